"""Attention over packed rows, end to end in one sequence: transformers' attention function `PACKED`.

It is told where rows begin (`boundaries.py`); no mask of T x T over a batch is built.
"""

import inspect
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .boundaries import Boundaries, Unpackable, current

WINDOW_BLOCK = 512  # queries that share one mask in a sliding-window layer
PACKED = "paceline_varlen"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each row of a packed batch; transformers' attention function `paceline_varlen`.

    query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] give [1, T, Hq, Dv]. A query at position t of its row
    sees keys max(0, t-W+1) to t, W being the sliding window. Half precision on CUDA runs torch's varlen kernel;
    elsewhere one SDPA call a row, whose cost is also the sum of squared row lengths. Compiled layers hold it as one
    operator, so their graph knows nothing of the boundaries.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    wanted = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    wanted += ["bidirectional"] * (not causal) + ["mask"] * (attention_mask is not None)
    if wanted:
        raise Unpackable(f"its attention uses {', '.join(wanted)}")
    attend = torch.ops.paceline.packed_attention if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, scaling, sliding_window), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    bounds = current()
    bounds.windows.add(window)
    if (output := _varlen(query, key, value, bounds, scaling, window)) is not None:
        return output.contiguous()  # the kernel lays it out as the query, compiled layers count on `_attended`
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for start, end in pairwise(bounds.cu_seqlens):
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        output[:, start:end] = _row_attention(q, k, v, scaling, window).transpose(1, 2)
    return output


_operator = torch.library.custom_op(
    "paceline::packed_attention",
    _attend,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float? scaling, int? window) -> Tensor",
)


@_operator.register_fake
def _attended(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


@cache
def _varlen_kernel() -> Callable[..., Any] | None:
    """torch's varlen attention with scale and window, called as `(q, k, v, offsets, longest, scale, window, grouped)`.

    None where this torch has none. Versions before `enable_gqa` group queries unasked.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= set(known):
        return None

    def run(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: Any, window: int, grouped: bool):
        options: dict[str, Any] = {"enable_gqa": grouped} if "enable_gqa" in known else {}
        lengths = (offsets, offsets, longest, longest)
        return varlen_attn(q, k, v, *lengths, scale=scale, window_size=(window, 0), **options)

    return run


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Boundaries, scaling: float | None, window: int | None
) -> Tensor | None:
    """`packed_attention` by torch's varlen kernel, [1, T, Hq, D]; None where it does not apply."""
    half, width = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    if not (q.is_cuda and half and width == v.shape[-1] and width <= 256 and width % 8 == 0):
        return None
    kernel = _varlen_kernel()
    if kernel is None:
        return None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
    left = -1 if window is None else window - 1  # the window counts the query's own position
    return kernel(q, k, v, bounds.offsets, bounds.longest, scaling, left, q.shape[1] != k.shape[1])[None]


def _row_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """One row's causal attention, [1, Hq, t, Dv]; in blocks of queries where a sliding window bites."""
    grouped = q.shape[1] != k.shape[1]
    length = q.shape[2]
    if window is None or length <= window:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
    blocks = []
    for start in range(0, length, WINDOW_BLOCK):
        end, low = min(start + WINDOW_BLOCK, length), max(0, start - window + 1)
        back = torch.arange(start, end, device=q.device)[:, None] - torch.arange(low, end, device=q.device)
        keys, values, seen = k[:, :, low:end], v[:, :, low:end], (back >= 0) & (back < window)
        blocks.append(
            scaled_dot_product_attention(
                q[:, :, start:end], keys, values, attn_mask=seen, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(blocks, dim=2)


# A name without a mask function makes transformers build no mask.
ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
