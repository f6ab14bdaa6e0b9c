"""What several modules of commands share: options, the run file, and a count while something runs."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .runfile import RunFile

run_argument = click.argument("run_path", metavar="RUN.toml", type=click.Path(path_type=Path))
set_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a setting of the run file, for example --set trainer.max_steps=100. Repeatable.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def load_run(run_path: Path, overrides: tuple[str, ...]) -> "RunFile":
    from .runfile import load

    return load(run_path, overrides)


@contextlib.contextmanager
def counter(what: str) -> Iterator[Callable[[int], None] | None]:
    """Counts on one line of a terminal; says nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    start = time.monotonic()

    def count(done: int) -> None:
        rate = done / max(time.monotonic() - start, 1e-3)
        click.echo(f"\r{done:,} {what}, {rate:,.0f}/s\033[K", nl=False, err=True)

    yield count
    click.echo("\r\033[K", nl=False, err=True)
