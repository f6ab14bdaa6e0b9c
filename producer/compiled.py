"""The target's layers through torch.compile: norms, RoPE, activations and residuals fused around the matmuls.

All layers of one kind share one graph: what is compiled is their class's forward, with the weights as inputs. Attention
is one opaque operator in it (`common.varlen.packed_attention`), so neither row boundaries nor row lengths are part of a
graph. The number of tokens is its only size that changes, and it is marked as such: one graph serves every batch.
Batches are filled up to a multiple of `PAD` tokens, which costs the matmuls nothing (their tiles are that long) and
keeps kernels from being chosen by what a count happens to be divisible by.

Hooks stay outside: a layer's forward is replaced, not its call, so its states are handed over as soon as it is done.

`capture.TargetSource` owns an instance; `Target.self_check` installs it, compares its states with those of rows run
alone, and removes it where they differ or nothing compiles.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from ..common import paths
from ..common.errors import first_line
from ..common.locks import FileLock
from ..common.notify import Patience, extend_timeout, notify
from ..common.target import Target

log = logging.getLogger(__name__)

PAD = 128  # tokens
MAX_GRAPHS = 8  # too many: dynamo's own limit for one function; beyond it layers would run uncompiled in silence
COMPILE_SECONDS = 600.0  # systemd is asked for so long: within it the first layer is compiled


class CompiledLayers:
    """A way for `Target.self_check` to try. `tokens`: those of the batches to come, whose largest is compiled for."""

    def __init__(self, tokens: int, max_length: int, backend: str | Callable[..., Any] = "inductor") -> None:
        # Three sizes: the first is compiled, and the last must find a graph that serves it.
        self._tokens, self._max_length, self._backend = max(tokens, 3 * PAD), max_length, backend
        self._plain: list[tuple[nn.Module, Any]] = []
        self._known = 0

    @property
    def installed(self) -> bool:
        return bool(self._plain)

    def install(self, target: Target) -> None:
        """Compiles the layers and runs batches of several sizes. Raises RuntimeError where that is of no use, and
        whatever the compiler raises."""
        started, before, layers = time.monotonic(), _graphs(), list(target.layers)
        paths.prepare_torch()
        notify("STATUS=compiling the target")
        self._plain = [(layer, layer.forward) for layer in layers]
        for layer in layers:
            layer.forward = _compiled(layer.forward, self._backend)
        target.pad_to = PAD
        patience = Patience()
        with _one_at_a_time(patience):
            extend_timeout(COMPILE_SECONDS)
            try:
                for share in (3, 2, 1):
                    self._known = _graphs()
                    self._run(target, self._tokens * share // 3, patience)
            except BackendCompilerFailed as error:  # whose own first line says no more than that
                raise RuntimeError(f"it does not compile: {first_line(error.inner_exception)}") from error
        graphs = _graphs() - before
        if _graphs() > self._known:
            raise RuntimeError(f"its layers compile anew for each number of tokens: {_reason()}")
        if graphs >= MAX_GRAPHS:
            raise RuntimeError(f"its {len(layers)} layers compile into {graphs} graphs, as they share too little")
        log.info("%d layers compiled into %d graphs (%.0f s)", len(layers), graphs, time.monotonic() - started)

    def remove(self, target: Target) -> None:
        for layer, forward in self._plain:
            layer.forward = forward
        self._plain = []
        target.pad_to = 1

    def watch(self, tokens: int) -> None:
        """Warns if the last forward, of `tokens` tokens, compiled something: all graphs were to be there by then."""
        if self.installed and (found := _graphs()) > self._known:
            self._known = found
            log.warning("the target was compiled anew for a batch of %d tokens: %s", tokens, _reason())

    def _run(self, target: Target, tokens: int, patience: Patience) -> None:
        tokens = tokens // PAD * PAD
        ids = torch.arange(tokens) % target.info.vocab_size
        cu_seqlens = [*range(0, tokens, self._max_length), tokens]
        layers = range(len(target.layers))
        target.forward_states(ids, cu_seqlens, layers, lambda *_: patience.alive())
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)


def _compiled(forward: Callable[..., Any], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(forward, backend=backend)

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        _mark(hidden_states.shape[1], (hidden_states, args, kwargs))
        return compiled(hidden_states, *args, **kwargs)

    return run


def _mark(tokens: int, value: Any) -> None:
    """Tells the compiler which sizes change from batch to batch. `torch.compile(dynamic=True)` would also take a
    hidden size that happens to equal the number of tokens for one, and floats of the config."""
    if isinstance(value, Tensor):
        if value.ndim > 1 and value.shape[1] == tokens:
            torch._dynamo.maybe_mark_dynamic(value, 1)
    elif isinstance(value, tuple | list):
        for item in value:
            _mark(tokens, item)
    elif isinstance(value, dict):
        _mark(tokens, tuple(value.values()))


def _graphs() -> int:
    """Graphs that this process has compiled."""
    return counters["stats"]["unique_graphs"]


def _reason() -> str:
    """Why the last graph was compiled, as far as dynamo tells."""
    metrics = torch._dynamo.utils.get_compilation_metrics()
    reason = getattr(metrics[-1], "recompile_reason", None) if metrics else None
    return (reason or "no reason given").strip().splitlines()[0]


@contextlib.contextmanager
def _one_at_a_time(patience: Patience) -> Iterator[None]:
    """Holds the lock under which targets are compiled: workers that start together compile once, not each."""
    lock, waited = FileLock(paths.compile_lock(), "a worker that compiles its target"), False
    while not lock.acquire():
        if not waited:
            log.info("waiting for another worker, which compiles the target")
            waited = True
        patience.alive()
        time.sleep(0.2)
    with lock:
        yield
