"""A drafter's step alone: `python -m paceline.consumer.bench_step RUN.toml OPTIONS` prints its times as JSON.

The learner is the trainer's own and its records lie in page-locked memory: an arm is a record, and `train_record` does
with it what it does in a run. Arms are measured in turn; those of one kind of learner share it, with a reader of their
own. In a resident arm the record lies on the GPU. Started by common/bench_parts.py.

A padded implementation is measured with the same model and the same kernels: its record has all rows at 512 positions
and as many blocks in each row as the row with most needs, every slot scored. What that computes is what padding would
compute; of use are the blocks that the packed rows have. It errs in favour of padding: slot 0 still skips the head, and
so do the slots beyond position 511.

What users of other trainers run is measured by padded.py: the packed arm's rows and anchors, padded, in plain PyTorch.
"""

import gc
import sys
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..common.bench_parts import EAGER, PADDED, PADDED_LENGTH, PLAIN, RESIDENT, StepOptions, chat_lengths, prompt_tokens
from ..common.errors import PacelineError
from ..common.flops import step_flops
from ..common.footprint import Shape
from ..common.measuring import doing, measured
from ..common.record import RecordMeta
from ..common.runfile import RunFile, load
from ..common.target_info import TargetInfo, resolve_layer_ids, target_info
from ..common.timeline import profiled
from .anchors import Positions, draw_anchors
from .bench import Ahead, forget_states, random_states
from .blocks import pack_blocks
from .ceilings import wait
from .learner import DFlashLearner, build_learner
from .padded import EagerPaddedLearner, PaddedLearner
from .rehearsal import check_compiled
from .transfer import Reading, StateReader

EPOCHS = 4  # anchors are drawn anew in each of so many, then repeat
WARM = {"cpu": 1, "cuda": EPOCHS + 2}  # repetitions that compile
PROFILED = 3  # repetitions in a profile
LR = 1e-6  # random states teach nothing
_PADDED = {PLAIN: PaddedLearner, EAGER: EagerPaddedLearner}


class ResidentReader(StateReader):
    """Copies a record to the device when it is first announced or read, and reads it there ever after: what bringing
    states to the device costs is the difference to this. Records have to keep their memory."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._here: dict[tuple[int, torch.Size], tuple[Tensor, Tensor | None]] = {}

    def expect(self, key: Hashable, reading: Reading) -> None:
        super().expect(key, self._resident(reading))

    def features(self, reading: Reading, key: Hashable | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
        return super().features(self._resident(reading), key)

    def _resident(self, reading: Reading) -> Reading:
        at = reading.states.data_ptr(), reading.states.shape
        if at not in self._here:
            scales = None if reading.scales is None else reading.scales.to(self._device)
            self._here[at] = reading.states.to(self._device), scales
        states, scales = self._here[at]
        return reading._replace(states=states, scales=scales)


class Arm(NamedTuple):
    """Rows to train on. supervised: token span of each row; blocks: those of use, None if all are."""

    settings: tuple[str, ...]
    lengths: list[int]
    supervised: list[tuple[int, int]]
    context: int  # tokens of use
    blocks: int | None = None
    learner: type[DFlashLearner] = DFlashLearner
    reader: type[StateReader] = StateReader


def measure(run_path: str, options: StepOptions) -> dict[str, Any]:
    """By the arm's name: seconds of each repetition and of its update, and what each did."""
    found: dict[str, Any] = {}
    learner: DFlashLearner | None = None
    for kind in options.kinds:
        arm = make_arm(run_path, kind, options)
        run = load(run_path, [*arm.settings, *options.settings])
        info = target_info(run.target.path, run.target.trust_remote_code)
        layers = resolve_layer_ids(run, info)
        if type(learner) is not arm.learner:
            learner = None  # before the next one takes its memory
            _clean_up()
            doing(f"{kind}: building the drafter")
            learner = build_learner(run, info, layers, device=torch.device(options.device), kind=arm.learner)
        assert learner is not None
        learner.reuse(run, arm.reader)
        found[kind] = measure_arm(learner, kind, arm, options, layers, info)
        _clean_up()
    return found


def _clean_up() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def make_arm(run_path: str, kind: str, options: StepOptions) -> Arm:
    """The rows of a kind (`StepOptions`)."""
    if kind.endswith(RESIDENT):
        return make_arm(run_path, kind.removesuffix(RESIDENT), options)._replace(reader=ResidentReader)
    if kind == "full":
        # Anchors keep away from the row's end, so that every block is whole and their number is exact.
        whole = options.length - options.block_size + 1
        settings = (
            f"objective.max_anchors={options.anchors}",
            "objective.anchors_per_token=1.0",
            f"trainer.micro_tokens={options.length}",
        )
        rows = options.rows
        return Arm(settings, [options.length] * rows, [(0, whole)] * rows, options.length * rows)
    lengths = chat_lengths(options.rows * options.length, PADDED_LENGTH)
    packed = Arm((), lengths, [(prompt_tokens(length), length) for length in lengths], sum(lengths))
    if kind in _PADDED:
        return packed._replace(learner=_PADDED[kind])
    if kind != PADDED:
        return packed
    run = load(run_path, options.settings)
    counts = [len(anchors) for anchors in _anchors(run, _masks(packed), range(len(lengths)), 0)]
    settings = (f"objective.max_anchors={max(counts)}", "objective.anchors_per_token=1.0")
    same = len(lengths)
    return Arm(settings, [PADDED_LENGTH] * same, [(0, PADDED_LENGTH)] * same, sum(lengths), sum(counts))


def measure_arm(
    learner: DFlashLearner, name: str, arm: Arm, options: StepOptions, layers: list[int], info: TargetInfo
) -> dict[str, Any]:
    """Times of forward and backward over the arm's rows, and of the optimiser's step after it."""
    run, device = learner.run, learner.device
    meta = describe(run, arm, layers, info)
    buffer = random_states(meta, on_gpu=device.type == "cuda")
    try:
        repetitions = _time(learner, meta, memoryview(buffer), device, options, name)
        check_compiled(learner)  # a step that learns nothing is fast
    finally:
        forget_states(buffer, on_gpu=device.type == "cuda")
    peak, computing = (max(values) for values in zip(*((one.peak, one.computing) for one in repetitions), strict=True))
    moments = learner.optimizer_bytes()
    work = [count_work(run, meta, epoch, info, len(layers)) for epoch in range(EPOCHS)]
    if arm.blocks is not None:
        work = [done | {"blocks": arm.blocks} for done in work]
    return {
        "step_s": [one.step_s for one in repetitions],
        "update_s": [one.update_s for one in repetitions],
        "work": [work[i % EPOCHS] for i in range(len(repetitions))],
        "rows": len(meta.row_ids),
        "context_tokens": arm.context,
        "peak_bytes": peak or None,
        "computing_bytes": computing - moments if computing else None,
    }


def describe(run: RunFile, arm: Arm, layers: list[int], info: TargetInfo) -> RecordMeta:
    """The record of an arm's rows; its tokens are random."""
    draw = np.random.default_rng(0)
    return RecordMeta(
        batch=0,
        row_ids=np.arange(len(arm.lengths), dtype=np.int64),
        cu_seqlens=np.cumsum([0, *arm.lengths]).astype(np.int32),
        tokens=draw.integers(0, info.vocab_size, sum(arm.lengths)).astype(np.int32),
        mask=np.concatenate(_masks(arm)),
        layer_ids=tuple(layers),
        dtype=run.record_dtype,
        hidden_size=info.hidden_size,
        last_hidden="before_norm" if run.target.last_hidden else "none",
        fingerprint=0,
    )


def _masks(arm: Arm) -> list[NDArray[np.uint8]]:
    masks = [np.zeros(length, np.uint8) for length in arm.lengths]
    for mask, (start, end) in zip(masks, arm.supervised, strict=True):
        mask[start:end] = 1
    return masks


class Repetition(NamedTuple):
    """Seconds of forward and backward, and of the update. Most bytes of the GPU that tensors held during both, and
    during forward and backward alone; 0 on a CPU."""

    step_s: float
    update_s: float
    peak: int
    computing: int


def _time(
    learner: DFlashLearner,
    meta: RecordMeta,
    states: memoryview,
    device: torch.device,
    options: StepOptions,
    name: str,
) -> list[Repetition]:
    """Each repetition after those that warm up."""
    warm = WARM[device.type]
    ahead = Ahead(learner, lambda call: (meta, states, (call - warm) % EPOCHS))

    def once() -> Repetition:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        wait(device)
        start = time.perf_counter()
        ahead.train_next()
        wait(device)
        step_s = time.perf_counter() - start
        computing = _peak(device)
        start = time.perf_counter()
        result = learner.step(learner.sums(), LR)
        wait(device)
        update_s = time.perf_counter() - start
        if not result.finite:
            raise PacelineError("the benchmark's step is not finite: its times would say nothing")
        return Repetition(step_s, update_s, _peak(device), computing)

    try:
        doing(f"{name}: first steps, compiling" if device.type == "cuda" else f"{name}: first steps")
        for _ in range(warm):
            once()
        doing(name)
        times: list[Repetition] = []
        begun = time.perf_counter()
        while not options.enough(len(times), time.perf_counter() - begun):
            times.append(once())
        if options.profile is not None:
            with profiled(Path(options.profile), f"step-{name}"):
                for _ in range(PROFILED):
                    once()
        return times
    finally:
        ahead.close()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def count_work(run: RunFile, meta: RecordMeta, epoch: int, info: TargetInfo, planes: int) -> dict[str, int]:
    """What the rows take in an epoch: slots, scored slots, blocks with one, model FLOPs."""
    cu = meta.cu_seqlens
    masks = [meta.mask[cu[r] : cu[r + 1]] for r in range(len(meta.row_ids))]
    anchors = _anchors(run, masks, meta.row_ids.tolist(), epoch)
    size = run.drafter.block_size
    blocks = pack_blocks(meta.tokens, meta.mask, cu, anchors, block_size=size, mask_token_id=0, gamma=1.0)
    own = np.bincount(blocks.block, minlength=blocks.count)
    seen = int((blocks.see_to - blocks.see_from).sum() + (own * own).sum())
    context = sum(span.context_to - span.context_from for span in blocks.spans)
    scored = len(blocks.scored)
    return {
        "slots": blocks.slots,
        "scored": scored,
        "blocks": len(np.unique(blocks.block[blocks.scored])),
        "flops": step_flops(Shape.of(run, info, planes), context=context, slots=blocks.slots, seen=seen, scored=scored),
    }


def _anchors(run: RunFile, masks: list[NDArray[np.uint8]], ids: Any, epoch: int) -> list[Positions]:
    """As the learner draws them."""
    per_token, most = run.objective.anchors_per_token, run.objective.max_anchors
    return [
        draw_anchors(mask, seed=run.trainer.seed, epoch=epoch, row_id=row, per_token=per_token, most=most)
        for mask, row in zip(masks, ids, strict=True)
    ]


if __name__ == "__main__":
    measured(lambda: measure(sys.argv[1], StepOptions.from_json(sys.argv[2])))
