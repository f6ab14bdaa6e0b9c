"""Targets that are quantised on disk, run with the values they are served with. Used by `target.py` alone.

compressed-tensors is the format of vLLM and llm-compressor. Its weights are restored once, at load, to the values that
the quantised ones stand for; activations are rounded at each layer where the checkpoint says so (W8A8), as an engine's
kernels do. transformers would restore the weights in a hook of the whole model's first forward, which a decoder run by
itself never calls, and the layers would compute with the raw integers.

Other methods bring linear layers of their own, which transformers makes at load; a plain linear layer whose weight is
no floating-point matrix is refused.
"""

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
                module.forward = MethodType(_rounding_forward, module)
    hook = getattr(model, "ct_decompress_hook", None)
    if hook is not None:
        hook.remove()


def _rounding_forward(self: Any, x: Tensor) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    scheme = self.quantization_scheme
    if scheme.input_activations:
        x = forward_quantize(self, x, "input", scheme.input_activations)
    y = F.linear(x, self.weight, self.bias)
    return forward_quantize(self, y, "output", scheme.output_activations) if scheme.output_activations else y
