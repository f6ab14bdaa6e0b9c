"""`paceline init`: a commented run file for a target and a number of GPUs.

The file holds what a person is likely to change; everything else has a default (docs/runfile.md).
"""

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError, UsageError, counted
from .runfile import NAME, NAME_IN_WORDS, parse, toml_value

# Rows of the target's embedding that released DFlash drafters (Qwen3) or trials (SmolLM2) mask with.
_KNOWN_MASKS = ((r"qwen3(?!\.5)", 151669), (r"smollm2", 16))


class Split(NamedTuple):
    """Topology N-M: N workers, M trainer ranks."""

    workers: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.workers}-{self.ranks}"


def choose_split(gpus: int) -> Split:
    """1-1 on one or two GPUs, 3-1 on four, 5-3 on eight: about 3 of 8 GPUs train, at least one. 2-1 without GPUs."""
    if gpus == 0:
        return Split(2, 1)
    ranks = max(1, gpus * 3 // 8)
    return Split(max(1, gpus - ranks), ranks)


def parse_split(text: str) -> Split:
    """ "3-1" as a split. Raises UsageError."""
    found = re.fullmatch(r"([1-9]\d{0,3})-([1-9]\d{0,3})", text)
    if not found:
        raise UsageError(f"--split {text}: give it as WORKERS-RANKS, for example 3-1")
    return Split(int(found[1]), int(found[2]))


def suggest_mask_token(target: str) -> int | None:
    """A row of the target's embedding that no text uses: the first row past the tokenizer, or else a token reserved
    for later use. Looks at local files only; None if nothing is sure."""
    folder = Path(target).expanduser()
    config, tokenizer = _json(folder / "config.json"), _json(folder / "tokenizer.json")
    if config and tokenizer:
        added = {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
        vocabulary = tokenizer.get("model", {}).get("vocab", ())
        entries = max([len(vocabulary), *(token + 1 for token in added)])
        rows = (config.get("text_config") or config).get("vocab_size", 0)
        if rows > entries:
            return entries
        spare = [token for token, text in added.items() if re.search(r"reserved|unused", text)]
        if spare:
            return min(spare)
    return next((token for pattern, token in _KNOWN_MASKS if re.search(pattern, target.lower())), None)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def default_name(target: str) -> str:
    """A run name from a target's path: lower case, with - for what a name may not hold."""
    stem = Path(target.rstrip("/")).name.removesuffix(".gguf")
    return re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-_")[:48] or "run"


_TEMPLATE = """\
# A paceline run: {target}, {split} ({workers_text}, {ranks_text}), {machine}.
# Start it with `paceline up {file}`. All keys: docs/runfile.md. Any key: --set key=value.

name = {name}  # names the run's rings, sockets and units
output = {output}  # checkpoints, metrics, logs

[target]
path = {target_text}  # local folder, GGUF file or hub id
dtype = "bfloat16"

[data]
files = [{data}]  # chat files; {{path = …, weight = …}} for a mix (docs/data.md)
max_length = {max_length}  # tokens; longer rows are cut
held_out = 64  # rows never trained on, for evaluation

[stream]
token_budget = {token_budget}  # most tokens in a batch; with slots it decides the size of the rings
slots = {slots}  # records that wait in each worker's ring
order = "arrival"  # "strict": same weights for any number of workers and any kills

[workers]
count = {workers}{workers_devices}

[trainer]
ranks = {ranks}{ranks_devices}
batches_per_step = {step}  # G: whole batches in an optimiser step, over all ranks
epochs = 6
# max_steps = 1000

[drafter]
layers = {layers}
block_size = {block}  # the anchor and {slots_after} drafted tokens
{mask}

[optimizer]
lr = {lr}

[checkpoint]
every_steps = 500
every_minutes = 30
keep_last = 3

[evaluation]
every_steps = 500  # tau and tau_chain on the held-out rows
"""


_CHOSEN_MASK = "mask_token_id = {}  # a row of the target's embedding that data never uses"
_NO_MASK = """\
# A row of the target's embedding that data never uses (never pad or eos); `paceline prepare {}` names some:
# mask_token_id = ..."""


def run_text(
    target: str,
    gpus: int,
    *,
    name: str | None = None,
    split: str | None = None,
    data: str = "data.jsonl",
    file: Path = Path("run.toml"),
) -> str:
    """The text of run file `file`. `gpus` 0 is a CPU run, with a small drafter and short rows. UsageError."""
    shape = parse_split(split) if split else choose_split(gpus)
    if name is not None and not re.fullmatch(NAME, name):
        raise UsageError(f"--name {name}: {NAME_IN_WORDS}")
    name = name or default_name(target)
    mask = suggest_mask_token(target)
    gpu = gpus > 0
    target, data = (_seen_from(file.parent, place) for place in (target, data))
    return _TEMPLATE.format(
        target=target,
        split=shape,
        workers_text=counted(shape.workers, "target worker"),
        ranks_text=counted(shape.ranks, "trainer rank"),
        machine=counted(gpus, "GPU") if gpu else "on CPU",
        file=file,
        name=toml_value(name),
        output=toml_value(f"runs/{name}"),
        target_text=toml_value(target),
        data=toml_value(data),
        max_length=3072 if gpu else 512,
        token_budget=16384 if gpu else 1024,
        slots=4 if gpu else 3,
        workers=shape.workers,
        ranks=shape.ranks,
        workers_devices="  # " + _devices(0, shape.workers) if gpus >= sum(shape) else _shared(gpus),
        ranks_devices="  # " + _devices(shape.workers, shape.ranks) if gpus >= sum(shape) else "",
        step=shape.ranks,
        layers=5 if gpu else 1,
        block=16 if gpu else 8,
        slots_after=15 if gpu else 7,
        mask=_NO_MASK.format(file) if mask is None else _CHOSEN_MASK.format(mask),
        lr="6e-4" if gpu else "2e-3",
    )


def _seen_from(folder: Path, text: str) -> str:
    """A path of the current folder as a file in `folder` has to name it; what is no path stays."""
    here = Path(text).expanduser()
    if here.is_absolute() or folder.absolute() == Path.cwd() or not here.exists():
        return text
    return os.path.relpath(here, folder)


def _devices(first: int, count: int) -> str:
    return f"cuda:{first}" if count == 1 else f"cuda:{first} to cuda:{first + count - 1}"


def _shared(gpus: int) -> str:
    return f"  # share {counted(gpus, 'GPU')} with the trainer" if gpus else ""


def write_run_file(path: Path, text: str, force: bool = False) -> None:
    """Writes a run file, if its text is a valid one.

    Raises:
        ConfigError: it is not, the file exists and `force` is not given, or it cannot be written.
    """
    parse(text, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists; --force replaces it") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
