"""The rows of a run: opened where `data.rows` says, or prepared once into the cache from `data.files`.

Both sides and the command line call `prepared_rows`. When the cache has the rows, neither transformers nor torch is
imported: the cache key is computed from the tokenizer's files as they are, the options and the contents of the data
files. While one process prepares, others of the same data wait for it.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .locks import FileLock, held_by
from .rows import Rows

if TYPE_CHECKING:
    from .runfile import RunFile

_log = logging.getLogger(__name__)

PREPARE_VERSION = 3
"""Part of the cache key: raised when the same input gives other rows."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_TEMPLATE_FOLDER = "additional_chat_templates"
_GGUF_HEAD_BYTES = 64 << 20  # a GGUF file's metadata, tokenizer included, are at its start


def prepared_rows(run: "RunFile", alive: Callable[[], None] = lambda: None) -> Rows:
    """The run's rows, prepared first if need be; `alive` is called now and then while that takes.

    ConfigError if files or tokenizer are missing, if the rows were prepared for another tokenizer, or if one is longer
    than data.max_length; PacelineError if no row is usable.
    """
    if run.data.rows is None:
        from ..producer.prepare import prepare_run  # transformers is needed on a miss only, and imported there

        return Rows.open(prepare_run(run, lambda done: alive(), waiting=alive).folder)
    rows = Rows.open(run.data.rows)
    _check_tokenizer(rows, run.target.path, run.target.trust_remote_code)
    longest = int(rows.lengths.max())
    if longest > run.data.max_length:
        raise ConfigError(
            f"{rows.folder} was prepared with rows of up to {longest} tokens, more than data.max_length "
            f"({run.data.max_length}): raise it, or prepare the rows again"
        )
    return rows


def _check_tokenizer(rows: Rows, target: str, trust_remote_code: bool) -> None:
    """The same tokenizer files will do; else the vocabularies are compared, which takes loading the tokenizer."""
    if rows.meta["tokenizer"] == tokenizer_digest(target):
        return
    from ..producer.prepare import load_format, vocabulary_digest

    if rows.meta["vocabulary"] != vocabulary_digest(load_format(target, trust_remote_code)):
        raise ConfigError(
            f"{rows.folder} was prepared for another tokenizer ({rows.meta['target']}) than the target's ({target}): "
            "prepare the rows again for this target"
        )


def cache_key(files: Sequence[str], tokenizer: str, options: Mapping[str, Any]) -> str:
    """Names the prepared rows of files, given by their digests, for a tokenizer's digest and options (values that JSON
    can hold)."""
    parts = {"version": PREPARE_VERSION, "tokenizer": tokenizer, "options": dict(options), "files": list(files)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def cached_rows(folder: Path, key: str) -> dict[str, Any] | None:
    """The meta of the rows in `folder` if they are there, whole and of this key."""
    try:
        meta = Rows.open(folder).meta
    except ConfigError:
        return None  # absent, damaged or of another version: they are prepared again
    return meta if meta.get("key") == key else None


def file_digest(path: Path) -> str:
    """SHA-256 of a file's contents. ConfigError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def tokenizer_digest(target: str) -> str | None:
    """SHA-256 over the tokenizer's files of a target: folder, GGUF file, or a hub id in the local hub cache.

    None for a hub id that isn't there. ConfigError for a folder without tokenizer."""
    path = Path(target).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.sha256(f"{path.stat().st_size}".encode() + file.read(_GGUF_HEAD_BYTES)).hexdigest()
    if path.is_dir():
        files = _folder_files(path)
        if not files:
            raise ConfigError(f"{target}: no tokenizer in this folder (tokenizer.json is missing)")
        return _digest_files(files, path / "config.json")
    return _hub_digest(target)


def _folder_files(folder: Path) -> dict[str, Path]:
    names = [*_TOKENIZER_FILES, *(f"{_TEMPLATE_FOLDER}/{p.name}" for p in sorted(folder.glob(f"{_TEMPLATE_FOLDER}/*")))]
    return {name: folder / name for name in names if (folder / name).is_file()}


def _hub_digest(target: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = {name: try_to_load_from_cache(target, name) for name in (*_TOKENIZER_FILES, "config.json")}
    except HFValidationError as error:
        raise ConfigError(f"target.path: {target} is no folder, no GGUF file and no hub id") from error
    files = {name: Path(path) for name, path in found.items() if isinstance(path, str)}
    if not any(name.startswith("tokenizer") for name in files):
        return None
    return _digest_files(
        {name: path for name, path in files.items() if name != "config.json"}, files.get("config.json")
    )


def _digest_files(files: Mapping[str, Path], config: Path | None) -> str:
    """Over the files' names and contents, and the model type, by which transformers may choose a tokenizer class."""
    parts = {name: file_digest(path) for name, path in sorted(files.items())}
    if config is not None and config.is_file():
        try:
            parts["model_type"] = str(json.loads(config.read_text()).get("model_type"))
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{config}: not a model configuration ({error})") from error
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def wait_for_lock(path: Path, who: str, alive: Callable[[], None] = lambda: None) -> FileLock:
    """Take a lock file, waiting for its holder; looks a few times a second, so that a signal ends the wait at once, and
    calls `alive` as often."""
    lock = FileLock(path, who)
    waiting = False
    while not lock.acquire():
        if not waiting:
            _log.info("waiting for %s, which prepares the same data", held_by(path) or "another process")
            waiting = True
        alive()
        time.sleep(0.2)
    return lock
