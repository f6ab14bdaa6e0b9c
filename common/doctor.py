"""`paceline doctor`: what this machine lacks, and what a run file needs of it.

Every check is a function that yields `Check`s and raises nothing: what it needs and cannot have (torch, a GPU, a file)
is itself what it reports. Torch is asked in a child process, so that a broken installation shows as one line. Nothing
is created or locked. The checks of a run file are in `doctor_run`.
"""

import importlib.metadata
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from . import paths
from .errors import ConfigError, PacelineError, counted
from .inspect import read_rings, runs_with_rings
from .locks import held_by
from .space import free_bytes, size_text

Level = Literal["OK", "WARN", "FAIL"]

CONTAINER_SHM = 64 << 20  # what container engines give /dev/shm unless told otherwise
TORCH_PATIENCE = 180.0  # seconds that importing torch may take
TESTED_PYTHON = ((3, 11), (3, 13))
# The newest version of each package that the tests have run with.
TESTED = {"click": "8.5", "numpy": "2.4", "pyarrow": "26.0", "pydantic": "2.14", "pyzmq": "27.3", "rich": "15.0"}
TESTED |= {"safetensors": "0.8", "tokenizers": "0.23", "torch": "2.13", "transformers": "5.24", "gguf": "0.19"}
MOST_FILES = 1024  # descriptors that a trainer with many ranks and workers stays below
LONGEST_NAME = 48  # characters of a run's name
LOGIND = ("/etc/systemd/logind.conf", "/run/systemd/logind.conf.d", "/etc/systemd/logind.conf.d")
UNIT_FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)

_TORCH = """
import json, sys
try:
    import torch
except BaseException as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"})); sys.exit()
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available(), "gpus": []}
if not facts["available"] and facts["cuda"]:
    try:
        torch.cuda.init()
    except Exception as error:
        facts["why"] = str(error).splitlines()[0]
for index in range(torch.cuda.device_count() if facts["available"] else 0):
    about = torch.cuda.get_device_properties(index)
    facts["gpus"].append({"name": about.name, "total": about.total_memory, "capability": [about.major, about.minor]})
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, what was found, and what to do about it (empty if nothing)."""

    name: str
    level: Level
    text: str
    todo: str = ""

    def json(self) -> dict[str, str]:
        return asdict(self)


def checks(run_path: Path | None = None, overrides: Sequence[str] = ()) -> list[Check]:
    """Every check of this machine and, if one is given, of a run file."""
    torch = torch_facts()
    found = [*python(), *packages(), *torch_and_gpus(torch), *shared_memory(), *limits(), *clock(), *topology()]
    found += [*folders(), *leftovers(), *systemd(), *ports()]
    if run_path is not None:
        from .doctor_run import run_checks

        found += run_checks(run_path, overrides, torch)
    return found


def doctor_lines(found: Iterable[Check], colour: bool = False) -> list[str]:
    """A line for each check, one more for what to do, and a sum."""
    colours = {"OK": "\033[32m", "WARN": "\033[33m", "FAIL": "\033[1;31m"}
    found, lines = list(found), []
    wide = max(len(check.name) for check in found)
    for check in found:
        level = f"{colours[check.level]}{check.level:<4}\033[0m" if colour else f"{check.level:<4}"
        lines.append(f"{level}  {check.name:<{wide}}  {check.text}")
        if check.todo:
            lines.append(f"{'':4}  {'':{wide}}  -> {check.todo}")
    counts = [f"{number} {level}" for level in colours if (number := sum(check.level == level for check in found))]
    return [*lines, "", ", ".join(counts)]


# This installation


def python() -> Iterator[Check]:
    version, text = sys.version_info[:2], f"{sys.version.split()[0]} at {sys.executable}"
    oldest, newest = TESTED_PYTHON
    if version < oldest:
        yield Check("python", "FAIL", text, f"use Python {oldest[0]}.{oldest[1]} or newer")
    elif version > newest:
        yield Check("python", "WARN", text, f"tested up to Python {newest[0]}.{newest[1]}")
    else:
        yield Check("python", "OK", text)


def packages() -> Iterator[Check]:
    """Requirements of the installed paceline against what is installed; one line if all are met."""
    try:
        from packaging.requirements import Requirement
        from packaging.version import InvalidVersion, Version
    except ImportError:
        yield Check("packages", "FAIL", "packaging is not installed", "pip install packaging")
        return
    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires("paceline") or []]
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "packages", "WARN", "paceline itself is not installed, so its requirements are not known", "pip install it"
        )
        return
    good = 0
    for requirement in (one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})):
        name = requirement.name
        try:
            found = importlib.metadata.version(name)
            version = Version(found)
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):
            yield Check(name, "FAIL", "not installed", f"pip install '{requirement}'")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield Check(name, "FAIL", f"{found}, which is not {requirement.specifier}", f"pip install '{requirement}'")
        elif name in TESTED and version.release[:2] > Version(TESTED[name]).release:
            yield Check(
                name,
                "WARN",
                f"{found}, tested up to {TESTED[name]}",
                f"if it fails: pip install {name}=={TESTED[name]}.*",
            )
        else:
            good += 1
    yield Check("packages", "OK", f"{good} of {good} checked packages are in the tested range" if good else "none")


def torch_facts() -> dict[str, Any]:
    """What a child process says of torch: version, cuda, available, gpus; or error."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=TORCH_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch took more than {TORCH_PATIENCE:.0f} s"}
    except OSError as error:
        return {"error": f"{sys.executable}: {error.strerror}"}
    try:
        facts = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"error": f"importing torch ended the process: {last[0]}"}
    return facts


# GPUs


def torch_and_gpus(torch: dict[str, Any]) -> Iterator[Check]:
    from .devices import installed_gpus

    if "error" in torch:
        yield Check(
            "torch", "FAIL", torch["error"], "install the build for this machine: https://pytorch.org/get-started"
        )
    else:
        build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built for CPU only"
        yield Check("torch", "OK", f"{torch['version']}, {build}")
    smi = _nvidia_smi()
    installed = len(smi) or installed_gpus()
    if not installed:
        yield Check("gpu", "OK", "no NVIDIA GPU here: everything runs on CPU (slow for real targets)")
    elif "error" not in torch and not torch["available"]:
        why = f": {torch['why']}" if torch.get("why") else ""
        todo = "install a CUDA build of torch" if not torch["cuda"] else "update the NVIDIA driver or see nvidia-smi"
        yield Check("cuda", "FAIL", f"{counted(installed, 'GPU')} installed, and torch cannot use any{why}", todo)
    elif "error" not in torch:
        yield Check("cuda", "OK", f"torch sees {len(torch['gpus'])} of {counted(installed, 'GPU')}")
    for gpu in smi:
        yield _gpu(gpu)


def _nvidia_smi() -> list[list[str]]:
    """[index, name, driver, total MiB, free MiB] of each GPU, without a CUDA context; [] if it cannot be asked."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=index,name,driver_version,memory.total,memory.free"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = ([cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines())
    return [row for row in rows if len(row) == 5]


def _gpu(row: list[str]) -> Check:
    index, name, driver, total, free = row
    text = f"{name}, driver {driver}"
    if not (total.isdigit() and free.isdigit()):
        return Check(f"gpu {index}", "OK", f"{text}, memory unknown")
    text += f", {size_text(int(free) << 20)} of {size_text(int(total) << 20)} free"
    if int(free) < 0.9 * int(total):
        return Check(f"gpu {index}", "WARN", text, "another process uses it: nvidia-smi shows which")
    return Check(f"gpu {index}", "OK", text)


# Memory, limits, clock


def shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Check]:
    try:
        system = os.statvfs(folder)
        free = free_bytes(folder)
    except OSError as error:
        yield Check("/dev/shm", "FAIL", f"{folder}: {error.strerror}", "mount a tmpfs there, or set stream.ring_dir")
        return
    size = system.f_blocks * system.f_frsize
    text = f"{size_text(size) if size else 'no limit'}, {size_text(free)} can be written"
    if 0 < size <= CONTAINER_SHM:
        todo = "start the container with a larger one: docker run --shm-size=64g (or --ipc=host)"
        yield Check("/dev/shm", "FAIL", f"{text}: a container's default, too small for a real target", todo)
    elif size and free < size // 10:
        yield Check(
            "/dev/shm", "WARN", text, "see what is in it: du -sh /dev/shm/*; `paceline clean` removes stale rings"
        )
    else:
        yield Check("/dev/shm", "OK", text)


def limits() -> Iterator[Check]:
    lock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if lock == resource.RLIM_INFINITY:
        yield Check("memlock", "OK", "unlimited")
    else:
        text = f"{size_text(lock)} may be locked; CUDA pins rings through its driver, which does not count here"
        yield Check("memlock", "OK", text, "if registering a ring fails: ulimit -l unlimited, or LimitMEMLOCK=infinity")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MOST_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        level: Level = "FAIL" if soft < 128 else "WARN"
        yield Check(
            "open files", level, f"{soft} descriptors a process", f"ulimit -n {MOST_FILES} (at most {most} here)"
        )
    else:
        yield Check(
            "open files", "OK", f"{soft if soft != resource.RLIM_INFINITY else 'unlimited'} descriptors a process"
        )


def clock() -> Iterator[Check]:
    """Ages and times left are taken from it; rings use the monotonic clock."""
    now, made = time.time(), Path(__file__).stat().st_mtime
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < made - 60:
        yield Check("clock", "WARN", f"{text}: before paceline was installed", "set it: timedatectl set-ntp true")
    else:
        yield Check("clock", "OK", text)


def topology() -> Iterator[Check]:
    nodes = [node for node in Path("/sys/devices/system/node").glob("node[0-9]*") if node.is_dir()]
    text = f"{os.cpu_count()} CPUs, {max(1, len(nodes))} NUMA node{'s' if len(nodes) > 1 else ''}"
    pages = _chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    todo = "workers and ranks go to their GPU's node by themselves (stream.numa)" if len(nodes) > 1 else ""
    yield Check("memory", "OK", f"{text}, huge pages of shared memory: {pages or 'unknown'}", todo)


def _chosen(path: Path) -> str:
    try:
        found = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


# Folders, locks, sockets


def folders() -> Iterator[Check]:
    base, _ = paths.runtime_base()
    try:
        if base.exists():
            paths.check_base(base)
            yield Check("run directories", "OK", f"{base}")
        else:
            parent = next(one for one in base.parents if one.exists())
            level: Level = "OK" if os.access(parent, os.W_OK | os.X_OK) else "FAIL"
            todo = "" if level == "OK" else "set PACELINE_RUNTIME_DIR to a folder of your own"
            yield Check("run directories", level, f"{base}, to be made in {parent}", todo)
    except (ConfigError, OSError) as error:
        yield Check("run directories", "FAIL", str(error), "set PACELINE_RUNTIME_DIR to a folder of your own")
    room = paths.SOCKET_PATH_BYTES - len(os.fsencode(base / "x" / "ranks.sock")) + 1
    if room < 1:
        todo = "set PACELINE_RUNTIME_DIR to a shorter folder"
        yield Check(
            "socket paths", "FAIL", f"no run's sockets fit in {paths.SOCKET_PATH_BYTES} bytes below {base}", todo
        )
    elif room < LONGEST_NAME:
        text = f"names of up to {room} characters fit below {base}"
        yield Check("socket paths", "WARN", text, "set PACELINE_RUNTIME_DIR to a shorter folder for longer names")
    else:
        yield Check("socket paths", "OK", f"a name of {LONGEST_NAME} characters fits below {base}")
    yield _ring_folder(paths.DEFAULT_RING_DIR)


def _ring_folder(folder: Path) -> Check:
    where = folder if folder.exists() else next(one for one in folder.parents if one.exists())
    if os.access(where, os.W_OK | os.X_OK):
        return Check("ring folder", "OK", str(folder) if where == folder else f"{folder}, to be made")
    owner = where.stat().st_uid
    todo = f"run as uid {owner}, or set stream.ring_dir to a folder of your own on a tmpfs"
    return Check(
        "ring folder", "FAIL", f"{where} belongs to uid {owner} and uid {os.geteuid()} cannot write there", todo
    )


def leftovers(folder: Path | None = None) -> Iterator[Check]:
    """Rings that nobody works on, files that are no rings, and ranks that outlived their trainer."""
    folder = folder or paths.DEFAULT_RING_DIR
    stale = 0
    for name in runs_with_rings(folder):
        rings = read_rings(folder / name)
        for ring in rings:
            if ring.problem:
                yield Check(
                    "rings", "WARN", ring.problem, f"`paceline clean {name}` removes damaged rings of a dead run"
                )
        dead = [ring for ring in rings if not ring.alive and ring.problem is None]
        if dead and len(dead) == len(rings) and not _has_trainer(name):
            stale += 1
            size = size_text(sum(len(ring.states) * ring.slot_bytes for ring in dead))
            held = sum(ring.held for ring in dead)
            text = f"nobody works on run {name}: {counted(len(dead), 'ring')}, {size}, {counted(held, 'record')} held"
            yield Check("rings", "WARN", text, f"start the run again, or drop them: paceline clean {name}")
    if not stale:
        yield Check("rings", "OK", f"no stale rings in {folder}")
    yield from _orphans()


def _has_trainer(name: str) -> bool:
    return any(_holder(run / "consumer.lock") for run in paths.find_run_dirs(name))


def _holder(lock: Path) -> str | None:
    try:
        return held_by(lock)
    except OSError:
        return None


def _orphans() -> Iterator[Check]:
    for run in paths.find_run_dirs():
        if _holder(run / "consumer.lock"):
            continue
        for lock in sorted(run.glob("rank-*.lock")):
            if holder := _holder(lock):
                text = f"run {run.name} has no trainer, but {holder} is alive"
                yield Check(
                    "locks", "WARN", text, "the next trainer waits for it; end it if it does not leave by itself"
                )


# systemd, ports


def systemd() -> Iterator[Check]:
    if not Path("/run/systemd/system").is_dir():
        yield Check("systemd", "OK", "not running here: use `paceline up`")
        return
    units = sorted({unit.name for folder in UNIT_FOLDERS for unit in Path(folder).glob("paceline*")})
    text = f"units: {', '.join(units)}" if units else "paceline's units are not installed; `paceline up` needs none"
    yield Check("systemd", "OK", text)
    if os.geteuid() >= 1000 and remove_ipc():
        todo = "RemoveIPC=no in /etc/systemd/logind.conf, or run under a system user"
        yield Check("RemoveIPC", "WARN", "logind deletes this user's rings when the last session ends", todo)
    else:
        yield Check("RemoveIPC", "OK", "logind leaves this user's rings alone")


def remove_ipc(where: Sequence[str] = LOGIND) -> bool:
    """logind's RemoveIPC as its files set it, the last one that does; yes is its default."""
    value = True
    for place in map(Path, where):
        for file in sorted(place.glob("*.conf")) if place.is_dir() else [place]:
            try:
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                continue
            for line in lines:
                if found := re.match(r"\s*RemoveIPC\s*=\s*(\S+)", line):
                    value = found[1].lower() in ("yes", "true", "1", "on")
    return value


def ports(port: int = 9478) -> Iterator[Check]:
    """Processes of a run speak over sockets in the run directory; only `paceline metrics` takes a port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        taken = probe.connect_ex(("127.0.0.1", port)) == 0
    if taken:
        yield Check("ports", "WARN", f"port {port} is taken", "if not by `paceline metrics` itself, give that --port")
    else:
        yield Check("ports", "OK", f"port {port} is free for `paceline metrics`; nothing else needs one")


def failed(name: str, error: PacelineError) -> Check:
    """A user's mistake as a check: its one line says what to do."""
    return Check(name, "FAIL", str(error))
