"""A path on the command line that is not there, or not what it should be: one rule for all commands, exit code 78 and
one line that names the path and says what to give."""

import json
import re
from pathlib import Path

import pytest
from exporting import checkpoint, config
from paceline.common.cli import main
from paceline.consumer.checkpoint import _seal
from paceline.consumer.export import export
from paceline.consumer.first_weights import init_drafter

FOLDER = {  # commands that read a checkpoint or a drafter
    "audit": ["audit", "PATH"],
    "eval": ["eval", "PATH"],
    "eval with a target": ["eval", "PATH", "--target", "TARGET"],
    "export": ["export", "PATH", "OUT"],
    "export --check": ["export", "PATH", "--check"],
}
FILE = {
    "eval --prompts": ["eval", "DRAFTER", "--prompts", "PATH"],
    "export --prompts": ["export", "DRAFTER", "--check", "--prompts", "PATH"],
    "export --eval": ["export", "CHECKPOINT", "OUT", "--eval", "PATH"],
    "demo --data": ["demo", "OUT", "--data", "PATH"],
    "prepare": ["prepare", "PATH", "--target", "TARGET"],
    "regenerate": ["regenerate", "PATH", "--target", "TARGET", "--out", "OUT"],
}
RUN_FILE = {
    name: [name, "PATH", *rest]
    for name, rest in {
        "up": [],
        "producer": [],
        "consumer": [],
        "prepare": [],
        "plan": [],
        "rings": [],
        "status": [],
        "metrics": [],
        "scale": ["1"],
        "restart": [],
        "stop": [],
        "clean": [],
    }.items()
}
ROOT = {name: [name, "--root", "PATH", "--dry-run"] for name in ("install-units", "uninstall-units")}


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> dict[str, Path]:
    """What can stand where another thing was meant."""
    root = tmp_path_factory.mktemp("of mine ü")
    run = root / "run"
    saved = checkpoint(run / "checkpoints", init_drafter(config(), seed=1), target=str(tiny_target_dir))
    drafter = export(saved, root / "drafter").folder
    empty = root / "empty"
    empty.mkdir()
    file = root / "file.jsonl"
    file.write_text("")
    half = checkpoint(root / "half" / "checkpoints", init_drafter(config(), seed=1), target=str(tiny_target_dir))
    (half / "manifest.json").unlink()
    short = checkpoint(root / "short" / "checkpoints", init_drafter(config(), seed=1), target=str(tiny_target_dir))
    (short / "model.safetensors").write_bytes(b"")
    other = checkpoint(root / "other" / "checkpoints", init_drafter(config(), seed=1))
    state = json.loads((other / "state.json").read_text()) | {"format": 2}
    (other / "state.json").write_text(json.dumps(state))
    (other / "manifest.json").unlink()
    _seal(other, 3)
    (root / "folder.toml").mkdir()
    return {
        "missing": root / "missing",
        "file": file,
        "empty": empty,
        "run": run,
        "no newest": empty / "newest",
        "no best": run / "best",
        "half": half,
        "short": short,
        "of another version": other,
        "CHECKPOINT": saved,
        "DRAFTER": drafter,
        "TARGET": tiny_target_dir,
        "missing.jsonl": root / "missing.jsonl",
        "missing.toml": root / "missing.toml",
        "folder.toml": root / "folder.toml",
    }


def refused(command: list[str], path: Path, things: dict[str, Path], out: Path, capfd: pytest.CaptureFixture) -> str:
    """The one line that the command ends with; it has written nothing."""
    words = {"PATH": path, "OUT": out, **things}
    code = main([str(words.get(word, word)) for word in command])
    said = capfd.readouterr()
    assert code == 78, said.err
    [line] = said.err.splitlines()
    assert line.startswith("paceline: ") and str(path) in line and not said.out
    assert not out.exists()
    return line


@pytest.mark.parametrize("command", FOLDER.values(), ids=FOLDER)
@pytest.mark.parametrize(
    ("thing", "said"),
    [
        ("missing", "there is no folder .*: give .*newest in a run's output folder"),
        ("file", "is a file: give .*newest in a run's output folder"),
        ("empty", "(no checkpoint|neither a checkpoint).*: give .*newest in a run's output folder"),
        ("run", "holds checkpoints: name one of them"),
        ("no newest", "there is no complete checkpoint in"),
        ("no best", "no checkpoint in .* was evaluated"),
        ("half", r"is no complete checkpoint \(manifest\.json is missing: it was never finished\): give another"),
        ("short", r"is no complete checkpoint \(model\.safetensors has 0 bytes, not \d+\): give another"),
        (
            "of another version",
            r"is no complete checkpoint \(state\.json is no state of this format: format: .*\): give",
        ),
    ],
)
def test_where_a_checkpoint_or_drafter_is_read(command, thing, said, things, tmp_path, capfd):
    if command[-1] == "--check" and thing in ("half", "short", "of another version"):
        pytest.skip("a checkpoint and no OUT is a wrong usage, whatever is in it")
    line = refused(command, things[thing], things, tmp_path / "out", capfd)
    assert re.search(said, line), line


@pytest.mark.parametrize("command", [FOLDER["audit"], FOLDER["export"]], ids=["audit", "export"])
def test_where_only_a_checkpoint_will_do(command, things, tmp_path, capfd):
    line = refused(command, things["DRAFTER"], things, tmp_path / "out", capfd)
    assert "is an exported drafter: give the checkpoint" in line


@pytest.mark.parametrize("command", FILE.values(), ids=FILE)
@pytest.mark.parametrize("thing", ["missing.jsonl", "empty"])
def test_where_a_file_is_read(command, thing, things, tmp_path, capfd):
    line = refused(command, things[thing], things, tmp_path / "out", capfd)
    assert ("is a folder" if thing == "empty" else "no such file") in line or "there is no file" in line


@pytest.mark.parametrize("command", RUN_FILE.values(), ids=RUN_FILE)
@pytest.mark.parametrize("thing", ["missing.toml", "folder.toml"])
def test_where_a_run_file_is_read(command, thing, things, tmp_path, capfd):
    line = refused(command, things[thing], things, tmp_path / "out", capfd)
    assert ("is a folder: give the run file in it" if thing == "folder.toml" else "no such run file") in line


@pytest.mark.parametrize("command", ROOT.values(), ids=ROOT)
@pytest.mark.parametrize("thing", ["missing", "file"])
def test_where_a_root_folder_is_given(command, thing, things, tmp_path, capfd):
    line = refused(command, things[thing], things, tmp_path / "out", capfd)
    assert ("there is no folder" if thing == "missing" else "is a file: give a folder") in line


@pytest.mark.parametrize(
    ("config_text", "source"),
    [
        ("{}", "3"),
        ("{}", "{"),
        ("{}", '{"target": 5}'),
        ("garbage", None),
        ("[1]", None),
        ("{}", None),
        ('{"num_hidden_layers": "x", "dflash_config": {}}', None),
        ('{"num_hidden_layers": 1, "dflash_config": 3}', None),
        ('{"speculators_model_type": "dflash", "speculators_config": 5}', None),
        ('{"speculators_model_type": "dflash", "transformer_layer_config": {"rope_scaling": 7}}', None),
    ],
)
def test_an_exported_folder_that_is_damaged(config_text, source, things, tmp_path, capfd):
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "config.json").write_text(config_text)
    if source is not None:
        (folder / "paceline.json").write_text(source)
    command = ["eval", "PATH"] if source is not None else ["eval", "PATH", "--target", "TARGET"]
    refused(command, folder, things, tmp_path / "out", capfd)
