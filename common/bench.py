"""`paceline bench pipeline`: both sides together, against each side alone, on this machine.

    target alone     workers' forwards into page-locked memory, nothing reads it            T tokens/s a worker
    trainer alone    forward, loss, backward and optimiser on records in page-locked memory  D tokens/s a rank
    pipeline         a real run of `paceline up`: rings, feed and ZeroMQ between, W workers and R ranks

A pipeline that loses nothing runs at min(W·T, R·D) where each process has a GPU of its own, and at 1/(1/T + 1/D) where
both sides share one (forecast.py has all cases). What `paceline plan` says of the same run is compared as well
(bench_plan.py); `--live` changes the topology of one run instead (bench_live.py).

Rates are of context tokens. The target has random weights of a real model's shape (or is a folder of your own), the
rows are random tokens: neither changes the speed.

Everything it makes is in one folder; it is a run like any other and can be looked at with `paceline rings`.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from . import inspect, paths, timeline
from .clean import clean_rings
from .dataset import tokenizer_digest
from .devices import assign_devices, gpu_count
from .errors import PacelineError, UsageError, counted
from .forecast import Rates, placed_rate
from .measuring import Said, run_side
from .rows import RowsWriter
from .runfile import RunFile, load, to_toml, toml_value
from .target_info import CONVERTED
from .telemetry import Status, read_metrics, read_status
from .up import Child, up

CONFIGS = Path(__file__).with_name("bench_configs")
NAME = "bench-pipeline"
MASK_TOKEN = 10  # never in the random rows
FIRST_TOKEN = 100
CHAT_MEAN, CHAT_SPREAD = 320, 0.55  # mean length of a chat row, sigma of its logarithm

RUN_FILE = """\
# Written by `paceline bench pipeline`.
name = "{name}"
output = "{workers}-{ranks}"
[target]
path = {target}
[data]
rows = {rows}
max_length = {max_length}
held_out = 0
[stream]
token_budget = {token_budget}
slots = {slots}
[workers]
count = {workers}
devices = {worker_devices}
[trainer]
ranks = {ranks}
devices = {rank_devices}
batches_per_step = {ranks}
micro_tokens = {micro_tokens}
epochs = 1000
[drafter]
layers = {layers}
block_size = {block_size}
mask_token_id = {mask}
[objective]
anchors_per_token = {anchors_per_token}
[evaluation]
every_steps = 0
at_end = false
[checkpoint]
every_steps = "none"
every_minutes = "none"
[logging]
log_every = 10
"""


@dataclass(frozen=True)
class Options:
    """What is measured: the pipeline for `seconds`, after `warm_up`; each side alone as long, or `alone_seconds`."""

    seconds: float = 60.0
    alone_seconds: float | None = None
    warm_up: float = 60.0
    token_budget: int = 16384
    max_length: int = 3072
    rows: str = "chat"  # or "full": every row of max_length
    slots: int = 4
    micro_tokens: int = 8192
    layers: int = 5
    block_size: int = 16
    anchors_per_token: float = 0.25


@dataclass
class Result:
    """Rates in context tokens/s. Shares are of the trainer's time (mean of ranks)."""

    topology: str
    target_alone: float  # of one worker
    trainer_alone: float  # of one rank
    predicted: float
    pipeline: float
    data_wait: float
    gpu_share: float
    rings_full: float  # share of the samples in which no ring had a free slot for its worker
    rings_empty: float  # ... in which no ring had a record to take
    ready: float  # records in all rings, taken ones included, mean
    reduce_share: float = 0.0  # of the time, for adding gradients up over the ranks
    reduce_ms: float = 0.0  # of a step
    idle: list[float] = field(default_factory=list)  # share of each rank: without a record, or waiting for another rank
    q_pre: dict[str, float] = field(default_factory=dict)  # of each worker: batches that wait for its forward, mean
    q_hs: dict[str, float] = field(default_factory=dict)  # ... records in its ring
    gpus: list[dict[str, float]] = field(default_factory=list)  # utilisation %, power W, memory MiB: means
    timeline: list[dict[str, Any]] = field(default_factory=list)
    placement: dict[str, list[str]] = field(default_factory=dict)  # devices of the workers and the ranks
    rank_memory: dict[str, float] = field(default_factory=dict)  # most bytes: of "tensors", "reserved" by the allocator
    plan: dict[str, Any] = field(default_factory=dict)  # what `paceline plan` says (bench_plan.py)

    @property
    def reached(self) -> float:
        return self.pipeline / self.predicted if self.predicted else 0.0

    @property
    def rank_cells(self) -> tuple[str, str]:
        reduction = f"{self.reduce_share:.1%}" if len(self.idle) > 1 else "-"
        return reduction, " ".join(f"{share:.1%}" for share in self.idle)

    @property
    def queues(self) -> str:
        """Of each worker, on a line."""
        means = (f"{name} {self.q_pre[name]:.1f}, {self.q_hs[name]:.1f}" for name in self.q_pre)
        return f"{self.topology}: q_pre, q_hs: {'; '.join(means)}" if self.q_pre else ""

    def each_gpu(self, name: str) -> str:
        return " ".join(f"{gpu[name]:.0f}" for gpu in self.gpus) or "-"


def parse_topology(text: str) -> tuple[int, int]:
    """ "3-1" is three workers and one rank. UsageError."""
    left, dash, right = text.partition("-")
    if not (dash and left.isdecimal() and right.isdecimal() and int(left) and int(right)):
        raise UsageError(f"--topology {text}: give WORKERS-RANKS, such as 3-1")
    return int(left), int(right)


def place(workers: int, ranks: int, gpus: int) -> tuple[list[str], list[str]]:
    """The device of each worker and each rank. UsageError where the GPUs do not go round.

    Several GPUs have a process each. A single one has all of them, as a CPU has.
    """
    if gpus <= 1:
        device = "cuda:0" if gpus else "cpu"
        return [device] * workers, [device] * ranks
    if workers + ranks > gpus:
        raise UsageError(f"topology {workers}-{ranks} needs {counted(workers + ranks, 'GPU')}, this machine has {gpus}")
    names = [f"cuda:{index}" for index in range(workers + ranks)]
    return names[:workers], names[workers:]


def predict(alone: Mapping[str, float], workers: Sequence[str], ranks: Sequence[str]) -> float:
    """Tokens/s of a pipeline on those devices that loses nothing. alone: of one "producer", one "consumer"."""
    return placed_rate(Rates(alone["producer"], alone["consumer"]), workers, ranks)


def bench_pipeline(
    folder: Path,
    target: str,
    topologies: Sequence[str],
    options: Options,
    console: Console | None = None,
    profile: Path | None = None,
    settings: Sequence[str] = (),
) -> list[Result]:
    """Measures each topology; target: a name of `CONFIGS` or a model folder. Prints tables, writes bench.json.

    profile: folder for a trace and a picture of a few steps of every process, by topology (timeline.py).
    settings: of the run file, key=value.
    """
    from .bench_plan import against_plan, plan_table

    console = console or bench_console()
    found = [parse_topology(text) for text in topologies]
    gpus = gpu_count()
    for workers, ranks in found:
        place(workers, ranks, gpus)
    paths.make_folder(folder, "--out: ", writable=True)
    model = model_folder(folder, target)
    rows = write_rows(folder / "rows", model, options)
    alone: dict[str, float] = {}
    results: list[Result] = []
    runs: list[RunFile] = []
    for workers, ranks in found:
        name = f"{workers}-{ranks}"
        run_path = folder / f"{name}.toml"
        devices = place(workers, ranks, gpus)
        run = write_run(run_path, model, rows, options, *devices, settings)
        alone = alone or measure_alone(run_path, run, options, console)
        console.print(f"pipeline {name}: {options.warm_up:.0f} s to warm up, {options.seconds:.0f} s")
        with profiling(None if profile is None else profile / name, console):
            result = _pipeline(run_path, run, alone, options, console)
        results.append(result)
        runs.append(run)
        _write(folder, results)
    for run, result in zip(runs, results, strict=True):
        result.plan = against_plan(run, alone, result)
    _write(folder, results)
    console.print(table(results))
    console.print(plan_table(results))
    print_queues(results, console)
    return results


def print_queues(results: Sequence[Result], console: Console) -> None:
    for result in results:
        if result.queues:
            console.print(result.queues, markup=False)


def _write(folder: Path, results: Sequence[Result]) -> None:
    (folder / "bench.json").write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")


def bench_console() -> Console:
    """Wide enough for the tables where there is no terminal, as in a job's log."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=120 if wide else None)


@contextlib.contextmanager
def profiling(folder: Path | None, console: Console) -> Iterator[None]:
    """Lets the processes that are started inside record a few steps, and shows them afterwards."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob("*.json.gz"))
    os.environ[timeline.ENVIRONMENT] = str(folder.absolute())
    try:
        yield
    finally:
        del os.environ[timeline.ENVIRONMENT]
    traces = sorted(set(folder.glob("*.json.gz")) - before)
    if not traces:
        console.print(
            f"no process did {timeline.FIRST + timeline.COUNT} steps: nothing to profile, give more --seconds"
        )
    timeline.show(traces, console)


# What is measured on


def model_folder(folder: Path, target: str) -> Path:
    """A folder with the config of that name and a note that its weights are random; or the user's own."""
    config = CONFIGS / f"{target}.json"
    if not config.is_file():
        if Path(target).is_dir():
            return Path(target)
        names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.json")))
        raise UsageError(f"--target-config {target}: no such config ({names}) and no folder")
    made = folder / target
    made.mkdir(exist_ok=True)
    shutil.copyfile(config, made / "config.json")
    (made / CONVERTED).write_text(json.dumps({"identity": f"random-{target}", "weights": "random"}))
    (made / "tokenizer.json").write_text("{}")  # the rows are made of token ids; it only has a digest to compare
    return made


def write_rows(folder: Path, model: Path, options: Options) -> Path:
    """Rows of random tokens, enough for 64 batches: lengths of chats, or all of max_length."""
    config = json.loads((model / "config.json").read_text())
    vocabulary = (config.get("text_config") or config)["vocab_size"]
    draw = np.random.default_rng(0)
    with RowsWriter(folder) as writer:
        total = 0
        while total < 64 * options.token_budget:
            length = options.max_length
            if options.rows == "chat":
                mean = np.log(CHAT_MEAN) - CHAT_SPREAD**2 / 2
                length = int(np.clip(draw.lognormal(mean, CHAT_SPREAD), 16, options.max_length))
            mask = np.ones(length, np.uint8)
            mask[: length // 5] = 0  # the prompt
            writer.add(draw.integers(FIRST_TOKEN, vocabulary, length).astype(np.int32), mask)
            total += length
        writer.finish({"tokenizer": tokenizer_digest(str(model)), "vocabulary": "", "target": str(model)})
    return folder


def write_run(
    path: Path,
    model: Path,
    rows: Path,
    options: Options,
    workers: Sequence[str],
    ranks: Sequence[str],
    settings: Sequence[str] = (),
) -> RunFile:
    """Writes the run file of a pipeline with those devices, in which `settings` (key=value) win. ConfigError."""
    values = asdict(options)
    values["rows"] = toml_value(str(rows.absolute()))
    text = RUN_FILE.format(
        name=NAME,
        target=toml_value(str(model.absolute())),
        workers=len(workers),
        ranks=len(ranks),
        worker_devices=json.dumps(list(workers)),
        rank_devices=json.dumps(list(ranks)),
        mask=MASK_TOKEN,
        **values,
    )
    path.write_text(text)
    run = load(path, settings)
    path.write_text(to_toml(run))
    return run


# Each side alone


def measure_alone(run_path: Path, run: RunFile, options: Options, console: Console) -> dict[str, float]:
    """`_alone` of both sides, at once where neither is on the other's device; prints what they warn of."""
    seconds = options.seconds if options.alone_seconds is None else options.alone_seconds
    console.print(f"target alone, trainer alone: {seconds:.0f} s each")
    sides, said = ("producer", "consumer"), Said()
    at_once = run.workers.devices[0] != run.trainer.devices[0]
    with said.on_terminal(), ThreadPoolExecutor(len(sides) if at_once else 1) as pool:
        rates = list(pool.map(lambda side: _alone(side, run_path, run, seconds, said), sides))
    for warning in said.warnings:
        console.print(f"warning: {warning}", markup=False)
    return dict(zip(sides, rates, strict=True))


def _alone(side: str, run_path: Path, run: RunFile, seconds: float, said: Said) -> float:
    """Tokens/s of one worker (producer) or one rank (consumer), in a process of its own. PacelineError."""
    device = (run.workers if side == "producer" else run.trainer).devices[0]
    return float(run_side(f"{side}.bench", str(run_path), device, str(seconds), said=said)["tokens_per_s"])


# Both together


class Sample(NamedTuple):
    """A look at a run."""

    rings: list[inspect.RingInfo]
    status: Status | None

    @classmethod
    def of(cls, run: RunFile) -> "Sample":
        return cls(inspect.read_rings(paths.ring_dir(run)), read_status(paths.status_path(run)))


class _Samples:
    """The view of a run that is measured: samples the rings each second, and ends the run when it has enough."""

    def __init__(self, run: RunFile, options: Options, console: Console) -> None:
        self.seen: list[Sample] = []
        self.window: tuple[float, float] | None = None  # time.time() of the first and last moment that count
        self.failures: list[str] = []
        self._run, self._options, self._console = run, options, console
        self._sampled, self._begun = 0.0, time.time()
        self._first_step: float | None = None
        self._gpus = GpuLog(Path(run.output) / "gpus.csv")

    def refresh(self, children: Sequence[Child], status: Status | None) -> None:
        now = time.time()
        if now - self._sampled < 1.0:
            return
        self._sampled = now
        if self._first_step is None and (status or {}).get("step", 0) > 0:
            self._first_step = now
            self._console.print(f"both sides up and trained a step after {now - self._begun:.0f} s")
        if self._first_step is None:
            return
        begins = self._first_step + self._options.warm_up
        if now >= begins:
            self.window = (begins, now)
            self.seen.append(Sample.of(self._run))
        if now >= begins + self._options.seconds:
            os.kill(os.getpid(), signal.SIGINT)  # the second one kills: the weights are of no use

    def event(self, text: str, urgent: bool = False) -> None:
        if urgent:
            self._console.print(text, markup=False)

    def line(self, child: str, text: str) -> None:
        pass

    def failure(self, child: Child, text: str, lines: Sequence[str]) -> None:
        self.failures += [text, *lines]

    def close(self) -> None:
        self._gpus.close()

    def gpus(self) -> list[dict[str, float]]:
        assert self.window is not None
        return self._gpus.means(*self.window)


class GpuLog:
    """nvidia-smi's own log of utilisation, power and memory, once a second; nothing where there is no nvidia-smi."""

    FIELDS = ("utilization.gpu", "power.draw", "memory.used")

    def __init__(self, path: Path) -> None:
        self._path, self._process = path, None
        if shutil.which("nvidia-smi"):
            path.parent.mkdir(parents=True, exist_ok=True)
            query = f"--query-gpu=timestamp,index,{','.join(self.FIELDS)}"
            with path.open("w") as file:
                self._process = subprocess.Popen(
                    ["nvidia-smi", query, "--format=csv,noheader,nounits", "-l", "1"],
                    stdout=file,
                    stderr=subprocess.DEVNULL,
                )

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def means(self, start: float, end: float) -> list[dict[str, float]]:
        """Of each GPU, over the samples between two moments (time.time())."""
        samples: dict[int, list[list[float]]] = {}
        for line in self._path.read_text().splitlines() if self._process else []:
            with contextlib.suppress(ValueError):  # a last line cut short, or "[N/A]"
                stamp, index, *cells = line.split(",")
                at = datetime.strptime(stamp.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp()  # in local time, both of them
                values = [float(cell) for cell in cells]
                if len(values) == len(self.FIELDS) and start <= at <= end:
                    samples.setdefault(int(index), []).append(values)
        return [
            {name: fmean(values) for name, values in zip(self.FIELDS, zip(*kept, strict=True), strict=True)}
            for _, kept in sorted(samples.items())
        ]


def _pipeline(run_path: Path, run: RunFile, alone: Mapping[str, float], options: Options, console: Console) -> Result:
    clear(run)
    view = _Samples(run, options, console)
    code = up(run_path, view=view)
    clear_shared(run)
    if view.window is None or code not in (0, 130):
        raise PacelineError(f"the pipeline did not run: {'; '.join(view.failures[:6]) or f'exit code {code}'}")
    return measured(run, alone, read_metrics(Path(run.output)), view.window, view.seen, view.gpus())


def clear(run: RunFile) -> None:
    """Removes what an earlier measurement left."""
    shutil.rmtree(run.output, ignore_errors=True)
    clear_shared(run)


def clear_shared(run: RunFile) -> None:
    """Removes the rings, and how many workers the run was scaled to."""
    paths.wanted_path(paths.run_dir(run.name)).unlink(missing_ok=True)
    if paths.ring_dir(run).is_dir():
        clean_rings(paths.ring_dir(run).parent, run.name, dry_run=False, say=lambda _: None)


def measured(
    run: RunFile,
    alone: Mapping[str, float],
    lines: Iterable[Mapping[str, Any]],
    window: tuple[float, float],
    seen: Sequence[Sample],
    gpus: list[dict[str, float]],
) -> Result:
    """What the steps, looks at the run and GPUs of a window (time.time()) of the run come to. PacelineError."""
    start, end = window
    steps = [line for line in lines if line.get("kind") == "train" and start <= line["time"] <= end]
    if len(steps) < 2:
        raise PacelineError(f"fewer than two steps in {end - start:.0f} s: give more --seconds")
    seconds = steps[-1]["time"] - steps[0]["time"]
    samples = [sample.rings for sample in seen if sample.rings]
    statuses = [sample.status or {} for sample in seen]
    workers, ranks = assign_devices(run)
    return Result(
        topology=f"{run.workers.count}-{run.trainer.ranks}",
        target_alone=alone["producer"],
        trainer_alone=alone["consumer"],
        predicted=predict(alone, workers, ranks),
        pipeline=sum(line["tokens"] for line in steps[1:]) / seconds,
        data_wait=fmean(line["wait_data"] for line in steps),
        gpu_share=fmean(line["wait_gpu"] for line in steps),
        rings_full=_mean(all(ring.full for ring in found) for found in samples),
        rings_empty=_mean(not any(ring.count("ready") for ring in found) for found in samples),
        ready=_mean(sum(ring.held for ring in found) for found in samples),
        reduce_share=fmean(line.get("reduce_share", 0.0) for line in steps),
        reduce_ms=1e3 * fmean(line.get("reduce_s", 0.0) for line in steps),
        idle=[fmean(rank) for rank in zip(*map(_idle, steps), strict=True)],
        q_pre=_by_worker(statuses, "q_pre"),
        q_hs=_by_worker(statuses, "q_hs"),
        gpus=gpus,
        timeline=[{"t": line["time"] - start, "tokens_per_s": line["tokens_per_s"]} for line in steps],
        placement={"workers": workers, "ranks": ranks},
        rank_memory={
            "tensors": max(line["peak_memory"] for line in steps),
            "reserved": max(line["reserved_memory"] for line in steps),
        },
    )


def _idle(line: Mapping[str, Any]) -> list[float]:
    """Of each rank in a step."""
    return [wait + idle for wait, idle in zip(line["rank_wait"], line["rank_idle"], strict=True)]


def _by_worker(statuses: Iterable[Status], queue: Literal["q_pre", "q_hs"]) -> dict[str, float]:
    """Mean length of each worker's queue."""
    found: dict[str, list[int]] = {}
    for status in statuses:
        for name, length in zip(status.get("names", []), status.get(queue, []), strict=False):
            found.setdefault(name, []).append(length)
    return {name: fmean(lengths) for name, lengths in sorted(found.items())}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


def rank_columns(results: Sequence[Result]) -> tuple[str, ...]:
    """What is shown where there is more than one rank: `Result.rank_cells`."""
    return ("reduction", "idle") if any(len(result.idle) > 1 for result in results) else ()


def table(results: Sequence[Result]) -> Table:
    shown = Table(title="context tokens/s")
    of_ranks = rank_columns(results)
    names = ("topology", "target alone", "trainer alone", "predicted", "pipeline", "of it", "data wait", "rings full")
    for name in (*names, *of_ranks, "GPU %", "W"):
        shown.add_column(name, justify="right")
    for result in results:
        shown.add_row(
            result.topology,
            *(f"{rate / 1e3:.2f}K" for rate in (result.target_alone, result.trainer_alone, result.predicted)),
            f"{result.pipeline / 1e3:.2f}K",
            f"{result.reached:.2f}",
            f"{result.data_wait:.1%}",
            f"{result.rings_full:.0%}",
            *result.rank_cells[: len(of_ranks)],
            result.each_gpu("utilization.gpu"),
            result.each_gpu("power.draw"),
        )
    return shown
