"""Drafters in the formats that engines load, and their way back in.

`export()` turns a checkpoint's float32 masters into a folder of one of the `FORMATS`: one safetensors file in the
config's dtype without prefix, embedding or head, a config.json and a model card. `load_drafter()` reads a checkpoint
or such a folder. Both are strict: a missing, extra or misshapen tensor is an error that names it. What the formats
say is formats.py's business; whether engines compute the same from them, export_check.py's.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..common import __version__
from ..common.errors import ConfigError, UsageError, first_line
from ..common.paths import make_folder
from ..common.target_info import target_info
from .card import CARD, find_evaluations, model_card
from .checkpoint import (
    MODEL,
    STATE,
    WANTED,
    CheckpointError,
    CheckpointState,
    UnfitCheckpoint,
    check_folder,
    find_checkpoint,
    load_state,
    whole_checkpoint,
)
from .drafter import Drafter, DrafterConfig, blank_drafter
from .formats import CONFIG, FORMATS, Verifier, config_values, is_speculators, read_config, read_tensors

SOURCE = "paceline.json"  # what a folder exported here says of its checkpoint
WANTED_DRAFTER = f"an exported drafter's folder, {WANTED}"


@dataclass(frozen=True)
class Exported:
    """What `export` wrote."""

    folder: Path
    checkpoint: Path
    format: str
    dtype: str
    tensors: int
    bytes: int
    target: str  # the run file's target.path
    step: int
    evaluations: int  # real decodings that the model card shows


def export(
    checkpoint: Path,
    out: Path,
    format: str = "zlab",
    *,
    dtype: str | None = None,
    target: str | None = None,
    evaluations: Sequence[Path] = (),
) -> Exported:
    """Writes the drafter of `checkpoint` (or of what `find_checkpoint` takes it for) to the new folder `out`.

    dtype: of the tensors and of the config, which must agree; default: the run's trainer.dtype. target: what engines
    call the target, in the model card and in a speculators config; default: the run's target.path. evaluations:
    reports of `paceline eval --out` for the model card, beside those found in the run's output folder.

    Raises:
        ConfigError, CheckpointError: the checkpoint is damaged, `out` exists, the target's config cannot be read (for
            speculators) or an evaluation is of another checkpoint; nothing half-made is left under `out`.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown export format {format!r}; there is {', '.join(FORMATS)}")
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; give a folder that does not")
    checkpoint = find_checkpoint(checkpoint)
    state = _whole_state(checkpoint)
    config = _config_of(checkpoint, state)
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    trained_on = state.run["target"]["path"]
    name = target or trained_on
    verifier = Verifier(name, _architectures(trained_on, name)) if format == "speculators" else None
    values = config_values(format, config, verifier)
    reports = find_evaluations(checkpoint, state, evaluations)
    masters = read_tensors(checkpoint, config)
    wanted = torch_dtype(config.dtype)
    tensors = {tensor: masters[tensor].to(wanted).contiguous() for tensor in masters}
    card = model_card(state, config, format, target=name, evaluations=reports)
    write_drafter(out, values, tensors, source_of(state), card=card)
    size = (out / MODEL).stat().st_size
    return Exported(
        out, checkpoint, format, config.dtype, len(tensors), size, trained_on, state.step, evaluations=len(reports)
    )


def _architectures(trained_on: str, name: str) -> tuple[str, ...]:
    try:
        return target_info(trained_on).architectures
    except ConfigError as error:
        if name == trained_on:
            raise ConfigError(f"a speculators config names the target's architectures: {error}") from error
        return target_info(name).architectures


def source_of(state: CheckpointState) -> dict[str, Any]:
    """paceline.json of an export: where it comes from."""
    return {
        "paceline": __version__,
        "run": state.name,
        "run_id": state.run_id,
        "step": state.step,
        "evaluated": state.evaluated,
        "target": state.run["target"]["path"],
        "block_size": state.drafter.get("block_size"),
        "metrics": state.metrics,
    }


def write_drafter(
    out: Path, config: dict[str, Any], tensors: dict[str, Tensor], source: dict[str, Any], *, card: str = ""
) -> None:
    """Makes the folder `out` under a temporary name, reads it back and renames it. config: `config_values`."""
    make_folder(out.parent, "OUT: ")
    made = out.with_name(f".{out.name}.new-{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir()
        save_file(tensors, made / MODEL, metadata={"format": "pt"})
        for name, values in ((CONFIG, config), (SOURCE, source)):
            (made / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if card:
            (made / CARD).write_text(card, encoding="utf-8")
        read_tensors(made, read_config(made))
        made.rename(out)
    except OSError as error:
        raise ConfigError(f"OUT: cannot write {out}: {error.strerror}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def load_drafter(
    path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", num_target_layers: int | None = None
) -> Drafter:
    """The drafter of a checkpoint folder or of an exported one, ready to draft. ConfigError names every missing,
    unexpected or misshapen tensor. num_target_layers: see `read_config`."""
    config, tensors = read_drafter(path, num_target_layers)
    drafter = blank_drafter(config)
    drafter.load_state_dict(tensors)
    return drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)


def read_drafter(path: Path, num_target_layers: int | None = None) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and tensors, as they are stored, of a checkpoint folder or of an exported one of either format."""
    path = check_drafter_folder(path)
    if (path / STATE).is_file():
        config = _config_of(path, _whole_state(path))
        return config, read_tensors(path, config)
    config = read_config(path, num_target_layers)
    return config, read_tensors(path, config, verifiers=is_speculators(path))


def _whole_state(checkpoint: Path) -> CheckpointState:
    return load_state(whole_checkpoint(checkpoint))


def _config_of(checkpoint: Path, state: CheckpointState) -> DrafterConfig:
    try:
        return DrafterConfig.from_dict(state.drafter)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint / STATE}: drafter: {error}") from error


def check_drafter_folder(path: Path) -> Path:
    """The folder of a drafter that `path` names (`find_checkpoint`): a checkpoint's or an exported one.

    Raises:
        ConfigError: it is neither; what is in it may still be damaged.
    """
    path = check_folder(find_checkpoint(path), WANTED_DRAFTER)
    if not any((path / name).is_file() for name in (STATE, CONFIG)):
        neither = f"{path} is neither a checkpoint (no {STATE}) nor an exported drafter (no {CONFIG})"
        raise ConfigError(f"{neither}: give {WANTED_DRAFTER}")
    return path


def drafter_source(path: Path) -> dict[str, Any]:
    """What a checkpoint or a folder exported here says of its run, step, target and metrics; of a speculators folder of
    others the target alone, and of any other nothing. ConfigError if it is neither, or cannot be read."""
    path = check_drafter_folder(path)
    if (path / STATE).is_file():
        try:
            return source_of(load_state(path))
        except CheckpointError as error:
            raise UnfitCheckpoint(f"{path} is no complete checkpoint ({error}): give another") from None
    if (path / SOURCE).is_file():
        source = _object(path / SOURCE)
        if not isinstance(source.get("target"), str | None):
            raise ConfigError(f"{path / SOURCE}: target is no text: export the drafter again")
        return source
    if is_speculators(path):
        return {"target": _verifier_name(_object(path / CONFIG))}
    return {}


def _object(path: Path) -> dict[str, Any]:
    """A JSON object. ConfigError if the file holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}): export the drafter again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no JSON object: export the drafter again")
    return values


def _verifier_name(values: Any) -> str | None:
    for key in ("speculators_config", "verifier", "name_or_path"):
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, str) else None


def drafter_target(path: Path) -> str | None:
    """The target that a checkpoint or an export names, if it does."""
    return drafter_source(path).get("target")


def torch_dtype(name: str) -> torch.dtype:
    found = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if found is None:
        raise ConfigError(f"dtype {name!r}: expected float32, bfloat16 or float16")
    return found
