"""What the three folders may import of each other, and who in `common` loads torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [path for side in ("common", "producer", "consumer") for path in sorted((ROOT / side).rglob("*.py"))]
LOAD_TORCH = {
    f"{name}.py"
    for name in ["target", "loading", "reference", "varlen", "eightbit", "boundaries", "delta_net", "quantised"]
}


def imports(path: Path, *, inside_functions: bool) -> set[str]:
    """Modules that a file imports, relative ones with their dots."""
    nodes = list(ast.walk(ast.parse(path.read_text())) if inside_functions else ast.parse(path.read_text()).body)
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports(path: Path):
    side = path.parent.name
    everywhere = imports(path, inside_functions=True)
    for other in {"common", "producer", "consumer"} - {side, "common"}:
        reached = {name for name in everywhere if name.startswith((f"..{other}", f"paceline.{other}"))}
        assert not reached or side == "common", f"{side} imports {other}"
    if side != "common":
        return
    at_once = {name.split(".")[0] for name in imports(path, inside_functions=False)}
    assert not at_once & {"torch", "transformers"} or path.name in LOAD_TORCH
    assert path.name in LOAD_TORCH or not everywhere & {
        f".{name.removesuffix('.py')}" for name in LOAD_TORCH - {"target.py", "loading.py"}
    }
    reached = {name for name in imports(path, inside_functions=False) if name.startswith(("..producer", "..consumer"))}
    assert not reached, "common is loaded without either side"
