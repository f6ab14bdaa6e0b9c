"""A target spread over several GPUs (`workers.gpus_per_worker`): one process a GPU, of which the worker is the first.

Each process holds its share of every weight by transformers' tensor parallel plan; what a layer hands on is whole on
all of them, so the worker alone writes the ring. Before each pass the worker tells the others what to run (`Pass`), and
they run just that: they decide nothing, so no difference between processes can part them.

They meet in a file store in the run directory (gloo for what to run, NCCL between GPUs, both over loopback). The kernel
kills the others when the worker dies; if one of them dies, the worker says so and ends at once, since its GPU may be
waiting for the dead one for ever. Its ring stays, as after any death.

    python -m paceline.producer.shards     one of the others; its job comes on standard input
"""

import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..common import paths
from ..common.boundaries import Unpackable
from ..common.devices import shard_devices
from ..common.errors import PacelineError, first_line, how_it_ended
from ..common.runfile import RunFile
from ..common.target import Pass, Target

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "paceline.producer.shards")
_TIMEOUT = timedelta(days=7)  # a worker may wait for work for long; deaths are seen by other means
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MODES = ("packed", "padded", "alone")


class Shards:
    """The other processes, as the worker has them. `load_target` gives each side its share."""

    def __init__(self, run: RunFile, device: str) -> None:
        self._devices = shard_devices(run, device)
        self._folder = _meeting_place(paths.run_dir(run.name))
        self._closing = threading.Event()
        self._processes = [self._start(run, rank) for rank in range(1, len(self._devices))]
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"shard {rank}", daemon=True).start()
        join(self._folder, 0, self._devices)

    def _start(self, run: RunFile, rank: int) -> "subprocess.Popen[bytes]":
        job = {"run": run.model_dump(), "rank": rank, "devices": self._devices, "folder": str(self._folder)}
        # A group of its own: Ctrl-C is for the worker.
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=2, process_group=0)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(json.dumps({**job, "parent": os.getpid()}).encode())
        return process

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if not self._closing.is_set():
            how = how_it_ended(code)
            log.error("the process of %s, share %d of the target, %s", self._devices[rank], rank, how)
            logging.shutdown()
            os._exit(code if code == 78 else 1)  # the main thread may be waiting for a GPU that waits for the dead one

    def announce(self, one: Pass) -> None:
        """Tells the others what the worker runs next."""
        send(one)

    def close(self) -> None:
        """Ends the others."""
        self._closing.set()
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _meeting_place(folder: Path) -> Path:
    """A new folder for the store; those of workers that were killed are removed."""
    for old in folder.glob("shards-*"):
        if not Path("/proc", old.name.partition("-")[2]).exists():
            shutil.rmtree(old, ignore_errors=True)
    place = folder / f"shards-{os.getpid()}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    return place


def join(folder: Path, rank: int, devices: list[str]) -> None:
    """Joins the group of a target's processes; transformers finds the rest in the environment."""
    index = int(devices[rank].partition(":")[2] or 0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(index), WORLD_SIZE=str(len(devices)))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    gpu = devices[rank].startswith("cuda")
    if gpu:
        torch.cuda.set_device(index)
    store = dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
        str(folder / "store"), len(devices)
    )
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=len(devices), timeout=_TIMEOUT)


# What to run, from the worker to the others


def send(one: Pass) -> None:
    hidden = next((states.shape[-1] for states in one.given.values()), 0)
    given = [len(one.given), hidden]
    shape = [*one.input_ids.shape, one.deepest, _MODES.index(one.mode), len(one.cu_seqlens), *given]
    dist.broadcast(torch.tensor(shape), 0)
    dist.broadcast(_flat(one), 0)
    for states in one.given.values():
        dist.broadcast(states.float().cpu().contiguous(), 0)


def receive(device: torch.device) -> Pass:
    shape = torch.zeros(7, dtype=torch.long)
    dist.broadcast(shape, 0)
    rows, length, deepest, mode, bounds, given, hidden = shape.tolist()
    flat = torch.zeros(2 * rows * length + bounds + given, dtype=torch.long)
    dist.broadcast(flat, 0)
    ids, positions, offsets, layers = flat.split([rows * length, rows * length, bounds, given])
    packed = _MODES[mode] == "packed"
    states = {}
    for layer in layers.tolist():
        values = torch.zeros(rows, length, hidden)
        dist.broadcast(values, 0)
        states[layer] = values  # a layer takes its own to the device
    return Pass(
        _MODES[mode],
        deepest,
        ids.view(rows, length).to(device),
        positions.view(rows, length).to(device) if packed else None,
        offsets.tolist(),
        states,
    )


def _flat(one: Pass) -> Tensor:
    positions = torch.zeros_like(one.input_ids) if one.position_ids is None else one.position_ids
    parts = [one.input_ids.reshape(-1).cpu(), positions.reshape(-1).cpu(), torch.tensor(one.cu_seqlens)]
    parts.append(torch.tensor(list(one.given)))
    return torch.cat([part.long() for part in parts])


def load_target(run: RunFile, path: str, last_layer: int | None, device: str, shards: int) -> Target:
    """The run's target, or this process's share of it."""
    return Target.load(
        path,
        dtype=run.target.dtype,
        device=device,
        last_layer=last_layer,
        trust_remote_code=run.target.trust_remote_code,
        shards=shards,
    )


# One of the others


def main(job: Mapping[str, Any]) -> int:
    """Joins, loads its share and follows the worker until it is killed."""
    from ..common.target_info import deepest_layer, resolve_layer_ids, target_info

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != job["parent"]:
        return 1
    run, rank, devices = RunFile.model_validate(job["run"]), job["rank"], job["devices"]
    if run.workers.threads:
        torch.set_num_threads(run.workers.threads)
    join(Path(job["folder"]), rank, devices)
    info = target_info(run.target.path, run.target.trust_remote_code)
    last_layer = deepest_layer(run, info, resolve_layer_ids(run, info))
    target = load_target(run, info.path, last_layer, devices[rank], len(devices))
    while True:
        one = receive(target.device)
        try:
            target.follow(one)
        except torch.OutOfMemoryError:
            raise
        except (Unpackable, RuntimeError, ValueError, TypeError) as error:  # so does the worker, and tries another way
            log.info("share %d of the target: %s", rank, first_line(error))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the worker ends this process once it has ended itself
    try:
        sys.exit(main(json.load(sys.stdin)))
    except PacelineError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
