"""The commands for a drafter that was trained: `eval` and `export`. `cli.py` takes them in."""

import json
from pathlib import Path
from typing import Any

import click

from .cli_shared import Device, Existing, Number, check_picture, counter, json_option
from .errors import UsageError
from .paths import check_writable, writing


@click.command(name="eval")
@click.argument("drafter", type=click.Path(path_type=Path))
@click.option("--target", help="Folder, GGUF file or hub id. Default: the target that DRAFTER was trained for.")
@click.option(
    "--prompts",
    metavar="SET",
    multiple=True,
    help="A prompt set's name (demo, human-eval, gsm8k, bfcl-simple, bfcl-multiple, bfcl-parallel, bfcl-live), or a "
    "chat file as `paceline regenerate` reads them. Repeatable. Default: demo, 16 prompts.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Take the first so many prompts of each set.")
@click.option("--thinking/--no-thinking", default=None, help="The chat template's enable_thinking.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--block-size", type=click.IntRange(min=2), help="Anchor included. Default: the drafter's.")
@click.option("--temperature", type=Number(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=Number(min=0, max=1, min_open=True), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 keeps all.")
@click.option(
    "--proposals",
    type=click.Choice(["greedy", "sampled"]),
    default="sampled",
    show_default=True,
    help="How tokens are drafted at a temperature; the output's distribution is the target's either way.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--device", type=Device(), help="cuda:N or cpu. Default: cuda if there is one.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="Write the whole report there, as JSON.")
@click.option("--picture", metavar="FILE.png", type=click.Path(path_type=Path), help="Draw it there.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run code that comes with the model.")
@json_option
def evaluate(
    drafter: Path,
    prompts: tuple[str, ...],
    limit: int | None,
    thinking: bool | None,
    temperature: float,
    top_p: float,
    top_k: int,
    proposals: Any,
    seed: int,
    out: Path | None,
    picture: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Measure acceptance length and speed-up in real decoding.

    DRAFTER is a checkpoint or an exported folder. Several prompt sets make a table and a curve each. Exit code 1 if the
    output is not what the target alone would write.
    """
    if out is not None:
        check_writable(out, "--out: ")
    if picture is not None:
        check_picture(picture, "--picture")
    from ..consumer.decode import Sampling
    from ..consumer.evaluate import evaluate_sets
    from ..consumer.prompts import DEMO, load_sets
    from ..producer.chat import thinking_variables

    sampling = Sampling(temperature, top_p, top_k, proposals, seed)
    sets = load_sets(prompts or [DEMO], limit)
    template = thinking_variables(thinking)
    with counter("prompts") as count:
        progress = None if count is None else lambda done, _all: count(done)
        report = evaluate_sets(drafter, sets, sampling=sampling, template_kwargs=template, progress=progress, **options)
    if out is not None:
        with writing(out):
            report.write(out)
    if picture is not None:
        from ..consumer.plots import draw_evaluation

        several = len(sets) > 1
        with writing(picture):
            draw_evaluation(report.by_name() if several else {drafter.name: report.combined}, picture)
    click.echo(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))
    return 0 if report.combined.lossless else 1


@click.command(short_help="Write a checkpoint's drafter for engines to load, and check it.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["zlab", "speculators"]),
    default="zlab",
    show_default=True,
    help="zlab: loads in z-lab's dflash, in SGLang and in vLLM. speculators: in vLLM and in that library.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Of the tensors. Default: the run's trainer.dtype.",
)
@click.option("--target", metavar="NAME", help="What engines call the target. Default: the run's target.path.")
@click.option(
    "--eval",
    "evaluations",
    metavar="FILE",
    multiple=True,
    type=Existing("file"),
    help="A report of `paceline eval --out` for the model card. Repeatable. Those in the run's output are found.",
)
@click.option("--check", is_flag=True, help="Reload the folder in the engine's own code and decode with it.")
@click.option(
    "--prompts",
    metavar="FILE",
    type=Existing("file"),
    help="Prompts for --check, as `paceline eval` reads them. Default: the demo's.",
)
@click.option("--limit", type=click.IntRange(min=1), default=3, show_default=True, help="Prompts for --check.")
@click.option("--device", type=Device(), default="cpu", show_default=True, help="Where --check computes, in float32.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run code that comes with the model.")
def export(checkpoint: Path, out: Path | None, format_name: str, dtype: str | None, check: bool, **options: Any) -> int:
    """Write a checkpoint's drafter in a format that engines load.

    CHECKPOINT is a checkpoint, or FOLDER/best or FOLDER/newest of a run's output folder: best has the highest tau_chain
    on the held-out rows. With --check and no OUT it is a folder that was exported before. Exit code 1 if a check fails.
    """
    if check and out is not None:
        from ..consumer.export_check import require_engine

        require_engine(format_name)
    folder = checkpoint
    if out is not None:
        folder, checkpoint = _export_to(checkpoint, out, format_name, dtype, options)
    elif not check or not _is_exported(checkpoint):
        raise UsageError("OUT is missing: the folder to write (or give an exported folder and --check)")
    return _check_export(folder, checkpoint if out is not None else None, options) if check else 0


def _is_exported(folder: Path) -> bool:
    """Whether it is an exported drafter and no checkpoint. ConfigError if it is neither."""
    from ..consumer.export import check_drafter_folder

    return (check_drafter_folder(folder) / "config.json").is_file()


def _export_to(
    checkpoint: Path, out: Path, format_name: str, dtype: str | None, options: dict[str, Any]
) -> tuple[Path, Path]:
    from ..consumer.export import export as export_drafter

    made = export_drafter(
        checkpoint, out, format_name, dtype=dtype, target=options["target"], evaluations=options["evaluations"]
    )
    click.echo(f"{made.tensors} tensors of step {made.step}, {made.bytes / 1e6:.1f} MB in {made.dtype}: {made.folder}")
    if made.evaluations:
        shown = "1 evaluation" if made.evaluations == 1 else f"{made.evaluations} evaluations"
        click.echo(f"its README.md shows {shown} and how to serve it")
    else:
        click.echo(f"measure it with: paceline eval {made.folder} --target {made.target}")
    return made.folder, made.checkpoint


def _check_export(folder: Path, checkpoint: Path | None, options: dict[str, Any]) -> int:
    from ..consumer.export_check import check_export
    from .demo import DATA

    report = check_export(
        folder,
        options["prompts"] or DATA / "prompts.jsonl",
        checkpoint=checkpoint,
        target=None if checkpoint is not None else options["target"],
        limit=options["limit"],
        device=options["device"],
        trust_remote_code=options["trust_remote_code"],
    )
    click.echo("\n".join(report.lines()))
    return 0 if report.passed else 1
