"""A ring and a GPU: `python -m paceline.consumer.bench_stream DEVICE RING_DIR BYTES ROUNDS` prints GB/s as JSON.

Copies between the GPU and a slot of a registered ring, beside the same copies of page-locked memory, which is as fast
as the bus goes. "both" is a copy each way at once on two streams, the bytes of both counted. Ways take turns, round by
round. Started by common/bench_parts.py.
"""

import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from ..common.fingerprint import Fingerprint
from ..common.measuring import measured
from ..common.ring import Ring
from .transfer import register_host, unregister_host

COPIES = 8  # one after another in a round


def measure(device: str, ring_dir: str, size: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of each round by the way's name."""
    torch.cuda.set_device(torch.device(device))
    Path(ring_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="bench-stream-", dir=ring_dir) as folder:
        ring = Ring.open(
            Path(folder) / "w0.ring",
            worker="w0",
            fingerprint=Fingerprint({"bench": "stream"}),
            slots=2,
            slot_bytes=size,
            device=device,
        )
        register_host(*ring.mapping())
        try:
            return _measure(ring, size, rounds)
        finally:
            unregister_host(*ring.mapping())
            ring.close()


def _measure(ring: Ring, size: int, rounds: int) -> dict[str, list[float]]:
    slots = [ring.claim(batch) for batch in range(2)]
    in_ring = [torch.frombuffer(slot.payload, dtype=torch.uint8, count=size) for slot in slots if slot is not None]
    locked = [torch.ones(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
    on_gpu = [torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    ways = {}
    for name, host in (("page-locked", locked), ("ring", in_ring)):
        ways[f"{name} to GPU"] = [(on_gpu[0], host[0])]
        ways[f"GPU to {name}"] = [(host[1], on_gpu[1])]
        ways[f"{name}, both"] = [(on_gpu[0], host[0]), (host[1], on_gpu[1])]
    streams = [torch.cuda.Stream() for _ in range(2)]
    speeds: dict[str, list[float]] = defaultdict(list)
    for i in range(1 + rounds):  # the first touches everything once
        for name, pairs in ways.items():
            seconds = _seconds(pairs, streams)
            if i:
                speeds[name].append(COPIES * len(pairs) * size / seconds / 1e9)
    del in_ring
    return speeds


def _seconds(pairs: list[tuple[Tensor, Tensor]], streams: list[torch.cuda.Stream]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(COPIES):
        for (to, source), stream in zip(pairs, streams, strict=False):
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    measured(lambda: measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
