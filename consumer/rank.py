"""One trainer rank as a process: `python -m paceline.consumer.rank`, started by the trainer's main process alone.

It dies with the main process, holds its rank's lock for life, joins the other ranks, loads the checkpoint and runs the
loop (training.py). Imports no torch by itself.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ..common import paths
from ..common.errors import PacelineError
from ..common.locks import FileLock, held_by
from ..common.plan import plan_from
from ..common.rows import Rows
from ..common.runfile import RunFile
from .check import RecordCheck
from .checkpoint import load_state
from .group import Group, LocalGroup, TorchGroup
from .job import RankJob, Reports
from .source import RecordSource
from .stop import StopFlag, StopRequested
from .training import FIRST_PHASE, Boundary, Ending, Learner, Training

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; exit if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


MakeLearner = Callable[[RankJob, RunFile], Learner]
MakeGroup = Callable[[RankJob], Group]


def dflash_learner(job: RankJob, run: RunFile) -> Learner:
    """The DFlash drafter on this rank's device; the first to import torch."""
    from ..common.target_info import target_info
    from .learner import DFlashLearner

    return DFlashLearner(
        run, target_info(run.target.path), job.layer_ids, device=job.device, rank=job.rank, world=job.world
    )


def join_group(job: RankJob) -> Group:
    return LocalGroup() if job.world == 1 else TorchGroup(job.rank, job.world, Path(job.store), job.device)


def main(make_learner: MakeLearner = dflash_learner, make_group: MakeGroup = join_group) -> int:
    """The rank process. Returns its exit code."""
    flag = StopFlag()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's: it tells its ranks
    flag.install(signal.SIGTERM)
    job = RankJob.from_json(sys.stdin.read())
    die_with_parent(job.parent)
    reports = Reports(job.reports)
    reports.doing("starting")
    try:
        ending = _run(job, reports, flag, make_learner, make_group)
    except StopRequested:
        ending = Ending("stopped")
    except PacelineError as error:
        print(f"paceline: rank {job.rank}: {error}", file=sys.stderr, flush=True)
        reports.end("failed", str(error))
        return error.exit_code
    reports.end(ending.kind, ending.why)
    return 1 if ending.kind == "failed" else 0


def _run(job: RankJob, reports: Reports, flag: StopFlag, make_learner: MakeLearner, make_group: MakeGroup) -> Ending:
    run = RunFile.model_validate(job.run)
    lock = FileLock(paths.rank_lock(run, job.rank), f"rank {job.rank} of run {run.name}")
    if not lock.acquire():
        raise PacelineError(f"rank {job.rank} of run {run.name} is running already: {held_by(lock.path)}")
    with flag.interruptible():
        rows = Rows.open(job.rows)
        plan = plan_from(run, rows)
        boundary = Boundary(FIRST_PHASE)
        group = make_group(job)
        learner = make_learner(job, run)
        if job.checkpoint is not None:
            boundary = Boundary.of(load_state(Path(job.checkpoint)))
            learner.load(Path(job.checkpoint))
    source = RecordSource(
        rank=job.rank,
        trainer=job.trainer,
        address=paths.ranks_address(run),
        ring_dir=paths.ring_dir(run),
        check=RecordCheck(plan, rows, job.expected),
        phase=boundary.phase,
        next_phase=plan.next_phase,
        skip_limit=run.trainer.skip_limit,
        on_map=getattr(learner, "map_ring", lambda address, size: None),
        on_unmap=getattr(learner, "unmap_ring", lambda address: None),
    )
    source.start()
    try:
        ending = Training(job, run, plan, learner, group, source, reports, flag, boundary).run()
    finally:
        source.close()
    if ending.kind == "finished":
        group.close()  # after a stop others may be gone, and NCCL would wait for them
    return ending


if __name__ == "__main__":
    sys.exit(main())
