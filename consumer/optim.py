"""AdamW on float32 masters, beside compute copies of the weights in the trainer's dtype; and the learning rate.

All parameters lie in one flat tensor, matrices first. So a step's gradients are one float32 buffer: micro-batches add
to it as backward produces them, ranks reduce it in one call, its norm and the clipping are one kernel each, and
publishing the new weights is one cast.

    compute (bf16)  --backward-->  gradient of a parameter, added to `gradients` (fp32) and dropped
    gradients       --all-reduce, one division by Σ w, clip-->  AdamW on `masters` (fp32)  --cast-->  compute
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..common.errors import PacelineError
from ..common.runfile import OptimizerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


def lr_at(step: int, total: int, settings: OptimizerSettings) -> float:
    """Learning rate of step `step` (0 .. total-1).

    Linear warm-up over the first `warmup` share of the steps. Then constant; or cosine down to final_lr·lr at the
    last step; or wsd: constant, and linear over the last `decay` share of the steps to final_lr·lr.
    From step `total` on: the last step's.
    """
    warm = round(settings.warmup * total)
    step = min(step, total - 1)
    if step < warm:
        return settings.lr * (step + 1) / warm
    falling = total - warm if settings.schedule == "cosine" else round(settings.decay * total)
    falling = max(1, min(falling, total - warm))
    done = (step - (total - falling) + 1) / falling  # 1 at the last step
    if settings.schedule == "constant" or done <= 0:
        return settings.lr
    share = (1 + math.cos(math.pi * done)) / 2 if settings.schedule == "cosine" else 1 - done
    return settings.lr * (settings.final_lr + (1 - settings.final_lr) * share)


class MasterWeights:
    """A module's parameters as float32 masters, float32 gradients and compute copies, each one flat tensor.

    Takes the module over: its parameters become views of the compute copies, and a hook on each moves what backward
    leaves in `.grad` into `gradients`. With float32 compute the copies are the masters themselves.
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype, device: torch.device | str) -> None:
        named = sorted(module.named_parameters(), key=lambda item: item[1].ndim == 1)
        self.matrices = sum(p.numel() for _, p in named if p.ndim > 1)
        self.masters = torch.cat([p.detach().reshape(-1).float() for _, p in named]).to(device)
        self.gradients = torch.zeros_like(self.masters)
        self.compute = self.masters if dtype == torch.float32 else self.masters.to(dtype)
        self._shapes = {name: p.shape for name, p in named}
        parts = zip(named, self.views(self.compute).values(), self.views(self.gradients).values(), strict=True)
        for (_, parameter), weights, gradient in parts:
            parameter.data = weights
            parameter.register_post_accumulate_grad_hook(_adder(gradient))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor of this layout by parameter name."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = zip(self._shapes.items(), flat.split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    @torch.no_grad()
    def publish(self) -> None:
        """Casts the masters into the compute copies."""
        if self.compute is not self.masters:
            self.compute.copy_(self.masters)


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return add


class MasterAdamW:
    """Decoupled AdamW (Loshchilov & Hutter) over `MasterWeights`; weight decay on matrices alone."""

    def __init__(self, weights: MasterWeights, settings: OptimizerSettings) -> None:
        self._weights, self._clip = weights, settings.clip
        self._moments = {name: torch.zeros_like(weights.masters) for name in MOMENTS}
        self._count = torch.zeros((), device=weights.masters.device)
        self._adamw = torch.optim.AdamW(
            [{"params": [], "weight_decay": decay} for decay in (settings.weight_decay, 0.0)],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        sizes = [weights.matrices, len(weights.masters) - weights.matrices]
        flats = (weights.masters, weights.gradients, *self._moments.values())
        parts = zip(self._adamw.param_groups, *(flat.split(sizes) for flat in flats), strict=True)
        for group, master, gradient, *moments in parts:
            parameter = nn.Parameter(master)
            parameter.grad = gradient
            group["params"].append(parameter)
            self._adamw.state[parameter] = dict(zip(MOMENTS, moments, strict=True)) | {"step": self._count.clone()}

    @torch.no_grad()
    def step(self, lr: float, weight: float) -> float:
        """Divides the summed gradients by `weight` (the step's Σ w over all ranks), clips them, updates and publishes.

        Returns the gradient's norm before clipping. When it is not finite nothing is changed but the gradients, which
        are cleared in every case. One wait for the device.
        """
        gradients = self._weights.gradients
        norm = float(torch.linalg.vector_norm(gradients)) / weight
        if math.isfinite(norm):
            gradients.mul_(min(1.0, self._clip / (norm + 1e-6)) / weight)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._count += 1
            self._weights.publish()
        gradients.zero_()
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """ "exp_avg.<parameter>", "exp_avg_sq.<parameter>" (float32) and "step" []; views, not copies."""
        state = {
            f"{moment}.{name}": part
            for moment, flat in self._moments.items()
            for name, part in self._weights.views(flat).items()
        }
        return state | {"step": self._count}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the values of a `state_dict`. PacelineError names tensors that are missing, unknown or misshapen."""
        copy_strictly(self.state_dict(), state, "optimiser state")
        for entry in self._adamw.state.values():
            entry["step"].copy_(self._count)


@torch.no_grad()
def copy_strictly(into: Mapping[str, Tensor], values: Mapping[str, Tensor], what: str) -> None:
    """Copies every tensor, or none: PacelineError names the first missing, unknown or misshapen ones."""
    wrong = [f"{name} missing" for name in into.keys() - values.keys()]
    wrong += [f"{name} unexpected" for name in values.keys() - into.keys()]
    both = into.keys() & values.keys()
    wrong += [
        f"{n}: {list(values[n].shape)}, not {list(into[n].shape)}" for n in both if values[n].shape != into[n].shape
    ]
    if wrong:
        raise PacelineError(f"{what} does not fit this drafter: {'; '.join(sorted(wrong)[:4])}")
    for name, tensor in into.items():
        tensor.copy_(values[name])
