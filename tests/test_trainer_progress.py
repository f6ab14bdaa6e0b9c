"""What a trainer says of its workers: rates, and how much of their time they wait."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from paceline.common.batch import Kind
from paceline.common.telemetry import Metrics
from paceline.consumer import progress as module
from paceline.consumer.feeder import FeedSnapshot, WorkerStatus
from paceline.consumer.progress import Progress
from standins import make_plan, make_rows

ONE = WorkerStatus(
    worker="w0", device="cpu", alive=True, connected=True, retired=False, silent=False, held=0, ready=2, slots=4,
    produced=100, tokens_per_s=1.0, waited=None,
)  # fmt: skip


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def progress(tmp_path: Path, clock: Clock) -> Progress:
    plan = make_plan(make_rows(tmp_path / "rows"))
    return Progress(
        plan, name="toy", ranks=1, step=0, listed=0, slots=4, metrics=Metrics(tmp_path), status_path=tmp_path / "status"
    )


def seconds(progress: Progress, clock: Clock, count: int, *workers: tuple[str, float | None]) -> None:
    """So many seconds with these workers, each of which waits a share of them; None: it has not said what it waited."""
    for _ in range(count):
        clock.now += 1
        seen = []
        for name, share in workers:
            waited = None if share is None else progress._waited.get(name, 5000.0) + share
            seen.append(replace(ONE, worker=name, waited=waited))
        progress.feed(FeedSnapshot(None, tuple(seen), (), {"refused": 0}))


def test_what_a_worker_waited_before_this_trainer_is_not_its_own(progress: Progress, clock: Clock):
    seconds(progress, clock, 3, ("w0", None))
    seconds(progress, clock, 10, ("w0", 0.1))
    assert progress.status["worker_wait"] == pytest.approx(0.1)


def test_workers_that_have_left_are_not_counted_against_those_that_stay(progress: Progress, clock: Clock):
    seconds(progress, clock, 20, *((f"w{i}", 0.9) for i in range(3)))
    assert progress.status["worker_wait"] == pytest.approx(0.9)
    seconds(progress, clock, 20, ("w0", 0.1))
    assert progress.status["worker_wait"] == pytest.approx((19 * 3 * 0.9 + 20 * 0.1) / (19 * 3 + 20))
    seconds(progress, clock, 60, ("w0", 0.1))
    assert progress.status["worker_wait"] == pytest.approx(0.1), "a minute later nothing is left of it"


def test_a_restarted_worker_counts_from_0_and_one_that_died_not_at_all(progress: Progress, clock: Clock):
    seconds(progress, clock, 10, ("w0", 0.5))
    progress._waited["w0"] = 0.0
    seconds(progress, clock, 10, ("w0", 0.5))
    assert progress.status["worker_wait"] == pytest.approx(0.5)
    for _ in range(90):
        clock.now += 1
        progress.feed(FeedSnapshot(None, (replace(ONE, alive=False, waited=9.0),), (), {"refused": 0}))
    assert progress.status["workers"] == 0 and "worker_wait" not in progress.status


def test_a_trainer_is_quiet_since_its_last_phase(progress: Progress, clock: Clock, tmp_path: Path):
    clock.now += 7
    assert progress.quiet_s == 7
    progress.phase(module.Kind.TRAIN, 0, {"records": 1, "tokens": 5, "seconds": 1.0}, {})
    assert progress.quiet_s == 0
    progress.write("training")
    assert json.loads((tmp_path / "status").read_text())["state"] == "training"


def test_an_evaluation_without_figures_shows_none_of_the_one_before(progress: Progress):
    progress.phase(Kind.EVAL, 1, {"tau_chain": 1.5}, {})
    assert progress.status["tau_chain"] == 1.5
    progress.phase(Kind.EVAL, 2, {"tau": 0.0}, {})
    assert "tau_chain" not in progress.status
