"""Errors a user can cause, each with its exit code; the CLI prints their text as one line, never a traceback.
And what such lines are made of."""

import signal


class PacelineError(Exception):
    """Something failed at run time. Exit code 1."""

    exit_code = 1


class UsageError(PacelineError):
    """The command line was wrong. Exit code 2."""

    exit_code = 2


class ConfigError(PacelineError):
    """The run file, data, target or machine does not fit. Exit code 78 (EX_CONFIG): systemd does not restart it."""

    exit_code = 78


class Interrupted(PacelineError):
    """Stopped by the user. Exit code 130."""

    exit_code = 130


def first_line(error: Exception) -> str:
    """The first line of an error's text that says something, or else its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def counted(number: int, name: str, plural: str = "") -> str:
    """A number of things in words: "1 record", "2 records"."""
    return f"{number:,} {name if number == 1 else plural or name + 's'}"


def how_it_ended(code: int) -> str:
    """What became of a process, by its `returncode`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
