"""Prepared rows: token ids and loss masks of tokenised conversations, on disk and mapped into memory.

    rows.arrow       Arrow IPC file, columns `tokens: large_list<int32>` and `mask: large_list<uint8>`, ROWS_PER_BATCH
                     rows in a record batch, so that row i is in batch i // ROWS_PER_BATCH and costs two slices
    used_tokens.npy  the token ids that occur, int32, ascending
    format.json      tokenizer and chat templates that made them, which `paceline prepare --show` reads them with
    meta.json        what the rows were prepared from, their digest and counts

`paceline.producer.prepare` writes the folder once; workers, trainer, ranks and audit read it.

mask[t] = 1: token t is supervised (assistant text and its end token; not the end token of an answer that was cut).

A row id names one use of a row in an epoch: the row's index, plus len(rows) for each use before it in that epoch.
Without weights above 1 row ids are indices. Anchors are drawn by row id, so that each use trains other ones.
"""

import hashlib
import json
import os
import secrets
import shutil
from array import array
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from . import faults
from .errors import ConfigError
from .paths import make_folder
from .record import MIN_ROW_TOKENS

ROWS_VERSION = 2
ROWS_PER_BATCH = 1024
MAX_WEIGHT = 100
"""Most uses of a row in an epoch."""
FILES = frozenset({"rows.arrow", "used_tokens.npy", "format.json", "meta.json"})
"""All that a folder of prepared rows has in it."""
_SCHEMA = pa.schema([("tokens", pa.large_list(pa.int32())), ("mask", pa.large_list(pa.uint8()))])


class Row(NamedTuple):
    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T]


class _Batch(NamedTuple):
    """One record batch: row r is tokens[offsets[r]:offsets[r+1]]."""

    offsets: np.ndarray  # int64 [rows + 1]
    tokens: np.ndarray  # int32
    mask: np.ndarray  # uint8


class Rows:
    """The rows of one folder. A row costs O(1) and is not copied. Pickles as its path."""

    def __init__(self, folder: Path, meta: dict[str, Any], batches: list[_Batch]):
        self.folder = folder
        self.meta = meta
        self.digest: str = meta["digest"]
        self.lengths: np.ndarray = np.concatenate([np.diff(batch.offsets) for batch in batches]).astype(np.int32)
        self._batches = batches

    @classmethod
    def open(cls, folder: str | Path) -> "Rows":
        """Map the rows of a folder. ConfigError if they are missing, damaged or of another version."""
        folder = Path(folder)
        meta = read_meta(folder)
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow")))
            if reader.schema != _SCHEMA:
                raise ConfigError(f"{folder}: rows.arrow has other columns: prepare the rows again")
            batches = [_flat(reader.get_batch(index)) for index in range(reader.num_record_batches)]
        except FileNotFoundError as error:
            raise _missing(folder, "rows.arrow") from error
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ConfigError(f"{folder}: rows.arrow cannot be read ({error}): prepare the rows again") from error
        counts = [len(batch.offsets) - 1 for batch in batches]
        shortest = min((int(np.diff(batch.offsets).min(initial=MIN_ROW_TOKENS)) for batch in batches), default=0)
        if sum(counts) != meta["rows"] or set(counts[:-1]) - {ROWS_PER_BATCH} or shortest < MIN_ROW_TOKENS:
            raise ConfigError(f"{folder}: rows.arrow does not match meta.json: prepare the rows again")
        return cls(folder, meta, batches)

    def __reduce__(self):
        return Rows.open, (self.folder,)

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, row_id: int) -> Row:
        """Tokens int32 [T] and mask uint8 [T] of a row, read-only views of the mapping. IndexError if it is none."""
        if not 0 <= row_id < self.ids:
            raise IndexError(f"row {row_id} is none of {len(self)} rows")
        at, within = divmod(int(row_id) % len(self), ROWS_PER_BATCH)
        batch = self._batches[at]
        start, end = batch.offsets[within], batch.offsets[within + 1]
        return Row(batch.tokens[start:end], batch.mask[start:end])

    @property
    def ids(self) -> int:
        """One more than the largest row id."""
        return len(self) * MAX_WEIGHT

    @property
    def total_tokens(self) -> int:
        return int(self.meta["tokens"])

    @cached_property
    def supervised(self) -> np.ndarray:
        """Supervised tokens of each row, int64 [rows]. Reads all masks."""
        counts = [np.add.reduceat(batch.mask, batch.offsets[:-1], dtype=np.int64) for batch in self._batches]
        return np.concatenate(counts)

    @cached_property
    def used_tokens(self) -> np.ndarray:
        """The token ids that occur, int32, ascending."""
        try:
            return np.load(self.folder / "used_tokens.npy", allow_pickle=False)
        except FileNotFoundError as error:
            raise _missing(self.folder, "used_tokens.npy") from error

    def used_token(self, token: int) -> bool:
        """Whether a token id occurs in any row (a mask token must not)."""
        at = int(np.searchsorted(self.used_tokens, token))
        return at < len(self.used_tokens) and int(self.used_tokens[at]) == token

    @property
    def vocab_bound(self) -> int:
        """One more than the largest token id that occurs: the target's embedding needs so many rows."""
        return int(self.meta["vocab_bound"])


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a folder of rows. ConfigError if it is missing, damaged or of another version."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(folder, "meta.json") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: meta.json cannot be read ({error}): prepare the rows again") from error
    if not isinstance(meta, dict) or meta.get("version") != ROWS_VERSION:
        raise ConfigError(f"{folder}: prepared by another version of paceline: prepare the rows again")
    return meta


def _missing(folder: Path, name: str) -> ConfigError:
    return ConfigError(f"{folder}: no prepared rows here ({name} is missing): write them with `paceline prepare --out`")


def _flat(batch: pa.RecordBatch) -> _Batch:
    """The buffers of a record batch as arrays, not copied. ValueError if tokens and mask differ in shape."""
    tokens, mask = batch.column("tokens"), batch.column("mask")
    offsets = _from_arrow(tokens.offsets, np.int64)
    if not np.array_equal(offsets, _from_arrow(mask.offsets, np.int64)):
        raise ValueError("tokens and mask have different lengths")
    return _Batch(offsets, _from_arrow(tokens.values, np.int32), _from_arrow(mask.values, np.uint8))


# Arrays go by their buffers: `to_numpy` and `pa.array` import pandas wherever it is installed, which takes a process
# most of a second.


def _from_arrow(array: pa.Array, dtype: type[np.generic]) -> np.ndarray:
    """A view of an array of numbers, read-only. ValueError if values are missing or the buffer is too short."""
    validity, values = array.buffers()
    if validity is not None and array.null_count:
        raise ValueError("values are missing")
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(values, dtype, len(array), array.offset * np.dtype(dtype).itemsize)


def _to_arrow(values: np.ndarray) -> pa.Array:
    """An array of the same numbers, not copied."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


class RowsWriter:
    """Writes a folder of rows, ROWS_PER_BATCH at a time, under a temporary name; `finish` renames it into place.

    Leaving the `with` block without `finish` removes what was written.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        make_folder(folder.parent)
        self._scratch = _scratch(folder)
        self._file = (self._scratch / "rows.arrow").open("wb")
        self._writer = pa.ipc.new_file(self._file, _SCHEMA)
        self._pending: list[Row] = []
        self._digest = hashlib.sha256()
        self._used = np.zeros(1 << 18, bool)  # by token id; grows
        self._hashes = array("Q")  # of each row's tokens: 64 bits, so that a million rows are told apart
        self.rows = self.tokens = self.supervised = 0

    def __enter__(self) -> "RowsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._file.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def added(self) -> int:
        """Rows added so far."""
        return self.rows + len(self._pending)

    def add(self, tokens: np.ndarray, mask: np.ndarray) -> None:
        """A row: int32 [T] and uint8 [T], T >= MIN_ROW_TOKENS."""
        self._pending.append(Row(tokens, mask))
        if len(self._pending) == ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        lengths = np.array([len(row.tokens) for row in self._pending], "<i8")
        tokens = np.concatenate([row.tokens for row in self._pending]).astype("<i4")
        mask = np.concatenate([row.mask for row in self._pending]).astype(np.uint8)
        offsets = _to_arrow(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        columns = [pa.LargeListArray.from_arrays(offsets, _to_arrow(values)) for values in (tokens, mask)]
        self._writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
        for values in (lengths, tokens, mask):
            self._digest.update(values.tobytes())
        for row in np.split(tokens, np.cumsum(lengths)[:-1]):
            self._hashes.append(int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little"))
        if (bound := int(tokens.max()) + 1) > len(self._used):
            self._used = np.concatenate([self._used, np.zeros(bound, bool)])
        self._used[tokens] = True
        self.rows += len(lengths)
        self.tokens += len(tokens)
        self.supervised += int(mask.sum(dtype=np.int64))
        self._pending = []

    def add_file(self, name: str, text: str) -> None:
        """A file beside the rows, for `Rows.folder`'s readers."""
        with (self._scratch / name).open("w", encoding="utf-8") as file:
            file.write(text)
            _sync(file)

    def finish(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Complete the folder, of one row at least, and put it in place, replacing an earlier one.

        Returns `meta` with version, rows, copies (rows whose tokens are an earlier one's), tokens, supervised,
        vocab_bound and digest (SHA-256 of the rows alone) added.
        """
        if self._pending:
            self._flush()
        self._writer.close()
        _sync(self._file)
        with (self._scratch / "used_tokens.npy").open("wb") as file:
            used = np.flatnonzero(self._used).astype("<i4")
            np.save(file, used)
            _sync(file)
        faults.point("rows.half-written")
        meta = meta | {
            "version": ROWS_VERSION,
            "rows": self.rows,
            "copies": self.rows - len(np.unique(np.frombuffer(self._hashes, np.uint64))),
            "tokens": self.tokens,
            "supervised": self.supervised,
            "vocab_bound": int(used[-1]) + 1,
            "digest": self._digest.hexdigest(),
        }
        with (self._scratch / "meta.json").open("w") as file:
            file.write(json.dumps(meta, indent=1, sort_keys=True) + "\n")
            _sync(file)
        faults.point("rows.before-rename")
        _replace(self._scratch, self._folder)
        return meta


def check_no_others(folder: Path) -> None:
    """ConfigError if there are files in `folder` that are not of prepared rows: replacing it would delete them."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    if others := sorted(names - FILES):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ConfigError(f"{folder} has files that are not of prepared rows ({others[0]}{more}): move them elsewhere")


def _scratch(folder: Path) -> Path:
    """A new folder next to `folder`, with the permissions of the umask."""
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        scratch.mkdir()
    except OSError as error:
        raise ConfigError(f"cannot make folder {folder}: {error.strerror}") from None
    return scratch


def has_scratch(folder: Path) -> bool:
    """Whether a writer of `folder` is at work, or was killed at it."""
    return next(folder.parent.glob(f".{folder.name}.*"), None) is not None


def remove_scratch(folder: Path) -> None:
    """Remove what killed writers of `folder` left behind. The caller sees to it that none is alive."""
    for scratch in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(scratch, ignore_errors=True)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _replace(scratch: Path, folder: Path) -> None:
    """Rename `scratch` to `folder`; a folder already there steps aside first and is then removed."""
    check_no_others(folder)
    if folder.exists():
        aside = _scratch(folder)
        folder.rename(aside / folder.name)
        faults.point("rows.between-renames")
        scratch.rename(folder)
        faults.point("rows.renamed")
        shutil.rmtree(aside, ignore_errors=True)
    else:
        scratch.rename(folder)
        faults.point("rows.renamed")
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
