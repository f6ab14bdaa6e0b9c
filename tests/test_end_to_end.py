"""A real, tiny target and the real drafter, through the command line: trained, killed, resumed, audited.

The processes are forked with their imports done (forked_cli.py).
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forking import Forks, Process
from paceline.common import faults, paths
from paceline.common.runfile import RunFile, to_toml
from paceline.common.telemetry import METRICS_FILE, read_metrics
from paceline.consumer import checkpoint as ck
from paceline.consumer.audit import audit
from safetensors.numpy import load_file

PATIENCE = 600.0  # seconds, on a loaded machine

Start = Callable[..., Process]


@pytest.fixture(scope="session")
def forks(fork_server: Callable[[str], Forks]) -> Forks:
    return fork_server("forked_cli.py")


@pytest.fixture
def run(tmp_path: Path, tiny_target_dir: Path, chat_file: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return RunFile.model_validate(
        {
            "name": "tiny",
            "output": str(tmp_path / "out"),
            "target": {"path": str(tiny_target_dir), "dtype": "float32"},
            "data": {"files": [str(chat_file)], "max_length": 256, "held_out": 8},
            "stream": {"token_budget": 1024, "order": "strict", "slots": 2, "ring_dir": str(tmp_path / "shm")},
            "workers": {"devices": ["cpu"]},
            "trainer": {
                "batches_per_step": 2,
                "epochs": 1,
                "max_steps": 6,
                "dtype": "float32",
                "devices": ["cpu"],
                "threads": 1,
            },
            "drafter": {"layers": 1, "block_size": 4, "mask_token_id": 3},
            "optimizer": {"lr": 5e-3},
            "checkpoint": {"every_steps": 2, "keep_last": 9},
            "evaluation": {"every_steps": 3},
            "logging": {"log_every": 1},
        }
    )


@pytest.fixture
def start(tmp_path: Path, forks: Forks) -> Iterator[Start]:
    """start(run, *command): a paceline command on the run file; its output goes to a log in tmp_path."""
    processes: list[Process] = []

    def start(run: RunFile, command: str, *options: str, fault: str = "") -> Process:
        file = tmp_path / "run.toml"
        file.write_text(to_toml(run))
        environment = {name: os.environ[name] for name in ("PACELINE_RUNTIME_DIR", "PACELINE_CACHE")}
        environment[faults.VARIABLE] = fault
        log = tmp_path / f"{command}.log"
        process = forks.start("command", command, str(file), *options, output=log, fault=fault, **environment)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()


def log(tmp_path: Path) -> str:
    return "\n".join(f"== {file.name}\n{file.read_text()}" for file in sorted(tmp_path.glob("*.log")))


def weights(run: RunFile) -> dict[str, Any]:
    path, skipped = ck.newest_complete(paths.checkpoint_dir(run))
    assert path is not None
    assert skipped == ()
    return load_file(path / ck.MODEL)


def steps(run: RunFile) -> list[tuple[int, float, float]]:
    lines = read_metrics(Path(run.output))
    return [(line["step"], line["loss"], line["lr"]) for line in lines if line["kind"] == "train"]


WORKER_FAULTS = [
    "ring.half-made",
    "worker.loading",
    "worker.hello",
    "worker.work-received",
    "ring.writing",
    "worker.filled",
    "worker.committed-not-sent",
    "worker.sent",
]
TRAINER_FAULTS = ["ring.taken", "rank.gathered-not-stepped", "checkpoint.after-rename", "rank.stepped-not-recorded"]


def supervise(run: RunFile, start: Start, tmp_path: Path, points: dict[str, list[str]]) -> None:
    """Both sides until the run is finished, each started again when it died at its next fault; proof that it did."""
    left = {command: [*own, ""] for command, own in points.items()}
    alive = {command: start(run, command, fault=own[0]) for command, own in left.items()}
    until = time.monotonic() + 2 * PATIENCE
    while alive:
        time.sleep(0.05)
        assert time.monotonic() < until, log(tmp_path)
        for command, process in list(alive.items()):
            code, point = process.poll(), left[command][0]
            if code is None:
                continue
            if not point:
                assert code == 0, log(tmp_path)
                del alive[command]
                continue
            # A rank's death ends its main process with 1.
            assert code in (-signal.SIGKILL, 1), log(tmp_path)
            died = f"paceline: killed at fault point {point.partition(':')[0]}\n"
            assert died in (tmp_path / f"{command}.log").read_text(), log(tmp_path)
            left[command].pop(0)
            alive[command] = start(run, command, fault=left[command][0])
    assert all(own == [""] for own in left.values())


@pytest.fixture
def undisturbed(run: RunFile, start: Start, tmp_path: Path) -> RunFile:
    """A finished run of one worker and one rank to which nothing happened."""
    first = run.model_copy(update={"output": str(tmp_path / "undisturbed"), "name": "undisturbed"})
    worker, trainer = start(first, "producer"), start(first, "consumer")
    assert trainer.wait(PATIENCE) == 0, log(tmp_path)
    assert worker.wait(PATIENCE) == 0, log(tmp_path)
    return first


def audited(run: RunFile) -> None:
    report = audit(ck.folders(paths.checkpoint_dir(run))[0])
    assert report.finished, report.text()
    assert report.trained == report.planned, report.text()


def same_weights(run: RunFile, undisturbed: RunFile, tmp_path: Path) -> None:
    assert "resuming run tiny-" in log(tmp_path)
    assert re.search(r"rank 0 is ready: .+ s for the checkpoint", log(tmp_path))
    expected, found = weights(undisturbed), weights(run)
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected), "bit-equal in strict order on CPU in fp32"
    audited(run)
    assert steps(undisturbed) == steps(run)
    assert {"tau", "tau_chain"} <= read_metrics(Path(run.output))[-1].keys()


@pytest.mark.slow
def test_killed_run_ends_with_the_same_weights(run: RunFile, undisturbed: RunFile, start: Start, tmp_path: Path):
    supervise(run, start, tmp_path, {"consumer": TRAINER_FAULTS, "producer": WORKER_FAULTS})
    same_weights(run, undisturbed, tmp_path)


@pytest.mark.slow
def test_strict_order_gives_the_same_weights_whatever_is_killed(
    run: RunFile, undisturbed: RunFile, start: Start, tmp_path: Path
):
    """First two workers, then three; the trainer and a worker are killed twice, at other moments."""
    workers = [start(run, "producer", "--worker", str(index)) for index in (0, 1)]
    for fault in ("rank.gathered-not-stepped:4", "rank.copied-not-released:2"):
        trainer = start(run, "consumer", fault=fault)
        assert trainer.wait(PATIENCE) == 1, log(tmp_path)
        victim = workers.pop(0)
        victim.kill()
        workers.append(start(run, "producer", "--worker", "2" if len(workers) == 1 else "0"))
    workers.append(start(run, "producer", "--worker", "0"))
    trainer = start(run, "consumer")
    assert trainer.wait(PATIENCE) == 0, log(tmp_path)
    same_weights(run, undisturbed, tmp_path)


@pytest.mark.slow
def test_ranks_change_from_one_to_two_to_three_to_one(run: RunFile, undisturbed: RunFile, start: Start, tmp_path: Path):
    """Over gloo. All ranks die in a step each time; the worker knows nothing of it. Only sums are rounded otherwise."""
    worker = start(run, "producer")
    every = ("--set", "checkpoint.every_steps=1")
    for ranks, phase in ((1, 3), (2, 3), (3, 2)):
        fault = f"rank.gathered-not-stepped:{phase}"
        trainer = start(run, "consumer", "--set", f"trainer.ranks={ranks}", *every, fault=fault)
        assert trainer.wait(PATIENCE) == 1, log(tmp_path)
        assert worker.poll() is None, log(tmp_path)
    assert start(run, "consumer", *every).wait(PATIENCE) == 0, log(tmp_path)
    assert worker.wait(PATIENCE) == 0, log(tmp_path)
    audited(run)
    # All that was ever written: a step whose checkpoint was not whole yet is done again, by another number of ranks.
    written = map(json.loads, (Path(run.output) / METRICS_FILE).read_text().splitlines())
    lines = [line for line in written if line["kind"] == "train"]
    assert {len(line["rank_records"]) for line in lines} == {1, 2, 3}
    assert all((line["reduce_s"] > 0) == (len(line["rank_idle"]) > 1) for line in lines)
    expected, found = steps(undisturbed), steps(run)
    assert [(step, lr) for step, _, lr in expected] == [(step, lr) for step, _, lr in found]
    assert [loss for _, loss, _ in expected] == pytest.approx([loss for _, loss, _ in found], rel=1e-4)


@pytest.mark.slow
def test_wrong_mask_token_keeps_its_exit_code(run: RunFile, start: Start, tmp_path: Path):
    wrong = run.model_copy(update={"drafter": run.drafter.model_copy(update={"mask_token_id": 100000})})
    assert start(wrong, "consumer").wait(PATIENCE) == 78, log(tmp_path)
    assert log(tmp_path).count("mask_token_id") == 1, log(tmp_path)


@pytest.mark.slow
def test_a_run_on_eight_bit_states(run: RunFile, undisturbed: RunFile, start: Start, tmp_path: Path):
    """Its losses are near those of the states as they are, and not the same."""
    stream = run.stream.model_copy(update={"payload": "fp8"})
    rounded = run.model_copy(update={"stream": stream})
    worker, trainer = start(rounded, "producer"), start(rounded, "consumer")
    assert trainer.wait(PATIENCE) == 0, log(tmp_path)
    assert worker.wait(PATIENCE) == 0, log(tmp_path)
    audited(rounded)
    expected, found = ([loss for _, loss, _ in steps(one)] for one in (undisturbed, rounded))
    assert found == pytest.approx(expected, rel=0.02) and found != expected
