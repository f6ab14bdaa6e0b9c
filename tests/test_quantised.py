"""Targets quantised to 8 and 4 bits, in the format that vLLM serves: states and head are those of the served model."""

import json
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import tiny_config
from paceline.common import paths
from paceline.common.errors import ConfigError
from paceline.common.footprint import target_weights
from paceline.common.loading import FrozenHead, load_causal_lm
from paceline.common.target import Target
from paceline.common.target_info import target_info
from paceline.producer.compiled import CompiledLayers
from paceline.producer.fp8 import use_fp8
from torch import nn
from transformers import AutoModelForCausalLM

TOKEN8 = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
SCHEMES = {
    "w8a8": ({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}, TOKEN8),
    "w4a16": ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}, None),
    "static": (
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True},
    ),
    "fp8": (
        {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        {**TOKEN8, "type": "float"},
    ),
}
ROWS = [0, 9, 49, 72]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_quantised(tmp_path_factory):
    """make_quantised(scheme, ignore=["lm_head"]) -> (folder, model): a random Qwen3 as llm-compressor saves it, and the
    model with the values it stands for. Made once a session."""
    made = {}

    def make(scheme, ignore=("lm_head",)):
        if (scheme, ignore) not in made:
            weights, activations = SCHEMES[scheme]
            made[scheme, ignore] = _quantise(tmp_path_factory.mktemp(scheme), weights, activations, ignore)
        return made[scheme, ignore]

    return make


def _quantise(folder, weights, activations, ignore):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32).eval()
    model.requires_grad_(False)
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=QuantizationArgs(**activations) if activations else None
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=list(ignore)))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            size = args.group_size or module.weight.shape[1]
            groups = module.weight.unflatten(-1, (-1, size))
            module.weight_scale.copy_(calculate_qparams(groups.amin(-1), groups.amax(-1), args)[0])
            if hasattr(module, "input_scale"):
                module.input_scale.fill_(0.03)  # as a calibration would leave it
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    return folder, model


def states_of_model(model, tokens):
    """The last layer's output by the format's own package, a row at a time."""
    caught = []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, output: caught.append(output[0]))
    with torch.no_grad():
        logits = [model(tokens[None, start:end]).logits[0] for start, end in pairwise(ROWS)]
    handle.remove()
    return torch.cat(caught), torch.cat(logits)


def states_of(target, tokens):
    states = torch.full((len(tokens), 64), torch.nan)

    def sink(plane, part, first):
        states[first : first + len(part)] = part

    target.forward_states(tokens, ROWS, [3], sink)
    return states


@pytest.fixture
def tokens():
    return torch.randint(512, (ROWS[-1],), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_states_and_logits_are_those_of_the_quantised_model(make_quantised, scheme, tokens, make_tiny_target):
    folder, model = make_quantised(scheme)
    wanted, logits = states_of_model(model, tokens)
    target = Target.load(str(folder), dtype="float32")
    assert target.info.identity != target_info(str(make_tiny_target("qwen3"))).identity
    torch.testing.assert_close(states_of(target, tokens), wanted, rtol=1e-4, atol=1e-4)
    target.self_check()
    assert target.can_pack
    states = states_of(target, tokens)
    torch.testing.assert_close(states, wanted, rtol=1e-4, atol=1e-4)
    plain = Target.load(str(make_tiny_target("qwen3")), dtype="float32")
    assert float((states_of(plain, tokens) - wanted).norm() / wanted.norm()) > 0.005, "quantisation tells in the states"
    head = FrozenHead.load(str(folder), dtype="float32")
    torch.testing.assert_close(head.logits(head.norm(states)), logits, rtol=1e-3, atol=1e-3)
    whole: Any = load_causal_lm(str(folder), "float32", "cpu")
    torch.testing.assert_close(whole(tokens[None, :9]).logits[0], logits[:9], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_the_layers_compile_into_one_graph(make_quantised, scheme, tokens, tmp_path, monkeypatch):
    for variable in ("PACELINE_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    torch._dynamo.reset()
    folder, model = make_quantised(scheme)
    target, graphs = Target.load(str(folder), dtype="float32"), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    layers = CompiledLayers(0, 64, backend)
    target.self_check(faster=layers)
    assert layers.installed and len(graphs) == 1
    torch.testing.assert_close(states_of(target, tokens), states_of_model(model, tokens)[0], rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize("wrong", [False, True])
def test_compiled_layers_may_round_activations_to_other_values(
    make_quantised, tokens, tmp_path, monkeypatch, caplog, wrong
):
    """One rounding of bfloat16 becomes one of the checkpoint's few values; that is no fault of the compiled layers."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    for variable in paths.COMPILE_CACHES:
        monkeypatch.setenv(variable, str(tmp_path))
    torch._dynamo.reset()

    def is_states(x):
        return isinstance(x, torch.Tensor) and x.ndim == 3 and x.shape[2] == 64

    def backend(graph, inputs):
        assert sum(map(is_states, inputs)) == 1

        def rounded(x, draw):
            return x * (1 + 2**-9 * (2 * torch.rand(x.shape, generator=draw) - 1))

        def run(*args):
            if wrong:
                return [0.8 * out for out in graph.forward(*args)]
            draw = torch.Generator().manual_seed(1)
            other = (rounded(x, draw) if is_states(x) else x for x in args)
            return [rounded(out, draw) for out in graph.forward(*other)]

        return run

    target, layers = Target.load(str(make_quantised("w8a8")[0]), dtype="float32"), CompiledLayers(0, 64, backend)
    plain = states_of(target, tokens)
    target.self_check(faster=layers)
    assert target.can_pack and layers.installed != wrong, caplog.text
    layers.remove(target)
    torch.testing.assert_close(states_of(target, tokens), plain, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def test_a_quantised_head_is_restored(make_quantised, tokens):
    folder, model = make_quantised("w4a16", ())
    head = FrozenHead.load(str(folder), dtype="float32")
    assert type(head.head) is nn.Linear and torch.equal(head.head_weight, model.lm_head.weight)
    states, logits = states_of_model(model, tokens)
    torch.testing.assert_close(head.logits(head.norm(states)), logits, rtol=1e-4, atol=1e-4)


def test_weights_are_those_of_the_dtype_asked_for(make_quantised, monkeypatch):
    monkeypatch.setattr("paceline.common.target.compute_dtype", lambda dtype, device: torch.bfloat16)  # as on a GPU
    target = Target.load(str(make_quantised("w4a16")[0]), dtype="bfloat16")
    assert {parameter.dtype for parameter in target.layers.parameters()} >= {torch.bfloat16}
    assert target.layers[0].get_submodule("mlp.up_proj").weight.dtype == torch.bfloat16
    target.self_check()
    assert target.can_pack


def test_the_memory_of_a_packed_target_is_that_of_its_restored_weights(make_quantised, make_tiny_target):
    plain = target_weights(target_info(str(make_tiny_target("qwen3"))), 2)
    for scheme in SCHEMES:
        found = target_weights(target_info(str(make_quantised(scheme)[0])), 2)
        assert plain <= found < 1.1 * plain, "scales come on top"


def test_a_missing_package_is_named(make_quantised, monkeypatch):
    folder, _ = make_quantised("w8a8")
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(
        ConfigError, match=r"is quantised with compressed-tensors, .* pip install 'paceline\[quantised\]'"
    ):
        Target.load(str(folder))


def test_what_is_not_known_how_to_restore_is_refused(make_quantised, monkeypatch):
    folder, _ = make_quantised("w8a8")
    monkeypatch.setattr("paceline.common.quantised._restore", lambda *_: None)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj is quantised \(compressed-tensors\) in a way"):
        Target.load(str(folder), dtype="float32")


def test_fp8_on_top_is_refused(make_quantised):
    target = Target.load(str(make_quantised("w4a16")[0]), dtype="float32")
    with pytest.raises(ConfigError, match=r"target\.fp8: .* is quantised already"):
        use_fp8(target)


def test_the_folder_is_as_engines_read_it(make_quantised):
    """The fixture's own claim: vLLM looks at these keys and names."""
    config = json.loads((make_quantised("w4a16")[0] / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert config["quantization_status"] == "compressed" and config["ignore"] == ["lm_head"]
