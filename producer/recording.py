"""Hidden states kept on disk: rows that were recorded once are read again, without a forward of the target.

`stream.record_to` names a folder. A worker writes the states of each row it computes there, and takes those of rows
that are there already, of whichever run, worker or epoch. So the first epoch records, later ones are fed from disk
(where targets are the bottleneck and disks are not), and a benchmark or a second run is fed without a target.

    FOLDER/<key>/meta.json            what the states are of: target, layers, dtype
    FOLDER/<key>/<worker>-<time>.states    rows end to end, each [planes, t, H] as in a ring's slot, and scales if any
    FOLDER/<key>/<worker>-<time>.index     an entry a row, 64 bytes, written after its states

A row is found by its tokens, so neither packing nor the order of rows matters. Only its writer appends to a pair of
files, and an entry counts when its own CRC, the length of the states file and, on reading, the states' checksum are
right: what a kill or a crash left half written is computed again. A full disk or the limit ends recording, not the run.

The states of a row are those of the batch it was first computed in. Another packing may round differently, so
`order = "strict"` gives equal weights only for equal recordings.
"""

import hashlib
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..common.errors import ConfigError
from ..common.record import FP8, SCALE_BYTES, checksum, scales_offset, token_bytes
from ..common.rows import Rows
from ..common.runfile import RunFile
from ..common.space import free_bytes, size_text
from ..common.target_info import TargetInfo
from .source import Filled, Filling, StateSource
from .summing import Landed

log = logging.getLogger(__name__)

_ENTRY = struct.Struct("<16sQQQ12x")  # key, offset, tokens, checksum; a CRC follows
_CRC = struct.Struct("<I")
ENTRY_BYTES = 64
_FILL = ENTRY_BYTES - _ENTRY.size - _CRC.size
KEEP_FREE = 2**30  # bytes left to others on the disk
VERSION = 1


class Place(NamedTuple):
    """Where a row's states are."""

    states: Path
    offset: int
    tokens: int
    checksum: int


def row_key(tokens: np.ndarray) -> bytes:
    """16 bytes that stand for a row's token ids (int32)."""
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()[:16]


@dataclass(frozen=True)
class StateKind:
    """What states depend on besides the tokens."""

    target: str  # `TargetInfo.identity`
    layer_ids: tuple[int, ...]
    last_hidden: bool
    dtype: str  # of what is recorded
    hidden_size: int
    computed: str = ""  # how the target computes, where that dtype does not say it: in fp8, or in another dtype

    @classmethod
    def of(cls, run: RunFile, info: TargetInfo, layer_ids: Sequence[int]) -> "StateKind":
        target = run.target
        computed = "fp8 " * target.fp8 + target.dtype * (target.dtype != run.record_dtype)
        return cls(info.identity, tuple(layer_ids), target.last_hidden, run.record_dtype, info.hidden_size, computed)

    @property
    def planes(self) -> int:
        return len(self.layer_ids) + self.last_hidden

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.planes, self.hidden_size, self.dtype)

    @property
    def name(self) -> str:
        parts = [VERSION, *(value for name, value in vars(self).items() if name != "computed" or value)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


class Recording:
    """The files of one kind of states: this process's own, which it appends to, and those of others."""

    def __init__(self, folder: Path, kind: StateKind, writer: str, limit: int | None = None) -> None:
        """limit: bytes of states that all files together may have. Raises ConfigError if the folder cannot be used."""
        self.kind, self._limit = kind, limit
        self._folder = folder / kind.name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._describe()
        except OSError as error:
            raise ConfigError(f"stream.record_to: {self._folder}: {error.strerror}") from None
        self._writer = writer
        self._stem = f"{writer}-{time.time_ns()}"
        self._places: dict[bytes, Place] = {}
        self._read: dict[Path, int] = {}  # bytes of each index file that were read
        self._fds: dict[Path, int] = {}
        self._own: tuple[int, int] | None = None  # descriptors of the states and index files
        self._size = 0
        self.off = ""  # why nothing is recorded any more
        self.refresh()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def refresh(self) -> None:
        """Takes in what other processes have recorded since."""
        for path in self._folder.glob("*.index"):
            done = self._read.get(path, 0)
            try:
                if path.stem == self._stem or path.stat().st_size < done + ENTRY_BYTES:
                    continue
                with path.open("rb") as file:
                    file.seek(done)
                    data = file.read()
            except FileNotFoundError:  # removed since it was listed
                continue
            whole = len(data) - len(data) % ENTRY_BYTES  # the last entry may be under way
            self._read[path] = done + whole
            states = path.with_suffix(".states")
            size = states.stat().st_size if states.exists() else 0
            for key, place in _entries(data[:whole], states):
                if place.offset + place.tokens * self.kind.token_bytes <= size:
                    self._places.setdefault(key, place)

    def read(self, key: bytes, out: Sequence[memoryview]) -> bool:
        """Reads a row's states into one buffer a plane; False, and the row is forgotten, if they are not whole."""
        place = self._places[key]
        try:
            found = _moved(os.preadv, self._open(place.states), out, place.offset)
        except OSError as error:
            self._forget(place.states, error)
            return False
        if found == sum(len(part) for part in out) and _sum(out) == place.checksum:
            return True
        log.warning("a row in %s is damaged: computing it again", place.states)
        del self._places[key]
        return False

    def write(self, key: bytes, planes: Sequence[memoryview]) -> None:
        """Appends a row's states. After the first failure nothing more is recorded, and a warning says why."""
        if self.off or key in self._places:
            return
        size = sum(len(part) for part in planes)
        try:
            if self._full(size):
                return
            states, index = self._own or self._create()
            total, offset = _sum(planes), self._size
            if _moved(os.pwritev, states, planes, offset) != size:
                return self._stop("the disk is full")
            tokens = size // self.kind.token_bytes
            entry = _ENTRY.pack(key, offset, tokens, total)
            entry += bytes(_FILL)
            if os.write(index, entry + _CRC.pack(zlib.crc32(entry))) != ENTRY_BYTES:
                return self._stop("the disk is full")  # entries after a part of one would not be found
        except OSError as error:
            return self._stop(error.strerror or str(error))
        self._size += size
        self._places[key] = Place(self._folder / f"{self._stem}.states", offset, tokens, total)

    def close(self) -> None:
        for fd in (*self._fds.values(), *(self._own or ())):
            os.close(fd)
        self._fds.clear()
        self._own = None

    def _forget(self, states: Path, error: OSError) -> None:
        """Rows of a file that is not there any more, or that its disk does not give; the next are kept in another."""
        log.warning("%s: %s: computing its rows again", states, error.strerror or error)
        self._places = {key: place for key, place in self._places.items() if place.states != states}
        if states.stem == self._stem and self._own is not None:
            for fd in self._own:
                os.close(fd)
            self._stem, self._own, self._size = f"{self._writer}-{time.time_ns()}", None, 0

    def _full(self, size: int) -> bool:
        used = sum(path.stat().st_size for path in self._folder.glob("*.states")) if self._limit else 0
        if self._limit and used + size > self._limit:
            self._stop(f"stream.record_limit is reached ({size_text(self._limit)})")
        elif free_bytes(self._folder) < size + KEEP_FREE:
            self._stop(f"less than {size_text(KEEP_FREE)} would be left on the disk")
        return bool(self.off)

    def _stop(self, why: str) -> None:
        self.off = why
        log.warning("recording of states to %s ends: %s", self._folder, why)

    def _create(self) -> tuple[int, int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        states = os.open(self._folder / f"{self._stem}.states", flags, 0o600)
        index = os.open(self._folder / f"{self._stem}.index", flags | os.O_APPEND, 0o600)
        self._own = states, index
        return self._own

    def _open(self, path: Path) -> int:
        if path not in self._fds:
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[path]

    def _describe(self) -> None:
        about = self._folder / "meta.json"
        if not about.exists():
            scratch = self._folder / f".meta-{os.getpid()}.json"
            scratch.write_text(json.dumps({"version": VERSION, **vars(self.kind)}, indent=1) + "\n")
            scratch.replace(about)


def _entries(data: bytes, states: Path) -> Iterator[tuple[bytes, Place]]:
    for start in range(0, len(data), ENTRY_BYTES):
        entry, crc = data[start : start + ENTRY_BYTES - 4], data[start + ENTRY_BYTES - 4 : start + ENTRY_BYTES]
        if zlib.crc32(entry) == _CRC.unpack(crc)[0]:
            key, offset, tokens, total = _ENTRY.unpack(entry[: _ENTRY.size])
            yield key, Place(states, offset, tokens, total)


def _moved(call: Callable[..., int], fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Bytes that preadv or pwritev moved in all, called again as long as some are left and some move: one call moves
    2 GiB at most, and a long row may have more."""
    left, done = [part.cast("B") for part in parts], 0
    while left and (moved := call(fd, left, offset + done)):
        done += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if left:
            left[0] = left[0][moved:]
    return done


def _sum(planes: Sequence[memoryview]) -> int:
    """One checksum over the planes' own, so that they need not lie side by side."""
    sums = np.array([checksum(part, len(part)) for part in planes], np.uint64)
    return checksum(sums.data, sums.nbytes)


class RecordingSource:
    """A `StateSource` that reads rows that are recorded and records those that are not.

    The target behind it is loaded when it is first needed: not at all if all rows of the run are there.
    """

    def __init__(self, info: TargetInfo, recording: Recording, load: Callable[[], StateSource]) -> None:
        self.info = info
        self._recording, self._load = recording, load
        self._target: StateSource | None = None
        self._mapping: tuple[int, int] | None = None
        self.rows_read = self.rows_computed = 0

    def load(self) -> None:
        """Loads the target now."""
        if self._target is None:
            self._target = self._load()
            if self._mapping is not None:
                self._target.register(*self._mapping)

    def register(self, address: int, length: int) -> None:
        self._mapping = address, length
        if self._target is not None:
            self._target.register(address, length)

    def close(self) -> None:
        self._recording.close()
        if self._target is not None:
            self._target.close()

    def settle(self) -> None:
        if self._target is not None:
            self._target.settle()

    def begin(
        self,
        tokens: np.ndarray,
        cu_seqlens: np.ndarray,
        out: memoryview,
        progress: Callable[[], None],
        landed: Landed | None = None,
    ) -> Filling:
        """As `StateSource.begin`. A batch of which a row is missing goes through the target whole."""
        bounds = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
        keys = [row_key(tokens[start:stop]) for start, stop in bounds]
        parts = [self._planes(out, len(tokens), start, stop) for start, stop in bounds]
        if any(key not in self._recording for key in keys):
            self._recording.refresh()
        if all(key in self._recording for key in keys) and self._read(keys, parts, progress):
            self.rows_read += len(keys)
            return Filled(True)
        self.load()
        assert self._target is not None
        filling = self._target.begin(tokens, cu_seqlens, out, progress, landed)
        self.rows_computed += len(keys)
        return _Recorded(filling, self._recording, list(zip(keys, parts, strict=True)))

    def _read(self, keys: Sequence[bytes], parts: Sequence[list[memoryview]], progress: Callable[[], None]) -> bool:
        for key, planes in zip(keys, parts, strict=True):
            if not self._recording.read(key, planes):
                return False
            progress()
        return True

    def _planes(self, out: memoryview, tokens: int, start: int, stop: int) -> list[memoryview]:
        """A row's bytes in each plane of a record's states [planes, T, H], then in each plane of their scales."""
        kind = self._recording.kind
        data = out.cast("B")

        def parts(data: memoryview, each: int) -> list[memoryview]:
            lines = [plane * tokens for plane in range(kind.planes)]
            return [data[(line + start) * each : (line + stop) * each] for line in lines]

        if kind.dtype != FP8:
            return parts(data, kind.token_bytes // kind.planes)
        scales = data[scales_offset(kind.planes, tokens, kind.hidden_size) :]
        return parts(data, kind.hidden_size) + parts(scales, SCALE_BYTES)


@dataclass(frozen=True)
class _Recorded:
    """A record that the target fills; its rows are recorded when it is complete."""

    filling: Filling
    recording: Recording
    rows: Sequence[tuple[bytes, Sequence[memoryview]]]  # keys and planes

    def done(self) -> bool:
        return self.filling.done()

    def finish(self) -> bool:
        finite = self.filling.finish()
        if finite:  # what is not finite is refused by the rank and must not come again
            for key, planes in self.rows:
                self.recording.write(key, planes)
        return finite


def recording_source(
    run: RunFile,
    info: TargetInfo,
    layer_ids: Sequence[int],
    rows: Rows,
    worker: str,
    load: Callable[[], StateSource],
) -> RecordingSource:
    """The source of a run with `stream.record_to`; its target is loaded now unless every row is recorded."""
    assert run.stream.record_to is not None
    limit = run.stream.record_limit
    recording = Recording(
        Path(run.stream.record_to),
        StateKind.of(run, info, layer_ids),
        worker,
        None if limit is None else int(limit * 2**30),
    )
    source = RecordingSource(info, recording, load)
    there = sum(row_key(rows.row(i).tokens) in recording for i in range(len(rows))) if len(recording) else 0
    log.info("%s: %d of %d rows are recorded in %s", worker, there, len(rows), run.stream.record_to)
    if there < len(rows):
        source.load()
    return source
