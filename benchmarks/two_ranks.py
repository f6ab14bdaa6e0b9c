"""What more trainer ranks bring, fed from recorded states: no target runs, so every GPU can have a rank.

    python benchmarks/two_ranks.py RUN.toml --out FOLDER [--ranks 1 --ranks 2] [--steps 40] [--batches 16]
                                   [--states FOLDER] [--workers 4] [--control] [--set key=value]

First a run of one worker and one rank trains one epoch of `--batches` batches of the run file's data and records their
states (stream.record_to; FOLDER/states, or `--states`, of which /dev/shm is the fastest). What is recorded already is
not computed again. Then for each `--ranks` the same run trains `--steps` steps on them, with workers that only read:
the same batches in each step, in the same order, whatever the number of ranks. So speed is compared, and the losses of
each step must be the same but for the order in which gradients are added up.

Rates are of whole steps after the first `--warm-steps`; a step that ends an epoch with fewer batches does not count.
Exit code 1: a loss differs by more than `--tolerance`, relatively. Writes FOLDER/two_ranks.json.

At a high learning rate, from random weights, a difference in the last bit grows within some steps. `--control` says by
how much: it trains the first number of ranks once more, with half the tokens in a micro-batch, so the same gradients
are added up in another order. Losses may then differ as well by `NOISE` times what the control's do, as root mean
squares over the steps.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.common.bench import clear, clear_shared
from paceline.common.dataset import prepared_rows
from paceline.common.devices import gpu_count
from paceline.common.errors import ConfigError, PacelineError, UsageError
from paceline.common.plan import plan_from
from paceline.common.rows import Rows, RowsWriter
from paceline.common.runfile import RunFile, load
from paceline.common.space import free_bytes, size_text
from paceline.common.target_info import resolve_layer_ids, target_info
from paceline.common.telemetry import read_metrics
from paceline.producer.recording import KEEP_FREE, Recording, StateKind, row_key
from rich.console import Console
from rich.table import Table

NOISE = 2.0


@dataclass
class Result:
    """Of one number of ranks. Shares are of a step's time; losses are by step."""

    ranks: int
    tokens_per_s: float
    step_ms: float
    reduce_ms: float
    reduce_share: float
    idle: list[float]  # of each rank: without a record, or waiting for a slower rank
    data_wait: float  # mean of the ranks
    losses: list[float]
    control: bool = False

    @property
    def name(self) -> str:
        return f"{self.ranks}, half micro-batches" if self.control else str(self.ranks)


@dataclass(frozen=True)
class Difference:
    """Of the losses of two arms, step by step: the largest, the largest relative one, the relative ones' root mean
    square."""

    largest: float
    relative: float
    typical: float


def subset(rows: Rows, folder: Path, tokens: int) -> Path:
    """The first rows, of so many tokens together, as prepared rows of their own."""
    kept = 0
    with RowsWriter(folder) as writer:
        for index in range(len(rows)):
            if kept >= tokens:
                break
            row = rows.row(index)
            writer.add(row.tokens, row.mask)
            kept += len(row.tokens)
        if kept < tokens:
            raise UsageError(
                f"the data have {kept:,} tokens, fewer than --batches times stream.token_budget ({tokens:,})"
            )
        writer.finish({key: rows.meta[key] for key in ("tokenizer", "vocabulary", "target") if key in rows.meta})
    return folder


class Bench:
    """The runs of one comparison. Raises UsageError for more ranks than GPUs, ConfigError for a wrong run file."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options, self._console, self._out = options, console, options.out.absolute()
        self._states = (options.states or self._out / "states").absolute()
        self._gpus = gpu_count()
        self._batches = math.lcm(*options.ranks)  # of a step: as many for each rank, of every arm
        if self._gpus and max(options.ranks) > self._gpus:
            raise UsageError(f"--ranks {max(options.ranks)}: this machine has {self._gpus} GPUs")
        self.load("record", self._record_settings())  # a wrong --set is said before anything is made

    def load(self, arm: str, settings: Sequence[str]) -> RunFile:
        return load(self._options.run, self._all(arm, settings))

    # Settings, as `--set` takes them

    def _all(self, arm: str, settings: Sequence[str]) -> list[str]:
        values: dict[str, Any] = {
            "name": json.dumps(f"two-{arm}"),
            "output": json.dumps(str(self._out / arm)),
            "data.files": "[]",
            "data.rows": json.dumps(str(self._out / "rows")),
            "data.held_out": 0,
            "stream.record_to": json.dumps(str(self._states)),
            "stream.record_limit": '"none"',
            "stream.order": '"strict"',
            "trainer.batches_per_step": self._batches,
            "trainer.max_tokens": '"none"',
            "trainer.max_hours": '"none"',
            "evaluation.every_steps": 0,
            "evaluation.at_end": "false",
            "checkpoint.every_steps": '"none"',
            "checkpoint.every_minutes": '"none"',
        }
        return [*(f"{key}={value}" for key, value in values.items()), *settings, *self._options.settings]

    def _record_settings(self) -> list[str]:
        """One epoch; the rank is on another GPU if there is one."""
        worker = "cuda:0" if self._gpus else "cpu"
        rank = "cuda:1" if self._gpus > 1 else worker
        return [
            "workers.count=1",
            f'workers.devices=["{worker}"]',
            "trainer.ranks=1",
            f'trainer.devices=["{rank}"]',
            "trainer.epochs=1",
            'trainer.max_steps="none"',
        ]

    def _replay_settings(self, ranks: int, control: bool = False) -> list[str]:
        """Workers that read need no GPU."""
        own = load(self._options.run, self._options.settings)
        half = min(own.trainer.micro_tokens, own.stream.token_budget) // 2
        devices = [f"cuda:{index}" for index in range(ranks)] if self._gpus else ["cpu"]
        return [
            f"workers.count={self._options.workers}",
            'workers.devices=["cpu"]',
            "workers.gpus_per_worker=1",
            f"trainer.ranks={ranks}",
            f"trainer.devices={json.dumps(devices)}",
            f"trainer.epochs={self._options.steps * self._batches + 1}",  # more than enough
            f"trainer.max_steps={self._options.steps}",
            *([f"trainer.micro_tokens={half}"] if control else []),
        ]

    # Runs

    def record(self) -> None:
        """Makes the rows, and records those that are not recorded yet."""
        own = load(self._options.run, self._options.settings)
        subset(prepared_rows(own), self._out / "rows", self._options.batches * own.stream.token_budget)
        settings = self._record_settings()
        run = self.load("record", settings)
        rows = Rows.open(self._out / "rows")
        missing, size = self._missing(run, rows)
        self._console.print(f"{len(rows)} rows, {rows.total_tokens:,} tokens; {missing} of them are to be recorded")
        if not missing:
            return
        if (free := free_bytes(self._states) - KEEP_FREE) < size:
            raise ConfigError(
                f"{self._states}: {size_text(size)} are needed, {size_text(max(0, free))} can be used: "
                "fewer --batches, or other --states"
            )
        self._run("record", settings)
        if left := self._missing(run, rows)[0]:
            raise PacelineError(f"{left} rows were not recorded: see {self._out / 'record' / 'logs'}")

    def _missing(self, run: RunFile, rows: Rows) -> tuple[int, int]:
        """Rows that are not recorded, and the bytes of their states."""
        info = target_info(run.target.path, run.target.trust_remote_code)
        kind = StateKind.of(run, info, resolve_layer_ids(run, info))
        recording = Recording(self._states, kind, "two-ranks")
        lengths = [len(tokens) for i in range(len(rows)) if row_key(tokens := rows.row(i).tokens) not in recording]
        recording.close()
        return len(lengths), sum(lengths) * kind.token_bytes

    def measure(self, ranks: int, control: bool = False) -> Result:
        arm = "control" if control else f"ranks-{ranks}"
        settings = self._replay_settings(ranks, control)
        run = self.load(arm, settings)
        whole = plan_from(run, Rows.open(self._out / "rows")).batches(0)
        if whole < self._batches:
            raise UsageError(f"an epoch has {whole} batches, a step {self._batches}: give more --batches")
        self._run(arm, settings)
        found = summarise(ranks, read_metrics(self._out / arm), self._batches, self._options.warm_steps)
        return replace(found, control=control)

    def _run(self, arm: str, settings: Sequence[str]) -> None:
        """`paceline up`, from the beginning and to the end."""
        run, folder = self.load(arm, settings), self._out / arm
        clear(run)  # and what a comparison that was killed left, of other data perhaps
        folder.mkdir(parents=True)
        log = folder / "up.log"
        try:
            code = up(self._options.run, self._all(arm, settings), log)
        finally:
            clear_shared(run)
        if code:
            raise PacelineError(f"{arm} ended with exit code {code}: {reason(log)} ({log})")


def up(run_path: Path, settings: Sequence[str], log: Path) -> int:
    """`paceline up`; its exit code."""
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "paceline.common.cli", "up", str(run_path), "--plain", *sets]
    with log.open("w") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode


def reason(log: Path) -> str:
    """What `paceline up` says made it end: a process's own error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line.partition("paceline: ")[2] for line in lines if "paceline: " in line]
    return (named or lines or ["it said nothing"])[-1]


def summarise(ranks: int, lines: Sequence[Mapping[str, Any]], batches: int, warm: int) -> Result:
    """batches: of a whole step. PacelineError where too few are left after the first `warm`."""
    steps = [line for line in lines if line.get("kind") == "train"]
    timed = [line for line in steps[warm:] if line["records"] == batches]
    if not timed:
        raise PacelineError(f"no whole step of {batches} batches after the first {warm}: give more --steps")
    idle = [[wait + rest for wait, rest in zip(line["rank_wait"], line["rank_idle"], strict=True)] for line in timed]
    return Result(
        ranks=ranks,
        tokens_per_s=sum(line["tokens"] for line in timed) / sum(line["seconds"] for line in timed),
        step_ms=1e3 * fmean(line["seconds"] for line in timed),
        reduce_ms=1e3 * fmean(line["reduce_s"] for line in timed),
        reduce_share=fmean(line["reduce_share"] for line in timed),
        idle=[fmean(rank) for rank in zip(*idle, strict=True)],
        data_wait=fmean(line["wait_data"] for line in timed),
        losses=[line["loss"] for line in steps],
    )


def difference(result: Result, first: Result) -> Difference:
    """PacelineError if one has more steps."""
    if len(result.losses) != len(first.losses):
        done = f"{result.ranks} ranks did {len(result.losses)} steps, {first.ranks} did {len(first.losses)}"
        raise PacelineError(f"{done}: see their logs")
    pairs = list(zip(result.losses, first.losses, strict=True))
    relative = [abs(a - b) / abs(b) for a, b in pairs]
    return Difference(max(abs(a - b) for a, b in pairs), max(relative), fmean(part**2 for part in relative) ** 0.5)


def fault(results: Sequence[Result], tolerance: float) -> str | None:
    """What is wrong with the losses of another number of ranks than the first; None if nothing is."""
    for one in results:
        if not all(map(math.isfinite, one.losses)):
            return f"ranks {one.name}: a loss is not a finite number"
    first, *others = results
    noise = max((difference(one, first).typical for one in others if one.control), default=0.0)
    for one in others:
        found = difference(one, first)
        if one.control or found.relative <= tolerance or found.typical <= NOISE * noise:
            continue
        said = f"the losses of {one.ranks} ranks differ by {found.relative:.2g}, more than {tolerance:g}"
        rest = f"; as root mean squares {found.typical:.2g}, more than {NOISE:g} x the control's {noise:.2g}"
        return said + (rest if noise else "")
    return None


def table(results: Sequence[Result]) -> Table:
    first = results[0]
    shown = Table(title="the same steps from recorded states, context tokens")
    for name in ("ranks", "Ktok/s", "scaling", "of ideal", "ms a step", "reduction ms", "of the step", "idle by rank"):
        shown.add_column(name, justify="right")
    for name in ("data wait", "loss differs by", "relatively", "root mean square"):
        shown.add_column(name, justify="right")
    for result in results:
        scaling = result.tokens_per_s / first.tokens_per_s
        apart = difference(result, first)
        shown.add_row(
            result.name,
            f"{result.tokens_per_s / 1e3:.2f}",
            f"{scaling:.2f}",
            f"{scaling * first.ranks / result.ranks:.2f}",
            f"{result.step_ms:.1f}",
            f"{result.reduce_ms:.2f}",
            f"{result.reduce_share:.1%}",
            " ".join(f"{share:.1%}" for share in result.idle),
            f"{result.data_wait:.1%}",
            *(f"{part:.2g}" if result is not first else "-" for part in (apart.largest, apart.relative, apart.typical)),
        )
    return shown


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=_positive, action="append", help="may be repeated; default: 1 and 2")
    parser.add_argument("--steps", type=_positive, default=40)
    parser.add_argument("--warm-steps", type=int, default=8, help="first steps, whose speed does not count")
    parser.add_argument("--batches", type=_positive, default=16, help="batches of data that are recorded")
    parser.add_argument("--states", type=Path, help="folder of the recorded states; default: OUT/states")
    parser.add_argument("--workers", type=_positive, default=4, help="processes that read them, in every arm")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of the losses, relative")
    parser.add_argument("--control", action="store_true", help="measure what rounding alone makes of the losses")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    options.ranks = options.ranks or [1, 2]
    return options


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    wide = not sys.stdout.isatty()
    console, results = Console(highlight=False, width=140 if wide else None), []
    try:
        bench = Bench(options, console)
        bench.record()
        arms = [(ranks, False) for ranks in options.ranks] + [(options.ranks[0], True)] * options.control
        for ranks, control in arms:
            results.append(bench.measure(ranks, control))
            console.print(f"ranks {results[-1].name}: {results[-1].tokens_per_s / 1e3:.2f} Ktok/s")
            _write(options, results)
        console.print(table(results))
        wrong = fault(results, options.tolerance)
    except PacelineError as error:
        print(f"two_ranks: {error}", file=sys.stderr)
        return error.exit_code
    if wrong is not None:
        print(f"two_ranks: {wrong}", file=sys.stderr)
        return 1
    return 0


def _write(options: argparse.Namespace, results: Sequence[Result]) -> None:
    """After each arm, so that what was measured stays."""
    report = {"batches_per_step": math.lcm(*options.ranks), "warm_steps": options.warm_steps}
    report |= {"results": [asdict(result) for result in results]}
    (options.out / "two_ranks.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
