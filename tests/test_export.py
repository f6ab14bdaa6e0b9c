"""Export to z-lab's format, and its own loader and decoding loop on what we wrote."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from dflash import model as zlab
from exporting import VOCAB, checkpoint, config, taught
from paceline.common.cli import main
from paceline.common.errors import ConfigError, UsageError
from paceline.consumer.decode import speculate
from paceline.consumer.drafter import ContextCache
from paceline.consumer.export import drafter_target, export, load_drafter
from paceline.consumer.first_weights import init_drafter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rope_theta": 50_000.0,
}
PROMPT = [5, 9, 23, 4, 60, 8, 30, 33, 12, 50, 2]
ANSWER = 36


def target(kind: str) -> PreTrainedModel:
    torch.manual_seed(5)
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**SMALL)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def cpu_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zlab, "_cuda_time", lambda: 0.0)


def zlab_lengths(drafter: zlab.DFlashDraftModel, model: PreTrainedModel, limit: int, stops: list[int]):
    found = zlab.dflash_generate(
        drafter.eval(),
        model,
        cast(torch.LongTensor, torch.tensor([PROMPT])),
        max_new_tokens=limit,
        stop_token_ids=stops or None,
        return_stats=True,
    )
    return found.output_ids[0, len(PROMPT) :].tolist(), found.acceptance_lengths


@pytest.fixture(scope="module", params=[("llama", 6), ("qwen3", 9), ("llama", 45)], ids=lambda p: f"{p[0]}-{p[1]}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Target, drafter loaded from our export, and the same by z-lab; the last accepts nearly every slot."""
    kind, steps = request.param
    folder = tmp_path_factory.mktemp("pair")
    model = target(kind)
    drafter = taught(model, steps, config(), [PROMPT], ANSWER)
    made = export(checkpoint(folder / "run", drafter), folder / "out")
    ours = load_drafter(made.folder, dtype=torch.float32)
    theirs = zlab.DFlashDraftModel.from_pretrained(made.folder, dtype=torch.float32)
    return steps, model, ours, theirs


@pytest.mark.parametrize("limit", [1, 2, 33])
def test_zlab_accepts_the_same_lengths(pair, limit: int, cpu_clock: None) -> None:
    _, model, ours, theirs = pair
    generation = speculate(ours, model, PROMPT, max_new_tokens=limit)
    tokens, lengths = zlab_lengths(theirs, model, limit, [])
    assert generation.tokens == tokens
    assert [step.produced for step in generation.steps] == lengths
    if limit == 33:
        assert max(lengths) > 1


def test_zlab_stops_where_we_stop(pair, cpu_clock: None) -> None:
    _, model, ours, theirs = pair
    stop = speculate(ours, model, PROMPT, max_new_tokens=30).tokens[12]
    generation = speculate(ours, model, PROMPT, max_new_tokens=30, stop_ids=[stop])
    tokens, lengths = zlab_lengths(theirs, model, 30, [stop])
    assert generation.tokens == tokens and tokens[-1] == stop
    assert [step.produced for step in generation.steps] == lengths


def test_full_blocks_in_zlabs_own_loop(pair, cpu_clock: None) -> None:
    """Labels, states and positions line up: what is learned in training is accepted in decoding."""
    steps, model, _, theirs = pair
    if steps == 45:
        _, lengths = zlab_lengths(theirs, model, ANSWER, [])
        assert lengths[:-1] == [5] * len(lengths[:-1])


@pytest.mark.parametrize("layer_types", [("full_attention",) * 2, ("sliding_attention", "full_attention")])
def test_zlab_computes_the_same_states(layer_types: tuple[str, ...], tmp_path: Path) -> None:
    shape = config(layer_types=layer_types, sliding_window=7 if "sliding_attention" in layer_types else None)
    made = export(checkpoint(tmp_path / "run", init_drafter(shape, seed=1)), tmp_path / "out")
    theirs = zlab.DFlashDraftModel.from_pretrained(made.folder, dtype=torch.float32).eval()
    ours = load_drafter(made.folder, dtype=torch.float32)
    features, block = torch.randn(1, 19, 64), torch.randn(1, 5, 32)
    with torch.no_grad():
        want = theirs(position_ids=torch.arange(24)[None], noise_embedding=block, target_hidden=features)
        got = ours.draft(block, features, ContextCache())
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_config_has_what_each_engine_reads(tmp_path: Path) -> None:
    made = export(checkpoint(tmp_path / "run", init_drafter(config(dtype="bfloat16"), seed=1)), tmp_path / "out")
    values = json.loads((made.folder / "config.json").read_text())
    assert values["architectures"] == ["DFlashDraftModel"] and values["model_type"] == "qwen3"
    assert values["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert values["block_size"] == 5 and values["num_target_layers"] == 6
    assert values["dflash_config"] == {"mask_token_id": 1, "target_layer_ids": [1, 3]}
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 1_000_000
    assert values["rope_scaling"] is None and values["layer_types"] == ["full_attention"] * 2
    assert values["dtype"] == "bfloat16" and values["vocab_size"] == VOCAB
    names = {"intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"}
    names |= {"hidden_act", "attention_bias", "attention_dropout", "rms_norm_eps", "initializer_range", "use_cache"}
    names |= {"sliding_window", "use_sliding_window", "max_window_layers", "max_position_embeddings"}
    assert names | {"tie_word_embeddings", "bos_token_id", "eos_token_id", "hidden_size"} <= values.keys()
    theirs = zlab.DFlashDraftModel.from_pretrained(made.folder)
    assert theirs.block_size == 5 and theirs.mask_token_id == 1 and theirs.target_layer_ids == [1, 3]


def test_tensors_are_the_masters_in_the_configs_dtype(tmp_path: Path) -> None:
    drafter = init_drafter(config(), seed=1)
    saved = checkpoint(tmp_path / "run", drafter)
    made = export(saved, tmp_path / "out", dtype="bfloat16")
    tensors = load_file(made.folder / "model.safetensors")
    assert len(tensors) == made.tensors == 11 * 2 + 3
    for name, tensor in tensors.items():
        assert torch.equal(tensor, drafter.state_dict()[name].to(torch.bfloat16)), name
    assert json.loads((made.folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert drafter_target(made.folder) == drafter_target(saved) == "/models/tiny"


def test_checkpoint_and_export_load_alike(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "run", init_drafter(config(), seed=1))
    made = export(saved, tmp_path / "out")
    one, two = (load_drafter(path, dtype=torch.float32) for path in (saved, made.folder))
    assert one.config == two.config
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not any(p.requires_grad for p in one.parameters())


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    made = export(checkpoint(tmp_path / "run", init_drafter(config(), seed=1)), tmp_path / "out")
    path = made.folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :32].contiguous()
    save_file(tensors, path)
    with pytest.raises(ConfigError) as caught:
        load_drafter(made.folder, dtype=torch.float32)
    for said in (
        "norm.weight is missing",
        "model.norm.weight is unexpected",
        "fc.weight has shape [32, 32], not [32, 64]",
    ):
        assert said in str(caught.value)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "run", init_drafter(config(), seed=1))
    with pytest.raises(UsageError, match="zlab"):
        export(saved, tmp_path / "out", "onnx")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        export(saved, tmp_path / "there")
    with pytest.raises(ConfigError, match="there is no folder"):
        export(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(ConfigError, match="is an exported drafter"):
        export(export(saved, tmp_path / "exported").folder, tmp_path / "out")
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        load_drafter(tmp_path / "there", dtype=torch.float32)
    with open(saved / "model.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\1\2\3")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        export(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = checkpoint(tmp_path / "run", init_drafter(config(), seed=1))
    assert main(["export", str(saved), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "25 tensors" in said and "bfloat16" in said and "--target /models/tiny" in said
    assert main(["export", str(saved), str(tmp_path / "other"), "--format", "onnx"]) == 2
    assert main(["export", str(saved), str(tmp_path / "out")]) == 78
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("out", ["/proc/x", "/proc/x/y", "file/x", "x" * 300])
def test_a_folder_that_cannot_be_made_is_one_line(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    saved = checkpoint(tmp_path / "run", init_drafter(config(), seed=1))
    assert main(["export", str(saved), out]) == 78
    error = capsys.readouterr().err
    assert error.startswith("paceline: ") and "OUT: cannot " in error and error.count("\n") == 1
