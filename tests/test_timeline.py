"""Profiles: what a trace says of streams, copies and kernels, its picture, and a real one of a few steps."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paceline.common import timeline
from paceline.common.errors import ConfigError
from paceline.common.timeline import Span, Steps, kind_of, own, read_spans, show, summarise
from rich.console import Console


def kernel(name, start, duration, stream=7, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "args": {"device": 0, "stream": stream}}


@pytest.fixture
def trace(tmp_path):
    """A millisecond: a matmul of 600 us in two calls, attention of 200, a copy that is half under them, 100 us idle."""
    events = [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "tid": 1},
        kernel("nvjet_tst_128x256", 0, 300),
        kernel("nvjet_tst_128x256", 300, 300),
        kernel("Memcpy HtoD (Pinned -> Device)", 500, 300, stream=13, cat="gpu_memcpy"),
        kernel("flash_fwd_kernel", 800, 200),
    ]
    path = tmp_path / "step.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::add", "other"),
        ("triton_poi_fused_mul_silu_3", "other"),
        ("triton_tem_fused_0", "attention"),
        ("void flash::flash_fwd_kernel", "attention"),
        ("_cross_entropy_kernel", "loss"),
        ("Memcpy DtoH (Device -> Pinned)", "copy from GPU"),
        ("Memcpy DtoD (Device -> Device)", "copy inside"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimiser"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_a_trace_with_a_gpu_is_its_streams_and_not_the_host(trace):
    spans = read_spans(trace)
    assert {span.lane for span in spans} == {"GPU 0, stream 7", "GPU 0, stream 13"}
    found = summarise(spans)
    assert found.seconds == pytest.approx(1e-3)
    assert found.computing == pytest.approx(0.8)
    assert found.copies == {"copy to GPU": (pytest.approx(3e-4), pytest.approx(1 / 3))}
    assert found.kernels[0] == ("nvjet_tst_128x256", 2, pytest.approx(6e-4))
    assert found.by_kind["attention"] == pytest.approx(2e-4)


def test_an_operator_counts_less_what_it_calls():
    def span(name, start, end):
        return Span("", name, "other", start, end)

    pieces = list(own([span("inner", 2, 4), span("outer", 0, 10), span("last", 4, 5), span("next", 10, 11)]))
    assert [(p.name, p.start, p.end, p.call) for p in pieces] == [
        ("outer", 0, 2, True),
        ("inner", 2, 4, True),
        ("last", 4, 5, True),
        ("outer", 5, 10, False),
        ("next", 10, 11, True),
    ]


def test_the_picture_and_the_largest_kernels(trace, capsys):
    (picture,) = show([trace], Console(width=120))
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.name == "step.png"
    said = capsys.readouterr().out
    assert "computing 80.0%" in said and "copy to GPU: 0.3 ms, 33.3% of it under computation" in said
    assert said.index("nvjet") < said.index("Memcpy") < said.index("flash_fwd")


def test_what_is_no_trace_is_named(tmp_path):
    path = tmp_path / "x.json.gz"
    path.write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"x\.json\.gz: no trace"):
        read_spans(path)
    command = [sys.executable, "-m", "paceline.common.timeline", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and result.stderr.startswith("paceline: ") and result.stderr.count("\n") == 1


def test_steps_are_recorded_once_and_only_where_asked_for(tmp_path, monkeypatch):
    import torch

    monkeypatch.delenv(timeline.ENVIRONMENT, raising=False)
    assert Steps.from_environment("rank0") is None
    monkeypatch.setenv(timeline.ENVIRONMENT, str(tmp_path / "traces"))
    steps = Steps.from_environment("rank0")
    assert steps is not None
    for _ in range(timeline.FIRST + 2 * timeline.COUNT):
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        steps.step_done()
    (trace,) = Path(tmp_path / "traces").iterdir()
    assert trace.name == f"rank0-{os.getpid()}.json.gz"
    (calls,) = [calls for name, calls, _ in summarise(read_spans(trace)).kernels if name == "aten::mm"]
    assert calls == timeline.COUNT
