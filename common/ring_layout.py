"""The bytes of a ring file, and their strict decoding: shared by the owner, the readers and the inspector.

    page 0     static words (never change after creation), owner's words, consumer's words, fingerprint JSON
    table      128 bytes a slot: a 64-byte line of producer words, then a 64-byte line of consumer words
    slots      page-aligned, all of one size

All words are 64-bit, in native order, each written by one side. The static part has a CRC; so has the producer line of
a READY slot. Decoding raises `RingInvalid` for anything that does not add up. `read_ring` uses pread alone, since an
mmap of a sparse tmpfs file allocates pages; nothing here imports numpy or mmap, so that the inspector starts fast.
"""

import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar

from .errors import PacelineError
from .fingerprint import MAX_JSON_BYTES, Fingerprint

Result = TypeVar("Result")

PAGE = 4096
MAGIC = int.from_bytes(b"PACERING", "little")
LAYOUT_VERSION = 1
MAX_SLOTS = 4096
SLOT_WORDS = 16
TABLE_OFFSET = PAGE
WORKER_BYTES = 64
WORD_LIMIT = 2**63
_READS = 1000  # readings of a table before it is called unstable
_RETRIES = 2  # before a table is called damaged

# Word indices into page 0.
OWNER_WORDS = 64
INCARNATION, PID, LAST_SEQ, PRODUCED = range(OWNER_WORDS, OWNER_WORDS + 4)
DEVICE_OFFSET, DEVICE_BYTES = 576, 64  # text, also the owner's
RETIRED = 80  # the incarnation that has been retired, so a later owner of the ring is not

# Word indices into a slot's 16: the producer's line, then the consumer's.
SEQ, COMMIT, BATCH, LENGTH, CHECKSUM, COMMITTED_AT, ORDINAL, CHECK = range(8)
DONE, TAKEN_SEQ, TAKEN_BY = range(8, 11)
USED_WORDS = 11

# magic, version, file bytes, ring id, fingerprint digest, slots, slot bytes, table offset, slots offset, JSON bytes,
# boot id, worker. The CRC over it and the JSON follows, then nothing up to the owner's words.
_STATIC = struct.Struct(f"=10Q16s{WORKER_BYTES}s")
_CRC = struct.Struct("=Q")
_LIVE = struct.Struct("=4Q")
_WORD = struct.Struct("=Q")
_PRODUCER_LINE = struct.Struct("=6Q")
_JSON_OFFSET = 1024
STATIC_BYTES = OWNER_WORDS * 8


class RingInvalid(PacelineError):
    """A file that is not a whole, current ring; the text says why."""


class RingForeign(RingInvalid):
    """A file that never was a ring: not ours to replace."""


class SlotState(Enum):
    FREE = "free"
    WRITING = "writing"
    READY = "ready"


_FREE, _WRITING, _READY = SlotState.FREE, SlotState.WRITING, SlotState.READY


class SlotView(NamedTuple):
    """One slot as it was at one moment. `batch`, `length`, `checksum` and `committed_at_ns` hold for READY slots."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (of tuple.index, which nobody calls)
    seq: int
    commit: int
    taken: int  # incarnation of the trainer that holds the record, else 0
    done: int
    batch: int  # packed batch id
    length: int  # bytes
    checksum: int
    committed_at_ns: int  # CLOCK_MONOTONIC
    state: SlotState


@dataclass(frozen=True)
class RingHeader:
    """The static part of page 0."""

    ring_id: int
    worker: str
    fingerprint: Fingerprint
    slots: int
    slot_bytes: int
    boot_id: bytes

    @property
    def slots_offset(self) -> int:
        return TABLE_OFFSET + pages(self.slots * SLOT_WORDS * 8)

    @property
    def table_bytes(self) -> int:
        return self.slots * SLOT_WORDS * 8

    @property
    def file_bytes(self) -> int:
        return self.slots_offset + self.slots * self.slot_bytes

    def offset(self, index: int) -> int:
        """Where slot `index` starts in the file."""
        return self.slots_offset + index * self.slot_bytes


class LiveWords(NamedTuple):
    """The words of page 0 that change."""

    incarnation: int
    pid: int
    last_seq: int
    produced: int  # records committed since the ring was made
    device: str
    retired: bool


class RingRead(NamedTuple):
    """A whole ring file without its payloads, as it was at one moment."""

    header: RingHeader
    live: LiveWords
    slots: list[SlotView]


def pages(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def boot_id() -> bytes:
    """This boot's id (16 bytes): sequence numbers and clocks in a ring of another boot mean nothing."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def ring_paths(folder: str | Path, *, half_made: bool = False) -> list[Path]:
    """The ring files of a run's folder, by worker ("w2" before "w10"); [] if it is not there.

    `half_made`: those too of which there is only the temporary file that a killed worker left.
    """
    paths = set(Path(folder).glob("*.ring"))
    if half_made:
        paths |= {path.with_suffix("") for path in Path(folder).glob("*.ring.tmp")}
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def temporary_path(path: Path) -> Path:
    """Where a ring is made before it is renamed to `path`. One fixed name, so a kill leaves one file at most."""
    return path.with_name(path.name + ".tmp")


def encode_header(header: RingHeader) -> bytes:
    """Page 0 with the live words at 0. Raises ValueError for a worker name or a fingerprint that is too long."""
    name, json_text = header.worker.encode(), header.fingerprint.to_json().encode()
    if not 0 < len(name) <= WORKER_BYTES or b"\0" in name:
        raise ValueError(f"worker name {header.worker!r}: 1 to {WORKER_BYTES} bytes")
    static = _STATIC.pack(
        *(MAGIC, LAYOUT_VERSION, header.file_bytes, header.ring_id, header.fingerprint.digest),
        *(header.slots, header.slot_bytes, TABLE_OFFSET, header.slots_offset, len(json_text)),
        *(header.boot_id, name),
    )
    page = bytearray(PAGE)
    page[: len(static)] = static
    _CRC.pack_into(page, len(static), zlib.crc32(json_text, zlib.crc32(static)))
    page[_JSON_OFFSET : _JSON_OFFSET + len(json_text)] = json_text
    return bytes(page)


def decode_header(page: bytes, file_bytes: int, path: Path) -> RingHeader:
    """Checks every field of page 0 against the file's size and name, and against this boot.

    Raises RingForeign if the file never was a ring, RingInvalid for anything else.
    """

    def refuse(reason: str) -> RingInvalid:
        return RingInvalid(f"{path}: {reason}")

    if len(page) < PAGE or not any(page[:8]):
        raise refuse("half-made ring")
    fields = _STATIC.unpack_from(page)
    magic, version, size, ring_id, digest, slots, slot_bytes, table, first_slot, json_bytes, boot, name = fields
    if magic != MAGIC:
        raise RingForeign(f"{path}: not a ring")
    if version != LAYOUT_VERSION:
        raise refuse(f"ring layout {version}, not {LAYOUT_VERSION}")
    if json_bytes > MAX_JSON_BYTES:
        raise refuse(f"fingerprint of {json_bytes} bytes")
    json_text = page[_JSON_OFFSET : _JSON_OFFSET + json_bytes]
    if _CRC.unpack_from(page, _STATIC.size)[0] != zlib.crc32(json_text, zlib.crc32(page[: _STATIC.size])):
        raise refuse("header checksum does not match")
    if not 0 < ring_id < WORD_LIMIT:
        raise refuse(f"ring id {ring_id:#x}")
    if not 0 < slots <= MAX_SLOTS:
        raise refuse(f"{slots} slots")
    if not 0 < slot_bytes < WORD_LIMIT or slot_bytes % PAGE:
        raise refuse(f"slots of {slot_bytes} bytes")
    if boot != boot_id():
        raise refuse("written before this machine booted")
    try:
        fingerprint = Fingerprint.from_json(json_text.decode())
        worker = name.rstrip(b"\0").decode()
    except ValueError as error:
        raise refuse(f"unreadable header: {error}") from error
    if fingerprint.digest != digest:
        raise refuse("fingerprint and its fields do not match")
    if worker != path.name.removesuffix(".tmp").removesuffix(".ring"):
        raise refuse(f"the ring of worker {worker!r}")
    header = RingHeader(ring_id, worker, fingerprint, slots, slot_bytes, boot)
    if (table, first_slot, size) != (TABLE_OFFSET, header.slots_offset, header.file_bytes):
        raise refuse(f"offsets {table}, {first_slot} and size {size} do not fit {slots} slots of {slot_bytes} bytes")
    if file_bytes != size:
        raise refuse(f"{file_bytes} bytes long, not {size}")
    return header


def decode_live(page: bytes | memoryview) -> LiveWords:
    incarnation, pid, last_seq, produced = _LIVE.unpack_from(page, INCARNATION * 8)
    (retired,) = _WORD.unpack_from(page, RETIRED * 8)
    device = bytes(page[DEVICE_OFFSET : DEVICE_OFFSET + DEVICE_BYTES]).rstrip(b"\0").decode(errors="replace")
    return LiveWords(incarnation, pid, last_seq, produced, device, retired == incarnation)


def write_retired(fd: int, incarnation: int) -> None:
    """Retires an owner as `RingReader.retire` does, without mapping the file (a mapping takes numpy)."""
    os.pwrite(fd, _WORD.pack(incarnation), RETIRED * 8)


def read_ring(fd: int, path: Path) -> RingRead:
    """Reads and checks a ring file whole, payloads apart; allocates and changes nothing.

    Raises RingForeign for what never was a ring, RingInvalid for one that is damaged, half-made, not allocated in full,
    of another layout or another boot.
    """
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        raise RingForeign(f"{path}: not a regular file")
    page = os.pread(fd, PAGE, 0)
    header = decode_header(page, about.st_size, path)
    if about.st_blocks * 512 < header.file_bytes:
        raise RingInvalid(f"{path}: not allocated in full")

    def live() -> LiveWords:
        return decode_live(_pread(fd, PAGE, 0, path))

    words, slots = read_table(
        lambda: list(memoryview(_pread(fd, header.table_bytes, TABLE_OFFSET, path)).cast("Q")),
        lambda: live().last_seq,
        header.slot_bytes,
        path,
    )
    # The count is from before the table: a record that is committed meanwhile does not pass for a consumed one.
    counted = decode_live(page).produced
    return RingRead(header, live()._replace(produced=produced(words, counted)), slots)


def _pread(fd: int, size: int, offset: int, path: Path) -> bytes:
    """`size` bytes; RingInvalid if somebody has cut the file off since its size was checked."""
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise RingInvalid(f"{path}: cut off while it was read")
    return data


def read_table(
    read_words: Callable[[], list[int]], read_last_seq: Callable[[], int], slot_bytes: int, path: Path
) -> tuple[list[int], list[SlotView]]:
    """The table's words at one moment and what they say. Raises RingInvalid if they are damaged."""

    def once() -> tuple[list[int], list[SlotView]]:
        words = at_rest(read_words, path)
        return words, decode_slots(words, read_last_seq(), slot_bytes, path)

    return settled(once)


def settled(read: Callable[[], Result]) -> Result:
    """`read()`, again if it raises RingInvalid: words that a processor with weak ordering shows too early get their
    chance to settle before they are called damaged."""
    for _ in range(_RETRIES):
        try:
            return read()
        except RingInvalid:
            time.sleep(0.001)
    return read()


def at_rest(read_words: Callable[[], list[int]], path: Path) -> list[int]:
    """The words that were read twice in a row: no writer was half-way, as no slot takes up a number again."""
    words = read_words()
    for _ in range(_READS):
        again = read_words()
        if words == again:
            return words
        words = again
    raise RingInvalid(f"{path}: slot table never at rest")


def line_check(seq: int, batch: int, length: int, checksum: int, committed_at: int, ordinal: int) -> int:
    """The check word of a producer line: shows words that are torn, stale or damaged."""
    return zlib.crc32(_PRODUCER_LINE.pack(seq, batch, length, checksum, committed_at, ordinal)) | 1 << 32


def decode_slots(words: Sequence[int], last_seq: int, slot_bytes: int, path: Path) -> list[SlotView]:
    """The slots of a table at rest; `last_seq` was read after it. Raises RingInvalid."""
    lines = [words[start : start + SLOT_WORDS] for start in range(0, len(words), SLOT_WORDS)]
    views = [decode_slot(index, line, last_seq, slot_bytes, path) for index, line in enumerate(lines)]
    used = [view.seq for view in views if view.seq]
    if len(set(used)) != len(used):
        raise RingInvalid(f"{path}: two slots with one sequence number")
    return views


def decode_slot(index: int, line: Sequence[int], last_seq: int, slot_bytes: int, path: Path) -> SlotView:
    """One slot from its words at rest; `last_seq` was read after them. Raises RingInvalid."""
    seq, commit, batch, length, checksum, committed_at, ordinal, check, done, taken_seq, taken_by = line[:USED_WORDS]
    if not done <= commit <= seq <= last_seq < WORD_LIMIT or taken_seq > commit:
        raise RingInvalid(f"{path}: slot {index}: sequence words {done}, {commit}, {seq}, {last_seq}, {taken_seq}")
    taken = 0
    if commit != seq:
        state = _WRITING
        if commit != done:  # only a FREE slot is ever claimed
            raise RingInvalid(f"{path}: slot {index}: claimed while it held a record ({done}, {commit}, {seq})")
    elif done == seq:
        state = _FREE
    else:
        state = _READY
        taken = taken_by if taken_seq == seq else 0
        if check != line_check(seq, batch, length, checksum, committed_at, ordinal):
            raise RingInvalid(f"{path}: slot {index}: damaged words")
        if not 0 < length <= slot_bytes or batch >= WORD_LIMIT:
            raise RingInvalid(f"{path}: slot {index}: batch {batch:#x} of {length} bytes")
    return SlotView(index, seq, commit, taken, done, batch, length, checksum, committed_at, state)


def produced(words: Sequence[int], header_count: int) -> int:
    """Records committed since the ring was made; right even if its owner died between a commit and the count."""
    slots = (words[start : start + SLOT_WORDS] for start in range(0, len(words), SLOT_WORDS))
    return max([header_count, *(slot[ORDINAL] for slot in slots if slot[COMMIT] == slot[SEQ])])
