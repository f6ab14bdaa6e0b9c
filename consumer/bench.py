"""The trainer alone: `python -m paceline.consumer.bench RUN DEVICE SECONDS` prints one rank's tokens/s as JSON.

Two of the run's batches lie in page-locked memory with random states; every step trains on one and updates.
"""

import math
import mmap
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ..common.batch import BatchId, Kind
from ..common.dataset import prepared_rows
from ..common.measuring import doing, measured
from ..common.plan import plan_from
from ..common.record import RecordMeta
from ..common.runfile import RunFile, load
from ..common.target_info import resolve_layer_ids, target_info
from .learner import DFlashLearner, build_learner
from .rehearsal import draw_states
from .transfer import register_host, unregister_host

RECORDS = 2
HELD = 2  # records that a rank holds at most: the one in training and the next
WARM = 4


def measure(run_path: str, device: str, seconds: float) -> dict[str, float]:
    """tokens_per_s of steps of one record each, after a few that compile; peak_bytes of the device's memory."""
    run = load(run_path)
    info = target_info(run.target.path, run.target.trust_remote_code)
    layers = resolve_layer_ids(run, info)
    doing("trainer alone: loading")
    learner = build_learner(run, info, layers, device=device)
    metas = [record_meta(run, layers, info.hidden_size, index) for index in range(RECORDS)]
    on_gpu = device.startswith("cuda")
    records = [(meta, memoryview(random_states(meta, on_gpu=on_gpu))) for meta in metas]
    doing("trainer alone: first steps, compiling" if on_gpu else "trainer alone: first steps")
    done, tokens, begun = 0, 0, time.perf_counter()
    compiled = math.inf  # until all has been compiled once
    ahead = Ahead(learner, lambda call: (*records[call % RECORDS], call))
    while done < WARM + 2 or time.perf_counter() - begun < seconds:
        meta, _ = records[done % RECORDS]
        ahead.train_next()
        learner.step(learner.sums(), run.optimizer.lr)  # waits for the device
        done, tokens = done + 1, tokens + len(meta.tokens)
        late = learner.compiled() > compiled and done <= 2 * WARM  # what is compiled late is no step
        if done == WARM or late:
            doing("trainer alone")
            compiled, tokens, begun = learner.compiled(), 0, time.perf_counter()
    rate = tokens / (time.perf_counter() - begun)
    ahead.close()
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return {"tokens_per_s": rate, "steps": done, "peak_bytes": peak}


class Ahead:
    """Trains records as a rank does, which holds two: once one has been read, another thread prepares the record after
    the next. It does not compete with this thread for the interpreter while kernels of a step's start are launched."""

    def __init__(self, learner: DFlashLearner, record: Callable[[int], tuple[RecordMeta, memoryview, int]]) -> None:
        """record: meta, states and epoch of the nth call."""
        self._learner, self._record, self._call = learner, record, 0
        self._thread = ThreadPoolExecutor(1)
        self._preparing: deque[Future[None]] = deque()

    def train_next(self) -> None:
        if len(self._preparing) == HELD:
            self._preparing.popleft().result()
        self._learner.train_record(*self._record(self._call))
        self._preparing.append(self._thread.submit(self._learner.prepare, *self._record(self._call + HELD)))
        self._call += 1

    def close(self) -> None:
        """To be called before the states go."""
        self._thread.shutdown()
        for _, states, _ in map(self._record, range(self._call, self._call + HELD)):
            self._learner.forget(torch.frombuffer(states, dtype=torch.uint8).data_ptr(), len(states))


def record_meta(run: RunFile, layers: list[int], hidden: int, index: int) -> RecordMeta:
    """The description of the run's batch `index` of the first epoch, as a worker would record it."""
    rows = prepared_rows(run)
    ids = plan_from(run, rows).rows(BatchId(Kind.TRAIN, 0, index))
    taken = [rows.row(int(row)) for row in ids]
    return RecordMeta(
        batch=BatchId(Kind.TRAIN, 0, index).pack(),
        row_ids=ids,
        cu_seqlens=np.cumsum([0, *(len(row.tokens) for row in taken)]).astype(np.int32),
        tokens=np.concatenate([row.tokens for row in taken]),
        mask=np.concatenate([row.mask for row in taken]),
        layer_ids=tuple(layers),
        dtype=run.record_dtype,
        hidden_size=hidden,
        last_hidden="none",
        fingerprint=0,
    )


def random_states(meta: RecordMeta, *, on_gpu: bool) -> mmap.mmap:
    """`draw_states` in memory that the GPU can copy from directly."""
    buffer = mmap.mmap(-1, meta.states_bytes)
    with memoryview(buffer) as states:
        draw_states(meta, states)
    if on_gpu:
        register_host(torch.frombuffer(buffer, dtype=torch.uint8).data_ptr(), len(buffer))
    return buffer


def forget_states(buffer: mmap.mmap, *, on_gpu: bool) -> None:
    """To be called before the memory of `random_states` goes: another mapping may come to lie at its address."""
    if on_gpu:
        unregister_host(torch.frombuffer(buffer, dtype=torch.uint8).data_ptr(), len(buffer))


if __name__ == "__main__":
    measured(lambda: measure(sys.argv[1], sys.argv[2], float(sys.argv[3])))
