"""Which side gets which GPU."""

from typing import Any

import pytest
from paceline.common import devices
from paceline.common.devices import assign_devices, check_ranks, gpu_count, spare_devices
from paceline.common.errors import ConfigError
from paceline.common.runfile import RunFile


def make_run(workers: dict[str, Any], trainer: dict[str, Any]) -> RunFile:
    return RunFile.model_validate(
        {
            "name": "r",
            "output": "/o",
            "target": {"path": "/t"},
            "data": {"files": ["/d"]},
            "workers": workers,
            "trainer": trainer,
        }
    )


@pytest.mark.parametrize(
    ("workers", "ranks", "gpus", "want_workers", "want_ranks"),
    [
        (2, 1, 0, ["cpu", "cpu"], ["cpu"]),
        (2, 1, 1, ["cuda:0", "cuda:0"], ["cuda:0"]),
        (3, 1, 2, ["cuda:0"] * 3, ["cuda:1"]),
        (3, 1, 4, ["cuda:0", "cuda:1", "cuda:2"], ["cuda:3"]),
        (5, 3, 8, [f"cuda:{i}" for i in range(5)], ["cuda:5", "cuda:6", "cuda:7"]),
        (1, 3, 2, ["cuda:0"], ["cuda:1"] * 3),
        (1, 1, 8, ["cuda:0"], ["cuda:1"]),
    ],
)
def test_defaults(workers: int, ranks: int, gpus: int, want_workers: list[str], want_ranks: list[str]) -> None:
    run = make_run({"count": workers}, {"ranks": ranks})
    assert assign_devices(run, gpus) == (want_workers, want_ranks)


def test_the_run_file_decides() -> None:
    run = make_run({"count": 3, "devices": ["cuda:1", "cpu"]}, {"ranks": 2})
    assert assign_devices(run, 3) == (["cuda:1", "cpu", "cuda:1"], ["cuda:0", "cuda:2"])
    run = make_run({"count": 2}, {"ranks": 1, "devices": ["cuda:0"]})
    assert assign_devices(run, 3) == (["cuda:1", "cuda:2"], ["cuda:0"])
    assert assign_devices(run, 1) == (["cuda:0", "cuda:0"], ["cuda:0"])


def test_workers_beyond_those_of_the_run_file_go_through_its_devices() -> None:
    """Also through those that its own workers leave over."""
    run = make_run({"count": 2, "devices": ["cuda:0", "cuda:1", "cuda:4"]}, {"ranks": 1})
    assert assign_devices(run, 6, workers=5).workers == ["cuda:0", "cuda:1", "cuda:4", "cuda:0", "cuda:1"]
    assert spare_devices(run, ["cuda:0", "cuda:1"], 6) == [], "the run file says where"
    assert assign_devices(make_run({"count": 2}, {"ranks": 1}), 3, workers=3).workers == ["cuda:0", "cuda:1", "cuda:0"]


def test_spare_gpus_are_those_that_nobody_of_the_run_has() -> None:
    run = make_run({"count": 1}, {"ranks": 1})
    assert spare_devices(run, ["cuda:0"], 4) == ["cuda:2", "cuda:3"], "the rank has cuda:1"
    assert spare_devices(run, ["cuda:0", "cuda:3"], 4) == ["cuda:2"]
    assert spare_devices(run, ["cuda:0"], 2) == [] == spare_devices(run, ["cpu"], 0)
    run = make_run({"count": 1, "gpus_per_worker": 2}, {"ranks": 1, "devices": ["cuda:2"]})
    assert assign_devices(run, 8) == (["cuda:0"], ["cuda:2"])
    assert spare_devices(run, ["cuda:0"], 8) == ["cuda:3", "cuda:5"], "two beside each other for each"


def test_ranks_take_the_gpus_of_added_workers_last() -> None:
    run = make_run({"count": 1}, {"ranks": 2})
    assert assign_devices(run, 4).ranks == ["cuda:1", "cuda:2"]
    assert assign_devices(run, 4, avoid=["cuda:2"]).ranks == ["cuda:1", "cuda:3"]
    assert assign_devices(run, 3, avoid=["cuda:2"]).ranks == ["cuda:1", "cuda:2"], "rather than both on one"
    named = make_run({"count": 1}, {"ranks": 1, "devices": ["cuda:2"]})
    assert assign_devices(named, 4, avoid=["cuda:2"]).ranks == ["cuda:2"]
    one = make_run({"count": 1}, {"ranks": 1})
    assert spare_devices(one, ["cuda:0", "cuda:2"], 4) == ["cuda:3"], "the rank is where it was before cuda:2 was given"


def test_a_gpu_takes_one_rank() -> None:
    check_ranks(["cuda:0", "cuda:1"])
    check_ranks(["cpu", "cpu"])
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 3: cuda:1 would have 2 of them, .*\(trainer\.devices\)"):
        check_ranks(["cuda:1", "cuda:0", "cuda:1"])


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("2", 1), ("0,1", 2), ("0,9,1", 1), ("GPU-aa,GPU-bb", 2), ("0,-1,1", 1)],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    monkeypatch.setattr(devices, "installed_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == count


def test_no_driver_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "installed_gpus", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu_count() == 0


def test_the_only_visible_gpu_is_used_whatever_the_run_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "installed_gpus", lambda: 8)
    run = make_run({"count": 3, "devices": ["cuda:5", "cpu"]}, {"ranks": 1, "devices": ["cuda:7"]})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    assert assign_devices(run) == (["cuda:0", "cpu", "cuda:0"], ["cuda:0"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    assert assign_devices(run) == (["cuda:5", "cpu", "cuda:5"], ["cuda:7"])


@pytest.mark.parametrize(
    ("visible", "device", "label"),
    [
        (None, "cuda:1", "cuda:1"),
        ("", "cuda:1", "cuda:1"),
        ("6", "cuda:0", "cuda:0 (GPU 6)"),
        ("6, 2", "cuda:1", "cuda:1 (GPU 2)"),
        ("0,1", "cuda:1", "cuda:1"),
        ("6", "cuda", "cuda (GPU 6)"),
        ("6", "cuda:3", "cuda:3"),
        ("6", "cpu", "cpu"),
        ("GPU-8f3a1c2e-1111", "cuda:0", "cuda:0 (GPU-8f3a1c2e)"),
    ],
)
def test_labels_name_the_gpu(monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, label: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.device_label(device) == label
