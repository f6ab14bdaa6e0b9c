"""One target worker: takes batches from the feed, runs the target, commits records to its own ring.

    start   lock the ring (its incarnation is written then), load the target, check it, warm up, say hello
    loop    hear the feed; lowest batch in hand; a free slot; meta, states, checksum, commit; ready; want
    stop    SIGTERM at any moment: the batches in the making are given back, the ring stays. Exit 0

A record that its source has not completed when `begin` returns, as on a GPU, has the next one begun beside it: the GPU
goes from one batch to the next while the worker waits for the last copies of the first, sums, commits and announces it.
What is complete is committed before anything else is begun, and records are committed in the order they were begun.

Nothing is believed because a message said it: the ring is what counts, messages only wake. `work` for another
incarnation is ignored, a new feed id drops what has not been started, anything malformed is counted, logged once and
dropped. The worker waits for a feed that is not there, and for a slot when its ring is full; a signal ends either wait.

A thread reads the rows of the next batches ahead (q_pre). Torch is imported by the real source only, so tests run this
module with a stand-in.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import NamedTuple

import numpy as np
import zmq

from ..common import faults, paths
from ..common.batch import BatchId
from ..common.dataset import prepared_rows
from ..common.devices import assign_devices, device_label, gpu_count
from ..common.drops import lost
from ..common.errors import ConfigError, PacelineError, counted, first_line
from ..common.fingerprint import Fingerprint, run_fingerprint
from ..common.finished import Marker, is_finished, marker
from ..common.notify import Patience, Watchdog, notify
from ..common.numa import bind_near
from ..common.record import (
    IN_THE_MAKING,
    RecordMeta,
    RunningChecksum,
    max_rows,
    record_bytes,
    slot_bytes,
    write_meta,
)
from ..common.ring import Ring, RingInvalid, Slot, SlotState
from ..common.rows import Rows
from ..common.runfile import RunFile
from ..common.target_info import TargetInfo, resolve_layer_ids, target_info
from ..common.wire import (
    Bye,
    Hello,
    Message,
    Ready,
    StopWorker,
    Want,
    WireError,
    Work,
    WorkItem,
    decode,
    encode,
)
from .recording import recording_source
from .source import Filling, StateSource
from .summing import Summing

log = logging.getLogger(__name__)

TICK_S = 1.0  # between wants, and between looks at marker, ring file and status
RETRY_S = 0.1  # between attempts to reach a feed that is not there
PATIENCE_S = 2.0  # a wait longer than this is logged
FULL_POLL_MS = (1, 20)  # a full ring is looked at so often: nobody says when a slot is freed
MAKING_POLL_MS = 1  # the same while a record is in the making, whose end nobody says either
BYE_LINGER_MS = 100


class Stopped(BaseException):
    """A signal asks the worker to stop. Raised in the main thread wherever it is; no `except Exception` keeps it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 130 if number == signal.SIGINT else 0


def main(run: RunFile, index: int, *, device: str | None = None, source: StateSource | None = None) -> int:
    """Runs worker `index` of a run until it is finished, retired or told to stop. Returns the exit code.

    `device`: where, instead of where the run file puts it.

    Raises ConfigError, RingBusy when a live process has this worker's ring, PacelineError when the ring vanished.
    """
    with _stop_signals() as pending:
        try:
            return _serve(run, index, device, source, pending)
        except Stopped as stopped:
            log.info("stopped by %s", stopped)
            notify("STOPPING=1")
            return stopped.exit_code


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Turns the first SIGTERM or SIGINT into `Stopped`; the list holds its number, should the exception get lost."""
    pending: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not pending:
            pending.append(number)
            raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield pending
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(run: RunFile, index: int, device: str | None, source: StateSource | None, pending: list[int]) -> int:
    name = f"w{index}"
    before = marker(run)
    if is_finished(run, before):
        log.info("%s: run %s is finished", name, run.name)
        notify("READY=1", f"STATUS=run {run.name} is finished")  # to leave before being ready would be a failure
        return 0
    notify("STATUS=looking at data and target")
    info = source.info if source else target_info(run.target.path, run.target.trust_remote_code)
    layer_ids = resolve_layer_ids(run, info)
    rows = prepared_rows(run, Patience().alive)
    if rows.vocab_bound > info.vocab_size:
        raise ConfigError(
            f"the data has token {rows.vocab_bound - 1}, the target only {info.vocab_size}: "
            "it was prepared for another tokenizer"
        )
    spec = RecordSpec.of(run, info, layer_ids, run_fingerprint(run, rows, info, layer_ids))
    device = device or assign_devices(run, workers=index + 1).workers[index]
    if source is None and device != "cpu" and int(device.partition(":")[2] or 0) >= gpu_count():
        from .capture import check_device

        check_device(device)  # before there is a ring that nobody removes
    if run.stream.numa == "auto" and (placed := bind_near(device)):  # before the ring's pages are touched
        log.info("%s: %s", name, placed)
    budget = run.stream.token_budget
    notify("STATUS=opening the ring")
    ring = Ring.open(
        paths.ring_dir(run) / f"{name}.ring",
        worker=name,
        fingerprint=spec.fingerprint,
        slots=run.stream.slots,
        slot_bytes=slot_bytes(budget, max_rows(budget), spec.planes, spec.hidden_size, spec.dtype),
        device=device_label(device),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(ring.close)
        faults.point("worker.loading")
        if source is None:
            notify("STATUS=loading the target")
            source = _make_source(run, info, layer_ids, device, rows, name)
        stack.callback(source.close)
        source.register(*ring.mapping())
        return Worker(run, name, rows, ring, source, spec, pending, stack, before).run()


def _make_source(
    run: RunFile, info: TargetInfo, layer_ids: Sequence[int], device: str, rows: Rows, name: str
) -> StateSource:
    load = partial(_target_source, run, info, layer_ids, device)
    return load() if run.stream.record_to is None else recording_source(run, info, layer_ids, rows, name, load)


def _target_source(run: RunFile, info: TargetInfo, layer_ids: Sequence[int], device: str) -> StateSource:
    paths.prepare_torch()  # so a new worker joins a live run warm
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a graph or two need no pool of processes
    from .capture import TargetSource

    return TargetSource.load(run, info, layer_ids, device)


@dataclass(frozen=True)
class RecordSpec:
    """What all records of a run have in common."""

    layer_ids: tuple[int, ...]
    dtype: str
    hidden_size: int
    last_hidden: str
    fingerprint: Fingerprint
    token_budget: int

    @classmethod
    def of(cls, run: RunFile, info: TargetInfo, layer_ids: Sequence[int], fingerprint: Fingerprint) -> "RecordSpec":
        last = "before_norm" if run.target.last_hidden else "none"
        budget = run.stream.token_budget
        return cls(tuple(layer_ids), run.record_dtype, info.hidden_size, last, fingerprint, budget)

    @property
    def planes(self) -> int:
        return len(self.layer_ids) + (self.last_hidden != "none")


# Rows read ahead ---------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A batch's rows end to end."""

    batch: int
    row_ids: np.ndarray  # int64 [R]
    cu_seqlens: np.ndarray  # int32 [R+1]
    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T]


def prepare(rows: Rows, item: WorkItem) -> Prepared:
    """Reads the rows of a work item, which `WorkQueue.fault` has passed."""
    parts = [rows.row(row) for row in item.rows]
    cu_seqlens = np.cumsum([0, *(len(part.tokens) for part in parts)]).astype(np.int32)
    tokens = np.concatenate([part.tokens for part in parts]).astype(np.int32, copy=False)
    mask = np.concatenate([part.mask for part in parts]).astype(np.uint8, copy=False)
    return Prepared(item.batch, np.asarray(item.rows, np.int64), cu_seqlens, tokens, mask)


class WorkQueue:
    """Batches given and not started. A thread reads the rows of the `ahead` lowest ones."""

    def __init__(self, rows: Rows, token_budget: int, ahead: int) -> None:
        self._rows = rows
        self._budget = token_budget
        self._ahead = ahead
        self._items: dict[int, WorkItem] = {}
        self._ready: dict[int, Prepared] = {}
        self._error: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="q_pre", daemon=True)
        self._thread.start()

    def fault(self, item: WorkItem) -> str | None:
        """Why a work item is no batch of this data; None if it is one."""
        try:
            BatchId.unpack(item.batch)
        except ValueError as error:
            return str(error)
        if not item.rows or len(set(item.rows)) < len(item.rows):
            return "no rows, or a row twice"
        if not 0 <= min(item.rows) <= max(item.rows) < self._rows.ids:
            return f"rows out of range, the data has {len(self._rows)}"
        tokens = int(self._rows.lengths[np.array(item.rows) % len(self._rows)].sum())
        return f"{tokens} tokens, more than the budget of {self._budget}" if tokens > self._budget else None

    def add(self, item: WorkItem) -> None:
        """Adds a batch; one that is there already stays as it is."""
        with self._changed:
            self._items.setdefault(item.batch, item)
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._items.clear()
            self._ready.clear()

    @property
    def held(self) -> tuple[int, ...]:
        """The batches in the queue, ascending."""
        with self._changed:
            return tuple(sorted(self._items))

    @property
    def ready(self) -> int:
        """Batches read ahead."""
        return len(self._ready)

    def lowest(self) -> int | None:
        """The batch to do next."""
        with self._changed:
            return min(self._items, default=None)

    def is_read(self, batch: int) -> bool:
        """Whether `take` would return at once."""
        return batch in self._ready

    def take(self, batch: int) -> Prepared:
        """Removes a batch that is in the queue, and waits until its rows are read."""
        with self._changed:
            while batch not in self._ready:
                if self._error is not None:
                    raise PacelineError(
                        f"the rows of a batch cannot be read: {first_line(self._error)}"
                    ) from self._error
                self._changed.wait(1.0)
            del self._items[batch]
            prepared = self._ready.pop(batch)
            self._changed.notify_all()
            return prepared

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> WorkItem | None:
        """Waits for a batch to read: the lowest unread one of the `ahead` lowest. None once closed."""
        with self._changed:
            while not self._closed:
                for batch in sorted(self._items)[: self._ahead]:
                    if batch not in self._ready:
                        return self._items[batch]
                self._changed.wait()
        return None

    def _read(self) -> None:
        try:
            while (item := self._next()) is not None:
                prepared = prepare(self._rows, item)
                with self._changed:
                    if self._items.get(item.batch) == item:  # it may have been dropped meanwhile
                        self._ready[item.batch] = prepared
                    self._changed.notify_all()
        except Exception as error:  # whatever it is, `take` must not wait for rows that nobody reads
            with self._changed:
                self._error = error
                self._changed.notify_all()


# The loop ----------------------------------------------------------------------------------------------------------


class Making(NamedTuple):
    """A record that was begun and is not committed."""

    slot: Slot
    tokens: int
    length: int  # bytes
    running: RunningChecksum
    filling: Filling
    begun: float  # seconds, monotonic


class Worker:
    """One worker's loop, from its first hello until it leaves. `stack` closes ring and source before the bye."""

    def __init__(
        self,
        run: RunFile,
        name: str,
        rows: Rows,
        ring: Ring,
        source: StateSource,
        spec: RecordSpec,
        pending: list[int],
        stack: contextlib.ExitStack,
        before: Marker | None,
    ) -> None:
        """before: the finished marker at this process's start."""
        self._run, self._before = run, before
        self._name = name
        self._ring = ring
        self._source = source
        self._summing = Summing()
        stack.callback(self._summing.close)
        self._spec = spec
        self._pending = pending
        self._stack = stack
        self._address = paths.feed_address(run)
        self._queue = WorkQueue(rows, spec.token_budget, run.stream.prefetch)
        self._watchdog = Watchdog()
        self._told_ready = False
        self._feed: int | None = None
        self._greeted = False
        self._leaving: str | None = None
        self._dropped = 0
        self._making: deque[Making] = deque()  # oldest first
        self._most = min(IN_THE_MAKING, ring.slots)
        self._made = 0
        self._finished = 0.0  # when the last record was committed; seconds, monotonic
        self._rate = 0.0  # tokens/s while making records, smoothed
        self._waited = 0.0
        self._wait: str | None = None  # what the loop waits for, and since when
        self._wait_since = 0.0
        self._wait_said = False
        self._full_poll = FULL_POLL_MS[0]
        self._next_tick = 0.0

    def run(self) -> int:
        """Works until the run is finished or the worker retired (0). Raises Stopped, PacelineError."""
        context = zmq.Context()
        try:
            self._socket = self._connect(context)
            log.info("%s: ready, ring %s, incarnation %x", self._name, self._ring.path, self._ring.incarnation)
            self._told_ready = notify("READY=1", "STATUS=waiting for work")
            try:
                self._loop()
                dropped = f"; {self._dropped} malformed messages were dropped" if self._dropped else ""
                log.info("%s: %s after %d records%s", self._name, self._leaving, self._made, dropped)
                return 0
            finally:
                try:
                    self._give_back()
                finally:
                    self._leave()
        finally:
            context.destroy(linger=BYE_LINGER_MS)

    def _connect(self, context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        # No MAXMSGSIZE: a socket that connects never connects again after a message beyond it. `decode` has the bound.
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a feed that is not there
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.connect(self._address)
        return socket

    def _give_back(self) -> None:
        """Drops what is in the making, once its copies are done: a slot that is given back may be filled again."""
        self._making.clear()
        self._source.settle()
        with contextlib.suppress(RingInvalid):  # a ring that is damaged, or another's by now, is not written to
            self._ring.abandon_all()

    def _leave(self) -> None:
        """Lets go of source and ring first, as a bye means that the lock can be probed now."""
        why = f"{self._leaving or 'stopped'} after {counted(self._made, 'record')}"
        notify("STOPPING=1", f"STATUS={why}")
        self._queue.close()
        self._stack.close()
        faults.point("worker.closed-not-told")
        self._send(Bye(self._name, self._ring.incarnation))
        faults.point("worker.bye")

    def _loop(self) -> None:
        while True:
            self._finish_due()
            self._hear(0)
            if self._pending:
                raise Stopped(self._pending[0])
            if time.monotonic() >= self._next_tick:
                self._tick()
            if self._ring.retired:
                self._leaving = self._leaving or "retired"
            if self._leaving:
                while self._making:
                    self._finish()
                return
            batch = self._next()
            if batch is not None and (slot := self._ring.claim(batch)) is not None:
                self._full_poll = FULL_POLL_MS[0]
                self._resume()
                self._begin(batch, slot)
            elif self._making:
                self._hear(MAKING_POLL_MS)
            elif batch is None:
                self._rest("work", int(max(0.0, self._next_tick - time.monotonic()) * 1000) + 1)
            else:
                self._rest("a free slot", self._full_poll)
                self._full_poll = min(2 * self._full_poll, FULL_POLL_MS[1])

    def _next(self) -> int | None:
        """The lowest batch in hand; while a record is in the making only if its rows are there, as nothing may keep the
        worker from committing that record."""
        batch = self._queue.lowest()
        if self._making and batch is not None and not self._queue.is_read(batch):
            return None
        return batch

    # Waiting

    def _rest(self, what: str, timeout_ms: int) -> None:
        """Waits for a message or the timeout, counts the time, and says so once it has taken a while."""
        started = time.monotonic()
        if self._wait != what:
            self._wait, self._wait_since, self._wait_said = what, started, False
        self._hear(timeout_ms)
        now = time.monotonic()
        self._waited += now - started
        if not self._wait_said and now - self._wait_since >= PATIENCE_S:
            self._wait_said = True
            log.info("%s: waiting for %s", self._name, self._waiting_for())

    def _waiting_for(self) -> str:
        if self._feed is None:
            return f"the trainer at {self._address}"
        return self._wait or ""

    def _resume(self) -> None:
        if self._wait_said:
            log.info("%s: goes on after waiting %.0f s", self._name, time.monotonic() - self._wait_since)
        self._wait, self._wait_said = None, False

    def _tick(self) -> None:
        """Each second: want (or the first hello), the finished marker, the ring's file, status and watchdog."""
        if self._ring.vanished():
            raise PacelineError(
                f"{self._ring.path} vanished under its worker (removed by hand, by systemd's RemoveIPC or a logout)"
            )
        if is_finished(self._run, self._before):
            self._leaving = "finished"
        heard = self._want()
        self._next_tick = time.monotonic() + (TICK_S if heard else RETRY_S)
        if not self._making:  # else only what the target gets done counts: a GPU may hang while this loop goes round
            self._watchdog.beat()
        self._told_ready = self._told_ready or notify("READY=1")
        notify(f"STATUS={self._status_line()}")

    def _status_line(self) -> str:
        """Rate, occupancy and what it does, for `systemctl status`."""
        ready = sum(view.state is SlotState.READY for view in self._ring.states())
        speed = f", {self._rate / 1000:.1f} Ktok/s" if self._made else ""
        doing = f", waiting for {self._waiting_for()}" if self._wait else ""
        ring = f"ring {ready} of {self._ring.slots} full, q_pre {self._queue.ready}"
        return f"{counted(self._made, 'record')}{speed}, {ring}{doing}"

    # Messages

    def _send(self, message: Message) -> bool:
        if lost():
            return True
        try:
            self._socket.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _want(self) -> bool:
        """Tells the feed what the worker holds. False if no feed is connected."""
        held = tuple(sorted({*self._queue.held, *self._being_made()}))
        if not self._greeted:
            faults.point("worker.before-hello")
            self._greeted = self._send(Hello(self._name, self._ring.incarnation, held))
            if self._greeted:
                faults.point("worker.hello")
            return self._greeted
        return self._send(Want(self._name, self._ring.incarnation, held, self._waited, self._rate))

    def _being_made(self) -> set[int]:
        return {slot.batch for slot in self._ring.claimed}

    def _hear(self, timeout_ms: int) -> None:
        """Takes in all messages that are there; waits for the first up to `timeout_ms`."""
        if not self._socket.poll(timeout_ms):
            return
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames, 1 was expected")
                message = decode(frames[0])
                if not isinstance(message, Work | StopWorker):
                    raise WireError(f"{type(message).__name__} is not for a worker")
            except WireError as error:
                self._drop(str(error))
                continue
            if message.incarnation == self._ring.incarnation:
                self._heed(message)

    def _heed(self, message: Work | StopWorker) -> None:
        if isinstance(message, StopWorker):
            self._leaving = message.reason
            faults.point("worker.told-to-stop")
            return
        if message.feed != self._feed:
            if self._feed is not None:
                log.info("%s: another trainer, dropping %d batches not started", self._name, len(self._queue.held))
            self._feed = message.feed
            self._queue.clear()
        begun = {view.batch for view in self._ring.states() if view.state is SlotState.READY} | self._being_made()
        for item in message.items:
            if (fault := self._queue.fault(item)) is not None:
                self._drop(f"batch {item.batch:#x}: {fault}")
            elif item.batch not in begun:
                self._queue.add(item)
        faults.point("worker.work-received")

    def _drop(self, reason: str) -> None:
        self._dropped += 1
        if self._dropped == 1:
            log.warning("%s: dropped a message (%s); further ones are only counted", self._name, reason)

    # A record

    def _begin(self, batch: int, slot: Slot) -> None:
        """Has the claimed slot filled. Where that fails, what was begun before it is committed all the same."""
        begun = time.monotonic()
        try:
            self._making.append(self._fill(slot, self._queue.take(batch), begun))
        except Exception:  # whatever the forward raises; it goes on from here. A signal is for `_give_back`
            self._ring.abandon(slot)
            while self._making:
                self._finish()
            raise

    def _fill(self, slot: Slot, prepared: Prepared, begun: float) -> Making:
        """Writes the meta and has the states written."""
        spec = self._spec
        meta = RecordMeta(
            batch=prepared.batch,
            row_ids=prepared.row_ids,
            cu_seqlens=prepared.cu_seqlens,
            tokens=prepared.tokens,
            mask=prepared.mask,
            layer_ids=spec.layer_ids,
            dtype=spec.dtype,
            hidden_size=spec.hidden_size,
            last_hidden=spec.last_hidden,
            fingerprint=spec.fingerprint.digest,
        )
        length = record_bytes(meta)
        start = write_meta(slot.payload, meta)
        states = slot.payload[start:length]
        running, landed = self._summing.begin(slot.payload, length, start)
        filling = self._source.begin(prepared.tokens, prepared.cu_seqlens, states, self._progress, landed)
        return Making(slot, len(prepared.tokens), length, running, filling, begun)

    def _progress(self) -> None:
        """Called while a batch is launched, which may take as long as the forward before it: some targets wait for
        their device as they run, and no device takes in more than so many kernels ahead."""
        self._watchdog.beat()
        if self._making and self._making[0].filling.done():
            self._finish()

    def _finish_due(self) -> None:
        """Commits what is complete. Where nothing more may be begun beside it, the oldest record is waited for."""
        while self._making and (len(self._making) == self._most or self._making[0].filling.done()):
            self._finish()

    def _finish(self) -> None:
        """Waits for the oldest record in the making, commits and announces it."""
        making = self._making.popleft()
        slot = making.slot
        if not making.filling.finish():
            log.warning("%s: non-finite states in batch %s", self._name, BatchId.unpack(slot.batch))
        total = making.running.result()
        faults.point("worker.filled")
        self._ring.commit(slot, making.length, total)
        faults.point("worker.committed-not-sent")
        self._made += 1
        now = time.monotonic()
        # From the commit before, where this record was begun before that: time that two records share counts once.
        rate = making.tokens / max(now - max(making.begun, self._finished), 1e-6)
        self._finished = now
        self._rate = rate if self._made == 1 else 0.8 * self._rate + 0.2 * rate
        self._send(Ready(self._name, self._ring.incarnation, slot.index, slot.seq, slot.batch))
        faults.point("worker.sent")
        self._want()
        self._watchdog.beat()
