"""The worker against a scripted feed: what it commits, what it believes, and how it leaves."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from paceline.common import paths, wire
from paceline.common.batch import BatchId, Kind
from paceline.common.dataset import tokenizer_digest
from paceline.common.errors import ConfigError, PacelineError
from paceline.common.fingerprint import run_fingerprint
from paceline.common.finished import mark_finished
from paceline.common.record import checksum, read_meta
from paceline.common.ring import RingReader, SlotState
from paceline.common.rows import Rows, RowsWriter
from paceline.common.runfile import RunFile
from paceline.producer import worker as worker_module

sys.path.insert(0, str(Path(__file__).parent))
from waiting import ownerless, until
from worker_peer import HIDDEN, Deferred, StandIn, expected_states, stand_in_info

PEER = Path(__file__).with_name("worker_peer.py")
LAYER_IDS = [1, 4, 6]
FEED = 77


def batch_word(index, epoch=0):
    return BatchId(Kind.TRAIN, epoch, index).pack()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run file over 40 random rows, with all its folders under tmp_path."""
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "target"
    target.mkdir()
    (target / "tokenizer.json").write_text("{}")
    draw = np.random.default_rng(0)
    with RowsWriter(tmp_path / "rows") as writer:
        for length in draw.integers(8, 20, 40).tolist():
            tokens = draw.integers(0, 90, length).astype(np.int32)
            writer.add(tokens, draw.integers(0, 2, length).astype(np.uint8))
        writer.finish({"tokenizer": tokenizer_digest(str(target)), "vocabulary": "", "target": str(target)})
    return RunFile.model_validate(
        {
            "name": "toy",
            "output": str(tmp_path / "out"),
            "target": {"path": str(target), "dtype": "float32", "layer_ids": LAYER_IDS},
            "data": {"rows": str(tmp_path / "rows"), "max_length": 32, "held_out": 4},
            "stream": {"token_budget": 64, "slots": 2, "ring_dir": str(tmp_path / "rings")},
            "workers": {"devices": ["cpu"]},
        }
    )


class FeedEnd:
    """The feed's end of the socket: hears the worker's messages and says what a test wants said."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(address)
        self.route = b""

    def hear(self, kind: Any = wire.Want, seconds=20.0, where=lambda message: True) -> Any:
        """The next message of a kind for which `where` holds; others are passed over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.socket.poll(100):
                self.route, data = self.socket.recv_multipart()
                message = wire.decode(data)
                if isinstance(message, kind) and where(message):
                    return message
        raise AssertionError(f"no {kind} heard")

    def say(self, message):
        self.say_bytes(wire.encode(message))

    def say_bytes(self, *frames):
        self.socket.send_multipart([self.route, *frames])

    def give(self, incarnation, *indices, feed=FEED):
        items = tuple(wire.WorkItem(batch_word(index), (3 * index, 3 * index + 1, 3 * index + 2)) for index in indices)
        self.say(wire.Work(incarnation, feed, items))

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def feed(run):
    end = FeedEnd(paths.feed_address(run))
    yield end
    end.close()


class InThread:
    """Worker 0 in a thread of this process, where messages matter and signals do not."""

    def __init__(self, run, source: Any = None):
        self.run = run
        self.source: Any = source or StandIn(run.target.path, len(LAYER_IDS))
        self.code = None
        self.error = None
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self):
        try:
            self.code = worker_module.main(self.run, 0, source=self.source)
        except PacelineError as error:
            self.error = error

    def join(self):
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.code


def ring_path(run):
    return paths.ring_dir(run) / "w0.ring"


def reader(run):
    return RingReader.open(ring_path(run))


def ready_batches(run):
    """Batch words of READY slots by index."""
    ring = reader(run)
    views = {view.index: view.batch for view in ring.scan().slots if view.state is SlotState.READY}
    ring.close()
    return views


def test_a_record_holds_the_batch_and_describes_itself(run, feed):
    worker = InThread(run)
    hello = feed.hear(wire.Hello)
    assert hello.worker == "w0" and hello.held == ()
    feed.give(hello.incarnation, 2)
    ready = feed.hear(wire.Ready)
    want = feed.hear(wire.Want)
    assert (ready.worker, ready.incarnation, ready.batch) == ("w0", hello.incarnation, batch_word(2))
    assert want.held == () and want.tokens_per_s > 0

    ring, rows = reader(run), Rows.open(run.data.rows)
    scan = ring.scan()
    assert scan.alive and scan.incarnation == hello.incarnation
    assert scan.fingerprint == run_fingerprint(run, rows, stand_in_info(run.target.path), LAYER_IDS)
    view = ring.slot(ready.slot)
    assert (view.seq, view.state, view.batch) == (ready.seq, SlotState.READY, batch_word(2))
    payload = ring.payload(view)
    assert checksum(payload, view.length) == view.checksum
    meta, start = read_meta(payload, view.length)
    parts = [rows.row(row) for row in (6, 7, 8)]
    assert meta.batch == batch_word(2) and meta.row_ids.tolist() == [6, 7, 8]
    assert np.array_equal(meta.tokens, np.concatenate([part.tokens for part in parts]))
    assert np.array_equal(meta.mask, np.concatenate([part.mask for part in parts]))
    assert np.diff(meta.cu_seqlens).tolist() == [len(part.tokens) for part in parts]
    assert meta.layer_ids == tuple(LAYER_IDS) and meta.dtype == "float32" and meta.last_hidden == "none"
    assert meta.fingerprint == scan.fingerprint.digest
    states = np.frombuffer(payload[start : view.length], np.float32).reshape(3, -1, HIDDEN)
    assert np.array_equal(states, expected_states(meta.tokens, 3))
    assert worker.source.mapping is not None and worker.source.mapping[1] >= 2 * ring.slot_bytes
    del payload, states
    ring.close()
    feed.say(wire.StopWorker(hello.incarnation, "finished"))
    assert feed.hear(wire.Bye).incarnation == hello.incarnation
    assert worker.join() == 0 and worker.source.closed


def test_lowest_batch_first_and_a_full_ring_waits_for_a_slot(run, feed):
    worker = InThread(run)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 5, 3, 4)
    first, second = feed.hear(wire.Ready), feed.hear(wire.Ready)
    assert [first.batch, second.batch] == [batch_word(3), batch_word(4)]
    assert feed.hear(wire.Want, where=lambda want: want.waited > 0.5).held == (batch_word(5),)
    ring = reader(run)
    assert ring.release(first.slot, first.seq)
    assert feed.hear(wire.Ready).batch == batch_word(5)
    ring.retire()
    ring.close()
    assert worker.join() == 0
    assert sorted(ready_batches(run).values()) == [batch_word(4), batch_word(5)]


def test_only_this_incarnation_and_the_newest_feed_are_heeded(run, feed):
    worker = InThread(run)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation + 1, 9)
    feed.give(incarnation, 0, 1, 2)
    feed.hear(wire.Ready)
    feed.hear(wire.Ready)
    assert feed.hear(wire.Want, where=lambda want: want.held).held == (batch_word(2),)
    feed.give(incarnation, 3, feed=FEED + 1)  # another trainer: batch 2 was not started
    feed.give(incarnation, 3, 0, feed=FEED + 1)  # said twice; batch 0 is READY in this ring
    assert feed.hear(wire.Want, where=lambda want: batch_word(2) not in want.held).held == (batch_word(3),)
    ring = reader(run)
    view = next(view for view in ring.scan().slots if view.batch == batch_word(0))
    ring.release(view.index, view.seq)
    assert feed.hear(wire.Ready).batch == batch_word(3)
    ring.close()
    paths.finished_path(run).touch()
    assert worker.join() == 0
    assert sorted(ready_batches(run).values()) == [batch_word(1), batch_word(3)]


def test_anything_malformed_is_dropped(run, feed, caplog):
    worker = InThread(run)
    incarnation = feed.hear(wire.Hello).incarnation
    for frames in ([b"\x80\x04N."], [b""], [b"\x81\x01\x02"], [b"a", b"b"], [wire.encode(wire.StopRank(1, "stop"))]):
        feed.say_bytes(*frames)
    bad_rows = [(), (1, 1), (39, 40 * 100), (2**40,), tuple(range(12))]  # none, twice, out of range, too many tokens
    items = tuple(wire.WorkItem(batch_word(index), rows) for index, rows in enumerate(bad_rows))
    feed.say(wire.Work(incarnation, FEED, items))
    feed.give(incarnation, 7)
    assert feed.hear(wire.Ready).batch == batch_word(7)
    assert sum("dropped a message" in record.message for record in caplog.records) == 1
    feed.say(wire.StopWorker(incarnation, "retired"))
    assert worker.join() == 0


def test_a_vanished_ring_ends_the_worker(run, feed):
    worker = InThread(run)
    feed.hear(wire.Hello)
    ring_path(run).unlink()
    worker.join()
    assert worker.error is not None and "vanished" in str(worker.error) and worker.error.exit_code == 1


def test_the_worker_comes_first_and_outlives_feeds(run):
    worker = InThread(run)
    until(ring_path(run).exists)
    first = FeedEnd(paths.feed_address(run))
    incarnation = first.hear(wire.Hello).incarnation
    first.close()
    second = FeedEnd(paths.feed_address(run))
    assert second.hear(wire.Want).incarnation == incarnation
    second.give(incarnation, 0)
    assert second.hear(wire.Ready).batch == batch_word(0)
    second.say(wire.StopWorker(incarnation, "finished"))
    assert worker.join() == 0
    second.close()


def test_a_finished_run_needs_no_worker(run):
    mark_finished(run, 5)
    assert InThread(run).join() == 0
    assert not ring_path(run).exists()


def test_a_device_that_is_not_there_is_refused_before_there_is_a_ring(run, tiny_target_dir, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("paceline.producer.worker.gpu_count", lambda: 0)
    info = {"target": run.target.model_copy(update={"path": str(tiny_target_dir), "layer_ids": [0, 1]})}
    monkeypatch.setattr("paceline.producer.worker.prepared_rows", lambda *_: Rows.open(run.data.rows))
    with pytest.raises(ConfigError, match=r"\(workers\.devices, --device\): cuda:3 is not there; .* sees 2 GPUs"):
        worker_module.main(run.model_copy(update=info), 99, device="cuda:3")
    assert not Path(run.stream.ring_dir).exists()


def test_a_run_that_was_finished_by_other_limits_is_not_finished(run, feed):
    """Its trainer may be slower to start, and removes the marker only then."""
    mark_finished(run, 5)
    os.utime(paths.finished_path(run), (5e9, 5e9))  # written before the clock was set back
    longer = run.model_copy(update={"trainer": run.trainer.model_copy(update={"epochs": run.trainer.epochs + 1})})
    worker = InThread(longer)
    feed.hear(wire.Hello)
    feed.hear(wire.Want)
    mark_finished(run, 6)  # after its start: whoever says so knows more than it does
    os.utime(paths.finished_path(run), (1, 1))  # and the clock was set back since
    assert worker.join() == 0


def test_a_reader_that_fails_ends_the_worker(run, monkeypatch):
    """However it fails: else the loop would wait for its rows for ever."""
    rows = Rows.open(run.data.rows)
    monkeypatch.setattr(worker_module, "prepare", lambda *_: bytearray(1 << 62))  # MemoryError
    queue = worker_module.WorkQueue(rows, 64, 1)
    queue.add(wire.WorkItem(batch_word(0), (0,)))
    until(lambda: not queue._thread.is_alive())
    with pytest.raises(PacelineError, match=r"the rows of a batch cannot be read: MemoryError"):
        queue.take(batch_word(0))
    queue.close()


def test_rows_of_another_vocabulary_are_refused(run, tmp_path):
    with RowsWriter(tmp_path / "rows") as writer:
        writer.add(np.full(8, 100, np.int32), np.ones(8, np.uint8))
        writer.finish({"tokenizer": tokenizer_digest(run.target.path), "vocabulary": "", "target": ""})
    with pytest.raises(ConfigError, match="token 100, the target only 100"):
        worker_module.main(run, 0, source=StandIn(run.target.path, 3))
    assert not ring_path(run).exists()


def test_a_real_target_is_loaded_checked_and_recorded(run, feed, tiny_target_dir, chat_file):
    changed = run.model_dump()
    changed["target"]["path"] = str(tiny_target_dir)
    changed["target"]["layer_ids"] = [0, 2]
    changed["data"] |= {"files": [str(chat_file)], "rows": None, "max_length": 128}
    changed["stream"]["token_budget"] = 1024
    run = RunFile.model_validate(changed)
    code = []
    thread = threading.Thread(target=lambda: code.append(worker_module.main(run, 0)), daemon=True)
    thread.start()
    incarnation = feed.hear(wire.Hello, seconds=60).incarnation
    feed.give(incarnation, 0, 1)
    readies = [feed.hear(wire.Ready), feed.hear(wire.Ready)]
    ring = reader(run)
    for ready in readies:
        view = ring.slot(ready.slot)
        meta, start = read_meta(ring.payload(view), view.length)
        states = np.frombuffer(ring.payload(view)[start:], np.float32).reshape(2, len(meta.tokens), 64)
        assert np.isfinite(states).all() and (states.std(axis=(1, 2)) > 0.01).all()
        del states
    ring.retire()
    ring.close()
    thread.join(20)
    assert code == [0]


# Two records in the making


@pytest.fixture
def deferred(run):
    return Deferred(run.target.path, len(LAYER_IDS))


def with_slots(run, slots):
    return run.model_copy(update={"stream": run.stream.model_copy(update={"slots": slots})})


def slot_states(ring):
    return sorted(view.state.name for view in ring.scan().slots)


def begun(source, count):
    until(lambda: len(source.begun) == count)


def stop(worker, feed, incarnation):
    feed.say(wire.StopWorker(incarnation, "finished"))
    assert worker.join() == 0


def test_the_next_record_is_begun_before_one_is_waited_for(run, feed, deferred):
    """Two at most; committed in the order in which they were begun, each with its own states."""
    worker = InThread(with_slots(run, 4), deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0, 1, 2)
    begun(deferred, 2)
    ring = reader(run)
    assert slot_states(ring) == ["FREE", "FREE", "WRITING", "WRITING"]
    deferred.land(0)
    assert feed.hear(wire.Ready).batch == batch_word(0)
    assert feed.hear(wire.Want).held == (batch_word(1), batch_word(2))
    begun(deferred, 3)
    deferred.land(2)
    deferred.land(1)
    readies = [feed.hear(wire.Ready), feed.hear(wire.Ready)]
    assert [ready.batch for ready in readies] == [batch_word(1), batch_word(2)]
    assert deferred.log == ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "finish 2"]
    for view in ring.scan().slots:
        if view.state is SlotState.READY:
            payload = ring.payload(view)
            assert checksum(payload, view.length) == view.checksum
            meta, start = read_meta(payload, view.length)
            states = np.frombuffer(payload[start : view.length], np.float32).reshape(3, -1, HIDDEN)
            assert meta.batch == view.batch and np.array_equal(states, expected_states(meta.tokens, 3))
            del payload, states
    ring.close()
    stop(worker, feed, incarnation)


def test_a_record_that_is_complete_is_announced_before_another_is_begun(run, feed, deferred):
    deferred.at_once = True
    worker = InThread(with_slots(run, 4), deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0, 1)
    assert [feed.hear(wire.Ready).batch, feed.hear(wire.Ready).batch] == [batch_word(0), batch_word(1)]
    assert deferred.log == ["begin 0", "finish 0", "begin 1", "finish 1"]
    stop(worker, feed, incarnation)


def test_a_record_waits_for_no_work_and_work_that_comes_is_begun_beside_it(run, feed, deferred):
    worker = InThread(with_slots(run, 4), deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0)
    begun(deferred, 1)
    feed.give(incarnation, 0, 1)  # 0 is held already
    begun(deferred, 2)
    deferred.land(0)
    assert feed.hear(wire.Ready).batch == batch_word(0)
    assert feed.hear(wire.Want, where=lambda want: want.held).held == (batch_word(1),)
    feed.give(incarnation, 1, feed=FEED + 1)  # another trainer: what is begun is not dropped, nor begun again
    assert feed.hear(wire.Want).held == (batch_word(1),), "said each second"
    deferred.land(1)
    assert feed.hear(wire.Ready).batch == batch_word(1)
    assert feed.hear(wire.Want).held == ()
    assert len(deferred.begun) == 2
    stop(worker, feed, incarnation)


def test_a_record_waits_for_no_rows_of_another_batch(run, feed, deferred, monkeypatch):
    there, prepare = threading.Event(), worker_module.prepare

    def slow(rows, item):
        assert item.batch == batch_word(0) or there.wait(20)
        return prepare(rows, item)

    monkeypatch.setattr(worker_module, "prepare", slow)
    worker = InThread(with_slots(run, 4), deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0, 1)
    begun(deferred, 1)
    deferred.land(0)
    assert feed.hear(wire.Ready).batch == batch_word(0)
    there.set()
    begun(deferred, 2)
    deferred.land(1)
    assert feed.hear(wire.Ready).batch == batch_word(1)
    stop(worker, feed, incarnation)


def test_a_device_that_hangs_does_not_feed_the_watchdog(run, feed, deferred, monkeypatch):
    beats = []
    monkeypatch.setattr(worker_module, "Watchdog", lambda: SimpleNamespace(beat=lambda: beats.append(1)))
    worker = InThread(run, deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0)
    begun(deferred, 1)
    feed.hear(wire.Want, where=lambda want: want.held)
    before = len(beats)
    for _ in range(2):
        feed.hear(wire.Want)
    assert before and len(beats) == before
    deferred.land(0)
    feed.hear(wire.Ready)
    feed.hear(wire.Want)
    until(lambda: len(beats) > before)
    stop(worker, feed, incarnation)


def test_a_slot_that_is_freed_while_a_record_is_made_is_filled(run, feed, deferred):
    worker = InThread(run, deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0, 1, 2)
    begun(deferred, 2)
    deferred.land(0)
    ready = feed.hear(wire.Ready)
    ring = reader(run)
    assert slot_states(ring) == ["READY", "WRITING"] and ring.release(ready.slot, ready.seq)
    begun(deferred, 3)
    assert "finish 1" not in deferred.log
    deferred.land(1)
    assert feed.hear(wire.Ready).batch == batch_word(1)
    deferred.land(2)
    assert feed.hear(wire.Ready).batch == batch_word(2)
    assert sorted(ready_batches(run).values()) == [batch_word(1), batch_word(2)]
    ring.close()
    stop(worker, feed, incarnation)


def test_with_one_slot_records_are_made_one_after_the_other(run, feed, deferred):
    worker = InThread(with_slots(run, 1), deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0, 1)
    ring = reader(run)
    for number in (0, 1):
        begun(deferred, number + 1)
        deferred.land(number)
        ready = feed.hear(wire.Ready)
        assert ready.batch == batch_word(number) and len(deferred.begun) == number + 1
        ring.release(ready.slot, ready.seq)
    ring.close()
    stop(worker, feed, incarnation)


def test_a_record_is_committed_while_the_next_is_still_launched(run, feed, deferred):
    """Some targets wait for their device as they run: their launch takes as long as the forward before it."""
    launched = threading.Event()

    def launch(progress):
        deferred.land(0)
        progress()
        assert launched.wait(20)

    deferred.launching = {1: launch}
    worker = InThread(run, deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0, 1)
    assert feed.hear(wire.Ready).batch == batch_word(0)
    assert feed.hear(wire.Want).held == (batch_word(1),)
    launched.set()
    begun(deferred, 2)
    deferred.land(1)
    assert feed.hear(wire.Ready).batch == batch_word(1)
    stop(worker, feed, incarnation)


def test_non_finite_states_are_those_of_their_batch(run, feed, deferred, caplog):
    deferred.infinite = {1}
    worker = InThread(with_slots(run, 4), deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 4, 5, 6)
    for number in range(3):
        begun(deferred, min(number + 2, 3))
        deferred.land(number)
        feed.hear(wire.Ready)
    warnings = [record.message for record in caplog.records if "non-finite" in record.message]
    assert warnings == [f"w0: non-finite states in batch {BatchId(Kind.TRAIN, 0, 5)}"]
    stop(worker, feed, incarnation)


def test_the_rate_counts_time_that_two_records_share_once(run, feed, deferred, monkeypatch):
    worker = InThread(run, deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    now = [time.monotonic()]
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    feed.give(incarnation, 0, 1)
    begun(deferred, 2)
    rates = []
    for number in (0, 1):
        now[0] += 0.25
        deferred.land(number)
        feed.hear(wire.Ready)
        rates.append(feed.hear(wire.Want).tokens_per_s)
    first, second = (len(record.tokens) / 0.25 for record in deferred.begun)
    assert rates == [pytest.approx(first), pytest.approx(0.8 * first + 0.2 * second)]
    stop(worker, feed, incarnation)


def test_what_is_in_the_making_is_committed_before_a_worker_leaves(run, feed, deferred):
    worker = InThread(with_slots(run, 4), deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0)
    begun(deferred, 1)
    feed.say(wire.StopWorker(incarnation, "retired"))
    assert deferred.begun[0].waited_for.wait(20)
    deferred.land(0)
    assert feed.hear(wire.Ready).batch == batch_word(0)
    assert feed.hear(wire.Bye).incarnation == incarnation
    assert worker.join() == 0
    assert list(ready_batches(run).values()) == [batch_word(0)]


def test_a_launch_that_fails_leaves_the_record_before_it(run, feed, deferred):
    failing = threading.Event()

    def fail(progress):
        failing.set()
        raise PacelineError("no memory")

    deferred.launching = {1: fail}
    worker = InThread(run, deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0, 1)
    assert failing.wait(20)
    deferred.land(0)
    assert feed.hear(wire.Ready).batch == batch_word(0)
    worker.join()
    assert str(worker.error) == "no memory"
    ring = reader(run)
    assert slot_states(ring) == ["FREE", "READY"]
    ring.close()


def test_copies_are_waited_for_before_their_slots_are_given_back(run, feed, deferred):
    """Whatever ends the worker: here its ring is removed."""
    worker = InThread(run, deferred)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0)
    begun(deferred, 1)
    ring, seen = reader(run), []
    deferred.at_settle = lambda: seen.append(slot_states(ring))
    ring_path(run).unlink()
    worker.join()
    assert worker.error is not None and "vanished" in str(worker.error)
    assert seen == [["FREE", "WRITING"]] and slot_states(ring) == ["FREE", "FREE"]
    ring.close()


# As a process: killed, stopped, started twice


@pytest.fixture
def start(run, tmp_path):
    """start(seconds=0, **environment) -> worker 0 as a process."""
    (tmp_path / "run.json").write_text(json.dumps(run.model_dump()))
    started = []

    def start(seconds: float | str = 0.0, **environment):
        command = [sys.executable, str(PEER), str(tmp_path / "run.json"), "0", str(seconds)]
        process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("point", "kept"),
    [("worker.work-received", 0), ("ring.writing", 0), ("worker.committed-not-sent", 1), ("worker.sent", 1)],
)
def test_what_a_killed_worker_committed_is_adopted(run, feed, start, point, kept):
    process = start(PACELINE_FAULT=point)
    killed = feed.hear(wire.Hello)
    feed.give(killed.incarnation, 0)
    assert process.wait(20) == -signal.SIGKILL
    assert list(ready_batches(run).values()) == [batch_word(0)] * kept
    old = reader(run)
    ownerless(old)
    again = InThread(run)
    hello = feed.hear(wire.Hello)
    assert hello.incarnation != killed.incarnation and hello.held == ()
    assert old.scan().incarnation == hello.incarnation and not old.replaced()
    feed.give(hello.incarnation, 0, 1)
    until(lambda: sorted(ready_batches(run).values()) == [batch_word(0), batch_word(1)])
    old.retire()
    old.close()
    assert again.join() == 0


def test_sigterm_with_a_full_ring_and_no_trainer_exits_at_once(run, feed, start):
    process = start()
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0, 1, 2)
    feed.hear(wire.Ready)
    feed.hear(wire.Ready)
    feed.close()
    process.terminate()
    assert process.wait(20) == 0
    assert sorted(ready_batches(run).values()) == [batch_word(0), batch_word(1)]
    assert "stopped by SIGTERM" in process.stderr.read()


def test_sigterm_in_a_batch_gives_the_slot_back(run, feed, start):
    process = start(seconds=600)
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0)
    ring = reader(run)
    until(lambda: any(view.state is SlotState.WRITING for view in ring.scan().slots))
    process.terminate()
    assert feed.hear(wire.Bye).incarnation == incarnation
    assert process.wait(20) == 0
    scan = ownerless(ring).scan()
    assert all(view.state is SlotState.FREE for view in scan.slots)
    ring.close()


def test_sigterm_with_two_records_in_the_making_gives_both_slots_back(run, feed, start):
    process = start("deferred")
    incarnation = feed.hear(wire.Hello).incarnation
    feed.give(incarnation, 0, 1)
    ring = reader(run)
    until(lambda: slot_states(ring) == ["WRITING", "WRITING"])
    process.terminate()
    assert feed.hear(wire.Bye).incarnation == incarnation
    assert process.wait(20) == 0
    assert slot_states(ownerless(ring)) == ["FREE", "FREE"]
    assert "2 records were waited for" in process.stderr.read()
    ring.close()


def test_two_records_in_the_making_of_a_killed_worker_are_made_again(run, feed, start):
    process = start("deferred")
    killed = feed.hear(wire.Hello)
    feed.give(killed.incarnation, 0, 1)
    ring = reader(run)
    until(lambda: slot_states(ring) == ["WRITING", "WRITING"])
    process.kill()
    process.wait(20)
    ownerless(ring)
    again = InThread(run)
    hello = feed.hear(wire.Hello, where=lambda hello: hello.incarnation != killed.incarnation)
    assert hello.held == () and slot_states(ring) == ["FREE", "FREE"] and not ring.replaced()
    feed.give(hello.incarnation, 0, 1)
    until(lambda: sorted(ready_batches(run).values()) == [batch_word(0), batch_word(1)])
    ring.close()
    stop(again, feed, hello.incarnation)


def test_a_second_worker_of_one_name_is_refused_and_a_signal_ends_the_wait_for_a_trainer(run, start):
    process = start()
    until(ring_path(run).exists)
    until(lambda: reader(run).probe())
    second = start()
    assert second.wait(20) == 1
    message = second.stderr.read().strip()
    assert str(process.pid) in message and len(message.splitlines()) == 1
    for line in process.stderr:
        if "waiting for the trainer" in line:
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130


def test_systemd_is_told(run, feed, start, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(20)
        process = start(NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="400000")
        feed.hear(wire.Hello)
        heard = []
        while not (
            {"READY=1", "WATCHDOG=1"} <= set(heard) and any(line.startswith("STATUS=0 records") for line in heard)
        ):
            heard += notified.recv(4096).decode().split("\n")
        assert heard.index("STATUS=opening the ring") < heard.index("READY=1")
        process.terminate()
        while "STOPPING=1" not in heard:
            heard += notified.recv(4096).decode().split("\n")
        assert process.wait(20) == 0
