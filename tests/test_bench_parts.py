"""`paceline bench step|target|stream`: what is counted, what is computed from it, and each for real on a CPU."""

import json

import numpy as np
import pytest
from paceline.common import bench_parts, paths
from paceline.common.bench_parts import (
    EAGER,
    PADDED,
    PLAIN,
    StepOptions,
    TargetOptions,
    chat_lengths,
    step_figures,
    stream_figures,
    target_figures,
)
from paceline.common.cli import main
from paceline.common.cli_bench import _KINDS
from paceline.common.flops import forward_flops, step_flops
from paceline.common.footprint import Shape

SHAPE = Shape(hidden=8, inner=16, layers=2, queries=8, keys=4, planes=3, vocabulary=10, block=4, tied=False)


def test_flops_of_a_step_by_hand():
    """One product of [n, i] and [i, o] is 2·n·i·o; a linear layer has three of them with its backward pass."""
    assert SHAPE.layer_weights == 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    features = 2 * (2 * 5 * 24 * 8)  # forward and the weight's gradient
    keys_values = 3 * 2 * 5 * 8 * 8
    linear = 3 * 2 * 7 * 576
    attention = 3 * 2 * (2 * 8 * 11)  # scores and their use, each [11 pairs] x 8
    head = 2 * (2 * 6 * 8 * 10)
    found = step_flops(SHAPE, context=5, slots=7, seen=11, scored=6)
    unscored = 3 * 2 * (7 - 6) * (8 * 8 + 3 * 8 * 16)  # after the last layer's attention
    assert found == features + 2 * (keys_values + linear + attention) - unscored + head


def test_flops_of_a_forward_by_hand():
    """Rows of 2 and 3 tokens see 3 and 6 keys; two of the layers attend."""
    assert forward_flops(weights=100, queries=8, attention_layers=2, lengths=[2, 3]) == 2 * 100 * 5 + 2 * 4 * 8 * 9


def test_chat_rows_are_like_chats_and_always_the_same():
    lengths = chat_lengths(200_000, 4096)
    assert lengths == chat_lengths(200_000, 4096)
    assert 190_000 < sum(lengths) <= 200_000
    assert np.mean(lengths) == pytest.approx(320, rel=0.1)
    assert max(chat_lengths(50_000, 512)) == 512


def _arm(**values):
    work = {"slots": 160, "blocks": 10, "flops": 4 * 10**12}
    return {
        "step_s": [2.0, 4.0, 2.0],
        "update_s": [0.5],
        "work": [work] * 3,
        "rows": 2,
        "peak_bytes": None,
        "computing_bytes": None,
    } | values


def test_rates_are_medians_of_work_by_time():
    ceilings = {"matmul_tflops": 8.0}
    arms = step_figures({"full": _arm(context_tokens=100)}, ceilings)
    assert arms["full"]["row_ms"] == 1000
    assert arms["full"]["positions_per_s"] == 80 and arms["full"]["context_tokens_per_s"] == 50
    assert arms["full"]["tflops"] == 2 and arms["full"]["of_matmul"] == 0.25


def test_packed_to_padded_compares_blocks_of_use():
    arms = {"chat": _arm(context_tokens=100), PADDED: _arm(context_tokens=100, step_s=[6.0, 6.0, 6.0])}
    assert step_figures(arms, {"matmul_tflops": 8.0})["chat"]["packed_to_padded"] == pytest.approx(3)
    arms[PLAIN] = _arm(context_tokens=100, step_s=[8.0, 16.0, 8.0])
    arms[EAGER] = _arm(context_tokens=100, step_s=[12.0, 12.0, 12.0])
    chat = step_figures(arms, {"matmul_tflops": 8.0})["chat"]
    assert [chat[f"packed_to_{other}"] for other in ("padded", "plain", "eager")] == pytest.approx([3, 4, 6])


def test_states_on_the_way_are_compared_with_states_on_the_device():
    arms = {"full": _arm(context_tokens=1), "full-resident": _arm(context_tokens=1, step_s=[1.5] * 3)}
    found = step_figures(arms, {"matmul_tflops": 8.0})
    assert found["full"]["of_resident"] == pytest.approx(0.75) and "of_resident" not in found["full-resident"]


def test_each_streaming_arm_is_compared_with_the_same_rows_alone():
    def arm(seconds, **values):
        return (
            {"batch_s": [seconds], "tokens": 10, "flops": 1e12, "peak_bytes": None}
            | {"runs": "packed", "compiled": False}
            | values
        )

    ring = {"checksum_s": [0.1], "record_bytes": 8e9}
    measured = {"transformers": arm(4), "full": arm(2), "full, ring": arm(2.5, **ring), "chat": arm(1)}
    arms = target_figures(measured, {"matmul_tflops": 1.0})
    assert arms["full"]["of_transformers"] == 2 and arms["chat"]["of_transformers"] == 4
    assert arms["full, ring"]["of_alone"] == pytest.approx(0.8)
    assert arms["full, ring"]["gb_per_s"] == pytest.approx(3.2)
    assert "of_alone" not in arms["full"]


def test_a_ring_copy_is_compared_with_the_page_locked_one_of_its_direction():
    ways = {
        "page-locked to GPU": [50.0, 40.0],
        "GPU to page-locked": [20.0],
        "ring to GPU": [45.0],
        "GPU to ring": [19],
    }
    found = stream_figures(ways, "page-locked")
    assert found["ring to GPU"]["of_ceiling"] == 0.9 and found["GPU to ring"]["of_ceiling"] == 0.95
    assert found["page-locked to GPU"] == {"best_gb_per_s": 50, "median_gb_per_s": 45, "of_ceiling": 1}


def test_anchors_have_to_fit_into_a_row(capsys):
    assert main(["bench", "step", "--device", "cpu", "--length", "64", "--anchors", "49"]) == 2
    assert "room for 48 whole blocks of 16" in capsys.readouterr().err


def test_a_wrong_setting_is_said_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setattr(bench_parts, "run_side", lambda *_, **__: pytest.fail("a process was started"))
    assert main(["bench", "target", "--device", "cpu", "--set", "target.dtyp=float32"]) == 78
    assert "target.dtyp" in capsys.readouterr().err


def test_arms_of_a_step(tmp_path, make_tiny_target):
    """Blocks of full rows are whole and their number exact; a padded row is one of 512, as useful as the packed one."""
    from paceline.common.runfile import load
    from paceline.common.target_info import resolve_layer_ids, target_info
    from paceline.consumer.bench_step import count_work, describe, make_arm

    options = StepOptions("cpu", str(make_tiny_target("qwen3")), layers=1, block_size=4, length=96, rows=12, anchors=7)
    path = str(bench_parts.write_run(tmp_path, options, token_budget=1152, micro_tokens=512, anchors=0.25))
    info = target_info(options.target)
    found = {}
    done = {}
    for kind in ("full", "chat", PADDED, PLAIN, EAGER):
        arm = make_arm(path, kind, options)
        run = load(path, arm.settings)
        layers = resolve_layer_ids(run, info)
        meta = describe(run, arm, layers, info)
        for epoch in range(3):
            done = count_work(run, meta, epoch, info, len(layers))
            assert done["blocks"] * 3 >= done["scored"] >= done["blocks"]
            if kind == "full":
                assert (done["slots"], done["blocks"]) == (12 * 7 * 4, 12 * 7)
        found[kind] = arm, done
    (packed, packed_done), (padded, padded_done) = found["chat"], found[PADDED]
    assert padded.lengths == [512] * len(packed.lengths) and padded.context == sum(packed.lengths) <= 1152
    assert padded.blocks == packed_done["blocks"]
    learners = {packed.learner}
    for kind in (PLAIN, EAGER):
        plain, plain_done = found[kind]
        assert plain.lengths == packed.lengths and plain_done == packed_done
        learners.add(plain.learner)
    assert len(learners) == 3
    assert padded_done["blocks"] >= padded.blocks and padded_done["flops"] > packed_done["flops"]


def test_what_was_warned_of_stands_under_the_table(capsys, monkeypatch):
    """A figure means something else when what was asked for did not happen."""
    ceilings = {"device": "a CPU", "dtype": "float32", "matmul_size": 8, "matmul_tflops": 1.0}

    def run_side(module, *_, said):
        said.line("@warning the target runs [un]compiled: why\n")
        return ceilings if module == "consumer.ceilings" else {"full": _arm(context_tokens=1)}

    monkeypatch.setattr(bench_parts, "run_side", run_side)
    assert main(["bench", "step", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "smollm2-135m on a CPU" in lines[0] and lines[-1] == "warning: the target runs [un]compiled: why"
    assert main(["bench", "step", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == ["the target runs [un]compiled: why"]


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_states_to_train_on_are_random_all_over(dtype, monkeypatch):
    from paceline.common.record import RecordMeta
    from paceline.consumer import bench, rehearsal
    from paceline.consumer.check import check_states

    monkeypatch.setattr(rehearsal, "TILE", 1000)
    rows = {"row_ids": np.arange(2), "cu_seqlens": np.array([0, 20, 50], np.int32)}
    tokens = {"tokens": np.zeros(50, np.int32), "mask": np.ones(50, np.uint8), "layer_ids": (1, 3)}
    meta = RecordMeta(1, **rows, **tokens, dtype=dtype, hidden_size=48, last_hidden="none", fingerprint=0)
    buffer = bench.random_states(meta, on_gpu=False)
    with memoryview(buffer) as states:
        check_states(states, meta)
        values = np.frombuffer(states, np.uint8, count=2 * 50 * 48 * (4 if dtype == "float32" else 1)).copy()
    assert len(np.unique(values.reshape(100, -1), axis=0)) == 100, "no token is like another"


def test_ceilings_compute_in_the_dtype_that_is_measured():
    import torch
    from paceline.common.loading import compute_dtype
    from paceline.consumer.ceilings import computed_in

    for dtype in ("bfloat16", "float16", "float32"):
        assert computed_in(dtype, "cpu") == compute_dtype(dtype, "cpu")
        assert computed_in(dtype, "cuda:0") == compute_dtype(dtype, "cuda:0") == getattr(torch, dtype)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_target_is_loaded_once_for_all_arms(tmp_path, make_tiny_target, monkeypatch, compiles):
    """Eager arms are there where there is something to compare them with, and say how they ran."""
    import torch
    from paceline.common.target import Target
    from paceline.producer import bench_target, capture
    from paceline.producer.compiled import CompiledLayers

    def backend(graph, inputs):
        return graph.forward if compiles else lambda *args: [2 * out for out in graph.forward(*args)]

    loads, load = [], Target.load
    monkeypatch.setattr(Target, "load", lambda *args, **options: (loads.append(options), load(*args, **options))[1])
    monkeypatch.setattr(
        capture, "CompiledLayers", lambda tokens, max_length: CompiledLayers(tokens, max_length, backend)
    )
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    for variable in paths.COMPILE_CACHES:
        monkeypatch.setenv(variable, str(tmp_path))
    torch._dynamo.reset()
    settings = (f"stream.ring_dir={tmp_path / 'rings'}", "target.compile=true")
    target = str(make_tiny_target("qwen3"))
    options = TargetOptions("cpu", target, steps=1, settings=settings, layers=1, length=32, kinds=("full",), budget=64)
    run = bench_parts.write_run(tmp_path, options, token_budget=64, micro_tokens=64, anchors=0.25)
    found = bench_target.measure(str(run), options)
    torch._dynamo.reset()
    assert len(loads) == 1
    ran = {name: (arm["runs"], arm["compiled"]) for name, arm in found.items()}
    if compiles:
        wanted = {"full, eager": ("packed", False), "full": ("packed", True), "full, ring": ("packed", True)}
    else:
        wanted = {"full": ("packed", False), "full, ring": ("packed", False)}
    assert list(ran.items()) == list(({"transformers": ("sdpa", False)} | wanted).items())
    assert found["full"]["flops"] == 0.75 * found["transformers"]["flops"], "layer 2 of 4 is the last"


@pytest.mark.slow
def test_a_target_that_was_not_compiled_is_told_of(make_tiny_target, capsys, tmp_path):
    command = "bench target --device cpu --steps 1 --rows-kind full --length 64 --budget 64 --layers 1"
    settings = [f"stream.ring_dir={tmp_path / 'rings'}", "target.compile=true"]
    target = str(make_tiny_target("gemma2"))
    sets = [option for setting in settings for option in ("--set", setting)]
    assert main([*command.split(), "--target-config", target, *sets]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("rows run" in line and "padded" in line for line in lines)
    assert any(line.startswith("warning: the target is not compiled, as its rows run padded") for line in lines)


@pytest.mark.slow
def test_a_step_on_a_cpu(make_tiny_target, capsys):
    command = "bench step --device cpu --steps 3 --rows 2 --length 64 --anchors 5 --block-size 4 --layers 1 --json"
    kinds = [option for kind in (*_KINDS, "full") for option in ("--rows-kind", kind)]
    assert main([*command.split(), *kinds, "--target-config", str(make_tiny_target("qwen3"))]) == 0
    report = json.loads(capsys.readouterr().out)
    full = report["arms"]["full"]
    assert (full["rows"], full["positions"], full["repetitions"]) == (2, 2 * 5 * 4, 3)
    assert full["positions_per_s"] == pytest.approx(4 * full["supervised_blocks_per_s"])
    assert full["of_matmul"] == pytest.approx(full["tflops"] / report["ceilings"]["matmul_tflops"])
    chat = report["arms"]["chat"]
    assert list(report["arms"]) == list(_KINDS)
    assert full["of_resident"] > 0.1 and report["arms"]["full-resident"]["positions"] == full["positions"]
    assert chat["packed_to_padded"] > 0 and chat["packed_to_plain"] > 0 and report["ceilings"]["torch"]
    for kind in (PLAIN, EAGER):
        assert report["arms"][kind]["positions"] == chat["positions"], "what is of use is the same"


@pytest.mark.slow
def test_a_target_on_a_cpu(make_tiny_target, capsys, tmp_path):
    command = "bench target --device cpu --steps 3 --length 64 --budget 192 --layers 1 --json"
    target, rings = str(make_tiny_target("qwen3")), tmp_path / "rings"
    assert main([*command.split(), "--target-config", target, "--set", f"stream.ring_dir={rings}"]) == 0
    arms = json.loads(capsys.readouterr().out)["arms"]
    assert list(arms) == ["transformers", "full", "full, ring", "chat", "chat, ring"]
    assert arms["transformers"]["runs"] == "sdpa" and arms["full"]["runs"] == "packed"
    assert arms["transformers"]["tokens"] == arms["full"]["tokens"] == 192
    flops = {name: arm["tflops"] * arm["batch_ms"] for name, arm in arms.items()}
    # Layer 2 is recorded, so the last of 4 does not run; a ring adds no arithmetic.
    assert flops["full"] == pytest.approx(flops["full, ring"])
    assert flops["full"] == pytest.approx(0.75 * flops["transformers"])
    assert list(rings.iterdir()) == []


@pytest.mark.slow
def test_a_ring_between_processes(capsys, tmp_path):
    command = f"bench stream --device cpu --record-mb 1 --rounds 1 --ring-dir {tmp_path} --json"
    assert main(command.split()) == 0
    report = json.loads(capsys.readouterr().out)
    ways = report["speeds"]["between processes"]
    assert {"memcpy", "ring touch", "ring copy", "ring sum"} <= set(ways)
    assert ways["memcpy"]["of_ceiling"] == 1 and all(way["best_gb_per_s"] > 0 for way in ways.values())
    assert 0 < report["latency_us"]["zeromq_p50"] <= report["latency_us"]["zeromq_p99"]
    assert list(tmp_path.iterdir()) == []


# Billions: of all weights, and of those that a token passes, with one of embedding and head.
SHAPES = {
    "qwen3-0.6b": (0.596, 0.596),
    "qwen3-8b": (8.19, 7.57),
    "qwen3-30b-a3b": (30.53, 3.03),
    "gpt-oss-20b": (20.91, 3.61),
    "qwen3.6-27b": (26.9, 25.62),
    "smollm2-135m": (0.1345, 0.1345),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_load_and_have_as_many_weights_as_their_names_say(name, tmp_path):
    import torch
    from paceline.common.bench import model_folder
    from paceline.common.footprint import active_weights, target_weights
    from paceline.common.loading import find_parts
    from paceline.common.target_info import load_config, target_info
    from transformers import AutoModelForCausalLM

    folder = model_folder(tmp_path, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(folder), dtype=torch.bfloat16)
    billions, passed = SHAPES[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(billions * 1e9, rel=2e-3)
    parts, info = find_parts(model), target_info(str(folder))
    assert (info.num_layers, info.hidden_size) == (len(parts.layers), parts.embedding.weight.shape[1])
    embedding, last = info.vocab_size * info.hidden_size, info.num_layers - 1
    head = 0 if info.tie_word_embeddings else embedding
    assert info.path == str(folder) and not list(folder.glob("*.safetensors")), "counted from the shape alone"
    assert target_weights(info, last) + head == pytest.approx(billions * 1e9, rel=2e-3)
    assert active_weights(info, last) + embedding == pytest.approx(passed * 1e9, rel=2e-3)


@pytest.mark.parametrize(("kind", "mlp"), [("qwen3", 3 * 128), ("qwen3_moe", 2 * 3 * 64), ("gpt_oss", 2 * 3 * 128)])
def test_a_token_passes_the_experts_chosen_for_it(make_tiny_target, kind, mlp):
    """Two of four, by shapes; whether a router is a linear layer differs."""
    from paceline.common.target import Target
    from paceline.producer.bench_target import count_flops

    target = Target.load(str(make_tiny_target(kind)), dtype="float32", last_layer=1)
    layer = 64 * (2 * 64 + 2 * 32 + mlp)
    pairs = 10 * 11 // 2 + 5 * 6 // 2
    assert count_flops(target, [10, 5]) == pytest.approx(2 * 2 * layer * 15 + 2 * 4 * 64 * pairs, rel=0.01)
