"""The loop of one rank: records in, gradients together with the other ranks, steps, checkpoints.

    for each phase of the plan (an optimiser step, or an evaluation):
        records   next -> train (accumulate) -> release, until the feed says that the phase has no more for this rank
        gather    batch ids, listed ones with reasons, is all finite, does anyone stop    -> the same on all ranks
        step      sums and gradients are all-reduced; one optimiser step, or the batches are listed
        told      ledger on all ranks alike; rank 0 tells feed and main process, and writes the checkpoint when due

Everything that a checkpoint holds changes in one place, after the gather: so whatever interrupts a phase, this rank's
weights and ledger are those of the last step boundary, and that is what is saved. Imports no torch: the learner does.
"""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..common import paths, wire
from ..common.batch import BatchId, Kind
from ..common.errors import PacelineError
from ..common.faults import point
from ..common.plan import Plan
from ..common.record import RecordMeta
from ..common.runfile import RunFile
from .checkpoint import Checkpointer, CheckpointError, CheckpointState, Outcome, Write
from .group import Group, GroupError
from .job import RankJob, Reports, versions
from .ledger import Ledger
from .source import BadWorker, FeedStopped, Phase, RecordSource
from .stop import StopFlag, StopRequested

RETRY_SECONDS = 5.0
"""Between two attempts to write the last checkpoint of a run."""

FIRST_PHASE: Phase = (Kind.TRAIN, 0)
_EVAL, _CHAIN = "eval_", "tau_chain"  # of the names of an evaluation's figures


class Gaps(Protocol):
    """When the device has nothing to do (stopwatch.py)."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def take(self) -> list[float]: ...


class Learner(Protocol):
    """What a rank trains (learner.py). All ranks make the same calls in the same order, but for their records."""

    @property
    def gaps(self) -> Gaps:
        """To be told of each record of a phase when it is there and when it has been trained."""
        ...

    def prepare(self, meta: RecordMeta, states: memoryview, epoch: int | None) -> None:
        """A record that `train_record`, or with epoch None `eval_record`, will be given after those that were prepared
        before it: what can be done ahead. Called by the source's thread, while this one trains. `states` may be read
        until that call returns or, if it never comes, until `unmap_ring`."""
        ...

    def train_record(self, meta: RecordMeta, states: memoryview, epoch: int, done: float = 0.0) -> None:
        """Add the record's unnormalised gradients and sums; done: the share of the run's steps behind it. On return
        nothing reads `states` any more."""
        ...

    def eval_record(self, meta: RecordMeta, states: memoryview) -> None:
        """Add the record's sums. On return nothing reads `states` any more."""
        ...

    def sums(self) -> NDArray[np.float64]:
        """This rank's sums since the last step or `discard`; added over ranks, they are the phase's."""
        ...

    def reduce(self, group: Group) -> None:
        """Add the gradients up over the ranks."""
        ...

    def reduce_seconds(self) -> float:
        """What the last `reduce` took; asked for after `step`."""
        ...

    def step(self, total: NDArray[np.float64], step: int, total_steps: int) -> tuple[bool, dict[str, Any]]:
        """Step `step` (from 0) with the summed gradients and sums, which it clears. Whether all was finite (if not,
        nothing else has changed), and the step's metrics: numbers or lists of them, the same on all ranks."""
        ...

    def eval_metrics(self, total: NDArray[np.float64]) -> dict[str, Any]:
        """Metrics of an evaluation from its summed sums."""
        ...

    def discard(self) -> None:
        """Clear gradients and sums."""
        ...

    def drafter_config(self) -> dict[str, Any]:
        """For state.json."""
        ...

    def peak_memory(self) -> tuple[int, int]:
        """Most bytes so far, of the GPU: what tensors took, and what the allocator held for them. On a CPU both are the
        resident memory."""
        ...

    def snapshot(self) -> Write:
        """What writes the present weights and optimiser, whatever training does meanwhile."""
        ...

    def restore(self, folder: Path) -> None:
        """Take weights and optimiser from a checkpoint."""
        ...

    def map_ring(self, address: int, size: int) -> None:
        """A ring has been mapped: its records will be read there."""
        ...

    def unmap_ring(self, address: int, size: int) -> None:
        """A ring is about to be unmapped. On return nothing reads it."""
        ...


@dataclass
class Boundary:
    """What a checkpoint holds beside the weights: as of the last completed phase."""

    phase: Phase | None
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    evaluated: int | None = None
    ledger: Ledger = field(default_factory=Ledger)
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, state: CheckpointState) -> "Boundary":
        ledger = Ledger.from_json(state.ledger)
        return cls(state.phase, state.step, state.seconds, state.tokens, state.evaluated, ledger, dict(state.metrics))


@dataclass
class Collected:
    """One rank's part of a phase, as the others are told."""

    batches: list[int] = field(default_factory=list)
    listed: list[list[Any]] = field(default_factory=list)
    finite: bool = True
    stop: str = ""  # why the run stops before this phase is complete: "signal", or what is wrong
    unfit: bool = False  # the reason will be the same after a restart
    last: bool = False  # from rank 0: the run's time is over after this phase
    tokens: int = 0
    data_s: float = 0.0
    compute_s: float = 0.0
    memory: int = 0  # bytes of tensors, at most so far
    reserved: int = 0  # bytes that the allocator held for them, at most so far
    arrived: float = 0.0  # when it was done with its records: CLOCK_MONOTONIC, which a host's processes share

    def account(self, waits: list[float], gaps: list[float]) -> None:
        """Sums the waiting up: that for a record, if the device had nothing to do by then; as computing, if it had.

        waits: seconds until each record, and until there was none. gaps: how long the device had nothing before each
        of them but the first, for which it was idle all the time.
        """
        for wait, gap in zip(waits, [math.inf, *gaps], strict=False):
            self.data_s += min(wait, gap)
            self.compute_s += max(0.0, wait - gap)


@dataclass(frozen=True)
class Ending:
    """Why the loop ended: finished, hours, stopped (by a signal), failed, or unfit: run file, data, target or a
    worker's device have to be changed first, as a trainer that is started again would only end the same way."""

    kind: str
    why: str = ""


class Training:
    """The loop of one rank."""

    def __init__(
        self,
        job: RankJob,
        run: RunFile,
        plan: Plan,
        learner: Learner,
        group: Group,
        source: RecordSource,
        reports: Reports,
        flag: StopFlag,
        boundary: Boundary,
    ):
        self._job, self._run, self._plan = job, run, plan
        self._learner, self._group, self._source = learner, group, source
        self._reports, self._flag = reports, flag
        self._at = boundary
        self._ending: Ending | None = None
        self._skipped = 0  # steps in a row without an update
        self._last_done: wire.Done | None = None
        self._began = self._phase_began = time.monotonic()
        self._before = boundary.seconds
        settings = run.checkpoint
        self._keeper = Checkpointer(
            paths.checkpoint_dir(run), keep_last=settings.keep_last, keep_best=settings.keep_best
        )
        self._updating = 0.0  # seconds of the last update
        self._written = self._asked = (boundary.step, boundary.phase)  # the boundaries of the newest checkpoints
        self._asked_at = time.monotonic()

    def run(self) -> Ending:
        """Train to the end of the plan, of the run's time, or to a stop; then write the last checkpoint.

        Raises:
            CheckpointError: the last checkpoint could not be written, and a signal asks to stop.
        """
        while self._at.phase is not None and self._ending is None:
            self._phase_began = time.monotonic()
            try:
                self._run_phase(*self._at.phase)
            except GroupError as error:  # all talk between ranks comes before anything changes
                self._ending = Ending("stopped") if self._flag.requested else Ending("failed", str(error))
            if self._job.rank == 0:
                self._save_if_due()
        ending = self._ending or Ending("finished")
        self._learner.discard()
        if self._job.rank == 0:
            self._save_last(patient=ending.kind in ("finished", "hours"))
        self._keeper.close()
        return ending

    # A phase

    def _run_phase(self, kind: Kind, number: int) -> None:
        mine = self._collect((kind, number))
        point("rank.collected-not-gathered")
        self._reports.doing("gather")
        mine.arrived = time.monotonic()
        everyone = [Collected(**found) for found in self._group.all_gather(asdict(mine))]
        if stopped := [one for one in everyone if one.stop]:
            self._ending = _ending_of(stopped)
            return
        point("rank.gathered-not-stepped")
        self._reports.doing("step")
        batches = [BatchId.unpack(word) for one in everyone for word in one.batches]
        listed = {BatchId.unpack(word): reason for one in everyone for word, reason in one.listed}
        self._check_whole(kind, number, batches, listed)
        if kind is Kind.TRAIN:
            values = self._step(number, batches, listed, all(one.finite for one in everyone))
            self._at.step = number + 1
            self._at.tokens += sum(one.tokens for one in everyone)
        else:
            values = self._evaluation(number)
        self._at.phase = self._plan.next_phase(kind, number)
        self._at.seconds = self._before + time.monotonic() - self._began
        self._tell(kind, number, batches, listed, values | self._rates(everyone, values.get("reduce_s")))
        if everyone[0].last and self._at.phase is not None:
            self._ending = Ending("hours", f"trainer.max_hours ({self._run.trainer.max_hours}) is over")

    def _collect(self, phase: Phase) -> Collected:
        """Train or evaluate this rank's records of the phase; a stop leaves it incomplete, and it will be dropped."""
        mine, waits = Collected(), list[float]()
        try:
            self._take_records(phase, mine, waits)
        except StopRequested:
            mine.stop = "signal"
        except (BadWorker, FeedStopped) as error:
            mine.stop, mine.unfit = str(error), isinstance(error, BadWorker)
        mine.listed = [[batch.pack(), reason] for batch, reason in self._source.listed(phase)]
        asked = time.monotonic()
        mine.finite = bool(np.isfinite(self._learner.sums()).all())
        mine.compute_s += time.monotonic() - asked  # a GPU may be at most of the records' work until then
        mine.account(waits, self._learner.gaps.take())
        mine.memory, mine.reserved = self._learner.peak_memory()
        hours = self._run.trainer.max_hours
        mine.last = hours is not None and self._before + time.monotonic() - self._began >= 3600 * hours
        return mine

    def _take_records(self, phase: Phase, mine: Collected, waits: list[float]) -> None:
        kind, number = phase
        while True:
            self._reports.doing("data")
            asked = time.monotonic()
            record = self._source.next(phase, self._waiting)
            given = time.monotonic()
            self._learner.gaps.begin()
            waits.append(given - asked)
            if record is None:
                return
            self._reports.doing("compute")
            with self._flag.interruptible():
                if kind is Kind.TRAIN:
                    done = number / max(1, self._plan.total_steps)
                    self._learner.train_record(record.meta, record.states, self._plan.epoch_of(number), done)
                else:
                    self._learner.eval_record(record.meta, record.states)
            self._learner.gaps.end()
            self._source.release(record)
            mine.batches.append(record.batch.pack())
            mine.tokens += record.tokens
            mine.compute_s += time.monotonic() - given

    def _waiting(self) -> None:
        """Called while there is no record. Signals are not let in there: the lock that it waits on could stay held."""
        if self._flag.requested is not None:
            raise StopRequested
        self._reports.alive()

    def _check_whole(self, kind: Kind, number: int, batches: list[BatchId], listed: dict[BatchId, str]) -> None:
        """A phase holds exactly its records, each once and none done before: else nothing may be learnt from it."""
        everything = [*batches, *listed]
        wanted = self._plan.eval_batches if kind is Kind.EVAL else self._plan.step_batches(number)
        group = number if kind is Kind.EVAL else self._plan.epoch_of(number)
        strangers = [b for b in everything if (b.kind, b.number) != (kind, group) or self._at.ledger.done(b)]
        if len(everything) != wanted or len(set(everything)) != wanted or strangers:
            raise PacelineError(
                f"{kind.name.lower()} phase {number} was given {len(everything)} records, not {wanted} of its own: "
                f"{', '.join(map(str, sorted(everything)))}"
            )

    def _step(self, step: int, batches: list[BatchId], listed: dict[BatchId, str], finite: bool) -> dict[str, Any]:
        """One optimiser step, or its batches are moved to `listed`; the ledger follows."""
        values: dict[str, Any] = {}
        if finite and batches:
            total = self._learner.sums()
            self._group.all_reduce(total)
            self._learner.reduce(self._group)
            asked = time.monotonic()
            finite, values = self._learner.step(total, step, self._plan.total_steps)
            self._updating = time.monotonic() - asked
            values["reduce_s"] = self._learner.reduce_seconds() if self._group.world > 1 else 0.0
            point("rank.stepped-not-recorded")
        else:
            self._learner.discard()
        if not finite:
            listed |= dict.fromkeys(batches, f"loss or gradient of step {step} was not finite")
            batches.clear()
        self._at.ledger.record(batches, listed)
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped >= self._run.trainer.skip_limit:
            self._ending = Ending(
                "unfit",
                f"{self._skipped} steps in a row had a loss or gradient that was not finite (trainer.skip_limit); "
                f"their batches are listed and the weights are those before step {step + 1 - self._skipped}",
            )
        return values | {"skipped": float(not finite)}

    def _evaluation(self, number: int) -> dict[str, Any]:
        total = self._learner.sums()
        self._group.all_reduce(total)
        self._learner.discard()
        self._at.evaluated = number
        return self._learner.eval_metrics(total)

    def _rates(self, everyone: list[Collected], reduction: float | None) -> dict[str, Any]:
        """Shares are of the phase, on this rank's clock. reduction: seconds, of a step."""
        wall = max(1e-9, time.monotonic() - self._phase_began)
        # The update waits for the sum of gradients before it, which has a figure of its own.
        updating, self._updating = max(0.0, self._updating - (reduction or 0.0)), 0.0
        busy = updating + sum(one.compute_s for one in everyone) / len(everyone)
        waited = sum(one.data_s for one in everyone) / len(everyone)
        last = max(one.arrived for one in everyone)
        idle = [min(1.0, (last - one.arrived) / wall) for one in everyone]
        records, tokens = sum(len(one.batches) for one in everyone), sum(one.tokens for one in everyone)
        return {
            "seconds": wall,
            "records": records,
            "tokens": tokens,
            "total_tokens": self._at.tokens,
            "tokens_per_s": tokens / wall,
            "records_per_s": records / wall,
            "wait_data": min(1.0, waited / wall),
            "wait_gpu": min(1.0, busy / wall),
            "wait_ranks": sum(idle) / len(idle),
            **({} if reduction is None else {"reduce_share": min(1.0, reduction / wall)}),
            "rank_records": [len(one.batches) for one in everyone],
            "rank_wait": [min(1.0, one.data_s / wall) for one in everyone],
            "rank_idle": idle,
            "peak_memory": max(one.memory for one in everyone),
            "reserved_memory": max(one.reserved for one in everyone),
        }

    def _tell(
        self, kind: Kind, number: int, batches: list[BatchId], listed: dict[BatchId, str], values: dict[str, Any]
    ) -> None:
        """The feed learns what is done, the main process also how it went."""
        point("rank.stepped-not-told")
        self._source.leave((kind, number))
        if (anchors := values.get("anchors")) is not None:
            values["anchors_per_s"] = anchors / values["seconds"]
        numbers = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
        kept = {_metric_name(kind, key): value for key, value in numbers.items() if math.isfinite(value)}
        # None of the phase before of its kind stays: it would pass for a figure of these weights.
        others = {key: value for key, value in self._at.metrics.items() if _of_evaluation(key) != (kind is Kind.EVAL)}
        self._at.metrics = others | kept
        if self._job.rank:
            return
        done = wire.Done(
            rank=0,
            trainer=self._job.trainer,
            kind=int(kind),
            number=number,
            trained=tuple(batch.pack() for batch in batches),
            listed=tuple(wire.Listed(batch.pack(), reason) for batch, reason in listed.items()),
            metrics=numbers,
        )
        if self._at.phase is None:
            self._last_done = done  # the feed then lets the workers go: not before the run is safe on disk
        else:
            self._source.done(done)
            point("rank.told")
        values["elapsed"] = self._at.seconds
        self._reports.phase(kind, number, values, listed)

    # Checkpoints (rank 0)

    def _save_if_due(self) -> None:
        self._note(self._keeper.poll())
        phase, settings = self._at.phase, self._run.checkpoint
        evaluation_next = phase is not None and phase[0] is Kind.EVAL  # its tau_chain decides what is kept
        if self._keeper.busy or evaluation_next or phase is None or self._ending is not None:
            return
        every, minutes = settings.every_steps, settings.every_minutes
        by_steps = every is not None and self._at.step // every > self._asked[0] // every
        by_time = minutes is not None and time.monotonic() - self._asked_at >= 60 * minutes
        if by_steps or (by_time and self._at.step > self._asked[0]):
            self._save()

    def _save(self) -> None:
        self._reports.doing("saving")
        self._asked, self._asked_at = (self._at.step, self._at.phase), time.monotonic()
        self._keeper.save(self._state(), self._learner.snapshot())

    def _note(self, outcome: Outcome | None) -> str:
        """Report how a write ended; why it failed, or nothing."""
        if outcome is None:
            return ""
        self._reports.checkpoint(outcome)
        if outcome.path is None:
            return outcome.error
        self._written = self._asked
        return ""

    def _save_last(self, patient: bool) -> None:
        """patient: where it cannot be written, as on a full disk, it is tried until it can, or a signal comes. Started
        again, the trainer would only train the same steps anew, and stand before the same disk."""
        self._await_save()
        while self._written != (self._at.step, self._at.phase):
            self._save()
            if error := self._await_save():
                if not patient or self._flag.requested is not None:
                    raise CheckpointError(error)
                print(f"trying again in {RETRY_SECONDS:.0f} s: only this checkpoint is missing", flush=True)
                self._pause(RETRY_SECONDS)
        if self._last_done is not None:
            point("rank.safe-not-told")
            self._source.done(self._last_done)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._flag.requested is None:
            self._reports.alive()
            time.sleep(0.2)

    def _await_save(self) -> str:
        """Wait for the write in progress, if there is one; why it failed, or nothing."""
        self._reports.doing("saving")
        outcome = None
        while self._keeper.pending and (outcome := self._keeper.wait(1.0)) is None:
            self._reports.alive()
        return self._note(outcome)

    def _state(self) -> CheckpointState:
        at, run = self._at, self._run
        return CheckpointState(
            name=run.name,
            run_id=self._job.run_id,
            step=at.step,
            phase=at.phase,
            seconds=at.seconds,
            tokens=at.tokens,
            evaluated=at.evaluated,
            ledger=at.ledger.to_json(),
            rng={"seed": run.trainer.seed},
            fingerprint=self._job.fingerprint,
            drafter=self._learner.drafter_config(),
            run=run.model_dump(mode="json"),
            versions=versions(),
            metrics=dict(at.metrics),
        )


def _ending_of(stopped: list[Collected]) -> Ending:
    """What ranks that stop in the middle of a phase make of it together; the same on all of them."""
    one = next((one for one in stopped if one.unfit), stopped[0])
    if one.unfit:
        return Ending("unfit", one.stop)
    return Ending("stopped") if one.stop == "signal" else Ending("failed", one.stop)


def _metric_name(kind: Kind, key: str) -> str:
    """In state.json an evaluation's figures stand beside a step's; tau_chain is only measured in evaluations."""
    return f"{_EVAL}{key}" if kind is Kind.EVAL and key != _CHAIN else key


def _of_evaluation(name: str) -> bool:
    return name == _CHAIN or name.startswith(_EVAL)
