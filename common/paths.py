"""Where everything of a run is.

    <run directory>/    sockets, locks, status.json, workers.json, finished            `run_dir`
    <ring_dir>/<run>/   rings, one file a worker                                       `ring_dir`
    <output>/           checkpoints, metrics, logs                                     `output_dir`
    <cache>/            prepared rows, converted targets, compile caches               `cache_dir`

Run directories live under the first of PACELINE_RUNTIME_DIR, RUNTIME_DIRECTORY (systemd's, /run/paceline),
$XDG_RUNTIME_DIR/paceline and /tmp/paceline-<uid>. They are the user's own (0700; 0750 under systemd, whose group
may read the status): whoever could write there could speak for a worker. Imports neither pydantic nor torch.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from .runfile import RunFile

# sockaddr_un.sun_path holds 108 bytes, the closing NUL included (unix(7)).
SOCKET_PATH_BYTES = 107
_LONGEST_SOCKET = "ranks.sock"

_UNIT_HINT = "; units write below /var/lib/paceline, and elsewhere after `paceline install-units --writable FOLDER`"

SYSTEM_RUNTIME = Path("/run/paceline")
DEFAULT_RING_DIR = Path("/dev/shm/paceline")


def _systemd_directory(variable: str) -> Path | None:
    """The first folder systemd names in `variable` (it joins several with colons), if any."""
    first = os.environ.get(variable, "").split(":")[0]
    return Path(first) if first else None


def private_folder(path: Path, mode: int = 0o700) -> Path:
    """Create `path` (and its parents) with `mode` if it is missing, and check that it is this user's alone to write.

    A folder that exists keeps its mode: a group may be let in to read, never to write.

    Raises:
        ConfigError: it is not a folder, is somebody else's, or others can write to it (or read it at all).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=mode)
        except FileExistsError:
            pass
        else:
            path.chmod(mode)  # mkdir's mode passes through the umask
        check_private(path)
    except OSError as error:
        raise ConfigError(f"cannot make folder {path}: {error.strerror}") from None
    return path


def make_folder(folder: Path, setting: str = "", *, writable: bool = False) -> Path:
    """Makes `folder` and its parents where they are missing.

    setting: what an error names it by, such as "output: ". writable: also try whether files can be made in it.

    Raises:
        ConfigError: it cannot be made, or nothing can be made in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = _UNIT_HINT if error.errno == errno.EROFS and "NOTIFY_SOCKET" in os.environ else ""
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"{setting}cannot make folder {folder}: {reason}{hint}") from None
    if writable:
        import tempfile

        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(f"{setting}cannot write in {folder}: {error.strerror}") from None
    return folder


def check_writable(path: Path, setting: str) -> None:
    """Tries whether the file `path` can be written, before the work whose result it is. Makes its folder, no more.

    Raises:
        ConfigError: it cannot.
    """
    make_folder(path.parent, setting)
    try:
        there = os.path.lexists(path)
        if there and not path.is_file() and not path.is_dir():
            return  # a pipe would take the opening for its only writer
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{setting}cannot write {path}: {error.strerror}") from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What is written inside is the file `path`. PacelineError if that fails, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise PacelineError(f"cannot write {path}: {error.strerror or error}") from None


def run_file_error(path: Path, error: OSError) -> ConfigError:
    """What to say of a run file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"{path}: no such run file (`paceline init` writes one)")
    if isinstance(error, IsADirectoryError):
        return ConfigError(f"{path} is a folder: give the run file in it")
    return ConfigError(f"{path}: the run file cannot be read: {error.strerror}")


def check_private(path: Path) -> None:
    """Raises ConfigError unless `path` is a folder that is this user's alone to write; OSError if it is not there."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is not a folder (a link does not count)")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to uid {found.st_uid}, this is uid {os.geteuid()}: run as its owner")
    if found.st_mode & 0o027:
        raise ConfigError(f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}): chmod it to 0700")


def runtime_base() -> tuple[Path, int]:
    """The folder of run directories, and the mode of what is created in it."""
    if chosen := os.environ.get("PACELINE_RUNTIME_DIR"):
        return Path(chosen).absolute(), 0o700
    if system := _systemd_directory("RUNTIME_DIRECTORY"):
        return system, 0o750
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "paceline", 0o700
    return Path(f"/tmp/paceline-{os.geteuid()}"), 0o700  # not $TMPDIR: every process of a run must find it


def check_base(base: Path) -> None:
    """Refuse a base in which another user could put a folder of their own in a run directory's place."""
    found = base.lstat() if not base.is_symlink() else base.stat()
    shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if shared or found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{base} can be written by others: set PACELINE_RUNTIME_DIR to a folder of your own")


def run_dir(name: str) -> Path:
    """The directory of run `name`, created if missing.

    Raises:
        ConfigError: it cannot be made, is not private to this user, or is too deep for sockets.
    """
    base, mode = runtime_base()
    _check_length(base / name / _LONGEST_SOCKET)
    if not base.exists():
        private_folder(base, mode)
    check_base(base)
    return private_folder(base / name, mode)


class Freshness:
    """Keeps what is in a run directory from looking abandoned. Where /tmp is swept (systemd-tmpfiles), files go that
    were not touched for some days: without its locks a run is up, and `stop` does not find it."""

    SECONDS = 3600.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._due = 0.0  # time.monotonic()

    def keep(self) -> None:
        """To be called again and again; touches the files once an hour."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self.SECONDS
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                with contextlib.suppress(OSError):  # gone meanwhile
                    os.utime(path, follow_symlinks=False)


def runtime_bases() -> list[Path]:
    """Every folder in which a run directory may be, the own one first; for commands that look and create nothing."""
    own, _ = runtime_base()
    return [own] if own == SYSTEM_RUNTIME else [own, SYSTEM_RUNTIME]


def find_run_dirs(name: str | None = None) -> list[Path]:
    """The run directories that exist and can be read, of one run or of all, sorted by name."""
    found: list[Path] = []
    for base in runtime_bases():
        try:
            found += [p for p in base.iterdir() if p.is_dir() and name in (None, p.name) and os.access(p, os.R_OK)]
        except OSError:
            continue  # no such base, or not ours to read: nothing to show there
    return sorted(found, key=lambda path: path.name)


def _check_length(path: Path) -> None:
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} has {size} bytes, at most {SOCKET_PATH_BYTES} fit: "
            "set PACELINE_RUNTIME_DIR to a shorter folder"
        )


def feed_address(run: "RunFile") -> str:
    """Where the feed listens for workers."""
    return f"ipc://{run_dir(run.name) / 'feed.sock'}"


def ranks_address(run: "RunFile") -> str:
    """Where the feed listens for ranks."""
    return f"ipc://{run_dir(run.name) / _LONGEST_SOCKET}"


def consumer_lock(run: "RunFile") -> Path:
    """Held by the run's trainer for life."""
    return run_dir(run.name) / "consumer.lock"


def rank_lock(run: "RunFile", rank: int) -> Path:
    """Held by one trainer rank for life."""
    return run_dir(run.name) / f"rank-{rank}.lock"


def trainer_lock(run: "RunFile") -> Path:
    """Held by the trainer that writes into the run's output folder, whatever the run is called."""
    return output_dir(run) / "trainer.lock"


def output_lock(run: "RunFile") -> Path:
    """Held by the `paceline up` whose run writes into the output folder."""
    return output_dir(run) / "up.lock"


def up_lock(run: "RunFile") -> Path:
    """Held by the run's supervisor (`paceline up`) for life."""
    return run_dir(run.name) / "up.lock"


def up_socket(folder: Path) -> Path:
    """Where the supervisor takes requests, in a run directory."""
    return folder / "up.sock"


def ready_socket(folder: Path) -> Path:
    """Where the supervisor's children say that they are up, in a run directory."""
    return folder / "ready.sock"


def wanted_path(folder: Path) -> Path:
    """How many workers the run was scaled to, in a run directory."""
    return folder / "workers.json"


def status_path(run: "RunFile") -> Path:
    """status.json: what the trainer last said about itself."""
    return run_dir(run.name) / "status.json"


def finished_path(run: "RunFile") -> Path:
    """The marker of a run that is done (finished.py); workers that find it exit 0."""
    return run_dir(run.name) / "finished"


def ring_dir(run: "RunFile") -> Path:
    """The folder of the run's rings. Not created here: the first ring's owner does (`private_folder`)."""
    return Path(run.stream.ring_dir) / run.name


def output_dir(run: "RunFile") -> Path:
    """Checkpoints, metrics and logs; created if missing."""
    return make_folder(Path(run.output), "output: ")


def checkpoint_dir(run: "RunFile") -> Path:
    """The folder of the run's checkpoints; created by the first one."""
    return Path(run.output) / "checkpoints"


def log_dir(run: "RunFile") -> Path:
    """The folder of the processes' logs under `paceline up`."""
    return Path(run.output) / "logs"


def cache_dir() -> Path:
    """Prepared rows, converted targets and compile caches, shared by all runs of this user; created if missing."""
    if chosen := os.environ.get("PACELINE_CACHE"):
        folder = Path(chosen).expanduser().absolute()
    elif system := _systemd_directory("CACHE_DIRECTORY"):
        folder = system
    else:
        home = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(home) if home else Path.home() / ".cache") / "paceline"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make cache folder {folder}: {error.strerror}; set PACELINE_CACHE") from None
    return folder


COMPILE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
# Torch looks for the older name first, and takes the other only where that is not set at all.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def compile_cache() -> Path:
    """The folder of compiled kernels, which are code that is run: this user's alone, whoever made it."""
    folder = cache_dir() / "compile"
    if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)
    return private_folder(folder)


def prepare_torch() -> None:
    """Sets `torch_environment`, in a process that computes. To be called before torch is imported."""
    os.environ.update(torch_environment())


def torch_environment() -> dict[str, str]:
    """What workers and ranks set for torch; what the user's environment says stays.

    Caches of compiled kernels in folders that all processes of this user share. And segments of GPU memory that grow:
    each micro-batch has other sizes than the one before, and among segments of fixed sizes the allocator would come
    to hold nearly twice what tensors ever take.
    """
    missing = {variable: name for variable, name in COMPILE_CACHES.items() if not os.environ.get(variable)}
    found = {variable: str(compile_cache() / name) for variable, name in missing.items()}
    if not any(variable in os.environ for variable in ALLOCATOR):
        found[ALLOCATOR[1]] = "expandable_segments:True"
    return found


def compile_lock() -> Path:
    """Held by the worker that compiles its target; others wait, and find what it compiled in the cache."""
    return compile_cache() / "target.lock"
