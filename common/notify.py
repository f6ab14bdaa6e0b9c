"""sd_notify in plain stdlib: tells systemd that a service is ready, what it does, that it lives, that it stops.

Without NOTIFY_SOCKET everything here does nothing. Abstract socket names (`@...`) work. `Watchdog.beat` is to be called
from the main loop's progress, never from a thread that runs whatever happens. Source: sd_notify(3).
"""

import contextlib
import os
import socket
import time

READY_SECONDS = 10.0


def notify(*lines: str) -> bool:
    """Sends assignments such as "READY=1" or "STATUS=loading" in one datagram.

    False if nobody listens, or has not for so long that the queue is full: whoever calls must not hang with systemd.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        # A listener that hangs must not hold up a worker: only what is said once may wait for it, and not for ever.
        sock.settimeout(READY_SECONDS if "READY=1" in lines else 0)
        sock.sendto("\n".join(lines).encode(), address)
        return True
    return False


def extend_timeout(seconds: float) -> bool:
    """Asks for `seconds` more to start, or to stop; send it again every few seconds while that takes."""
    return notify(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")


class Watchdog:
    """Feeds systemd's watchdog (WatchdogSec) at most a few times in its interval."""

    def __init__(self) -> None:
        for_me = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit = int(os.environ.get("WATCHDOG_USEC", "0") or 0) / 1e6 if for_me else 0.0
        self._interval = limit / 4 if limit > 0 else None
        self._next = 0.0

    def beat(self) -> None:
        """Says that the main loop moves."""
        now = time.monotonic()
        if self._interval is not None and now >= self._next:
            self._next = now + self._interval
            notify("WATCHDOG=1")


class Patience:
    """Asks for more time to start, by signs of life: at most once a second, `seconds` each time."""

    def __init__(self, seconds: float = 30.0) -> None:
        self._seconds = seconds
        self._next = 0.0

    def alive(self) -> None:
        """Says that the start goes on."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 1.0
            extend_timeout(self._seconds)
