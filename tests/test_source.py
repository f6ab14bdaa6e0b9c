"""What a rank refuses, and how it asks, takes, frees and lists: a real ring, and a feed that the test plays."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from paceline.common import wire
from paceline.common.batch import BatchId, Kind
from paceline.common.errors import PacelineError
from paceline.common.fingerprint import Fingerprint
from paceline.common.plan import Plan
from paceline.common.record import RecordMeta, max_rows, slot_bytes, write_meta
from paceline.common.ring import Ring, RingReader, SlotState
from paceline.common.rows import Rows
from paceline.consumer.check import RecordCheck, RecordRefused, check_states
from paceline.consumer.source import BadWorker, FeedStopped, Record, RecordSource, TornRecord
from standins import EXPECTED, HIDDEN, LAYERS, commit, make_meta, make_plan, make_rows, stamp

TRAINER = 4711
SECONDS = 20_000  # milliseconds a message may take on a loaded machine


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return make_rows(tmp_path_factory.mktemp("rows") / "rows")


@pytest.fixture(scope="module")
def plan(rows: Rows) -> Plan:
    return make_plan(rows)


def train(index: int, epoch: int = 0) -> BatchId:
    return BatchId(Kind.TRAIN, epoch, index)


# What is refused -----------------------------------------------------------------------------------------------------


def assert_refused(reason: str, meta: RecordMeta, plan: Plan, rows: Rows, states: np.ndarray | None = None) -> None:
    """The record is refused for this reason (a pattern) when batch train/0/0 was asked for."""
    if states is None:
        states = stamp(meta.tokens, meta.cu_seqlens, meta.planes, meta.hidden_size).astype(meta.dtype)
    payload = bytearray(1 << 20)
    offset = write_meta(payload, meta)
    payload[offset : offset + states.nbytes] = states.tobytes()
    with pytest.raises(RecordRefused, match=reason):
        RecordCheck(plan, rows, EXPECTED)(memoryview(payload)[: offset + states.nbytes], train(0))


def shifted(ends: np.ndarray) -> np.ndarray:
    """The same rows with every boundary between them one token later."""
    return np.concatenate([ends[:1], ends[1:-1] + 1, ends[-1:]])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: {"fingerprint": 78}, "fingerprint"),
        (lambda m: {"layer_ids": (1, 2)}, r"layer ids \[1, 2\], not \[1, 3\]"),
        (lambda m: {"dtype": "float16", "hidden_size": 2 * HIDDEN}, "dtype float16, not float32"),
        (lambda m: {"hidden_size": HIDDEN - 1}, "hidden size"),
        (lambda m: {"layer_ids": (1,), "last_hidden": "before_norm"}, "layer ids"),
        (lambda m: {"batch": train(1).pack()}, "it describes batch train/0/1, not train/0/0"),
        (lambda m: {"row_ids": m.row_ids + 1}, r"rows \["),
        (lambda m: {"cu_seqlens": shifted(m.cu_seqlens)}, "boundaries"),
        (lambda m: {"tokens": np.roll(m.tokens, 1)}, "tokens are not those"),
        (lambda m: {"mask": 1 - m.mask}, "loss mask"),
    ],
)
def test_record_of_something_else_is_refused(change: Callable, reason: str, plan: Plan, rows: Rows):
    meta = make_meta(plan, rows, train(0))
    assert_refused(reason, replace(meta, **change(meta)), plan, rows)


def test_whole_record_is_accepted_in_place(plan: Plan, rows: Rows):
    meta = make_meta(plan, rows, train(0))
    states = stamp(meta.tokens, meta.cu_seqlens, meta.planes, HIDDEN)
    payload = bytearray(1 << 20)
    offset = write_meta(payload, meta)
    payload[offset : offset + states.nbytes] = states.tobytes()
    found, view = RecordCheck(plan, rows, EXPECTED)(memoryview(payload)[: offset + states.nbytes], train(0))
    assert np.array_equal(found.tokens, meta.tokens)
    payload[offset] ^= 1
    assert view[0] == payload[offset], "the states are read in place"


def test_bytes_that_are_no_record(plan: Plan, rows: Rows):
    with pytest.raises(RecordRefused, match="not a record"):
        RecordCheck(plan, rows, EXPECTED)(memoryview(bytes(8192)), train(0))


def as_bits(states: np.ndarray, dtype: str) -> np.ndarray:
    """float32 states in another dtype, as numpy can hold it (bfloat16 as its bits, cut)."""
    if dtype == "bfloat16":
        return (states.view(np.uint32) >> 16).astype(np.uint16)
    return states.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_non_finite_state_anywhere_is_refused(dtype: str, value: float, plan: Plan, rows: Rows):
    meta = make_meta(plan, rows, train(0), dtype=dtype)
    states = stamp(meta.tokens, meta.cu_seqlens, meta.planes, HIDDEN)
    states[0] *= -1
    check_states(memoryview(as_bits(states, dtype).tobytes()), meta)
    token = len(meta.tokens) // 2 + 1
    states[1, token, 5] = value
    with pytest.raises(RecordRefused, match=rf"layer 3: the states of token {token} .*not finite \(1 tokens\)"):
        check_states(memoryview(as_bits(states, dtype).tobytes()), meta)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_largest_finite_values_pass(dtype: str, plan: Plan, rows: Rows):
    meta = make_meta(plan, rows, train(0), dtype=dtype)
    states = stamp(meta.tokens, meta.cu_seqlens, meta.planes, HIDDEN)
    largest = {"float32": 3.4e38, "bfloat16": 3.38e38, "float16": 65504.0}[dtype]
    states[0, :, 3], states[1, :, 3] = largest, -largest
    check_states(memoryview(as_bits(states, dtype).tobytes()), meta)


def zero(states: np.ndarray) -> None:
    states[:] = 0


def minus_zero_token(states: np.ndarray) -> None:
    states[1, -1] = -0.0


def constant_token(states: np.ndarray) -> None:
    states[0, 0] = 3.5


def one_token_for_all(states: np.ndarray) -> None:
    states[1] = states[1, :1]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (zero, "layer 1: the states of token 0 .* all zero"),
        (minus_zero_token, "layer 3: .* all zero"),
        (constant_token, "layer 1: the states of token 0 .* the same number"),
        (one_token_for_all, "layer 3: every token has the same states"),
    ],
)
def test_dead_states_are_refused(harm: Callable, reason: str, plan: Plan, rows: Rows):
    meta = make_meta(plan, rows, train(0))
    states = stamp(meta.tokens, meta.cu_seqlens, meta.planes, HIDDEN)
    harm(states)
    assert_refused(reason, meta, plan, rows, states)


# Asking, taking, freeing ---------------------------------------------------------------------------------------------


class PlayedFeed:
    """The feed's socket in the test's hands."""

    def __init__(self, address: str):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)
        self.peer = b""

    def receive(self) -> wire.Message:
        assert self.socket.poll(SECONDS), "the rank says nothing"
        self.peer, data = self.socket.recv_multipart()
        return wire.decode(data)

    def expect(self, kind: type, **fields: Any) -> Any:
        """The next message of `kind` with these fields; what comes before it is dropped, being repeated or of no
        interest here."""
        deadline = time.monotonic() + SECONDS / 1000  # a rank goes on repeating what it said
        while True:
            assert time.monotonic() < deadline, f"the rank does not say {kind.__name__} {fields}"
            message = self.receive()
            if isinstance(message, kind) and all(getattr(message, key) == value for key, value in fields.items()):
                return message

    def send(self, message: wire.Message) -> None:
        self.socket.send_multipart([self.peer, wire.encode(message)])

    def send_bytes(self, data: bytes) -> None:
        self.socket.send_multipart([self.peer, data])


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    size = slot_bytes(64, max_rows(64), len(LAYERS), HIDDEN, "float32")
    ring = Ring.open(tmp_path / "w0.ring", worker="w0", fingerprint=Fingerprint({"run": "x"}), slots=4, slot_bytes=size)
    yield ring
    ring.close()


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[PlayedFeed]:
    feed = PlayedFeed(f"ipc://{tmp_path}/ranks.sock")
    yield feed
    feed.socket.close()
    feed.context.term()


def make_source(folder: Path, plan: Plan, rows: Rows, **options: Any) -> RecordSource:
    return RecordSource(
        rank=0,
        trainer=TRAINER,
        address=f"ipc://{folder}/ranks.sock",
        ring_dir=folder,
        check=RecordCheck(plan, rows, EXPECTED),
        phase=(Kind.TRAIN, 0),
        next_phase=plan.next_phase,
        skip_limit=3,
        **options,
    )


@pytest.fixture
def source(tmp_path: Path, plan: Plan, rows: Rows, feed: PlayedFeed, ring: Ring) -> Iterator[RecordSource]:
    source = make_source(tmp_path, plan, rows)
    source.start()
    yield source
    source.close()


def give(feed: PlayedFeed, ring: Ring, want: wire.RankWant, where: tuple[int, int], batch: BatchId, refusals: int = 0):
    slot, seq = where
    feed.send(
        wire.Take(TRAINER, want.kind, want.number, want.index, "w0", ring.ring_id, slot, seq, batch.pack(), refusals)
    )


def take(source: RecordSource, phase=(Kind.TRAIN, 0)) -> Record:
    record = source.next(phase)
    assert record is not None
    return record


def test_asks_checks_trains_frees(source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows):
    assert feed.receive() == wire.RankHello(0, TRAINER)
    want = feed.expect(wire.RankWant)
    assert (want.kind, want.number, want.index) == (Kind.TRAIN, 0, 0)
    where = commit(ring, make_meta(plan, rows, train(0)))
    give(feed, ring, want, where, train(0))
    record = take(source)
    assert record.batch == train(0)
    assert ring.states()[where[0]].taken == TRAINER, "the ring says who holds it"
    feed.expect(wire.RankWant, index=1)  # one ahead
    source.release(record)
    assert ring.states()[where[0]].state is SlotState.FREE


def test_holds_at_most_two(source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows):
    for index in range(2):
        want = feed.expect(wire.RankWant, index=index)
        give(feed, ring, want, commit(ring, make_meta(plan, rows, train(index))), train(index))
    first = take(source)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        if feed.socket.poll(100):
            assert not isinstance(m := feed.receive(), wire.RankWant) or m.index < 2
    source.release(first)
    feed.expect(wire.RankWant, index=2)


def test_request_is_repeated_and_answers_are_taken_once(
    source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows
):
    feed.expect(wire.RankWant, index=0)
    want = feed.expect(wire.RankWant, index=0)  # lost, so again
    where = commit(ring, make_meta(plan, rows, train(0)))
    for _ in range(3):
        give(feed, ring, want, where, train(0))
    feed.send_bytes(b"\x80\x04pickle")
    feed.send(wire.Take(1, 1, 0, 1, "w0", ring.ring_id, *where, train(0).pack(), 0))  # of another trainer
    want = feed.expect(wire.RankWant, index=1)
    feed.send(wire.Exhausted(TRAINER, want.kind, want.number, want.index))
    source.release(take(source))
    assert source.next((Kind.TRAIN, 0)) is None


def test_exhausted_phase_leads_to_the_next(source: RecordSource, feed: PlayedFeed, plan: Plan):
    want = feed.expect(wire.RankWant)
    feed.send(wire.Exhausted(TRAINER, want.kind, want.number, want.index))
    want = feed.expect(wire.RankWant, number=1)
    assert (want.kind, want.index) == (Kind.TRAIN, 0)
    assert source.next((Kind.TRAIN, 0)) is None
    done = wire.Done(0, TRAINER, 1, 0, (train(0).pack(),), (), {"loss": 1.0})
    source.done(done)
    assert feed.expect(wire.Done) == done
    assert feed.expect(wire.Done) == done, "repeated with the request"


def refuse_next(feed: PlayedFeed, ring: Ring, index: int, where: tuple[int, int], batch: BatchId, refusals: int = 0):
    give(feed, ring, feed.expect(wire.RankWant, index=index), where, batch, refusals)
    return feed.expect(wire.Refused, index=index)


def test_bad_record_is_freed_refused_and_the_second_time_listed(
    source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows
):
    meta = make_meta(plan, rows, train(0))
    states = np.zeros(meta.states_shape, np.float32)
    where = commit(ring, meta, states)
    refused = refuse_next(feed, ring, 0, where, train(0))
    assert refused.reason.startswith("worker w0: layer 1")
    assert ring.states()[where[0]].state is SlotState.FREE
    assert source.listed((Kind.TRAIN, 0)) == []
    refuse_next(feed, ring, 1, commit(ring, meta, states), train(0), refusals=1)
    want = feed.expect(wire.RankWant, index=2)
    feed.send(wire.Exhausted(TRAINER, want.kind, want.number, want.index))
    assert source.next((Kind.TRAIN, 0)) is None
    [(batch, reason)] = source.listed((Kind.TRAIN, 0))
    assert batch == train(0)
    assert "all zero" in reason


def test_refusals_are_repeated_before_each_request(
    source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows
):
    meta = make_meta(plan, rows, train(0))
    first = refuse_next(feed, ring, 0, commit(ring, meta, checksum=1), train(0))
    assert "checksum" in first.reason
    assert feed.expect(wire.Refused) == first
    feed.expect(wire.RankWant, index=1)


def test_worker_refused_in_a_row_ends_the_run_by_name(
    source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows
):
    meta = make_meta(plan, rows, train(0), fingerprint=5)
    for index in range(3):
        refuse_next(feed, ring, index, commit(ring, meta), train(0))
    with pytest.raises(BadWorker, match=r"3 records in a row from worker w0 .*fingerprint"):
        source.next((Kind.TRAIN, 0))


def test_a_record_in_order_ends_a_row_of_refusals(
    source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows
):
    bad = make_meta(plan, rows, train(0), fingerprint=5)
    for index in (0, 1):
        refuse_next(feed, ring, index, commit(ring, bad), train(0))
    good = commit(ring, make_meta(plan, rows, train(1)))
    give(feed, ring, feed.expect(wire.RankWant, index=2), good, train(1))
    for index in (3, 4):
        refuse_next(feed, ring, index, commit(ring, bad), train(0))
    feed.expect(wire.RankWant, index=5)
    assert take(source).batch == train(1)


def test_a_ring_that_cannot_be_mapped_ends_the_run(
    source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows, monkeypatch: pytest.MonkeyPatch
):
    """Refused, the record would keep its slot, as there is no ring to free it in: the worker's last one, some day."""

    def too_many(path: Path) -> RingReader:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(RingReader, "open", too_many)
    meta = make_meta(plan, rows, train(0))
    want = feed.expect(wire.RankWant)
    give(feed, ring, want, commit(ring, meta), train(0))
    with pytest.raises(PacelineError, match=r"of worker w0 cannot be mapped: \[Errno 24\] Too many open files"):
        source.next((Kind.TRAIN, 0))
    assert [view.state for view in ring.states()].count(SlotState.READY) == 1, "a later run finds it"


def test_a_record_in_training_is_freed_though_the_thread_has_ended(
    source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows, monkeypatch: pytest.MonkeyPatch
):
    """The rank then ends by the reason why it has, and not by one that follows from it."""
    where = commit(ring, make_meta(plan, rows, train(0)))
    give(feed, ring, feed.expect(wire.RankWant), where, train(0))
    record = take(source)

    def too_many(path: Path) -> RingReader:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(RingReader, "open", too_many)
    want = feed.expect(wire.RankWant, index=1)
    feed.send(wire.Take(TRAINER, want.kind, want.number, 1, "w1", 1, 0, 1, train(1).pack(), 0))
    with pytest.raises(PacelineError, match="of worker w1 cannot be mapped"):
        source.next((Kind.TRAIN, 0))
    source._thread.join()
    source.release(record)
    assert ring.states()[where[0]].state is SlotState.FREE


def test_slot_that_is_no_longer_the_record(source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows):
    slot, seq = commit(ring, make_meta(plan, rows, train(0)))
    refused = refuse_next(feed, ring, 0, (slot, seq + 1), train(0))
    assert "another record" in refused.reason
    assert ring.states()[slot].state is SlotState.READY, "it was not given, so it is not freed"


def test_record_that_changes_while_it_is_read(
    source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows
):
    where = commit(ring, make_meta(plan, rows, train(0)))
    give(feed, ring, feed.expect(wire.RankWant), where, train(0))
    record = take(source)
    thief = RingReader.open(ring.path)
    thief.release(*where)
    with pytest.raises(TornRecord, match="worker w0"):
        source.release(record)
    thief.close()


def test_feed_stops_the_rank(source: RecordSource, feed: PlayedFeed):
    feed.expect(wire.RankWant)
    feed.send(wire.StopRank(TRAINER, "the disk is on fire"))
    with pytest.raises(FeedStopped, match="on fire"):
        source.next((Kind.TRAIN, 0))


def test_waiting_is_reported(source: RecordSource, feed: PlayedFeed):
    want = feed.expect(wire.RankWant)
    calls: list[float] = []

    def waiting() -> None:
        calls.append(time.monotonic())
        if len(calls) == 2:
            feed.send(wire.Exhausted(TRAINER, want.kind, want.number, want.index))

    assert source.next((Kind.TRAIN, 0), waiting) is None
    assert len(calls) >= 2


def test_a_record_is_told_of_ahead_and_keeps_its_ring_until_the_end(
    feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows, tmp_path: Path
):
    """What is told of may be read at once; so its ring stays mapped, trained on or not, until `on_unmap` returned."""
    told: list[Record] = []
    unmapped: list[bytes] = []
    source = make_source(
        tmp_path,
        plan,
        rows,
        on_ready=lambda record, phase: told.append(record),
        on_unmap=lambda address, size: unmapped.append(bytes(told[1].states[:8])),
    )
    source.start()
    for index in range(2):
        want = feed.expect(wire.RankWant, index=index)
        give(feed, ring, want, commit(ring, make_meta(plan, rows, train(index))), train(index))
    first = take(source)
    assert first is told[0]
    source.release(first)
    (tmp_path / "w0.ring").unlink()  # its worker was removed; the other record is never trained
    feed.expect(wire.RankWant, index=2)
    feed.expect(wire.RankWant, index=2)  # a round in which nothing came, and it looked around
    assert [record.batch for record in told] == [train(0), train(1)] and not unmapped
    source.close()
    assert unmapped == [bytes(stamp(told[1].meta.tokens, told[1].meta.cu_seqlens, 2, HIDDEN).tobytes()[:8])]


def test_replaced_ring_is_opened_anew(
    source: RecordSource, feed: PlayedFeed, ring: Ring, plan: Plan, rows: Rows, tmp_path: Path
):
    give(feed, ring, feed.expect(wire.RankWant), commit(ring, make_meta(plan, rows, train(0))), train(0))
    old = take(source)
    (tmp_path / "w0.ring").unlink()
    fresh = Ring.open(
        tmp_path / "w0.ring", worker="w0", fingerprint=Fingerprint({"run": "x"}), slots=2, slot_bytes=ring.slot_bytes
    )
    give(feed, fresh, feed.expect(wire.RankWant, index=1), commit(fresh, make_meta(plan, rows, train(1))), train(1))
    new = take(source)
    assert new.batch == train(1)
    assert old.states[0] is not None, "what is held of the old ring can still be read"
    source.release(old)
    source.release(new)
    fresh.close()
