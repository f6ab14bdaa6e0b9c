"""Stand-ins without torch: states that tell where they belong, a learner that checks them, a group over sockets.

A stamped state is a function of (plane, position in row, token id, feature), so whoever reads a record can tell whether
it is the record it should be. `SumLearner` checks each one and moves a toy weight by a sum over them, in float64, so
that a run that loses, doubles or reorders a record ends with another weight.
"""

import json
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from paceline.common import record
from paceline.common.batch import BatchId
from paceline.common.plan import Plan, PlanSpec
from paceline.common.record import RecordMeta
from paceline.common.ring import Ring
from paceline.common.rows import Rows, RowsWriter
from paceline.consumer import checkpoint as ck
from paceline.consumer.check import Expected
from safetensors.numpy import load_file, save_file

HIDDEN, LAYERS = 16, (1, 3)
EXPECTED = Expected(fingerprint=77, layer_ids=LAYERS, dtype="float32", hidden_size=HIDDEN, last_hidden="none")


def stamp(tokens: np.ndarray, cu_seqlens: np.ndarray, planes: int, hidden: int) -> np.ndarray:
    """States float32 [planes, T, H] of tokens in rows; integers from 1 to 251, never constant over features."""
    ends = np.asarray(cu_seqlens, np.int64)
    position = np.arange(ends[-1]) - np.repeat(ends[:-1], np.diff(ends))
    of_token = position * 7 + np.asarray(tokens, np.int64) * 3
    of_plane, of_feature = np.arange(planes) * 101, np.arange(hidden) * 13
    return ((of_token[None, :, None] + of_plane[:, None, None] + of_feature) % 251 + 1).astype(np.float32)


class StampSource:
    """A worker's state source that stamps instead of running a target."""

    def __init__(self, planes: int = len(LAYERS), hidden: int = HIDDEN, seconds: float = 0.0):
        self._planes, self._hidden, self._seconds = planes, hidden, seconds

    def record(self, tokens: np.ndarray, cu_seqlens: np.ndarray, out: Any) -> None:
        time.sleep(self._seconds)
        states = stamp(tokens, cu_seqlens, self._planes, self._hidden)
        np.frombuffer(out, np.float32)[: states.size] = states.reshape(-1)


def make_rows(folder: Path, count: int = 40, seed: int = 0) -> Rows:
    """Rows of 8 to 24 tokens; the second half of each is supervised."""
    draw = np.random.default_rng(seed)
    writer = RowsWriter()
    for _ in range(count):
        length = int(draw.integers(8, 25))
        mask = np.arange(length) >= length // 2
        writer.add(np.array([length]), draw.integers(4, 500, length), mask.astype(np.uint8))
    return Rows.open(writer.write(folder, {}))


def make_plan(rows: Rows, **changes: Any) -> Plan:
    spec = PlanSpec(rows.digest, seed=0, token_budget=64, max_length=24, packer="first-fit", held_out=4)
    return Plan(spec, rows.lengths, **({"batches_per_step": 2, "epochs": 1} | changes))


def make_meta(plan: Plan, rows: Rows, batch: BatchId, expected: Expected = EXPECTED, **changes: Any) -> RecordMeta:
    ids = plan.rows(batch)
    parts = [rows.row(int(row)) for row in ids]
    fields = {
        "batch": batch.pack(),
        "row_ids": ids,
        "cu_seqlens": np.cumsum([0, *(len(part.tokens) for part in parts)]).astype(np.int32),
        "tokens": np.concatenate([part.tokens for part in parts]),
        "mask": np.concatenate([part.mask for part in parts]),
        "layer_ids": expected.layer_ids,
        "dtype": expected.dtype,
        "hidden_size": expected.hidden_size,
        "last_hidden": expected.last_hidden,
        "fingerprint": expected.fingerprint,
    }
    return RecordMeta(**(fields | changes))


def commit(
    ring: Ring, meta: RecordMeta, states: np.ndarray | None = None, checksum: int | None = None
) -> tuple[int, int]:
    """Write a record into a free slot of `ring`; returns (slot, seq)."""
    slot = ring.claim(meta.batch)
    assert slot is not None, "no free slot"
    if states is None:
        states = stamp(meta.tokens, meta.cu_seqlens, meta.planes, meta.hidden_size)
    offset, length = record.write_meta(slot.payload, meta), record.record_bytes(meta)
    slot.payload[offset:length] = states.tobytes()
    ring.commit(slot, length, record.checksum(slot.payload, length) if checksum is None else checksum)
    return slot.index, slot.seq


@dataclass
class SumLearner:
    """Learns one number: w += rate · (mean stamped state − w), with the mean over a step's tokens on all ranks."""

    seconds: float = 0.0  # per record
    poison: int = -1  # a batch id (packed) whose loss is NaN
    weight: float = 0.0
    steps: int = 0
    _sums: np.ndarray = field(default_factory=lambda: np.zeros(2))

    def _read(self, meta: RecordMeta, states: memoryview) -> np.ndarray:
        time.sleep(self.seconds)
        found = np.frombuffer(states, np.float32).reshape(meta.states_shape)
        wanted = stamp(meta.tokens, meta.cu_seqlens, meta.planes, meta.hidden_size)
        if not np.array_equal(found, wanted):
            raise AssertionError(f"record of batch {BatchId.unpack(meta.batch)} holds other states")
        value = float("nan") if meta.batch == self.poison else float(found.sum(dtype=np.float64))
        return np.array([value / found.size * len(meta.tokens), len(meta.tokens)])

    def train_record(self, meta: RecordMeta, states: memoryview, epoch: int) -> None:
        self._sums += self._read(meta, states)

    def sums(self) -> np.ndarray:
        return self._sums.copy()

    def reduce(self, group: Any) -> None:
        return

    def step(self, total: np.ndarray, step: int, total_steps: int) -> tuple[bool, dict[str, Any]]:
        mean = total[0] / total[1]
        self.discard()
        if not np.isfinite(mean):
            return False, {}
        rate = 0.1 * (1 - step / total_steps)
        self.weight += rate * (mean - self.weight)
        self.steps += 1
        return True, {"loss": abs(mean - self.weight), "acc": 0.5, "tau": 2.0, "lr": rate, "acc_slot": [0.5, 0.25]}

    def discard(self) -> None:
        self._sums = np.zeros(2)

    def eval_record(self, meta: RecordMeta, states: memoryview) -> None:
        self._sums += self._read(meta, states)

    def eval_metrics(self, total: np.ndarray) -> dict[str, Any]:
        return {"tau": 1.0, "tau_chain": 1.0 + self.steps / 100, "eval_tokens": float(total[1])}

    def drafter_config(self) -> dict[str, Any]:
        return {"kind": "sum"}

    def peak_memory(self) -> int:
        return 1 << 20

    def map_ring(self, address: int, size: int) -> None:
        return

    def unmap_ring(self, address: int, size: int) -> None:
        return

    def snapshot(self) -> ck.Write:
        model, optimizer = {"weight": np.array([self.weight])}, {"steps": np.array([self.steps])}

        def write(folder: Path) -> None:
            save_file(model, folder / ck.MODEL)
            save_file(optimizer, folder / ck.OPTIMIZER)

        return write

    def restore(self, folder: Path) -> None:
        self.weight = float(load_file(folder / ck.MODEL)["weight"][0])
        self.steps = int(load_file(folder / ck.OPTIMIZER)["steps"][0])


class SocketGroup:
    """All-gather over a unix socket that rank 0 serves; sums are taken in rank order."""

    def __init__(self, rank: int, world: int, path: Path):
        self.rank, self.world = rank, world
        if rank == 0:
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(path))
            server.listen(world)
            peers = [server.accept()[0] for _ in range(world - 1)]
            self._peers = [peer for _, peer in sorted((_read_object(peer), peer) for peer in peers)]
        else:
            self._peers = [_connect(path)]
            _write_object(self._peers[0], rank)

    def all_gather(self, value: Any) -> list[Any]:
        if self.rank == 0:
            values = [value, *(_read_object(peer) for peer in self._peers)]
            for peer in self._peers:
                _write_object(peer, values)
            return values
        _write_object(self._peers[0], value)
        return _read_object(self._peers[0])

    def all_reduce(self, values: np.ndarray) -> None:
        values[:] = np.sum(self.all_gather(values.tolist()), axis=0)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


def _connect(path: Path, patience: float = 30.0) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(str(path))
            return peer
        except OSError:
            peer.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _write_object(peer: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    peer.sendall(struct.pack("<I", len(data)) + data)


def _read_object(peer: socket.socket) -> Any:
    (size,) = struct.unpack("<I", _read_bytes(peer, 4))
    return json.loads(_read_bytes(peer, size))


def _read_bytes(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other rank is gone")
        data += piece
    return data


__all__ = [
    "EXPECTED",
    "SocketGroup",
    "StampSource",
    "SumLearner",
    "commit",
    "make_meta",
    "make_plan",
    "make_rows",
    "stamp",
]
