"""Stand-ins without torch: states that tell where they belong, a learner that checks them, a group over sockets.

A stamped state is a function of (plane, position in row, token id, feature), so whoever reads a record can tell whether
it is the record it should be. `SumLearner` checks each one and moves a toy weight by a sum over them, in float64, so
that a run that loses, doubles or reorders a record ends with another weight.
"""

import hashlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from forking import fork_ranks_from_here, serve
from paceline.common import faults, paths, record, wire
from paceline.common.batch import BatchId
from paceline.common.errors import ConfigError
from paceline.common.fingerprint import Fingerprint
from paceline.common.finished import is_finished, marker
from paceline.common.plan import Plan, PlanSpec, plan_from
from paceline.common.record import RecordMeta
from paceline.common.ring import Ring, SlotState
from paceline.common.rows import Rows, RowsWriter
from paceline.common.runfile import RunFile
from paceline.consumer import checkpoint as ck
from paceline.consumer import rank, trainer
from paceline.consumer.check import Expected
from paceline.consumer.describe import RunFacts
from paceline.consumer.group import Group, GroupError, LocalGroup
from paceline.consumer.job import RankJob
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


def make_rows(folder: Path, count: int = 40, seed: int = 0) -> Rows:
    """Rows of 8 to 24 tokens; the second half of each is supervised."""
    draw = np.random.default_rng(seed)
    with RowsWriter(folder) as writer:
        for _ in range(count):
            length = int(draw.integers(8, 25))
            mask = (np.arange(length) >= length // 2).astype(np.uint8)
            writer.add(draw.integers(4, 500, length).astype(np.int32), mask)
        writer.finish({})
    return Rows.open(folder)


def make_plan(rows: Rows, **changes: Any) -> Plan:
    spec = PlanSpec(rows.digest, seed=0, token_budget=64, max_length=24, packer="first-fit", held_out=4)
    options: dict[str, Any] = {"batches_per_step": 2, "epochs": 1} | changes
    return Plan(spec, rows.lengths, **options)


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
    ring: Ring,
    meta: RecordMeta,
    states: np.ndarray | None = None,
    checksum: int | None = None,
    harm: Callable[[memoryview], None] = lambda payload: None,
) -> tuple[int, int]:
    """Write a record into a free slot of `ring`; returns (slot, seq). `harm` changes it after its checksum is taken."""
    slot = ring.claim(meta.batch)
    assert slot is not None, "no free slot"
    if states is None:
        states = stamp(meta.tokens, meta.cu_seqlens, meta.planes, meta.hidden_size)
    offset, length = record.write_meta(slot.payload, meta), record.record_bytes(meta)
    slot.payload[offset:length] = states.tobytes()
    checksum = record.checksum(slot.payload, length) if checksum is None else checksum
    harm(slot.payload[:length])
    ring.commit(slot, length, checksum)
    return slot.index, slot.seq


@dataclass
class Gaps:
    """Before each record but a phase's first one the device was idle for `idle` seconds, or for ever."""

    idle: float = float("inf")
    records: int = 0

    def begin(self) -> None:
        self.records += 1

    def end(self) -> None:
        return

    def take(self) -> list[float]:
        found, self.records = [self.idle] * (self.records - 1), 0
        return found


@dataclass
class SumLearner:
    """Learns one number: w += rate · (mean stamped state − w), with the mean over a step's tokens on all ranks."""

    seconds: float = 0.0  # per record
    eval_seconds: float = 0.0
    save_seconds: float = 0.0  # of writing a checkpoint
    poison: list[int] = field(default_factory=list)  # batch ids (packed) whose loss is NaN
    explode: str = ""  # what the first record's error says
    refuse: str = ""  # why it cannot be made by this run file
    weight: float = 0.0
    steps: int = 0
    gaps: Gaps = field(default_factory=Gaps)
    _sums: np.ndarray = field(default_factory=lambda: np.zeros(2))

    def __post_init__(self) -> None:
        if self.refuse:
            raise ConfigError(self.refuse)

    def _read(self, meta: RecordMeta, states: memoryview, seconds: float) -> np.ndarray:
        time.sleep(seconds)
        if self.explode:
            raise RuntimeError(self.explode)
        found = np.frombuffer(states, np.float32).reshape(meta.states_shape)
        wanted = stamp(meta.tokens, meta.cu_seqlens, meta.planes, meta.hidden_size)
        if not np.array_equal(found, wanted):
            raise AssertionError(f"record of batch {BatchId.unpack(meta.batch)} holds other states")
        value = float("nan") if meta.batch in self.poison else float(found.sum(dtype=np.float64))
        return np.array([value / found.size * len(meta.tokens), len(meta.tokens)])

    def prepare(self, meta: RecordMeta, states: memoryview, epoch: int | None) -> None:
        pass

    def train_record(self, meta: RecordMeta, states: memoryview, epoch: int, done: float = 0.0) -> None:
        self._sums += self._read(meta, states, self.seconds)

    def sums(self) -> np.ndarray:
        return self._sums.copy()

    def reduce(self, group: Any) -> None:
        return

    def reduce_seconds(self) -> float:
        return 0.001

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
        self._sums += self._read(meta, states, self.eval_seconds)

    def eval_metrics(self, total: np.ndarray) -> dict[str, Any]:
        return {"tau": 1.0, "tau_chain": 1.0 + self.steps / 100, "eval_tokens": float(total[1])}

    def drafter_config(self) -> dict[str, Any]:
        return {"kind": "sum"}

    def peak_memory(self) -> tuple[int, int]:
        return 1 << 20, 1 << 21

    def map_ring(self, address: int, size: int) -> None:
        return

    def unmap_ring(self, address: int, size: int) -> None:
        return

    def snapshot(self) -> ck.Write:
        model, optimizer = {"weight": np.array([self.weight])}, {"steps": np.array([self.steps])}

        def write(folder: Path) -> None:
            time.sleep(self.save_seconds)
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
            server.bind(_address(path))
            server.listen(world)
            peers = [server.accept()[0] for _ in range(world - 1)]
            self._peers = [peer for _, peer in sorted((_read_object(peer), peer) for peer in peers)]
        else:
            self._peers = [_connect(path)]
            _write_object(self._peers[0], rank)

    def all_gather(self, value: Any) -> list[Any]:
        try:
            return self._gather(value)
        except OSError as error:  # of a peer that died with something unread
            raise GroupError("the other rank is gone") from error

    def _gather(self, value: Any) -> list[Any]:
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


def _address(path: Path) -> str:
    """An abstract one for the path, which may be longer than a socket's name."""
    return "\0" + hashlib.sha256(str(path).encode()).hexdigest()


def _connect(path: Path, patience: float = 30.0) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(_address(path))
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
            raise GroupError("the other rank is gone")
        data += piece
    return data


# Whole processes, forked (forking.py) ---------------------------------------------------------------------------------


def facts_of(run: RunFile, alive: Any = None) -> RunFacts:
    """What `describe` says of a run on stamped states: no target is asked."""
    assert run.data.rows is not None
    rows = Rows.open(run.data.rows)
    fields: dict[str, str | int] = {
        "dataset": rows.digest,
        "seed": run.trainer.seed,
        "token_budget": run.stream.token_budget,
        "batches_per_step": run.trainer.batches_per_step,
    }
    return RunFacts(run.data.rows, fields, list(LAYERS), HIDDEN)


def trainer_process(run: str, resume: str | None = None) -> int:
    """The trainer's main process on stand-ins; afterwards torch must not have been imported."""
    fork_ranks_from_here(rank_process, lambda number: os.environ.get(faults.VARIABLE, ""))
    code = trainer.main(RunFile.model_validate_json(run), resume, describe=facts_of)
    assert "torch" not in sys.modules
    return code


def rank_process() -> int:
    options = json.loads(os.environ.get("STANDIN_LEARNER", "{}"))

    def group(job: RankJob) -> Group:
        return LocalGroup() if job.world == 1 else SocketGroup(job.rank, job.world, Path(job.store))

    code = rank.main(lambda job, run, rows: SumLearner(**options), group)
    assert "torch" not in sys.modules
    return code


@dataclass
class Worker:
    """A worker that stamps. `harm`: "zero" writes zeros instead; `seconds` for each record. Without `marker` it does
    not look for the marker of a finished run: it leaves when it is told."""

    run: RunFile
    index: int
    seconds: float = 0.0
    harm: str = ""
    marker: bool = True

    def main(self) -> int:
        self._before = marker(self.run)
        name, facts = f"w{self.index}", facts_of(self.run)
        rows = Rows.open(facts.rows)
        self._plan, self._rows, fingerprint = plan_from(self.run, rows), rows, Fingerprint(facts.fingerprint)
        self._expected = replace(EXPECTED, fingerprint=fingerprint.digest)
        budget = self.run.stream.token_budget
        size = record.slot_bytes(budget, record.max_rows(budget), len(LAYERS), HIDDEN, "float32")
        path = paths.ring_dir(self.run) / f"{name}.ring"
        self._ring = Ring.open(path, worker=name, fingerprint=fingerprint, slots=self.run.stream.slots, slot_bytes=size)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(paths.feed_address(self.run))
        self._queue: dict[int, None] = {}
        self._feed, self._said = 0, 0.0
        self._send(wire.Hello(name, self._ring.incarnation, ()))
        while not (
            (self.marker and is_finished(self.run, self._before)) or self._ring.retired or self._ring.vanished()
        ):
            if self._turn():
                break
        return 0

    def _turn(self) -> bool:
        """Hear, say, make one record; True when told to stop."""
        if time.monotonic() - self._said > 0.3:
            self._said = time.monotonic()
            self._send(wire.Want(self._ring.worker, self._ring.incarnation, tuple(self._queue), 0.0, 1000.0))
        slot_free = any(view.state is SlotState.FREE for view in self._ring.states())
        if self._socket.poll(0 if self._queue and slot_free else 20):
            message = wire.decode(self._socket.recv())
            if isinstance(message, wire.StopWorker):
                return True
            if isinstance(message, wire.Work) and message.incarnation == self._ring.incarnation:
                if message.feed != self._feed:
                    self._feed = message.feed
                    self._queue.clear()
                self._queue |= dict.fromkeys(item.batch for item in message.items)
        elif self._queue and slot_free:
            self._make(min(self._queue))
        return False

    def _make(self, word: int) -> None:
        time.sleep(self.seconds)
        meta = make_meta(self._plan, self._rows, BatchId.unpack(word), self._expected)
        states = np.zeros(meta.states_shape, np.float32) if self.harm == "zero" else None
        slot, seq = commit(self._ring, meta, states)
        del self._queue[word]
        self._said = 0.0
        self._send(wire.Ready(self._ring.worker, self._ring.incarnation, slot, seq, word))

    def _send(self, message: wire.Message) -> None:
        try:
            self._socket.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return


def worker_process(run: str, index: str) -> int:
    options = json.loads(os.environ.get("STANDIN_WORKER", "{}"))
    return Worker(RunFile.model_validate_json(run), int(index), **options).main()


if __name__ == "__main__":
    serve({"trainer": trainer_process, "worker": worker_process})
