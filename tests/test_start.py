"""`drafter.init_from` another drafter: it goes on from those very weights, or says by name what does not fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import CONFIG, INFO, make_drafter, make_run
from exporting import checkpoint
from paceline.common.errors import ConfigError
from paceline.common.runfile import load, to_toml
from paceline.consumer.drafter import Drafter, DrafterConfig
from paceline.consumer.export import export, write_drafter
from paceline.consumer.formats import Verifier, config_values
from paceline.consumer.start import first_drafter
from safetensors.torch import load_file, save_file

TAPS = [1, 3]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """One drafter as checkpoint, as the best of its run, and in both formats."""
    drafter = make_drafter(seed=4)
    good = {"step": 2, "evaluated": 2, "metrics": {"tau_chain": 2.5}}
    best = checkpoint(tmp_path / "run" / "checkpoints", drafter, **good)
    checkpoint(best.parent, make_drafter(seed=5), step=3, evaluated=3, metrics={"tau_chain": 1.5})
    zlab = export(best, tmp_path / "zlab").folder
    values = config_values("speculators", drafter.config, Verifier("nowhere", ()))
    write_drafter(tmp_path / "speculators", values, dict(drafter.state_dict()), {})
    return {
        "checkpoint": best,
        "best": tmp_path / "run" / "best",
        "zlab": zlab,
        "speculators": tmp_path / "speculators",
    }


def start(name: Path | str, **sections: Any) -> Drafter:
    drafter = {"init_from": str(name)} | sections.pop("drafter", {})
    return first_drafter(make_run(drafter=drafter, **sections), INFO, TAPS)


@pytest.mark.parametrize("kind", ["checkpoint", "best", "zlab", "speculators"])
def test_goes_on_from_the_same_weights(folders: dict[str, Path], kind: str) -> None:
    drafter, wanted = start(folders[kind], trainer={"dtype": "bfloat16"}), make_drafter(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), wanted.parameters(), strict=True))
    assert all(p.dtype == torch.float32 and p.requires_grad for p in drafter.parameters())
    assert replace(drafter.config, dtype="float32") == replace(wanted.config, initializer_range=0.2)
    assert drafter.config.dtype == "bfloat16"  # the run's, not what it was stored in


@pytest.mark.parametrize("name", ["random", "target", "checkpoint"])
def test_a_resumed_run_draws_and_reads_nothing(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint replaces every weight; until then they are numbers, with which a rank may rehearse."""
    for draw in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, draw, lambda tensor, *_, **__: tensor.is_meta or pytest.fail("drawn"))
    run = make_run(drafter={"init_from": str(folders.get(name, name))})
    drafter = first_drafter(run, INFO, TAPS, resumed=folders["checkpoint"])
    assert all(not p.any() and p.requires_grad and p.device.type == "cpu" for p in drafter.parameters())
    monkeypatch.undo()
    assert torch.equal(drafter.rotary_emb.inv_freq, Drafter(drafter.config).rotary_emb.inv_freq)


def test_what_no_run_file_says_stays_the_drafters(tmp_path: Path) -> None:
    own = replace(CONFIG, num_attention_heads=8, head_dim=8, intermediate_size=40, rope_theta=5e6, rms_norm_eps=1e-5)
    config = start(checkpoint(tmp_path, make_drafter(own))).config
    assert (config.num_attention_heads, config.intermediate_size, config.rope_theta) == (8, 40, 5e6)
    assert config.rms_norm_eps == 1e-5


def test_its_mask_token_need_not_be_repeated(folders: dict[str, Path]) -> None:
    assert start(folders["zlab"], drafter={"mask_token_id": None}).config.mask_token_id == CONFIG.mask_token_id


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3, "layer_types": ()}, "its layers 3, drafter.layers = 2"),
        ({"block_size": 8}, "its block size 8, drafter.block_size = 4"),
        ({"mask_token_id": 5}, "its mask token 5, drafter.mask_token_id = 60"),
        ({"target_layer_ids": (0, 3)}, r"its target layers read \[0, 3\], target.layer_ids = \[1, 3\]"),
        ({"hidden_size": 32}, "its hidden size 32, the target has 48"),
        ({"num_target_layers": 8}, "its target layers 8, the target has 6"),
        ({"vocab_size": 80}, "its vocabulary rows 80, the target has 61"),
        ({"hidden_act": "gelu"}, "its activation gelu, drafter.hidden_act = silu"),
        (
            {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 9},
            r"its sliding layers \[1\], drafter.sliding_layers = \[\]",
        ),
    ],
)
def test_a_mismatch_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    saved = checkpoint(tmp_path, make_drafter(replace(CONFIG, **changes)))
    with pytest.raises(ConfigError, match=words) as caught:
        start(saved)
    assert str(caught.value).startswith(f'drafter.init_from = "{saved}"')


def test_its_window_has_to_be_the_runs(tmp_path: Path) -> None:
    shape = replace(CONFIG, layer_types=("sliding_attention",) * 2, sliding_window=9)
    saved = checkpoint(tmp_path, make_drafter(shape))
    assert start(saved, drafter={"sliding_window": 9}).config.layer_types == shape.layer_types
    with pytest.raises(ConfigError, match=r"its window 9, drafter\.sliding_window = 8"):
        start(saved, drafter={"sliding_window": 8})


def test_every_mismatch_is_named_at_once(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path, make_drafter(replace(CONFIG, block_size=8, mask_token_id=5)))
    with pytest.raises(ConfigError, match=r"block size 8.*mask token 5.*MLP width 64"):
        start(saved, drafter={"intermediate_size": 32})


def test_missing_and_extra_tensors_are_named(folders: dict[str, Path]) -> None:
    path = folders["zlab"] / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.2.mlp.up_proj.weight"] = tensors.pop("hidden_norm.weight")
    save_file(tensors, path)
    with pytest.raises(
        ConfigError, match=r"hidden_norm.weight is missing.*layers\.2\.mlp\.up_proj\.weight is unexpected"
    ):
        start(folders["zlab"])


def test_what_is_no_drafter_is_said(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        start(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder /nowhere/drafter"):
        start("/nowhere/drafter")
    with pytest.raises(ConfigError, match=r"holds checkpoints: name one of them, or .*best"):
        start(folders["checkpoint"].parent)
    (folders["checkpoint"] / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="is no complete checkpoint"):
        start(folders["checkpoint"])


def test_a_resumed_run_needs_its_start_no_more(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its own checkpoint says what the drafter is; weights follow from there."""
    own = replace(CONFIG, intermediate_size=40)
    saved = checkpoint(tmp_path / "own", make_drafter(own))
    run = make_run(drafter={"init_from": "/gone/drafter"})
    config = first_drafter(run, INFO, TAPS, resumed=saved).config
    assert config == replace(own, initializer_range=0.2)
    with pytest.raises(ConfigError, match=r"block size 4, drafter\.block_size = 8"):
        first_drafter(make_run(drafter={"init_from": "/gone/drafter", "block_size": 8}), INFO, TAPS, resumed=saved)


def test_run_file_paths(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    text = 'name = "a"\noutput = "out"\n[target]\npath = "x/y"\n[data]\nfiles = ["d"]\n[drafter]\ninit_from = "{}"\n'
    wanted = {
        "random": "random",
        "target": "target",
        "z-lab/Qwen3-8B-DFlash-b16": "z-lab/Qwen3-8B-DFlash-b16",
        "./new": str(tmp_path / "new"),
        "there/": str(tmp_path / "there"),
        "gone": str(tmp_path / "gone"),
        "other/best": str(tmp_path / "other/best"),
    }
    for said, meant in wanted.items():
        (tmp_path / "run.toml").write_text(text.format(said))
        run = load(tmp_path / "run.toml")
        assert run.drafter.init_from == meant
        (tmp_path / "again.toml").write_text(to_toml(run))
        assert load(tmp_path / "again.toml") == run
    (tmp_path / "run.toml").write_text(text.format("traget"))
    with pytest.raises(ConfigError, match=r'run\.toml:8: drafter\.init_from = "traget": must be "random", "target"'):
        load(tmp_path / "run.toml")


def test_a_config_of_todays_checkpoints_is_one_of_tomorrows(folders: dict[str, Path]) -> None:
    """state.json holds z-lab's config, so both are read by one function."""
    state = json.loads((folders["checkpoint"] / "state.json").read_text())
    assert DrafterConfig.from_dict(state["drafter"]) == make_drafter(seed=4).config
