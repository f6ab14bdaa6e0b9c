"""Prepared rows: token ids and loss masks of tokenised conversations, on disk and mapped into memory.

A folder holds `rows.arrow` (Arrow IPC, one record batch, columns `tokens: large_list<int32>` and `mask:
large_list<uint8>`, mapped, so that a row costs two slices) and `meta.json` (what they were prepared from, their digest
and counts). `paceline.producer.prepare` writes it once; workers, trainer, ranks and audit read it.

mask[t] = 1: token t is supervised (assistant text and its end token; not the end token of an answer that was cut).
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from .errors import ConfigError
from .plan import MIN_ROW_TOKENS

ROWS_VERSION = 1
_SCHEMA = pa.schema([("tokens", pa.large_list(pa.int32())), ("mask", pa.large_list(pa.uint8()))])


class Row(NamedTuple):
    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T]


class Rows:
    """The rows of one folder. Indexing costs O(1) and copies nothing. Pickles as its path."""

    def __init__(self, folder: Path, meta: dict[str, Any], offsets: np.ndarray, tokens: np.ndarray, mask: np.ndarray):
        self.folder = folder
        self.meta = meta
        self.digest: str = meta["digest"]
        self.lengths = np.diff(offsets).astype(np.int32)
        self._offsets = offsets
        self._tokens = tokens
        self._mask = mask

    @classmethod
    def open(cls, folder: str | Path) -> "Rows":
        """Map the rows of a folder. ConfigError if they are missing, damaged or of another version."""
        folder = Path(folder)
        try:
            meta = json.loads((folder / "meta.json").read_text())
            table = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow"))).read_all()
        except FileNotFoundError as error:
            raise ConfigError(
                f"{folder}: no prepared rows here ({Path(error.filename or '?').name} is missing): "
                "write them with `paceline prepare --out`"
            ) from error
        except (OSError, ValueError, pa.ArrowInvalid) as error:
            raise ConfigError(f"{folder}: prepared rows cannot be read ({error}): prepare them again") from error
        if not isinstance(meta, dict) or meta.get("version") != ROWS_VERSION:
            raise ConfigError(f"{folder}: prepared by another version of paceline: prepare the rows again")
        if table.schema != _SCHEMA or table.num_rows != meta["rows"] or table.num_rows == 0:
            raise ConfigError(f"{folder}: rows.arrow does not match meta.json: prepare the rows again")
        offsets, tokens = _flat(table["tokens"])
        mask_offsets, mask = _flat(table["mask"])
        if not np.array_equal(offsets, mask_offsets) or int(np.diff(offsets).min()) < MIN_ROW_TOKENS:
            raise ConfigError(f"{folder}: rows.arrow is damaged: prepare the rows again")
        return cls(folder, meta, offsets, tokens, mask)

    def __reduce__(self):
        return Rows.open, (self.folder,)

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, index: int) -> Row:
        """Tokens int32 [T] and mask uint8 [T] of a row, views of the mapping. IndexError out of range."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} is not in 0..{len(self) - 1}")
        start, end = self._offsets[index], self._offsets[index + 1]
        return Row(self._tokens[start:end], self._mask[start:end])

    @property
    def total_tokens(self) -> int:
        return len(self._tokens)

    @property
    def used_tokens(self) -> np.ndarray:
        """The token ids that occur, int32, ascending."""
        return np.asarray(self.meta["used_tokens"], np.int32)

    def used_token(self, token: int) -> bool:
        """Whether a token id occurs in any row (a mask token must not)."""
        return bool(np.isin(token, self.used_tokens))

    @property
    def vocab_bound(self) -> int:
        """One more than the largest token id that occurs."""
        return int(self.meta["vocab_bound"])


def _flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets int64 [N+1] and values of a column of one chunk without nulls, not copied."""
    array = column.chunk(0)
    return array.offsets.to_numpy(), array.values.to_numpy()


class RowsWriter:
    """Collects rows as they are tokenised (4 + 1 bytes a token in memory) and writes the folder in one go."""

    def __init__(self):
        self._lengths: list[int] = []
        self._tokens: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, lengths: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> None:
        """Rows of `lengths`, end to end in `tokens` and `mask`."""
        self._lengths += lengths.tolist()
        self._tokens.append(tokens.astype(np.int32))
        self._mask.append(mask.astype(np.uint8))

    def write(self, folder: Path, meta: dict[str, Any]) -> Path:
        """Write the folder under a temporary name, then rename it into place, replacing an earlier one.

        Adds to `meta`: version, rows, tokens, supervised, used_tokens, vocab_bound and digest (SHA-256 of the rows'
        contents alone)."""
        offsets = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        tokens = np.concatenate(self._tokens)
        mask = np.concatenate(self._mask)
        used = np.unique(tokens)
        meta = meta | {
            "version": ROWS_VERSION,
            "rows": len(self),
            "tokens": len(tokens),
            "supervised": int(mask.sum()),
            "used_tokens": used.tolist(),
            "vocab_bound": int(used[-1]) + 1,
            "digest": _digest([offsets, tokens, mask]),
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write_arrow(scratch / "rows.arrow", offsets, tokens, mask)
            _write_synced(scratch / "meta.json", (json.dumps(meta, sort_keys=True) + "\n").encode())
            scratch.chmod(0o755)
            _replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return folder


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()


def _write_arrow(path: Path, offsets: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> None:
    columns = [pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in (tokens, mask)]
    with path.open("wb") as file:
        with pa.ipc.new_file(file, _SCHEMA) as writer:
            writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
        file.flush()
        os.fsync(file.fileno())


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(scratch: Path, folder: Path) -> None:
    """Rename `scratch` to `folder`; a folder already there steps aside first and is removed."""
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        folder.rename(aside / "old")
        scratch.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)
