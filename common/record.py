"""A record: the target's hidden states for one batch, with all that a rank needs to check and to train on it.

    meta      a fixed head, then layer ids, row ids, cu_seqlens, token ids and loss mask, padded to a whole page
    states    [planes, T, H], layer-major: one plane for each recorded layer, in order, then one for the last layer
    scales    of float8_e4m3fn states alone: float32 [planes, T], a state is its eight bits times its token's scale

A record describes itself, so nothing about it is believed because a message said so. It is written in place into a
slot: `write_meta`, the states at the offset that it returns, then `checksum` over the whole record.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import PacelineError
from .record_head import HEAD, MAGIC
from .ring_layout import WORD_LIMIT, pages

Buffer = bytes | bytearray | memoryview

FP8 = "float8_e4m3fn"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}  # in the order of their codes in a head
SCALE_BYTES = 4
LAST_HIDDEN = ("none", "before_norm")
MIN_ROW_TOKENS = 8  # shorter rows are never prepared
CHUNK_WORDS = 8192
IN_THE_MAKING = 2  # most records that a worker fills at once: one lands while the next one's forward runs

_DTYPES = tuple(ITEM_BYTES)
_MOST = 2**31 - 1  # rows, tokens, hidden size; cu_seqlens are int32


class RecordInvalid(PacelineError):
    """Bytes that are not a whole record, or not the record that was expected; the text says why."""


@dataclass(frozen=True, eq=False)
class RecordMeta:
    """What a record says of itself: R rows of T tokens in all, states of size H. Arrays are not to be changed."""

    batch: int  # packed batch id
    row_ids: NDArray[np.int64]  # [R]
    cu_seqlens: NDArray[np.int32]  # [R + 1], row r's tokens are cu_seqlens[r]:cu_seqlens[r + 1]
    tokens: NDArray[np.int32]  # [T]
    mask: NDArray[np.uint8]  # [T], 1: supervised
    layer_ids: tuple[int, ...]
    dtype: str
    hidden_size: int
    last_hidden: str  # "none", or "before_norm": the last plane is the last layer's output before the final norm
    fingerprint: int

    @property
    def planes(self) -> int:
        return len(self.layer_ids) + (self.last_hidden != "none")

    @property
    def states_shape(self) -> tuple[int, int, int]:
        """[planes, T, H]"""
        return self.planes, len(self.tokens), self.hidden_size

    @property
    def states_bytes(self) -> int:
        """Of the states and their scales."""
        return states_bytes(self.planes, len(self.tokens), self.hidden_size, self.dtype)


def states_bytes(planes: int, tokens: int, hidden_size: int, dtype: str) -> int:
    """Bytes of states [planes, tokens, hidden_size], scales included."""
    if dtype == FP8:
        return scales_offset(planes, tokens, hidden_size) + planes * tokens * SCALE_BYTES
    return planes * tokens * hidden_size * ITEM_BYTES[dtype]


def scales_offset(planes: int, tokens: int, hidden_size: int) -> int:
    """Where the scales of float8 states begin, from the states' first byte."""
    return _aligned(planes * tokens * hidden_size)


def token_bytes(planes: int, hidden_size: int, dtype: str) -> int:
    """What a token adds to the states: its planes, and their scales."""
    return planes * (hidden_size * ITEM_BYTES[dtype] + (SCALE_BYTES if dtype == FP8 else 0))


def max_rows(token_budget: int) -> int:
    """The most rows that a batch of `token_budget` tokens can have."""
    return token_budget // MIN_ROW_TOKENS


def slot_bytes(token_budget: int, max_rows: int, planes: int, hidden_size: int, dtype: str) -> int:
    """Bytes of the largest record that the token budget allows, in whole pages."""
    return _states_offset(max_rows, token_budget, planes) + pages(
        states_bytes(planes, token_budget, hidden_size, dtype)
    )


def record_bytes(meta: RecordMeta) -> int:
    """Bytes of the record, meta and states."""
    tokens, layers = len(meta.tokens), len(meta.layer_ids)
    return _states_offset(len(meta.row_ids), tokens, layers) + meta.states_bytes


def write_meta(payload: Buffer, meta: RecordMeta) -> int:
    """Writes the meta at the start of a slot and returns the offset of the states.

    Raises RecordInvalid for a meta that `read_meta` would refuse, ValueError if the record is larger than `payload`.
    """
    _check(meta)
    view = memoryview(payload).cast("B")
    if len(view) < record_bytes(meta):
        raise ValueError(f"record of {record_bytes(meta)} bytes in a slot of {len(view)}")
    rows, tokens, layers = len(meta.row_ids), len(meta.tokens), len(meta.layer_ids)
    dtype, last_hidden = _DTYPES.index(meta.dtype), LAST_HIDDEN.index(meta.last_hidden)
    end = _states_offset(rows, tokens, layers)
    arrays = (np.asarray(meta.layer_ids, np.int32), meta.row_ids, meta.cu_seqlens, meta.tokens, meta.mask)
    head = HEAD.pack(*(MAGIC, meta.batch, meta.fingerprint, rows, tokens, layers, meta.hidden_size, dtype, last_hidden))
    position = 0
    for part in (head, *(array.tobytes() for array in arrays)):
        padded = part.ljust(_aligned(len(part)), b"\0")
        view[position : position + len(padded)] = padded
        position += len(padded)
    view[position:end] = bytes(end - position)
    return end


def read_meta(payload: Buffer, length: int) -> tuple[RecordMeta, int]:
    """The meta (copied out of `payload`) of a record of `length` bytes, and the offset of its states.

    Raises RecordInvalid unless every field is in range, the arrays fit each other and `length` is exactly theirs.
    """
    view = memoryview(payload).cast("B")
    if not HEAD.size <= length <= len(view):
        raise RecordInvalid(f"record of {length} bytes in {len(view)}")
    magic, batch, fingerprint, rows, tokens, layers, hidden_size, dtype, last_hidden = HEAD.unpack_from(view)
    if magic != MAGIC:
        raise RecordInvalid("no record")
    if max(rows, tokens, layers, hidden_size) > _MOST or dtype >= len(_DTYPES) or last_hidden >= len(LAST_HIDDEN):
        raise RecordInvalid("record head out of range")
    end = _states_offset(rows, tokens, layers)
    states = states_bytes(layers + last_hidden, tokens, hidden_size, _DTYPES[dtype])
    if length != end + states:
        raise RecordInvalid(f"record of {length} bytes, not {end + states}")
    position, arrays = HEAD.size, []
    for kind, count in _arrays(rows, tokens, layers):
        arrays.append(np.frombuffer(view, kind, count, position).copy())
        position += _aligned(arrays[-1].nbytes)
    layer_ids, row_ids, cu_seqlens, ids, mask = arrays
    meta = RecordMeta(
        batch=batch,
        row_ids=row_ids,
        cu_seqlens=cu_seqlens,
        tokens=ids,
        mask=mask,
        layer_ids=tuple(layer_ids.tolist()),
        dtype=_DTYPES[dtype],
        hidden_size=hidden_size,
        last_hidden=LAST_HIDDEN[last_hidden],
        fingerprint=fingerprint,
    )
    _check(meta)
    return meta, end


def checksum(payload: Buffer, length: int) -> int:
    """A 64-bit sum over the first `length` bytes, at the speed of memory (numpy sums of 64-bit words).

    The words of each chunk of 64 KiB are added, the chunks' sums weighted by odd numbers that depend on their place
    and added, modulo 2^64. So any one changed word shows, and chunks out of place do; words that change places within
    a chunk do not. It is against torn and stale data, not against an adversary.
    """
    return RunningChecksum(payload, length).result()


class RunningChecksum:
    """`checksum` of bytes that become final piece by piece: each piece is summed while the next is still made."""

    def __init__(self, payload: Buffer, length: int) -> None:
        self._data = memoryview(payload).cast("B")[:length]
        if len(self._data) != length:
            raise ValueError(f"checksum over {length} of {len(self._data)} bytes")
        whole = length // 8
        self._words = np.frombuffer(self._data, np.uint64, whole)
        self._chunks = whole // CHUNK_WORDS
        self._sums = np.empty(self._chunks + 2, np.uint64)
        self._summed = np.zeros(self._chunks, np.bool_)

    def add(self, start: int, stop: int, share: tuple[int, int] = (0, 1)) -> None:
        """Bytes start:stop will not change any more; their whole chunks are summed now. numpy lets other threads run
        meanwhile: several may `add` other bytes, or with share = (i, n) the ith of n parts of the same ones."""
        size = CHUNK_WORDS * 8
        first, past = -(-start // size), min(stop // size, self._chunks)
        part, parts = share
        width = max(0, past - first)
        self._sum(first + width * part // parts, first + width * (part + 1) // parts)

    def result(self) -> int:
        """The checksum, once all bytes are final; nothing of the payload is read afterwards."""
        missing = np.flatnonzero(~self._summed)
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            if len(run):
                self._sum(int(run[0]), int(run[-1]) + 1)
        length, whole = len(self._data), len(self._words)
        self._sums[self._chunks] = self._words[self._chunks * CHUNK_WORDS :].sum()
        self._sums[self._chunks + 1] = int.from_bytes(self._data[whole * 8 :], "little")
        weights = np.arange(1, 2 * len(self._sums) + 1, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        del self._words, self._data
        return (int((self._sums * weights).sum()) + length * 0xD6E8FEB86659FD93) % 2**64

    def _sum(self, first: int, past: int) -> None:
        if past > first:
            words = self._words[first * CHUNK_WORDS : past * CHUNK_WORDS]
            words.reshape(past - first, CHUNK_WORDS).sum(axis=1, out=self._sums[first:past])
            self._summed[first:past] = True


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


def _arrays(rows: int, tokens: int, layers: int) -> tuple[tuple[type[np.generic], int], ...]:
    return (np.int32, layers), (np.int64, rows), (np.int32, rows + 1), (np.int32, tokens), (np.uint8, tokens)


def _states_offset(rows: int, tokens: int, layers: int) -> int:
    arrays = _arrays(rows, tokens, layers)
    return pages(HEAD.size + sum(_aligned(np.dtype(kind).itemsize * count) for kind, count in arrays))


def _check(meta: RecordMeta) -> None:
    """Raises RecordInvalid unless the parts of the meta fit each other."""
    rows, tokens = len(meta.row_ids), len(meta.tokens)
    ends = meta.cu_seqlens
    if meta.dtype not in ITEM_BYTES or meta.last_hidden not in LAST_HIDDEN:
        raise RecordInvalid(f"states of dtype {meta.dtype!r}, last hidden {meta.last_hidden!r}")
    if not (0 <= meta.batch < WORD_LIMIT and 0 <= meta.fingerprint < WORD_LIMIT):
        raise RecordInvalid(f"batch {meta.batch:#x}, fingerprint {meta.fingerprint:#x}")
    if rows == 0 or meta.planes == 0 or meta.hidden_size <= 0:
        raise RecordInvalid(f"record of {rows} rows, {meta.planes} planes of size {meta.hidden_size}")
    kinds = (meta.row_ids.dtype, ends.dtype, meta.tokens.dtype, meta.mask.dtype)
    if kinds != (np.int64, np.int32, np.int32, np.uint8):
        raise RecordInvalid(f"record arrays of dtypes {kinds}")
    if meta.row_ids.shape != (rows,) or meta.tokens.shape != (tokens,):
        raise RecordInvalid("row ids and tokens are one-dimensional")
    if ends.shape != (rows + 1,) or ends[0] != 0 or ends[-1] != tokens or (ends[1:] <= ends[:-1]).any():
        raise RecordInvalid("cu_seqlens do not cut the tokens into rows")
    if meta.mask.shape != (tokens,) or (meta.mask > 1).any():
        raise RecordInvalid("the loss mask does not fit the tokens")
    if (meta.row_ids < 0).any() or (meta.tokens < 0).any():
        raise RecordInvalid("negative row or token ids")
    if any(not 0 <= layer <= _MOST for layer in meta.layer_ids) or len(set(meta.layer_ids)) != len(meta.layer_ids):
        raise RecordInvalid(f"layer ids {meta.layer_ids}")
