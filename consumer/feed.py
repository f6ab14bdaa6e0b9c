"""The feed's decision: which worker makes which batch, which rank gets which record, what is freed.

`decide` is a pure function of what the feed derives from rings, locks and its own grants (`View`); the fourteen rules
are in docs/design.md and are cited here by number. It runs at each message and each second, and its cost depends on
the records in flight, not on the length of the plan. It sends nothing and touches no ring: `FeedState` and `Feeder`
carry out what it returns.

    need = plan - trained - listed - held by ranks - READY in a ring - assigned to a live incarnation     (rule 1)

Batches are packed words here (common/batch.py), so what a request may be answered with is one range of words.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Any, NamedTuple, Protocol

from ..common.batch import MAX_NUMBER, BatchId, Kind
from ..common.ring import RingScan, SlotState
from .ledger import Ledger

RESEND_AFTER_S = 0.5
"""A batch that a worker doesn't list so long after it was sent is sent again; until then messages may have crossed."""


class FeedPlan(Protocol):
    """The part of a plan (common/plan.py) that the feed uses."""

    batches_per_step: int
    eval_every: int

    @property
    def epochs(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def eval_batches(self) -> int: ...
    def batches(self, epoch: int) -> int: ...
    def first_step(self, epoch: int) -> int: ...
    def epoch_of(self, step: int) -> int: ...
    def step_batches(self, step: int) -> int: ...
    def eval_due(self, steps_done: int) -> bool: ...
    def next_phase(self, kind: Kind, number: int) -> tuple[Kind, int] | None: ...
    def rows(self, batch: BatchId) -> Any: ...


class Phase(NamedTuple):
    """What ranks work on together: a step (TRAIN, number = step) or an evaluation (EVAL, number = steps done)."""

    kind: Kind
    number: int

    @property
    def place(self) -> tuple[int, int]:
        """Sorts phases in the order in which they come: the evaluation after n steps, then step n."""
        return self.number, self.kind


class Place(NamedTuple):
    """Where a record is. Sequence numbers never repeat in a ring, so a place never holds another record."""

    worker: str
    ring: int
    slot: int
    seq: int


class Outcome(Enum):
    """What became of a record that was given to a rank."""

    GIVEN = "given"
    ACCEPTED = "accepted"
    LISTED = "listed"  # refused for the second time: counts as a record of its phase
    REFUSED = "refused"  # its batch is needed again


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a rank's request number `index` of a phase. `refusals`: how often the batch was refused before."""

    rank: int
    index: int
    place: Place
    batch: int
    refusals: int
    outcome: Outcome


class Assignment(NamedTuple):
    """A batch that an incarnation of a worker was told to make, last at `sent_at` (seconds, monotonic)."""

    batch: int
    worker: str
    incarnation: int
    sent_at: float


class WorkerHint(NamedTuple):
    """What a worker last said. Only decides whom to prefer and what to send again."""

    incarnation: int
    held: frozenset[int]
    heard_at: float  # seconds, monotonic
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Request:
    """A rank waits for the answer to its request number `index` of a phase."""

    rank: int
    phase: Phase
    index: int


@dataclass(frozen=True)
class View:
    """All that a decision depends on. Rings of another fingerprint are not in it."""

    plan: FeedPlan
    ledger: Ledger
    phase: Phase | None  # None: the run is finished
    strict: bool
    ranks: int
    prefetch: int
    rings: Sequence[RingScan]
    workers: Mapping[str, WorkerHint]  # those with a route, by name
    assignments: Collection[Assignment]
    grants: Mapping[Phase, Sequence[Grant]]  # of this phase and the next
    lagging: Collection[Place]  # of earlier phases or refused, and not released yet by their rank
    requests: Sequence[Request]  # in order of arrival
    refused_by: Mapping[int, str]  # batch -> the worker whose record of it was refused


class Free(NamedTuple):
    """Free a READY record that no rank holds. `why`: done, held, duplicate, evaluation, foreign or evicted."""

    place: Place
    batch: int
    why: str


class Assign(NamedTuple):
    batch: int
    worker: str
    incarnation: int
    urgent: bool  # beyond the worker's credit (rule 7)


class Resend(NamedTuple):
    batch: int
    worker: str
    incarnation: int


class Give(NamedTuple):
    request: Request
    place: Place
    batch: int


class GiveExhausted(NamedTuple):
    request: Request


class Reap(NamedTuple):
    """An assignment that is over: its owner is dead or retired, its record READY, or its batch no longer needed."""

    assignment: Assignment


class RemoveRing(NamedTuple):
    worker: str
    ring: int


Action = Free | Assign | Resend | Give | GiveExhausted | Reap | RemoveRing
Span = tuple[int, int]  # words from, up to and without


def decide(view: View) -> list[Action]:
    """What to do now, in the order in which it is to be done; [] if there is nothing."""
    decision = _Decision(view)
    decision.sort_records()
    decision.sort_assignments()
    if view.phase is not None:
        decision.answer()
        decision.assign()
        decision.rescue()
        decision.resend()
    decision.remove()
    return decision.actions


def phase_size(plan: FeedPlan, phase: Phase) -> int:
    """Records that a phase takes."""
    return plan.eval_batches if phase.kind is Kind.EVAL else plan.step_batches(phase.number)


def turn(plan: FeedPlan, phase: Phase, rank: int, ranks: int) -> int:
    """The first record of a phase, by its place j in it, that is dealt to the rank: it gets each `ranks`-th from there.

    Records are dealt in turn, and dealing goes on in the next step where it was, so that no rank gets more of an epoch
    than another by more than one record, whatever their number, the size of a step and how fast they ask.
    """
    if phase.kind is Kind.EVAL:
        before = phase.number // max(1, plan.eval_every)
    else:
        epoch = plan.epoch_of(phase.number)
        before = epoch + (phase.number - plan.first_step(epoch)) * plan.batches_per_step
    return (rank - before) % ranks


def share(plan: FeedPlan, phase: Phase, rank: int, ranks: int) -> int:
    """How many records of the phase are the rank's."""
    return len(range(turn(plan, phase, rank, ranks), phase_size(plan, phase), ranks))


def phase_after(plan: FeedPlan, phase: Phase) -> Phase | None:
    following = plan.next_phase(*phase)
    return None if following is None else Phase(*following)


def eval_after(plan: FeedPlan, steps_done: int) -> int | None:
    """The number of the first evaluation after more than `steps_done` steps; None if there is none."""
    due = {plan.total_steps}
    if plan.eval_every:
        due.add((steps_done // plan.eval_every + 1) * plan.eval_every)
    return min((number for number in due if number > steps_done and plan.eval_due(number)), default=None)


def train_records(plan: FeedPlan, start: int, stop: int, enough: int) -> int:
    """Records of the steps from `start` up to `stop`; counting ends once there are `enough`."""
    records = 0
    while start < stop and records < enough:
        epoch = plan.epoch_of(start)
        first, end = plan.first_step(epoch), min(stop, plan.first_step(epoch + 1))
        most = plan.batches(epoch)
        upto = [min(most, (step - first) * plan.batches_per_step) for step in (start, end)]
        records += upto[1] - upto[0]
        start = end
    return records


def _span(kind: Kind, number: int, batches: int) -> Span:
    first = BatchId(kind, number, 0).pack()
    return first, first + batches


class _RingState:
    """A ring as this decision sees and changes it."""

    def __init__(self, scan: RingScan, hint: WorkerHint | None, mean_rate: float) -> None:
        self.scan = scan
        self.live = scan.alive and not scan.retired
        self.reachable = self.live and hint is not None and hint.incarnation == scan.incarnation
        self.cost = mean_rate / (hint.tokens_per_s or mean_rate) if hint else 1.0  # of a batch, next to other workers
        self.ready: dict[int, Place] = {}  # untaken and kept
        self.made: set[int] = set()  # batches of all its READY records
        self.open = 0  # slots that can take a new record
        self.taken = 0  # slots that a rank will free
        self.assigned = 0

    @property
    def load(self) -> float:
        """When its worker would have made a further batch."""
        return (self.assigned + 1) * self.cost

    @property
    def stuck(self) -> bool:
        """Nothing but an eviction can give its worker a slot."""
        return not self.open and not self.taken


class _Decision:
    def __init__(self, view: View) -> None:
        self.view = view
        self.actions: list[Action] = []
        self.plan = view.plan
        rates = [hint.tokens_per_s for hint in view.workers.values() if hint.tokens_per_s > 0]
        mean = sum(rates) / len(rates) if rates else 1.0
        self.rings = {scan.worker: _RingState(scan, view.workers.get(scan.worker), mean) for scan in view.rings}
        self.ready: dict[int, Place] = {}
        self.assigned: dict[int, list[_RingState]] = {}
        self.kept: list[Assignment] = []
        self.starving: Counter[Span] = Counter()
        self.given = {
            phase: [(grant.rank, grant.batch) for grant in grants if grant.outcome is not Outcome.REFUSED]
            for phase, grants in view.grants.items()
        }
        self.held = {batch for given in self.given.values() for _, batch in given}
        self.taken = {g.place for grants in view.grants.values() for g in grants} | set(view.lagging)
        phase = view.phase
        self.following = phase and phase_after(view.plan, phase)
        self.coming_eval = None if phase is None else eval_after(view.plan, phase.number)
        self.epoch = self._first_epoch()

    def _first_epoch(self) -> int:
        """The epoch of the current step, or of the one after the current evaluation."""
        phase = self.view.phase
        if phase is None or phase.number >= self.plan.total_steps:
            return self.plan.epochs
        return self.plan.epoch_of(phase.number)

    # ---- what is there (rules 1, 2, 3 and 5)

    def _unwanted(self, batch: int) -> str | None:
        """Why no further record of the batch is wanted; None if one is."""
        number, index = batch >> 32 & MAX_NUMBER, batch & 0xFFFFFFFF
        if batch in self.held:
            return "held"
        if batch >> 62 == Kind.EVAL:
            phase = self.view.phase
            under_way = phase is not None and phase == (Kind.EVAL, number)
            if index >= self.plan.eval_batches or not (under_way or number == self.coming_eval):
                return "evaluation"
            return None
        if number >= self.plan.epochs or index >= self.plan.batches(number):
            return "foreign"
        return "done" if number < self.epoch or self.view.ledger.done_at(number, index) else None

    def _too_early(self, scan: RingScan, batch: int) -> str | None:
        """A retired worker's ring is removed once drained: records of a coming evaluation would keep it till then."""
        phase = self.view.phase
        kept = batch >> 62 != Kind.EVAL or (phase is not None and phase.kind is Kind.EVAL)
        return "evaluation" if scan.retired and not scan.alive and not kept else None

    def sort_records(self) -> None:
        """Find the READY records that count; free the others that no rank holds (rule 3)."""
        copies: dict[int, list[tuple[_RingState, Place]]] = {}
        for ring in self.rings.values():
            scan = ring.scan
            for slot in scan.slots:
                if slot.state is not SlotState.READY:
                    ring.open += 1
                    continue
                place = Place(scan.worker, scan.ring_id, slot.index, slot.seq)
                if place in self.taken:
                    ring.taken += 1
                    continue
                ring.made.add(slot.batch)
                if why := self._unwanted(slot.batch) or self._too_early(scan, slot.batch):
                    self._free(ring, place, slot.batch, why)
                else:
                    copies.setdefault(slot.batch, []).append((ring, place))
        for batch, found in copies.items():
            if len(found) > 1:  # a live worker can use the slot of a second copy, a dead one's only stays in the way
                found.sort(key=lambda copy: copy[0].live)
                for ring, place in found[1:]:
                    self._free(ring, place, batch, "duplicate")
            ring, place = found[0]
            ring.ready[batch] = self.ready[batch] = place

    def _free(self, ring: _RingState, place: Place, batch: int, why: str) -> None:
        self.actions.append(Free(place, batch, why))
        ring.open += 1

    def sort_assignments(self) -> None:
        """Keep the assignments that still bring a needed record; end the others (rules 1 and 5)."""
        for assignment in self.view.assignments:
            ring = self.rings.get(assignment.worker)
            live = ring is not None and ring.live and ring.scan.incarnation == assignment.incarnation
            if not live or ring is None or assignment.batch in ring.made or self._unwanted(assignment.batch):
                self.actions.append(Reap(assignment))
                continue
            self.kept.append(assignment)
            self._count(assignment.batch, ring)

    def _count(self, batch: int, ring: _RingState) -> None:
        self.assigned.setdefault(batch, []).append(ring)
        ring.assigned += 1

    # ---- answers to ranks (rules 9, 10 and 11)

    def answer(self) -> None:
        """Answer the requests that can be answered now; note what the others wait for."""
        for request in self.view.requests:
            if self._over(request.phase):
                self.actions.append(GiveExhausted(request))
                continue
            span = self._takeable(request)
            if span is None:
                continue
            batch = min((batch for batch in self.ready if span[0] <= batch < span[1]), default=None)
            if batch is None:
                self.starving[span] += 1
            else:
                self._give(request, batch)

    def _over(self, phase: Phase) -> bool:
        """All records of the current phase are given, and accepted by their ranks."""
        return phase == self.view.phase and self._settled

    @property
    def _settled(self) -> bool:
        phase = self.view.phase
        if phase is None or len(self.given.get(phase, ())) < phase_size(self.plan, phase):
            return False
        grants = self.view.grants.get(phase, ())
        waiting = sum(grant.outcome is Outcome.GIVEN for grant in grants)
        fresh = len(self.given.get(phase, ())) - sum(grant.outcome is not Outcome.REFUSED for grant in grants)
        return not waiting and not fresh

    def _takeable(self, request: Request) -> Span | None:
        """The batches that may answer the request (rule 9); None if it has to wait for other ranks."""
        rank, phase = request.rank, request.phase
        given = self.given.get(phase, [])
        size = phase_size(self.plan, phase)
        mine = sum(1 for one, _ in given if one == rank)
        if phase != self.view.phase and (phase != self.following or mine or not self._settled):
            return None  # one record ahead, once the current phase needs no more
        if len(given) >= size:
            return None
        if phase.kind is Kind.TRAIN and self.view.strict:
            return self._place_in_step(rank, phase, size, {batch for _, batch in given})
        if mine >= share(self.plan, phase, rank, self.view.ranks):
            return None  # the others are kept for slower ranks: a step ends with its last rank
        if phase.kind is Kind.EVAL:
            return _span(Kind.EVAL, phase.number, size)
        epoch = self.plan.epoch_of(phase.number)
        return _span(Kind.TRAIN, epoch, self.plan.batches(epoch))

    def _place_in_step(self, rank: int, phase: Phase, size: int, given: set[int]) -> Span | None:
        """Strict order: each rank gets those dealt to it, and in plan order."""
        epoch = self.plan.epoch_of(phase.number)
        first, _ = _span(Kind.TRAIN, epoch, 0)
        earlier = {batch for other, had in self.given.items() if other != phase for _, batch in had}
        undone = (first + index for index in self.view.ledger.undone(epoch, self.plan.batches(epoch)))
        step = islice((b for b in undone if phase == self.view.phase or b not in earlier), size)
        dealt = islice(step, turn(self.plan, phase, rank, self.view.ranks), None, self.view.ranks)
        batch = next((b for b in dealt if b not in given), None)
        return None if batch is None else (batch, batch + 1)

    def _give(self, request: Request, batch: int) -> None:
        place = self.ready.pop(batch)
        self.actions.append(Give(request, place, batch))
        self.given.setdefault(request.phase, []).append((request.rank, batch))
        self.held.add(batch)
        ring = self.rings[place.worker]
        del ring.ready[batch]
        ring.taken += 1

    # ---- work for workers (rules 6, 7 and 8)

    def assign(self) -> None:
        """Hand out needed batches, lowest first, to the workers with credit; to the one that will be done first."""
        able = [(ring.load, at, ring) for at, ring in enumerate(self.rings.values()) if self._credit(ring) > 0]
        heapify(able)
        needs = self._needs()
        while able and (batch := next(needs, None)) is not None:
            best = heappop(able)
            if able and best[2].scan.worker == self.view.refused_by.get(batch):
                best = heapreplace(able, best)  # another worker is to make it this time
            _, at, ring = best
            self._assign(batch, ring, urgent=False)
            if self._credit(ring) > 0:
                heappush(able, (ring.load, at, ring))

    def _assign(self, batch: int, ring: _RingState, *, urgent: bool) -> None:
        self.actions.append(Assign(batch, ring.scan.worker, ring.scan.incarnation, urgent))
        self._count(batch, ring)

    def _credit(self, ring: _RingState) -> int:
        """Batches that the ring's worker may get (rule 6): it prefetches some and makes one."""
        if not ring.reachable:
            return 0
        return min(ring.open, self.view.prefetch + 1) - ring.assigned

    def _missing(self, span: Span) -> Iterator[int]:
        """The needed batches of a span of wanted ones, ascending."""
        kind, number = span[0] >> 62, span[0] >> 32 & MAX_NUMBER
        base = span[0] & ~0xFFFFFFFF
        first, stop = span[0] - base, span[1] - base
        whole_epoch = kind == Kind.TRAIN and first == 0
        for index in self.view.ledger.undone(number, stop) if whole_epoch else range(first, stop):
            batch = base + index
            if batch not in self.ready and batch not in self.assigned and batch not in self.held:
                yield batch

    def _needs(self) -> Iterator[int]:
        """All needed batches in the order in which ranks will want them, evaluations in their place."""
        phase, plan = self.view.phase, self.plan
        if phase is None:
            return
        if phase.kind is Kind.EVAL:
            yield from self._missing(_span(Kind.EVAL, phase.number, plan.eval_batches))
        spans = (_span(Kind.TRAIN, epoch, plan.batches(epoch)) for epoch in range(self.epoch, plan.epochs))
        train = (batch for span in spans for batch in self._missing(span))
        if self.coming_eval is not None:
            yield from islice(train, self._train_until(phase, self.coming_eval))
            yield from self._missing(_span(Kind.EVAL, self.coming_eval, plan.eval_batches))
        yield from train

    def _train_until(self, phase: Phase, evaluation: int) -> int:
        """Training batches to hand out before the evaluation's: what it takes to reach it, less what is on its way."""
        underway = sum(batch >> 62 == Kind.TRAIN for batch in (*self.ready, *self.assigned, *self.held))
        slots = sum(len(ring.scan.slots) for ring in self.rings.values())
        return max(0, train_records(self.plan, phase.number, evaluation, underway + slots) - underway)

    def rescue(self) -> None:
        """See to it that what ranks wait for is made, whatever fills the rings (rules 7 and 8)."""
        for span, waiting in self.starving.items():
            coming = [batch for batch in self.assigned if span[0] <= batch < span[1]]
            for batch in islice(self._missing(span), max(0, waiting - len(coming))):
                ring = self._least_loaded(batch)
                if ring is None:
                    return
                self._assign(batch, ring, urgent=True)
                coming.append(batch)
            makers = [ring for batch in coming for ring in self.assigned[batch]]
            moving = sum(not ring.stuck for ring in makers)
            for ring in makers:
                if moving < waiting and ring.stuck and ring.ready:
                    self._evict(ring)
                    moving += 1

    def _least_loaded(self, batch: int) -> _RingState | None:
        """Who makes the batch beyond credit: rather a worker that has a slot, and another than last time."""
        avoid = self.view.refused_by.get(batch)
        live = [ring for ring in self.rings.values() if ring.reachable]
        return min(live, key=lambda ring: (ring.scan.worker == avoid, ring.stuck, ring.load), default=None)

    def _evict(self, ring: _RingState) -> None:
        batch = max(ring.ready)
        place = ring.ready.pop(batch)
        del self.ready[batch]
        self._free(ring, place, batch, "evicted")

    def resend(self) -> None:
        """Send again what a worker should hold and does not list (rule 6)."""
        for assignment in self.kept:
            hint = self.view.workers.get(assignment.worker)
            if hint is None or hint.incarnation != assignment.incarnation or assignment.batch in hint.held:
                continue
            if hint.heard_at > assignment.sent_at + RESEND_AFTER_S:
                self.actions.append(Resend(assignment.batch, assignment.worker, assignment.incarnation))

    def remove(self) -> None:
        """Remove the rings of workers that were scaled away, once they are drained (rule 13)."""
        for name, ring in self.rings.items():
            if ring.scan.retired and not ring.scan.alive and not ring.ready and not ring.taken:
                self.actions.append(RemoveRing(name, ring.scan.ring_id))
