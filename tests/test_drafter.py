"""The drafter's numbers (against a plain float64 one and z-lab's), what a block may see, config and first weights."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drafting import CONFIG, HIDDEN, INFO, SLIDING, VOCAB, make_drafter, make_head, make_rows, make_run, plain_block
from paceline.common.errors import ConfigError
from paceline.common.target_info import check_mask_token, pad_token_id
from paceline.consumer import first_weights
from paceline.consumer.blocks import DenseAttention, pack_blocks
from paceline.consumer.drafter import ContextCache, DrafterConfig
from paceline.consumer.first_weights import copy_from_target, init_drafter, read_target_tensors, target_tensor_names
from safetensors.torch import save_file
from torch.nn import functional as F

HEAD = make_head()
ANCHORS = [np.array([3, 5, 17]), np.array([9]), np.array([4, 12])]  # one block of each row but the second is cut
CONFIGS = pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])


def rows_and_blocks(config):
    rows = make_rows(19, 16, 13)
    blocks = pack_blocks(
        rows.tokens,
        rows.mask,
        rows.cu_seqlens,
        ANCHORS,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        gamma=4.0,
    )
    return rows, blocks


def forward(drafter, rows, blocks, features):
    embeds = F.embedding(torch.from_numpy(blocks.ids), HEAD.embed_weight.to(features.dtype))
    positions = torch.from_numpy(blocks.positions)
    return drafter(features, rows.context_positions, embeds, positions, DenseAttention(blocks))


@CONFIGS
def test_packed_forward_equals_the_plain_drafter(config):
    rows, blocks = rows_and_blocks(config)
    drafter = make_drafter(config)
    hidden = forward(drafter, rows, blocks, rows.features)
    at = 0
    for row, anchors in zip(rows.rows, ANCHORS, strict=True):
        for anchor in anchors:
            length = min(config.block_size, row.stop - row.start - anchor)
            embeds = HEAD.embed_weight[torch.from_numpy(blocks.ids[at : at + length])].double()
            plain = plain_block(drafter, rows.features[row].double(), embeds, int(anchor))
            torch.testing.assert_close(hidden[at : at + length].double(), plain, rtol=1e-4, atol=1e-5)
            at += length
    assert at == blocks.slots


@CONFIGS
def test_drafting_with_a_cache_equals_the_training_forward(config):
    """Anchors in order, as a decoding loop meets them: each call brings the context since the last."""
    rows, blocks = rows_and_blocks(config)
    drafter = make_drafter(config)
    hidden = forward(drafter, rows, blocks, rows.features)
    row_start, cache = -1, ContextCache()
    for number, anchor in enumerate(blocks.anchors):
        slots = blocks.block == number
        if blocks.see_from[slots][0] != row_start:
            row_start, cache = int(blocks.see_from[slots][0]), ContextCache()
        start = row_start + cache.length
        embeds = F.embedding(torch.from_numpy(blocks.ids[slots]), HEAD.embed_weight)
        with torch.inference_mode():
            drafted = drafter.draft(embeds[None], rows.features[None, start : int(anchor)], cache)
        assert cache.length == blocks.positions[slots][0]
        torch.testing.assert_close(drafted[0], hidden[torch.from_numpy(slots)], rtol=1e-5, atol=1e-5)


def test_context_cache_grows_and_crops():
    cache, parts = ContextCache(), [torch.randn(2, n, 4) for n in (3, 300, 700)]
    for part in parts:
        cache.append([(part, -part)])
    torch.testing.assert_close(cache.layers()[0][0], torch.cat(parts, 1))
    cache.crop(2)
    cache.append([(parts[0], -parts[0])])
    torch.testing.assert_close(cache.layers()[0][1], -torch.cat([parts[0][:, :2], parts[0]], 1))
    with pytest.raises(ValueError, match="cannot crop"):
        cache.crop(6)


@CONFIGS
def test_equals_zlabs_model(config):
    model = pytest.importorskip("dflash.model")
    from transformers import Qwen3Config

    rows = make_rows(23)
    drafter = make_drafter(config)
    other = model.DFlashDraftModel(Qwen3Config(**json.loads(json.dumps(config.to_dict())))).eval()
    other.load_state_dict(drafter.state_dict())
    anchor, ids = 17, torch.tensor([int(rows.tokens[17])] + [config.mask_token_id] * 3)
    embeds = F.embedding(ids, HEAD.embed_weight)[None]
    features = rows.features[None, :anchor]
    with torch.inference_mode():
        theirs = other(torch.arange(anchor + 4)[None], None, embeds, features)
        ours = drafter.draft(embeds, features, ContextCache())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@CONFIGS
def test_no_block_sees_its_anchor_or_later_or_another_row(config):
    rows, blocks = rows_and_blocks(config)
    drafter = make_drafter(config)
    features = rows.features.requires_grad_()
    hidden = forward(drafter, rows, blocks, features)
    for number in range(blocks.count):
        slots = torch.from_numpy(blocks.block == number)
        seen = slice(int(blocks.see_from[slots][0]), int(blocks.see_to[slots][0]))
        outside = torch.ones(len(features), dtype=torch.bool)
        outside[seen] = False
        (gradient,) = torch.autograd.grad(hidden[slots].square().sum(), features, retain_graph=True)
        assert (gradient[outside] == 0).all()
        assert config is SLIDING or (gradient[seen].abs().sum(1) > 0).all()
        changed = torch.where(outside[:, None], 100 * torch.randn_like(features), features)
        torch.testing.assert_close(forward(drafter, rows, blocks, changed)[slots], hidden[slots], rtol=0, atol=0)


def test_blocks_do_not_see_each_other():
    rows, blocks = rows_and_blocks(CONFIG)
    drafter = make_drafter()
    embeds = F.embedding(torch.from_numpy(blocks.ids), HEAD.embed_weight).requires_grad_()
    hidden = drafter(
        rows.features, rows.context_positions, embeds, torch.from_numpy(blocks.positions), DenseAttention(blocks)
    )
    own = torch.from_numpy(blocks.block == 1)
    (gradient,) = torch.autograd.grad(hidden[own].square().sum(), embeds)
    assert (gradient[~own] == 0).all()
    assert (gradient[own].abs().sum(1) > 0).all()


def test_a_cast_keeps_rope_in_float32():
    drafter = make_drafter(replace(CONFIG, max_position_embeddings=40960))
    positions = torch.tensor([0, 30001])
    before = [t.clone() for t in drafter.rope(torch.zeros(1), positions)]
    drafter.to(torch.bfloat16)
    assert drafter.fc.weight.dtype == torch.bfloat16
    torch.testing.assert_close(drafter.rope(torch.zeros(1), positions), tuple(before), rtol=0, atol=0)


# Config


def test_config_survives_json():
    for config in (
        CONFIG,
        SLIDING,
        replace(CONFIG, eos_token_id=(1, 2), rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    ):
        assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_reads_zlabs_config_of_either_transformers():
    values = CONFIG.to_dict()
    for gone in ("rope_parameters", "rope_theta"):
        assert DrafterConfig.from_dict({k: v for k, v in values.items() if k != gone}) == CONFIG
    with pytest.raises(ConfigError, match="rope_theta"):
        DrafterConfig.from_dict({k: v for k, v in values.items() if not k.startswith("rope")})


def test_config_from_target_and_run():
    run = make_run(drafter={"intermediate_size": 32})
    config = DrafterConfig.from_target(INFO, run, [1, 3])
    assert config.target_layer_ids == (1, 3)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (HIDDEN, 32, 2)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_layer_ids": (1, 6)}, "distinct and in 0..5"),
        ({"target_layer_ids": (1, 1)}, "distinct"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"block_size": 1}, "at least 2"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "sliding_window"),
        ({"mask_token_id": VOCAB}, "outside the vocabulary"),
    ],
)
def test_bad_configs_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        replace(CONFIG, **change)


@pytest.mark.parametrize("key", ["block_size", "dflash_config", "head_dim"])
def test_missing_config_keys_are_named(key):
    values = {k: v for k, v in CONFIG.to_dict().items() if k != key}
    with pytest.raises(ConfigError, match="mask_token_id" if key == "dflash_config" else key):
        DrafterConfig.from_dict(values)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, "not set: `paceline prepare"),
        (VOCAB, "outside"),
        (1, "bos"),
        (2, "eos"),
        (7, "pad"),
        (8, "occurs in the data"),
    ],
)
def test_mask_tokens_that_cannot_serve(token, words):
    with pytest.raises(ConfigError, match=words):
        check_mask_token(token, INFO, pad_token_id=7, used_token=lambda token: token == 8)
    assert check_mask_token(60, INFO, pad_token_id=7, used_token=lambda token: token == 8) == 60


def test_pad_token_of_a_target_folder(tmp_path: Path):
    assert pad_token_id(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 5, "content": "<pad>"}]}')
    assert pad_token_id(tmp_path) == 5
    (tmp_path / "config.json").write_text('{"pad_token_id": 6}')
    assert pad_token_id(tmp_path) == 6


# First weights


def test_random_weights_come_from_the_seed():
    one, same, other = (init_drafter(CONFIG, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert (one["norm.weight"] == 1).all()
    assert one["fc.weight"].std().item() == pytest.approx(CONFIG.initializer_range, rel=0.05)


@pytest.fixture
def threads():
    """Sets torch's number of threads until the test is over."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_random_weights_do_not_depend_on_threads_or_on_other_parameters(threads, monkeypatch):
    monkeypatch.setattr(first_weights, "PIECE", 1000)  # no multiple of a row
    drawn = []
    for count in (1, 2, 5):
        threads(count)
        drawn.append(init_drafter(CONFIG, seed=3).state_dict())
    threads(3)
    deep = init_drafter(replace(CONFIG, num_hidden_layers=4, layer_types=()), seed=3).state_dict()
    for name, weights in drawn[0].items():
        assert all(torch.equal(weights, other[name]) for other in [*drawn[1:], deep]), name


def test_random_weights_are_normal_and_no_piece_is_like_another(monkeypatch):
    monkeypatch.setattr(first_weights, "PIECE", 512)
    drafter = init_drafter(replace(CONFIG, intermediate_size=512), seed=11)
    weights = torch.cat([p.detach().flatten() for p in drafter.parameters() if p.ndim == 2]) / CONFIG.initializer_range
    count = len(weights)
    assert count > 100_000
    # Four standard errors of each; a quarter of 512 weights that were left out or drawn twice would show as well.
    assert abs(float(weights.mean())) < 4 / count**0.5
    assert float(weights.var()) == pytest.approx(1, abs=4 * (2 / count) ** 0.5)
    assert float((weights**4).mean()) == pytest.approx(3, abs=4 * (96 / count) ** 0.5)
    assert len(weights.unique()) > 0.97 * count, "float32 has few equal ones among independent draws"
    pieces = weights[: count // 512 * 512].view(-1, 512)
    alike = (pieces @ pieces.T / 512).fill_diagonal_(0)
    assert float(alike.abs().max()) < 6.5 / 512**0.5, "pieces are independent"


def target_tensors(config=CONFIG, head_norms=True):
    """A drafter's own layers, renamed as the target's last."""
    source = make_drafter(config, seed=5).state_dict()
    first = config.num_target_layers - config.num_hidden_layers
    tensors = {"norm.weight": source["norm.weight"]}
    for name, tensor in source.items():
        if name.startswith("layers.") and (head_norms or "_norm." not in name):
            _, i, rest = name.split(".", 2)
            tensors[f"layers.{first + int(i)}.{rest}"] = tensor
    return tensors


def test_start_from_the_target():
    tensors = target_tensors()
    assert tensors.keys() == set(target_tensor_names(CONFIG))
    drafter = init_drafter(CONFIG, seed=0, init_from="target", target_tensors=tensors)
    torch.testing.assert_close(drafter.norm.weight.data, tensors["norm.weight"])
    for i, name in ((0, "self_attn.q_proj.weight"), (1, "mlp.down_proj.weight"), (1, "self_attn.k_norm.weight")):
        torch.testing.assert_close(drafter.state_dict()[f"layers.{i}.{name}"], tensors[f"layers.{4 + i}.{name}"])
    features = torch.randn(5, CONFIG.features)
    torch.testing.assert_close(drafter.fc(features), features[:, -HIDDEN:])


def test_head_norms_absent_in_the_target_start_at_one():
    drafter = init_drafter(CONFIG, seed=0, init_from="target", target_tensors=target_tensors(head_norms=False))
    assert (drafter.state_dict()["layers.0.self_attn.q_norm.weight"] == 1).all()


def test_target_layers_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"layers\.4\.mlp\.gate_proj\.weight is \[64, 48\].*init_from"):
        wide = replace(CONFIG, intermediate_size=80)
        init_drafter(wide, seed=0, init_from="target", target_tensors=target_tensors())
    with pytest.raises(ConfigError, match="exceeds the target's 6"):
        deep = replace(CONFIG, num_hidden_layers=7, layer_types=())
        copy_from_target(make_drafter(deep), target_tensors())


def test_reads_only_the_tensors_needed_from_a_target_folder(tmp_path: Path):
    tensors = target_tensors()
    stored = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(stored | {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    found = read_target_tensors(replace(INFO, path=str(tmp_path)), CONFIG)
    assert found.keys() == tensors.keys()
    with pytest.raises(ConfigError, match="gemma3_text target are of another kind"):
        read_target_tensors(replace(INFO, path=str(tmp_path), model_type="gemma3_text"), CONFIG)
    with pytest.raises(ConfigError, match="no decoder layers"):
        read_target_tensors(replace(INFO, path=str(tmp_path / "none")), CONFIG)
