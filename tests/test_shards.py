"""A target over two processes by tensor parallelism gives one process's states, and ends when a share of it is lost."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from paceline.common.devices import assign_devices, shard_devices
from paceline.common.errors import ConfigError
from paceline.common.runfile import RunFile
from paceline.common.target import Target

PEER = Path(__file__).parent / "shard_peer.py"
LAYER_IDS = [0, 2, 3]
LENGTHS = [9, 40, 23, 38, 21]

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="transformers' tensor parallel plan needs accelerate"
)


def run_file(target, shards=2, **workers):
    return RunFile.model_validate(
        {
            "name": "toy",
            "output": "out",
            "target": {"path": str(target), "dtype": "float32", "layer_ids": LAYER_IDS},
            "data": {"rows": "rows", "max_length": 64},
            "stream": {"token_budget": 256},
            "workers": {"gpus_per_worker": shards, "threads": 1, **workers},
        }
    )


@pytest.fixture
def batch():
    tokens = np.random.default_rng(0).integers(0, 512, sum(LENGTHS)).astype(np.int32)
    return tokens, np.array([0, *np.cumsum(LENGTHS)], np.int32)


@pytest.fixture
def peer(tmp_path, batch):
    """peer(run, *arguments) -> the finished process; its states are in tmp_path/batch.npz."""
    np.savez(tmp_path / "batch.npz", tokens=batch[0], cu_seqlens=batch[1])

    def start(run, *arguments):
        (tmp_path / "run.json").write_text(json.dumps(run.model_dump()))
        command = [sys.executable, str(PEER), str(tmp_path / "run.json"), str(tmp_path / "batch.npz"), *arguments]
        (tmp_path / "runtime").mkdir(mode=0o700)
        environment = {**os.environ, "PACELINE_RUNTIME_DIR": str(tmp_path / "runtime"), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    return start


@needs_accelerate
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [("qwen3", "packed"), ("gemma2", "padded")])
def test_two_processes_give_the_states_of_one(make_tiny_target, peer, batch, tmp_path, kind, mode):
    """Also of a target that cannot be packed: what one process tries and finds so, the other finds as well."""
    folder = make_tiny_target(kind)
    done = peer(run_file(folder))
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "batch.npz")
    target = Target.load(str(folder), dtype="float32")
    states = torch.empty(len(LAYER_IDS), len(batch[0]), 64)

    def sink(plane, part, first):
        states[plane, first : first + len(part)] = part

    target.forward_states(torch.from_numpy(batch[0]), batch[1].tolist(), LAYER_IDS, sink)
    assert found["mode"] == mode
    for way in ("packed", "padded") if mode == "packed" else ("padded",):
        recorded = torch.from_numpy(found[way]).view(len(LAYER_IDS), -1, 64)
        torch.testing.assert_close(recorded, states, rtol=1e-4, atol=1e-4)
    assert not list((tmp_path / "runtime" / "toy").glob("shards-*"))


@needs_accelerate
@pytest.mark.slow
def test_a_lost_share_ends_the_worker_in_one_line(tiny_target_dir, peer):
    done = peer(run_file(tiny_target_dir), "kill")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "share" in line]
    assert lines == ["the process of cpu, share 1 of the target, was killed by SIGKILL"]


def test_heads_that_cannot_be_shared_and_a_missing_package_are_named(tiny_target_dir, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "accelerate" or find(name, *rest))
    with pytest.raises(ConfigError, match="3 GPUs cannot share 4 heads and 2 key-value heads"):
        Target.load(str(tiny_target_dir), dtype="float32", shards=3)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(ConfigError, match=r"needs accelerate: pip install 'paceline\[tensor-parallel\]'"):
        Target.load(str(tiny_target_dir), dtype="float32", shards=2)


@pytest.mark.parametrize(
    ("workers", "devices", "gpus", "want_workers", "want_ranks"),
    [
        (1, None, 4, ["cuda:0"], ["cuda:2"]),
        (2, None, 8, ["cuda:0", "cuda:2"], ["cuda:4"]),
        (3, None, 4, ["cuda:0"] * 3, ["cuda:2"]),
        (2, ["cuda:2", "cuda:4"], 6, ["cuda:2", "cuda:4"], ["cuda:0"]),
        (2, None, 0, ["cpu"] * 2, ["cpu"]),
    ],
)
def test_a_workers_gpus_follow_each_other(tmp_path, workers, devices, gpus, want_workers, want_ranks):
    run = run_file(tmp_path, count=workers, devices=devices or [])
    assert assign_devices(run, gpus) == (want_workers, want_ranks)
    assert shard_devices(run, "cuda:2") == ["cuda:2", "cuda:3"] and shard_devices(run, "cpu") == ["cpu"] * 2


def test_fp8_is_refused(tmp_path):
    values = run_file(tmp_path).model_dump()
    values["target"] |= {"fp8": True, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"target\.fp8 and workers\.gpus_per_worker above 1 do not go together"):
        RunFile.model_validate(values)
