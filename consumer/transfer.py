"""Hidden states from a ring slot to the device of a rank, one micro-batch ahead of the computation.

    CPU    a strided copy out of the slot: nothing that is returned points into it
    CUDA   one asynchronous copy a layer straight out of the slot, on a stream of its own, into one of two landing
           buffers; the next micro-batch lands while this one computes, and the GPU never holds more than two

A slot may be released when `features` is exhausted: the last copy's event has then completed. With the ring's mapping
registered (`register_host`) copies run at the bus's speed beside the computation; unregistered they work, slower.

Float8 states are copied as they are, with their scales, and multiplied out on the device.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.errors import PacelineError
from ..common.record import scales_offset

REGISTER_BYTES = 2**36  # one registration's limit: the driver refuses larger pieces on some machines


def register_host(address: int, length: int) -> None:
    """Page-locks a ring's mapping for direct copies. Raises PacelineError with CUDA's reason; nothing stays registered.

    address, length: of the whole mapping (`Ring.mapping()`), which must stay mapped until `unregister_host`.
    """
    cudart: Any = torch.cuda.cudart()
    done: list[int] = []
    for start in range(address, address + length, REGISTER_BYTES):
        code = int(cudart.cudaHostRegister(start, min(REGISTER_BYTES, address + length - start), 0))
        if code:
            reason = cudart.cudaGetErrorString(cudart.cudaError(code))
            for earlier in done:
                cudart.cudaHostUnregister(earlier)
            _clear_error()
            raise PacelineError(f"cannot page-lock {length} bytes of a ring: {reason} (limit of locked memory?)")
        done.append(start)


def unregister_host(address: int, length: int) -> None:
    """Undoes `register_host`. To be called before the mapping is closed."""
    cudart: Any = torch.cuda.cudart()
    for start in range(address, address + length, REGISTER_BYTES):
        if int(cudart.cudaHostUnregister(start)):
            _clear_error()


def _clear_error() -> None:
    """Takes CUDA's last error away, which would otherwise be reported by the next, innocent kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()


def view_states(states: memoryview, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """A record's states [planes, T, H] as a tensor on the slot itself. It must be gone before the slot is released."""
    count = shape[0] * shape[1] * shape[2]
    return torch.frombuffer(states, dtype=dtype, count=count).view(shape)


def view_scales(states: memoryview, shape: tuple[int, int, int]) -> Tensor:
    """The scales float32 [planes, T] of a record's float8 states, on the slot itself like `view_states`."""
    planes, tokens, _ = shape
    offset = scales_offset(*shape)
    return torch.frombuffer(states, dtype=torch.float32, count=planes * tokens, offset=offset).view(planes, tokens)


class StateReader:
    """Reads micro-batches of a record's states into features on the device; see the module's docstring."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the features that come out; what is recorded may be of another."""
        self._device, self._dtype = device, dtype
        self._landing: _Landing | None = None

    def features(
        self,
        states: Tensor,
        layers: int,
        spans: Sequence[tuple[int, int]],
        *,
        last: bool = False,
        scales: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """For each token span (from, to): features [to - from, layers·H] of the first `layers` planes of `states`, and
        with `last` the plane after them, [to - from, H]: the target's last hidden state. scales [planes, T]: of float8
        states."""
        planes = layers + last
        if self._device.type != "cuda":
            for start, stop in spans:
                by = None if scales is None else scales[:planes, start:stop]
                yield _parted(states[:planes, start:stop], layers, self._dtype, by)
            return
        longest = max((stop - start for start, stop in spans), default=0)
        if self._landing is None or not self._landing.holds(states, planes, longest):
            self._landing = _Landing(self._device, states, planes, longest)
        yield from self._landing.run(states, spans, layers, self._dtype, scales)


def _parted(planes: Tensor, layers: int, dtype: torch.dtype, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Copies of the first `layers` planes [K, t, H] as [t, K·H], and of the one after them if it is there.

    scales [planes, t]: what float8 planes are multiplied with, in float32.
    """
    _, tokens, hidden = planes.shape
    features = torch.empty(tokens, layers, hidden, dtype=dtype, device=planes.device)
    last = torch.empty(tokens, hidden, dtype=dtype, device=planes.device) if len(planes) > layers else None
    if scales is None:
        features.copy_(planes[:layers].transpose(0, 1))
        if last is not None:
            last.copy_(planes[layers])
    else:
        for plane, by, out in zip(planes, scales, [*features.unbind(1), last], strict=False):
            assert out is not None
            out.copy_(plane.float().mul_(by[:, None]))  # a plane at a time: float32 is four times as large
    return features.view(tokens, layers * hidden), last


class _Landing:
    """Two device buffers [planes, tokens, H], with room for scales, and the stream that fills them in turn."""

    def __init__(self, device: torch.device, like: Tensor, planes: int, tokens: int) -> None:
        shape = (planes, -(-tokens // 1024) * 1024, like.shape[2])
        self._buffers = [torch.empty(shape, dtype=like.dtype, device=device) for _ in range(2)]
        self._scales = [torch.empty(shape[:2], dtype=torch.float32, device=device) for _ in range(2)]
        self._stream = torch.cuda.Stream(device)
        self._copied, self._read = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        for event in self._read:
            event.record(torch.cuda.current_stream(device))

    def holds(self, like: Tensor, planes: int, tokens: int) -> bool:
        buffer = self._buffers[0]
        fits = buffer.shape[0] == planes and buffer.shape[1] >= tokens and buffer.shape[2] == like.shape[2]
        return fits and buffer.dtype == like.dtype

    def run(
        self,
        states: Tensor,
        spans: Sequence[tuple[int, int]],
        layers: int,
        dtype: torch.dtype,
        scales: Tensor | None,
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields each span's features. A buffer is filled again as soon as its planes have been put side by side."""
        compute = torch.cuda.current_stream(self._buffers[0].device)
        try:
            for i, (start, stop) in enumerate(spans):
                if i == 0:
                    self._fill(0, states, scales, *spans[0])
                if i + 1 < len(spans):
                    self._fill((i + 1) % 2, states, scales, *spans[i + 1])
                compute.wait_event(self._copied[i % 2])
                by = None if scales is None else self._scales[i % 2][:, : stop - start]
                found = _parted(self._buffers[i % 2][:, : stop - start], layers, dtype, by)
                self._read[i % 2].record(compute)
                yield found
        finally:
            self._stream.record_event().synchronize()

    def _fill(self, side: int, states: Tensor, scales: Tensor | None, start: int, stop: int) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._read[side])
            for target, plane in zip(self._buffers[side], states, strict=False):
                target[: stop - start].copy_(plane[start:stop], non_blocking=True)
            if scales is not None:
                for by, line in zip(self._scales[side], scales, strict=False):
                    by[: stop - start].copy_(line[start:stop], non_blocking=True)
            self._copied[side].record(self._stream)
