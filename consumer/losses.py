"""The objective: cross-entropy with decay through the frozen head, as sums, and what is counted beside it.

    L = Σ w_k·CE_k / Σ w_k       over all scored slots of a step, on all ranks; w_k comes with the blocks

Everything here is a sum over slots or blocks; the one division by the step's Σ w_k is the optimiser's, so neither
loss nor gradient depends on how rows are split over micro-batches, records and ranks.

`head_cross_entropy` never holds all logits: a chunk of slots is taken through the head, and its loss, its
argmax and its gradient dh = w·(softmax - onehot)·W are computed before the next. W is frozen, so backward only
scales the stored dh: the head costs two matrix products a slot, with no recomputation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..common.eightbit import quantise, scaled_matmul
from .linears import SLOPE, Eight

TILE = 128, 256  # of a large matrix product
SLOPE_MAX = torch.finfo(SLOPE).max


class Slopes(NamedTuple):
    """dL/dz of a chunk of logits: values [c, V], times scale [c] if there is one."""

    values: Tensor
    scale: Tensor | None = None


class Scored(NamedTuple):
    """What an objective says of scored slots."""

    loss: Tensor  # [] numerator of the loss, differentiable in the hidden states
    ce: Tensor  # [n] cross-entropy of each slot, detached
    hits: Tensor  # [n] bool, argmax equals the label (the lowest id among equals)
    weights: Tensor  # [n] w of each slot; their sum is the loss's denominator


def head_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    eight: Eight | None = None,
    chunk_bytes: int = 2**26,
) -> Scored:
    """Weighted cross-entropy sum of slots through a frozen head.

    hidden [n, H]; head_weight [V, H] in the same dtype; labels [n] int64; weights [n]; eight: see `head_logits`. Logits
    come out of the product in that dtype; softmax and loss are float32 (float64 for float64). chunk_bytes bounds one
    chunk's float32 logits; the peak is about twice that. n may be 0.
    """
    chunk = chunk_rows(len(labels), head_weight, chunk_bytes)
    loss, losses, hits = _HeadCrossEntropy.apply(hidden, head_weight, labels, weights, eight, chunk)
    return Scored(loss, losses, hits, weights)


def quantised_head(head_weight: Tensor) -> Eight:
    """A head [V, H] for `head_logits` and `through_head`; in pieces, as its float32 copy would be the largest tensor of
    all."""
    pieces = [quantise(part) for part in head_weight.split(2**13)]
    turned = [quantise(part.t().contiguous()) for part in head_weight.split(2**8, 1)]
    values, scale, turned, turned_scale = (
        torch.cat(part) for pair in (pieces, turned) for part in zip(*pair, strict=True)
    )
    return values, scale, turned, turned_scale


def head_logits(hidden: Tensor, head_weight: Tensor, eight: Eight | None = None) -> Tensor:
    """[n, V] of hidden [n, H] through a head [V, H]. eight: the same head quantised, for a product in fp8."""
    if eight is None:
        return hidden @ head_weight.T
    return scaled_matmul(*quantise(hidden), *eight[:2], hidden.dtype)


def through_head(slopes: Slopes, head_weight: Tensor, eight: Eight | None, out: Tensor) -> None:
    """The slopes of `head_logits`'s hidden [c, H] into `out`. eight: as there, for `SLOPE` values with scales; their
    products are summed in full, as they are as many as the vocabulary has tokens."""
    scale = None if slopes.scale is None else slopes.scale[:, None]
    if eight is not None:
        assert scale is not None
        out.copy_(scaled_matmul(slopes.values, scale, *eight[2:], out.dtype, fast=False))
        return
    torch.mm(slopes.values, head_weight, out=out)
    if scale is not None:
        out *= scale


def chunk_rows(rows: int, head_weight: Tensor, chunk_bytes: int) -> int:
    """Rows of a chunk, so that its float32 logits take at most `chunk_bytes`, one row at least.

    On a GPU chunks are of one size, and as many as waste least of the multiprocessors: the product back through the
    head has so few tiles that 1.1 waves of them, which take as long as 2, cost a fifth of the time in the head.
    """
    vocabulary, hidden = head_weight.shape
    most = max(1, chunk_bytes // (4 * vocabulary))
    if not head_weight.is_cuda or rows <= most:
        return most
    processors = torch.cuda.get_device_properties(head_weight.device).multi_processor_count
    return even_chunk(rows, most, hidden, vocabulary, processors)


def even_chunk(rows: int, most: int, hidden: int, vocabulary: int, processors: int) -> int:
    """The size of equal chunks of at most `most` rows whose products take the fewest waves of tiles."""

    def waves(height: int, width: int, depth: int) -> int:
        return -(-(-(-height // TILE[0]) * -(-width // TILE[1])) // processors) * depth

    def cost(count: int) -> int:
        size = -(-rows // count)
        return count * (waves(size, vocabulary, hidden) + waves(size, hidden, vocabulary))

    fewest = -(-rows // most)
    return -(-rows // min(range(fewest, 2 * fewest + 2), key=cost))


def softmax_parts(logits: Tensor, labels: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [c, V]: the losses [c] in `wide`, whether the argmax is the label, and softmax - onehot [c, V].

    The label's 1 is taken off before the slope is rounded to the logits' dtype: near certainty p - 1 would vanish in
    bfloat16.
    """
    label = labels[:, None]
    hits = logits.argmax(-1) == labels
    scores = torch.log_softmax(logits, -1, dtype=wide)
    losses = -scores.gather(1, label)[:, 0]
    slope = scores.exp_().scatter_add_(1, label, scores.new_full((), -1).expand(label.shape))
    return losses, hits, slope.to(logits.dtype)


def fused_cross_entropy() -> Callable[..., tuple[Tensor, Tensor]]:
    """Imported on first use: a CPU run never needs Triton."""
    from .kernels import cross_entropy

    return cross_entropy


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        eight: Eight | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = hidden.new_empty(len(labels), dtype=wide)
        hits = torch.empty_like(labels, dtype=torch.bool)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for first in range(0, len(labels), chunk):
            part = slice(first, first + chunk)
            logits = head_logits(hidden[part], head_weight, eight)
            by = None if gradient is None else weights[part]
            if hidden.is_cuda:
                beside = None if by is None or eight is None else torch.empty_like(logits, dtype=SLOPE)
                losses[part], hits[part] = fused_cross_entropy()(logits, labels[part], by, beside)
                values, scale = (logits, None) if beside is None else (beside, weights[part] / SLOPE_MAX)
            else:
                beside = None
                losses[part], hits[part], values = softmax_parts(logits, labels[part], wide)
                scale = weights[part]
                if eight is not None:
                    values, scale = (values.to(wide) * SLOPE_MAX).to(SLOPE), scale / SLOPE_MAX
            if gradient is not None:
                through_head(Slopes(values, scale), head_weight, eight, gradient[part])
            del logits, values, beside  # else the next chunk would be beside this one
        ctx.save_for_backward(*([] if gradient is None else [gradient]))
        ctx.mark_non_differentiable(losses, hits)
        return (losses * weights).sum(), losses, hits

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None, None


def head_hits(hidden: Tensor, head_weight: Tensor, labels: Tensor, *, chunk_bytes: int = 2**26) -> Tensor:
    """[n] bool: the head's argmax equals the label; `head_cross_entropy` without a loss."""
    chunk = max(1, chunk_bytes // (4 * head_weight.shape[0]))
    parts = [
        (hidden[i : i + chunk] @ head_weight.T).argmax(-1) == labels[i : i + chunk]
        for i in range(0, len(labels), chunk)
    ]
    return torch.cat(parts) if parts else torch.zeros_like(labels, dtype=torch.bool)


def accepted(hits: Tensor, cells: Tensor, blocks: int, block_size: int) -> Tensor:
    """[blocks] float32: Σ_k Π_{i≤k} hit_i, the slots of each block that greedy verification would accept.

    hits [n] bool of the scored slots, cells [n] their places in the [blocks, block_size] table. Scored slots of a
    block run from 1 without a gap; those beyond count as misses.
    """
    table = hits.new_zeros(blocks * block_size, dtype=torch.float32)
    table[cells] = hits.float()
    return table.view(blocks, block_size)[:, 1:].cumprod(1).sum(1)


def accepted_lazily(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, cells: Tensor, blocks: int, block_size: int
) -> Tensor:
    """`accepted` of `head_hits`, but a slot is taken through the head only if all before it in its block hit.

    Where few slots hit and the head is what costs, as on a CPU, that is several times less work; it waits for each
    slot's answer, which a GPU should not.
    """
    counts = torch.zeros(blocks, dtype=torch.float32, device=labels.device)
    slot, block = cells % block_size, cells // block_size
    alive = torch.ones(blocks, dtype=torch.bool, device=labels.device)
    for k in range(1, block_size):
        asked = torch.nonzero((slot == k) & alive[block])[:, 0]
        hits = head_hits(hidden[asked], head_weight, labels[asked])
        alive = torch.zeros_like(alive).index_fill_(0, block[asked[hits]], True)
        if not alive.any():
            break
        counts += alive
    return counts


SCALARS = ("loss", "weight", "accepted", "blocks", "chain_accepted", "chain_blocks", "context_tokens")


def sums_size(block_size: int) -> int:
    """Length of a step's sums: SCALARS, then hits of slots 1..B-1, then how often each was scored."""
    return len(SCALARS) + 2 * (block_size - 1)


def block_sums(scored: Scored, cells: Tensor, *, blocks: int, block_size: int, context_tokens: int) -> Tensor:
    """One micro-batch's sums as a float64 vector (see `sums_size`), on the device, without waiting for it."""
    slots = cells % block_size - 1
    per_slot = scored.ce.new_zeros(2, block_size - 1, dtype=torch.float64)
    per_slot[0].index_add_(0, slots, scored.hits.double())
    per_slot[1].index_add_(0, slots, torch.ones_like(scored.ce, dtype=torch.float64))
    right = accepted(scored.hits, cells, blocks, block_size).sum(dtype=torch.float64)
    known = dict.fromkeys(SCALARS, 0.0) | {"blocks": float(blocks), "context_tokens": float(context_tokens)}
    found = {
        "loss": scored.loss.detach().double(),
        "weight": scored.weights.sum(dtype=torch.float64),
        "accepted": right,
    }
    # Filled, not assigned into: a number written into a tensor on a GPU is a copy that waits for the GPU.
    counts = [found[name] if name in found else right.new_full((), known[name]) for name in SCALARS]
    return torch.cat([torch.stack(counts), per_slot.flatten()])


@dataclass(frozen=True)
class Summary:
    """Averages of a step or an evaluation. A mean over nothing is 0, so a rank without an anchor breaks no average.

    tau: 1 + mean over drawn blocks of Σ_k Π_{i≤k} [argmax q_i = label]; slots beyond the supervised text or the
    document count as misses. tau_chain: the same mean over chained blocks (chains.py), which is what greedy decoding
    of the recorded answers would accept. Both count the bonus token.
    """

    loss: float
    accuracy: float
    accuracy_per_slot: tuple[float, ...]  # slots 1..B-1
    tau: float
    tau_chain: float | None  # None where no chain was run: training steps
    weight: float
    scored_slots: int
    blocks: int
    context_tokens: int

    @classmethod
    def of(cls, sums: NDArray[np.float64]) -> "Summary":
        """sums: `sums_size` float64, added up over micro-batches and ranks."""
        total = dict(zip(SCALARS, sums.tolist(), strict=False))
        hits, counts = sums[len(SCALARS) :].reshape(2, -1)
        per_slot = np.divide(hits, counts, out=np.zeros_like(hits), where=counts > 0)
        chained = total["chain_blocks"]
        return cls(
            loss=_mean(total["loss"], total["weight"]),
            accuracy=_mean(float(hits.sum()), float(counts.sum())),
            accuracy_per_slot=tuple(per_slot.tolist()),
            tau=1 + _mean(total["accepted"], total["blocks"]) if total["blocks"] else 0.0,
            tau_chain=1 + _mean(total["chain_accepted"], chained) if chained else None,
            weight=total["weight"],
            scored_slots=int(counts.sum()),
            blocks=int(total["blocks"]),
            context_tokens=int(total["context_tokens"]),
        )


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0
