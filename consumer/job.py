"""What passes between the trainer's main process and a rank: the job on its standard input, and reports on a pipe.

Both ends are one program and one user's processes, parent and child; nothing here is read from anyone else.
"""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..common.batch import BatchId, Kind
from ..common.fingerprint import Fingerprint
from ..common.runfile import RunFile
from .check import Expected
from .checkpoint import Outcome


@dataclass(frozen=True)
class RankJob:
    """What the main process tells a rank."""

    run: dict[str, Any]
    run_id: str
    rank: int
    world: int
    device: str
    trainer: int  # the trainer's incarnation
    parent: int  # the main process
    reports: int  # descriptor of the pipe to it
    store: str  # the group's meeting place
    rows: str
    fingerprint: dict[str, str | int]
    layer_ids: list[int]
    hidden_size: int
    checkpoint: str | None
    phase: tuple[int, int] | None  # what comes first; None: nothing is left to do

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankJob":
        return cls(**json.loads(text))

    @property
    def expected(self) -> Expected:
        run = RunFile.model_validate(self.run)
        return Expected(
            fingerprint=Fingerprint(self.fingerprint).digest,
            layer_ids=tuple(self.layer_ids),
            dtype=run.record_dtype,
            hidden_size=self.hidden_size,
            last_hidden="before_norm" if run.target.last_hidden else "none",
        )


class Reports:
    """JSON lines to the main process: what this rank does now, and from rank 0 what has been done."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._said = 0.0
        self.state = ""

    def doing(self, state: str) -> None:
        """starting, data, compute, gather, step or saving. Each report is also a sign of life."""
        self.state = state
        self._send({"state": state})

    def alive(self) -> None:
        """A sign of life, passed on once a second at most."""
        if time.monotonic() - self._said >= 1.0:
            self._send({"state": self.state})

    def phase(self, kind: Kind, number: int, values: dict[str, Any], listed: dict[BatchId, str]) -> None:
        text = {str(batch): reason for batch, reason in listed.items()}
        self._send({"phase": [int(kind), number], "values": values, "listed": text})

    def checkpoint(self, outcome: Outcome) -> None:
        path = None if outcome.path is None else str(outcome.path)
        self._send({"checkpoint": path, "step": outcome.step, "error": outcome.error})

    def end(self, kind: str, why: str) -> None:
        self._send({"end": kind, "why": why})

    def _send(self, message: dict[str, Any]) -> None:
        self._said = time.monotonic()
        line = memoryview((json.dumps(message) + "\n").encode())
        while line:  # a signal cuts a write short that a full pipe holds up, and half a line would end the trainer
            line = line[os.write(self._descriptor, line) :]


@cache
def versions() -> dict[str, str]:
    """What writes a checkpoint; not to be changed."""
    found = {"python": platform.python_version()}
    for package in ("paceline", "torch", "transformers", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
