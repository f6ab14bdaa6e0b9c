"""The ring: one file of fixed slots for each worker, through which records reach the ranks.

A slot's life. Every word has one writer, so there is no lock and no compare-and-swap in the data path:

    FREE      done == seq             claim:   seq = n (a number never used before)
    WRITING   commit != seq           commit:  batch, length, checksum, check word, then commit = n
    READY     commit == seq > done    take:    taken_by = trainer, then taken_seq = n; still READY
    FREE      done == seq             release: done = n

The owner (a worker) uses `Ring`, the feed and the ranks use `RingReader`. The owner holds an OFD lock on the file for
life, which is the only proof that it lives. A READY slot survives the death of both sides.

The file is made under a temporary name, allocated and pre-faulted in full, and renamed, all under its lock: there is
no half-made ring, and no SIGBUS later. A restarted worker adopts its ring after checking every field. A ring that
cannot be adopted is replaced by a new file with a new id and higher sequence numbers, never written over.

Neither class is thread-safe, but `RingReader`'s `take`, `holds` and `release` may be called from several threads for
different slots. Neither may cross a fork. Data is read and written through `memoryview`s of the
mapping; drop them before `close`, which else leaves the mapping to the garbage collector.
"""

import errno
import mmap
import os
import secrets
import stat
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import faults
from . import ring_layout as layout
from .errors import ConfigError, PacelineError, counted
from .fingerprint import Fingerprint
from .locks import OfdLock
from .paths import DEFAULT_RING_DIR
from .ring_layout import (
    PAGE,
    LiveWords,
    RingForeign,
    RingHeader,
    RingInvalid,
    SlotState,
    SlotView,
    pages,
    ring_paths,
    temporary_path,
)
from .space import free_bytes

__all__ = [
    "Ring",
    "RingBusy",
    "RingForeign",
    "RingInvalid",
    "RingReader",
    "RingScan",
    "Slot",
    "SlotState",
    "SlotView",
    "remove_ring",
    "ring_paths",
]

MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; not yet in the mmap module
_PATIENCE_S = 2.0  # how long the kernel may take to tear down a killed owner of a large ring


class RingBusy(PacelineError):
    """The ring's owner is alive."""


@dataclass(frozen=True)
class Slot:
    """A claimed slot. `payload` is the whole slot, writable; `address` is where it is in this process."""

    index: int
    seq: int
    batch: int
    payload: memoryview
    address: int


@dataclass(frozen=True)
class RingScan:
    """What a reader saw of a ring at one moment. A dead owner's ring is as good as a live one's."""

    worker: str
    path: Path
    ring_id: int
    incarnation: int
    pid: int
    device: str
    alive: bool
    retired: bool
    fingerprint: Fingerprint
    produced: int
    slots: tuple[SlotView, ...]

    @property
    def credit(self) -> int:
        """Slots that can take a new record; the feed subtracts what it has assigned."""
        return sum(slot.state is not SlotState.READY for slot in self.slots)


class _Mapping:
    """A ring file mapped whole: header words, slot table, slots.

    Scans read words with pread, which falls short where the file was truncated; a load from the mapping would be a
    SIGBUS. Single words are read and written through the mapping, right after a look at the file's size.
    """

    def __init__(self, fd: int, header: RingHeader, path: Path) -> None:
        self.fd = fd
        self.header = header
        self.path = path
        self.static = os.pread(fd, layout.STATIC_BYTES, 0)
        try:
            self.map = mmap.mmap(fd, header.file_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except ValueError:  # mmap compares the lengths itself
            raise RingInvalid(f"{path}: truncated") from None
        self.view = memoryview(self.map)
        words = np.frombuffer(self.map, np.uint64, (layout.TABLE_OFFSET + header.table_bytes) // 8)
        self.words = words[: PAGE // 8]
        self.table = words[layout.TABLE_OFFSET // 8 :]
        self.address = words.ctypes.data

    def live(self) -> LiveWords:
        """Page 0's words. Raises RingInvalid if the file was truncated or its static part changed."""
        self.check_size()
        page = self._read(0, PAGE)
        if page[: layout.STATIC_BYTES] != self.static:
            raise RingInvalid(f"{self.path}: header changed")
        return layout.decode_live(page)

    def check_size(self) -> None:
        if os.fstat(self.fd).st_size != self.header.file_bytes:
            raise RingInvalid(f"{self.path}: truncated or extended")

    def _read(self, start: int, size: int) -> bytes:
        data = os.pread(self.fd, size, start)
        if len(data) != size:
            raise RingInvalid(f"{self.path}: truncated")
        return data

    def _words(self, index: int, slots: int) -> list[int]:
        """The words of so many slots from `index` on, as they are now."""
        size = layout.SLOT_WORDS * 8
        return list(memoryview(self._read(layout.TABLE_OFFSET + index * size, slots * size)).cast("Q"))

    def _last_seq(self) -> int:
        return int.from_bytes(self._read(layout.LAST_SEQ * 8, 8), sys.byteorder)

    def word(self, index: int, name: int) -> int:
        return int(self.table[index * layout.SLOT_WORDS + name])

    def write(self, index: int, name: int, value: int) -> None:
        self.table[index * layout.SLOT_WORDS + name] = value

    def write_device(self, device: str) -> None:
        text = device.encode()[: layout.DEVICE_BYTES].ljust(layout.DEVICE_BYTES, b"\0")
        self.view[layout.DEVICE_OFFSET : layout.DEVICE_OFFSET + layout.DEVICE_BYTES] = text

    def slots(self) -> list[SlotView]:
        """All slots. Raises RingInvalid if they were damaged."""
        return self.table_read()[1]

    def table_read(self) -> tuple[list[int], list[SlotView]]:
        return layout.read_table(
            lambda: self._words(0, self.header.slots), self._last_seq, self.header.slot_bytes, self.path
        )

    def slot(self, index: int) -> SlotView:
        """One slot, which must be there. Raises RingInvalid if it was damaged."""
        self.live()

        def once() -> SlotView:
            words = layout.at_rest(lambda: self._words(index, 1), self.path)
            return layout.decode_slot(index, words, self._last_seq(), self.header.slot_bytes, self.path)

        return layout.settled(once)

    def holds(self, index: int, seq: int) -> bool:
        """True if slot `index` is READY with `seq`, its words read twice. Raises RingInvalid if it was truncated."""
        if not 0 <= index < self.header.slots:
            return False
        self.check_size()
        line = self.table[index * layout.SLOT_WORDS : (index + 1) * layout.SLOT_WORDS]
        first, second = line.tolist(), line.tolist()
        return all(
            words[layout.SEQ] == words[layout.COMMIT] == seq and seq > words[layout.DONE] for words in (first, second)
        )

    def payload(self, index: int, length: int) -> memoryview:
        start = self.header.offset(index)
        return self.view[start : start + length]

    def prefault(self) -> None:
        """Makes this process's page tables for the whole mapping. Contents stay as they are."""
        try:
            self.map.madvise(MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            np.frombuffer(self.map, np.uint8)[::PAGE].max()

    def replaced(self) -> bool:
        """True if the file's name is gone or names another file."""
        return not _names(self.path, self.fd)

    def close(self) -> None:
        """Unmaps, unless someone still has a view of a slot: then the mapping goes with the last view."""
        del self.words, self.table
        try:
            self.view.release()
            self.map.close()
        except BufferError:
            del self.view, self.map
        os.close(self.fd)


class Ring:
    """The owner's side: one worker, one ring, from `open` until `close` or death."""

    def __init__(self, mapping: _Mapping, incarnation: int) -> None:
        self._mapping = mapping
        self._claimed: dict[int, Slot] = {}
        header = mapping.header
        self.path = mapping.path
        self.worker = header.worker
        self.ring_id = header.ring_id
        self.slots = header.slots
        self.slot_bytes = header.slot_bytes
        self.incarnation = incarnation

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        worker: str,
        fingerprint: Fingerprint,
        slots: int,
        slot_bytes: int,
        device: str = "cpu",
        patience: float = _PATIENCE_S,
    ) -> "Ring":
        """Adopts the worker's ring, or makes it; the lock is held and the incarnation written on return.

        `slot_bytes` is rounded up to whole pages; `device` is for the inspector. Raises RingBusy, naming the pid, if
        the owner still lives after `patience` seconds; ConfigError if there is too little room, if the file is not a
        ring, or if it holds records of another fingerprint. Then nothing was written.
        """
        path = Path(path)
        if not 0 < slots <= layout.MAX_SLOTS:
            raise ConfigError(f"stream.slots is {slots}; a ring has 1 to {layout.MAX_SLOTS} slots")
        if path.name != f"{worker}.ring" or slot_bytes <= 0:
            raise ValueError(f"{path} cannot be the ring of worker {worker!r} with slots of {slot_bytes} bytes")
        incarnation = secrets.randbelow(layout.WORD_LIMIT - 1) + 1
        ring_id = secrets.randbelow(layout.WORD_LIMIT - 1) + 1
        wanted = RingHeader(ring_id, worker, fingerprint, slots, pages(slot_bytes), layout.boot_id())
        try:
            _make_folder(path.parent)
            mapping = _adopt_or_make(path, wanted, incarnation, time.monotonic() + patience)
        except OSError as error:
            raise ConfigError(f"stream.ring_dir: {error.filename or path}: {error.strerror}") from error
        mapping.write_device(device)
        return cls(mapping, incarnation)

    def claim(self, batch: int) -> Slot | None:
        """A slot to write batch's record into; None if none is FREE.

        The slot freed last is used again first: part of it is still in the cache. Raises RingInvalid if the ring was
        damaged or taken over.
        """
        free = [view for view in self.states() if view.state is SlotState.FREE]
        if not free:
            return None
        index = max(free, key=lambda view: view.seq).index
        mapping = self._mapping
        seq = int(mapping.words[layout.LAST_SEQ]) + 1
        mapping.words[layout.LAST_SEQ] = seq
        faults.point("ring.numbered")
        mapping.write(index, layout.SEQ, seq)
        faults.point("ring.writing")
        address = mapping.address + mapping.header.offset(index)
        slot = Slot(index, seq, batch, mapping.payload(index, self.slot_bytes), address)
        self._claimed[index] = slot
        return slot

    def commit(self, slot: Slot, length: int, checksum: int) -> None:
        """Makes the record of `length` bytes READY. Copies into the slot must be complete before the call."""
        self._unclaim(slot)
        if not 0 < length <= self.slot_bytes:
            raise ValueError(f"record of {length} bytes in a slot of {self.slot_bytes}")
        mapping, now = self._mapping, time.monotonic_ns()
        ordinal = (int(mapping.words[layout.PRODUCED]) + 1) % layout.WORD_LIMIT  # a damaged count is only shown
        mapping.write(slot.index, layout.BATCH, slot.batch)
        mapping.write(slot.index, layout.LENGTH, length)
        mapping.write(slot.index, layout.CHECKSUM, checksum)
        mapping.write(slot.index, layout.COMMITTED_AT, now)
        mapping.write(slot.index, layout.ORDINAL, ordinal)
        check = layout.line_check(slot.seq, slot.batch, length, checksum, now, ordinal)
        mapping.write(slot.index, layout.CHECK, check)
        faults.point("ring.described")
        mapping.write(slot.index, layout.COMMIT, slot.seq)
        faults.point("ring.committed")
        mapping.words[layout.PRODUCED] = ordinal

    def abandon(self, slot: Slot) -> None:
        """Gives a claimed slot back unwritten. Its sequence number is not used again."""
        self._unclaim(slot)
        _restore(self._mapping, slot.index)

    @property
    def claimed(self) -> tuple[Slot, ...]:
        """The slots claimed and neither committed nor abandoned, in the order of their claims."""
        return tuple(self._claimed.values())

    def abandon_all(self) -> None:
        """Gives all claimed slots back. RingInvalid, and nothing written, if the ring was damaged or taken over."""
        self.states()
        for slot in self.claimed:
            self.abandon(slot)

    def _unclaim(self, slot: Slot) -> None:
        if self._claimed.get(slot.index) is not slot:
            raise ValueError(f"slot {slot.index} is not claimed with sequence number {slot.seq}")
        del self._claimed[slot.index]

    def states(self) -> list[SlotView]:
        """All slots, in order of index. Raises RingInvalid if the ring was damaged or taken over."""
        if self._mapping.live().incarnation != self.incarnation:
            raise RingInvalid(f"{self.path}: owned by another process")
        return self._mapping.slots()

    @property
    def retired(self) -> bool:
        """True once the feed has retired this owner: no more work will come."""
        return self._mapping.live().retired

    def vanished(self) -> bool:
        """True if the file was unlinked or replaced: nobody will find what is written to it."""
        return self._mapping.replaced()

    def mapping(self) -> tuple[int, int]:
        """(address, bytes) of the whole mapping, for cudaHostRegister; unregister before `close`."""
        return self._mapping.address, self._mapping.header.file_bytes

    def close(self) -> None:
        """Gives up the ring. The file and its READY slots stay. Claimed slots become FREE at the next `open`."""
        OfdLock(self._mapping.fd).release()  # views of slots may keep the mapping, and its descriptor, open
        self._claimed.clear()
        self._mapping.close()


class RingReader:
    """The consumer's side: the feed scans and frees, a rank takes and releases."""

    def __init__(self, mapping: _Mapping) -> None:
        self._mapping = mapping
        self.path = mapping.path
        self.worker = mapping.header.worker
        self.ring_id = mapping.header.ring_id
        self.fingerprint = mapping.header.fingerprint
        self.slots = mapping.header.slots
        self.slot_bytes = mapping.header.slot_bytes

    @classmethod
    def open(cls, path: str | Path) -> "RingReader":
        """Maps the ring after checking all its fields. Raises RingInvalid with the reason, or OSError."""
        path = Path(path)
        fd = _open_own(path)
        try:
            mapping = _Mapping(fd, layout.read_ring(fd, path).header, path)
        except BaseException:
            os.close(fd)
            raise
        return cls(mapping)

    def scan(self) -> RingScan:
        """Every slot and whether the owner lives. Raises RingInvalid if the ring has been damaged.

        Incarnation, lock and slots are read in that order: `alive` false proves that this incarnation is dead, and all
        that it committed is then in `slots`. (`alive` true may be a successor that has yet to write its own.)
        """
        mapping = self._mapping
        live, alive = mapping.live(), self.probe()
        words, slots = mapping.table_read()
        return RingScan(
            worker=self.worker,
            path=self.path,
            ring_id=self.ring_id,
            incarnation=live.incarnation,
            pid=live.pid,
            device=live.device,
            alive=alive,
            retired=live.retired,
            fingerprint=self.fingerprint,
            produced=layout.produced(words, live.produced),  # a record committed meanwhile is in the words
            slots=tuple(slots),
        )

    def probe(self) -> bool:
        """True if the owner is alive, by the kernel's word."""
        return OfdLock.holder(self._mapping.fd)

    def slot(self, index: int) -> SlotView:
        """One slot, its words read twice. Raises RingInvalid, also for a slot that is not there."""
        if not 0 <= index < self.slots:
            raise RingInvalid(f"{self.path}: no slot {index}")
        return self._mapping.slot(index)

    def holds(self, slot: int, seq: int) -> bool:
        """True while slot `slot` is READY with `seq`: check before a record is copied, and after."""
        return self._mapping.holds(slot, seq)

    def payload(self, slot: SlotView) -> memoryview:
        """The record in a READY slot, in place and not to be written; valid until it is released."""
        return self._mapping.payload(slot.index, slot.length)

    def address(self, slot: SlotView) -> int:
        """Where the slot's payload is in this process."""
        return self._mapping.address + self._mapping.header.offset(slot.index)

    def take(self, slot: int, seq: int, trainer: int) -> bool:
        """Marks the record as held by the trainer of incarnation `trainer`; False if it is not READY with `seq`."""
        if not self.holds(slot, seq):
            return False
        self._mapping.write(slot, layout.TAKEN_BY, trainer)
        faults.point("ring.taking")
        self._mapping.write(slot, layout.TAKEN_SEQ, seq)
        faults.point("ring.taken")
        return True

    def release(self, slot: int, seq: int) -> bool:
        """Frees the slot; False, and nothing done, if it is not READY with `seq`.

        Reads of the payload, asynchronous copies too, must be complete before the call.
        """
        if not self.holds(slot, seq):
            return False
        self._mapping.write(slot, layout.DONE, seq)
        faults.point("ring.released")
        return True

    def retire(self) -> None:
        """Tells the present owner that it gets no more work. A later owner of the ring is not retired."""
        self._mapping.words[layout.RETIRED] = self._mapping.words[layout.INCARNATION]

    def remove_if_empty(self) -> bool:
        """Removes a retired ring that is drained and has no owner. Returns True if it is gone."""
        lock = OfdLock(self._mapping.fd)
        if self.replaced():
            return True
        if not lock.acquire():
            return False
        try:
            if self.replaced():
                return True
            scan = self.scan()
            if not scan.retired or any(slot.state is SlotState.READY for slot in scan.slots):
                return False
            faults.point("ring.removing")
            self.path.unlink()
            faults.point("ring.removed")
            return True
        finally:
            lock.release()

    def replaced(self) -> bool:
        """True if the ring was removed or replaced: close it and open what is there now."""
        return self._mapping.replaced()

    def prefault(self) -> None:
        """Makes the page tables for all slots at once; a first touch later is 5 times slower."""
        self._mapping.prefault()

    def mapping(self) -> tuple[int, int]:
        """(address, bytes) of the whole mapping, for cudaHostRegister; unregister before `close`."""
        return self._mapping.address, self._mapping.header.file_bytes

    def close(self) -> None:
        self._mapping.close()


def remove_ring(path: str | Path) -> int:
    """Removes a ring, whatever it holds, and what a killed worker left half-made. Returns the bytes freed.

    Raises RingBusy if the owner is alive, RingForeign for a file that never was a ring. The caller makes sure that no
    trainer of the run is alive.
    """
    path, freed = Path(path), 0
    for name in (path, temporary_path(path)):
        try:
            fd = _open(name)
        except FileNotFoundError:
            continue
        try:
            if not OfdLock(fd).acquire():
                raise _busy(fd, path)
            if _names(name, fd):
                _refuse_foreign(fd, name)
                name.unlink()
                freed += os.fstat(fd).st_blocks * 512
        finally:
            os.close(fd)
    return freed


def _refuse_foreign(fd: int, path: Path) -> None:
    """Raises RingForeign for a file that never was a ring."""
    try:
        layout.read_ring(fd, path)
    except RingForeign:
        raise
    except RingInvalid:
        return


def _open(path: Path) -> int:
    """Raises FileNotFoundError, RingForeign for what is no regular file, or another OSError."""
    try:
        # Without O_CREAT, which fs.protected_regular refuses on another user's file in a sticky folder.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise RingForeign(f"{path}: not a regular file") from error
        raise
    return fd


def _open_own(path: Path) -> int:
    """As `_open`; another user's file is foreign too: who may write it may change records under their readers."""
    fd = _open(path)
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():
        os.close(fd)
        raise RingForeign(f"{path}: belongs to uid {owner}, this is uid {os.geteuid()}")
    return fd


def _names(path: Path, fd: int) -> bool:
    """True if `path` is the file that `fd` has open."""
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def _busy(fd: int, path: Path) -> RingBusy:
    page = os.pread(fd, PAGE, 0)
    pid = layout.decode_live(page).pid if len(page) == PAGE else 0
    return RingBusy(f"{path} is held by pid {pid or 'unknown'}, which is alive: stop it or use another worker index")


def _make_folder(folder: Path) -> None:
    """Makes the run's folder and its parents; modes of those that exist stay. They are the owner's alone, but below a
    folder that a group shares, and others cannot enter, that group may look: the inspector only reads."""
    for parent in (*reversed(folder.parents), folder):
        if not parent.exists():
            above = parent.parent.stat().st_mode
            shared = above & stat.S_IXGRP and not above & stat.S_IRWXO
            parent.mkdir(mode=0o750 if shared else 0o700, exist_ok=True)


def _adopt_or_make(path: Path, wanted: RingHeader, incarnation: int, deadline: float) -> _Mapping:
    while True:
        with ExitStack() as stack:
            old, floor = _lock(path, deadline), 0
            if old is not None:
                stack.callback(os.close, old)
                faults.point("ring.lock-taken")
                mapping, floor = _adopt(old, path, wanted, incarnation)
                if mapping is not None:
                    stack.pop_all()
                    return mapping
            mapping = _make(path, wanted, incarnation, floor, replaces=old)  # the old lock covers the rename
        if mapping is not None:
            return mapping
        if time.monotonic() >= deadline:
            raise RingBusy(f"{path} is being made by another process: stop it or use another worker index")
        time.sleep(0.02)


def _lock(path: Path, deadline: float) -> int | None:
    """A descriptor of the file that `path` names, its lock held; None if there is none. Raises RingBusy."""
    while True:
        try:
            fd = _open_own(path)
        except FileNotFoundError:
            return None
        except RingForeign as error:
            raise ConfigError(f"{error}: move it away") from error
        try:
            if OfdLock(fd).acquire():
                if _names(path, fd):
                    return fd
            elif time.monotonic() >= deadline:
                raise _busy(fd, path)
            else:
                time.sleep(0.02)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _adopt(fd: int, path: Path, wanted: RingHeader, incarnation: int) -> tuple[_Mapping | None, int]:
    """Takes over the locked file; or returns None, and the last sequence number used, if it is to be replaced.

    Raises ConfigError for a file that must not be replaced: not a ring, or records of another fingerprint.
    """
    try:
        header, live, slots = layout.read_ring(fd, path)
    except RingForeign as error:
        raise ConfigError(f"{error}: move it away") from error
    except RingInvalid:
        return None, 0
    if header.fingerprint != wanted.fingerprint:
        ready = sum(slot.state is SlotState.READY for slot in slots)
        if ready:
            raise _other_fingerprint(path, wanted.fingerprint, header.fingerprint, ready)
        return None, live.last_seq
    if (header.slots, header.slot_bytes) != (wanted.slots, wanted.slot_bytes):
        return None, live.last_seq
    mapping = _Mapping(fd, header, path)
    _own(mapping, incarnation)
    faults.point("ring.adopted")
    mapping.words[layout.PRODUCED] = live.produced
    for slot in slots:
        if slot.state is SlotState.WRITING:
            _restore(mapping, slot.index)
    mapping.prefault()
    _remove_half_made(temporary_path(path))
    return mapping, live.last_seq


def _remove_half_made(temporary: Path) -> None:
    """Removes what an earlier owner left when it was killed while it replaced its ring."""
    try:
        fd = _open(temporary)
    except (FileNotFoundError, RingForeign):
        return
    try:
        if OfdLock(fd).acquire() and _names(temporary, fd):
            temporary.unlink()
    finally:
        os.close(fd)


def _own(mapping: _Mapping, incarnation: int) -> None:
    """Declares all earlier owners dead: what was assigned to them is free to go elsewhere."""
    mapping.words[layout.PID] = os.getpid()
    mapping.words[layout.INCARNATION] = incarnation


def _restore(mapping: _Mapping, index: int) -> None:
    """WRITING to FREE, by the producer's own word. The number is spent: LAST_SEQ has passed it."""
    mapping.write(index, layout.SEQ, mapping.word(index, layout.COMMIT))


def _other_fingerprint(path: Path, wanted: Fingerprint, found: Fingerprint, ready: int) -> ConfigError:
    # Without a name `clean` would drop other runs' records too; by its name a run is found in the default folder alone.
    run = path.parent.name if path.parent.parent == DEFAULT_RING_DIR else "RUN.toml"
    return ConfigError(
        f"{path} holds {counted(ready, 'record')} of another run file, dataset or target "
        f"({wanted.differences(found, 'the ring')}): go back to the ring's, or drop them with `paceline clean {run}`"
    )


def _make(path: Path, wanted: RingHeader, incarnation: int, floor: int, *, replaces: int | None) -> _Mapping | None:
    """A new ring at `path`, with sequence numbers above `floor`; None if another process is making one.

    `replaces` is the locked descriptor of the file that it replaces, if there is one.
    """
    temporary = temporary_path(path)
    with ExitStack() as stack:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o660)
        stack.callback(os.close, fd)
        if not OfdLock(fd).acquire() or not _names(temporary, fd):
            return None
        stack.callback(temporary.unlink)
        if replaces is None and os.path.lexists(path):
            return None
        faults.point("ring.temporary")
        _allocate(fd, path, wanted)
        faults.point("ring.half-made")
        mapping = _Mapping(fd, wanted, path)
        mapping.prefault()
        # Microseconds since 1970: above whatever a ring of this name, even one long removed, has used.
        mapping.words[layout.LAST_SEQ] = max(floor, time.time_ns() // 1000)
        _own(mapping, incarnation)
        faults.point("ring.before-rename")
        temporary.rename(path)
        faults.point("ring.renamed")
        stack.pop_all()
        return mapping


def _allocate(fd: int, path: Path, wanted: RingHeader) -> None:
    """Reserves every byte of the file and writes its header. Raises ConfigError, before any write, if it can tell."""
    os.ftruncate(fd, 0)  # a predecessor may have been killed here
    free = free_bytes(path.parent)
    if free < wanted.file_bytes:
        raise _no_room(path, wanted, free)
    try:
        os.posix_fallocate(fd, 0, wanted.file_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
            raise _no_room(path, wanted, free_bytes(path.parent)) from error
        raise
    if os.fstat(fd).st_blocks * 512 < wanted.file_bytes:
        raise ConfigError(f"stream.ring_dir: {path.parent} is on a file system that reserves no space; use a tmpfs")
    faults.point("ring.allocated")
    os.pwrite(fd, layout.encode_header(wanted), 0)


def _no_room(path: Path, wanted: RingHeader, free: int) -> ConfigError:
    return ConfigError(
        f"{path} needs {wanted.file_bytes} bytes and {free} are free: lower stream.slots ({wanted.slots}) or "
        "stream.token_budget, clear stale rings with `paceline clean`, or enlarge the file system of stream.ring_dir"
    )
