"""The commands that make data: options, and what a terminal shows. `cli.py` takes them in."""

import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cli_shared import Device, Number, counter, load_run, set_option
from .errors import ConfigError, Interrupted, UsageError, counted

if TYPE_CHECKING:
    from ..producer.endpoint import EndpointOptions
    from ..producer.prepare import PrepareReport
    from ..producer.regenerate import Progress, RegenerateReport
    from .rows import Rows
    from .runfile import RunFile

_PLAIN_SECONDS = 30.0  # between two lines of progress where there is no terminal
_SPARE_SHOWN = 5  # tokens that may serve as mask token
_HERE = ("device", "dtype", "batch_size", "trust_remote_code")
_THERE = ("model", "concurrency", "timeout", "patience", "tries", "api_key_env", "extra_body")


@click.command(short_help="Let the target answer the prompts itself.")
@click.argument("data", nargs=-1, required=True, metavar="DATA...", type=click.Path(path_type=Path))
@click.option(
    "--out", required=True, metavar="FILE.jsonl", type=click.Path(path_type=Path), help="Written, or gone on with."
)
@click.option("--target", help="Folder, GGUF file or hub id of a model that answers here.")
@click.option(
    "--endpoint",
    "endpoints",
    metavar="URL",
    multiple=True,
    help="OpenAI-compatible server that answers, such as http://localhost:8000/v1. Repeatable: asked in turn.",
)
@click.option(
    "--turns",
    type=click.Choice(["last", "all"]),
    default="last",
    show_default=True,
    help="Which answers of a conversation are written anew.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="Of one answer.")
@click.option("--temperature", type=Number(min=0), help="0 is greedy. Default: the target's own.")
@click.option("--top-p", type=Number(min=0, max=1, min_open=True), help="Default: the target's own.")
@click.option("--top-k", type=click.IntRange(min=0), help="0 keeps all. Default: the target's own.")
@click.option("--seed", type=click.IntRange(min=0), help="Default: other answers each time.")
@click.option("--thinking/--no-thinking", default=None, help="The mode of the chat template.")
@click.option("--template-kwargs", metavar="JSON", help="Further variables for the chat template, as an object.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many rows.")
@click.option("--device", type=Device(), help="Target here: cuda:N or cpu. Default: cuda if there is one.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Target here.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Target here: rows at a time, at most.",
)
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run code that comes with the model.")
@click.option("--model", metavar="NAME", help="Endpoint: the model's name there. Default: the only one it serves.")
@click.option(
    "--concurrency", type=click.IntRange(min=1), default=64, show_default=True, help="Endpoint: rows asked at a time."
)
@click.option(
    "--timeout",
    type=Number(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Endpoint: seconds for one answer.",
)
@click.option(
    "--patience",
    type=Number(min=0),
    default=600.0,
    show_default=True,
    help="Endpoint: seconds that it may be away before the job ends; if it is only busy, at least --timeout.",
)
@click.option(
    "--tries",
    type=click.IntRange(min=1),
    default=6,
    show_default=True,
    help="Endpoint: tries of a row that it fails on.",
)
@click.option("--api-key-env", metavar="NAME", help="Endpoint: environment variable that holds its API key.")
@click.option("--extra-body", metavar="JSON", help="Endpoint: fields for every request, as an object.")
@click.pass_context
def regenerate(
    context: click.Context,
    data: tuple[Path, ...],
    out: Path,
    target: str | None,
    endpoints: tuple[str, ...],
    thinking: bool | None,
    template_kwargs: str | None,
    **options: Any,
) -> int:
    """Let the target answer the prompts of chat files itself, with the template, thinking and sampling of serving.

    DATA are chat files as for `prepare`; rows may also be prompts alone, {"prompt": text} or messages that end with the
    user's. What is written is for `prepare`. A job that was stopped or killed goes on when the same command is given
    again. Exit code 1 if rows are left without an answer.
    """
    if (target is None) == (not endpoints):
        raise UsageError("give either --target, to answer here, or --endpoint")
    _check_options(context, _THERE if target is not None else _HERE, "--target" if target is not None else "--endpoint")
    from ..producer.chat import thinking_variables
    from ..producer.regenerate import Listener
    from ..producer.regenerate import regenerate as run
    from ..producer.replies import Sampling

    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
    sampling = Sampling(**{name: options.pop(name) for name in names})
    kwargs = _object("--template-kwargs", template_kwargs)
    kwargs |= thinking_variables(thinking)
    there = {name: options.pop(name) for name in _THERE}
    endpoint = _endpoint(endpoints, **there) if endpoints else None
    with _Screen() as screen:
        listener = Listener(screen.say, screen.progress)
        try:
            report = run(
                data,
                out,
                target=target,
                endpoint=endpoint,
                sampling=sampling,
                template_kwargs=kwargs,
                listener=listener,
                **options,
            )
        except KeyboardInterrupt:
            raise Interrupted(f"stopped; the rows in {out} stand, and the same command goes on from them") from None
    click.echo("\n".join(_report_lines(report, target)))
    return 1 if report.failed else 0


def _check_options(context: click.Context, foreign: tuple[str, ...], chosen: str) -> None:
    for name in foreign:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('_', '-')} does not go with {chosen}")


def _endpoint(
    urls: tuple[str, ...], *, api_key_env: str | None, extra_body: str | None, **options: Any
) -> "EndpointOptions":
    from ..producer.endpoint import EndpointOptions, base_url

    key = None
    if api_key_env is not None and not (key := os.environ.get(api_key_env)):
        raise ConfigError(f"--api-key-env: the environment variable {api_key_env} is not set")
    for url in urls:
        base_url(url)
    return EndpointOptions(urls, api_key=key, body=_object("--extra-body", extra_body), **options)


def _object(option: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise UsageError(f"{option}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f'{option}: a JSON object was expected, such as {{"name": 1}}')
    return value


def _report_lines(report: "RegenerateReport", target: str | None) -> list[str]:
    share = report.unfinished / report.answered if report.answered else 0.0
    found = [
        f"{report.answered:,} of {counted(report.rows, 'row')} answered in {report.path}, "
        f"{counted(report.tokens, 'token')}; {report.unfinished:,} ({share:.0%}) stopped at the length limit"
    ]
    if report.refused:
        found.append(f"{report.refused:,} refused: {report.path.with_suffix('.refused')}")
    if report.failed:
        found.append(f"{report.failed:,} without an answer: the same command asks them again")
    else:
        found.append(f"next: paceline prepare {report.path} --target {target or 'TARGET'}")
    return found


class _Screen:
    """A bar on a terminal, else a line now and then; both on stderr."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._printed = time.monotonic()

    def __enter__(self) -> "_Screen":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            console = Console(stderr=True, highlight=False)
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), console=console
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        else:
            click.echo(text, err=True)

    def progress(self, progress: "Progress") -> None:
        done = progress.answered + progress.refused + progress.failed
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("", total=progress.rows)
                self._bar.start()
            self._bar.update(self._task, completed=done, description=_progress_text(progress))
        elif time.monotonic() - self._printed > _PLAIN_SECONDS:
            self._printed = time.monotonic()
            click.echo(_progress_text(progress), err=True)


def _progress_text(progress: "Progress") -> str:
    from .telemetry import duration

    parts = [f"{progress.answered:,} of {counted(progress.rows, 'row')}", f"{progress.tokens_per_s:,.0f} tokens/s"]
    parts += [f"{progress.refused:,} refused"] * bool(progress.refused)
    parts += [f"{progress.failed:,} failed"] * bool(progress.failed)
    return ", ".join([*parts, f"ETA {duration(progress.eta)}"])


@click.command()
@click.argument("data", nargs=-1, required=True, metavar="DATA...", type=click.Path(path_type=Path))
@click.option("--target", help="Model whose tokenizer and chat template are used.")
@click.option("--out", type=click.Path(path_type=Path), help="New folder to write. Default: in the cache.")
@click.option(
    "--max-length", type=click.IntRange(min=8), default=3072, show_default=True, help="Longest row, in tokens."
)
@click.option(
    "--supervise", type=click.Choice(["all", "last"]), default="all", show_default=True, help="Which answers."
)
@click.option("--thinking/--no-thinking", default=None, help="The chat template's enable_thinking.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run code that comes with the model.")
@click.option(
    "--show",
    "shown",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Print N rows with what is supervised.",
)
@set_option
def prepare(data: tuple[Path, ...], overrides: tuple[str, ...], shown: int, **options: Any) -> None:
    """Turn chat files into token rows with loss masks.

    DATA are chat files (.jsonl, .json, either with .gz or .zst, .parquet). Or it is one run file: then its data are
    prepared as its settings say and its target is fetched or converted, and nothing else; `paceline up` begins with
    this. What of the data can't be used is left out, with file, line and reason; docs/data.md lists forms and reasons.
    """
    first = next(iter(data))
    if first.suffix == ".toml":
        given = click.get_current_context().get_parameter_source
        if len(data) > 1 or any(given(name) is click.core.ParameterSource.COMMANDLINE for name in options):
            raise UsageError("a run file has its own settings: give it alone, and change them with --set")
        _prepare_run(load_run(first, overrides), shown)
    elif overrides:
        raise UsageError("--set changes a run file, and none is given")
    elif not options["target"]:
        raise UsageError("--target is missing: the model whose tokenizer and chat template are used")
    else:
        _prepare_files(data, shown, **options)


def _prepare_files(data: tuple[Path, ...], shown: int, thinking: bool | None, **options: Any) -> None:
    from ..producer.chat import thinking_variables
    from ..producer.prepare import prepare as prepare_rows
    from .rows import Rows

    with counter("conversations") as progress:
        report = prepare_rows(data, template_kwargs=thinking_variables(thinking), progress=progress, **options)
    _show_prepared(report)
    if shown:
        _show_rows(Rows.open(report.folder), shown)


def _prepare_run(run: "RunFile", shown: int) -> None:
    """What trainer and workers would each do first, done once: rows, target, and the checks that need no weights."""
    from ..producer.prepare import prepare_run, spare_tokens
    from .dataset import prepared_rows
    from .plan import plan_from
    from .target_info import check_run_mask_token, resolve_layer_ids, target_info

    if run.data.files:
        with counter("conversations") as progress:
            report = prepare_run(run, progress)
        _show_prepared(report, [file.weight for file in run.data.files])
    rows = prepared_rows(run)
    info = target_info(run.target.path, run.target.trust_remote_code)
    layers = resolve_layer_ids(run, info)
    plan = plan_from(run, rows)
    click.echo(
        f"target {info.model_type}, {info.num_layers} layers of {info.hidden_size}; records layers {layers}\n"
        f"{counted(plan.batches(0), 'batch', 'batches')} in the first epoch, {counted(plan.total_steps, 'step')} in all"
    )
    if shown:
        _show_rows(rows, shown)
    if run.drafter.needs_mask_token:
        spare = [f"{token} {text}" for token, text in islice(spare_tokens(rows, info).items(), _SPARE_SHOWN)]
        click.echo(
            f"set drafter.mask_token_id to a token that these data never use: {', '.join(spare) or 'none is special'}"
        )
    else:
        check_run_mask_token(run, info, rows.used_token)


def _show_rows(rows: "Rows", count: int) -> None:
    """Rows as colours tell them apart, or with marks where there are none."""
    from rich.console import Console

    from ..producer.show import show

    console = Console(highlight=False, soft_wrap=True)
    for text in show(rows, count, marks=console.color_system is None):
        console.print(text)


def _show_prepared(report: "PrepareReport", weights: Sequence[float] = ()) -> None:
    """What a preparation made; `weights` of the files, if a run file gives them."""
    found = " (prepared before)" if report.cached else ""
    share = f"{report.supervised / report.tokens:.0%}"
    click.echo(
        f"{counted(report.kept, 'row')} of {counted(report.conversations, 'conversation')} in {report.folder}{found}"
    )
    click.echo(
        f"{report.tokens:,} tokens, {report.supervised:,} ({share}) supervised; {counted(report.cut, 'row')} cut"
    )
    if report.copies:
        click.echo(
            f"{counted(report.copies, 'row')} the same as an earlier one: what is held out may be trained on too"
        )
    weights = weights or [1.0] * len(report.files)
    if len(report.files) > 1 or weights != [1.0]:
        for file, weight in zip(report.files, weights, strict=True):
            uses = "" if weight == 1 else f", weight {weight:g}: about {file.rows * weight:,.0f} uses in an epoch"
            left_out = f", {file.dropped:,} dropped" if file.dropped else ""
            click.echo(f"    {file.name}: {counted(file.rows, 'row')}, {file.tokens:,} tokens{left_out}{uses}")
    for reason, count in sorted(report.dropped.items(), key=lambda item: -item[1]):
        click.echo(f"{count:,} dropped: {reason}")
    for example in report.examples:
        click.echo(f"    {example}")
