"""How long some work of a device takes, and how long it has none, without waiting for it."""

import time
from typing import Any

import torch


class Stopwatch:
    """Seconds between `start` and `stop`: on a GPU those of the current stream, between two events in it."""

    def __init__(self, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if gpu else None
        self._began = self._seconds = 0.0

    def start(self) -> None:
        if self._events:
            self._events[0].record()
        else:
            self._began = time.perf_counter()

    def stop(self) -> None:
        if self._events:
            self._events[1].record()
        else:
            self._seconds = time.perf_counter() - self._began

    def seconds(self) -> float:
        """Of the last interval; waits for its end if that is not over. Must have been started and stopped before."""
        if self._events is None:
            return self._seconds
        first, last = self._events
        last.synchronize()
        return first.elapsed_time(last) / 1e3


class Gaps:
    """How long a device had nothing to do before each piece of work. A GPU is still at the last piece while the host
    waits for what the next one needs: such waiting costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._begun: list[Any] = []
        self._ended: list[Any] = []

    def begin(self) -> None:
        """What the next piece needs is there."""
        self._begun.append(self._now())

    def end(self) -> None:
        """All of the piece has been started."""
        self._ended.append(self._now())

    def take(self) -> list[float]:
        """Seconds without work between a piece's end and the next `begin`, since the last call; waits for them."""
        between = list(zip(self._ended, self._begun[1:], strict=False))
        self._begun, self._ended = [], []
        if not self._gpu:
            return [begun - ended for ended, begun in between]
        for _, begun in between[-1:]:
            begun.synchronize()
        return [ended.elapsed_time(begun) / 1e3 for ended, begun in between]

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
