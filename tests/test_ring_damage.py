"""Rings that are not what they were: adopted, replaced or refused with a reason, also under a running feed.

Damage is drawn by seed: random bytes in the header, the slot words and the payloads, files truncated, extended, removed
or replaced. Nothing crashes, and no record is trained but the one that its worker wrote.
"""

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from paceline.common import ring_layout, wire
from paceline.common.batch import BatchId, Kind
from paceline.common.errors import ConfigError
from paceline.common.fingerprint import Fingerprint
from paceline.common.plan import Plan
from paceline.common.record import max_rows, slot_bytes
from paceline.common.ring import Ring, RingForeign, RingInvalid, RingReader, SlotState
from paceline.common.rows import Rows
from paceline.common.runfile import RunFile
from paceline.consumer import feed as feed_module
from paceline.consumer import feeder as feeder_module
from paceline.consumer import source as source_module
from paceline.consumer.check import RecordCheck
from paceline.consumer.feed import Phase
from paceline.consumer.feeder import Feeder
from paceline.consumer.ledger import Ledger
from paceline.consumer.source import RecordSource, TornRecord
from pair import toy_settings
from standins import EXPECTED, HIDDEN, LAYERS, SumLearner, commit, make_meta, make_plan, make_rows

FINGERPRINT = Fingerprint({"run": "x"})
SLOTS = 3
SLOT_BYTES = slot_bytes(64, max_rows(64), len(LAYERS), HIDDEN, "float32")
TABLE_END = ring_layout.TABLE_OFFSET + SLOTS * ring_layout.SLOT_WORDS * 8


def open_ring(path: Path, **changes: object) -> Ring:
    named = {"worker": path.stem, "fingerprint": FINGERPRINT, "slots": SLOTS, "slot_bytes": SLOT_BYTES}
    return Ring.open(path, **(named | changes))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = Path("/dev/shm") / f"paceline-test-{os.getpid()}-{tmp_path.name[:20]}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return make_rows(tmp_path_factory.mktemp("rows") / "rows", count=100)


@pytest.fixture(scope="module")
def plan(rows: Rows) -> Plan:
    return make_plan(rows, epochs=12, eval_every=20)


def scribble(draw: random.Random, path: Path, start: int, end: int) -> None:
    """A few bytes between `start` and `end` become others."""
    width = draw.choice((1, 4, 8, 64))
    data = draw.choice((bytes(width), draw.randbytes(width), b"\xff" * width))
    with path.open("r+b") as file:
        file.seek(draw.randrange(start, end))
        file.write(data)


# Nobody looks while it happens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_ring_is_adopted_whole_or_replaced(folder: Path, plan: Plan, rows: Rows, seed: int):
    """A hundred damaged rings each: what their owner adopts is what it once committed, and it can go on."""
    draw, path, kept = random.Random(seed), folder / "w0.ring", 0
    ring = open_ring(path)
    metas = [make_meta(plan, rows, BatchId(Kind.TRAIN, 0, index)) for index in range(2)]
    for meta in metas:
        commit(ring, meta)
    assert ring.claim(9) is not None
    ring.close()
    whole = path.read_bytes()
    check = RecordCheck(plan, rows, EXPECTED)
    for _ in range(100):
        path.write_bytes(whole)
        scribble(draw, path, *draw.choice([(0, 1024), (0, 4096), (4096, TABLE_END)]))
        if draw.random() < 0.1:
            os.truncate(path, draw.randrange(len(whole) + 4096))
        try:
            ring = open_ring(path)
        except ConfigError as error:  # another fingerprint, or not recognisable as a ring any more
            assert str(path) in str(error)
            path.unlink()
            continue
        reader = RingReader.open(path)
        for slot in reader.scan().slots:
            if slot.state is SlotState.READY:
                check(reader.payload(slot), BatchId.unpack(slot.batch))
                kept += 1
                assert reader.release(slot.index, slot.seq)
        assert commit(ring, metas[0])[1] > 0
        reader.close()
        ring.close()
        path.unlink()
    assert kept > 20


@pytest.mark.parametrize("size", [0, 100, 4096, 4096 + 64, 8192, 8192 + SLOT_BYTES, 4096 * 100])
def test_a_ring_truncated_under_both_sides_is_refused(folder: Path, plan: Plan, rows: Rows, size: int):
    """No SIGBUS: a word is only looked at where the file still is."""
    ring = open_ring(folder / "w0.ring")
    reader = RingReader.open(ring.path)
    slot, seq = commit(ring, make_meta(plan, rows, BatchId(Kind.TRAIN, 0, 0)))
    assert ring.claim(2) is not None
    os.truncate(ring.path, size)
    for look in (reader.scan, ring.states, lambda: ring.claim(1), lambda: ring.retired, ring.abandon_all):
        with pytest.raises(RingInvalid, match=r"w0\.ring: "):
            look()
    for act in (reader.holds, reader.release, lambda slot, seq: reader.take(slot, seq, 7)):
        with pytest.raises(RingInvalid, match="truncated"):
            act(slot, seq)
    ring.close()
    assert open_ring(ring.path).ring_id != ring.ring_id


def test_a_ring_of_another_user_is_refused_by_both_sides(folder: Path):
    if os.geteuid():
        pytest.skip("only root can give a file away")
    path = folder / "w0.ring"
    open_ring(path).close()
    os.chown(path, 12345, -1)
    with pytest.raises(RingForeign, match="belongs to uid 12345, this is uid 0"):
        RingReader.open(path)
    with pytest.raises(ConfigError, match="belongs to uid 12345, this is uid 0: move it away"):
        open_ring(path)


def test_what_a_kill_left_half_made_goes_when_the_old_ring_is_adopted(folder: Path):
    """Killed while it replaced its ring by a larger one; then the setting was put back."""
    path = folder / "w0.ring"
    first = open_ring(path)
    first.close()
    path.with_name("w0.ring.tmp").write_bytes(bytes(1 << 16))
    again = open_ring(path)
    assert again.ring_id == first.ring_id
    assert [one.name for one in folder.iterdir()] == ["w0.ring"]


# Under a running feed -----------------------------------------------------------------------------------------------


class SmallWorker:
    """A worker without a process: one turn at a time, in the test's thread. Starts again whatever its ring became."""

    def __init__(self, world: "World", name: str) -> None:
        self._world, self.path = world, world.folder / f"{name}.ring"
        self._socket = world.context.socket(zmq.DEALER)
        self._socket.connect(f"ipc://{world.run_dir}/feed.sock")
        self._queue: set[int] = set()
        self._said = 0.0
        self.starts = 0
        self._start()

    def _start(self) -> None:
        try:
            self.ring = open_ring(self.path)
        except ConfigError:  # what is no ring any more is for its user to move away
            self.path.unlink()
            self.ring = open_ring(self.path)
        self.starts += 1
        self._queue.clear()
        self._say(wire.Hello(self.path.stem, self.ring.incarnation, ()))

    def turn(self) -> None:
        try:
            self._hear()
            self._make()
            if time.monotonic() - self._said > 0.02:
                self._say(wire.Want(self.path.stem, self.ring.incarnation, tuple(self._queue), 0.0, 1000.0))
            if self.ring.vanished():
                raise RingInvalid("it vanished")
        except RingInvalid:
            self.ring.close()
            self._start()

    def _hear(self) -> None:
        while self._socket.poll(0):
            message = wire.decode(self._socket.recv())
            if isinstance(message, wire.Work) and message.incarnation == self.ring.incarnation:
                committed = {slot.batch for slot in self.ring.states() if slot.state is SlotState.READY}
                self._queue |= {item.batch for item in message.items} - committed

    def _make(self) -> None:
        free = any(slot.state is SlotState.FREE for slot in self.ring.states())
        if self._queue and free:
            batch = min(self._queue)
            commit(self.ring, self._world.meta(batch), harm=self._world.harm)
            self._queue.discard(batch)
            self._say(wire.Ready(self.path.stem, self.ring.incarnation, 0, 1, batch))

    def _say(self, message: wire.Message) -> None:
        self._said = time.monotonic()
        self._socket.send(wire.encode(message))

    def close(self) -> None:
        self.ring.close()


class World:
    """A trainer of one rank, three workers, and damage: the feeder and the rank's end are the real ones."""

    def __init__(self, folder: Path, plan: Plan, rows: Rows, seed: int) -> None:
        self.folder, self.run_dir = folder / "rings", folder / "run"
        for path in (self.folder, self.run_dir):
            path.mkdir(mode=0o700)
        self._plan, self._rows, self._draw = plan, rows, random.Random(seed)
        self.context = zmq.Context()
        self.context.linger = 0
        self._settings = RunFile.model_validate({**toy_settings(folder), "name": "x"})
        self.ledger = Ledger()
        self.phase: Phase | None = Phase(Kind.TRAIN, 0)
        self.damaged = self.harmed = self.trainers = 0
        self._start_trainer()
        self.workers = [SmallWorker(self, f"w{index}") for index in range(3)]

    def meta(self, batch: int):
        return make_meta(self._plan, self._rows, BatchId.unpack(batch))

    def _start_trainer(self) -> None:
        self.trainers += 1
        phase = self.phase
        self._feeder = Feeder(
            self._settings,
            self._plan,
            self.ledger,
            phase,
            trainer=self.trainers,
            fingerprint=FINGERPRINT,
            ring_dir=self.folder,
            run_dir=self.run_dir,
        )
        self._feeder.start()
        self._source = RecordSource(
            rank=0,
            trainer=self.trainers,
            address=f"ipc://{self.run_dir}/ranks.sock",
            ring_dir=self.folder,
            check=RecordCheck(self._plan, self._rows, EXPECTED),
            phase=phase,
            next_phase=self._plan.next_phase,
            skip_limit=1 << 30,
        )
        self._source.start()

    def _stop_trainer(self) -> None:
        self._source.close()
        self._feeder.stop()

    def close(self) -> None:
        self._stop_trainer()
        for worker in self.workers:
            worker.close()
        self.context.destroy(linger=0)

    # Damage

    def harm(self, payload: memoryview) -> None:
        """Between a record's checksum and its commit."""
        if self._draw.random() < 0.1:
            at = self._draw.randrange(len(payload))
            payload[at] ^= self._draw.randint(1, 255)
            self.harmed += 1

    def _damage(self) -> None:
        draw, worker = self._draw, self._draw.choice(self.workers)
        path = worker.path
        self.damaged += 1
        match draw.randrange(6):
            case 0 | 1:
                scribble(draw, path, 0, 4096)
            case 2 | 3:
                scribble(draw, path, 4096, TABLE_END)
            case 4:
                path.unlink()
                if draw.random() < 0.5:
                    path.write_bytes(draw.randbytes(draw.choice([0, 100, 8192])))
            case _:
                self._resize(worker)

    def _resize(self, worker: SmallWorker) -> None:
        """Only a ring that nobody reads a payload of: a copy out of a file that shrinks meanwhile ends in SIGBUS."""
        size = worker.path.stat().st_size
        try:
            empty = all(slot.state is not SlotState.READY for slot in worker.ring.states())
        except RingInvalid:
            return
        os.truncate(worker.path, self._draw.randrange(size) if empty else size + 4096)

    # Training

    def _waiting(self) -> None:
        self._feeder.check()
        for worker in self.workers:
            worker.turn()
        if self._draw.random() < 0.5:
            self._damage()

    def step(self) -> None:
        """One phase, to its end or to a record that changed while it was read: then another trainer takes over."""
        phase, learner = self.phase, SumLearner()
        assert phase is not None
        trained: list[BatchId] = []
        try:
            while (record := self._source.next(phase, self._waiting)) is not None:
                learner.train_record(record.meta, record.states, 0)
                self._source.release(record)
                trained.append(record.batch)
        except TornRecord:
            self._stop_trainer()
            self._start_trainer()
            return
        listed = dict(self._source.listed(phase))
        if phase.kind is Kind.TRAIN:
            assert len(trained) + len(listed) == self._plan.step_batches(phase.number)
            self.ledger.record(trained, listed)
        words = tuple(batch.pack() for batch in trained)
        reasons = tuple(wire.Listed(batch.pack(), reason) for batch, reason in listed.items())
        self._source.done(wire.Done(0, self.trainers, int(phase.kind), phase.number, words, reasons, {}))
        self._source.leave(phase)
        following = self._plan.next_phase(*phase)
        self.phase = None if following is None else Phase(*following)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_rings_damaged_under_a_running_feed(
    folder: Path, plan: Plan, rows: Rows, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(source_module, "_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(source_module, "RESEND_SECONDS", 0.05)
    monkeypatch.setattr(source_module, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(feeder_module, "RESCAN_S", 0.02)
    monkeypatch.setattr(feed_module, "RESEND_AFTER_S", 0.05)
    world = World(folder, plan, rows, seed)
    until = time.monotonic() + 120
    try:
        while world.phase is not None:
            world.step()
            assert time.monotonic() < until, "the run does not come to its end"
    finally:
        world.close()
    assert world.ledger.complete(plan)
    assert world.ledger.trained_count() > 0.8 * plan.total_batches, "what was damaged is made again"
    assert world.damaged > 40 and world.harmed > 5, "hundreds over the seeds; how many, the clock decides"
    assert sum(worker.starts for worker in world.workers) > 10
