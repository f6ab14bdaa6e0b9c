"""What the feed remembers between decisions: its grants to ranks, its assignments to workers, who it can reach.

None of it is needed by the next trainer: it starts empty, and what is not in the checkpoint is found in the rings
again. Transitions happen on messages and on the actions of `decide`, without sockets or rings, so that tests can drive
them through any schedule.

A grant's life: GIVEN when decided; REFUSED, LISTED or ACCEPTED when its rank says so or asks for more. Grants end with
their phase; their places stay untouchable (`lagging`) until the rank has released them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..common.batch import BatchId, Kind
from ..common.errors import PacelineError
from ..common.ring import RingScan, SlotState
from ..common.wire import Done, Exhausted, RankWant, Refused, Take
from .feed import (
    Action,
    Assign,
    Assignment,
    FeedPlan,
    Free,
    Give,
    GiveExhausted,
    Grant,
    Outcome,
    Phase,
    Place,
    Reap,
    Request,
    Resend,
    View,
    WorkerHint,
    phase_after,
    phase_size,
)
from .ledger import Ledger


class FeedBroken(PacelineError):
    """A rank reports what cannot be: a fault in the trainer. The run must stop at its last checkpoint."""


@dataclass
class Counters:
    """Of this trainer's life, for status and log."""

    assigned: int = 0
    urgent: int = 0
    resent: int = 0
    given: int = 0
    refused: int = 0
    listed: int = 0
    reaped: int = 0
    duplicates: int = 0  # READY records freed because another copy is held, done or kept
    stale: int = 0  # READY records freed because their plan or evaluation has passed
    evicted: int = 0
    removed_rings: int = 0
    malformed: int = 0
    unroutable: int = 0


class FeedState:
    """The feed's memory for one trainer.

    ledger: as of the checkpoint that was resumed; copied, and kept up to date. phase: what the ranks start with, None
    if nothing is left to do. ranks: M. trainer: this trainer's incarnation, which is also the feed's id. FeedBroken if
    the ledger is not what the steps before the phase have done.
    """

    def __init__(
        self,
        plan: FeedPlan,
        ledger: Ledger,
        phase: Phase | None,
        *,
        trainer: int,
        ranks: int,
        strict: bool,
        prefetch: int,
    ) -> None:
        self.plan = plan
        self.ledger = ledger.copy()
        self.phase = phase
        self.trainer = trainer
        self.ranks = ranks
        self.strict = strict
        self.prefetch = prefetch
        self.counters = Counters()
        self.workers: dict[str, WorkerHint] = {}
        self._assignments: dict[tuple[int, str, int], Assignment] = {}
        self._grants: dict[Phase, list[Grant]] = {}
        self._exhausted: dict[tuple[Phase, int], int] = {}  # (phase, rank) -> index
        self._requests: dict[int, Request] = {}  # by rank, in order of arrival
        self._lagging: set[Place] = set()
        self._refusals: dict[int, str] = {}  # batch -> worker of the refused record
        self._check_start()

    def _check_start(self) -> None:
        plan = self.plan
        steps = plan.total_steps if self.phase is None else self.phase.number
        for epoch in range(plan.epochs):
            within = max(0, steps - plan.first_step(epoch))
            done = min(plan.batches(epoch), within * plan.batches_per_step)
            if self.ledger.done_count(epoch) != done:
                raise FeedBroken(
                    f"the ledger does not fit step {steps}: it has {self.ledger.done_count(epoch)} batches of epoch "
                    f"{epoch} done, the plan {done}"
                )

    def view(self, rings: Sequence[RingScan]) -> View:
        """What `decide` needs, with rings scanned after the last message was heard."""
        if self._lagging:
            ready = {
                Place(scan.worker, scan.ring_id, slot.index, slot.seq)
                for scan in rings
                for slot in scan.slots
                if slot.state is SlotState.READY
            }
            self._lagging &= ready
        return View(
            plan=self.plan,
            ledger=self.ledger,
            phase=self.phase,
            strict=self.strict,
            ranks=self.ranks,
            prefetch=self.prefetch,
            rings=rings,
            workers=self.workers,
            assignments=self._assignments.values(),
            grants=self._grants,
            lagging=self._lagging,
            requests=tuple(self._requests.values()),
            refused_by=self._refusals,
        )

    @property
    def waiting_ranks(self) -> list[int]:
        """Ranks whose request is not answered yet."""
        return sorted(self._requests)

    # ---- what ranks say

    def want(self, message: RankWant) -> Take | Exhausted | None:
        """Note a rank's request; the answer if it was given before (rule 10), else None: `decide` will answer it."""
        phase = self._phase_of(message.kind, message.number)
        if phase is None or message.rank >= self.ranks or message.trainer != self.trainer:
            return None
        if self.phase is None or phase.place < self.phase.place:
            return Exhausted(self.trainer, phase.kind, phase.number, message.index)
        if phase not in (self.phase, phase_after(self.plan, self.phase)):
            return None
        mine = [grant for grant in self._grants.get(phase, ()) if grant.rank == message.rank]
        if message.index < len(mine):
            return self._take(phase, mine[message.index])
        if message.index > len(mine):
            return None
        self._hear_outcomes(message, phase)
        if self._exhausted.get((phase, message.rank)) == message.index:
            return Exhausted(self.trainer, phase.kind, phase.number, message.index)
        request = Request(message.rank, phase, message.index)
        if self._requests.get(message.rank) != request:
            self._requests.pop(message.rank, None)  # to the end of the queue
            self._requests[message.rank] = request
        return None

    def _phase_of(self, kind: int, number: int) -> Phase | None:
        return Phase(Kind(kind), number) if kind in (Kind.EVAL, Kind.TRAIN) else None

    def _hear_outcomes(self, message: RankWant, phase: Phase) -> None:
        """A request tells that those before it were accepted, but for the refused ones that it names."""
        assert self.phase is not None
        for heard in {self.phase, phase}:
            for at, grant in enumerate(self._grants.get(heard, ())):
                if grant.rank == message.rank and grant.outcome is Outcome.GIVEN:
                    if heard == phase and grant.index in message.refused:
                        self._refuse(heard, at)
                    else:
                        self._grants[heard][at] = replace(grant, outcome=Outcome.ACCEPTED)

    def refused(self, message: Refused) -> bool:
        """Note that a rank refused a record; False if this is known or not about a record it was given."""
        phase = self._phase_of(message.kind, message.number)
        if phase is None or message.trainer != self.trainer:
            return False
        for at, grant in enumerate(self._grants.get(phase, ())):
            if (grant.rank, grant.index, grant.batch) == (message.rank, message.index, message.batch):
                if grant.outcome is not Outcome.GIVEN:
                    return False
                self._refuse(phase, at)
                return True
        return False

    def _refuse(self, phase: Phase, at: int) -> None:
        """Back to need, or listed by its rank if the batch was refused before."""
        grant = self._grants[phase][at]
        outcome = Outcome.LISTED if grant.refusals else Outcome.REFUSED
        self._grants[phase][at] = replace(grant, outcome=outcome)
        self._refusals[grant.batch] = grant.place.worker
        self.counters.refused += 1
        self.counters.listed += outcome is Outcome.LISTED

    def done(self, message: Done) -> bool:
        """End the current phase; False if the message is about another. FeedBroken if it does not add up."""
        if message.trainer != self.trainer or self.phase != self._phase_of(message.kind, message.number):
            return False
        assert self.phase is not None
        trained = [BatchId.unpack(word) for word in message.trained]
        listed = {BatchId.unpack(one.batch): one.reason for one in message.listed}
        self._check_done(self.phase, trained, list(listed))
        if self.phase.kind is Kind.TRAIN:
            self.ledger.record(trained, listed)
        self._lagging.update(grant.place for grant in self._grants.pop(self.phase, ()))
        for batch in (*message.trained, *(one.batch for one in message.listed)):
            self._refusals.pop(batch, None)
        self._exhausted = {key: index for key, index in self._exhausted.items() if key[0] != self.phase}
        self._requests = {rank: request for rank, request in self._requests.items() if request.phase != self.phase}
        self.phase = phase_after(self.plan, self.phase)
        return True

    def _check_done(self, phase: Phase, trained: list[BatchId], listed: list[BatchId]) -> None:
        """Every record of the phase was given, and each is trained or listed; the ranks did nothing else."""
        given = {g.batch: g.outcome for g in self._grants.get(phase, ()) if g.outcome is not Outcome.REFUSED}
        said = sorted(batch.pack() for batch in (*trained, *listed))
        refused = {batch for batch, outcome in given.items() if outcome is Outcome.LISTED}
        whole = len(given) == phase_size(self.plan, phase)
        if phase.kind is Kind.EVAL and whole and set(said) <= given.keys():
            return  # an evaluation's batches are in no ledger
        if not whole or said != sorted(given) or refused & {batch.pack() for batch in trained}:
            raise FeedBroken(
                f"{phase.kind.name.lower()} phase {phase.number}: ranks report {_names(said)} as done, "
                f"they were given {_names(sorted(given))} of {phase_size(self.plan, phase)}"
            )

    def _take(self, phase: Phase, grant: Grant) -> Take:
        place = grant.place
        return Take(
            trainer=self.trainer,
            kind=phase.kind,
            number=phase.number,
            index=grant.index,
            worker=place.worker,
            ring=place.ring,
            slot=place.slot,
            seq=place.seq,
            batch=grant.batch,
            refusals=grant.refusals,
        )

    # ---- what workers say

    def heard(self, worker: str, incarnation: int, held: Iterable[int], rate: float | None, now: float) -> None:
        """Note a worker's Hello or Want. `rate` in tokens/s; None leaves the last one."""
        before = self.workers.get(worker)
        if rate is None:
            rate = before.tokens_per_s if before and before.incarnation == incarnation else 0.0
        self.workers[worker] = WorkerHint(incarnation, frozenset(held), now, rate)

    def forget(self, worker: str) -> None:
        """The worker's ring is gone."""
        self.workers.pop(worker, None)

    # ---- what was decided

    def apply(self, action: Action, now: float) -> Take | Exhausted | None:
        """Note an action of `decide`, and return what is to be sent to its rank, if it answers one."""
        counters = self.counters
        match action:
            case Give(request, place, batch):
                refusals = int(batch in self._refusals)
                grant = Grant(request.rank, request.index, place, batch, refusals, Outcome.GIVEN)
                self._grants.setdefault(request.phase, []).append(grant)
                del self._requests[request.rank]
                counters.given += 1
                return self._take(request.phase, grant)
            case GiveExhausted(request):
                self._exhausted[request.phase, request.rank] = request.index
                del self._requests[request.rank]
                return Exhausted(self.trainer, request.phase.kind, request.phase.number, request.index)
            case Assign(batch, worker, incarnation, urgent):
                self._assignments[batch, worker, incarnation] = Assignment(batch, worker, incarnation, now)
                counters.assigned += 1
                counters.urgent += urgent
            case Resend(batch, worker, incarnation):
                self._assignments[batch, worker, incarnation] = Assignment(batch, worker, incarnation, now)
                counters.resent += 1
            case Reap(assignment):
                del self._assignments[assignment[:3]]
                counters.reaped += 1
            case Free(_, _, why):
                counters.evicted += why == "evicted"
                counters.duplicates += why in ("held", "done", "duplicate")
                counters.stale += why in ("evaluation", "foreign")
            case _:
                pass
        return None


def _names(words: list[int]) -> str:
    return ", ".join(str(BatchId.unpack(word)) for word in words[:8]) + (", ..." if len(words) > 8 else "") or "nothing"
