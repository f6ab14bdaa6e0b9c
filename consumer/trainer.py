"""The trainer's main process: `paceline consumer`.

It holds consumer.lock for life, finds the checkpoint to go on from, runs the feed in a thread, starts the ranks and
watches them. It never imports torch.

    one trainer    consumer.lock, and a lock on the output folder; then waits for ranks that a dead trainer left
    resume         the newest complete checkpoint, its fingerprint compared with this run file's
    a rank dies    or hangs: the others are told, get a moment to save, and are killed; exit 1 (then started again)
    SIGTERM        the ranks drop the unfinished step, rank 0 saves the last step boundary; exit 0 (SIGINT: 130)
    run finished   last checkpoint, the marker that workers find, a few seconds in which the feed tells them; exit 0.
                   So also when trainer.max_hours is over
    skip_limit     records or steps refused so often in a row that a restart would end the same way: the last step
                   boundary is saved; exit 78, so that no supervisor starts the trainer again

Exit codes: 0 done or stopped by SIGTERM, 1 failed, 78 not without a change by the user, 130 stopped by SIGINT.
"""

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common import devices, faults, paths
from ..common.batch import Kind
from ..common.errors import ConfigError, PacelineError, counted, how_it_ended
from ..common.fingerprint import Fingerprint
from ..common.finished import clear_finished, mark_finished
from ..common.locks import FileLock, held_by
from ..common.notify import Patience, Watchdog, extend_timeout, notify
from ..common.plan import Plan, plan_from
from ..common.rows import Rows
from ..common.runfile import RunFile
from ..common.scale import Wanted
from ..common.telemetry import Metrics
from ..common.units import given_devices
from .audit import check_ledger
from .checkpoint import (
    CheckpointError,
    CheckpointState,
    bring_in,
    load_state,
    newest_complete,
    prune,
    set_aside_newer,
    step_folder,
    sweep,
    whole_checkpoint,
)
from .describe import RunFacts, describe_apart
from .feed import Phase
from .feeder import Feeder
from .job import RankJob
from .ledger import Ledger
from .progress import Progress
from .ranks import RANK_COMMAND, Rank, RankSet
from .shortfall import held_out_shortfall
from .stop import StopFlag, StopRequested
from .training import FIRST_PHASE

STOP_SECONDS = 60.0
"""How long ranks may take to stop, beside the time in which rank 0 is saving; then they are killed."""

DEATH_SECONDS = 20.0
"""How long the others may take after a rank has died: rank 0 may save its step boundary."""

STARTING_SECONDS = 5.0
"""How long a rank that is still loading may take to stop: it has nothing to save."""

FAREWELL_SECONDS = 3.0
"""How long the feed of a finished run answers workers that it is finished."""

EXTEND_SECONDS = 15.0
"""What systemd is asked for, each second, while the trainer is about to start or to stop."""

_TICK = 0.25
_FEED_SILENCE = 30.0  # a turn of the feed takes milliseconds
_SAVING_SILENCE = 10.0  # rank 0 says each second that it is saving
_WAITS_AFTER = 2.0  # seconds without a step, after which a trainer that is found waiting is said to wait

log = logging.getLogger(__name__)

Describe = Callable[[RunFile, Callable[[], object]], RunFacts]


def main(
    run: RunFile,
    resume: str | None = None,
    *,
    describe: Describe = describe_apart,
    rank_command: Sequence[str] = RANK_COMMAND,
) -> int:
    """Train the run until it is finished, stopped or broken. Returns the exit code.

    resume: the checkpoint to go on from; None for the newest complete one, or the beginning if there is none.

    Raises:
        ConfigError: run file, data, target and checkpoint do not fit each other.
        PacelineError: another trainer has the run, or a rank died or hung.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    flag = StopFlag()
    flag.install(signal.SIGTERM, signal.SIGINT)
    with ExitStack() as stack:
        try:
            with flag.interruptible():
                _claim(run, stack)
                notify("STATUS=looking at data, target and checkpoint")
                places = rank_devices(run)
                start = _prepare(run, resume, describe)
        except StopRequested:
            notify("STOPPING=1")
            return _stopped(flag)
        if start.phase is None:
            mark_finished(run, start.step)
            _remove_leftovers(run)
            print(f"run {run.name} is finished: {counted(start.step, 'step')}, {start.checkpoint}", flush=True)
            notify("READY=1", f"STATUS=run {run.name} is finished")  # to leave before being ready would be a failure
            return 0
        faults.point("trainer.resumed")
        return Trainer(run, start, places, flag).run(rank_command)


def _stopped(flag: StopFlag) -> int:
    return 130 if flag.requested is signal.SIGINT else 0


# Before the ranks start -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """What the run starts or goes on with."""

    facts: RunFacts
    plan: Plan
    run_id: str
    checkpoint: Path | None
    state: CheckpointState | None
    phase: Phase | None
    ledger: Ledger

    @property
    def step(self) -> int:
        return self.state.step if self.state else 0


def rank_devices(run: RunFile) -> list[str]:
    """Where the ranks go: by the run file, else on GPUs that no worker has. ConfigError for two on a GPU."""
    added = Wanted.read(paths.run_dir(run.name), run.workers.count).devices.values()
    return devices.rank_devices(run, [*added, *given_devices(run.name)])


def _claim(run: RunFile, stack: ExitStack) -> None:
    """Take the run's locks, and wait until no rank of an earlier trainer is alive."""
    who = f"trainer of run {run.name}"
    places = ((paths.consumer_lock(run), f"run {run.name}"), (paths.trainer_lock(run), f"output folder {run.output}"))
    for path, what in places:
        lock = FileLock(path, who)
        if not lock.acquire():
            raise PacelineError(f"{what} has a trainer already: {held_by(path)}")
        stack.callback(lock.release)
    faults.point("trainer.locked")
    told: set[str] = set()
    patience = Patience(EXTEND_SECONDS)
    folder = paths.run_dir(run.name)
    while holders := [held for path in sorted(folder.glob("rank-*.lock")) if (held := held_by(path))]:
        for holder in holders:
            if holder not in told:
                print(f"waiting for {holder} of an earlier trainer to end", flush=True)
                notify(f"STATUS=waiting for {holder} of an earlier trainer to end")
            told.add(holder)
        patience.alive()
        time.sleep(0.2)


def _prepare(run: RunFile, resume: str | None, describe: Describe) -> Start:
    """Find data, plan and checkpoint, and make sure that they belong together."""
    checkpoint = _find_checkpoint(run, resume)
    state = load_state(checkpoint) if checkpoint else None
    facts = describe(run, lambda: extend_timeout(EXTEND_SECONDS))
    plan = plan_from(run, Rows.open(facts.rows))
    if state is None or checkpoint is None:
        run_id = f"{run.name}-{secrets.token_hex(4)}"
        return Start(facts, plan, run_id, None, None, FIRST_PHASE_OF_FEED, Ledger())
    _check_fingerprint(checkpoint, state, facts)
    ledger = Ledger.from_json(state.ledger)
    if problems := check_ledger(ledger, plan, state.step, strict=run.stream.order == "strict"):
        raise ConfigError(
            f"checkpoint {checkpoint} does not fit this run file's plan (were trainer.epochs, max_steps or max_tokens "
            f"lowered?): {problems[0]}"
        )
    # Those that were passed over too: damaged in ways that only reading shows, they would be kept for the newest ones.
    root = paths.checkpoint_dir(run)
    for moved in set_aside_newer(root, state.step):
        print(f"a newer checkpoint is left aside: {moved}", flush=True)
    checkpoint = bring_in(root, checkpoint)
    hours = run.trainer.max_hours
    over = hours is not None and state.seconds >= 3600 * hours
    following = None if over else _phase_after(state, plan)
    print(f"resuming run {state.run_id} at step {state.step} from {checkpoint}", flush=True)
    phase = None if following is None else Phase(*following)
    return Start(facts, plan, state.run_id, checkpoint, state, phase, ledger)


FIRST_PHASE_OF_FEED = Phase(*FIRST_PHASE)


def _find_checkpoint(run: RunFile, resume: str | None) -> Path | None:
    root = paths.checkpoint_dir(run)
    sweep(root)
    if resume is not None and resume != "auto":
        path = Path(resume)
        try:
            return whole_checkpoint(path if path.is_dir() or not resume.isdigit() else step_folder(root, int(resume)))
        except CheckpointError as error:
            raise ConfigError(f"cannot resume: {error}") from None
    found, skipped = newest_complete(root)
    for one in skipped:
        print(f"passing over checkpoint {one.path}: {one.reason}", flush=True)
    return found


def _check_fingerprint(checkpoint: Path, state: CheckpointState, facts: RunFacts) -> None:
    differences = Fingerprint(facts.fingerprint).differences(Fingerprint(state.fingerprint), "the checkpoint")
    if differences:
        raise ConfigError(
            f"checkpoint {checkpoint} is of another run file, dataset or target ({differences}): "
            "go back to the checkpoint's, or choose another output folder"
        )


def _phase_after(state: CheckpointState, plan: Plan) -> tuple[Kind, int] | None:
    """What comes next by this run file, whose limits may have been raised since the checkpoint."""
    if state.step == 0:
        return FIRST_PHASE
    if state.evaluated == state.step or not plan.eval_due(state.step):
        return plan.next_phase(Kind.EVAL, state.step)
    return Kind.EVAL, state.step


def _remove_leftovers(run: RunFile) -> None:
    """Remove what a trainer that was killed at the end of its run left behind, as no further one will."""
    prune(paths.checkpoint_dir(run), keep_last=run.checkpoint.keep_last, keep_best=run.checkpoint.keep_best)
    folder = paths.run_dir(run.name)
    status = paths.status_path(run)
    _remove_stores(run)
    for left in (*folder.glob("*.sock"), *folder.glob(f".{status.name}.*")):
        left.unlink()


def _remove_stores(run: RunFile) -> None:
    """Remove the places where ranks that are dead met."""
    for store in paths.run_dir(run.name).glob("group-*"):
        store.unlink(missing_ok=True)


# While they run -------------------------------------------------------------------------------------------------------


class Trainer:
    """Feed and ranks of one trainer incarnation, from their start to their end."""

    def __init__(self, run: RunFile, start: Start, places: Sequence[str], flag: StopFlag):
        """places: the device of each rank."""
        self._run, self._start, self._places, self._flag = run, start, places, flag
        self._incarnation = secrets.randbits(62) + 1
        self._ranks = RankSet()
        self._kill_at: float | None = None  # when ranks that should stop are killed
        self._killed = False
        self._failure: PacelineError | None = None
        self._said: set[str] = set()  # what other ranks died of
        self._ending: tuple[str, str] | None = None  # what the ranks agreed on
        self._ticked = 0.0
        self._message = ""
        self._watchdog = Watchdog()
        self._ready = False
        self._fresh = paths.Freshness(paths.run_dir(run.name))

    def run(self, rank_command: Sequence[str]) -> int:
        run, start = self._run, self._start
        clear_finished(run)
        faults.point("trainer.marker-removed")
        feeder = Feeder(
            run,
            start.plan,
            start.ledger,
            Phase(*start.phase) if start.phase else None,
            trainer=self._incarnation,
            fingerprint=Fingerprint(start.facts.fingerprint),
            ring_dir=paths.ring_dir(run),
            run_dir=paths.run_dir(run.name),
        )
        with self._metrics() as metrics:
            self._progress = Progress(
                start.plan,
                name=run.name,
                ranks=run.trainer.ranks,
                step=start.step,
                listed=len(start.ledger.listed),
                slots=run.stream.slots,
                metrics=metrics,
                status_path=paths.status_path(run),
            )
            self._progress.status["ring_dir"] = str(paths.ring_dir(run))
            self._progress.status["gpus"] = any(device != "cpu" for device in self._places)
            if start.checkpoint is not None:
                self._progress.status["checkpoint"] = str(start.checkpoint)
            feeder.start()
            try:
                self._ranks.start(self._jobs(), rank_command)
                faults.point("trainer.ranks-started")
                self._watch(feeder)
                return self._finish(feeder)
            finally:
                self._ranks.kill()
                feeder.stop()
                _remove_stores(run)

    def _metrics(self) -> Metrics:
        run = self._run
        return Metrics(
            paths.output_dir(run),
            name=run.name,
            start=self._start.step,
            tensorboard=run.logging.tensorboard,
            wandb=run.logging.wandb,
            config=run.model_dump(mode="json"),
        )

    def _jobs(self) -> list[RankJob]:
        run, facts = self._run, self._start.facts
        folder = paths.run_dir(run.name)
        _remove_stores(run)
        store = folder / f"group-{self._incarnation:016x}"
        return [
            RankJob(
                run=run.model_dump(mode="json"),
                run_id=self._start.run_id,
                rank=rank,
                world=run.trainer.ranks,
                device=self._places[rank],
                trainer=self._incarnation,
                parent=os.getpid(),
                reports=-1,
                store=str(store),
                rows=facts.rows,
                fingerprint=facts.fingerprint,
                layer_ids=facts.layer_ids,
                hidden_size=facts.hidden_size,
                checkpoint=None if self._start.checkpoint is None else str(self._start.checkpoint),
                phase=None if self._start.phase is None else (int(self._start.phase.kind), self._start.phase.number),
            )
            for rank in range(run.trainer.ranks)
        ]

    # The loop

    def _watch(self, feeder: Feeder) -> None:
        """Until every rank has ended, one way or another."""
        while self._ranks.running:
            for rank, report in self._ranks.poll(_TICK):
                self._hear(rank, report)
            self._look_at_ranks()
            self._look_at_signals()
            try:
                feeder.check()
            except PacelineError as error:
                self._fail(error, DEATH_SECONDS, "the feed failed")
            self._enforce()
            self._tick(feeder)
        self._look_at_ranks()

    def _hear(self, rank: Rank, report: dict[str, Any]) -> None:
        if "phase" in report:
            kind, number = report["phase"]
            self._progress.phase(Kind(kind), number, report["values"], report["listed"])
            for batch, reason in report["listed"].items():
                print(f"batch {batch} is listed: {reason}", flush=True)
            if kind == Kind.EVAL:
                self._say_evaluation(number, report["values"])
            elif self._progress.due_line(self._run.logging.log_every):
                print(self._progress.line(), flush=True)
        elif "checkpoint" in report:
            if report["checkpoint"]:
                self._progress.status["checkpoint"] = report["checkpoint"]
                print(f"checkpoint {report['checkpoint']}", flush=True)
            if report["error"]:
                print(report["error"], file=sys.stderr, flush=True)

    def _say_evaluation(self, number: int, values: dict[str, Any]) -> None:
        figures = " ".join(f"{key}={values[key]:.3f}" for key in ("loss", "acc", "tau", "tau_chain") if key in values)
        print(f"evaluation at step {number}: {figures}", flush=True)
        if number == self._start.plan.total_steps and (text := held_out_shortfall(self._progress.status, values)):
            print(f"WARNING: {text}", flush=True)

    def _look_at_ranks(self) -> None:
        """A rank that died or hangs ends all; ranks that agreed on an end are given the time to save."""
        for rank in self._ranks.ranks:
            if rank.end is not None and rank.end[0] != "crashed":
                if self._ending is None:
                    self._ending = rank.end
                    self._limit(STOP_SECONDS)
            elif rank.code is not None and not self._killed and not self._told_while_starting(rank):
                self._fail(_death(rank), DEATH_SECONDS, f"rank {rank.number} {how_it_ended(rank.code)}")
                self._say_another(rank)
        if self._kill_at is None and (hung := self._ranks.hung(self._run.trainer.hang_seconds)):
            names = ", ".join(f"rank {rank.number} ({rank.state})" for rank in hung)
            seconds = self._run.trainer.hang_seconds
            why = f"no progress for {seconds:.0f} s (trainer.hang_seconds): {names}"
            self._fail(PacelineError(why), 0.0, f"{names} without progress")

    def _say_another(self, rank: Rank) -> None:
        """What a rank died of, if it is not what the trainer ends with, nor was said before."""
        why = rank.end[1] if rank.end else ""
        if why and why not in self._said and why not in str(self._failure):
            self._said.add(why)
            print(f"rank {rank.number}: {why}", file=sys.stderr, flush=True)

    def _told_while_starting(self, rank: Rank) -> bool:
        """It was told to stop before it could listen, and has nothing to save."""
        return self._flag.requested is not None and rank.state == "starting" and rank.code == -signal.SIGTERM

    def _fail(self, error: PacelineError, patience: float, what: str) -> None:
        """what: has happened, in few words: the error itself is said when this process ends with it."""
        if self._failure is None:
            self._failure = error
            print(f"stopping all ranks: {what}", file=sys.stderr, flush=True)
            self._ranks.signal(signal.SIGTERM)
            self._limit(patience)

    def _look_at_signals(self) -> None:
        if self._flag.requested is None:
            return
        if self._message == "":
            self._message = f"stopping ({self._flag.requested.name})"
            print(f"{self._message}: the unfinished step is dropped, its records stay in the rings", flush=True)
            self._ranks.signal(signal.SIGTERM)
            starting = any(rank.state == "starting" for rank in self._ranks.running)
            self._limit(STARTING_SECONDS if starting else STOP_SECONDS)
        elif self._flag.count > 1 and self._flag.requested is signal.SIGINT:
            self._kill_at = 0.0

    def _limit(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        if self._kill_at is None:  # here and not only each second: the end may be quicker
            notify("STOPPING=1")
            extend_timeout(EXTEND_SECONDS)
        self._kill_at = until if self._kill_at is None else min(until, self._kill_at)

    def _enforce(self) -> None:
        """Kill ranks whose time to stop is over; while rank 0 writes a checkpoint, and says so, it is not over."""
        if self._kill_at is None or time.monotonic() < self._kill_at:
            return
        now = time.monotonic()
        saving = any(rank.state == "saving" and now - rank.heard_at < _SAVING_SILENCE for rank in self._ranks.running)
        if saving and self._failure is None and self._flag.count < 2:
            return
        stuck = ", ".join(f"rank {rank.number} ({rank.state})" for rank in self._ranks.running)
        lost = any(rank.end is None and rank.state != "starting" for rank in self._ranks.running)
        self._killed = True
        self._ranks.kill()
        if self._failure is None and lost:
            self._failure = PacelineError(
                f"{stuck} did not stop in time and was killed; the last complete checkpoint stands"
            )

    def _tick(self, feeder: Feeder) -> None:
        """Each second: status.json."""
        if time.monotonic() - self._ticked < 1.0:
            return
        self._ticked = time.monotonic()
        self._fresh.keep()
        self._progress.feed(feeder.snapshot())
        states = {rank.state for rank in self._ranks.running}
        if self._message or "saving" in states:
            state = "saving"
        elif "starting" in states:
            state = "starting"
        elif states <= {"data", "gather"} and self._progress.quiet_s > _WAITS_AFTER:
            state = "waiting"
        else:
            phase = feeder.snapshot().phase
            state = "evaluating" if phase is not None and phase.kind is Kind.EVAL else "training"
        message = self._message or self._waits_for(state, feeder)
        self._progress.write(state, message)
        self._tell_systemd(state, message, feeder.silence)

    def _tell_systemd(self, state: str, message: str, feed_silence: float) -> None:
        """READY once every rank has loaded. The watchdog is fed between looks at the ranks (one that hangs ends the
        trainer), and only while the feed's thread moves and no rank has outlived its end."""
        if feed_silence < _FEED_SILENCE and not self._killed:
            self._watchdog.beat()
        notify(f"STATUS={self._status_line(message or state)}")
        if self._kill_at is not None or state == "starting":
            extend_timeout(EXTEND_SECONDS)
        elif not self._ready:
            self._ready = notify("READY=1")

    def _status_line(self, doing: str) -> str:
        """Step, rate, occupancy and what it does, for `systemctl status`."""
        status = self._progress.status
        parts = [f"step {status['step']} of {status['total_steps']}"]
        if "tokens_per_s" in status:
            parts.append(f"{status['tokens_per_s'] / 1000:.1f} Ktok/s")
        if full := status.get("q_hs"):
            parts.append(f"rings {sum(full)} of {len(full) * status['slots']} full")
        return ", ".join([*parts, doing])

    def _waits_for(self, state: str, feeder: Feeder) -> str:
        if state != "waiting":
            return ""
        workers = feeder.snapshot().workers
        if not any(worker.alive for worker in workers):
            return "waiting for a worker to start"
        return "waiting for hidden states"

    # The end

    def _finish(self, feeder: Feeder) -> int:
        if self._failure is not None:
            self._progress.write("stopped", str(self._failure))
            raise self._failure
        kind, why = self._ending or ("stopped", "")
        if kind in ("failed", "unfit"):
            self._progress.write("stopped", why)
            raise ConfigError(why) if kind == "unfit" else PacelineError(why)
        if kind == "stopped":
            self._progress.write("stopped", self._message)
            self._say_last("stopped")
            return _stopped(self._flag)
        step = self._progress.status["step"]
        faults.point("trainer.before-finished")
        mark_finished(self._run, step)
        faults.point("trainer.finished")
        self._progress.write("finished", why)
        self._say_last(f"run {self._run.name} is finished")
        print(f"run {self._run.name} is finished: {counted(step, 'step')}{f' ({why})' if why else ''}", flush=True)
        feeder.finish()
        self._say_farewell(feeder)
        return 0

    def _say_last(self, how: str) -> None:
        """What `systemctl status` goes on showing."""
        status = self._progress.status
        newest = status.get("checkpoint") or self._start.checkpoint
        saved = f", checkpoint {newest}" if newest else ""
        notify(f"STATUS={how} at step {status['step']} of {status['total_steps']}{saved}")

    def _say_farewell(self, feeder: Feeder) -> None:
        """Stay until the workers have left, a few seconds at most."""
        until = time.monotonic() + FAREWELL_SECONDS
        while time.monotonic() < until and any(worker.alive for worker in feeder.snapshot().workers):
            if self._flag.requested is not None:
                return
            time.sleep(0.1)


def _death(rank: Rank) -> PacelineError:
    """Why a rank ended that should not have. Its own configuration errors keep their exit code."""
    why = rank.end[1] if rank.end else ""
    if rank.code == ConfigError.exit_code:
        return ConfigError(f"rank {rank.number}: {why}")
    return PacelineError(f"rank {rank.number}: {why}" if why else rank.obituary())
