"""What `paceline rings` draws: it fits, reads without colour, and leaves the terminal as it was."""

import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path

import pytest
from paceline.common import rings_screen as screen
from paceline.common.errors import counted
from paceline.common.fingerprint import Fingerprint
from paceline.common.inspect import RingInfo
from paceline.common.ring import Ring
from paceline.common.space import size_text
from paceline.common.window import Rates, Shares, TrainerState, Window
from rich.console import Console, RenderableType
from test_window import info

WIDTHS = [20, 39, 40, 60, 77, 78, 80, 91, 92, 107, 108, 140, 200]
PATIENCE = 60.0
STATES = ("ready",) * 3 + ("taken", "writing") + ("free",) * 3


def rings() -> list[RingInfo]:
    return [
        info("w0", states=STATES, produced=123_456),
        info("w1", states=("ready",) * 60 + ("taken",) + ("free",) * 3, alive=False, device="cuda:1 (GPU 6)"),
        info("w2", states=STATES, alive=False, retired=True, oldest_ready_s=None),
        RingInfo("w3", Path("w3.ring"), problem="w3.ring: not a ring"),
    ]


def lines(shown: RenderableType, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text().splitlines()


def drawn(width: int, *, watched: bool, style: screen.Style = screen.UNICODE) -> list[str]:
    rates = {"w0": Rates(1.5, 2.25, 31_900.0, 950.0)} if watched else None
    shares = {"w0": Shares(0.93, 0.05, (0.0, 0.5, 1.0))} if watched else None
    return lines(screen.table("demo", rings(), rates, shares, width=width, style=style), width)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_fits_its_terminal(width: int, watched: bool):
    shown = drawn(width, watched=watched)
    assert all(len(line) <= width for line in shown)
    rows = {line.split()[0]: line for line in shown if line.startswith("w")}
    assert {"w0", "w1", "w2"} <= rows.keys()
    assert "not a ring" in " ".join(shown).replace("  ", " ")
    bar = "".join(character for character in rows["w1"] if character in "■▣□·")
    assert "■" in bar and "▣" in bar and "·" in bar and screen.NARROWEST_BAR <= len(bar) <= screen.WIDEST_BAR
    if width >= 40:
        assert "■■■▣□···" in rows["w0"] and "2.5s" in rows["w0"]
    if width >= 60:
        assert "● 1234" in rows["w0"] and "✖ dead" in rows["w1"] and "✖ retired" in rows["w2"]
    if width >= 80:
        assert "cuda:1 (GPU 6)" in rows["w1"]
    if width >= 92 and watched:
        assert re.search(r"1\.50 +31\.9k +2\.25 +950", rows["w0"])
    if width >= 107 and watched:
        assert "93%" in rows["w0"]
    if width >= 140:
        assert ("▁▄▇" in rows["w0"]) if watched else ("3 MiB" in rows["w0"] and "123,456" in rows["w0"])


def test_every_state_has_a_shape_of_its_own():
    for style in (screen.UNICODE, screen.ASCII):
        assert len(set(style.slots.values())) == len(style.slots) == 4
        assert set(screen.slot_bar(STATES, 8, style).plain) == set(style.slots.values())


def test_in_ascii():
    for width in WIDTHS:
        assert all(line.isascii() for line in drawn(width, watched=True, style=screen.ASCII))


def test_a_low_window_counts_the_workers_that_it_leaves_out():
    many = [info(f"w{place}", states=STATES) for place in range(40)]
    shown = lines(screen.table("demo", many, {}, width=100, most_rows=10), 100)
    assert "and 31 more workers: make the window taller" in "\n".join(shown)
    assert [line.split()[0] for line in shown if re.match(r"w\d", line)] == [f"w{place}" for place in range(9)]


def test_one_is_told_apart_from_many():
    one = replace(rings()[0], states=("ready",), slot_bytes=1 << 20, alive=True)
    assert screen._sizes([one]) == "1 ring, 1 MiB, 1 owner alive"
    assert screen._sizes([one, replace(one, alive=False)]).endswith("1 owner alive")
    assert screen._sizes([one, one]) == "2 rings, 2 MiB, 2 owners alive"
    assert [counted(n, "batch", "batches") for n in (0, 1, 1000)] == ["0 batches", "1 batch", "1,000 batches"]


def test_the_sum_is_of_all_workers():
    pair = [info("w0", states=STATES), info("w1", states=STATES)]
    rates = {"w0": Rates(1.0, 2.0, 10.0, 20.0), "w1": Rates(3.0, 4.0)}
    (row,) = [line for line in lines(screen.table("demo", pair, rates, width=100), 100) if line.startswith("all")]
    assert row.split() == ["all", "8", "of", "16", "4.00", "10.0", "6.00", "20.0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (9.994, "9.99"), (9.996, "10.0"), (99.96, "100"), (999.4, "999"), (999.9, "1.0k"), (2.5e6, "2.5M")],
)
def test_quantities_have_three_digits(value: float, text: str):
    assert screen._quantity(value) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1023 * 1024 + 600, "1 MiB"),
        (5 << 39, "2560 GiB"),
    ],
)
def test_sizes(size: float, text: str):
    assert size_text(size) == text


@pytest.mark.parametrize("height", [6, 10, 24, 60])
@pytest.mark.parametrize("width", [20, 80, 140])
def test_a_frame_fits_and_keeps_what_matters_on_top(tmp_path: Path, width: int, height: int):
    watcher = screen.Watcher(lambda: ["demo", "other"], tmp_path)
    watcher.sample()
    status = {"state": "training", "step": 5, "total_steps": 10, "eta_s": 60}
    for name in ("demo", "other"):
        watcher._rings[name] = [info(f"w{place}", states=STATES) for place in range(12)]
        watcher._windows[name] = Window()
        watcher._windows[name].add(0.0, watcher._rings[name], TrainerState(True, status))
    shown = lines(watcher.frame(width, height), width)
    assert all(len(line) <= width for line in shown)
    assert shown[0].startswith("demo") and "measuring" in " ".join(shown[1:3])
    if height == 60:
        assert any(line.startswith("other   training") for line in shown) and len(shown) <= 60
    if width == 140:
        assert "step 5 of 10" in shown[0] and "ETA 1m" in shown[0] and "12 rings" in shown[0]


# The command itself


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    (tmp_path / "run.toml").write_text(f'name = "demo"\n[stream]\nring_dir = "{tmp_path}/rings"\n')
    path = tmp_path / "rings/demo/w0.ring"
    ring = Ring.open(path, worker="w0", fingerprint=Fingerprint({"seed": 0}), slots=8, slot_bytes=4096)
    yield ring
    ring.close()


def command(tmp_path: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "paceline.common.cli", "rings", str(tmp_path / "run.toml"), "--watch", *more]


class Terminal:
    """A command in a pseudo-terminal of its own."""

    def __init__(self, arguments: list[str], columns: int, **environment: str):
        self.master, slave = pty.openpty()
        self.resize(columns)
        variables = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1"} | environment
        unset = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")
        inherited = {key: value for key, value in os.environ.items() if key not in unset}
        self.process = subprocess.Popen(
            arguments, stdin=slave, stdout=slave, stderr=slave, env=inherited | variables, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def resize(self, columns: int) -> None:
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def until(self, pattern: str) -> str:
        """What was written up to `pattern`; later calls look at what comes after it."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.text, re.DOTALL)):
            assert time.monotonic() < deadline, self.text
            if select.select([self.master], [], [], 0.5)[0]:
                self.text += os.read(self.master, 65536).decode(errors="replace")
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def end(self, number: int) -> tuple[int, str]:
        """Exit code, and what was written after the signal."""
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        while select.select([self.master], [], [], 0.1)[0]:
            try:
                self.text += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                break
        os.close(self.master)
        return code, self.text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_terminal_is_put_right_at_the_end(ring: Ring, tmp_path: Path, number: int, code: int):
    terminal = Terminal(command(tmp_path, "--interval", "0.2"), 100)
    begun = terminal.until("w0 .*free")
    assert "\x1b[?1049h" in begun and "\x1b[?25l" in begun
    found, rest = terminal.end(number)
    assert found == code and "\x1b[?1049l" in rest and "\x1b[?25h" in rest and "Traceback" not in rest


def test_it_follows_the_size_of_the_terminal_at_once(ring: Ring, tmp_path: Path):
    terminal = Terminal(command(tmp_path, "--interval", "1000"), 140)
    terminal.until("last 30 s.*free")
    terminal.resize(60)
    assert "last 30 s" not in terminal.until("w0 .*free")
    terminal.end(signal.SIGTERM)


def test_no_colour_if_none_is_wanted(ring: Ring, tmp_path: Path):
    terminal = Terminal(command(tmp_path), 100, NO_COLOR="1")
    shown = terminal.until("w0 .*free")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", shown)
    terminal.end(signal.SIGTERM)


@pytest.mark.parametrize("name", ["dumb", "pipe"])
def test_no_escape_codes_where_nothing_understands_them(ring: Ring, tmp_path: Path, name: str):
    arguments = command(tmp_path, "--interval", "0.2")
    if name == "dumb":
        terminal = Terminal(arguments, 100, TERM="dumb")
        shown = terminal.until("w0 .*free.*w0 .*free")
        terminal.end(signal.SIGTERM)
    else:
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "100"})
        assert process.stdout is not None
        seen: list[str] = []
        while sum("free" in line for line in seen) < 2:
            seen.append(process.stdout.readline())
            assert seen[-1], "it ended"
        process.terminate()
        assert process.wait(PATIENCE) == 0
        shown = "".join(seen)
    assert "\x1b" not in shown and "measuring" in shown


def test_a_closed_pipe_ends_it(ring: Ring, tmp_path: Path):
    process = subprocess.Popen(
        command(tmp_path, "--interval", "0.1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == 0 and process.stderr.read() == ""


def test_the_picture_is_the_last_frame(ring: Ring, tmp_path: Path):
    picture = tmp_path / "rings.svg"
    terminal = Terminal(command(tmp_path, "--svg", str(picture)), 80)
    terminal.until("w0 .*free")
    terminal.end(signal.SIGINT)
    svg = picture.read_text().replace("&#160;", " ")
    assert svg.startswith("<svg") and "paceline rings --watch" in svg and "measuring" in svg and "w0" in svg


def test_rings_that_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    names: list[str] = []
    watcher = screen.Watcher(lambda: names, tmp_path)
    watcher.sample()
    assert "no rings" in lines(watcher.frame(80), 80)[0]
    names.append("demo")
    watcher.sample()
    assert lines(watcher.frame(80), 80)[0] == "demo   no rings"
    path = tmp_path / "demo/w0.ring"
    ring = Ring.open(path, worker="w0", fingerprint=Fingerprint({"seed": 0}), slots=2, slot_bytes=4096)
    watcher.sample()
    assert any(line.startswith("w0 ") for line in lines(watcher.frame(80), 80))
    path.write_bytes(b"not a ring" * 1000)
    watcher.sample()
    assert "not a ring" in " ".join(lines(watcher.frame(200), 200))
    path.unlink()
    ring.close()
    watcher.sample()
    assert lines(watcher.frame(80), 80)[0] == "demo   no rings"
    names.clear()
    watcher.sample()
    assert "no rings" in lines(watcher.frame(80), 80)[0]


def test_infos_of_both_kinds_are_drawn_once_too():
    assert replace(info("w0"), states=()).full is False
    assert "no rings" in lines(screen.table("demo", [], width=80), 80)[0]


def test_many_workers_in_a_small_window_leave_what_matters():
    """A worker that is dead, the legend under a verdict of two lines, and no sum of what nobody knows."""
    many = [info(f"w{index}", alive=index != 33, ring_id=index + 1) for index in range(40)]
    window = Window()
    for second in range(20):
        now = [replace(ring, produced=second, read_at=float(second)) for ring in many]
        window.add(float(second), now, TrainerState(True, {"wait_data": 0.5}))
    watcher = screen.Watcher(lambda: ["demo"], Path("rings"), {"demo": window}, {"demo": many})
    shown = lines(watcher.frame(40, 24), 40)
    assert len(shown) <= 24 and "ready" in shown[-1]
    assert len(lines(screen.verdict_line(window.verdict(), screen.UNICODE), 40)) == 2
    rows = [line.split()[0] for line in shown if re.match(r"w[0-9]", line)]
    assert rows == [*(f"w{index}" for index in range(len(rows) - 1)), "w33"]
    (total,) = [line for line in lines(watcher.frame(100, 24), 100) if line.startswith("all")]
    assert re.search(r" of [0-9]+ +40\.0 +- +", total)
