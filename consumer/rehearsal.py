"""What a rank tries before it trains, on made-up records: whether it fits the device, and whether it learns.

    rehearse         the largest micro-batch that can come, forward and backward; then `check_compiled`
    check_compiled   a small record's gradients, compiled and in fp8 if the run says so, against the plain ones
    draw_states      random hidden states of a record, for benchmarks too

Nothing is left of it: weights, optimiser, sums, random states and what was prepared stay as they were.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..common.densest import Densest
from ..common.errors import ConfigError
from ..common.footprint import micro_tokens
from ..common.loading import as_dtype
from ..common.record import FP8, RecordMeta
from .learner import DFlashLearner
from .transfer import view_scales

NO_BATCH = -1  # of made-up records: nothing is ever prepared for it
EPOCH = 0
CHECK_ROWS, CHECK_LENGTH = 4, 96  # of the comparison of compiled gradients with plain ones
LEAST_SHARE = 0.01  # of the whole gradient's norm, for one weight's to be compared
LEAST_ALIKE = 0.5  # cosine and ratio to the plain gradient
TILE = 2**22  # random values of a record's states


def rehearse(learner: DFlashLearner, densest: Densest | None = None) -> None:
    """Takes the largest micro-batch that can come forward and backward, then compares compiled gradients with plain
    ones. densest: of the run's rows, else of any.

    So a run that does not fit the device's memory, or would learn wrongly, ends in its first minute, with what to
    change (ConfigError), and kernels are compiled for the largest sizes.
    """
    run, densest = learner.run, densest or Densest(learner.run)
    size = micro_tokens(run, densest)
    bounds = [*range(0, size - 1, densest.row), size]
    lengths = np.diff(bounds)
    share = min(1.0, densest.anchors(size) / densest.of_rows(lengths).sum())
    meta = _made_up(learner, bounds, np.zeros(size, np.int32))
    for start, stop, supervised in zip(bounds, bounds[1:], np.ceil(share * lengths).astype(int), strict=False):
        meta.mask[start : stop - supervised] = 0
    try:
        learner.train_record(meta, memoryview(bytearray(meta.states_bytes)), EPOCH)
    except torch.OutOfMemoryError as error:
        said = str(error).split(". ")[0]
        raise ConfigError(
            f"a micro-batch of {size:,} tokens does not fit into {learner.device}: {said}. Lower "
            f"trainer.micro_tokens ({run.trainer.micro_tokens:,}); paceline plan says what fits"
        ) from error
    finally:
        learner.discard()
    check_compiled(learner)


def check_compiled(learner: DFlashLearner) -> None:
    """ConfigError if the drafter is compiled and its step has other gradients than the same step run plainly.

    To be called once kernels were compiled for large sizes: the first sizes decide how sums are split.
    """
    if not learner.drafter.is_compiled:
        return
    length = min(CHECK_LENGTH, learner.run.data.max_length)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(learner.config.vocab_size, (CHECK_ROWS * length,), generator=draw, dtype=torch.int32)
    meta = _made_up(learner, range(0, len(tokens) + 1, length), tokens.numpy())
    states = memoryview(bytearray(meta.states_bytes))
    draw_states(meta, states)
    weights = learner.weights
    try:
        with learner.plainly():
            learner.train_record(meta, states, EPOCH)
        plain = weights.gradients.to(weights.compute.dtype, copy=True)
        learner.discard()
        learner.train_record(meta, states, EPOCH)
        fault = gradient_fault(weights.views(weights.gradients), weights.views(plain))
    finally:
        learner.discard()
    if fault is not None:
        do = "leave trainer.fp8 out" if learner.run.trainer.fp8 else "use another version of torch"
        raise ConfigError(f"the drafter compiled by torch {torch.__version__} has wrong gradients: {fault}; {do}")


def gradient_fault(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """What is wrong with the first weight's gradient that points elsewhere than wanted, or is of another size; None if
    none does. Roundings move them too, fp8's by a few per cent: what is sought are gradients that are not there or of
    something else."""
    total = torch.stack([part.float().norm() for part in wanted.values()]).norm()
    for name, part in wanted.items():
        mine, other = found[name].float().flatten(), part.float().flatten()
        size, due = mine.norm(), other.norm()
        if due <= LEAST_SHARE * total:
            continue
        alike, ratio = float(mine @ other / (size * due).clamp_min(1e-30)), float(size / due)
        if not (alike > LEAST_ALIKE and LEAST_ALIKE < ratio < 1 / LEAST_ALIKE):
            return f"that of {name} is {ratio:.2g} times as large, its cosine {alike:.2g}"
    return None


def draw_states(meta: RecordMeta, states: memoryview) -> None:
    """Fills a record's states [planes, T, H] with random values, float8 ones scaled by 1.

    They repeat after TILE values: a record of a large target would take seconds to draw.
    """
    view = torch.frombuffer(states, dtype=as_dtype(meta.dtype), count=math.prod(meta.states_shape))
    tile = torch.randn(min(TILE, len(view)), generator=torch.Generator().manual_seed(0)).to(view.dtype)
    for part in view.split(TILE):
        part.copy_(tile[: len(part)])
    if meta.dtype == FP8:
        view_scales(states, meta.states_shape).fill_(1.0)


def _made_up(learner: DFlashLearner, bounds: Sequence[int], tokens: NDArray[np.int32]) -> RecordMeta:
    """A record whose rows have these bounds, every token supervised."""
    return RecordMeta(
        batch=NO_BATCH,
        row_ids=np.arange(len(bounds) - 1, dtype=np.int64),
        cu_seqlens=np.array(bounds, np.int32),
        tokens=tokens,
        mask=np.ones(len(tokens), np.uint8),
        layer_ids=learner.config.target_layer_ids,
        dtype=learner.run.record_dtype,
        hidden_size=learner.config.hidden_size,
        last_hidden="before_norm" if learner.run.target.last_hidden else "none",
        fingerprint=0,
    )
