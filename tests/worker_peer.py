"""A worker with a stand-in for the target: `worker_peer.py RUN.json INDEX [SECONDS]`; also imported by test_worker.py.

SECONDS is how long each record takes.
"""

import json
import logging
import sys
import time
from pathlib import Path

import numpy as np
from paceline.common.errors import PacelineError
from paceline.common.runfile import RunFile
from paceline.common.target_info import TargetInfo
from paceline.producer import worker
from paceline.producer.source import Filled

HIDDEN, LAYERS, VOCAB = 16, 8, 100


def stand_in_info(folder):
    return TargetInfo(
        path=str(folder),
        model_type="none",
        architectures=(),
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        vocab_size=VOCAB,
        intermediate_size=32,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        identity="stand-in",
    )


def expected_states(tokens, planes):
    """float32 [planes, T, H]: 1000 plane + token + h / H."""
    parts = 1000 * np.arange(planes)[:, None, None], np.asarray(tokens)[None, :, None], np.arange(HIDDEN) / HIDDEN
    return (parts[0] + parts[1] + parts[2]).astype(np.float32)


class StandIn:
    def __init__(self, folder, planes, seconds=0.0):
        self.info = stand_in_info(folder)
        self.planes = planes
        self.seconds = seconds
        self.mapping = None
        self.closed = False

    def register(self, address, length):
        self.mapping = (address, length)

    def begin(self, tokens, cu_seqlens, out, progress, landed=None):
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(0.01)
        states = np.frombuffer(out, np.float32).reshape(self.planes, len(tokens), HIDDEN)
        states[:] = expected_states(tokens, self.planes)
        progress()
        return Filled(bool(np.isfinite(states).all()))

    def settle(self):
        return

    def close(self):
        self.closed = True


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    run = RunFile.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    source = StandIn(run.target.path, len(run.target.layer_ids or ()), seconds)
    try:
        sys.exit(worker.main(run, int(sys.argv[2]), source=source))
    except PacelineError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
