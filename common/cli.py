"""The command line. Commands import what they need when they run: `--help` and `rings` load neither torch nor pydantic.

Errors of the classes in `errors` end a command with one line on stderr and their exit code; anything else is a fault
of paceline and shows its traceback. PACELINE_DEBUG=1 shows every traceback.
"""

import json
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .errors import ConfigError, PacelineError, UsageError

if TYPE_CHECKING:
    from .runfile import RunFile

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _InOrder(click.Group):
    """Lists commands in the order in which they are defined, which is the order in which they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="paceline", message="%(prog)s %(version)s")
def cli() -> None:
    """Train DFlash drafters for speculative decoding from a live stream of a target's hidden states."""


_run_argument = click.argument("run_path", metavar="RUN.toml", type=click.Path(path_type=Path))
_set_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a setting of the run file, for example --set trainer.max_steps=100. Repeatable.",
)
_resume_option = click.option(
    "--resume",
    metavar="CHECKPOINT",
    help="Go on from this checkpoint. Default: the newest complete one of the run, if any.",
)
_named_run_argument = click.argument("run", metavar="[RUN]", required=False)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _load(run_path: Path, overrides: tuple[str, ...]) -> "RunFile":
    from .runfile import load

    return load(run_path, overrides)


def _run_reference(text: str | None) -> tuple[str | None, Path]:
    """The name and the ring folder's parent of a run given by name or by run file, without validating the file."""
    from .paths import DEFAULT_RING_DIR

    if text is None or not text.endswith(".toml"):
        return text, DEFAULT_RING_DIR
    try:
        values = tomllib.loads(Path(text).read_text(encoding="utf-8"))
        return str(values["name"]), Path(values.get("stream", {}).get("ring_dir", DEFAULT_RING_DIR))
    except OSError as error:
        raise ConfigError(f"{text}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{text}: not a run file ({error})") from None


# Setting up


@cli.command()
@click.argument("path", metavar="[RUN.toml]", type=click.Path(path_type=Path), default=Path("run.toml"))
@click.option("--target", required=True, help="Local folder, GGUF file or hub id of a causal language model.")
@click.option("--gpus", type=click.IntRange(min=0), help="GPUs to use; 0 is a CPU run. Default: what this machine has.")
@click.option("--split", metavar="N-M", help="N workers and M trainer ranks. Default: 3-1 on 4 GPUs, 5-3 on 8.")
@click.option("--data", metavar="FILE", help="Chat file to train on (.jsonl, .jsonl.gz, .parquet).")
@click.option("--name", help="The run's name. Default: from the target.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(
    path: Path, target: str, gpus: int | None, split: str | None, data: str | None, name: str | None, force: bool
) -> None:
    """Write a commented run file for a target and a number of GPUs."""
    from .devices import gpu_count
    from .init import run_text, suggest_mask_token, write_run_file

    gpus = gpu_count() if gpus is None else gpus
    text = run_text(target, gpus, name=name, split=split, data=data, file=str(path))
    write_run_file(path, text, force)
    click.echo(f"wrote {path}")
    if suggest_mask_token(target) is None:
        click.echo(f"set drafter.mask_token_id in it, then: paceline up {path}")
    else:
        click.echo(f"next: paceline up {path}")


@cli.command()
@click.argument("data", nargs=-1, required=True, metavar="DATA...", type=click.Path(path_type=Path))
@click.option("--target", help="Model whose tokenizer and chat template are used.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write. Default: the cache.")
@click.option(
    "--max-length", type=click.IntRange(min=8), default=3072, show_default=True, help="Longest row in tokens."
)
@click.option("--supervise", type=click.Choice(["all", "last"]), default="all", show_default=True,
              help="Which assistant turns are supervised.")  # fmt: skip
@_set_option
def prepare(
    data: tuple[Path, ...],
    target: str | None,
    out: Path | None,
    max_length: int,
    supervise: str,
    overrides: tuple[str, ...],
) -> None:
    """Turn chat files (JSONL, Parquet) into token rows with loss masks.

    DATA are chat files, or one run file, whose data are prepared as its settings say.
    """
    from ..producer.prepare import prepare as prepare_rows
    from .paths import cache_dir

    if len(data) == 1 and data[0].suffix == ".toml":
        if target or out:
            raise UsageError("--target and --out come from the run file; use --set target.path=... there")
        _prepare_run(_load(data[0], overrides))
        return
    if not target:
        raise UsageError("prepare needs --target: the model whose tokenizer and chat template are used")
    if overrides:
        raise UsageError("--set is for a run file")
    report = prepare_rows(
        list(data), target=target, max_length=max_length, supervise=supervise, out=out, cache=cache_dir()
    )
    _show_prepared(report)


def _prepare_run(run: "RunFile") -> None:
    from ..producer.prepare import prepare as prepare_rows
    from .dataset import prepared_rows
    from .paths import cache_dir

    if run.data.files:
        report = prepare_rows(
            [Path(file) for file in run.data.files],
            target=run.target.path,
            max_length=run.data.max_length,
            supervise=run.data.supervise,
            out=None,
            cache=cache_dir(),
        )
        _show_prepared(report)
    prepared_rows(run)


def _show_prepared(report: Any) -> None:
    click.echo(f"{report.kept:,} rows in {report.folder}")
    for reason, count in sorted(report.dropped.items(), key=lambda item: -item[1]):
        click.echo(f"  {count:,} dropped: {reason}")
    for example in report.examples:
        click.echo(f"    {example}")


# Running


@cli.command()
@_run_argument
@_set_option
@_resume_option
@click.option("--plain", is_flag=True, help="Plain lines even on a terminal.")
def up(run_path: Path, overrides: tuple[str, ...], resume: str | None, plain: bool) -> int:
    """Run trainer and workers here under one supervisor, until done or Ctrl-C."""
    from .up import up as run_up

    return run_up(run_path, overrides, resume=resume, plain=plain)


@cli.command()
@_run_argument
@click.option("--worker", type=click.IntRange(min=0), default=0, show_default=True, help="Which worker this is.")
@_set_option
def producer(run_path: Path, worker: int, overrides: tuple[str, ...]) -> int:
    """Run one target worker in the foreground (what the unit runs)."""
    run = _load(run_path, overrides)
    from ..producer.worker import main as worker_main

    return worker_main(run, worker)


@cli.command()
@_run_argument
@_set_option
@_resume_option
def consumer(run_path: Path, overrides: tuple[str, ...], resume: str | None) -> int:
    """Run the trainer and its ranks in the foreground (what the unit runs)."""
    run = _load(run_path, overrides)
    from ..consumer.trainer import main as trainer_main

    return trainer_main(run, resume)


# Looking


@cli.command()
@_named_run_argument
@click.option("--watch", is_flag=True, help="Keep showing them, until Ctrl-C.")
@_json_option
def rings(run: str | None, watch: bool, as_json: bool) -> None:
    """Show the rings: states of their slots, bytes, rates, oldest READY record, whether the owner lives.

    RUN is a run's name or its file. Reads headers only and changes nothing.
    """
    from .inspect import show_rings

    if watch and as_json:
        raise UsageError("--watch and --json do not go together")
    name, folder = _run_reference(run)
    show_rings(folder, name, watch=watch, as_json=as_json)


@cli.command()
@_named_run_argument
@_json_option
def status(run: str | None, as_json: bool) -> None:
    """Show topology, loss, rates, ETA and which side waits for which.

    RUN is a run's name or its file. Default: every run of this machine that can be read.
    """
    from .status import find_status, show_status

    name, _ = _run_reference(run)
    found = find_status(name)
    if as_json:
        if name is not None:
            click.echo(json.dumps(found[0]))
        else:
            click.echo(json.dumps(found))
        return
    show_status(found)


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@_json_option
def audit(checkpoint: Path, as_json: bool) -> int:
    """Prove from a checkpoint that every batch is trained once, listed, or still to come."""
    from ..consumer.audit import audit as audit_checkpoint

    report = audit_checkpoint(checkpoint)
    click.echo(report.json() if as_json else report.text())
    return 0 if report.clean else 1


@cli.command()
@_named_run_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def clean(run: str | None, dry_run: bool) -> None:
    """Remove stale rings: those whose owner is dead and whose run has no trainer.

    What is in them is not lost: the batches are made again when the run goes on.
    """
    from .clean import clean_rings

    name, folder = _run_reference(run)
    clean_rings(folder, name, dry_run=dry_run, say=click.echo)


# Drafters


# Entry point


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0 done, 1 failed, 2 usage, 78 bad configuration, 130 interrupted."""
    try:
        result = cli.main(args=arguments, prog_name="paceline", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except PacelineError as error:
        return _fail(str(error), error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return _fail(error.format_message() + hint, error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # `paceline rings | head`: nobody reads on; keep the exit's flush quiet too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _fail(text: str, code: int) -> int:
    if os.environ.get("PACELINE_DEBUG") == "1":
        import traceback

        traceback.print_exc()
    print(f"paceline: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
