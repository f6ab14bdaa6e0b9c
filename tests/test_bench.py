"""`paceline bench pipeline`: what it predicts, where it puts processes, and a whole small run of it."""

import json
import time
from datetime import datetime

import pytest
from paceline.common import planner
from paceline.common.bench import (
    GpuLog,
    Options,
    Result,
    Sample,
    bench_pipeline,
    measured,
    model_folder,
    parse_topology,
    place,
    predict,
    write_rows,
    write_run,
)
from paceline.common.bench_plan import against_plan, plan_table
from paceline.common.errors import UsageError
from paceline.common.runfile import RunFile, load
from paceline.common.target_info import resolve_layer_ids, target_info


def test_topologies():
    assert parse_topology("6-2") == (6, 2)
    for text in ("6", "0-1", "1-0", "a-b", "-1", "1-2-3"):
        with pytest.raises(UsageError, match="--topology"):
            parse_topology(text)


def test_each_process_has_a_gpu_of_its_own_where_there_are_enough():
    assert place(2, 1, 4) == (["cuda:0", "cuda:1"], ["cuda:2"])
    assert place(1, 1, 1) == (["cuda:0"], ["cuda:0"])
    assert place(3, 2, 0) == (["cpu"] * 3, ["cpu"] * 2)
    with pytest.raises(UsageError, match="needs 3 GPUs, this machine has 2"):
        place(2, 1, 2)


def test_prediction():
    """Of two sides apart the slower counts; two that share a device share its time."""
    assert predict({"producer": 10, "consumer": 30}, ["a", "b"], ["c"]) == 20
    assert predict({"producer": 20, "consumer": 30}, ["a", "b"], ["c"]) == 30
    assert predict({"producer": 10, "consumer": 30}, ["a"], ["a"]) == pytest.approx(7.5)


def test_gpus_are_sampled_by_the_clock(tmp_path, monkeypatch):
    """Whatever nvidia-smi takes between two samples; a line cut short or without a figure counts for nothing."""
    begun = 1_800_000_000.0
    stamps = [datetime.fromtimestamp(begun + at).strftime("%Y/%m/%d %H:%M:%S.%f")[:-3] for at in range(4)]
    lines = [f"{stamp}, {gpu}, {10 * at + gpu}, 300.5, 1000" for at, stamp in enumerate(stamps) for gpu in (0, 1)]
    text = "\n".join([*lines, f"{stamps[2]}, 0, [N/A], 1, 1", f"{stamps[2]}, 0, 5"])
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho '{text}'\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    log = GpuLog(tmp_path / "gpus.csv")
    while "0, 5" not in (tmp_path / "gpus.csv").read_text():
        time.sleep(0.01)
    log.close()
    first, second = log.means(begun + 0.5, begun + 2.5)
    assert first == {"utilization.gpu": 15.0, "power.draw": 300.5, "memory.used": 1000.0}
    assert second["utilization.gpu"] == 16.0
    assert log.means(begun + 10, begun + 20) == []


def test_the_plan_against_what_was_measured(tmp_path, monkeypatch):
    """Of a run of Qwen3-8B's shape on two H200, one of which two processes share."""
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setattr(planner, "list_gpus", lambda: [planner.Gpu("NVIDIA H200", 141 * 2**30)] * 2)
    model = model_folder(tmp_path, "qwen3-8b")
    options = Options(token_budget=4096)
    rows = write_rows(tmp_path / "rows", model, options)
    devices = ["cuda:0", "cuda:1"], ["cuda:1"]
    run = write_run(tmp_path / "run.toml", model, rows, options, *devices, ["trainer.seed=3"])
    assert run.trainer.seed == load(tmp_path / "run.toml").trainer.seed == 3
    alone = {"producer": 10e3, "consumer": 30e3}
    result = Result("2-1", 10e3, 30e3, predict(alone, *devices), 12e3, 0.1, 0.9, 0.0, 0.0, 1.0)
    result.gpus = [{"memory.used": 60 * 1024.0}, {"memory.used": 20 * 1024.0}]
    result.rank_memory = {"tensors": 37.6 * 2**30, "reserved": 40 * 2**30}
    result.plan = against_plan(run, alone, result)
    given = result.plan["with_alone_rates"]
    assert given["tokens_per_s"] == pytest.approx(15e3) and result.predicted == pytest.approx(15e3)
    assert given["measured_of_it"] == pytest.approx(0.8)
    estimated = result.plan["estimated"]
    assert "estimated for NVIDIA H200" in estimated["source"] and estimated["worker"] > 20e3
    info = target_info(str(model))
    plan = planner.make_plan(run, info, resolve_layer_ids(run, info))
    shared, target = result.plan["memory"]
    assert (shared["gpu"], target["gpu"]) == (0, 1), "as nvidia-smi counts them"
    assert shared["planned"] == plan.rank.total + plan.worker.total and target["planned"] == plan.worker.total
    assert shared["measured_of_it"] == pytest.approx(60 * 2**30 / shared["planned"])
    cells = [next(iter(column.cells)) for column in plan_table([result]).columns]
    assert cells[0] == "2-1" and cells[3:5] == ["15.00K", "0.80"] and cells[6] == "60.0 20.0"
    assert cells[8] == "37.6, 40.0"


def test_queues_are_means_of_what_the_trainer_said_by_worker():
    """One that came later counts from then on; a status of before the first worker says nothing."""
    said = [
        None,
        {"names": ["w0"], "q_pre": [4], "q_hs": [0]},
        {"names": ["w0", "w1"], "q_pre": [1, 3], "q_hs": [1, 2]},
    ]
    step = {"kind": "train", "tokens": 100, "tokens_per_s": 1.0, "wait_data": 0.0, "wait_gpu": 1.0}
    step |= {"rank_wait": [0.0], "rank_idle": [0.0], "peak_memory": 1, "reserved_memory": 1}
    run = RunFile.model_validate({"target": {"path": "x"}, "data": {"rows": "y"}, "output": "z", "name": "q"})
    seen = [Sample([], status) for status in said]
    rates = {"producer": 1.0, "consumer": 1.0}
    result = measured(run, rates, [step | {"time": float(at)} for at in range(3)], (0.0, 2.0), seen, [])
    assert result.q_pre == {"w0": 2.5, "w1": 3.0} and result.q_hs == {"w0": 0.5, "w1": 2.0}
    assert result.queues == "1-1: q_pre, q_hs: w0 2.5, 0.5; w1 3.0, 2.0"
    assert Result("1-1", 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0).queues == ""


def test_no_estimate_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    model = model_folder(tmp_path, "smollm2-135m")
    options = Options(token_budget=512, max_length=256)
    rows = write_rows(tmp_path / "rows", model, options)
    run = write_run(tmp_path / "run.toml", model, rows, options, ["cpu"], ["cpu"])
    result = Result("1-1", 1e3, 1e3, 500.0, 400.0, 0.1, 0.9, 0.0, 0.0, 1.0)
    monkeypatch.setattr(planner, "list_gpus", list)
    result.plan = against_plan(run, {"producer": 1e3, "consumer": 1e3}, result)
    assert result.plan["estimated"] is None and result.plan["memory"] == []
    assert str(plan_table([result]).caption).startswith("no estimate: give --target-rate")


def test_an_unknown_shape_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"no such config \(gpt-oss-20b, qwen3-0.6b"):
        bench_pipeline(tmp_path / "out", "qwen9", ["1-1"], Options())


@pytest.mark.slow
def test_a_small_pipeline_on_a_cpu(tmp_path, make_tiny_target, monkeypatch):
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setattr("paceline.common.bench.gpu_count", lambda: 0)
    options = Options(seconds=3, warm_up=1, token_budget=512, max_length=256, layers=1, block_size=4, slots=2)
    (result,) = bench_pipeline(tmp_path / "out", str(make_tiny_target("qwen3")), ["1-1"], options)
    assert result.target_alone > 0 and result.trainer_alone > 0 and result.pipeline > 0
    assert result.predicted == pytest.approx(1 / (1 / result.target_alone + 1 / result.trainer_alone))
    assert 0 <= result.data_wait <= 1 and 0 <= result.rings_full <= 1
    assert 0 <= result.q_hs["w0"] <= options.slots and result.q_pre["w0"] >= 0
    (written,) = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert written["pipeline"] == result.pipeline and len(written["timeline"]) > 1
