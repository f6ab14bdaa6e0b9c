"""Blocks of a micro-batch, packed: which slots exist, what each may see, and which labels count.

A block is an anchor token and the masked slots after it, cut at its document's end, so every slot that is computed
exists. All blocks of all rows lie one after another: S slots in N blocks over T context positions of packed rows.

    slot k of the block at anchor a     sits at position a+k, is asked for the token there (no shift)
    sees context t < a                  of its own document only: states at or after the anchor would tell the label
    sees its own block                  both ways; no other block
    counts with m_k·exp(-(k-1)/γ)       m_k = 1 while every label up to k is supervised and inside the document; m_0 = 0

`pack_blocks` is plain numpy on the host. Two implementations of the mask follow: `DenseAttention` (SDPA with an
explicit mask, document by document: the reference, used on CPU) and `FlexAttention` (flex_attention with a tile mask:
CUDA).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .drafter import ContextKV, sdpa

TILE = 128  # queries and keys of a flex_attention tile


class Span(NamedTuple):
    """One document's share of a micro-batch: its context positions that some block sees, and its slots."""

    context_from: int
    context_to: int
    slot_from: int
    slot_to: int


@dataclass(frozen=True, eq=False)
class Blocks:
    """The packed blocks of a micro-batch; int64 unless said, on the host."""

    block_size: int
    ids: NDArray[np.int64]  # [S] token in the slot: the anchor's, then the mask token
    positions: NDArray[np.int64]  # [S] position in the document, a+k
    see_from: NDArray[np.int64]  # [S] context seen: packed indices see_from:see_to
    see_to: NDArray[np.int64]  # [S]
    block: NDArray[np.int64]  # [S] number of the slot's block, ascending
    slot: NDArray[np.int64]  # [S] k, 0 for the anchor
    scored: NDArray[np.int64]  # [n] slots with a weight, ascending; never a slot 0
    labels: NDArray[np.int64]  # [n] token id each of them is asked for
    weights: NDArray[np.float32]  # [n] w_k
    label_at: NDArray[np.int64]  # [n] packed index of that token
    spans: tuple[Span, ...]
    anchors: NDArray[np.int64]  # [N] packed index of each block's anchor

    @property
    def slots(self) -> int:
        return len(self.ids)

    @property
    def count(self) -> int:
        return len(self.anchors)

    @property
    def cells(self) -> NDArray[np.int64]:
        """[n] place of each scored slot in an [N, block_size] table, flattened."""
        return self.block[self.scored] * self.block_size + self.slot[self.scored]

    def table(self) -> list[tuple[int, int, int, float]]:
        """(anchor, label position, label id, weight) of every scored slot, in packed indices: for tests and reading."""
        anchors = self.anchors[self.block[self.scored]]
        rows = zip(anchors, anchors + self.slot[self.scored], self.labels, self.weights, strict=True)
        return [(int(a), int(at), int(label), float(weight)) for a, at, label, weight in rows]


def default_gamma(block_size: int) -> float:
    """γ of the weights' decay: 4, 5, 7 for blocks of 8, 10, 16, linear between; half the block below, 7/16 above."""
    if block_size <= 8:
        return block_size / 2
    return float(np.interp(block_size, [8, 10, 16], [4, 5, 7])) if block_size <= 16 else block_size * 7 / 16


def pack_blocks(
    tokens: NDArray[np.int32],
    mask: NDArray[np.uint8],
    cu_seqlens: NDArray[np.int32],
    anchors: Sequence[NDArray[np.int64]],
    *,
    block_size: int,
    mask_token_id: int,
    gamma: float,
) -> Blocks:
    """Blocks at `anchors` (one ascending array a row, positions inside the row) of packed rows.

    tokens, mask [T]; cu_seqlens [R+1], row r being cu_seqlens[r]:cu_seqlens[r+1]. Any row may have no anchor.
    """
    starts, ends = cu_seqlens[:-1].astype(np.int64), cu_seqlens[1:].astype(np.int64)
    per_row = np.array([len(row) for row in anchors], np.int64)
    row = np.repeat(np.arange(len(anchors)), per_row)
    inside = np.concatenate(anchors) if len(anchors) else np.zeros(0, np.int64)
    at = starts[row] + inside
    reach = np.arange(block_size)
    exists = at[:, None] + reach < ends[row, None]
    block, slot = np.nonzero(exists)
    place = at[block] + slot

    ahead = np.minimum(at[:, None] + reach, max(len(mask) - 1, 0))
    counts = exists & (mask[ahead] != 0) if len(at) else exists
    counts[:, :1] = True
    counts = np.logical_and.accumulate(counts, axis=1)
    counts[:, :1] = False
    scored = np.flatnonzero(counts[block, slot])
    return Blocks(
        block_size=block_size,
        ids=np.where(slot == 0, tokens[place], mask_token_id).astype(np.int64),
        positions=inside[block] + slot,
        see_from=starts[row][block],
        see_to=at[block],
        block=block,
        slot=slot,
        scored=scored,
        labels=tokens[place[scored]].astype(np.int64),
        weights=np.exp(-(slot[scored] - 1) / gamma).astype(np.float32),
        label_at=place[scored],
        spans=_spans(starts, at, per_row, exists.sum(1)),
        anchors=at,
    )


def _spans(
    starts: NDArray[np.int64], at: NDArray[np.int64], per_row: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[Span, ...]:
    block_ends = np.cumsum(per_row)
    slot_ends = np.concatenate([[0], np.cumsum(lengths)])
    spans = []
    for row in np.flatnonzero(per_row):
        first, last = block_ends[row] - per_row[row], block_ends[row]
        spans.append(Span(int(starts[row]), int(at[last - 1]), int(slot_ends[first]), int(slot_ends[last])))
    return tuple(spans)


def dense_mask(blocks: Blocks, span: Span, window: int | None) -> NDArray[np.bool_]:
    """What the slots of `span` see of [its context ; its slots]: bool [slots, context + slots]."""
    rows = slice(span.slot_from, span.slot_to)
    block, slot = blocks.block[rows, None], blocks.slot[rows, None]
    context = np.arange(span.context_from, span.context_to)
    sees = (context >= blocks.see_from[rows, None]) & (context < blocks.see_to[rows, None])
    own = block == block.T
    if window is not None:
        sees &= context > blocks.see_to[rows, None] + slot - window
        behind = slot - slot.T
        own &= (behind >= 0) & (behind < window)
    return np.concatenate([sees, own], axis=1)


class DenseAttention:
    """SDPA with an explicit mask, one document after another: the plain form, and the oracle of the fast one."""

    def __init__(self, blocks: Blocks, device: torch.device | str = "cpu") -> None:
        self._blocks, self._device = blocks, device
        self._masks: dict[int | None, list[Tensor]] = {}

    def __call__(self, q: Tensor, context: ContextKV, block: ContextKV, window: int | None) -> Tensor:
        mixed = [
            sdpa(
                q[:, span.slot_from : span.slot_to],
                _join(context[0], block[0], span),
                _join(context[1], block[1], span),
                mask,
            )
            for span, mask in zip(self._blocks.spans, self._of(window), strict=True)
        ]
        return torch.cat(mixed, 1) if mixed else q

    def _of(self, window: int | None) -> list[Tensor]:
        if window not in self._masks:
            self._masks[window] = [
                torch.from_numpy(dense_mask(self._blocks, span, window)).to(self._device) for span in self._blocks.spans
            ]
        return self._masks[window]


def _join(context: Tensor, block: Tensor, span: Span) -> Tensor:
    return torch.cat([context[:, span.context_from : span.context_to], block[:, span.slot_from : span.slot_to]], 1)


class FlexAttention:
    """flex_attention over [context ; slots], both padded to whole tiles, with a tile mask made on the host.

    The tile mask needs no S×T work: slots lie in document and anchor order, so what all slots of a tile see of the
    context is one range, what any of them sees is another, and both follow from the tables' minima and maxima over
    the tile. Key tiles inside the first are full (no mask evaluated), those that only meet the second are partial.
    A padded slot repeats the last slot's range and is a block of its own, so no row is without a key.
    """

    def __init__(self, blocks: Blocks, context: int, device: torch.device | str, *, compiled: bool) -> None:
        """context: T of the tensors that the calls will bring. compiled: through torch.compile (CUDA)."""
        self._device, self._slots, self._compiled = torch.device(device), blocks.slots, compiled
        self._tables = _tables(blocks, context)
        self._masks: dict[int | None, BlockMask] = {}

    def __call__(self, q: Tensor, context: ContextKV, block: ContextKV, window: int | None) -> Tensor:
        keys, values = (_joined_tiles(a, b) for a, b in zip(context, block, strict=True))
        kernel = _compiled_flex() if self._compiled else flex_attention
        mixed = kernel(_tiles(q)[None], keys[None], values[None], block_mask=self.mask(window), enable_gqa=True)
        assert isinstance(mixed, Tensor)
        return mixed[0, :, : self._slots]

    def mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            self._masks[window] = _block_mask(self._tables, window, self._device)
        return self._masks[window]


class _Tables(NamedTuple):
    """int32 tables of the padded micro-batch; keys are the padded context, then the padded slots."""

    see_from: NDArray[np.int32]  # [S'] context seen by a slot, as key indices
    see_to: NDArray[np.int32]
    block: NDArray[np.int32]  # [S']
    slot: NDArray[np.int32]
    key_block: NDArray[np.int32]  # [T' + S'], -1 for context
    key_slot: NDArray[np.int32]


def _tables(blocks: Blocks, context: int) -> _Tables:
    padding = _padded(blocks.slots) - blocks.slots
    extend = {"pad_width": (0, padding), "mode": "edge"}
    see_from, see_to, slot = (np.pad(a, **extend) for a in (blocks.see_from, blocks.see_to, blocks.slot))
    block = np.concatenate([blocks.block, blocks.count + np.arange(padding)])
    before = np.full(_padded(context), -1)
    columns = see_from, see_to, block, slot, np.concatenate([before, block]), np.concatenate([before, slot])
    return _Tables(*(column.astype(np.int32) for column in columns))


def _seen_from(tables: _Tables, window: int | None) -> NDArray[np.int32]:
    if window is None:
        return tables.see_from
    return np.maximum(tables.see_from, tables.see_to + tables.slot - (window - 1))


def tile_kinds(tables: _Tables, window: int | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(partial, full), each bool [query tiles, key tiles]: which tiles need the mask, which are seen whole."""
    low, high = (column.reshape(-1, TILE) for column in (_seen_from(tables, window), tables.see_to))
    key_blocks = tables.key_block.reshape(-1, TILE)
    edges = np.arange(len(key_blocks)) * TILE
    full = (edges >= low.max(1)[:, None]) & (edges + TILE <= high.min(1)[:, None])
    some = (edges + TILE > low.min(1)[:, None]) & (edges < high.max(1)[:, None])
    own = tables.block.reshape(-1, TILE)
    some |= (own.min(1)[:, None] <= key_blocks.max(1)) & (own.max(1)[:, None] >= key_blocks.min(1))
    return some & ~full, full


def _block_mask(tables: _Tables, window: int | None, device: torch.device) -> BlockMask:
    partial, full = tile_kinds(tables, window)
    columns = _seen_from(tables, window), tables.see_to, tables.block, tables.slot, tables.key_block, tables.key_slot
    low, high, block, slot, key_block, key_slot = to_device(columns, device)
    (kv_count, kv_index), (full_count, full_index) = _ordered(partial, device), _ordered(full, device)

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((kv >= low[q]) & (kv < high[q])) | (key_block[kv] == block[q])

    def sees_window(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        assert window is not None
        near = (key_slot[kv] <= slot[q]) & (key_slot[kv] > slot[q] - window)
        return sees(batch, head, q, kv) & (near | (key_block[kv] < 0))

    return BlockMask.from_kv_blocks(
        kv_count,
        kv_index,
        full_count,
        full_index,
        BLOCK_SIZE=TILE,
        mask_mod=sees if window is None else sees_window,
        seq_lengths=(len(tables.block), len(tables.key_block)),
    )


def _ordered(tiles: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, rows] and indices [1, 1, rows, columns] (those set first, ascending) of a tile table."""
    counts = tiles.sum(1).astype(np.int32)
    index = np.argsort(~tiles, axis=1, kind="stable").astype(np.int32)
    count, flat = to_device([counts, index.ravel()], device)
    return count[None, None], flat.view(1, 1, *tiles.shape)


def _padded(n: int) -> int:
    return -(-n // TILE) * TILE


def _tiles(x: Tensor) -> Tensor:
    """x [heads, n, D] padded with zeros to whole tiles, contiguous.

    Padding by nothing would keep x's strides: another layout, for which the kernels would be compiled once more.
    """
    return F.pad(x, (0, 0, 0, _padded(x.shape[1]) - x.shape[1])).contiguous()


def _joined_tiles(context: Tensor, block: Tensor) -> Tensor:
    return torch.cat([_tiles(context), _tiles(block)], 1)


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Made on first use: torch.compile imports a compiler, which a CPU run never needs."""
    return torch.compile(flex_attention, dynamic=True)


def to_device(columns: Sequence[NDArray[Any]], device: torch.device | str) -> list[Tensor]:
    """1-D arrays of one dtype as tensors on a device, moved in one copy that the host does not wait for."""
    lengths = [len(column) for column in columns]
    joined = torch.from_numpy(np.concatenate(columns))
    if torch.device(device).type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return list(joined.split(lengths))
