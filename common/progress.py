"""What `paceline up` shows: a live screen on a terminal, else plain lines.

Both are given the same events, child lines and status; neither starts a thread (see `up`).
"""

import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .errors import counted
from .runfile import RunFile
from .telemetry import Status, bottleneck, duration

if TYPE_CHECKING:
    from .up import Child, View

_SEEN = 32  # lines of a child that are remembered as shown
_LOG_LINE = re.compile(r"\[[^]]*\] step=\d+ loss=")
_RELAYED = ("trainer", "prepare")  # whose lines a terminal shows as they come
_UP = ("to start", "running", "restarts")  # states of a child that is part of the run
_ROOMY, _NARROW = 70, 50  # widths from which a table has all its columns, and from which most of them
_MOST_MARKS = 16  # slots that get a mark each
_STYLES = {"running": "green", "restarts": "yellow", "failed": "bold red", "left": "dim", "stopped": "dim"}


def make_view(run: RunFile, plain: bool = False) -> "View":
    """The live screen if stdout is a terminal (and `plain` is not asked for), else plain lines."""
    console = Console(highlight=False)
    if plain or not console.is_terminal:
        return PlainView()
    return LiveView(run, console)


class PlainView:
    """Every event and every line of every child, with the name of who says it."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[str]] = {}  # the last lines of each child

    def event(self, text: str, urgent: bool = False) -> None:
        self.line("up", text)

    def line(self, child: str, text: str) -> None:
        self._seen.setdefault(child, deque(maxlen=_SEEN)).append(text)
        for part in text.splitlines():
            print(f"{child:<7} | {_unnamed(child, part)}", file=sys.stdout, flush=True)

    def failure(self, child: "Child", text: str, lines: Sequence[str]) -> None:
        """With those of the child's lines that were not shown as they came."""
        seen = self._seen.pop(child.name, ())
        unseen = [line for line in lines if line not in seen]
        self.event("\n    ".join([text, *unseen, f"(log: {child.log})"]), urgent=True)

    def refresh(self, children: "Sequence[Child]", status: Status | None) -> None:
        pass

    def close(self) -> None:
        pass


class LiveView:
    """A screen of fixed place under the events and the trainer's own remarks."""

    def __init__(self, run: RunFile, console: Console) -> None:
        self._run, self._console = run, console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()
        self._begun = time.monotonic()
        self._workers = run.workers.count
        self._last: Status | None = None

    def event(self, text: str, urgent: bool = False) -> None:
        stamp = time.strftime("%H:%M:%S")
        self._live.console.print(Text(f"{stamp} ", style="dim") + Text(text, style="bold red" if urgent else ""))

    def line(self, child: str, text: str) -> None:
        # Log lines are the screen's own figures; workers' lines are in their table row.
        if child in _RELAYED and not _LOG_LINE.match(text):
            self._live.console.print(Text(f"{child:>8} ", style="cyan") + Text(_unnamed(child, text)), soft_wrap=True)

    def failure(self, child: "Child", text: str, lines: Sequence[str]) -> None:
        shown = [] if child.name in _RELAYED else lines
        self.event("\n    ".join([text, *shown, f"(log: {child.log})"]), urgent=True)

    def refresh(self, children: "Sequence[Child]", status: Status | None) -> None:
        self._last = status or self._last
        if any(child.name == "trainer" for child in children):
            self._workers = sum(child.name != "trainer" and child.state in _UP for child in children)
        self._live.update(self._screen(children, status), refresh=True)

    def close(self) -> None:
        """Leaves the last figures standing, without what was only true while the run was up."""
        self._live.update(Group(*self._summary()), refresh=True)
        self._live.stop()

    def _summary(self) -> list[RenderableType]:
        if not self._last:
            return [self._title()]
        return [self._title(), _steps(self._last, self._console.width), *_figures(self._last)]

    def _screen(self, children: "Sequence[Child]", status: Status | None) -> RenderableType:
        above, below = self._summary(), []
        if waits := bottleneck(status or {}):
            below.append(Text(waits, style="italic"))
        below.append(Text(f"Ctrl-C stops with a checkpoint · logs in {self._run.output}/logs", style="dim"))
        lines = len(self._console.render_lines(Group(*above, *below), pad=False))
        shown = _foremost(children, self._console.height - lines - 1)  # less the table's head
        if left := len(children) - len(shown):
            below.insert(0, Text(f"and {left} more, running: make the window taller", style="dim"))
        return Group(*above, _processes(shown, self._last, self._console.width), *below)

    def _title(self) -> Text:
        run = self._run
        text = Text.assemble(("paceline ", "bold"), (run.name, "bold cyan"))
        shape = f"  {self._workers}-{run.trainer.ranks}: {counted(self._workers, 'worker')}, "
        text.append(
            f"{shape}{counted(run.trainer.ranks, 'rank')}  up {duration(time.monotonic() - self._begun)}", "dim"
        )
        return text


def _unnamed(child: str, line: str) -> str:
    """A line without the child's own name in front, which is shown next to it."""
    return line.removeprefix(f"{child}: ")


def _foremost(children: "Sequence[Child]", most: int) -> "list[Child]":
    """The children that `most` lines have room for, and a line for how many are left: before those that just run, those
    that there is something to see of."""
    if len(children) <= most:
        return list(children)
    chosen = sorted(children, key=lambda child: child.state == "running" and child.name != "trainer")[
        : max(1, most - 1)
    ]
    return [child for child in children if child in chosen]


def _steps(status: Status, width: int) -> RenderableType:
    step, total = status.get("step", 0), status.get("total_steps")
    state, message = status.get("state", ""), status.get("message", "")
    if message.startswith(state):  # "waiting", "waiting for a worker"
        state, message = message, ""
    row = Table.grid(padding=(0, 1))
    bar = [ProgressBar(total=float(total or 1), completed=float(step), width=32)] if width >= _ROOMY else []
    row.add_row(
        Text(f"step {step:,}" + (f" of {total:,}" if total else ""), style="bold"),
        *bar,
        Text(f"{step / total:4.0%}" if total else ""),
        Text(f"ETA {duration(status.get('eta_s'))}"),
        Text(state, style="green" if state == "training" else "yellow"),
        *([Text(message, style="dim")] if message else []),
    )
    return row


def _figures(status: Status) -> list[RenderableType]:
    """Learning and rates, one line each, without what is not known yet."""
    epoch = "{:.2f}" + (f" of {status['epochs']}" if "epochs" in status else "")
    learning = [
        ("loss", "loss", "{:.3f}"),
        ("acc", "acc", "{:.2f}"),
        ("tau", "tau", "{:.2f}"),
        ("tau_chain", "tau_chain", "{:.2f}"),
        ("lr", "lr", "{:.1e}"),
        ("epoch", "epoch", epoch),
    ]
    rates = [
        ("target", "target_bps", "{:.2f} batches/s"),
        ("drafter", "drafter_bps", "{:.2f} batches/s"),
        ("context", "tokens_per_s", "{:,.0f} tokens/s"),
        ("ranks compute", "wait_gpu", "{:.0%}"),
        ("wait for data", "wait_data", "{:.0%}"),
        ("listed", "listed", "{}"),
    ]
    lines: list[RenderableType] = []
    for pairs in (learning, rates):
        text = Text()
        for name, key, form in pairs:
            if (value := status.get(key)) is not None and (key, value) != ("listed", 0):
                text.append(f"{name} ", "dim").append(form.format(value) + "   ")
        if text:
            lines.append(text)
    return lines


def _processes(children: "Sequence[Child]", status: Status | None, width: int) -> RenderableType:
    """A row a child; what matters least goes where `width` is short."""
    gone = set() if width >= _ROOMY else {"pid", "q_pre"} if width >= _NARROW else {"pid", "q_pre", "up", "last said"}
    columns = [name for name in ("process", "pid", "state", "up", "q_pre", "ring") if name not in gone]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    for column in columns:
        table.add_column(column, no_wrap=True)
    if "last said" not in gone:
        columns.append("last said")
        table.add_column("last said", no_wrap=True, overflow="ellipsis", ratio=1)
    for child in children:
        said = "" if _LOG_LINE.match(child.last_line) else _unnamed(child.name, child.last_line)
        state = child.state if not child.restarts else f"{child.state}, {counted(child.restarts, 'restart')}"
        if child.state == "restarts":
            state = f"restarts in {max(child.start_at - time.monotonic(), 0):.0f}s"
        running = child.state == "running"
        q_pre, ring = _queues(child.name, status if running else None)
        cells: dict[str, RenderableType] = {
            "process": child.name,
            "pid": str(child.pid or ""),
            "state": Text(state, style=_STYLES.get(child.state, "")),
            "up": duration(time.monotonic() - child.started) if running else "",
            "q_pre": q_pre,
            "ring": ring,
            "last said": Text(said, style="dim"),
        }
        table.add_row(*(cells[column] for column in columns))
    return table


def _queues(name: str, status: Status | None) -> tuple[str, str]:
    """A worker's tokenised batches, and its ring with one mark a slot, if they are not too many: filled for READY."""
    if status is None:
        return "", ""
    pre, ready, slots = status.get("q_pre", []), status.get("q_hs", []), status.get("slots", 0)
    names = status.get("names", [f"w{place}" for place in range(len(ready))])
    index = names.index(name) if name in names else len(ready)
    if index >= len(ready):
        return "", ""
    marks = "■" * ready[index] + "□" * max(slots - ready[index], 0)
    tokenised = str(pre[index]) if index < len(pre) else ""
    return tokenised, f"{ready[index]} of {slots}" if slots > _MOST_MARKS else f"{marks} {ready[index]}"
