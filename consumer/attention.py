"""Triton kernels of the drafter's attention: a slot's keys are two ranges, one of the context and one of the slots.

Blocks lie in document and anchor order, so everything a slot sees is the context `low:high` and the slots
`own_low:own_high`; a sliding window only narrows the two ranges. A tile of slots therefore walks over one stretch of
the context, the inner part of it without a mask, and over the few tiles of slots around itself. No mask is ever made.
The plain form is `blocks.DenseAttention`; the tests hold these kernels against it (on a CPU under TRITON_INTERPRET=1).

    forward         a program a tile of slots and head; softmax with running maxima, its logarithm is kept (base 2)
    queries         dq the same way round; Σ do·o of each slot on the way
    keys            dk and dv, a program a tile of keys; the slots that may see the tile are a range as well

Tensors are [heads, n, D] with stride 1 along D and any others, so nothing is copied or transposed. Slots S, context T.
FlashAttention's recurrences (Dao, 2307.08691).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .blocks import MAX_HEAD_DIM, Blocks, seen_from, to_device
from .drafter import ContextKV

COUNTS = ["slots", "context", "count"]  # vary: a kernel for each remainder of 16 would be compiled in mid-run
LOG2_E = 1.4426950408889634


class Launch(NamedTuple):
    """Slots and keys of a tile, and how it is launched."""

    slots: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tuning:
    """Tiles of the three kernels. `each`: heads of a group whose slopes of the context's keys one program adds up, 0
    for all of them; fewer make more programs of more equal length, and a sum over them afterwards."""

    forward: Launch
    queries: Launch
    keys: Launch
    each: int = 1


TUNED = {  # by padded head dimension; 64 and 128 chosen among ten each on an H200
    64: Tuning(Launch(64, 64, 4, 3), Launch(64, 32, 4, 3), Launch(32, 64, 4, 3), each=0),
    128: Tuning(Launch(64, 64, 4, 3), Launch(64, 64, 4, 2), Launch(32, 64, 4, 3), each=1),
    256: Tuning(Launch(64, 32, 4, 2), Launch(64, 32, 4, 2), Launch(32, 32, 4, 2), each=1),
}


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _attend(
    q, acc, top, total, keys, values, key_stride, value_stride, first, last, limit, low, high, scale,
    MASKED: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax of q [M, D] over keys first:last."""
    d = tl.arange(0, PAD)
    n = tl.arange(0, N)
    for start in tl.range(first, last, N):
        begin = tl.cast(start, tl.int64)
        k_at = keys + begin * key_stride + n[None, :] * key_stride + d[:, None]
        v_at = values + begin * value_stride + n[:, None] * value_stride + d[None, :]
        at = start + n
        if MASKED or D != PAD:
            k = tl.load(k_at, mask=(at[None, :] < limit) & (d[:, None] < D), other=0.0)
        else:
            k = tl.load(k_at)
        z = tl.dot(q, k, input_precision=PRECISION) * scale
        if MASKED:
            z = tl.where((at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]), z, float("-inf"))
        new = tl.maximum(top, tl.max(z, 1))
        base = new
        if MASKED:
            base = tl.where(new == float("-inf"), 0.0, new)  # a slot that has seen no key yet
        p = tl.exp2(z - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if MASKED or D != PAD:
            v = tl.load(v_at, mask=(at[:, None] < limit) & (d[None, :] < D), other=0.0)
        else:
            v = tl.load(v_at)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit
def _stretch(low, high, valid, N: tl.constexpr):
    """(first, whole, past, last): first:whole and past:last hold keys that only some slots of the tile see, and in
    whole:past each slot sees all. The first two lengths are multiples of N."""
    far = 2147483647
    first = tl.min(tl.where(valid, low, far), 0)
    last = tl.max(tl.where(valid, high, 0), 0)
    whole = first + (tl.max(tl.where(valid, low, 0), 0) - first + N - 1) // N * N
    past = whole + tl.maximum(tl.min(tl.where(valid, high, far), 0) - whole, 0) // N * N
    return first, whole, past, last


@triton.jit(do_not_specialize=COUNTS)
def _forward_kernel(
    q, keys, values, own_keys, own_values, low, high, own_low, own_high, out, lse,
    slots, context, group, scale,
    q_head, q_row, k_head, k_row, v_head, v_row, ok_head, ok_row, ov_head, ov_row, o_head, o_row,
    D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    shared = (head // group).to(tl.int64)
    rows = tile * M + tl.arange(0, M)
    valid = rows < slots
    d = tl.arange(0, PAD)
    inside = valid[:, None] & (d[None, :] < D)
    wide = rows.to(tl.int64)
    x = tl.load(q + head.to(tl.int64) * q_head + wide[:, None] * q_row + d[None, :], mask=inside, other=0.0)
    acc = tl.zeros((M, PAD), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)

    lo, hi = tl.load(low + rows, mask=valid, other=0), tl.load(high + rows, mask=valid, other=0)
    first, whole, past, last = _stretch(lo, hi, valid, N)
    k, v = keys + shared * k_head, values + shared * v_head
    acc, top, total = _attend(
        x, acc, top, total, k, v, k_row, v_row, first, whole, context, lo, hi, scale, True, D, PAD, N, PRECISION
    )
    acc, top, total = _attend(
        x, acc, top, total, k, v, k_row, v_row, whole, past, context, lo, hi, scale, False, D, PAD, N, PRECISION
    )
    acc, top, total = _attend(
        x, acc, top, total, k, v, k_row, v_row, past, last, context, lo, hi, scale, True, D, PAD, N, PRECISION
    )
    lo, hi = tl.load(own_low + rows, mask=valid, other=0), tl.load(own_high + rows, mask=valid, other=0)
    first, whole, past, last = _stretch(lo, hi, valid, N)
    k, v = own_keys + shared * ok_head, own_values + shared * ov_head
    acc, top, total = _attend(
        x, acc, top, total, k, v, ok_row, ov_row, first, last, slots, lo, hi, scale, True, D, PAD, N, PRECISION
    )
    total = tl.where(valid, total, 1.0)
    y = acc / total[:, None]
    tl.store(out + head.to(tl.int64) * o_head + wide[:, None] * o_row + d[None, :], y.to(out.dtype.element_ty), inside)
    tl.store(lse + head.to(tl.int64) * slots + rows, top + tl.log2(total), valid)


@triton.jit
def _query_slopes(
    x, slope, dq, lse, delta, keys, values, key_stride, value_stride, first, last, limit, low, high, scale,
    MASKED: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, PAD)
    n = tl.arange(0, N)
    for start in tl.range(first, last, N):
        begin = tl.cast(start, tl.int64)
        k_at = keys + begin * key_stride + n[:, None] * key_stride + d[None, :]
        v_at = values + begin * value_stride + n[None, :] * value_stride + d[:, None]
        at = start + n
        if MASKED or D != PAD:
            k = tl.load(k_at, mask=(at[:, None] < limit) & (d[None, :] < D), other=0.0)
            v = tl.load(v_at, mask=(at[None, :] < limit) & (d[:, None] < D), other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        z = tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale
        p = tl.exp2(z - lse[:, None])
        if MASKED:
            p = tl.where((at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]), p, 0.0)
        dp = tl.dot(slope, v, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=COUNTS)
def _queries_kernel(
    q, keys, values, own_keys, own_values, low, high, own_low, own_high, out, lse, slope, delta, dq,
    slots, context, group, scale, unit,
    q_head, q_row, k_head, k_row, v_head, v_row, ok_head, ok_row, ov_head, ov_row, o_head, o_row, s_head, s_row,
    D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    shared, wide_head = (head // group).to(tl.int64), head.to(tl.int64)
    rows = tile * M + tl.arange(0, M)
    valid = rows < slots
    d = tl.arange(0, PAD)
    inside = valid[:, None] & (d[None, :] < D)
    wide = rows.to(tl.int64)
    x = tl.load(q + wide_head * q_head + wide[:, None] * q_row + d[None, :], mask=inside, other=0.0)
    y = tl.load(out + wide_head * o_head + wide[:, None] * o_row + d[None, :], mask=inside, other=0.0)
    dy = tl.load(slope + wide_head * s_head + wide[:, None] * s_row + d[None, :], mask=inside, other=0.0)
    met = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    tl.store(delta + wide_head * slots + rows, met, valid)
    norm = tl.load(lse + wide_head * slots + rows, mask=valid, other=0.0)
    acc = tl.zeros((M, PAD), tl.float32)

    lo, hi = tl.load(low + rows, mask=valid, other=0), tl.load(high + rows, mask=valid, other=0)
    first, whole, past, last = _stretch(lo, hi, valid, N)
    k, v = keys + shared * k_head, values + shared * v_head
    acc = _query_slopes(
        x, dy, acc, norm, met, k, v, k_row, v_row, first, whole, context, lo, hi, scale, True, D, PAD, N, PRECISION
    )
    acc = _query_slopes(
        x, dy, acc, norm, met, k, v, k_row, v_row, whole, past, context, lo, hi, scale, False, D, PAD, N, PRECISION
    )
    acc = _query_slopes(
        x, dy, acc, norm, met, k, v, k_row, v_row, past, last, context, lo, hi, scale, True, D, PAD, N, PRECISION
    )
    lo, hi = tl.load(own_low + rows, mask=valid, other=0), tl.load(own_high + rows, mask=valid, other=0)
    first, whole, past, last = _stretch(lo, hi, valid, N)
    k, v = own_keys + shared * ok_head, own_values + shared * ov_head
    acc = _query_slopes(
        x, dy, acc, norm, met, k, v, ok_row, ov_row, first, last, slots, lo, hi, scale, True, D, PAD, N, PRECISION
    )
    at = dq + wide_head * o_head + wide[:, None] * o_row + d[None, :]
    tl.store(at, (acc * unit).to(dq.dtype.element_ty), inside)


@triton.jit(do_not_specialize=COUNTS)
def _keys_kernel(
    q, keys, values, low, high, seen_first, seen_past, lse, slope, delta, dk, dv,
    slots, count, group, scale, unit,
    q_head, q_row, k_head, k_row, v_head, v_row, s_head, s_row, d_head, d_row,
    EACH: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    shared = (part * EACH // group).to(tl.int64)
    at = tile * N + tl.arange(0, N)
    d = tl.arange(0, PAD)
    m = tl.arange(0, M)
    inside = (at[:, None] < count) & (d[None, :] < D)
    wide = at.to(tl.int64)
    k = tl.load(keys + shared * k_head + wide[:, None] * k_row + d[None, :], mask=inside, other=0.0)
    v = tl.load(values + shared * v_head + wide[:, None] * v_row + d[None, :], mask=inside, other=0.0)
    k_sum = tl.zeros((N, PAD), tl.float32)
    v_sum = tl.zeros((N, PAD), tl.float32)
    first, past = tl.load(seen_first + tile), tl.load(seen_past + tile)
    for one in tl.static_range(EACH):
        head = (part * EACH + one).to(tl.int64)
        for start in tl.range(first, past, M):
            rows = start + m
            valid = rows < slots
            begin = tl.cast(start, tl.int64)
            x_at = q + head * q_head + begin * q_row + m[:, None] * q_row + d[None, :]
            dy_at = slope + head * s_head + begin * s_row + m[:, None] * s_row + d[None, :]
            x = tl.load(x_at, mask=valid[:, None] & (d[None, :] < D), other=0.0)
            dy = tl.load(dy_at, mask=valid[:, None] & (d[None, :] < D), other=0.0)
            norm = tl.load(lse + head * slots + rows, mask=valid, other=0.0)
            met = tl.load(delta + head * slots + rows, mask=valid, other=0.0)
            lo, hi = tl.load(low + rows, mask=valid, other=0), tl.load(high + rows, mask=valid, other=0)
            z = tl.dot(k, tl.trans(x), input_precision=PRECISION) * scale
            p = tl.exp2(z - norm[None, :])
            p = tl.where((at[:, None] >= lo[None, :]) & (at[:, None] < hi[None, :]), p, 0.0)
            v_sum = tl.dot(p.to(dy.dtype), dy, v_sum, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
            ds = p * (dp - met[None, :])
            k_sum = tl.dot(ds.to(x.dtype), x, k_sum, input_precision=PRECISION)
    to = part.to(tl.int64) * d_head + wide[:, None] * d_row + d[None, :]
    tl.store(dk + to, (k_sum * unit).to(dk.dtype.element_ty), inside)
    tl.store(dv + to, v_sum.to(dv.dtype.element_ty), inside)


# Tables --------------------------------------------------------------------------------------------------------------


class Ranges(NamedTuple):
    """int32 on the device. Of each slot: the context low:high and the slots own_low:own_high that it sees. Of each
    tile of keys, of the context and of the slots: the slots that may see any of it."""

    low: Tensor
    high: Tensor
    own_low: Tensor
    own_high: Tensor
    context_first: Tensor
    context_past: Tensor
    own_first: Tensor
    own_past: Tensor


def key_ranges(blocks: Blocks, context: int, window: int | None, tile: int) -> list[NDArray[np.int32]]:
    """The columns of `Ranges` for key tiles of `tile`."""
    slots = np.arange(blocks.slots)
    starts = np.flatnonzero(np.diff(blocks.block, prepend=-1))
    own_low = starts[blocks.block]
    own_high = np.append(starts[1:], blocks.slots)[blocks.block] if blocks.count else own_low
    low, high = seen_from(blocks, window), blocks.see_to
    key_tiles, slot_tiles = (np.arange(0, count, tile) for count in (context, blocks.slots))
    # Slots are sorted by `high`, and but for a window's shifts inside blocks by `low`.
    nearest = np.minimum.accumulate(low[::-1])[::-1]
    context_first = np.searchsorted(high, key_tiles, side="right")
    context_past = np.searchsorted(nearest, np.minimum(key_tiles + tile, context), side="left")
    own_first = own_low[slot_tiles]
    own_past = own_high[np.minimum(slot_tiles + tile, blocks.slots) - 1]
    if window is not None:
        own_low, own_high = np.maximum(own_low, slots - (window - 1)), slots + 1
    columns = low, high, own_low, own_high, context_first, context_past, own_first, own_past
    return [column.astype(np.int32) for column in columns]


class RangeAttention:
    """The kernels for one micro-batch's blocks; an `Attend`."""

    def __init__(self, blocks: Blocks, context: int, device: torch.device | str, tuning: Tuning | None = None) -> None:
        """context: T of the tensors that the calls will bring. tuning: None for what suits the head dimension."""
        self._blocks, self._context, self._device = blocks, context, device
        self._tuning = tuning
        self._ranges: dict[tuple[int | None, int], Ranges] = {}

    def __call__(self, q: Tensor, context: ContextKV, block: ContextKV, window: int | None) -> Tensor:
        """Differentiable in all five tensors; see `Attend`."""
        tuning = self._tuning or tuned(q.shape[-1])
        ranges = self.ranges(window, tuning.keys.keys)
        result = _Attention.apply(q, *context, *block, ranges, tuning)
        assert isinstance(result, Tensor)
        return result

    def ranges(self, window: int | None, tile: int) -> Ranges:
        if (window, tile) not in self._ranges:
            columns = key_ranges(self._blocks, self._context, window, tile)
            self._ranges[window, tile] = Ranges._make(to_device(columns, self._device))
        return self._ranges[window, tile]


def tuned(head_dim: int) -> Tuning:
    """The tiles for a head dimension of up to `MAX_HEAD_DIM`. ValueError beyond."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"a head dimension of {head_dim} is more than the attention kernels take ({MAX_HEAD_DIM})")
    return TUNED[max(min(TUNED), triton.next_power_of_2(head_dim))]


# Autograd ------------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, ranges: Ranges,
        tuning: Tuning,
    ) -> Tensor:  # fmt: skip
        q, keys, values, own_keys, own_values = map(_rows, (q, keys, values, own_keys, own_values))
        heads, slots, dim = q.shape
        out = _like(q)
        lse = torch.empty(heads, slots, dtype=torch.float32, device=q.device)
        launch = tuning.forward
        if slots:
            cast(Any, _forward_kernel)[(triton.cdiv(slots, launch.slots), heads)](
                q, keys, values, own_keys, own_values, *ranges[:4], out, lse,
                slots, keys.shape[1], heads // len(keys), LOG2_E * dim**-0.5,
                *_strides(q, keys, values, own_keys, own_values, out),
                **_constants(dim, q.dtype), M=launch.slots, N=launch.keys,
                num_warps=launch.warps, num_stages=launch.stages,
            )  # fmt: skip
        ctx.save_for_backward(q, keys, values, own_keys, own_values, out, lse)
        ctx.ranges, ctx.tuning = ranges, tuning
        return out

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, own_keys, own_values, out, lse = ctx.saved_tensors
        slope = _rows(outer[0])
        heads, slots, dim = q.shape
        ranges, tuning = ctx.ranges, ctx.tuning
        delta, dq = torch.empty_like(lse), _like(q)
        common = _constants(dim, q.dtype)
        group, scale, unit = heads // len(keys), LOG2_E * dim**-0.5, dim**-0.5
        launch = tuning.queries
        if slots:
            cast(Any, _queries_kernel)[(triton.cdiv(slots, launch.slots), heads)](
                q, keys, values, own_keys, own_values, *ranges[:4], out, lse, slope, delta, dq,
                slots, keys.shape[1], group, scale, unit,
                *_strides(q, keys, values, own_keys, own_values, dq, slope),
                **common, M=launch.slots, N=launch.keys, num_warps=launch.warps, num_stages=launch.stages,
            )  # fmt: skip
        slopes: list[Tensor] = []
        sides = (
            (tuning.each, keys, values, ranges.low, ranges.high, ranges.context_first, ranges.context_past),
            (0, own_keys, own_values, ranges.own_low, ranges.own_high, ranges.own_first, ranges.own_past),
        )
        for each, k, v, *tables in sides:
            each = min(group, each or group)
            dk, dv = (_like(k, heads // each, k.dtype if each == group else torch.float32) for _ in range(2))
            launch, count = tuning.keys, k.shape[1]
            if count:
                cast(Any, _keys_kernel)[(triton.cdiv(count, launch.keys), heads // each)](
                    q, k, v, *tables, lse, slope, delta, dk, dv,
                    slots, count, group, scale, unit, *_strides(q, k, v, slope, dk),
                    EACH=each, **common, M=launch.slots, N=launch.keys,
                    num_warps=launch.warps, num_stages=launch.stages,
                )  # fmt: skip
            slopes += (_summed(part, len(k), k.dtype) for part in (dk, dv))
        return dq, *slopes, None, None


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(x: Tensor, heads: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised [heads, n, D] that lies in memory as [n, heads, D], as the projections around it read and write."""
    own_heads, count, dim = x.shape
    shape = (count, heads or own_heads, dim)
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device).transpose(0, 1)


def _summed(parts: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[heads · p, n, D] summed over p to [heads, n, D]."""
    if len(parts) == heads:
        return parts
    rows = parts.transpose(0, 1)
    return rows.view(rows.shape[0], heads, len(parts) // heads, rows.shape[2]).sum(2).to(dtype).transpose(0, 1)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _constants(dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """D, its padding to a power of two, and full precision for float32 operands."""
    precision = "ieee" if dtype == torch.float32 else "tf32"
    return {"D": dim, "PAD": max(16, triton.next_power_of_2(dim)), "PRECISION": precision}
