"""Open-file-description locks: who is alive, proven by the kernel.

The kernel drops an OFD lock within a millisecond of its owner's death, however it died, and `F_OFD_GETLK` asks for it
without taking anything. Unlike POSIX locks they are not lost when another descriptor of the file is closed. A lock
belongs to the open file, so a forked child keeps it: processes that hold one are spawned, never forked.

Lock files are never unlinked: two processes could then hold "the" lock on two files of one name.
"""

import errno
import fcntl
import os
import struct
from pathlib import Path
from types import TracebackType

from . import faults
from .errors import ConfigError

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid


def _request(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


class OfdLock:
    """A write lock on a whole open file. The descriptor stays the caller's."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def acquire(self, blocking: bool = False) -> bool:
        """Takes the lock. Returns False if another open file holds it (never when `blocking`).

        A blocking wait ends at once when a signal handler raises.
        """
        command = fcntl.F_OFD_SETLKW if blocking else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self.fd, command, _request(fcntl.F_WRLCK))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def release(self) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK))

    @staticmethod
    def holder(fd: int) -> bool:
        """True if an open file other than `fd`'s holds the lock. Takes nothing; `fd` may be read-only."""
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK))
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK


class FileLock:
    """A lock file of its own, which tells who holds it (`consumer.lock`, a rank's lock).

    `who` is the holder's name as others should read it, e.g. "trainer of run demo".
    """

    def __init__(self, path: str | Path, who: str) -> None:
        self.path = Path(path)
        self.who = who
        self._fd: int | None = None

    def acquire(self, blocking: bool = False) -> bool:
        """Makes the file if need be (0600) and takes its lock; False if another holds it.

        Raises:
            ConfigError: it cannot be made or opened.
        """
        if self._fd is not None:
            return True
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
            raise ConfigError(f"cannot lock {self.path}: {reason}") from None
        try:
            taken = OfdLock(fd).acquire(blocking)
        except BaseException:
            os.close(fd)
            raise
        if not taken:
            os.close(fd)
            return False
        faults.point("lock.taken")
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n{self.who}\n".encode(), 0)
        except OSError as error:  # a full disk
            os.close(fd)
            raise ConfigError(f"cannot lock {self.path}: {error.strerror}") from None
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.release()


def held_by(path: str | Path) -> str | None:
    """Who holds the lock file, as "name (pid 123)"; None if it is free or not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not OfdLock.holder(fd):
            return None
        pid, _, who = os.pread(fd, 512, 0).decode(errors="replace").partition("\n")
    finally:
        os.close(fd)
    who = who.strip()
    return f"{who or 'a process'} (pid {pid.strip() or 'unknown'})"
