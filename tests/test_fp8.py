"""fp8 matmuls: their rounding error is the format's, a token's scale is its own, and they are refused elsewhere."""

import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drafting import CONFIG, make_drafter, make_head, make_rows, make_run
from paceline.common import paths
from paceline.common.eightbit import plain_scaled_matmul, quantise, scaled_matmul
from paceline.common.errors import ConfigError
from paceline.common.footprint import Shape, layer_weights, rank_parts, target_weights, worker_parts
from paceline.common.runfile import RunFile
from paceline.common.target import Target
from paceline.common.target_info import target_info
from paceline.consumer import linears, losses
from paceline.consumer.learner import DFlashLearner
from paceline.consumer.linears import SLOPE
from paceline.consumer.losses import SLOPE_MAX
from paceline.consumer.objective import Objective, Slots, score_through_head
from paceline.consumer.optim import MasterWeights
from paceline.consumer.rehearsal import rehearse
from paceline.producer import fp8
from paceline.producer.capture import TargetSource
from paceline.producer.compiled import CompiledLayers
from paceline.producer.fp8 import Fp8Linear, use_fp8
from torch import nn

# A value rounded to 3 bits of mantissa is off by at most 2^-4 of itself, and by 2.6 % in root mean square; a product of
# two such matrices by sqrt(2) of that.
ROUNDING, PRODUCT = 2**-4, 0.037


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def test_values_are_rounded_to_the_formats_precision_by_row():
    x = draw(64, 256) * torch.logspace(-6, 6, 64)[:, None]  # a scale for all would lose the small rows
    values, scale = quantise(x)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (64, 1)
    assert float(values.float().abs().amax(-1).min()) == float(values.float().abs().max()) == 448
    restored = values.float() * scale
    normal = x.abs() > scale * 2**-6  # smaller ones are subnormal
    assert float(((restored - x) / x)[normal].abs().max()) <= ROUNDING * 1.001
    zeros, scale = quantise(torch.zeros(3, 16))
    assert not zeros.float().any() and torch.isfinite(scale).all()


def test_the_largest_value_of_a_row_comes_out_at_the_formats_largest_whatever_it_is():
    """Every float32 mantissa: scaled it may lie a rounding above 448, and the format has no larger value but NaN."""
    largest = torch.arange(2**23, 2**24, 3, dtype=torch.int32).float()[:, None]
    for exponent in (-60, 0, 60):
        values, scale = quantise(-largest * 2.0**exponent)
        assert bool((values.float() == -448).all()) and scale.shape == largest.shape
    values, _ = quantise(torch.tensor([[1.0, torch.nan], [torch.inf, 1.0]]))
    assert values.float().isnan().any(-1).all(), "what is no number stays none"


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_within_the_formats_error_of_float32(bias):
    linear = nn.Linear(512, 256, bias=bias)
    x = draw(2, 50, 512) * torch.logspace(-3, 3, 50)[:, None]
    with torch.no_grad():
        found, wanted = Fp8Linear(linear)(x), linear(x)
    assert found.shape == wanted.shape and found.dtype == x.dtype
    last = relative(found[:, -1], wanted[:, -1])
    assert PRODUCT / 2 < last < 1.5 * PRODUCT
    if not bias:
        worst = max(relative(a, b) for a, b in zip(found.flatten(0, 1), wanted.flatten(0, 1), strict=True))
        assert worst < 1.5 * PRODUCT, "small tokens are no worse than large ones"


def test_the_layers_of_a_target_change_and_nothing_else(make_tiny_target):
    folder = make_tiny_target("qwen3")
    target, plain = (Target.load(str(folder), dtype="float32") for _ in range(2))
    assert use_fp8(target) == 4 * 7
    assert type(target.layers[0].get_submodule("self_attn.q_proj")) is Fp8Linear
    assert type(target.decoder.embed_tokens) is nn.Embedding
    target.self_check()
    assert target.can_pack
    tokens = torch.randint(512, (60,), generator=torch.Generator().manual_seed(1))
    states = {}
    for name, one in (("fp8", target), ("plain", plain)):
        one.forward_states(
            tokens,
            [0, 20, 60],
            [0, 3],
            lambda plane, out, first, n=name: states.update({(n, plane, first): out.clone()}),
        )
    assert ("fp8", 0, 0) in states
    assert 0.01 < relative(states["fp8", 0, 0], torch.cat([states["plain", 0, 0], states["plain", 0, 20]])) < 0.1


def test_layers_that_read_the_same_input_quantise_it_once(make_tiny_target, monkeypatch):
    target = Target.load(str(make_tiny_target("qwen3")), dtype="float32")
    use_fp8(target)
    inputs = []
    monkeypatch.setattr(fp8, "quantise", lambda x: (inputs.append(x.shape[1]), quantise(x))[1])
    tokens = torch.arange(30)
    target.forward_states(tokens, [0, 30], [3], lambda *_: None)
    assert inputs == 4 * [64, 64, 64, 128], "q, k, v; o; gate, up; down"


def test_an_input_is_not_taken_for_the_one_before():
    layer = Fp8Linear(nn.Linear(32, 16, bias=False).requires_grad_(False))
    found = []
    for seed in range(5):  # each may lie where the one before lay
        x = draw(3, 32, seed=seed)
        found.append((layer(x), Fp8Linear.forward(layer, x.clone())))
        del x
    assert all(torch.equal(*pair) for pair in found)
    assert len({float(y.sum()) for y, _ in found}) == 5


# Compiled


def exact(graph, inputs):
    return graph.forward


def roundings(graph, inputs):
    """As right as the plain layers, with roundings of its own, as large as bfloat16's; the same each time."""

    def run(*args):
        generator = torch.Generator().manual_seed(1)
        outputs = graph.forward(*args)
        return [out * (1 + 2**-7 * (2 * torch.rand(out.shape, generator=generator) - 1)) for out in outputs]

    return run


def positions(graph, inputs):
    """Sines of the position before."""
    tables = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.ndim == 3 and x.shape[2] == HEAD]
    assert len(tables) == 2

    def run(*args):
        return graph.forward(*(x.roll(1, 1) if i == tables[1] else x for i, x in enumerate(args)))

    return run


def short(graph, inputs):
    """A tenth of what a layer adds is lost."""
    (before,) = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.ndim == 3 and x.shape[2] == 64]
    return lambda *args: [args[before] + 0.9 * (out - args[before]) for out in graph.forward(*args)]


def leaking(graph, inputs):
    """Tokens see a little of the one before, also of another row; far less than fp8's own error."""
    return lambda *args: [out + 0.01 * out.roll(1, 1) for out in graph.forward(*args)]


HEAD = 16


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        (exact, None),
        (roundings, None),
        (positions, "what layer 0 adds differs from a row's alone"),
        (short, "what layer 0 adds differs from a row's alone"),
        (leaking, "the first row moves what layer 0 adds to later rows"),
    ],
)
def test_compiled_fp8_layers_have_to_be_as_near_to_the_unquantised_as_plain_ones(
    make_tiny_target, compiler, caplog, backend, fault
):
    caplog.set_level("INFO", "paceline")
    target, layers = Target.load(str(make_tiny_target("qwen3")), dtype="float32"), CompiledLayers(0, 64, backend)
    target.self_check(quantising=use_fp8, faster=layers)
    assert target.can_pack and "quantised, what a layer adds is off by 0.0" in caplog.text
    assert layers.installed == (fault is None), caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (fault is not None) and (fault or "") in "".join(warnings)


@pytest.mark.parametrize(("kind", "mode", "linears"), [("gpt_oss", "packed", 16), ("gemma2", "padded", 28)])
def test_rows_are_packed_by_what_they_give_before_they_are_quantised(make_tiny_target, kind, mode, linears):
    """That fp8 moves what layers add by more than the check allows does not change how rows run."""
    target = Target.load(str(make_tiny_target(kind)), dtype="float32")
    seen = []
    target.self_check(quantising=lambda target: seen.append((target.mode, use_fp8(target))))
    assert seen == [(mode, linears)] and target.mode == mode


def test_quantising_is_in_the_graph_that_norms_and_activations_are_in(make_tiny_target, compiler):
    """No opaque operator and no graph of its own: the compiler makes it one kernel with what comes before."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    target, layers = Target.load(str(make_tiny_target("qwen3")), dtype="float32"), CompiledLayers(0, 64, keep)
    target.self_check(quantising=use_fp8, faster=layers)
    assert layers.installed
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes]
    for name, count in (("vector_norm", 7), ("rsqrt", 4), ("silu", 1), ("packed_attention", 1)):
        assert sum(name in one for one in called) == count, name


def test_a_gpu_whose_products_are_wrong_is_refused(monkeypatch):
    """Nothing compares fp8's own states with a bound, so that what they are made of is looked at beforehand."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(fp8.torch, "device", lambda _: types.SimpleNamespace(type="cuda"))
    monkeypatch.setattr(fp8, "_product_error", lambda _: 0.5)
    with pytest.raises(ConfigError, match=r"target\.fp8: torch .* on cuda:0: a matmul is off by 0\.5"):
        fp8.check_fp8("cuda:0")


def test_an_error_of_products_is_seen(monkeypatch):
    assert fp8._product_error("cpu") < fp8.PRODUCT_ERROR / 4
    monkeypatch.setattr(fp8, "scaled_matmul", lambda x, a, w, b, dtype: scaled_matmul(x, 1.1 * a, w, b, dtype))
    assert fp8._product_error("cpu") > 4 * fp8.PRODUCT_ERROR


def test_the_memory_of_layers_is_halved(make_tiny_target):
    folder = make_tiny_target("qwen3")
    info = target_info(str(folder))
    plain, fp8 = (worker_parts(run_file(folder, fp8=on), info, 3, 3).parts["target's weights"] for on in (False, True))
    assert (plain, plain - fp8) == (2 * target_weights(info, 3), layer_weights(info, 3))
    layers = 4 * 64 * (2 * 64 + 2 * 32 + 3 * 128)
    assert layers < layer_weights(info, 3) < 1.02 * layers, "norms' weights come on top"


def test_a_mixtures_routers_stay(make_tiny_target):
    target = Target.load(str(make_tiny_target("gpt_oss")), dtype="float32")
    router = target.layers[0].get_submodule("mlp.router")
    assert use_fp8(target) == 4 * 4
    assert target.layers[0].get_submodule("mlp.router") is router and not any(
        isinstance(m, Fp8Linear) for m in router.modules()
    )


def run_file(target, **settings):
    return RunFile.model_validate(
        {
            "name": "toy",
            "output": "out",
            "target": {"path": str(target), "fp8": True, **settings},
            "data": {"rows": "rows", "max_length": 32},
            "stream": {"token_budget": 1024},
        }
    )


def test_a_device_without_fp8_is_refused(tiny_target_dir):
    with pytest.raises(ConfigError, match=r"^target\.fp8: cpu has no fp8 matmuls; they need a GPU of .* 8\.9$"):
        TargetSource.load(run_file(tiny_target_dir), target_info(str(tiny_target_dir)), [0, 2], "cpu")


def test_another_dtype_is_refused(tiny_target_dir):
    with pytest.raises(ValueError, match=r'target\.fp8 needs target\.dtype = "bfloat16", not "float16"'):
        run_file(tiny_target_dir, dtype="float16")


needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
)


@needs_fp8
@pytest.mark.parametrize("tokens", [1, 23, 128, 1000])
def test_the_gpus_matmul_agrees_with_the_plain_one(tokens):
    x, x_scale = quantise(draw(tokens, 256).cuda().bfloat16())
    weight, scale = quantise(draw(96, 256, seed=1).cuda().bfloat16())
    found = scaled_matmul(x, x_scale, weight, scale, torch.bfloat16)
    wanted = plain_scaled_matmul(x, x_scale, weight, scale, torch.float32)
    assert found.dtype == torch.bfloat16 and relative(found.float(), wanted) < 0.01


@needs_fp8
@pytest.mark.parametrize("compiled", [False, True])
def test_an_fp8_target_on_a_gpu(make_tiny_target, compiled, tmp_path, monkeypatch, caplog):
    for variable in ("PACELINE_CACHE", *paths.COMPILE_CACHES):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    torch._dynamo.reset()
    folder = make_tiny_target("qwen3")
    tokens = torch.randint(512, (900,), generator=torch.Generator().manual_seed(1))
    rows = [0, 20, 60, 900]
    states = {}
    for eight in (False, True):
        run = run_file(folder, fp8=eight, compile=eight and compiled)
        source = TargetSource.load(run, target_info(str(folder)), [0, 3], "cuda:0")
        assert source.mode == "packed" and source.compiled == (eight and compiled), caplog.text
        out = memoryview(bytearray(2 * len(tokens) * 64 * 2))
        assert source.begin(tokens.numpy().astype(np.int32), np.array(rows, np.int32), out, lambda: None).finish()
        states[eight] = torch.frombuffer(out, dtype=torch.bfloat16).view(2, -1, 64).float()
    assert 0.005 < relative(states[True][0], states[False][0]) < 0.1


# The drafter's


def test_a_drafters_fp8_product_and_its_gradients():
    """Forward and input gradient are off by the format's error, row by row; the weight gradient is exact."""
    x, weight, slope = draw(48, 64), draw(96, 64, seed=1), draw(48, 96, seed=2)
    leaves = [[t.clone().requires_grad_() for t in (x, weight)] for _ in range(2)]
    eight = linears.both_ways(weight)
    found, wanted = (linears.linear(a, b, None, by) for (a, b), by in zip(leaves, (eight, None), strict=True))
    assert PRODUCT / 2 < relative(found.detach(), wanted.detach()) < 1.5 * PRODUCT
    for product in (found, wanted):
        (product * slope).sum().backward()
    (dx, dw), (plain_dx, plain_dw) = ([leaf.grad for leaf in pair] for pair in leaves)
    assert PRODUCT / 2 < relative(dx, plain_dx) < 1.5 * PRODUCT
    torch.testing.assert_close(dw, plain_dw)


def test_an_fp8_product_has_a_gradient_by_name():
    """Without it torch 2.11 compiles the function around it as one that has none."""
    x, weight = draw(48, 64).requires_grad_(), draw(96, 64)
    product = linears.fp8_product(*quantise(x.detach()), *quantise(weight), x, True)
    assert product.requires_grad and product.shape == (48, 96)
    torch.testing.assert_close(product, scaled_matmul(*quantise(x.detach()), *quantise(weight), torch.float32))
    with pytest.raises(RuntimeError, match="derivatives of their own"):
        product.sum().backward()


def test_layers_of_a_drafter_that_run_in_fp8():
    drafter = make_drafter(CONFIG)
    assert not any(getattr(module, "fp8", False) for module in drafter.modules())
    linears.use_fp8(drafter)
    sizes = {
        name: all(size % 16 == 0 for part in module.parameters() for size in part.shape)
        for name, module in drafter.named_modules()
        if isinstance(module, linears.DraftLinear | linears.DraftMLP)
    }
    assert sizes
    for name, aligned in sizes.items():
        assert drafter.get_submodule(name).fp8 == aligned, name


@needs_fp8
def test_a_compiled_drafter_in_fp8_has_the_plain_ones_gradients():
    drafter = make_drafter(replace(CONFIG, vocab_size=64))
    run = make_run(trainer={"fp8": True, "dtype": "bfloat16"})
    learner = DFlashLearner(run, drafter, make_head(vocab=64), device="cuda", dtype=torch.bfloat16)
    assert learner.drafter.is_compiled
    rehearse(learner)  # ConfigError else


@pytest.mark.parametrize("form", ["plain", "general"])
def test_the_heads_products_in_fp8(form):
    """As cross-entropy of the quantised values; its slopes go back quantised as well, through the head turned round."""
    head, labels = draw(96, 64), torch.arange(40) % 96
    hidden, weights = draw(40, 64, seed=1).requires_grad_(), torch.rand(40, generator=torch.Generator().manual_seed(2))
    eight = losses.quantised_head(head)
    if form == "plain":
        found = losses.head_cross_entropy(hidden, head, labels, weights, eight=eight, chunk_bytes=7 * 4 * 96)
    else:
        runs = [slice(0, 20), slice(20, 40)]
        slots = Slots(labels, weights, torch.arange(40) + 1, 1, 41, runs)
        found = score_through_head(hidden, head, slots, Objective(confidence=1e-9), None, eight=eight)
    found.loss.backward()
    values, scale = quantise(hidden.detach())
    logits = (values.double() * scale) @ (eight[0].double() * eight[1]).T
    ce = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(found.ce, ce.float(), rtol=1e-5, atol=1e-5)
    assert (
        0.001
        < relative(found.ce, torch.nn.functional.cross_entropy(hidden.detach() @ head.T, labels, reduction="none"))
        < 0.1
    )
    slopes = (logits.softmax(-1) - torch.nn.functional.one_hot(labels, 96)) * weights[:, None]
    assert 0.01 < relative(hidden.grad, (slopes @ head.double()).float()) < 0.08
    if form == "plain":
        rounded = (slopes / weights[:, None] * SLOPE_MAX).to(SLOPE).double() / SLOPE_MAX * weights[:, None]
        turned = (eight[2].double() * eight[3]).T
        assert relative(hidden.grad, (rounded @ turned).float()) < 0.003, "but for what falls on another side"


def test_a_large_head_is_quantised_in_pieces_as_a_whole(monkeypatch):
    head = draw(2**13 + 70, 16)
    monkeypatch.setattr(losses, "quantise", lambda x: (pieces.append(len(x)), quantise(x))[1])
    pieces = []
    found = losses.quantised_head(head)
    assert pieces == [2**13, 70, 16]
    for one, wanted in zip(found, linears.both_ways(head), strict=True):
        torch.testing.assert_close(one.float(), wanted.float(), rtol=0, atol=0)


def test_a_learner_trains_on_fp8_logits_and_evaluates_in_full(monkeypatch):
    monkeypatch.setattr("paceline.consumer.learner.check_fp8", lambda _: None)
    monkeypatch.setattr("paceline.consumer.learner.head_cross_entropy", lambda *given, eight, **_: heard(given, eight))
    eights: list[bool] = []

    def heard(given, eight):
        eights.append(eight is not None)
        return losses.head_cross_entropy(*given, eight=eight)

    rows = make_rows(20, 30, 9)
    meta, found = rows.meta([0, 1, 2]), {}
    for vocab, on in ((64, False), (64, True), (61, True)):
        run = make_run(trainer={"fp8": on, "micro_tokens": 1000})
        learner = DFlashLearner(run, make_drafter(), make_head(vocab=vocab), device="cpu", dtype=torch.float32)
        learner.train_record(meta, rows.memory(), 0)
        found[vocab, on] = float(learner.sums()[0])
        learner.eval_record(meta, rows.memory())
    assert eights == [False, False, True, False, False, False], "a vocabulary of 61 does not fit fp8 products"
    assert 0 < abs(found[64, True] / found[64, False] - 1) < 0.05


def test_a_plan_counts_what_is_quantised():
    shape = Shape(64, 96, 2, 64, 32, 3, 1000, 16, tied=False)
    plain, eight = (rank_parts(make_run(trainer={"fp8": on}), shape, 64).parts for on in (False, True))
    more = {name: eight[name] - plain.get(name, 0) for name in eight if eight[name] != plain.get(name)}
    assert more.pop("logits chunk") % 1000 == 0
    assert more == {"drafter and head in fp8": 2 * (1000 * 64 + shape.weights)}


@pytest.mark.parametrize("joint", [False, True])
def test_a_step_quantises_the_weights_anew(joint):
    drafter = make_drafter(CONFIG)
    weights = MasterWeights(drafter, dtype=torch.bfloat16, device="cpu")
    if joint:
        mlp: Any = drafter.get_submodule("layers.0.mlp")
        mlp.joint = (weights.joined([f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]),)
    weights.published.append(linears.use_fp8(drafter))
    weights.masters.mul_(-3)
    weights.publish()
    checked = 0
    modules: list[Any] = list(drafter.modules())
    for module in modules:
        if getattr(module, "fp8", False):
            own = module.products if isinstance(module, linears.DraftMLP) else [module.weight]
            for weight, eight in zip(own, module.eight, strict=True):
                checked += 1
                for one, wanted in zip(eight, linears.both_ways(weight), strict=True):
                    assert torch.equal(one.float(), wanted.float())
    assert checked == sum(p.ndim == 2 for p in drafter.parameters()) - joint


@pytest.mark.parametrize("shape", [(16, 16), (80, 144), (200, 64)])
def test_the_kernel_that_quantises_both_ways(shape):
    kernels = pytest.importorskip("paceline.consumer.kernels")
    device, kind = ("cuda", torch.float8_e4m3fn) if torch.cuda.is_available() else ("cpu", torch.float32)
    wide = draw(shape[0], shape[1] + 16).to(device)
    weight = wide[:, : shape[1]] * torch.logspace(-3, 3, shape[0], device=device)[:, None]
    values, scale, turned, turned_scale = linears.both_ways(weight)
    found = [torch.empty_like(part, dtype=kind) for part in (values, turned)]  # the interpreter rounds to them wrongly
    scales = [torch.empty_like(part) for part in (scale, turned_scale)]
    kernels.quantise_both_ways(weight, found[0], scales[0], found[1], scales[1])
    torch.testing.assert_close(scales, [scale, turned_scale])
    for one, wanted in zip(found, (values, turned), strict=True):
        off = one.to(torch.float8_e4m3fn).float() != wanted.float()
        assert one.shape == wanted.shape and int(off.sum()) <= one.numel() // 1000, "half-way between two values"
        assert bool(((one.float() - wanted.float()).abs() <= wanted.float().abs() / 8 + 2**-9).all())


def test_a_drafter_in_fp8_needs_a_gpu_that_has_it():
    with pytest.raises(ConfigError, match=r"trainer\.fp8: cpu has no fp8"):
        linears.check_fp8(torch.device("cpu"))
