"""What several modules of commands share: options, the run file, and a count while something runs."""

import contextlib
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from .errors import ConfigError

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


class Number(click.FloatRange):
    """A number within bounds. NaN and infinity, which bounds alone let through, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Existing(click.Path):
    """A path to a file, or to a folder, that is there. ConfigError if it is not: click's own would be a wrong usage."""

    def __init__(self, kind: Literal["file", "folder"]) -> None:
        super().__init__(file_okay=kind == "file", path_type=Path)  # for the shell's completion
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path, option = Path(value), param.opts[0] if param else ""
        if not path.exists():
            raise ConfigError(f"{option}: there is no {self._kind} {path}")
        if path.is_dir() != (self._kind == "folder"):
            raise ConfigError(f"{option}: {path} is a {'folder' if path.is_dir() else 'file'}: give a {self._kind}")
        return path


class Device(click.ParamType):
    """cpu, cuda or cuda:N. elsewhere: it need not be a GPU of this machine, or is checked later."""

    name = "device"

    def __init__(self, elsewhere: bool = False) -> None:
        self._elsewhere = elsewhere

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not (found := re.fullmatch(r"cpu|cuda(?::([0-9]{1,4}))?", value)):
            self.fail(f"{value}: cpu, cuda or cuda:N was expected.", param, ctx)
        if value == "cpu":
            return value
        if not self._elsewhere:
            _check_gpu(value, int(found[1] or 0))
        return value if found[1] is None else f"cuda:{int(found[1])}"  # torch takes no cuda:00


def _check_gpu(device: str, index: int) -> None:
    from .devices import gpu_count

    if index >= (count := gpu_count()):
        here = "no GPU" if not count else "1 GPU, cuda:0" if count == 1 else f"{count} GPUs, cuda:0 to cuda:{count - 1}"
        raise ConfigError(f"--device {device}: this machine has {here}{'' if count else '; give cpu'}")
    import torch

    if index >= torch.cuda.device_count():
        raise ConfigError(f"--device {device}: torch {torch.__version__} cannot use it; `paceline doctor` says why")


def check_picture(path: Path, option: str) -> None:
    """Tries whether matplotlib draws in the format of `path`, and writes there. UsageError, ConfigError."""
    import io

    from matplotlib.figure import Figure

    from .errors import UsageError, first_line
    from .paths import check_writable

    if kind := path.suffix[1:].lower():  # matplotlib takes one without for PNG
        figure = Figure()
        figure.text(0, 0, "a")
        try:
            figure.savefig(io.BytesIO(), format=kind)
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            raise UsageError(f"{option} {path}: {first_line(error)}; give a .png") from None
    check_writable(path, f"{option}: ")


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
