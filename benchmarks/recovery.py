"""What the loss of a worker costs: Ktok/s over time of a run whose workers are killed one after another.

    python benchmarks/recovery.py [--workers 3] [--record 0.12] [--warm-up 4] [--out docs/recovery.png] [--json FILE]

A real run of `paceline up`: supervisor, trainer, feed, worker loop, rings and sockets are those of any run. Target and
drafter are stand-ins of fixed speed, which sleep as a CPU sleeps while its GPU computes: a record takes `--record`
seconds, a restarted worker another `--warm-up` before it is ready (a real one loads its target then). So the machine's
cores do not limit the rate, the workers do, and each is worth the same share of it.

Once the rate is steady worker 1 gets SIGKILL; when it is back, the last worker is removed by `paceline scale`, and
added again. Prints the rates before, while it is away and after, and draws the curve. Exits 1 if the other workers'
rate falls below 0.9 of what it was, or if 0.9 of the full rate is not back with the restarted worker's first records.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paceline.common import paths
from paceline.common.control import NoSupervisor, ask
from paceline.common.dataset import tokenizer_digest
from paceline.common.fingerprint import run_fingerprint
from paceline.common.inspect import read_rings
from paceline.common.progress import PlainView
from paceline.common.record import RecordMeta
from paceline.common.rows import Rows, RowsWriter
from paceline.common.runfile import RunFile, load
from paceline.common.scale import scale
from paceline.common.target_info import TargetInfo
from paceline.common.telemetry import read_metrics
from paceline.common.up import up
from paceline.producer.source import Filled

HIDDEN, LAYERS, LENGTH, BUDGET = 64, [1, 3], 512, 4096
SETTLE_S = 8.0  # of each steady stretch
WINDOW_S = 1.0  # over which a rate of the curve is taken
KEEPS = 0.9

RUN_FILE = """\
name = "recovery"
output = "out"
[target]
path = "target"
dtype = "float32"
layer_ids = [1, 3]
[data]
rows = "rows"
max_length = 512
held_out = 0
[stream]
token_budget = 4096
slots = 2
prefetch = 2
ring_dir = {rings}
[workers]
count = {workers}
devices = ["cpu"]
[trainer]
epochs = 1000
dtype = "float32"
devices = ["cpu"]
[drafter]
mask_token_id = 3
[checkpoint]
every_steps = 100
[evaluation]
every_steps = 0
at_end = false
[logging]
log_every = 50
"""


# The stand-ins --------------------------------------------------------------------------------------------------------


def target_info() -> TargetInfo:
    return TargetInfo(
        path="none",
        model_type="sleep",
        architectures=(),
        hidden_size=HIDDEN,
        num_layers=4,
        vocab_size=1000,
        intermediate_size=HIDDEN,
        num_heads=2,
        num_kv_heads=2,
        head_dim=HIDDEN // 2,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        identity="sleep",
    )


class SleepingTarget:
    """Writes noise that passes for hidden states, after as long as a target would take."""

    def __init__(self, record_s: float, warm_up_s: float) -> None:
        self.info = target_info()
        self._record_s, self._warm_up_s = record_s, warm_up_s
        self._noise = np.random.default_rng(0).standard_normal(len(LAYERS) * BUDGET * HIDDEN, np.float32)

    def register(self, address: int, length: int) -> None:
        time.sleep(self._warm_up_s)

    def begin(
        self,
        tokens: NDArray[np.int32],
        cu_seqlens: NDArray[np.int32],
        out: memoryview,
        progress: Callable[[], None],
        landed: Any = None,
    ) -> Filled:
        due = time.monotonic() + self._record_s
        states = np.frombuffer(out, np.float32)
        states[:] = self._noise[: len(states)]
        time.sleep(max(0.0, due - time.monotonic()))
        return Filled(True)

    def settle(self) -> None:
        return

    def close(self) -> None:
        return


class NoDevice:
    """Is never busy: all waiting for records counts."""

    def __init__(self) -> None:
        self._begun = 0

    def begin(self) -> None:
        self._begun += 1

    def end(self) -> None:
        return

    def take(self) -> list[float]:
        found, self._begun = [math.inf] * (self._begun - 1), 0
        return found


class CountingLearner:
    """Learns nothing, at once."""

    def __init__(self) -> None:
        self._tokens, self.gaps = 0, NoDevice()

    def prepare(self, meta: RecordMeta, states: memoryview, epoch: int | None) -> None:
        pass

    def train_record(self, meta: RecordMeta, states: memoryview, epoch: int, done: float = 0.0) -> None:
        self._tokens += len(meta.tokens)

    def eval_record(self, meta: RecordMeta, states: memoryview) -> None:
        self._tokens += len(meta.tokens)

    def sums(self) -> NDArray[np.float64]:
        return np.array([self._tokens], np.float64)

    def reduce(self, group: Any) -> None:
        return

    def reduce_seconds(self) -> float:
        return 0.0

    def step(self, total: NDArray[np.float64], step: int, total_steps: int) -> tuple[bool, dict[str, Any]]:
        self.discard()
        return True, {"loss": 0.0}

    def eval_metrics(self, total: NDArray[np.float64]) -> dict[str, Any]:
        return {}

    def discard(self) -> None:
        self._tokens = 0

    def drafter_config(self) -> dict[str, Any]:
        return {}

    def peak_memory(self) -> tuple[int, int]:
        return 0, 0

    def map_ring(self, address: int, size: int) -> None:
        return

    def unmap_ring(self, address: int, size: int) -> None:
        return

    def snapshot(self) -> Callable[[Path], None]:
        return lambda folder: (folder / "nothing").touch()

    def restore(self, folder: Path) -> None:
        return


# The processes --------------------------------------------------------------------------------------------------------


def command(verb: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, __file__, "--process", verb, *arguments]


def process(verb: str, arguments: list[str]) -> int:
    """One of the run's processes: what `paceline VERB` does, on stand-ins."""
    if verb == "up":
        return up(arguments[0], view=PlainView(), command=command)
    if verb == "rank":
        from paceline.consumer import rank

        return rank.main(lambda job, run, rows: CountingLearner(), rank.join_group)
    run = load(arguments[0])
    if verb == "consumer":
        return run_trainer(run)
    if verb == "producer":
        from paceline.producer import worker

        speed = json.loads(os.environ["RECOVERY_TARGET"])
        return worker.main(run, int(arguments[2]), source=SleepingTarget(**speed))
    return 0  # prepare: the rows are there


def run_trainer(run: RunFile) -> int:
    from paceline.consumer import trainer
    from paceline.consumer.describe import RunFacts

    def facts(run: RunFile, alive: object) -> RunFacts:
        rows = str(run.data.rows)
        fields = run_fingerprint(run, Rows.open(rows), target_info(), LAYERS).fields
        return RunFacts(rows, dict(fields), LAYERS, HIDDEN)

    return trainer.main(run, describe=facts, rank_command=[sys.executable, __file__, "--process", "rank"])


# The measurement ------------------------------------------------------------------------------------------------------


class Watch(threading.Thread):
    """Counts the records that each worker has made, many times a second."""

    def __init__(self, run: RunFile) -> None:
        super().__init__(daemon=True)
        self.rings = paths.ring_dir(run)
        self.samples: list[tuple[float, dict[str, int]]] = []  # seconds, worker -> records since its ring was made
        self.begun = time.monotonic()

    def run(self) -> None:
        while True:
            made = {ring.worker: ring.produced for ring in read_rings(self.rings) if ring.problem is None}
            self.samples.append((time.monotonic() - self.begun, made))
            time.sleep(0.05)

    def now(self) -> float:
        return time.monotonic() - self.begun

    def made(self, worker: str) -> int:
        return self.samples[-1][1].get(worker, 0) if self.samples else 0

    def counted(self, moments: Sequence[float]) -> dict[str, NDArray[np.float64]]:
        """Records that each worker has made up to each moment, over all the rings it had."""
        times = np.array([at for at, _ in self.samples])
        places = np.maximum(np.searchsorted(times, moments, "right") - 1, 0)
        counted = {}
        for name in sorted({name for _, made in self.samples for name in made}):
            made = np.array([made.get(name, 0) for _, made in self.samples])
            counted[name] = np.cumsum(np.maximum(np.diff(made, prepend=0), 0))[places].astype(float)
        return counted

    def rate(self, start: float, stop: float, without: str = "") -> float:
        """Records a second of all workers, or of all but one, between two moments."""
        made = [after - before for name, (before, after) in self.counted([start, stop]).items() if name != without]
        return float(sum(made)) / (stop - start)


class Experiment:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = folder
        self.path = folder / "run.toml"
        with RowsWriter(folder / "rows") as writer:
            draw = np.random.default_rng(0)
            for _ in range(800):
                tokens = draw.integers(4, 1000, LENGTH).astype(np.int32)
                writer.add(tokens, (np.arange(LENGTH) > 9).astype(np.uint8))
            target = folder / "target"
            target.mkdir()
            (target / "tokenizer.json").write_text("{}")  # the rows are made here, without a tokenizer
            writer.finish({"tokenizer": tokenizer_digest(str(target)), "vocabulary": "", "target": str(target)})
        self.path.write_text(RUN_FILE.format(rings=json.dumps(str(folder / "rings")), workers=options.workers))
        self.run = load(self.path)
        self.watch = Watch(self.run)
        self.events: list[tuple[float, str]] = []
        self.end = 0.0

    def until(self, what: Callable[[], Any], why: str) -> None:
        deadline = time.monotonic() + 300
        while not what():
            if self.supervisor.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"no {why}:\n{(self.folder / 'up.log').read_text()[-4000:]}")
            time.sleep(0.02)

    def worker(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(NoSupervisor):
            shown = ask(paths.up_socket(paths.run_dir(self.run.name)), {"do": "show"})
            return next((worker for worker in shown["workers"] if worker["name"] == name), {"ready": False})
        return {"ready": False}

    def note(self, what: str) -> float:
        self.events.append((self.watch.now(), what))
        return self.events[-1][0]

    def measure(self) -> dict[str, Any]:
        speed = {"record_s": self.options.record, "warm_up_s": self.options.warm_up}
        with (self.folder / "up.log").open("ab") as log:
            self.supervisor = subprocess.Popen(
                command("up", [str(self.path)]),
                stdout=log,
                stderr=log,
                env=os.environ | {"RECOVERY_TARGET": json.dumps(speed), "OMP_NUM_THREADS": "1"},
            )
        try:
            return self._measure()
        finally:
            self.supervisor.send_signal(signal.SIGTERM)
            self.supervisor.wait()

    def _measure(self) -> dict[str, Any]:
        names, watch = [f"w{index}" for index in range(self.options.workers)], self.watch
        watch.start()
        self.until(lambda: all(watch.made(name) > 3 for name in names), "records of all workers")
        time.sleep(SETTLE_S)
        killed = self.note("w1 gets SIGKILL")
        os.kill(self.worker("w1")["pid"], signal.SIGKILL)
        time.sleep(0.1)
        made = watch.made("w1")
        self.until(lambda: self.worker("w1")["ready"], "restart of w1")
        ready = self.note("w1 is ready")
        self.until(lambda: watch.made("w1") > made, "records of the restarted worker")
        first = watch.now()
        time.sleep(SETTLE_S)
        before, after = watch.rate(killed - SETTLE_S, killed), watch.rate(first, first + SETTLE_S)
        figures = {
            "before": before,
            "others_before": watch.rate(killed - SETTLE_S, killed, "w1"),
            "others_away": watch.rate(killed, ready, "w1"),
            "after": after,
            "away_s": ready - killed,
            "first_record_s": first - ready,
        }
        count = self.options.workers
        for wanted, what in ((count - 1, "one is removed"), (count, "one is added")):
            self.note(f"scale {wanted}: {what}")
            scale(self.run.name, wanted, [], lambda said: None)
            time.sleep(SETTLE_S / 2)
        time.sleep(SETTLE_S / 2)
        self.end = watch.now()
        return figures

    def curve(self) -> list[dict[str, Any]]:
        """The rates of each worker and of the trainer, over `WINDOW_S`, in Ktok/s."""
        tokens = BUDGET / 1000
        ends = np.arange(WINDOW_S, self.end, WINDOW_S / 4)
        counted = self.watch.counted([*ends]), self.watch.counted([*(ends - WINDOW_S)])
        rates = {name: (made - counted[1][name]) * tokens / WINDOW_S for name, made in counted[0].items()}
        shift = time.time() - self.watch.now()
        steps = [
            (line["time"] - shift, line["tokens"])
            for line in read_metrics(Path(self.run.output))
            if line["kind"] == "train"
        ]
        curve: list[dict[str, Any]] = []
        for place, end in enumerate(ends):
            trained = sum(count for at, count in steps if end - WINDOW_S < at <= end)
            workers = {name: float(rate[place]) for name, rate in rates.items()}
            curve.append({"t": float(end), "workers": workers, "trainer": trained / 1000 / WINDOW_S})
        return curve


def draw(curve: list[dict[str, Any]], events: list[tuple[float, str]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots()
    start = max(0.0, events[0][0] - SETTLE_S)
    shown = [point for point in curve if point["t"] >= start]
    times = [point["t"] - start for point in shown]
    names = sorted(shown[0]["workers"])
    colours = ("#9aa5b1", "#1f6feb", "#2b8a3e", "#d9480f")
    rates = [[point["workers"][name] for point in shown] for name in names]
    axes.stackplot(times, rates, labels=[f"made by worker {name}" for name in names], colors=colours, alpha=0.45)
    axes.plot(times, [point["trainer"] for point in shown], color="black", linewidth=1.2, label="trained")
    for at, what in events:
        axes.axvline(at - start, color="#d9480f", linestyle="--", linewidth=1)
        axes.annotate(what, (at - start, 1), xycoords=("data", "axes fraction"), xytext=(3, -4), va="top", fontsize=8,
                      textcoords="offset points", rotation=90, color="#d9480f")  # fmt: skip
    axes.set(xlabel="seconds", ylabel="Ktok/s", ylim=(0, None), xlim=(0, times[-1]))
    axes.set_title("A worker is killed; another is removed and added")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    if sys.argv[1:2] == ["--process"]:
        sys.exit(process(sys.argv[2], sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--record", type=float, default=0.12, help="seconds that a target takes for a record")
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds that a worker loads and warms up")
    parser.add_argument("--out", type=Path, help="picture to draw")
    parser.add_argument("--json", type=Path, help="file for figures, curve and events")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-recovery-", dir="/tmp") as name:
        os.environ["PACELINE_RUNTIME_DIR"] = f"{name}/rt"
        experiment = Experiment(Path(name), options)
        figures = experiment.measure()
        curve = experiment.curve()
    if options.out:
        draw(curve, experiment.events, options.out)
    if options.json:
        options.json.write_text(json.dumps({"figures": figures, "events": experiment.events, "curve": curve}))
    unit = BUDGET / 1000
    others, full = figures["others_away"] / figures["others_before"], figures["after"] / figures["before"]
    killed = experiment.events[0][0]
    steady = median(point["trainer"] for point in curve if killed - SETTLE_S < point["t"] < killed)
    print(
        f"{options.workers} workers of {unit / options.record:.1f} Ktok/s, warm-up {options.warm_up:.0f} s; "
        f"before: {figures['before'] * unit:.1f} Ktok/s made, {steady:.1f} trained (median)\n"
        f"away for {figures['away_s']:.1f} s: the other workers at {others:.2f} of their rate before\n"
        f"first record {figures['first_record_s']:.2f} s after it was ready; from then on {full:.2f} of the full rate"
    )
    sys.exit(0 if others >= KEEPS and full >= KEEPS else 1)


if __name__ == "__main__":
    main()
