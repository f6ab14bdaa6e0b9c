"""The feeder's thread over real sockets and rings: workers and ranks are played by hand, step by step."""

import logging
import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from feed_world import FINGERPRINT, evaluation, one_row_batches, train
from paceline.common import wire
from paceline.common.batch import Kind
from paceline.common.errors import ConfigError
from paceline.common.fingerprint import Fingerprint
from paceline.common.ring import Ring, RingReader, SlotState
from paceline.common.runfile import RunFile
from paceline.consumer.feed import Phase
from paceline.consumer.feeder import Feeder
from paceline.consumer.feedstate import FeedBroken
from paceline.consumer.ledger import Ledger
from waiting import ownerless, until

TRAINER = 41
PLAN = one_row_batches(4, group=2, held_out=1)  # steps 0 and 1, then the evaluation after 2


def run_file(**changes: Any) -> RunFile:
    return RunFile.model_validate(
        {
            "name": "test",
            "output": "out",
            "target": {"path": "tiny"},
            "data": {"rows": "rows"},
            "trainer": {"batches_per_step": 2},
            **changes,
        }
    )


class Peer:
    """One DEALER socket, as workers and ranks have."""

    def __init__(self, path: Path) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{path}")

    def say(self, message: wire.Message) -> None:
        self.socket.send(wire.encode(message))

    def hear(self, kind: type, seconds: float = 20.0) -> Any:
        """The next message of a kind; others are dropped."""
        end = time.monotonic() + seconds
        while self.socket.poll(max(0, round((end - time.monotonic()) * 1000))):
            message = wire.decode(self.socket.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def close(self) -> None:
        self._context.destroy(linger=0)


class Stage:
    """A run directory, a ring directory, and whoever acts on them."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.ring_dir = folder / "run", folder / "rings"
        self.run_dir.mkdir(mode=0o700)
        self.ring_dir.mkdir(mode=0o700)
        self.closers: list[Callable[[], None]] = []

    def feeder(self, phase: Phase | None = None, **changes: Any) -> Feeder:
        run = changes.pop("run", run_file())
        named: dict[str, Any] = {
            "plan": PLAN,
            "ledger": Ledger(),
            "phase": phase or Phase(Kind.TRAIN, 0),
            "trainer": TRAINER,
            "fingerprint": FINGERPRINT,
            "ring_dir": self.ring_dir,
            "run_dir": self.run_dir,
        }
        feeder = Feeder(run, **{**named, **changes})
        feeder.start()
        self.closers.append(feeder.stop)
        return feeder

    def ring(self, worker: str = "w0", **changes: Any) -> Ring:
        named: dict[str, Any] = {"worker": worker, "fingerprint": FINGERPRINT, "slots": 2, "slot_bytes": 64}
        ring = Ring.open(self.ring_dir / f"{worker}.ring", **{**named, **changes})
        self.closers.append(ring.close)
        return ring

    def worker(self, ring: Ring) -> Peer:
        peer = self.peer("feed.sock")
        peer.say(wire.Hello(ring.worker, ring.incarnation, ()))
        return peer

    def rank(self, number: int = 0) -> Peer:
        peer = self.peer("ranks.sock")
        peer.say(wire.RankHello(number, TRAINER))
        return peer

    def peer(self, socket: str) -> Peer:
        peer = Peer(self.run_dir / socket)
        self.closers.append(peer.close)
        return peer

    def close(self) -> None:
        for close in reversed(self.closers):
            close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def make(ring: Ring, batch: int) -> None:
    slot = ring.claim(batch)
    assert slot is not None
    slot.payload[:8] = b"a record"
    ring.commit(slot, 8, 0)


def want(number: int, index: int, *, kind: Kind = Kind.TRAIN, rank: int = 0) -> wire.RankWant:
    return wire.RankWant(rank, TRAINER, kind, number, index)


def test_a_run_from_the_first_batch_to_the_last(stage: Stage) -> None:
    done: list[wire.Done] = []
    feeder = stage.feeder(on_done=done.append)
    ring = stage.ring()
    worker, rank = stage.worker(ring), stage.rank()
    reader = RingReader.open(ring.path)
    queue: dict[int, tuple[int, ...]] = {}

    def record() -> None:
        while not queue:
            worker.say(wire.Want("w0", ring.incarnation, (), 1.5, 1000.0))
            work = worker.hear(wire.Work)
            assert (work.incarnation, work.feed) == (ring.incarnation, TRAINER)
            queue.update({item.batch: item.rows for item in work.items})
        batch = min(queue)
        assert len(queue.pop(batch)) == 1
        make(ring, batch)
        worker.say(wire.Ready("w0", ring.incarnation, 0, 1, batch))

    for phase, records in ((Phase(Kind.TRAIN, 0), 2), (Phase(Kind.TRAIN, 1), 2), (Phase(Kind.EVAL, 2), 1)):
        trained = []
        for index in range(records):
            record()
            rank.say(want(phase.number, index, kind=phase.kind))
            take = rank.hear(wire.Take)
            assert (take.trainer, take.ring, take.refusals) == (TRAINER, ring.ring_id, 0)
            assert reader.take(take.slot, take.seq, TRAINER)
            assert reader.release(take.slot, take.seq)
            trained.append(take.batch)
        rank.say(want(phase.number, records, kind=phase.kind))
        rank.hear(wire.Exhausted)
        rank.say(wire.Done(0, TRAINER, phase.kind, phase.number, tuple(trained), (), {"loss": 1.0}))
    assert worker.hear(wire.StopWorker).reason == "finished"
    assert rank.hear(wire.StopRank).reason == "finished"
    assert [one.number for one in done] == [0, 1, 2]
    late = stage.worker(ring)
    assert late.hear(wire.StopWorker).incarnation == ring.incarnation
    until(lambda: feeder.snapshot().phase is None)
    status = feeder.snapshot().workers[0]
    assert (status.worker, status.alive, status.connected, status.waited) == ("w0", True, True, 1.5)
    feeder.check()
    reader.close()


def test_an_unanswered_request_and_its_repetition_get_the_same_record(stage: Stage) -> None:
    ring = stage.ring()
    stage.feeder()
    rank = stage.rank()
    rank.say(want(0, 0))
    make(ring, train(0, 1))
    make(ring, train(0, 0))
    first = rank.hear(wire.Take)
    for _ in range(2):
        rank.say(want(0, 0))
        assert rank.hear(wire.Take) == first


def test_rings_come_and_go_while_it_runs(stage: Stage) -> None:
    feeder = stage.feeder()
    rank = stage.rank()
    rank.say(want(0, 0))
    until(lambda: feeder.snapshot().waiting_ranks == (0,))
    ring = stage.ring("w7")
    make(ring, train(0, 0))
    assert rank.hear(wire.Take).worker == "w7"
    until(lambda: feeder.snapshot().workers)
    assert feeder.snapshot().workers[0].connected is False
    ring.path.unlink()
    until(lambda: not feeder.snapshot().workers)


def test_a_dead_workers_batches_go_to_another(stage: Stage) -> None:
    feeder = stage.feeder()
    rings = [stage.ring("w0"), stage.ring("w1")]
    first = stage.worker(rings[0])
    given = {item.batch for item in first.hear(wire.Work).items}
    assert given == {train(0, 0), train(0, 1)}
    second = stage.worker(rings[1])
    assert {item.batch for item in second.hear(wire.Work).items} == {train(0, 2), train(0, 3)}
    rank = stage.rank()
    rank.say(want(0, 0))
    until(lambda: feeder.snapshot().waiting_ranks == (0,))
    for batch in (train(0, 2), train(0, 3)):
        make(rings[1], batch)
    second.say(wire.Want("w1", rings[1].incarnation, (), 0.0, 0.0))
    assert rank.hear(wire.Take).batch == train(0, 2)
    stage.closers.remove(rings[0].close)
    rings[0].close()
    reader = RingReader.open(rings[1].path)
    taken = next(slot for slot in reader.scan().slots if slot.batch == train(0, 2))
    reader.release(taken.index, taken.seq)
    second.say(wire.Want("w1", rings[1].incarnation, (), 0.0, 0.0))
    assert train(0, 0) in {item.batch for item in second.hear(wire.Work).items}
    reader.close()


def test_lost_work_is_sent_again(stage: Stage) -> None:
    stage.feeder()
    ring = stage.ring()
    worker = stage.worker(ring)
    first = worker.hear(wire.Work)
    worker.say(wire.Want("w0", ring.incarnation, tuple(item.batch for item in first.items), 0.0, 0.0))
    time.sleep(0.7)
    worker.say(wire.Want("w0", ring.incarnation, (), 0.0, 0.0))
    assert worker.hear(wire.Work) == first


def test_a_ring_of_another_run_is_left_alone_and_both_values_are_logged(stage: Stage, caplog: Any) -> None:
    ring = stage.ring(fingerprint=Fingerprint({"target": "other", "seed": 0}))
    make(ring, train(0, 0))
    (stage.ring_dir / "w1.ring").write_bytes(b"no ring at all")
    with caplog.at_level(logging.WARNING):
        feeder = stage.feeder()
        rank = stage.rank()
        rank.say(want(0, 0))
        until(lambda: feeder.snapshot().waiting_ranks == (0,))
        time.sleep(1.2)
    assert feeder.snapshot().workers == ()
    lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(lines) == 2, "each is logged once"
    assert any("(target is tiny in the run file and other in the ring)" in line for line in lines)
    reader = RingReader.open(ring.path)
    assert [slot.state for slot in reader.scan().slots].count(SlotState.READY) == 1
    reader.close()


def test_a_retired_ring_is_drained_and_removed(stage: Stage) -> None:
    ring = stage.ring()
    make(ring, train(0, 0))
    feeder = stage.feeder()
    rank = stage.rank()
    reader = RingReader.open(ring.path)
    reader.retire()
    stage.closers.remove(ring.close)
    ring.close()
    rank.say(want(0, 0))
    take = rank.hear(wire.Take)
    assert ring.path.exists()
    assert reader.release(take.slot, take.seq)
    until(lambda: not ring.path.exists())
    until(lambda: feeder.snapshot().counters["removed_rings"] == 1)
    reader.close()


def test_what_the_plan_does_not_want_is_freed(stage: Stage) -> None:
    ring = stage.ring()
    make(ring, train(3, 0))
    make(ring, evaluation(9, 0))
    feeder = stage.feeder()
    until(lambda: feeder.snapshot().counters["stale"] == 2)
    assert all(slot.state is SlotState.FREE for slot in ring.states())


HOSTILE = [
    b"",
    b"\x00" * 1000,
    pickle.dumps({"v": 1}),
    wire.encode(wire.Hello("w0", 1, ()))[:-1],
    b"\x81\x01\x02",
    b"\xdd\xff\xff\xff\xff",
    wire.encode(wire.StopRank(1, "x")),
    os.urandom(5000),
]


@pytest.mark.parametrize("socket", ["feed.sock", "ranks.sock"])
def test_hostile_bytes_are_counted_logged_at_a_bounded_rate_and_dropped(stage: Stage, socket: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        feeder = stage.feeder()
        enemy = stage.peer(socket)
        for data in HOSTILE * 5:
            enemy.socket.send(data)
        enemy.socket.send_multipart([b"", wire.encode(wire.Bye("w0", 1))])
        until(lambda: feeder.snapshot().counters["malformed"] == len(HOSTILE) * 5 + 1)
    assert sum("dropped a message" in record.getMessage() for record in caplog.records) == 1
    enemy.socket.send(bytes(wire.MAX_BYTES + 1))  # the connection is closed on it
    rank = stage.rank()
    rank.say(want(0, 0))
    until(lambda: feeder.snapshot().waiting_ranks == (0,))
    feeder.check()


def test_workers_are_sent_home_when_the_run_ends_early(stage: Stage) -> None:
    feeder = stage.feeder()
    rings = [stage.ring("w0"), stage.ring("w1")]
    early = stage.worker(rings[0])
    early.hear(wire.Work)
    feeder.finish()
    assert early.hear(wire.StopWorker) == wire.StopWorker(rings[0].incarnation, "finished")
    assert stage.worker(rings[1]).hear(wire.StopWorker) == wire.StopWorker(rings[1].incarnation, "finished")


def test_messages_of_strangers_change_nothing(stage: Stage) -> None:
    feeder = stage.feeder()
    ring = stage.ring()
    rank, worker = stage.rank(), stage.peer("feed.sock")
    worker.say(wire.Hello("w0", ring.incarnation + 1, ()))
    worker.say(wire.Hello("w99", 5, ()))
    for stranger in (wire.RankWant(0, 1, 1, 0, 0), wire.RankWant(9, TRAINER, 1, 0, 0), wire.RankHello(0, 1)):
        rank.say(stranger)
    rank.say(wire.Refused(0, TRAINER, 1, 0, 0, train(0, 0), "x"))
    rank.say(wire.Done(0, TRAINER, 1, 1, (), (), {}))
    rank.say(wire.RankWant(0, TRAINER, 2**62, 0, 0))
    rank.say(wire.RankWant(0, TRAINER, 1, 2**62, 0))
    rank.say(want(0, 0))
    until(lambda: feeder.snapshot().waiting_ranks == (0,) and feeder.snapshot().workers)
    assert feeder.snapshot().workers[0].connected is False
    assert feeder.snapshot().phase == Phase(Kind.TRAIN, 0)
    feeder.check()


def test_a_rank_that_reports_what_it_was_not_given_ends_the_feed(stage: Stage) -> None:
    feeder = stage.feeder()
    rank = stage.rank()
    rank.say(wire.Done(0, TRAINER, 1, 0, (train(0, 0), train(0, 1)), (), {}))
    assert "train/0/0" in rank.hear(wire.StopRank).reason
    with pytest.raises(FeedBroken):
        until(lambda: feeder.check())


def test_only_the_owner_can_connect(stage: Stage) -> None:
    stage.feeder()
    for name in ("feed.sock", "ranks.sock"):
        assert stat.S_IMODE((stage.run_dir / name).stat().st_mode) == 0o600


def test_a_stale_socket_is_replaced_and_another_file_is_not(stage: Stage) -> None:
    first = stage.feeder()
    first.stop()
    stage.closers.remove(first.stop)
    script = f"import socket; socket.socket(socket.AF_UNIX).bind({str(stage.run_dir / 'feed.sock')!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
    second = stage.feeder()
    second.stop()
    stage.closers.remove(second.stop)
    (stage.run_dir / "ranks.sock").write_text("mine")
    with pytest.raises(ConfigError, match="in the way"):
        stage.feeder()
    assert (stage.run_dir / "ranks.sock").read_text() == "mine"


def test_a_path_that_is_too_long_for_a_socket_is_refused(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="107 bytes"):
        stage.feeder(run_dir=stage.run_dir / ("x" * 100))


def test_it_ends_at_once_with_or_without_peers(stage: Stage) -> None:
    for _ in range(3):
        feeder = stage.feeder()
        feeder.stop()
        stage.closers.remove(feeder.stop)
        assert not list(stage.run_dir.iterdir())


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_feeder import Stage, make, train, want, wire
stage = Stage(Path(sys.argv[1]))
ring = stage.ring()
make(ring, train(0, 0))
stage.feeder()
rank = stage.rank()
rank.say(want(0, 0))
rank.hear(wire.Take)
print("answered")
"""


def test_killed_between_decision_and_answer_the_record_is_still_there(tmp_path: Path) -> None:
    script = KILLED.format(tests=str(Path(__file__).parent))
    environment = {**os.environ, "PACELINE_FAULT": "feed.given-not-sent"}
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    reader = RingReader.open(tmp_path / "rings" / "w0.ring")
    scan = ownerless(reader).scan()
    assert not scan.alive
    assert [slot.batch for slot in scan.slots if slot.state is SlotState.READY] == [train(0, 0)]
    reader.close()
