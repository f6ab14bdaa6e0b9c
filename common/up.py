"""`paceline up`: one machine's trainer and workers under one supervisor, without systemd.

Each child runs in a process group of its own, so that Ctrl-C reaches the supervisor alone, and gets SIGTERM from the
kernel if the supervisor dies. A child writes to its log itself (<output>/logs/<name>.log) and the supervisor reads the
log after it: a supervisor that is stopped or killed never blocks a child or breaks its pipe.

    exit 0              the trainer: the run is over, workers leave or are sent SIGTERM; a worker: it left
    exit 2, 78          wrong use or configuration: everything stops with that code; the child's lines say why. But a
                        child that was up and dies while the run file is being edited is started again
    anything else       started again after a pause, at most `Policy.limit` times in `Policy.window` seconds, and fewer
                        times if it always ends by itself right after its start
    Ctrl-C, SIGTERM     the trainer is told first and writes a checkpoint; a second Ctrl-C kills
    paceline scale      workers are added, or told to leave through their rings (`scale`); one that does not come up
                        when it is added is given up, and the run goes on without it
    paceline restart    the trainer stops with a checkpoint and is started again, by the run file as it is then; the
                        workers go on
    paceline stop       as SIGTERM

What cannot be shown, and what the system refuses (a process, a file), does not end the run; whatever else ends the
supervisor, the trainer first gets the time for its checkpoint.

The supervisor is one thread: PR_SET_PDEATHSIG follows the thread that forks, and `preexec_fn` wants no others. (numpy,
which would start some, is not imported.) Requests and news from children come over two sockets (`control`).
"""

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from . import paths
from .control import Control, ReadySocket
from .devices import gpu_count, rank_devices
from .errors import ConfigError, PacelineError, UsageError, counted, how_it_ended
from .finished import clear_finished
from .locks import FileLock, held_by
from .runfile import RunFile, load
from .scale import Wanted, gpu_devices, place, retire, retire_dead, shared, worker_index
from .target_info import no_mask_token
from .telemetry import Status, StatusWatch

TRAINER = "trainer"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_FATAL = (2, 78)
_STOPPED = (0, -signal.SIGTERM, -signal.SIGKILL)  # how a child ends that was told to
_TICK = 0.2  # seconds between looks at children, logs and status
MAX_WORKERS = 1024


@dataclass(frozen=True)
class Policy:
    """How children are restarted and stopped. Times in seconds."""

    limit: int = 10  # failures of one child ...
    window: float = 300.0  # ... within so long end the run
    first_pause: float = 1.0  # doubles with each failure in the window
    longest_pause: float = 30.0
    quick: float = 20.0  # a child that ends by itself so soon after its start and was never up ...
    quick_limit: int = 3  # ... so many times in a row ends the run too
    drain: float = 120.0  # for a worker that is removed to finish its batch; then SIGTERM
    drain_kill: float = 30.0  # from that SIGTERM to SIGKILL
    leave: float = 15.0  # for workers to find that the run is over
    stop: float = 300.0  # from SIGTERM to SIGKILL: a checkpoint must fit


class Tail:
    """The lines added to a file since it was opened here; a line is complete at a newline or a carriage return."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - open for the child's life
        self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def lines(self, last: bool = False) -> list[str]:
        """New complete lines; with `last` also what stands without a line end."""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():  # cut off in place, as copytruncate does
            self._file.seek(0)
            self._rest = b""
        *whole, self._rest = re.split(rb"[\r\n]", self._rest + (self._file.read() or b""))
        if last or len(self._rest) > 1 << 16:
            whole.append(self._rest)
            self._rest = b""
        return [text for line in whole if (text := line.decode(errors="replace").rstrip())]

    def close(self) -> None:
        self._file.close()


@dataclass
class Child:
    """A process of the run and what became of it."""

    name: str
    command: list[str]
    log: Path
    state: str = "to start"  # "running", "restarts", "left", "failed", "stopped"
    device: str = ""  # of a worker that was given one; else it is placed by the run file
    extra: bool = False  # added to a live run, which goes on without it if it does not come up
    ready: bool = False  # said so since its last start
    was_ready: bool = False  # since any start
    leave_at: float | None = None  # of a worker that is removed: time.monotonic() of the next, stronger word to it
    told: bool = False  # by SIGTERM to leave
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0  # time.monotonic()
    restarts: int = 0
    start_at: float = 0.0  # time.monotonic(), when it is to be started again
    failures: deque[float] = field(default_factory=deque)
    quick_failures: int = 0  # in a row
    own_lines: deque[str] = field(default_factory=lambda: deque(maxlen=15))
    tail: Tail | None = None
    stamp: object = None  # of the run file when it was started

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def running(self) -> bool:
        """Started and not reaped, whatever its state says."""
        return self.process is not None and self.process.returncode is None

    @property
    def last_line(self) -> str:
        return self.own_lines[-1] if self.own_lines else ""

    def start(self, environment: dict[str, str]) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        with open(self.log, "ab") as log:
            if self.tail:
                self.tail.close()
            self.tail = Tail(self.log)
            self.own_lines.clear()
            self.started, self.state, self.start_at, self.ready = time.monotonic(), "running", 0.0, False
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
                preexec_fn=lambda: _die_with(parent),
            )

    def signal(self, number: int) -> None:
        # Not Popen.send_signal: that reaps a child that has just ended, and `reap` would never hear of it.
        if self.process and self.running:
            os.kill(self.process.pid, number)

    def kill_group(self) -> None:
        """SIGKILL to the child and all it started. Only while it is not reaped: its pid is its own until then."""
        if self.process and self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """The exit code if the child has just ended (negative: by that signal). Takes its descendants down with it:
        the ranks of a dead trainer would only keep the next one waiting."""
        if self.process is None or not self.running:
            return None
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self.kill_group()
        return self.process.wait()


def _die_with(parent: int) -> None:
    """In the child, before exec: SIGTERM when the supervisor dies, however it dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was in place
        os._exit(1)


class View(Protocol):
    """Shows the run to a person (`progress`)."""

    def event(self, text: str, urgent: bool = False) -> None: ...
    def line(self, child: str, text: str) -> None: ...
    def failure(self, child: "Child", text: str, lines: Sequence[str]) -> None: ...
    def refresh(self, children: Sequence[Child], status: Status | None) -> None: ...
    def close(self) -> None: ...


class _Shown:
    """A view that cannot end the run: what is shown may find its terminal closed, its reader gone, its disk full."""

    def __init__(self, view: View, logs: Path) -> None:
        self._view, self._logs = view, logs
        self._broken = False

    def event(self, text: str, urgent: bool = False) -> None:
        self._try(lambda: self._view.event(text, urgent))

    def line(self, child: str, text: str) -> None:
        self._try(lambda: self._view.line(child, text))

    def failure(self, child: Child, text: str, lines: Sequence[str]) -> None:
        self._try(lambda: self._view.failure(child, text, lines))

    def refresh(self, children: Sequence[Child], status: Status | None) -> None:
        self._try(lambda: self._view.refresh(children, status))

    def close(self) -> None:
        self._try(self._view.close)

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except OSError as error:
            if not self._broken:
                self._broken = True
                text = f"the run goes on unseen: {error.strerror or error}; its logs are in {self._logs}"
                with contextlib.suppress(OSError):
                    print(f"paceline: {text}", file=sys.stderr, flush=True)


class Supervisor:
    """Runs the children of one run until it is over; `run()` returns the exit code."""

    def __init__(
        self,
        run: RunFile,
        trainer: Child,
        workers: Sequence[Child],
        view: View,
        *,
        prepare: Child | None = None,
        policy: Policy | None = None,
        make_worker: "MakeWorker | None" = None,
        wanted: Wanted | None = None,
        reload: Callable[[], RunFile] | None = None,
        stamp: Callable[[], object] = lambda: None,
    ) -> None:
        """reload: the run file as it is now. stamp: what changes when it is written."""
        self.run_file, self.trainer, self.workers = run, trainer, list(workers)
        self.view: View = _Shown(view, trainer.log.parent)
        self.prepare, self.policy, self.make_worker = prepare, policy or Policy(), make_worker
        self.wanted = wanted or Wanted(len(self.workers))
        self._reload, self._stamp = reload or (lambda: run), stamp
        self._again_by: float | None = None  # the trainer is to be started again: when it is killed if it still runs
        self._folder = paths.run_dir(run.name)
        self._fresh = paths.Freshness(self._folder)
        self._status, self._finished = StatusWatch(paths.status_path(run)), paths.finished_path(run)
        self.active: list[Child] = []
        self.code: int | None = None  # set once the run is being ended
        self._why = ""  # what a child said last before it failed
        self._kill_at = float("inf")
        self._term_workers_at = float("inf")
        self._alone_at = float("inf")  # when to say that no workers are left, unless the run ends by then
        self._pending: deque[int] = deque()
        self._environment = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "WATCHDOG_USEC")}
        self._environment["PYTHONUNBUFFERED"] = "1"

    def run(self) -> int:
        with self._signals() as wake, self._sockets():
            try:
                if self.prepare and not self._run_alone(self.prepare, wake):
                    return self.code or 0
                # The marker of an earlier run of this name would send the workers home; this trainer writes its own.
                clear_finished(self.run_file)
                retire_dead(paths.ring_dir(self.run_file), self.wanted.count)
                self._loop([self.trainer, *self.workers], wake)
            except BaseException:
                self._let_save()
                raise
            finally:
                for child in self.active:
                    child.kill_group()
                    child.reap()
                self.view.close()
        return self.code or 0

    def _run_alone(self, child: Child, wake: int) -> bool:
        """Runs a child that must succeed before the others start. False: it did not, `code` says how."""
        self.view.event("preparing the data")
        self._loop([child], wake)
        self.active = []
        return self.code is None

    def _let_save(self) -> None:
        """Before the supervisor ends by a fault of its own: the trainer writes its checkpoint, unless Ctrl-C comes."""
        for child in self.active:
            child.signal(signal.SIGTERM)
        until = time.monotonic() + self.policy.stop
        while self.trainer.reap() is None and self.trainer.running and time.monotonic() < until:
            if signal.SIGINT in self._pending:
                return
            time.sleep(_TICK)

    def _loop(self, children: list[Child], wake: int) -> None:
        self.active = children
        for child in children:
            self._launch(child)
        while any(child.state in ("running", "restarts") for child in self.active):
            self._handle_signals()
            self._note_ready()
            for child in list(self.active):
                self._relay(child)
                if (code := child.reap()) is not None:
                    self._relay(child, last=True)
                    self._ended(child, code)
            self._restart_due()
            self._control.serve()
            self._fresh.keep()
            self._enforce_deadlines()
            self.view.refresh(self.active, self._status.present())
            _wait([wake, self._ready.fileno(), *self._control.descriptors()], _TICK)
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 512)

    # Signals and sockets

    @contextlib.contextmanager
    def _sockets(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            self._control = Control(paths.up_socket(self._folder), self._answer)
            stack.callback(self._control.close)
            self._ready = ReadySocket(paths.ready_socket(self._folder))
            stack.callback(self._ready.close)
            self._environment["NOTIFY_SOCKET"] = str(self._ready.path)
            yield

    def _note_ready(self) -> None:
        pids = set(self._ready.ready())
        for child in self.active:
            if child.state == "running" and child.pid in pids:
                child.ready = child.was_ready = True
                child.quick_failures = 0

    @contextlib.contextmanager
    def _signals(self) -> Iterator[int]:
        """Queues SIGINT, SIGTERM and SIGHUP; yields a descriptor that becomes readable with each signal."""
        wake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old: dict[int, Any] = {n: signal.signal(n, lambda number, _: self._pending.append(number)) for n in numbers}
        old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        old_wake = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        try:
            yield wake
        finally:
            signal.set_wakeup_fd(old_wake)
            for number, handler in old.items():
                signal.signal(number, handler)
            os.close(wake)
            os.close(write)

    def _handle_signals(self) -> None:
        while self._pending:
            number = self._pending.popleft()
            if number == signal.SIGINT and self.code is not None:
                self.view.event("killing everything", urgent=True)
                self.code = 130
                for child in self.active:
                    child.kill_group()
            elif self.code is None:
                interrupted = number == signal.SIGINT
                hint = " (Ctrl-C again kills)" if interrupted else ""
                self._stop(130 if interrupted else 0, f"stopping{self._saves}{hint}")

    # Requests

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What another process asks for: "show", "scale", "restart" or "stop". Raises PacelineError to refuse."""
        match request.get("do"):
            case "show":
                return self._show()
            case "stop":
                if self.code is None:
                    self._stop(0, f"stopping, as asked{self._saves}")
                return {"said": f"stopping {self.run_file.name}{self._saves}"}
            case "scale":
                return {"said": self._scale(request.get("count"), request.get("gpus"))}
            case "restart":
                return self._restart()
        raise UsageError("the supervisor is of another version of paceline")

    def _show(self) -> dict[str, Any]:
        """The topology now. Lines are cut: an answer has a bound."""
        workers = [
            {
                "name": child.name,
                "pid": child.pid if child.state == "running" else None,
                "state": child.state,
                "ready": child.ready and child.state == "running",
                "device": child.device,
                "said": child.last_line[:200],
                "log": str(child.log),
            }
            for child in self.workers
        ]
        return {
            "run": self.run_file.name,
            "count": self.wanted.count,
            "stopping": self.code is not None,
            "why": self._why[:300],
            "preparing": self.prepare in self.active,
            "trainer": {"state": self.trainer.state, "pid": self.trainer.pid, "ready": self.trainer.ready},
            "rings": str(paths.ring_dir(self.run_file)),
            "workers": workers,
        }

    def _scale(self, count: Any, gpus: Any) -> str:
        """Starts and removes workers; returns what is done. Nothing is done if it raises."""
        if type(count) is not int or not 0 <= count <= MAX_WORKERS:
            raise UsageError(f"the number of workers: 0 to {MAX_WORKERS} was expected")
        if self.make_worker is None:
            raise UsageError("this supervisor cannot scale")
        self._check_training()
        here = {worker_index(child.name) or 0: child for child in self.workers}
        leaving = {index for index, child in here.items() if child.leave_at is not None}
        up = {index for index, child in here.items() if child.state not in ("left", "failed")}
        new = [index for index in range(count) if index not in up or index in leaving]
        gone = [child for index, child in here.items() if index >= count and index not in leaving]
        devices = gpu_devices(gpus, gpu_count() if gpus else 0)
        if devices and not new:
            raise UsageError(
                f"--gpu places new workers, and {count} would add none to the {self.wanted.count} there are"
            )
        placed = place(self.run_file, self.wanted, new, up - {*new}, devices)
        wanted = self.wanted.scaled(count, placed)
        wanted.write(self._folder, self.run_file.workers.count)
        self.wanted = wanted
        for index in new:
            if index not in leaving:  # else its name is free once it has left: `_forget` starts it
                self._add(index)
        for child in reversed(gone):
            self._remove(child)
        parts = [f"starts {_names(new)}"] if new else []
        parts += [f"removes {', '.join(child.name for child in gone)}"] if gone else []
        said = f"{counted(count, 'worker')}: {' and '.join(parts) or 'nothing to change'}"
        said += shared(self.run_file, self.wanted, new, up - leaving)
        self.view.event(said)
        return said

    def _check_training(self) -> None:
        """Raises PacelineError where nothing can be asked for."""
        if self.code is not None or self.trainer not in self.active:
            doing = "is stopping" if self.code is not None else "is not training yet"
            raise PacelineError(f"run {self.run_file.name} {doing}: ask again later")

    def _restart(self) -> dict[str, Any]:
        """Has the trainer write a checkpoint and end; `_ended` starts it again. Workers are not touched.

        Nothing is done if the run file is not valid now, or has become that of another run.
        """
        self._check_training()
        new, old = self._reload(), self.run_file
        if (new.name, new.output) != (old.name, old.output) or paths.ring_dir(new) != paths.ring_dir(old):
            raise ConfigError("name, output and stream.ring_dir of a live run must stay as they are: stop it first")
        rank_devices(new, self.wanted.devices.values())
        self.run_file = new
        pid = self.trainer.pid if self.trainer.state == "running" else None
        if pid is not None and self._again_by is None:  # else it is about to be started anyway
            self._again_by = time.monotonic() + self.policy.stop
            self.trainer.signal(signal.SIGTERM)
        said = f"the trainer restarts{self._saves}"
        self.view.event(said)
        return {"said": said, "pid": pid}

    def _add(self, index: int) -> None:
        assert self.make_worker is not None
        child = self.make_worker(index, self.wanted.devices.get(index))
        child.extra = True
        self.workers = [old for old in self.workers if old.name != child.name]
        self.active = [old for old in self.active if old.name != child.name]
        self.workers.append(child)
        self.workers.sort(key=lambda worker: worker_index(worker.name) or 0)
        self.active = [child for child in self.active if child not in self.workers] + self.workers
        self._launch(child)

    def _remove(self, child: Child) -> None:
        """Asks a worker to go: through its ring, which it looks at between batches, or SIGTERM while it loads."""
        retire(self._ring(child))
        if child.state != "running":
            self._forget(child)
            return
        child.leave_at = time.monotonic() + (self.policy.drain if child.ready else 0.0)

    def _ring(self, child: Child) -> Path:
        return paths.ring_dir(self.run_file) / f"{child.name}.ring"

    def _forget(self, child: Child) -> None:
        """A worker that was to go is gone; its ring's last owner is retired, whichever that was."""
        self.workers.remove(child)
        self.active.remove(child)
        retire(self._ring(child))
        index = worker_index(child.name)
        if index is not None and index < self.wanted.count and self.code is None:  # wanted again meanwhile
            self._add(index)
        else:
            self.view.event(f"{child.name} is removed")

    # Children

    @property
    def _saves(self) -> str:
        return ": the trainer writes a checkpoint" if self.trainer.state == "running" else ""

    def _relay(self, child: Child, last: bool = False) -> None:
        for text in child.tail.lines(last) if child.tail else []:
            child.own_lines.append(text)
            self.view.line(child.name, text)
        if last and child.tail:
            child.tail.close()
            child.tail = None

    def _ended(self, child: Child, code: int) -> None:
        again = child is self.trainer and self._again_by is not None
        if again:
            self._again_by = None
        if self.code is not None:
            self._ended_while_stopping(child, code)
        elif again and code in _STOPPED and not self._finished.exists():
            self._start_again(child)
        elif child.leave_at is not None:
            self._forget(child)
        elif code == 0:
            child.state = "left"
            if child is self.trainer:
                self._finish()
            elif child in self.workers:
                self.view.event(f"{child.name} left")
                self._alone_at = time.monotonic() + self.policy.leave
        elif code in _FATAL and child.extra and not child.was_ready:
            self._give_up(child, how_it_ended(code))
        elif code in _FATAL and child.was_ready and self._edited(child):
            self._failed(child, how_it_ended(code))
        elif code in _FATAL or child is self.prepare:
            self._show_failure(child, f"{child.name} {how_it_ended(code)}")
            child.state = "failed"
            self._stop(code if code in _FATAL else 1, "stopping: starting it again would not help")
        else:
            # A signal is somebody's doing, a child that was up can be so again; one that ends by itself at once cannot.
            quick = code > 0 and not child.was_ready and time.monotonic() - child.started < self.policy.quick
            self._failed(child, how_it_ended(code), quick)

    def _edited(self, child: Child) -> bool:
        """Whether the run file is not valid now, or was written while the child started; or, for a worker, is not what
        the trainer goes by: it may be another run's already, whose rings are others."""
        if not child.ready and self._stamp() != child.stamp:
            return True
        try:
            return self._reload() != self.run_file and child is not self.trainer
        except PacelineError:
            return True

    def _ended_while_stopping(self, child: Child, code: int) -> None:
        child.state = "stopped"
        if code in _STOPPED:
            return
        self._show_failure(child, f"{child.name} {how_it_ended(code)} while stopping")
        if child is self.trainer and not self.code:
            self.code = 1

    def _failed(self, child: Child, how: str, quick: bool = False) -> None:
        """Has a child started again after a pause, unless it has failed too often. quick: right after its start."""
        policy, now = self.policy, time.monotonic()
        child.failures.append(now)
        while child.failures[0] < now - policy.window:
            child.failures.popleft()
        child.quick_failures = child.quick_failures + 1 if quick else 0
        often = ""
        if child.quick_failures >= policy.quick_limit:
            often = f"{policy.quick_limit} times in a row right after its start"
        elif len(child.failures) >= policy.limit:
            often = f"{policy.limit} times in {policy.window:.0f} s"
        if often:
            self._give_up(child, f"{how}: {often}")
            return
        pause = min(policy.first_pause * 2 ** (len(child.failures) - 1), policy.longest_pause)
        child.state, child.start_at = "restarts", now + pause
        self._show_failure(child, f"{child.name} {how}; starting it again in {pause:.0f} s")

    def _give_up(self, child: Child, how: str) -> None:
        """A child that does not stay up ends the run, unless it was added to it and never was a part of it."""
        child.state = "failed"
        self._show_failure(child, f"{child.name} {how}")
        if child.extra and not child.was_ready:
            self.view.event(f"the run goes on without {child.name}", urgent=True)
        else:
            self._stop(1, f"stopping: {child.name} does not stay up")

    def _show_failure(self, child: Child, text: str) -> None:
        lines = [line for line in child.own_lines if not line.startswith("[")]  # log lines explain no failure
        if (
            child is self.trainer
            and (said := (self._status.present() or {}).get("message"))
            and said not in " ".join(lines)
        ):
            lines.append(said)  # where its log could not be written, on a full disk
        self._why = lines[-1] if lines else text
        self.view.failure(child, text, lines[-8:])

    def _restart_due(self) -> None:
        now = time.monotonic()
        for child in self.active:
            if child.state != "restarts":
                continue
            if self.code is not None:
                child.state = "stopped"
            elif now >= child.start_at:
                child.restarts += 1
                self._start_again(child)

    def _start_again(self, child: Child) -> None:
        if child is self.trainer and child.was_ready:  # until then newer checkpoints may not have been set aside
            child.command = _without_resume(child.command)
        if self._launch(child):
            self.view.event(f"{child.name} started again (pid {child.pid})")

    def _launch(self, child: Child) -> bool:
        """Starts a child. False where the system refuses that (no process, no file): it is tried again later."""
        if child is self.trainer:
            self._status.forget()
        child.stamp = self._stamp()
        try:
            child.start(self._environment)
        except OSError as error:
            where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
            self._failed(child, f"cannot be started ({where}{error.strerror or error})")
            return False
        return True

    # Ending

    def _finish(self) -> None:
        finished = self._finished.exists()
        if finished:
            paths.wanted_path(self._folder).unlink(missing_ok=True)
        self.code = 0
        self.view.event("the run is finished" if finished else "the trainer has stopped")
        self._term_workers_at = time.monotonic() + (self.policy.leave if finished else 0)
        self._kill_at = self._term_workers_at + self.policy.stop

    def _stop(self, code: int, text: str) -> None:
        self.code = code
        self.view.event(text)
        self.trainer.signal(signal.SIGTERM)
        for child in self.active:
            if child is not self.trainer:
                child.signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + self.policy.stop

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        running = [child for child in self.active if child.state == "running"]
        if now >= self._alone_at:
            self._alone_at = float("inf")
            if self.code is None and all(worker.state == "left" for worker in self.workers):
                self.view.event("no workers are left; the trainer waits (Ctrl-C stops it)", urgent=True)
        for child in running:
            if child.leave_at is not None and now >= child.leave_at and self.code is None:
                self._press(child)
        if self._again_by is not None and now >= self._again_by:
            self._again_by = float("inf")
            self.view.event(f"{TRAINER} did not stop within {self.policy.stop:.0f} s: killed", urgent=True)
            self.trainer.kill_group()
        if now >= self._term_workers_at:
            self._term_workers_at = float("inf")
            for child in running:
                child.signal(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            for child in running:
                self.view.event(f"{child.name} did not stop within {self.policy.stop:.0f} s: killed", urgent=True)
                child.kill_group()
                self.code = self.code or 1

    def _press(self, child: Child) -> None:
        """The next word to a worker that is to go and has not gone: SIGTERM, then SIGKILL."""
        if child.told:
            self.view.event(f"{child.name} does not leave: killed", urgent=True)
            child.kill_group()
        else:
            child.signal(signal.SIGTERM)
        child.told, child.leave_at = True, time.monotonic() + self.policy.drain_kill


def _wait(descriptors: Sequence[int], seconds: float) -> None:
    """Until one can be read. By poll, as select takes no descriptor from 1024 on."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(seconds * 1000)


def _stamp(path: Path) -> object:
    """What changes whenever a file is written."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _names(indices: Sequence[int]) -> str:
    return ", ".join(f"w{index}" for index in indices)


def _without_resume(command: list[str]) -> list[str]:
    """A chosen checkpoint is for the first start that comes up; later ones go on from the newest."""
    if "--resume" not in command:
        return command
    place = command.index("--resume")
    return command[:place] + command[place + 2 :]


# The children of a run

Command = Callable[[str, Sequence[str]], list[str]]
MakeWorker = Callable[[int, str | None], Child]


def paceline_command(command: str, arguments: Sequence[str]) -> list[str]:
    """`paceline COMMAND ARGUMENTS...` with this Python."""
    return [sys.executable, "-m", "paceline.common.cli", command, *arguments]


def up(
    run_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: str | None = None,
    plain: bool = False,
    view: View | None = None,
    command: Command = paceline_command,
    policy: Policy | None = None,
) -> int:
    """Trains the run here until it is done or stopped; returns the exit code.

    `view` shows it (default: the screen, or lines if `plain` is asked for or stdout is no terminal).
    `command` makes a child's command line from the `paceline` command and its arguments (tests put stand-ins here).

    Raises:
        ConfigError: the run file is wrong, or the output folder cannot be written.
        PacelineError: the run has another supervisor or trainer.
    """
    from .progress import make_view

    run = load(run_path, overrides)
    if run.drafter.needs_mask_token:
        raise no_mask_token(str(run_path))
    arguments = [str(run_path), *(part for text in overrides for part in ("--set", text))]
    logs = _log_folder(run)
    with contextlib.ExitStack() as held:
        # Also the output folder: a run of another name would write into this one's logs, and retry in vain.
        for path, what in ((paths.up_lock(run), f"run {run.name}"), (paths.output_lock(run), f"output {run.output}")):
            lock = FileLock(path, f"paceline up of run {run.name}")
            if not lock.acquire():
                raise PacelineError(f"{what} is already up: {held_by(path)}")
            held.callback(lock.release)
        for path, what in (
            (paths.consumer_lock(run), f"run {run.name}"),
            (paths.trainer_lock(run), f"output {run.output}"),
        ):
            if holder := held_by(path):
                raise PacelineError(f"{what} already has a trainer: {holder}")

        def child(name: str, verb: str, *more: str) -> Child:
            return Child(name, command(verb, [*arguments, *more]), logs / f"{name}.log")

        def worker(index: int, device: str | None = None) -> Child:
            place = ("--device", device) if device else ()
            made = child(f"w{index}", "producer", "--worker", str(index), *place)
            made.device, made.extra = device or "", index >= run.workers.count
            return made

        wanted = Wanted.read(paths.run_dir(run.name), run.workers.count)
        rank_devices(run, wanted.devices.values())  # it would be found out after the data
        trainer = child(TRAINER, "consumer", *(("--resume", resume) if resume else ()))
        workers = [worker(index, wanted.devices.get(index)) for index in range(wanted.count)]
        view = view or make_view(run, plain)
        if wanted.count != run.workers.count:
            view.event(f"{counted(wanted.count, 'worker')}, as it was scaled to; workers.count is {run.workers.count}")
        return Supervisor(
            run,
            trainer,
            workers,
            view,
            prepare=child("prepare", "prepare"),
            policy=policy,
            make_worker=worker,
            wanted=wanted,
            reload=lambda: load(run_path, overrides),
            stamp=lambda: _stamp(Path(run_path)),
        ).run()


def _log_folder(run: RunFile) -> Path:
    return paths.make_folder(paths.log_dir(run), "output: ")
