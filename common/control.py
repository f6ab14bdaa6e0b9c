"""The two sockets of `paceline up` in the run directory, and the one question another process may ask through one.

    up.sock     stream, 0600: one JSON line asks, one JSON line answers, and the connection is over    `Control`, `ask`
    ready.sock  datagrams as for systemd: a child says READY=1 once it is up                          `ReadySocket`

The supervisor is one thread with children to look after, so nothing on its side waits: a client that says nothing, too
much or never reads is dropped, and what it asked for either happened whole or not at all. Both sockets ask the kernel
who speaks. Answers describe the present state; whoever waits for something asks again.
"""

import contextlib
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError, PacelineError

MAX_REQUEST = 4096  # bytes
PATIENCE_S = 2.0  # for a client to send its request
MAX_CLIENTS = 16
_MAX_ANSWER = 1 << 16  # fits a stream socket's buffer, so that an answer is sent at once or never
_DRAIN = 64  # datagrams taken in a turn
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def _listen(path: Path, kind: int) -> socket.socket:
    """A non-blocking socket at `path`, 0600. One that is there is a dead supervisor's: the caller holds up.lock."""
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    umask = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error.strerror or error}") from None
    finally:
        os.umask(umask)
    return listener


@dataclass
class _Client:
    connection: socket.socket
    until: float
    data: bytes = field(default=b"")


class Control:
    """The supervisor's end of up.sock. `answer` gets each request of this user, or root's, and must not wait."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self._path, self._answer = path, answer
        self._listener = _listen(path, socket.SOCK_STREAM)
        self._listener.listen(MAX_CLIENTS)
        self._clients: list[_Client] = []

    def descriptors(self) -> list[int]:
        """What to wait on for reading."""
        return [self._listener.fileno(), *(client.connection.fileno() for client in self._clients)]

    def serve(self) -> None:
        """Accepts, reads and answers as far as that goes without waiting."""
        while len(self._clients) < MAX_CLIENTS:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody there, or gone again
                break
            connection.setblocking(False)
            if _peer(connection) in (0, os.geteuid()):
                self._clients.append(_Client(connection, time.monotonic() + PATIENCE_S))
            else:
                connection.close()
        self._clients = [client for client in self._clients if self._keeps(client)]

    def _keeps(self, client: _Client) -> bool:
        """Reads on; False, and the connection closed, once there is nothing more to hear from this client."""
        try:
            piece = client.connection.recv(MAX_REQUEST)
        except BlockingIOError:
            if time.monotonic() < client.until:
                return True
            piece = b""
        except OSError:
            piece = b""
        client.data += piece
        line, newline, _ = client.data.partition(b"\n")
        if piece and not newline and len(client.data) <= MAX_REQUEST:
            return True
        with client.connection, contextlib.suppress(OSError):
            if newline:
                client.connection.send(_line(self._reply(line)))
        return False

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return {"error": "the request is not JSON"}
        if not isinstance(request, dict):
            return {"error": "the request is no JSON object"}
        try:
            return self._answer(request)
        except PacelineError as error:
            return {"error": str(error), "code": error.exit_code}
        except OSError as error:  # a full disk, say, is no reason for the supervisor to end
            where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
            return {"error": f"{where}{error.strerror or error}"}

    def close(self) -> None:
        for client in self._clients:
            client.connection.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)


def _line(answer: dict[str, Any]) -> bytes:
    data = json.dumps(answer, separators=(",", ":")).encode() + b"\n"
    return data if len(data) <= _MAX_ANSWER else _line({"error": f"the answer is too long ({len(data)} bytes)"})


def _peer(connection: socket.socket) -> int:
    """The user id at the other end, by the kernel's word."""
    return _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]


class NoSupervisor(PacelineError):
    """Nobody answers at a run's up.sock."""


class SilentSupervisor(NoSupervisor):
    """It is there and does not answer: it has not ended."""


def ask(path: Path, request: dict[str, Any], patience: float = 30.0) -> dict[str, Any]:
    """The supervisor's answer to a request.

    Raises:
        NoSupervisor: it is not there; SilentSupervisor: it does not answer within `patience` seconds.
        PacelineError: it refuses; the text says why.
    """
    deadline = time.monotonic() + patience
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(patience)
        try:
            while (refused := connection.connect_ex(str(path))) == errno.EAGAIN and time.monotonic() < deadline:
                time.sleep(0.05)  # a crowd waits to be accepted
            if refused:
                raise OSError(refused, os.strerror(refused))
            connection.sendall(_line(request))
            data = b""
            while not data.endswith(b"\n") and (piece := connection.recv(_MAX_ANSWER)):
                data += piece
        except (TimeoutError, BlockingIOError):
            raise SilentSupervisor(
                f"the supervisor at {path} does not answer for {patience:g} s: go on with it if it was stopped "
                "(Ctrl-Z), or with its terminal (Ctrl-S)"
            ) from None
        except OSError as error:
            raise NoSupervisor(f"no supervisor answers at {path}: {error.strerror or error}") from None
    if not data.endswith(b"\n"):
        raise NoSupervisor(f"the supervisor at {path} ended before it answered")
    answer = json.loads(data)
    if "error" in answer:
        error = PacelineError(answer["error"])
        error.exit_code = int(answer.get("code", 1))
        raise error
    return answer


class ReadySocket:
    """The supervisor's end of ready.sock, which children find as NOTIFY_SOCKET (sd_notify(3))."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = _listen(path, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def ready(self) -> Iterator[int]:
        """The pids that have said READY=1 since the last call."""
        for _ in range(_DRAIN):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(_UCRED.size))
            except OSError:  # nothing more to read
                return
            for level, kind, credentials in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(credentials) == _UCRED.size:
                    pid, uid, _ = _UCRED.unpack(credentials)
                    if uid in (0, os.geteuid()) and b"READY=1" in data.split(b"\n"):
                        yield pid

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)
