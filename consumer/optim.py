"""AdamW or Muon on float32 masters, beside compute copies of the weights in the trainer's dtype; and the learning rate.

All parameters lie in one flat tensor, matrices first. So a step's gradients are one float32 buffer: micro-batches add
to it as backward produces them, ranks reduce it in one call, its norm and the clipping are one kernel each, and
publishing the new weights is one cast.

    compute (bf16)  --backward-->  gradient of a parameter, added to `gradients` (fp32) and dropped
    gradients       --all-reduce, one division by Σ w, clip-->  update of `masters` (fp32)  --cast-->  compute
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..common import footprint
from ..common.errors import PacelineError
from ..common.runfile import OptimizerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class Reducer(Protocol):
    """The group of ranks (group.py)."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def all_reduce(self, values: Tensor) -> None:
        """Sums a tensor over the ranks, in place."""
        ...


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
        self.published: list[Callable[[], None]] = []  # called whenever the compute copies have changed
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

    def joined(self, names: Sequence[str]) -> nn.Parameter:
        """One parameter on the memory of matrices that lie side by side here, [Σ rows, columns]; backward through it
        adds to their gradients. ValueError for others."""
        order = list(self._shapes)
        first = order.index(names[0])
        shapes = [self._shapes[name] for name in names]
        if order[first : first + len(names)] != list(names) or len({shape[1:] for shape in shapes}) > 1:
            raise ValueError(f"{', '.join(names)} do not lie side by side")
        start = sum(self._shapes[name].numel() for name in order[:first])
        size = sum(shape.numel() for shape in shapes)
        both = (flat[start : start + size].view(-1, shapes[0][1]) for flat in (self.compute, self.gradients))
        weights, gradient = both
        parameter = nn.Parameter(weights)
        parameter.register_post_accumulate_grad_hook(_adder(gradient))
        return parameter

    @torch.no_grad()
    def publish(self) -> None:
        """Casts the masters into the compute copies, and tells `published`."""
        if self.compute is not self.masters:
            self.compute.copy_(self.masters)
        for told in self.published:
            told()


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    add_to = fused_add() if total.is_cuda and total.ndim > 1 else None

    def add(parameter: Tensor) -> None:
        part = parameter.grad
        assert part is not None
        if add_to is not None and part.is_contiguous() and part.dtype != total.dtype:
            add_to(total, part)
        else:
            total.add_(part)
        parameter.grad = None

    return add


def fused_add() -> Callable[[Tensor, Tensor], None]:
    """Imported on first use: a CPU run never needs Triton."""
    from .kernels import add_to

    return add_to


class MasterOptimizer(ABC):
    """A step on `MasterWeights`: the mean gradient, its clipping, the update, the new weights published."""

    def __init__(self, weights: MasterWeights, settings: OptimizerSettings) -> None:
        self._weights, self._settings = weights, settings
        self._count = torch.zeros((), device=weights.masters.device)

    @torch.no_grad()
    def step(self, lr: float, weight: float, group: Reducer | None = None) -> float:
        """Divides the summed gradients by `weight` (the step's Σ w over all ranks), clips them, updates and publishes.

        Returns the gradient's norm before clipping. When it is not finite nothing is changed but the gradients, which
        are cleared in every case. One wait for the device. group: ranks that do the same, with the same gradients, and
        may share the work; what it raises leaves everything but the gradients as it was.
        """
        gradients = self._weights.gradients
        norm = float(torch.linalg.vector_norm(gradients)) / weight
        if math.isfinite(norm):
            gradients.mul_(min(1.0, self._settings.clip / (norm + 1e-6)) / weight)
            self._update(lr, group)
            self._count += 1
            self._weights.publish()
        gradients.zero_()
        return norm

    @abstractmethod
    def _update(self, lr: float, group: Reducer | None) -> None:
        """Moves the masters by the mean, clipped gradients."""

    def state_dict(self) -> dict[str, Tensor]:
        """Float32 tensors by "<kind>.<parameter>", and "step" []; views, not copies."""
        return {"step": self._count}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the values of a `state_dict`. PacelineError names tensors that are missing, unknown or misshapen."""
        copy_strictly(self.state_dict(), state, "optimiser state")


class MasterAdamW(MasterOptimizer):
    """Decoupled AdamW (Loshchilov & Hutter, 1711.05101); weight decay on matrices alone. State: `MOMENTS`."""

    def __init__(self, weights: MasterWeights, settings: OptimizerSettings) -> None:
        super().__init__(weights, settings)
        self._moments = {name: torch.zeros_like(weights.masters) for name in MOMENTS}
        parts = [slice(0, weights.matrices), slice(weights.matrices, None)]
        flats = {"masters": weights.masters, "gradients": weights.gradients, **self._moments}
        groups = [({name: flat[part] for name, flat in flats.items()}) for part in parts]
        self._adamw = _fused_adamw(groups, [settings.weight_decay, 0.0], settings, self._count)

    def _update(self, lr: float, group: Reducer | None) -> None:
        _adamw_step(self._adamw, lr)

    def state_dict(self) -> dict[str, Tensor]:
        state = {
            f"{moment}.{name}": part
            for moment, flat in self._moments.items()
            for name, part in self._weights.views(flat).items()
        }
        return state | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        _set_count(self._adamw, self._count)


class MasterMuon(MasterOptimizer):
    """Muon (Jordan et al., 2024) for the matrices, AdamW for the vectors, one learning rate for both.

        buffer   <- momentum · buffer + (1 - momentum) · gradient
        update    = orthogonalised(gradient + momentum · (buffer - gradient))                  (Nesterov)
        matrix   <- (1 - lr · weight_decay) · matrix - lr · 0.2 · sqrt(max(rows, columns)) · update

    The factor gives an update AdamW's usual root mean square (Liu et al., 2502.16982), so that AdamW's learning rates
    carry over. State: "momentum.<matrix>" and AdamW's moments of the vectors.

    For a large drafter this is more arithmetic than forward and backward of a full row. Ranks then share it: each
    orthogonalises some of the matrices, and their updates are added up like gradients.
    """

    def __init__(self, weights: MasterWeights, settings: OptimizerSettings) -> None:
        super().__init__(weights, settings)
        self._momentum = torch.zeros_like(weights.masters[: weights.matrices])
        self._masters, self._updates = weights.views(weights.masters), weights.views(weights.gradients)
        self._groups = same_shapes({name: part.shape for name, part in self._masters.items() if part.ndim > 1})
        tail = slice(weights.matrices, None)
        self._moments = {name: torch.zeros_like(weights.masters[tail]) for name in MOMENTS}
        vectors = {"masters": weights.masters[tail], "gradients": weights.gradients[tail], **self._moments}
        self._adamw = _fused_adamw([vectors], [0.0], settings, self._count)

    def _update(self, lr: float, group: Reducer | None) -> None:
        keep, flat = self._settings.momentum, self._weights.gradients[: self._weights.matrices]
        # Nesterov's mean from the buffer as it was: it need not change before the other ranks have answered.
        flat.lerp_(self._momentum, keep**2)
        large = self._weights.matrices >= footprint.MUON_SHARED
        found = self._from_all_ranks(group) if large and group is not None and group.world > 1 else None
        self._momentum.lerp_(flat, 1 / (1 + keep))
        self._weights.masters[: self._weights.matrices].mul_(1 - lr * self._settings.weight_decay)
        for names in self._groups:
            updates = self._orthogonalised(names) if found is None else [found[name] for name in names]
            by = -lr * 0.2 * math.sqrt(max(updates[0].shape))
            add_all: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
            add_all([self._masters[name] for name in names], updates, alpha=by)
        _adamw_step(self._adamw, lr)

    def _orthogonalised(self, names: list[str]) -> Sequence[Tensor]:
        updates = [self._updates[name] for name in names]
        return orthogonalised(torch.stack(updates) if len(updates) > 1 else updates[0][None]).unbind()

    def _from_all_ranks(self, group: Reducer) -> dict[str, Tensor]:
        """Every matrix's update, each made by one rank; of the dtype that they are made in."""
        masters = self._weights.masters
        everyone = torch.zeros_like(masters, dtype=torch.bfloat16 if masters.is_cuda else None)
        found = self._weights.views(everyone)
        for names, owner in zip(self._groups, self._owners(group.world), strict=True):
            if owner == group.rank:
                for name, update in zip(names, self._orthogonalised(names), strict=True):
                    found[name].copy_(update)
        group.all_reduce(everyone)
        return found

    def _owners(self, world: int) -> list[int]:
        """Of each group of matrices: the rank with least to do so far, the dearest group first."""
        costs = [len(names) * footprint.muon_flops(*self._masters[names[0]].shape) for names in self._groups]
        load, owners = [0.0] * world, [0] * len(costs)
        for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
            owners[number] = load.index(min(load))
            load[owners[number]] += costs[number]
        return owners

    def state_dict(self) -> dict[str, Tensor]:
        names = self._weights.views(self._weights.masters)
        matrices = [name for name, part in names.items() if part.ndim > 1]
        vectors = [name for name, part in names.items() if part.ndim == 1]
        state = _named(self._momentum, "momentum", matrices, names)
        for moment, flat in self._moments.items():
            state |= _named(flat, moment, vectors, names)
        return state | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        _set_count(self._adamw, self._count)


def build_optimizer(weights: MasterWeights, settings: OptimizerSettings) -> MasterOptimizer:
    """The optimiser of a run file (`optimizer.name`)."""
    return {"adamw": MasterAdamW, "muon": MasterMuon}[settings.name](weights, settings)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of Jordan's Muon: steep at 0, singular values end in about 0.7 to 1.2


GROUP = 2**25  # elements of matrices that are orthogonalised together, if one alone has no more


def same_shapes(shapes: Mapping[str, torch.Size]) -> list[list[str]]:
    """Names in groups of one shape. One by one, small matrices would leave a GPU waiting for the host: a draft layer
    has seven, and each takes twenty kernels."""
    kinds: dict[torch.Size, list[str]] = {}
    for name, shape in shapes.items():
        kinds.setdefault(shape, []).append(name)
    groups = []
    for shape, names in kinds.items():
        most = max(1, GROUP // shape.numel())
        groups += [names[i : i + most] for i in range(0, len(names), most)]
    return groups


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrices with equal singular values, roughly: `steps` of a quintic Newton-Schulz iteration on each of
    [n, r, c].

    In bfloat16 on CUDA, whose rounding the iteration bears, else in float32. Zero stays zero.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices.float()
    x = x.mT if tall else x
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype, memory_format=torch.contiguous_format)


def _fused_adamw(
    groups: list[dict[str, Tensor]], decays: list[float], settings: OptimizerSettings, count: Tensor
) -> torch.optim.AdamW:
    """torch's fused AdamW over flat pieces, each with its masters, gradients and moments."""
    adamw = torch.optim.AdamW(
        [
            {"params": [nn.Parameter(group["masters"])], "weight_decay": d}
            for group, d in zip(groups, decays, strict=True)
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    for made, group in zip(adamw.param_groups, groups, strict=True):
        (parameter,) = made["params"]
        parameter.grad = group["gradients"]
        adamw.state[parameter] = {name: group[name] for name in MOMENTS} | {"step": count.clone()}
    return adamw


def _adamw_step(adamw: torch.optim.AdamW, lr: float) -> None:
    for group in adamw.param_groups:
        group["lr"] = lr
    adamw.step()


def _set_count(adamw: torch.optim.AdamW, count: Tensor) -> None:
    for entry in adamw.state.values():
        entry["step"].copy_(count)


def _named(flat: Tensor, kind: str, names: list[str], shaped: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of a flat tensor that holds the parameters `names` one after another."""
    parts = flat.split([shaped[name].numel() for name in names])
    return {f"{kind}.{name}": part.view(shaped[name].shape) for name, part in zip(names, parts, strict=True)}


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
