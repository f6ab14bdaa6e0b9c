"""What `paceline doctor` checks of a run file: that it can be read, and that this machine has what it asks for.

Needs neither torch nor transformers: the target's shape is read from its config.json or its GGUF head.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import paths
from .doctor import Check, failed, leftovers
from .errors import ConfigError, PacelineError, counted
from .inspect import read_rings
from .space import free_bytes, size_text

if TYPE_CHECKING:
    from .runfile import RunFile

_WEIGHTS = ("*.safetensors", "*.bin")


def run_checks(run_path: Path, overrides: Sequence[str], torch: Mapping[str, Any]) -> Iterator[Check]:
    """The checks of a run file; `torch` is what `doctor.torch_facts` found."""
    try:
        from .runfile import load

        run = load(run_path, overrides)
    except ImportError as error:
        yield Check("run file", "FAIL", f"cannot be read without {error.name}", f"pip install {error.name}")
        return
    except PacelineError as error:
        yield failed("run file", error)
        return
    yield Check("run file", "OK", f"{run_path}: run {run.name}, {run.workers.count}-{run.trainer.ranks}")
    yield from _sockets(run)
    yield from _directory(run)
    yield from _target(run)
    yield from _data(run)
    yield from _output(run)
    yield from _mask_token(run)
    yield from _start(run)
    yield from _devices(run, torch)
    yield from _rings(run)
    if Path(run.stream.ring_dir) != paths.DEFAULT_RING_DIR:
        yield from (check for check in leftovers(Path(run.stream.ring_dir)) if check.level != "OK")


def _sockets(run: "RunFile") -> Iterator[Check]:
    path = paths.runtime_base()[0] / run.name / "ranks.sock"
    if (size := len(os.fsencode(path))) > paths.SOCKET_PATH_BYTES:
        text = f"{path} has {size} bytes, at most {paths.SOCKET_PATH_BYTES} fit"
        yield Check("sockets", "FAIL", text, "set PACELINE_RUNTIME_DIR to a shorter folder, or shorten the run's name")


def _directory(run: "RunFile") -> Iterator[Check]:
    folder = paths.runtime_base()[0] / run.name
    with suppress(FileNotFoundError):
        try:
            paths.check_private(folder)
            yield Check("run directory", "OK", str(folder))
        except ConfigError as error:
            yield failed("run directory", error)


def _target(run: "RunFile") -> Iterator[Check]:
    name, path = run.target.path, Path(run.target.path).expanduser()
    if path.is_dir():
        yield _target_folder(path)
    elif path.suffix == ".gguf" or path.exists():
        yield _readable("target", path)
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        yield Check("target", "FAIL", f"there is no folder {name}", "correct target.path")
    elif cached := _hub_file(name, "config.json"):
        yield Check("target", "OK", f"{name}, in the hub's cache: {cached.parent}")
    else:
        todo = "a machine without network needs it in the hub's cache first: hf download"
        yield Check("target", "WARN", f"{name} is not here; it is taken from the hub at the start", todo)


def _target_folder(path: Path) -> Check:
    if not os.access(path / "config.json", os.R_OK):
        return Check(
            "target", "FAIL", f"{path} has no config.json that can be read", "give a transformers model's folder"
        )
    weights = [file for pattern in _WEIGHTS for file in path.glob(pattern)]
    if not weights:
        return Check("target", "FAIL", f"{path} has no weights ({', '.join(_WEIGHTS)})", "copy the whole model there")
    if closed := [file for file in weights if not os.access(file, os.R_OK)]:
        return Check("target", "FAIL", f"{closed[0]} cannot be read", f"let uid {os.geteuid()} read it")
    size = sum(file.stat().st_size for file in weights)
    return Check("target", "OK", f"{path}, {size_text(size)} of weights")


def _hub_file(name: str, file: str) -> Path | None:
    """A file of a hub model in the local cache; asks no network."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    with suppress(HFValidationError):
        found = try_to_load_from_cache(name, file)
        return Path(found) if isinstance(found, str) else None
    return None


def _readable(name: str, path: Path) -> Check:
    if not path.exists():
        return Check(name, "FAIL", f"there is no {path}", "correct the path, or put the file there")
    if not os.access(path, os.R_OK):
        return Check(name, "FAIL", f"{path} cannot be read", f"let uid {os.geteuid()} read it")
    return Check(name, "OK", f"{path}, {size_text(path.stat().st_size)}")


def _data(run: "RunFile") -> Iterator[Check]:
    from .runfile import CHAT_SUFFIXES

    if run.data.rows is not None:
        yield _readable("data", Path(run.data.rows) / "rows.arrow")
    for file in (Path(file.path) for file in run.data.files):
        if file.is_dir():
            yield Check("data", "FAIL", f"{file} is a folder", "name each of its files in data.files")
        elif not file.name.endswith(CHAT_SUFFIXES):
            yield Check("data", "FAIL", f"{file} is no chat file by its name", f"give {', '.join(CHAT_SUFFIXES)}")
        elif file.is_file() and not file.stat().st_size:
            yield Check("data", "FAIL", f"{file} is empty", "put conversations in it")
        else:
            yield _readable("data", file)


def _output(run: "RunFile") -> Iterator[Check]:
    folder = Path(run.output)
    where = next(one for one in (folder, *folder.parents) if one.exists())
    if not where.is_dir() or not os.access(where, os.W_OK | os.X_OK):
        yield Check("output", "FAIL", f"{where} is no folder that can be written", "correct output, or its permissions")
        return
    system = os.statvfs(where)
    free = size_text(system.f_bavail * system.f_frsize)
    yield Check("output", "OK", f"{folder}{'' if where == folder else ', to be made'}, {free} free")


def _mask_token(run: "RunFile") -> Iterator[Check]:
    if run.drafter.needs_mask_token:
        todo = "name a token of the target that data never use: `paceline prepare RUN.toml` lists some"
        yield Check("mask token", "FAIL", "drafter.mask_token_id is not set", todo)
    rows, mask = config_value(run.target.path, "vocab_size", int), run.drafter.mask_token_id
    if rows and mask is not None and mask >= rows:
        text = f"drafter.mask_token_id = {mask} is outside the target's {rows} embedding rows"
        yield Check("mask token", "FAIL", text, "name a token of the target that data never use")


def _start(run: "RunFile") -> Iterator[Check]:
    """The drafter to start from, where it is to be on this machine; the trainer looks whether it fits."""
    from .runfile import COPYABLE, INIT_KINDS

    kind = config_value(run.target.path, "model_type", str)
    if run.drafter.init_from == "target" and kind is not None and kind not in COPYABLE:
        text = f'drafter.init_from = "target": layers of a {kind} target are of another kind'
        yield Check("first weights", "FAIL", text, 'use drafter.init_from = "random"')
    name = run.drafter.init_from
    path = Path(name).expanduser()
    if name in INIT_KINDS or not (path.is_absolute() or path.exists()):
        return
    folder = path if path.exists() or path.name not in ("best", "newest") else path.parent
    if folder.is_dir():
        yield Check("first weights", "OK", name)
    else:
        yield Check("first weights", "FAIL", f"there is no folder {folder}", "correct drafter.init_from")


def _devices(run: "RunFile", torch: Mapping[str, Any]) -> Iterator[Check]:
    from .devices import assign_devices, check_ranks, shard_devices

    devices = assign_devices(run)
    used = [*devices.ranks, *(name for first in devices.workers for name in shard_devices(run, first))]
    split = f"workers on {', '.join(devices.workers)}; ranks on {', '.join(devices.ranks)}"
    seen = len(torch.get("gpus", []))
    numbers = {int(name.partition(":")[2] or 0) for name in used if name != "cpu"}
    if numbers and "error" not in torch and max(numbers) >= seen:
        text = f"{split}: torch sees {counted(seen, 'GPU')}"
        yield Check("devices", "FAIL", text, "correct workers.devices and trainer.devices, or CUDA_VISIBLE_DEVICES")
        return
    try:
        check_ranks(devices.ranks)
    except ConfigError as error:
        yield failed("devices", error)
    else:
        yield Check("devices", "OK", split)


# The rings of the run


def _rings(run: "RunFile") -> Iterator[Check]:
    folder = paths.ring_dir(run)
    hidden_size = hidden_size_of(run.target.path)
    planes = _planes(run)
    if hidden_size is None or planes is None:
        text = "the target's shape cannot be read here, so what the rings need is not known"
        yield Check("rings", "WARN", text, "correct target.path, or fetch the target first")
        return
    try:
        from .footprint import ring_bytes  # numpy, whose absence is a finding of its own

        needed = run.workers.count * ring_bytes(run, planes, hidden_size)
    except ImportError as error:
        yield Check("rings", "FAIL", f"cannot be sized without {error.name}", f"pip install {error.name}")
        return
    where = next(one for one in (folder, *folder.parents) if one.exists())
    have = sum(ring.path.stat().st_blocks * 512 for ring in read_rings(folder) if ring.problem is None)
    free = free_bytes(where)
    each = f"{counted(run.workers.count, 'ring')} of {counted(run.stream.slots, 'slot')}: {size_text(needed)}"
    text = f"{each} in {folder}; {size_text(free)} are free" + (f", {size_text(have)} are there" if have else "")
    if not os.access(where, os.W_OK | os.X_OK):
        yield Check("rings", "FAIL", f"{where} cannot be written by uid {os.geteuid()}", "correct stream.ring_dir")
    elif needed > free + have:
        todo = "lower stream.slots or stream.token_budget, enlarge /dev/shm (--shm-size in a container), paceline clean"
        yield Check("rings", "FAIL", text, todo)
    else:
        yield Check("rings", "OK", text)


def _planes(run: "RunFile") -> int | None:
    layers = len(run.target.layer_ids) if run.target.layer_ids is not None else run.drafter.layers
    return layers + run.target.last_hidden or None


def hidden_size_of(path: str) -> int | None:
    """The decoder's hidden size, from config.json of a folder or of the hub's cache, or from a GGUF file's head.

    None if that cannot be had without network, transformers or torch.
    """
    local = Path(path).expanduser()
    if local.is_file():
        return _gguf_hidden_size(local)
    size = config_value(path, "hidden_size", int)
    return size if size is not None and size > 0 else None


Kind = TypeVar("Kind", int, str)


def config_value(path: str, key: str, kind: type[Kind]) -> Kind | None:
    """A value of a target's config.json, in a folder or the hub's cache: of its decoder, if it has parts."""
    local = Path(path).expanduser()
    config = local / "config.json" if local.is_dir() else _hub_file(path, "config.json")
    if config is None:
        return None
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for part in (values.get("text_config"), values) if isinstance(values, dict) else ():
        if isinstance(part, dict) and isinstance(found := part.get(key), kind):
            return found
    return None


def _gguf_hidden_size(path: Path) -> int | None:
    try:
        from gguf import GGUFReader
    except ImportError:
        return None
    try:
        fields = GGUFReader(path).fields
        found = next((field for name, field in fields.items() if name.endswith(".embedding_length")), None)
        return None if found is None else int(found.contents())
    except (OSError, ValueError, IndexError):
        return None  # damaged, or no GGUF file: the target's own check says so
