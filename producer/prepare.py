"""`paceline prepare`: chat files to token rows with loss masks.

The files' forms are those of chatfiles.py and forms.py; how a conversation becomes tokens is chat.py's.

What can't be used is skipped with file, line and reason, and counted; it never ends the job, unless nothing is left.
Files are read in chunks, parsed and tokenised by a pool of spawned processes when there are more than a few chunks, and
written as they come back, in order: memory stays bounded and the same input gives the same bytes.
"""

import contextlib
import ctypes
import json
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.chatfiles import Chunk, check_names, read_chunks
from ..common.dataset import cache_key, cached_rows, file_digest, tokenizer_digest, wait_for_lock
from ..common.errors import ConfigError, PacelineError, counted
from ..common.forms import Encoded, Refused
from ..common.gguf import converted
from ..common.locks import FileLock
from ..common.paths import cache_dir, make_folder
from ..common.record import MIN_ROW_TOKENS
from ..common.rows import Rows, RowsWriter, check_no_others, has_scratch, read_meta, remove_scratch
from ..common.target_info import end_token_ids, pad_token_id
from .chat import ChatEncoder, ChatFormat, Outline, cut_after_supervised, thinking_variables

if TYPE_CHECKING:
    from ..common.runfile import RunFile
    from ..common.target_info import TargetInfo

FORMAT_FILE = "format.json"
_SERIAL_CHUNKS = 12  # up to so many chunks, starting processes costs more than it saves
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_EXAMPLES = 3  # examples kept of each reason


@dataclass
class FileCounts:
    """What came of one file. dropped: rows, or whole conversations. tokens, supervised: of the rows kept."""

    name: str
    sha256: str
    conversations: int = 0
    rows: int = 0
    dropped: int = 0
    tokens: int = 0
    supervised: int = 0


@dataclass(frozen=True)
class PrepareReport:
    """What a preparation made.

    files: each one's part, in their order, which is that of the rows.
    dropped: rows, or whole conversations, by reason. examples: a few of each, as "file:line: reason (detail)".
    cut: rows kept that were longer than max_length. tokens, supervised: of the rows kept.
    copies: rows kept whose tokens are those of an earlier one. cached: they had been prepared before.
    """

    folder: Path
    files: list[FileCounts]
    conversations: int
    kept: int
    cut: int
    tokens: int
    supervised: int
    dropped: dict[str, int]
    examples: list[str]
    cached: bool
    copies: int = 0


@dataclass
class _Result:
    """What came of a chunk: its rows end to end, and what was dropped as (place, reason, detail)."""

    file: int
    conversations: int
    cut: int
    lengths: np.ndarray  # int64 [rows]
    tokens: np.ndarray  # int32
    mask: np.ndarray  # uint8
    dropped: list[tuple[str, str, str]]

    def rows(self) -> Iterator[Encoded]:
        ends = np.cumsum(self.lengths)[:-1]
        return map(Encoded, np.split(self.tokens, ends), np.split(self.mask, ends)) if len(self.lengths) else iter(())


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
    out: folder to write, which must be new, empty or have these rows; else one in the cache (default: the user's),
    named by everything that decides the rows. Rows that are there are left as they are.
    template_kwargs: variables for the chat template.
    progress: called with the number of conversations done. waiting: called while another process prepares the same.
    processes: default one a CPU.

    ConfigError if a file, the tokenizer or its chat template can't be read; PacelineError if no row is usable.
    """
    paths = [Path(file) for file in files]
    check_names(paths)
    options = _Options(max_length, supervise, dict(template_kwargs or {}))
    chat = None
    tokenizer = tokenizer_digest(target)
    if tokenizer is None:  # a hub id that is not here yet
        chat = load_format(target, trust_remote_code)
        tokenizer = tokenizer_digest(target) or sha256(chat.tokenizer.encode()).hexdigest()
    counts = [FileCounts(str(path), file_digest(path)) for path in paths]
    key = cache_key([file.sha256 for file in counts], tokenizer, options.to_json())
    base = cache or cache_dir()
    folder = out or base / "rows" / key
    # Whoever writes the folder holds its lock, which is never in a folder of the user's.
    place = base / "out" / sha256(bytes(out.resolve())).hexdigest()[:24] if out else folder
    lock, who = place.with_name(f"{place.name}.lock"), f"prepare {paths[0].name}"
    if meta := cached_rows(folder, key):
        if out is None and has_scratch(folder):
            _remove_leftovers(folder, FileLock(lock, who))
        return _report(folder, meta, paths, cached=True)
    make_folder(lock.parent, "PACELINE_CACHE: ", writable=True)
    if out is not None:
        make_folder(out.parent, "--out: ", writable=True)
    _check_folder(folder, out is not None, key)
    with wait_for_lock(lock, who, waiting):
        if out is None:
            remove_scratch(folder)
        if meta := cached_rows(folder, key):
            return _report(folder, meta, paths, cached=True)
        _check_folder(folder, out is not None, key)
        chat = chat or load_format(target, trust_remote_code)
        about = {
            "key": key,
            "target": target,
            "tokenizer": tokenizer,
            "vocabulary": vocabulary_digest(chat),
            "template": sha256(json.dumps(dict(chat.templates), sort_keys=True).encode()).hexdigest(),
            **options.to_json(),
        }
        with RowsWriter(folder) as writer:
            writer.add_file(FORMAT_FILE, json.dumps(asdict(chat), sort_keys=True))
            made = _write(writer, counts, _Tokeniser(chat, options), progress, processes)
            meta = writer.finish(about | made)
        return _report(folder, meta, paths, cached=False)


def prepare_run(
    run: "RunFile", progress: Callable[[int], None] | None = None, *, waiting: Callable[[], None] = lambda: None
) -> PrepareReport:
    """Prepare `data.files` of a run file into the cache, as its settings say."""
    return prepare(
        [file.path for file in run.data.files],
        target=run.target.path,
        max_length=run.data.max_length,
        supervise=run.data.supervise,
        template_kwargs=thinking_variables(run.data.thinking),
        trust_remote_code=run.target.trust_remote_code,
        progress=progress,
        waiting=waiting,
    )


def _remove_leftovers(folder: Path, lock: FileLock) -> None:
    """Remove what a writer that was killed at its very end left beside the rows, unless one is at work. In a cache that
    cannot be written it stays: the rows are good."""
    with contextlib.suppress(ConfigError):
        if lock.acquire():
            with lock:
                remove_scratch(folder)


def _check_folder(folder: Path, chosen: bool, key: str) -> None:
    """Never replace something that is not these rows, damaged. chosen: by the user, not by `key`."""
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder")
        filled = folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}: give another folder") from None
    if not filled:
        return
    if chosen:
        if not (folder / "meta.json").exists():
            raise ConfigError(f"--out {folder} is not empty and holds no prepared rows: choose another folder")
        if _key_of(folder) != key:
            raise ConfigError(f"--out {folder} has other prepared rows: choose another folder, or remove it first")
    check_no_others(folder)


def _key_of(folder: Path) -> str | None:
    """The key of the rows in a folder, which may be damaged but for their meta.json."""
    try:
        return read_meta(folder).get("key")
    except ConfigError:
        return None


def _write(
    writer: RowsWriter,
    files: list[FileCounts],
    tokeniser: "_Tokeniser",
    progress: Callable[[int], None] | None,
    processes: int | None,
) -> dict[str, Any]:
    """Write the rows of all files and return what is to be told of them. PacelineError if there is none."""
    conversations = cut = 0
    dropped: Counter[str] = Counter()
    examples: list[str] = []
    for result in _tokenise(read_chunks([Path(file.name) for file in files]), tokeniser, processes):
        file = files[result.file]
        for row in result.rows():
            writer.add(row.tokens, row.mask)
        _count(file, result)
        for place, reason, detail in result.dropped:
            dropped[reason] += 1
            if dropped[reason] <= _EXAMPLES:
                examples.append(f"{file.name}{place}: {reason}{f' ({detail})' if detail else ''}")
        conversations += result.conversations
        cut += result.cut
        if progress:
            progress(conversations)
    if not writer.added:
        first = f"the first: {examples[0]}" if examples else f"nothing in {', '.join(file.name for file in files)}"
        raise PacelineError(f"no usable row among {counted(conversations, 'conversation')}; {first}")
    return {
        "files": [asdict(file) for file in files],
        "conversations": conversations,
        "cut": cut,
        "dropped": dict(dropped),
        "examples": examples,
    }


def _count(file: FileCounts, result: _Result) -> None:
    file.conversations += result.conversations
    file.rows += len(result.lengths)
    file.dropped += len(result.dropped)
    file.tokens += len(result.tokens)
    file.supervised += int(result.mask.sum(dtype=np.int64))


def _report(folder: Path, meta: Mapping[str, Any], paths: Sequence[Path], *, cached: bool) -> PrepareReport:
    """What meta.json says, of files that may have had other names then."""
    return PrepareReport(
        folder=folder,
        files=[FileCounts(**file | {"name": str(path)}) for path, file in zip(paths, meta["files"], strict=True)],
        conversations=meta["conversations"],
        kept=meta["rows"],
        cut=meta["cut"],
        tokens=meta["tokens"],
        supervised=meta["supervised"],
        dropped=meta["dropped"],
        examples=meta["examples"],
        cached=cached,
        copies=meta.get("copies", 0),
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


def saved_format(folder: Path) -> ChatFormat:
    """The chat format that the rows of a folder were prepared with. ConfigError if it is not there."""
    try:
        return ChatFormat(**json.loads((folder / FORMAT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: {FORMAT_FILE} cannot be read ({error}): prepare the rows again") from error


def spare_tokens(rows: Rows, info: "TargetInfo") -> dict[int, str]:
    """Tokens that may serve as drafter.mask_token_id, with their texts: the first row of the embedding past the
    tokenizer, then special tokens that neither the rows nor the chat templates use."""
    from tokenizers import Tokenizer

    chat = saved_format(rows.folder)
    tokenizer = Tokenizer.from_str(chat.tokenizer)
    past = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    folder = Path(info.path)
    taken = {info.bos_token_id, info.eos_token_id, pad_token_id(folder), *end_token_ids(folder)}
    named = [text for name, text in chat.special_tokens.items() if name != "mask_token"]  # unk_token and the like
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    special = [(at, token.content) for at, token in added if token.special and token.content not in named]
    found = {past: "past the tokenizer"} if past < info.vocab_size else {}
    return found | {
        at: text
        for at, text in special
        if at not in taken and not rows.used_token(at) and not any(text in one for one in chat.templates.values())
    }


def _plain(value: Any) -> Any:
    return [str(item) for item in value] if isinstance(value, list) else str(value)


def vocabulary_digest(chat: ChatFormat) -> str:
    """SHA-256 over the tokens and their ids: equal for the same tokenizer saved in different ways."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_str(chat.tokenizer).get_vocab(with_added_tokens=True)
    return sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


# Tokenising


class _Tokeniser:
    """Tokenises chunks: what a process of the pool does."""

    def __init__(self, chat: ChatFormat, options: _Options):
        self.chat = chat
        self.options = options
        self.encoder = ChatEncoder(chat, supervise=options.supervise, template_kwargs=options.template_kwargs)

    def __call__(self, chunk: Chunk) -> _Result:
        kept: list[Encoded] = []
        dropped: list[tuple[str, str, str]] = []
        cut = 0
        outlined = [(place, made) for place, row in chunk.rows() for made in self._outline(row)]
        tokenised = iter(self.encoder.tokenise([made for _, made in outlined if isinstance(made, Outline)]))
        for place, made in outlined:
            row = next(tokenised) if isinstance(made, Outline) else made
            fitted = row if isinstance(row, Refused) else self._fit(row)
            if isinstance(fitted, Refused):
                dropped.append((place, fitted.reason, fitted.detail))
            else:
                kept.append(fitted)
                cut += fitted is not row
        lengths = np.array([len(row.tokens) for row in kept], np.int64)
        tokens = np.concatenate([np.zeros(0, np.int32), *(row.tokens for row in kept)])
        mask = np.concatenate([np.zeros(0, np.uint8), *(row.mask for row in kept)])
        return _Result(chunk.file, len(chunk), cut, lengths, tokens, mask, dropped)

    def _outline(self, row: Any) -> list[Outline | Encoded | Refused]:
        if isinstance(row, Refused):
            return [row]
        try:
            return self.encoder.outline(row)
        except Refused as refused:
            return [refused]

    def _fit(self, row: Encoded) -> Encoded | Refused:
        """The row itself, cut to max_length, or refused if too little is left."""
        within = ""
        if len(row.tokens) > self.options.max_length:
            row, within = cut_after_supervised(*(part[: self.options.max_length] for part in row)), " within max_length"
        if not np.any(row.mask[1:] & row.mask[:-1]):
            return Refused(f"no two supervised tokens in a row{within}")
        if len(row.tokens) < MIN_ROW_TOKENS:
            return Refused(f"fewer than {MIN_ROW_TOKENS} tokens")
        return row


_in_process: _Tokeniser | None = None


def _start_process(chat: ChatFormat, options: _Options) -> None:
    global _in_process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each CPU has a process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed parent can't
    _in_process = _Tokeniser(chat, options)


def _run_in_process(chunk: Chunk) -> _Result:
    assert _in_process is not None, "the pool's initializer has run"
    return _in_process(chunk)


def _tokenise(chunks: Iterator[Chunk], tokeniser: _Tokeniser, processes: int | None) -> Iterator[_Result]:
    """The results of all chunks, in order: here if they are few, else by a pool of processes."""
    count = processes or len(os.sched_getaffinity(0))
    head = list(islice(chunks, _SERIAL_CHUNKS + 1))
    if count == 1 or len(head) <= _SERIAL_CHUNKS:
        yield from map(tokeniser, chain(head, chunks))
    else:
        yield from _tokenise_in_pool(chain(head, chunks), tokeniser, count)


def _tokenise_in_pool(chunks: Iterable[Chunk], tokeniser: _Tokeniser, count: int) -> Iterator[_Result]:
    pool = ProcessPoolExecutor(count, get_context("spawn"), _start_process, (tokeniser.chat, tokeniser.options))
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
