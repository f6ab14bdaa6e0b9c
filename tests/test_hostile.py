"""Hostile bytes on every socket: each message that is none is counted, the process lives, and its state is as before.

Over 100,000 messages: noise, damaged and retyped messages, sizes that lie, integers beyond 63 bits, stale messages of
other incarnations and trainers, true ones said again. The feeder, the worker and the rank's end are the real ones.
"""

import logging
import pickle
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from feed_world import train as train_word
from paceline.common import paths, wire
from paceline.common.batch import BatchId, Kind
from paceline.common.fingerprint import Fingerprint
from paceline.common.record import max_rows, slot_bytes
from paceline.common.ring import Ring, RingReader, SlotState
from paceline.common.runfile import RunFile
from paceline.consumer.check import RecordCheck
from paceline.consumer.feeder import Feeder
from paceline.consumer.source import RecordSource
from paceline.producer import worker as worker_module
from pair import StampSource, toy_settings, write_toy
from standins import EXPECTED, HIDDEN, LAYERS, commit, make_meta, make_plan, make_rows
from test_feeder import TRAINER, Stage, make, want
from waiting import until

SECONDS = 30_000  # milliseconds that an answer may take on a loaded machine

ODD: list[Any] = [
    *(None, True, -1, 2**63, 2**64 - 1, 1.5, float("nan"), float("inf"), -float("inf"), 1e308),
    *("", "x" * 2000, "../../etc/passwd", "w0\0", b"", b"\xff" * 10, [], [[]], [None], {}, {"a": 1}),
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(2**33, 5), [2**64 - 1] * 100),
]

BOMBS = [
    *(b"", b"\xc1", b"\x81\x01\x02", pickle.dumps({"v": 1}), bytes(1000)),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xffabc"),
    *(b"\x91" * 5000, b"\x81\xa1v" * 3000, b"\x81\xa1v\x01" * 2, b"\xc7\x04\xff\xff\xff\xff\xff", b"\xd8" * 40),
]


def hostile(draw: random.Random, stale: Sequence[wire.Message], said: Sequence[wire.Message]) -> list[bytes]:
    """The frames of one message that must change nothing. `stale`: well-formed, of others. `said`: heard before."""
    whole = wire.encode(draw.choice(stale))
    match draw.randrange(9):
        case 0:
            return [draw.randbytes(draw.randrange(200))]
        case 1:
            data = bytearray(whole)
            for _ in range(draw.randint(1, 8)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            return [bytes(data)]
        case 2:
            cut = draw.randrange(len(whole))
            return [draw.choice([whole[:cut], whole[cut:], whole + whole, whole[:cut] + draw.randbytes(9)])]
        case 3:
            return [_repacked(draw, whole, lambda body, name: body.__setitem__(name, draw.choice(ODD)))]
        case 4:
            return [_repacked(draw, whole, lambda body, name: body.pop(name))]
        case 5:
            return [_repacked(draw, whole, lambda body, name: body.__setitem__(name + "x", draw.choice(ODD)))]
        case 6:
            return [draw.choice(BOMBS)]
        case 7:
            return [draw.choice([whole, b""]) for _ in range(draw.randint(2, 40))]
        case _:
            return [wire.encode(draw.choice([*stale, *said]))]


def _repacked(draw: random.Random, whole: bytes, change: Any) -> bytes:
    body = msgpack.unpackb(whole)
    change(body, draw.choice(list(body)))
    return msgpack.packb(body) or b""


def malformed(frames: Sequence[bytes], kinds: Any) -> bool:
    """Whether a socket for messages of these kinds has to count the message as none."""
    try:
        return len(frames) != 1 or not isinstance(wire.decode(frames[0]), kinds)
    except wire.WireError:
        return True


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Whatever is left open is closed, also after a failure."""
    with ExitStack() as stack:
        yield stack


# The feeder's sockets ------------------------------------------------------------------------------------------------


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def state_of(feeder: Feeder) -> Any:
    """All that the feeder's decisions rest on, but for who is reached where and when."""
    state = feeder._state
    return (
        state.ledger.to_json(),
        state.phase,
        sorted(state._assignments),
        {phase: list(grants) for phase, grants in state._grants.items()},
        dict(state._requests),
        dict(state._refusals),
        set(state._lagging),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("socket", "messages"), [("feed.sock", 40_000), ("ranks.sock", 30_000)])
def test_the_feeder(stage: Stage, socket: str, messages: int, caplog: pytest.LogCaptureFixture):
    feeder = stage.feeder()
    ring = stage.ring()
    worker, rank = stage.worker(ring), stage.rank()
    batches = sorted(item.batch for item in worker.hear(wire.Work).items)
    rank.say(want(0, 0))
    make(ring, batches[0])
    worker.say(wire.Want("w0", ring.incarnation, tuple(batches[1:]), 0.0, 1000.0))
    assert rank.hear(wire.Take).batch == batches[0]
    rank.say(want(0, 1))
    # There is a state that could change.
    until(lambda: feeder.snapshot().waiting_ranks == (0,) and all(state_of(feeder)[2:5]))
    before = state_of(feeder)

    of_workers = [
        wire.Hello("w0", ring.incarnation + 1, (1, 2)),
        wire.Hello("w7", 5, ()),
        wire.Want("w0", ring.incarnation + 1, tuple(batches), 5.0, 1e300),
        wire.Ready("w0", ring.incarnation - 1, 0, 1, batches[1]),
        wire.Bye("w0", ring.incarnation + 1),
        wire.Bye("../w0", 1),
    ]
    of_ranks = [
        wire.RankHello(0, TRAINER + 1),
        wire.RankHello(2**62, TRAINER),
        wire.RankWant(0, TRAINER + 1, 1, 0, 1),
        wire.RankWant(0, TRAINER, 1, 2**62, 0),
        wire.RankWant(0, TRAINER, 9, 0, 0),
        wire.Refused(0, TRAINER + 1, 1, 0, 0, batches[0], "no"),
        wire.Done(0, TRAINER + 1, 1, 0, tuple(batches[:2]), (), {"loss": 1.0}),
        wire.Done(0, TRAINER, 1, 1, (train_word(0, 2), train_word(0, 3)), (), {}),
    ]
    stale, kinds, said = {
        "feed.sock": (of_workers, feeder_hears_workers, [wire.Hello("w0", ring.incarnation, ())]),
        "ranks.sock": (of_ranks, feeder_hears_ranks, [want(0, 0), wire.RankHello(0, TRAINER)]),
    }[socket]
    draw, enemies, expected = random.Random(socket), [stage.peer(socket) for _ in range(4)], 0
    with caplog.at_level(logging.CRITICAL):
        for _ in range(messages):
            frames = hostile(draw, stale, said)
            expected += malformed(frames, kinds)
            draw.choice(enemies).socket.send_multipart(frames)
        until(lambda: feeder.snapshot().counters["malformed"] == expected, 120)
        for _ in range(20):  # the connection of one who sends too much is closed
            stage.peer(socket).socket.send(bytes(wire.MAX_BYTES + draw.randint(1, 1 << 22)))
        stage.peer(socket).socket.send_multipart([b"x"] * 20_000)
        until(lambda: feeder.snapshot().counters["malformed"] == expected + 1)
    assert expected > messages / 2
    feeder.check()
    assert state_of(feeder) == before

    make(ring, batches[1])  # and the run goes on
    worker.say(wire.Want("w0", ring.incarnation, tuple(batches[2:]), 0.0, 1000.0))
    rank.say(want(0, 1))
    assert rank.hear(wire.Take).batch == batches[1]


feeder_hears_workers = wire.Hello | wire.Want | wire.Ready | wire.Bye
feeder_hears_ranks = wire.RankHello | wire.RankWant | wire.Refused | wire.Done


# A worker's socket ---------------------------------------------------------------------------------------------------


class Liar:
    """In the feed's place: a ROUTER that waits rather than drop what it sends."""

    def __init__(self, address: str):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(address)
        self.peer = b""

    def hear(self, kind: type, **fields: Any) -> Any:
        while True:
            assert self.socket.poll(SECONDS), f"no {kind.__name__} heard"
            self.peer, data = self.socket.recv_multipart()
            message = wire.decode(data)
            if isinstance(message, kind) and all(getattr(message, key) == value for key, value in fields.items()):
                return message

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.peer, *frames])
        while self.socket.poll(0):
            self.peer = self.socket.recv_multipart()[0]

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "run"))
    write_toy(tmp_path)
    return RunFile.model_validate(toy_settings(tmp_path))


def test_a_worker(run: RunFile, stack: ExitStack, caplog: pytest.LogCaptureFixture):
    liar = Liar(paths.feed_address(run))
    stack.callback(liar.close)
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(worker_module.main(run, 0, source=StampSource(run))), daemon=True
    )
    thread.start()
    incarnation = liar.hear(wire.Hello).incarnation
    # Three batches and two slots: the third stays in hand.
    items = tuple(wire.WorkItem(train_word(0, index), (2 * index, 2 * index + 1)) for index in range(3))
    work = wire.Work(incarnation, 5, items)
    liar.say(wire.encode(work))
    liar.hear(wire.Want, held=(items[2].batch,))
    reader = RingReader.open(paths.ring_dir(run) / "w0.ring")
    before = reader.scan()
    assert sum(slot.state is SlotState.READY for slot in before.slots) == 2

    stale = [
        wire.Work(incarnation + 1, 5, (wire.WorkItem(train_word(0, 9), (1, 2)),)),
        wire.Work(incarnation - 1, 6, items),
        wire.StopWorker(incarnation + 1, "finished"),
        wire.Take(5, 1, 0, 0, "w0", 1, 0, 1, items[0].batch, 0),
    ]
    draw, expected = random.Random(1), 0
    with caplog.at_level(logging.INFO):
        for _ in range(20_000):
            frames = hostile(draw, stale, [work])
            expected += malformed(frames, wire.Work | wire.StopWorker)
            liar.say(*frames)
        bad_items = (wire.WorkItem(train_word(0, 4), (0, 2**62)), wire.WorkItem(train_word(0, 5), (1, 1)))
        liar.say(wire.encode(wire.Work(incarnation, 5, bad_items)))
        expected += len(bad_items)
        liar.say(bytes(64 * wire.MAX_BYTES))
        expected += 1
        liar.hear(wire.Want, incarnation=incarnation, held=(items[2].batch,))
        assert reader.scan() == before
        first = min((slot for slot in before.slots), key=lambda slot: slot.batch)
        assert reader.release(first.index, first.seq)
        assert liar.hear(wire.Ready).batch == items[2].batch
        liar.say(wire.encode(wire.StopWorker(incarnation, "finished")))
        thread.join(30)
    assert codes == [0]
    said = [record.getMessage() for record in caplog.records]
    assert sum("dropped a message" in line for line in said) == 1
    assert f"w0: finished after 3 records; {expected} malformed messages were dropped" in said
    reader.close()


# A rank's socket -----------------------------------------------------------------------------------------------------


def test_a_rank(tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture):
    rows = make_rows(tmp_path / "rows")
    plan = make_plan(rows)
    size = slot_bytes(64, max_rows(64), len(LAYERS), HIDDEN, "float32")
    fingerprint = Fingerprint({"run": "x"})
    ring = Ring.open(tmp_path / "w0.ring", worker="w0", fingerprint=fingerprint, slots=4, slot_bytes=size)
    address = f"ipc://{tmp_path}/ranks.sock"
    liar = Liar(address)
    stack.callback(liar.close)
    source = RecordSource(
        rank=0,
        trainer=TRAINER,
        address=address,
        ring_dir=tmp_path,
        check=RecordCheck(plan, rows, EXPECTED),
        phase=(Kind.TRAIN, 0),
        next_phase=plan.next_phase,
        skip_limit=3,
    )
    source.start()
    stack.callback(source.close)
    first, second = (BatchId(Kind.TRAIN, 0, index) for index in range(2))
    places = [commit(ring, make_meta(plan, rows, batch)) for batch in (first, second)]
    takes = [
        wire.Take(TRAINER, 1, 0, index, "w0", ring.ring_id, *place, batch.pack(), 0)
        for index, (place, batch) in enumerate(zip(places, (first, second), strict=True))
    ]
    liar.hear(wire.RankWant, index=0)
    liar.say(wire.encode(takes[0]))
    liar.hear(wire.RankWant, index=1)
    record = source.next((Kind.TRAIN, 0))
    assert record is not None and record.batch == first
    before = ring.states()

    stale = [
        replace(takes[1], trainer=TRAINER + 1),
        replace(takes[1], index=7),
        replace(takes[1], number=3),
        replace(takes[1], kind=0),
        wire.Exhausted(TRAINER + 1, 1, 0, 1),
        wire.Exhausted(TRAINER, 1, 5, 0),
        wire.StopRank(TRAINER + 1, "stop"),
    ]
    draw, expected = random.Random(2), 0
    with caplog.at_level(logging.WARNING):
        for _ in range(20_000):
            frames = hostile(draw, stale, [takes[0]])
            expected += malformed(frames, wire.Take | wire.Exhausted | wire.StopRank)
            liar.say(*frames)
        until(lambda: source.malformed == expected, 60)
    assert sum("dropped a message" in record.getMessage() for record in caplog.records) == 1
    assert ring.states() == before
    liar.say(bytes(64 * wire.MAX_BYTES))
    until(lambda: source.malformed == expected + 1, 60)
    liar.say(wire.encode(takes[1]))
    following = source.next((Kind.TRAIN, 0))
    assert following is not None and following.batch == second
    for one in (record, following):
        source.release(one)


NAMES = ["../w0", "", ".", "w0/../w0", "w0\0", "x" * 1000, "/etc/passwd", "w1"]


@pytest.mark.parametrize("change", [*({"worker": name} for name in NAMES), {"batch": 2**63 - 1}, {"slot": 2**62}])
def test_a_take_that_names_what_is_not_there_is_refused(tmp_path: Path, stack: ExitStack, change: dict[str, Any]):
    """As if the feed itself had said so: the rank reads no other file, and goes on."""
    rows = make_rows(tmp_path / "rows")
    plan = make_plan(rows)
    folder = tmp_path / "rings"
    size = slot_bytes(64, max_rows(64), len(LAYERS), HIDDEN, "float32")
    # A name may lead to a good ring outside of the folder; slots and batches are looked for in the one inside.
    path = tmp_path / "w0.ring" if "worker" in change else folder / "w0.ring"
    ring = Ring.open(path, worker="w0", fingerprint=Fingerprint({"run": "x"}), slots=2, slot_bytes=size)
    stack.callback(ring.close)
    batch = BatchId.unpack(change.get("batch", BatchId(Kind.TRAIN, 0, 0).pack()))
    meta = replace(make_meta(plan, rows, BatchId(Kind.TRAIN, 0, 0)), batch=batch.pack())
    place = commit(ring, meta)
    liar = Liar(f"ipc://{tmp_path}/ranks.sock")
    stack.callback(liar.close)
    source = RecordSource(
        rank=0,
        trainer=TRAINER,
        address=f"ipc://{tmp_path}/ranks.sock",
        ring_dir=folder,
        check=RecordCheck(plan, rows, EXPECTED),
        phase=(Kind.TRAIN, 0),
        next_phase=plan.next_phase,
        skip_limit=3,
    )
    source.start()
    stack.callback(source.close)
    liar.hear(wire.RankWant, index=0)
    take = wire.Take(TRAINER, 1, 0, 0, "w0", ring.ring_id, *place, batch.pack(), 0)
    liar.say(wire.encode(replace(take, **change)))
    refused = liar.hear(wire.Refused)
    assert refused.reason.startswith("worker ")
    liar.hear(wire.RankWant, index=1, refused=(0,))
