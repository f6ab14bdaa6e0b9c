"""Formats that engines load: what the engines' own classes read of them, and what is refused on the way back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from drafting import INFO, make_run
from exporting import checkpoint, config, config_for
from paceline.common.errors import ConfigError
from paceline.common.target_info import target_info
from paceline.consumer.drafter import Drafter, DrafterConfig
from paceline.consumer.export import Exported, drafter_target, export, load_drafter, read_drafter
from paceline.consumer.first_weights import init_drafter
from paceline.consumer.formats import Verifier, config_values, read_config
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModelConfig
from speculators.convert.dflash.converter import DFlashConverter
from speculators.models.dflash import DFlashSpeculatorConfig

FULL, SLIDING = "full_attention", "sliding_attention"
ALL_SLIDING = {"layer_types": (SLIDING, SLIDING), "sliding_window": 64}
MIXED = {"layer_types": (SLIDING, FULL), "sliding_window": 64}


@pytest.fixture
def shape(tiny_target_dir: Path) -> DrafterConfig:
    return config_for(target_info(str(tiny_target_dir)))


@pytest.fixture
def made(tmp_path: Path, tiny_target_dir: Path):
    """made(format, config, name) -> the export of a random drafter of that config."""

    def make(format: str, shape: DrafterConfig, name: str = "out") -> Exported:
        saved = checkpoint(tmp_path / f"run-{name}", init_drafter(shape, seed=1), target=str(tiny_target_dir))
        return export(saved, tmp_path / name, format)

    return make


def edit(folder: Path, **changes: Any) -> None:
    """Changes config.json: dotted keys as `layer__key`, None removes a key."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for key, value in changes.items():
        *outer, last = key.split("__")
        place = values
        for part in outer:
            place = place[part]
        if value is None:
            place.pop(last)
        else:
            place[last] = value
    path.write_text(json.dumps(values))


# Each format in its engine's own classes


def test_speculators_reads_every_key(made, shape: DrafterConfig, tiny_target_dir: Path) -> None:
    found: Any = SpeculatorModelConfig.from_pretrained(made("speculators", replace(shape, dtype="bfloat16")).folder)
    assert isinstance(found, DFlashSpeculatorConfig)
    assert found.architectures == ["DFlashDraftModel"] and found.speculators_model_type == "dflash"
    assert (found.block_size, found.mask_token_id, found.sample_from_anchor) == (5, 3, False)
    assert found.aux_hidden_state_layer_ids == [1, 3]  # target layers 0 and 2, the embedding counted
    assert found.draft_vocab_size == found.target_vocab_size == 512
    assert found.sliding_window_non_causal is True and str(found.dtype) == "torch.bfloat16"
    said = found.speculators_config
    assert said.algorithm == "dflash" and said.default_proposal_method == "greedy"
    assert said.proposal_methods[0].model_dump() == {
        "proposal_type": "greedy",
        "speculative_tokens": 4,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    assert said.verifier.name_or_path == str(tiny_target_dir) and said.verifier.architectures == ["LlamaForCausalLM"]
    layer = found.transformer_layer_config
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size", "rms_norm_eps"):
        assert getattr(layer, key) == getattr(shape, key), key
    assert layer.rope_parameters["rope_theta"] == 1_000_000 and layer.layer_types == [FULL] * 2


@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_reads_back_what_it_wrote(made, shape: DrafterConfig, format: str) -> None:
    wanted = replace(shape, **ALL_SLIDING, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert read_config(made(format, wanted).folder) == wanted


def test_speculators_own_converter_makes_the_same_of_the_zlab_folder(
    made, shape: DrafterConfig, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Its converter takes the z-lab folder, and what it writes, embedding and head included, is read here."""
    ours = json.loads((made("speculators", shape).folder / "config.json").read_text())
    zlab = made("zlab", shape, "zlab").folder
    DFlashConverter().convert(zlab, tmp_path / "theirs", str(tiny_target_dir))
    theirs: Any = SpeculatorModelConfig.from_pretrained(tmp_path / "theirs")
    mine: Any = SpeculatorModelConfig.from_dict(ours)
    for key in ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "draft_vocab_size", "sample_from_anchor"):
        assert getattr(mine, key) == getattr(theirs, key), key
    assert mine.speculators_config == theirs.speculators_config
    for key in ours["transformer_layer_config"]:
        assert getattr(mine.transformer_layer_config, key, 0) == getattr(theirs.transformer_layer_config, key, 0), key
    back, tensors = read_drafter(tmp_path / "theirs", 4)
    assert replace(back, initializer_range=shape.initializer_range) == shape
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(zlab / "model.safetensors").items())
    assert drafter_target(tmp_path / "theirs") == str(tiny_target_dir)
    with pytest.raises(ConfigError, match="how many layers its target has"):
        read_drafter(tmp_path / "theirs")


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}], ids=["plain", "linear"])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0, 10_000_000.0])
def test_rope_is_the_same_in_every_engine(made, shape: DrafterConfig, theta: float, scaling: Any) -> None:
    """Also far out, where a wrong base or a partial rotation shows first."""
    from speculators.models.dflash import DFlashDraftModel as SpeculatorsDrafter

    wanted = replace(shape, rope_theta=theta, rope_scaling=scaling, max_position_embeddings=131072)
    zlab = DFlashDraftModel.from_pretrained(made("zlab", wanted, "zlab").folder)
    theirs: Any = SpeculatorsDrafter(SpeculatorModelConfig.from_pretrained(made("speculators", wanted).folder))
    positions = torch.tensor([[0, 1, 77, 4096, 131071]])
    cos, sin = Drafter(wanted).rotary_emb(torch.zeros(1), positions)
    for engine in (zlab, theirs):
        got = engine.rotary_emb(torch.zeros(1), positions)
        torch.testing.assert_close(got[0], cos, atol=0, rtol=0)
        torch.testing.assert_close(got[1], sin, atol=0, rtol=0)


def test_a_drafter_takes_no_partial_or_multimodal_rope_from_its_target() -> None:
    """The target's config class may say partial_rotary_factor or mrope_section; only its base is taken."""
    made = DrafterConfig.from_target(replace(INFO, model_type="qwen3_5_text", rope_theta=1e7), make_run(), [1, 3])
    assert made.rope_parameters == {"rope_type": "default", "rope_theta": 1e7} and made.rope_scaling is None
    assert Drafter(made).rotary_emb.inv_freq.shape == (made.head_dim // 2,)


@pytest.mark.parametrize("layers", [{}, ALL_SLIDING, MIXED], ids=["full", "sliding", "mixed"])
def test_windows_and_causality_are_what_engines_take_them_for(made, shape: DrafterConfig, layers: Any) -> None:
    """vLLM: is_causal, else dflash_config.causal, else sliding layers alone; z-lab: is_causal, else sliding layers
    alone; SGLang: layer_types alone. So nothing but layer_types is written."""
    wanted = replace(shape, **layers)
    values = json.loads((made("zlab", wanted).folder / "config.json").read_text())
    assert "is_causal" not in values and "causal" not in values["dflash_config"]
    slides = [kind == SLIDING for kind in wanted.layer_types]
    assert values["layer_types"] == list(wanted.layer_types) and values["use_sliding_window"] == any(slides)
    zlab: Any = DFlashDraftModel.from_pretrained(made("zlab", wanted, "again").folder)
    assert [layer.self_attn.is_causal for layer in zlab.layers] == slides
    assert [layer.self_attn.sliding_window for layer in zlab.layers] == [64 if one else None for one in slides]


def test_speculators_flag_of_sliding_layers(made, shape: DrafterConfig) -> None:
    """vLLM takes it for all layers: true without sliding ones, false where all slide, no right value for a mixture."""
    for layers, non_causal in (({}, True), (ALL_SLIDING, False)):
        folder = made("speculators", replace(shape, **layers), f"out-{non_causal}").folder
        found: Any = SpeculatorModelConfig.from_pretrained(folder)
        assert found.sliding_window_non_causal is non_causal
        assert found.transformer_layer_config.sliding_window == layers.get("sliding_window")
    with pytest.raises(ConfigError, match="use --format zlab"):
        made("speculators", replace(shape, **MIXED), "mixed")


def test_block_size_is_where_each_engine_looks(made, shape: DrafterConfig, tmp_path: Path) -> None:
    """z-lab and SGLang: dflash_config first, then the top level. speculators: the top level, and B-1 proposed tokens.
    Newer released drafters have it in dflash_config, which is read here too."""
    folder = made("zlab", shape).folder
    values = json.loads((folder / "config.json").read_text())
    assert values["block_size"] == 5 and "block_size" not in values["dflash_config"]
    assert DFlashDraftModel.from_pretrained(folder).block_size == 5
    edit(folder, block_size=None, dflash_config__block_size=7)
    assert read_config(folder).block_size == 7 and DFlashDraftModel.from_pretrained(folder).block_size == 7


# Strictness


@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_missing_extra_and_misshapen_tensors_are_named(made, shape: DrafterConfig, format: str) -> None:
    folder = made(format, shape).folder
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load_drafter(folder, dtype=torch.float32)
    for said in ("norm.weight is missing", "model.norm.weight is unexpected", "fc.weight has shape [64, 64], not"):
        assert said in str(caught.value)


def test_the_targets_own_tensors_may_lie_in_a_speculators_folder_alone(made, shape: DrafterConfig) -> None:
    for format, welcome in (("speculators", True), ("zlab", False)):
        folder = made(format, shape, format).folder
        tensors = load_file(folder / "model.safetensors") | {"embed_tokens.weight": torch.zeros(512, 64)}
        save_file(tensors, folder / "model.safetensors")
        if welcome:
            load_drafter(folder, dtype=torch.float32)
        else:
            with pytest.raises(ConfigError, match=r"embed_tokens\.weight is unexpected"):
                load_drafter(folder, dtype=torch.float32)


def test_shards_are_read_together(made, shape: DrafterConfig) -> None:
    folder = made("zlab", shape).folder
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    for number, part in ((1, names[:9]), (2, names[9:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-0000{number}-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    _, read = read_drafter(folder)
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in names)


@pytest.mark.parametrize(
    ("format", "changes", "words"),
    [
        ("zlab", {"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ("zlab", {"dflash_config__output_multiplier": 0.5}, "output_multiplier = 0.5"),
        ("zlab", {"dflash_config__attention_sink_bias": True}, "attention_sink_bias = True"),
        ("zlab", {"dflash_config__causal": True}, "dflash_config.causal is True"),
        ("zlab", {"is_causal": True}, "is_causal is True"),
        ("zlab", {"rope_parameters__partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ("zlab", {"rope_parameters__mrope_section": [4, 2, 2]}, "mrope_section"),
        ("zlab", {"rope_theta": 10_000.0}, "rope_parameters.rope_theta"),
        ("zlab", {"rope_theta": None, "rope_parameters": None}, "no rope_theta"),
        ("speculators", {"speculators_model_type": "dspark"}, "'dspark'"),
        ("speculators", {"sample_from_anchor": True}, "sample_from_anchor"),
        ("speculators", {"draft_vocab_size": 256}, "reduced vocabulary"),
        ("speculators", {"draft_vocab_size": None}, "32000 of 512"),
        ("speculators", {"aux_hidden_state_layer_ids": [0, 3]}, "target_layer_ids"),
        ("speculators", {"transformer_layer_config__partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_would_be_dropped_in_silence_is_refused(
    made, shape: DrafterConfig, format: str, changes: dict[str, Any], words: str
) -> None:
    folder = made(format, shape).folder
    edit(folder, **changes)
    with pytest.raises(ConfigError, match=r"config\.json: ") as caught:
        read_config(folder)
    assert words in str(caught.value)


def test_neutral_settings_of_others_are_no_reason(made, shape: DrafterConfig) -> None:
    folder = made("zlab", shape).folder
    edit(folder, dflash_config__output_multiplier=1.0, dflash_config__use_swa=False, dflash_config__causal=False)
    assert read_config(folder) == shape


def test_bidirectional_sliding_layers_are_refused(made, shape: DrafterConfig) -> None:
    folder = made("speculators", replace(shape, **ALL_SLIDING)).folder
    edit(folder, sliding_window_non_causal=True)
    with pytest.raises(ConfigError, match="causal inside the block"):
        read_config(folder)


def test_speculators_needs_a_target_whose_config_can_be_read(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "run", init_drafter(config(), seed=1))
    with pytest.raises(ConfigError, match=r"names the target's architectures.*no folder /models/tiny"):
        export(saved, tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()
    values = config_values("speculators", config(), Verifier("Org/Model", ("QwenForCausalLM",)))
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": "Org/Model",
        "architectures": ["QwenForCausalLM"],
    }
