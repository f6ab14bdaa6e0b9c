"""`paceline clean`: removes the rings of runs that nobody works on."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from . import paths
from .errors import PacelineError
from .locks import FileLock, OfdLock, held_by
from .ring import RingBusy, remove_ring
from .space import size_text

_WHO = "paceline clean"


def clean_rings(folder: Path, name: str | None, *, dry_run: bool, say: Callable[[str], None]) -> int:
    """Removes stale rings below `folder`, of run `name` or of all; returns the bytes freed.

    A ring is stale if its owner's lock is free and its run's consumer.lock too; the latter is held meanwhile, so that
    no trainer starts to read what is being removed.

    Raises:
        PacelineError: run `name` has no rings there.
    """
    runs = [run for run in _run_folders(folder) if name in (None, run.name)]
    if name is not None and not runs:
        raise PacelineError(f"run {name} has no rings in {folder}")
    freed = sum(_clean_run(run, dry_run, say) for run in runs)
    say(f"{'would free' if dry_run else 'freed'} {size_text(freed)}" if freed else "no stale rings")
    return freed


def _run_folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PacelineError(f"{folder}: {error.strerror}") from None


def _clean_run(folder: Path, dry_run: bool, say: Callable[[str], None]) -> int:
    try:
        with _no_trainer(folder.name, dry_run):
            freed = sum(_clean_ring(path, dry_run, say) for path in _files(folder))
            if not dry_run:
                with contextlib.suppress(OSError):  # not empty: a ring of a living worker is left
                    folder.rmdir()
    except PacelineError as busy:
        say(f"kept {folder}: {busy}")
        return 0
    except OSError as error:
        say(f"kept {folder}: {error.strerror}")
        return 0
    return freed


@contextlib.contextmanager
def _no_trainer(run: str, dry_run: bool) -> Iterator[None]:
    """Holds consumer.lock wherever the run has one, or only looks at it. Raises PacelineError if a trainer holds it."""
    with contextlib.ExitStack() as held:
        for folder in paths.find_run_dirs(run):
            lock = FileLock(folder / "consumer.lock", _WHO)
            if not lock.path.exists():
                continue
            if held_by(lock.path) if dry_run else not lock.acquire():
                raise PacelineError(f"its trainer is up: {held_by(lock.path)}")
            held.enter_context(lock)
        yield


def _files(folder: Path) -> list[Path]:
    """The rings of a run, those that a kill left half-made included."""
    return sorted({path.with_name(path.name.removesuffix(".tmp")) for path in folder.glob("*.ring*")})


def _clean_ring(path: Path, dry_run: bool, say: Callable[[str], None]) -> int:
    try:
        freed = _stale_bytes(path) if dry_run else remove_ring(path)
    except RingBusy as busy:
        say(f"kept {path}: {busy}")
        return 0
    say(f"{'stale' if dry_run else 'removed'} {path} ({size_text(freed)})")
    return freed


def _stale_bytes(path: Path) -> int:
    size = 0
    for name in (path, path.with_name(path.name + ".tmp")):
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        try:
            if OfdLock.holder(fd):
                raise RingBusy("its owner is alive")
            size += os.fstat(fd).st_blocks * 512
        finally:
            os.close(fd)
    return size
