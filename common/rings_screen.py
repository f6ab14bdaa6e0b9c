"""What `paceline rings` draws: a table once, or a screen that follows the runs (`--watch`).

    name     what the trainer says of itself: state, step, time left, speed
    verdict  which side waits for which, in words (`window`)
    table    a row a worker: slots, rates in and out, shares of time, oldest record, owner, GPU

Slot states differ in shape as well as in colour. Columns are left out where a terminal is narrow, rows where it is low;
what is left out is counted. Where the output is no terminal the same frames are printed without escape codes.
"""

import contextlib
import io
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .errors import counted
from .inspect import STATES, RingInfo, read_rings
from .paths import writing
from .space import size_text
from .status import trainer_of
from .telemetry import duration
from .window import SECONDS, Rates, Shares, TrainerState, Verdict, Window

SAMPLE_SECONDS = 0.2  # between readings; frames may be further apart
WIDEST_BAR, GOOD_BAR, NARROWEST_BAR = 32, 8, 4  # cells
ROOMY, NARROW = 70, 40  # widths from which columns have two blanks between them, and the legend whole words


@dataclass(frozen=True)
class Style:
    """Characters and colours. Every state and every kind of verdict has a character of its own."""

    slots: Mapping[str, str]
    verdicts: Mapping[str, str]
    levels: str
    alive: str
    dead: str
    rule: str
    overflow: Any


UNICODE = Style(
    slots={"ready": "■", "taken": "▣", "writing": "□", "free": "·"},
    verdicts={
        "targets": "◀",
        "drafters": "▶",
        "balanced": "●",
        "stalled": "✖",
        "waiting": "…",
        "measuring": "…",
        "none": "…",
    },
    levels="▁▂▃▄▅▆▇",
    alive="●",
    dead="✖",
    rule="─",
    overflow="ellipsis",
)
ASCII = Style(
    slots={"ready": "#", "taken": "=", "writing": "~", "free": "."},
    verdicts={
        "targets": "<",
        "drafters": ">",
        "balanced": "=",
        "stalled": "!",
        "waiting": "-",
        "measuring": "-",
        "none": "-",
    },
    levels="_.:-=+#",
    alive="*",
    dead="x",
    rule="-",
    overflow="crop",
)
COLOURS = {"ready": "green", "taken": "cyan", "writing": "yellow", "free": "bright_black"}
VERDICT_COLOURS = {
    "targets": "bold yellow",
    "drafters": "bold yellow",
    "balanced": "bold green",
    "stalled": "bold red",
    "waiting": "bold cyan",
}


class QuietConsole(Console):
    """A console whose reader may leave (`| head`): rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def style_for(console: Console) -> Style:
    return ASCII if console.options.ascii_only else UNICODE


# A table


@dataclass(frozen=True)
class _Column:
    name: str
    left: bool = False


_FIRST = [_Column("worker", True), _Column("slots", True)]
_RATES = [_Column("in\nrec/s"), _Column("\ntok/s"), _Column("out\nrec/s"), _Column("\ntok/s ")]
_TOTALS = [_Column("produced"), _Column("consumed")]
_COUNTS = [_Column(state) for state in STATES]
_SHARES = [_Column("full"), _Column("empty")]
_LAST = [_Column("oldest"), _Column("owner", True), _Column("gpu", True)]


def table(
    run: str,
    rings: Sequence[RingInfo],
    rates: Mapping[str, Rates] | None = None,
    shares: Mapping[str, Shares] | None = None,
    *,
    width: int,
    style: Style = UNICODE,
    most_rows: int | None = None,
    heading: bool = True,
) -> RenderableType:
    """The rings of a run; with rates and shares, where they are given, instead of totals.

    Columns are left out where `width` is narrow, workers beyond `most_rows`.
    """
    if not rings:
        return Text(f"{run}: no rings")
    whole = [ring for ring in rings if ring.problem is None]
    problems = [Text(ring.problem, style="red") for ring in rings if ring.problem is not None]
    shown = whole if most_rows is None or len(whole) <= most_rows else _foremost(whole, max(1, most_rows - 1))
    rows = [_cells(ring, (rates or {}).get(ring.worker), (shares or {}).get(ring.worker), style) for ring in shown]
    if rates is not None and len(whole) > 1:
        rows.append(_sum(whole, rates))
    gap = 2 if width >= ROOMY else 1
    slots = max((len(ring.states) for ring in whole), default=0)
    columns, bar = _fitting(rows, _choices(rates is not None, shares is not None), width, gap, slots)
    grid = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for column in columns:
        justify = "left" if column.left else "right"
        grid.add_column(column.name.rstrip(" "), justify=justify, no_wrap=True, overflow=style.overflow)
    for ring, row in zip(shown, rows, strict=False):
        row["slots"] = slot_bar(ring.states, bar, style)
    for row in rows:
        grid.add_row(*(row.get(column.name, "") for column in columns))
    left = len(whole) - len(shown)
    more_text = f"and {counted(left, 'more worker')}: make the window taller"
    more = [Text(more_text, style="dim", no_wrap=True, overflow=style.overflow)] if left else []
    top = [Text(f"{run}: {_sizes(rings)}", style="bold", no_wrap=True, overflow=style.overflow)] if heading else []
    return Group(*top, grid, *more, *problems)


def _foremost(rings: Sequence[RingInfo], most: int) -> list[RingInfo]:
    """So many, in their order: rings without an owner before those that are as they should be."""
    chosen = {ring.worker for ring in sorted(rings, key=lambda ring: ring.alive)[:most]}
    return [ring for ring in rings if ring.worker in chosen]


def _choices(with_rates: bool, with_shares: bool) -> list[list[_Column]]:
    """Sets of columns, the richest first."""
    history = _Column(f"last {SECONDS:.0f} s", True)
    moves = _RATES if with_rates else _TOTALS
    extra = [*_SHARES, history] if with_shares else [*_COUNTS, _Column("slot size")]
    oldest, owner, gpu = _LAST
    few = [_RATES[0], _RATES[2]] if with_rates else _TOTALS
    ends = [
        [*moves, *extra, oldest, owner, gpu],
        [*moves, *extra[:-1], oldest, owner, gpu],
        [*moves, oldest, owner, gpu],
    ]
    ends += [[*few, oldest, owner, gpu], [*few, oldest, owner], [*few, oldest], [oldest], []]
    return [[*_FIRST, *end] for end in ends]


def _fitting(
    rows: Sequence[Mapping[str, Any]], choices: Sequence[list[_Column]], width: int, gap: int, slots: int
) -> tuple[list[_Column], int]:
    """The richest columns that leave bars of a good size, and the bars' width: no more than the rings have slots."""
    console = Console(width=1000, file=io.StringIO())

    def wide(column: _Column) -> int:
        cells = [column.name.rstrip(" "), *(row.get(column.name, "") for row in rows)]
        return max(Measurement.get(console, console.options, cell).maximum for cell in cells)

    columns, left = choices[-1], 0
    for columns in choices:
        left = width - gap - sum(wide(column) + gap for column in columns if column.name != "slots")
        if left >= min(slots, GOOD_BAR):
            break
    return columns, max(NARROWEST_BAR, min(WIDEST_BAR, slots, left))


def _cells(ring: RingInfo, rate: Rates | None, share: Shares | None, style: Style) -> dict[str, Any]:
    owner = Text.assemble((style.alive, "green"), f" {ring.pid}")
    if not ring.alive:
        owner = Text(f"{style.dead} {'retired' if ring.retired else 'dead'}", style="red")
    elif ring.retired:
        owner = Text.assemble((style.alive, "yellow"), f" {ring.pid} leaves")
    columns = [column.name for column in _RATES]
    moving = [None] * 4 if rate is None else [rate.produced, rate.produced_tokens, rate.consumed, rate.consumed_tokens]
    return {
        "worker": Text(ring.worker, style="bold" if ring.alive else "red"),
        **{name: _quantity(value) for name, value in zip(columns, moving, strict=True)},
        **{state: str(ring.count(state)) for state in STATES},
        "full": "" if share is None else f"{share.full:.0%}",
        "empty": "" if share is None else f"{share.empty:.0%}",
        f"last {SECONDS:.0f} s": "" if share is None else _history(share.levels, style),
        "slot size": size_text(ring.slot_bytes),
        "produced": f"{ring.produced:,}",
        "consumed": f"{ring.consumed:,}",
        "oldest": "-" if ring.oldest_ready_s is None else short_time(ring.oldest_ready_s),
        "owner": owner,
        "gpu": Text(ring.device or "-", style="" if ring.alive else "dim"),
    }


def _sum(rings: Sequence[RingInfo], rates: Mapping[str, Rates]) -> dict[str, Any]:
    """The last row: what all rings together do."""
    found = [rates[ring.worker] for ring in rings if ring.worker in rates]
    names = [column.name for column in _RATES]
    columns = zip(*((r.produced, r.produced_tokens, r.consumed, r.consumed_tokens) for r in found), strict=True)
    known = ([value for value in column if value is not None] for column in columns)
    totals = [sum(values) if values else None for values in known] or [None] * 4
    held, slots = sum(ring.held for ring in rings), sum(len(ring.states) for ring in rings)
    cells = {name: Text(_quantity(total), style="bold") for name, total in zip(names, totals, strict=True)}
    return {"worker": Text("all", style="bold"), "slots": Text(f"{held} of {slots}", style="dim"), **cells}


def slot_bar(states: Sequence[str], width: int, style: Style = UNICODE) -> Text:
    """One cell a slot, sorted by state; scaled down to `width` cells, a state that occurs keeping one, if need be."""
    counts = {state: states.count(state) for state in STATES}
    if len(states) > width:
        scaled = {state: max(1, count * width // len(states)) if count else 0 for state, count in counts.items()}
        widest = max(scaled, key=lambda state: scaled[state])
        scaled[widest] += width - sum(scaled.values())
        counts = scaled
    return Text.assemble(*((style.slots[state] * count, COLOURS[state]) for state, count in counts.items()))


def _history(levels: Sequence[float], style: Style, cells: int = 15) -> Text:
    """How full the ring was, oldest on the left; each cell is the mean of its stretch of readings."""
    if not levels:
        return Text("")
    cells = min(cells, len(levels))
    bounds = [place * len(levels) // cells for place in range(cells + 1)]
    means = [sum(levels[a:b]) / (b - a) for a, b in pairwise(bounds)]
    top = len(style.levels) - 1
    return Text("".join(style.levels[min(top, round(mean * top))] for mean in means), style="green")


def legend(width: int, style: Style = UNICODE) -> Text:
    text = Text()
    for state, glyph in style.slots.items():
        text.append(glyph, style=COLOURS[state])
        text.append(f" {state}  " if width >= NARROW else f"{state[0]} ", style="dim")
    return text


def _sizes(rings: Sequence[RingInfo]) -> str:
    whole = [ring for ring in rings if ring.problem is None]
    size = sum(len(ring.states) * ring.slot_bytes for ring in whole)
    alive = sum(ring.alive for ring in whole)
    return f"{counted(len(whole), 'ring')}, {size_text(size)}, {counted(alive, 'owner')} alive"


def _quantity(value: float | None) -> str:
    """Three digits at most: 0.24, 12.3, 950, 1.2k, 31.9k, 1.2M."""
    if value is None:
        return "-"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{value / size:.1f}{unit}"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def short_time(seconds: float) -> str:
    """An age with a decimal while it is young: 2.5s, 99.9s, 3m, 2h."""
    if seconds < 100:
        return f"{seconds:.1f}s"
    return f"{seconds / 60:.0f}m" if seconds < 6000 else f"{seconds / 3600:.0f}h"


# A screen


def run_frame(
    run: str,
    rings: Sequence[RingInfo],
    window: Window,
    *,
    width: int,
    style: Style = UNICODE,
    most_rows: int | None = None,
) -> Group:
    """One run: heading, verdict and table."""
    verdict = verdict_line(window.verdict(), style)
    if most_rows is not None:  # which counts one line for the verdict
        most_rows = max(1, most_rows + 1 - len(verdict.wrap(Console(width=width, file=io.StringIO()), width)))
    body = table(
        run, rings, window.rates(), window.shares(), width=width, style=style, most_rows=most_rows, heading=False
    )
    heading = heading_line(run, rings, window.trainer, width, style)
    return Group(heading, verdict, Text(""), body) if rings else Group(heading)


def heading_line(run: str, rings: Sequence[RingInfo], trainer: TrainerState, width: int, style: Style) -> Text:
    """The run's name and what its trainer says of itself, as far as it fits."""
    parts = [] if trainer.status is None else _trainer_parts(trainer)
    text = Text(run, style="bold", no_wrap=True, overflow=style.overflow)
    for part in [*parts, _sizes(rings) if rings else "no rings"]:
        if len(text) + 3 + len(part) <= width:
            text.append(f"   {part}", style="not bold dim")
    return text


def _trainer_parts(trainer: TrainerState) -> list[str]:
    step, total = trainer.get("step"), trainer.get("total_steps")
    parts = [str(trainer.get("state") or "")]
    if step is not None:
        parts.append(f"step {step:,}" + (f" of {total:,}" if total else ""))
    if trainer.get("eta_s") is not None:
        parts.append(f"ETA {duration(trainer.get('eta_s'))}")
    return [part for part in parts if part]


def verdict_line(verdict: Verdict, style: Style) -> Text:
    colour = VERDICT_COLOURS.get(verdict.kind, "dim")
    return Text(f"{style.verdicts[verdict.kind]} {verdict.text}", style=colour, overflow="fold")


@dataclass
class Watcher:
    """Follows the runs that `names` lists each time, reading their rings below `folder`; draws what it saw."""

    names: Callable[[], Sequence[str]]
    folder: Path
    _windows: dict[str, Window] = field(default_factory=dict)
    _rings: dict[str, list[RingInfo]] = field(default_factory=dict)
    _trainers: dict[str, TrainerState] = field(default_factory=dict)
    _asked: float = float("-inf")

    def sample(self) -> None:
        """Read every ring once, and each second what the trainers say."""
        now = time.monotonic()
        ask, names = now - self._asked >= 1.0, self.names()
        self._asked = now if ask else self._asked
        self._windows = {name: self._windows.get(name) or Window() for name in names}
        self._rings = {name: read_rings(self.folder / name) for name in names}
        for name in names:
            if ask or name not in self._trainers:
                self._trainers[name] = trainer_of(name)
            self._windows[name].add(now, self._rings[name], self._trainers[name])

    def frame(self, width: int, height: int | None = None, style: Style = UNICODE, keys: str = "") -> RenderableType:
        """Every run, for a screen of `width` cells and `height` lines (None: as many as it takes)."""
        parts: list[RenderableType] = []
        rows = None if height is None else _rows_each(self._rings, height)
        for name, window in self._windows.items():
            if parts:
                parts.append(Text(""))
            parts.append(run_frame(name, self._rings[name], window, width=width, style=style, most_rows=rows))
        if not parts:
            return Text(f"no rings in {self.folder}")
        foot = legend(width, style)
        if keys and width >= ROOMY:
            foot.append(f"  {keys}", style="dim")
        return Group(*parts, Text(""), foot)


def _rows_each(rings: Mapping[str, Sequence[RingInfo]], height: int) -> int:
    """Workers that each run may show, so that all of it fits: a run also takes three lines above its table, two for the
    table's head, one for the sum and a blank one; the legend two."""
    left = height - 2 - sum(7 + sum(ring.problem is not None for ring in found) for found in rings.values())
    return max(1, left // max(1, len(rings)))


def watch(
    names: Callable[[], Sequence[str]],
    folder: Path,
    console: Console,
    interval: float = 1.0,
    picture: Path | None = None,
) -> None:
    """Redraws every `interval` seconds until SIGINT, SIGTERM or SIGHUP, and at once when the terminal changes its size.

    Where the output is no terminal, one frame is printed after another. `picture`: where the last frame is written as
    SVG at the end.
    """
    watcher, style = Watcher(names, folder), style_for(console)
    screen = console.is_terminal and not console.is_dumb_terminal
    keys = f"every {interval:g} s; Ctrl-C leaves"
    try:
        with _ended_by_signals(), _live(console) if screen else contextlib.nullcontext() as live:
            for width, height in _beats(watcher, console, interval):
                if live is None:
                    console.print(watcher.frame(width, None, style), Text(""))
                    console.file.flush()
                else:
                    live.update(watcher.frame(width, height, style, keys), refresh=True)
    except _Ended:
        return
    finally:
        if picture is not None:
            # Ctrl-C reaches a process twice where something passes it on, as timeout(1) does.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            with writing(picture):
                write_picture(watcher, picture)
            signal.signal(signal.SIGINT, before)


def _live(console: Console) -> Live:
    return Live(console=console, auto_refresh=False, screen=True)


def _beats(watcher: Watcher, console: Console, interval: float) -> Iterator[tuple[int, int]]:
    """Samples, and yields the terminal's size whenever a frame is due."""
    due, size = float("-inf"), (0, 0)
    while True:
        begun = time.monotonic()
        watcher.sample()
        if begun >= due or size != console.size:
            size, due = console.size, begun + interval
            yield size[0], size[1]
        time.sleep(max(0.01, min(SAMPLE_SECONDS, interval) - (time.monotonic() - begun)))


class _Ended(BaseException):
    """A signal other than SIGINT ends the watch; the terminal is put right on the way out."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_picture(watcher: Watcher, path: Path, width: int = 108) -> None:
    """The newest frame as SVG, `width` cells wide, as a terminal would show it. Raises OSError."""
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(watcher.frame(width))
    path.write_text(console.export_svg(title="paceline rings --watch"), encoding="utf-8")
