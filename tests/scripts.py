"""benchmarks/ as modules, and a run file small enough for them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.common.runfile import RunFile, to_toml

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """benchmarks/NAME.py. In sys.modules too, where dataclasses look for their module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def write_tiny_run(folder: Path, target: Path, chats: Path, *, token_budget: int, **tables: dict[str, Any]) -> Path:
    """A run file in `folder`, whose output, rings and data are its own. tables: settings on top, by table."""
    values: dict[str, Any] = {
        "name": "tiny",
        "output": str(folder / "own"),
        "target": {"path": str(target), "dtype": "float32"},
        "data": {"files": [str(chats)], "max_length": 256, "held_out": 8},
        "stream": {"token_budget": token_budget, "slots": 2, "ring_dir": str(folder / "shm")},
        "trainer": {"dtype": "float32", "threads": 1},
        "drafter": {"layers": 1, "block_size": 4, "mask_token_id": 3},
    }
    for name, more in tables.items():
        values[name] = values.get(name, {}) | more
    path = folder / "run.toml"
    path.write_text(to_toml(RunFile.model_validate(values)))
    return path
