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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from .attention_kernels import forward_kernel, keys_kernel, queries_kernel
from .blocks import MAX_HEAD_DIM, Blocks, seen_from, to_device
from .drafter import ContextKV

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


TUNED = {  # by bytes of a padded head; 128 and 256 (heads of 64 and 128 in bfloat16) chosen among ten each on an H200
    128: Tuning(Launch(64, 64, 4, 3), Launch(64, 32, 4, 3), Launch(32, 64, 4, 3), each=0),
    256: Tuning(Launch(64, 64, 4, 3), Launch(64, 64, 4, 2), Launch(32, 64, 4, 3), each=1),
    512: Tuning(Launch(64, 32, 4, 2), Launch(64, 32, 4, 2), Launch(32, 32, 4, 2), each=1),
    1024: Tuning(Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), each=1),
}


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
        tuning = self._tuning or tuned(q.shape[-1], q.element_size())
        ranges = self.ranges(window, tuning.keys.keys)
        result = _Attention.apply(q, *context, *block, ranges, tuning)
        assert isinstance(result, Tensor)
        return result

    def prepare(self, windows: Iterable[int | None], head_dim: int, item_bytes: int) -> None:
        """See `blocks.Prepared`; they go to the device on the current stream."""
        tuning = self._tuning or tuned(head_dim, item_bytes)
        for window in windows:
            self.ranges(window, tuning.keys.keys)

    def tables(self) -> Iterator[Tensor]:
        for ranges in self._ranges.values():
            yield from ranges

    def ranges(self, window: int | None, tile: int) -> Ranges:
        if (window, tile) not in self._ranges:
            columns = key_ranges(self._blocks, self._context, window, tile)
            self._ranges[window, tile] = Ranges._make(to_device(columns, self._device))
        return self._ranges[window, tile]


def tuned(head_dim: int, item_bytes: int) -> Tuning:
    """The tiles for a head dimension of up to `MAX_HEAD_DIM`: wide heads need small ones to fit a multiprocessor's
    shared memory. ValueError beyond."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"a head dimension of {head_dim} is more than the attention kernels take ({MAX_HEAD_DIM})")
    return TUNED[max(min(TUNED), item_bytes * triton.next_power_of_2(head_dim))]


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
            cast(Any, forward_kernel)[(triton.cdiv(slots, launch.slots), heads)](
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
            cast(Any, queries_kernel)[(triton.cdiv(slots, launch.slots), heads)](
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
                cast(Any, keys_kernel)[(triton.cdiv(count, launch.keys), heads // each)](
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
