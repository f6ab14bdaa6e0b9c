"""Cross-entropy through a frozen head: ours against Liger's fused linear cross-entropy and plain PyTorch, on CUDA.

    python benchmarks/liger.py [--slots 7680] [--hidden 4096] [--vocabulary 151936] [--rounds 20]

All take the same bfloat16 states [slots, hidden] and head [vocabulary, hidden] to the sum of losses and to its gradient
with respect to the states; the head needs none. Every way's loss and gradient are first compared with plain PyTorch's
in float32, over a few slots. Ways take turns, round by round; memory is the peak above what was there before. Needs
liger-kernel (pip install liger-kernel).
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import torch
from paceline.common.footprint import HEAD_CHUNK
from paceline.consumer.losses import head_cross_entropy
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # states, head, labels to the sum of losses


def plain(states: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((states @ head.T).float(), labels, reduction="sum")


def ours(states: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    weights = torch.ones(len(labels), device=labels.device)
    return head_cross_entropy(states, head, labels, weights, chunk_bytes=HEAD_CHUNK["cuda"]).loss


def liger() -> Way:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        sys.exit(f"liger-kernel does not import ({error}): pip install liger-kernel")
    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda states, head, labels: fused(head, states, labels)


def gradient(way: Way, states: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and its gradient with respect to the states."""
    leaf = states.detach().requires_grad_()
    loss = way(leaf, head, labels)
    (found,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), found


def errors(way: Way, states: Tensor, head: Tensor, labels: Tensor) -> tuple[float, float]:
    """Relative errors of loss and gradient against float32."""
    loss, slope = gradient(plain, states.float(), head.float(), labels)
    found, ours = gradient(way, states, head, labels)
    return float((found - loss).abs() / loss.abs()), float((ours.float() - slope).norm() / slope.norm())


def once(way: Way, states: Tensor, head: Tensor, labels: Tensor) -> tuple[float, int]:
    """Milliseconds of forward and backward, and bytes at the peak above what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    gradient(way, states, head, labels)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), torch.cuda.max_memory_allocated() - before


def main() -> int:
    parser = argparse.ArgumentParser(description="Cross-entropy through a frozen head, against Liger's")
    parser.add_argument("--slots", type=int, default=7680, help="512 anchors x 15 scored slots")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/liger.py needs a CUDA device")
    ways: dict[str, Way] = {"paceline": ours, "Liger": liger(), "PyTorch, all logits": plain}
    generator = torch.Generator("cuda").manual_seed(0)
    states = torch.randn(options.slots, options.hidden, device="cuda", generator=generator).bfloat16()
    head = torch.randn(options.vocabulary, options.hidden, device="cuda", generator=generator).bfloat16()
    head *= options.hidden**-0.5  # logits of a spread of one
    labels = torch.randint(options.vocabulary, (options.slots,), device="cuda", generator=generator)
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    few = {name: errors(way, states[:256], head, labels[:256]) for name, way in ways.items()}
    for turn in range(3 + options.rounds):  # the first three warm up
        for name, way in ways.items():
            measured = once(way, states, head, labels)
            if turn >= 3:
                found[name].append(measured)
    show(options, found, few)
    return 0


def show(
    options: argparse.Namespace, found: dict[str, list[tuple[float, int]]], few: dict[str, tuple[float, float]]
) -> None:
    products = 4 * options.slots * options.hidden * options.vocabulary
    title = f"{options.slots} slots, hidden {options.hidden}, vocabulary {options.vocabulary}"
    table = Table("", title=f"{title}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in ("median ms", "of Liger", "TFLOP/s", "peak MiB", "loss error", "gradient error"):
        table.add_column(name, justify="right")
    liger_ms = median(ms for ms, _ in found["Liger"])
    for name, measured in found.items():
        ms = median(ms for ms, _ in measured)
        table.add_row(
            name,
            f"{ms:.2f}",
            f"{liger_ms / ms:.2f}",
            f"{products / ms / 1e9:.0f}",
            f"{max(peak for _, peak in measured) / 2**20:.0f}",
            f"{few[name][0]:.1e}",
            f"{few[name][1]:.1e}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
