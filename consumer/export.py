"""Drafters in the formats that engines load, and their way back in.

`export()` turns a checkpoint's float32 masters into a folder of z-lab's format: one safetensors file in the config's
dtype, without prefix, embedding or head, and a config.json. z-lab's `dflash`, SGLang and vLLM load it by name. The
format's tables are in docs/checkpoints.md; the config keys are `DrafterConfig.to_dict`.

`load_drafter()` reads a checkpoint or such a folder. Both are strict: a missing, extra or misshapen tensor is an error
that names it.
"""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..common import __version__
from ..common.errors import ConfigError, UsageError
from .checkpoint import MODEL, STATE, CheckpointState, damage, load_state
from .drafter import Drafter, DrafterConfig

FORMATS = ("zlab",)
CONFIG = "config.json"
SOURCE = "paceline.json"  # what a folder exported here says of its checkpoint


@dataclass(frozen=True)
class Exported:
    """What `export` wrote."""

    folder: Path
    format: str
    dtype: str
    tensors: int
    bytes: int
    target: str  # the run file's target.path


def export(checkpoint: Path, out: Path, format: str = "zlab", *, dtype: str | None = None) -> Exported:
    """Writes the drafter of `checkpoint` to the new folder `out`.

    `dtype` (default: the run's trainer.dtype) is that of the tensors and of the config, which must agree. ConfigError
    where the checkpoint is damaged or `out` exists; nothing half-made is left under `out`.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown export format {format!r}; there is {', '.join(FORMATS)}")
    if out.exists():
        raise ConfigError(f"{out} exists; give a folder that does not")
    state = _whole_state(checkpoint)
    config = DrafterConfig.from_dict(state.drafter)
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    masters = _tensors(checkpoint / MODEL, config)
    wanted = torch_dtype(config.dtype)
    tensors = {name: tensor.to(wanted).contiguous() for name, tensor in masters.items()}
    target = state.run["target"]["path"]
    source = {
        "paceline": __version__,
        "run": state.name,
        "run_id": state.run_id,
        "step": state.step,
        "target": target,
        "metrics": state.metrics,
    }
    write_zlab(out, config, tensors, source)
    return Exported(out, format, config.dtype, len(tensors), (out / MODEL).stat().st_size, target)


def write_zlab(out: Path, config: DrafterConfig, tensors: dict[str, Tensor], source: dict[str, Any]) -> None:
    """Makes the folder `out` under a temporary name, reads it back and renames it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    made = out.with_name(f".{out.name}.new-{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    try:
        save_file(tensors, made / MODEL, metadata={"format": "pt"})
        for name, values in ((CONFIG, config.to_dict()), (SOURCE, source)):
            (made / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        _tensors(made / MODEL, DrafterConfig.load(made))
        made.rename(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot write it: {error.strerror}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def load_drafter(path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Drafter:
    """The drafter of a checkpoint folder or of a z-lab folder, ready to draft. ConfigError names every missing,
    unexpected or misshapen tensor."""
    if (path / STATE).is_file():
        config = DrafterConfig.from_dict(_whole_state(path).drafter)
    elif (path / CONFIG).is_file():
        config = DrafterConfig.load(path)
    else:
        raise ConfigError(f"{path}: neither a checkpoint (no {STATE}) nor an exported drafter (no {CONFIG})")
    drafter = Drafter(config)
    drafter.load_state_dict(_tensors(path / MODEL, config))
    return drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _whole_state(checkpoint: Path) -> CheckpointState:
    if not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint}: there is no such checkpoint folder")
    reason = damage(checkpoint)
    if reason is not None:
        raise ConfigError(f"{checkpoint}: not a complete checkpoint: {reason}")
    return load_state(checkpoint)


def _tensors(path: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """The file's tensors, once their names and shapes are exactly the config's."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: unreadable drafter weights: {error}") from error
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in Drafter(config).state_dict().items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    wrong = [f"{name} is missing" for name in expected.keys() - shapes.keys()]
    wrong += [f"{name} is unexpected" for name in shapes.keys() - expected.keys()]
    wrong += [
        f"{name} has shape {list(shapes[name])}, not {list(expected[name])}"
        for name in expected.keys() & shapes.keys()
        if shapes[name] != expected[name]
    ]
    if wrong:
        raise ConfigError(f"{path} does not fit its config: {'; '.join(sorted(wrong))}")
    return tensors


def drafter_target(path: Path) -> str | None:
    """The target that a checkpoint or an export names, if it does."""
    if (path / STATE).is_file():
        return load_state(path).run["target"]["path"]
    if (path / SOURCE).is_file():
        return json.loads((path / SOURCE).read_text(encoding="utf-8")).get("target")
    return None


def torch_dtype(name: str) -> torch.dtype:
    found = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if found is None:
        raise ConfigError(f"dtype {name!r}: expected float32, bfloat16 or float16")
    return found
