"""What a slot's loss is made of, and how the slots of a step are weighted.

For a scored slot of a block: logits z, q = softmax(z), label y; p is the target's own distribution there, the frozen
head's softmax over the target's final norm of its last hidden state one row before the label.

    ce          -log q_y
    kl          Σ p·log(p/q)                                     soft labels
    tv          1 - α,  α = Σ min(p, q)                          the chance that verification rejects (2211.17192)
    lk          -log α                                           2602.23881
    lk_hybrid   λ·kl + (1-λ)·tv,  λ = exp(-3·sg[α])              2602.23881
    confidence  entropy of q where argmax q = y already          CAP of LLaDA2.0 (2512.15745)
    first_error ce once more at the first wrong slot of a block  2606.11552

    L = Σ_slots w·(Σ_terms weight·term + confidence·[argmax q = y]·H(q)) + first_error·Σ_blocks ce(first wrong)
        all over Σ_slots w

    w = exp(-(k-1)/γ)                    "decay", as the released DFlash models were trained (2602.06036)
    w_j = Σ_{m≥j} Π_{i≤m} q̃_i           "dpace" (2605.18810), detached; q̃ = (1-α)·q_y + α over the block's scored slots

Everything is a sum over slots with the one denominator Σ w, added up over micro-batches and ranks, so no split of the
rows changes the gradient. D-PACE's weights are divided by their own sum: projects differ here, by up to 15 times.

A slot's gradient with respect to its logits needs a few numbers of the slot (`SlotStats`) and four factors that follow
from them (`Factors`), so that a chunk of logits can be turned into its gradient in place:

    dL/dz = ce·(q - onehot_y) + kl·(q - p) + overlap·q·(Σ_{q<p} q - [q < p]) - entropy·q·(log q + H)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..common.runfile import TARGET_TERMS, ObjectiveSettings
from .linears import SLOPE, Eight
from .losses import SLOPE_MAX, Scored, Slopes, head_logits, through_head

HYBRID_RATE = 3.0  # of the blend's exponent
LEAST_OVERLAP = 1e-6  # below it -log α is as good as flat: its slope would only be rounding


@dataclass(frozen=True)
class Objective:
    """Weights of the terms; see the module's docstring for each."""

    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    lk: float = 0.0
    lk_hybrid: float = 0.0
    confidence: float = 0.0
    first_error: float = 0.0
    dpace: float | None = None  # α of D-PACE's weights; None: decay

    @classmethod
    def of(cls, settings: ObjectiveSettings) -> "Objective":
        return cls(
            **{name: getattr(settings, name) for name in ("ce", *TARGET_TERMS, "confidence", "first_error")},
            dpace=settings.dpace_alpha if settings.weighting == "dpace" else None,
        )

    @property
    def needs_target(self) -> bool:
        """Whether the target's own distribution is needed, and with it its last hidden state in the records."""
        return any(getattr(self, term) for term in TARGET_TERMS)

    @property
    def plain(self) -> bool:
        """Whether it is cross-entropy with given weights, whose gradient needs no look at the other slots."""
        return self == Objective()


class SlotStats(NamedTuple):
    """Of each slot, [n] in float32 or wider; those of the target's distribution are None where nobody asks."""

    ce: Tensor
    right: Tensor  # bool: argmax q = y, the lowest id among equals
    entropy: Tensor  # H(q)
    lse: Tensor  # log Σ exp z
    target_lse: Tensor | None = None
    kl: Tensor | None = None
    overlap: Tensor | None = None  # α
    below: Tensor | None = None  # Σ q over the tokens with q < p


class Factors(NamedTuple):
    """What a slot's four gradient terms are multiplied with, [n]."""

    ce: Tensor
    kl: Tensor
    overlap: Tensor
    entropy: Tensor


class Scores(NamedTuple):
    """weights: w of each slot, detached. loss: each slot's share of L's numerator, detached."""

    weights: Tensor
    loss: Tensor
    factors: Factors


def score(objective: Objective, stats: SlotStats, weights: Tensor, cells: Tensor, blocks: int, size: int) -> Scores:
    """Weights, losses and gradient factors of the scored slots of whole blocks.

    weights [n]: the decaying ones; cells [n]: places in a [blocks, size] table, a block's slots being 1.. in a row.
    """
    if objective.dpace is not None:
        weights = dpace_weights(stats.ce, cells, blocks, size, objective.dpace)
    weights = weights.to(stats.ce.dtype)
    wrong = first_wrong(stats.right, cells, blocks, size).to(weights.dtype) if objective.first_error else 0 * weights
    ce = objective.ce * weights + objective.first_error * wrong
    confident = objective.confidence * weights * stats.right
    loss = ce * stats.ce + confident * stats.entropy
    zero = torch.zeros_like(weights)
    kl, overlap = zero, zero
    if stats.kl is not None and stats.overlap is not None:
        blend = torch.exp(-HYBRID_RATE * stats.overlap)
        alpha = stats.overlap.clamp_min(LEAST_OVERLAP)
        kl = weights * (objective.kl + objective.lk_hybrid * blend)
        tv = weights * (objective.tv + objective.lk_hybrid * (1 - blend))
        loss = loss + kl * stats.kl + tv * (1 - stats.overlap) - objective.lk * weights * alpha.log()
        overlap = tv + objective.lk * weights / alpha
    return Scores(weights, loss, Factors(ce, kl, overlap, confident))


def dpace_weights(ce: Tensor, cells: Tensor, blocks: int, size: int, alpha: float) -> Tensor:
    """[n] Σ_{m≥j} Π_{i≤m} q̃_i, q̃ = (1-α)·exp(-ce) + α: how many further acceptances hang on slot j."""
    table = ce.new_zeros(blocks * size)
    table[cells] = (1 - alpha) * torch.exp(-ce) + alpha
    reached = table.view(blocks, size)[:, 1:].cumprod(1)  # slots that are not scored end the block
    ahead = reached.flip(1).cumsum(1).flip(1)
    return torch.nn.functional.pad(ahead, (1, 0)).flatten()[cells]


def first_wrong(right: Tensor, cells: Tensor, blocks: int, size: int) -> Tensor:
    """[n] 1 at the first slot of each block whose argmax is not its label, 0 elsewhere."""
    table = torch.zeros(blocks * size, dtype=torch.float32, device=right.device)
    table[cells] = right.float()
    before = torch.nn.functional.pad(table.view(blocks, size)[:, 1:].cumprod(1), (2, -1), value=1.0)
    return before.flatten()[cells] * ~right


def whole_blocks(block: NDArray[np.int64], most: int) -> list[slice]:
    """Runs of scored slots of at most `most` slots that never part a block (one block at least).

    block [n]: ascending number of the block of each scored slot.
    """
    ends = np.append(np.flatnonzero(np.diff(block)) + 1, len(block)) if len(block) else np.zeros(0, np.int64)
    runs: list[slice] = []
    for end in ends.tolist():
        if runs and end - runs[-1].start <= most:
            runs[-1] = slice(runs[-1].start, end)
        else:
            runs.append(slice(runs[-1].stop if runs else 0, end))
    return runs


# Statistics and gradient of a chunk of logits: the plain form ---------------------------------------------------------


def slot_stats(logits: Tensor, labels: Tensor, target: Tensor | None) -> SlotStats:
    """logits [c, V], labels [c], target: the target's logits [c, V] there. Softmaxes in float32 or wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    z = logits.to(wide)
    lse = z.logsumexp(-1)
    log_q = z - lse[:, None]
    q = log_q.exp()
    ce = -log_q.gather(1, labels[:, None])[:, 0]
    entropy = -(q * log_q).sum(-1)
    right = logits.argmax(-1) == labels
    if target is None:
        return SlotStats(ce, right, entropy, lse)
    t = target.to(wide)
    target_lse = t.logsumexp(-1)
    log_p = t - target_lse[:, None]
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    below = torch.where(q < p, q, 0).sum(-1)
    return SlotStats(ce, right, entropy, lse, target_lse, kl, torch.minimum(p, q).sum(-1), below)


def slot_slopes(
    logits: Tensor,
    labels: Tensor,
    target: Tensor | None,
    stats: SlotStats,
    factors: Factors,
    scaled: torch.dtype | None = None,
) -> Slopes:
    """dL/dz [c, V] in the logits' dtype, from the same arguments as `slot_stats` and what came of them. scaled: another
    dtype, of values up to SLOPE_MAX that the slots' scales are to be multiplied with."""
    z = logits.to(stats.lse.dtype)
    log_q = z - stats.lse[:, None]
    q = log_q.exp()
    ce, kl, overlap, entropy = (factor[:, None] for factor in factors)
    slope = (ce + kl) * q - entropy * q * (log_q + stats.entropy[:, None])
    slope = slope.scatter_add(1, labels[:, None], -ce)
    if target is not None and stats.target_lse is not None and stats.below is not None:
        p = (target.to(z.dtype) - stats.target_lse[:, None]).exp()
        slope = slope - kl * p + overlap * q * (stats.below[:, None] - (q < p).to(z.dtype))
    if scaled is None:
        return Slopes(slope.to(logits.dtype))
    scale = slope_scale(stats, factors)
    return Slopes((slope / scale[:, None]).to(scaled), scale)


def slope_scale(stats: SlotStats, factors: Factors) -> Tensor:
    """What slots' slopes [c, V] are divided by to be at most SLOPE_MAX, float32 [c]: from a bound of each term, as
    finding the largest would be another walk. One that is too wide costs no precision, there is range to spare."""
    entropy = factors.entropy.abs() * (stats.entropy.abs() + 0.5)  # q·|log q| is at most 1/e
    bound = factors.ce.abs() + factors.kl.abs() + factors.overlap.abs() + entropy
    return bound.float().clamp_min(1e-30) / SLOPE_MAX


class Backend(NamedTuple):
    """Two ways to the same numbers: `PLAIN`, and the kernels of kernels.py."""

    stats: Callable[[Tensor, Tensor, Tensor | None], SlotStats]
    slopes: Callable[[Tensor, Tensor, Tensor | None, SlotStats, Factors, torch.dtype | None], Slopes]


PLAIN = Backend(slot_stats, slot_slopes)


def fused_backend() -> Backend:
    """The kernels, imported on first use: a CPU run never needs Triton."""
    from .kernels import slot_slopes, slot_stats

    return Backend(slot_stats, slot_slopes)


# Through the frozen head ---------------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """The scored slots of a micro-batch's blocks; see `Blocks`."""

    labels: Tensor  # [n] int64
    weights: Tensor  # [n] decaying
    cells: Tensor  # [n] places in the [blocks, size] table
    blocks: int
    size: int
    runs: Sequence[slice]  # `whole_blocks`


def score_through_head(
    hidden: Tensor,
    head: Tensor,
    slots: Slots,
    objective: Objective,
    target: Tensor | None,
    backend: Backend = PLAIN,
    *,
    eight: Eight | None = None,
) -> Scored:
    """L's numerator of slots through a frozen head, a run of whole blocks at a time; no logits outlive their run.

    hidden [n, H], head [V, H], target: the target's normalised last hidden states [n, H] one row before each label, or
    None if `objective` has no term that needs them; eight: for products in fp8, see `head_logits`. Only
    dh = dz·head is kept, since the head is frozen.
    """
    if target is None and objective.needs_target:
        raise ValueError("the objective needs the target's last hidden states")
    loss, ce, right, weights = _ThroughHead.apply(hidden, head, slots, objective, target, backend, eight)
    return Scored(loss, ce, right, weights)


class _ThroughHead(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        slots: Slots,
        objective: Objective,
        target: Tensor | None,
        backend: Backend,
        eight: Eight | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss, ce, weights = (hidden.new_empty(len(slots.labels), dtype=wide) for _ in range(3))
        right = torch.empty_like(slots.labels, dtype=torch.bool)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for run in slots.runs:
            logits, own = head_logits(hidden[run], head, eight), None
            if target is not None:
                own = head_logits(target[run], head)
            stats = backend.stats(logits, slots.labels[run], own)
            scores = score(objective, stats, slots.weights[run], slots.cells[run], slots.blocks, slots.size)
            ce[run], right[run], weights[run], loss[run] = stats.ce, stats.right, scores.weights, scores.loss
            if gradient is not None:
                scaled = None if eight is None else SLOPE
                slopes = backend.slopes(logits, slots.labels[run], own, stats, scores.factors, scaled)
                through_head(slopes, head, eight, gradient[run])
                del slopes
            del logits, own  # else the next run's would be beside these
        ctx.save_for_backward(*([] if gradient is None else [gradient]))
        ctx.mark_non_differentiable(ce, right, weights)
        return loss.sum(), ce, right, weights

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, None, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None, None, None


# Noise on the features -----------------------------------------------------------------------------------------------


def noise_seeds(seed: int, epoch: int, row_ids: Iterable[int]) -> Iterator[int]:
    """A generator's seed for each row, of nothing but (seed, epoch, row id)."""
    for row_id in row_ids:
        (state,) = np.random.SeedSequence([seed, 0x6E6F, epoch, row_id]).generate_state(1, np.uint64)
        yield int(state) >> 1
