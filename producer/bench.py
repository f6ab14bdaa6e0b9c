"""The target alone: `python -m paceline.producer.bench RUN DEVICE SECONDS` prints its tokens/s as JSON.

The worker's own source of states writes the run's batches into page-locked memory, with as many in the making as a
worker has; no ring, no feed.
"""

import mmap
import sys
import time
from collections import deque

import numpy as np
import torch

from ..common.batch import BatchId, Kind
from ..common.dataset import prepared_rows
from ..common.measuring import doing, measured
from ..common.plan import plan_from
from ..common.record import IN_THE_MAKING, states_bytes
from ..common.runfile import load
from ..common.target_info import resolve_layer_ids, target_info
from .capture import TargetSource
from .source import Filling

BATCHES = 16  # different batches, run in turn
WARM = 3


def measure(run_path: str, device: str, seconds: float) -> dict[str, float]:
    """tokens_per_s over the batches that ran in `seconds`, after a few that warm up."""
    run = load(run_path)
    info = target_info(run.target.path, run.target.trust_remote_code)
    layers = resolve_layer_ids(run, info)
    rows = prepared_rows(run)
    plan = plan_from(run, rows)
    doing("target alone: loading, checking and compiling")
    source = TargetSource.load(run, info, layers, device)
    doing("target alone")
    planes = len(layers) + run.target.last_hidden
    size = states_bytes(planes, run.stream.token_budget, info.hidden_size, run.record_dtype)
    with mmap.mmap(-1, IN_THE_MAKING * size) as buffer:
        view = torch.frombuffer(buffer, dtype=torch.uint8)
        view.zero_()
        source.register(view.data_ptr(), len(buffer))
        batches = []
        for index in range(min(BATCHES, plan.batches(0))):
            taken = [rows.row(int(row)).tokens for row in plan.rows(BatchId(Kind.TRAIN, 0, index))]
            offsets = np.cumsum([0, *(len(tokens) for tokens in taken)]).astype(np.int32)
            batches.append((np.concatenate(taken).astype(np.int32), offsets))
        making: deque[tuple[int, Filling]] = deque()
        done, tokens, begun, started = 0, 0, 0, time.perf_counter()
        while done < WARM + 2 or time.perf_counter() - started < seconds:
            ids, offsets = batches[begun % len(batches)]
            first = begun % IN_THE_MAKING * size
            past = first + states_bytes(planes, len(ids), info.hidden_size, run.record_dtype)
            making.append((len(ids), source.begin(ids, offsets, memoryview(buffer)[first:past], lambda: None)))
            begun += 1
            if len(making) < IN_THE_MAKING:
                continue
            count, filling = making.popleft()
            filling.finish()
            done, tokens = done + 1, tokens + count
            if done == WARM:
                tokens, started = 0, time.perf_counter()
        rate = tokens / (time.perf_counter() - started)
        source.close()
        making.clear()
        del view
    return {"tokens_per_s": rate, "batches": done}


if __name__ == "__main__":
    measured(lambda: measure(sys.argv[1], sys.argv[2], float(sys.argv[3])))
