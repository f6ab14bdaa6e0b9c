"""What each objective and setting does to acceptance: the same run once per arm and seed, and a table.

    python benchmarks/ablation.py RUN.toml --out FOLDER [--arm ce --arm dpace ...] [--seeds 2] [--epochs 1]
                                  [--prompts FILE.jsonl] [--at-once 3] [--set key=value]

Each arm is a run of `paceline up` with the run file's data and target, both sides on one GPU, `--at-once` runs on each
GPU of this machine (their speeds then mean nothing, their results do). What is compared is tau_chain of the held-out
rows at the end, and with --prompts the acceptance length of `paceline eval` in real decoding. The spread of an arm's
seeds is the noise that a difference between arms has to exceed.

An arm that has finished in FOLDER is not run again, so arms and seeds can be added later. Writes FOLDER/ablation.json.
"""

import argparse
import json
import queue
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.common.devices import gpu_count
from paceline.common.errors import PacelineError
from paceline.common.finished import is_finished, marker
from paceline.common.runfile import RunFile, load
from paceline.common.telemetry import read_metrics
from rich.console import Console
from rich.table import Table

PLAIN = {"objective.ce": 1.0}
SOFT = {"target.last_hidden": True}  # the teacher's distribution needs it
ARMS: dict[str, Mapping[str, Any]] = {
    "ce": PLAIN,
    "dpace": {"objective.weighting": "dpace"},
    "kl": {"objective.ce": 0.0, "objective.kl": 1.0} | SOFT,
    "ce+kl": {"objective.ce": 0.5, "objective.kl": 0.5} | SOFT,
    "kl, dpace": {"objective.ce": 0.0, "objective.kl": 1.0, "objective.weighting": "dpace"} | SOFT,
    "tv": {"objective.ce": 0.0, "objective.tv": 1.0} | SOFT,
    "lk": {"objective.ce": 0.0, "objective.lk": 1.0} | SOFT,
    "lk_hybrid": {"objective.ce": 0.0, "objective.lk_hybrid": 1.0} | SOFT,
    "cap": {"objective.confidence": 0.1},
    "first error": {"objective.first_error": 0.3},
    "noise": {"objective.noise": 0.05},
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 6e-4},
    "block 8": {"drafter.block_size": 8},
    "fp8": {"trainer.fp8": True},
    "fp8 states": {"stream.payload": "fp8"},
}


@dataclass
class Result:
    """tau_chain: of each seed's last evaluation; acceptance: pooled, of each seed, if prompts were given."""

    arm: str
    seeds: list[int] = field(default_factory=list)
    tau_chain: list[float] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    tokens: int = 0


def overrides(arm: str, seed: int, output: Path, device: str, epochs: float | None) -> list[str]:
    """The settings of one run, as `--set` takes them."""
    values: dict[str, Any] = {
        "name": json.dumps(output.name),
        "output": json.dumps(str(output)),
        "workers.count": 1,
        "workers.devices": json.dumps([device]),
        "trainer.ranks": 1,
        "trainer.devices": json.dumps([device]),
        "trainer.seed": seed,
        "evaluation.every_steps": 0,
        "evaluation.at_end": "true",
    }
    if epochs is not None:
        values["trainer.epochs"] = epochs
    values |= {key: json.dumps(value) for key, value in ARMS[arm].items()}
    return [f"{key}={value}" for key, value in values.items()]


def folder_of(out: Path, arm: str, seed: int) -> Path:
    safe = "".join(character if character.isalnum() else "-" for character in arm)
    return out / f"{safe}-{seed}"


class Bench:
    """Runs arms, a bounded number on each device at a time."""

    def __init__(self, run_path: Path, out: Path, options: argparse.Namespace, console: Console) -> None:
        self._path, self._out, self._options, self._console = run_path, out, options, console
        self._devices: queue.Queue[str] = queue.Queue()
        for _ in range(options.at_once):
            for device in [f"cuda:{index}" for index in range(gpu_count())] or ["cpu"]:
                self._devices.put(device)

    def run(self, pairs: Sequence[tuple[str, int]]) -> None:
        """All (arm, seed) pairs; one that fails is told and leaves the others alone."""
        with ThreadPoolExecutor(self._devices.qsize()) as pool:
            list(pool.map(lambda pair: self._one(*pair), pairs))

    def settings(self, arm: str, seed: int, device: str = "cpu") -> list[str]:
        chosen = overrides(arm, seed, folder_of(self._out, arm, seed), device, self._options.epochs)
        return [*chosen, *self._options.settings]

    def load(self, arm: str, seed: int) -> RunFile:
        return load(self._path, self.settings(arm, seed))

    def _one(self, arm: str, seed: int) -> None:
        device = self._devices.get()
        try:
            folder = folder_of(self._out, arm, seed)
            run = self.load(arm, seed)
            if not is_finished(run, marker(run)):
                self._command(folder, "up", str(self._path), settings=self.settings(arm, seed, device))
            report = folder / "eval.json"
            if self._options.prompts is not None and not report.exists():
                newest = max((folder / "checkpoints").glob("step-*"))
                given = ["--prompts", str(self._options.prompts), "--device", device, "--out", str(report)]
                self._command(folder, "eval", str(newest), *given, allowed=(0, 1))  # 1: a near-tie went another way
            self._console.print(f"{arm}, seed {seed}: done")
        except PacelineError as error:
            self._console.print(f"{arm}, seed {seed}: {error}", markup=False)
        finally:
            self._devices.put(device)

    def _command(
        self, folder: Path, verb: str, *arguments: str, settings: Sequence[str] = (), allowed: Sequence[int] = (0,)
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sets = [part for setting in settings for part in ("--set", setting)]
        log = folder / f"{verb}.log"
        with log.open("w") as file:
            command = [sys.executable, "-m", "paceline.common.cli", verb, *arguments, *sets]
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        if code not in allowed:
            last = (log.read_text().strip().splitlines() or ["it said nothing"])[-1]
            raise PacelineError(f"paceline {verb} ended with {code}: {last} ({log})")


def collect(out: Path, pairs: Sequence[tuple[str, int]]) -> list[Result]:
    """What finished runs measured, by arm in the order of `pairs`."""
    results: dict[str, Result] = {}
    for arm, seed in pairs:
        folder = folder_of(out, arm, seed)
        lines = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
        evaluations = [line for line in lines if line.get("kind") == "eval" and "tau_chain" in line]
        if not evaluations:
            continue
        result = results.setdefault(arm, Result(arm))
        result.seeds.append(seed)
        result.tau_chain.append(evaluations[-1]["tau_chain"])
        result.tokens = max((line.get("total_tokens", 0) for line in lines), default=0)
        report = folder / "eval.json"
        if report.exists():
            result.acceptance.append(json.loads(report.read_text())["acceptance_length"]["pooled"])
    return list(results.values())


def spread(values: Sequence[float]) -> str:
    """Mean, and half the range where there is more than one."""
    if not values:
        return "-"
    half = (max(values) - min(values)) / 2
    return f"{fmean(values):.3f}" + (f" ± {half:.3f}" if len(values) > 1 else "")


def table(results: Sequence[Result]) -> Table:
    shown = Table(title="at the end; ± half the range of the seeds")
    for name in ("arm", "seeds", "tokens", "tau_chain", "acceptance length"):
        shown.add_column(name, justify="left" if name == "arm" else "right")
    for result in sorted(results, key=lambda one: -fmean(one.tau_chain)):
        tokens = f"{result.tokens / 1e6:.2f} M"
        shown.add_row(result.arm, str(len(result.seeds)), tokens, spread(result.tau_chain), spread(result.acceptance))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arm", dest="arms", action="append", choices=list(ARMS), help="default: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="default: the run file's")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--at-once", type=int, default=1, help="runs on a GPU at a time")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    console, out = Console(highlight=False), options.out.absolute()
    pairs = [(arm, seed) for seed in range(options.seeds) for arm in options.arms or ARMS]
    bench = Bench(options.run, out, options, console)
    try:
        for pair in pairs:
            bench.load(*pair)  # a setting that is wrong is said before anything runs
    except PacelineError as error:
        print(f"ablation: {error}", file=sys.stderr)
        return error.exit_code
    bench.run(pairs)
    results = collect(out, pairs)
    (out / "ablation.json").write_text(json.dumps([vars(result) for result in results], indent=1) + "\n")
    console.print(table(results))
    return 0 if len([seed for result in results for seed in result.seeds]) == len(pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
