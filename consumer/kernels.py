"""Triton kernels of a step, but for the attention's: a chunk of logits to statistics and to its own gradient, and what
Inductor's or torch's own kernels do too slowly.

One program a row walks along the vocabulary, softmaxes in float32 with running maxima; but for slopes in fp8, nothing
of the chunk's size is allocated. They compute what `objective.slot_stats` and `objective.slot_slopes` do, the plain
form that the tests hold them against (on a CPU under TRITON_INTERPRET=1).

    cross_entropy   decayed cross-entropy alone: statistics and gradient in one launch, the row still in the cache
    slot_stats      any objective; with the target's logits a second walk, for what needs both softmaxes
    slot_slopes     any objective: overwrites the logits
    add_to, swiglu_slopes, quantise_both_ways    of optim.py and linears.py, where their plain forms are

Logits are [c, V] with stride 1 along V. Reads: c·V twice (cross_entropy), once and with a target's chunk two times two
(slot_stats), once (slot_slopes). Writes: c·V once; in fp8, where the run says so, beside the logits.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.eightbit import scale_of
from .losses import SLOPE_MAX, Slopes
from .objective import Factors, SlotStats, slope_scale

BLOCK = 4096  # logits a program takes at a time
WARPS = 8
LOWEST = tl.constexpr(-3.0e38)  # finite, so that a lane without a logit gives no NaN
ADD_BLOCK = 2048
TURNED = 64  # rows and columns of a tile that is turned round

# A chunk's slots begin anywhere in a micro-batch's: a kernel for each alignment of theirs would be compiled late.
COLUMNS = [
    "labels", "weights", "ce", "right", "entropy", "lse_out", "target_lse", "kl", "overlap", "below",
    "lse_in", "entropy_in", "ce_by", "kl_by", "overlap_by", "entropy_by", "scales",
]  # fmt: skip


@triton.jit
def _softmax_walk(row, label, size, BLOCK: tl.constexpr):
    """Maximum, Σ exp(z - max), Σ exp(z - max)·z and the lowest argmax of one row, and the label's logit.

    Each lane walks for itself and they are joined once at the end: nothing waits for other lanes on the way.
    """
    lane = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), LOWEST, tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    means = tl.zeros((BLOCK,), tl.float32)
    bests = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, BLOCK):
        at = start + lane
        z = tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
        bests = tl.where(z > tops, at, bests)
        new = tl.maximum(tops, z)
        scale = tl.exp(tops - new)
        e = tl.exp(z - new)
        totals = totals * scale + e
        means = means * scale + e * tl.where(e == 0.0, 0.0, z)
        tops = new
    top = tl.max(tops, 0)
    scale = tl.exp(tops - top)
    best = tl.min(tl.where(tops == top, bests, size), 0)
    return top, tl.sum(totals * scale, 0), tl.sum(means * scale, 0), best, tl.load(row + label).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _cross_entropy_kernel(
    logits, labels, weights, ce, right, slopes, size, stride, slopes_stride,
    GRADIENT: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * stride
    label = tl.load(labels + i)
    top, total, _, best, z_label = _softmax_walk(row, label, size, BLOCK)
    lse = top + tl.log(total)
    tl.store(ce + i, lse - z_label)
    tl.store(right + i, (best == label).to(tl.int8))
    if GRADIENT:
        by = tl.load(weights + i).to(tl.float32)
        if LARGEST > 0:
            by = LARGEST  # the weight is in the row's scale
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
            slope = by * (tl.exp(z - lse) - tl.where(at == label, 1.0, 0.0))
            tl.store(slopes + i * slopes_stride + at, slope.to(slopes.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _stats_kernel(
    logits, target, labels, ce, right, entropy, lse_out, target_lse, kl, overlap, below, size, stride,
    TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * stride
    label = tl.load(labels + i)
    top, total, mean, best, z_label = _softmax_walk(row, label, size, BLOCK)
    lse = top + tl.log(total)
    tl.store(ce + i, lse - z_label)
    tl.store(right + i, (best == label).to(tl.int8))
    tl.store(entropy + i, lse - mean / total)  # pyright: ignore[reportOperatorIssue]
    tl.store(lse_out + i, lse)
    if TARGET:
        own = target + i * stride
        own_top, own_total, _, _, _ = _softmax_walk(own, label, size, BLOCK)
        own_lse = own_top + tl.log(own_total)
        kl_sum = tl.zeros((), tl.float32)
        shared = tl.zeros((), tl.float32)
        less = tl.zeros((), tl.float32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            log_q = tl.load(row + at, mask=inside, other=0.0).to(tl.float32) - lse
            log_p = tl.load(own + at, mask=inside, other=0.0).to(tl.float32) - own_lse
            q = tl.where(inside, tl.exp(log_q), 0.0)
            p = tl.where(inside, tl.exp(log_p), 0.0)
            kl_sum += tl.sum(p * (log_p - log_q), 0)
            shared += tl.sum(tl.minimum(p, q), 0)
            less += tl.sum(tl.where(q < p, q, 0.0), 0)
        tl.store(target_lse + i, own_lse)
        tl.store(kl + i, kl_sum)
        tl.store(overlap + i, shared)
        tl.store(below + i, less)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _slopes_kernel(
    logits, target, labels, lse_in, entropy_in, target_lse, below, ce_by, kl_by, overlap_by, entropy_by, slopes, scales,
    size, stride, slopes_stride, TARGET: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * stride
    label, lse, entropy = tl.load(labels + i), tl.load(lse_in + i), tl.load(entropy_in + i)
    ce, kl, by_entropy = tl.load(ce_by + i), tl.load(kl_by + i), tl.load(entropy_by + i)
    unit = 1.0
    if SCALED:
        unit = 1.0 / tl.load(scales + i)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < size
        log_q = tl.load(row + at, mask=inside, other=0.0).to(tl.float32) - lse
        q = tl.exp(log_q)
        slope = (ce + kl) * q - ce * tl.where(at == label, 1.0, 0.0) - by_entropy * q * (log_q + entropy)
        if TARGET:
            own = tl.load(target + i * stride + at, mask=inside, other=0.0).to(tl.float32)
            p = tl.exp(own - tl.load(target_lse + i))
            less = tl.where(q < p, 1.0, 0.0)
            slope = slope - kl * p + tl.load(overlap_by + i) * q * (tl.load(below + i) - less)
        tl.store(slopes + i * slopes_stride + at, (slope * unit).to(slopes.dtype.element_ty), mask=inside)


def cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None, slopes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """CE [c] float32 and whether the argmax is the label [c] of logits [c, V], labels [c].

    With weights [c] the logits become weights·(softmax - onehot) in place; or, if `slopes` [c, V] is given, that
    becomes (softmax - onehot)·SLOPE_MAX.
    """
    ce, right = _column(logits), torch.empty(len(logits), dtype=torch.int8, device=logits.device)
    largest = 0.0 if slopes is None else SLOPE_MAX
    slopes = logits if slopes is None else slopes
    if len(logits):
        weighted = ce if weights is None else weights.contiguous()
        cast(Any, _cross_entropy_kernel)[(len(logits),)](
            logits, labels, weighted, ce, right, slopes, logits.shape[1], logits.stride(0), slopes.stride(0),
            GRADIENT=weights is not None, LARGEST=largest, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return ce, right.bool()


def slot_stats(logits: Tensor, labels: Tensor, target: Tensor | None) -> SlotStats:
    """As `objective.slot_stats`."""
    _check(logits, target)
    ce, entropy, lse = (_column(logits) for _ in range(3))
    right = torch.empty(len(logits), dtype=torch.int8, device=logits.device)
    more = [_column(logits) for _ in range(4)] if target is not None else [ce] * 4
    if len(logits):
        cast(Any, _stats_kernel)[(len(logits),)](
            logits, logits if target is None else target, labels, ce, right, entropy, lse, *more,
            logits.shape[1], logits.stride(0), TARGET=target is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return SlotStats(ce, right.bool(), entropy, lse, *(more if target is not None else [None] * 4))


def slot_slopes(
    logits: Tensor,
    labels: Tensor,
    target: Tensor | None,
    stats: SlotStats,
    factors: Factors,
    scaled: torch.dtype | None = None,
) -> Slopes:
    """As `objective.slot_slopes`, but in place if they are not scaled: the logits' own memory is returned."""
    _check(logits, target)
    own_lse, below = (stats.lse if column is None else column for column in (stats.target_lse, stats.below))
    by = [factor.float().contiguous() for factor in factors]
    slopes, scale = logits, None
    if scaled is not None:
        slopes, scale = torch.empty_like(logits, dtype=scaled), slope_scale(stats, factors)
    if len(logits):
        cast(Any, _slopes_kernel)[(len(logits),)](
            logits, logits if target is None else target, labels, stats.lse, stats.entropy, own_lse, below, *by,
            slopes, own_lse if scale is None else scale, logits.shape[1], logits.stride(0), slopes.stride(0),
            TARGET=target is not None, SCALED=scale is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return Slopes(slopes, scale)


def _column(logits: Tensor) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)


def _check(logits: Tensor, target: Tensor | None) -> None:
    if logits.stride(-1) != 1 or (
        target is not None and (target.shape, target.stride()) != (logits.shape, logits.stride())
    ):
        raise ValueError("logits must be rows of stride 1, and the target's of the same shape and strides")


@triton.jit
def _add_kernel(total, part, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    sum_ = tl.load(total + at, mask=inside, other=0.0) + tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, sum_, mask=inside)


def add_to(total: Tensor, part: Tensor) -> None:
    """total += part of another dtype, both contiguous: torch's own kernel for mixed dtypes moves a third fewer bytes
    a second."""
    cast(Any, _add_kernel)[(triton.cdiv(part.numel(), ADD_BLOCK),)](total, part, part.numel(), BLOCK=ADD_BLOCK)


@triton.jit
def _both_ways_kernel(
    weight, values, turned, row_scale, column_scale, rows, columns, stride, R: tl.constexpr, C: tl.constexpr
):
    i = tl.program_id(0) * R + tl.arange(0, R)
    j = tl.program_id(1) * C + tl.arange(0, C)
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    far, wide = i.to(tl.int64), j.to(tl.int64)
    w = tl.load(weight + far[:, None] * stride + wide[None, :], mask=inside, other=0.0).to(tl.float32)
    by_row = tl.load(row_scale + i, mask=i < rows, other=1.0)
    by_column = tl.load(column_scale + j, mask=j < columns, other=1.0)
    kind = values.dtype.element_ty
    tl.store(values + far[:, None] * columns + wide[None, :], (w / by_row[:, None]).to(kind), mask=inside)
    other_way = tl.trans((w / by_column[None, :]).to(kind))
    tl.store(turned + wide[:, None] * rows + far[None, :], other_way, mask=tl.trans(inside))


def quantise_both_ways(weight: Tensor, values: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor) -> None:
    """`linears.both_ways` of a weight [N, K] of stride 1 along K, into contiguous tensors."""
    for dim, into in ((1, scale), (0, turned_scale)):
        largest = torch.linalg.vector_norm(weight, torch.inf, dim=dim).float()
        into.copy_(scale_of(largest)[:, None])
    rows, columns = weight.shape
    cast(Any, _both_ways_kernel)[(triton.cdiv(rows, TURNED), triton.cdiv(columns, TURNED))](
        weight, values, turned, scale, turned_scale, rows, columns, weight.stride(0), R=TURNED, C=TURNED
    )


@triton.jit
def _swiglu_kernel(both, inner, slopes, mixed, size, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(both + i * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + i * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(inner + i * stride + at, mask=inside, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    active = gate * share
    kind = slopes.dtype.element_ty
    tl.store(slopes + i * 2 * size + at, (slope * up * share * (1 + gate * (1 - share))).to(kind), mask=inside)
    tl.store(slopes + i * 2 * size + size + at, (slope * active).to(kind), mask=inside)
    tl.store(mixed + i * size + at, (active * up).to(kind), mask=inside)


def swiglu_slopes(both: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """As `linears.swiglu_slopes`; both contiguous."""
    slopes, mixed = torch.empty_like(both), torch.empty_like(inner, memory_format=torch.contiguous_format)
    rows, size = inner.shape
    if rows:
        cast(Any, _swiglu_kernel)[(rows, triton.cdiv(size, ADD_BLOCK))](
            both, inner, slopes, mixed, size, inner.stride(0), BLOCK=ADD_BLOCK
        )
    return slopes, mixed


def variants() -> int:
    """How many kernels of ours, compiled for what they were called with, this process has."""
    from . import attention_kernels

    own = [*vars(attention_kernels).values(), *globals().values()]
    caches = [cache for kernel in own for cache in getattr(kernel, "device_caches", {}).values()]
    return sum(len(compiled) for compiled, *_ in caches)
