"""The loop of one rank in this process, fed by the test: what it keeps of each phase."""

import errno
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from paceline.common import paths, wire
from paceline.common.batch import BatchId, Kind
from paceline.common.errors import PacelineError
from paceline.common.plan import Plan, plan_from
from paceline.common.rows import Rows
from paceline.common.runfile import RunFile
from paceline.consumer import checkpoint as ck
from paceline.consumer.group import LocalGroup
from paceline.consumer.job import RankJob, Reports
from paceline.consumer.source import Phase, RecordSource
from paceline.consumer.stop import StopFlag
from paceline.consumer.training import FIRST_PHASE, Boundary, Training
from standins import LAYERS, Gaps, SumLearner, make_meta, make_rows, stamp


class PlayedSource:
    """Gives each phase the records of the plan, but lists those that `refuse` was told."""

    def __init__(self, plan: Plan, rows: Rows) -> None:
        self._plan, self._rows = plan, rows
        self._listed: set[BatchId] = set()
        self._left: dict[Phase, list[BatchId]] = {}
        self.gives: dict[Phase, list[BatchId]] = {}  # instead of the phase's own
        self.before: Callable[[Phase], None] = lambda phase: None
        self.told: list[wire.Done] = []

    def refuse(self, batches: Iterable[BatchId]) -> None:
        self._listed |= set(batches)

    def _batches(self, phase: Phase) -> list[BatchId]:
        kind, number = phase
        if kind is Kind.EVAL:
            return list(self._plan.eval_ids(number))
        epoch = self._plan.epoch_of(number)
        first = (number - self._plan.first_step(epoch)) * self._plan.batches_per_step
        return [BatchId(kind, epoch, first + i) for i in range(self._plan.step_batches(number))]

    def next(self, phase: Phase, waiting: Callable[[], None]) -> Any:
        self.before(phase)
        own = [batch for batch in self._batches(phase) if batch not in self._listed]
        left = self._left.setdefault(phase, list(self.gives.get(phase, own)))
        if not left:
            return None
        batch = left.pop(0)
        meta = make_meta(self._plan, self._rows, batch)
        states = memoryview(stamp(meta.tokens, meta.cu_seqlens, meta.planes, meta.hidden_size).tobytes())
        return SimpleNamespace(batch=batch, meta=meta, states=states, tokens=len(meta.tokens))

    def release(self, record: Any) -> None:
        return

    def listed(self, phase: Phase) -> list[tuple[BatchId, str]]:
        return [(batch, "refused twice") for batch in self._batches(phase) if batch in self._listed]

    def leave(self, phase: Phase) -> None:
        return

    def done(self, message: wire.Done) -> None:
        self.told.append(message)


class Loop:
    """A run of 2 records a step that is evaluated after each, and what it leaves behind. `trainer`: more of its
    settings."""

    def __init__(
        self, folder: Path, learner: SumLearner, *, every_steps: int | None = None, group: Any = None, **trainer: Any
    ) -> None:
        rows = make_rows(folder / "rows", count=32)
        settings = {
            "name": "toy",
            "output": str(folder / "out"),
            "target": {"path": "none", "dtype": "float32"},
            "data": {"rows": str(rows.folder), "max_length": 24, "held_out": 6},
            "stream": {"token_budget": 64},
            "trainer": {"batches_per_step": 2, "epochs": 1, "dtype": "float32", "skip_limit": 3} | trainer,
            "checkpoint": {"every_steps": every_steps, "every_minutes": None, "keep_last": 9},
            "evaluation": {"every_steps": 1},
        }
        self.run = RunFile.model_validate(settings)
        self.plan, self.learner = plan_from(self.run, rows), learner
        self.source = PlayedSource(self.plan, rows)
        self.group, self.flag, self.boundary = group or LocalGroup(), StopFlag(), Boundary(FIRST_PHASE)
        self.reported: list[Any] = []
        self.written: list[ck.Outcome] = []

    @property
    def checkpoints(self) -> list[Path]:
        return ck.folders(paths.checkpoint_dir(self.run))

    def train(self) -> ck.CheckpointState:
        """Runs to the end; the state of the last checkpoint."""
        job = SimpleNamespace(rank=0, trainer=1, run_id="toy-1", fingerprint={"layers": str(LAYERS)})
        reports: Any = SimpleNamespace(
            doing=lambda state: None,
            alive=lambda: None,
            phase=lambda *told: self.reported.append(told),
            checkpoint=self.written.append,
        )
        loop = Training(
            cast(RankJob, job),
            self.run,
            self.plan,
            self.learner,
            self.group,
            cast(RecordSource, self.source),
            reports,
            self.flag,
            self.boundary,
        )
        self.ending = loop.run()
        assert ck.damage(self.checkpoints[0]) is None
        return ck.load_state(self.checkpoints[0])


def train(index: int) -> BatchId:
    return BatchId(Kind.TRAIN, 0, index)


@pytest.mark.parametrize("given", [[2, 2], [2], [2, 1], [2, 3, 4]])
def test_nothing_is_learnt_from_a_step_that_is_not_whole(tmp_path: Path, given: list[int]):
    """A record twice, one too few, one that was trained before, one too many."""
    loop = Loop(tmp_path, SumLearner())
    loop.source.gives[Kind.TRAIN, 1] = [train(index) for index in given]
    with pytest.raises(PacelineError, match="train phase 1 was given"):
        loop.train()
    assert loop.learner.steps == 1 and loop.boundary.ledger.done_count() == 2
    assert [done.number for done in loop.source.told if done.kind == Kind.TRAIN] == [0]


class FullDisk(SumLearner):
    """The first `fails` checkpoints cannot be written."""

    fails = 1

    def on_full(self) -> None:
        pass

    def snapshot(self) -> ck.Write:
        write, self.fails = super().snapshot(), self.fails - 1

        def full(folder: Path) -> None:
            self.on_full()
            raise OSError(errno.ENOSPC, "No space left on device")

        return full if self.fails >= 0 else write


def test_a_boundary_whose_write_failed_is_written_again_at_the_end(tmp_path: Path):
    loop = Loop(tmp_path, FullDisk(), every_steps=2)

    def stop(phase: Phase) -> None:
        if phase == (Kind.TRAIN, 2):
            loop.flag.requested = signal.SIGTERM

    loop.source.before = stop
    assert loop.train().step == 2 and loop.ending.kind == "stopped"
    assert [(one.step, one.path is None) for one in loop.written] == [(2, True), (2, False)]


def test_a_last_checkpoint_that_cannot_be_written_before_a_stop_is_an_error_and_workers_stay(tmp_path: Path):
    loop = Loop(tmp_path, learner := FullDisk(), max_steps=2)
    learner.on_full = lambda: setattr(loop.flag, "requested", signal.SIGTERM)
    with pytest.raises(ck.CheckpointError, match="No space left"):
        loop.train()
    assert loop.source.told[-1].number == 1, "the last evaluation is not told, so that no worker leaves"


def test_a_checkpoint_waits_for_the_evaluation_that_says_what_it_is_worth(tmp_path: Path):
    loop = Loop(tmp_path, SumLearner(), every_steps=1, max_steps=3)
    loop.train()
    states = [ck.load_state(path) for path in loop.checkpoints]
    assert [(state.step, state.evaluated) for state in states if state.step == 3] == [(3, 3)]
    assert all(state.evaluated == state.step for state in states) and len(states) > 1


def test_skipped_steps_stop_a_run_only_in_a_row(tmp_path: Path):
    loop = Loop(tmp_path, SumLearner(poison=[train(index).pack() for index in (0, 2, 6)]))  # all steps but one
    assert loop.plan.total_steps == 4 and loop.run.trainer.skip_limit == 3
    assert loop.train().step == 4 and loop.ending.kind == "finished"
    assert len(loop.boundary.ledger.listed) == 6 and loop.learner.steps == 1


class Both(LocalGroup):
    """Two ranks of which the other did the same."""

    world = 2

    def all_gather(self, value: Any) -> list[Any]:
        return [value, value | {"batches": [], "listed": []}]

    def all_reduce(self, values: np.ndarray) -> None:
        values *= 2


def test_tokens_are_counted_over_all_ranks(tmp_path: Path):
    loop = Loop(tmp_path, SumLearner(), group=Both(), max_steps=1)
    assert loop.train().tokens == 2 * sum(loop.plan.tokens(train(index)) for index in (0, 1))


def test_training_time_is_that_of_all_trainers_of_the_run(tmp_path: Path):
    loop = Loop(tmp_path, SumLearner(), max_steps=2, max_hours=1.0)
    loop.boundary.seconds = 3599.0
    assert 3599.0 < loop.train().seconds < 3660.0
    late = Loop(tmp_path / "late", SumLearner(), max_steps=2, max_hours=1.0)
    late.boundary.seconds = 3600.0
    assert late.train().step == 1 and late.ending.kind == "hours"


@pytest.mark.parametrize(
    ("says", "ending"),
    [
        ({"stop": "signal"}, "stopped"),
        ({"stop": "the feed told it to"}, "failed"),
        ({"stop": "zeros from w1", "unfit": True}, "unfit"),
    ],
)
def test_all_ranks_stop_before_a_step_that_one_did_not_complete(tmp_path: Path, says: dict[str, Any], ending: str):
    class Other(LocalGroup):
        calls = 0

        def all_gather(self, value: Any) -> list[Any]:
            self.calls += 1
            return [value] if self.calls < 3 else [value, value | {"batches": []} | says]

    loop = Loop(tmp_path, SumLearner(), group=Other())
    state = loop.train()  # a step, its evaluation, and a step that is not completed
    assert (state.step, state.phase, loop.ending.kind) == (1, (Kind.TRAIN, 1), ending)
    assert loop.learner.steps == 1 and loop.boundary.ledger.done_count() == 2
    assert len(loop.source.told) == 2


def test_an_evaluation_without_records_has_no_figures_of_the_one_before(tmp_path: Path):
    """A checkpoint whose held-out records were all refused must not pass for the best by older weights' figures."""

    class Measuring(SumLearner):
        def eval_metrics(self, total: np.ndarray) -> dict[str, Any]:
            return super().eval_metrics(total) if total[1] else {"tau": 0.0}

    loop = Loop(tmp_path, Measuring(), max_steps=2)
    loop.source.refuse(loop.plan.eval_ids(2))
    state = loop.train()
    assert (state.step, state.evaluated) == (2, 2)
    assert "tau_chain" not in state.metrics and "eval_eval_tokens" not in state.metrics
    assert state.metrics["eval_tau"] == 0.0 and "loss" in state.metrics, "the step's own stay"


def test_a_figure_that_is_no_number_does_not_leave_the_one_before(tmp_path: Path):
    class Measuring(SumLearner):
        def eval_metrics(self, total: np.ndarray) -> dict[str, Any]:
            return {"loss": float("nan") if self.steps == 2 else 3.0, "tau_chain": 1.5}

    state = Loop(tmp_path, Measuring(), max_steps=2).train()
    assert "eval_loss" not in state.metrics and state.metrics["tau_chain"] == 1.5


def test_a_skipped_step_has_no_figures_of_the_one_before(tmp_path: Path):
    poison = [BatchId(Kind.TRAIN, 0, 2).pack()]
    state = Loop(tmp_path, SumLearner(poison=poison), max_steps=2).train()
    assert state.metrics["skipped"] == 1.0 and "loss" not in state.metrics and "lr" not in state.metrics
    assert state.metrics["tau_chain"] == 1.01, "of the evaluation after it"


def test_a_report_longer_than_the_pipe_is_whole_whatever_signal_comes():
    reading, writing = os.pipe()
    heard = bytearray()
    signalled = threading.Event()

    def listen() -> None:
        signalled.wait()
        while piece := os.read(reading, 1 << 16):
            heard.extend(piece)

    before = signal.signal(signal.SIGALRM, lambda number, frame: signalled.set())
    listener = threading.Thread(target=listen)
    try:
        listener.start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # while the pipe is full
        Reports(writing).end("failed", 500_000 * "x")
    finally:
        signalled.set()
        signal.signal(signal.SIGALRM, before)
        os.close(writing)
        listener.join()
        os.close(reading)
    assert json.loads(heard) == {"end": "failed", "why": 500_000 * "x"}


@pytest.mark.parametrize(("idle", "data"), [(float("inf"), 3.0), (0.0, 1.0), (0.25, 1.5)])
def test_waiting_while_the_device_computes_is_no_waiting_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: float, data: float
):
    """Two records a step and the end of each, waited for a second each; the device is idle before the first one, and
    for so long before the others."""
    loop, now = Loop(tmp_path, SumLearner(gaps=Gaps(idle)), max_steps=3), [0.0]
    monkeypatch.setattr("paceline.consumer.training.time", SimpleNamespace(monotonic=lambda: now[0]))

    def late(phase: Phase) -> None:
        now[0] += 1.0

    loop.source.before = late
    loop.train()
    steps = [values for kind, _, values, _ in loop.reported if kind is Kind.TRAIN]
    assert [values["seconds"] for values in steps] == 3 * [3.0]
    assert [values["wait_data"] for values in steps] == 3 * [pytest.approx(data / 3)]
    assert [values["rank_wait"] for values in steps] == 3 * [[pytest.approx(data / 3)]]
    assert [values["wait_gpu"] for values in steps] == 3 * [pytest.approx(1 - data / 3)]


def test_computing_is_the_records_work_its_end_and_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A GPU is at the records when the host asks for their sums, and at the update when it asks whether all is finite:
    1 s in each record, 2 in the sums, 4 in the update, of which half a second is the reduction over two ranks."""
    now = [0.0]

    class Slow(SumLearner):
        def train_record(self, *arguments: Any, **more: Any) -> None:
            now[0] += 1.0
            super().train_record(*arguments, **more)

        def sums(self) -> np.ndarray:
            now[0] += 2.0
            return super().sums()

        def step(self, total: np.ndarray, step: int, total_steps: int) -> tuple[bool, dict[str, Any]]:
            now[0] += 4.0
            return super().step(total, step, total_steps)

        def reduce_seconds(self) -> float:
            return 0.5

    loop = Loop(tmp_path, Slow(), max_steps=2, group=Both())
    monkeypatch.setattr("paceline.consumer.training.time", SimpleNamespace(monotonic=lambda: now[0]))
    loop.source.before = lambda phase: now.__setitem__(0, now[0] + 0.25)
    loop.train()
    steps = [values for kind, _, values, _ in loop.reported if kind is Kind.TRAIN]
    for values in steps:
        seconds = values["seconds"]
        assert values["wait_data"] * seconds == pytest.approx(0.75)
        assert values["wait_gpu"] * seconds == pytest.approx(2 * 1.0 + 2.0 + 4.0 - 0.5)
