"""The three Triton kernels of attention.py; what they do as a whole is said there.

A slot's keys are the context `low:high` and the slots `own_low:own_high`. A tile of slots walks over the stretch of
keys that any of its slots sees (`_stretch`): without a mask where all do, with one before and after.
"""

# The bodies are Triton's language, not Python's: its types say nothing to a checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

# They vary: a kernel for each remainder of 16, and for each place of a table in what was sent to the device as one,
# would be compiled in the middle of a run, for a second or more.
COUNTS = ["slots", "context", "count"]
TABLES = ["low", "high", "own_low", "own_high", "seen_first", "seen_past"]


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
        z = tl.dot(q, k, input_precision=PRECISION)
        if MASKED:
            z = tl.where((at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]), z, float("-inf"))
        new = tl.maximum(top, tl.max(z, 1) * scale)
        base = new
        if MASKED:
            base = tl.where(new == float("-inf"), 0.0, new)  # a slot that has seen no key yet
        p = tl.exp2(z * scale - base[:, None])  # one instruction but for the exponential
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


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def forward_kernel(
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
        z = tl.dot(x, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(z * scale - lse[:, None])
        if MASKED:
            p = tl.where((at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]), p, 0.0)
        dp = tl.dot(slope, v, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def queries_kernel(
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


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def keys_kernel(
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
    tiles = (past - first + M - 1) // M
    # One loop over heads and tiles of slots: what comes next is loaded beside the products also where heads change.
    for i in tl.range(0, EACH * tiles):
        one = 0
        start = first + i * M
        if EACH > 1:
            one = i // tiles
            start = first + (i - one * tiles) * M
        head = tl.cast(part * EACH + one, tl.int64)
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
        z = tl.dot(k, tl.trans(x), input_precision=PRECISION)
        p = tl.exp2(z * scale - norm[None, :])
        p = tl.where((at[:, None] >= lo[None, :]) & (at[:, None] < hi[None, :]), p, 0.0)
        v_sum = tl.dot(p.to(dy.dtype), dy, v_sum, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
        ds = p * (dp - met[None, :])
        k_sum = tl.dot(ds.to(x.dtype), x, k_sum, input_precision=PRECISION)
    to = part.to(tl.int64) * d_head + wide[:, None] * d_row + d[None, :]
    tl.store(dk + to, (k_sum * unit).to(dk.dtype.element_ty), inside)
    tl.store(dv + to, v_sum.to(dv.dtype.element_ty), inside)
