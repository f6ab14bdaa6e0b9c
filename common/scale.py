"""`paceline scale`, `restart` and `stop`: more or fewer workers on a live run, its trainer anew, and its end. All wait
until it is so.

Whoever supervises the run does it: `paceline up` (asked through `control`) or systemd (`units`). What a removed worker
leaves behind is the same either way: its ring's `retired` word tells it, and the feed, that this owner is to go
(`retire`). It makes no further record, its READY ones are trained, and the feed removes the drained ring.

How many workers a run was scaled to is kept in its run directory (`Wanted`), so that a supervisor that comes back
starts as many; an edit of the run file's workers.count overrides it. Imports neither numpy nor torch, as `up` uses it.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import paths
from .control import NoSupervisor, SilentSupervisor, ask
from .devices import assign_devices, spare_devices
from .errors import PacelineError, UsageError, counted
from .inspect import RingInfo, read_rings
from .locks import OfdLock, held_by
from .ring_layout import RingInvalid, read_ring, ring_paths, write_retired
from .telemetry import Status, read_status

if TYPE_CHECKING:
    from .runfile import RunFile

POLL_S = 0.2
PATIENCE_S = 10.0  # a wait longer than this is explained
_WORKER = re.compile(r"w([0-9]{1,6})")

Say = Callable[[str], None]


def worker_index(name: str) -> int | None:
    """The index of worker `name` ("w3" is 3); None if it is no worker's name."""
    found = _WORKER.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Wanted:
    """How many workers a run is to have, and where: worker index -> device, for those not placed by the run file."""

    count: int
    devices: dict[int, str] = field(default_factory=dict)

    def scaled(self, count: int, devices: dict[int, str]) -> "Wanted":
        """With `count` workers, of which some get a device."""
        return Wanted(count, {at: device for at, device in (self.devices | devices).items() if at < count})

    def write(self, folder: Path, run_file_count: int) -> None:
        """Keeps it in the run directory. `run_file_count`: workers.count of the run file as it is now."""
        path = paths.wanted_path(folder)
        values = {"count": self.count, "run_file_count": run_file_count, "devices": self.devices}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(values), encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, folder: Path, run_file_count: int) -> "Wanted":
        """What was kept; the run file's count if nothing was, or if that has been edited since."""
        try:
            values = json.loads(paths.wanted_path(folder).read_text(encoding="utf-8"))
            count, devices = values["count"], {int(at): str(device) for at, device in values["devices"].items()}
            if values["run_file_count"] == run_file_count and isinstance(count, int) and count >= 0:
                return cls(count, devices)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass  # not there or not whole: the run file counts
        return cls(run_file_count)


def place(
    run: "RunFile", wanted: Wanted, new: Sequence[int], there: Iterable[int], devices: Sequence[str]
) -> dict[int, str]:
    """The devices of new workers, of those that are given one: `devices` in turn, else GPUs that nobody of the run has.

    Workers that the run file counts have their places in it; further ones would share these, though others are free.
    there: the workers that have a device now.
    """
    if devices:
        return dict(zip(new, cycle(devices), strict=False))
    spare = spare_devices(run, [_device(run, wanted, index) for index in there])
    return dict(zip((index for index in new if index >= run.workers.count), spare, strict=False))


def shared(run: "RunFile", wanted: Wanted, new: Sequence[int], there: Iterable[int]) -> str:
    """What is said of new workers whose GPU another process of the run computes on: "; w3 shares cuda:1 with rank 0".
    Empty if none has."""
    users: dict[str, list[str]] = {}
    stay = sorted(index for index in there if index < wanted.count)
    ranks = assign_devices(run, avoid=[_device(run, wanted, index) for index in stay]).ranks
    for number, device in enumerate(ranks):
        users.setdefault(device, []).append(f"rank {number}")
    said = ""
    for index in (*stay, *new):
        device = _device(run, wanted, index)
        others = users.setdefault(device, [])
        if index in new and others and device != "cpu":
            said += f"; w{index} shares {device} with {', '.join(others)}"
        others.append(f"w{index}")
    return said


def _device(run: "RunFile", wanted: Wanted, index: int) -> str:
    """A worker's (first) device."""
    return wanted.devices.get(index) or assign_devices(run, workers=index + 1).workers[index]


def retire(path: Path, *, only_dead: bool = False) -> bool:
    """Tells a ring's present or last owner that it is to go; a later owner is not meant. False if there is none to
    tell: no ring, or with `only_dead` a live owner."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        incarnation = read_ring(fd, path).live.incarnation
        if only_dead and OfdLock.holder(fd):
            return False
        write_retired(fd, incarnation)
    except RingInvalid:
        return False  # no owner can be told through it; the feed leaves it out too
    finally:
        os.close(fd)
    return True


def retire_dead(ring_dir: Path, count: int) -> list[str]:
    """Retires the rings of workers from index `count` on that have no owner: what an earlier topology left."""
    above = [path for path in ring_paths(ring_dir) if (worker_index(path.stem) or 0) >= count]
    return [path.stem for path in above if worker_index(path.stem) is not None and retire(path, only_dead=True)]


# The commands ---------------------------------------------------------------------------------------------------------


def scale(run: str, count: int, gpus: Sequence[int], say: Say) -> None:
    """Gives run `run` so many workers. The new ones go to `gpus` in turn, or where the run file would put them.

    Raises:
        UsageError: `gpus` without new workers.
        PacelineError: nobody supervises the run, or a new worker does not come up.
    """
    folder = _supervised(run)
    if folder is not None:
        request = {"do": "scale", "count": count, "gpus": list(gpus)}
        say(ask(paths.up_socket(folder), request)["said"])
        _Wait(run, folder, count, say).until_scaled()
    elif _has_units(run):
        from .units import ring_dir, scale_units

        scale_units(run, count, gpus, say=say)
        rings = ring_dir(run)
        retire_dead(rings, count)  # of a worker that was being started again when it was told
        for folder in paths.find_run_dirs(run):
            _Wait(run, folder, count, say).until_drained(rings)
        say(f"{run} has {counted(count, 'worker')}")
    else:
        raise _unsupervised(run)


def restart(run: str, say: Say) -> None:
    """Stops the trainer of run `run` with a checkpoint and starts it again, by the run file as it is now: with other
    ranks, say. Workers go on meanwhile.

    Raises:
        ConfigError: the run file is wrong.
        PacelineError: nobody supervises the run, or it ends instead.
    """
    folder = _supervised(run)
    if folder is not None:
        asked = ask(paths.up_socket(folder), {"do": "restart"})
        say(asked["said"])
        _Wait(run, folder, None, say).until_restarted(asked["pid"])
    elif _has_units(run):
        from .units import restart_trainer

        restart_trainer(run, say=say)
    else:
        raise _unsupervised(run)


def stop(run: str, say: Say) -> None:
    """Stops a run with a checkpoint, and waits until it has ended. `paceline up` or the units start it again.

    Raises:
        PacelineError: nobody supervises the run, or the checkpoint of its last steps could not be written.
    """
    folder = _supervised(run)
    if folder is not None:
        lock, before = folder / "up.lock", read_status(folder / "status.json")
        supervisor = held_by(lock)
        say(ask(paths.up_socket(folder), {"do": "stop"})["said"])
        explain_at = time.monotonic() + PATIENCE_S
        while supervisor is not None and held_by(lock) == supervisor:  # another one may come up at once
            time.sleep(POLL_S)
            if time.monotonic() > explain_at:
                explain_at = float("inf")
                doing = (read_status(folder / "status.json") or {}).get("state", "ending")
                say(f"waiting for {supervisor}; the trainer is {doing}")
        if (status := read_status(folder / "status.json")) != before and (lost := _unsaved(status or {})):
            raise PacelineError(f"{run} has stopped, {lost}")
        say(f"{run} has stopped")
    elif _has_units(run):
        from .units import stop_units

        stop_units(run, say=say)
    else:
        raise _unsupervised(run)


def _unsaved(status: Status) -> str:
    """What a trainer that has ended left undone, in words: its last steps are in no checkpoint. Empty if all is."""
    step, newest = status.get("step", 0), status.get("checkpoint", "")
    if status.get("state") != "stopped" or step == 0 or Path(newest).name.endswith(f"-{step:08d}"):
        return ""
    stands = f"{newest} stands" if newest else "there is none"
    return f"but without a checkpoint of step {step}, and {stands}: {status.get('message', '')}"


def _supervised(run: str) -> Path | None:
    """The run directory whose supervisor is alive, if there is one."""
    for folder in paths.find_run_dirs(run):
        try:
            if held_by(folder / "up.lock"):
                return folder
        except PermissionError:
            continue  # another user's
    return None


def _has_units(run: str) -> bool:
    from .units import systemd_has  # which imports this module

    return systemd_has(run)


def _unsupervised(run: str) -> PacelineError:
    """Says who runs it, if anyone."""
    holders = [held_by(folder / "consumer.lock") for folder in paths.find_run_dirs(run) if os.access(folder, os.W_OK)]
    if by_hand := next((holder for holder in holders if holder), None):
        return PacelineError(f"run {run} was started by hand ({by_hand}): start and SIGTERM its processes likewise")
    return PacelineError(f"run {run} is not up here: no `paceline up` and no units of it are running")


class _Wait:
    """Watches a supervisor until its run is as it was asked for, and says what happens. `count`: of its workers, None
    for any number."""

    def __init__(self, run: str, folder: Path, count: int | None, say: Say) -> None:
        self._run, self._folder, self._count, self._say = run, folder, count, say
        self._seen: dict[str, str] = {}  # worker -> what was said of it
        self._still: tuple[object, float] = (None, 0.0)  # what the rings were like, and since when

    def until_scaled(self) -> None:
        while not self._scaled(self._look()):
            time.sleep(POLL_S)

    def until_restarted(self, before: int | None) -> None:
        """Until a trainer is up that is not process `before`."""
        while True:
            trainer = self._look()["trainer"]
            if trainer["ready"] and trainer["state"] == "running" and trainer["pid"] != before:
                return self._note("trainer", f"is ready (pid {trainer['pid']})")
            self._note("trainer", "stops" if trainer["pid"] == before else "loads and warms up")
            time.sleep(POLL_S)

    def until_drained(self, ring_dir: Path) -> None:
        """Until the rings of workers that have been removed are gone."""
        while not self._drained(ring_dir, set()):
            time.sleep(POLL_S)

    def _look(self) -> dict[str, Any]:
        try:
            shown = ask(paths.up_socket(self._folder), {"do": "show"})
        except SilentSupervisor:
            raise
        except NoSupervisor:
            raise PacelineError(f"run {self._run} ended meanwhile") from None
        if shown["stopping"]:
            why = shown.get("why", "")  # a supervisor of an earlier version says none
            raise PacelineError(f"run {self._run} is stopping{f': {why}' if why else ''}")
        if self._count is not None and shown["count"] != self._count:
            raise PacelineError(
                f"run {self._run} was scaled to {counted(shown['count'], 'worker')} by someone else meanwhile"
            )
        return shown

    def _scaled(self, shown: dict[str, Any]) -> bool:
        assert self._count is not None
        pending = False
        present: set[str] = set()
        for worker in shown["workers"]:
            name, index = worker["name"], worker_index(worker["name"])
            present.add(name)
            if index is None or index >= self._count:
                self._note(name, "leaves once its batch is made")
                pending = True
            elif worker["state"] in ("failed", "left"):
                if (self._folder / "finished").exists():
                    raise PacelineError(f"run {self._run} has finished meanwhile")
                said = f": {worker['said']}" if worker["said"] else ""
                raise PacelineError(
                    f"worker {name} did not come up ({worker['state']}){said}; its log: {worker['log']}"
                )
            elif worker["ready"]:
                where = f" on {worker['device']}" if worker["device"] else ""
                self._note(name, f"is ready{where} (pid {worker['pid']})")
            else:
                self._note(name, "loads and warms up" if worker["state"] == "running" else "is started again")
                pending = True
        return self._drained(Path(shown["rings"]), present) and not pending

    def _note(self, name: str, what: str) -> None:
        if self._seen.get(name) != what:
            self._seen[name] = what
            self._say(f"{name} {what}")

    def _drained(self, ring_dir: Path, present: set[str]) -> bool:
        """The rings of removed workers are gone, or only a worker or a trainer that comes later can empty them."""
        left = [ring for ring in read_rings(ring_dir) if _is_left(ring) and ring.worker not in present]
        for name in [name for name, what in self._seen.items() if name not in present and what != "is gone"]:
            if not any(ring.worker == name for ring in left):
                self._note(name, "is gone")
        if not left:
            return True
        state = sorted((ring.ring_id, ring.states) for ring in left)
        if state != self._still[0]:
            self._still = state, time.monotonic()
        if time.monotonic() - self._still[1] < PATIENCE_S:
            return False
        records = sum(ring.count("ready") + ring.count("taken") for ring in left)
        names = ", ".join(ring.worker for ring in left)
        if self._count and held_by(self._folder / "consumer.lock"):
            self._note(names, f"left {counted(records, 'record')} for the trainer to take")
            return False
        stay = "stays" if records == 1 else "stay"
        later = "workers are there again" if held_by(self._folder / "consumer.lock") else "a trainer is up"
        self._note(names, f"left {counted(records, 'record')}, which {stay} in the rings until {later}")
        return True


def _is_left(ring: RingInfo) -> bool:
    return ring.problem is None and ring.retired and not ring.alive


def gpu_devices(gpus: Any, available: int) -> list[str]:
    """Device names of GPU numbers as `--gpu` gives them. Raises UsageError for one that is not there."""
    if not isinstance(gpus, list) or not all(type(gpu) is int and gpu >= 0 for gpu in gpus):
        raise UsageError("gpus: a list of numbers from 0 was expected")
    for gpu in gpus:
        if gpu >= available:
            raise UsageError(f"--gpu {gpu}: the supervisor sees {counted(available, 'GPU')}, counted from 0")
    return [f"cuda:{gpu}" for gpu in gpus]
