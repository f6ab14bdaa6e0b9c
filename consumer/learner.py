"""What a rank does with a record: forward, loss and backward of its rows, then one optimiser step for all ranks.

A record is cut into micro-batches of whole rows. Gradients and metrics only ever add up, unnormalised, until `step`
divides them once by the weight summed over all ranks; so splits change nothing. What is drawn depends on (seed, epoch,
row id) alone. Called by the rank's loop (rank.py, training.py).

A step, on each rank:    train_record(...) for its records;  sums() -> all-reduce;  reduce(group);  step(total, lr)
An evaluation:           eval_record(...) for its records;   sums() -> all-reduce;  Summary.of(total);  discard()
Before the first step:   rehearsal.py, on records that are made up
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F

from ..common.errors import ConfigError, PacelineError
from ..common.footprint import HEAD_CHUNK
from ..common.loading import FrozenHead, as_dtype, compute_dtype
from ..common.record import FP8, RecordMeta
from ..common.runfile import RunFile
from ..common.target_info import TargetInfo, check_target_mask_token
from .anchors import Positions, draw_anchors
from .blocks import Blocks, Prepared, attention, default_gamma, pack_blocks, to_device
from .chains import accept_everywhere, run_chains
from .drafter import ContextKV, Drafter
from .linears import ALIGNED, DraftMLP, Eight, check_fp8, use_fp8, without_fp8
from .losses import (
    SCALARS,
    Scored,
    Summary,
    accepted,
    accepted_lazily,
    block_sums,
    chunk_rows,
    head_cross_entropy,
    head_hits,
    quantised_head,
    sums_size,
)
from .objective import (
    PLAIN,
    Objective,
    Slots,
    fused_backend,
    noise_seeds,
    score_through_head,
    whole_blocks,
)
from .optim import MasterWeights, Reducer, build_optimizer, copy_strictly
from .start import first_drafter
from .stopwatch import Gaps, Stopwatch
from .transfer import Reading, StateReader, view_scales, view_states

log = logging.getLogger(__name__)

Key = tuple[int, int | None]  # of a record: its batch and the epoch, None in an evaluation
WARM_STEPS = 3  # after which nothing should be compiled any more
AHEAD = 4  # records whose blocks are kept; a rank holds two
EVAL_EPOCH = 0  # evaluations draw the same anchors each time
CHAIN_BLOCKS = {"cpu": 256, "cuda": 4096}  # blocks of an evaluation's chains at a time, at most
FEW_BLOCKS = 64  # are no matter of memory
MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class StepResult:
    """finite: the step's loss and gradient were numbers, on all ranks alike. If not, nothing was changed."""

    finite: bool
    grad_norm: float  # of Σ w·CE / Σ w, before clipping
    summary: Summary


class FrozenWeights(Protocol):
    """The target's embedding and head, [V, H] each, and its final norm (`common.loading.FrozenHead`)."""

    @property
    def embed_weight(self) -> Tensor: ...
    @property
    def head_weight(self) -> Tensor: ...
    @property
    def norm(self) -> Callable[[Tensor], Tensor]: ...


def drafter_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype a drafter computes in: what the run file says, or float32 as `compute_dtype` finds for this CPU.

    float16 is refused: summed gradients pass its range and there is no loss scaling.
    """
    if name == "float16":
        raise ConfigError('trainer.dtype = "float16" is not supported: use "bfloat16" or "float32"')
    dtype = compute_dtype(name, device)
    if dtype != as_dtype(name):
        log.warning("this CPU has no fast %s arithmetic: the drafter computes in float32", name)
    return dtype


def micro_batches(lengths: NDArray[np.int64], wanted: NDArray[np.bool_], budget: int) -> list[tuple[int, int]]:
    """Runs of rows (first, past the last) of at most `budget` tokens, one row at least; rows not wanted are in none."""
    runs: list[tuple[int, int]] = []
    tokens = 0
    for row in np.flatnonzero(wanted).tolist():
        tokens += int(lengths[row])
        if runs and runs[-1][1] == row and tokens <= budget:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
            tokens = int(lengths[row])
    return runs


@dataclass(frozen=True, eq=False)
class _Rows:
    """Consecutive rows of a record: one micro-batch. Indices count from the first row's first token."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    cu_seqlens: NDArray[np.int32]
    anchors: list[Positions]  # of each row
    ids: NDArray[np.int64]  # of each row
    start: int  # place of the first token in the record

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return list(zip(self.cu_seqlens[:-1].tolist(), self.cu_seqlens[1:].tolist(), strict=True))


class _Inputs(NamedTuple):
    """The tables of some blocks on the device; see `Blocks`."""

    ids: Tensor
    positions: Tensor
    scored: Tensor
    labels: Tensor
    cells: Tensor
    label_at: Tensor
    weights: Tensor


class _Ready(NamedTuple):
    """Blocks of a micro-batch, ready for the device."""

    blocks: Blocks
    inputs: _Inputs
    attend: Prepared


class _Micro(NamedTuple):
    """A micro-batch without its states. needed: tokens whose states something sees; positions: theirs, int64."""

    rows: _Rows
    needed: int
    positions: Tensor
    slots: _Ready

    @property
    def span(self) -> tuple[int, int]:
        """The needed tokens in the record."""
        return self.rows.start, self.rows.start + self.needed


class _Packed(NamedTuple):
    """A record's micro-batches; arrived: when their tables are on the device, if another stream brings them there."""

    micros: list[_Micro]
    arrived: torch.cuda.Event | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [micro.span for micro in self.micros]

    def tensors(self) -> Iterator[Tensor]:
        for micro in self.micros:
            yield from (micro.positions, *micro.slots.inputs, *micro.slots.attend.tables())


class _States(NamedTuple):
    """A micro-batch's hidden states on the device: features [t, K·H], and the target's normalised last ones [t, H]."""

    features: Tensor
    last: Tensor | None


class DFlashLearner:
    """Trains a `Drafter` on records; the target's embedding and head stay frozen and are never written."""

    def __init__(
        self, run: RunFile, drafter: Drafter, head: FrozenWeights, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """drafter: float32, with its first weights; it is taken over and moved. dtype: `drafter_dtype`."""
        self.config, self.drafter = drafter.config, drafter.to(device)
        self.device = torch.device(device)
        self.run = run
        self._gamma = run.objective.gamma or default_gamma(self.config.block_size)
        self._embedding = head.embed_weight.detach().to(self.device, dtype)
        self._head = head.head_weight.detach().to(self.device, dtype)
        self._norm = head.norm
        self._chunk = HEAD_CHUNK[self.device.type]
        self._objective = Objective.of(run.objective)
        self.weights = MasterWeights(self.drafter, dtype=dtype, device=self.device)
        self._join()
        self._eight: Eight | None = None  # the head for products in fp8
        if run.trainer.fp8:
            check_fp8(self.device)
            self.weights.published.append(use_fp8(self.drafter))
            if all(size % ALIGNED == 0 for size in self._head.shape):
                self._eight = quantised_head(self._head)
        self._optimizer = build_optimizer(self.weights, run.optimizer)
        self._dtype, self._reader = dtype, StateReader(self.device, dtype)
        if self.device.type == "cuda":
            self.drafter.compile_parts()
        self._reduction, self.gaps = Stopwatch(self.device), Gaps(self.device)
        self._group: Reducer | None = None
        self._steps = self._graphs = 0
        self._ahead: dict[Key, _Packed] = {}
        self._beside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._sums = torch.zeros(sums_size(self.config.block_size), dtype=torch.float64, device=self.device)

    def _join(self) -> None:
        """Gate's and up's products become one: fewer, larger, and the input's gradient is summed within it."""
        for name, module in self.drafter.named_modules():
            if isinstance(module, DraftMLP):
                parts = [f"{name}.{part}.weight" for part in ("gate_proj", "up_proj")]
                module.joint = (self.weights.joined(parts),)

    def reuse(self, run: RunFile, reader: type[StateReader] = StateReader) -> None:
        """Goes on with a run file that draws other anchors or cuts other micro-batches, and differs in nothing else;
        what was prepared is forgotten. For benchmarks: a large drafter takes a minute to build and to compile."""
        self.run = run
        self._ahead.clear()
        self._reader = reader(self.device, self._dtype)
        self._graphs = self.compiled()

    # Records

    def prepare(self, meta: RecordMeta, states: memoryview, epoch: int | None) -> None:
        """Draws the anchors and packs the blocks of a record that `train_record` (epoch None: `eval_record`) will get
        after those that were prepared before it, in any thread, and sends their tables to the device. The first
        micro-batch of its states is copied as soon as the record before needs no buffer for another of its own.

        Tens of thousands of slots, and the way of a hundred megabytes, take long enough for the GPU to wait. A record
        that never comes keeps its slot until `forget`.
        """
        # Those that never came: refused, or of a phase that was left. Another thread may take one meanwhile.
        for never in list(self._ahead)[: 1 - AHEAD]:
            self._ahead.pop(never, None)
        if self._beside is None:
            packed = self._packed(meta, epoch)
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(self._beside):
                packed = self._packed(meta, epoch)._replace(arrived=self._beside.record_event())
        self._ahead[meta.batch, epoch] = packed
        self._reader.expect((meta.batch, epoch), self._reading(meta, states, packed.spans))

    def forget(self, address: int, size: int) -> None:
        """Before a ring is unmapped, in any thread: on return no copy of a record that was only prepared reads it."""
        self._reader.forget(address, size)

    def train_record(self, meta: RecordMeta, states: memoryview, epoch: int, done: float = 0.0) -> None:
        """Adds a record's gradients and sums. states: the record's [planes, T, H] bytes in its slot; done: the share
        of the run's steps that is behind, for schedules.

        On return the slot may be released: nothing points into it and no copy out of it is under way.
        """
        noise = self.run.objective.noise * (1 - done)
        for micro, found in self._micros(meta, states, epoch):
            if noise:
                self._add_noise(found.features, micro.rows, noise, epoch)
            context = self.drafter.project_context(found.features, micro.positions)
            self._score(micro.slots, context, len(micro.rows.tokens), found.last).backward()

    @torch.no_grad()
    def eval_record(self, meta: RecordMeta, states: memoryview) -> None:
        """Adds a record's sums, chains included; no gradients. On return its slot may be released."""
        for micro, found in self._micros(meta, states, None):
            context = self.drafter.project_context(found.features, micro.positions)
            self._score(micro.slots, context, len(micro.rows.tokens), found.last)
            self._chain(micro.rows, context)
        self._graphs = self.compiled()  # an evaluation's are its own

    def _micros(self, meta: RecordMeta, states: memoryview, epoch: int | None) -> Iterator[tuple[_Micro, _States]]:
        """A record's micro-batches with their states, as prepared if they were."""
        packed = self._ahead.pop((meta.batch, epoch), None) or self._packed(meta, epoch)
        if packed.arrived is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(packed.arrived)
            for table in packed.tensors():
                table.record_stream(here)  # else its memory could be another table's before it has been read
        return zip(packed.micros, self._states(meta, states, packed.spans, epoch), strict=True)

    def _packed(self, meta: RecordMeta, epoch: int | None) -> _Packed:
        packed = []
        for rows in self._micro_batches(meta, EVAL_EPOCH if epoch is None else epoch):
            blocks = self._pack(rows, rows.anchors)
            needed = len(rows.tokens)
            # Nothing sees what is after the last anchor, but for an evaluation's chains.
            if not self._objective.needs_target and epoch is not None:
                needed = max(1, blocks.spans[-1].context_to)
            positions = self._context_positions(rows, needed)
            packed.append(_Micro(rows, needed, positions, self._ready(blocks, needed)))
        return _Packed(packed)

    def _ready(self, blocks: Blocks, context: int) -> _Ready:
        columns = [blocks.ids, blocks.positions, blocks.scored, blocks.labels, blocks.cells, blocks.label_at]
        inputs = _Inputs._make([*to_device(columns, self.device), *to_device([blocks.weights], self.device)])
        attend = attention(blocks, context, self.device, self.config.head_dim)
        attend.prepare(self.drafter.windows, self.config.head_dim, self._embedding.element_size())
        return _Ready(blocks, inputs, attend)

    def _micro_batches(self, meta: RecordMeta, epoch: int) -> list[_Rows]:
        cu, anchors = meta.cu_seqlens, self._anchors(meta, epoch)
        wanted = np.array([len(row) > 0 for row in anchors], bool)
        runs = micro_batches(np.diff(cu).astype(np.int64), wanted, self.run.trainer.micro_tokens)
        parts = [(first, past, slice(int(cu[first]), int(cu[past]))) for first, past in runs]
        return [
            _Rows(
                meta.tokens[at],
                meta.mask[at],
                cu[first : past + 1] - cu[first],
                anchors[first:past],
                np.asarray(meta.row_ids[first:past], np.int64),
                at.start,
            )
            for first, past, at in parts
        ]

    def _anchors(self, meta: RecordMeta, epoch: int) -> list[Positions]:
        """Of each row of a record."""
        cu, objective = meta.cu_seqlens, self.run.objective
        return [
            draw_anchors(
                meta.mask[cu[r] : cu[r + 1]],
                seed=self.run.trainer.seed,
                epoch=epoch,
                row_id=int(row_id),
                per_token=objective.anchors_per_token,
                most=objective.max_anchors,
            )
            for r, row_id in enumerate(meta.row_ids)
        ]

    def _states(
        self, meta: RecordMeta, states: memoryview, spans: Sequence[tuple[int, int]], epoch: int | None
    ) -> Iterator[_States]:
        """Hidden states of a record's tokens (from, to), a micro-batch after the other."""
        for features, hidden in self._reader.features(self._reading(meta, states, spans), (meta.batch, epoch)):
            with torch.no_grad():
                normed = None if hidden is None else self._norm(hidden)
            yield _States(features, normed)

    def _reading(self, meta: RecordMeta, states: memoryview, spans: Sequence[tuple[int, int]]) -> Reading:
        layers = len(meta.layer_ids)
        planes = layers + self._objective.needs_target
        view = view_states(states, meta.states_shape, as_dtype(meta.dtype))[:planes]
        scales = view_scales(states, meta.states_shape)[:planes] if meta.dtype == FP8 else None
        return Reading(view, layers, spans, scales)

    def _add_noise(self, features: Tensor, rows: _Rows, scale: float, epoch: int) -> None:
        """Adds u·scale, u uniform in [-1, 1], to the features; a row's depend on (seed, epoch, row id) alone."""
        for (start, stop), seed in zip(
            rows.bounds, noise_seeds(self.run.trainer.seed, epoch, rows.ids.tolist()), strict=True
        ):
            generator = torch.Generator(self.device).manual_seed(seed)
            shape = (stop - start, features.shape[1])  # of the whole row, so that cutting it changes nothing
            noise = torch.empty(shape, dtype=features.dtype, device=self.device).uniform_(-1, 1, generator=generator)
            features[start:stop] += scale * noise[: len(features) - start]

    def _context_positions(self, rows: _Rows, count: int) -> Tensor:
        """Position of each context token in its own document, int64 [count]."""
        lengths = np.diff(rows.cu_seqlens)
        at = np.arange(len(rows.tokens)) - np.repeat(rows.cu_seqlens[:-1], lengths)
        return to_device([at[:count].astype(np.int64)], self.device)[0]

    def _pack(self, rows: _Rows, anchors: Sequence[Positions]) -> Blocks:
        return pack_blocks(
            rows.tokens,
            rows.mask,
            rows.cu_seqlens,
            anchors,
            block_size=self.config.block_size,
            mask_token_id=self.config.mask_token_id,
            gamma=self._gamma,
        )

    def _hidden(self, ready: _Ready, context: Sequence[ContextKV]) -> Tensor:
        """States [n, H] of the scored slots."""
        embeds = F.embedding(ready.inputs.ids, self._embedding)
        return self.drafter.decode(embeds, ready.inputs.positions, context, ready.attend, ready.inputs.scored)

    def _score(self, ready: _Ready, context: Sequence[ContextKV], tokens: int, last: Tensor | None = None) -> Tensor:
        """Adds the blocks' sums and returns their share of the loss's numerator."""
        scored = self._through_head(ready, self._hidden(ready, context), last)
        self._sums += block_sums(
            scored,
            ready.inputs.cells,
            blocks=ready.blocks.count,
            block_size=self.config.block_size,
            context_tokens=tokens,
        )
        return scored.loss

    def _through_head(self, ready: _Ready, hidden: Tensor, last: Tensor | None) -> Scored:
        blocks, inputs = ready.blocks, ready.inputs
        eight = self._eight if torch.is_grad_enabled() else None  # evaluated is what will be served
        if self._objective.plain:
            return head_cross_entropy(
                hidden, self._head, inputs.labels, inputs.weights, eight=eight, chunk_bytes=self._chunk
            )
        size = self.config.block_size
        # A run of whole blocks is a little shorter than what is allowed: so that there is not one more than needed.
        most = min(chunk_rows(len(hidden), self._head, self._chunk) + size, self._chunk // (4 * len(self._head)))
        runs = whole_blocks(blocks.block[blocks.scored], max(1, most))
        slots = Slots(inputs.labels, inputs.weights, inputs.cells, blocks.count, size, runs)
        target = None if last is None else last.index_select(0, inputs.label_at - 1)
        backend = fused_backend() if self.device.type == "cuda" else PLAIN
        return score_through_head(hidden, self._head, slots, self._objective, target, backend, eight=eight)

    def _chain(self, rows: _Rows, context: Sequence[ContextKV]) -> None:
        def accept(anchors: list[Positions]) -> NDArray[np.int64]:
            blocks = self._pack(rows, anchors)
            ready = self._ready(blocks, context[0][0].shape[1])
            hidden, inputs = self._hidden(ready, context), ready.inputs
            size = self.config.block_size
            if self.device.type == "cpu":
                counts = accepted_lazily(hidden, self._head, inputs.labels, inputs.cells, blocks.count, size)
            else:
                hits = head_hits(hidden, self._head, inputs.labels, chunk_bytes=self._chunk)
                counts = accepted(hits, inputs.cells, blocks.count, size)
            return counts.cpu().numpy().astype(np.int64)

        masks = [rows.mask[start:stop] for start, stop in rows.bounds]
        # As many at a time as the micro-batch has anchors: more could take memory that no training step has asked for.
        fitting = max(FEW_BLOCKS, sum(map(len, rows.anchors)))
        most = min(CHAIN_BLOCKS[self.device.type], fitting)
        chains = run_chains(masks, accept_everywhere(masks, accept, most))
        self._sums[SCALARS.index("chain_accepted")] += chains.accepted
        self._sums[SCALARS.index("chain_blocks")] += chains.blocks

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Computes without torch.compile and without fp8 for as long as it lasts."""
        eight, self._eight = self._eight, None
        try:
            with torch.compiler.set_stance("force_eager"), without_fp8(self.drafter):
                yield
        finally:
            self._eight = eight

    # Steps

    def sums(self) -> NDArray[np.float64]:
        """This rank's sums since the last step or `discard`, to be added up over ranks (`Summary.of`).

        The only place that waits for the device, with `step`.
        """
        return self._sums.cpu().numpy().copy()

    def reduce(self, group: Reducer) -> None:
        """Adds the ranks' gradients up. Every rank calls it, also one that had no record; the next `step` is theirs."""
        self._group = group
        self._reduction.start()
        group.all_reduce(self.weights.gradients)
        self._reduction.stop()

    def reduce_seconds(self) -> float:
        """What the last `reduce` took. After `step`, which has waited for the device, this waits for nothing."""
        return self._reduction.seconds()

    def step(self, total: NDArray[np.float64], lr: float) -> StepResult:
        """Applies the reduced gradients; total: the ranks' added-up sums. Clears gradients and sums.

        A step without a scored slot changes nothing and is finite.
        """
        self._watch_compiler()
        summary = Summary.of(total)
        finite = bool(np.isfinite(total).all())
        norm = 0.0
        if finite and summary.weight > 0:
            norm = self._optimizer.step(lr, summary.weight, self._group)  # clears the gradients
            self._sums.zero_()
        else:
            self.discard()
        return StepResult(finite and math.isfinite(norm), norm, summary)

    def compiled(self) -> int:
        """How much this process has compiled: graphs, and kernels of ours."""
        return counters["stats"]["unique_graphs"] + (kernel_variants() if self.device.type == "cuda" else 0)

    def _watch_compiler(self) -> None:
        """Warns of what was compiled after the first steps: all sizes are symbols, so nothing should be."""
        graphs = self.compiled()
        self._steps += 1
        if self._steps > WARM_STEPS and graphs > self._graphs:
            log.warning("the drafter was compiled anew at the %dth step of this process", self._steps)
        self._graphs = graphs

    def discard(self) -> None:
        """Drops the gradients and sums of an unfinished step, or an evaluation's sums."""
        self.weights.gradients.zero_()
        self._sums.zero_()

    # State

    def optimizer_bytes(self) -> int:
        """What the optimiser's state takes, beside masters, gradients and compute copies."""
        return sum(part.nbytes for part in self._optimizer.state_dict().values())

    def snapshot(self) -> Callable[[Path], None]:
        """Copies weights and optimiser state now; the result writes them into a folder, from any thread."""
        model = _copied(self.weights.views(self.weights.masters))
        optimizer = _copied(self._optimizer.state_dict())

        def write(folder: Path) -> None:
            save_file(model, folder / MODEL_FILE, metadata={"format": "pt"})
            save_file(optimizer, folder / OPTIMIZER_FILE, metadata={"format": "pt"})

        return write

    def restore(self, folder: Path) -> None:
        """Takes weights and optimiser state from a folder that a snapshot wrote; PacelineError when they do not fit."""
        try:
            model, optimizer = load_file(folder / MODEL_FILE), load_file(folder / OPTIMIZER_FILE)
        except (OSError, SafetensorError) as error:
            raise PacelineError(f"{folder}: unreadable weights or optimiser state ({error})") from error
        self._optimizer.load_state_dict(optimizer)
        copy_strictly(self.weights.views(self.weights.masters), model, f"{folder / MODEL_FILE}")
        self.weights.publish()
        self.discard()


def kernel_variants() -> int:
    """Imported on first use: a CPU run never needs Triton."""
    from .kernels import variants

    return variants()


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def build_learner(
    run: RunFile,
    info: TargetInfo,
    layer_ids: Sequence[int],
    *,
    device: torch.device | str,
    used_token: Callable[[int], bool] | None = None,
    resumed: Path | None = None,
    kind: type[DFlashLearner] = DFlashLearner,
) -> DFlashLearner:
    """The learner of a run file, with its first weights: the same on every rank, whatever their number.

    used_token: whether the prepared rows contain a token (`Rows.used_token`). resumed: the checkpoint that will be
    restored. kind: another class, where a benchmark compares. Raises ConfigError for a mask token, shape, target or
    drafter to start from that does not fit.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # page-locking and compiled kernels use the current device
    dtype = drafter_dtype(run.trainer.dtype, device)
    drafter = first_drafter(run, info, layer_ids, resumed)
    check_target_mask_token(drafter.config.mask_token_id, info, used_token)
    trusted = run.target.trust_remote_code
    head = FrozenHead.load(info.path, dtype=dtype, device=device, trust_remote_code=trusted)
    return kind(run, drafter, head, device=device, dtype=dtype)
