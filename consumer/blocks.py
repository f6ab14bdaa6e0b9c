"""Blocks of a micro-batch, packed: which slots exist, what each may see, and which labels count.

A block is an anchor token and the masked slots after it, cut at its document's end, so every slot that is computed
exists. All blocks of all rows lie one after another: S slots in N blocks over T context positions of packed rows.

    slot k of the block at anchor a     sits at position a+k, is asked for the token there (no shift)
    sees context t < a                  of its own document only: states at or after the anchor would tell the label
    sees its own block                  both ways; no other block
    counts with m_k·exp(-(k-1)/γ)       m_k = 1 while every label up to k is supervised and inside the document; m_0 = 0

`pack_blocks` is plain numpy on the host. `DenseAttention` is SDPA with an explicit mask, document by document: the
reference, used on CPU. On CUDA the kernels of attention.py do the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .drafter import Attend, ContextKV, sdpa

MAX_HEAD_DIM = 256  # of the kernels in attention.py


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

    def prepare(self, windows: Iterable[int | None], head_dim: int, item_bytes: int) -> None:
        """Masks are made when they are used."""

    def tables(self) -> Iterator[Tensor]:
        return iter(())

    def _of(self, window: int | None) -> list[Tensor]:
        if window not in self._masks:
            self._masks[window] = [
                torch.from_numpy(dense_mask(self._blocks, span, window)).to(self._device) for span in self._blocks.spans
            ]
        return self._masks[window]


def _join(context: Tensor, block: Tensor, span: Span) -> Tensor:
    return torch.cat([context[:, span.context_from : span.context_to], block[:, span.slot_from : span.slot_to]], 1)


def seen_from(blocks: Blocks, window: int | None) -> NDArray[np.int64]:
    """[S] first context position seen by a slot, as a packed index; at or above `see_to` when it sees none."""
    if window is None:
        return blocks.see_from
    return np.maximum(blocks.see_from, blocks.see_to + blocks.slot - (window - 1))


class Prepared(Attend, Protocol):
    """An `Attend` whose tables can be made before the micro-batch is computed."""

    def prepare(self, windows: Iterable[int | None], head_dim: int, item_bytes: int) -> None:
        """Makes them for layers with these windows and heads of so many elements, of so many bytes each."""
        ...

    def tables(self) -> Iterator[Tensor]:
        """Those that lie on the device."""
        ...


def attention(blocks: Blocks, context: int, device: torch.device, head_dim: int) -> Prepared:
    """How a micro-batch of `context` tokens attends on a device: the kernels on CUDA, for heads that they take."""
    if device.type == "cuda" and head_dim <= MAX_HEAD_DIM:
        from .attention import RangeAttention  # on first use: a CPU run never needs Triton

        return RangeAttention(blocks, context, device)
    return DenseAttention(blocks, device)


class _Staging:
    """Page-locked memory that tables pass through on their way to a GPU: a few pieces in turn, each used again once its
    copy is done. Pinning anew for each table costs milliseconds."""

    PIECES = 16

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces = [torch.empty(0, dtype=torch.uint8) for _ in range(self.PIECES)]
        self._copied = [torch.cuda.Event() for _ in range(self.PIECES)]
        self._next = 0

    def send(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        """The columns, one after another; the host waits for nothing but a copy of `PIECES` calls ago."""
        turn, self._next = self._next, (self._next + 1) % self.PIECES
        self._copied[turn].synchronize()
        size = sum(column.nbytes for column in columns)
        if len(self._pieces[turn]) < size:
            self._pieces[turn] = torch.empty(1 << size.bit_length(), dtype=torch.uint8, pin_memory=True)
        held = self._pieces[turn][:size]
        np.concatenate(columns, out=held.numpy().view(columns[0].dtype))
        sent = held.view(torch.from_numpy(columns[0][:0]).dtype).to(self._device, non_blocking=True)
        self._copied[turn].record(torch.cuda.current_stream(self._device))
        return sent


@cache
def _staging(stream: torch.cuda.Stream) -> _Staging:
    return _Staging(stream.device)


def to_device(columns: Sequence[NDArray[Any]], device: torch.device | str) -> list[Tensor]:
    """1-D arrays of one dtype as tensors on a device, moved in one copy on the current stream that the host does not
    wait for. One thread at a time for each stream."""
    lengths, device = [len(column) for column in columns], torch.device(device)
    if device.type == "cuda":
        joined = _staging(torch.cuda.current_stream(device)).send(columns)
    else:
        joined = torch.from_numpy(np.concatenate(columns))
    return list(joined.split(lengths))
