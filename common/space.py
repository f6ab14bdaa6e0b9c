"""Bytes: how many can still be written (a tmpfs holds no more than the memory that is left), and as text."""

import os
import sys
from pathlib import Path


def free_bytes(folder: Path) -> int:
    """What can be written in `folder`; on a tmpfs that is no more than the memory that is left."""
    system = os.statvfs(folder)
    room = system.f_bavail * system.f_frsize if system.f_blocks else sys.maxsize  # 0: a tmpfs without a limit
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == name and rest.split()[0] == "tmpfs":
            return min(room, free_memory())
    return room


def free_memory() -> int:
    amounts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(amounts[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))


def size_text(size: float) -> str:
    """Three digits and a unit: 950 B, 1.13 MiB, 1000 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1023.5 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
