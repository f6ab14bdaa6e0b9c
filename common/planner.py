"""`paceline plan`: what a run will need and how fast it will go, before anything is started.

    memory    of a rank's and a worker's device by part, against what the GPU has; the largest micro-batch that fits
    rings     bytes in /dev/shm, against what can be written there (never MemTotal alone: a tmpfs holds no more than
              the memory that is left)
    speed     every split of the GPUs, from the speed of one worker and one rank: given, or what a trainer of this run
              measured, or estimated from the shapes and the GPU's rate

It says where each figure is from. No torch, no CUDA: GPUs are asked for through nvidia-smi.
"""

import contextlib
import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import paths
from .densest import Densest
from .errors import ConfigError, UsageError
from .footprint import (
    Parts,
    Shape,
    active_weights,
    attention_layers,
    checkpoint_bytes,
    checkpoints_kept,
    largest_micro_batch,
    micro_tokens,
    muon_flops,
    muon_shared,
    rank_parts,
    ring_bytes,
    slots_of,
    worker_parts,
)
from .forecast import Rates, Split, forecast, live_rates, splits
from .rows import Rows
from .space import free_bytes, size_text
from .target_info import deepest_layer
from .telemetry import read_status

if TYPE_CHECKING:
    from .runfile import RunFile
    from .target_info import TargetInfo

GIB = 2**30
USABLE = 0.95  # of a GPU's memory; the rest is the driver's and fragments

# Dense bf16 TFLOP/s of the makers' data sheets, by a part of the name that nvidia-smi gives. Longer names first.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}
# Shares of that peak measured on an H200 at Qwen3-8B's size (docs/performance.md): target forward, compiled and plain,
# and the drafter's step; and how many times as fast they are with fp8 products.
TARGET_SHARE, PLAIN_TARGET_SHARE, DRAFTER_SHARE = 0.61, 0.45, 0.59
TARGET_FP8, PLAIN_TARGET_FP8, DRAFTER_FP8 = 1.5, 1.15, 1.35
SMALLEST_HIDDEN = 2048  # narrower models leave a GPU idle between kernels: their speed cannot be had from arithmetic
SUPERVISED_SHARE = 0.8  # of a row's tokens, where no prepared rows say


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes

    @property
    def tflops(self) -> float | None:
        return next((rate for part, rate in PEAK_TFLOPS.items() if part in self.name), None)


@dataclass(frozen=True)
class Speed:
    """Speed of one worker and one rank, in `unit`, and where it is from."""

    rates: Rates
    unit: str
    source: str


@dataclass(frozen=True)
class Files:
    """Files of a run, so many at a time at most, and what their disk has room for. Bytes."""

    count: int
    each: int
    folder: Path
    free: int
    there: int  # of those that are there already

    @property
    def total(self) -> int:
        return self.count * self.each

    @property
    def fit(self) -> bool:
        return self.total <= self.free + self.there


@dataclass(frozen=True)
class Plan:
    name: str
    workers: int
    ranks: int
    gpus: Sequence[Gpu]
    count: int  # of GPUs to split
    rank: Parts
    worker: Parts
    shared: bool  # both sides on one GPU
    micro_tokens: int  # of the largest micro-batch that can come
    largest_micro: int | None  # None where the GPU's memory is not known
    slots: int  # draft positions of the micro-batch that has most
    of_rows: bool  # they are those of the run's rows; else of rows that are supervised throughout
    rings: Files
    checkpoints: Files
    speed: Speed | None
    why_no_speed: str

    @property
    def memory(self) -> int | None:
        return min((gpu.memory for gpu in self.gpus), default=None)

    @property
    def needed(self) -> int:
        """Bytes of the fullest GPU."""
        return self.rank.total + self.worker.total if self.shared else max(self.rank.total, self.worker.total)

    @property
    def fits(self) -> bool:
        """Nothing that is known says that the run cannot start."""
        memory = self.memory is None or self.needed <= USABLE * self.memory
        return memory and self.rings.fit and self.checkpoints.fit

    @property
    def splits(self) -> list[Split]:
        return splits(self.speed.rates, self.count) if self.speed and self.count else []

    @property
    def present(self) -> Split | None:
        """The run file's own split, where each process has a GPU."""
        return None if self.speed is None or self.shared else forecast(self.speed.rates, self.workers, self.ranks)


def make_plan(
    run: "RunFile",
    info: "TargetInfo",
    layer_ids: Sequence[int],
    *,
    gpus: int | None = None,
    memory: float | None = None,
    gpu_name: str | None = None,
    target_rate: str | None = None,
    drafter_rate: str | None = None,
    supervised: float | None = None,
    live: bool = True,
) -> Plan:
    """gpus: how many to split (default: those of the machine, else those of the run file); memory: GiB of each;
    gpu_name: what they are, one of `PEAK_TFLOPS`.

    target_rate, drafter_rate: of one worker and one rank, "4.5" Ktok/s or "0.08b" batches/s; both or neither.
    supervised: share of the rows' tokens. live: by what a trainer of this run has measured, if one has. UsageError.
    """
    count = gpus or run.workers.count + run.trainer.ranks
    found = list_gpus() if memory is None else [Gpu("GPU", int(memory * GIB))] * count
    count = gpus or len(found) or count
    if gpu_name is not None:
        found = [Gpu(_known(gpu_name), gpu.memory) for gpu in found]
        if not found:
            raise UsageError("--gpu-name: this machine has no GPU, so say --gpu-memory GIB as well")
    shape = Shape.of(run, info, len(layer_ids))
    device = "cuda" if found or gpus else "cpu"
    rows = known_rows(run)
    densest = Densest(run, rows)
    micro = micro_tokens(run, densest)
    last = deepest_layer(run, info, layer_ids)
    planes = len(layer_ids) + run.target.last_hidden
    worker = worker_parts(run, info, last, planes, device)
    shared = count < run.workers.count + run.trainer.ranks
    room = min((gpu.memory for gpu in found), default=None)
    spare = None if room is None else int(USABLE * room) - (worker.total if shared else 0)
    speed, why = _speed(run, info, shape, found, last, supervised, target_rate, drafter_rate, live)
    return Plan(
        name=run.name,
        workers=run.workers.count,
        ranks=run.trainer.ranks,
        gpus=found,
        count=count,
        rank=rank_parts(run, shape, micro, device, densest),
        worker=worker,
        shared=shared,
        micro_tokens=micro,
        largest_micro=None if spare is None else largest_micro_batch(run, shape, spare, device, densest),
        slots=slots_of(run, micro, densest),
        of_rows=rows is not None,
        rings=_files(run.workers.count, ring_bytes(run, planes, info.hidden_size), paths.ring_dir(run), "*.ring"),
        checkpoints=_files(
            checkpoints_kept(run), checkpoint_bytes(run, shape), paths.checkpoint_dir(run), "*/*.safetensors"
        ),
        speed=speed,
        why_no_speed=why,
    )


def _known(name: str) -> str:
    """The GPU of `PEAK_TFLOPS` that a user means. UsageError."""
    found = [known for known in PEAK_TFLOPS if known.lower() == name.strip().lower().removeprefix("nvidia ")]
    if not found:
        raise UsageError(f"--gpu-name {name}: nothing is known of its speed; known are {', '.join(PEAK_TFLOPS)}")
    return found[0]


def known_rows(run: "RunFile") -> Rows | None:
    """Those of `data.rows`; None where rows are still to be prepared."""
    if run.data.rows is None:
        return None
    try:
        return Rows.open(Path(run.data.rows))
    except ConfigError:
        return None


def supervised_share(run: "RunFile") -> float | None:
    """Of the tokens of `data.rows`; None where the rows are not prepared yet."""
    rows = known_rows(run)
    return None if rows is None else rows.meta["supervised"] / rows.meta["tokens"]


def _files(count: int, each: int, folder: Path, pattern: str) -> Files:
    there = 0
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # it may go meanwhile
            there += path.stat().st_blocks * 512
    return Files(count, each, folder, free_bytes(_nearest(folder)), there)


def _nearest(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def list_gpus() -> list[Gpu]:
    """The machine's GPUs, by nvidia-smi; none where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in listed.splitlines() if "," in line]
    return [Gpu(name.strip(), int(size) * 2**20) for name, size in rows if size.strip().isdigit()]


# Speed ---------------------------------------------------------------------------------------------------------------


def _speed(
    run: "RunFile",
    info: "TargetInfo",
    shape: Shape,
    gpus: Sequence[Gpu],
    last_layer: int,
    supervised: float | None,
    target_rate: str | None,
    drafter_rate: str | None,
    live: bool,
) -> tuple[Speed | None, str]:
    if target_rate or drafter_rate:
        if not (target_rate and drafter_rate):
            raise UsageError("give both --target-rate and --drafter-rate, or neither")
        return _given(target_rate, drafter_rate), ""
    status: Mapping[str, Any] = (read_status(paths.status_path(run)) if live else None) or {}
    if (rates := live_rates(status)) is not None:
        return Speed(rates, "batches/s", f"measured by this run's trainer up to step {status.get('step', 0)}"), ""
    peak = gpus[0].tflops if gpus else None
    if peak is None:
        return None, "give --target-rate and --drafter-rate, or run it once: nothing is known of this machine's speed"
    if info.hidden_size < SMALLEST_HIDDEN:
        return None, (
            f"a target of hidden size {info.hidden_size} is too small for an estimate: "
            "measure with paceline bench pipeline and give --target-rate and --drafter-rate"
        )
    share = SUPERVISED_SHARE if supervised is None else supervised
    reached = TARGET_SHARE if run.target.compile else PLAIN_TARGET_SHARE
    if run.target.fp8:
        reached *= TARGET_FP8 if run.target.compile else PLAIN_TARGET_FP8
    target = reached * peak * 1e9 / target_flops(info, last_layer, run.data.max_length)
    trained = DRAFTER_SHARE * (DRAFTER_FP8 if run.trainer.fp8 else 1)
    flops = drafter_flops(run, shape, share) / trained
    if run.optimizer.name == "muon":  # AdamW's update, a matter of memory, is in the share
        flops += update_flops(run, shape) / DRAFTER_SHARE / step_tokens(run)
    drafter = peak * 1e9 / flops
    return Speed(Rates(target, drafter), "Ktok/s", f"estimated for {gpus[0].name} from the shapes"), ""


def _given(target: str, drafter: str) -> Speed:
    units = {text.endswith("b") for text in (target, drafter)}
    if len(units) > 1:
        raise UsageError("--target-rate and --drafter-rate must both be in Ktok/s or both in batches/s (b)")
    try:
        rates = Rates(*(float(text.removesuffix("b")) for text in (target, drafter)))
    except ValueError:
        raise UsageError(f"rates are numbers, as 4.5 (Ktok/s) or 0.08b (batches/s), not {target} {drafter}") from None
    if not all(0 < rate < math.inf for rate in rates):
        raise UsageError("rates must be above 0 and finite")
    return Speed(rates, "batches/s" if True in units else "Ktok/s", "as given")


def target_flops(info: "TargetInfo", last_layer: int, length: int) -> float:
    """Of the target's forward, a token of rows of `length`: two a weight that it passes, and attention over half a row
    on average."""
    weights = active_weights(info, last_layer)
    attention = attention_layers(info, last_layer) * 4 * info.num_heads * info.head_dim * length / 2
    return 2 * weights + attention


def update_flops(run: "RunFile", shape: Shape) -> float:
    """Of Muon's update of all matrices, a rank's share of it."""
    whole = sum(muon_flops(*sides) for sides in shape.matrices)
    return whole / (run.trainer.ranks if muon_shared(run, shape) else 1)


def step_tokens(run: "RunFile") -> float:
    """Context tokens that a rank trains on in a step, if batches are full."""
    return run.stream.token_budget * run.trainer.batches_per_step / run.trainer.ranks


def drafter_flops(run: "RunFile", shape: Shape, supervised: float) -> float:
    """Of a drafter's step, a context token: forward and backward of its share of slots and of its own projections.

    Three times the forward's for what is trained, twice for the frozen head.
    """
    slots = run.objective.anchors_per_token * supervised * shape.block
    stack = 3 * 2 * shape.layers * shape.layer_weights
    head = 2 * 2 * shape.vocabulary * shape.hidden * (shape.block - 1) / shape.block
    context = 3 * 2 * shape.hidden * (shape.planes * shape.hidden + shape.layers * 2 * shape.keys)
    return slots * (stack + head) + context


# Shown ---------------------------------------------------------------------------------------------------------------


def plan_json(plan: Plan) -> dict[str, Any]:
    speed = plan.speed
    return {
        "run": plan.name,
        "split": f"{plan.workers}-{plan.ranks}",
        "gpus": [{"name": gpu.name, "memory": gpu.memory} for gpu in plan.gpus],
        "fits": plan.fits,
        "rank": {"bytes": plan.rank.total, "parts": dict(plan.rank.parts)},
        "worker": {"bytes": plan.worker.total, "parts": dict(plan.worker.parts)},
        "one_gpu_for_both": plan.shared,
        "micro_tokens": plan.micro_tokens,
        "largest_micro_tokens": plan.largest_micro,
        "draft_positions": plan.slots,
        "of_rows": plan.of_rows,
        "rings": _files_json(plan.rings),
        "checkpoints": _files_json(plan.checkpoints),
        "speed": None if speed is None else {**speed.rates._asdict(), "unit": speed.unit, "source": speed.source},
        "splits": [
            {"split": str(split), "rate": split.rate, "waits": split.bound, "idle_targets": split.idle_targets,
             "idle_drafters": split.idle_drafters} for split in plan.splits
        ],
    }  # fmt: skip


def _files_json(files: Files) -> dict[str, Any]:
    return {"bytes": files.total, "each": files.each, "folder": str(files.folder), "free": files.free}


def plan_lines(plan: Plan) -> list[str]:
    """The plan as text, a line each."""
    machine = _machine(plan.gpus)
    lines = [f"plan of {plan.name}: {plan.workers}-{plan.ranks}" + (f" on {machine}" if machine else ""), ""]
    lines += _memory_lines(plan)
    smaller = "lower stream.slots or stream.token_budget, or enlarge /dev/shm (--shm-size in a container)"
    fewer = "lower checkpoint.keep_last, or set output to a larger disk"
    lines += ["", _files_line("rings", plan.rings, smaller), _files_line("checkpoints", plan.checkpoints, fewer)]
    return [*lines, "", *_speed_lines(plan)]


def _machine(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return ""
    return f"{len(gpus)} x {gpus[0].name}, {size_text(min(gpu.memory for gpu in gpus))} each"


def _memory_lines(plan: Plan) -> list[str]:
    lines = []
    for who, parts in (("a rank's", plan.rank), ("a worker's", plan.worker)):
        lines.append(f"{who} device {size_text(parts.total):>9}")
        lines += [f"  {name:<31} {size_text(size):>9}" for name, size in parts.parts.items() if size]
    if plan.memory is not None:
        both = "both on one GPU" if plan.shared else "the fuller of the two"
        verdict = "fits" if plan.needed <= USABLE * plan.memory else "DOES NOT FIT"
        lines.append(f"{both}: {size_text(plan.needed)} of {size_text(plan.memory)}: {verdict}")
    of = "" if plan.of_rows else ", if rows are supervised throughout"
    lines.append(f"micro-batches of up to {plan.micro_tokens:,} tokens and {plan.slots:,} draft positions{of}")
    if plan.largest_micro is not None:
        lines.append(
            f"largest trainer.micro_tokens that fits: {plan.largest_micro:,}"
            if plan.largest_micro
            else "no micro_tokens fits: lower data.max_length, objective.max_anchors or drafter.layers"
        )
    return lines


def _files_line(name: str, files: Files, todo: str) -> str:
    need = f"{name}: {files.count} x {size_text(files.each)} = {size_text(files.total)} in {files.folder}"
    room = f"{size_text(files.free)} free" + (f", {size_text(files.there)} are there" if files.there else "")
    return f"{need}: fits ({room})" if files.fit else f"{need}: DOES NOT FIT ({room}): {todo}"


def _speed_lines(plan: Plan) -> list[str]:
    if plan.speed is None:
        return [f"speed: {plan.why_no_speed}"]
    rates, unit = plan.speed.rates, plan.speed.unit
    lines = [
        f"speed: one worker {rates.target:.3g} {unit}, one rank {rates.drafter:.3g} {unit} ({plan.speed.source})",
        f"{'split':>7} {unit:>10}  targets idle  drafters idle",
    ]
    for split in plan.splits[:8]:
        mark = "  <- this run" if (split.workers, split.ranks) == (plan.workers, plan.ranks) else ""
        idle = f"{split.idle_targets:>12.0%}  {split.idle_drafters:>13.0%}"
        lines.append(f"{split!s:>7} {split.rate:>10.3g}  {idle}{mark}")
    return [*lines, *_better(plan)]


def _better(plan: Plan) -> list[str]:
    if not plan.splits:
        return []
    best, present = plan.splits[0], plan.present
    used = plan.workers + plan.ranks
    if present is None or used != plan.count or present.rate >= best.rate:
        return [f"best split of {plan.count} GPUs: {best}"]
    gain = f"{best.rate / present.rate - 1:+.0%}".replace("%", " %")
    return [f"best split of {plan.count} GPUs: {best}, {gain} over {present}"]
