"""Chat files, read in chunks of conversations that are parsed where they are used.

    .jsonl .json (.gz .zst)   a JSON object a line, or one array of objects, told apart by their first character
    .parquet                  a row each

A chunk holds a few hundred conversations of one file as they are in it: lines as bytes, Parquet rows as Arrow. So the
process that reads does little of the work, and memory is bounded whatever the size of a file. What of a file can't be
read becomes a `Refused` at its place, after what could.
"""

import codecs
import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

from .errors import ConfigError
from .forms import CARRIERS, COLUMNS, OPEN_CARRIERS, Refused, first_line
from .runfile import CHAT_SUFFIXES

CHUNK, CHUNK_BYTES = 256, 8 << 20  # a chunk is full when it holds so many conversations, or so much text
MAX_BYTES = 64 << 20  # of one conversation as JSON
PROMPT_CARRIERS = (*CARRIERS, *(name for name in OPEN_CARRIERS if name not in CARRIERS))
"""The columns that a row can come in where it need not hold an answer."""
_BLOCK = 1 << 20  # bytes of an array read at a time
_UNPACKED = 1 << 16  # bytes of zstd read at a time: a broken stream loses as many before the fault
_BOM = b"\xef\xbb\xbf"
_GAP = re.compile(r"[\s,]*")
_UNREADABLE = "the file cannot be read further"


@dataclass(frozen=True)
class TextChunk:
    """Conversations as JSON, or why one can't be read. file: its index. places: ":12" is line 12, "[3]" element 3 of an
    array; both go after the file's name."""

    file: int
    places: list[str]
    texts: list[bytes | Refused]

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Each conversation's place and its row or Refused."""
        return zip(self.places, map(_parse, self.texts), strict=True)


@dataclass(frozen=True)
class ArrowChunk:
    """Rows `first`, first + 1, … (from 1) of a Parquet file as an Arrow stream of one batch."""

    file: int
    first: int
    count: int
    data: bytes

    def __len__(self) -> int:
        return self.count

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Each conversation's place and its row."""
        import pyarrow as pa

        rows = pa.ipc.open_stream(self.data).read_all().to_pylist()
        return ((f":{line}", _without_null(row)) for line, row in enumerate(rows, self.first))


Chunk = TextChunk | ArrowChunk
T = TypeVar("T")


def check_names(paths: Sequence[Path]) -> None:
    """ConfigError unless these are files with the names of chat files."""
    if not paths:
        raise ConfigError("no chat files given")
    for path in paths:
        if fault := name_fault(path):
            raise ConfigError(f"{path}: {fault}")


def name_fault(path: Path) -> str | None:
    """What is wrong with the path of a chat file, and what to give instead; None if it is one."""
    if not path.is_dir() and not path.name.endswith(CHAT_SUFFIXES):
        return f"chat files end in {', '.join(CHAT_SUFFIXES)}"
    return open_fault(path) or (None if path.is_file() else "is no regular file")


def open_fault(path: Path) -> str | None:
    """As `name_fault`, of a file that may have any name and may be a pipe: one without a known ending is JSON."""
    if path.is_dir():
        return "is a folder: name each of its files"
    if not path.exists():
        return "no such file" + (
            "; patterns are not looked up: name each file" if re.search(r"[*?[]", str(path)) else ""
        )
    return None


def read_chunks(paths: Sequence[Path], carriers: Sequence[str] = CARRIERS) -> Iterator[Chunk]:
    """The conversations of all files in order. ConfigError for a Parquet file without any of the columns `carriers`."""
    for file, path in enumerate(paths):
        yield from _read_parquet(file, path, carriers) if path.suffix == ".parquet" else _read_text(file, path)


def first_rows(rows: Iterable[T], limit: int | None) -> Iterator[T]:
    """The first `limit` of them, however large that is; all for None."""
    return islice(rows, None if limit is None else min(limit, sys.maxsize))


def _parse(text: bytes | Refused) -> Any:
    if isinstance(text, Refused):
        return text
    try:
        return json.loads(text.rstrip().decode())
    except UnicodeDecodeError as error:
        return Refused("not UTF-8", f"byte {error.start}")
    except json.JSONDecodeError as error:
        if text.strip() == b"{":  # as a person lays an object out
            return Refused("not JSON", "an object over several lines: each row is one line, or an element of an array")
        return Refused("not JSON", f"{error.msg}, column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Refused("not JSON", str(error))


# JSON


def _read_text(file: int, path: Path) -> Iterator[TextChunk]:
    with path.open("rb") as raw:
        stream = _unpacked(raw, path.suffix)
        chunk, size = TextChunk(file, [], []), 0
        for place, text in _conversations(stream):
            chunk.places.append(place)
            chunk.texts.append(text)
            size += len(text) if isinstance(text, bytes) else 0
            if len(chunk) >= CHUNK or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = TextChunk(file, [], []), 0
        if len(chunk):
            yield chunk


def _unpacked(raw: BufferedReader, suffix: str) -> BufferedReader | gzip.GzipFile:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix == ".zst":
        import pyarrow as pa

        return BufferedReader(cast(RawIOBase, pa.CompressedInputStream(raw, "zstd")), _UNPACKED)
    return raw


def _conversations(stream: BufferedReader | gzip.GzipFile) -> Iterator[tuple[str, bytes | Refused]]:
    place = ":0"
    try:
        start = stream.peek(64).removeprefix(_BOM).lstrip()
        for place, text in _elements(stream) if start.startswith(b"[") else _lines(stream):
            yield place, text
    except (OSError, EOFError, zlib.error) as error:  # a damaged gzip file, a broken disk
        after = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), place)
        yield after, Refused(_UNREADABLE, first_line(error))


def _lines(stream: BufferedReader | gzip.GzipFile) -> Iterator[tuple[str, bytes | Refused]]:
    """The lines that are not blank."""
    number = 0
    while line := stream.readline(MAX_BYTES):
        number += 1
        if len(line) == MAX_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_BYTES)
            yield f":{number}", Refused("not JSON", f"a line of more than {MAX_BYTES >> 20} MiB")
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            yield f":{number}", line


def _elements(stream: BufferedReader | gzip.GzipFile) -> Iterator[tuple[str, bytes | Refused]]:
    """The elements of one JSON array. Nothing marks where one starts but the end of the one before, so a broken one
    ends the reading."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    text, at, index, size = "", 0, 0, _BLOCK
    opened = False
    while True:
        data = stream.read(size)
        text, at = text[at:] + utf8.decode(data, final=not data), 0
        while True:
            at = _gap_end(text, at)
            if at < len(text) and not opened:
                opened, at = True, at + 1  # the bracket
                continue
            if at == len(text):
                fault = "the array is not closed"
                break
            if text[at] == "]":
                return
            try:
                _, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                fault = getattr(error, "msg", str(error))
                break
            yield f"[{index}]", text[at:end].encode(errors="surrogateescape")
            at, index, size = end, index + 1, _BLOCK
        if not data or len(text) - at > MAX_BYTES:
            yield f"[{index}]", Refused(_UNREADABLE, f"not JSON: {fault}")
            return
        size = max(_BLOCK, len(text) - at)  # twice as much of a long element each time


def _gap_end(text: str, at: int) -> int:
    found = _GAP.match(text, at)
    return found.end() if found else at


# Parquet


def _read_parquet(file: int, path: Path, carriers: Sequence[str]) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    line = 1
    try:
        with pq.ParquetFile(path) as parquet:
            names = parquet.schema_arrow.names
            if not set(names) & set(carriers):
                found = ", ".join(sorted(names))
                raise ConfigError(f"{path}: no column {_either(carriers)} (found {found})")
            read = [name for name in dict.fromkeys((*COLUMNS, *carriers)) if name in names]
            for batch in parquet.iter_batches(CHUNK, columns=read):
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                yield ArrowChunk(file, line, len(batch), sink.getvalue().to_pybytes())
                line += len(batch)
    except (OSError, pa.ArrowException) as error:
        yield TextChunk(file, [f":{line}"], [Refused(_UNREADABLE, first_line(error))])


def _either(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


def _without_null(value: Any) -> Any:
    """Without the nulls that fill a Parquet struct where a row lacks the field."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and not (value and isinstance(value[0], int)):  # tokens have no nulls, and are many
        return [_without_null(item) for item in value]
    return value
