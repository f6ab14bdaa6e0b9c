"""What `paceline up` draws, without a terminal."""

import io
import time
from pathlib import Path

import pytest
from paceline.common.progress import LiveView, PlainView, make_view
from paceline.common.runfile import RunFile
from paceline.common.telemetry import Status, log_line
from paceline.common.up import Child
from rich.console import Console

STATUS: Status = {
    "state": "training",
    "step": 40,
    "total_steps": 1056,
    "epoch": 0.25,
    "epochs": 6,
    "loss": 2.5,
    "acc": 0.25,
    "tau": 1.5,
    "lr": 6e-4,
    "target_bps": 1.25,
    "drafter_bps": 1.0,
    "tokens_per_s": 1500.0,
    "q_pre": [4, 3],
    "q_hs": [2, 0],
    "slots": 3,
    "eta_s": 7200.0,
    "wait_data": 0.3,
    "wait_gpu": 0.6,
    "worker_wait": 0.0,
}


@pytest.fixture
def run() -> RunFile:
    return RunFile.model_validate(
        {
            "name": "demo",
            "output": "/out",
            "target": {"path": "t"},
            "data": {"files": ["d"]},
            "workers": {"count": 2},
        }
    )


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=110, color_system=None, highlight=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def child(name: str, state: str, line: str = "") -> Child:
    made = Child(name, [], Path("/log"), state=state, started=time.monotonic() - 90)
    made.own_lines.append(line)
    return made


def test_the_screen(run: RunFile, console: Console) -> None:
    view = LiveView(run, console)
    failed = child("w1", "restarts", "RuntimeError: out of memory")
    failed.start_at = time.monotonic() + 4.5
    view.refresh([child("trainer", "running", log_line(STATUS)), child("w0", "running", "w0: packing"), failed], STATUS)
    view.close()
    text = shown(console)
    for part in (
        "paceline demo  2-1: 2 workers, 1 rank",
        "step 40 of 1,056",
        "ETA 2.0h",
        "loss 2.500   acc 0.25   tau 1.50   lr 6.0e-04   epoch 0.25 of 6",
        "target 1.25 batches/s   drafter 1.00 batches/s   context 1,500 tokens/s   ranks compute 60%",
        "■■□ 2",
        "packing",
        "restarts in 4s",
        "RuntimeError: out of memory",
        "targets are the bottleneck",
        "Ctrl-C stops with a checkpoint",
    ):
        assert part in text
    assert "w0: packing" not in text and "| tgt=" not in text


def last_screen(run: RunFile, width: int, height: int, children: list[Child], status: Status = STATUS) -> list[str]:
    """The lines of a terminal of that size after one frame."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    view = LiveView(run, console)
    view.refresh(children, status)
    lines = shown(console).removeprefix("\x1b[?25l").splitlines()
    view.close()
    return [line.rstrip() for line in lines]


def test_more_workers_than_lines(run: RunFile) -> None:
    """What can be done something about is on the screen: a worker that fails, and what to do."""
    workers = [child(f"w{index}", "running") for index in range(40)]
    workers[33].state = "failed"
    lines = last_screen(run, 100, 24, [child("trainer", "running"), *workers])
    assert len(lines) <= 24 and lines[-1].startswith("Ctrl-C stops")
    rows = [line.split()[0] for line in lines if line.startswith(("trainer", "w"))]
    assert rows == ["trainer", *(f"w{index}" for index in range(len(rows) - 2)), "w33"]
    assert f"and {41 - len(rows)} more, running: make the window taller" in lines
    assert not any(" more, running" in line for line in last_screen(run, 100, 60, workers))


@pytest.mark.parametrize("width", [40, 50, 60, 70, 110])
def test_a_narrow_terminal_cuts_no_figure(run: RunFile, width: int) -> None:
    again = child("w1", "running", "packing")
    again.restarts = 2
    lines = last_screen(run, width, 30, [child("trainer", "running", "up"), child("w0", "running", "packing"), again])
    text = "\n".join(lines)
    for part in ("process", "running, 2 restarts", "■■□ 2", "□□□ 0", "step 40 of 1,056", "ETA 2.0h", "training"):
        assert part in text, text
    assert max(map(len, lines)) <= width


def test_a_ring_of_many_slots_takes_no_line(run: RunFile) -> None:
    lines = last_screen(run, 80, 30, [child("w0", "running", "packing")], STATUS | {"slots": 256, "q_hs": [200, 0]})
    assert any("200 of 256" in line and "packing" in line for line in lines)


def test_before_there_is_a_status(run: RunFile, console: Console) -> None:
    view = LiveView(run, console)
    view.refresh([child("trainer", "running", "loading")], None)
    view.close()
    assert "loading" in shown(console) and "loss" not in shown(console)


def test_waiting_shows_what_for(run: RunFile, console: Console) -> None:
    view = LiveView(run, console)
    view.refresh([], {"state": "waiting", "message": "for a worker", "step": 0})
    view.close()
    assert "waiting for a worker" in shown(console)


def test_queues_of_named_workers(run: RunFile, console: Console) -> None:
    view = LiveView(run, console)
    status: Status = {"names": ["w1"], "q_pre": [4], "q_hs": [1], "slots": 2, "step": 0}
    view.refresh([child("w0", "running", "loading"), child("w1", "running", "packing")], status)
    lines = shown(console).splitlines()
    view.close()
    assert any("w1" in line and "■□ 1" in line for line in lines)
    assert not any("w0" in line and "■" in line for line in lines)


def test_events_and_remarks_stay_above_the_screen(run: RunFile, console: Console) -> None:
    view = LiveView(run, console)
    view.event("w0 was killed by SIGKILL", urgent=True)
    view.line("trainer", log_line(STATUS))
    view.line("trainer", "trainer: resumed from step 40 [ok]")
    view.line("w0", "w0: loading")
    view.close()
    text = shown(console)
    assert "w0 was killed by SIGKILL" in text and "trainer resumed from step 40 [ok]" in text
    assert "tgt=" not in text and "loading" not in text


def test_failures_show_what_is_not_on_the_screen_yet(run: RunFile, console: Console) -> None:
    view = LiveView(run, console)
    view.failure(child("w0", "restarts"), "w0 failed", ["no memory"])
    view.failure(child("trainer", "restarts"), "trainer failed", ["shown before"])
    view.close()
    text = shown(console)
    assert "w0 failed" in text and "    no memory" in text and "(log: /log)" in text
    assert "trainer failed" in text and "shown before" not in text


def test_plain_lines(run: RunFile, capsys: pytest.CaptureFixture[str]) -> None:
    view = make_view(run, plain=False)
    assert isinstance(view, PlainView), "stdout is no terminal here"
    view.event("one\ntwo")
    view.line("w0", "w0: ready")
    view.failure(child("w0", "failed"), "w0 failed", ["w0: ready", "no memory"])  # of which one was shown already
    view.refresh([], STATUS)
    view.close()
    assert capsys.readouterr().out == (
        "up      | one\nup      | two\nw0      | ready\n"
        "up      | w0 failed\nup      |     no memory\nup      |     (log: /log)\n"
    )
