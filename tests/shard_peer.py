"""A worker's source of states in a process of its own: `shard_peer.py RUN.json OUT.npy [kill]` records one batch.

With `kill` it kills the process that has the other share of the target first.
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from paceline.common.runfile import RunFile
from paceline.common.target_info import resolve_layer_ids, target_info
from paceline.producer.capture import TargetSource

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run = RunFile.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    batch = np.load(sys.argv[2])
    tokens, cu_seqlens = batch["tokens"], batch["cu_seqlens"]
    info = target_info(run.target.path)
    source = TargetSource.load(run, info, resolve_layer_ids(run, info), "cpu")
    if sys.argv[3:] == ["kill"]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
        time.sleep(60)  # ended by what watches the other
    found: dict[str, Any] = {"mode": source.mode}
    ways = ("packed", "padded") if source.mode == "packed" else ("padded",)
    for mode in ways:  # the other process is to change with it
        source._target._use(mode)
        out = bytearray(len(run.target.layer_ids or ()) * len(tokens) * info.hidden_size * 4)
        assert source.begin(tokens, cu_seqlens, memoryview(out), lambda: None).finish()
        found[mode] = np.frombuffer(out, np.float32)
    np.savez(sys.argv[2], **found)
    source.close()
