"""The real source of states: runs the target and copies each recorded layer's output into the slot.

A layer's copy starts in that layer's own hook, while later layers still compute. On CUDA the ring's mapping is
registered with the driver, so the copy goes from the GPU straight into the slot, asynchronously, on a stream of its
own; one event at the end says that all are complete. On the CPU the copy goes through a tensor view of the slot.

Nothing between a batch's first kernel and its last copy waits for the GPU: the next batch is launched behind it on the
same stream, and each record has an event and a flag of its own, so that waiting for one does not wait for the next.

Used by `worker.py` only, which never imports torch itself.
"""

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..common.eightbit import quantise
from ..common.errors import ConfigError, counted
from ..common.loading import as_dtype
from ..common.record import IN_THE_MAKING, scales_offset
from ..common.runfile import RunFile
from ..common.target import Target
from ..common.target_info import TargetInfo, deepest_layer
from ..common.timeline import Steps
from .compiled import CompiledLayers
from .fp8 import check_fp8, use_fp8
from .shards import Shards, load_target
from .source import Filled, Filling
from .summing import Landed

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
_WARM_UP_TOKENS = 64  # on the CPU, where a large batch would only take long


class TargetSource:
    """A loaded, checked and warm target; what `source.StateSource` asks for."""

    def __init__(
        self,
        target: Target,
        layer_ids: Sequence[int],
        dtype: str,
        last_hidden: bool,
        compiled: CompiledLayers | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.info: TargetInfo = target.info
        self._target = target
        self._layer_ids = list(layer_ids)
        self._planes = len(self._layer_ids) + last_hidden
        self._dtype = as_dtype(dtype)
        self._last_hidden = last_hidden
        self._registered: int | None = None
        self._compiled, self._shards = compiled, shards
        self._profile = Steps.from_environment(f"worker-{target.device.type}{target.device.index or 0}")
        self._copies = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
        self._teller = ThreadPoolExecutor(1, "landed")

    @classmethod
    def load(cls, run: RunFile, info: TargetInfo, layer_ids: Sequence[int], device: str) -> "TargetSource":
        """Loads the run's target on `device`, chooses how rows run, compiles and warms up. Raises ConfigError."""
        prepare(run, device)
        shards = Shards(run, device) if run.workers.gpus_per_worker > 1 else None
        try:
            return cls._load(run, info, layer_ids, device, shards)
        except BaseException:
            if shards is not None:
                shards.close()
            raise

    @classmethod
    def _load(
        cls, run: RunFile, info: TargetInfo, layer_ids: Sequence[int], device: str, shards: Shards | None
    ) -> "TargetSource":
        last_layer = deepest_layer(run, info, layer_ids)
        target = load_target(run, info.path, last_layer, device, run.workers.gpus_per_worker)
        return cls.over(run, target, layer_ids, shards)

    @classmethod
    def over(
        cls, run: RunFile, target: Target, layer_ids: Sequence[int], shards: Shards | None = None
    ) -> "TargetSource":
        """Takes a target over that has just been loaded, without layers that are not needed: see `load`."""
        if shards is not None:
            target.announce = shards.announce
        gpu, wanted = target.device.type == "cuda", run.target.compile
        compiled = None
        if shards is not None:
            log.info("the target runs on %d devices, uncompiled", run.workers.gpus_per_worker)
        elif gpu if wanted == "auto" else wanted:
            compiled = CompiledLayers(run.stream.token_budget if gpu else 0, run.data.max_length)
        target.self_check(
            pack=run.workers.pack == "auto",
            longest=run.data.max_length,
            quantising=use_fp8 if run.target.fp8 else None,
            faster=compiled,
        )
        source = cls(target, layer_ids, run.record_dtype, run.target.last_hidden, compiled, shards)
        source.warm_up(run.stream.token_budget, run.data.max_length)
        return source

    def uncompile(self) -> None:
        """Runs plain layers from now on; to compare with."""
        if self._compiled is not None:
            self._compiled.remove(self._target)

    @property
    def mode(self) -> str:
        """How rows run: packed, padded or alone."""
        return self._target.mode

    @property
    def compiled(self) -> bool:
        """Whether the layers run compiled."""
        return self._compiled is not None and self._compiled.installed

    @property
    def target(self) -> Target:
        return self._target

    def register(self, address: int, length: int) -> None:
        """Pins the ring's mapping for copies from the GPU; nothing to do on the CPU. Raises ConfigError."""
        if self._copies is None:
            return
        error = int(_cudart().cudaHostRegister(address, length, _PORTABLE))
        if error:
            raise ConfigError(
                f"the CUDA driver cannot register a ring of {length} bytes (error {error}): raise the limit on locked "
                "memory (ulimit -l, LimitMEMLOCK=), or lower stream.slots or stream.token_budget"
            )
        self._registered = address

    def close(self) -> None:
        """Unregisters the ring, before its mapping goes, and ends the processes that share the target."""
        self.settle()
        if self._registered is not None:
            _cudart().cudaHostUnregister(self._registered)
            self._registered = None
        if self._shards is not None:
            self._shards.close()

    def warm_up(self, token_budget: int, max_length: int) -> None:
        """Runs the largest batch on CUDA, as often as records are in the making at once and with their states kept, as
        they are until they are copied; a small one on the CPU. ConfigError if it does not fit."""
        gpu = self._copies is not None
        tokens = token_budget if gpu else min(token_budget, _WARM_UP_TOKENS)
        cu_seqlens = [*range(0, tokens, max_length), tokens]
        ids = torch.arange(tokens) % self.info.vocab_size
        kept: list[Tensor] = []

        def keep(_plane: int, states: Tensor, _first: int) -> None:
            if gpu:
                kept.append(quantise(states)[0] if self._dtype == torch.float8_e4m3fn else states)

        try:
            for _ in range(IN_THE_MAKING if gpu and self._shards is None else 1):
                self._target.forward_states(ids, cu_seqlens, self._layer_ids, keep, self._last_hidden)
            if gpu:
                torch.cuda.synchronize(self._target.device)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"stream.token_budget: a batch of {tokens} tokens does not fit into {self._target.device} "
                "beside the target"
            ) from None

    def begin(
        self,
        tokens: np.ndarray,
        cu_seqlens: np.ndarray,
        out: memoryview,
        progress: Callable[[], None],
        landed: Landed | None = None,
    ) -> Filling:
        """Has the states of a batch written to `out`, [planes, T, H] of the recorded dtype and float8's scales.

        tokens int32 [T], cu_seqlens int32 [R+1]. `progress` is called as layers are launched; `landed` with the bytes
        of states that are there for good, on CUDA by another thread while later layers compute. On the CPU, and where
        several processes share the target, the record is complete on return. If the forward is interrupted, all copies
        under way are waited for.
        """
        shape = (self._planes, len(tokens), self.info.hidden_size)
        view = torch.frombuffer(out, dtype=self._dtype, count=math.prod(shape)).view(shape)
        scales = None
        if self._dtype == torch.float8_e4m3fn:
            scales = torch.frombuffer(out, dtype=torch.float32, offset=scales_offset(*shape)).view(shape[:2])
        total = torch.zeros((), device=self._target.device)
        token_bytes = shape[2] * view.element_size()
        telling: list[Future[None]] = []

        def tell(plane: int, first: int, count: int) -> None:
            if landed is None:
                return
            start = (plane * shape[1] + first) * token_bytes
            if self._copies is None:
                landed(start, start + count * token_bytes)
                return
            copied = self._copies.record_event()
            telling.append(self._teller.submit(_tell, copied, landed, start, start + count * token_bytes))

        def sink(plane: int, states: Tensor, first: int) -> None:
            nonlocal total
            if scales is None:
                self._copy(view[plane, first : first + len(states)], states)
            else:
                eight, by = quantise(states)
                self._copy(view[plane, first : first + len(states)], eight)
                self._copy(scales[plane, first : first + len(states)], by[:, 0])
            tell(plane, first, len(states))
            total = total + states.sum(dtype=torch.float32)  # NaN and infinity carry over
            progress()

        try:
            self._target.forward_states(
                torch.from_numpy(tokens), cu_seqlens.tolist(), self._layer_ids, sink, self._last_hidden
            )
            if self._compiled is not None:
                self._compiled.watch(len(tokens))
            return self._begun(torch.isfinite(total), telling)
        except BaseException:
            self.settle()
            raise

    def _begun(self, finite: Tensor, telling: "list[Future[None]]") -> Filling:
        """What is left to wait for of a record whose last layer is launched."""
        if self._copies is None:
            if self._profile is not None:
                self._profile.step_done()
            return Filled(bool(finite))
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._copy(flag, finite)
        landing = _Landing(self._copies.record_event(), telling, flag, self._profile)
        if self._shards is not None:  # the others follow one pass at a time
            landing.wait()
        return landing

    def settle(self) -> None:
        """Waits for all copies, also those of records that got lost before they were finished."""
        if self._copies is not None:
            self._copies.synchronize()
            self._teller.submit(lambda: None).result()  # behind all that it was given

    def _copy(self, out: Tensor, states: Tensor) -> None:
        if self._copies is None:
            out.copy_(states)
            return
        self._copies.wait_event(torch.cuda.current_stream(self._target.device).record_event())
        with torch.cuda.stream(self._copies):
            out.copy_(states, non_blocking=True)
        # Its memory is not used again before the copy is done. So the device holds one forward's activations, whose
        # memory the next takes over in the order of their stream, and the planes of the records in the making.
        states.record_stream(self._copies)


class _Landing:
    """A record on its way from the GPU; the next one's forward may be running."""

    def __init__(self, copied: Any, telling: "list[Future[None]]", finite: Tensor, profile: Steps | None) -> None:
        """copied: the event after its last copy, that of `finite` to page-locked memory."""
        self._copied, self._telling, self._finite, self._profile = copied, telling, finite, profile

    def done(self) -> bool:
        return self._copied.query() and all(told.done() for told in self._telling)

    def wait(self) -> None:
        self._copied.synchronize()
        for told in self._telling:
            told.result()

    def finish(self) -> bool:
        self.wait()
        if self._profile is not None:
            self._profile.step_done()
        return bool(self._finite)


def _tell(copied: Any, landed: Landed, start: int, stop: int) -> None:
    copied.synchronize()
    landed(start, stop)


def _cudart() -> Any:
    return torch.cuda.cudart()


def prepare(run: RunFile, device: str) -> None:
    """What comes before a target is loaded: threads are set, a device that cannot run it is refused. ConfigError."""
    if run.workers.threads:
        torch.set_num_threads(run.workers.threads)
    check_device(device)
    if run.target.fp8:
        check_fp8(device)


def check_device(device: str) -> None:
    """ConfigError if torch cannot use it. Else it is the process's current one, if it is a GPU."""
    what = "a worker's device (workers.devices, --device)"
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{what}: there is no {device!r}") from None
    if wanted.type == "cuda":
        count = torch.cuda.device_count()
        if (wanted.index or 0) >= count:
            raise ConfigError(f"{what}: {device} is not there; this process sees {counted(count, 'GPU')}")
        torch.cuda.set_device(wanted)
    elif wanted.type != "cpu":
        raise ConfigError(f"{what}: {device} is neither cuda nor cpu")
