"""One complete checkpoint always exists, whatever is killed, cut short or full."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paceline.common.batch import Kind
from paceline.consumer import checkpoint as ck
from safetensors.numpy import load_file, save_file


def state(step: int, **changes) -> ck.CheckpointState:
    fields = {
        "name": "demo",
        "run_id": "demo-1",
        "step": step,
        "phase": (Kind.TRAIN, step),
        "seconds": 1.5,
        "tokens": 10 * step,
        "evaluated": None,
        "ledger": {"trained": {"0": [[0, step]]}, "listed": {}},
        "rng": {"seed": 0},
        "fingerprint": {"target": "abc", "seed": 0},
        "drafter": {"layers": 1},
        "run": {"name": "demo"},
        "versions": {"paceline": "0"},
        "metrics": {"loss": 1.0},
    }
    return ck.CheckpointState(**(fields | changes))


def evaluated(step: int, tau_chain: float) -> ck.CheckpointState:
    return state(step, evaluated=step, metrics={"tau_chain": tau_chain})


def writer(value: float, size: int = 8):
    def write(folder: Path) -> None:
        save_file({"w": np.full(size, value)}, folder / ck.MODEL)
        save_file({"m": np.zeros(size)}, folder / ck.OPTIMIZER)

    return write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_what_is_written_is_what_is_read(root: Path):
    path = ck.write_checkpoint(root, state(7), writer(3.0))
    assert path.name == "step-00000007"
    assert ck.newest_complete(root) == (path, ())
    assert ck.load_state(path) == state(7)
    assert load_file(path / ck.MODEL)["w"].tolist() == [3.0] * 8


def test_no_checkpoint_at_all(root: Path):
    assert ck.newest_complete(root) == (None, ())


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda p: (p / ck.MANIFEST).unlink(), "manifest.json is missing"),
        (lambda p: (p / ck.MANIFEST).write_text("{"), "manifest.json is damaged"),
        (lambda p: (p / ck.MODEL).write_bytes((p / ck.MODEL).read_bytes()[:-1]), "bytes, not"),
        (lambda p: (p / ck.MODEL).write_bytes((p / ck.MODEL).read_bytes()[:-1] + b"\1"), "SHA-256 differs"),
        (lambda p: (p / ck.OPTIMIZER).unlink(), "optimizer.safetensors is missing"),
        (lambda p: (p / ck.STATE).unlink(), "state.json is missing"),
    ],
)
def test_damaged_checkpoint_is_passed_over_and_named(root: Path, harm, reason: str):
    good = ck.write_checkpoint(root, state(1), writer(1.0))
    bad = ck.write_checkpoint(root, state(2), writer(2.0))
    harm(bad)
    found, skipped = ck.newest_complete(root)
    assert found == good
    assert [s.path for s in skipped] == [bad]
    assert reason in skipped[0].reason


@pytest.mark.parametrize(
    ("change", "where"),
    [({"surprise": 1}, "surprise"), ({"step": "1"}, "step"), ({"phase": [7, 1]}, "phase"), ({"format": 2}, "format")],
)
def test_state_is_read_strictly(root: Path, change: dict, where: str):
    path = ck.write_checkpoint(root, state(1), writer(1.0))
    (path / ck.STATE).write_text(json.dumps(json.loads((path / ck.STATE).read_text()) | change))
    with pytest.raises(ck.CheckpointError, match=where):
        ck.load_state(path)


def test_finished_run_has_no_next_phase(root: Path):
    path = ck.write_checkpoint(root, state(1, phase=None), writer(1.0))
    assert ck.load_state(path).phase is None


def test_incomplete_folder_of_the_same_step_is_replaced(root: Path):
    path = ck.write_checkpoint(root, state(3), writer(1.0))
    (path / ck.MANIFEST).unlink()
    ck.write_checkpoint(root, state(3), writer(2.0))
    assert ck.newest_complete(root) == (path, ())
    assert load_file(path / ck.MODEL)["w"][0] == 2.0
    assert [p.name for p in root.iterdir()] == ["step-00000003"]


KILLED = """
import sys
from pathlib import Path
from paceline.consumer import checkpoint as ck
state = ck.CheckpointState.model_validate_json(sys.argv[2])
def write(folder):
    for name in (ck.MODEL, ck.OPTIMIZER):
        (folder / name).write_bytes(b"new")
ck.write_checkpoint(Path(sys.argv[1]), state, write)
"""


def killed_at(point: str, root: Path, step: int) -> None:
    """Write a checkpoint in another process, which dies at the named fault point."""
    command = [sys.executable, "-c", KILLED, str(root), state(step).model_dump_json()]
    assert subprocess.run(command, env=os.environ | {"PACELINE_FAULT": point}).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("point", "step", "newest"), [("checkpoint.before-rename", 2, 1), ("checkpoint.after-rename", 2, 2)]
)
def test_killed_writer_leaves_a_complete_checkpoint(root: Path, point: str, step: int, newest: int):
    ck.write_checkpoint(root, state(1), writer(1.0))
    killed_at(point, root, step)
    found, skipped = ck.newest_complete(root)
    assert found == ck.step_folder(root, newest)
    assert skipped == ()
    ck.write_checkpoint(root, state(3), writer(3.0))
    assert all(p.name.startswith("step-") for p in root.iterdir()), "what the killed writer left is swept"


def test_killed_between_the_two_renames_of_a_replacement(root: Path):
    path = ck.write_checkpoint(root, state(1), writer(1.0))
    path.rename(root / f".was-{path.name}")
    found, _ = ck.newest_complete(root)
    assert found is not None
    assert ck.load_state(found) == state(1)
    ck.write_checkpoint(root, state(2), writer(2.0))
    assert ck.damage(path) is None


def test_full_disk_leaves_the_last_complete_one(root: Path):
    good = ck.write_checkpoint(root, state(1), writer(1.0))

    def full(folder: Path) -> None:
        writer(2.0)(folder)
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    with pytest.raises(ck.CheckpointError, match="No space left on device"):
        ck.write_checkpoint(root, state(2), full)
    assert ck.newest_complete(root) == (good, ())
    assert [p.name for p in root.iterdir()] == [good.name]


def test_learner_that_forgets_a_file_is_refused(root: Path):
    with pytest.raises(ck.CheckpointError, match=r"optimizer\.safetensors"):
        ck.write_checkpoint(root, state(1), lambda folder: save_file({"w": np.ones(1)}, folder / ck.MODEL))
    assert ck.newest_complete(root) == (None, ())


def steps(root: Path) -> list[int]:
    return sorted(ck.load_state(path).step for path in ck.folders(root) if ck.damage(path) is None)


def test_prune_keeps_the_newest_and_the_best(root: Path):
    for step, tau in [(1, 2.0), (2, 3.5), (3, 3.0), (4, 3.1), (5, 2.9)]:
        ck.write_checkpoint(root, evaluated(step, tau), writer(step))
    ck.prune(root, keep_last=2, keep_best=True)
    assert steps(root) == [2, 4, 5]
    ck.prune(root, keep_last=1, keep_best=False)
    assert steps(root) == [5]


def test_best_counts_only_evaluations_of_its_own_weights(root: Path):
    ck.write_checkpoint(root, state(1, evaluated=0, metrics={"tau_chain": 9.0}), writer(1.0))
    best = ck.write_checkpoint(root, evaluated(2, 2.0), writer(2.0))
    assert ck.best_of(ck.folders(root)) == best
    newer = ck.write_checkpoint(root, evaluated(3, 2.0), writer(3.0))
    assert ck.best_of(ck.folders(root)) == newer, "of equals"


def test_best_and_newest_stand_for_checkpoints(tmp_path: Path):
    output, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    for step, tau in [(1, 2.0), (2, 3.5), (3, 3.0)]:
        ck.write_checkpoint(root, evaluated(step, tau), writer(step))
    ck.write_checkpoint(root, state(4), writer(4))
    (ck.step_folder(root, 4) / ck.MODEL).unlink()
    for folder in (output, root):
        assert ck.find_checkpoint(folder / "best") == ck.step_folder(root, 2)
        assert ck.find_checkpoint(folder / "newest") == ck.step_folder(root, 3)
        with pytest.raises(ck.CheckpointError, match=r"holds checkpoints: name one of them, or .*best"):
            ck.find_checkpoint(folder)
    assert ck.find_checkpoint(ck.step_folder(root, 1)) == ck.step_folder(root, 1)
    (tmp_path / "best").mkdir()  # a folder of that name is that folder
    assert ck.find_checkpoint(tmp_path / "best") == tmp_path / "best"


def test_best_of_none(tmp_path: Path):
    root = tmp_path / "run" / "checkpoints"
    with pytest.raises(ck.CheckpointError, match="no complete checkpoint"):
        ck.find_checkpoint(tmp_path / "run" / "newest")
    ck.write_checkpoint(root, state(1), writer(1))
    with pytest.raises(ck.CheckpointError, match=r"no checkpoint in .* was evaluated"):
        ck.find_checkpoint(tmp_path / "run" / "best")


def test_prune_neither_counts_nor_removes_incomplete_ones(root: Path):
    for step in (1, 2, 3):
        ck.write_checkpoint(root, state(step), writer(step))
    (ck.step_folder(root, 3) / ck.MODEL).unlink()
    ck.prune(root, keep_last=1, keep_best=True)
    assert steps(root) == [2]
    assert ck.step_folder(root, 3).exists()


def test_resuming_an_older_one_sets_the_newer_aside(root: Path):
    for step in (1, 2, 3):
        ck.write_checkpoint(root, state(step), writer(step))
    assert [p.name for p in ck.set_aside_newer(root, 1)] == ["left-step-00000003", "left-step-00000002"]
    ck.write_checkpoint(root, state(2), writer(2))
    assert [p.name for p in ck.set_aside_newer(root, 1)] == ["left-step-00000002.1"]
    assert ck.newest_complete(root)[0] == ck.step_folder(root, 1)


def test_what_was_just_written_is_kept_beside_a_newer_one_whose_damage_only_reading_shows(root: Path):
    for step in (100, 200):
        ck.write_checkpoint(root, state(step), writer(step))
    damaged = ck.step_folder(root, 200) / ck.MODEL
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    found, skipped = ck.newest_complete(root)
    assert found == ck.step_folder(root, 100) and len(skipped) == 1
    keeper = ck.Checkpointer(root, keep_last=1, keep_best=False)
    keeper.save(state(150), writer(150))
    outcome = keeper.wait(60)
    assert outcome is not None and not outcome.error
    assert ck.newest_complete(root)[0] == ck.step_folder(root, 150)
    keeper.close()


def test_background_writer_reports_each_outcome_once(root: Path):
    keeper = ck.Checkpointer(root, keep_last=2, keep_best=False)
    for step in (1, 2, 3):
        keeper.save(state(step), writer(step))
        outcome = keeper.wait(60)
        assert outcome is not None
        assert (outcome.step, outcome.path, outcome.error) == (step, ck.step_folder(root, step), "")
        assert keeper.poll() is None
    assert steps(root) == [2, 3]

    def refuses(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    keeper.save(state(4), refuses)
    outcome = keeper.wait(60)
    assert outcome is not None
    assert outcome.path is None
    assert "No space left" in outcome.error
    assert steps(root) == [2, 3]
    keeper.close()


def test_imports_no_torch():
    code = "import sys, paceline.consumer.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
