"""`paceline status`: what runs of this machine say about themselves in status.json."""

import time
from pathlib import Path
from typing import Any

import click

from . import paths
from .errors import PacelineError
from .locks import held_by
from .telemetry import STALE_SECONDS, bottleneck, duration, read_status


def find_status(name: str | None) -> list[dict[str, Any]]:
    """The status of run `name`, or of every run that has one. To the keys of `Status` are added `alive` (a trainer
    holds consumer.lock), `up` (a supervisor holds up.lock), `age_s` (of the status) and `directory`.

    Raises:
        PacelineError: a run was named and has no status here.
    """
    found: list[dict[str, Any]] = []
    for folder in paths.find_run_dirs(name):
        status = read_status(folder / "status.json")
        if status is None:
            continue
        age = max(time.time() - status.get("updated", 0.0), 0.0)
        alive = _held(folder / "consumer.lock", age <= STALE_SECONDS)
        up = _held(folder / "up.lock", False)
        extra = {"alive": alive, "up": up, "age_s": round(age, 1), "directory": str(folder)}
        found.append({"run": folder.name, **status, **extra})
    if name is not None and not found:
        bases = " or ".join(str(base) for base in paths.runtime_bases())
        raise PacelineError(f"run {name} has no status in {bases}: its trainer has not been up since this machine was")
    return found


def _held(lock: Path, unknown: bool) -> bool:
    try:
        return held_by(lock) is not None
    except PermissionError:  # another user's run: only the status can be read
        return unknown


def show_status(found: list[dict[str, Any]]) -> None:
    """Prints a few lines for each run."""
    if not found:
        click.echo("no run has a status on this machine")
    for place, status in enumerate(found):
        if place:
            click.echo()
        for line in status_lines(status):
            click.echo(line)


def status_lines(status: dict[str, Any]) -> list[str]:
    """A run's status as text: state and progress, learning, rates and queues, who waits."""

    def known(key: str, form: str, scale: float = 1) -> str:
        value = status.get(key)
        return "-" if value is None else format(value * scale, form)

    step, total = status.get("step", 0), status.get("total_steps")
    progress = f"step {step:,}" + (f" of {total:,} ({step / total:.0%})" if total else "")
    progress += f", epoch {known('epoch', '.2f')}" + (f" of {status['epochs']}" if "epochs" in status else "")
    state = status.get("state", "")
    if status["alive"]:
        progress += f", ETA {duration(status.get('eta_s'))}"
    if not status["alive"] and state != "finished":
        state = f"no trainer is up (last {state}, {duration(status['age_s'])} ago)"
    elif status["alive"] and status["age_s"] > STALE_SECONDS:
        state = f"{state}, silent for {duration(status['age_s'])}"
    lines = [
        f"{status['run']}: {state}; {progress}",
        f"  loss {known('loss', '.3f')}  acc {known('acc', '.2f')}  tau {known('tau', '.2f')}"
        f"  tau_chain {known('tau_chain', '.2f')}  lr {known('lr', '.1e')}",
        f"  target {known('target_bps', '.2f')} batches/s, drafter {known('drafter_bps', '.2f')} batches/s"
        f" ({known('tokens_per_s', '.1f', 1e-3)} Ktok/s)",
        f"  {known('workers', 'd')} workers up, {known('ranks', 'd')} ranks;"
        f" q_pre {status.get('q_pre', [])}, q_hs {status.get('q_hs', [])} of {known('slots', 'd')} slots",
    ]
    if status.get("message"):
        lines.append(f"  {status['message']}")
    if status["alive"] and (waits := bottleneck(status)):
        lines.append(f"  {waits}")
    if status.get("listed"):
        lines.append(f"  {status['listed']} batches refused or skipped (`paceline audit` names them)")
    if status.get("checkpoint"):
        lines.append(f"  newest checkpoint: {status['checkpoint']}")
    return lines
