"""One trainer rank as a process: `python -m paceline.consumer.rank`, started by the trainer's main process alone.

It dies with the main process, holds its rank's lock for life, joins the other ranks, loads the checkpoint and runs the
loop (training.py). Imports no torch by itself.
"""

import ctypes
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..common import faults, paths
from ..common.batch import Kind
from ..common.densest import Densest
from ..common.errors import ConfigError, PacelineError
from ..common.locks import FileLock, held_by
from ..common.numa import bind_near
from ..common.plan import Plan, plan_from
from ..common.rows import Rows
from ..common.runfile import RunFile
from ..common.timeline import Steps
from .check import RecordCheck
from .checkpoint import load_state
from .group import Group, LocalGroup, TorchGroup
from .job import RankJob, Reports
from .source import Phase, Record, RecordSource
from .stop import StopFlag, StopRequested
from .training import Boundary, Learner, Training

if TYPE_CHECKING:
    from .losses import Summary

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; exit if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


class DFlash:
    """A `DFlashLearner` as the loop calls it: with the step's learning rate, metrics by name, and rings page-locked."""

    def __init__(self, job: RankJob, run: RunFile, rows: Rows):
        moments = [time.monotonic()]
        paths.prepare_torch()
        if run.stream.numa == "auto" and (placed := bind_near(job.device)):
            log.info("rank %d: %s", job.rank, placed)
        import torch

        from ..common.target_info import target_info
        from . import learner, losses, optim, rehearsal, transfer

        moments.append(time.monotonic())
        if run.trainer.threads:
            torch.set_num_threads(run.trainer.threads)
        self._device, self._settings = torch.device(job.device), run.optimizer
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._locked: set[int] = set()  # addresses of page-locked rings
        self._profile = Steps.from_environment(f"rank{job.rank}")
        self._torch, self._lr_at, self._summary, self._transfer = torch, optim.lr_at, losses.Summary.of, transfer
        info = target_info(run.target.path, run.target.trust_remote_code)
        resumed = None if job.checkpoint is None else Path(job.checkpoint)
        self._learner = learner.build_learner(
            run, info, job.layer_ids, device=self._device, used_token=rows.used_token, resumed=resumed
        )
        moments.append(time.monotonic())
        if self._device.type == "cuda":
            rehearsal.rehearse(self._learner, Densest(run, rows))
        moments.append(time.monotonic())
        self._rank, self._took = job.rank, [end - start for start, end in pairwise(moments)]
        if resumed is None:
            self._say_ready()
        self.train_record, self.eval_record = self._learner.train_record, self._learner.eval_record
        self.prepare, self.gaps = self._learner.prepare, self._learner.gaps
        self.sums, self.reduce, self.discard = self._learner.sums, self._learner.reduce, self._learner.discard
        self.reduce_seconds = self._learner.reduce_seconds
        self.snapshot = self._learner.snapshot

    def restore(self, folder: Path) -> None:
        begun = time.monotonic()
        self._learner.restore(folder)
        self._took.append(time.monotonic() - begun)
        self._say_ready()

    def _say_ready(self) -> None:
        parts = zip(self._took, ("libraries", "weights", "a rehearsal", "the checkpoint"), strict=False)
        log.info(
            "rank %d is ready: %s", self._rank, ", ".join(f"{seconds:.1f} s for {part}" for seconds, part in parts)
        )

    def step(self, total: NDArray[np.float64], step: int, total_steps: int) -> tuple[bool, dict[str, Any]]:
        lr = self._lr_at(step, total_steps, self._settings)
        result = self._learner.step(total, lr)
        if self._profile is not None:
            self._profile.step_done()
        return result.finite, {"lr": lr, "grad_norm": result.grad_norm, **_metrics(result.summary)}

    def eval_metrics(self, total: NDArray[np.float64]) -> dict[str, Any]:
        return _metrics(self._summary(total))

    def drafter_config(self) -> dict[str, Any]:
        return self._learner.config.to_dict()

    def peak_memory(self) -> tuple[int, int]:
        if self._device.type == "cuda":
            cuda = self._torch.cuda
            return cuda.max_memory_allocated(self._device), cuda.max_memory_reserved(self._device)
        resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return resident, resident

    def map_ring(self, address: int, size: int) -> None:
        """Page-lock the ring, from the source's thread; without it copies work, but slower."""
        if self._device.type != "cuda":
            return
        try:
            with self._torch.cuda.device(self._device):  # else a context is made on the first GPU as well
                self._transfer.register_host(address, size)
            self._locked.add(address)
        except PacelineError as error:
            log.warning("%s; copies from this ring are slower", error)

    def unmap_ring(self, address: int, size: int) -> None:
        self._learner.forget(address, size)
        if self._device.type != "cuda":
            return
        with self._torch.cuda.device(self._device):
            self._torch.cuda.synchronize()  # a record that was left in the middle may still be on its way
            if address in self._locked:
                self._locked.remove(address)
                self._transfer.unregister_host(address, size)


def _metrics(summary: "Summary") -> dict[str, Any]:
    values = {
        "loss": summary.loss,
        "acc": summary.accuracy,
        "acc_slot": list(summary.accuracy_per_slot),
        "tau": summary.tau,
        "anchors": summary.blocks,
    }
    return values if summary.tau_chain is None else values | {"tau_chain": summary.tau_chain}


MakeLearner = Callable[[RankJob, RunFile, Rows], Learner]
MakeGroup = Callable[[RankJob], Group]


def join_group(job: RankJob) -> Group:
    if job.world == 1:
        return LocalGroup()
    paths.prepare_torch()  # it imports torch, before the learner does
    return TorchGroup(job.rank, job.world, Path(job.store), job.device)


def main(make_learner: MakeLearner = DFlash, make_group: MakeGroup = join_group) -> int:
    """The rank process. Returns its exit code."""
    flag = StopFlag()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's: it tells its ranks
    flag.install(signal.SIGTERM)
    job = RankJob.from_json(sys.stdin.read())
    die_with_parent(job.parent)
    reports = Reports(job.reports)
    reports.doing("starting")
    try:
        return _run(job, reports, flag, make_learner, make_group)
    except StopRequested:  # while it was loading
        reports.end("stopped", "")
        return 0
    except PacelineError as error:
        reports.end("crashed", str(error))  # the main process says it, once
        return error.exit_code


def _run(job: RankJob, reports: Reports, flag: StopFlag, make_learner: MakeLearner, make_group: MakeGroup) -> int:
    run = RunFile.model_validate(job.run)
    lock = FileLock(paths.rank_lock(run, job.rank), f"rank {job.rank} of run {run.name}")
    if not lock.acquire():
        raise PacelineError(f"rank {job.rank} of run {run.name} is running already: {held_by(lock.path)}")
    faults.point("rank.locked")
    with flag.interruptible():
        rows = Rows.open(job.rows)
        plan = plan_from(run, rows)
        boundary = Boundary(None)
        group = make_group(job)
        learner = make_learner(job, run, rows)
        if job.checkpoint is not None:
            boundary = Boundary.of(load_state(Path(job.checkpoint)))
            learner.restore(Path(job.checkpoint))
        boundary.phase = None if job.phase is None else (Kind(job.phase[0]), job.phase[1])
    faults.point("rank.restored")
    source = RecordSource(
        rank=job.rank,
        trainer=job.trainer,
        address=paths.ranks_address(run),
        ring_dir=paths.ring_dir(run),
        check=RecordCheck(plan, rows, job.expected),
        phase=boundary.phase,
        next_phase=plan.next_phase,
        skip_limit=run.trainer.skip_limit,
        on_map=learner.map_ring,
        on_unmap=learner.unmap_ring,
        on_ready=lambda record, phase: _prepare(learner, plan, record, phase),
    )
    source.start()
    try:
        ending = Training(job, run, plan, learner, group, source, reports, flag, boundary).run()
    finally:
        source.close()
    reports.end(ending.kind, ending.why)
    if ending.kind == "finished":
        group.close()  # after a stop others may be gone, and NCCL would wait for them
    return {"failed": PacelineError.exit_code, "unfit": ConfigError.exit_code}.get(ending.kind, 0)


def _prepare(learner: Learner, plan: Plan, record: Record, phase: Phase) -> None:
    kind, number = phase
    learner.prepare(record.meta, record.states, plan.epoch_of(number) if kind is Kind.TRAIN else None)


if __name__ == "__main__":
    sys.exit(main())
