"""Small drafters, rows and records for the drafter's tests, and a plain float64 drafter to compare with."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from paceline.common.batch import BatchId, Kind
from paceline.common.record import RecordMeta
from paceline.common.runfile import RunFile
from paceline.common.target_info import TargetInfo
from paceline.consumer.drafter import Drafter, DrafterConfig
from paceline.consumer.first_weights import init_drafter
from torch import Tensor, nn

VOCAB, HIDDEN, MASK_ID = 61, 48, 60

INFO = TargetInfo(
    path="nowhere",
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    hidden_size=HIDDEN,
    num_layers=6,
    vocab_size=VOCAB,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
    identity="test",
)

CONFIG = DrafterConfig(
    block_size=4,
    mask_token_id=MASK_ID,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    dtype="float32",
)

SLIDING = replace(CONFIG, layer_types=("sliding_attention", "full_attention"), sliding_window=5)


def make_run(**sections: dict[str, Any]) -> RunFile:
    values: dict[str, dict[str, Any]] = {
        "drafter": {"layers": 2, "block_size": 4, "mask_token_id": MASK_ID},
        "trainer": {"dtype": "float32", "micro_tokens": 64},
        "objective": {"anchors_per_token": 0.5},
        "data": {"rows": "rows", "max_length": 64},
        "stream": {"token_budget": 256},
    }
    merged = {name: {**values.get(name, {}), **sections.get(name, {})} for name in values.keys() | sections.keys()}
    return RunFile.model_validate({"name": "test", "output": "out", "target": {"path": "nowhere"}, **merged})


@dataclass
class Head:
    """Stands in for the target's embedding, head and final norm."""

    embed_weight: Tensor
    head_weight: Tensor
    norm: nn.Module


def make_head(seed: int = 0, *, vocab: int = VOCAB, hidden: int = HIDDEN) -> Head:
    generator = torch.Generator().manual_seed(seed)
    embed, head = (torch.randn(vocab, hidden, generator=generator) for _ in range(2))
    norm = nn.RMSNorm(hidden, eps=1e-6)
    nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    return Head(embed, head * 0.3, norm.requires_grad_(False))


def make_drafter(config: DrafterConfig = CONFIG, seed: int = 0) -> Drafter:
    """Weights large enough that every part moves the output, norms included."""
    drafter = init_drafter(replace(config, initializer_range=0.2), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return drafter


@dataclass
class Packed:
    """Packed rows and their states [planes, T, H]."""

    tokens: np.ndarray
    mask: np.ndarray
    cu_seqlens: np.ndarray
    states: Tensor

    @property
    def features(self) -> Tensor:
        return self.states.transpose(0, 1).reshape(len(self.tokens), -1)

    @property
    def rows(self) -> list[slice]:
        return [slice(int(a), int(b)) for a, b in zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True)]

    @property
    def context_positions(self) -> Tensor:
        return torch.from_numpy(np.concatenate([np.arange(row.stop - row.start) for row in self.rows]))

    def pick(self, *rows: int) -> "Packed":
        """These rows alone, in this order."""
        at = [self.rows[row] for row in rows]
        bounds = np.cumsum([0, *(row.stop - row.start for row in at)]).astype(np.int32)
        tokens, mask = (np.concatenate([array[row] for row in at]) for array in (self.tokens, self.mask))
        return Packed(tokens, mask, bounds, torch.cat([self.states[:, row] for row in at], 1))

    def meta(self, row_ids: list[int]) -> RecordMeta:
        return RecordMeta(
            batch=BatchId(Kind.TRAIN, 0, 0).pack(),
            row_ids=np.array(row_ids, np.int64),
            cu_seqlens=self.cu_seqlens,
            tokens=self.tokens,
            mask=self.mask,
            layer_ids=(1, 3),
            dtype="float32",
            hidden_size=HIDDEN,
            last_hidden="none",
            fingerprint=7,
        )

    def memory(self) -> memoryview:
        """The states as bytes that can be written, like a slot's."""
        return memoryview(bytearray(self.states.contiguous().numpy().tobytes()))


def make_rows(*lengths: int, prompt: int = 3, seed: int = 0, planes: int = 2) -> Packed:
    """Rows of random tokens, each with `prompt` unsupervised tokens first."""
    draw = np.random.default_rng(seed)
    total = sum(lengths)
    mask = np.concatenate([np.r_[np.zeros(prompt, np.uint8), np.ones(n - prompt, np.uint8)] for n in lengths])
    return Packed(
        tokens=draw.integers(3, MASK_ID, total).astype(np.int32),
        mask=mask,
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        states=torch.from_numpy(draw.standard_normal((planes, total, HIDDEN)).astype(np.float32)),
    )


def plain_block(drafter: Drafter, features: Tensor, embeds: Tensor, anchor: int) -> Tensor:
    """Hidden states [n, H] of the block at `anchor` of one document, by the formulas of the paper, slot by slot.

    features [T, K·H] of the whole document, embeds [n, H]; any dtype, weights are cast to it.
    """
    config, dtype = drafter.config, features.dtype
    weights = {name: p.to(dtype) for name, p in drafter.named_parameters()}
    context = _norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], config)
    x = embeds
    for i, kind in enumerate(config.layer_types):
        part = {name[len(f"layers.{i}.") :]: w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        window = config.sliding_window if kind == "sliding_attention" else None
        inner = _norm(x, part["input_layernorm.weight"], config)
        x = x + _attention(part, context, inner, anchor, window, config)
        inner = _norm(x, part["post_attention_layernorm.weight"], config)
        gate = torch.nn.functional.silu(inner @ part["mlp.gate_proj.weight"].T)
        x = x + (gate * (inner @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
    return _norm(x, weights["norm.weight"], config)


def _norm(x: Tensor, weight: Tensor, config: DrafterConfig) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight


def _attention(
    part: dict[str, Tensor], context: Tensor, x: Tensor, anchor: int, window: int | None, config: DrafterConfig
) -> Tensor:
    dim, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    norms = part["self_attn.q_norm.weight"], part["self_attn.k_norm.weight"]

    def heads(name: str, row: Tensor) -> Tensor:
        return (part[f"self_attn.{name}.weight"] @ row).view(-1, dim)

    keys = [(t, context[t]) for t in range(anchor)] + [(anchor + k, x[k]) for k in range(len(x))]
    out = []
    for k, row in enumerate(x):
        q = _turn(_norm(heads("q_proj", row), norms[0], config), anchor + k, config)
        seen = [(t, y) for t, y in keys if window is None or anchor + k - window < t <= anchor + k]
        k_all = torch.stack([_turn(_norm(heads("k_proj", y), norms[1], config), t, config) for t, y in seen])
        v_all = torch.stack([heads("v_proj", y) for _, y in seen])
        mixed = []
        for head in range(config.num_attention_heads):
            scores = k_all[:, head // groups] @ q[head] / dim**0.5
            mixed.append(scores.softmax(0) @ v_all[:, head // groups])
        out.append(part["self_attn.o_proj.weight"] @ torch.cat(mixed))
    return torch.stack(out)


def _turn(x: Tensor, position: int, config: DrafterConfig) -> Tensor:
    """RoPE on [heads, D]: pairs (i, i + D/2) turn by position·θ^(-2i/D)."""
    half = config.head_dim // 2
    angle = position * config.rope_theta ** (-torch.arange(half, dtype=x.dtype) / half)
    one, two = x[:, :half], x[:, half:]
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], 1)
