"""The rank processes, as the trainer's main process sees them: started together, watched, ended together.

Each rank gets its job on standard input, reports on a pipe (job.py), and its output comes through another, line by
line, so that the last lines of one that dies can be shown. Ranks are killed by the kernel when the main process dies.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..common.errors import how_it_ended
from .job import RankJob

RANK_COMMAND = (sys.executable, "-m", "paceline.consumer.rank")
STARTUP_SECONDS = 1800.0
_TAIL_LINES = 12
_READ = 1 << 16


@dataclass
class Rank:
    """One process. `state` and `end` are what it said last; `code` is its exit code once it has ended."""

    number: int
    process: "subprocess.Popen[bytes]"
    reports: int
    state: str = "starting"
    heard_at: float = 0.0
    end: tuple[str, str] | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    pieces: dict[int, bytes] = field(default_factory=dict)  # descriptor -> the line that has begun

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def obituary(self) -> str:
        """How it ended, with its last line; those before were passed on."""
        last = next((f": {line.strip()}" for line in reversed(self.tail) if line.strip()), "")
        return f"rank {self.number} {how_it_ended(self.code or 0)}{last}"


class RankSet:
    """The M ranks of one trainer."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()

    def start(self, jobs: Sequence[RankJob], command: Sequence[str] = RANK_COMMAND) -> None:
        for job in jobs:
            self._start(job, command)

    def _start(self, job: RankJob, command: Sequence[str]) -> None:
        reading, writing = os.pipe()
        # A group of its own: Ctrl-C is for the main process, which tells its ranks.
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            process_group=0,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        os.close(writing)
        rank = Rank(job.rank, process, reading, heard_at=time.monotonic())
        self.ranks.append(rank)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(replace(job, reports=writing).to_json().encode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # it is dead already; its exit code tells
        for descriptor in (reading, process.stdout.fileno()):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, rank)

    def poll(self, seconds: float) -> Iterator[tuple[Rank, dict[str, Any]]]:
        """Reports that came within `seconds`; output is passed on to standard error, exit codes are collected."""
        for key, _ in self._selector.select(seconds):
            rank: Rank = key.data
            yield from self._read(rank, key.fd)
        for rank in self.ranks:
            if rank.code is None and rank.process.poll() is not None:
                for key in [key for key in self._selector.get_map().values() if key.data is rank]:
                    yield from self._read(rank, key.fd)  # what it said last
                    if key.fd in self._selector.get_map():
                        self._selector.unregister(key.fd)
                os.close(rank.reports)

    def _read(self, rank: Rank, descriptor: int) -> Iterator[tuple[Rank, dict[str, Any]]]:
        while True:
            try:
                data = os.read(descriptor, _READ)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(descriptor)
                return
            *lines, rest = (rank.pieces.get(descriptor, b"") + data).split(b"\n")
            rank.pieces[descriptor] = rest
            for line in lines:
                if descriptor == rank.reports:
                    yield rank, self._note(rank, json.loads(line))
                else:
                    self._pass_on(rank, line.decode(errors="replace"))

    def _note(self, rank: Rank, report: dict[str, Any]) -> dict[str, Any]:
        rank.heard_at = time.monotonic()
        rank.state = report.get("state", rank.state)
        if "end" in report:
            rank.end = (report["end"], report["why"])
        return report

    def _pass_on(self, rank: Rank, line: str) -> None:
        rank.tail.append(line)
        print(line, file=sys.stderr, flush=True)

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.code is None]

    def hung(self, seconds: float) -> list[Rank]:
        """Ranks that should have said something for `seconds`; more while they load, which has no signs of life.

        One that waits for the others in a gather is excused while any other is elsewhere: that one is to speak.
        """
        running, now = self.running, time.monotonic()
        limits = {"starting": max(seconds, STARTUP_SECONDS)}
        silent = [rank for rank in running if now - rank.heard_at > limits.get(rank.state, seconds)]
        if all(rank.state == "gather" for rank in running):
            return silent if len(silent) == len(running) else []
        return [rank for rank in silent if rank.state != "gather"]

    def signal(self, number: signal.Signals) -> None:
        for rank in self.running:
            rank.process.send_signal(number)

    def kill(self, patience: float = 10.0) -> None:
        """End all at once, with what they started, and collect them."""
        for rank in self.running:
            try:
                os.killpg(rank.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + patience
        while self.running and time.monotonic() < deadline:
            for _ in self.poll(0.05):
                pass
