"""The DFlash drafter: a few Qwen3 decoder layers that read the target's hidden states and fill a block at once.

Parameter names, shapes and numerics are those of z-lab's released `DFlashDraftModel` (PyPI `dflash`), so a
checkpoint moves between the two without a conversion. Owned here: the model and its config. Not here: its
first weights (first_weights.py), which slots exist and what they may see (blocks.py), the loss (losses.py), training
(learner.py).

The model never holds the target's embedding or head. It takes embedded block slots and returns hidden states after the
final norm; the frozen head turns them into logits. The forward is split in two so that both of its users share it:

    project_context(features, positions)  ->  keys and values of the context, one pair a layer
    decode(embeds, positions, context, attend)  ->  hidden states of the slots

Training runs both over packed micro-batches (`forward`); decoding appends new context to a `ContextCache` and runs
`decode` over one block (`draft`). In both, a slot attends the context before its anchor and its own block.

Shapes: T context positions, S block slots, K recorded target layers, H hidden size, D head dimension.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from torch.nn import functional as F
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from ..common.errors import ConfigError
from ..common.runfile import RunFile
from ..common.target_info import TargetInfo, check_mask_token
from .linears import DraftLinear, DraftMLP

FULL, SLIDING = "full_attention", "sliding_attention"

ContextKV = tuple[Tensor, Tensor]  # keys and values of one layer, each [kv heads, T, D], keys after RoPE
Rope = tuple[Tensor, Tensor]  # cosines and sines, each [positions, 1, D]


class Attend(Protocol):
    """How block slots attend: an object of blocks.py that knows the mask of the packed micro-batch."""

    def __call__(self, q: Tensor, context: ContextKV, block: ContextKV, window: int | None) -> Tensor:
        """q [heads, S, D], the context's and the slots' own keys and values; returns [heads, S, D].

        window: None in a full-attention layer; W in a sliding one, which is causal inside the block and sees
        positions above its own minus W only.
        """
        ...


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter, with the keys of z-lab's config.json (docs/checkpoints.md lists that file)."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        _check_config(self)

    @classmethod
    def from_target(cls, info: TargetInfo, run: RunFile, layer_ids: Sequence[int]) -> "DrafterConfig":
        """The drafter of a run file: the target's widths, heads and plain RoPE; layers and block size of the run.

        Never takes M-RoPE or partial_rotary_factor from the target: engines serve a drafter with plain RoPE.
        Raises ConfigError when drafter.mask_token_id is missing or unusable.
        """
        return cls(
            block_size=run.drafter.block_size,
            mask_token_id=check_mask_token(run.drafter.mask_token_id, info),
            target_layer_ids=tuple(layer_ids),
            num_target_layers=info.num_layers,
            hidden_size=info.hidden_size,
            intermediate_size=run.drafter.intermediate_size or info.intermediate_size,
            num_hidden_layers=run.drafter.layers,
            num_attention_heads=info.num_heads,
            num_key_value_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            vocab_size=info.vocab_size,
            rms_norm_eps=info.rms_norm_eps,
            rope_theta=float(info.rope_theta),
            max_position_embeddings=info.max_position_embeddings,
            hidden_act=run.drafter.hidden_act,
            layer_types=tuple(SLIDING if slides else FULL for slides in run.drafter.slides),
            sliding_window=run.drafter.sliding_window,
            bos_token_id=info.bos_token_id,
            eos_token_id=info.eos_token_id,
            dtype=run.trainer.dtype,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DrafterConfig":
        """Reads z-lab's config.json (transformers 4 or 5 RoPE keys). ConfigError names a missing or wrong key.

        For a folder use `formats.read_config`, which also refuses what this would drop.
        """
        nested: Mapping[str, Any] = values.get("dflash_config") or {}
        flat = {**values, **nested}
        rope = dict(values.get("rope_parameters") or {})
        theta = rope.pop("rope_theta", None) or values.get("rope_theta")
        scaling = rope if rope.get("rope_type", "default") != "default" else values.get("rope_scaling")
        names = {field.name for field in dataclasses.fields(cls)} - {"rope_theta", "rope_scaling"}
        taken = {name: flat[name] for name in names if name in flat}
        for name in ("target_layer_ids", "layer_types"):
            taken[name] = tuple(taken.get(name) or ())
        taken["eos_token_id"] = _one_or_many(flat.get("eos_token_id"))
        if theta is None:
            raise ConfigError("drafter config: no rope_theta; a wrong RoPE base would be silent")
        try:
            return cls(**taken, rope_theta=float(theta), rope_scaling=dict(scaling) if scaling else None)
        except TypeError as error:
            raise ConfigError(f"drafter config: {str(error).replace('DrafterConfig.__init__() ', '')}") from error

    def to_dict(self) -> dict[str, Any]:
        """z-lab's config.json, JSON types only.

        RoPE is written twice: transformers 4 reads rope_theta and rope_scaling, 5 reads rope_parameters, and each
        falls back to base 10,000 in silence.
        """
        values = dataclasses.asdict(self)
        nested = {name: values.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        nested["target_layer_ids"] = list(nested["target_layer_ids"])
        values["layer_types"] = list(self.layer_types)
        if isinstance(self.eos_token_id, tuple):
            values["eos_token_id"] = list(self.eos_token_id)
        return values | {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "dflash_config": nested,
            "rope_parameters": self.rope_parameters,
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": False,
            "use_cache": True,
        }

    @property
    def rope_parameters(self) -> dict[str, Any]:
        return {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}

    @property
    def features(self) -> int:
        """Width of a context position's features, K·H."""
        return len(self.target_layer_ids) * self.hidden_size

    def qwen3(self) -> Qwen3Config:
        """The config that transformers' Qwen3 parts read."""
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            hidden_act=self.hidden_act,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=self.rope_parameters,
        )


def _check_config(config: DrafterConfig) -> None:
    """Raises ConfigError for a shape that cannot work, naming the key."""
    layers, ids = config.num_hidden_layers, config.target_layer_ids
    if config.block_size < 2:
        raise ConfigError(f"drafter config: block_size is {config.block_size}; a block has at least 2 slots")
    if not ids:
        raise ConfigError("drafter config: target_layer_ids is missing or empty")
    if len(set(ids)) != len(ids) or not all(0 <= i < config.num_target_layers for i in ids):
        raise ConfigError(
            f"drafter config: target_layer_ids {list(ids)} must be distinct and in 0..{config.num_target_layers - 1}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError("drafter config: num_attention_heads is no multiple of num_key_value_heads")
    if len(config.layer_types) != layers or not set(config.layer_types) <= {FULL, SLIDING}:
        raise ConfigError(f"drafter config: layer_types must name {layers} layers, each {FULL} or {SLIDING}")
    if SLIDING in config.layer_types and not config.sliding_window:
        raise ConfigError("drafter config: sliding_attention layers need sliding_window")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ConfigError(
            f"drafter config: mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}"
        )


def _one_or_many(ids: "int | Sequence[int] | None") -> "int | tuple[int, ...] | None":
    return ids if ids is None or isinstance(ids, int) else tuple(ids)


class PlainRope(Qwen3RotaryEmbedding):
    """Qwen3's rotary embedding whose frequencies stay float32 when the module is cast.

    In bfloat16 a frequency is off by up to 0.4 %, so a position in the thousands would turn by several radians.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PlainRope":
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)
        return self


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """RoPE on x [positions, heads, D]."""
    cos, sin = rope
    return x * cos + rotate_half(x) * sin


class DraftAttention(nn.Module):
    """Attention of block slots over [context ; own block], q and k normalised per head (Qwen3)."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim = dim
        self.window = config.sliding_window if config.layer_types[layer] == SLIDING else None
        self.q_proj = DraftLinear(config.hidden_size, heads * dim, bias=config.attention_bias)
        self.k_proj = DraftLinear(config.hidden_size, kv_heads * dim, bias=config.attention_bias)
        self.v_proj = DraftLinear(config.hidden_size, kv_heads * dim, bias=config.attention_bias)
        self.o_proj = DraftLinear(heads * dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(dim, eps=config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: Rope) -> ContextKV:
        """Keys (after norm and RoPE) and values of x [n, H]: two of [n, kv heads, D]."""
        shape = (x.shape[0], -1, self.head_dim)
        return rotate(self.k_norm(self.k_proj(x).view(shape)), rope), self.v_proj(x).view(shape)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """Queries of x [n, H] after norm and RoPE: [n, heads, D]."""
        return rotate(self.q_norm(self.q_proj(x).view(x.shape[0], -1, self.head_dim)), rope)

    def output(self, mixed: Tensor) -> Tensor:
        """[n, heads, D] to [n, H]."""
        return self.o_proj(mixed.flatten(1))


class DraftLayer(nn.Module):
    """A Qwen3 decoder layer over block slots; the context enters through attention alone."""

    def __init__(self, config: DrafterConfig, qwen3: Qwen3Config, layer: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, layer)
        self.mlp = DraftMLP(qwen3)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def before(self, x: Tensor, rope: Rope) -> tuple[Tensor, ContextKV]:
        """Queries, and keys and values of the slots, for the attention."""
        inner = self.input_layernorm(x)
        return self.self_attn.queries(inner, rope), self.self_attn.keys_values(inner, rope)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output from its input and what the attention made."""
        x = x + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class ContextCache:
    """Keys and values of the context positions 0..length-1, one pair a layer, grown by doubling.

    Holds target context only: a block's own keys never enter it, so nothing is cropped after a block. `crop`
    is for callers that take context back.
    """

    def __init__(self) -> None:
        self.length = 0
        self._layers: list[ContextKV] = []

    def append(self, new: Sequence[ContextKV]) -> None:
        """Adds t positions; new holds every layer's keys and values [kv heads, t, D]."""
        added = new[0][0].shape[1]
        if not self._layers:
            self._layers = [(k.clone(), v.clone()) for k, v in new]
        elif self.length + added > self._layers[0][0].shape[1]:
            self._layers = [(self._grown(k, added), self._grown(v, added)) for k, v in self._layers]
        for (keys, values), (k, v) in zip(self._layers, new, strict=True):
            keys[:, self.length : self.length + added] = k
            values[:, self.length : self.length + added] = v
        self.length += added

    def _grown(self, tensor: Tensor, added: int) -> Tensor:
        heads, _, dim = tensor.shape
        larger = tensor.new_empty(heads, max(256, 2 * (self.length + added)), dim)
        larger[:, : self.length] = tensor[:, : self.length]
        return larger

    def crop(self, length: int) -> None:
        """Forgets the positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} cached positions to {length}")
        self.length = length

    def layers(self) -> list[ContextKV]:
        return [(k[:, : self.length], v[:, : self.length]) for k, v in self._layers]


class Drafter(nn.Module):
    """The DFlash drafter; see the module's docstring."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        qwen3 = config.qwen3()
        self.config = config
        self.layers = nn.ModuleList([DraftLayer(config, qwen3, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = DraftLinear(config.features, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = PlainRope(qwen3)
        self._parts = PLAIN_PARTS

    @property
    def windows(self) -> set[int | None]:
        """Of the layers' attentions."""
        return {layer.self_attn.window for layer in self._draft_layers()}

    def rope(self, like: Tensor, positions: Tensor) -> Rope:
        """Cosines and sines at int64 positions [n], in the dtype of `like`."""
        cos, sin = self.rotary_emb(like, positions[None])
        return cos[0, :, None], sin[0, :, None]

    def project_context(self, features: Tensor, positions: Tensor) -> list[ContextKV]:
        """Every layer's keys and values of the context.

        features [T, K·H]: outputs of the recorded target layers side by side, in the order of target_layer_ids;
        positions [T] int64, each inside its own document.
        """
        attentions = [layer.self_attn for layer in self._draft_layers()]
        pairs = self._parts.context(self.fc, self.hidden_norm, attentions, features, self.rope(features, positions))
        return [_by_head(pair) for pair in pairs]

    def decode(
        self,
        embeds: Tensor,
        positions: Tensor,
        context: Sequence[ContextKV],
        attend: Attend,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [S, H] after the final norm of slots embedded as embeds [S, H] at positions [S].

        wanted: [n] int64, ascending, none twice: only these slots' states, [n, H]. After its
        attention the last layer then goes on with these alone.
        """
        rope = self.rope(embeds, positions)
        layers, parts = self._draft_layers(), self._parts
        q, block = parts.first(layers[0], embeds, rope)
        # One graph of `between` serves all layers when each one's input needs a gradient; the embedding's goes nowhere.
        x = embeds.detach().requires_grad_(torch.is_grad_enabled())
        for i, (layer, layer_context) in enumerate(zip(layers, context, strict=True)):
            by_head = attend(q.transpose(0, 1), layer_context, _by_head(block), layer.self_attn.window)
            mixed = by_head.transpose(0, 1)
            if i + 1 < len(layers):
                x, q, block = parts.between(layer, layers[i + 1], x, mixed, rope)
            else:
                if wanted is not None:
                    x, mixed = picked([x, mixed], wanted)
                x = parts.last(layer, self.norm, x, mixed)
        return x

    def compile_parts(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Fuses norms, RoPE and activations by torch.compile: for training on CUDA.

        Layers are arguments of what is compiled, so all share one graph; numbers of slots and tokens are symbols of it.
        """
        # With and without gradients, and where sizes matter to a fusion: more than the default limit of 8 versions,
        # beyond which the parts would run uncompiled.
        dynamo_config.recompile_limit = max(64, dynamo_config.recompile_limit)
        self._parts = Parts(*(compiled(part, backend) for part in PLAIN_PARTS))

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_parts` was called."""
        return self._parts is not PLAIN_PARTS

    def forward(
        self, features: Tensor, context_positions: Tensor, embeds: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Hidden states [S, H] of a packed micro-batch; `attend` says which context and slots each slot sees."""
        return self.decode(embeds, positions, self.project_context(features, context_positions), attend)

    def draft(self, block_embeds: Tensor, features: Tensor, cache: ContextCache) -> Tensor:
        """One block of a sequence being decoded: hidden states [1, B, H] after the final norm.

        block_embeds [1, B, H]: the raw target embeddings of [anchor token, mask token × (B-1)].
        features [1, t, K·H]: the target's states at the t context positions not yet in `cache`, the last being the one
        before the anchor; they are appended, and slot k sits at position cache.length + k. t may be 0.
        Same numbers as the training forward of that anchor.
        """
        start = cache.length
        if features.shape[1] or not cache.length:
            new = torch.arange(start, start + features.shape[1], device=features.device)
            cache.append(self.project_context(features[0], new))
        positions = torch.arange(cache.length, cache.length + block_embeds.shape[1], device=block_embeds.device)
        return self.decode(block_embeds[0], positions, cache.layers(), attend_one_block)[None]

    def _draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]


def picked(tensors: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """The rows [n] (int64, none twice) of each tensor [S, ...].

    Backward gathers as well: autograd's own adds row by row, as rows could repeat, at a fifth of the memory's speed.
    """
    if not torch.is_grad_enabled():
        return [x.index_select(0, rows) for x in tensors]
    place = rows.new_full((len(tensors[0]),), len(rows))
    place.scatter_(0, rows, torch.arange(len(rows), device=rows.device))
    found = []
    for x in tensors:
        one = _Picked.apply(x, rows, place)
        assert isinstance(one, Tensor)
        found.append(one)
    return found


class _Picked(torch.autograd.Function):
    """x [S, ...] to [n, ...]; place [S]: where a row went, n if nowhere."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, rows: Tensor, place: Tensor
    ) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (place,), (slope,) = ctx.saved_tensors, outer
        nothing = slope.new_zeros(1, *slope.shape[1:])
        return torch.cat([slope, nothing]).index_select(0, place), None, None


def _by_head(pair: ContextKV) -> ContextKV:
    """[n, kv heads, D] to [kv heads, n, D], in the eager code: what a compiled part gives and takes stays contiguous,
    so that its backward is not handed gradients that it has to copy first."""
    return pair[0].transpose(0, 1), pair[1].transpose(0, 1)


def _context(
    fc: nn.Module, norm: nn.Module, attentions: Sequence[DraftAttention], features: Tensor, rope: Rope
) -> list[ContextKV]:
    x = norm(fc(features))
    return [attention.keys_values(x, rope) for attention in attentions]


def _first(layer: DraftLayer, x: Tensor, rope: Rope) -> tuple[Tensor, ContextKV]:
    return layer.before(x, rope)


def _between(
    layer: DraftLayer, following: DraftLayer, x: Tensor, mixed: Tensor, rope: Rope
) -> tuple[Tensor, Tensor, ContextKV]:
    x = layer.after(x, mixed)
    return x, *following.before(x, rope)


def _last(layer: DraftLayer, norm: nn.Module, x: Tensor, mixed: Tensor) -> Tensor:
    return norm(layer.after(x, mixed))


class Parts(NamedTuple):
    """What the forward consists of between its attentions, as functions of the modules: plain, or each compiled."""

    context: Callable[..., list[ContextKV]]
    first: Callable[..., tuple[Tensor, ContextKV]]
    between: Callable[..., tuple[Tensor, Tensor, ContextKV]]
    last: Callable[..., Tensor]


PLAIN_PARTS = Parts(_context, _first, _between, _last)


def compiled(part: Callable[..., Any], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """A part of the forward, compiled for any first size of its tensors.

    `torch.compile(dynamic=True)` would also make a symbol of a hidden size that happens to equal that first size once,
    and inputs of floats.
    """
    inner = torch.compile(part, backend=backend, options=unguarded() if backend == "inductor" else None)

    def run(*arguments: Any) -> Any:
        for argument in arguments:
            for tensor in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(tensor, Tensor):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return inner(*arguments)

    return run


def unguarded() -> dict[str, Any]:
    """Inductor's options for graphs that serve all sizes.

    Where it could fuse a norm's two sums in backward it asks whether there are many rows (8,192 at a width of 4,096),
    and its answer becomes a guard: the first micro-batch on the other side would be compiled anew, ten seconds into
    which everything waits.
    """
    name = "mix_order_reduction_non_strict_mode"
    return {f"triton.{name}": True} if hasattr(inductor_config.triton, name) else {}


def attend_one_block(q: Tensor, context: ContextKV, block: ContextKV, window: int | None) -> Tensor:
    """Attention of one block right after its whole context: no mask in a full layer."""
    keys, values = torch.cat([context[0], block[0]], 1), torch.cat([context[1], block[1]], 1)
    mask = None
    if window is not None:
        key_at = torch.arange(keys.shape[1], device=q.device)
        slot_at = key_at[-q.shape[1] :, None]
        mask = (key_at <= slot_at) & (key_at > slot_at - window)
    return sdpa(q, keys, values, mask)


def sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention of q [heads, S, D] over keys and values [kv heads, n, D]; mask [S, n] bool."""
    repeats = q.shape[0] // keys.shape[0]
    if repeats > 1:
        keys, values = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
    mask = None if mask is None else mask[None, None]
    return F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask)[0]


def blank_drafter(config: DrafterConfig) -> Drafter:
    """A float32 drafter on the CPU whose weights are for the caller to set, every one: they are whatever lay there.

    torch's modules draw their own on one thread, ten seconds a billion, only to be overwritten.
    """
    with torch.device("meta"):
        drafter = Drafter(config).float()
    drafter.rotary_emb = PlainRope(config.qwen3())  # computed, in no file
    return drafter.to_empty(device="cpu")
