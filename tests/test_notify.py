"""What systemd is told by both sides, on the socket that it would give them."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forking import Forks, Process
from paceline.common import notify, paths
from paceline.common.dataset import wait_for_lock
from paceline.common.finished import mark_finished
from paceline.common.locks import FileLock
from paceline.common.runfile import RunFile
from paceline.consumer.trainer import Trainer
from standins import make_rows

PATIENCE = 60.0


class Listener:
    """systemd's end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._arrived: queue.Queue[list[str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Always, as systemd does: few datagrams fit into the socket's own queue."""
        while data := self._socket.recv(8192):
            self._arrived.put(data.decode().split("\n"))

    def until(self, start: str) -> str:
        """Hears lines until one begins so; returns that one."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            lines = self._arrived.get(timeout=PATIENCE)
            self.heard += lines
            if found := [line for line in lines if line.startswith(start)]:
                return found[0]
        raise AssertionError(f"{start} was not heard, but {self.heard[-5:]}")

    def pending(self) -> list[str]:
        """What has arrived and was not heard."""
        notify.notify("END=1")  # arrives last
        lines: list[str] = []
        while (found := self._arrived.get(timeout=PATIENCE)) != ["END=1"]:
            lines += found
        return lines

    def close(self) -> None:
        """Ends the thread: a datagram without contents."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", str(self.path))


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    listener = Listener(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(listener.path))
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    yield listener
    listener.close()


Start = Callable[..., Process]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "run"))
    rows = make_rows(tmp_path / "rows", count=64)
    settings = {
        "name": "toy",
        "output": str(tmp_path / "out"),
        "target": {"path": "none", "dtype": "float32"},
        "data": {"rows": str(rows.folder), "max_length": 24, "held_out": 6},
        "stream": {"token_budget": 64, "slots": 2, "ring_dir": str(tmp_path / "shm")},
        "trainer": {"epochs": 1000, "dtype": "float32"},
        "checkpoint": {"every_steps": 100, "every_minutes": None},
        "evaluation": {"every_steps": 0, "at_end": False},
    }
    return RunFile.model_validate(settings)


@pytest.fixture(scope="session")
def forks(fork_server: Callable[[str], Forks]) -> Forks:
    return fork_server("standins.py")


@pytest.fixture
def start(run: RunFile, tmp_path: Path, forks: Forks) -> Iterator[Start]:
    """start("trainer", seconds=...) or start("worker"): a process on stand-ins; only the trainer notifies."""
    processes: list[Process] = []

    def start(role: str, run: RunFile = run, **learner: float) -> Process:
        names = ["PACELINE_RUNTIME_DIR", *(["NOTIFY_SOCKET", "WATCHDOG_USEC"] if role == "trainer" else [])]
        environment = {name: os.environ[name] for name in names} | {"STANDIN_LEARNER": json.dumps(learner)}
        arguments = [run.model_dump_json(), *(["0"] if role == "worker" else [])]
        process = forks.start(role, *arguments, output=tmp_path / f"{role}.log", **environment)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()


def test_trainer_is_ready_after_its_ranks_and_shows_rate_and_rings(run: RunFile, systemd: Listener, start: Start):
    trainer = start("trainer", seconds=0.1)
    systemd.until("READY=1")
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in systemd.heard), "while the rank started"
    systemd.until("STATUS=step 0 of ")
    start("worker")
    while not (said := systemd.until("STATUS=")).endswith(" training") or "Ktok/s" not in said:
        continue
    assert re.fullmatch(r"STATUS=step \d+ of \d+, [0-9.]+ Ktok/s, rings [0-2] of 2 full, training", said)
    systemd.until("WATCHDOG=1")
    trainer.terminate()
    systemd.until("STOPPING=1")
    assert trainer.wait(PATIENCE) == 0


def test_trainer_asks_for_time_as_long_as_it_saves(run: RunFile, systemd: Listener, start: Start):
    trainer = start("trainer", seconds=0.05, save_seconds=4.0)
    start("worker")
    while "step 0 " in systemd.until("STATUS=step "):
        continue
    trainer.terminate()
    systemd.until("STOPPING=1")
    extensions = 0
    while "checkpoint" not in (said := systemd.until("STATUS=")):
        extensions = sum(line.startswith("EXTEND") for line in systemd.heard[systemd.heard.index("STOPPING=1") :])
    assert extensions >= 2, "once would be a request of EXTEND_SECONDS, however long it takes"
    assert said.startswith("STATUS=stopped at step ")
    assert trainer.wait(PATIENCE) == 0


def test_finished_run_is_ready_before_it_leaves(run: RunFile, systemd: Listener, start: Start):
    """Type=notify calls it a failure to end without READY=1, and would start it again."""
    short = run.model_copy(update={"trainer": run.trainer.model_copy(update={"max_steps": 1})})
    start("worker", run=short)
    assert start("trainer", run=short).wait(PATIENCE) == 0
    systemd.until("STATUS=run toy is finished at step 1 of 1, checkpoint ")
    systemd.pending()
    assert start("trainer", run=short).wait(PATIENCE) == 0
    heard = systemd.pending()
    assert heard.index("READY=1") < heard.index("STATUS=run toy is finished")


def test_worker_of_a_finished_run_is_ready_before_it_leaves(run: RunFile, systemd: Listener):
    from paceline.producer import worker

    mark_finished(run, 1)
    assert worker.main(run, 0) == 0
    assert systemd.pending()[:2] == ["READY=1", "STATUS=run toy is finished"]


def test_trainer_that_waits_for_a_rank_of_a_dead_one_asks_for_time(run: RunFile, systemd: Listener, start: Start):
    with FileLock(paths.rank_lock(run, 0), "rank 0 of run toy") as lock:
        assert lock.acquire()
        trainer = start("trainer")
        assert systemd.until("STATUS=waiting for ").endswith("of an earlier trainer to end")
        systemd.until("EXTEND_TIMEOUT_USEC=")
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(PATIENCE) == 0
    assert "READY=1" not in systemd.heard


def test_waiting_for_prepared_rows_asks_for_time(systemd: Listener, tmp_path: Path):
    patience, held = notify.Patience(30.0), FileLock(tmp_path / "rows.lock", "prepare")
    assert held.acquire()

    def alive() -> None:
        patience.alive()
        held.release()

    wait_for_lock(held.path, "another", alive).release()
    assert systemd.pending() == ["EXTEND_TIMEOUT_USEC=30000000"]


def test_patience_does_not_chatter(systemd: Listener):
    patience = notify.Patience(30.0)
    for _ in range(100):
        patience.alive()
    assert len(systemd.pending()) == 1


@pytest.mark.parametrize(("silence", "killed", "beats"), [(0.0, False, 1), (1000.0, False, 0), (0.0, True, 0)])
def test_watchdog_is_not_fed_when_the_feed_hangs_or_ranks_outlive_a_kill(
    systemd: Listener, monkeypatch: pytest.MonkeyPatch, silence: float, killed: bool, beats: int
):
    trainer = Trainer.__new__(Trainer)
    trainer._watchdog, trainer._killed, trainer._kill_at, trainer._ready = notify.Watchdog(), killed, None, True
    monkeypatch.setattr(Trainer, "_status_line", lambda self, doing: doing)
    trainer._tell_systemd("training", "", silence)
    assert systemd.pending().count("WATCHDOG=1") == beats


def test_systemd_that_does_not_listen_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notify, "READY_SECONDS", 0.05)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    assert not notify.notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "notify"))
        assert notify.notify("READY=1")
        while notify.notify("STATUS=" + 1000 * "x"):  # until its queue is full
            continue


def test_failure_is_told(systemd: Listener, tmp_path: Path):
    command = [sys.executable, "-m", "paceline.common.cli", "consumer", str(tmp_path / "none.toml")]
    assert subprocess.run(command, capture_output=True).returncode == 78
    assert systemd.pending() == [f"STATUS={tmp_path}/none.toml: no such run file (`paceline init` writes one)"]
