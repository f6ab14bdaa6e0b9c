"""The target's matmuls in fp8 (`target.fp8`), as an engine that serves the target in fp8 runs them.

Weights are quantised once, a scale for each output channel; activations as they come, a scale for each token. Products
are summed in float32 and come out in bfloat16. With x [T, K], W [N, K], q() rounding to e4m3:

    y = (q(x / a) q(W / b)^T) * a b^T      a[t] = max_k |x[t, k]| / 448      b[n] = max_k |W[n, k]| / 448

That is the scheme of vLLM's `--quantization fp8` on checkpoints in bfloat16, but for its scales of activations, which
there are one a tensor on older GPUs. Only the linear layers of decoder layers change; embedding, norms, head, routers
and the stacked experts of a mixture stay as they are. Source of the format: arXiv 2209.05433.

The states then are those of the fp8 target, so the run's fingerprint says that they are.
"""

import logging
import weakref

import torch
from torch import Tensor, nn

from ..common.eightbit import FP8_CAPABILITY, plain_scaled_matmul, quantise, scaled_matmul
from ..common.errors import ConfigError, first_line
from ..common.target import Target

__all__ = ["Fp8Linear", "check_fp8", "use_fp8"]

log = logging.getLogger(__name__)

ALIGNED = 16  # both sizes of a weight must be multiples of it
PRODUCT_ERROR = 0.02  # of a matmul: results are rounded to bfloat16 (0.002), sums to the matrix unit's own precision
KEPT = ("gate", "router")  # a mixture's choice of experts, which engines keep in the model's own dtype


class LastInput:
    """The last input that was quantised, of all layers that share this: q, k and v read one, gate and up another.

    It must not be written to between them. Compiled, the graph holds a quantisation for each of them and the compiler
    makes them one kernel, together with the norm or activation before.
    """

    def __init__(self) -> None:
        self._x: weakref.ref[Tensor] | None = None
        self._quantised: tuple[Tensor, Tensor] | None = None

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`quantise` of x [..., K] as a matrix."""
        if torch.compiler.is_compiling():
            return quantise(x.reshape(-1, x.shape[-1]))
        if self._quantised is None or self._x is None or self._x() is not x:
            self._x, self._quantised = weakref.ref(x), quantise(x.reshape(-1, x.shape[-1]))
        return self._quantised


class Fp8Linear(nn.Module):
    """A linear layer [K] to [N] in fp8."""

    weight: Tensor  # e4m3 [N, K]
    scale: Tensor  # float32 [N, 1]

    def __init__(self, linear: nn.Linear, last: LastInput | None = None) -> None:
        super().__init__()
        weight, scale = quantise(linear.weight)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self._last = last or LastInput()

    def forward(self, x: Tensor) -> Tensor:
        values, scale = self._last.quantised(x)
        y = scaled_matmul(values, scale, self.weight, self.scale, x.dtype).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def check_fp8(device: str) -> None:
    """ConfigError unless `device` is a GPU with fp8 matmuls that torch can use."""
    wanted = torch.device(device)
    if wanted.type != "cuda" or torch.cuda.get_device_capability(wanted) < FP8_CAPABILITY:
        least = ".".join(map(str, FP8_CAPABILITY))
        raise ConfigError(f"target.fp8: {device} has no fp8 matmuls; they need a GPU of compute capability {least}")
    try:
        error = _product_error(device)
    except RuntimeError as error:
        raise ConfigError(f"target.fp8: torch {torch.__version__} on {device}: {first_line(error)}") from error
    if not error <= PRODUCT_ERROR:
        raise ConfigError(
            f"target.fp8: torch {torch.__version__} on {device}: a matmul is off by {error:.2g} of what it should be"
        )


def _product_error(device: str) -> float:
    """How far a matmul of quantised values is from the same in float32, relative."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=draw).to(device, torch.bfloat16) for rows in (48, 32))
    factors = (*quantise(x), *quantise(weight))
    found = scaled_matmul(*factors, torch.bfloat16).float()
    wanted = plain_scaled_matmul(*factors, torch.float32)
    return float((found - wanted).norm() / wanted.norm())


@torch.no_grad()
def use_fp8(target: Target) -> int:
    """Replaces the linear layers of a target's decoder layers; returns how many. ConfigError if it is quantised already
    or has none."""
    if getattr(target.decoder.config, "quantization_config", None) is not None:
        raise ConfigError(f"target.fp8: {target.info.path} is quantised already; leave target.fp8 out")
    found, last = 0, LastInput()
    for layer in target.layers:
        linears = [(name, module) for name, module in layer.named_modules() if type(module) is nn.Linear]
        for name, linear in linears:
            aligned = linear.in_features % ALIGNED == linear.out_features % ALIGNED == 0
            parent, _, own = name.rpartition(".")
            if aligned and own not in KEPT:
                setattr(layer.get_submodule(parent), own, Fp8Linear(linear, last))
                found += 1
    if not found:
        raise ConfigError(f"target.fp8: {target.info.path} has no linear layers that run in fp8")
    log.info("%d linear layers run in fp8", found)
    return found
