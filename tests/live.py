"""A live run on one machine without torch: the real supervisor, trainer, feed and worker loop on stamped states.

Started by tests as `live.py up RUN.toml`, which runs the other commands below with this file. What each does is set by
environment variables that hold JSON: LIVE_WORKER (`StampSource`; "fail": {"2": 78} ends worker 2 with that code),
STANDIN_LEARNER (`SumLearner`), LIVE_POLICY (`Policy`).
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from paceline.common import paths
from paceline.common.dataset import tokenizer_digest
from paceline.common.errors import PacelineError
from paceline.common.fingerprint import run_fingerprint
from paceline.common.inspect import RingInfo, read_rings
from paceline.common.locks import held_by
from paceline.common.progress import PlainView
from paceline.common.record import RecordMeta
from paceline.common.rows import Rows, RowsWriter
from paceline.common.runfile import RunFile, load, to_toml
from paceline.common.target_info import TargetInfo, resolve_layer_ids
from paceline.common.telemetry import read_metrics
from paceline.common.up import Policy, up
from paceline.producer.source import Filled
from standins import HIDDEN, LAYERS, SocketGroup, SumLearner, stamp

THIS = Path(__file__)
PATIENCE = 300.0  # seconds that anything may take on a loaded machine


def stand_in_info(folder: str) -> TargetInfo:
    return TargetInfo(
        path=folder,
        model_type="stamp",
        architectures=(),
        hidden_size=HIDDEN,
        num_layers=4,
        vocab_size=512,
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
        identity="stamp",
    )


class StampSource:
    """`seconds`: of each record; `warm`: of the warm-up."""

    def __init__(self, folder: str, seconds: float = 0.0, warm: float = 0.0) -> None:
        self.info = stand_in_info(folder)
        self._seconds, self._warm = seconds, warm

    def register(self, address: int, length: int) -> None:
        time.sleep(self._warm)

    def begin(
        self,
        tokens: np.ndarray,
        cu_seqlens: np.ndarray,
        out: memoryview,
        progress: Callable[[], None],
        landed: Any = None,
    ) -> Filled:
        time.sleep(self._seconds)
        states = stamp(tokens, cu_seqlens, len(LAYERS), HIDDEN)
        np.frombuffer(out, np.float32).reshape(states.shape)[:] = states
        return Filled(True)

    def settle(self) -> None:
        return

    def close(self) -> None:
        return


# The processes --------------------------------------------------------------------------------------------------------


def command(verb: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, str(THIS), verb, *arguments]


def run_up(run_path: str) -> int:
    policy = Policy(**json.loads(os.environ.get("LIVE_POLICY", "{}")))
    return up(run_path, command=command, policy=policy, view=PlainView())


def run_trainer(run: RunFile, resume: str | None) -> int:
    from paceline.consumer import trainer
    from paceline.consumer.describe import RunFacts

    def facts(run: RunFile, alive: object) -> RunFacts:
        assert run.data.rows is not None
        info = stand_in_info(run.target.path)
        layers = list(resolve_layer_ids(run, info))
        fields = run_fingerprint(run, Rows.open(run.data.rows), info, layers).fields
        return RunFacts(run.data.rows, dict(fields), layers, HIDDEN)

    rank = os.environ.get("LIVE_RANK", "rank")
    return trainer.main(run, resume, describe=facts, rank_command=[sys.executable, str(THIS), rank])


@dataclass
class StoppingLearner(SumLearner):
    """`stops`: [step, rank, signal, mark]: in the sums over ranks of that step the rank gets the signal, unless file
    `mark` says that it had it before. From step `gate_step` on nothing is trained until file `gate` is there."""

    stops: list[tuple[int, int, str, str]] = field(default_factory=list)
    gate: str = ""
    gate_step: int = 0
    slow: dict[str, float] = field(default_factory=dict)  # rank -> seconds that each of its records takes more
    rank: int = 0

    def train_record(self, meta: RecordMeta, states: memoryview, epoch: int, done: float = 0.0) -> None:
        while self.gate and self.steps >= self.gate_step and not Path(self.gate).exists():
            time.sleep(0.02)
        time.sleep(self.slow.get(str(self.rank), 0.0))
        super().train_record(meta, states, epoch, done)

    def reduce(self, group: Any) -> None:
        for step, rank, how, mark in self.stops:
            if (step, rank) == (self.steps, self.rank) and not Path(mark).exists():
                Path(mark).touch()
                os.kill(os.getpid(), signal.Signals[how])
        group.all_reduce(np.zeros(1000))


def run_rank(over_gloo: bool) -> int:
    from paceline.consumer import rank
    from paceline.consumer.group import Group, LocalGroup
    from paceline.consumer.job import RankJob

    options = json.loads(os.environ.get("STANDIN_LEARNER", "{}"))

    def group(job: RankJob) -> Group:
        if over_gloo:
            return rank.join_group(job)
        return LocalGroup() if job.world == 1 else SocketGroup(job.rank, job.world, Path(job.store))

    def learner(job: RankJob, run: RunFile, rows: Rows) -> StoppingLearner:
        return StoppingLearner(rank=job.rank, **options)

    return rank.main(learner, group)


def run_worker(run: RunFile, index: int, device: str | None) -> int:
    from paceline.producer import worker

    options = json.loads(os.environ.get("LIVE_WORKER", "{}"))
    if (code := options.pop("fail", {}).get(str(index))) is not None:
        print("out of memory", flush=True)
        return code
    return worker.main(run, index, device=device, source=StampSource(run.target.path, **options))


def main(arguments: list[str]) -> int:
    verb, *rest = arguments
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if verb in ("rank", "rank-gloo"):
        return run_rank(verb == "rank-gloo")
    if verb == "up":
        return run_up(rest[0])
    options = dict(zip(rest[1::2], rest[2::2], strict=True))
    try:
        run = load(rest[0])
        match verb:
            case "consumer":
                return run_trainer(run, options.get("--resume"))
            case "producer":
                return run_worker(run, int(options["--worker"]), options.get("--device"))
    except PacelineError as error:
        print(f"paceline: {error}", flush=True)
        return error.exit_code
    return 0  # prepare


# The tests' side ------------------------------------------------------------------------------------------------------


def live_rows(folder: Path, count: int, seed: int = 0) -> Rows:
    """As standins.make_rows, for any number of rows."""
    draw = np.random.default_rng(seed)
    with RowsWriter(folder) as writer:
        for _ in range(count):
            length = int(draw.integers(8, 25))
            mask = (np.arange(length) >= length // 2).astype(np.uint8)
            writer.add(draw.integers(4, 500, length).astype(np.int32), mask)
        target = folder.with_name("target")
        target.mkdir()
        (target / "tokenizer.json").write_text("{}")  # the stand-in has none, and its rows are as good as any
        writer.finish({"tokenizer": tokenizer_digest(str(target)), "vocabulary": "", "target": str(target)})
    return Rows.open(folder)


def live_settings(folder: Path, rows: int = 200) -> dict[str, Any]:
    """A run of about rows / 3 batches, one step each two."""
    return {
        "name": "live",
        "output": str(folder / "out"),
        "target": {"path": str(folder / "target"), "dtype": "float32", "layer_ids": list(LAYERS)},
        "data": {"rows": str(live_rows(folder / "rows", rows).folder), "max_length": 24, "held_out": 6},
        "stream": {"token_budget": 64, "slots": 3, "prefetch": 2, "ring_dir": str(folder / "shm")},
        "workers": {"count": 1, "devices": ["cpu"]},
        "trainer": {"batches_per_step": 2, "epochs": 1, "dtype": "float32", "devices": ["cpu"]},
        "drafter": {"mask_token_id": 3},
        "checkpoint": {"every_steps": 5, "every_minutes": None},
        "evaluation": {"every_steps": 10},
        "logging": {"log_every": 5},
    }


@dataclass
class Live:
    """One run and its supervisor."""

    folder: Path
    settings: dict[str, Any]
    process: "subprocess.Popen[bytes] | None" = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> RunFile:
        return RunFile.model_validate(self.settings)

    @property
    def path(self) -> Path:
        return self.folder / "run.toml"

    def start(self, **options: Any) -> None:
        """`options`: LIVE_WORKER and such, as JSON or text."""
        self.path.write_text(to_toml(self.run))
        given = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
        self.environment |= given
        with (self.folder / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                command("up", [str(self.path)]),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | self.environment,
            )

    def log(self) -> str:
        return (self.folder / "up.log").read_text()

    def ended(self, code: int = 0) -> None:
        assert self.process is not None
        assert self.process.wait(PATIENCE) == code, self.log()

    def wait_for(self, what: Callable[[], Any]) -> Any:
        """Until `what` is true, while the supervisor lives."""
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE
        while not (found := what()):
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, f"it does not come to pass:\n{self.log()}"
            time.sleep(0.02)
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """Of the training steps."""
        file = Path(self.run.output) / "metrics.jsonl"
        return [line for line in read_metrics(file) if line["kind"] == "train"] if file.exists() else []

    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics()]

    def step_reached(self, step: int) -> None:
        self.wait_for(lambda: max(self.steps(), default=0) >= step)

    def rings(self) -> list[RingInfo]:
        return read_rings(paths.ring_dir(self.run))

    def ring_names(self) -> list[str]:
        """Whatever is in the run's folder of rings."""
        folder = paths.ring_dir(self.run)
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def pids(self) -> dict[str, int]:
        return {ring.worker: ring.pid for ring in self.rings() if ring.alive}

    def gated(self, step: int) -> dict[str, Any]:
        """A learner that trains no step from `step` on until `open` is called."""
        return {"gate": str(self.folder / "gate"), "gate_step": step}

    def open(self) -> None:
        (self.folder / "gate").touch()

    def wait_for_children(self) -> None:
        """Until all that a killed supervisor left has ended."""
        deadline = time.monotonic() + PATIENCE
        while self.pids() or held_by(paths.consumer_lock(self.run)):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
