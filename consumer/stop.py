"""SIGTERM and SIGINT, seen at once without breaking what must not be broken.

A signal always sets the flag. Inside `with flag.interruptible():` it also raises StopRequested, out of whatever Python
is doing there: waiting for a record, compiling, a forward pass. Around the optimiser step, the ledger and a
checkpoint it does not, and whoever runs those looks at the flag afterwards.
"""

import signal
from types import FrameType, TracebackType


class StopRequested(BaseException):
    """A stop signal arrived inside an interruptible part. No Exception: code in between must not swallow it."""


class StopFlag:
    """`requested` is the signal that arrived first, or None; `count` how many arrived."""

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.count = 0
        self._raises = False

    def install(self, *signals: signal.Signals) -> None:
        """Handle `signals` in this process; to be called in the main thread."""
        for number in signals:
            signal.signal(number, self._handle)

    def interruptible(self) -> "StopFlag":
        """A part that a signal may leave with StopRequested, as one that came before it does at once."""
        return self

    def __enter__(self) -> "StopFlag":
        self._raises = True
        if self.requested is not None:
            self._raises = False
            raise StopRequested
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._raises = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.requested is None:
            self.requested = signal.Signals(number)
        if self._raises:
            self._raises = False
            raise StopRequested
