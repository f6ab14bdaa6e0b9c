"""Hidden states from a ring slot to the device of a rank, one micro-batch ahead of the computation.

    CPU    a strided copy out of the slot: nothing that is returned points into it
    CUDA   one asynchronous copy a layer straight out of the slot, on a stream of its own, into one of two landing
           buffers; the next micro-batch lands while this one computes, and the GPU never holds more than two

The first micro-batch of the next record lands while the last one of this record computes, if the record was announced
(`expect`) by then. A slot may be released when `features` of its record is exhausted: no copy out of it is then under
way. A record that was announced and is never read keeps its slot, until `forget` has waited for what was copied of it.

With the ring's mapping registered (`register_host`) copies run at the bus's speed beside the computation; unregistered
they work, slower.

Float8 states are copied as they are, with their scales, and multiplied out on the device.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

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


class Reading(NamedTuple):
    """What is read of a record: views of its slot, and the tokens (from, to) of each micro-batch in turn.

    states: the planes [layers, T, H] that become features, and perhaps one more, the target's last hidden state.
    scales: float32 [planes, T] of float8 states.
    """

    states: Tensor
    layers: int
    spans: Sequence[tuple[int, int]]
    scales: Tensor | None = None

    @property
    def longest(self) -> int:
        return max(stop - start for start, stop in self.spans)

    def begins_like(self, other: "Reading") -> bool:
        """Whether the first micro-batch is the same piece of the same memory."""
        mine, others = (
            (one.states.data_ptr(), one.states.shape, one.states.dtype, one.spans[0]) for one in (self, other)
        )
        return mine == others


class StateReader:
    """Reads micro-batches of records' states into features on the device; see the module's docstring.

    One thread reads. Any thread may `expect` and `forget`: the lock keeps the order in which the buffers are filled.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the features that come out; what is recorded may be of another."""
        self._device, self._dtype = device, dtype
        self._lock = threading.Lock()
        self._landing: _Landing | None = None
        self._coming: dict[Hashable, Reading] = {}  # in the order in which they will be read
        self._begun: Hashable | None = None  # of them, the one whose first micro-batch is landing
        self._filling = False  # micro-batches of the present record are still to be copied

    def expect(self, key: Hashable, reading: Reading) -> None:
        """Announces a record that `features` will be asked for after those that were announced before."""
        if not reading.spans:
            return
        with self._lock:
            self._drop(key)
            self._coming[key] = reading
            self._begin()

    def forget(self, address: int, size: int) -> None:
        """Gives up what was announced of some memory, which may go afterwards: no copy ahead out of it is under way."""
        with self._lock:
            for key, reading in list(self._coming.items()):
                if address <= reading.states.data_ptr() < address + size:
                    self._drop(key)

    def features(self, reading: Reading, key: Hashable | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """For each token span (from, to): features [to - from, layers·H], and where `reading` has one plane more, that
        [to - from, H]. key: what the record was announced by."""
        if not reading.spans:
            return
        first = self._claim(reading, key)
        landing = self._landing
        if landing is None:
            for start, stop in reading.spans:
                by = None if reading.scales is None else reading.scales[:, start:stop]
                yield _parted(reading.states[:, start:stop], reading.layers, self._dtype, by)
            return
        last = len(reading.spans) - 1
        try:
            for i in range(last + 1):
                with self._lock:
                    while landing.filled - first <= min(i + 1, last):
                        landing.fill(reading, landing.filled - first)
                    if i == last:
                        self._filling = False
                        self._begin()
                yield landing.take(first + i, reading, i, self._dtype)
        except BaseException:
            landing.wait()  # it cannot be told which copies were started
            raise
        landing.wait(first + last)  # not for what follows: the next record's may be waiting for this computation

    def _claim(self, reading: Reading, key: Hashable | None) -> int:
        """Begins to read a record; the number of its first micro-batch among all that were copied."""
        with self._lock:
            expected = None
            if key in self._coming:
                while (passed := next(iter(self._coming))) != key:
                    del self._coming[passed]  # it never came
                expected = self._coming.pop(key)
            ahead = expected is not None and self._begun == key and expected.begins_like(reading)
            if not ahead:
                self._take_back()  # of a record that comes later than was thought, or never
            self._begun = None
            if self._device.type != "cuda":
                return 0
            if self._landing is None or not self._landing.holds(reading):
                if self._landing is not None:
                    self._landing.wait()
                self._landing = _Landing(self._device, reading)
            self._filling = True
            return self._landing.filled - ahead

    def _begin(self) -> None:
        """Starts the copy of the next record's first micro-batch, once all of the present one's have been started: a
        buffer is then free, or will be when what is in it has been read."""
        key = next(iter(self._coming), None)
        if self._landing is None or self._filling or self._begun is not None or key is None:
            return
        if self._landing.holds(self._coming[key]):  # else larger buffers are made at its turn
            self._landing.fill(self._coming[key], 0)
            self._begun = key

    def _drop(self, key: Hashable) -> None:
        if self._coming.pop(key, None) is not None and self._begun == key:
            self._take_back()

    def _take_back(self) -> None:
        if self._begun is not None and self._landing is not None:
            self._landing.take_back()
        self._begun = None


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
    """Two device buffers [planes, tokens, H], with room for scales, and the stream that fills them in turn.

    Micro-batches are numbered on from record to record, and number i lies in buffer i % 2: it may be filled once the
    reading of number i - 2 has been queued.
    """

    def __init__(self, device: torch.device, like: Reading) -> None:
        planes, _, hidden = like.states.shape
        shape = (planes, -(-like.longest // 1024) * 1024, hidden)
        self._buffers = [torch.empty(shape, dtype=like.states.dtype, device=device) for _ in range(2)]
        self._scales = [torch.empty(shape[:2], dtype=torch.float32, device=device) for _ in range(2)]
        self._stream = torch.cuda.Stream(device)
        self._copied, self._read = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        for event in self._read:
            event.record(torch.cuda.current_stream(device))
        self.filled = 0  # micro-batches so far

    def holds(self, reading: Reading) -> bool:
        """Whether all of the record's micro-batches fit."""
        buffer, states = self._buffers[0], reading.states
        fits = buffer.shape[0] == len(states) and buffer.shape[1] >= reading.longest
        return fits and buffer.shape[2] == states.shape[2] and buffer.dtype == states.dtype

    def fill(self, reading: Reading, i: int) -> None:
        """Starts the copy of a record's micro-batch i as the next in number."""
        side, (start, stop) = self.filled % 2, reading.spans[i]
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._read[side])
            for target, plane in zip(self._buffers[side], reading.states, strict=True):
                target[: stop - start].copy_(plane[start:stop], non_blocking=True)
            if reading.scales is not None:
                for by, line in zip(self._scales[side], reading.scales, strict=True):
                    by[: stop - start].copy_(line[start:stop], non_blocking=True)
            self._copied[side].record(self._stream)
        self.filled += 1

    def take(self, number: int, reading: Reading, i: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The features of micro-batch `number`, which is i of its record, on the current stream. Its buffer is free
        as soon as its planes have been put side by side."""
        side, (start, stop) = number % 2, reading.spans[i]
        compute = torch.cuda.current_stream(self._buffers[side].device)
        compute.wait_event(self._copied[side])
        by = None if reading.scales is None else self._scales[side][:, : stop - start]
        found = _parted(self._buffers[side][:, : stop - start], reading.layers, dtype, by)
        self._read[side].record(compute)
        return found

    def take_back(self) -> None:
        """Gives up the newest micro-batch, whose copy has ended on return."""
        self.wait(self.filled - 1)
        self.filled -= 1

    def wait(self, number: int | None = None) -> None:
        """Until the copies up to micro-batch `number`, one of the newest two, have ended; all of them by default."""
        if number is None:
            self._stream.synchronize()
        else:
            self._copied[number % 2].synchronize()
