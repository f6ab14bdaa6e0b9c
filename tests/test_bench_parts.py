"""`paceline bench step|target|stream`: what is counted, what is computed from it, and each for real on a CPU."""

import json
import os

import numpy as np
import pytest
from paceline.common import bench_parts, paths
from paceline.common.bench import error_line, run_side
from paceline.common.bench_parts import (
    PADDED,
    PLAIN,
    StepOptions,
    chat_lengths,
    step_figures,
    stream_figures,
    target_figures,
)
from paceline.common.cli import main
from paceline.common.errors import ConfigError, PacelineError
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
    assert found == features + 2 * (keys_values + linear + attention) + head


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
    return {"step_s": [2.0, 4.0, 2.0], "update_s": [0.5], "work": [work] * 3, "rows": 2, "peak_bytes": None} | values


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
    chat = step_figures(arms, {"matmul_tflops": 8.0})["chat"]
    assert chat["packed_to_padded"] == pytest.approx(3) and chat["packed_to_plain"] == pytest.approx(4)


def test_each_streaming_arm_is_compared_with_the_same_rows_alone():
    def arm(seconds, **values):
        return {"batch_s": [seconds], "tokens": 10, "flops": 1e12, "peak_bytes": None, "runs": "packed"} | values

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
    monkeypatch.setattr(bench_parts, "run_side", lambda *_: pytest.fail("a process was started"))
    assert main(["bench", "target", "--device", "cpu", "--set", "target.dtyp=float32"]) == 78
    assert "target.dtyp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [("ConfigError", ConfigError, 78), ("PacelineError", PacelineError, 1)],
)
def test_an_error_of_a_measuring_process_is_one_line(name, kind, code, tmp_path, monkeypatch):
    """Its kind, and so the exit code, stays what it was."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho Traceback >&2\necho 'paceline.common.errors.{name}: too few: 4' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    with pytest.raises(kind, match=r"^too few: 4$") as error:
        bench_parts.run_side("consumer.bench_step")
    assert error.value.exit_code == code


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
    for kind in ("full", "chat", PADDED, PLAIN):
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
    plain, plain_done = found[PLAIN]
    assert plain.lengths == packed.lengths and plain_done == packed_done and plain.learner is not packed.learner
    assert padded_done["blocks"] >= padded.blocks and padded_done["flops"] > packed_done["flops"]


@pytest.mark.slow
def test_a_step_on_a_cpu(make_tiny_target, capsys):
    command = "bench step --device cpu --steps 3 --rows 2 --length 64 --anchors 5 --block-size 4 --layers 1 --json"
    kinds = [option for kind in ("full", "chat", PADDED, PLAIN) for option in ("--rows-kind", kind)]
    assert main([*command.split(), *kinds, "--target-config", str(make_tiny_target("qwen3"))]) == 0
    report = json.loads(capsys.readouterr().out)
    full = report["arms"]["full"]
    assert (full["rows"], full["positions"], full["repetitions"]) == (2, 2 * 5 * 4, 3)
    assert full["positions_per_s"] == pytest.approx(4 * full["supervised_blocks_per_s"])
    assert full["of_matmul"] == pytest.approx(full["tflops"] / report["ceilings"]["matmul_tflops"])
    chat, plain = report["arms"]["chat"], report["arms"][PLAIN]
    assert chat["packed_to_padded"] > 0 and chat["packed_to_plain"] > 0 and report["ceilings"]["torch"]
    assert plain["positions"] == chat["positions"], "what is of use is the same"


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


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "qwen3.6-27b", "smollm2-135m"])
def test_shapes_load_and_have_as_many_weights_as_their_names_say(name, tmp_path):
    import torch
    from paceline.common.bench import model_folder
    from paceline.common.target import find_parts
    from paceline.common.target_info import load_config, target_info
    from transformers import AutoModelForCausalLM

    folder = model_folder(tmp_path, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(folder), dtype=torch.bfloat16)
    billions = {"qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "qwen3.6-27b": 26.9, "smollm2-135m": 0.1345}[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(billions * 1e9, rel=2e-3)
    parts, info = find_parts(model), target_info(str(folder))
    assert (info.num_layers, info.hidden_size) == (len(parts.layers), parts.embedding.weight.shape[1])


def test_the_line_of_a_traceback_that_names_the_error():
    """CUDA's and dynamo's errors go on after it, and the last line is advice for torch's developers."""
    text = (
        "Traceback (most recent call last):\n"
        '  File "x.py", line 3, in <module>\n'
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\n\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n"
    )
    assert error_line(text) == "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert error_line("killed\n") == "killed" and error_line("") == ""


def test_what_is_measured_compiles_where_runs_look(tmp_path, monkeypatch):
    """Else each side of a pipeline would be compiled a second time, minutes into the measurement."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    for variable in paths.COMPILE_CACHES:
        monkeypatch.setenv(variable, "")  # as good as none, and taken back afterwards
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "{\\"inductor\\": \\"$TORCHINDUCTOR_CACHE_DIR\\"}"\n')
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    found = run_side("consumer.bench")
    assert not os.environ["TORCHINDUCTOR_CACHE_DIR"]  # only for the child
    paths.share_compile_caches()
    assert found == {"inductor": os.environ["TORCHINDUCTOR_CACHE_DIR"]}
