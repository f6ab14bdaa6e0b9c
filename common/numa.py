"""Puts a process, and the memory that it touches first, on the NUMA node of its GPU.

On a machine of several nodes a copy between a GPU and memory of another node crosses the link between them. A worker
binds itself before it makes its ring: pages of a tmpfs are placed where they are first touched, so the ring is near
the worker's GPU, and so are the threads that follow. A rank binds itself before it loads torch. Nothing is bound where
there is one node, where the kernel does not know a GPU's node, or where CPUs of one node have been chosen already.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SYS = Path("/sys")


class Gpu(NamedTuple):
    """As nvidia-smi names it; `pci` as /sys does."""

    number: int
    uuid: str
    pci: str
    name: str


class Choice(NamedTuple):
    """CPUs to run on, or None; and what to say."""

    cpus: frozenset[int] | None
    text: str


def bind_near(device: str, *, root: Path = SYS) -> str:
    """Binds this process, and threads it starts from now on, near `device`; what was done, in words, or nothing."""
    nodes = numa_nodes(root)
    if len(nodes) < 2 or not device.startswith("cuda"):
        return ""
    choice = choose(device, nodes, gpus(), os.sched_getaffinity(0), os.environ.get("CUDA_VISIBLE_DEVICES"), root)
    if choice.cpus is not None:
        try:
            os.sched_setaffinity(0, choice.cpus)
        except OSError as error:
            return f"not bound to a NUMA node: {error.strerror}"
    return choice.text


def choose(
    device: str,
    nodes: dict[int, frozenset[int]],
    gpus: Sequence[Gpu],
    allowed: set[int],
    visible: str | None,
    root: Path,
) -> Choice:
    """Where a process of these allowed CPUs should run. visible: CUDA_VISIBLE_DEVICES; root: /sys."""
    used = {node for node, cpus in nodes.items() if cpus & allowed}
    if len(used) < 2:
        return Choice(None, f"bound to NUMA node {', '.join(map(str, used))} already")
    gpu = gpu_of(device, gpus, visible)
    if gpu is None:
        return Choice(None, f"not bound to a NUMA node: which GPU {device} is cannot be told")
    node = gpu_node(gpu.pci, root)
    if node is None or node not in nodes:
        return Choice(None, f"not bound to a NUMA node: the kernel names none for {device} ({gpu.pci})")
    cpus = frozenset(nodes[node] & allowed)
    if not cpus:
        return Choice(None, f"not bound to NUMA node {node} of {device}: none of its CPUs is allowed")
    return Choice(cpus, f"bound to NUMA node {node} of {device}: {len(cpus)} CPUs")


def numa_nodes(root: Path = SYS) -> dict[int, frozenset[int]]:
    """CPUs of each node that has any."""
    found: dict[int, frozenset[int]] = {}
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        try:
            cpus = parse_cpus((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            found[int(folder.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def parse_cpus(text: str) -> frozenset[int]:
    """ "0-2,8" is {0, 1, 2, 8}. ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def gpu_node(pci: str, root: Path = SYS) -> int | None:
    """The node of a PCI device; None where the kernel does not know it."""
    try:
        node = int((root / "bus/pci/devices" / pci / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def gpus() -> list[Gpu]:
    """By index; none where nvidia-smi does not list them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(listed)


def parse_gpus(listed: str) -> list[Gpu]:
    """Of nvidia-smi's lines; its PCI domains have eight digits, the kernel's four."""
    found: list[Gpu] = []
    for line in listed.splitlines():
        number, *rest = (cell.strip() for cell in line.split(",", 3))
        if len(rest) == 3 and number.isdecimal():
            uuid, pci, name = rest
            found.append(Gpu(int(number), uuid, pci[-12:].lower(), name))
    return sorted(found)


def gpu_of(device: str, gpus: Sequence[Gpu], visible: str | None) -> Gpu | None:
    """The GPU that CUDA calls `device`; None where that cannot be told.

    CUDA counts the fastest GPUs first unless CUDA_DEVICE_ORDER says otherwise: with GPUs of several kinds an index
    tells nothing, a UUID does.
    """
    index = device.partition(":")[2] or "0"
    names = [str(gpu.number) for gpu in gpus]
    if visible is not None:
        names = [part.strip() for part in visible.split(",")]
    if not index.isdecimal() or int(index) >= len(names):
        return None
    name = names[int(index)]
    if name.isdecimal():
        alike = len({gpu.name for gpu in gpus}) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        return next((gpu for gpu in gpus if alike and gpu.number == int(name)), None)
    found = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
    return found[0] if len(found) == 1 else None
