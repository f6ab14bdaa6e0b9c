"""Processes of a run in milliseconds: one process imports everything, once, and forks whatever it is asked to start.

Starting Python with numpy, zmq and pydantic takes most of a second, with torch and transformers five; a test of many
kills cannot pay that for every process. So a script imports what its processes need, starts no thread, holds no lock,
and calls `serve`; `Forks` is a test's side of it. A trainer's ranks are forked by a helper that the trainer forked
before it took its locks, and are then its own children, as spawned ones would be.
"""

import ctypes
import functools
import gc
import itertools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.common import faults
from paceline.common.errors import PacelineError
from paceline.consumer import ranks

Main = Callable[..., int]

_PDEATHSIG, _SUBREAPER = 1, 36  # prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)


def _become(main: Main, arguments: list[str], fault: str) -> int:
    """What a freshly started process does; its exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s", force=True)
    try:
        faults.arm(fault)
        return main(*arguments)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _in_child(main: Callable[[], int]) -> None:
    """Ends this forked process with what `main` returns; a failure shows its traceback, as in any Python."""
    code = 1
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# A trainer's ranks --------------------------------------------------------------------------------------------------


def fork_ranks_from_here(main: Main, fault_of: Callable[[int], str]) -> None:
    """From now on this process's `subprocess.Popen` of a rank is a fork of it as it is now, which runs `main` and dies
    at the point `fault_of` its number."""
    _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        here.close()
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _in_child(lambda: _serve_ranks(there, parent, main, fault_of))
    there.close()
    ranks.subprocess = _Popens(here)  # pyright: ignore[reportAttributeAccessIssue]


def _serve_ranks(requests: socket.socket, parent: int, main: Main, fault_of: Callable[[int], str]) -> int:
    for number in itertools.count():  # ranks are started in order
        data, fds, _, _ = socket.recv_fds(requests, 4096, 3)
        if not data:
            break
        become = functools.partial(_become, main, [], fault_of(number))
        requests.send(str(_fork_rank(requests, fds, int(data), parent, become)).encode())
        for fd in fds:
            os.close(fd)
    return 0


def _fork_rank(requests: socket.socket, fds: list[int], reports: int, parent: int, become: Callable[[], int]) -> int:
    """The pid of a rank that is a child of the trainer: of the one that forked it, which ends, and so of the reaper."""
    answer, pid = os.pipe()
    if (between := os.fork()) == 0:
        forker = os.getpid()
        if (child := os.fork()) == 0:
            _in_child(lambda: _forked_rank(requests, fds, reports, (forker, parent), become))
        os.write(pid, str(child).encode())
        os._exit(0)
    os.waitpid(between, 0)
    found = int(os.read(answer, 32))
    os.close(answer)
    os.close(pid)
    return found


def _forked_rank(
    requests: socket.socket, fds: list[int], reports: int, parents: tuple[int, int], become: Callable[[], int]
) -> int:
    """parents: who forked it and ends at once, then the trainer, which may have been killed meanwhile."""
    forker, trainer = parents
    os.setpgid(0, 0)
    requests.close()
    stdin, stdout, pipe = (os.dup2(fd, 200 + at) for at, fd in enumerate(fds))
    for fd in fds:
        os.close(fd)
    for fd, number in ((stdin, 0), (stdout, 1), (stdout, 2), (pipe, reports)):
        os.dup2(fd, number)
    for fd in (stdin, stdout, pipe):
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    while os.getppid() == forker:
        time.sleep(0.0005)
    return become() if os.getppid() == trainer else 1


class _Popens:
    """In place of the module `subprocess` in ranks.py."""

    PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT

    def __init__(self, helper: socket.socket) -> None:
        self._helper = helper

    def Popen(self, command: list[str], *, pass_fds: list[int], **options: Any) -> "_ForkedRank":
        return _ForkedRank(self._helper, pass_fds[0])


class _ForkedRank:
    """What `RankSet` uses of a Popen."""

    def __init__(self, helper: socket.socket, reports: int) -> None:
        (stdin, write), (read, stdout) = os.pipe(), os.pipe()
        socket.send_fds(helper, [str(reports).encode()], [stdin, stdout, reports])
        self.pid = int(helper.recv(32))
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(write, "wb"), os.fdopen(read, "rb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


# The process that forks, and a test's side of it --------------------------------------------------------------------


def serve(roles: Mapping[str, Main]) -> None:
    """Starts, waits for and collects processes, as told on standard input; its answers are its standard output."""
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    assert threading.active_count() == 1, "a thread does not survive a fork, but its locks do"
    gc.freeze()  # else each child's collector would copy every page that it looks at
    for line in sys.stdin:
        request = json.loads(line)
        answer = _start(roles, request) if "role" in request else _wait(request["wait"], request["seconds"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _start(roles: Mapping[str, Main], request: dict[str, Any]) -> int:
    if child := os.fork():
        return child
    os.environ |= request["environment"]
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd, number in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(fd, number)
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _in_child(lambda: _become(roles[request["role"]], request["arguments"], request["fault"]))
    raise AssertionError


def _wait(pid: int, seconds: float) -> int | None:
    """The exit code, negative for a signal; None if it lives on."""
    fd = os.pidfd_open(pid)
    try:
        if not select.select([fd], [], [], seconds)[0]:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(fd)


class Process:
    """A process started by `Forks`."""

    def __init__(self, forks: "Forks", pid: int, output: Path) -> None:
        self._forks, self.pid, self._output = forks, pid, output
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.wait(0.0)

    def wait(self, seconds: float) -> int | None:
        """The exit code (negative: the signal that killed it), or None after `seconds`."""
        if self.code is None:
            self.code = self._forks.ask({"wait": self.pid, "seconds": seconds})
        return self.code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Returns when it is dead."""
        self.send_signal(signal.SIGKILL)
        self.wait(10.0)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")


class Forks:
    """Starts processes by the script that serves them. `close` ends them all."""

    def __init__(self, script: Path) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def start(self, role: str, *arguments: str, output: Path, fault: str = "", **environment: str) -> Process:
        """A process of one of the script's roles, which dies at the point `fault`. What it says is added to a file."""
        output.touch()
        request = {
            "role": role,
            "arguments": list(arguments),
            "fault": fault,
            "environment": environment,
            "output": str(output),
        }
        return Process(self, self.ask(request), output)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the process that forks is gone"
        return json.loads(answer)

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()
