"""The audit is clean for what a run may leave behind, and names what it may not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from paceline.common.batch import BatchId, Kind
from paceline.common.errors import ConfigError, PacelineError
from paceline.common.plan import Plan, plan_from
from paceline.common.rows import Rows
from paceline.common.runfile import RunFile
from paceline.consumer import checkpoint as ck
from paceline.consumer.audit import audit, check_ledger
from paceline.consumer.ledger import Ledger
from standins import SumLearner, make_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return make_rows(tmp_path_factory.mktemp("rows") / "rows", count=64)


@pytest.fixture(scope="module")
def run(rows: Rows) -> RunFile:
    return RunFile.model_validate(
        {
            "name": "toy",
            "output": "out",
            "target": {"path": "none"},
            "data": {"rows": str(rows.folder), "max_length": 24, "held_out": 6},
            "stream": {"token_budget": 64},
            "trainer": {"batches_per_step": 2, "epochs": 2},
        }
    )


@pytest.fixture(scope="module")
def plan(run: RunFile, rows: Rows) -> Plan:
    return plan_from(run, rows)


def train(epoch: int, *indices: int) -> list[BatchId]:
    return [BatchId(Kind.TRAIN, epoch, index) for index in indices]


def after(plan: Plan, steps: int) -> Ledger:
    """The ledger of a strict run after so many steps."""
    ledger = Ledger()
    for step in range(steps):
        epoch = plan.epoch_of(step)
        first = (step - plan.first_step(epoch)) * plan.batches_per_step
        ledger.record(train(epoch, *range(first, first + plan.step_batches(step))), {})
    return ledger


def write(root: Path, run: RunFile, rows: Rows, plan: Plan, step: int, ledger: dict, **changes) -> Path:
    state = {
        "name": "toy",
        "run_id": "toy-1",
        "step": step,
        "phase": (Kind.TRAIN, step) if step < plan.total_steps else None,
        "seconds": 0.0,
        "tokens": 0,
        "evaluated": None,
        "ledger": ledger,
        "rng": {"seed": 0},
        "fingerprint": {"dataset": rows.digest},
        "drafter": {},
        "run": run.model_dump(mode="json"),
        "versions": {},
        "metrics": {},
    }
    return ck.write_checkpoint(root, ck.CheckpointState(**(state | changes)), SumLearner().snapshot())


def test_clean_in_the_middle(tmp_path: Path, run: RunFile, rows: Rows, plan: Plan):
    step = plan.first_step(1) + 1
    path = write(tmp_path, run, rows, plan, step, after(plan, step).to_json())
    report = audit(path)
    assert report.clean
    assert not report.finished
    assert (report.planned, report.trained) == (plan.total_batches, plan.batches(0) + 2)
    assert report.remaining == plan.total_batches - report.trained
    assert "clean: every batch is trained once, listed, or still to come" in report.text()
    assert json.loads(report.json())["remaining"] == report.remaining


def test_clean_at_the_end(tmp_path: Path, run: RunFile, rows: Rows, plan: Plan):
    ledger = after(plan, plan.total_steps).to_json()
    report = audit(write(tmp_path, run, rows, plan, plan.total_steps, ledger))
    assert report.finished
    assert report.remaining == 0


def test_listed_rows_are_named(tmp_path: Path, run: RunFile, rows: Rows, plan: Plan):
    ledger = Ledger()
    ledger.record(train(0, 0), {train(0, 1)[0]: "worker w3: all zero"})
    report = audit(write(tmp_path, run, rows, plan, 1, ledger.to_json()))
    assert report.clean
    [listed] = report.listed
    assert listed.rows == tuple(plan.rows(train(0, 1)[0]).tolist())
    assert "train/0/1" in report.text()
    assert "worker w3: all zero" in report.text()


def test_arrival_order_has_gaps_in_the_epoch_under_way(plan: Plan):
    ledger = Ledger()
    ledger.record(train(0, 1, 3), {})
    assert check_ledger(ledger, plan, 1, strict=False) == []
    assert "batch 0 is not done" in check_ledger(ledger, plan, 1, strict=True)[0]


def test_a_batch_too_few_or_too_many(plan: Plan):
    ledger = after(plan, 2)
    assert "hold 6" in check_ledger(ledger, plan, 3, strict=False)[0]
    ledger.record(train(1, 0), {})
    [problem] = check_ledger(ledger, plan, 2, strict=False)
    assert problem.startswith("epoch 1: 1 batches are done, 0 of its steps hold 0; undone: 1, 2, ")


def test_earlier_epochs_must_be_whole(plan: Plan):
    last = plan.batches(0) - 1
    ledger = Ledger()
    ledger.record(train(0, *range(last)), {})
    ledger.record(train(1, 0), {})
    problems = check_ledger(ledger, plan, plan.first_step(1), strict=False)
    assert f"epoch 0: {last} batches are done" in problems[0]
    assert f"undone: {last}" in problems[0]
    assert len(problems) == 2


def test_strangers_are_named(plan: Plan):
    ledger = after(plan, 1)
    ledger.record(train(7, 3), {train(0, 10**6)[0]: "x"})
    problems = " ".join(check_ledger(ledger, plan, 1, strict=False))
    assert "train/7/3" in problems
    assert "train/0/1000000" in problems


def test_twice_is_a_problem(tmp_path: Path, run: RunFile, rows: Rows, plan: Plan):
    ledger = {"trained": {"0": [[0, 2]]}, "listed": [[0, 1, "x"]]}
    report = audit(write(tmp_path, run, rows, plan, 1, ledger))
    assert not report.clean
    assert "train/0/1 is trained and listed" in report.text()
    assert "NOT CLEAN" in report.text()


def test_finished_by_word_alone(tmp_path: Path, run: RunFile, rows: Rows, plan: Plan):
    ledger = after(plan, plan.total_steps - 1).to_json()
    report = audit(write(tmp_path, run, rows, plan, plan.total_steps, ledger, phase=None))
    assert any("marked finished" in problem for problem in report.problems)


def test_other_rows_are_refused(tmp_path: Path, run: RunFile, rows: Rows, plan: Plan):
    path = write(tmp_path, run, rows, plan, 0, Ledger().to_json())
    with pytest.raises(ConfigError, match="other rows"):
        audit(path, make_rows(tmp_path / "rows", count=64, seed=1))


def test_incomplete_checkpoint_is_refused(tmp_path: Path, run: RunFile, rows: Rows, plan: Plan):
    path = write(tmp_path, run, rows, plan, 0, Ledger().to_json())
    (path / ck.MODEL).unlink()
    with pytest.raises(PacelineError, match=r"no complete checkpoint \(model\.safetensors is missing\)"):
        audit(path)
    with pytest.raises(PacelineError, match=r"there is no folder .*: give a checkpoint"):
        audit(tmp_path / "nowhere")


def test_the_newest_may_be_named_so_and_other_folders_are_said_to_be_no_checkpoint(
    tmp_path: Path, run: RunFile, rows: Rows, plan: Plan
):
    path = write(tmp_path, run, rows, plan, 0, Ledger().to_json())
    assert audit(path.parent / "newest").checkpoint == str(path)
    (tmp_path / "output" / "checkpoints").mkdir(parents=True)
    path.rename(tmp_path / "output" / "checkpoints" / path.name)
    assert audit(tmp_path / "output" / "newest").clean
    with pytest.raises(PacelineError, match=r"holds checkpoints: name one of them, or .*/best or .*/newest"):
        audit(tmp_path / "output")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / ck.MODEL).touch()
    with pytest.raises(PacelineError, match=r"export is no checkpoint, it has neither state\.json nor manifest\.json"):
        audit(tmp_path / "export")


def test_needs_no_torch(tmp_path: Path, run: RunFile, rows: Rows, plan: Plan):
    path = write(tmp_path, run, rows, plan, 0, Ledger().to_json())
    code = "import sys; from paceline.consumer.audit import audit; r = audit(sys.argv[1]); "
    code += "assert r.clean; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 0
