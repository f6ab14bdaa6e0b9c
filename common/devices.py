"""Which device each worker and rank runs on, decided without torch.

`CUDA_VISIBLE_DEVICES` is obeyed: indices in "cuda:N" count the visible GPUs. A process that it shows a single GPU uses
that one, whatever number the run file gives: so a worker can be put on a GPU that the run file does not know.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .errors import ConfigError

if TYPE_CHECKING:
    from .runfile import RunFile


class Devices(NamedTuple):
    workers: list[str]
    ranks: list[str]


def installed_gpus() -> int:
    """GPUs of this machine, by the driver's folder, its device files, or nvidia-smi."""
    for folder, pattern in ((Path("/proc/driver/nvidia/gpus"), r"[0-9a-fA-F]+:.*"), (Path("/dev"), r"nvidia[0-9]+")):
        if folder.is_dir() and (found := sum(bool(re.fullmatch(pattern, name.name)) for name in folder.iterdir())):
            return found
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0  # a driver that cannot list its GPUs has none to use
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def gpu_count() -> int:
    """GPUs that this process's children would see."""
    installed = installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not installed or visible is None:
        return installed
    count = 0
    for name in (part.strip() for part in visible.split(",")):
        if not name or name == "-1" or (name.isdigit() and int(name) >= installed):
            break  # CUDA ignores everything from the first invalid entry on
        count += 1
    return count


def device_label(device: str) -> str:
    """A device as others should read it: "cuda:0 (GPU 6)" where CUDA_VISIBLE_DEVICES makes GPU 6 this process's first.

    Of a UUID only its first part is given.
    """
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    index = int(device.partition(":")[2] or 0)
    if not device.startswith("cuda") or index >= len(visible) or visible[index] in ("", str(index)):
        return device
    name = visible[index]
    return f"{device} (GPU {name})" if name.isdigit() else f"{device} ({name[:12]})"


def assign_devices(
    run: "RunFile", gpus: int | None = None, workers: int | None = None, avoid: Iterable[str] = ()
) -> Devices:
    """The device of each worker and each rank.

    workers: place so many; those beyond `workers.count` begin again. avoid: (first) devices of workers that were given
    others than the run file's, which ranks take last.

    What the run file names is used in turn. Otherwise GPUs go one to each worker and one to each rank; where they are
    too few, ranks keep one each as long as the workers have one to share, then they share too. Without GPUs, cpu.
    A worker of several GPUs has the one named and those after it (`shard_devices`).
    """
    each = run.workers.gpus_per_worker
    single = False
    if gpus is None:
        gpus = gpu_count()
        single = gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    names = [f"cuda:{index}" for index in range(gpus)]
    count = run.workers.count if workers is None else workers
    places, ranks = list(run.workers.devices), list(run.trainer.devices)
    if not places:
        free = [name for name in names if name not in ranks] or names
        spare = len(free) - (0 if ranks else run.trainer.ranks)
        places = free[: each * max(1, min(run.workers.count, spare // each)) : each] or ["cpu"]
    if not ranks:
        taken = {name for first in places for name in shard_devices(run, first)}
        last = {name for first in avoid for name in shard_devices(run, first)}
        left = sorted((name for name in names if name not in taken), key=lambda name: name in last)
        ranks = left[: run.trainer.ranks] or names[-1:] or ["cpu"]
    if single:
        places, ranks = ([name if name == "cpu" else "cuda:0" for name in side] for side in (places, ranks))
    return Devices(list(islice(cycle(places), count)), list(islice(cycle(ranks), run.trainer.ranks)))


def check_ranks(ranks: Sequence[str]) -> None:
    """ConfigError for two ranks on one GPU: NCCL, which adds their gradients up, takes one."""
    for device, count in Counter(ranks).items():
        if count > 1 and device != "cpu":
            raise ConfigError(
                f"trainer.ranks = {len(ranks)}: {device} would have {count} of them, and a GPU takes one: lower "
                "trainer.ranks, or give each a GPU (trainer.devices)"
            )


def rank_devices(run: "RunFile", avoid: Iterable[str] = ()) -> list[str]:
    """`assign_devices`' of the ranks. ConfigError for two on a GPU."""
    ranks = assign_devices(run, avoid=avoid).ranks
    check_ranks(ranks)
    return ranks


def spare_devices(run: "RunFile", taken: Iterable[str], gpus: int | None = None) -> list[str]:
    """Where further workers of a live run go, as long as there are any: GPUs that no rank and none of its workers have.

    taken: the (first) device of each worker that is there. None where the run file names the workers' devices.
    """
    if run.workers.devices:
        return []
    gpus = gpu_count() if gpus is None else gpus
    taken = list(taken)
    ranks = assign_devices(run, gpus, avoid=taken).ranks
    used = {*ranks, *(name for first in taken for name in shard_devices(run, first))}
    free, found = {index for index in range(gpus) if f"cuda:{index}" not in used}, []
    for index in range(gpus):
        group = set(range(index, index + run.workers.gpus_per_worker))
        if group <= free:
            free -= group
            found.append(f"cuda:{index}")
    return found


def shard_devices(run: "RunFile", first: str) -> list[str]:
    """The devices of a worker that begins at `first`: that GPU and those after it; cpu as often."""
    if first == "cpu":
        return [first] * run.workers.gpus_per_worker
    index = int(first.partition(":")[2] or 0)
    return [f"cuda:{number}" for number in range(index, index + run.workers.gpus_per_worker)]


def visible_gpu(device: str) -> int | None:
    """The number that nvidia-smi has for a device: that of "cuda:1" is 5 if CUDA_VISIBLE_DEVICES is 4,5. None for a CPU
    and for a GPU that is named by its UUID."""
    if not device.startswith("cuda"):
        return None
    index = int(device.partition(":")[2] or 0)
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if index >= len(visible) or not visible[index]:
        return index
    return int(visible[index]) if visible[index].isdigit() else None
