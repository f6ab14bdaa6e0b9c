"""Time of one feed decision, with eight workers of sixteen slots and a million batches left.

    python benchmarks/feed.py [--workers 8] [--slots 16] [--batches 1000000] [--seconds 3]

Prints one JSON object: microseconds (median, p99) of `decide`, and of the scan of the real rings in shared memory
before it, for three states of the rings: filling (each worker gets work for all its slots), steady (rings half full,
two ranks ask) and stuck (all full of later records, what the ranks wait for is not made; strict order). Exits with 1 if
a median decision takes a millisecond.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paceline.common.batch import BatchId, Kind
from paceline.common.fingerprint import Fingerprint
from paceline.common.ring import Ring, RingReader
from paceline.consumer.feed import Assignment, Phase, Request, View, WorkerHint, decide
from paceline.consumer.ledger import Ledger

PHASE = Phase(Kind.TRAIN, 100)


class Plan:
    """An epoch of `batches` batches, two in a step; no packing, which a decision never looks at."""

    batches_per_step = 2
    eval_every = 500
    epochs = 1
    eval_batches = 8

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self.total_steps = batches // 2

    def batches(self, epoch: int) -> int:
        return self._batches

    def first_step(self, epoch: int) -> int:
        return epoch * self.total_steps

    def epoch_of(self, step: int) -> int:
        return 0

    def step_batches(self, step: int) -> int:
        return 2

    def eval_due(self, steps_done: int) -> bool:
        return steps_done % self.eval_every == 0

    def next_phase(self, kind: Kind, number: int) -> tuple[Kind, int]:
        return Kind.TRAIN, number + 1

    def rows(self, batch: BatchId) -> range:
        return range(8)


def word(index: int) -> int:
    return BatchId(Kind.TRAIN, 0, index).pack()


def fill(ring: Ring, batches: list[int]) -> None:
    for batch in batches:
        slot = ring.claim(word(batch))
        assert slot is not None
        ring.commit(slot, 64, 0)


def make_view(plan: Plan, readers: list[RingReader], state: str, slots: int) -> View:
    """The feed's view after 100 steps, with gaps in what is done, as arrival order leaves them."""
    scans = [reader.scan() for reader in readers]
    ledger = Ledger()
    ledger.record([BatchId(Kind.TRAIN, 0, index) for index in range(230) if index % 8], {})
    assignments = []
    if state == "steady":
        assignments = [
            Assignment(word(10_000 + w * slots + k), scan.worker, scan.incarnation, 1.0)
            for w, scan in enumerate(scans)
            for k in range(slots // 2)
        ]
    return View(
        plan=plan,
        ledger=ledger,
        phase=PHASE,
        strict=state == "stuck",
        ranks=2,
        prefetch=slots,
        rings=scans,
        workers={
            scan.worker: WorkerHint(
                scan.incarnation, frozenset(a.batch for a in assignments if a.worker == scan.worker), 2.0, 1e4
            )
            for scan in scans
        },
        assignments=assignments,
        grants={},
        lagging=(),
        requests=[] if state == "filling" else [Request(rank, PHASE, 0) for rank in range(2)],
        refused_by={},
    )


def measure(act: Callable[[], object], seconds: float) -> dict[str, float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 100:
        start = time.perf_counter()
        act()
        times.append((time.perf_counter() - start) * 1e6)
    return {"median_us": round(statistics.median(times), 1), "p99_us": round(sorted(times)[len(times) * 99 // 100], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3)
    arguments = parser.parse_args()
    plan = Plan(arguments.batches)
    fingerprint = Fingerprint({"benchmark": "feed"})
    result: dict[str, object] = {key: getattr(arguments, key) for key in ("workers", "slots", "batches")}
    shared, slow = Path("/dev/shm"), False
    for state, full in (("filling", 0), ("steady", arguments.slots // 2), ("stuck", arguments.slots)):
        folder = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
        rings: list[Ring] = []
        try:
            for w in range(arguments.workers):
                path = folder / f"w{w}.ring"
                ring = Ring.open(
                    path, worker=path.stem, fingerprint=fingerprint, slots=arguments.slots, slot_bytes=4096
                )
                fill(ring, [300 + w * arguments.slots + k for k in range(full)])
                rings.append(ring)
            readers = [RingReader.open(ring.path) for ring in rings]
            view = make_view(plan, readers, state, arguments.slots)
            part = arguments.seconds / 6
            timed = measure(lambda view=view: decide(view), part)
            slow = slow or timed["median_us"] >= 1000
            result[state] = {
                "actions": len(decide(view)),
                "decide": timed,
                "scan": measure(lambda readers=readers: [reader.scan() for reader in readers], part),
            }
        finally:
            for ring in rings:
                ring.close()
            shutil.rmtree(folder)
    print(json.dumps(result, indent=2))
    raise SystemExit(int(slow))


if __name__ == "__main__":
    main()
