"""Targets that are quantised on disk, run with the values they are served with. Used by `target.py` and
`loading.py` alone.

compressed-tensors is the format of vLLM and llm-compressor. Its weights are restored once, at load, to the values that
the quantised ones stand for; activations are rounded at each layer where the checkpoint says so (W8A8), as an engine's
kernels do. transformers would restore the weights in a hook of the whole model's first forward, which a decoder run by
itself never calls, and the layers would compute with the raw integers.

Other methods bring linear layers of their own, which transformers makes at load; a plain linear layer whose weight is
no floating-point matrix is refused.
"""

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import ConfigError

METHOD = "compressed-tensors"
EXTRA = "paceline[quantised]"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantisation(config: Any) -> str | None:
    """How a model is quantised on disk, as its config says; None if it is not. Wrapped models' text config counts."""
    for one in (config, config.get_text_config(decoder=True)):
        found = getattr(one, "quantization_config", None)
        if found:
            method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
            return str(getattr(method, "value", method))
    return None


def check_quantisation(folder: Any, config: Any) -> None:
    """ConfigError where the package is missing that reads the checkpoint."""
    if quantisation(config) != METHOD:
        return
    try:
        import compressed_tensors  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"target.path: {folder} is quantised with {METHOD}, which is not installed: pip install '{EXTRA}'"
        ) from None


def restore(folder: Any, model: nn.Module, config: Any, dtype: torch.dtype) -> None:
    """Gives a loaded model's linear layers weights of `dtype`, and a forward that rounds activations where the
    checkpoint does. ConfigError where that is not known how."""
    method = quantisation(config)
    if method is None:
        return
    if method == METHOD:
        _restore(model, dtype)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if type(module) is nn.Linear and (not isinstance(weight, Tensor) or weight.dtype not in FLOATS):
            raise ConfigError(f"target.path: {folder}: {name} is quantised ({method}) in a way that is not known here")


@torch.no_grad()
def _restore(model: nn.Module, dtype: torch.dtype) -> None:
    from compressed_tensors.compressors.base import decompress_module

    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        decompress_module(module)
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.to(dtype), requires_grad=False)
            vars(module).pop("forward", None)  # which would round the weights each time anew
            if scheme.input_activations or scheme.output_activations:
                forward = _token_forwards().get(_plain(scheme), _rounding_forward)
                module.forward = MethodType(forward, module)
    hook = getattr(model, "ct_decompress_hook", None)
    if hook is not None:
        hook.remove()


@contextlib.contextmanager
def unrounded(layers: nn.Module) -> Iterator[bool]:
    """Leaves activations as they are for as long as it lasts; gives whether any are rounded otherwise."""
    ours = {*_token_forwards().values(), _rounding_forward}
    forwards = [(module, vars(module).get("forward")) for module in layers.modules()]
    rounding = [(module, forward) for module, forward in forwards if getattr(forward, "__func__", None) in ours]
    for module, _ in rounding:
        del vars(module)["forward"]
    try:
        yield bool(rounding)
    finally:
        for module, forward in rounding:
            vars(module)["forward"] = forward


def _plain(scheme: Any) -> tuple[str, int] | None:
    """Type and bits of inputs that are rounded with a symmetric scale for each token; None for any other scheme."""
    args = scheme.input_activations
    if args is None or scheme.output_activations or args.dynamic is not True or getattr(args, "scale_dtype", None):
        return None
    kind, strategy = (getattr(value, "value", value) for value in (args.type, args.strategy))
    return (str(kind), int(args.num_bits)) if strategy == "token" and args.symmetric else None


def _token_forwards() -> dict[Any, Any]:
    return {("int", 8): _int8_forward, ("float", 8): _fp8_forward}


def _token_scale(x: Tensor, half_range: float) -> Tensor:
    """compressed-tensors' scale of each token, [..., 1] in the dtype of x."""
    scale = x.abs().amax(dim=-1, keepdim=True) / half_range
    return torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)


def _int8_forward(self: Any, x: Tensor) -> Tensor:
    """As `_rounding_forward`, without the package's objects, which torch.compile of some versions cannot follow."""
    scale = _token_scale(x, 127.5)
    return F.linear(torch.round((x / scale).clamp(-128, 127)) * scale, self.weight, self.bias)


def _fp8_forward(self: Any, x: Tensor) -> Tensor:
    scale = _token_scale(x, 448.0)
    rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
    return F.linear(rounded * scale, self.weight, self.bias)


def _rounding_forward(self: Any, x: Tensor) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    scheme = self.quantization_scheme
    if scheme.input_activations:
        x = forward_quantize(self, x, "input", scheme.input_activations)
    y = F.linear(x, self.weight, self.bias)
    return forward_quantize(self, y, "output", scheme.output_activations) if scheme.output_activations else y
