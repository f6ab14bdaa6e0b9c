"""The other process of the ring tests: `ring_peer.py ROLE PATH ...`, run as a script and killed at will."""

import sys
import time
from pathlib import Path

import numpy as np
from paceline.common.fingerprint import Fingerprint
from paceline.common.record import checksum
from paceline.common.ring import Ring, RingReader, SlotState

FINGERPRINT = Fingerprint({"target": "tiny", "seed": 0})


def open_ring(path: str, slots: int, slot_bytes: int) -> Ring:
    return Ring.open(path, worker=Path(path).stem, fingerprint=FINGERPRINT, slots=slots, slot_bytes=slot_bytes)


def write_record(ring: Ring, batch: int, length: int) -> None:
    """Waits for a slot and commits `length` bytes stamped with the batch."""
    while (slot := ring.claim(batch)) is None:
        time.sleep(0.0001)
    words = np.frombuffer(slot.payload, np.uint64, -(-length // 8))
    words[:] = batch
    ring.commit(slot, length, checksum(slot.payload, length))


def hold(path: str, slots: int, slot_bytes: int) -> None:
    ring = open_ring(path, slots, slot_bytes)
    print(ring.incarnation, flush=True)
    sys.stdin.read()


def write(path: str, slots: int, slot_bytes: int, count: int) -> None:
    """Commits batches 0 to count - 1, of lengths that differ, as fast as slots become free."""
    ring = open_ring(path, slots, slot_bytes)
    for batch in range(count):
        write_record(ring, batch, slot_bytes - batch % 50)
    ring.close()


def take(path: str, slots: int, slot_bytes: int) -> None:
    """Takes and releases one READY record."""
    reader = RingReader.open(path)
    slot = next(slot for slot in reader.scan().slots if slot.state is SlotState.READY)
    assert reader.take(slot.index, slot.seq, 77)
    assert reader.release(slot.index, slot.seq)


if __name__ == "__main__":
    role, path, *numbers = sys.argv[1:]
    {"hold": hold, "write": write, "take": take}[role](path, *map(int, numbers))
