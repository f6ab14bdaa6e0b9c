"""The plan: which rows make up which batch, epoch by epoch, for the whole run.

A plan is a pure function of its inputs, so workers, trainer, ranks and `paceline audit` each build it and agree without
talking. An epoch is packed by itself: its rows are shuffled (first-fit) or taken in the dataset's order (sequential),
and packed into batches of at most `token_budget` tokens. Steps never mix epochs: an epoch has ceil(batches / G) steps
and its last step may hold fewer than G records. A limit on steps or tokens cuts the last epoch, so that what has been
trained or listed when the run ends is exactly the plan, and a plan with a limit is a prefix of the one without.

With weights, an epoch uses weight × the rows of each file, going round and round in an order of the file's rows that is
drawn once: weight 0.5 uses one half in even epochs and the other in odd ones, weight 2 all of them twice. So no row is
used again before all others of its file, and over 1 / weight epochs all are used equally often.

Held-out rows are drawn by seed, packed once, and evaluated in whole at each evaluation.

Randomness is the raw 64-bit output of Philox, sorted stably: numpy promises that stream for ever and on every
platform, which it doesn't for `Generator.permutation`. A million rows pack in about a second.
"""

import bisect
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from .batch import MAX_INDEX, MAX_NUMBER, BatchId, Kind
from .errors import ConfigError
from .record import MIN_ROW_TOKENS

if TYPE_CHECKING:
    from .rows import Rows
    from .runfile import RunFile

_OPEN_BATCHES = 12  # batches first-fit looks at: 99.5 % full and better for rows well under the budget
_KEPT_INTS = 1 << 24  # row indices kept packed in memory; older epochs are packed again when asked for


@dataclass(frozen=True)
class PlanSpec:
    """What decides the batches, beside the rows' lengths. `dataset` is the digest of the prepared rows.

    mix: number of rows and weight of each file, in the rows' order; empty if all weights are 1.
    """

    dataset: str
    seed: int
    token_budget: int
    max_length: int
    packer: str
    held_out: int
    mix: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Packed:
    """Batches of one epoch: batch b holds rows[offsets[b]:offsets[b+1]], tokens[b] in all."""

    rows: np.ndarray  # int32 or int64 [rows of the epoch], row ids
    offsets: np.ndarray  # int64 [batches + 1]
    tokens: np.ndarray  # int64 [batches]

    def __len__(self) -> int:
        return len(self.tokens)


class Plan:
    """All batches of a run.

    lengths: tokens of each prepared row, int [N].
    batches_per_step: whole batches in an optimiser step, over all ranks (G).
    max_steps, max_tokens: stop after so many steps, or after the step that reaches so many context tokens.
    eval_every: steps between evaluations, 0 for none; eval_at_end: evaluate after the last step.

    ConfigError if a row is longer than the token budget, or if the held-out rows leave none to train on.
    """

    def __init__(
        self,
        spec: PlanSpec,
        lengths: np.ndarray,
        *,
        batches_per_step: int,
        epochs: int,
        max_steps: int | None = None,
        max_tokens: int | None = None,
        eval_every: int = 0,
        eval_at_end: bool = True,
    ):
        self.spec = spec
        self.batches_per_step = batches_per_step
        self.eval_every = eval_every
        self.eval_at_end = eval_at_end
        self._lengths = np.asarray(lengths, np.int32)
        _check(spec, self._lengths)
        order = _shuffled(len(self._lengths), spec.seed, Kind.EVAL, 0)
        held_out, training = np.sort(order[: spec.held_out]), np.sort(order[spec.held_out :])
        self._training = training
        self._files = _file_orders(spec, training)
        self._eval = _pack(held_out, self._lengths, spec)
        self._packed: dict[int, _Packed] = {}
        self._batches: list[int] = []  # per epoch, after the cut
        self._first_step = [0]  # per epoch, and one past the last
        self._tokens = 0
        self._walk_epochs(epochs, max_steps, max_tokens)

    def _walk_epochs(self, epochs: int, max_steps: int | None, max_tokens: int | None) -> None:
        """Count the steps of each epoch up to the run's end."""
        group = self.batches_per_step
        for epoch in range(min(epochs, MAX_NUMBER + 1)):
            packed = self._epoch(epoch)
            ends = np.cumsum(np.add.reduceat(packed.tokens, np.arange(0, len(packed), group)))
            steps = len(ends)
            if max_steps is not None:
                steps = min(steps, max_steps - self._first_step[-1])
            if max_tokens is not None:
                steps = min(steps, int(np.searchsorted(ends, max_tokens - self._tokens)) + 1)
            self._batches.append(min(len(packed), steps * group))
            self._first_step.append(self._first_step[-1] + steps)
            self._tokens += int(ends[steps - 1])
            if self.total_steps == max_steps or (max_tokens is not None and self._tokens >= max_tokens):
                break
        if self.total_steps > MAX_NUMBER:
            raise ConfigError(f"a run of {self.total_steps} steps is longer than {MAX_NUMBER}: lower trainer.epochs")

    def _epoch(self, epoch: int) -> _Packed:
        packed = self._packed.get(epoch)
        if packed is None:
            rows = self._epoch_rows(epoch)
            if self.spec.packer == "first-fit":
                rows = rows[_shuffled(len(rows), self.spec.seed, Kind.TRAIN, epoch)]
            packed = _pack(rows, self._lengths, self.spec)
            keep = max(2, _KEPT_INTS // len(rows))
            # A new dict each time, so that threads reading the old one are not disturbed.
            self._packed = {**dict(list(self._packed.items())[1 - keep :]), epoch: packed}
        return packed

    def _epoch_rows(self, epoch: int) -> np.ndarray:
        """The row ids of an epoch, ascending."""
        if not self.spec.mix:
            return self._training
        ids = [np.zeros(0, np.int64)]
        for order, weight in self._files:
            share = weight * len(order)
            turns = np.arange(math.floor(epoch * share), math.floor((epoch + 1) * share))
            uses = (turns - turns[:1]) // max(len(order), 1)  # before it in this epoch
            ids.append(order[turns % max(len(order), 1)] + uses * len(self._lengths))
        found = np.sort(np.concatenate(ids))
        if not len(found):
            raise ConfigError(f"the weights of data.files leave epoch {epoch} without a row: raise them")
        return found

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the run."""
        return self._first_step[-1]

    @property
    def epochs(self) -> int:
        """Epochs of the run, the last perhaps cut short."""
        return len(self._batches)

    @property
    def total_batches(self) -> int:
        """Training batches of the run, over all epochs."""
        return sum(self._batches)

    @property
    def total_tokens(self) -> int:
        """Context tokens of the run's training batches."""
        return self._tokens

    @property
    def eval_batches(self) -> int:
        """Batches of each evaluation; 0 without held-out rows."""
        return len(self._eval)

    @property
    def eval_rows(self) -> np.ndarray:
        """The held-out rows, int64, ascending."""
        return np.sort(self._eval.rows).astype(np.int64)

    def batches(self, epoch: int) -> int:
        """Training batches of an epoch; the run's last epoch counts those before the cut only."""
        return self._batches[_index(epoch, self.epochs, "epoch")]

    def first_step(self, epoch: int) -> int:
        """The epoch's first step; for `epoch == epochs`, the number of steps of the run."""
        return self._first_step[_index(epoch, self.epochs + 1, "epoch")]

    def epoch_of(self, step: int) -> int:
        """The epoch that step `step` (from 0) belongs to."""
        return bisect.bisect_right(self._first_step, _index(step, self.total_steps, "step")) - 1

    def step_batches(self, step: int) -> int:
        """Records that step `step` takes: G, or what is left in the last step of an epoch."""
        epoch = self.epoch_of(step)
        done = (step - self._first_step[epoch]) * self.batches_per_step
        return min(self.batches_per_step, self._batches[epoch] - done)

    def __contains__(self, batch: object) -> bool:
        """Whether a batch id is of this plan: a training batch before the cut, or one of an evaluation that is due."""
        if not isinstance(batch, BatchId):
            return False
        if batch.kind is Kind.EVAL:
            return 0 <= batch.index < self.eval_batches and self.eval_due(batch.number)
        return 0 <= batch.number < self.epochs and 0 <= batch.index < self._batches[batch.number]

    def rows(self, batch: BatchId) -> np.ndarray:
        """Row ids of a batch, int64, in the order they are packed. KeyError if it is not of this plan."""
        packed = self._packed_of(batch)
        return packed.rows[packed.offsets[batch.index] : packed.offsets[batch.index + 1]].astype(np.int64)

    def indices(self, batch: BatchId) -> np.ndarray:
        """Indices of the rows of a batch, int64, whichever use of them it is. KeyError if it is not of this plan."""
        return self.rows(batch) % len(self._lengths)

    def tokens(self, batch: BatchId) -> int:
        """Context tokens of a batch. KeyError if it is not of this plan."""
        return int(self._packed_of(batch).tokens[batch.index])

    def _packed_of(self, batch: BatchId) -> _Packed:
        if batch not in self:
            raise KeyError(f"batch {batch} is not of this plan")
        return self._eval if batch.kind is Kind.EVAL else self._epoch(batch.number)

    def ids(self, epoch: int) -> Iterator[BatchId]:
        """The training batches of an epoch, in plan order."""
        return (BatchId(Kind.TRAIN, epoch, index) for index in range(self.batches(epoch)))

    def eval_ids(self, number: int) -> Iterator[BatchId]:
        """The batches of the evaluation after `number` steps."""
        return (BatchId(Kind.EVAL, number, index) for index in range(self.eval_batches))

    def eval_due(self, steps_done: int) -> bool:
        """Whether an evaluation follows the step that makes `steps_done` steps."""
        if not 0 < steps_done <= self.total_steps or not self.eval_batches:
            return False
        at_interval = self.eval_every > 0 and steps_done % self.eval_every == 0
        return at_interval or (self.eval_at_end and steps_done == self.total_steps)

    def next_phase(self, kind: Kind, number: int) -> tuple[Kind, int] | None:
        """The phase after a training phase (number = step, from 0) or an evaluation (number = steps done); None at the
        run's end. The first phase is (TRAIN, 0)."""
        done = number + 1 if kind is Kind.TRAIN else number
        if kind is Kind.TRAIN and self.eval_due(done):
            return Kind.EVAL, done
        return (Kind.TRAIN, done) if done < self.total_steps else None


def plan_from(run: "RunFile", rows: "Rows") -> Plan:
    """The plan of a run file over its prepared rows."""
    spec = PlanSpec(
        dataset=rows.digest,
        seed=run.trainer.seed,
        token_budget=run.stream.token_budget,
        max_length=run.data.max_length,
        packer=run.stream.packer,
        held_out=run.data.held_out,
        mix=run.data.mix(rows.meta),
    )
    return Plan(
        spec,
        rows.lengths,
        batches_per_step=run.trainer.batches_per_step,
        epochs=run.trainer.epochs,
        max_steps=run.trainer.max_steps,
        max_tokens=run.trainer.max_tokens,
        eval_every=run.evaluation.every_steps,
        eval_at_end=run.evaluation.at_end,
    )


def _check(spec: PlanSpec, lengths: np.ndarray) -> None:
    if len(lengths) == 0:
        raise ConfigError("the dataset has no rows")
    longest = int(lengths.max())
    if longest > spec.token_budget:
        raise ConfigError(
            f"the dataset's longest row has {longest} tokens, more than stream.token_budget ({spec.token_budget}): "
            "raise it, or prepare with a smaller max_length"
        )
    if spec.held_out >= len(lengths):
        raise ConfigError(
            f"data.held_out ({spec.held_out}) leaves none of the dataset's {len(lengths)} rows to train on: lower it"
        )


def _index(value: int, end: int, what: str) -> int:
    if not 0 <= value < end:
        raise IndexError(f"{what} {value} is not in 0..{end - 1}")
    return value


def _shuffled(count: int, seed: int, kind: Kind, number: int) -> np.ndarray:
    """A permutation of range(count), int64, drawn from (seed, kind, number)."""
    key = np.array([seed % 2**64, int(kind) << 32 | number], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def _file_orders(spec: PlanSpec, training: np.ndarray) -> list[tuple[np.ndarray, Fraction]]:
    """Of each file of a mix its training rows, in the order in which they are used, and its weight as written."""
    ends = np.cumsum([0, *(rows for rows, _ in spec.mix)])
    orders = []
    for file, (_, weight) in enumerate(spec.mix):
        rows = training[np.searchsorted(training, ends[file]) : np.searchsorted(training, ends[file + 1])]
        order = _shuffled(len(rows), spec.seed, Kind.EVAL, 1 + file)  # draw 0 of this kind chose the held-out rows
        orders.append((rows[order], Fraction(str(weight))))
    return orders


def _pack(rows: np.ndarray, lengths: np.ndarray, spec: PlanSpec) -> _Packed:
    """Pack row ids, in their order, into batches of at most spec.token_budget tokens."""
    if len(rows) == 0:
        return _Packed(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.int64))
    # A row never counts for less than MIN_ROW_TOKENS, which also bounds the rows of a batch.
    costs = np.maximum(lengths[rows % len(lengths)], MIN_ROW_TOKENS).tolist()
    fit = _first_fit if spec.packer == "first-fit" else _sequential
    batch_of = np.array(fit(costs, spec.token_budget), np.int64)
    order = np.argsort(batch_of, kind="stable")
    rows = rows[order].astype(np.int32 if rows.max() <= np.iinfo(np.int32).max else np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(batch_of))]).astype(np.int64)
    if len(offsets) - 1 > MAX_INDEX:
        raise ConfigError(f"{len(offsets) - 1} batches in an epoch are more than {MAX_INDEX}: raise token_budget")
    return _Packed(rows, offsets, np.add.reduceat(lengths[rows % len(lengths)].astype(np.int64), offsets[:-1]))


def _first_fit(costs: list[int], budget: int) -> list[int]:
    """The batch of each row: the first open batch with room for it, else a new one, closing the fullest of too many."""
    batch_of = []
    ids: list[int] = []  # open batches, in order of opening
    room: list[int] = []  # tokens each of them still takes
    smallest = min(costs)
    opened = 0
    for cost in costs:
        at = next((at for at, left in enumerate(room) if cost <= left), len(room))
        if at == len(room):
            if at == _OPEN_BATCHES:
                fullest = room.index(min(room))
                del ids[fullest], room[fullest]
                at -= 1
            ids.append(opened)
            room.append(budget)
            opened += 1
        batch_of.append(ids[at])
        room[at] -= cost
        if room[at] < smallest:
            del ids[at], room[at]
    return batch_of


def _sequential(costs: list[int], budget: int) -> list[int]:
    """The batch of each row: the one before it while there is room, else the next."""
    batch_of = []
    batch, left = 0, budget
    for cost in costs:
        if cost > left:
            batch, left = batch + 1, budget
        left -= cost
        batch_of.append(batch)
    return batch_of
