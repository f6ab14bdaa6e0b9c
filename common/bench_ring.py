"""The ring against memcpy, and the time of an announcement, between two processes; `paceline bench stream`.

One process copies records into slots; the other reads two bytes of each in place (touch), or copies it out (copy), or
checks its checksum, which the producer then also computes (sum). memcpy is one process copying between warm anonymous
buffers. All take turns, round by round, and each is judged by its best round: on a busy machine noise only slows.
Latency is one small record's whole way: claim, commit, announcement over ZeroMQ, take and release, acknowledgement;
beside it stands a bare ZeroMQ round trip of the same messages. Where iceoryx2 is installed, its shared-memory
publisher moves the same records.
"""

import ctypes
import multiprocessing
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

from .errors import ConfigError
from .fingerprint import Fingerprint
from .record import checksum
from .ring import Ring, RingReader

try:
    import iceoryx2
except ImportError:  # no wheel for this machine: measured without
    iceoryx2 = None

iox2: Any = iceoryx2
SLOTS = 4
SERVICE = "paceline/benchmark"


def pack(kind: str, **fields: Any) -> Any:
    """A message in the form of common/wire.py's."""
    return msgpack.packb({"v": 1, "t": kind, **fields})


def consume(folder: Path, record_bytes: int) -> None:
    """The reading process: does what each message asks for and answers it, until told to stop."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(f"ipc://{folder}/socket")
    readers = {name: RingReader.open(folder / f"{name}.ring") for name in ("w0", "w1")}
    for reader in readers.values():
        reader.prefault()
    subscriber = None if iox2 is None else _iceoryx_service().subscriber_builder().create()
    out = np.ones(record_bytes, np.uint8)
    while True:
        peer, data = socket.recv_multipart()
        message = msgpack.unpackb(data)
        if message["t"] == "stop":
            return
        if message["t"] == "echo":
            pass
        elif message["t"] == "iceoryx":
            for _ in range(message["count"]):
                _read_iceoryx(subscriber, message["mode"], out)
        else:
            _read_ring(readers[message["ring"]], message, out)
        socket.send_multipart([peer, pack("done")])


def _read_ring(reader: RingReader, message: dict[str, Any], out: np.ndarray) -> None:
    slot = reader.slot(message["slot"])
    if not reader.take(slot.index, message["seq"], trainer=1):
        raise RuntimeError("the record announced is not there")
    payload = reader.payload(slot)
    if message["mode"] == "sum" and checksum(payload, slot.length) != slot.checksum:
        raise RuntimeError("checksum does not match")
    _use(np.frombuffer(payload, np.uint8), message["mode"], out)
    reader.release(slot.index, slot.seq)


def _read_iceoryx(subscriber: Any, mode: str, out: np.ndarray) -> None:
    while (sample := subscriber.receive()) is None:
        time.sleep(20e-6)
    _use(np.frombuffer(sample.payload().as_memory_view(), np.uint8), mode, out)
    sample.delete()


def _use(data: np.ndarray, mode: str, out: np.ndarray) -> None:
    if mode == "copy":
        np.copyto(out[: len(data)], data)
    else:
        out[0], out[1] = data[0], data[-1]


def _iceoryx_service() -> Any:
    iox2.set_log_level(iox2.LogLevel.Error)
    node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
    service = node.service_builder(iox2.ServiceName.new(SERVICE)).publish_subscribe(iox2.Slice[ctypes.c_uint8])
    return service.enable_safe_overflow(False).subscriber_max_buffer_size(SLOTS - 1).open_or_create()


class Producer:
    """The writing process: each method moves `count` records and returns when all are acknowledged."""

    def __init__(self, folder: Path, record_bytes: int) -> None:
        fingerprint = Fingerprint({"benchmark": "ring"})
        self.ring = Ring.open(
            folder / "w0.ring", worker="w0", fingerprint=fingerprint, slots=SLOTS, slot_bytes=record_bytes
        )
        self.small = Ring.open(folder / "w1.ring", worker="w1", fingerprint=fingerprint, slots=SLOTS, slot_bytes=4096)
        self.socket = zmq.Context().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{folder}/socket")
        self.source = np.random.default_rng(0).integers(0, 255, record_bytes, np.uint8)
        self.target = np.ones(record_bytes, np.uint8)
        self.publisher = None
        if iox2 is not None:
            self.publisher = _iceoryx_service().publisher_builder().initial_max_slice_len(record_bytes).create()

    def memcpy(self, count: int) -> None:
        for _ in range(count):
            np.copyto(self.target, self.source)

    def move(self, ring: Ring, mode: str, count: int) -> None:
        """Through a ring; waits for acknowledgements only when no slot is free."""
        unanswered = 0
        for batch in range(count):
            while (slot := ring.claim(batch)) is None:
                self.socket.recv()
                unanswered -= 1
            length = min(len(self.source), ring.slot_bytes)
            np.copyto(np.frombuffer(slot.payload, np.uint8, length), self.source[:length])
            ring.commit(slot, length, checksum(slot.payload, length) if mode == "sum" else 0)
            self.socket.send(pack("ready", ring=ring.worker, mode=mode, slot=slot.index, seq=slot.seq, batch=batch))
            unanswered += 1
        for _ in range(unanswered):
            self.socket.recv()

    def iceoryx(self, mode: str, count: int) -> None:
        if self.publisher is None:
            return
        self.socket.send(pack("iceoryx", mode=mode, count=count))
        for _ in range(count):
            sample = self.publisher.loan_slice_uninit(len(self.source))
            np.copyto(np.frombuffer(sample.payload().as_memory_view(), np.uint8), self.source)
            sample.assume_init().send()
        self.socket.recv()

    def latencies_us(self, count: int) -> list[tuple[float, float]]:
        """(a small record from claim to acknowledgement, a bare round trip), one after the other."""
        echo = pack("echo", ring="w1", mode="touch", slot=0, seq=1 << 50, batch=0)
        found = []
        for _ in range(count):
            start = time.perf_counter()
            self.move(self.small, "touch", 1)
            moved = time.perf_counter()
            self.socket.send(echo)
            self.socket.recv()
            found.append(((moved - start) * 1e6, (time.perf_counter() - moved) * 1e6))
        return found

    def stop(self) -> None:
        self.socket.send(pack("stop"))


def measure(
    record_bytes: int, rounds: int, ring_dir: Path, messages: int = 3000
) -> tuple[dict[str, list[float]], list[tuple[float, float]]]:
    """GB/s of each round by name, and latencies in microseconds. ConfigError where the rings do not fit."""
    try:
        ring_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(prefix="bench-ring-", dir=ring_dir))
    except OSError as error:
        raise ConfigError(f"{ring_dir}: {error.strerror}; give --ring-dir") from None
    try:
        return _measure(folder, record_bytes, rounds, messages)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(
    folder: Path, record_bytes: int, rounds: int, messages: int
) -> tuple[dict[str, list[float]], list[tuple[float, float]]]:
    producer = Producer(folder, record_bytes)
    consumer = multiprocessing.get_context("spawn").Process(target=consume, args=(folder, record_bytes), daemon=True)
    consumer.start()
    ways: dict[str, Callable[[int], None]] = {"memcpy": producer.memcpy}
    for mode in ("touch", "copy", "sum"):
        ways[f"ring {mode}"] = lambda count, mode=mode: producer.move(producer.ring, mode, count)
        if iox2 is not None and mode != "sum":
            ways[f"iceoryx2 {mode}"] = lambda count, mode=mode: producer.iceoryx(mode, count)
    speeds: dict[str, list[float]] = defaultdict(list)
    count = max(2 * SLOTS, (512 << 20) // record_bytes)
    try:
        for way in ways.values():
            way(2 * SLOTS)  # first touch of every slot and chunk
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way(count)
                speeds[name].append(count * record_bytes / (time.perf_counter() - start) / 1e9)
        producer.latencies_us(messages // 10)
        latencies = producer.latencies_us(messages)
        producer.stop()
        consumer.join(10)
    finally:
        consumer.kill()
    return speeds, latencies
