"""`paceline prepare`: chat files to token rows with loss masks.

A conversation is one line of a .jsonl or .jsonl.gz file or one row of a .parquet file: `messages`, a list of objects
with `role` and `content` (and `tool_calls`, `reasoning_content`, whatever the target's chat template reads), and
optionally `finished` (false: the last answer stopped at a length limit), `tools` and `chat_template_kwargs`.

What can't be used is skipped with file, line and reason, and counted; it never ends the job, unless nothing is left.
Files are read in chunks, tokenised by a pool of spawned processes when there are more than a few chunks, and written as
they come back, in order: memory stays bounded and the same input gives the same bytes.
"""

import ctypes
import gzip
import json
import os
import signal
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain, islice, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..common.dataset import cache_key, cached_rows, file_digest, tokenizer_digest, wait_for_lock
from ..common.errors import ConfigError, PacelineError
from ..common.gguf import converted
from ..common.locks import FileLock
from ..common.paths import cache_dir
from ..common.record import MIN_ROW_TOKENS
from ..common.rows import Rows, RowsWriter, has_scratch, remove_scratch
from .chat import ChatEncoder, ChatFormat, Encoded, Refused

if TYPE_CHECKING:
    from rich.text import Text

    from ..common.runfile import RunFile

_CHUNK = 256  # conversations handed to a process at a time
_SERIAL_CHUNKS = 12  # up to so many chunks, starting processes costs more than it saves
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_EXAMPLES = 3  # examples kept of each reason
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class PrepareReport:
    """What a preparation made.

    dropped: rows, or whole conversations, by reason. examples: a few of them, as "file:line: reason (detail)".
    cut: rows kept that were longer than max_length. tokens, supervised: of the rows kept.
    cached: they had been prepared before.
    """

    folder: Path
    conversations: int
    kept: int
    cut: int
    tokens: int
    supervised: int
    dropped: dict[str, int]
    examples: list[str]
    cached: bool


class _Item(NamedTuple):
    """A conversation as read: where, and its JSON line, its Parquet row, or why there is none."""

    file: int
    line: int
    row: bytes | dict[str, Any] | Refused


class _Drop(NamedTuple):
    file: int
    line: int
    reason: str
    detail: str


@dataclass
class _Result:
    """What came of a chunk: its rows end to end, and what was dropped."""

    conversations: int = 0
    cut: int = 0
    rows: list[Encoded] = field(default_factory=list)
    dropped: list[_Drop] = field(default_factory=list)


@dataclass(frozen=True)
class _Options:
    max_length: int
    supervise: str
    template_kwargs: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "max_length": self.max_length,
            "supervise": self.supervise,
            "template_kwargs": dict(self.template_kwargs),
        }


def prepare(
    files: Sequence[str | Path],
    *,
    target: str,
    max_length: int = 3072,
    supervise: str = "all",
    out: Path | None = None,
    cache: Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int], None] | None = None,
    waiting: Callable[[], None] = lambda: None,
    processes: int | None = None,
) -> PrepareReport:
    """Prepare chat files for a target: a folder, a GGUF file or a hub id.

    max_length: longest row in tokens; longer ones are cut. supervise: "all" answers or the "last".
    out: folder to write; else one in the cache (default: the user's), named by everything that decides the rows, and
    left as it is if it is there. template_kwargs: variables for the chat template.
    progress: called with the number of conversations done. waiting: called while another process prepares the same.
    processes: default one a CPU.

    ConfigError if a file, the tokenizer or its chat template can't be read; PacelineError if no row is usable.
    """
    paths = [Path(file) for file in files]
    _check_files(paths)
    options = _Options(max_length, supervise, dict(template_kwargs or {}))
    chat = None
    tokenizer = tokenizer_digest(target)
    if tokenizer is None:  # a hub id that is not here yet
        chat = load_format(target, trust_remote_code)
        tokenizer = tokenizer_digest(target) or sha256(chat.tokenizer.encode()).hexdigest()
    key = cache_key(paths, tokenizer, options.to_json())
    store = (cache or cache_dir()) / "rows"
    folder = out or store / key
    _check_folder(folder)
    lock, who = store / f"{key}.lock", f"prepare {paths[0].name}"
    if meta := cached_rows(folder, key):
        if folder.parent == store and has_scratch(folder):
            _remove_leftovers(folder, FileLock(lock, who))
        return _report(folder, meta, cached=True)
    store.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(lock, who, waiting):
        if folder.parent == store:  # only holders of this lock write there
            remove_scratch(folder)
        if meta := cached_rows(folder, key):
            return _report(folder, meta, cached=True)
        chat = chat or load_format(target, trust_remote_code)
        about = {
            "key": key,
            "target": target,
            "tokenizer": tokenizer,
            "vocabulary": vocabulary_digest(chat),
            "template": sha256(json.dumps(dict(chat.templates), sort_keys=True).encode()).hexdigest(),
            "files": [{"name": str(path), "sha256": file_digest(path)} for path in paths],
            **options.to_json(),
        }
        return _write(paths, chat, options, folder, about, progress, processes)


def prepare_run(
    run: "RunFile", progress: Callable[[int], None] | None = None, *, waiting: Callable[[], None] = lambda: None
) -> PrepareReport:
    """Prepare `data.files` of a run file into the cache, as its settings say."""
    return prepare(
        run.data.files,
        target=run.target.path,
        max_length=run.data.max_length,
        supervise=run.data.supervise,
        template_kwargs={} if run.data.thinking is None else {"enable_thinking": run.data.thinking},
        trust_remote_code=run.target.trust_remote_code,
        progress=progress,
        waiting=waiting,
    )


def _remove_leftovers(folder: Path, lock: FileLock) -> None:
    """Remove what a writer that was killed at its very end left beside the rows, unless one is at work."""
    if lock.acquire():
        with lock:
            remove_scratch(folder)


def _check_files(paths: list[Path]) -> None:
    if not paths:
        raise ConfigError("no chat files given")
    for path in paths:
        if not path.name.endswith(_SUFFIXES):
            raise ConfigError(f"{path}: chat files end in {', '.join(_SUFFIXES)}")
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")


def _check_folder(folder: Path) -> None:
    """Never replace something that is not prepared rows."""
    if folder.is_dir() and not (folder / "meta.json").exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and holds no prepared rows: give another folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")


def _write(
    paths: list[Path],
    chat: ChatFormat,
    options: _Options,
    folder: Path,
    about: dict[str, Any],
    progress: Callable[[int], None] | None,
    processes: int | None,
) -> PrepareReport:
    conversations = cut = 0
    dropped: Counter[str] = Counter()
    examples: list[str] = []
    with RowsWriter(folder) as writer:
        for result in _encode_all(_chunks(_read(paths)), _Chunk(chat, options), processes):
            conversations += result.conversations
            cut += result.cut
            for row in result.rows:
                writer.add(row.tokens, row.mask)
            for drop in result.dropped:
                dropped[drop.reason] += 1
                if dropped[drop.reason] <= _EXAMPLES:
                    detail = f" ({drop.detail})" if drop.detail else ""
                    examples.append(f"{paths[drop.file]}:{drop.line}: {drop.reason}{detail}")
            if progress:
                progress(conversations)
        kept = writer.added
        if not kept:
            first = f"; the first: {examples[0]}" if examples else ""
            raise PacelineError(f"no usable row among {conversations} conversations{first}")
        counts = {"conversations": conversations, "cut": cut, "dropped": dict(dropped), "examples": examples}
        meta = writer.finish(about | counts)
    return _report(folder, meta, cached=False)


def _report(folder: Path, meta: Mapping[str, Any], *, cached: bool) -> PrepareReport:
    return PrepareReport(
        folder=folder,
        conversations=meta["conversations"],
        kept=meta["rows"],
        cut=meta["cut"],
        tokens=meta["tokens"],
        supervised=meta["supervised"],
        dropped=meta["dropped"],
        examples=meta["examples"],
        cached=cached,
    )


# The tokenizer


def load_format(target: str, trust_remote_code: bool = False) -> ChatFormat:
    """The target's tokenizer and chat templates, as transformers loads them.

    ConfigError if there is none, or if it is not a fast one, which tells where its tokens are in the text."""
    from transformers import AutoTokenizer

    path = Path(target).expanduser()
    # transformers takes ten seconds to read a tokenizer out of a GGUF file, and a worker converts the file anyway.
    source = str(converted(path)) if path.suffix == ".gguf" and path.is_file() else target
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"target.path: the tokenizer of {target} cannot be loaded: {lines[0]}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer of {target} is not a fast one (tokenizer.json): masks need its offsets")
    templates = tokenizer.chat_template
    if isinstance(templates, str):
        templates = {"default": templates}
    if not templates or "default" not in templates:
        raise ConfigError(f"the tokenizer of {target} has no chat template: use an instruction-tuned target")
    return ChatFormat(
        tokenizer.backend_tokenizer.to_str(),
        templates,
        {name: _plain(value) for name, value in tokenizer.special_tokens_map.items()},
    )


def _plain(value: Any) -> Any:
    return [str(item) for item in value] if isinstance(value, list) else str(value)


def vocabulary_digest(chat: ChatFormat) -> str:
    """SHA-256 over the tokens and their ids: equal for the same tokenizer saved in different ways."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_str(chat.tokenizer).get_vocab(with_added_tokens=True)
    return sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


# Reading


def _read(paths: list[Path]) -> Iterator[_Item]:
    for file, path in enumerate(paths):
        yield from _read_parquet(file, path) if path.suffix == ".parquet" else _read_lines(file, path)


def _read_lines(file: int, path: Path) -> Iterator[_Item]:
    """Lines that are not blank. A damaged gzip file gives what can be read of it and then a Refused."""
    line = 0
    with path.open("rb") as raw:
        stream: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        try:
            for line, text in enumerate(stream, 1):
                if line == 1:
                    text = text.removeprefix(b"\xef\xbb\xbf")
                if text.strip():
                    yield _Item(file, line, text)
        except (OSError, EOFError, zlib.error) as error:
            yield _Item(file, line + 1, Refused("the file cannot be read further", str(error)))


def _read_parquet(file: int, path: Path) -> Iterator[_Item]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    line = 0
    try:
        with pq.ParquetFile(path) as parquet:
            names = set(parquet.schema_arrow.names)
            columns = [name for name in ("messages", "finished", "tools", "chat_template_kwargs") if name in names]
            if "messages" not in columns:
                raise ConfigError(f"{path}: no column `messages` (found {', '.join(sorted(names))})")
            for batch in parquet.iter_batches(_CHUNK, columns=columns):
                for row in batch.to_pylist():
                    line += 1
                    yield _Item(file, line, _without_null(row))
    except (OSError, pa.ArrowException) as error:
        yield _Item(file, line + 1, Refused("the file cannot be read further", str(error)))


def _without_null(value: Any) -> Any:
    """Without the nulls that fill a Parquet struct where a row lacks the field."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return value


def _chunks(items: Iterator[_Item]) -> Iterator[list[_Item]]:
    while chunk := list(islice(items, _CHUNK)):
        yield chunk


# Tokenising


class _Chunk:
    """Tokenises chunks: what a process of the pool does."""

    def __init__(self, chat: ChatFormat, options: _Options):
        self.chat = chat
        self.options = options
        self.encoder = ChatEncoder(chat, supervise=options.supervise, template_kwargs=options.template_kwargs)

    def __call__(self, chunk: list[_Item]) -> _Result:
        result = _Result(conversations=len(chunk))
        for item in chunk:
            try:
                rows = self.encoder.encode(_parse(item.row))
            except Refused as refused:
                rows = [refused]
            for row in rows:
                try:
                    result.rows.append(self._fit(row, result))
                except Refused as refused:
                    result.dropped.append(_Drop(item.file, item.line, refused.reason, refused.detail))
        return result

    def _fit(self, row: Encoded | Refused, result: _Result) -> Encoded:
        """Cut a row to max_length. Raises Refused if too little is left."""
        if isinstance(row, Refused):
            raise row
        tokens, mask = row
        was_cut = len(tokens) > self.options.max_length
        if was_cut:
            mask = mask[: self.options.max_length]
            supervised = np.flatnonzero(mask)
            length = supervised[-1] + 1 if len(supervised) else 0
            tokens, mask = tokens[:length], mask[:length]
        if not np.any(mask[1:] & mask[:-1]):
            reason = "no two supervised tokens in a row"
            raise Refused(f"{reason} within max_length" if was_cut else reason)
        if len(tokens) < MIN_ROW_TOKENS:
            raise Refused(f"fewer than {MIN_ROW_TOKENS} tokens")
        result.cut += was_cut
        return Encoded(tokens, mask)


def _parse(row: bytes | dict[str, Any] | Refused) -> Any:
    if isinstance(row, Refused):
        raise row
    if isinstance(row, dict):
        return row
    try:
        return json.loads(row.decode())
    except UnicodeDecodeError as error:
        raise Refused("not UTF-8", f"byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise Refused("not JSON", f"{error.msg}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise Refused("not JSON", str(error)) from error


_in_process: _Chunk | None = None


def _start_process(chat: ChatFormat, options: _Options) -> None:
    global _in_process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed parent can't
    _in_process = _Chunk(chat, options)


def _run_in_process(chunk: list[_Item]) -> _Result:
    assert _in_process is not None, "the pool's initializer has run"
    return _in_process(chunk)


def _encode_all(chunks: Iterator[list[_Item]], encode: _Chunk, processes: int | None) -> Iterator[_Result]:
    """The results of all chunks, in order: here if they are few, else by a pool of processes."""
    count = processes or len(os.sched_getaffinity(0))
    head = list(islice(chunks, _SERIAL_CHUNKS + 1))
    if count == 1 or len(head) <= _SERIAL_CHUNKS:
        yield from map(encode, chain(head, chunks))
    else:
        yield from _encode_in_pool(chain(head, chunks), encode, count)


def _encode_in_pool(chunks: Iterable[list[_Item]], encode: _Chunk, count: int) -> Iterator[_Result]:
    pool = ProcessPoolExecutor(count, get_context("spawn"), _start_process, (encode.chat, encode.options))
    waiting: deque[Future[_Result]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_run_in_process, chunk))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise PacelineError("a tokenising process died; was memory short?") from error
    finally:
        pool.shutdown(cancel_futures=True)


# Looking at rows


def show(rows: Rows, target: str, count: int, *, trust_remote_code: bool = False) -> Iterator["Text"]:
    """The first rows as rich text: supervised tokens in green, the rest dim."""
    from rich.text import Text
    from tokenizers import Tokenizer

    tokenizer: Tokenizer = Tokenizer.from_str(load_format(target, trust_remote_code).tokenizer)
    for index in range(min(count, len(rows))):
        row = rows.row(index)
        supervised = int(row.mask.sum())
        text = Text(f"row {index}: {len(row.tokens)} tokens, {supervised} supervised\n", style="bold")
        edges = np.flatnonzero(np.diff(row.mask, prepend=2, append=2))
        for start, end in pairwise(edges):
            part = tokenizer.decode(row.tokens[start:end].tolist(), skip_special_tokens=False)
            text.append(part, style="green" if row.mask[start] else "dim")
        yield text
