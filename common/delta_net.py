"""Gated DeltaNet layers on packed rows, by flash-linear-attention's kernels.

Qwen3-Next, Qwen3.5 and Qwen3.6 mix full attention with layers whose state runs along the sequence: a short causal
convolution, then for each head the gated delta rule (arXiv 2412.06464)

    S_t = exp(g_t)·S_{t-1} + k_t ⊗ β_t·(v_t - exp(g_t)·S_{t-1}ᵀk_t)        o_t = S_tᵀq_t / √K

with q and k of unit length. Where a row begins, both must begin anew. transformers' own code runs the convolution of
packed rows only by another package's CUDA extension; fla's kernels, Triton all of them, take the rows' offsets for
both.

`pack` makes layers run so and `unpack` undoes it; a layer keeps its weights, projections and norm. Each kernel is one
opaque operator to torch.compile. `fault` compares the kernels with the plain twins below, which loop over tokens, on a
layer's own widths: a state that is wrong only after some chunks would not show in the self-check's short rows.

Used by target.py alone.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus

from .boundaries import Boundaries, Unpackable, boundaries, current
from .errors import first_line

__all__ = ["DEVICES", "delta_nets", "fault", "pack", "unpack"]

DEVICES = ("cuda",)  # where fla's kernels run
CHUNK = 64  # tokens that fla's kernels take at a time
CHECK_OFFSETS = (0, 70, 75, 75 + 2 * CHUNK + 1, 290)
LIMITS = {torch.float32: 0.01}  # relative error; the products of float32 are TF32's
LIMIT = 0.05  # of half precision
PACKAGE = "flash-linear-attention"  # or its part fla-core, which has the kernels
EXTRA = "pip install 'paceline[linear-attention]'"


# The plain twins


def plain_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, cu: Sequence[int]) -> Tensor:
    """Causal convolution of each channel inside each row: x [1, T, D] and weight [D, W] give [1, T, D]."""
    width, out = weight.shape[1], torch.empty_like(x)
    for start, end in pairwise(cu):
        row = conv1d(x[:, start:end].mT, weight[:, None], bias, padding=width - 1, groups=len(weight))
        out[:, start:end] = row[..., : end - start].mT
    return silu(out) if activation is not None else out


def plain_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Sequence[int]) -> Tensor:
    """The gated delta rule inside each row, token by token in float32.

    q and k [1, T, Hk, K], v [1, T, Hv, V], g (log of the decay) and beta [1, T, Hv] give [1, T, Hv, V]. Each head of q
    and k serves Hv/Hk heads of v that lie side by side.
    """
    share = v.shape[2] // q.shape[2]
    q, k = (_unit(x[0].float()).repeat_interleave(share, dim=1) for x in (q, k))
    values, decay, rate = v[0].float(), g[0].float().exp(), beta[0].float()
    out, starts = torch.empty_like(values), set(cu)
    state = values.new_zeros(v.shape[2], q.shape[-1], v.shape[-1])
    for t in range(len(values)):
        state = torch.zeros_like(state) if t in starts else state * decay[t, :, None, None]
        error = rate[t, :, None] * (values[t] - (state * k[t, :, :, None]).sum(1))
        state = state + k[t, :, :, None] * error[:, None]
        out[t] = (state * q[t, :, :, None]).sum(1) / q.shape[-1] ** 0.5
    return out[None].to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()  # fla's epsilon: a zero stays zero


# fla's kernels


class Kernels(NamedTuple):
    conv: Callable[..., Any]
    rule: Callable[..., Any]


@cache
def kernels() -> Kernels:
    """fla's convolution and gated delta rule. Raises Unpackable where they are not there."""
    try:
        conv = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ModuleNotFoundError as error:
        if error.name == "fla":
            raise Unpackable(f"its Gated DeltaNet layers need {PACKAGE} for that: {EXTRA}") from None
        raise Unpackable(f"{PACKAGE} lacks {error.name}: {EXTRA}") from error
    except Exception as error:  # kernels are declared at import, where Triton may refuse them in any way
        raise Unpackable(f"{PACKAGE} does not load ({_named(error)}): {EXTRA}") from error
    return Kernels(conv, rule)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    rows = current()
    options = {"cu_seqlens": rows.offsets, "cu_seqlens_cpu": rows.on_host}
    out, _ = kernels().conv(x.contiguous(), weight, bias, activation=activation, **options)
    return out.contiguous()


def _rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    rows = current()
    options = {"cu_seqlens": rows.offsets, "cu_seqlens_cpu": rows.on_host}
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, _ = kernels().rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **options)
    return out.contiguous()


_conv_operator = torch.library.custom_op(
    "paceline::packed_conv",
    _conv,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, str? activation) -> Tensor",
)
_rule_operator = torch.library.custom_op(
    "paceline::packed_delta_rule",
    _rule,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta) -> Tensor",
)


@_conv_operator.register_fake
def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    return x.new_empty(x.shape)


@_rule_operator.register_fake
def _ruled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return v.new_empty(v.shape)


# A layer


class PackedDeltaNet(nn.Module):
    """What a Gated DeltaNet of transformers becomes: the same weights, its forward on packed rows [1, T, H]."""

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:
        layer: Any = self
        given = [name for name in ("attention_mask", "cache", "cache_params") if context.get(name) is not None]
        if given:
            raise Unpackable(f"its Gated DeltaNet layers are given {', '.join(given)}")
        qkv, z, b, a = _project(layer, hidden_states)
        compiling, ops = torch.compiler.is_compiling(), torch.ops.paceline
        conv, rule = (ops.packed_conv, ops.packed_delta_rule) if compiling else (_conv, _rule)
        qkv = conv(qkv, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.activation)
        q, k, v = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
        q, k = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (q, k))
        g = -layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias)
        out = rule(q, k, v.unflatten(-1, (-1, layer.head_v_dim)), g, b.sigmoid())
        out = layer.norm(out.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
        return layer.out_proj(out.view(*qkv.shape[:2], layer.value_dim))


def _project(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v side by side [1, T, D], gate z, and what makes beta and g, [1, T, Hv] each."""
    if hasattr(layer, "in_proj_qkv"):
        return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    return torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1), z, b, a


_SHARED = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "activation", "key_dim", "head_k_dim", "head_v_dim")
_PROJECTIONS = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # Qwen3.5
    ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering"),  # Qwen3-Next
)


def delta_nets(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The Gated DeltaNets of decoder layers that `pack` can change."""
    modules = [module for layer in layers for module in layer.modules()]
    return [module for module in modules if _is_delta_net(module)]


def _is_delta_net(module: nn.Module) -> bool:
    has = lambda names: all(hasattr(module, name) for name in names)  # noqa: E731
    known = getattr(module, "activation", None) in ("silu", "swish", None)
    return has(_SHARED) and known and any(has(names) for names in _PROJECTIONS)


@cache
def _packed_class(own: type[nn.Module]) -> type[nn.Module]:
    # A class, not a forward on the instance: compiled layers then share a graph.
    return type(f"Packed{own.__name__}", (PackedDeltaNet, own), {})


def pack(layers: Iterable[nn.Module]) -> None:
    """Makes Gated DeltaNets run packed rows. Raises Unpackable where fla's kernels are not there."""
    for layer in layers:
        kernels()
        if not isinstance(layer, PackedDeltaNet):
            layer.__class__ = _packed_class(type(layer))


def unpack(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        if isinstance(layer, PackedDeltaNet):
            layer.__class__ = type(layer).__bases__[1]


# Whether the kernels are right


def fault(layer: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why fla's kernels are not to be used for a layer; None if they give the plain twins' values here."""
    draw = torch.Generator().manual_seed(0)
    tokens, heads = CHECK_OFFSETS[-1], layer.value_dim // layer.head_v_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=draw).to(device, dtype)

    weight = layer.conv1d.weight.squeeze(1)
    x, g, beta = random(len(weight)), -softplus(random(heads).float()), random(heads).sigmoid()
    q, k = (random(layer.key_dim // layer.head_k_dim, layer.head_k_dim) for _ in "qk")
    v = random(heads, layer.head_v_dim)
    token = boundaries.set(Boundaries(CHECK_OFFSETS, device))
    try:
        found = (_conv(x, weight, layer.conv1d.bias, layer.activation), _rule(q, k, v, g, beta))
    except Exception as error:  # a kernel's compiler may raise anything, and rows can run another way
        return f"fla's kernels do not run: {_named(error)}"
    finally:
        boundaries.reset(token)
    bias = layer.conv1d.bias
    wanted = (
        plain_conv(x, weight, bias, layer.activation, CHECK_OFFSETS),
        plain_rule(q, k, v, g, beta, CHECK_OFFSETS),
    )
    limit = LIMITS.get(dtype, LIMIT)
    for name, one, other in zip(("causal_conv1d", "chunk_gated_delta_rule"), found, wanted, strict=True):
        error = float((one.float() - other.float()).norm() / other.float().norm())
        if not error <= limit:
            return f"fla's {name} is off by {error:.2g} (at most {limit:g})"
    return None
