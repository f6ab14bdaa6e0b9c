"""The feeder: the trainer's thread that carries out the feed's decisions.

It owns both sockets and the feed's memory (`FeedState`), reads every ring, frees and removes, and never touches weights
or checkpoints. At each message, and each second without one, it scans the rings and carries out what `decide` returns.

Messages are hints: a lost one costs a second, a doubled or hostile one nothing. What cannot be read is counted, logged
at a bounded rate and dropped. Start it only while holding consumer.lock: sockets that an earlier trainer left behind
are removed.

    workers  DEALER --- ROUTER feed.sock  \\                     / rings (scan, free, remove)
                                           feeder --- decide ---
    ranks    DEALER --- ROUTER ranks.sock /                     \\ Work, Take, Exhausted, StopWorker, StopRank
"""

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

from ..common import faults, wire
from ..common.batch import BatchId
from ..common.drops import lost
from ..common.errors import ConfigError
from ..common.fingerprint import Fingerprint
from ..common.ring import RingInvalid, RingReader, RingScan, SlotState, ring_paths
from ..common.runfile import RunFile
from .feed import Assign, FeedPlan, Free, Give, GiveExhausted, Phase, RemoveRing, Resend, decide
from .feedstate import FeedBroken, FeedState
from .ledger import Ledger

RESCAN_S = 1.0
SILENT_S = 60.0  # a worker in a long forward, or loading, says nothing meanwhile
"""A live worker that has said nothing for so long is reported; only its lock proves it dead."""

_COMPLAIN_EVERY_S = 10.0
_HIGH_WATER = 1000  # messages queued for, and from, each peer
_DRAIN = 256  # messages read from a socket before the next decision
_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less the closing NUL
_WORK_BYTES = wire.MAX_BYTES // 2  # of a Work message; longer ones are split
_ROW_BYTES, _ITEM_BYTES = 9, 32  # most that a row and the rest of an item take

log = logging.getLogger(__name__)

_WorkerMessage = wire.Hello | wire.Want | wire.Ready | wire.Bye
_RankMessage = wire.RankHello | wire.RankWant | wire.Refused | wire.Done


@dataclass(frozen=True)
class WorkerStatus:
    """One worker as the feed sees it."""

    worker: str
    device: str
    alive: bool
    connected: bool  # has said hello, so that work can be sent
    retired: bool
    silent: bool  # alive and connected, but not heard of for SILENT_S
    held: int  # batches it says it holds, the one in the making included (q_pre)
    ready: int  # READY records in its ring, taken ones included (q_hs)
    slots: int
    produced: int  # records since its ring was made
    tokens_per_s: float
    waited: float | None  # seconds since its start without a free slot or without work; None until it has said so


@dataclass(frozen=True)
class FeedSnapshot:
    """For status and log line; taken after each decision."""

    phase: Phase | None  # None: every batch of the run is done
    workers: tuple[WorkerStatus, ...]
    waiting_ranks: tuple[int, ...]
    counters: dict[str, int]

    @property
    def q_pre(self) -> list[int]:
        return [worker.held for worker in self.workers]

    @property
    def q_hs(self) -> list[int]:
        return [worker.ready for worker in self.workers]


class Feeder:
    """The feed of one trainer.

    ledger, phase: as resumed; the ledger is copied. trainer: this trainer's incarnation, also the feed's id: a later
    trainer's must be another. on_done and on_refused are called from the feed's thread and must not block.
    """

    def __init__(
        self,
        run: RunFile,
        plan: FeedPlan,
        ledger: Ledger,
        phase: Phase | None,
        *,
        trainer: int,
        fingerprint: Fingerprint,
        ring_dir: Path,
        run_dir: Path,
        on_done: Callable[[wire.Done], None] = lambda done: None,
        on_refused: Callable[[wire.Refused], None] = lambda refused: None,
    ) -> None:
        self._plan = plan
        self._trainer = trainer
        self._rings = _Rings(ring_dir, fingerprint)
        self._addresses = run_dir / "feed.sock", run_dir / "ranks.sock"
        self._on_done, self._on_refused = on_done, on_refused
        self._state = FeedState(
            plan,
            ledger,
            phase,
            trainer=trainer,
            ranks=run.trainer.ranks,
            strict=run.stream.order == "strict",
            prefetch=run.stream.prefetch,
        )
        self._routes: dict[str, bytes] = {}
        self._rank_routes: dict[int, bytes] = {}
        self._waited: dict[str, float] = {}
        self._silent: set[str] = set()
        self._complaints = _Complaints()
        self._failure: BaseException | None = None
        self._stopping = False
        self._finished = False
        self._told: set[str] = set()  # workers that were told so
        self._snapshot = FeedSnapshot(phase, (), (), asdict(self._state.counters))
        self._turned = time.monotonic()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        """Bind both sockets and start the thread. ConfigError if a socket cannot be bound."""
        self._context = zmq.Context()
        try:
            self._workers, self._ranks = (self._bind(path) for path in self._addresses)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        faults.point("feed.bound")
        self._thread.start()

    def stop(self) -> None:
        """End the thread, close sockets and rings. Workers and ranks are not told: they wait for the next trainer."""
        self._stopping = True
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def finish(self) -> None:
        """Tell workers, those that come later too, that the run is over although batches are left (max_hours)."""
        self._finished = True
        os.eventfd_write(self._wake, 1)

    def snapshot(self) -> FeedSnapshot:
        return self._snapshot

    @property
    def silence(self) -> float:
        """Seconds since the thread's last complete turn; it makes one a second at least."""
        return time.monotonic() - self._turned

    def check(self) -> None:
        """Raise what ended the thread, if anything did: the run has to stop."""
        if self._failure is not None:
            raise self._failure

    def _bind(self, path: Path) -> "zmq.Socket[bytes]":
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
            raise ConfigError(
                f"socket path {path} is longer than {_SOCKET_PATH_BYTES} bytes: use a shorter run directory"
            )
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        umask = os.umask(0o177)
        try:
            if os.path.lexists(path):
                if not stat.S_ISSOCK(path.lstat().st_mode):
                    raise ConfigError(f"{path} is in the way and is no socket: move it away")
                path.unlink()
            faults.point("feed.before-bind")
            socket.bind(f"ipc://{path}")
            path.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError(f"cannot listen at {path}: {error.strerror}") from error
        finally:
            os.umask(umask)
        return socket

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except FeedBroken as error:
            self._failure = error
            for route in self._rank_routes.values():
                self._send(self._ranks, route, wire.StopRank(self._trainer, str(error)))
        except BaseException as error:  # whatever it is, `check` raises it in the trainer's main thread
            self._failure = error
        finally:
            self._rings.close()
            self._context.destroy(linger=0)
            for path in self._addresses:
                path.unlink(missing_ok=True)

    def _turn(self) -> None:
        """Hear what there is to hear, look at the rings, and act."""
        from_workers, from_ranks = self._hear()
        scans = self._rings.scan(relist=any(self._unknown(message) for _, message in from_workers))
        known = {scan.worker: scan for scan in scans}
        for worker in self._state.workers.keys() - known.keys():
            self._forget(worker)
        for route, message in from_workers:
            self._hear_worker(route, message, known.get(message.worker))
        for route, message in from_ranks:
            self._hear_rank(route, message)
        self._tell_workers()
        self._act(scans)
        self._snapshot = self._take_snapshot(scans)
        self._turned = time.monotonic()

    def _hear(self) -> tuple[list[tuple[bytes, _WorkerMessage]], list[tuple[bytes, _RankMessage]]]:
        poller = zmq.Poller()
        for source in (self._workers, self._ranks, self._wake):
            poller.register(source, zmq.POLLIN)
        poller.poll(max(0, round((self._rings.due - time.monotonic()) * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        workers = [(r, m) for r, m in self._drain(self._workers, "workers") if isinstance(m, _WorkerMessage)]
        ranks = [(r, m) for r, m in self._drain(self._ranks, "ranks") if isinstance(m, _RankMessage)]
        return workers, ranks

    def _drain(self, socket: "zmq.Socket[bytes]", name: str) -> list[tuple[bytes, wire.Message]]:
        heard: list[tuple[bytes, wire.Message]] = []
        expected = _WorkerMessage if name == "workers" else _RankMessage
        for _ in range(_DRAIN):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                if len(frames) != 2:
                    raise wire.WireError(f"{len(frames) - 1} frames, 1 was expected")
                message = wire.decode(frames[1])
                if not isinstance(message, expected):
                    raise wire.WireError(f"{type(message).__name__} is not for this socket")
            except wire.WireError as error:
                self._state.counters.malformed += 1
                self._complaints.log(name, f"dropped a message on the socket of {name}: {str(error)[:200]}")
                continue
            heard.append((frames[0], message))
        return heard

    # ---- hearing

    def _unknown(self, message: _WorkerMessage) -> bool:
        hint = self._state.workers.get(message.worker)
        return hint is None or hint.incarnation != message.incarnation

    def _forget(self, worker: str) -> None:
        self._state.forget(worker)
        self._routes.pop(worker, None)
        self._waited.pop(worker, None)

    def _hear_worker(self, route: bytes, message: _WorkerMessage, scan: RingScan | None) -> None:
        """Learn the route of a live incarnation; what the message says is only a hint."""
        speaks = isinstance(message, wire.Hello | wire.Want)
        if self._finished and speaks:
            self._send(self._workers, route, wire.StopWorker(message.incarnation, "finished"))
        if scan is None or scan.incarnation != message.incarnation or not scan.alive:
            return
        self._routes[scan.worker] = route
        if speaks:
            if self._unknown(message):
                self._waited.pop(scan.worker, None)
            rate = None
            if isinstance(message, wire.Want):
                rate, self._waited[scan.worker] = message.tokens_per_s, message.waited
            else:
                faults.point("feed.hello-heard")
            self._state.heard(scan.worker, scan.incarnation, message.held, rate, time.monotonic())

    def _hear_rank(self, route: bytes, message: _RankMessage) -> None:
        state = self._state
        if message.trainer != self._trainer or message.rank >= state.ranks:
            self._complaints.log("strangers", f"dropped a message of rank {message.rank} of another trainer")
            return
        self._rank_routes[message.rank] = route
        match message:
            case wire.RankWant():
                answer = state.want(message)
                if answer is not None:
                    self._send(self._ranks, route, answer)
            case wire.Refused():
                if state.refused(message):
                    faults.point("feed.refusal-heard")
                    log.warning("batch %s refused by rank %d: %s", _name(message.batch), message.rank, message.reason)
                    self._on_refused(message)
            case wire.Done():
                faults.point("feed.done-heard")
                if state.done(message):
                    faults.point("feed.done-recorded")
                    self._on_done(message)
            case wire.RankHello():
                pass
        if state.phase is None and not isinstance(message, wire.Refused):
            self._send(self._ranks, route, wire.StopRank(self._trainer, "finished"))

    def _tell_workers(self) -> None:
        """Once the run is over, send each worker home; one that misses it asks again."""
        self._finished = self._finished or self._state.phase is None
        if self._finished:
            for worker, hint in self._state.workers.items():
                if worker not in self._told:
                    faults.point("feed.finished-not-told")
                    self._told.add(worker)
                    self._send(self._workers, self._routes[worker], wire.StopWorker(hint.incarnation, "finished"))
                    faults.point("feed.finished-told")

    # ---- acting

    def _act(self, scans: list[RingScan]) -> None:
        work: dict[tuple[str, int], list[int]] = {}
        now = time.monotonic()
        for action in decide(self._state.view(scans)):
            answer = self._state.apply(action, now)
            match action:
                case Give(request) | GiveExhausted(request):
                    self._answer(answer, request.rank)
                case Free(place):
                    self._rings.free(place.worker, place.ring, place.slot, place.seq)
                case Assign() | Resend():
                    work.setdefault((action.worker, action.incarnation), []).append(action.batch)
                case RemoveRing(worker, ring):
                    if self._rings.remove(worker, ring):
                        self._state.counters.removed_rings += 1
                        log.info("removed the ring of retired worker %s", worker)
                case _:
                    pass
        for (worker, incarnation), batches in work.items():
            self._send_work(worker, incarnation, batches)

    def _answer(self, answer: wire.Take | wire.Exhausted | None, rank: int) -> None:
        if isinstance(answer, wire.Take):
            faults.point("feed.given-not-sent")
        else:
            faults.point("feed.exhausted-not-sent")
        route = self._rank_routes.get(rank)
        if route is not None and answer is not None:
            self._send(self._ranks, route, answer)
        if isinstance(answer, wire.Take):
            faults.point("feed.given")

    def _send_work(self, worker: str, incarnation: int, batches: list[int]) -> None:
        faults.point("feed.assigned-not-sent")
        items: list[wire.WorkItem] = []
        size = 0
        for batch in batches:
            rows = tuple(self._plan.rows(BatchId.unpack(batch)).tolist())
            item_size = len(rows) * _ROW_BYTES + _ITEM_BYTES
            if items and size + item_size > _WORK_BYTES:
                self._send(self._workers, self._routes[worker], wire.Work(incarnation, self._trainer, tuple(items)))
                items, size = [], 0
            items.append(wire.WorkItem(batch, rows))
            size += item_size
        self._send(self._workers, self._routes[worker], wire.Work(incarnation, self._trainer, tuple(items)))
        faults.point("feed.work-sent")

    def _send(self, socket: "zmq.Socket[bytes]", route: bytes, message: wire.Message) -> None:
        """Send if the peer is there and takes it; what is lost is asked for again."""
        if lost():
            return
        try:
            socket.send_multipart([route, wire.encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, errno.EHOSTUNREACH):
                raise
            self._state.counters.unroutable += 1

    def _note_silence(self, worker: str, silent: bool) -> None:
        """Log once that a live worker went silent, and once that it is back: an alarm that proves nothing."""
        if silent and worker not in self._silent:
            log.warning("worker %s is alive but has said nothing for %.0f s", worker, SILENT_S)
            self._silent.add(worker)
        elif not silent and worker in self._silent:
            log.info("worker %s is heard again", worker)
            self._silent.discard(worker)

    def _take_snapshot(self, scans: list[RingScan]) -> FeedSnapshot:
        state, now = self._state, time.monotonic()
        workers: list[WorkerStatus] = []
        for scan in scans:
            hint = state.workers.get(scan.worker)
            connected = hint is not None and scan.alive and hint.incarnation == scan.incarnation
            silent = connected and now - hint.heard_at > SILENT_S if hint else False
            self._note_silence(scan.worker, silent)
            workers.append(
                WorkerStatus(
                    worker=scan.worker,
                    device=scan.device,
                    alive=scan.alive,
                    connected=connected,
                    retired=scan.retired,
                    silent=silent,
                    held=len(hint.held) if hint and connected else 0,
                    ready=sum(slot.state is SlotState.READY for slot in scan.slots),
                    slots=len(scan.slots),
                    produced=scan.produced,
                    tokens_per_s=hint.tokens_per_s if hint and connected else 0.0,
                    waited=self._waited.get(scan.worker),
                )
            )
        return FeedSnapshot(state.phase, tuple(workers), tuple(state.waiting_ranks), asdict(state.counters))


class _Rings:
    """The run's rings, found by listing their folder: each second, and when an unknown worker speaks."""

    def __init__(self, folder: Path, fingerprint: Fingerprint) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._readers: dict[str, RingReader] = {}
        self._skipped: dict[str, str] = {}  # file name -> why, logged once
        self.due = 0.0  # when the folder is to be listed again

    def scan(self, *, relist: bool) -> list[RingScan]:
        """A scan of every ring of this run that is in order."""
        for worker in [worker for worker, reader in self._readers.items() if reader.replaced()]:
            self._drop(worker)
            relist = True
        if relist or time.monotonic() >= self.due:
            self._list()
        scans: list[RingScan] = []
        for reader in list(self._readers.values()):
            with self._left_out(reader):
                scans.append(reader.scan())
        return scans

    def _list(self) -> None:
        self.due = time.monotonic() + RESCAN_S
        paths = ring_paths(self._folder)
        for path in paths:
            if path.name.removesuffix(".ring") not in self._readers:
                self._open(path)
        self._skipped = {name: why for name, why in self._skipped.items() if any(p.name == name for p in paths)}

    def _open(self, path: Path) -> None:
        try:
            reader = RingReader.open(path)
        except FileNotFoundError:
            return
        except (RingInvalid, OSError) as error:
            self._skip(path, str(error))
            return
        if reader.fingerprint.digest != self._fingerprint.digest:
            differences = self._fingerprint.differences(reader.fingerprint, "the ring")
            self._skip(path, f"it is of another run file, dataset or target ({differences})")
            reader.close()
            return
        self._skipped.pop(path.name, None)
        self._readers[reader.worker] = reader

    def _skip(self, path: Path, why: str) -> None:
        if self._skipped.get(path.name) != why:
            log.warning("ring %s is left out: %s", path, why)
        self._skipped[path.name] = why

    def _drop(self, worker: str) -> None:
        self._readers.pop(worker).close()

    def free(self, worker: str, ring: int, slot: int, seq: int) -> None:
        reader = self._readers.get(worker)
        if reader is not None and reader.ring_id == ring:
            with self._left_out(reader):
                reader.release(slot, seq)

    def remove(self, worker: str, ring: int) -> bool:
        reader = self._readers.get(worker)
        gone = False
        if reader is not None and reader.ring_id == ring:
            with self._left_out(reader):
                gone = reader.remove_if_empty()
        if gone:
            self._drop(worker)
        return gone

    @contextlib.contextmanager
    def _left_out(self, reader: RingReader) -> Iterator[None]:
        """A ring that turns out to be damaged is left out from now on."""
        try:
            yield
        except RingInvalid as error:
            self._skip(reader.path, str(error))
            self._drop(reader.worker)

    def close(self) -> None:
        for worker in list(self._readers):
            self._drop(worker)


class _Complaints:
    """Warnings at a bounded rate: one for each key in a while, with the number of those left out."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def log(self, key: str, text: str) -> None:
        now = time.monotonic()
        if now - self._last.get(key, -_COMPLAIN_EVERY_S) < _COMPLAIN_EVERY_S:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return
        more = self._left_out.pop(key, 0)
        self._last[key] = now
        log.warning("%s%s", text, f" (and {more} more since the last such line)" if more else "")


def _name(word: int) -> str:
    return str(BatchId.unpack(word))
