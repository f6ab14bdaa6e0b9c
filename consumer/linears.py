"""The drafter's linear layers: plain, joined where two read the same input, and with fp8 products.

Parameters keep the names and shapes of the plain model. Training on CUDA spends nine tenths of its time in their
products, so `learner.py` may change how these are computed:

    joined      gate and up projection as one product: their weights lie side by side in `optim.MasterWeights`; what
                comes back through the activation is then written side by side as well, by one kernel
    fp8         forward and input gradient in e4m3, a scale a row on either side; weight gradients stay in bfloat16,
                whose sums over thousands of slots are what training needs exact (`trainer.fp8`). Weights are quantised
                once a step, not once a micro-batch, both ways round: [N, K] for the forward, [K, N] for backward
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ..common.eightbit import FP8, FP8_CAPABILITY, quantise, scaled_matmul
from ..common.errors import ConfigError, first_line

ALIGNED = 16  # sizes of an fp8 product
SLOPE = torch.float8_e5m2  # of logits' slopes: the likeliest token's is millions of times an unlikely one's


Eight = tuple[Tensor, Tensor, Tensor, Tensor]
"""A weight [N, K] as e4m3 values [N, K] and their scales [N, 1], then turned round: [K, N] and [K, 1]."""


class DraftLinear(nn.Linear):
    """`nn.Linear`, whose products may be fp8 ones. `eight`: its weight for these."""

    fp8 = False
    eight: tuple[Eight, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.eight[0] if self.fp8 else None)


class DraftMLP(Qwen3MLP):
    """Qwen3's gated MLP. `joint`: gate's and up's weights in one parameter [2I, H] on the same memory, or nothing.
    `eight`: for fp8 products, the weights that `products` names."""

    joint: tuple[Tensor, ...] = ()
    fp8 = False
    eight: tuple[Eight, ...] = ()

    @property
    def products(self) -> list[Tensor]:
        """The weights of the products that forward has."""
        first = list(self.joint) or [self.gate_proj.weight, self.up_proj.weight]
        return [*first, self.down_proj.weight]

    def forward(self, x: Tensor) -> Tensor:
        down = self.down_proj.weight
        eight = self.eight if self.fp8 else (None, None, None)
        if self.joint:
            both = linear(x, self.joint[0], None, eight[0])
            if isinstance(self.act_fn, nn.SiLU | SiLUActivation):
                return _applied(_SwigluDown, both, down, *(eight[-1] or ()))
            gate, up = both.chunk(2, -1)
        else:
            gate = linear(x, self.gate_proj.weight, None, eight[0])
            up = linear(x, self.up_proj.weight, None, eight[1])
        return linear(self.act_fn(gate) * up, down, None, eight[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, eight: Eight | None) -> Tensor:
    """[n, K] through a weight [N, K] and bias [N]; by an fp8 product if the weight is given for one as well."""
    if eight is None:
        return F.linear(x, weight, bias)
    product = _applied(_Fp8Product, x, weight, *eight)
    return product if bias is None else product + bias


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result = function.apply(*arguments)
    assert isinstance(result, Tensor)
    return result


def _forward_product(x: Tensor, weight: Tensor, eight: tuple[Tensor, ...]) -> Tensor:
    """x [n, K] through weight [N, K]."""
    return fp8_product(*quantise(x), eight[0], eight[1], x, True) if eight else x @ weight.t()


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
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Tensor, *eight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *eight[2:])
        return _forward_product(x, weight, eight)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        x, *turned = ctx.saved_tensors
        (slope,) = outer
        dx = fp8_product(*quantise(slope), *turned, slope, False) if ctx.needs_input_grad[0] else None
        return dx, slope.t() @ x, None, None, None, None


class _SwigluDown(torch.autograd.Function):
    """silu(gate)·up of both [n, 2I] = [gate, up], through the weight [H, I] of the down projection: [n, H].

    Keeps `both` alone: backward computes the activation again in the kernel that computes its slope.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, both: Tensor, weight: Tensor, *eight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(both, weight, *eight[2:])
        gate, up = both.chunk(2, -1)
        return _forward_product(F.silu(gate) * up, weight, eight)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        both, weight, *turned = ctx.saved_tensors
        (slope,) = outer
        inner = fp8_product(*quantise(slope), *turned, slope, False) if turned else slope @ weight
        found, mixed = swiglu_slopes(both, inner)
        return found, slope.t() @ mixed, *(2 * len(turned) * [None])


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


def use_fp8(drafter: nn.Module) -> Callable[[], None]:
    """Switches the linear layers whose sizes allow it to fp8 products. What it returns quantises their weights anew, to
    be called whenever these have changed."""
    kept: list[tuple[Tensor, Eight]] = []
    for module in drafter.modules():
        if not isinstance(module, DraftLinear | DraftMLP):
            continue
        weights = module.products if isinstance(module, DraftMLP) else [module.weight]
        if all(size % ALIGNED == 0 for weight in weights for size in weight.shape):
            module.fp8, module.eight = True, tuple(map(both_ways, weights))
            kept += zip(weights, module.eight, strict=True)

    def refresh() -> None:
        for weight, eight in kept:
            quantise_anew(weight, eight)

    return refresh


@torch.no_grad()
def both_ways(weight: Tensor) -> Eight:
    """A weight [N, K] quantised."""
    return *quantise(weight.detach()), *quantise(weight.detach().t().contiguous())


@torch.no_grad()
def quantise_anew(weight: Tensor, eight: Eight) -> None:
    """`both_ways` into the same memory."""
    if weight.is_cuda:
        from .kernels import quantise_both_ways  # on first use: a CPU run never needs Triton

        quantise_both_ways(weight.detach(), *eight)
    else:
        for part, value in zip(eight, both_ways(weight), strict=True):
            part.copy_(value)


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
    """ConfigError unless the device has the fp8 matmuls that training takes."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        least = ".".join(map(str, FP8_CAPABILITY))
        raise ConfigError(f"trainer.fp8: {device} has no fp8 matmuls; they need a GPU of compute capability {least}")
    small = torch.zeros(ALIGNED, ALIGNED, device=device)
    scale = torch.ones(ALIGNED, 1, device=device)
    try:
        for kind in (FP8, SLOPE):
            scaled_matmul(small.to(kind), scale, small.to(FP8), scale, torch.bfloat16, fast=False)
    except RuntimeError as error:
        raise ConfigError(f"trainer.fp8: torch {torch.__version__} on {device}: {first_line(error)}") from error
