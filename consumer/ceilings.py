"""What this machine can do at best: `python -m paceline.consumer.ceilings DEVICE DTYPE` prints it as JSON.

The rates that the benchmarks' shares are shares of, measured in a process of its own at the start of each call.
"""

import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from ..common.measuring import doing, measured

SIZE = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrices
PRODUCTS = {"cpu": 4, "cuda": 20}  # one after another in a round
ROUNDS = 5


def measure(device: str, dtype: str) -> dict[str, str | float]:
    """matmul_tflops of square matrices in the dtype that is computed in; names of device and versions beside it."""
    doing("matmul rate")
    where, kind = torch.device(device), computed_in(dtype, device)
    return {
        "matmul_tflops": matmul_tflops(where, kind),
        "matmul_size": SIZE[where.type],
        "dtype": str(kind).removeprefix("torch."),
        "device": device_name(where),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def computed_in(dtype: str, device: str) -> torch.dtype:
    """`compute_dtype`, whose module is imported only where it decides: it loads transformers, which takes seconds."""
    if torch.device(device).type != "cpu":
        return getattr(torch, dtype)
    from ..common.loading import compute_dtype

    return compute_dtype(dtype, device)


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Of the best round; rounds are long enough that launches do not count."""
    size, products = SIZE[device.type], PRODUCTS[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(1 + ROUNDS):  # the first warms up, and never is the best
        wait(device)
        begun = time.perf_counter()
        for _ in range(products):
            torch.mm(a, b, out=out)
        wait(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 * products / best / 1e12


def wait(device: torch.device) -> None:
    """Until all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{found or platform.processor()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    measured(lambda: measure(sys.argv[1], sys.argv[2]))
