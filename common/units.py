"""A run's units on systemd: are there any, how many workers, stop them all, the trainer anew (`paceline scale`, `stop`,
`restart`).

    paceline@RUN.target              wants the trainer, and each worker that `scale_units` made
    paceline-consumer@RUN.service    the trainer
    paceline-producer@RUN.N.service  worker N; two files make it part of the run, as no unit can split its own name:
        /etc/systemd/system/paceline-producer@RUN.N.service.d/50-paceline.conf   PartOf= and WantedBy= the target
        /etc/paceline/RUN.N.env      CUDA_VISIBLE_DEVICES, for a worker that `scale` put there

Enabled instances come back after a reboot, as many as the last `scale` asked for. Imports no torch.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from .devices import installed_gpus, rank_devices
from .errors import ConfigError, PacelineError, UsageError, counted
from .runfile import RunFile, load
from .scale import Wanted, place, retire, shared

CONFIG_DIR = Path("/etc/paceline")
UNIT_DIR = Path("/etc/systemd/system")
BOOTED = Path("/run/systemd/system")  # sd_booted(3)

LEAVE_SECONDS = 60.0
"""How long a removed worker may take to make its batch to the end."""

_MARK = "# Written by `paceline scale`, which removes it with its worker."
_DROP_IN = "50-paceline.conf"
_ACTIVE = ("active", "activating", "reloading", "deactivating")
_INSTANCE = re.compile(r"(?P<run>[a-z0-9][a-z0-9_-]*)\.(?P<worker>0|[1-9][0-9]*)")

Say = Callable[[str], None]


def split_instance(instance: str) -> tuple[str, int]:
    """ "demo.3" -> ("demo", 3): run and worker of a producer's instance. Raises UsageError."""
    found = _INSTANCE.fullmatch(instance)
    if found is None:
        raise UsageError(f"{instance!r} is not RUN.N, a run's name and a worker's number")
    return found["run"], int(found["worker"])


def target_unit(run: str) -> str:
    return f"paceline@{run}.target"


def trainer_unit(run: str) -> str:
    return f"paceline-consumer@{run}.service"


def worker_unit(run: str, worker: int) -> str:
    return f"paceline-producer@{run}.{worker}.service"


# systemctl


def systemctl(*arguments: str) -> str:
    """Runs systemctl and returns its output. Raises PacelineError with what systemd said, on one line."""
    try:
        done = subprocess.run(["systemctl", "--no-ask-password", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise PacelineError("systemctl is missing: this machine has no systemd") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise PacelineError(f"systemctl {' '.join(arguments)}: {said}")
    return done.stdout


def need_systemd() -> None:
    if not BOOTED.is_dir():
        raise PacelineError("systemd does not run this machine: use `paceline up` here, or --root for an image")


def need_root(command: str) -> None:
    if os.geteuid() != 0:
        raise PacelineError(f"`paceline {command}` changes units and needs root: sudo paceline {command} ...")


@dataclass(frozen=True)
class UnitState:
    """One unit as systemd has it."""

    name: str
    active: str  # active, activating, inactive, failed, ...
    result: str  # success, exit-code, timeout, watchdog, ...
    exit_code: int
    status: str  # its last STATUS line

    @property
    def up(self) -> bool:
        return self.active in _ACTIVE


def unit_state(name: str) -> UnitState:
    wanted = "ActiveState,Result,ExecMainStatus,StatusText"
    lines = systemctl("show", "--property", wanted, name).splitlines()
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    code = values.get("ExecMainStatus", "0")
    return UnitState(
        name,
        values.get("ActiveState", "inactive"),
        values.get("Result", "success"),
        int(code) if code.isdigit() else 0,
        values.get("StatusText", ""),
    )


def _listed(*patterns: str) -> dict[str, str]:
    """Loaded units that match, with their active state."""
    text = systemctl("list-units", "--all", "--output=json", *patterns)
    return {unit["unit"]: unit["active"] for unit in json.loads(text or "[]")}


def running_units() -> list[str]:
    """All units of paceline that are up, or about to be."""
    if not BOOTED.is_dir():
        return []
    found = _listed("paceline-producer@*.service", "paceline-consumer@*.service")
    return sorted(name for name, active in found.items() if active in _ACTIVE)


# A run's units


def _enabled(run: str, kind: str) -> set[str]:
    """Units of the run that links in UNIT_DIR start with something else: at boot, or with the target."""
    names = {link.name for link in UNIT_DIR.glob(f"*.wants/paceline*@{run}.*")}
    return {name for name in names if name.startswith(kind)}


def workers(run: str) -> list[int]:
    """The numbers of the run's workers that are enabled or up, ascending."""
    up = {name for name, active in _listed(f"paceline-producer@{run}.*.service").items() if active in _ACTIVE}
    found: set[int] = set()
    for name in up | _enabled(run, "paceline-producer@"):
        instance = name.removeprefix("paceline-producer@").removesuffix(".service")
        match = _INSTANCE.fullmatch(instance)
        if match and match["run"] == run:
            found.add(int(match["worker"]))
    return sorted(found)


def systemd_has(run_name: str) -> bool:
    """Whether systemd runs this machine and units of the run are up, failed, or enabled."""
    if not BOOTED.is_dir() or shutil.which("systemctl") is None:
        return False
    if _enabled(run_name, "paceline"):
        return True
    own = (target_unit(run_name), trainer_unit(run_name), f"paceline-producer@{run_name}.*.service")
    return any(active != "inactive" for active in _listed(*own).values())


# Scaling


def scale_units(run_name: str, count: int, gpus: Sequence[int] = (), *, say: Say = print) -> None:
    """Makes workers 0 to `count` - 1 of the run be up, now and after a reboot, and no others; waits until it is so.

    New workers go to `gpus` in turn, or where the run file puts them. Those removed make their batch to the end, their
    rings are retired, and the trainer drains and removes these.

    Raises:
        UsageError: `gpus` without new workers. ConfigError: there is no such GPU, or no run file of the units.
        PacelineError: no root rights, or a worker that does not come up or go down; names what it said last.
    """
    need_root("scale")
    if not (CONFIG_DIR / f"{run_name}.toml").is_file():
        raise ConfigError(f"{CONFIG_DIR / run_name}.toml: no such file; it is the run file of the units")
    present = workers(run_name)
    removed = [number for number in present if number >= count]
    new = [number for number in range(count) if number not in present]
    placed = _place(new, gpus)
    if new:
        run = load(CONFIG_DIR / f"{run_name}.toml")
        placed = placed or _spare(run, count, new, present)
        _say_shared(run, count, new, present, placed, say)
    if removed:
        _remove(run_name, removed, say)
    for number in new:
        _add(run_name, number, placed.get(number))
    down = [number for number in range(count) if not unit_state(worker_unit(run_name, number)).up]
    _start(run_name, down, say)


def _names(numbers: Iterable[int]) -> str:
    return ", ".join(f"w{number}" for number in numbers)


def _place(new: Sequence[int], gpus: Sequence[int]) -> dict[int, int]:
    """The GPU of each new worker, if they are given any."""
    if not gpus:
        return {}
    if not new:
        raise UsageError("--gpu is for new workers, and there would be none")
    have = installed_gpus()
    for gpu in gpus:
        if gpu >= have:
            raise ConfigError(f"--gpu {gpu}: this machine has {counted(have, 'GPU')}, counted from 0")
    return dict(zip(new, cycle(gpus)))


def _spare(run: RunFile, count: int, new: Sequence[int], present: Sequence[int]) -> dict[int, int]:
    """GPUs that nobody of the run has, for new workers that its file does not place."""
    if run.workers.gpus_per_worker > 1:
        return {}  # what a unit sees would begin at 0, and the run file's devices be others
    found = place(run, Wanted(count, _given(run.name, present)), new, present, [])
    return {number: int(device.partition(":")[2]) for number, device in found.items()}


def _say_shared(
    run: RunFile, count: int, new: Sequence[int], present: Sequence[int], placed: Mapping[int, int], say: Say
) -> None:
    given = _given(run.name, present) | {number: f"cuda:{gpu}" for number, gpu in placed.items()}
    if said := shared(run, Wanted(count, given), new, present):
        say(said.removeprefix("; "))


def given_devices(run_name: str) -> list[str]:
    """Those of all workers of the run whose unit is shown one GPU, as far as this user may read it."""
    names = (
        path.name.removeprefix(f"{run_name}.").removesuffix(".env") for path in CONFIG_DIR.glob(f"{run_name}.*.env")
    )
    with contextlib.suppress(OSError):
        return list(_given(run_name, [int(name) for name in names if name.isdecimal()]).values())
    return []


def _given(run_name: str, numbers: Iterable[int]) -> dict[int, str]:
    """The devices of the workers whose unit is shown one GPU."""
    found = {}
    for number in numbers:
        file = _environment(run_name, number)
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        if only := re.search(r"^CUDA_VISIBLE_DEVICES=[\"']?([0-9]+)[\"']?\s*$", text, re.MULTILINE):
            found[number] = f"cuda:{only[1]}"
    return found


def _add(run: str, number: int, gpu: int | None) -> None:
    """Writes the files that make the worker part of the run."""
    unit, target = worker_unit(run, number), target_unit(run)
    folder = UNIT_DIR / f"{unit}.d"
    try:
        folder.mkdir(exist_ok=True)
        text = f"{_MARK}\n[Unit]\nPartOf={target}\n\n[Install]\nWantedBy={target}\n"
        (folder / _DROP_IN).write_text(text, encoding="utf-8")
        environment = _environment(run, number)
        if gpu is not None:
            if environment.exists() and not _ours(environment):
                raise PacelineError(f"{environment} was written by hand: set CUDA_VISIBLE_DEVICES there, without --gpu")
            environment.write_text(f"{_MARK}\nCUDA_VISIBLE_DEVICES={gpu}\n", encoding="utf-8")
    except OSError as error:
        raise PacelineError(f"{error.filename}: {error.strerror}") from None


def _environment(run: str, number: int) -> Path:
    return CONFIG_DIR / f"{run}.{number}.env"


def _ours(path: Path) -> bool:
    return path.read_text(encoding="utf-8", errors="replace").startswith(_MARK)


def _start(run: str, numbers: Sequence[int], say: Say) -> None:
    """Enables and starts workers together, and waits until each is ready or has ended well (a finished run's)."""
    if not numbers:
        return
    names = [worker_unit(run, number) for number in numbers]
    systemctl("daemon-reload")
    systemctl("enable", *names)
    say(f"starting {_names(numbers)}; each is up once its target is loaded")
    try:
        systemctl("start", *names)
    except PacelineError as error:
        failed = [state for name in names if (state := unit_state(name)).active not in ("active", "inactive")]
        if not failed:
            raise
        raise PacelineError("; ".join(_failure(state) for state in failed)) from error
    for number, name in zip(numbers, names, strict=True):
        state = unit_state(name)
        if not state.up:
            say(f"w{number} has left again: {state.status or state.result}")


def _failure(state: UnitState) -> str:
    said = f": {state.status}" if state.status else ""
    return f"{state.name} did not come up ({state.result}){said} (journalctl -u {state.name})"


def _remove(run: str, numbers: Sequence[int], say: Say) -> None:
    """Disables workers, retires their rings, stops them, and removes what `_add` wrote."""
    names = [worker_unit(run, number) for number in numbers]
    say(f"stopping {_names(numbers)}; their rings are drained by the trainer")
    systemctl("disable", *names)
    for number in numbers:
        retire(ring_dir(run) / f"w{number}.ring")
    deadline = time.monotonic() + LEAVE_SECONDS  # one that is starting, or started again, does not hear of it
    while any(unit_state(name).active == "active" for name in names) and time.monotonic() < deadline:
        time.sleep(0.2)
    systemctl("stop", *names)
    for name in names:
        if unit_state(name).active == "failed":  # it stays listed otherwise
            systemctl("reset-failed", name)
    for number in numbers:
        _forget(run, number)
    systemctl("daemon-reload")


def ring_dir(run: str) -> Path:
    """The folder of the run's rings, from its run file, which may be invalid by now."""
    import tomllib

    from .paths import DEFAULT_RING_DIR

    try:
        values = tomllib.loads((CONFIG_DIR / f"{run}.toml").read_text(encoding="utf-8-sig"))
        return Path(values.get("stream", {}).get("ring_dir", DEFAULT_RING_DIR)) / run
    except (OSError, ValueError, AttributeError):
        return DEFAULT_RING_DIR / run


def _forget(run: str, number: int) -> None:
    folder = UNIT_DIR / f"{worker_unit(run, number)}.d"
    drop_in, environment = folder / _DROP_IN, _environment(run, number)
    for path in (drop_in, environment):
        if path.exists() and _ours(path):
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def forget_instances(*, dry_run: bool, say: Say) -> None:
    """Disables every instance of paceline's units and removes what `scale_units` wrote for them (uninstalling)."""
    names = sorted({link.name for link in UNIT_DIR.glob("*.wants/paceline*@*")})
    if names:
        say(f"{'would disable' if dry_run else 'disabling'} {', '.join(names)}")
    if names and not dry_run:
        systemctl("disable", *names)
    for folder in UNIT_DIR.glob("paceline-producer@*.service.d"):
        instance = folder.name.removeprefix("paceline-producer@").removesuffix(".service.d")
        if _INSTANCE.fullmatch(instance) and not dry_run:
            _forget(*split_instance(instance))
    if not dry_run:
        for name in _listed("paceline*@*", "paceline.slice"):
            systemctl("stop", name)
            if unit_state(name).active == "failed":
                systemctl("reset-failed", name)


# Restarting and stopping


def restart_trainer(run_name: str, *, say: Say = print) -> None:
    """Stops the trainer with a checkpoint and starts it again by its run file; returns once it is up. Workers go on.

    Raises:
        ConfigError: the run file is not valid, or puts two ranks on a GPU: the trainer goes on.
        PacelineError: it does not come up.
    """
    need_root("restart")
    run = load(CONFIG_DIR / f"{run_name}.toml")
    rank_devices(run, given_devices(run_name))
    trainer = trainer_unit(run_name)
    say(f"{trainer} restarts")
    systemctl("restart", trainer)
    state = unit_state(trainer)
    if not state.up:
        said = f": {state.status}" if state.status else ""
        raise PacelineError(f"{trainer} did not come up ({state.result}){said}")
    say(f"{trainer}: {state.status}" if state.status else f"{trainer} is up")


def stop_units(run_name: str, *, say: Say = print) -> None:
    """Stops trainer (with a checkpoint), workers and target, and returns once systemd says that all are down.

    They stay enabled. Stopping the target alone would return at once, while they are still at it.

    Raises:
        PacelineError: the trainer did not end as it should; its last complete checkpoint stands.
    """
    need_root("stop")
    trainer = trainer_unit(run_name)
    was_up = unit_state(trainer).up
    found = _listed(f"paceline-producer@{run_name}.*.service")
    up = sorted(name for name, active in found.items() if active in _ACTIVE)
    say(f"stopping run {run_name}{': the trainer writes a checkpoint' if was_up else ''}")
    systemctl("stop", target_unit(run_name), trainer, *up)
    state = unit_state(trainer)
    if was_up and state.active == "failed":
        said = f": {state.status}" if state.status else ""
        raise PacelineError(f"{trainer} ended badly ({state.result}){said}; the last complete checkpoint stands")
    if was_up and state.status:
        say(f"{trainer}: {state.status}")
