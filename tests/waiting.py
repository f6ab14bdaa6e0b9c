"""Bounded waits for what is sure to come, but not at once."""

import time
from collections.abc import Callable

from paceline.common.ring import RingReader

PATIENCE = 30.0  # seconds


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Returns once the condition holds; AssertionError if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def ownerless(reader: RingReader) -> RingReader:
    """The reader, once the kernel has let go of its dead owner's lock.

    That takes until the last reference to the file is gone: a moment longer than the process itself, whose memory a
    reader of /proc may keep for a while.
    """
    until(lambda: not reader.probe())
    return reader
