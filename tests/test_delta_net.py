"""Hybrids of Gated DeltaNet and attention run packed where fla's kernels are there, and every row begins anew.

The kernels are Triton's and need a GPU, where the last tests run them. Elsewhere a stand-in of their signature, made of
plain twins that loop over tokens, shows how they are called; the states are compared with transformers' own.
"""

import logging
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HAS_FLA, tiny_config
from paceline.common import delta_net
from paceline.common.delta_net import CHECK_OFFSETS, PackedDeltaNet, plain_conv, plain_rule
from paceline.common.reference import run_layers
from paceline.common.target import Target
from paceline.producer.compiled import PAD, CompiledLayers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5  # before a stand-in is there to be found by it
from transformers.models.qwen3_next import modeling_qwen3_next  # noqa: F401

HYBRIDS = ["qwen3_5", "qwen3_next"]
LENGTHS = [9, 140, 23, 3, 70]  # more and less than a chunk of the kernels, and less than the convolution's width
LAYER_IDS = [0, 2, 3]


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    torch._dynamo.reset()
    delta_net.kernels.cache_clear()
    yield
    delta_net.kernels.cache_clear()
    torch._dynamo.reset()


class StandIn:
    """What fla's two functions are called with, and values by the plain twins. `broken` names what goes wrong."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.rows: list[list[int]] = []

    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        assert x.shape[0] == 1 and weight.shape == (x.shape[2], 4) and activation == "silu"
        return plain_conv(x, weight, bias, activation, self._offsets(x, cu_seqlens, cu_seqlens_cpu, "conv")), None

    def rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, None]:
        assert use_qk_l2norm_in_kernel and g.dtype == torch.float32 and q.shape == k.shape
        return plain_rule(q, k, v, g, beta, self._offsets(v, cu_seqlens, cu_seqlens_cpu, "rule")), None

    def _offsets(self, x: Tensor, cu: Tensor | None, on_host: Tensor | None, which: str) -> list[int]:
        assert cu is not None and on_host is not None and cu.tolist() == on_host.tolist()
        if self.broken == "kernel":
            raise ZeroDivisionError("no such tile\nin line 3")
        self.rows.append(cu.tolist())
        checked = cu.tolist() == list(CHECK_OFFSETS)
        leaks = self.broken == which or (self.broken == f"{which}, not in the check" and not checked)
        return [0, x.shape[1]] if leaks else cu.tolist()


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in(broken) installs a module `fla` whose kernels run on the CPU."""

    def install(broken: str = "") -> StandIn:
        made = StandIn(broken)
        modules = {"fla": {}, "fla.ops": {}, "fla.modules": {}}
        modules["fla.ops.gated_delta_rule"] = {"chunk_gated_delta_rule": made.rule}
        modules["fla.modules.causal_conv1d"] = {"causal_conv1d": made.conv}
        for name, values in modules.items():
            module = ModuleType(name)
            module.__path__ = []
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(delta_net, "DEVICES", ("cpu",))
        return made

    return install


def batch(lengths=LENGTHS, vocab=512):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (sum(lengths),), generator=generator), [0, *np.cumsum(lengths).tolist()]


def states_of(target, tokens, cu_seqlens):
    states = torch.full((len(LAYER_IDS), len(tokens), target.info.hidden_size), torch.nan)

    def sink(plane, part, first):
        states[plane, first : first + len(part)] = part

    target.forward_states(tokens, cu_seqlens, LAYER_IDS, sink)
    return states


def reference_states(folder, tokens, cu_seqlens):
    """float32 [planes, T, H] by hooks on a plain model, a row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers: Any = model.get_decoder().layers
    caught: dict[int, Tensor] = {}
    for layer in LAYER_IDS:

        def keep(module, args, output, layer=layer):
            caught[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        layers[layer].register_forward_hook(keep)
    rows = []
    with torch.no_grad():
        for start, end in pairwise(cu_seqlens):
            model(tokens[None, start:end])
            rows.append(torch.stack([caught[layer] for layer in LAYER_IDS]))
    return torch.cat(rows, dim=1)


def load(folder, **options):
    return Target.load(str(folder), **{"dtype": "float32", **options})


def warnings(caplog):
    """Our own: transformers says for itself, once a process, that it has no kernels."""
    own = [record for record in caplog.records if record.name.startswith("paceline")]
    return [record.getMessage() for record in own if record.levelno >= logging.WARNING]


def test_the_plain_twins_are_the_models_own_functions_row_by_row():
    draw = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(1, sum(LENGTHS), *shape, generator=draw)  # noqa: E731
    q, k, v, g, beta = random(2, 8), random(2, 8), random(4, 6), -random(4).abs(), random(4).sigmoid()
    x, weight = random(10), torch.randn(10, 4, generator=draw)
    _, cu = batch()
    rule, conv = plain_rule(q, k, v, g, beta, cu), plain_conv(x, weight, None, "silu", cu)
    for start, end in pairwise(cu):
        own = [part[:, start:end] for part in (q.repeat_interleave(2, 2), k.repeat_interleave(2, 2), v)]
        wanted, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(
            *own, g=g[:, start:end], beta=beta[:, start:end], use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(rule[:, start:end], wanted, rtol=1e-4, atol=1e-5)
        convolved = modeling_qwen3_5.causal_conv1d_fn(x[:, start:end].mT, weight, activation="silu").mT
        torch.testing.assert_close(conv[:, start:end], convolved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_packed_states_are_those_of_a_plain_forward(make_tiny_target, stand_in, caplog, kind):
    made, folder = stand_in(), make_tiny_target(kind)
    target = load(folder)
    target.self_check()
    assert target.mode == "packed" and not warnings(caplog)
    made.rows.clear()
    tokens, cu_seqlens = batch()
    states = states_of(target, tokens, cu_seqlens)
    assert made.rows == [cu_seqlens] * 4, "both DeltaNet layers run once over all rows, each with two kernels"
    torch.testing.assert_close(states, reference_states(folder, tokens, cu_seqlens), rtol=1e-3, atol=1e-4)


def test_errors_of_many_layers_do_not_keep_a_mixture_from_being_packed(tmp_path, stand_in, caplog, monkeypatch):
    """After some layers in bfloat16 tokens go to other experts, and two right ways differ as two wrong ones would."""
    monkeypatch.setattr("paceline.common.target.compute_dtype", lambda dtype, device: torch.bfloat16)  # as on a GPU
    config = tiny_config("qwen3_next")
    config.update({"num_hidden_layers": 24, "layer_types": ["linear_attention", "full_attention"] * 12})
    config.update({"num_experts": 16, "initializer_range": 0.3})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stand_in()
    target = load(tmp_path, dtype="bfloat16")
    target.self_check()
    assert target.mode == "packed" and not warnings(caplog)
    rows = target._check_rows()
    packed = run_layers(target, rows)
    target._use("alone")
    alone = run_layers(target, rows)
    errors = [float((packed[n] - alone[n]).float().norm() / alone[n].float().norm()) for n in packed]
    assert errors[0] < 0.01 and errors[-1] > 0.12, "the check would have told nothing of the last layer's states"


def test_a_target_of_linear_layers_alone_packs_as_well(make_tiny_target, stand_in):
    stand_in()
    target = load(make_tiny_target("qwen3_5"), last_layer=0)
    target.self_check()
    assert target.mode == "packed"


def test_rows_run_padded_and_alone_by_the_models_own_code(make_tiny_target, stand_in):
    made = stand_in()
    target = load(make_tiny_target("qwen3_5"))
    target.self_check()
    packed = states_of(target, *batch())
    for mode in ("padded", "alone"):
        target._use(mode)
        assert not any(isinstance(module, PackedDeltaNet) for module in target.decoder.modules())
        made.rows.clear()
        torch.testing.assert_close(states_of(target, *batch()), packed, rtol=1e-3, atol=1e-4)
        assert not made.rows
    target._use("packed")
    assert torch.equal(states_of(target, *batch()), packed)


def test_without_the_package_rows_run_padded_and_one_line_names_it(make_tiny_target, monkeypatch, caplog):
    monkeypatch.setattr(delta_net, "DEVICES", ("cpu",))
    for name in ["fla", *(name for name in sys.modules if name.startswith("fla."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    target = load(make_tiny_target("qwen3_5"))
    target.self_check()
    assert target.mode == "padded"
    (line,) = warnings(caplog)
    assert "flash-linear-attention" in line and "pip install 'paceline[linear-attention]'" in line
    caplog.clear()
    target.self_check(pack=False)
    assert not warnings(caplog), "rows that are not to be packed need no package"


def test_where_the_kernels_cannot_run_nothing_is_asked_for(make_tiny_target, caplog):
    target = load(make_tiny_target("qwen3_5"))
    target.self_check()
    assert target.mode == "padded" and not warnings(caplog)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("conv", "fla's causal_conv1d is off by"),
        ("rule", "fla's chunk_gated_delta_rule is off by"),
        ("conv, not in the check", "adds differs from a row's alone"),
        ("rule, not in the check", "adds differs from a row's alone"),
        ("kernel", "fla's kernels do not run: ZeroDivisionError: no such tile"),
    ],
)
def test_kernels_that_are_wrong_are_not_used(make_tiny_target, stand_in, caplog, broken, words):
    stand_in(broken)
    target = load(make_tiny_target("qwen3_5"))
    target.self_check()
    assert target.mode == "padded"
    (line,) = warnings(caplog)
    assert words in line and "\n" not in line
    assert states_of(target, *batch()).isfinite().all()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("fla.modules.causal_conv1d", "flash-linear-attention lacks fla.modules.causal_conv1d"),  # an early version
        ("fla.ops.gated_delta_rule", "flash-linear-attention does not load (AttributeError"),
    ],
)
def test_a_package_without_the_kernels_is_named(make_tiny_target, stand_in, caplog, monkeypatch, broken, words):
    stand_in()
    monkeypatch.setitem(sys.modules, broken, None if "lacks" in words else ModuleType(broken))
    target = load(make_tiny_target("qwen3_5"))
    target.self_check()
    assert target.mode == "padded"
    (line,) = warnings(caplog)
    assert words in line and line.endswith("pip install 'paceline[linear-attention]'")


@pytest.mark.parametrize("kind", HYBRIDS)
def test_compiled_layers_share_two_graphs_with_the_kernels_opaque(make_tiny_target, stand_in, kind):
    stand_in()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    target = load(make_tiny_target(kind))
    target.self_check()
    batches = [batch(), batch([7] * 30), batch([PAD])]
    plain = [states_of(target, *each) for each in batches]
    layers = CompiledLayers(0, 64, backend)
    target.self_check(faster=layers)
    assert layers.installed
    compiled = len(graphs)
    for each, wanted in zip(batches, plain, strict=True):
        torch.testing.assert_close(states_of(target, *each), wanted, rtol=1e-4, atol=1e-4)
    assert len(graphs) == compiled, "these graphs serve every number of tokens"
    if kind == "qwen3_5":  # a mixture's experts break the graph, each break adds one
        assert compiled == 2
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    for name in ("packed_conv", "packed_delta_rule", "packed_attention"):
        assert any(name in call for call in called)


# On a GPU, by fla's own kernels


@pytest.mark.skipif(not (torch.cuda.is_available() and HAS_FLA), reason="needs a GPU and flash-linear-attention")
@pytest.mark.parametrize("compile_", [False, True])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_packed_states_on_a_gpu(make_tiny_target, kind, compile_, caplog):
    """fla's kernels in bfloat16, against transformers' plain functions in float32, a row at a time on the CPU."""
    folder = make_tiny_target(kind)
    target = load(folder, dtype="bfloat16", device="cuda")
    layers = CompiledLayers(0, 256) if compile_ else None
    target.self_check(faster=layers)
    assert target.mode == "packed" and not warnings(caplog), caplog.text
    assert layers is None or layers.installed
    for lengths in (LENGTHS, [700, 5, 1, 64, 65, 400], [1] * 20):
        tokens, cu_seqlens = batch(lengths)
        states, wanted = states_of(target, tokens, cu_seqlens), reference_states(folder, tokens, cu_seqlens)
        error = (states - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-3)
        assert float(error.median()) < 0.05
        if kind == "qwen3_5":  # no mixture
            assert float(error.quantile(0.95)) < 0.1 and float(error.mean()) < 0.05
            for start in cu_seqlens[1:-1]:  # where a state that is not reset shows first
                assert float(error[:, start : start + 4].mean()) < 0.1


@pytest.mark.skipif(not (torch.cuda.is_available() and HAS_FLA), reason="needs a GPU and flash-linear-attention")
def test_the_kernels_equal_the_plain_twins_at_a_models_widths(make_tiny_target):
    layer: Any = load(make_tiny_target("qwen3_5"), device="cuda").layers[0].linear_attn
    layer.key_dim, layer.head_k_dim, layer.value_dim, layer.head_v_dim = 16 * 128, 128, 48 * 128, 128
    channels = 2 * layer.key_dim + layer.value_dim
    layer.conv1d.weight = torch.nn.Parameter(torch.randn(channels, 1, 4, device="cuda", dtype=torch.bfloat16))
    assert delta_net.fault(layer, torch.device("cuda"), torch.bfloat16) is None
    layer.conv1d.weight = torch.nn.Parameter(layer.conv1d.weight.float())
    assert delta_net.fault(layer, torch.device("cuda"), torch.float32) is None
