"""The log line, metrics and status.json."""

import json
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from paceline.common import telemetry
from paceline.common.telemetry import (
    Metrics,
    StatusWatch,
    bottleneck,
    duration,
    log_line,
    read_metrics,
    read_status,
    write_status,
)

VALUES = {
    "elapsed_s": 725,
    "step": 15000,
    "loss": 1.2341,
    "acc": 0.412,
    "tau": 3.21,
    "lr": 6e-4,
    "target_bps": 0.24,
    "drafter_bps": 0.241,
    "tokens_per_s": 15930.0,
    "q_pre": [4, 4, 5],
    "q_hs": [1, 0, 2],
    "epoch": 0.42,
    "eta_s": 7.9 * 86400,
    "wait_data": 0.03,
    "wait_gpu": 0.91,
}


def test_log_line() -> None:
    assert log_line(VALUES) == (
        "[12m] step=15000 loss=1.234 acc=0.41 tau=3.2 lr=6.0e-04 | tgt=0.24b/s dft=0.24b/s (15.9Ktok/s) | "
        "q_pre=[4,4,5] q_hs=[1,0,2] | epoch~0.42 ETA=7.9d | wait: data 3% gpu 91%"
    )


def test_log_line_of_nothing_known() -> None:
    assert log_line({"step": 0, "q_hs": []}) == (
        "[-] step=0 loss=- acc=- tau=- lr=- | tgt=-b/s dft=-b/s (-Ktok/s) | q_pre=[] q_hs=[] | epoch~- ETA=- | "
        "wait: data - gpu -"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (5400, "1.5h"), (86400, "1.0d"), (None, "-"), (1e400, "-")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_without_gpus_none_is_to_be_moved() -> None:
    status = {"target_bps": 1.0, "drafter_bps": 0.5, "worker_wait": 0.5, "wait_data": 0.0, "workers": 2, "ranks": 1}
    assert "(move one GPU from targets to drafters: +" in bottleneck(status)
    assert "move one GPU from targets to drafters: +" in bottleneck({**status, "gpus": True})
    assert bottleneck({**status, "gpus": False}).endswith("of their time (add ranks)")


def test_bottleneck_names_the_slower_side() -> None:
    assert bottleneck({}) == ""
    assert "targets are the bottleneck" in bottleneck({"wait_data": 0.4, "worker_wait": 0.0})
    assert "drafters are the bottleneck" in bottleneck({"wait_data": 0.02, "worker_wait": 0.6})
    assert bottleneck({"wait_data": 0.02, "worker_wait": 0.03}) == "balanced: neither side waits for the other"


def test_status_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_status(path) is None
    write_status(path, {"step": 3, "loss": float("nan"), "q_hs": [1, 2]})
    assert json.loads(path.read_text()) == {"step": 3, "loss": None, "q_hs": [1, 2]}
    assert read_status(path) == {"step": 3, "q_hs": [1, 2]}
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
    path.write_text("{half")
    assert read_status(path) is None


def test_a_status_is_present_while_it_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "status.json", [100.0]
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: clock[0])
    write_status(path, {"step": 1, "updated": 5000.0})
    watch = StatusWatch(path)
    assert watch.present() is None, "nobody knows how old it is"
    for step, updated in ((2, 5001.0), (3, 1400.0), (4, 9000.0)):  # set back an hour, then forward
        write_status(path, {"step": step, "updated": updated})
        assert watch.present() == {"step": step, "updated": updated}
    clock[0] += telemetry.STALE_SECONDS
    assert watch.present() is None
    write_status(path, {"step": 5, "updated": 9001.0})
    assert watch.present() is not None
    watch.forget()
    assert watch.present() is None


def test_values_of_another_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    wrong = {"step": "3", "loss": "low", "q_hs": [1, "2"], "names": "w0", "updated": None, "state": 7, "listed": True}
    path.write_text(json.dumps(wrong | {"epoch": 1, "later": {"any": 1}}))
    assert read_status(path) == {"epoch": 1, "later": {"any": 1}}


def test_metrics_keep_the_surviving_timeline(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.write(step, {"loss": 1 / step, "acc_slot": [0.5, 0.25]})
    with open(tmp_path / telemetry.METRICS_FILE, "a") as file:
        file.write('{"step":6,"los')  # killed here
    with Metrics(tmp_path, start=3) as metrics:
        metrics.write(4, {"loss": float("inf")})
        metrics.write(4, {"tau": 1.5}, kind="eval")
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["kind"]) for line in lines if line["kind"] != "event"] == [
        (1, "train"),
        (2, "train"),
        (3, "train"),
        (4, "train"),
        (4, "eval"),
    ]
    assert lines[-2]["loss"] is None
    assert lines[1]["acc_slot"] == [0.5, 0.25]


def test_a_full_disk_does_not_stop_metrics(tmp_path: Path) -> None:
    (tmp_path / telemetry.METRICS_FILE).symlink_to("/dev/full")
    warnings: list[str] = []
    with Metrics(tmp_path, warn=warnings.append) as metrics:
        metrics.write(1, {"loss": 1.0})
        metrics.write(2, {"loss": 1.0})
    assert len(warnings) == 1 and "No space left" in warnings[0]


def test_tensorboard(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    with Metrics(tmp_path, tensorboard=True) as metrics:
        metrics.write(7, {"loss": 0.5, "acc_slot": [0.5, 0.25], "note": "text"})
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = {
        value.tag: (event.step, value.tensor.float_val[0])
        for event in loader.EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert values == {"train/loss": (7, 0.5), "train/acc_slot/1": (7, 0.5), "train/acc_slot/2": (7, 0.25)}


class _WandbRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.finished = threading.Event()

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished.set()


def _stand_in_wandb(monkeypatch: pytest.MonkeyPatch, init) -> None:
    module = ModuleType("wandb")
    module.init = init  # pyright: ignore[reportAttributeAccessIssue]
    module.util = ModuleType("util")  # pyright: ignore[reportAttributeAccessIssue]
    module.util.generate_id = lambda: "abc"  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_wandb_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    run = _WandbRun()
    _stand_in_wandb(monkeypatch, lambda **settings: calls.append(settings) or run)
    for _ in range(2):
        with Metrics(tmp_path, wandb="project", name="demo", config={"a": 1}) as metrics:
            metrics.write(1, {"loss": 0.5})
    assert [call["id"] for call in calls] == ["abc", "abc"] and calls[0]["resume"] == "allow"
    assert run.logged[1] == {"train/loss": 0.5, "step": 1} and run.finished.is_set()


def test_failing_sinks_are_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("no network")

    _stand_in_wandb(monkeypatch, refuse)
    warnings: list[str] = []
    with Metrics(tmp_path, wandb="project", warn=warnings.append) as metrics:
        for step in range(3000):  # more than the queue holds
            metrics.write(step, {"loss": 0.5})
    assert warnings == ["W&B is off for the rest of this run: RuntimeError: no network"]
    assert len(read_metrics(tmp_path)) == 3001


def test_a_hanging_sink_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    _stand_in_wandb(monkeypatch, lambda **_: never.wait())
    warnings: list[str] = []
    metrics = Metrics(tmp_path, wandb="project", warn=warnings.append)
    for step in range(3000):
        metrics.write(step, {"loss": 0.5})
    metrics.close(seconds=0.05)
    assert len(warnings) == 1 and "did not finish" in warnings[0]
    never.set()


def test_a_missing_package_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    warnings: list[str] = []
    with Metrics(tmp_path, wandb="project", warn=warnings.append) as metrics:
        metrics.write(1, {"loss": 0.5})
    assert "W&B is off" in warnings[0]
    assert json.loads((tmp_path / telemetry.METRICS_FILE).read_text().splitlines()[-1])["loss"] == 0.5
