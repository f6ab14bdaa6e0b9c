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
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each row of a packed batch; transformers' attention function `paceline_varlen`.

    query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] give [1, T, Hq, Dv]. A query at position t of its row
    sees keys max(0, t-W+1) to t, W being the sliding window. s_aux [Hq]: attention sinks (gpt-oss), the logits of a key
    more that every query sees, whose value is zero. Half precision on CUDA runs torch's varlen kernel; elsewhere one
    SDPA call a row, whose cost is also the sum of squared row lengths. Compiled layers hold it as one operator, so
    their graph knows nothing of the boundaries.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    wanted = [name for name in ("softcap", "position_bias") if options.get(name) is not None]
    wanted += ["bidirectional"] * (not causal) + ["mask"] * (attention_mask is not None)
    if wanted:
        raise Unpackable(f"its attention uses {', '.join(wanted)}")
    attend = torch.ops.paceline.packed_attention if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, scaling, sliding_window, s_aux), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    bounds = current()
    bounds.windows.add(window)
    if (output := _varlen(query, key, value, bounds, scaling, window, sinks)) is not None:
        return output.contiguous()  # the kernel lays it out as the query, compiled layers count on `_attended`
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for start, end in pairwise(bounds.cu_seqlens):
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        row = _row_attention(q, k, v, scaling, window, sinks)
        output[:, start:end] = row.transpose(1, 2)
    return output


_operator = torch.library.custom_op(
    "paceline::packed_attention",
    _attend,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float? scaling, int? window, Tensor? sinks=None) -> Tensor",
)


@_operator.register_fake
def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


@cache
def _varlen_kernel() -> Callable[..., Any] | None:
    """torch's varlen attention with scale, window and the scores' logsumexp, called as `(q, k, v, offsets, longest,
    scale, window, grouped, with_lse)`.

    None where this torch has none. Versions before `enable_gqa` group queries unasked.
    """
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:  # torch 2.9 has neither; later ones have both
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size", "return_aux"} <= set(known):
        return None

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        longest: int,
        scale: float | None,
        window: int,
        grouped: bool,
        with_lse: bool,
    ) -> Any:
        options: dict[str, Any] = {"enable_gqa": grouped} if "enable_gqa" in known else {}
        if with_lse:
            options["return_aux"] = AuxRequest(lse=True)
        lengths = (offsets, offsets, longest, longest)
        return varlen_attn(q, k, v, *lengths, scale=scale, window_size=(window, 0), **options)

    return run


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Boundaries,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None,
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
    grouped = q.shape[1] != k.shape[1]
    found = kernel(q, k, v, bounds.offsets, bounds.longest, scaling, left, grouped, sinks is not None)
    if sinks is None:
        return found[None]
    output, lse = found
    return sunk(output, lse, sinks)[None]


def sunk(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention's output [T, Hq, D] with a sink a head [Hq] among the keys, from the output without: the sink takes
    e^sink of e^sink + e^lse of each query's weights, and its value is zero. lse: logsumexp of the scores, [Hq, T] or
    [T, Hq], as torch's kernels give the one and its documentation names the other."""
    lse = lse if lse.shape[0] == len(sinks) else lse.mT
    share = (lse.float() - sinks.float()[:, None]).sigmoid()
    return (output * share.mT[..., None]).to(output.dtype)


def _row_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, sinks: Tensor | None
) -> Tensor:
    """One row's causal attention, [1, Hq, t, Dv]; in blocks of queries where a sliding window bites."""
    if sinks is not None:
        return _with_sinks(q, k, v, scaling, window, sinks)
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


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, sinks: Tensor) -> Tensor:
    """`_row_attention` with a sink a head [Hq], spelt out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    length, scale = q.shape[2], q.shape[3] ** -0.5 if scaling is None else scaling
    blocks = []
    for start in range(0, length, WINDOW_BLOCK):
        end, low = min(start + WINDOW_BLOCK, length), 0 if window is None else max(0, start - window + 1)
        back = torch.arange(start, end, device=q.device)[:, None] - torch.arange(low, end, device=q.device)
        seen = (back >= 0) if window is None else (back >= 0) & (back < window)
        scores = (q[:, :, start:end] @ k[:, :, low:end].mT).float() * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        sink = sinks.float()[None, :, None, None].expand(-1, -1, end - start, -1)
        shares = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        blocks.append(shares.to(v.dtype) @ v[:, :, low:end])
    return torch.cat(blocks, dim=2)


# A name without a mask function makes transformers build no mask.
ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
