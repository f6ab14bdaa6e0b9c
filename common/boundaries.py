"""Where the rows of a packed batch lie, for the operators of a layer that must keep rows apart.

A model's own code does not pass this down to them, so `Target` sets it for the time of a pass. Attention is in
target.py, Gated DeltaNet in delta_net.py.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["Boundaries", "Unpackable", "boundaries", "current"]


class Unpackable(Exception):
    """The model's layers need something that packed rows do not give them."""


@dataclass
class Boundaries:
    cu_seqlens: Sequence[int]  # R+1 offsets
    device: torch.device
    windows: set[int | None] = field(default_factory=set)  # the sliding windows that layers asked for

    @cached_property
    def offsets(self) -> Tensor:
        """int32 [R+1] on the device."""
        return torch.tensor(self.cu_seqlens, dtype=torch.int32, device=self.device)

    @cached_property
    def on_host(self) -> Tensor:
        """int32 [R+1] on the CPU."""
        return torch.tensor(self.cu_seqlens, dtype=torch.int32)

    @cached_property
    def longest(self) -> int:
        return max(end - start for start, end in pairwise(self.cu_seqlens))


boundaries: ContextVar[Boundaries | None] = ContextVar("paceline_boundaries", default=None)


def current() -> Boundaries:
    """Those of the pass that runs."""
    if (bounds := boundaries.get()) is None:
        raise RuntimeError("packed rows run only inside Target.forward_states")
    return bounds
