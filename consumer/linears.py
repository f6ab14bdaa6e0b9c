"""The drafter's linear layers: plain, joined where two read the same input, and with fp8 products.

Parameters keep the names and shapes of the plain model. Training on CUDA spends nine tenths of its time in their
products, so `learner.py` may change how these are computed:

    joined      gate and up projection as one product: their weights lie side by side in `optim.MasterWeights`
    fp8         forward and input gradient in e4m3, a scale a row on either side; weight gradients stay in bfloat16,
                whose sums over thousands of slots are what training needs exact (`trainer.fp8`)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ..common.errors import ConfigError
from ..common.target import FP8_CAPABILITY, quantise, scaled_matmul

ALIGNED = 16  # sizes of an fp8 product


class DraftLinear(nn.Linear):
    """`nn.Linear`, whose products may be fp8 ones."""

    fp8 = False

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.fp8)


class DraftMLP(Qwen3MLP):
    """Qwen3's gated MLP. `joint`: gate's and up's weights in one parameter [2I, H] on the same memory, or nothing."""

    joint: tuple[Tensor, ...] = ()
    fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        if self.joint:
            gate, up = linear(x, self.joint[0], None, self.fp8).chunk(2, -1)
        else:
            gate, up = (linear(x, layer.weight, None, self.fp8) for layer in (self.gate_proj, self.up_proj))
        return linear(self.act_fn(gate) * up, self.down_proj.weight, None, self.fp8)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, fp8: bool) -> Tensor:
    """[n, K] through a weight [N, K] and bias [N]."""
    if not fp8:
        return F.linear(x, weight, bias)
    product = _Fp8Product.apply(x, weight)
    assert isinstance(product, Tensor)
    return product if bias is None else product + bias


class _Fp8Product(torch.autograd.Function):
    """x [n, K] times weight [N, K]; see the module's docstring."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight)
        return scaled_matmul(*quantise(x), *quantise(weight), x.dtype)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (slope,) = outer
        dx = None
        if ctx.needs_input_grad[0]:
            dx = scaled_matmul(*quantise(slope), *quantise(weight.t().contiguous()), x.dtype, fast=False)
        return dx, slope.t() @ x


def use_fp8(drafter: nn.Module) -> None:
    """Switches the linear layers whose sizes allow it to fp8 products."""
    for module in drafter.modules():
        if not isinstance(module, DraftLinear | DraftMLP):
            continue
        inside: list[Any] = [module]
        if isinstance(module, DraftMLP):
            inside = [module.gate_proj, module.up_proj, module.down_proj]
        sizes = [size for layer in inside for size in layer.weight.shape]
        if all(size % ALIGNED == 0 for size in sizes):
            module.fp8 = True


def check_fp8(device: torch.device) -> None:
    """ConfigError unless the device has fp8 matmuls."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        least = ".".join(map(str, FP8_CAPABILITY))
        raise ConfigError(f"trainer.fp8: {device} has no fp8 matmuls; they need a GPU of compute capability {least}")
