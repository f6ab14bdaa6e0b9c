"""A padded drafter's step in plain PyTorch: what packing is compared with (`paceline bench step --rows-kind
padded-plain`).

Each row takes `LENGTH` context positions and as many blocks as the row with most has, all of `block_size` slots. All of
these slots go through the layers and through the head; what does not exist has no weight in the loss. On CUDA a layer,
with flex_attention over a block mask, is one torch.compile graph, which all layers share, and so are the features'
projection and the loss; or the attention alone is, as in SpecForge's DFlash training (`padded-eager`). Elsewhere all is
eager, with SDPA and a dense mask.
Weights, rows, anchors, loss and gradients are those of the packed learner; the layers are written out once more, on
batches [R, ...], with nothing of its kernels.

Shapes: R rows, C context positions, N blocks a row, B slots a block, S = N·B, H hidden size, D head dimension.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..common.bench_parts import PADDED_LENGTH
from ..common.errors import ConfigError
from ..common.record import RecordMeta
from .anchors import Positions
from .blocks import to_device
from .drafter import Drafter, DraftLayer, rotate
from .learner import DFlashLearner
from .losses import SCALARS

LENGTH = PADDED_LENGTH  # C

Rope = tuple[Tensor, Tensor]  # cosines and sines, each [R, 1, n, D]
Mask = Tensor | BlockMask  # bool [R, 1, S, C+S], or flex_attention's form of it


class Tables(NamedTuple):
    """Blocks of some rows, padded. Arrays on the host, tensors on the device."""

    ids: Any  # int64 [R, S] token in the slot: the anchor's, then the mask token
    positions: Any  # int64 [R, S]
    labels: Any  # int64 [R, S]
    before: Any  # int64 [R, S] context positions that the slot sees, from the row's start
    own: Any  # int64 [R, S] first slot of its block
    until: Any  # int64 [R, S] past the last slot that it sees there
    place: Any  # int64 [t] of each context token in [R·C]
    weights: Any  # float32 [R, S]


def pad_blocks(
    rows: Sequence[NDArray[np.int32]],
    masks: Sequence[NDArray[np.uint8]],
    anchors: Sequence[Positions],
    *,
    blocks: int,
    block_size: int,
    mask_token_id: int,
    gamma: float,
) -> Tables:
    """Tables of rows of at most C tokens with their supervised masks and anchors; `blocks` is N."""
    shape = (len(rows), LENGTH + block_size)
    tokens, supervised, inside = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, bool)
    at, keep = np.zeros((len(rows), blocks), np.int64), np.zeros((len(rows), blocks), bool)
    for r, (row, mask, places) in enumerate(zip(rows, masks, anchors, strict=True)):
        tokens[r, : len(row)], supervised[r, : len(row)], inside[r, : len(row)] = row, mask != 0, True
        at[r, : len(places)], keep[r, : len(places)] = places, True
    slot = np.arange(block_size)
    positions = at[:, :, None] + slot
    of = np.arange(len(rows))[:, None, None], positions
    exists = keep[:, :, None] & inside[of]
    counts = np.logical_and.accumulate((exists & supervised[of]) | (slot == 0), axis=2) & exists & (slot > 0)
    flat = (len(rows), blocks * block_size)
    slots = np.arange(flat[1]).reshape(blocks, block_size)
    own = np.broadcast_to(slots[:, :1], positions.shape)
    # A slot beyond its row sees itself as well, as softmax over no keys is not a number; nobody sees it.
    until = np.maximum(own + exists.sum(2, keepdims=True), slots + 1)
    return Tables(
        ids=np.where(slot == 0, tokens[of], mask_token_id).reshape(flat),
        positions=positions.reshape(flat),
        labels=tokens[of].reshape(flat),
        before=np.broadcast_to(at[:, :, None], positions.shape).reshape(flat),
        own=own.reshape(flat),
        until=until.reshape(flat),
        place=np.concatenate([r * LENGTH + np.arange(len(row)) for r, row in enumerate(rows)]),
        weights=np.where(counts, np.exp(-(slot - 1) / gamma), 0).astype(np.float32).reshape(flat),
    )


# What a slot sees


def sees(tables: Tables) -> Callable[[Any, Any, Any, Any], Tensor]:
    """Whether slot q of row r sees key k of [C context positions; S slots], as flex_attention asks: (r, head, q, k).

    Context before the anchor, and the slots of its own block that exist. Comparisons alone: what divides takes the
    kernels' assembler minutes.
    """
    before, own, until = tables.before, tables.own, tables.until

    def mask_mod(r: Any, head: Any, q: Any, k: Any) -> Tensor:
        slot = k - LENGTH
        return ((slot < 0) & (k < before[r, q])) | ((slot >= own[r, q]) & (slot < until[r, q]))

    return mask_mod


def dense_mask(tables: Tables) -> Tensor:
    """`sees` spelt out, bool [R, 1, S, C+S]."""
    rows, slots = tables.ids.shape
    r, q, k = (torch.arange(n, device=tables.ids.device) for n in (rows, slots, LENGTH + slots))
    return sees(tables)(r[:, None, None], None, q[:, None], k)[:, None]


def flex_mask(tables: Tables) -> BlockMask:
    rows, slots = tables.ids.shape
    # Not compiled: it is a few milliseconds of a micro-batch's half second.
    return create_block_mask(sees(tables), rows, None, slots, LENGTH + slots, device=tables.ids.device)


# The model


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """q [R, heads, S, D] over k and v [R, kv heads, C+S, D]."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return cast(Tensor, flex_attention(q, k, v, block_mask=mask, enable_gqa=True))


def layer_forward(
    layer: DraftLayer,
    x: Tensor,
    context: Tensor,
    ropes: tuple[Rope, Rope],
    mask: Mask,
    attend: Callable[..., Tensor] = attend,
) -> Tensor:
    """A draft layer on slots x [R, S, H]; ropes: of the slots, and of [context; slots]."""
    attention, mlp = layer.self_attn, layer.mlp

    def heads(part: Any, y: Tensor) -> Tensor:
        return F.linear(y, part.weight, part.bias).unflatten(-1, (-1, attention.head_dim))

    inner = layer.input_layernorm(x)
    both = torch.cat([context, inner], 1)
    q = rotate(attention.q_norm(heads(attention.q_proj, inner)).transpose(1, 2), ropes[0])
    k = rotate(attention.k_norm(heads(attention.k_proj, both)).transpose(1, 2), ropes[1])
    mixed = attend(q, k, heads(attention.v_proj, both).transpose(1, 2), mask).transpose(1, 2).flatten(2)
    x = x + F.linear(mixed, attention.o_proj.weight, attention.o_proj.bias)
    inner = layer.post_attention_layernorm(x)
    gate, up = F.linear(inner, mlp.gate_proj.weight), F.linear(inner, mlp.up_proj.weight)
    return x + F.linear(mlp.act_fn(gate) * up, mlp.down_proj.weight)


def project(drafter: Drafter, features: Tensor) -> Tensor:
    """The context [R, C, H] of features [R, C, K·H]."""
    return drafter.hidden_norm(F.linear(features, drafter.fc.weight))


def head_loss(drafter: Drafter, head: Tensor, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Σ w·CE over all slots x [R, S, H]. head [V, H], labels and weights [R, S]."""
    return _weighted(F.linear(drafter.norm(x), head).flatten(0, 1).float(), labels, weights)


def rounded_head_loss(drafter: Drafter, head: Tensor, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """`head_loss` on logits of the drafter's dtype: uncompiled, a float32 copy of them would be made."""
    return _weighted(F.linear(drafter.norm(x), head).flatten(0, 1), labels, weights)


def _weighted(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (F.cross_entropy(logits, labels.flatten(), reduction="none") * weights.flatten()).sum()


class Parts(NamedTuple):
    """What the step computes, plain or each compiled."""

    project: Callable[..., Tensor] = project
    layer: Callable[..., Tensor] = layer_forward
    loss: Callable[..., Tensor] = head_loss


class PaddedLearner(DFlashLearner):
    """Trains as `DFlashLearner` does, each row padded: `train_record` is another, what is around it is the same.

    Full attention and cross-entropy with decay only. Of the sums a step needs, it counts loss and weight.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.drafter.windows != {None} or not self._objective.plain or self.run.objective.noise:
            raise ConfigError("padded-plain: only for full attention and objective.ce alone, without noise")
        self._parts, self._mask = Parts(), dense_mask
        if self.device.type == "cuda":
            self._mask = flex_mask
            self.compile_step()
        self._padded: dict[tuple[int, int], list[tuple[tuple[int, int], Tables]]] = {}

    def compile_step(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Layers are arguments of what is compiled: one graph is made for all of them."""
        self._parts = Parts(*(torch.compile(part, backend=backend, dynamic=False) for part in Parts()))

    def prepare(self, meta: RecordMeta, states: memoryview, epoch: int | None) -> None:
        assert epoch is not None  # it only trains
        micros = self._padded[meta.batch, epoch] = self._tables(meta, epoch)
        self._reader.expect((meta.batch, epoch), self._reading(meta, states, [span for span, _ in micros]))

    def train_record(self, meta: RecordMeta, states: memoryview, epoch: int, done: float = 0.0) -> None:
        micros = self._padded.pop((meta.batch, epoch), None) or self._tables(meta, epoch)
        spans = [span for span, _ in micros]
        for (_, host), found in zip(micros, self._states(meta, states, spans, epoch), strict=True):
            self._train(self._sent(host), found.features)

    def _train(self, tables: Tables, features: Tensor) -> None:
        rows = len(tables.ids)
        context = features.new_zeros(rows * LENGTH, features.shape[1]).index_copy_(0, tables.place, features)
        at = torch.arange(LENGTH, device=self.device).expand(rows, -1)
        ropes = self._ropes(features, tables.positions), self._ropes(features, torch.cat([at, tables.positions], 1))
        mask = self._mask(tables)
        projected = self._parts.project(self.drafter, context.view(rows, LENGTH, -1))
        x = F.embedding(tables.ids, self._embedding)
        for layer in self.drafter.layers:
            x = self._parts.layer(layer, x, projected, ropes, mask)
        loss = self._parts.loss(self.drafter, self._head, x, tables.labels, tables.weights)
        loss.backward()
        self._sums[SCALARS.index("loss")] += loss.detach().double()
        self._sums[SCALARS.index("weight")] += tables.weights.sum(dtype=torch.float64)

    def _ropes(self, like: Tensor, positions: Tensor) -> Rope:
        cos, sin = self.drafter.rotary_emb(like, positions)
        return cos[:, None], sin[:, None]

    def _tables(self, meta: RecordMeta, epoch: int) -> list[tuple[tuple[int, int], Tables]]:
        """Token span and tables of each micro-batch: no more rows than `trainer.micro_tokens` has room for, and as many
        in each if they divide, as every other number is compiled anew."""
        cu = meta.cu_seqlens.tolist()
        bounds = list(pairwise(cu))
        drawn = self._anchors(meta, epoch)
        blocks, most = max(len(row) for row in drawn), max(1, self.run.trainer.micro_tokens // LENGTH)
        micros = []
        even = -(-len(bounds) // -(-len(bounds) // most))
        for first in range(0, len(bounds), even):
            rows = bounds[first : first + even]
            tables = pad_blocks(
                [meta.tokens[start:end] for start, end in rows],
                [meta.mask[start:end] for start, end in rows],
                drawn[first : first + even],
                blocks=blocks,
                block_size=self.config.block_size,
                mask_token_id=self.config.mask_token_id,
                gamma=self._gamma,
            )
            micros.append(((rows[0][0], rows[-1][1]), tables))
        return micros

    def _sent(self, host: Tables) -> Tables:
        tables = to_device([column.reshape(-1) for column in host[:-1]], self.device)
        tables += to_device([host.weights.reshape(-1)], self.device)
        return Tables(*(table.view(column.shape) for table, column in zip(tables, host, strict=True)))


class EagerPaddedLearner(PaddedLearner):
    """Nothing is compiled but the attention."""

    def compile_step(self, backend: str | Callable[..., Any] = "inductor") -> None:
        compiled = torch.compile(attend, backend=backend, dynamic=False)
        self._parts = Parts(layer=partial(layer_forward, attend=compiled), loss=rounded_head_loss)
