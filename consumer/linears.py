"""The drafter's linear layers: plain, joined where two read the same input, and with fp8 products.

Parameters keep the names and shapes of the plain model. Training on CUDA spends nine tenths of its time in their
products, so `learner.py` may change how these are computed:

    joined      gate and up projection as one product: their weights lie side by side in `optim.MasterWeights`; what
                comes back through the activation is then written side by side as well, by one kernel
    fp8         forward and input gradient in e4m3, a scale a row on either side; weight gradients stay in bfloat16,
                whose sums over thousands of slots are what training needs exact (`trainer.fp8`)
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation
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
        down = self.down_proj.weight
        if self.joint:
            both = linear(x, self.joint[0], None, self.fp8)
            if isinstance(self.act_fn, nn.SiLU | SiLUActivation):
                return _applied(_SwigluDown, both, down, self.fp8)
            gate, up = both.chunk(2, -1)
        else:
            gate, up = (linear(x, layer.weight, None, self.fp8) for layer in (self.gate_proj, self.up_proj))
        return linear(self.act_fn(gate) * up, down, None, self.fp8)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, fp8: bool) -> Tensor:
    """[n, K] through a weight [N, K] and bias [N]."""
    if not fp8:
        return F.linear(x, weight, bias)
    product = _applied(_Fp8Product, x, weight)
    return product if bias is None else product + bias


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result = function.apply(*arguments)
    assert isinstance(result, Tensor)
    return result


def _forward_product(x: Tensor, weight: Tensor, fp8: bool) -> Tensor:
    """x [n, K] through weight [N, K]."""
    return fp8_product(*quantise(x), *quantise(weight), x, True) if fp8 else x @ weight.t()


def _backward_product(slope: Tensor, weight: Tensor, fp8: bool) -> Tensor:
    """The slope of x from that [n, N] of `_forward_product`."""
    if not fp8:
        return slope @ weight
    return fp8_product(*quantise(slope), *quantise(weight.t().contiguous()), slope, False)


@torch.library.custom_op("paceline::fp8_product", mutates_args=())
def fp8_product(
    values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, original: Tensor, fast: bool
) -> Tensor:
    """`scaled_matmul` of what `original` was quantised to, differentiable in name where `original` is.

    torch 2.11 compiles an autograd function whose result comes of an operator without a derivative, as
    `torch._scaled_mm` is one, as if it had none itself: all gradients before it are then zero.
    """
    return scaled_matmul(values, scale, weight, weight_scale, original.dtype, fast=fast)


@fp8_product.register_fake
def _(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, original: Tensor, fast: bool) -> Tensor:
    return original.new_empty(values.shape[0], weight.shape[0])  # `len` would make a constant of a symbol


def _never(*_: Any) -> None:
    raise RuntimeError("the functions that use it have derivatives of their own")


fp8_product.register_autograd(_never)


class _Fp8Product(torch.autograd.Function):
    """x [n, K] times weight [N, K]; see the module's docstring."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight)
        return _forward_product(x, weight, True)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (slope,) = outer
        dx = _backward_product(slope, weight, True) if ctx.needs_input_grad[0] else None
        return dx, slope.t() @ x


class _SwigluDown(torch.autograd.Function):
    """silu(gate)·up of both [n, 2I] = [gate, up], through the weight [H, I] of the down projection: [n, H].

    Keeps `both` alone: backward computes the activation again in the kernel that computes its slope.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, both: Tensor, weight: Tensor, fp8: bool
    ) -> Tensor:
        ctx.save_for_backward(both, weight)
        ctx.fp8 = fp8
        gate, up = both.chunk(2, -1)
        return _forward_product(F.silu(gate) * up, weight, fp8)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, None]:
        both, weight = ctx.saved_tensors
        (slope,) = outer
        inner = _backward_product(slope, weight, ctx.fp8)
        found, mixed = swiglu_slopes(both, inner)
        return found, slope.t() @ mixed, None


@torch.library.custom_op("paceline::swiglu_slopes", mutates_args=())
def swiglu_slopes(both: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes [n, 2I] of both [n, 2I] = [gate, up], and silu(gate)·up [n, I], from the latter's slope [n, I].

    A kernel of its own on CUDA: Inductor writes two halves side by side at half of the memory's speed.
    """
    wide = torch.promote_types(both.dtype, torch.float32)
    (gate, up), slope = both.to(wide).chunk(2, -1), inner.to(wide)
    share = gate.sigmoid()
    active = gate * share
    by_gate = slope * up * share * (1 + gate * (1 - share))
    return torch.cat([by_gate, slope * active], -1).to(both.dtype), (active * up).to(both.dtype)


@swiglu_slopes.register_kernel("cuda")
def _(both: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    from .kernels import swiglu_slopes as fused  # on first use: a CPU run never needs Triton

    return fused(both, inner)


@swiglu_slopes.register_fake
def _(both: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(both), torch.empty_like(inner)


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


@contextlib.contextmanager
def without_fp8(drafter: nn.Module) -> Iterator[None]:
    """Has plain products for as long as it lasts."""
    eight: list[Any] = [module for module in drafter.modules() if getattr(module, "fp8", False)]
    for module in eight:
        module.fp8 = False
    try:
        yield
    finally:
        for module in eight:
            module.fp8 = True


def check_fp8(device: torch.device) -> None:
    """ConfigError unless the device has fp8 matmuls."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        least = ".".join(map(str, FP8_CAPABILITY))
        raise ConfigError(f"trainer.fp8: {device} has no fp8 matmuls; they need a GPU of compute capability {least}")
