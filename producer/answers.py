"""The file that `paceline regenerate` writes: one row a line, appended, so that a job killed at any moment goes on.

    answers.jsonl        rows for `paceline prepare`; each names the input row it answers
    answers.meta.json    the input files' digests and the settings; written before the first row
    answers.refused      input rows that can't be answered, one JSON line each; not there without any

An input row is done when a whole line in one of the files names it, and nothing else is remembered. A line is written
by one system call and synced to disk with others every few seconds: after a kill at most the last line is torn, after
a power failure the last few. Both are cut off on opening, and their rows are asked again. One process holds the file,
by a lock that dies with it.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..common.errors import ConfigError, PacelineError
from ..common.locks import OfdLock

SYNC_ROWS = 64
SYNC_SECONDS = 5.0
MOST_LINES = 1 << 30  # of an input file


class RowId(NamedTuple):
    """An input row: the number of its file on the command line, and its line, Parquet row or place in a JSON array,
    counted from 1."""

    file: int
    line: int


class _Lines:
    """A file of JSON lines that is only appended to. `rows()` must be read to the end before the first `add`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        if not OfdLock(self._fd).acquire():
            os.close(self._fd)
            raise PacelineError(f"{path}: another process is writing it; wait for it, or give another file")
        self._end = 0
        self._unsynced = 0
        self._synced_at = time.monotonic()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The whole lines that are there; then cuts off what follows them. ConfigError for a line that is no row and
        not among the last, which a crash can't explain."""
        broken_at = None
        after = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                row = _parsed(line) if broken_at is None else None
                if row is not None:
                    self._end += len(line)
                    yield row
                    continue
                broken_at = broken_at or number
                after += 1
                if after > SYNC_ROWS:
                    raise ConfigError(f"{self.path}:{broken_at}: not a row that this command wrote: give another file")
        os.ftruncate(self._fd, self._end)

    def add(self, row: Mapping[str, Any]) -> None:
        line = _json(row, separators=(",", ":")) + b"\n"
        try:
            written = os.pwrite(self._fd, line, self._end)
            while written < len(line):
                written += os.pwrite(self._fd, line[written:], self._end + written)
        except OSError as error:
            raise self._failed(error) from None
        self._end += len(line)
        self._unsynced += 1
        if self._unsynced >= SYNC_ROWS or time.monotonic() - self._synced_at > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        try:
            if self._unsynced:
                os.fdatasync(self._fd)
        except OSError as error:
            raise self._failed(error) from None
        self._unsynced, self._synced_at = 0, time.monotonic()

    def _failed(self, error: OSError) -> PacelineError:
        return PacelineError(
            f"cannot write {self.path}: {error.strerror}; its whole rows stand, and the same command goes on from them"
        )

    def close(self) -> None:
        try:
            self.sync()
        finally:
            os.close(self._fd)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The row in a whole line; None if it is torn or none."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("regenerated"), dict) else None


class Answers:
    """The rows done, and those to add. A context manager; `close` makes everything durable.

    about: what decides the rows (settings and input digests). On a file begun before it must be the same, else
    ConfigError names what differs.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        if path.suffix != ".jsonl":
            raise ConfigError(f"{path}: the name of the file to write must end in .jsonl")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.absolute().parent}")
        self.path = path
        self.refused_path = path.with_suffix(".refused")
        self.meta_path = path.with_suffix(".meta.json")
        self._done = [bytearray() for _ in about["files"]]  # a byte a line, 1 where it is done
        self.answered = self.unfinished = self.tokens = self.refused = 0
        fresh = not _has_content(path) and not _has_content(self.refused_path)
        if not fresh:
            self._check_meta(about)
        self._answers = _Lines(path)
        self._refused = _Lines(self.refused_path)
        if fresh:
            _write_whole(self.meta_path, _json(about, indent=1) + b"\n")
        for row in self._answers.rows():
            self._recall(row, path)
            self._count(row)
        for row in self._refused.rows():
            self._recall(row, self.refused_path)
            self.refused += 1

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, row: RowId) -> bool:
        marks = self._done[row.file]
        return row.line < len(marks) and bool(marks[row.line])

    def add(self, row_id: RowId, row: Mapping[str, Any], tokens: int | None) -> None:
        """A row with its answers; `tokens`: of the answers."""
        made = {**row, "regenerated": {"file": row_id.file, "line": row_id.line, "tokens": tokens}}
        self._answers.add(made)
        self._mark(row_id)
        self._count(made)

    def refuse(self, row_id: RowId, where: str, reason: str) -> None:
        """A row that another run need not look at again."""
        at = {"file": row_id.file, "line": row_id.line}
        self._refused.add({"where": where, "reason": reason, "regenerated": at})
        self._mark(row_id)
        self.refused += 1

    def served_by(self, model: str) -> None:
        """Notes which model a server answers with; ConfigError if it is another than before."""
        about = json.loads(self.meta_path.read_text(encoding="utf-8"))
        before = about.setdefault("served", model)
        if before != model:
            raise ConfigError(f"{self.path} has answers of {before}, and {model} is asked now: give another file")
        _write_whole(self.meta_path, _json(about, indent=1) + b"\n")

    def close(self) -> None:
        if not self.refused:
            self.refused_path.unlink(missing_ok=True)  # empty; nobody else has it, as the answers' lock is held
        self._refused.close()
        self._answers.close()

    def _count(self, row: Mapping[str, Any]) -> None:
        self.answered += 1
        self.unfinished += row.get("finished") is False
        self.tokens += row["regenerated"].get("tokens") or 0

    def _mark(self, row: RowId) -> None:
        marks = self._done[row.file]
        if row.line >= len(marks):
            marks.extend(bytes(row.line + 1024 - len(marks)))
        marks[row.line] = 1

    def _recall(self, row: Mapping[str, Any], path: Path) -> None:
        at = row["regenerated"]
        file, line = at.get("file"), at.get("line")
        inside = type(file) is int and type(line) is int and 0 <= file < len(self._done) and 0 < line < MOST_LINES
        if not inside or self.has(RowId(file, line)):
            raise ConfigError(f"{path}: {at} names no row of the input, or one twice: give another file")
        self._mark(RowId(file, line))

    def _check_meta(self, about: Mapping[str, Any]) -> None:
        try:
            before = json.loads(self.meta_path.read_text(encoding="utf-8"))
            settings, files = before["settings"], before["files"]
            digests = [file["sha256"] for file in files]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{self.path} is there, and {self.meta_path.name} beside it does not say how it was made: "
                "give another file"
            ) from None
        if digests != [file["sha256"] for file in about["files"]]:
            raise ConfigError(f"{self.path} was begun with other input ({_names(files)}): give another file")
        now = about["settings"]
        for name in sorted(settings | now):
            if settings.get(name) != now.get(name):
                raise ConfigError(
                    f"{self.path} was begun with {name} {json.dumps(settings.get(name))}, now it is "
                    f"{json.dumps(now.get(name))}: give another file"
                )


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _names(files: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(file.get("name")) for file in files)


def _json(value: Any, **layout: Any) -> bytes:
    """As JSON, readable; all of it escaped where there is a lone surrogate, which UTF-8 cannot hold: in a field that is
    only kept, or a file name of other bytes."""
    try:
        return json.dumps(value, ensure_ascii=False, **layout).encode()
    except UnicodeEncodeError:
        return json.dumps(value, **layout).encode()


def _write_whole(path: Path, data: bytes) -> None:
    """The file appears whole, or not at all."""
    scratch = path.with_name(f"{path.name}.tmp")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
