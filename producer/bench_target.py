"""A target's forward alone: `python -m paceline.producer.bench_target RUN.toml OPTIONS` prints its times as JSON.

    transformers       all layers of the decoder, one padded batch of full rows, its own attention, output hooks
    full, chat         the worker's target: layers up to the last recorded one, packed rows, states dropped
    ..., eager         the same without torch.compile, where the target runs compiled
    ..., ring          the same rows as records in a ring that is drained at once, as a worker makes them

All run the same weights, loaded once: first all layers as they come, then what a worker makes of them, and at last that
without its compilation. common/bench_parts.py calls it. In every arm a repetition is begun before the one before it is
waited for, as a worker begins records, and takes the time from the end of that one to its own.
"""

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..common.bench_parts import TargetOptions, chat_lengths
from ..common.fingerprint import Fingerprint
from ..common.flops import forward_flops
from ..common.measuring import doing, measured
from ..common.record import RecordMeta, max_rows, record_bytes, slot_bytes, write_meta
from ..common.ring import Ring, RingReader
from ..common.runfile import RunFile, load
from ..common.target import Target
from ..common.target_info import TargetInfo, deepest_layer, resolve_layer_ids, target_info
from ..common.timeline import profiled
from .capture import TargetSource, prepare
from .shards import load_target
from .summing import Summing

WARM = 3  # repetitions that do not count
SLOTS = 3
PROFILED = 3  # repetitions in a profile


Finish = Callable[[], object]
"""Waits for one repetition, and for nothing that was begun after it."""


class Rows(NamedTuple):
    """A batch: tokens int32 [T] and offsets int32 [R+1]."""

    tokens: np.ndarray
    cu_seqlens: np.ndarray

    @property
    def lengths(self) -> list[int]:
        return np.diff(self.cu_seqlens).tolist()


def measure(run_path: str, options: TargetOptions) -> dict[str, Any]:
    """By the arm's name: seconds of each repetition, tokens and model FLOPs of one, peak memory, how rows ran and
    whether compiled."""
    run = load(run_path, options.settings)
    info = target_info(run.target.path, run.target.trust_remote_code)
    layers = resolve_layer_ids(run, info)
    rows = {kind: make_rows(kind, options, info) for kind in ("full", *options.kinds)}
    prepare(run, options.device)
    doing("loading the target")
    target = load_target(run, info.path, None, options.device, 1)
    plain = _transformers(target, layers, rows["full"], options)
    doing("checking the target, compiling" if _compiles(run, options) else "checking the target")
    if run.workers.gpus_per_worker > 1:
        del target
        _free()
        source = TargetSource.load(run, info, layers, options.device)
    else:
        target.drop_after(deepest_layer(run, info, layers))
        _free()
        source = TargetSource.over(run, target, layers)
    ran, eager = {}, {}
    for kind in options.kinds:
        ran[kind] = _alone(source, layers, rows[kind], kind, options)
        ran[f"{kind}, ring"] = _streaming(source, run, layers, rows[kind], f"{kind}-ring", options)
    if source.compiled:
        ran = {name: arm | {"compiled": True} for name, arm in ran.items()}
        source.uncompile()
        for kind in options.kinds:
            eager[f"{kind}, eager"] = _alone(source, layers, rows[kind], f"{kind}-eager", options)
    return {"transformers": plain, **eager, **ran}


def _free() -> None:
    """One arm's memory is for the next."""
    gc.collect()
    torch.cuda.empty_cache()


def _compiles(run: RunFile, options: TargetOptions) -> bool:
    return run.target.compile is True or (run.target.compile == "auto" and options.device.startswith("cuda"))


def make_rows(kind: str, options: TargetOptions, info: TargetInfo) -> Rows:
    """Random tokens: as many full rows as the budget holds, or rows of a chat's lengths that fill it."""
    lengths = [options.length] * (options.budget // options.length)
    if kind == "chat":
        lengths = chat_lengths(options.budget, options.length)
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, info.vocab_size, sum(lengths)).astype(np.int32)
    return Rows(tokens, np.cumsum([0, *lengths]).astype(np.int32))


def _transformers(target: Target, layers: Sequence[int], rows: Rows, options: TargetOptions) -> dict[str, Any]:
    """transformers' own forward of the whole decoder, its recorded layers' outputs taken by hooks."""
    taken: list[Any] = []
    hooks = [
        target.layers[layer].register_forward_hook(lambda _module, _inputs, output: taken.append(output))
        for layer in layers
    ]
    ids = torch.from_numpy(rows.tokens).long().view(len(rows.lengths), -1).to(target.device)

    @torch.inference_mode()
    def forward() -> Finish:
        target.decoder(input_ids=ids, use_cache=False)
        taken.clear()
        return _ended(target)

    found = _arm(target, rows, str(target.decoder.config._attn_implementation), forward, "transformers", options)
    for hook in hooks:
        hook.remove()
    return found


def _alone(
    source: TargetSource, layers: Sequence[int], rows: Rows, name: str, options: TargetOptions
) -> dict[str, Any]:
    tokens, offsets = torch.from_numpy(rows.tokens), rows.cu_seqlens.tolist()
    target = source.target

    def forward() -> Finish:
        target.forward_states(tokens, offsets, layers, lambda *_: None)
        return _ended(target)

    return _arm(target, rows, source.mode, forward, name, options)


def _ended(target: Target) -> Finish:
    """Waits for what was launched until now."""
    if target.device.type != "cuda":
        return lambda: None
    return torch.cuda.current_stream(target.device).record_event().synchronize


def _streaming(
    source: TargetSource, run: RunFile, layers: Sequence[int], rows: Rows, name: str, options: TargetOptions
) -> dict[str, Any]:
    """Records into a ring whose reader frees each as soon as it is there."""
    lengths = rows.lengths
    meta = RecordMeta(
        batch=1,
        row_ids=np.arange(len(lengths), dtype=np.int64),
        cu_seqlens=rows.cu_seqlens,
        tokens=rows.tokens,
        mask=np.ones(len(rows.tokens), np.uint8),
        layer_ids=tuple(layers),
        dtype=run.record_dtype,
        hidden_size=source.info.hidden_size,
        last_hidden="none",
        fingerprint=1,
    )
    length, most = record_bytes(meta), max_rows(options.budget)
    size = slot_bytes(options.budget, most, meta.planes, meta.hidden_size, meta.dtype)
    parent = Path(run.stream.ring_dir)
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="bench-target-", dir=parent) as folder:
        path = Path(folder) / "w0.ring"
        ring = Ring.open(path, worker="w0", fingerprint=Fingerprint({"bench": "target"}), slots=SLOTS, slot_bytes=size)
        reader = RingReader.open(path)
        source.register(*ring.mapping())

        sums, summing = Summing(), list[float]()

        def record() -> Finish:
            slot = ring.claim(meta.batch)
            assert slot is not None  # all but the one before are free again
            start = write_meta(slot.payload, meta)
            running, landed = sums.begin(slot.payload, length, start)
            states = slot.payload[start:length]
            filling = source.begin(meta.tokens, meta.cu_seqlens, states, lambda: None, landed)

            def finish() -> None:
                filling.finish()
                copied = time.perf_counter()
                total = running.result()
                summing.append(time.perf_counter() - copied)
                ring.commit(slot, length, total)
                reader.take(slot.index, slot.seq, trainer=1)
                reader.release(slot.index, slot.seq)

            return finish

        try:
            found = _arm(source.target, rows, source.mode, record, name, options)
            return found | {
                "checksum_s": summing,
                "record_bytes": length,
            }
        finally:
            source.close()
            sums.close()
            reader.close()
            ring.close()


def _arm(
    target: Target, rows: Rows, runs: str, begin: Callable[[], Finish], name: str, options: TargetOptions
) -> dict[str, Any]:
    """Seconds of each repetition after those that warm up."""
    cuda = target.device.type == "cuda"
    doing(name)
    finish = begin()

    def repeat() -> float:
        nonlocal finish
        following = begin()
        finish()
        finish = following
        return time.perf_counter()

    for _ in range(WARM if cuda else 1):
        repeat()
    if cuda:
        torch.cuda.reset_peak_memory_stats(target.device)
    ends = [repeat()]
    while not options.enough(len(ends) - 1, ends[-1] - ends[0]):
        ends.append(repeat())
    peak = torch.cuda.max_memory_allocated(target.device) if cuda else None
    if options.profile is not None:
        with profiled(Path(options.profile), f"target-{name}"):
            for _ in range(PROFILED):
                repeat()
    finish()
    times = np.diff(ends).tolist()
    return {
        "batch_s": times,
        "tokens": len(rows.tokens),
        "flops": count_flops(target, rows.lengths),
        "peak_bytes": peak,
        "runs": runs,
        "compiled": False,
    }


def count_flops(target: Target, lengths: Sequence[int]) -> int:
    """Model FLOPs of one forward over rows of these lengths by the layers that were loaded."""
    weights = sum(_passed(layer, target.info.expert_share) for layer in target.layers)
    kinds = getattr(target.decoder.config.get_text_config(decoder=True), "layer_types", None)
    kinds = kinds or ["full_attention"] * len(target.layers)
    attending = sum(kind in ("full_attention", "sliding_attention") for kind in kinds[: len(target.layers)])
    return forward_flops(weights, target.info.num_heads * target.info.head_dim, attending, lengths)


def _passed(layer: nn.Module, expert_share: float) -> int:
    """Weights of a layer's matrices that a token passes: of a mixture's experts, linear layers or stacked, its own."""
    weights = 0.0
    for name, module in layer.named_modules():
        any_module: Any = module
        among_experts = "experts" in name.split(".")
        if hasattr(module, "out_features"):  # nn.Linear, and in fp8
            weights += any_module.in_features * any_module.out_features * (expert_share if among_experts else 1)
        elif among_experts:
            stacked = sum(part.numel() for part in module.parameters(recurse=False) if part.ndim == 3)
            weights += stacked * expert_share
    return round(weights)


if __name__ == "__main__":
    measured(lambda: measure(sys.argv[1], TargetOptions.from_json(sys.argv[2])))
