"""Processes that measure for `paceline bench`: started here, and what they say while they run.

Each prints its figures as JSON on the last line of its standard output. On its standard error lines with a mark are for
the command that started it, all others for whoever looks into a failure:

    @doing compiling       what it does from now on: shown where standard error is a terminal, and if it fails meanwhile
    @warning the target…   a warning that was logged: shown under the figures, which may mean something else by it

    `run_side`    the command's side: bench.py, bench_parts.py
    `measured`    the process's own: producer/bench*.py, consumer/bench*.py, consumer/ceilings.py
"""

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from . import paths
from .errors import ConfigError, PacelineError, how_it_ended

DOING, WARNING = "@doing ", "@warning "
WATCHED = ("paceline", "torch._dynamo")  # dynamo says so when it gives up on a function, which then runs uncompiled


# The process's side


def doing(text: str) -> None:
    """Says what this process does from now on."""
    print(f"{DOING}{text}", file=sys.stderr, flush=True)


def measured(measure: Callable[[], Any]) -> None:
    """Measures and prints the figures; what is logged as a warning meanwhile goes to the command as one line."""
    handler = _Warnings(logging.WARNING)
    for name in WATCHED:
        logging.getLogger(name).addHandler(handler)
    print(json.dumps(measure()), flush=True)


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines = record.getMessage().strip().splitlines()
        print(f"{WARNING}{lines[0] if lines else record.name}", file=sys.stderr, flush=True)


# The command's side


class Said:
    """What the processes of one call have said. `warnings`: in order, each once."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.doing = ""
        self._show: Callable[[str], None] | None = None

    @contextlib.contextmanager
    def on_terminal(self) -> Iterator[None]:
        """Shows what is being done on the last line of standard error, if that is a terminal; written when it changes,
        as anything that moves would take time from what is measured on a CPU."""
        if not sys.stderr.isatty() or os.environ.get("TERM") in (None, "dumb"):
            yield
            return
        self._show = _last_line
        try:
            yield
        finally:
            self._show = None
            _last_line("")

    def line(self, line: str) -> None:
        """Takes a line of a process's standard error."""
        if line.startswith(DOING):
            self.doing = line.removeprefix(DOING).strip()
            if self._show is not None:
                self._show(self.doing)
        elif line.startswith(WARNING):
            warning = line.removeprefix(WARNING).strip()
            if warning not in self.warnings:
                self.warnings.append(warning)


def _last_line(text: str) -> None:
    width = shutil.get_terminal_size().columns
    print(f"\r\x1b[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)


def run_side(module: str, *arguments: str, said: Said | None = None) -> dict[str, Any]:
    """The JSON that `python -m paceline.MODULE ARGUMENTS` prints last; its errors, a user's mistake in one line.

    It compiles into the cache that workers and ranks use, so that a pipeline after it starts warm.
    """
    said = said or Said()
    said.line(f"{DOING}starting {module}")
    command = [sys.executable, "-m", f"paceline.{module}", *arguments]
    environment = os.environ | paths.torch_environment()
    heard: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        listener = threading.Thread(target=_listen, args=(process.stderr, said, heard), daemon=True)
        listener.start()
        try:
            output = process.stdout.read()
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        listener.join()
    if code or not output.strip():
        raise _failure(module, heard, code, said.doing)
    return json.loads(output.splitlines()[-1])


def _listen(stderr: IO[str], said: Said, heard: list[str]) -> None:
    for line in stderr:
        said.line(line)
        heard.append(line)


def _failure(module: str, heard: list[str], code: int, doing: str) -> PacelineError:
    last = error_line("".join(line for line in heard if not line.startswith((DOING, WARNING))))
    kind, own, text = last.partition("Error: ")
    if own and kind.startswith("paceline."):
        return (ConfigError if kind.endswith(".Config") else PacelineError)(text)
    log = Path(tempfile.gettempdir()) / f"paceline-{module}.log"
    log.write_text("".join(heard))
    if code < 0 or not last:  # a crash or the kernel leaves no line of its own
        last = how_it_ended(code) + (last and f"; its last line: {last}")
    return PacelineError(f"{module} failed ({doing}): {last} (all it said: {log})")


def error_line(stderr: str) -> str:
    """The line of a traceback that names the error: what CUDA and dynamo say goes on for lines after it."""
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    return (named or lines or [""])[-1]
