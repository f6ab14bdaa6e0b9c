"""`paceline bench pipeline --live`: one run whose topology is changed while it runs.

The run is a real `paceline up`. Workers are added and removed by what `paceline scale` does; another number of ranks is
written into the run file, and `paceline restart` has the trainer stop with a checkpoint and start again with it, while
the workers go on. Between two changes each topology is measured for as long, like any other pipeline.

    change      from the request until a new worker has made its first record, a removed one's ring is drained and gone,
                the restarted trainer has done a step: whichever is last
    pause       the longest time without a step meanwhile

Workers take the GPUs from the first on, ranks from the last on. Where there are fewer GPUs than processes, the workers
that are too many begin at the first one again or share with ranks: of two GPUs 2-1 has its second worker on the rank's.

At the end the run is stopped with a checkpoint and audited: each batch of the plan up to there was trained once.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import bench, inspect, paths, scale
from .bench import GpuLog, Options, Result, Sample, print_queues
from .bench_plan import against_plan, plan_table
from .devices import assign_devices
from .errors import PacelineError, UsageError
from .measuring import error_line
from .runfile import RunFile, load, to_toml
from .telemetry import METRICS_FILE, read_metrics
from .up import Child, paceline_command

PATIENCE = 900.0  # seconds that a start, or a change, may take
STOP_PATIENCE = 120.0  # ... and the run's end after something failed
_POLL = 0.1


@dataclass
class Phase(Result):
    """A topology of the run. Times are seconds since the run's first step."""

    began: float = 0.0  # its request
    changed: float = 0.0  # when it was in effect
    window: tuple[float, float] = (0.0, 0.0)  # what was measured
    pause: float = 0.0  # longest time without a step, from the request on until the window
    parts: dict[str, float] = field(default_factory=dict)  # seconds from the request until each part of it was done

    @property
    def seconds(self) -> float:
        """That the change took."""
        return self.changed - self.began


def place_live(workers: int, ranks: int, gpus: int) -> tuple[list[str], list[str]]:
    """The device of each worker and rank: worker i's never depends on the topology. UsageError for too many ranks."""
    if gpus == 0:
        return ["cpu"] * workers, ["cpu"] * ranks
    if ranks > gpus:
        raise UsageError(f"topology {workers}-{ranks} needs a GPU for each rank, this machine has {gpus}")
    first = [f"cuda:{index % gpus}" for index in range(workers)]
    return first, [f"cuda:{index}" for index in range(gpus - ranks, gpus)]


def bench_live(
    folder: Path,
    target: str,
    topologies: Sequence[str],
    options: Options,
    *,
    settle: float = 10.0,
    picture: Path | None = None,
    console: Console | None = None,
    profile: Path | None = None,
    settings: Sequence[str] = (),
) -> list[Phase]:
    """Measures the topologies in turn on one run. Prints tables; writes bench.json, after each of them, and `picture`.

    settle: seconds after each change that do not count. Other arguments as `bench_pipeline`'s.
    """
    console = console or bench.bench_console()
    found = [bench.parse_topology(text) for text in topologies]
    if len(found) < 2:
        raise UsageError("--live changes the topology: give two --topology at least")
    gpus = bench.gpu_count()
    places = [place_live(workers, ranks, gpus) for workers, ranks in found]
    paths.make_folder(folder, "--out: ", writable=True)
    model = bench.model_folder(folder, target)
    rows = bench.write_rows(folder / "rows", model, options)
    # Each rank of every topology gets as many batches of a step; a checkpoint is bound to their number.
    own = [
        f"trainer.batches_per_step={math.lcm(*(ranks for _, ranks in found))}",
        f"output={json.dumps(str((folder / 'live').absolute()))}",
        "checkpoint.keep_last=1",
    ]
    run_path = folder / "live.toml"
    run = bench.write_run(run_path, model, rows, options, *places[0], [*own, *settings])
    alone = bench.measure_alone(run_path, run, options, console)
    bench.clear(run)
    report = Report(folder / "bench.json", run)
    try:
        with bench.profiling(None if profile is None else profile / "live", console), LiveRun(run_path) as live:
            measure(live, places, options, settle, alone, report, console)
            live.stop(console)
        report.audit = audit(Path(run.output))
    finally:
        bench.clear_shared(run)
        if report.phases:
            for phase, its in zip(report.phases, report.runs, strict=True):
                phase.plan = against_plan(its, alone, phase)
            show(report, console)
            if picture is not None:
                with paths.writing(picture):
                    draw(report, picture)
                console.print(f"{picture}: context tokens/s over time")
        report.write()
    if not report.whole:
        raise PacelineError(f"batches were lost or trained twice: {report.audit['problems'] or report.audit}")
    return report.phases


# What was measured ----------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What has been measured so far, as bench.json has it."""

    path: Path
    run: RunFile
    runs: list[RunFile] = field(default_factory=list)  # the run file as it was in each phase
    phases: list[Phase] = field(default_factory=list)
    audit: dict[str, Any] = field(default_factory=dict)  # as `paceline audit --json`, once the run has ended
    origin: float = 0.0  # time.time() of the first step

    def write(self) -> None:
        values = {
            "live": True,
            "batches_per_step": self.run.trainer.batches_per_step,
            "phases": [asdict(phase) | {"seconds": phase.seconds, "reached": phase.reached} for phase in self.phases],
            "timeline": self.timeline(),
            "audit": self.audit,
        }
        self.path.write_text(json.dumps(values, indent=1) + "\n")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of the timeline that survives."""
        return train_steps(Path(self.run.output))

    @property
    def whole(self) -> bool:
        """Every batch up to the end was trained once or listed, and every step is there."""
        done = [line["step"] for line in self.steps]
        return bool(self.audit.get("clean")) and done == list(range(1, self.audit["step"] + 1))

    def timeline(self) -> list[dict[str, Any]]:
        """Each step but the first, with the rate since the one before it, so that a pause shows."""
        steps, begins = self.steps, [phase.began for phase in self.phases]
        found = []
        for before, line in pairwise(steps):
            at, took = line["time"] - self.origin, max(1e-9, line["time"] - before["time"])
            phase = max(0, sum(begin <= at for begin in begins) - 1)
            found.append(
                {"t": at, "step": line["step"], "tokens": line["tokens"], "tokens_per_s": line["tokens"] / took}
                | {"phase": phase, "topology": self.phases[phase].topology if self.phases else ""}
            )
        return found


def train_steps(output: Path) -> list[dict[str, Any]]:
    """Of the run's metrics; none before there are any."""
    if not (output / METRICS_FILE).exists():
        return []
    return [line for line in read_metrics(output) if line.get("kind") == "train"]


def audit(output: Path) -> dict[str, Any]:
    """What `paceline audit` says of the run's last checkpoint. A process of its own: `common` imports no trainer."""
    newest = max((output / "checkpoints").glob("step-*"), default=None)
    if newest is None:
        raise PacelineError(f"the run left no checkpoint in {output}")
    command = paceline_command("audit", [str(newest), "--json"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise PacelineError(f"paceline audit failed: {error_line(done.stderr)}")
    return json.loads(done.stdout)


# The run --------------------------------------------------------------------------------------------------------------


class LiveRun:
    """`paceline up` of a run file in a process of its own, and what is asked of it. As a context: it ends with it."""

    def __init__(self, run_path: Path) -> None:
        self.run_path, self.run = run_path, load(run_path)
        log = run_path.with_suffix(".log")
        log.unlink(missing_ok=True)
        self._up = Child("up", paceline_command("up", [str(run_path), "--plain"]), log)
        self._gpus = GpuLog(Path(self.run.output) / "gpus.csv")
        self._code: int | None = None

    def __enter__(self) -> "LiveRun":
        self._up.start(dict(os.environ))
        return self

    def __exit__(self, *_: object) -> None:
        self._gpus.close()
        if self._ended() is None:
            self._up.signal(signal.SIGTERM)
            with contextlib.suppress(PacelineError):
                self.wait_for(lambda: self._ended() is not None, "the run's end", STOP_PATIENCE, ends=True)
        self._up.kill_group()  # what the supervisor started ends with it
        self._up.reap()

    def _ended(self) -> int | None:
        """The supervisor's exit code once it has ended."""
        if self._code is None:
            self._code = self._up.reap()
        return self._code

    def check(self) -> None:
        """Raises PacelineError if the run has ended."""
        if (code := self._ended()) is not None:
            said = [line.strip() for line in self._up.log.read_text(errors="replace").splitlines() if line.strip()]
            raise PacelineError(f"the run ended with exit code {code}: {'; '.join(said[-6:])} ({self._up.log})")

    def wait_for(self, what: Callable[[], bool], name: str, patience: float = PATIENCE, ends: bool = False) -> float:
        """time.time() when it was first seen true. ends: the run may end meanwhile. PacelineError after `patience`."""
        until = time.monotonic() + patience
        while not what():
            if not ends:
                self.check()
            if time.monotonic() > until:
                raise PacelineError(f"{name} did not come within {patience:.0f} s; the run's log: {self._up.log}")
            time.sleep(_POLL)
        return time.time()

    def steps(self) -> list[dict[str, Any]]:
        return train_steps(Path(self.run.output))

    def rings(self) -> list[inspect.RingInfo]:
        return inspect.read_rings(paths.ring_dir(self.run))

    def gpus(self, window: tuple[float, float]) -> list[dict[str, float]]:
        return self._gpus.means(*window)

    def _trainer_start(self) -> float:
        """time.time() at which the newest trainer began to write metrics: before its first step."""
        return max(line["time"] for line in read_metrics(Path(self.run.output)) if line.get("event") == "start")

    def first_step_after(self, moment: float) -> float:
        """time.time() of it."""
        found: list[float] = []

        def seen() -> bool:
            found[:] = [line["time"] for line in self.steps() if line["time"] > moment][:1]
            return bool(found)

        self.wait_for(seen, "a step")
        return found[0]

    def change(self, workers: Sequence[str], ranks: Sequence[str], say: Callable[[str], None]) -> dict[str, float]:
        """Gives the run those devices; time.time() of each part's effect. What frees a GPU is done first."""
        now, asked = assign_devices(self.run), time.time()
        done: dict[str, float] = {}
        if len(workers) < len(now.workers):
            scale.scale(self.run.name, len(workers), [], say)
            done["removed"] = time.time()
        if list(ranks) != now.ranks:
            self._write(workers, ranks)
            scale.restart(self.run.name, say)
            done["trainer_up"] = time.time()
            done["first_step"] = self.first_step_after(self._trainer_start())
        if len(workers) > len(now.workers):
            before = {ring.ring_id: ring.produced for ring in self.rings()}
            added = [f"w{index}" for index in range(len(now.workers), len(workers))]
            gpus = [int(device.partition(":")[2]) for device in workers[len(now.workers) :] if device != "cpu"]
            scale.scale(self.run.name, len(workers), gpus, say)
            done["workers_up"] = time.time()

            def all_made() -> bool:
                made = {ring.worker: ring.produced - before.get(ring.ring_id, 0) for ring in self.rings()}
                return all(made.get(name, 0) > 0 for name in added)

            done["first_record"] = self.wait_for(all_made, "a first record of each new worker")
        self._write(workers, ranks)
        return done or {"nothing": asked}

    def _write(self, workers: Sequence[str], ranks: Sequence[str]) -> None:
        """The run file with other devices: what a process that starts later goes by."""
        run = self.run
        sides = {
            "workers": run.workers.model_copy(update={"count": len(workers), "devices": list(workers)}),
            "trainer": run.trainer.model_copy(update={"ranks": len(ranks), "devices": list(ranks)}),
        }
        self.run = run.model_copy(update=sides)
        scratch = self.run_path.with_suffix(".new")
        scratch.write_text(to_toml(self.run))
        scratch.replace(self.run_path)

    def stop(self, console: Console) -> None:
        """With a checkpoint."""
        scale.stop(self.run.name, _say(console))
        self.wait_for(lambda: self._ended() is not None, "the run's end", ends=True)
        if self._code:
            self.check()


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(f"  {text}", markup=False)


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(
    live: LiveRun,
    places: Sequence[tuple[list[str], list[str]]],
    options: Options,
    settle: float,
    alone: Mapping[str, float],
    report: Report,
    console: Console,
) -> None:
    """Each topology in turn, into the report; the run has been started with the first."""
    for number, (workers, ranks) in enumerate(places):
        name, asked = f"{len(workers)}-{len(ranks)}", time.time()
        if number == 0:
            console.print(f"live {name}: {options.warm_up:.0f} s to warm up, {options.seconds:.0f} s")
            report.origin = asked = live.first_step_after(0.0)
            console.print(f"  trained a step; log: {live.run_path.with_suffix('.log')}", markup=False)
            parts, changed, rest = {}, asked, options.warm_up
        else:
            console.print(f"live {name}: changing, {settle:.0f} s to settle, {options.seconds:.0f} s")
            parts = live.change(workers, ranks, _say(console))
            changed, rest = max(parts.values()), settle
        _sampled(live, changed + rest)
        window, seen = _sampled(live, time.time() + options.seconds)
        steps = live.steps()
        result = bench.measured(live.run, alone, steps, window, seen, live.gpus(window))
        phase = Phase(
            **{name: value for name, value in vars(result).items() if name != "timeline"},
            began=asked - report.origin,
            changed=changed - report.origin,
            window=(window[0] - report.origin, window[1] - report.origin),
            pause=longest_pause([line["time"] for line in steps], asked, window[0]),
            parts={part: at - asked for part, at in parts.items()},
        )
        report.phases.append(phase)
        report.runs.append(live.run)
        report.write()


def _sampled(live: LiveRun, until: float) -> tuple[tuple[float, float], list[Sample]]:
    """Looks at the run each second until that moment (time.time()); the window and what was seen."""
    begun, seen = time.time(), []
    while True:
        live.check()
        seen.append(Sample.of(live.run))
        left = until - time.time()
        if left <= 0:
            return (begun, time.time()), seen
        time.sleep(min(1.0, left))


def longest_pause(times: Sequence[float], start: float, end: float) -> float:
    """Longest time without a step between two moments; a step before and one after them bound it."""
    before = [at for at in times if at <= start][-1:]
    inside = [at for at in times if start < at < end]
    after = [at for at in times if at >= end][:1]
    points = [*(before or [start]), *inside, *(after or [end])]
    return max((late - early for early, late in pairwise(points)), default=0.0)


# Shown ----------------------------------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    console.print(live_table(report))
    console.print(plan_table(report.phases))
    print_queues(report.phases, console)
    for name, placement in {phase.topology: phase.placement for phase in report.phases}.items():
        workers, ranks = (" ".join(placement[side]) for side in ("workers", "ranks"))
        console.print(f"{name}: workers on {workers}; ranks on {ranks}", markup=False)
    if found := report.audit:
        verdict = "each batch up to there once, none missing" if report.whole else "NOT WHOLE"
        counts = f"{found['trained']} batches trained, {len(found['listed'])} listed"
        console.print(f"audit of step {found['step']}: {counts}: {verdict}")


def live_table(report: Report) -> Table:
    shown = Table(title="one run, context tokens/s", caption="change: seconds from the request until it was in effect")
    of_ranks = bench.rank_columns(report.phases)
    names = ("topology", "change", "pause", "predicted", "pipeline", "of it", "data wait", "rings full")
    for name in (*names, *of_ranks, "GPU %", "W"):
        shown.add_column(name, justify="right")
    for number, phase in enumerate(report.phases):
        shown.add_row(
            phase.topology,
            f"{phase.seconds:.1f}s" if number else "-",
            f"{phase.pause:.1f}s" if number else "-",
            f"{phase.predicted / 1e3:.2f}K",
            f"{phase.pipeline / 1e3:.2f}K",
            f"{phase.reached:.2f}",
            f"{phase.data_wait:.1%}",
            f"{phase.rings_full:.0%}",
            *phase.rank_cells[: len(of_ranks)],
            phase.each_gpu("utilization.gpu"),
            phase.each_gpu("power.draw"),
        )
    return shown


def rate_curve(timeline: Sequence[Mapping[str, Any]], width: float) -> Iterator[tuple[float, float]]:
    """(t, Ktok/s): rates of the `width` seconds that end at each step; a longer step has its own from its start on."""
    first = 0
    for last, line in enumerate(timeline):
        while first < last and timeline[first]["t"] <= line["t"] - width:
            first += 1
        begun = timeline[first]["t"] - timeline[first]["tokens"] / timeline[first]["tokens_per_s"]
        rate = sum(one["tokens"] for one in timeline[first : last + 1]) / 1e3 / (line["t"] - begun)
        if line["t"] - begun > width and first == last:
            yield begun, rate
        yield line["t"], rate


def draw(report: Report, path: Path) -> None:
    """Ktok/s over time, with each change's request and effect, and what was predicted of each topology."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline = report.timeline()
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if timeline:
        width = max(1.0, timeline[-1]["t"] / 100)
        curve = list(rate_curve(timeline, width))
        axes.plot([at for at, _ in curve], [rate for _, rate in curve], color="#1f6feb", label=f"over {width:.1f} s")
    for number, phase in enumerate(report.phases):
        label = "" if number else "predicted"
        axes.hlines(phase.predicted / 1e3, *phase.window, color="#d9480f", linestyles="dashed", label=label)
        if number:
            span = axes.axvspan(phase.began, phase.changed, color="#9aa5b1", alpha=0.35, linewidth=0)
            span.set_label("a change, until it is in effect" if number == 1 else "_another")
        top = axes.get_xaxis_transform()
        axes.text(phase.window[0], 1.01, phase.topology, transform=top, fontsize=11, fontweight="bold")
    axes.set(xlabel="seconds since the first step", ylabel="Ktok/s")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
