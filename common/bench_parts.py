"""`paceline bench step|target|stream`: each part alone, as shares of what this machine can do.

    step    forward, backward and update of the drafter on rows in page-locked memory
    target  its forward by plain transformers, packed by paceline, and streaming into a ring that is drained
    stream  the ring between processes and between a GPU and a process, beside memcpy and page-locked copies

Each measurement runs in a process of its own on one device and prints JSON; this module makes what it runs on, asks
for the ceilings (`paceline.consumer.ceilings`) in the same call, and turns times and counts into rates.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
from rich.table import Table

from .bench import MASK_TOKEN, RUN_FILE, model_folder
from .devices import gpu_count
from .errors import UsageError
from .measuring import Said, run_side
from .runfile import load, toml_value

LARGE, SMALL = "qwen3-8b", "smollm2-135m"  # shapes measured unless another is asked for, on a GPU and without
PADDED, PLAIN, EAGER = "padded-512", "padded-plain", "padded-eager"
RESIDENT = "-resident"  # after "full" or "chat"
PADDED_LENGTH = 512
GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """What every measurement is told. `settings`: of the run file, key=value; `steps` ends it before `seconds` do."""

    device: str
    target: str
    seconds: float = 20.0
    steps: int | None = None
    settings: tuple[str, ...] = ()
    layers: int = 5
    block_size: int = 16
    length: int = 3072  # tokens of a full row
    profile: str | None = None  # folder for traces of three repetitions of each arm, after those that are timed

    @classmethod
    def from_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        for key, value in values.items():
            values[key] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def enough(self, done: int, seconds: float) -> bool:
        """Whether `done` repetitions in so many seconds are enough: ten at least unless their number was given."""
        if self.steps is not None:
            return done >= self.steps
        return done >= 10 and seconds >= self.seconds


@dataclass(frozen=True)
class StepOptions(Measured):
    """full: `rows` rows of `length` tokens, one a micro-batch, with `anchors` blocks each. chat: as many tokens in rows
    of a chat's lengths (512 at most), packed; padded-512: those rows, each computed as 512 positions; padded-plain:
    those rows and their blocks as plain PyTorch computes them padded, and padded-eager so with nothing compiled but the
    attention. full-resident, chat-resident: with the states on
    the device from the start."""

    kinds: tuple[str, ...] = ("full",)
    rows: int = 4
    anchors: int = 512
    anchors_per_token: float = 0.25  # of chat rows
    micro_tokens: int = 8192  # of chat rows

    def check(self) -> None:
        if self.rows < 1 or self.anchors < 1:
            raise UsageError("--rows and --anchors: one at least")
        if self.anchors > self.length - self.block_size:
            raise UsageError(
                f"--anchors {self.anchors}: a row of {self.length} tokens has room for "
                f"{max(0, self.length - self.block_size)} whole blocks of {self.block_size}"
            )


@dataclass(frozen=True)
class TargetOptions(Measured):
    kinds: tuple[str, ...] = ("full", "chat")
    budget: int = 16384  # tokens in a batch


def default_device() -> str:
    return "cuda:0" if gpu_count() else "cpu"


def default_target(device: str) -> str:
    return LARGE if device.startswith("cuda") else SMALL


# What is measured on


def chat_lengths(total: int, most: int) -> list[int]:
    """Lengths of rows as in chats, of `total` tokens together or a little less, none above `most`; always the same."""
    from .bench import CHAT_MEAN, CHAT_SPREAD

    draw = np.random.default_rng(0)
    lengths: list[int] = []
    while True:
        drawn = draw.lognormal(np.log(CHAT_MEAN) - CHAT_SPREAD**2 / 2, CHAT_SPREAD)
        length = int(np.clip(drawn, 16, most))
        if lengths and sum(lengths) + length > total:
            return lengths
        lengths.append(min(length, total))


def prompt_tokens(length: int) -> int:
    """Tokens at the start of a chat row that are not supervised."""
    return length // 5


def write_run(folder: Path, options: Measured, *, token_budget: int, micro_tokens: int, anchors: float) -> Path:
    """A run file for one process on one device; rows and rings are named and never opened."""
    path = folder / "bench.toml"
    text = RUN_FILE.format(
        name="bench-part",
        workers=1,
        ranks=1,
        target=toml_value(str(model_folder(folder, options.target).absolute())),
        rows=toml_value(str((folder / "rows").absolute())),
        max_length=options.length,
        token_budget=token_budget,
        slots=3,
        worker_devices=json.dumps([options.device]),
        rank_devices=json.dumps([options.device]),
        micro_tokens=micro_tokens,
        layers=options.layers,
        block_size=options.block_size,
        mask=MASK_TOKEN,
        anchors_per_token=anchors,
    )
    path.write_text(text)
    load(path, options.settings)  # a wrong --set is said here, in one line
    return path


def _measure(
    what: str,
    options: Measured,
    run: Path,
    dtype: str,
    module: str,
    figures: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, dict[str, Any]]],
) -> dict[str, Any]:
    """Ceilings and arms, each in a process of its own, and what they warned of."""
    said = Said()
    with said.on_terminal():
        ceilings = run_side("consumer.ceilings", options.device, dtype, said=said)
        measured = run_side(module, str(run), options.to_json(), said=said)
    return {
        "bench": what,
        "date": time.strftime("%Y-%m-%d"),
        "options": asdict(options),
        "ceilings": ceilings,
        "arms": figures(measured, ceilings),
        "warnings": said.warnings,
    }


# The step


def bench_step(options: StepOptions) -> dict[str, Any]:
    """Measures the drafter's step. UsageError, ConfigError, PacelineError."""
    options.check()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        run = write_run(
            Path(folder),
            options,
            token_budget=max(options.rows * options.length, options.length),
            micro_tokens=options.micro_tokens,
            anchors=options.anchors_per_token,
        )
        dtype = load(run, options.settings).trainer.dtype
        return _measure("step", options, run, dtype, "consumer.bench_step", step_figures)


def step_figures(measured: Mapping[str, Any], ceilings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rates of each arm: medians over the repetitions of what one did by the time it took."""
    arms = {name: _step_arm(arm, float(ceilings["matmul_tflops"])) for name, arm in measured.items()}
    for padded, ratio in ((PADDED, "packed_to_padded"), (PLAIN, "packed_to_plain"), (EAGER, "packed_to_eager")):
        if "chat" in arms and padded in arms:
            rate, other = (arms[name]["supervised_blocks_per_s"] for name in ("chat", padded))
            arms["chat"][ratio] = rate / other
    for name, arm in arms.items():
        if (resident := arms.get(name + RESIDENT)) is not None:
            arm["of_resident"] = resident["row_ms"] / arm["row_ms"]
    return arms


def _step_arm(arm: Mapping[str, Any], ceiling: float) -> dict[str, Any]:
    times, work = np.array(arm["step_s"]), arm["work"]

    def rate(name: str) -> float:
        return float(np.median(np.array([done[name] for done in work]) / times))

    low, middle, high = (float(value) / arm["rows"] * 1e3 for value in np.percentile(times, (10, 50, 90)))
    return {
        "repetitions": len(times),
        "rows": arm["rows"],
        "row_ms": middle,
        "row_ms_p10": low,
        "row_ms_p90": high,
        "update_ms": median(arm["update_s"]) * 1e3,
        "context_tokens_per_s": float(np.median(arm["context_tokens"] / times)),
        "positions_per_s": rate("slots"),
        "positions": work[0]["slots"],
        "supervised_blocks_per_s": rate("blocks"),
        "tflops": rate("flops") / 1e12,
        "of_matmul": rate("flops") / 1e12 / ceiling,
        "peak_gib": None if arm["peak_bytes"] is None else arm["peak_bytes"] / GIB,
        "computing_gib": None if arm["computing_bytes"] is None else arm["computing_bytes"] / GIB,
    }


_SHARED_ROWS = (
    ("model TFLOP/s", "tflops", "{:.2f}"),
    ("  of matmul", "of_matmul", "{:.2f}"),
    ("peak memory, GiB", "peak_gib", "{:.2f}"),
)
_STEP_ROWS = (
    ("fwd + bwd a row, ms", "row_ms", "{:.1f}"),
    ("  p10, p90", ("row_ms_p10", "row_ms_p90"), "{:.1f}, {:.1f}"),
    ("  of states on the device", "of_resident", "{:.3f}"),
    ("optimiser step, ms", "update_ms", "{:.1f}"),
    ("context Ktok/s", "context_tokens_per_s", "K"),
    ("draft positions/s", "positions_per_s", "{:,.0f}"),  # slot 0 included
    ("supervised blocks/s", "supervised_blocks_per_s", "{:,.0f}"),
    ("  of padded-512", "packed_to_padded", "{:.2f}"),
    ("  of padded-plain", "packed_to_plain", "{:.2f}"),
    ("  of padded-eager", "packed_to_eager", "{:.2f}"),
    *_SHARED_ROWS,
    ("  fwd + bwd, no moments", "computing_gib", "{:.2f}"),
)
_TARGET_ROWS = (
    ("rows run", "runs", "{}"),
    ("  compiled", "compiled", "yes or no"),
    ("Ktok/s", "tokens_per_s", "K"),
    ("  of transformers", "of_transformers", "{:.2f}"),
    ("  of alone", "of_alone", "{:.3f}"),
    ("a batch, ms", "batch_ms", "{:.1f}"),
    ("  p10, p90", ("batch_ms_p10", "batch_ms_p90"), "{:.1f}, {:.1f}"),
    ("  checksum, ms", "checksum_ms", "{:.1f}"),
    ("into the ring, GB/s", "gb_per_s", "{:.2f}"),
    *_SHARED_ROWS,
)


def part_shown(report: Mapping[str, Any]) -> list[Table | str]:
    """The table of step or target, and under it what the processes warned of."""
    return [part_table(report), *(f"warning: {warning}" for warning in report["warnings"])]


def part_table(report: Mapping[str, Any]) -> Table:
    """The arms of a report of step or target, side by side."""
    ceilings = report["ceilings"]
    title = (
        f"{report['options']['target']} on {ceilings['device']}, {ceilings['dtype']}; matmul of "
        f"{ceilings['matmul_size']}³: {ceilings['matmul_tflops']:.2f} TFLOP/s"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in report["arms"]:
        table.add_column(name, justify="right")
    for label, keys, form in _STEP_ROWS if report["bench"] == "step" else _TARGET_ROWS:
        cells = [_cell(arm, keys, form) for arm in report["arms"].values()]
        if any(cell != "-" for cell in cells):
            table.add_row(label, *cells)
    return table


def _cell(arm: Mapping[str, Any], keys: str | Sequence[str], form: str) -> str:
    values: list[Any] = [arm.get(key) for key in ([keys] if isinstance(keys, str) else keys)]
    if None in values:
        return "-"
    if form == "yes or no":
        return "yes" if values[0] else "no"
    return f"{values[0] / 1e3:.2f}" if form == "K" else form.format(*values)


# The target


def bench_target(options: TargetOptions) -> dict[str, Any]:
    """Measures the target's forward. UsageError, ConfigError, PacelineError."""
    if options.length > options.budget:
        raise UsageError(f"--length {options.length}: rows longer than --budget {options.budget}")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        run = write_run(Path(folder), options, token_budget=options.budget, micro_tokens=options.budget, anchors=0.25)
        dtype = load(run, options.settings).target.dtype
        return _measure("target", options, run, dtype, "producer.bench_target", target_figures)


def target_figures(measured: Mapping[str, Any], ceilings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rates of each arm, and their ratios to plain transformers and to the same rows without a ring."""
    arms: dict[str, dict[str, Any]] = {}
    for name, arm in measured.items():
        times = np.array(arm["batch_s"])
        low, middle, high = (float(value) * 1e3 for value in np.percentile(times, (10, 50, 90)))
        tflops = arm["flops"] / (middle / 1e3) / 1e12
        arms[name] = {
            "repetitions": len(times),
            "tokens": arm["tokens"],
            "tokens_per_s": arm["tokens"] / (middle / 1e3),
            "batch_ms": middle,
            "batch_ms_p10": low,
            "batch_ms_p90": high,
            "tflops": tflops,
            "of_matmul": tflops / ceilings["matmul_tflops"],
            "peak_gib": None if arm["peak_bytes"] is None else arm["peak_bytes"] / GIB,
            "runs": arm["runs"],
            "compiled": arm["compiled"],
        }
    for name, arm in arms.items():
        if name != "transformers":
            arm["of_transformers"] = arm["tokens_per_s"] / arms["transformers"]["tokens_per_s"]
        kind, streams, _ = name.partition(", ring")
        if streams:
            arm["of_alone"] = arm["tokens_per_s"] / arms[kind]["tokens_per_s"]
            arm["checksum_ms"] = median(measured[name]["checksum_s"]) * 1e3
            arm["gb_per_s"] = measured[name]["record_bytes"] / arm["batch_ms"] / 1e6
    return arms


# The stream


@dataclass(frozen=True)
class StreamOptions:
    device: str
    record_mb: int = 64
    rounds: int = 8
    ring_dir: str = "/dev/shm/paceline"
    gpu_mb: int = 512  # of one copy between ring and GPU
    messages: int = 3000  # announcements that are timed


def bench_stream(options: StreamOptions) -> dict[str, Any]:
    """Measures the ring. ConfigError, PacelineError."""
    from .bench_ring import measure

    if min(options.record_mb, options.rounds, options.gpu_mb) < 1 or options.messages < 10:
        raise UsageError("--record-mb and --rounds: one at least")
    speeds, latencies = measure(options.record_mb << 20, options.rounds, Path(options.ring_dir), options.messages)
    found, said = {"between processes": (speeds, "memcpy")}, Said()
    if options.device.startswith("cuda"):
        size, rounds = str(options.gpu_mb << 20), str(options.rounds)
        gpu = run_side("consumer.bench_stream", options.device, options.ring_dir, size, rounds, said=said)
        found["ring and GPU"] = (gpu, "page-locked")
    return {
        "bench": "stream",
        "date": time.strftime("%Y-%m-%d"),
        "options": asdict(options),
        "speeds": {part: stream_figures(ways, ceiling) for part, (ways, ceiling) in found.items()},
        "latency_us": _latencies(latencies),
        "warnings": said.warnings,
    }


def stream_figures(ways: Mapping[str, Sequence[float]], ceiling: str) -> dict[str, dict[str, float]]:
    """GB/s of each way: best and median round, and the best's share of the ceiling's best.

    ceiling: the name of one way, or what stands for "ring" in the name of the way that goes the same direction.
    """
    best = {name: max(values) for name, values in ways.items()}
    return {
        name: {
            "best_gb_per_s": best[name],
            "median_gb_per_s": median(values),
            "of_ceiling": best[name] / best[ceiling if ceiling in best else name.replace("ring", ceiling)],
        }
        for name, values in ways.items()
    }


def _latencies(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    record, bare = np.percentile(np.array(pairs), (50, 99), axis=0).T
    return {"p50": record[0], "p99": record[1], "zeromq_p50": bare[0], "zeromq_p99": bare[1]}


def stream_tables(report: Mapping[str, Any]) -> list[Table | str]:
    """A table for each part, and a line on announcements."""
    shown: list[Table | str] = []
    sizes = {"between processes": report["options"]["record_mb"], "ring and GPU": report["options"]["gpu_mb"]}
    for part, ways in report["speeds"].items():
        ceiling = "memcpy" if "memcpy" in ways else "page-locked"
        table = Table("", "best GB/s", "median GB/s", f"of {ceiling}", title=f"{part}, {sizes[part]} MiB a copy")
        for name, way in ways.items():
            table.add_row(
                name,
                f"{way['best_gb_per_s']:.1f}",
                f"{way['median_gb_per_s']:.1f}",
                f"{way['of_ceiling']:.2f}",
            )
        shown.append(table)
    us = report["latency_us"]
    shown.append(
        f"announce + ack: p50 {us['p50']:.0f} us, p99 {us['p99']:.0f} us "
        f"(ZeroMQ alone {us['zeromq_p50']:.0f}, {us['zeromq_p99']:.0f})"
    )
    return [*shown, *(f"warning: {warning}" for warning in report["warnings"])]
