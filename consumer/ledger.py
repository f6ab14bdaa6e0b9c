"""The ledger: which training batches are done, each trained or listed (refused, with a reason).

It is what a checkpoint says about the data, beside the weights of the same step boundary. trained and listed are
disjoint, nothing leaves either, and a batch enters once: what would be counted twice raises ValueError. Evaluation
batches are never in it.

Stored as ranges of indices for each epoch, so its size and the time of a look-up depend on the gaps (at most the
records in flight and the listed ones), not on the length of the run.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from ..common.batch import MAX_INDEX, MAX_NUMBER, BatchId, Kind
from ..common.errors import PacelineError


class LedgerInvalid(PacelineError):
    """A stored ledger that does not add up; the text says where."""


class Epochs(Protocol):
    """The part of a plan that a ledger is measured against."""

    @property
    def epochs(self) -> int: ...

    def batches(self, epoch: int) -> int: ...


class Ledger:
    """trained ∪ listed. Equal ledgers compare equal, whatever the order in which batches came."""

    def __init__(self) -> None:
        self._trained: dict[int, Ranges] = {}
        self._done: dict[int, Ranges] = {}
        self._listed: dict[BatchId, str] = {}

    def record(self, trained: Iterable[BatchId], listed: Mapping[BatchId, str]) -> None:
        """Enter the outcome of one step. ValueError, and nothing is entered, if a batch is done or comes twice."""
        trained = list(trained)
        batches = [*trained, *listed]
        for batch in batches:
            if batch.kind is not Kind.TRAIN:
                raise ValueError(f"batch {batch} is not a training batch")
            if self.done(batch):
                raise ValueError(f"batch {batch} is done already")
        if len(set(batches)) != len(batches):
            raise ValueError(f"a batch comes twice in one step: {', '.join(map(str, sorted(batches)))}")
        for batch in trained:
            self._trained.setdefault(batch.number, Ranges()).add(batch.index)
        for batch in batches:
            self._done.setdefault(batch.number, Ranges()).add(batch.index)
        self._listed.update(listed)

    def done(self, batch: BatchId) -> bool:
        """Whether the batch is trained or listed."""
        return batch.kind is Kind.TRAIN and self.done_at(batch.number, batch.index)

    def done_at(self, epoch: int, index: int) -> bool:
        ranges = self._done.get(epoch)
        return ranges is not None and index in ranges

    def trained(self, batch: BatchId) -> bool:
        ranges = self._trained.get(batch.number)
        return batch.kind is Kind.TRAIN and ranges is not None and batch.index in ranges

    @property
    def listed(self) -> Mapping[BatchId, str]:
        """The listed batches and why, in the order in which they were listed."""
        return MappingProxyType(self._listed)

    def trained_count(self) -> int:
        return sum(map(len, self._trained.values()))

    def done_count(self, epoch: int | None = None) -> int:
        """Batches trained or listed, in one epoch or in all."""
        if epoch is not None:
            return len(self._done.get(epoch, ()))
        return sum(map(len, self._done.values()))

    def trained_ids(self, epoch: int) -> Iterator[BatchId]:
        """The epoch's trained batches, ascending."""
        for start, stop in self._trained.get(epoch, Ranges()).pairs():
            yield from (BatchId(Kind.TRAIN, epoch, index) for index in range(start, stop))

    def trained_epochs(self) -> list[int]:
        """Epochs with a trained batch, ascending."""
        return sorted(self._trained)

    def undone(self, epoch: int, batches: int) -> Iterator[int]:
        """The indices below `batches` that are not done in the epoch, ascending."""
        return self._done.get(epoch, Ranges()).gaps(batches)

    def lowest_undone(self, plan: Epochs, epoch: int) -> BatchId | None:
        """The epoch's first batch that is not done; None if all are."""
        index = next(self.undone(epoch, plan.batches(epoch)), None)
        return None if index is None else BatchId(Kind.TRAIN, epoch, index)

    def complete(self, plan: Epochs) -> bool:
        """Whether every batch of the plan is done."""
        return all(self.lowest_undone(plan, epoch) is None for epoch in range(plan.epochs))

    def copy(self) -> "Ledger":
        return Ledger.from_json(self.to_json())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ledger):
            return NotImplemented
        return self._trained == other._trained and self._listed == other._listed

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"<Ledger: {self.trained_count()} trained, {len(self._listed)} listed>"

    def to_json(self) -> dict[str, Any]:
        """`{"trained": {"0": [[first, past last], ...]}, "listed": [[epoch, index, reason], ...]}`, by epoch."""
        trained = {str(epoch): [list(pair) for pair in self._trained[epoch].pairs()] for epoch in sorted(self._trained)}
        return {"trained": trained, "listed": [[b.number, b.index, reason] for b, reason in self._listed.items()]}

    @classmethod
    def from_json(cls, body: Any) -> "Ledger":
        """The ledger in `to_json`'s form; LedgerInvalid if it is anything else."""
        if not isinstance(body, dict) or body.keys() != {"trained", "listed"}:
            raise LedgerInvalid("ledger: an object with trained and listed was expected")
        ledger = cls()
        if not isinstance(body["trained"], dict) or not isinstance(body["listed"], list):
            raise LedgerInvalid("ledger: trained must be an object, listed a list")
        for name, pairs in body["trained"].items():
            if not name.isascii() or not name.isdigit() or name != str(int(name)) or int(name) > MAX_NUMBER:
                raise LedgerInvalid(f"ledger: {name[:40]!r} is no epoch")
            ledger._trained[int(name)] = Ranges.from_pairs(pairs, f"ledger: epoch {name}")
            ledger._done[int(name)] = Ranges.from_pairs(pairs, f"ledger: epoch {name}")
        for entry in body["listed"]:
            ledger.record((), dict([_listed(entry, ledger)]))
        return ledger


def _listed(entry: Any, ledger: Ledger) -> tuple[BatchId, str]:
    well_formed = isinstance(entry, list) and [type(part) for part in entry] == [int, int, str]
    if not well_formed or not (0 <= entry[0] <= MAX_NUMBER and 0 <= entry[1] <= MAX_INDEX):
        raise LedgerInvalid(f"ledger: listed: {str(entry)[:80]} is not [epoch, index, reason]")
    batch = BatchId(Kind.TRAIN, entry[0], entry[1])
    if ledger.done(batch):
        raise LedgerInvalid(f"ledger: batch {batch} is trained and listed, or listed twice")
    return batch, entry[2]


class Ranges:
    """A set of indices kept as disjoint ranges, ascending and with gaps between them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    @classmethod
    def from_pairs(cls, pairs: Any, where: str) -> "Ranges":
        """From `[[first, past last], ...]`; LedgerInvalid if the pairs are not ascending with gaps between them."""
        ranges, last = cls(), -1
        if not isinstance(pairs, list) or not pairs:
            raise LedgerInvalid(f"{where}: a list of ranges was expected")
        for pair in pairs:
            if not isinstance(pair, list) or [type(end) for end in pair] != [int, int]:
                raise LedgerInvalid(f"{where}: {str(pair)[:80]} is not [first, past last]")
            start, stop = pair
            if not last < start < stop <= MAX_INDEX + 1:
                raise LedgerInvalid(f"{where}: range {pair} is empty, or overlaps or touches the one before it")
            ranges._starts.append(start)
            ranges._stops.append(stop)
            last = stop
        return ranges

    def add(self, index: int) -> None:
        """Put in an index that is not in it."""
        at = bisect_right(self._starts, index)  # the range before the index is at - 1
        joins_left = at > 0 and self._stops[at - 1] == index
        joins_right = at < len(self._starts) and self._starts[at] == index + 1
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif joins_left:
            self._stops[at - 1] = index + 1
        elif joins_right:
            self._starts[at] = index
        else:
            self._starts.insert(at, index)
            self._stops.insert(at, index + 1)

    def __contains__(self, index: int) -> bool:
        at = bisect_right(self._starts, index) - 1
        return at >= 0 and index < self._stops[at]

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and (self._starts, self._stops) == (other._starts, other._stops)

    __hash__ = None  # type: ignore[assignment]

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(first, past last) of each range, ascending."""
        return zip(self._starts, self._stops, strict=True)

    def gaps(self, stop: int) -> Iterator[int]:
        """The indices from 0 to stop - 1 that are not in it, ascending."""
        at = 0
        for start, past in self.pairs():
            yield from range(at, min(start, stop))
            at = past
            if at >= stop:
                return
        yield from range(at, stop)
