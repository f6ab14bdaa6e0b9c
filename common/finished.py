"""The marker of a finished run, for workers whom the feed's word does not reach.

The trainer writes it at the run's end and removes it when it starts. Whether a run is finished depends on the run file
(its limits may be raised, its name given to other data), and workers may start before the trainer does. So the marker
says by which settings the run was finished, and a worker that starts heeds it only if they are its own.
"""

import hashlib
import json
from typing import TYPE_CHECKING

from . import paths

if TYPE_CHECKING:
    from .runfile import RunFile


Marker = tuple[int, int]
"""Which file it is, and when it was written (nanoseconds)."""


def mark_finished(run: "RunFile", step: int) -> None:
    """Write the marker: the run is finished after `step` steps."""
    paths.finished_path(run).write_text(f"{_settings(run)} {step}\n", encoding="utf-8")


def clear_finished(run: "RunFile") -> None:
    paths.finished_path(run).unlink(missing_ok=True)


def marker(run: "RunFile") -> Marker | None:
    """The marker that is there now; another one later is another, whatever the clock says then."""
    try:
        found = paths.finished_path(run).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def is_finished(run: "RunFile", before: Marker | None) -> bool:
    """Whether the run is finished by this run file, or has been finished by any since its `marker` was `before`."""
    if (now := marker(run)) is None:
        return False
    try:
        return now != before or paths.finished_path(run).read_text(encoding="utf-8").split()[:1] == [_settings(run)]
    except FileNotFoundError:
        return False


def _settings(run: "RunFile") -> str:
    """Digest of what decides whether the run of this name is finished: its data, output and limits."""
    limits = run.trainer.model_dump(mode="json", include={"epochs", "max_steps", "max_tokens", "max_hours", "seed"})
    parts = [run.output, run.target.path, run.data.model_dump(mode="json"), limits]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
