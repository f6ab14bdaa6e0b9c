"""Is this record what the plan says it is, and can it be hidden states at all?

A rank asks before it trains on anything a worker wrote: another batch, other tokens, another target's layers, zero,
constant or non-finite states are refused, with the worker's name, rather than trained on. Pure numpy; every state is
looked at once for NaN and infinity (two integer maxima, no copy), some tokens of every row for zeros and constants.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..common.batch import BatchId
from ..common.plan import Plan
from ..common.record import FP8, RecordInvalid, RecordMeta, read_meta, scales_offset
from ..common.rows import Rows

SAMPLED_TOKENS = 128  # beside the first and the last token of every row


class RecordRefused(Exception):
    """The record must not be trained on; the text says why."""


@dataclass(frozen=True)
class Expected:
    """What every record of the run has in common."""

    fingerprint: int
    layer_ids: tuple[int, ...]
    dtype: str
    hidden_size: int
    last_hidden: str  # "none" or "before_norm"


@dataclass(frozen=True)
class _Float:
    """A float's bits as integers: non-finite are those from `infinity` up, sign bit aside."""

    signed: type[np.signedinteger]
    unsigned: type[np.unsignedinteger]
    infinity: int

    @property
    def sign(self) -> int:
        return int(np.iinfo(self.unsigned).max) // 2 + 1


_FLOATS = {
    "bfloat16": _Float(np.int16, np.uint16, 0x7F80),
    "float16": _Float(np.int16, np.uint16, 0x7C00),
    "float32": _Float(np.int32, np.uint32, 0x7F800000),
    FP8: _Float(np.int8, np.uint8, 0x7F),  # no infinity; this pattern is NaN
}


class RecordCheck:
    """Checks records against the plan, the prepared rows and what the run's target was asked for."""

    def __init__(self, plan: Plan, rows: Rows, expected: Expected):
        self._plan, self._rows, self._expected = plan, rows, expected

    def __call__(self, payload: memoryview, batch: BatchId) -> tuple[RecordMeta, memoryview]:
        """The description and the states [planes, T, H] of the record of `batch` in `payload`, which is read in place.

        Raises:
            RecordRefused: it is another record, or none.
        """
        try:
            meta, offset = read_meta(payload, len(payload))
        except RecordInvalid as error:
            raise RecordRefused(f"not a record: {error}") from None
        self._check_run(meta)
        self._check_rows(meta, batch)
        states = payload[offset:]
        check_states(states, meta)
        return meta, states

    def _check_run(self, meta: RecordMeta) -> None:
        want = self._expected
        for name, found, wanted in (
            ("fingerprint", f"{meta.fingerprint:016x}", f"{want.fingerprint:016x}"),
            ("layer ids", list(meta.layer_ids), list(want.layer_ids)),
            ("dtype", meta.dtype, want.dtype),
            ("hidden size", meta.hidden_size, want.hidden_size),
            ("last hidden state", meta.last_hidden, want.last_hidden),
        ):
            if found != wanted:
                raise RecordRefused(f"{name} {found}, not {wanted}")

    def _check_rows(self, meta: RecordMeta, batch: BatchId) -> None:
        if meta.batch != batch.pack():
            raise RecordRefused(f"it describes batch {_name(meta.batch)}, not {batch}")
        if batch not in self._plan:
            raise RecordRefused(f"batch {batch} is not of this run's plan")
        wanted = self._plan.rows(batch)
        if not np.array_equal(meta.row_ids, wanted):
            raise RecordRefused(f"rows {_head(meta.row_ids)}, not {_head(wanted)}")
        rows = [self._rows.row(int(index)) for index in wanted]
        ends = np.cumsum([0, *(len(row.tokens) for row in rows)])
        if not np.array_equal(meta.cu_seqlens, ends):
            raise RecordRefused("its rows' boundaries are not those of the prepared rows")
        if not np.array_equal(meta.tokens, np.concatenate([row.tokens for row in rows])):
            raise RecordRefused("its tokens are not those of the prepared rows")
        if not np.array_equal(meta.mask, np.concatenate([row.mask for row in rows])):
            raise RecordRefused("its loss mask is not that of the prepared rows")


def check_states(states: memoryview, meta: RecordMeta) -> None:
    """Refuse states [planes, T, H] that are non-finite anywhere, or zero or constant in a sampled token.

    Of float8 states also scales that are no positive number.

    Raises:
        RecordRefused: naming layer, token and row.
    """
    form = _FLOATS[meta.dtype]
    shape = (meta.planes, len(meta.tokens), meta.hidden_size)
    if len(states) != meta.states_bytes:
        raise RecordRefused(f"{len(states)} bytes of states do not hold {shape} of {meta.dtype}")
    if meta.dtype == FP8:
        _check_scales(states, meta)
    bits = np.frombuffer(states, form.unsigned, math.prod(shape)).reshape(shape)
    sampled = _sampled(meta)
    for plane in range(meta.planes):
        _check_finite(bits[plane], form, meta, plane)
        _check_alive(bits[plane, sampled], sampled, form, meta, plane)


def _check_scales(states: memoryview, meta: RecordMeta) -> None:
    scales = np.frombuffer(states, np.float32, offset=scales_offset(*meta.states_shape)).reshape(meta.planes, -1)
    bad = ~(np.isfinite(scales) & (scales > 0))
    if bad.any():
        plane, token = (int(index) for index in np.argwhere(bad)[0])
        raise RecordRefused(f"{_where(meta, plane, token)} are not finite (scale {scales[plane, token]})")


def _check_finite(bits: np.ndarray, form: _Float, meta: RecordMeta, plane: int) -> None:
    # Without the sign bit, NaN and infinity are the patterns from `infinity` up. As signed integers those of them that
    # are positive are the largest, as unsigned integers the negative ones are: two maxima need no temporary.
    if bits.view(form.signed).max() < form.infinity and bits.max() < form.infinity + form.sign:
        return
    bad = ((bits & (form.sign - 1)) >= form.infinity).any(axis=1)
    raise RecordRefused(f"{_where(meta, plane, int(bad.argmax()))} are not finite ({int(bad.sum())} tokens)")


def _check_alive(bits: np.ndarray, tokens: np.ndarray, form: _Float, meta: RecordMeta, plane: int) -> None:
    zero = ~(bits & (form.sign - 1)).any(axis=1)
    if zero.any():
        raise RecordRefused(f"{_where(meta, plane, int(tokens[zero.argmax()]))} are all zero")
    constant = (bits == bits[:, :1]).all(axis=1)
    if meta.hidden_size > 1 and constant.any():
        raise RecordRefused(f"{_where(meta, plane, int(tokens[constant.argmax()]))} are all the same number")
    if len(bits) > 1 and (bits == bits[0]).all():
        raise RecordRefused(f"{_layer(meta, plane)}: every token has the same states")


def _sampled(meta: RecordMeta) -> np.ndarray:
    """Tokens looked at closely: the ends of every row, and some evenly spaced."""
    ends = np.asarray(meta.cu_seqlens, np.int64)
    spread = np.linspace(0, ends[-1] - 1, min(SAMPLED_TOKENS, int(ends[-1])), dtype=np.int64)
    return np.unique(np.concatenate([ends[:-1], ends[1:] - 1, spread]))


def _where(meta: RecordMeta, plane: int, token: int) -> str:
    row = int(np.searchsorted(meta.cu_seqlens, token, side="right")) - 1
    return f"{_layer(meta, plane)}: the states of token {token} (row {int(meta.row_ids[row])})"


def _layer(meta: RecordMeta, plane: int) -> str:
    return f"layer {meta.layer_ids[plane]}" if plane < len(meta.layer_ids) else "last hidden state"


def _head(values: np.ndarray) -> str:
    return str(values[:4].tolist()) + (f" and {len(values) - 4} more" if len(values) > 4 else "")


def _name(word: int) -> str:
    try:
        return str(BatchId.unpack(word))
    except ValueError:
        return hex(word)
