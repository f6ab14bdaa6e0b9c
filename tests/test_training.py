"""The loop of one rank in this process, fed by the test: what it keeps of each phase."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from paceline.common import paths, wire
from paceline.common.batch import BatchId, Kind
from paceline.common.plan import Plan, plan_from
from paceline.common.rows import Rows
from paceline.common.runfile import RunFile
from paceline.consumer import checkpoint as ck
from paceline.consumer.group import LocalGroup
from paceline.consumer.job import RankJob, Reports
from paceline.consumer.source import Phase, RecordSource
from paceline.consumer.stop import StopFlag
from paceline.consumer.training import FIRST_PHASE, Boundary, Training
from standins import LAYERS, SumLearner, make_meta, make_rows, stamp


class PlayedSource:
    """Gives each phase the records of the plan, but lists those that `refuse` was told."""

    def __init__(self, plan: Plan, rows: Rows) -> None:
        self._plan, self._rows = plan, rows
        self._listed: set[BatchId] = set()
        self._left: dict[Phase, list[BatchId]] = {}
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
        left = self._left.setdefault(phase, [b for b in self._batches(phase) if b not in self._listed])
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
    """A run of 2 records a step that is evaluated after each, and what it leaves behind."""

    def __init__(self, folder: Path, learner: SumLearner, **trainer: Any) -> None:
        rows = make_rows(folder / "rows", count=32)
        settings = {
            "name": "toy",
            "output": str(folder / "out"),
            "target": {"path": "none", "dtype": "float32"},
            "data": {"rows": str(rows.folder), "max_length": 24, "held_out": 6},
            "stream": {"token_budget": 64},
            "trainer": {"batches_per_step": 2, "epochs": 1, "dtype": "float32", "skip_limit": 3} | trainer,
            "checkpoint": {"every_steps": None, "every_minutes": None},
            "evaluation": {"every_steps": 1},
        }
        self.run = RunFile.model_validate(settings)
        self.plan, self.learner = plan_from(self.run, rows), learner
        self.source = PlayedSource(self.plan, rows)
        self.reported: list[Any] = []

    def train(self) -> ck.CheckpointState:
        """The state of the last checkpoint."""
        job = SimpleNamespace(rank=0, trainer=1, run_id="toy-1", fingerprint={"layers": str(LAYERS)})
        reports: Any = SimpleNamespace(
            doing=lambda state: None,
            alive=lambda: None,
            phase=lambda *told: self.reported.append(told),
            checkpoint=lambda outcome: None,
        )
        loop = Training(
            cast(RankJob, job),
            self.run,
            self.plan,
            self.learner,
            LocalGroup(),
            cast(RecordSource, self.source),
            reports,
            StopFlag(),
            Boundary(FIRST_PHASE),
        )
        self.ending = loop.run()
        path, skipped = ck.newest_complete(paths.checkpoint_dir(self.run))
        assert path is not None and skipped == ()
        return ck.load_state(path)


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
