"""What a worker asks of whatever makes states: `capture.TargetSource`, `recording.RecordingSource`, stand-ins in tests.

A record is begun and then finished, because a device runs on by itself: the next batch's forward is launched while the
last states of this one are still copied and summed, so the device has no gap between two batches. Without torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..common.target_info import TargetInfo
from .summing import Landed


class Filling(Protocol):
    """A record that was begun."""

    def done(self) -> bool:
        """Whether `finish` would return at once. Waits for nothing."""
        ...

    def finish(self) -> bool:
        """Waits until the record's states are complete, and for nothing that was begun after it; to be called once.
        Returns: all finite."""
        ...


@dataclass(frozen=True)
class Filled:
    """A record that was complete as soon as it was begun."""

    finite: bool

    def done(self) -> bool:
        return True

    def finish(self) -> bool:
        return self.finite


class StateSource(Protocol):
    """Knows nothing of rings and messages. Called by one thread."""

    info: TargetInfo

    def register(self, address: int, length: int) -> None:
        """Told of the ring's mapping before the first record."""
        ...

    def begin(
        self,
        tokens: np.ndarray,
        cu_seqlens: np.ndarray,
        out: memoryview,
        progress: Callable[[], None],
        landed: Landed | None = None,
    ) -> Filling:
        """Has [planes, T, H] written to `out`, which stays as it is until the record is finished; calls `progress` now
        and then before it returns. Records become complete in the order in which they are begun.

        landed: may be told, by any thread and before `finish` returns, which bytes of `out` will not change any more.

        Raises whatever the forward raises; then nothing writes to `out` any more.
        """
        ...

    def settle(self) -> None:
        """Waits until nothing writes to any record's `out` or tells what landed, whatever became of the records."""
        ...

    def close(self) -> None:
        """Told before the mapping goes."""
        ...
