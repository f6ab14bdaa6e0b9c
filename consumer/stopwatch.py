"""How long some work of a device takes, without waiting for it."""

import time

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
