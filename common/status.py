"""`paceline status`: how runs of this machine stand, from their trainers' status.json, their rings and their locks, and
from the supervisor where no trainer is up.

Reads only. What a dead trainer said last is shown as that, with its age.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import paths
from .control import ask
from .errors import PacelineError, counted
from .inspect import RingInfo, read_rings, rings_json, runs_with_rings
from .locks import held_by
from .telemetry import STALE_SECONDS, Status, bottleneck, duration, read_status
from .window import TrainerState

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class RunState:
    """What can be known of a run from outside. `status` is {} if no trainer has been up."""

    name: str
    directory: Path | None
    status: Status
    alive: bool  # a trainer holds consumer.lock
    up: bool  # a supervisor holds up.lock
    preparing: bool  # it says that it prepares the data, before there is a trainer
    age_s: float | None  # of the status
    checkpoint_age_s: float | None
    ring_folder: Path
    rings: tuple[RingInfo, ...]

    @property
    def workers_alive(self) -> int:
        return sum(ring.alive for ring in self.rings)

    @property
    def bottleneck(self) -> str:
        """By the trainer's count, unless all workers have just gone; empty if no trainer is up."""
        if not self.alive:
            return ""
        return bottleneck(self.status if self.workers_alive else {**self.status, "workers": 0})

    @property
    def state(self) -> str:
        """The run's, which is the trainer's if there is one; empty if nothing is known."""
        if self.preparing:
            return "preparing"
        return self.status.get("state", "starting" if self.alive or self.up else "")

    def json(self) -> dict[str, Any]:
        """The object of `status --json`: status.json's keys, and what it cannot know."""
        return {
            "run": self.name,
            **self.status,
            **({"state": self.state} if self.state else {}),
            "alive": self.alive,
            "up": self.up,
            "age_s": _rounded(self.age_s),
            "directory": None if self.directory is None else str(self.directory),
            "workers_alive": self.workers_alive,
            "checkpoint_age_s": _rounded(self.checkpoint_age_s),
            "bottleneck": self.bottleneck,
            "rings": rings_json(self.name, self.rings)["rings"],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def run_states(name: str | None, ring_folder: Path) -> list[RunState]:
    """Run `name`, or every run that is up or has a status or rings; rings are looked for below `ring_folder`, and where
    the run's trainer says that they are.

    Raises:
        PacelineError: a run was named and there is no trace of it.
    """
    folders = {folder.name: folder for folder in reversed(paths.find_run_dirs(name))}
    names = {run for run in runs_with_rings(ring_folder) if name in (None, run)}
    found = [_run_state(run, folders.get(run), ring_folder) for run in sorted(names | folders.keys())]
    found = [state for state in found if state.status or state.rings or state.alive or state.up]
    if name is not None and not found:
        bases = " or ".join(str(base) for base in paths.runtime_bases())
        raise PacelineError(
            f"run {name} has no status in {bases} and no rings in {ring_folder}: "
            "it has not been up since this machine was"
        )
    return found


def _run_state(name: str, directory: Path | None, ring_folder: Path) -> RunState:
    status = (read_status(directory / "status.json") if directory else None) or {}
    age = max(time.time() - status.get("updated", 0.0), 0.0) if status else None
    fresh = age is not None and age <= STALE_SECONDS
    own = Path(status["ring_dir"]) if "ring_dir" in status else ring_folder / name
    folder = own if own.is_dir() else ring_folder / name
    alive = bool(directory and _held(directory / "consumer.lock", fresh))
    up = bool(directory and _held(directory / "up.lock", False))
    return RunState(
        name=name,
        directory=directory,
        status=status,
        alive=alive,
        up=up,
        preparing=directory is not None and up and not alive and _prepares(directory),
        age_s=age,
        checkpoint_age_s=_age(status.get("checkpoint")),
        ring_folder=folder,
        rings=tuple(read_rings(folder)),
    )


def _prepares(directory: Path) -> bool:
    """Whether the run's supervisor says that it prepares the data. False if it does not answer."""
    try:
        return bool(ask(paths.up_socket(directory), {"do": "show"}, patience=2.0).get("preparing"))
    except PacelineError:
        return False


def trainer_of(name: str) -> TrainerState:
    """What run `name`'s lock and status.json say of its trainer now. Raises nothing."""
    for folder in paths.find_run_dirs(name):
        try:
            alive = held_by(folder / "consumer.lock") is not None
        except OSError:  # another user's run: only the status can be read
            alive = None
        return TrainerState.of(alive, read_status(folder / "status.json"), time.time())
    return TrainerState()


def _held(lock: Path, unknown: bool) -> bool:
    try:
        return held_by(lock) is not None
    except OSError:
        return unknown


def _age(checkpoint: str | None) -> float | None:
    """Seconds since a checkpoint was completed: its manifest is written last."""
    if not checkpoint:
        return None
    try:
        return max(0.0, time.time() - (Path(checkpoint) / "manifest.json").stat().st_mtime)
    except OSError:
        return None


# As text


def status_text(state: RunState) -> str:
    """A run on a few lines: a heading, then a name and what there is to say of it on each."""
    lines = [f"{state.name}  {_heading(state)[0]}", *(f"  {name:<10}  {text}" for name, text in status_lines(state))]
    return "\n".join(lines)


def status_table(state: RunState) -> "RenderableType":
    """`status_text` for a terminal: in colour, long lines folded under their own start."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in status_lines(state):
        grid.add_row(f"  {name}", Text(text, style=_colour(name, text)))
    heading, colour = _heading(state)
    return Group(Text.assemble((state.name, "bold"), "  ", (heading, colour)), grid)


def _colour(name: str, text: str) -> str:
    if name == "bottleneck":
        return "bold green" if text.startswith("balanced") else "bold yellow"
    return "red" if name == "trouble" else ""


def _heading(state: RunState) -> tuple[str, str]:
    """The run's state in words, and their colour."""
    status = state.status
    said = state.state
    if state.preparing:
        return "preparing the data; the trainer starts after that", "yellow"
    if not status and said:
        return f"{said}; {_workers(state)}", "yellow"
    if not status:
        return f"no trainer has been up; {_workers(state)}", "yellow"
    if said == "finished":
        return f"finished {duration(state.age_s)} ago", "green"
    if not state.alive:
        return f"no trainer is up (last {said or 'seen'}, {duration(state.age_s)} ago)", "red"
    if (state.age_s or 0.0) > STALE_SECONDS:
        return f"{said}, but silent for {duration(state.age_s)}", "red"
    return said, "green" if said in ("training", "evaluating", "saving") else "yellow"


def _in_one_line(message: str) -> str:
    """Of a process's last lines the last: the log has the others."""
    first, *others = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    return f"{first} {others[-1]}" if others else first


def _workers(state: RunState) -> str:
    return counted(state.workers_alive, "worker") + " up"


def status_lines(state: RunState) -> list[tuple[str, str]]:
    """Name and text of each line; without what is not known."""
    status, lines = state.status, []
    if status:
        lines.append(("progress", _progress(state)))
    if message := status.get("message"):
        lines.append(("says", _in_one_line(message)))
    if state.bottleneck:
        lines.append(("bottleneck", state.bottleneck))
    lines.append(("targets", _joined([_workers(state), *_part(status, "target_bps", "{:.2f} batches/s")])))
    if status:
        lines.append(("drafters", _drafters(status)))
        lines.append(("learning", _learning(status)))
    if state.rings:
        lines.append(("rings", _rings(state.rings)))
    if "checkpoint" in status:
        age = "" if state.checkpoint_age_s is None else f", {duration(state.checkpoint_age_s)} ago"
        lines.append(("checkpoint", f"{status['checkpoint']}{age}"))
    if "listed" in status:
        refused = [f"{status['refused']} refused by ranks since the trainer's start"] if "refused" in status else []
        audit = " (`paceline audit` names them)" if status["listed"] else ""
        lines.append(("records", _joined([f"{counted(status['listed'], 'batch', 'batches')} listed{audit}", *refused])))
    lines += [("trouble", str(ring.problem)) for ring in state.rings if ring.problem]
    return [(name, text) for name, text in lines if text]


def _progress(state: RunState) -> str:
    status = state.status
    step, total = status.get("step", 0), status.get("total_steps")
    epochs = f" of {status['epochs']}" if "epochs" in status else ""
    parts = [f"step {step:,}" + (f" of {total:,} ({step / total:.0%})" if total else "")]
    parts += _part(status, "epoch", "epoch {:.2f}" + epochs)
    if state.alive:
        parts.append(f"ETA {duration(status.get('eta_s'))}")
    return _joined(parts)


def _drafters(status: Mapping[str, Any]) -> str:
    return _joined(
        [
            counted(status.get("ranks", 0), "rank"),
            *_part(status, "drafter_bps", "{:.2f} batches/s"),
            *_part(status, "tokens_per_s", "{:.1f} Ktok/s", 1e-3),
            *_part(status, "wait_gpu", "{:.0%} of the time computing"),
            *_part(status, "wait_data", "{:.0%} waiting for data"),
        ]
    )


def _learning(status: Mapping[str, Any]) -> str:
    forms = {"loss": ".3f", "acc": ".2f", "tau": ".2f", "tau_chain": ".2f", "lr": ".1e"}
    return "  ".join(part for key, form in forms.items() for part in _part(status, key, f"{key} {{:{form}}}"))


def _rings(rings: Iterable[RingInfo]) -> str:
    whole = [ring for ring in rings if ring.problem is None]
    slots, ages = (
        sum(len(ring.states) for ring in whole),
        [r.oldest_ready_s for r in whole if r.oldest_ready_s is not None],
    )
    each = " ".join(f"{ring.worker} {ring.held}/{len(ring.states)}" for ring in whole[:16])
    oldest = [f"oldest record {duration(max(ages))}"] if ages else []
    return _joined([f"{sum(ring.held for ring in whole)} of {slots} slots hold a record ({each})", *oldest])


def _part(status: Mapping[str, Any], key: str, form: str, scale: float = 1.0) -> list[str]:
    value = status.get(key)
    return [] if value is None else [form.format(value if scale == 1.0 else value * scale)]


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(part for part in parts if part)
