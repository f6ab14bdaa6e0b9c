"""Two ranks over gloo: the same on both, and an error, not a hang, when the other is gone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from paceline.common import paths
from paceline.consumer import rank
from paceline.consumer.group import LocalGroup
from paceline.consumer.job import RankJob

RANK = """
import json, os, sys
import numpy as np, torch
from pathlib import Path
from paceline.consumer.group import GroupError, TorchGroup
rank = int(sys.argv[1])
group = TorchGroup(rank, 2, Path(sys.argv[2]), "cpu")
told = group.all_gather({"rank": rank, "text": "x" * (1 + 100 * rank), "nan": float("nan")})
host, tensor = np.array([1.5, rank]), torch.full((3,), float(rank + 1))
group.all_reduce(host)
group.all_reduce(tensor)
lengths = [[one["rank"], len(one["text"])] for one in told]
print(json.dumps({"told": lengths, "host": host.tolist(), "tensor": tensor.tolist()}))
sys.stdout.flush()
if rank == 1:
    os._exit(0)
try:
    while True:
        group.all_gather(0)
except GroupError as error:
    print(json.dumps(str(error)))
os._exit(0)
"""


def test_one_rank_is_itself():
    group = LocalGroup()
    values = np.array([1.0, 2.0])
    group.all_reduce(values)
    assert group.all_gather({"a": 1}) == [{"a": 1}]
    assert values.tolist() == [1.0, 2.0]


def test_torch_is_set_up_before_a_group_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    names = (*paths.COMPILE_CACHES, *paths.ALLOCATOR)
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is taken back afterwards
        monkeypatch.delenv(name)
    wanted = paths.torch_environment()
    found: list[dict[str, str]] = []
    monkeypatch.setattr(rank, "TorchGroup", lambda *_: found.append({name: os.environ[name] for name in wanted}))
    rank.join_group(cast(RankJob, SimpleNamespace(rank=0, world=2, store="store", device="cpu")))
    assert found == [wanted] and len(wanted) == 3


@pytest.mark.slow
def test_two_ranks_over_gloo(tmp_path: Path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "group")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, second = (json.loads(output[0]) for output in outputs)
    assert first == second == {"told": [[0, 1], [1, 101]], "host": [3.0, 1.0], "tensor": [3.0, 3.0, 3.0]}
    assert "another rank is gone" in json.loads(outputs[0][1])
