"""The commands that say what a run needs and how fast it is: `plan` and `bench`. `cli.py` takes them in."""

import json
from pathlib import Path
from typing import Any

import click

from .cli_shared import json_option, load_run, run_argument, set_option


@click.command(short_help="Say what a run will need, and which split is fastest.")
@run_argument
@set_option
@click.option("--gpus", type=click.IntRange(1), metavar="N", help="GPUs to split. Default: this machine's.")
@click.option("--gpu-memory", type=float, metavar="GIB", help="Memory of each. Default: what nvidia-smi says.")
@click.option("--target-rate", metavar="RATE", help="Of one worker: 4.5 is Ktok/s, 0.08b is batches/s.")
@click.option("--drafter-rate", metavar="RATE", help="Of one rank, in the same unit.")
@json_option
def plan(
    run_path: Path,
    overrides: tuple[str, ...],
    gpus: int | None,
    gpu_memory: float | None,
    target_rate: str | None,
    drafter_rate: str | None,
    as_json: bool,
) -> int:
    """Say what a run will need, and which split is fastest.

    Memory of each GPU by part and the largest micro-batch that fits, bytes in /dev/shm, and the speed of every split
    of the GPUs. Nothing is started. Exit code 1: it does not fit.

    Speed is computed from what one worker and one rank do when they never wait: the rates given, or what this run's
    trainer measured, or an estimate from the shapes.
    """
    from .planner import make_plan, plan_json, plan_lines, supervised_share
    from .target_info import resolve_layer_ids, target_info

    run = load_run(run_path, overrides)
    info = target_info(run.target.path, run.target.trust_remote_code)
    made = make_plan(
        run,
        info,
        resolve_layer_ids(run, info),
        gpus=gpus,
        memory=gpu_memory,
        target_rate=target_rate,
        drafter_rate=drafter_rate,
        supervised=supervised_share(run),
    )
    click.echo(json.dumps(plan_json(made)) if as_json else "\n".join(plan_lines(made)))
    return 0 if made.fits else 1


@click.group(short_help="Measure this machine, in ratios.")
def bench() -> None:
    """Measure this machine, as ratios to what a part reaches alone."""


@bench.command(name="pipeline")
@click.option(
    "--target-config",
    "target",
    default="qwen3-0.6b",
    show_default=True,
    help="Shape with random weights, or a model folder.",
)
@click.option("--topology", "topologies", multiple=True, help="WORKERS-RANKS, may be repeated.  [default: 1-1]")
@click.option("--seconds", default=60.0, show_default=True, help="Steady state that is measured.")
@click.option("--warm-up", default=60.0, show_default=True, help="Seconds after the first step that do not count.")
@click.option("--token-budget", default=16384, show_default=True, help="Tokens in a batch.")
@click.option("--rows", type=click.Choice(["chat", "full"]), default="chat", show_default=True, help="Row lengths.")
@click.option("--max-length", default=3072, show_default=True, help="Longest row in tokens.")
@click.option("--anchors-per-token", default=0.25, show_default=True, help="Anchors drawn per supervised token.")
@click.option("--layers", default=5, show_default=True, help="Draft layers.")
@click.option("--block-size", default=16, show_default=True, help="Slots in a block.")
@click.option("--micro-tokens", default=8192, show_default=True, help="Context tokens in a micro-batch.")
@click.option("--slots", default=4, show_default=True, help="Slots in each ring.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/bench"), show_default=True, help="Folder.")
def bench_pipeline(target: str, topologies: tuple[str, ...], out: Path, **options: Any) -> None:
    """Both sides together against each side alone."""
    from .bench import Options
    from .bench import bench_pipeline as run

    run(out, target, topologies or ("1-1",), Options(**options))
