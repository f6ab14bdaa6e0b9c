"""What the ranks of one trainer tell each other: small objects and sums, in the same order on every rank.

`LocalGroup` is one rank. `TorchGroup` is torch.distributed over a file store in the run directory: gloo for objects and
host arrays, NCCL for gradients on GPUs. A store is used by one trainer incarnation only, so that a rank that a dead
trainer left behind can never join. torch is imported by `TorchGroup` alone.
"""

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..common.errors import PacelineError, first_line

if TYPE_CHECKING:
    import torch

# The main process ends ranks that hang (trainer.hang_seconds), and knows why they wait; this only bounds a leak.
_TIMEOUT = timedelta(days=7)


class GroupError(PacelineError):
    """Another rank is gone, or the ranks do not do the same thing."""


class Group(Protocol):
    """Collectives are called by all ranks in the same order; each returns the same on all."""

    rank: int
    world: int

    def all_gather(self, value: Any) -> list[Any]:
        """Each rank's `value` (anything JSON can hold), by rank. Raises GroupError if a rank is gone."""
        ...

    def all_reduce(self, values: Any) -> None:
        """Sum a numpy array or a torch tensor over the ranks, in place. Raises GroupError if a rank is gone."""
        ...

    def close(self) -> None: ...


class LocalGroup:
    """The only rank."""

    rank = 0
    world = 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def all_reduce(self, values: Any) -> None:
        return

    def close(self) -> None:
        return


class TorchGroup:
    """M ranks over torch.distributed; blocks until all have joined.

    store: a path that no earlier trainer has used. device: of this rank's gradients.
    """

    def __init__(self, rank: int, world: int, store: Path, device: str):
        import torch
        import torch.distributed as dist

        self.rank, self.world = rank, world
        self._torch, self._dist = torch, dist
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=_TIMEOUT)
        self._gpu = None
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(device)
            self._gpu = dist.new_group(backend="nccl", timeout=_TIMEOUT)

    def all_gather(self, value: Any) -> list[Any]:
        data = json.dumps(value, separators=(",", ":")).encode()
        sizes = [self._torch.zeros(1, dtype=self._torch.int64) for _ in range(self.world)]
        self._call(self._dist.all_gather, sizes, self._torch.tensor([len(data)]))
        widest = max(int(size) for size in sizes)
        mine = np.zeros(widest, np.uint8)
        mine[: len(data)] = np.frombuffer(data, np.uint8)
        pieces = [self._torch.zeros(widest, dtype=self._torch.uint8) for _ in range(self.world)]
        self._call(self._dist.all_gather, pieces, self._torch.from_numpy(mine))
        return [json.loads(bytes(p.numpy()[: int(n)])) for p, n in zip(pieces, sizes, strict=True)]

    def all_reduce(self, values: "np.ndarray | torch.Tensor") -> None:
        tensor = self._torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        self._call(self._dist.all_reduce, tensor, group=self._gpu if tensor.is_cuda else None)

    def _call(self, collective: Any, *arguments: Any, **options: Any) -> None:
        try:
            collective(*arguments, **options)
        except RuntimeError as error:  # what gloo and NCCL raise when a peer's connection breaks
            raise GroupError(f"another rank is gone: {first_line(error)}") from error

    def close(self) -> None:
        self._dist.destroy_process_group()
