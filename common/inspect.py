"""`paceline rings`: what is in a run's rings, without a trace.

Headers and tables are read with pread, owners' locks are asked for with F_OFD_GETLK: nothing is mapped, written or
allocated. It imports neither numpy nor torch, and rich only to draw, so that the command starts at once.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .locks import OfdLock
from .ring_layout import RingInvalid, SlotState, read_ring, ring_paths

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

# One character a slot, in the order in which they are drawn.
GLYPHS = {"ready": "█", "taken": "▓", "writing": "▒", "free": "·"}
ASCII_GLYPHS = {"ready": "#", "taken": "=", "writing": "~", "free": "."}
COLOURS = {"ready": "green", "taken": "cyan", "writing": "yellow", "free": "bright_black"}
FULL, WIDE, MEDIUM, NARROW = 128, 96, 64, 40  # widths from which ever more of the table's columns fit
WIDEST_BAR = 24


@dataclass(frozen=True)
class RingInfo:
    """One ring at one moment. With a `problem` (why it is no ring) only worker and path mean anything."""

    worker: str
    path: Path
    pid: int = 0
    device: str = ""
    alive: bool = False
    retired: bool = False
    states: tuple[str, ...] = ()  # of each slot: "free", "writing", "ready" or, of a READY one, "taken"
    slot_bytes: int = 0
    produced: int = 0  # records committed since the ring was made
    ring_id: int = 0
    oldest_ready_s: float | None = None
    read_at: float = 0.0  # seconds, monotonic
    problem: str | None = None

    def count(self, state: str) -> int:
        return self.states.count(state)

    @property
    def consumed(self) -> int:
        """Records freed: produced and no longer READY."""
        return self.produced - self.count("ready") - self.count("taken")


@dataclass(frozen=True)
class Rates:
    """Records a second into and out of one ring, between two readings."""

    produced: float
    consumed: float


def read_rings(folder: str | Path) -> list[RingInfo]:
    """Every ring in a run's ring folder, by worker; [] if it is not there."""
    return [info for info in map(_read, ring_paths(folder)) if info is not None]


def _read(path: Path) -> RingInfo | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:  # removed since it was listed
        return None
    except OSError as error:
        return RingInfo(path.stem, path, problem=f"{path}: {error.strerror}")
    try:
        header, live, slots = read_ring(fd, path)
        alive = OfdLock.holder(fd)
    except RingInvalid as error:
        return RingInfo(path.stem, path, problem=str(error))
    finally:
        os.close(fd)
    commits = [slot.committed_at_ns for slot in slots if slot.state is SlotState.READY]
    return RingInfo(
        worker=header.worker,
        path=path,
        pid=live.pid,
        device=live.device,
        alive=alive,
        retired=live.retired,
        states=tuple("taken" if slot.taken else slot.state.value for slot in slots),
        slot_bytes=header.slot_bytes,
        produced=live.produced,
        ring_id=header.ring_id,
        oldest_ready_s=max(0.0, (time.monotonic_ns() - min(commits)) / 1e9) if commits else None,
        read_at=time.monotonic(),
    )


def rings_json(run: str, rings: Sequence[RingInfo]) -> dict[str, Any]:
    """The object that `rings --json` prints. Files with a `problem` are not in it."""
    return {"run": run, "rings": [_as_json(ring) for ring in rings if ring.problem is None]}


def _as_json(ring: RingInfo) -> dict[str, Any]:
    age = ring.oldest_ready_s
    return {
        "worker": ring.worker,
        "path": str(ring.path),
        "pid": ring.pid,
        "alive": ring.alive,
        "slots": len(ring.states),
        **{state: ring.count(state) for state in ("free", "writing", "ready", "taken")},
        "slot_bytes": ring.slot_bytes,
        "produced": ring.produced,
        "consumed": ring.consumed,
        "oldest_ready_s": None if age is None else round(age, 3),
    }


def rates(before: Sequence[RingInfo], now: Sequence[RingInfo]) -> dict[str, Rates]:
    """By worker, for the rings that are in both readings and the same file."""
    earlier = {ring.ring_id: ring for ring in before if ring.problem is None}
    found = {}
    for ring in now:
        past = earlier.get(ring.ring_id)
        if past is None or ring.problem is not None or ring.read_at <= past.read_at:
            continue
        seconds = ring.read_at - past.read_at
        # A record that is freed while a table is read may count one reading late, never as less than nothing.
        consumed = max(0, ring.consumed - past.consumed)
        found[ring.worker] = Rates((ring.produced - past.produced) / seconds, consumed / seconds)
    return found


def table(
    run: str,
    rings: Sequence[RingInfo],
    by_worker: dict[str, Rates] | None = None,
    *,
    width: int = FULL,
    ascii_only: bool = False,
) -> "RenderableType":
    """The rings of a run as a table, with rates if given; columns are left out where `width` is narrow."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not rings:
        return Text(f"{run}: no rings")
    glyphs, overflow = (ASCII_GLYPHS, "crop") if ascii_only else (GLYPHS, "ellipsis")
    grid = Table(box=None, pad_edge=False, padding=(0, 2 if width >= MEDIUM else 1, 0, 0))
    columns = _columns(width, by_worker is not None)
    for name in columns:
        justify = "left" if name in ("worker", "owner", "slots") else "right"
        grid.add_column(name, justify=justify, no_wrap=True, overflow=overflow)
    for ring in (ring for ring in rings if ring.problem is None):
        cells = _cells(ring, (by_worker or {}).get(ring.worker), width)
        cells["slots"] = slot_bar(ring.states, min(WIDEST_BAR, max(4, width // 4)), glyphs)
        grid.add_row(*(cells[name] for name in columns))
    problems = [Text(ring.problem, style="red") for ring in rings if ring.problem is not None]
    heading = Text(_heading(run, rings), style="bold", no_wrap=True, overflow=overflow)
    return Group(heading, grid, *problems, _legend(width, glyphs))


def _columns(width: int, with_rates: bool) -> list[str]:
    rate_columns = ["in/s", "out/s"] if with_rates else []
    if width >= FULL:
        counts = ["free", "writing", "ready", "taken", "slot"]
        return ["worker", "owner", "slots", *counts, *rate_columns, "produced", "consumed", "oldest"]
    if width >= WIDE:
        return ["worker", "owner", "slots", "free", "writing", "ready", "taken", *rate_columns, "oldest"]
    if width >= MEDIUM:
        return ["worker", "owner", "slots", *(rate_columns or ["produced", "consumed"]), "oldest"]
    return ["worker", "slots", *rate_columns, "oldest"] if width >= NARROW else ["worker", "slots"]


def _cells(ring: RingInfo, rate: Rates | None, width: int) -> "dict[str, str | Text]":
    from rich.text import Text

    if ring.alive:
        owner = Text(f"pid {ring.pid}" + (f" {ring.device}" if width >= FULL else ""))
    else:
        owner = Text("retired" if ring.retired else "dead", style="red")
    return {
        "worker": Text(ring.worker, style="" if ring.alive else "red"),
        "owner": owner,
        **{state: str(ring.count(state)) for state in GLYPHS},
        "slot": _size(ring.slot_bytes),
        "in/s": "-" if rate is None else f"{rate.produced:.2f}",
        "out/s": "-" if rate is None else f"{rate.consumed:.2f}",
        "produced": str(ring.produced),
        "consumed": str(ring.consumed),
        "oldest": "-" if ring.oldest_ready_s is None else _duration(ring.oldest_ready_s),
    }


def slot_bar(states: Sequence[str], width: int, glyphs: dict[str, str] = GLYPHS) -> "Text":
    """One cell a slot, sorted by state; scaled down to `width` cells, a state that occurs keeping one, if need be."""
    from rich.text import Text

    counts = {state: states.count(state) for state in GLYPHS}
    if len(states) > width:
        scaled = {state: max(1, count * width // len(states)) if count else 0 for state, count in counts.items()}
        widest = max(scaled, key=lambda state: scaled[state])
        scaled[widest] += width - sum(scaled.values())
        counts = scaled
    return Text.assemble(*((glyphs[state] * count, COLOURS[state]) for state, count in counts.items()))


def _heading(run: str, rings: Sequence[RingInfo]) -> str:
    whole = [ring for ring in rings if ring.problem is None]
    size = sum(len(ring.states) * ring.slot_bytes for ring in whole)
    alive = sum(ring.alive for ring in whole)
    return f"{run}: {len(whole)} rings, {_size(size)}, {alive} owners alive"


def _legend(width: int, glyphs: dict[str, str]) -> "Text":
    from rich.text import Text

    legend = Text()
    for state, glyph in glyphs.items():
        legend.append(glyph, style=COLOURS[state])
        legend.append(f" {state}  " if width >= NARROW else f"{state[0]} ")
    return legend


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f}s"
    return f"{seconds / 60:.0f}m" if seconds < 6000 else f"{seconds / 3600:.0f}h"


def readings(folder: str | Path, interval: float = 1.0) -> Iterator[tuple[list[RingInfo], dict[str, Rates]]]:
    """The rings every `interval` seconds, each time with the rates since the reading before. Never ends."""
    before: list[RingInfo] = []
    while True:
        now = read_rings(folder)
        yield now, rates(before, now)
        before = now
        time.sleep(interval)


def watch(run: str, folder: str | Path, console: "Console", interval: float = 1.0) -> None:
    """Redraws the table every `interval` seconds until KeyboardInterrupt; follows changes of the terminal's width.

    Where the output is no terminal, one table is printed after another.
    """
    from rich.live import Live

    def drawn(rings: list[RingInfo], by_worker: dict[str, Rates]) -> "RenderableType":
        return table(run, rings, by_worker, width=console.width, ascii_only=console.options.ascii_only)

    if not console.is_terminal:
        for rings, by_worker in readings(folder, interval):
            console.print(drawn(rings, by_worker))
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for rings, by_worker in readings(folder, interval):
            live.update(drawn(rings, by_worker), refresh=True)
