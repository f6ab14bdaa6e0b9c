"""Both sides on the same cores against each side alone: what the stream costs.

    python benchmarks/pipeline_cpu.py [--steps 16] [--rounds 2] [--target PATH] [--check]

T is the target alone (its forward and the copies into a buffer), D the trainer alone (forward, loss, backward and
optimiser on records that lie in memory), both in tokens/s of the same batches with the same threads. Two programs that
share the cores and lose nothing would run at 1/(1/T + 1/D). The pair is a real run of `paceline up`: one worker, one
rank, rings and ZeroMQ between, timed over its steady steps. Each side is measured before and after each pair, since
machines drift.

`--check` exits 1 unless the pair reaches 0.9 of that.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from paceline.common.demo import DATA, MASK_TOKEN, find_target
from paceline.common.loading import as_dtype
from paceline.common.runfile import RunFile, load
from paceline.common.target_info import resolve_layer_ids, target_info
from paceline.consumer.bench import record_meta
from paceline.consumer.learner import DFlashLearner, build_learner
from paceline.producer.capture import TargetSource
from rich.console import Console
from rich.table import Table

FLOOR = 0.9
WARM_STEPS = 4  # of the pair: the ring is filled and both sides are warm

RUN_FILE = """\
name = "bench-pipeline"
output = "out"
[target]
path = {target}
[data]
files = [{data}]
max_length = 512
held_out = 0
[stream]
token_budget = 1024
slots = 3
order = "strict"
[workers]
devices = ["cpu"]
threads = {threads}
[trainer]
devices = ["cpu"]
threads = {threads}
epochs = 1
max_steps = {steps}
[drafter]
layers = 1
block_size = 8
mask_token_id = {mask}
init_from = "target"
[objective]
anchors_per_token = 0.1
[evaluation]
every_steps = 0
at_end = false
[checkpoint]
every_steps = 100000
"""


class Alone:
    """Each side by itself, in this process, on the run's own batches."""

    def __init__(self, run: RunFile, batches: int) -> None:
        info = target_info(run.target.path)
        self._layers = resolve_layer_ids(run, info)
        self._source = TargetSource.load(run, info, self._layers, "cpu")
        self._learner: DFlashLearner = build_learner(run, info, self._layers, device="cpu")
        metas = [record_meta(run, self._layers, info.hidden_size, index) for index in range(batches)]
        itemsize = as_dtype(run.target.dtype).itemsize
        self._records = [(meta, memoryview(bytearray(int(np.prod(meta.states_shape)) * itemsize))) for meta in metas]
        self.target()  # fills the records' states
        self.trainer()

    def target(self) -> float:
        """Tokens/s of the target's forward into memory."""
        begun = time.perf_counter()
        for meta, states in self._records:
            self._source.begin(meta.tokens, meta.cu_seqlens, states, lambda: None).finish()
        return self._rate(begun)

    def trainer(self) -> float:
        """Tokens/s of training on records in memory, one optimiser step each."""
        begun = time.perf_counter()
        for meta, states in self._records:
            self._learner.train_record(meta, states, 0)
            self._learner.step(self._learner.sums(), 1e-4)
        return self._rate(begun)

    def _rate(self, begun: float) -> float:
        return sum(len(meta.tokens) for meta, _ in self._records) / (time.perf_counter() - begun)


def pair(folder: Path) -> float:
    """Tokens/s of the steady steps of a real run."""
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700, exist_ok=True)
    out = folder / f"out-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "paceline.common.cli", "up", str(folder / "run.toml"), "--set", f"output={out}"]
    result = subprocess.run(
        command, env=os.environ | {"PACELINE_RUNTIME_DIR": str(runtime)}, capture_output=True, text=True, check=False
    )
    if result.returncode:
        sys.exit(f"the run failed with exit code {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    seconds = steps[-1]["time"] - steps[WARM_STEPS - 1]["time"]
    return sum(line["tokens"] for line in steps[WARM_STEPS:]) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run of the pair, of about 1,000 tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", type=int, default=4, help="batches that each side runs alone at a time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--target", help="folder or GGUF file; default: the demo's SmolLM2-135M")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        text = RUN_FILE.format(
            target=json.dumps(options.target or str(find_target())),
            data=json.dumps(str(DATA / "answers.jsonl.gz")),
            threads=options.threads,
            steps=options.steps,
            mask=MASK_TOKEN,
        )
        (folder / "run.toml").write_text(text)
        alone = Alone(load(folder / "run.toml", []), options.batches)
        targets, trainers, pairs = [alone.target()], [alone.trainer()], []
        for _ in range(options.rounds):
            pairs.append(pair(folder))
            targets.append(alone.target())
            trainers.append(alone.trainer())
    show(targets, trainers, pairs, options.threads, options.check)


def show(targets: list[float], trainers: list[float], pairs: list[float], threads: int, check: bool) -> None:
    ideal = [
        1 / (2 / (targets[at] + targets[at + 1]) + 2 / (trainers[at] + trainers[at + 1])) for at in range(len(pairs))
    ]
    ratio = median(both / best for both, best in zip(pairs, ideal, strict=True))
    table = Table(title=f"one worker and one rank on {threads} threads each, tokens/s")
    for column in ("", "median", "all"):
        table.add_column(column, justify="left" if not column else "right")
    for label, values in (
        ("target alone, T", targets),
        ("trainer alone, D", trainers),
        ("1 / (1/T + 1/D)", ideal),
        ("both", pairs),
    ):
        table.add_row(label, f"{median(values):,.0f}", "  ".join(f"{value:,.0f}" for value in values))
    Console().print(table)
    print(f"both / ideal = {ratio:.2f} (at least {FLOOR})")
    if check and ratio < FLOOR:
        sys.exit(1)


if __name__ == "__main__":
    main()
