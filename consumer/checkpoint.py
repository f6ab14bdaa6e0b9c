"""Checkpoints: what a run has done, at one step boundary, on disk.

A checkpoint is a folder `step-%08d` of

    model.safetensors, optimizer.safetensors   written by the learner (`Write`)
    state.json                                 `CheckpointState`: step, ledger, what comes next, run file, fingerprint
    manifest.json                              size and SHA-256 of every other file; written last

It is made under a temporary name in the same folder, every file is fsynced, then the folder is renamed and its parent
fsynced: so a folder called `step-…` with a manifest that fits is complete, whatever was killed and when. Nothing is
ever written into a finished one. A full disk or a kill leaves the earlier checkpoints as they were; the oldest are
removed only after a newer one is complete.

Called by rank 0 (`Checkpointer`, which writes in the background) and by the trainer's main process, which loads
state.json only. Imports no torch.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from ..common.batch import Kind
from ..common.errors import ConfigError, PacelineError
from ..common.faults import point

MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
FOLDER = "checkpoints"  # of a run's output folder (`paths.checkpoint_dir`)
BEST, NEWEST = "best", "newest"  # stand for a checkpoint where one is read

_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY, _REMOVED, _REPLACED = ".new-", ".old-", ".was-"
_PIECE = 1 << 22  # bytes hashed at a time: between two pieces a signal is seen

Write = Callable[[Path], None]
"""Writes model.safetensors and optimizer.safetensors into a folder, from a snapshot taken at the step boundary."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be read or written."""


class UnfitCheckpoint(CheckpointError, ConfigError):
    """What the user named is no checkpoint, or not a whole one. Exit code 78."""


WANTED = f"a checkpoint (step-…), or {BEST} or {NEWEST} in a run's output folder"
"""What can be given where a checkpoint is read."""


class CheckpointState(BaseModel):
    """state.json. Exact fields and types; anything else is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1] = 1
    name: str = Field(description="The run's name")
    run_id: str = Field(description="Drawn when the run's first trainer started")
    step: int = Field(ge=0, description="Optimiser steps done")
    phase: tuple[Kind, int] | None = Field(description="The phase that comes next; None: the run is finished")
    seconds: float = Field(ge=0, description="Training time so far, over all trainers of the run")
    tokens: int = Field(ge=0, description="Context tokens trained so far")
    evaluated: int | None = Field(description="Step at which `metrics` holds an evaluation of these weights, if any")
    ledger: dict[str, Any] = Field(description="Batches trained, and batches listed with the reason")
    rng: dict[str, int] = Field(description="The seed: all draws are functions of (seed, epoch, row id)")
    fingerprint: dict[str, str | int] = Field(description="Target, data, layers and plan inputs")
    drafter: dict[str, Any] = Field(description="The drafter's configuration")
    run: dict[str, Any] = Field(description="The resolved run file")
    versions: dict[str, str] = Field(description="paceline, Python and libraries that wrote this")
    metrics: dict[str, float] = Field(description="Of the last step, and of the last evaluation")


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that resume passed over."""

    path: Path
    reason: str


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def folders(root: Path) -> list[Path]:
    """Folders with a checkpoint's name, complete or not, newest step first; with the one that was being replaced by
    another of its step when a writer was killed between its two renames."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _step_of(path) >= 0 and path.is_dir()]
    found = [path for path in found if not (path.name.startswith(_REPLACED) and _original(path).exists())]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name.removeprefix(_REPLACED))
    return int(match[1]) if match else -1


def _original(path: Path) -> Path:
    return path.with_name(path.name.removeprefix(_REPLACED))


# Reading ------------------------------------------------------------------------------------------------------------


def find_checkpoint(path: Path) -> Path:
    """`path` itself, or the checkpoint that `FOLDER/best` or `FOLDER/newest` stands for, where FOLDER is a run's output
    folder or the folder of its checkpoints. best: see `best_of`.

    Raises:
        UnfitCheckpoint: there is none, or `path` is such a FOLDER and names none.
    """
    if path.exists() or path.name not in (BEST, NEWEST):
        if not (path / STATE).is_file() and (path.name == FOLDER or (path / FOLDER).is_dir()):
            raise UnfitCheckpoint(f"{path} holds checkpoints: name one of them, or {path / BEST} or {path / NEWEST}")
        return path
    root = path.parent / FOLDER if (path.parent / FOLDER).is_dir() else path.parent
    complete = [found for found in folders(root) if damage(found, read=False) is None]
    if not complete:
        raise UnfitCheckpoint(f"{path}: there is no complete checkpoint in {root}")
    found = complete[0] if path.name == NEWEST else best_of(complete)
    if found is None:
        raise UnfitCheckpoint(f"{path}: no checkpoint in {root} was evaluated (evaluation.every_steps, at_end)")
    return found


def newest_complete(root: Path) -> tuple[Path | None, tuple[Skipped, ...]]:
    """The newest checkpoint whose every file is as its manifest says (all bytes are read), and the newer ones that
    are not, with the reason."""
    skipped: list[Skipped] = []
    for path in folders(root):
        reason = damage(path)
        if reason is None:
            return path, tuple(skipped)
        skipped.append(Skipped(path, reason))
    return None, tuple(skipped)


def whole_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` names (`find_checkpoint`), all of whose bytes are as they were written.

    Raises:
        UnfitCheckpoint: there is none, or it is damaged or something else; says what could be given.
    """
    path = check_folder(find_checkpoint(path), WANTED)
    if not any((path / name).exists() for name in (STATE, MANIFEST)):
        if (path / "config.json").is_file():
            raise UnfitCheckpoint(f"{path} is an exported drafter: give the checkpoint, which has the float32 masters")
        if not _NAME.fullmatch(path.name):
            raise UnfitCheckpoint(f"{path} is no checkpoint, it has neither {STATE} nor {MANIFEST}: give {WANTED}")
    if reason := damage(path):
        raise UnfitCheckpoint(f"{path} is no complete checkpoint ({reason}): give another")
    return path


def check_folder(path: Path, wanted: str) -> Path:
    """`path`, if it is a folder; else UnfitCheckpoint, which says what is wanted."""
    if path.is_dir():
        return path
    problem = f"{path} is a file" if path.exists() else f"there is no folder {path}"
    raise UnfitCheckpoint(f"{problem}: give {wanted}")


def damage(path: Path, *, read: bool = True) -> str | None:
    """What is wrong with checkpoint `path`, or None if it is complete. `read=False` compares sizes only."""
    try:
        files = _manifest(path)
        for name, entry in files.items():
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
        for name, entry in files.items() if read else ():
            if _sha256(path / name) != entry["sha256"]:
                return f"{name} is not what was written (SHA-256 differs)"
        load_state(path)
    except CheckpointError as error:
        return str(error)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"cannot read it: {error.strerror}"
    return None


def _manifest(path: Path) -> dict[str, dict[str, Any]]:
    """File name -> {"bytes", "sha256"}; the learner's two files and state.json are always among them."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{MANIFEST} is missing: it was never finished")
    try:
        files = json.loads((path / MANIFEST).read_bytes())["files"]
        good = isinstance(files, dict) and all(
            Path(name).name == name and isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
            for name, entry in files.items()
        )
    except (ValueError, KeyError, TypeError):
        good, files = False, {}
    if not good or not {MODEL, OPTIMIZER, STATE} <= files.keys():
        raise CheckpointError(f"{MANIFEST} is damaged")
    return files


def load_state(path: Path) -> CheckpointState:
    """state.json of checkpoint `path`.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
    """
    file = path / STATE
    try:
        # Through JSON, not Python values: pydantic's strict mode then takes a list for a tuple and an int for a Kind.
        return CheckpointState.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{STATE} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {STATE}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{STATE} is no state of this format: {where or 'document'}: {first['msg']}") from None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


# Writing ------------------------------------------------------------------------------------------------------------


def write_checkpoint(root: Path, state: CheckpointState, write: Write) -> Path:
    """Write checkpoint `state.step` under `root` and return its folder; on any error nothing of it is left.

    An incomplete folder of the same name, or one of a timeline that was left, is replaced.

    Raises:
        CheckpointError: the disk is full or cannot be written; earlier checkpoints stand.
    """
    target = step_folder(root, state.step)
    try:
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        new = root / f"{_TEMPORARY}{target.name}"
        try:
            new.mkdir()
            point("checkpoint.begun")
            write(new)
            (new / STATE).write_text(state.model_dump_json(indent=1), encoding="utf-8")
            _seal(new, state.step)
            point("checkpoint.before-rename")
            if target.exists():
                target.rename(root / f"{_REPLACED}{target.name}")
                point("checkpoint.between-renames")
            new.rename(target)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        _fsync(root)
        point("checkpoint.after-rename")
        sweep(root)
    except OSError as error:
        raise CheckpointError(f"checkpoint {target} was not written: {_disk_error(error, root)}") from error
    except SafetensorError as error:  # what safetensors makes of a write error
        raise CheckpointError(f"checkpoint {target} was not written: {error}") from error
    return target


def _disk_error(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(root).free if root.is_dir() else 0
        return f"{error.strerror} ({free / 1e9:.2f} GB free)"
    return error.strerror or str(error)


def _seal(folder: Path, step: int) -> None:
    """Fsync every file, then write and fsync the manifest, then the folder."""
    files = {}
    for path in sorted(folder.iterdir()):
        _fsync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    missing = {MODEL, OPTIMIZER, STATE} - files.keys()
    if missing:
        raise CheckpointError(f"the learner wrote no {', '.join(sorted(missing))}")
    point("checkpoint.before-manifest")
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": files}, indent=1), encoding="utf-8")
    _fsync(manifest)
    point("checkpoint.after-manifest")
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(root: Path) -> None:
    """Remove what a killed writer or remover left, and give back its name to a checkpoint that was not replaced after
    all. For the run's one trainer (consumer.lock): nobody else writes here."""
    if not root.is_dir():
        return
    for path in list(root.iterdir()):
        if path.name.startswith(_REPLACED) and not _original(path).exists():
            path.rename(_original(path))
        elif path.name.startswith((_TEMPORARY, _REMOVED, _REPLACED)):
            shutil.rmtree(path, ignore_errors=True)


def prune(root: Path, *, keep_last: int, keep_best: bool, written: Path | None = None) -> list[Path]:
    """Remove all complete checkpoints but the newest `keep_last`, the one just `written` and, with `keep_best`, the one
    whose own evaluation has the highest tau_chain (the newest of equals). Incomplete ones are left for the user to see.
    Returns what was removed."""
    complete = [path for path in folders(root) if damage(path, read=False) is None]
    keep = {*complete[: max(1, keep_last)], written}
    if keep_best and (best := best_of(complete)) is not None:
        keep.add(best)
    gone = [path for path in complete if path not in keep]
    point("checkpoint.before-removal")
    for path in gone:
        # Renamed first: a kill halfway through must not leave half a checkpoint under a checkpoint's name.
        removed = path.rename(root / f"{_REMOVED}{path.name}")
        point("checkpoint.removing")
        shutil.rmtree(removed, ignore_errors=True)
    return gone


def best_of(paths: list[Path]) -> Path | None:
    """The checkpoint with the highest tau_chain measured on its own weights; of equals the newest; None without one."""
    scores = []
    for path in paths:
        state = load_state(path)
        if state.evaluated == state.step and "tau_chain" in state.metrics:
            scores.append((state.metrics["tau_chain"], state.step, path))
    return max(scores)[2] if scores else None


def set_aside_newer(root: Path, step: int) -> list[Path]:
    """Rename every checkpoint after `step` to `left-step-…` and return the new names: when an older checkpoint is
    resumed, a later trainer must not find the newer ones again and continue the timeline that was left."""
    moved = []
    for path in folders(root):
        if _step_of(path) > step:
            number = 0
            while (aside := root / f"left-{path.name}{f'.{number}' if number else ''}").exists():
                number += 1
            moved.append(path.rename(aside))
    return moved


def bring_in(root: Path, checkpoint: Path) -> Path:
    """A complete checkpoint's place under `root`; one that lies elsewhere, or was left aside, is copied there first. So
    a run that was started from it finds it again, also if it is killed before a checkpoint of its own.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    state = load_state(checkpoint)
    if checkpoint.resolve() == step_folder(root, state.step).resolve():
        return checkpoint

    def write(folder: Path) -> None:
        for name in (MODEL, OPTIMIZER):
            shutil.copyfile(checkpoint / name, folder / name)

    return write_checkpoint(root, state, write)


# In the background ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How one background write ended: `path` is the checkpoint, or None with the reason."""

    step: int
    path: Path | None
    error: str = ""


class Checkpointer:
    """Writes checkpoints in a thread, one at a time, and keeps the newest and the best.

    The caller takes the snapshot (`Write` reads nothing that training goes on to change); writing, hashing and
    syncing are off the critical path. A failed write is an `Outcome` with a reason; training goes on and the next
    checkpoint tries again.
    """

    def __init__(self, root: Path, *, keep_last: int, keep_best: bool):
        self.root = root
        self._keep_last, self._keep_best = keep_last, keep_best
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Outcome] | None = None

    @property
    def pending(self) -> bool:
        """Whether there is a write whose outcome has not been taken."""
        return self._pending is not None

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def save(self, state: CheckpointState, write: Write) -> None:
        """Start writing. The write before must have been taken by `poll` or `wait`."""
        if self._pending is not None:
            raise RuntimeError("a checkpoint is still being written")
        self._pending = self._thread.submit(self._run, state, write)

    def poll(self) -> Outcome | None:
        """How the write ended, once, when it has."""
        return None if self._pending is None or self.busy else self._take()

    def wait(self, seconds: float) -> Outcome | None:
        """Wait for at most `seconds`; then as `poll`."""
        if self._pending is not None:
            try:
                self._pending.result(seconds)
            except TimeoutError:
                return None
        return self.poll()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _take(self) -> Outcome:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.result()

    def _run(self, state: CheckpointState, write: Write) -> Outcome:
        try:
            path = write_checkpoint(self.root, state, write)
        except CheckpointError as error:
            return Outcome(state.step, None, str(error))
        try:
            prune(self.root, keep_last=self._keep_last, keep_best=self._keep_best, written=path)
        except (CheckpointError, OSError) as error:
            return Outcome(state.step, path, f"older checkpoints were not removed: {error}")
        return Outcome(state.step, path)
