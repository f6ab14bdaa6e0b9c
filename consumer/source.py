"""A rank's end of the stream: asks the feed for records, checks them, hands them to the training loop, frees them.

One thread talks to the feed and checks records while the loop trains, and keeps one record ahead of it. It follows the
phases by itself: when the feed says that a phase has no more records, it asks for the next one's. Messages may be lost,
so the request in hand is sent again each second, after all that the feed must know before it: this rank's refusals and,
from rank 0, what the last phases trained.

A record is freed by `release`, after the loop has read all of it, and only if the slot's words still say that it is
the record that was given. A record that does not check out is freed and refused; refused a second time, its batch is
listed: it counts as one of its step's records and is never trained. A worker whose records are refused `skip_limit`
times in a row ends the run.

    loop            next -> train -> release                   next -> ...
    thread  want(0)  check(0)  want(1)  check(1) .............. want(2) ...
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from ..common import wire
from ..common.batch import BatchId, Kind
from ..common.drops import lost
from ..common.errors import PacelineError
from ..common.faults import point
from ..common.record import RecordMeta, checksum
from ..common.ring import RingInvalid, RingReader
from .check import RecordCheck, RecordRefused

RESEND_SECONDS = 1.0
_CLOSE_LINGER_MS = 200  # for the last `Done`
_WAIT_SECONDS = 0.2
_RETRIES = 4  # reads of a record found by scanning, before it is called bad
_RETRY_SECONDS = 0.02
_HELD = 2  # records a rank holds at most: the one in training and the next

_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # of a ring's file, which is looked for in one folder only

log = logging.getLogger(__name__)

Phase = tuple[Kind, int]


class BadWorker(PacelineError):
    """A worker's records were refused too often in a row."""


class TornRecord(PacelineError):
    """A record changed while it was read: what was computed from it must be thrown away."""


class FeedStopped(PacelineError):
    """The feed told this rank to stop."""


@dataclass(frozen=True)
class Record:
    """A record that checks out. `states`: [planes, T, H] in place, valid until `release`."""

    batch: BatchId
    meta: RecordMeta
    states: memoryview
    take: wire.Take
    reader: RingReader

    @property
    def tokens(self) -> int:
        return len(self.meta.tokens)


@dataclass
class _Progress:
    """What this rank got of one phase."""

    ready: deque[Record] = field(default_factory=deque)
    listed: list[tuple[BatchId, str]] = field(default_factory=list)
    exhausted: bool = False


class RecordSource:
    """Records for one rank of one trainer, phase by phase.

    address: where the feed listens for ranks. ring_dir: the run's rings. next_phase: what follows a phase.
    on_map, on_unmap: called with (address, bytes) when a ring has been mapped and before it is unmapped; by the
        source's thread, or in the end by `close`.
    on_ready: called with a record that checks out, before `next` gives it, in the order in which it gives them, by the
        source's thread. It may read the record until that is released or its ring unmapped.
    """

    def __init__(
        self,
        *,
        rank: int,
        trainer: int,
        address: str,
        ring_dir: Path,
        check: RecordCheck,
        phase: Phase | None,
        next_phase: Callable[[Kind, int], Phase | None],
        skip_limit: int,
        on_map: Callable[[int, int], None] = lambda address, size: None,
        on_unmap: Callable[[int, int], None] = lambda address, size: None,
        on_ready: Callable[["Record", Phase], None] = lambda record, phase: None,
    ):
        self._rank, self._trainer = rank, trainer
        self._address, self._ring_dir = address, ring_dir
        self._check, self._next_phase, self._skip_limit = check, next_phase, skip_limit
        self._on_map, self._on_unmap, self._on_ready = on_map, on_unmap, on_ready
        # Of the thread alone:
        self._readers: dict[str, RingReader] = {}
        self._replaced: list[RingReader] = []  # no longer given, but perhaps still read
        self._phase, self._index = phase, 0
        self._in_a_row: dict[str, int] = {}
        self.malformed = 0  # messages that were none
        # Of both, under the lock:
        self._lock = threading.Condition()
        self._phases: dict[Phase, _Progress] = {}
        self._held = 0
        self._refused: list[wire.Refused] = []
        self._done: deque[wire.Done] = deque(maxlen=2)
        self._failure: Exception | None = None
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)

    # The training loop's side ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def next(self, phase: Phase, waiting: Callable[[], None] = lambda: None) -> Record | None:
        """This rank's next record of `phase`, or None when it gets no more of them. Calls `waiting` several times a
        second; what it raises ends the wait.

        Raises:
            BadWorker, FeedStopped: the run must stop.
        """
        with self._lock:
            while True:
                if self._failure is not None:
                    raise self._failure
                progress = self._of(phase)
                if progress.ready:
                    return progress.ready.popleft()
                if progress.exhausted:
                    return None
                if not self._lock.wait(_WAIT_SECONDS):
                    waiting()

    def release(self, record: Record) -> None:
        """Free the record's slot: all reads of it, asynchronous copies too, are complete.

        Raises:
            TornRecord: the slot was no longer the record's, so what was read of it is worthless.
        """
        point("rank.copied-not-released")
        reason = f"slot {record.take.slot} holds another record"
        try:
            released = record.reader.release(record.take.slot, record.take.seq)
        except RingInvalid as error:
            released, reason = False, str(error)
        if not released:
            raise TornRecord(
                f"the record of batch {record.batch} from worker {record.take.worker} changed while it was read "
                f"({record.reader.path}: {reason})"
            )
        point("rank.released-not-told")
        with self._lock:
            self._held -= 1
        self._poke()

    def listed(self, phase: Phase) -> list[tuple[BatchId, str]]:
        """The batches this rank lists in `phase`, with the reason; complete once `next` has returned None."""
        with self._lock:
            return list(self._of(phase).listed)

    def done(self, message: wire.Done) -> None:
        """Tell the feed that a phase is complete on all ranks (rank 0)."""
        with self._lock:
            self._done.append(message)
        self._poke()

    def leave(self, phase: Phase) -> None:
        """Forget a phase that is complete on all ranks."""
        with self._lock:
            self._phases.pop(phase, None)
            self._refused = [one for one in self._refused if (one.kind, one.number) != phase]

    def close(self) -> None:
        """Stop the thread. Records held stay READY in their rings, for the next trainer."""
        with self._lock:
            self._stopping = True
        self._poke()
        if self._thread.ident is not None:
            self._thread.join()
        # Not by the thread, which may have ended while the loop reads a record.
        self._replaced += self._readers.values()
        self._readers.clear()
        self._unmap_replaced()
        os.close(self._wake)

    def _of(self, phase: Phase) -> _Progress:
        return self._phases.setdefault(phase, _Progress())

    def _poke(self) -> None:
        os.eventfd_write(self._wake, 1)

    # The thread's side ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        # No MAXMSGSIZE: a socket that connects never connects again after a message beyond it. `decode` has the bound.
        socket.connect(self._address)
        try:
            self._talk(socket)
        except Exception as error:  # whatever it is, the loop must raise it rather than wait for ever
            self._fail(error)
        finally:
            socket.close(linger=_CLOSE_LINGER_MS)
            context.term()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._lock.notify_all()

    def _talk(self, socket: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        point("rank.before-hello")
        self._send(socket, wire.RankHello(self._rank, self._trainer))
        point("rank.hello")
        asked, sent_at = None, 0.0
        while not self._stopping:
            now = time.monotonic()
            request = self._request()
            news = self._take_wake()
            if news or request != asked or now - sent_at >= RESEND_SECONDS:
                self._say(socket, request)
                asked, sent_at = request, now
            elif not poller.poll(1 + int(1000 * max(0.0, sent_at + RESEND_SECONDS - now))):
                self._drop_replaced()
            while socket.poll(0):
                self._receive(socket.recv_multipart(), request)
        self._say(socket, None)

    def _take_wake(self) -> bool:
        try:
            return os.eventfd_read(self._wake) > 0
        except BlockingIOError:
            return False

    def _request(self) -> wire.RankWant | None:
        """The request in hand: None when enough is held or the run has no more phases."""
        with self._lock:
            if self._phase is None or self._held >= _HELD or self._failure is not None:
                return None
            kind, number = self._phase
            refused = tuple(one.index for one in self._refused if (one.kind, one.number) == (kind, number))
        return wire.RankWant(self._rank, self._trainer, int(kind), number, self._index, refused)

    def _say(self, socket: "zmq.Socket[bytes]", request: wire.RankWant | None) -> None:
        with self._lock:
            first = [*self._refused, *self._done]
        for message in (*first, *([request] if request else [])):
            self._send(socket, message)
        if request is not None:
            point("rank.asked")

    def _send(self, socket: "zmq.Socket[bytes]", message: wire.Message) -> None:
        if lost():
            return
        try:
            socket.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return  # no peer and a full queue: it is sent again

    def _receive(self, frames: list[bytes], request: wire.RankWant | None) -> None:
        try:
            if len(frames) != 1:
                raise wire.WireError(f"{len(frames)} frames, 1 was expected")
            message = wire.decode(frames[0])
            if not isinstance(message, wire.Take | wire.Exhausted | wire.StopRank):
                raise wire.WireError(f"{type(message).__name__} is not for a rank")
        except wire.WireError as error:
            if not self.malformed:
                log.warning("dropped a message (%s); further ones are only counted", error)
            self.malformed += 1
            return
        if isinstance(message, wire.StopRank) and message.trainer == self._trainer and message.reason != "finished":
            self._fail(FeedStopped(message.reason))
        if request is None or not isinstance(message, wire.Take | wire.Exhausted):
            return
        if message.trainer != self._trainer or self._failure is not None:
            return
        # A repeated or late answer is not to the request in hand, which `_request` would name now.
        if (message.kind, message.number, message.index) != (request.kind, request.number, self._index):
            return
        assert self._phase is not None
        if self._phase != (Kind(message.kind), message.number):
            return
        if isinstance(message, wire.Exhausted):
            self._exhausted()
        else:
            point("rank.take-received")
            self._accept(message)

    def _exhausted(self) -> None:
        assert self._phase is not None
        with self._lock:
            self._of(self._phase).exhausted = True
            self._lock.notify_all()
        self._phase, self._index = self._next_phase(*self._phase), 0

    def _accept(self, take: wire.Take) -> None:
        assert self._phase is not None
        try:
            record = self._open(take)
        except RecordRefused as error:
            self._refuse(take, str(error))
        else:
            self._in_a_row[take.worker] = 0
            self._on_ready(record, self._phase)
            with self._lock:
                self._of(self._phase).ready.append(record)
                self._held += 1
                self._lock.notify_all()
        self._index += 1

    def _open(self, take: wire.Take) -> Record:
        """Check the record that `take` names, and take it."""
        batch = BatchId.unpack(take.batch)
        try:
            reader = self._reader(take)
            payload = self._payload(reader, take)
            meta, states = self._check(payload, batch)
            if not reader.take(take.slot, take.seq, self._trainer):
                raise RecordRefused("its slot was freed while it was checked")
        except (RingInvalid, FileNotFoundError) as error:
            raise RecordRefused(f"its ring cannot be read: {error}") from None
        except (
            OSError
        ) as error:  # no fault of the record's; refused, it would keep its slot, with no ring to free it in
            raise PacelineError(f"the ring of worker {take.worker} cannot be mapped: {error}") from error
        return Record(batch, meta, states, take, reader)

    def _reader(self, take: wire.Take) -> RingReader:
        reader = self._readers.get(take.worker)
        if reader is not None and reader.ring_id != take.ring:
            self._replaced.append(self._readers.pop(take.worker))
            reader = None
        if reader is None:
            if not _WORKER.fullmatch(take.worker):
                raise RecordRefused(f"{take.worker[:64]!r} is no worker's name")
            reader = RingReader.open(self._ring_dir / f"{take.worker}.ring")
            self._readers[take.worker] = reader
            self._on_map(*reader.mapping())
        if reader.ring_id != take.ring:
            raise RecordRefused(f"the ring is {reader.ring_id:016x}, not {take.ring:016x}")
        return reader

    def _payload(self, reader: RingReader, take: wire.Take) -> memoryview:
        """The record's bytes, once the slot's words and the checksum agree; a racing write is given time to settle."""
        reason = ""
        for attempt in range(_RETRIES):
            if attempt:
                time.sleep(_RETRY_SECONDS)
            if not reader.holds(take.slot, take.seq):
                reason = "its slot holds another record"
                continue
            view = reader.slot(take.slot)
            if view.batch != take.batch:
                reason = "its slot is of another batch"
                continue
            payload = reader.payload(view)
            if checksum(payload, view.length) == view.checksum:
                return payload
            reason = "its checksum is wrong"
        raise RecordRefused(reason)

    def _refuse(self, take: wire.Take, reason: str) -> None:
        """Free the slot, count, and tell the feed; a batch refused for the second time is listed."""
        point("rank.refusing")
        reader = self._readers.get(take.worker)
        if reader is not None and reader.ring_id == take.ring:
            with contextlib.suppress(RingInvalid):  # of a damaged ring: there is no slot to free
                reader.release(take.slot, take.seq)
        point("rank.refused")
        reason = f"worker {take.worker}: {reason}"
        message = wire.Refused(self._rank, self._trainer, take.kind, take.number, take.index, take.batch, reason[:400])
        in_a_row = self._in_a_row[take.worker] = self._in_a_row.get(take.worker, 0) + 1
        phase = (Kind(take.kind), take.number)
        with self._lock:
            self._refused.append(message)
            if take.refusals:
                self._of(phase).listed.append((BatchId.unpack(take.batch), reason))
        self._poke()
        if in_a_row >= self._skip_limit:
            self._fail(
                BadWorker(
                    f"{in_a_row} records in a row from worker {take.worker} were refused (trainer.skip_limit); "
                    f"the last, batch {BatchId.unpack(take.batch)}: {reason}"
                )
            )

    def _drop_replaced(self) -> None:
        """Give up rings that were removed or replaced, and unmap them once nothing is held."""
        for name in [name for name, reader in self._readers.items() if reader.replaced()]:
            self._replaced.append(self._readers.pop(name))
        with self._lock:
            idle = not self._held
        if idle:
            self._unmap_replaced()

    def _unmap_replaced(self) -> None:
        for reader in self._replaced:
            self._on_unmap(*reader.mapping())
            reader.close()
        self._replaced.clear()
