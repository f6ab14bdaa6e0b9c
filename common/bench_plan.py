"""What `paceline plan` says of a run against what `paceline bench pipeline` measured of it: speed, memory of each GPU.

The plan's speed is taken twice: as it estimates it from the shapes, before anything has run, and from the rates of each
side alone that were measured here, which is what the run file's owner can give it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from .bench import Result
from .devices import assign_devices, visible_gpu
from .forecast import placed_rate
from .planner import GIB, Plan, make_plan, supervised_share
from .runfile import RunFile
from .target_info import resolve_layer_ids, target_info

MIB = 2**20


def against_plan(run: RunFile, alone: Mapping[str, float], result: Result) -> dict[str, Any]:
    """For bench.json: `estimated` and `with_alone_rates`, tokens/s and ratios of the measured to them, and `memory`,
    bytes of each GPU that the run used. alone: tokens/s of one "producer", one "consumer"."""
    estimate, given = _plans(run, alone)
    return {
        "estimated": _speed(estimate, run, result.pipeline),
        "why_not": estimate.why_no_speed,
        "with_alone_rates": _speed(given, run, result.pipeline),
        "memory": _memory(estimate, run, result.gpus),
    }


def _plans(run: RunFile, alone: Mapping[str, float]) -> tuple[Plan, Plan]:
    """As estimated, and with the measured rates."""
    info = target_info(run.target.path, run.target.trust_remote_code)
    layers, share = resolve_layer_ids(run, info), supervised_share(run)
    devices = assign_devices(run)
    gpus = len({*devices.workers, *devices.ranks})
    target, drafter = (f"{alone[side] / 1e3:.9g}" for side in ("producer", "consumer"))
    return (
        make_plan(run, info, layers, gpus=gpus, supervised=share, live=False),
        make_plan(run, info, layers, gpus=gpus, supervised=share, target_rate=target, drafter_rate=drafter),
    )


def _speed(plan: Plan, run: RunFile, measured: float) -> dict[str, Any] | None:
    """None where the plan knows no rates."""
    if plan.speed is None:
        return None
    rate = 1e3 * placed_rate(plan.speed.rates, *assign_devices(run))
    target, drafter = plan.speed.rates
    return {
        "tokens_per_s": rate,
        "measured_of_it": measured / rate,
        "worker": 1e3 * target,
        "rank": 1e3 * drafter,
        "source": plan.speed.source,
    }


def _memory(plan: Plan, run: RunFile, gpus: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Of each GPU by its number in nvidia-smi; nothing where nothing was measured."""
    planned: Counter[str] = Counter()
    devices = assign_devices(run)
    for device in devices.workers:
        planned[device] += plan.worker.total
    for device in devices.ranks:
        planned[device] += plan.rank.total
    found = []
    for device, size in sorted(planned.items()):
        number = visible_gpu(device)
        if number is not None and number < len(gpus):
            used = gpus[number]["memory.used"] * MIB
            found.append({"gpu": number, "planned": size, "measured": used, "measured_of_it": used / size})
    return sorted(found, key=lambda one: one["gpu"])


def plan_table(results: Sequence[Result]) -> Table:
    """Of results whose `plan` is filled in."""
    shown = Table(title="paceline plan, and what was measured of it", caption=_caption(results))
    names = (
        "topology",
        "estimated",
        "measured",
        "from alone rates",
        "measured",
        "GiB planned",
        "GiB measured",
        "of it",
        "rank: tensors, reserved",
    )
    for name in names:
        shown.add_column(name, justify="right")
    for result in results:
        speeds = (result.plan["estimated"], result.plan["with_alone_rates"])
        memory = result.plan["memory"]
        shown.add_row(
            result.topology,
            *(cell for speed in speeds for cell in _cells(speed)),
            " ".join(f"{one['planned'] / GIB:.1f}" for one in memory) or "-",
            " ".join(f"{one['measured'] / GIB:.1f}" for one in memory) or "-",
            " ".join(f"{one['measured_of_it']:.2f}" for one in memory) or "-",
            ", ".join(f"{size / GIB:.1f}" for size in result.rank_memory.values()) or "-",
        )
    return shown


def _cells(speed: Mapping[str, Any] | None) -> tuple[str, str]:
    return ("-", "-") if speed is None else (f"{speed['tokens_per_s'] / 1e3:.2f}K", f"{speed['measured_of_it']:.2f}")


def _caption(results: Sequence[Result]) -> str | None:
    """Why nothing is estimated."""
    return next((f"no estimate: {result.plan['why_not']}" for result in results if result.plan["why_not"]), None)
