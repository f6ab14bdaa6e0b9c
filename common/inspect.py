"""What is in a run's rings, read without a trace: for `paceline rings`, `status`, `metrics` and `doctor`.

Headers, tables and the first words of records are read with pread, owners' locks are asked for with F_OFD_GETLK:
nothing is mapped, written or allocated. Imports neither numpy nor torch, so that commands start at once. What is made
of several readings is `window`'s business, what it looks like `rings_screen`'s.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .locks import OfdLock
from .record_head import HEAD, head_tokens
from .ring_layout import RingInvalid, RingRead, SlotState, read_ring, ring_paths

STATES = ("ready", "taken", "writing", "free")


@dataclass(frozen=True)
class RingInfo:
    """One ring at one moment. With a `problem` (why it is no ring) only worker and path mean anything."""

    worker: str
    path: Path
    pid: int = 0
    device: str = ""
    alive: bool = False
    retired: bool = False
    states: tuple[str, ...] = ()  # of each slot: "free", "writing", "ready" or, of a READY one, "taken"
    slot_bytes: int = 0
    produced: int = 0  # records committed since the ring was made
    ring_id: int = 0
    oldest_ready_s: float | None = None
    read_at: float = 0.0  # seconds, monotonic
    records: tuple[tuple[int, int], ...] = ()  # (sequence number, tokens) of READY records
    problem: str | None = None

    def count(self, state: str) -> int:
        return self.states.count(state)

    @property
    def held(self) -> int:
        """Records in the ring, taken ones included: what the log line calls q_hs."""
        return self.count("ready") + self.count("taken")

    @property
    def full(self) -> bool:
        """Every slot holds a record: its worker can only wait."""
        return bool(self.states) and self.held == len(self.states)

    @property
    def consumed(self) -> int:
        """Records freed: produced and no longer READY."""
        return self.produced - self.held


def runs_with_rings(folder: str | Path) -> list[str]:
    """The names of the runs that have a ring folder below `folder`; [] if it cannot be read."""
    try:
        return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    except OSError:
        return []


def read_rings(folder: str | Path) -> list[RingInfo]:
    """Every ring in a run's ring folder, by worker; [] if it is not there. Raises nothing for what is in it."""
    return [info for info in map(_read, ring_paths(folder)) if info is not None]


def _read(path: Path) -> RingInfo | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:  # removed since it was listed
        return None
    except OSError as error:
        return RingInfo(path.stem, path, problem=f"{path}: {error.strerror}")
    try:
        ring = read_ring(fd, path)
        alive = OfdLock.holder(fd)
        records = _records(fd, ring)
    except RingInvalid as error:
        return RingInfo(path.stem, path, problem=str(error))
    except OSError as error:
        return RingInfo(path.stem, path, problem=f"{path}: {error.strerror}")
    finally:
        os.close(fd)
    header, live, slots = ring
    commits = [slot.committed_at_ns for slot in slots if slot.state is SlotState.READY]
    return RingInfo(
        worker=header.worker,
        path=path,
        pid=live.pid,
        device=live.device,
        alive=alive,
        retired=live.retired,
        states=tuple("taken" if slot.taken else slot.state.value for slot in slots),
        slot_bytes=header.slot_bytes,
        produced=live.produced,
        ring_id=header.ring_id,
        oldest_ready_s=max(0.0, (time.monotonic_ns() - min(commits)) / 1e9) if commits else None,
        read_at=time.monotonic(),
        records=records,
    )


def _records(fd: int, ring: RingRead) -> tuple[tuple[int, int], ...]:
    """(sequence number, tokens) of each READY record; one whose slot has been freed and used meanwhile is left out."""
    found = []
    for slot in ring.slots:
        if slot.state is SlotState.READY:
            head = os.pread(fd, HEAD.size, ring.header.offset(slot.index))
            if (tokens := head_tokens(head, slot.batch, slot.length)) is not None:
                found.append((slot.seq, tokens))
    return tuple(found)


def rings_json(run: str, rings: Sequence[RingInfo]) -> dict[str, Any]:
    """The object that `rings --json` prints. Files with a `problem` are not in it."""
    return {"run": run, "rings": [_as_json(ring) for ring in rings if ring.problem is None]}


def _as_json(ring: RingInfo) -> dict[str, Any]:
    age = ring.oldest_ready_s
    return {
        "worker": ring.worker,
        "path": str(ring.path),
        "pid": ring.pid,
        "alive": ring.alive,
        "slots": len(ring.states),
        **{state: ring.count(state) for state in ("free", "writing", "ready", "taken")},
        "slot_bytes": ring.slot_bytes,
        "produced": ring.produced,
        "consumed": ring.consumed,
        "oldest_ready_s": None if age is None else round(age, 3),
    }
