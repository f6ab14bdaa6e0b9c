"""Where the rows of a packed batch lie, for the operators of a layer that must keep rows apart.

A model's own code does not pass this down to them, so `Target` sets it for the time of a pass. Attention is in
varlen.py, Gated DeltaNet in delta_net.py.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["Boundaries", "Unpackable", "boundaries", "current", "on_device"]


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
        return on_device(self.on_host, self.device)

    @cached_property
    def on_host(self) -> Tensor:
        """int32 [R+1] on the CPU."""
        return torch.tensor(self.cu_seqlens, dtype=torch.int32)

    @cached_property
    def longest(self) -> int:
        return max(end - start for start, end in pairwise(self.cu_seqlens))


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A GPU is not waited for: a copy from pageable memory would return only when the GPU had
    done all that it was given before, and so keep a forward from being launched while another runs."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


boundaries: ContextVar[Boundaries | None] = ContextVar("paceline_boundaries", default=None)


def current() -> Boundaries:
    """Those of the pass that runs."""
    if (bounds := boundaries.get()) is None:
        raise RuntimeError("packed rows run only inside Target.forward_states")
    return bounds
