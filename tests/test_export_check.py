"""`paceline export --check`: passes on what was exported, and fails on each way in which an engine can differ."""

import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash import model as zlab
from exporting import checkpoint, config_for, taught
from paceline.common.cli import main
from paceline.common.errors import ConfigError, PacelineError, UsageError
from paceline.common.loading import load_causal_lm
from paceline.common.target_info import target_info
from paceline.consumer import export_check as module
from paceline.consumer.drafter import Drafter
from paceline.consumer.evaluate import prompt_ids, read_prompts
from paceline.consumer.export import export
from paceline.consumer.export_check import check_export
from paceline.consumer.first_weights import init_drafter
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

SLIDING = ("sliding_attention", "sliding_attention")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": "The river carries the letter."}, {"prompt": "The market."}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def drafter(tiny_target_dir: Path, prompts: Path) -> Drafter:
    """Taught the answers to the prompts, so that verifications accept more and less."""
    model = load_causal_lm(str(tiny_target_dir), torch.float32, "cpu")
    ids = prompt_ids(AutoTokenizer.from_pretrained(tiny_target_dir), read_prompts(prompts))
    return taught(model, 12, config_for(target_info(str(tiny_target_dir))), ids, 20)


@pytest.fixture
def saved(drafter: Drafter, tiny_target_dir: Path, tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "run" / "checkpoints", drafter, target=str(tiny_target_dir))


def failures(folder: Path, prompts: Path, saved: Path | None = None) -> list[str]:
    report = check_export(folder, prompts, checkpoint=saved, new_tokens=12)
    found = [one.text for one in report.findings if not one.passed]
    assert report.passed == (not found)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_what_was_exported_passes(saved: Path, prompts: Path, tmp_path: Path, format: str, dtype: str) -> None:
    made = export(saved, tmp_path / "out", format, dtype=dtype)
    report = check_export(made.folder, prompts, checkpoint=saved, new_tokens=20)
    assert report.passed, "\n".join(report.lines())
    said = "\n".join(report.lines())
    assert f"25 float32 masters in {dtype}" in said and "bit by bit" in said and "RoPE of base 1e+06" in said
    assert "block size 5, mask token 3, target layers [0, 2]" in said and "logits of 16 blocks" in said
    accepted = float(said.rpartition("acceptance length ")[2].split()[0])
    assert 1.2 < accepted <= 5, said  # else the loops would have had nothing to disagree about


@pytest.mark.parametrize(
    ("format", "layers"),
    [("zlab", SLIDING), ("zlab", ("sliding_attention", "full_attention")), ("speculators", SLIDING)],
)
def test_sliding_layers_past_their_window(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, format: str, layers: tuple[str, str]
) -> None:
    """z-lab's masks are ours on either side of the window; speculators' while the window holds the whole context."""
    window = 12 if format == "zlab" else 64
    shape = replace(config_for(target_info(str(tiny_target_dir))), layer_types=layers, sliding_window=window)
    saved = checkpoint(tmp_path / "run", init_drafter(shape, seed=3), target=str(tiny_target_dir))
    assert failures(export(saved, tmp_path / "out", format).folder, prompts, saved) == []


def test_a_window_that_an_engine_forgets_is_seen(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(config_for(target_info(str(tiny_target_dir))), layer_types=SLIDING, sliding_window=12)
    saved = checkpoint(tmp_path / "run", init_drafter(shape, seed=3), target=str(tiny_target_dir))
    folder = export(saved, tmp_path / "out").folder
    whole = zlab._attention_mask
    monkeypatch.setattr(
        zlab,
        "_attention_mask",
        lambda q, k, *, is_causal, sliding_window: whole(q, k, is_causal=True, sliding_window=None),
    )
    assert [text.split(" of ")[0] for text in failures(folder, prompts)] == ["logits"]


def test_causality_that_an_engine_takes_differently_is_seen(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(config_for(target_info(str(tiny_target_dir))), layer_types=SLIDING, sliding_window=500)
    saved = checkpoint(tmp_path / "run", init_drafter(shape, seed=3), target=str(tiny_target_dir))
    folder = export(saved, tmp_path / "out").folder
    start = zlab.Qwen3DFlashAttention.__init__

    def bidirectional(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self.is_causal = False

    monkeypatch.setattr(zlab.Qwen3DFlashAttention, "__init__", bidirectional)
    found = failures(folder, prompts)
    assert len(found) == 1 and "causal inside the block [False, False], not [True, True]" in found[0]


def test_states_of_another_layer_are_seen(saved: Path, prompts: Path, tmp_path: Path) -> None:
    """The off-by-one between the two ways of counting layers."""
    folder = export(saved, tmp_path / "out", "speculators").folder
    values = json.loads((folder / "config.json").read_text())
    values["aux_hidden_state_layer_ids"] = [2, 4]
    (folder / "config.json").write_text(json.dumps(values))
    assert any("target_layer_ids (1, 3), trained with (0, 2)" in text for text in failures(folder, prompts, saved))


def test_a_changed_tensor_is_seen(saved: Path, prompts: Path, tmp_path: Path) -> None:
    folder = export(saved, tmp_path / "out").folder
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert failures(folder, prompts) == []  # whole in itself
    found = failures(folder, prompts, saved)
    assert found[0] == "not the checkpoint's in float32: fc.weight" and found[1].startswith("logits of 16 blocks")


def test_another_rope_base_than_was_trained_is_seen(saved: Path, prompts: Path, tmp_path: Path) -> None:
    folder = export(saved, tmp_path / "out").folder
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("1000000.0", "10000.0"))
    assert failures(folder, prompts) == []  # whole in itself, and useless
    found = failures(folder, prompts, saved)
    assert "rope_theta 10000.0, trained with 1000000.0" in found[0]
    assert found[1].startswith("RoPE of base 1e+06") and found[2].startswith("logits of 16 blocks")


def test_tensors_of_another_dtype_than_the_config_are_seen(saved: Path, prompts: Path, tmp_path: Path) -> None:
    folder = export(saved, tmp_path / "out", dtype="bfloat16").folder
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"dtype": "float32"}))
    assert any("tensors of bfloat16 under a config of float32" in text for text in failures(folder, prompts))


def test_an_engine_that_is_missing_is_named(saved: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", missing)
    with pytest.raises(PacelineError, match="pip install --no-deps speculators hs-connectors"):
        module.require_engine("speculators")


def test_a_folder_that_names_no_target(saved: Path, prompts: Path, tmp_path: Path) -> None:
    folder = export(saved, tmp_path / "out").folder
    (folder / "paceline.json").unlink()
    with pytest.raises(UsageError, match="--target"):
        check_export(folder, prompts)
    with pytest.raises(ConfigError, match="no folder"):
        check_export(folder, prompts, target="/nowhere")


def test_command(saved: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--check", "--prompts", str(prompts), "--limit", "1"]
    for format in ("zlab", "speculators"):
        out = tmp_path / format
        newest = saved.parent.parent / "newest"
        assert main(["export", str(newest), str(out), "--format", format, "--target", "Org/Model", *options]) == 0
        said = capsys.readouterr().out
        assert "25 tensors of step 3" in said and said.count("\nok  ") == 6 and "FAIL" not in said
        assert main(["export", str(out), *options]) == 0  # the folder alone: without the checkpoint's masters
        assert capsys.readouterr().out.count("ok  ") == 5
    assert main(["export", str(saved)]) == 2
    assert main(["export", str(saved), "--check"]) == 2
    assert all("OUT is missing" in line for line in capsys.readouterr().err.splitlines())
