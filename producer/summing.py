"""The checksum of a record that is being filled: summed plane by plane as states land, by several threads.

After a forward the device has nothing to do until the record is committed and the next batch is under way; a sum over
the whole record then, at the speed of one core's memory, cost a tenth of a large target's time.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..common.record import Buffer, RunningChecksum

Landed = Callable[[int, int], None]
"""Told which bytes of a record's states, (first, past the last), will not change any more."""

MOST_THREADS = 8  # a sum is bound by memory


class Summing:
    """Threads that sum. `close` when no record is being filled any more, before the ring's mapping goes."""

    def __init__(self) -> None:
        self._threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._pool = ThreadPoolExecutor(self._threads, "checksum")

    def begin(self, payload: Buffer, length: int, offset: int) -> tuple[RunningChecksum, Landed]:
        """The sum over a record's bytes, and whom to tell what landed of its states, which begin at `offset`; that
        returns when it is summed."""
        running = RunningChecksum(payload, length)

        def landed(start: int, stop: int) -> None:
            shares = ((part, self._threads) for part in range(self._threads))
            done = [self._pool.submit(running.add, offset + start, offset + stop, share) for share in shares]
            for one in done:
                one.result()

        return running, landed

    def close(self) -> None:
        self._pool.shutdown()
