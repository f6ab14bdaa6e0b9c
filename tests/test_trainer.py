"""Whole runs of real processes, forked, on stand-ins: trainer, ranks and workers, killed and stopped at any moment.

Each test ends with what counts: the audit is clean, and in strict order the toy weight is exactly that of a run to
which nothing happened.
"""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forking import Forks, Process
from paceline.common import faults, paths
from paceline.common.batch import BatchId, Kind
from paceline.common.plan import plan_from
from paceline.common.runfile import RunFile
from paceline.common.telemetry import read_metrics, read_status
from paceline.consumer import checkpoint as ck
from paceline.consumer.audit import AuditReport, audit
from safetensors.numpy import load_file
from standins import make_rows

PATIENCE = 120.0  # seconds that anything may take on a loaded machine


@dataclass
class Job:
    """A run in a folder of its own, and the processes that the test started for it."""

    folder: Path
    settings: dict[str, Any]
    forks: Forks
    processes: list[Process] = field(default_factory=list)
    started: int = 0

    @property
    def run(self) -> RunFile:
        return RunFile.model_validate(self.settings)

    @property
    def checkpoints(self) -> Path:
        return paths.checkpoint_dir(self.run)

    def start(self, role: str, *arguments: str, fault: str = "", **options: Any) -> Process:
        self.started += 1
        environment = {name: json.dumps(value) for name, value in options.items()}
        environment |= {"PACELINE_RUNTIME_DIR": os.environ["PACELINE_RUNTIME_DIR"], faults.VARIABLE: fault}
        output = self.folder / f"{self.started:04d}-{role}.log"
        run = self.run.model_dump_json()
        process = self.forks.start(role, run, *arguments, output=output, fault=fault, **environment)
        self.processes.append(process)
        return process

    def trainer(self, *arguments: str, learner: dict[str, Any] | None = None, fault: str = "") -> Process:
        return self.start("trainer", *arguments, fault=fault, STANDIN_LEARNER=learner or {})

    def worker(self, index: int = 0, **options: Any) -> Process:
        return self.start("worker", str(index), STANDIN_WORKER=options)

    def kill_all(self) -> None:
        """What is still running of this run is killed; rings stay as they are."""
        for process in self.processes:
            process.kill()
        self.processes.clear()

    def newest(self) -> Path:
        path, skipped = ck.newest_complete(self.checkpoints)
        assert path is not None
        assert skipped == ()
        return path

    def weight(self) -> float:
        return float(load_file(self.newest() / ck.MODEL)["weight"][0])

    def audit(self) -> AuditReport:
        report = audit(self.newest())
        assert report.clean, report.text()
        return report

    def rank_pids(self) -> list[int]:
        locks = sorted(paths.run_dir(self.run.name).glob("rank-*.lock"))
        return [int(lock.read_text().split()[0]) for lock in locks]


@pytest.fixture(scope="session")
def forks(fork_server: Callable[[str], Forks]) -> Forks:
    return fork_server("standins.py")


@pytest.fixture
def job(tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Strict order, 2 records a step, 8 steps, no time-driven checkpoints."""
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "run"))
    rows = make_rows(tmp_path / "rows", count=64)
    settings = {
        "name": "toy",
        "output": str(tmp_path / "out"),
        "target": {"path": "none", "dtype": "float32"},
        "data": {"rows": str(rows.folder), "max_length": 24, "held_out": 6},
        "stream": {"token_budget": 64, "order": "strict", "slots": 2, "prefetch": 2, "ring_dir": str(tmp_path / "shm")},
        "trainer": {"batches_per_step": 2, "epochs": 1, "dtype": "float32", "skip_limit": 3},
        "checkpoint": {"every_steps": 3, "every_minutes": None},
        "evaluation": {"every_steps": 4},
        "logging": {"log_every": 2},
    }
    job = Job(tmp_path, settings, forks)
    yield job
    job.kill_all()


def ended(process: Process, code: int) -> str:
    """The output of a process that ends with `code`."""
    assert process.wait(PATIENCE) == code, process.output
    return process.output


def wait_for(what: Callable[[], Any], process: Process) -> Any:
    """Wait until `what` is true, while the process lives."""
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert process.poll() is None, process.output
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.02)
    return found


def step_reached(job: Job, step: int) -> Callable[[], bool]:
    """Whether the trainer has reported so many steps."""
    metrics = Path(job.run.output) / "metrics.jsonl"
    return lambda: (
        metrics.exists() and any(line["step"] >= step for line in read_metrics(metrics) if line["kind"] == "train")
    )


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, float]:
    """The weight of an undisturbed strict run, filled by `expected_weight`."""
    return {}


def expected_weight(job: Job, seen: dict[str, float]) -> float:
    """What training in plan order on one rank gives, computed without any of the machinery."""
    if "weight" not in seen:
        from paceline.common.rows import Rows
        from standins import EXPECTED, SumLearner, make_meta, stamp

        rows = Rows.open(job.settings["data"]["rows"])
        plan, learner = plan_from(job.run, rows), SumLearner()
        for step in range(plan.total_steps):
            first = step * plan.batches_per_step
            for index in range(first, first + plan.step_batches(step)):
                meta = make_meta(plan, rows, BatchId(Kind.TRAIN, 0, index), EXPECTED)
                states = stamp(meta.tokens, meta.cu_seqlens, meta.planes, meta.hidden_size)
                learner.train_record(meta, memoryview(states.tobytes()), 0)
            learner.step(learner.sums(), step, plan.total_steps)
        seen["weight"] = learner.weight
    return seen["weight"]


def finish(job: Job, undisturbed: dict[str, float]) -> str:
    """Run to the end with two healthy workers; all is as if nothing had happened."""
    job.kill_all()
    trainer = job.trainer()
    workers = [job.worker(0), job.worker(1)]
    output = ended(trainer, 0)
    for worker in workers:
        ended(worker, 0)
    report = job.audit()
    assert report.finished
    assert report.listed == ()
    assert job.weight() == expected_weight(job, undisturbed)
    return output


# Runs to which nothing happens ---------------------------------------------------------------------------------------


def test_run_from_start_to_end(job: Job, undisturbed: dict[str, float]):
    output = finish(job, undisturbed)
    report = job.audit()
    steps = report.total_steps
    queues = r"q_pre=\[[\d,]*\] q_hs=\[[\d,]*\]"  # of those workers that are still there: perhaps none
    assert re.search(rf"\[\d+s\] step={steps} loss=.* tau=.* lr=.* \| tgt=.* {queues}", output)
    assert f"run toy is finished: {steps} steps" in output
    lines = read_metrics(Path(job.run.output))
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, steps + 1))
    assert [line["step"] for line in lines if line["kind"] == "eval"][-1] == steps
    assert sum(line["records"] for line in lines if line["kind"] == "train") == report.planned
    status = read_status(paths.status_path(job.run))
    assert status is not None
    assert status.get("gpus") is False
    assert (status.get("state"), status.get("step"), status.get("ranks")) == ("finished", steps, 1)
    state = ck.load_state(job.newest())
    assert state.phase is None
    assert state.evaluated == steps
    assert "tau_chain" in state.metrics

    again = ended(job.trainer(), 0)
    assert f"run toy is finished: {steps} steps" in again


@pytest.mark.parametrize("workers", [1, 3])
def test_strict_order_whatever_the_number_of_workers(job: Job, workers: int, undisturbed: dict[str, float]):
    """`finish` has two; the sums are exact, so one record out of place would show."""
    trainer = job.trainer()
    for index in range(workers):
        job.worker(index)
    ended(trainer, 0)
    assert job.audit().finished
    assert job.weight() == expected_weight(job, undisturbed)


@pytest.mark.slow
def test_killed_on_both_sides_several_times(job: Job, undisturbed: dict[str, float]):
    """Every start is of another number of workers, every end is SIGKILL to all."""
    for workers, step in ((1, 2), (3, 4), (2, 5), (3, 6)):  # of 8 steps
        trainer = job.trainer(learner={"seconds": 0.2})
        for index in range(workers):
            job.worker(index)
        wait_for(step_reached(job, step), trainer)
        for pid in job.rank_pids():
            os.kill(pid, signal.SIGKILL)
        job.kill_all()
    assert "resuming run toy-" in finish(job, undisturbed)


def test_checkpoints_are_pruned_to_the_newest_and_the_best(job: Job, undisturbed: dict[str, float]):
    job.settings["checkpoint"] |= {"every_steps": 2, "keep_last": 2, "keep_best": False}
    finish(job, undisturbed)
    assert len(ck.folders(job.checkpoints)) == 2


def test_a_last_checkpoint_that_cannot_be_written_is_tried_again(job: Job, undisturbed: dict[str, float]):
    """As on a full disk: a trainer that ended would be started again, and train the same steps anew."""
    job.settings["checkpoint"]["every_steps"] = None
    job.checkpoints.parent.mkdir()
    job.checkpoints.write_text("in the way")
    trainer, workers = job.trainer(), [job.worker(0), job.worker(1)]
    wait_for(lambda: "only this checkpoint is missing" in trainer.output, trainer)
    assert "was not written" in trainer.output
    assert all(worker.poll() is None for worker in workers), "they stay until the run is safe"
    job.checkpoints.unlink()
    for process in (trainer, *workers):
        ended(process, 0)
    assert job.audit().finished and job.weight() == expected_weight(job, undisturbed)


def test_a_last_checkpoint_that_cannot_be_written_keeps_nobody_from_stopping(job: Job):
    job.settings["checkpoint"]["every_steps"] = None
    job.checkpoints.parent.mkdir()
    job.checkpoints.write_text("in the way")
    trainer, _ = job.trainer(), job.worker(0)
    wait_for(lambda: "only this checkpoint is missing" in trainer.output, trainer)
    trainer.send_signal(signal.SIGTERM)
    assert "was not written: File exists" in ended(trainer, 1)


def test_two_ranks_do_what_one_does(job: Job):
    """Schedule and audit do not depend on M (the toy weight does, in its last bits)."""
    job.settings["trainer"]["ranks"] = 2
    trainer = job.trainer()
    workers = [job.worker(0), job.worker(1)]
    ended(trainer, 0)
    for worker in workers:
        ended(worker, 0)
    report = job.audit()
    assert report.finished
    assert job.weight() == pytest.approx(expected_weight(job, {}), rel=1e-12)


def test_arrival_order_with_uneven_workers(job: Job):
    job.settings["stream"]["order"] = "arrival"
    job.settings["trainer"]["ranks"] = 2
    job.settings["trainer"]["epochs"] = 2
    trainer = job.trainer()
    job.worker(0, seconds=0.05)
    job.worker(1)
    ended(trainer, 0)
    report = job.audit()
    assert report.finished
    assert report.planned == report.trained


# Stops ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_drops_the_step_and_saves_the_last_boundary(
    job: Job, number: signal.Signals, code: int, undisturbed: dict[str, float]
):
    job.settings["checkpoint"]["every_steps"] = None
    trainer = job.trainer(learner={"seconds": 0.1})
    job.worker(0)
    wait_for(step_reached(job, 3), trainer)
    trainer.send_signal(number)
    output = ended(trainer, code)
    report = job.audit()
    assert 3 <= report.step < report.total_steps
    assert f"step-{report.step:08d}" in output
    finish(job, undisturbed)


def test_signal_in_the_middle_of_a_record(job: Job):
    """A record that takes a minute (compiling, say) is left at once."""
    trainer = job.trainer(learner={"seconds": 600.0})
    job.worker(0)
    wait_for(lambda: (read_status(paths.status_path(job.run)) or {}).get("state") == "training", trainer)
    trainer.terminate()
    ended(trainer, 0)
    assert ck.folders(job.checkpoints) == [], "no step was done: there is nothing to save"


def test_signal_while_waiting_for_workers(job: Job):
    trainer = job.trainer()
    message = "waiting for a worker to start"
    wait_for(lambda: (read_status(paths.status_path(job.run)) or {}).get("message") == message, trainer)
    trainer.terminate()
    ended(trainer, 0)


def test_signal_in_an_evaluation(job: Job, undisturbed: dict[str, float]):
    job.settings["evaluation"] = {"every_steps": 1}
    job.settings["checkpoint"]["every_steps"] = None
    trainer = job.trainer(learner={"eval_seconds": 600.0})
    job.worker(0)
    wait_for(lambda: (read_status(paths.status_path(job.run)) or {}).get("state") == "evaluating", trainer)
    trainer.terminate()
    ended(trainer, 0)
    state = ck.load_state(job.newest())
    assert state.phase == (Kind.EVAL, 1)
    finish(job, undisturbed)


def test_hours_are_counted_over_trainers(job: Job):
    job.settings["trainer"]["max_hours"] = 0.5 / 3600
    trainer = job.trainer(learner={"seconds": 0.1})
    worker = job.worker(0, marker=False)
    output = ended(trainer, 0)
    assert "trainer.max_hours" in output
    ended(worker, 0)
    report = job.audit()
    assert 0 < report.step < report.total_steps
    assert f"is finished: {report.step} steps" in ended(job.trainer(), 0)
    job.kill_all()
    job.settings["trainer"]["max_hours"] = None
    trainer = job.trainer()
    job.worker(0)
    ended(trainer, 0)
    assert job.audit().finished


# Deaths ---------------------------------------------------------------------------------------------------------------

FAULTS = [
    "rank.copied-not-released:4",
    "rank.released-not-told:5",
    "rank.gathered-not-stepped:3",
    "checkpoint.before-rename:2",
    "checkpoint.after-rename:2",
    "ring.taken:6",
    "ring.released:5",
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_rank_killed_at_a_named_point(job: Job, fault: str, undisturbed: dict[str, float]):
    trainer = job.trainer(fault=fault, learner={"seconds": 0.05})
    worker = job.worker(0)
    output = ended(trainer, 1)
    assert "rank 0 was killed by SIGKILL" in output
    assert worker.poll() is None, "workers go on"
    finish(job, undisturbed)


def test_killed_before_the_last_checkpoint_is_safe(job: Job, undisturbed: dict[str, float]):
    """The last step is done, but on no disk: workers must still be there when the trainer comes back."""
    job.settings["checkpoint"]["every_steps"] = None
    trainer = job.trainer(fault="checkpoint.before-rename")
    worker = job.worker(0)
    ended(trainer, 1)
    assert worker.poll() is None
    ended(job.trainer(), 0)
    ended(worker, 0)
    assert job.audit().finished
    assert job.weight() == expected_weight(job, undisturbed)


def test_trainer_killed(job: Job, undisturbed: dict[str, float]):
    trainer = job.trainer(learner={"seconds": 0.05})
    job.worker(0)
    wait_for(step_reached(job, 5), trainer)
    trainer.kill()
    output = finish(job, undisturbed)
    assert "resuming run toy-" in output


def test_worker_killed(job: Job, undisturbed: dict[str, float]):
    trainer = job.trainer(learner={"seconds": 0.05})
    victim = job.worker(0)
    job.worker(1)
    wait_for(step_reached(job, 2), trainer)
    victim.kill()
    ended(trainer, 0)
    assert job.audit().finished
    assert job.weight() == expected_weight(job, undisturbed)


def test_one_of_two_ranks_killed(job: Job):
    job.settings["trainer"]["ranks"] = 2
    trainer = job.trainer(learner={"seconds": 0.1})
    job.worker(0)
    wait_for(step_reached(job, 4), trainer)
    pids = job.rank_pids()
    os.kill(pids[1], signal.SIGKILL)
    output = ended(trainer, 1)
    assert "rank 1 was killed by SIGKILL" in output
    report = job.audit()
    assert report.step >= 4, "rank 0 saved its boundary"
    job.settings["trainer"]["ranks"] = 1
    trainer = job.trainer()
    ended(trainer, 0)
    assert job.audit().finished


@pytest.mark.slow
def test_hanging_rank_ends_the_trainer(job: Job):
    job.settings["trainer"]["hang_seconds"] = 5
    trainer = job.trainer(learner={"seconds": 0.05})
    job.worker(0)
    wait_for(step_reached(job, 2), trainer)
    os.kill(job.rank_pids()[0], signal.SIGSTOP)
    output = ended(trainer, 1)
    assert "no progress for 5 s (trainer.hang_seconds): rank 0" in output


def test_dying_rank_shows_its_last_line(job: Job):
    trainer = job.trainer(learner={"explode": "the GPU fell off the bus"})
    job.worker(0)
    output = ended(trainer, 1)
    assert one_error(output) == "error: rank 0 ended with exit code 1: RuntimeError: the GPU fell off the bus"
    assert output.count("the GPU fell off the bus") == 2, "its own traceback's, and the trainer's"
    assert output.count("stopping all ranks: rank 0 ended with exit code 1\n") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_rank_refuses_is_said_once(job: Job, ranks: int):
    job.settings["trainer"]["ranks"] = ranks
    output = ended(job.trainer(learner={"refuse": "no such layer"}), 78)
    assert re.fullmatch(r"error: rank [01]: no such layer", one_error(output))
    assert output.count("no such layer") == 1, output


# Bad records and bad steps --------------------------------------------------------------------------------------------


def poison(job: Job, *indices: int) -> dict[str, Any]:
    return {"poison": [BatchId(Kind.TRAIN, 0, index).pack() for index in indices]}


def one_error(output: str) -> str:
    """The line in which the trainer says why it ends: the only one, and the last."""
    lines = output.strip().splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], output
    return lines[-1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_step_that_is_not_finite_is_listed_and_the_run_goes_on(job: Job, ranks: int):
    """On both ranks alike, though the numbers of one are in order."""
    job.settings["trainer"]["ranks"] = ranks
    trainer = job.trainer(learner=poison(job, 3))
    job.worker(0)
    output = ended(trainer, 0)
    report = job.audit()
    assert report.finished
    assert [one.batch for one in report.listed] == ["train/0/2", "train/0/3"]
    assert "not finite" in report.listed[0].reason
    assert "batch train/0/2 is listed" in output
    assert np.isfinite(job.weight())


def test_several_steps_in_a_row_that_are_not_finite_stop_the_run(job: Job):
    trainer = job.trainer(learner=poison(job, 2, 4, 6))
    job.worker(0)
    output = ended(trainer, 78)
    assert one_error(output).startswith("error: 3 steps in a row had a loss or gradient that was not finite")
    report = job.audit()
    assert report.step == 4
    assert len(report.listed) == 6


def test_worker_that_writes_zeros_stops_the_run_by_name(job: Job):
    job.settings["stream"]["order"] = "arrival"
    trainer = job.trainer(learner={"seconds": 0.05})
    job.worker(0, seconds=0.1)
    job.worker(1, harm="zero")
    output = ended(trainer, 78)
    assert one_error(output).startswith("error: 3 records in a row from worker w1 were refused (trainer.skip_limit)")
    assert "all zero" in one_error(output)
    if ck.folders(job.checkpoints):
        job.audit()


# Beginnings -----------------------------------------------------------------------------------------------------------


def test_second_trainer_names_the_first(job: Job):
    first = job.trainer()
    wait_for(paths.status_path(job.run).exists, first)
    output = ended(job.trainer(), 1)
    assert f"error: run toy has a trainer already: trainer of run toy (pid {first.pid})" in output
    first.terminate()
    ended(first, 0)


def test_two_runs_with_one_output_folder(job: Job):
    first = job.trainer()
    wait_for(paths.status_path(job.run).exists, first)
    job.settings["name"] = "other"
    assert f"has a trainer already: trainer of run toy (pid {first.pid})" in ended(job.trainer(), 1)
    first.terminate()


def test_its_files_in_the_run_directory_stay_fresh(job: Job):
    lock, status = paths.rank_lock(job.run, 7), paths.status_path(job.run)
    lock.touch()
    os.utime(lock, (0, 0))
    wait_for(status.exists, job.trainer())
    assert lock.stat().st_mtime > 1e6


def test_waits_for_a_rank_of_a_dead_trainer(job: Job):
    from paceline.common.locks import FileLock

    folder = paths.run_dir("toy")
    with FileLock(folder / "rank-0.lock", "rank 0 of run toy") as lock:
        assert lock.acquire()
        trainer = job.trainer()
        said = f"waiting for rank 0 of run toy (pid {os.getpid()}) of an earlier trainer to end\n"
        wait_for(lambda: trainer.output == said, trainer)
        trainer.terminate()
        ended(trainer, 0)


def stop_after(job: Job, step: int) -> None:
    trainer = job.trainer(learner={"seconds": 0.05})
    job.worker(0)
    wait_for(step_reached(job, step), trainer)
    trainer.terminate()
    ended(trainer, 0)
    job.kill_all()


def test_changed_run_file_is_refused_with_both_values(job: Job):
    stop_after(job, 2)
    job.settings["trainer"]["seed"] = 5
    output = ended(job.trainer(), 78)
    assert "(seed is 5 in the run file and 0 in the checkpoint)" in output


def test_lowered_limit_is_refused(job: Job):
    stop_after(job, 4)
    job.settings["trainer"]["max_steps"] = 2
    assert "the plan has 2" in ended(job.trainer(), 78)


def test_damaged_checkpoint_is_passed_over(job: Job, undisturbed: dict[str, float]):
    stop_after(job, 4)
    newest = job.newest()
    (newest / ck.MANIFEST).unlink()
    output = finish(job, undisturbed)
    assert f"passing over checkpoint {newest}: manifest.json is missing" in output
    assert f"a newer checkpoint is left aside: {newest.with_name('left-' + newest.name)}" in output


def test_resume_from_an_older_checkpoint_leaves_the_newer_aside(job: Job, undisturbed: dict[str, float]):
    job.settings["checkpoint"]["keep_last"] = 9
    stop_after(job, 5)
    oldest = ck.folders(job.checkpoints)[-1]
    trainer = job.trainer(str(oldest))
    job.worker(0)
    output = ended(trainer, 0)
    assert "a newer checkpoint is left aside" in output
    assert job.audit().finished
    assert job.weight() == expected_weight(job, undisturbed)
    assert "cannot resume: there is no folder nowhere: give a checkpoint" in ended(job.trainer("nowhere"), 78)


@pytest.mark.parametrize("own", ["newer checkpoints", "none", "one left aside"])
def test_resume_from_another_folder(job: Job, own: str, undisturbed: dict[str, float]):
    """A copy was kept elsewhere, whose neighbours stay as they are. Killed before the first checkpoint of its own, the
    trainer goes on in the timeline that was chosen: neither from newer checkpoints of the one left nor from nothing."""
    job.settings["checkpoint"]["keep_last"] = 9
    stop_after(job, 5)
    kept = shutil.copytree(job.checkpoints, job.folder / "kept")
    if own == "none":
        shutil.rmtree(job.checkpoints)
    newest, *_, oldest = ck.folders(kept)
    if own == "one left aside":
        oldest = (job.checkpoints / oldest.name).rename(job.checkpoints / f"left-{oldest.name}")
    trainer = job.trainer(str(oldest), learner={"seconds": 600.0})
    wait_for(lambda: (read_status(paths.status_path(job.run)) or {}).get("state") == "waiting", trainer)
    trainer.kill()
    assert newest.exists(), "another folder's checkpoints are none of this run's timeline"
    step = ck.load_state(oldest).step
    assert ck.load_state(job.newest()).step == step
    assert f"at step {step} from" in finish(job, undisturbed)
