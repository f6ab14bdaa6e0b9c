"""A worker with a stand-in for the target: `worker_peer.py RUN.json INDEX [SECONDS]`; also imported by test_worker.py.

SECONDS is how long each record takes; with "deferred" records are only complete once they are settled.
"""

import json
import logging
import sys
import threading
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


class Deferred:
    """Runs like a GPU: records are begun at once and complete when `land` says so. `log`: what was asked of it."""

    def __init__(self, folder, planes):
        self.info = stand_in_info(folder)
        self.planes = planes
        self.begun = []
        self.log = []
        self.at_once = False  # land in `begin`
        self.infinite = set()  # numbers of records with a state that is not finite
        self.launching = {}  # number of a record: what its launch does, told `progress`
        self.at_settle = lambda: None

    def register(self, address, length):
        pass

    def begin(self, tokens, cu_seqlens, out, progress, landed=None):
        number = len(self.begun)
        self.log.append(f"begin {number}")
        record = DeferredRecord(self, number, tokens, out, landed)
        self.begun.append(record)
        if launch := self.launching.get(number):
            launch(progress)
        if self.at_once:
            record.land()
        return record

    def land(self, number):
        self.begun[number].land()

    def settle(self):
        self.at_settle()
        waiting = [record for record in self.begun if not record.landed.is_set()]
        for record in waiting:
            record.land()
        logging.info("%d records were waited for", len(waiting))

    def close(self):
        pass


class DeferredRecord:
    def __init__(self, source, number, tokens, out, tell):
        self.source, self.number, self.tokens, self.out, self.tell = source, number, tokens, out, tell
        self.landed, self.waited_for = threading.Event(), threading.Event()

    def land(self):
        states = np.frombuffer(self.out, np.float32).reshape(self.source.planes, len(self.tokens), HIDDEN)
        states[:] = expected_states(self.tokens, self.source.planes)
        if self.number in self.source.infinite:
            states[0, 0, 0] = np.inf
        self.tell(0, len(self.out))
        del self.out, self.tell
        self.landed.set()

    def done(self):
        return self.landed.is_set()

    def finish(self):
        self.waited_for.set()
        while not self.landed.wait(0.02):  # in steps, so that a signal is handled
            pass
        self.source.log.append(f"finish {self.number}")
        return self.number not in self.source.infinite


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    run = RunFile.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    planes, how = len(run.target.layer_ids or ()), sys.argv[3] if len(sys.argv) > 3 else "0"
    source = Deferred(run.target.path, planes) if how == "deferred" else StandIn(run.target.path, planes, float(how))
    try:
        sys.exit(worker.main(run, int(sys.argv[2]), source=source))
    except PacelineError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
