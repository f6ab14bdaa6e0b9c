"""The command line. Commands import what they need when they run: `--help` and `rings` load neither torch nor pydantic.

Errors of the classes in `errors` end a command with one line on stderr and their exit code, and so do the system's own
(a full disk, a folder that cannot be written); anything else is a fault of paceline and shows its traceback.
PACELINE_DEBUG=1 shows every traceback.
"""

import contextlib
import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .cli_bench import bench, plan
from .cli_data import prepare, regenerate
from .cli_drafter import evaluate, export
from .cli_shared import Device, Existing, Number, json_option, load_run, run_argument, set_option
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


def _not_empty(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """An unset shell variable is no wish for the default."""
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty.", context, option)
    return value


_resume_option = click.option(
    "--resume",
    metavar="CHECKPOINT",
    callback=_not_empty,
    help="Go on from this checkpoint. Default: the newest complete one of the run, if any.",
)
_run_or_instance_argument = click.argument(
    "run_path", metavar="[RUN.toml]", required=False, type=click.Path(path_type=Path)
)
_instance_option = click.option(
    "--instance",
    metavar="NAME",
    help="As systemd's units name it, in place of RUN.toml: RUN for a trainer and RUN.N for worker N, "
    "of /etc/paceline/RUN.toml.",
)
_named_run_argument = click.argument("run", metavar="[RUN]", required=False)


def _load_run_or_instance(run_path: Path | None, name: str | None, overrides: tuple[str, ...]) -> "RunFile":
    """The run file given, or the one that belongs to the unit of run `name`."""
    from .units import CONFIG_DIR

    if (run_path is None) == (name is None):
        raise UsageError("give either a run file or --instance")
    path = run_path or CONFIG_DIR / f"{name}.toml"
    run = load_run(path, overrides)
    if name is not None and run.name != name:
        raise ConfigError(f'{path}: its name is "{run.name}"; units find a run by its file, so both must be the same')
    return run


class _Unfailing(io.TextIOWrapper):
    """Drops what cannot be written. A log often lies on the disk of the checkpoints: a full one ends no side of a run,
    nor does a reader that leaves."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def _log_to_stderr() -> None:
    """What a process of a run logs, a line each without stamps: the journal and `up` add their own. Of one that hangs
    and is aborted, by systemd's watchdog for one, also where each thread stood."""
    import faulthandler
    import logging

    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # else somebody has put another there
            stream.flush()
            raw = open(number, "wb", closefd=False)  # noqa: SIM115 - for good
            setattr(sys, name, _Unfailing(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True))
    faulthandler.enable(2)  # by number: sys.stderr may be no file
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)


def _yield_idle_cores() -> None:
    """Idle OpenMP threads sleep instead of spinning, in this process and its ranks: the other side may need the core.

    Worker and rank with two threads each on two cores reach 1.04 instead of 0.71 of what sharing without loss would
    give (benchmarks/pipeline_cpu.py). Read when torch is first imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _run_reference(text: str | None) -> tuple[str | None, Path]:
    """The name and the ring folder's parent of a run given by name or by run file, without validating the file."""
    import tomllib

    from .paths import DEFAULT_RING_DIR, run_file_error

    if text is not None and not text.strip():
        raise UsageError("RUN is empty: give a run's name or its file")
    if text is None or not text.endswith(".toml"):
        if text is not None and "/" in text:
            raise UsageError(f"{text}: a run's name or its file (.toml) was expected")
        return text, DEFAULT_RING_DIR
    path = Path(text)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        name, rings = values["name"], values.get("stream", {}).get("ring_dir", str(DEFAULT_RING_DIR))
        if not isinstance(name, str) or not isinstance(rings, str):
            raise ValueError("name and stream.ring_dir are texts")
        return name, path.absolute().parent / Path(rings).expanduser()  # as `runfile.load` has it
    except OSError as error:
        raise run_file_error(path, error) from None
    except KeyError:
        raise ConfigError(f"{text}: not a run file (it has no name)") from None
    except (ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{text}: not a run file ({error})") from None


# Setting up


@cli.command(short_help="Run the whole pipeline on a small real target here.")
@click.argument("out", type=click.Path(path_type=Path), default=Path("paceline-demo"))
@click.option(
    "--data",
    metavar="FILE",
    type=Existing("file"),
    help="Chat file to train on. Default: a slice of SmolLM2's own answers that comes along.",
)
@click.option("--plain", is_flag=True, help="Plain lines even on a terminal.")
def demo(out: Path, data: Path | None, plain: bool) -> int:
    """Run the whole pipeline on a small real target here, CPU or GPU.

    Everything it makes goes to the folder OUT. Takes up to five minutes on two cores.
    """
    from .demo import demo as run_demo

    return run_demo(out, data=data, plain=plain)


@cli.command(short_help="Write a commented run file for a target.")
@click.argument("path", metavar="[RUN.toml]", type=click.Path(path_type=Path), default=Path("run.toml"))
@click.option("--target", required=True, help="Local folder, GGUF file or hub id of a causal language model.")
@click.option("--gpus", type=click.IntRange(min=0), help="GPUs to use, 0 for CPU. Default: all of this machine.")
@click.option("--split", metavar="N-M", help="N workers and M trainer ranks. Default: 3-1 on 4 GPUs, 5-3 on 8.")
@click.option("--data", metavar="FILE", default="data.jsonl", help="Chat file to train on (docs/data.md).")
@click.option("--name", help="The run's name. Default: from the target.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(
    path: Path, target: str, gpus: int | None, split: str | None, data: str, name: str | None, force: bool
) -> None:
    """Write a commented run file for a target and a number of GPUs."""
    from .devices import gpu_count
    from .init import run_text, suggest_mask_token, write_run_file

    gpus = gpu_count() if gpus is None else gpus
    text = run_text(target, gpus, name=name, split=split, data=data, file=path)
    write_run_file(path, text, force)
    click.echo(f"wrote {path}")
    if suggest_mask_token(target) is None:
        named = f"`paceline prepare {path}` names tokens that the data never use"
        click.echo(f"set drafter.mask_token_id in it ({named}), then: paceline up {path}")
    else:
        click.echo(f"next: paceline doctor {path}, which looks whether all is there; then paceline up {path}")


cli.add_command(regenerate)
cli.add_command(prepare)
cli.add_command(plan)


# Running


@cli.command()
@run_argument
@set_option
@_resume_option
@click.option("--plain", is_flag=True, help="Plain lines even on a terminal.")
def up(run_path: Path, overrides: tuple[str, ...], resume: str | None, plain: bool) -> int:
    """Run trainer and workers here, until done or Ctrl-C."""
    from .up import up as run_up

    return run_up(run_path, overrides, resume=resume, plain=plain)


@cli.command()
@_run_or_instance_argument
@click.option("--worker", type=click.IntRange(min=0), default=0, show_default=True, help="Which worker this is.")
@click.option(
    "--device", metavar="NAME", type=Device(elsewhere=True), help="cpu or cuda:N. Default: where the run file puts it."
)
@_instance_option
@set_option
def producer(
    run_path: Path | None, worker: int, device: str | None, instance: str | None, overrides: tuple[str, ...]
) -> int:
    """Run one target worker in the foreground."""
    if instance is not None:
        from .units import split_instance

        instance, worker = split_instance(instance)
    run = _load_run_or_instance(run_path, instance, overrides)
    _log_to_stderr()
    _yield_idle_cores()
    from ..producer.worker import main as worker_main

    return worker_main(run, worker, device=device)


@cli.command()
@_run_or_instance_argument
@_instance_option
@set_option
@_resume_option
def consumer(run_path: Path | None, instance: str | None, overrides: tuple[str, ...], resume: str | None) -> int:
    """Run the trainer and its ranks in the foreground."""
    run = _load_run_or_instance(run_path, instance, overrides)
    _log_to_stderr()
    _yield_idle_cores()
    from ..consumer.trainer import main as trainer_main

    return trainer_main(run, resume)


_live_run_argument = click.argument("run", metavar="RUN")


@cli.command()
@_live_run_argument
@click.argument("count", metavar="N", type=click.IntRange(min=0))
@click.option(
    "--gpu",
    "gpus",
    type=click.IntRange(min=0),
    multiple=True,
    help="Put new workers on this GPU. Repeatable: taken in turn.  [default: where the run file puts them; further "
    "ones on GPUs that the run does not use]",
)
def scale(run: str, count: int, gpus: tuple[int, ...]) -> None:
    """Give a live run N workers, and wait until it has them.

    RUN is a run's name or its file. New workers warm up before they take work. Of more than N the highest leave: each
    makes its batch to the end, what is in its ring is trained, then the ring is removed.
    """
    from .scale import scale as scale_run

    scale_run(_live_run(run), count, gpus, click.echo)


@cli.command(short_help="Restart a live run's trainer, by its run file.")
@_live_run_argument
def restart(run: str) -> None:
    """Stop a live run's trainer with a checkpoint and start it again, by the run file as it is now.

    RUN is a run's name or its file. Workers go on meanwhile, so this is how the number of ranks changes.
    """
    from .scale import restart as restart_run

    restart_run(_live_run(run), click.echo)


@cli.command(short_help="Stop a live run with a checkpoint.")
@_live_run_argument
def stop(run: str) -> None:
    """Stop a live run with a checkpoint, and wait until it has ended.

    RUN is a run's name or its file.
    """
    from .scale import stop as stop_run

    stop_run(_live_run(run), click.echo)


def _live_run(run: str) -> str:
    name, _ = _run_reference(run)
    assert name is not None
    return name


# Looking


@cli.command()
@_named_run_argument
@click.option("--watch", is_flag=True, help="Keep showing them, until Ctrl-C.")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=Number(min=0.1),
    default=1.0,
    show_default=True,
    help="Between two pictures of --watch.",
)
@click.option(
    "--svg",
    "picture",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="When --watch ends, write its last picture there.",
)
@json_option
def rings(run: str | None, watch: bool, interval: float, picture: Path | None, as_json: bool) -> None:
    """Show the rings: slots by state, rates, owners, who waits.

    RUN is a run's name or its file. Default: every run that has rings. Reads headers only and changes nothing.
    """
    if watch and as_json:
        raise UsageError("--watch and --json do not go together")
    if picture is not None and not watch:
        raise UsageError("--svg goes with --watch")
    given = click.get_current_context().get_parameter_source("interval")
    if given is click.core.ParameterSource.COMMANDLINE and not watch:
        raise UsageError("--interval goes with --watch")
    name, folder = _run_reference(run)
    if watch:
        _rings_watch(name, folder, interval, picture)
    elif as_json:
        _rings_json(name, folder)
    else:
        _rings_table(_ring_names(name, folder), folder)


def _ring_names(name: str | None, folder: Path) -> list[str]:
    from .inspect import runs_with_rings

    return [name] if name is not None else runs_with_rings(folder)


def _rings_json(name: str | None, folder: Path) -> None:
    """An object of the run named, else a list of one for every run that has rings."""
    from .inspect import read_rings, rings_json

    found = [(one, read_rings(folder / one)) for one in _ring_names(name, folder)]
    objects = [rings_json(one, rings) for one, rings in found if rings or name is not None]
    click.echo(json.dumps(objects[0] if name is not None else objects))


def _rings_table(names: list[str], folder: Path) -> None:
    from . import inspect, rings_screen

    console = rings_screen.QuietConsole(highlight=False)
    style = rings_screen.style_for(console)
    shown = [(name, found) for name in names if (found := inspect.read_rings(folder / name))]
    if not shown:
        raise PacelineError(f"no rings in {folder / names[0] if len(names) == 1 else folder}")
    for place, (name, found) in enumerate(shown):
        if place:
            console.print()
        console.print(rings_screen.table(name, found, width=console.width, style=style))
    console.print(rings_screen.legend(console.width, style))


def _rings_watch(name: str | None, folder: Path, interval: float, picture: Path | None) -> None:
    from . import rings_screen
    from .paths import check_writable

    if picture is not None:
        if not picture.absolute().parent.is_dir():
            raise UsageError(f"--svg: there is no folder {picture.absolute().parent}")
        check_writable(picture, "--svg: ")
    console = rings_screen.QuietConsole(highlight=False)
    rings_screen.watch(lambda: _ring_names(name, folder), folder, console, interval, picture)


@cli.command()
@_named_run_argument
@json_option
def status(run: str | None, as_json: bool) -> None:
    """Show progress, rates and which side waits for which.

    RUN is a run's name or its file. Default: every run of this machine that can be read.
    """
    from .status import run_states, status_table, status_text

    name, folder = _run_reference(run)
    found = run_states(name, folder)
    if as_json:
        objects = [state.json() for state in found]
        click.echo(json.dumps(objects[0] if name is not None else objects))
        return
    if not found:
        click.echo("no run has a status on this machine")
        return
    if not sys.stdout.isatty():
        click.echo("\n\n".join(status_text(state) for state in found))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for place, state in enumerate(found):
        console.print(*([""] if place else []), status_table(state), sep="\n")


@cli.command()
@_named_run_argument
@click.option("--port", type=click.IntRange(0, 65535), default=9478, show_default=True, help="0 takes a free one.")
@click.option(
    "--listen",
    "address",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Any other than a loopback address lets other machines read.",
)
def metrics(run: str | None, port: int, address: str) -> None:
    """Serve a run's metrics to Prometheus, until Ctrl-C.

    RUN is a run's name or its file. Default: every run of this machine. Only reads, and only when asked over HTTP.
    """
    from .metrics import serve

    name, folder = _run_reference(run)
    serve(name, folder, address, port, lambda text: click.echo(text, err=True))


@cli.command()
@click.argument("run_path", metavar="[RUN.toml]", required=False, type=click.Path(path_type=Path))
@set_option
@json_option
def doctor(run_path: Path | None, overrides: tuple[str, ...], as_json: bool) -> int:
    """Check this machine, and what a run file needs of it.

    Each line says OK, WARN or FAIL, and what to do. Exit code 1 if any check fails. Changes nothing.
    """
    from .doctor import checks, doctor_lines

    if overrides and run_path is None:
        raise UsageError("--set changes a run file, and none is given")
    found = checks(run_path, overrides)
    if as_json:
        click.echo(json.dumps([check.json() for check in found]))
    else:
        click.echo("\n".join(doctor_lines(found, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)))
    return int(any(check.level == "FAIL" for check in found))


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@json_option
def audit(checkpoint: Path, as_json: bool) -> int:
    """Prove that no batch is lost or trained twice.

    Each batch of the plan up to where CHECKPOINT stands is trained once, or listed with its reason and rows.
    """
    from ..consumer.audit import audit as audit_checkpoint

    report = audit_checkpoint(checkpoint)
    click.echo(report.json() if as_json else report.text())
    return 0 if report.clean else 1


@cli.command()
@_named_run_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def clean(run: str | None, dry_run: bool) -> None:
    """Remove rings that nobody works on.

    Kept are rings whose owner lives, and all of a run whose trainer does.

    What is in them is not lost: the batches are made again when the run goes on.
    """
    from .clean import clean_rings

    name, folder = _run_reference(run)
    clean_rings(folder, name, dry_run=dry_run, say=click.echo)


# systemd


_root_option = click.option(
    "--root",
    type=Existing("folder"),
    default=Path("/"),
    help="Below this folder, as for an image; nothing is started or reloaded then.",
)


@cli.command(name="install-units")
@click.option("--user", default="paceline", show_default=True, help="Whom the units run as; made if missing.")
@click.option("--group", help="Who may look at runs. Default: a group of the user's name.")
@click.option(
    "--python", type=click.Path(path_type=Path), help="Python of the environment that the units use. Default: this one."
)
@click.option(
    "--writable",
    metavar="FOLDER",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder outside /var/lib/paceline that the runs' output is in. Repeatable.",
)
@_root_option
@click.option("--dry-run", is_flag=True, help="Only print what would be written.")
def install_units(**options: Any) -> None:
    """Install systemd units for workers and trainers.

    Run files are then /etc/paceline/RUN.toml. `systemctl enable --now paceline@RUN.target` starts a run and
    `paceline scale RUN N` gives it workers.
    """
    from .unitfiles import install

    install(**options, say=click.echo)


@cli.command(name="uninstall-units")
@_root_option
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def uninstall_units(root: Path, dry_run: bool) -> None:
    """Remove what install-units and scale have made.

    Nothing may be running. Run files, checkpoints and caches stay.
    """
    from .unitfiles import uninstall

    uninstall(root=root, dry_run=dry_run, say=click.echo)


# Drafters

cli.add_command(evaluate)
cli.add_command(export)
cli.add_command(bench)


# Entry point


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0 done, 1 failed, 2 usage, 78 bad configuration, 130 interrupted."""
    _open_standard_files()
    code = 0
    try:
        result = cli.main(args=arguments, prog_name="paceline", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
        return code
    except PacelineError as error:
        return _fail(str(error), error.exit_code)
    except click.ClickException as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # from click 8.2 on
            error.show()
            return error.exit_code
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return _fail(error.format_message() + hint, error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # `paceline rings | head`: nobody reads on
        _silence_stdout()
        return code
    except OSError as error:
        return _fail(_system_error(error), 1)


def _open_standard_files() -> None:
    """Opens those of the three standard files that the caller has closed: the next file opened would take their place,
    and be written to as such."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115 - for good


def _silence_stdout() -> None:
    """What could not be written is dropped, so that the exit's own flush fails no more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _system_error(error: OSError) -> str:
    """In one line, with the file that it is about."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.EMFILE:
        reason += ": raise `ulimit -n`"
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason}"
    try:
        os.write(1, b"\n")  # the failed write was dropped: only another one tells
    except OSError:
        _silence_stdout()
        return f"cannot write standard output: {reason}"
    return f"{reason} (PACELINE_DEBUG=1 shows where)"


def _fail(text: str, code: int) -> int:
    if os.environ.get("PACELINE_DEBUG") == "1":
        import traceback

        traceback.print_exc()
    line = " ".join(text.split())
    print(f"paceline: {line}", file=sys.stderr)
    if "NOTIFY_SOCKET" in os.environ:  # so that `systemctl status` says why the unit failed
        from .notify import notify

        notify(f"STATUS={line}")
    return code


if __name__ == "__main__":
    sys.exit(main())
