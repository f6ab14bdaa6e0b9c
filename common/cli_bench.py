"""The commands that say what a run needs and how fast it is: `plan` and `bench`. `cli.py` takes them in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cli_shared import Device, Number, check_picture, json_option, load_run, run_argument, set_option
from .errors import UsageError
from .paths import make_folder

if TYPE_CHECKING:
    from .bench_parts import Measured


@click.command(short_help="Say what a run will need, and which split is fastest.")
@run_argument
@set_option
@click.option("--gpus", type=click.IntRange(1), metavar="N", help="GPUs to split. Default: this machine's.")
@click.option(
    "--gpu-memory",
    type=Number(min=0, min_open=True),
    metavar="GIB",
    help="Memory of each. Default: what nvidia-smi says.",
)
@click.option("--gpu-name", metavar="NAME", help="What they are: the part of nvidia-smi's name that says it, as H200.")
@click.option("--target-rate", metavar="RATE", help="Of one worker: 4.5 is Ktok/s, 0.08b is batches/s.")
@click.option("--drafter-rate", metavar="RATE", help="Of one rank, in the same unit.")
@json_option
def plan(
    run_path: Path,
    overrides: tuple[str, ...],
    gpus: int | None,
    gpu_memory: float | None,
    gpu_name: str | None,
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
        gpu_name=gpu_name,
        target_rate=target_rate,
        drafter_rate=drafter_rate,
        supervised=supervised_share(run),
    )
    click.echo(json.dumps(plan_json(made)) if as_json else "\n".join(plan_lines(made)))
    return 0 if made.fits else 1


@click.group(short_help="Measure this machine, in ratios.")
def bench() -> None:
    """Measure this machine, as ratios to what a part reaches alone."""


_profile_option = click.option(
    "--profile",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=str),
    help="Record a few steps there: a trace and a picture a process, and the largest kernels.",
)


_layers_option = click.option(
    "--layers", type=click.IntRange(min=1), default=5, show_default=True, help="Draft layers."
)
_block_option = click.option(
    "--block-size", type=click.IntRange(min=2), default=16, show_default=True, help="Slots in a block."
)
_anchors_option = click.option(
    "--anchors-per-token",
    type=Number(min=0, min_open=True, max=1),
    default=0.25,
    show_default=True,
    help="Anchors drawn per supervised token; in `step` of chat rows.",
)
_micro_option = click.option(
    "--micro-tokens",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="Context tokens in a micro-batch; in `step` of chat rows.",
)


def _check_profile(folder: str | None) -> None:
    if folder is not None:
        make_folder(Path(folder), "--profile: ", writable=True)


@bench.command(name="pipeline")
@click.option(
    "--target-config",
    "target",
    default="qwen3-0.6b",
    show_default=True,
    help="Shape with random weights, or a model folder.",
)
@click.option("--topology", "topologies", multiple=True, help="WORKERS-RANKS, may be repeated.  [default: 1-1]")
@click.option("--seconds", type=Number(min=0), default=60.0, show_default=True, help="Steady state that is measured.")
@click.option("--alone-seconds", type=Number(min=0), help="Of each side alone.  [default: --seconds]")
@click.option(
    "--warm-up",
    type=Number(min=0),
    default=60.0,
    show_default=True,
    help="Seconds after the first step that do not count.",
)
@click.option("--token-budget", type=click.IntRange(min=1), default=16384, show_default=True, help="Tokens in a batch.")
@click.option("--rows", type=click.Choice(["chat", "full"]), default="chat", show_default=True, help="Row lengths.")
@click.option(
    "--max-length", type=click.IntRange(min=1), default=3072, show_default=True, help="Longest row in tokens."
)
@_anchors_option
@_layers_option
@_block_option
@_micro_option
@click.option("--slots", type=click.IntRange(min=1), default=4, show_default=True, help="Slots in each ring.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/bench"), show_default=True, help="Folder.")
@click.option("--live", is_flag=True, help="One run, changed from each topology to the next while it runs.")
@click.option(
    "--settle", type=Number(min=0), help="Seconds after each change of --live that do not count.  [default: 10]"
)
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="PNG of the rate over --live's time.")
@_profile_option
@set_option
def bench_pipeline(
    target: str,
    topologies: tuple[str, ...],
    out: Path,
    live: bool,
    settle: float | None,
    picture: Path | None,
    profile: str | None,
    overrides: tuple[str, ...],
    **options: Any,
) -> None:
    """Both sides together, against each side alone."""
    from .bench import Options
    from .bench import bench_pipeline as run

    if not live and (settle is not None or picture is not None):
        raise UsageError("--settle and --picture belong to --live")
    if picture is not None:
        check_picture(picture, "--picture")
    _check_profile(profile)
    shared: dict[str, Any] = {"profile": None if profile is None else Path(profile), "settings": overrides}
    if live:
        from .bench_live import bench_live

        settle = 10.0 if settle is None else settle
        bench_live(out, target, topologies, Options(**options), settle=settle, picture=picture, **shared)
    else:
        run(out, target, topologies or ("1-1",), Options(**options), **shared)


_KINDS = ("full", "chat", "padded-512", "padded-plain", "padded-eager", "full-resident", "chat-resident")


def _part_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that `step` and `target` share."""
    for option in reversed(
        (
            click.option(
                "--target-config",
                "target",
                metavar="NAME",
                help="Shape with random weights, or a model folder.  [default: qwen3-8b, without a GPU smollm2-135m]",
            ),
            click.option("--device", type=Device(), help="cuda:N or cpu.  [default: the first GPU, else cpu]"),
            click.option("--length", type=click.IntRange(min=32), help="Tokens of a full row."),
            click.option("--seconds", type=Number(min=0), help="Of each arm, ten repetitions at least."),
            click.option("--steps", type=click.IntRange(min=1), help="Repetitions of each arm, instead of --seconds."),
            _layers_option,
            _profile_option,
            set_option,
            json_option,
        )
    ):
        command = option(command)
    return command


@bench.command(name="step")
@_part_options
@click.option(
    "--rows-kind",
    "kinds",
    multiple=True,
    type=click.Choice(_KINDS),
    help="full: rows of --length. chat: rows of a chat's lengths, packed. padded-512: those, each computed as 512 "
    "positions. padded-plain: so by plain PyTorch. padded-eager: that with nothing compiled but the attention. "
    "-resident: states on the device from the start. Repeatable.  "
    "[default: full]",
)
@click.option("--rows", type=click.IntRange(min=1), help="Full rows in a step.  [default: 4, on a CPU 1]")
@click.option("--anchors", type=click.IntRange(min=1), help="Blocks in a full row.  [default: 512, on a CPU 16]")
@_anchors_option
@_block_option
@_micro_option
def bench_step(**options: Any) -> None:
    """The drafter's step, against the matmul rate."""
    from .bench_parts import StepOptions
    from .bench_parts import bench_step as run

    small = {"rows": 1, "length": 256, "anchors": 16}
    _show_part(run, StepOptions, small, {"kinds": ("full",)}, **options)


@bench.command(name="target")
@_part_options
@click.option(
    "--rows-kind",
    type=click.Choice(["full", "chat", "both"]),
    default="both",
    show_default=True,
    help="Rows of --length, or of a chat's lengths.",
)
@click.option("--budget", type=click.IntRange(min=32), help="Tokens in a batch.  [default: 16384, on a CPU 256]")
def bench_target(rows_kind: str, **options: Any) -> None:
    """The target, packed and streaming, against plain transformers."""
    from .bench_parts import TargetOptions
    from .bench_parts import bench_target as run

    kinds = ("full", "chat") if rows_kind == "both" else (rows_kind,)
    _show_part(run, TargetOptions, {"length": 128, "budget": 256}, {"kinds": kinds}, **options)


def _show_part(
    run: Callable[[Any], dict[str, Any]],
    kind: "type[Measured]",
    small: dict[str, Any],
    defaults: dict[str, Any],
    *,
    device: str | None,
    target: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Runs a measurement with what was asked for; `small` are the defaults where there is no GPU."""
    from .bench_parts import default_device, default_target, part_shown

    _check_profile(options["profile"])
    device = device or default_device()
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    values: dict[str, Any] = defaults | ({} if device.startswith("cuda") else small | {"seconds": 5.0}) | given
    report = run(kind(device=device, target=target or default_target(device), settings=overrides, **values))
    _print(report, part_shown(report), as_json)
    if options["profile"] is not None:
        from rich.console import Console

        from .timeline import show

        names = (f"{report['bench']}-{arm.replace(', ', '-')}.json.gz" for arm in report["arms"])
        show([Path(options["profile"]) / name for name in names], Console(highlight=False, stderr=as_json))


@bench.command(name="stream")
@click.option("--record-mb", type=click.IntRange(min=1), default=64, show_default=True, help="MiB of a record.")
@click.option("--rounds", type=click.IntRange(min=1), default=8, show_default=True, help="Turns of each way.")
@click.option(
    "--device", type=Device(), help="GPU to copy to and from, or cpu for none.  [default: the first GPU, if any]"
)
@click.option("--ring-dir", default="/dev/shm/paceline", show_default=True, help="Where the rings are made.")
@json_option
def bench_stream(device: str | None, as_json: bool, **options: Any) -> None:
    """The ring, against memcpy and page-locked copies."""
    from .bench_parts import StreamOptions, default_device, stream_tables
    from .bench_parts import bench_stream as run

    report = run(StreamOptions(device=device or default_device(), **options))
    _print(report, stream_tables(report), as_json)


def _print(report: dict[str, Any], shown: "list[Any]", as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for part in shown:
        console.print(part, markup=False)
