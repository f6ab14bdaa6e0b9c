"""What rows give that run alone by a model's own attention, and whether another way to run them gives the same.

`Target.self_check` (target.py) takes the reference and chooses by it; this module only compares.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .target import Target

# Largest error of what a layer adds to its input, relative to that: a mean over tokens.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
ROUNDED = 0.03  # of a layer's output is allowed to be wrong likewise: it is rounded, however little a layer adds
ROUTED = 0.25  # of a mixture's tokens, those with the largest errors, may have gone to other experts
# How far off quantised layers may be another way, relative to plain ones: roundings of its own are as large and
# independent, so that it is 1 but for chance, and faults of 0.75 of that error are seen. Besides a tenth of the
# tolerance, for roundings of the dtype itself where quantising moves the states by less.
QUANTISED, BESIDES = 1.25, 0.1


class Reference(NamedTuple):
    """What a way to run the layers is compared with: rows alone. By layer: its input and output [T, H], on the host,
    and the error allowed.

    A layer gets the reference's input, whatever the layers before it made of the rows. So errors do not add up: after
    dozens of layers in bfloat16 two right ways can be as far from each other as a wrong one, most of all where experts
    are chosen.
    """

    rows: list[Tensor]
    inputs: dict[int, Tensor]
    outputs: dict[int, Tensor]
    limits: dict[int, float]
    routed: bool  # the target is a mixture of experts
    device: torch.device  # that compares

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return list(pairwise([0, *accumulate(map(len, self.rows))]))

    @property
    def given(self) -> dict[int, Tensor]:
        """The inputs of all layers but the first, whose own are the tokens' embeddings."""
        return {layer: states for layer, states in self.inputs.items() if layer > 0}

    def errors(self, outputs: Mapping[int, Tensor]) -> dict[int, float]:
        """Of each layer, the largest of rows."""
        return self._compared(outputs, self.outputs, self.bounds, ROUTED if self.routed else 0.0)

    def moved(self, outputs: Mapping[int, Tensor], before: Mapping[int, Tensor]) -> dict[int, float]:
        """Of each layer, by how much later rows differ from before, when the first row was another one. They have the
        same inputs and run the same way, so that none of their tokens has a reason to go to other experts."""
        return self._compared(outputs, before, self.bounds[1:], 0.0)

    def _compared(
        self,
        outputs: Mapping[int, Tensor],
        wanted: Mapping[int, Tensor],
        bounds: Sequence[tuple[int, int]],
        spared: float,
    ) -> dict[int, float]:
        found = {}
        for layer, output in outputs.items():
            states = [part.to(self.device).float() for part in (output, wanted[layer], self.inputs[layer])]
            rows = (tuple(part[start:end] for part in states) for start, end in bounds)
            found[layer] = _largest([_error(one, other, given, spared) for one, other, given in rows])
        return found


def _error(output: Tensor, wanted: Tensor, given: Tensor, spared: float) -> float:
    """Of a row [t, H]: the largest of the means over the first 4, last 8 and all tokens, without the share of them that
    is spared, those with the largest errors.

    A leak from the row before shows at the start (a convolution) or everywhere, a wrong sliding window at the end.
    """
    added = (wanted - given).norm(dim=-1) + ROUNDED * wanted.norm(dim=-1)
    each = (output - wanted).norm(dim=-1) / added.clamp_min(1e-12)
    if not bool(each.isfinite().all()):
        return math.nan
    parts = (each[:4], each[-8:], each)
    return _largest([float(part.sort().values[: len(part) - int(spared * len(part))].mean()) for part in parts])


def _largest(errors: Sequence[float]) -> float:
    """NaN if one is: `max` would take whatever stands before it."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def take_alone(target: "Target", rows: list[Tensor]) -> Reference:
    """The reference, in mode alone: what layers make of rows, one at a time."""
    taken: dict[int, list[Tensor]] = {layer: [] for layer in range(len(target.layers))}

    def taking(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def take(module: nn.Module, args: Any, kwargs: Any) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            taken[layer].append(states.reshape(-1, target.info.hidden_size).to("cpu", copy=True))

        return take

    handles = [target.layers[n].register_forward_pre_hook(taking(n), with_kwargs=True) for n in taken]
    try:
        outputs = run_layers(target, rows)
    finally:
        for handle in handles:
            handle.remove()
    inputs = {layer: torch.cat(parts) for layer, parts in taken.items()}
    limits = dict.fromkeys(outputs, TOLERANCE.get(target.dtype, 1e-3))
    return Reference(rows, inputs, outputs, limits, target.info.experts > 0, target.device)


def run_layers(
    target: "Target", rows: list[Tensor], given: Mapping[int, Tensor] = MappingProxyType({})
) -> dict[int, Tensor]:
    """Outputs [T, H] of all layers in the current mode, on the host; given: see `forward_states`."""
    offsets, layers = [0, *accumulate(map(len, rows))], list(range(len(target.layers)))
    whole = torch.empty(len(layers), offsets[-1], target.info.hidden_size, dtype=target.dtype)

    def keep(plane: int, states: Tensor, first: int) -> None:
        whole[plane, first : first + len(states)] = states

    target.forward_states(torch.cat(rows), offsets, layers, keep, given=given)
    return dict(zip(layers, whole, strict=True))


def states_fault(target: "Target", reference: Reference) -> str | None:
    """What is wrong with what layers make of the reference's inputs; None if it is right."""
    rows, given = reference.rows, reference.given
    outputs = run_layers(target, rows, given)
    for layer, error in reference.errors(outputs).items():
        if not error <= (limit := reference.limits[layer]):
            return f"what layer {layer} adds differs from a row's alone by {error:.2g} (at most {limit:.2g})"
    # Other tokens, and states that are neither the same where they stood nor the same together.
    first = len(rows[0])
    others = {n: torch.cat([-states[:first].roll(1, 0), states[first:]]) for n, states in given.items()}
    moved = run_layers(target, [(rows[0] + 1) % target.info.vocab_size, *rows[1:]], others)
    limit = TOLERANCE.get(target.dtype, 1e-3)  # also where quantised: a token is rounded by itself
    for layer, error in reference.moved(moved, outputs).items():
        if not error <= limit:
            return f"the first row moves what layer {layer} adds to later rows by {error:.2g} (at most {limit:g})"
    return None
