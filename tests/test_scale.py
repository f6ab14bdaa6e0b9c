"""Workers added to and removed from a live run, through the supervisor's control socket.

The runs are real processes on stamped states (live.py): what ends with a clean audit lost nothing and doubled nothing.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Live, live_settings
from paceline.common import control, paths, scale, units
from paceline.common.cli import main
from paceline.common.errors import ConfigError, PacelineError, UsageError
from paceline.common.fingerprint import Fingerprint
from paceline.common.ring import Ring
from paceline.common.runfile import RunFile, to_toml
from paceline.common.scale import Wanted
from paceline.common.telemetry import write_status
from paceline.consumer import checkpoint as ck
from paceline.consumer.audit import audit
from paceline.consumer.trainer import rank_devices


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    settings = live_settings(tmp_path)
    settings["trainer"]["epochs"] = 1000  # until it is stopped
    live = Live(tmp_path, settings)
    yield live
    live.kill()


def finish(live: Live) -> None:
    """To the end of the run; every batch trained once and no ring with anything in it."""
    live.open()
    live.ended()
    newest, skipped = ck.newest_complete(paths.checkpoint_dir(live.run))
    assert newest is not None and not skipped
    report = audit(newest)
    assert report.clean and report.finished and report.planned == report.trained, report.text()
    assert not any(set(ring.states) - {"free"} for ring in live.rings())


def stopped(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    """Through `paceline stop`, with a checkpoint that proves that nothing was lost or doubled up to there."""
    assert main(["stop", "live"]) == 0
    assert capsys.readouterr().out.endswith("live has stopped\n")
    live.ended()
    newest, skipped = ck.newest_complete(paths.checkpoint_dir(live.run))
    assert newest is not None and not skipped
    report = audit(newest)
    assert report.clean and report.step >= max(live.steps()), report.text()


def scaled(live: Live, count: int, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["scale", str(live.path), str(count), *options]) == 0, capsys.readouterr().err + live.log()
    return capsys.readouterr().out


@pytest.mark.slow
def test_one_to_three_to_one(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    live.start(LIVE_WORKER={"seconds": 0.03, "warm": 0.3})
    live.step_reached(2)
    (first,) = live.pids().values()
    said = scaled(live, 3, capsys)
    assert said.startswith("3 workers: starts w1, w2\n")
    assert "w1 loads and warms up\n" in said and "w2 is ready (pid " in said
    assert sorted(live.pids()) == ["w0", "w1", "w2"]
    live.wait_for(lambda: all(ring.produced for ring in live.rings()))
    said = scaled(live, 1, capsys)
    assert "1 worker: removes w1, w2" in said
    assert "w1 is gone" in said and "w2 is gone" in said
    assert live.ring_names() == ["w0.ring"]
    assert live.pids() == {"w0": first}, "the one that stays was not touched"
    stopped(live, capsys)
    live.settings["trainer"]["max_steps"] = max(live.steps()) + 2
    live.start()
    finish(live)
    assert not paths.wanted_path(paths.run_dir("live")).exists()


@pytest.mark.slow
def test_workers_are_added_where_gpus_are_idle(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine that says it has four GPUs; w0 has the first and the rank the second. The places outlive the run."""
    tool = live.folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nfor n in 0 1 2 3; do echo GPU $n: stand-in; done\n")
    tool.chmod(0o755)
    live.environment["PATH"] = f"{tool.parent}:{os.environ['PATH']}"
    for side in ("workers", "trainer"):
        live.settings[side].pop("devices", None)
    live.start(LIVE_WORKER={"seconds": 0.03})
    live.step_reached(2)
    said = scaled(live, 4, capsys)
    assert said.startswith("4 workers: starts w1, w2, w3; w3 shares cuda:0 with w0\n")
    for line in ("w1 is ready on cuda:2 (pid ", "w2 is ready on cuda:3 (pid ", "w3 is ready (pid "):
        assert line in said
    assert scaled(live, 2, capsys).startswith("2 workers: removes w2, w3\n")
    assert Wanted.read(paths.run_dir("live"), 1) == Wanted(2, {1: "cuda:2"})
    stopped(live, capsys)
    live.start(LIVE_WORKER={"seconds": 0.03})
    live.wait_for(lambda: any(ring.worker == "w1" and ring.alive for ring in live.rings()))
    assert "--device cuda:2" in Path(f"/proc/{live.pids()['w1']}/cmdline").read_text().replace("\0", " ")
    live.settings["trainer"]["devices"] = ["cuda:3"]
    live.path.write_text(to_toml(live.run))
    assert main(["restart", str(live.path)]) == 0, live.log()
    said = scaled(live, 3, capsys)
    assert "w2 is ready on cuda:1 (pid " in said, "the rank is where the run file says now"
    stopped(live, capsys)


@pytest.mark.slow
def test_two_to_none_to_two(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    live.settings["workers"]["count"] = 2
    live.settings["stream"]["order"] = "strict"
    live.start(LIVE_WORKER={"seconds": 0.03})
    live.step_reached(2)
    said = scaled(live, 0, capsys)
    assert "0 workers: removes w0, w1" in said
    assert live.pids() == {}
    assert live.ring_names() == [] or re.search("which stays? in the rings until workers are there again", said)
    said = scaled(live, 2, capsys)
    assert "2 workers: starts w0, w1" in said
    assert sorted(live.pids()) == ["w0", "w1"]
    reached = max(live.steps())
    live.step_reached(reached + 2)
    stopped(live, capsys)


@pytest.mark.slow
def test_an_added_worker_that_does_not_come_up_is_given_up(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    """No room for its ring, say: the live run goes on with what it has."""
    live.start(LIVE_WORKER={"seconds": 0.03, "fail": {"1": 78, "2": 1}}, LIVE_POLICY={"first_pause": 0.05})
    live.step_reached(1)
    before = live.pids()
    assert main(["scale", "live", "2"]) == 1
    shown = capsys.readouterr()
    assert "worker w1 did not come up (failed): out of memory; its log: " in shown.err
    assert main(["scale", "live", "3"]) == 1
    assert "did not come up (failed)" in capsys.readouterr().err
    live.wait_for(lambda: "w2 ended with exit code 1: 3 times in a row right after its start" in live.log())
    assert "the run goes on without w2" in live.log()
    assert scaled(live, 1, capsys).startswith("1 worker: removes w1, w2\n")
    reached = max(live.steps())
    live.step_reached(reached + 2)
    assert live.pids() == before
    stopped(live, capsys)


@pytest.mark.slow
def test_a_killed_supervisor_comes_back_with_as_many(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    live.start(LIVE_WORKER={"seconds": 0.03})
    live.step_reached(1)
    scaled(live, 2, capsys)
    live.kill()
    live.wait_for_children()
    live.start()
    live.wait_for(lambda: "2 workers, as it was scaled to; workers.count is 1" in live.log())
    live.wait_for(lambda: sorted(live.pids()) == ["w0", "w1"])
    reached = max(live.steps())
    live.step_reached(reached + 1)
    live.kill()
    live.wait_for_children()
    live.settings["workers"]["count"] = 3
    live.settings["trainer"]["max_steps"] = max(live.steps()) + 3
    live.start()
    live.wait_for(lambda: sorted(live.pids()) == ["w0", "w1", "w2"])
    finish(live)


# Ranks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "ranks"), [(5, 3), (6, 2)])
def test_every_rank_gets_as_much(live: Live, workers: int, ranks: int) -> None:
    """With steps that do not divide by the ranks: none idles more than another."""
    live.settings["workers"]["count"] = workers
    live.settings["trainer"] |= {"ranks": ranks, "batches_per_step": 5, "epochs": 2}
    live.start(LIVE_WORKER={"seconds": 0.05}, STANDIN_LEARNER={"seconds": 0.02})
    finish(live)
    by_rank = [sum(rank) for rank in zip(*(line["rank_records"] for line in live.metrics()), strict=True)]
    assert len(by_rank) == ranks
    assert max(by_rank) - min(by_rank) <= 2, "one at most in each epoch"


@pytest.mark.slow
def test_who_waits_for_a_slow_rank_says_so(live: Live) -> None:
    """As idle, not as waiting for data; the slow one itself waits for nobody."""
    live.settings["trainer"] |= {"ranks": 2, "max_steps": 6, "epochs": 1}
    live.settings["evaluation"] = {"every_steps": 0, "at_end": False}
    live.start(STANDIN_LEARNER={"slow": {"1": 0.3}})
    finish(live)
    lines = [line for line in live.metrics() if line["rank_records"] == [1, 1]]
    assert lines and all(min(line["rank_idle"]) == 0.0 for line in lines)
    assert sum(line["rank_idle"][0] > line["rank_idle"][1] for line in lines) > len(lines) / 2
    for line in lines:
        assert line["wait_ranks"] == pytest.approx(sum(line["rank_idle"]) / 2)
        assert line["reduce_share"] == pytest.approx(line["reduce_s"] / line["seconds"]) and line["reduce_s"] == 0.001


@pytest.mark.slow
def test_ranks_killed_and_stopped_in_a_sum_over_ranks(live: Live) -> None:
    """Over gloo: the trainer ends within its bounds and is started again, the worker is left alone."""
    live.settings["trainer"] |= {"ranks": 2, "epochs": 1, "hang_seconds": 6}
    live.settings["checkpoint"]["every_steps"] = 1
    killed, stopped = live.folder / "killed", live.folder / "stopped"
    stops = [(4, 1, "SIGKILL", str(killed)), (8, 0, "SIGSTOP", str(stopped))]
    live.start(LIVE_RANK="rank-gloo", STANDIN_LEARNER={"stops": stops, "seconds": 0.02})
    live.wait_for(killed.exists)
    workers = live.pids()
    live.step_reached(6)
    live.wait_for(stopped.exists)
    live.step_reached(10)
    assert live.pids() == workers
    finish(live)
    assert "rank 1 was killed by SIGKILL" in live.log()
    assert "no progress for 6 s (trainer.hang_seconds): rank 0 (step)" in live.log()
    assert live.log().count("trainer started again") == 2


@pytest.mark.slow
def test_a_resumed_trainer_has_no_record_made_again_that_is_in_a_ring(live: Live) -> None:
    live.settings["workers"]["count"] = 2
    live.settings["trainer"]["epochs"] = 1
    live.settings["evaluation"] = {"every_steps": 0, "at_end": False}
    live.settings["checkpoint"]["every_steps"] = 4
    live.start(STANDIN_LEARNER=live.gated(6))
    live.step_reached(6)
    live.wait_for(lambda: all(ring.count("ready") + ring.count("taken") == 3 for ring in live.rings()))
    live.wait_for(lambda: ck.newest_complete(paths.checkpoint_dir(live.run))[0])
    before = {ring.worker: ring.produced for ring in live.rings()}
    trainer = int(paths.consumer_lock(live.run).read_text().split()[0])
    os.kill(trainer, signal.SIGKILL)
    live.wait_for(lambda: "resuming run live-" in live.log())
    found = re.search(r"resuming run live-\w+ at step (\d+)", live.log())
    assert found is not None
    finish(live)
    newest, _ = ck.newest_complete(paths.checkpoint_dir(live.run))
    assert newest is not None
    undone = audit(newest).planned - 2 * int(found[1])
    made = sum(ring.produced - before[ring.worker] for ring in live.rings())
    assert made == undone - 6, "the six records that were in the rings were used as they were"


@pytest.mark.slow
def test_another_number_of_ranks_on_a_live_run(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the trainer restarts, by the run file as it is then; nothing is lost or trained twice."""
    live.settings["checkpoint"]["every_steps"] = None
    live.start(LIVE_WORKER={"seconds": 0.03})
    live.step_reached(3)
    workers = live.pids()
    live.path.write_text(live.path.read_text().replace('name = "live"', 'name = "other"'))
    assert main(["restart", "live"]) == 78
    assert "name, output and stream.ring_dir of a live run must stay" in capsys.readouterr().err
    live.path.write_text("ranks = ")
    assert main(["restart", "live"]) == 78, "the run goes on with what it has"
    assert "run.toml: not TOML" in capsys.readouterr().err
    for ranks in (2, 1):
        live.settings["trainer"]["ranks"] = ranks
        live.path.write_text(to_toml(live.run))
        assert main(["restart", "live"]) == 0, live.log()
        said = capsys.readouterr().out
        assert said.startswith("the trainer restarts") and "trainer is ready (pid " in said
        reached = max(live.steps())
        live.step_reached(reached + 2)
        assert len(live.metrics()[-1]["rank_records"]) == ranks
    assert live.pids() == workers
    assert live.steps() == list(range(1, len(live.steps()) + 1)), "each step once, none undone"
    live.settings["trainer"]["seed"] = 5
    live.path.write_text(to_toml(live.run))
    assert main(["restart", "live"]) == 1
    assert re.search(r"run live (is stopping: .*seed.*|ended meanwhile)", capsys.readouterr().err)
    live.wait_for(lambda: not live.pids())


# The parts ------------------------------------------------------------------------------------------------------------


def test_wanted_is_kept_until_the_run_file_is_edited(tmp_path: Path) -> None:
    Wanted(2).scaled(5, {3: "cuda:6", 4: "cuda:7"}).write(tmp_path, 2)
    assert Wanted.read(tmp_path, 2) == Wanted(5, {3: "cuda:6", 4: "cuda:7"})
    assert Wanted.read(tmp_path, 3) == Wanted(3)
    assert Wanted.read(tmp_path, 2).scaled(4, {0: "cuda:1"}) == Wanted(4, {0: "cuda:1", 3: "cuda:6"})
    for text in ("", "[]", '{"count": 4}', '{"count": -1, "run_file_count": 2, "devices": {}}'):
        paths.wanted_path(tmp_path).write_text(text)
        assert Wanted.read(tmp_path, 2) == Wanted(2)


def test_only_rings_above_the_count_and_without_owner_are_retired(tmp_path: Path) -> None:
    rings = {}
    for worker in ("w0", "w1", "w2", "w10", "other"):
        path = tmp_path / f"{worker}.ring"
        rings[worker] = Ring.open(path, worker=worker, fingerprint=Fingerprint({"a": 1}), slots=1, slot_bytes=64)
    rings["w2"].close()
    rings["other"].close()
    (tmp_path / "w7.ring").write_bytes(b"no ring")
    assert scale.retire_dead(tmp_path, 1) == ["w2"]
    assert [rings[worker].retired for worker in ("w0", "w1", "w10")] == [False] * 3
    rings["w10"].close()
    assert scale.retire_dead(tmp_path, 2) == ["w2", "w10"]
    assert scale.retire(tmp_path / "w1.ring") and rings["w1"].retired
    assert not scale.retire(tmp_path / "w8.ring") and not scale.retire(tmp_path / "w7.ring")
    assert (tmp_path / "w7.ring").read_bytes() == b"no ring"


def test_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.gpu_devices([5, 0], 6) == ["cuda:5", "cuda:0"]
    with pytest.raises(UsageError, match="--gpu 6: the supervisor sees 6 GPUs"):
        scale.gpu_devices([6], 6)
    for odd in (None, "5", ["5"], [-1], [True], {}):
        with pytest.raises(UsageError):
            scale.gpu_devices(odd, 9)


def test_a_stop_that_takes_long_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = iter(["paceline up of run r (pid 7)"] * 4 + [None] * 9)
    monkeypatch.setattr(scale, "_supervised", lambda run: tmp_path)
    monkeypatch.setattr(scale, "held_by", lambda path: next(holders))
    monkeypatch.setattr(scale, "ask", lambda *_: {"said": "stopping r"})
    monkeypatch.setattr(scale, "POLL_S", 0.0)
    monkeypatch.setattr(scale, "PATIENCE_S", -1.0)
    write_status(tmp_path / "status.json", {"state": "saving", "updated": 1.0})
    said = []
    scale.stop("r", said.append)
    waits = "waiting for paceline up of run r (pid 7); the trainer is saving"
    assert said == ["stopping r", waits, "r has stopped"]


def gpus(monkeypatch: pytest.MonkeyPatch, number: int, **workers: Any) -> RunFile:
    """A run file of one rank on a machine of so many GPUs."""
    monkeypatch.setattr("paceline.common.devices.installed_gpus", lambda: number)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    values = {"name": "r", "output": "o", "target": {"path": "t"}, "data": {"rows": "d"}, "workers": workers}
    return RunFile.model_validate(values)


def test_new_workers_go_to_gpus_that_nobody_of_the_run_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """On four GPUs with one worker and one rank: not to the first one again."""
    run = gpus(monkeypatch, 4)
    placed = scale.place(run, Wanted(1), [1, 2, 3], [0], [])
    assert placed == {1: "cuda:2", 2: "cuda:3"}, "cuda:1 is the rank's; w3 has none of its own"
    wanted = Wanted(1).scaled(4, placed)
    assert scale.shared(run, wanted, [1, 2, 3], [0]) == "; w3 shares cuda:0 with w0"
    assert scale.place(run, Wanted(2, {1: "cuda:3"}), [2], [0, 1], []) == {2: "cuda:2"}
    assert scale.place(run, Wanted(0), [0, 1], [], []) == {1: "cuda:0"}, "w0 has its place in the run file"


def test_where_nothing_is_free_it_is_said_who_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    run = gpus(monkeypatch, 2)
    assert scale.place(run, Wanted(1), [1], [0], []) == {}
    assert scale.shared(run, Wanted(2), [1], [0]) == "; w1 shares cuda:0 with w0"
    given = scale.place(run, Wanted(1), [1, 2], [0], ["cuda:1"])
    assert given == {1: "cuda:1", 2: "cuda:1"}
    said = scale.shared(run, Wanted(1).scaled(3, given), [1, 2], [0])
    assert said == "; w1 shares cuda:1 with rank 0; w2 shares cuda:1 with rank 0, w1"
    named = gpus(monkeypatch, 4, devices=["cuda:0", "cuda:2"])
    assert scale.place(named, Wanted(1), [1, 2], [0], []) == {}, "the run file names its workers' devices"
    assert scale.shared(named, Wanted(3), [1, 2], [0]) == "; w2 shares cuda:0 with w0"
    assert scale.shared(gpus(monkeypatch, 0), Wanted(3), [1, 2], [0]) == "", "of a CPU nothing is said"


def test_ranks_go_where_no_added_worker_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that starts anew with more ranks; and is refused where a GPU would have two."""
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setattr("paceline.common.units.CONFIG_DIR", tmp_path)
    run = gpus(monkeypatch, 4, count=1)
    assert rank_devices(run) == ["cuda:1"]
    two = run.model_copy(update={"trainer": run.trainer.model_copy(update={"ranks": 2})})
    folder = paths.run_dir(run.name)
    Wanted(2, {1: "cuda:2"}).write(folder, 1)
    assert rank_devices(two) == ["cuda:1", "cuda:3"]
    paths.wanted_path(folder).unlink()
    (tmp_path / "r.1.env").write_text("CUDA_VISIBLE_DEVICES=1\n")
    (tmp_path / "r.x.env").write_text("CUDA_VISIBLE_DEVICES=3\n")
    assert rank_devices(two) == ["cuda:2", "cuda:3"], "of a worker that is a unit"
    gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match="cuda:1 would have 2 of them, and a GPU takes one"):
        rank_devices(two)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(two))
    assert main(["up", str(path)]) == 78


def test_a_run_file_that_would_end_it_does_not_restart_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "CONFIG_DIR", tmp_path)
    monkeypatch.setattr(units, "need_root", lambda *_: None)
    monkeypatch.setattr(units, "systemctl", lambda *_: pytest.fail("the trainer was touched"))
    run = gpus(monkeypatch, 2)
    text = to_toml(run.model_copy(update={"trainer": run.trainer.model_copy(update={"ranks": 2})}))
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ConfigError, match="a GPU takes one"):
        units.restart_trainer("r")
    (tmp_path / "r.toml").write_text(text.replace("ranks = 2", "ranks = 0"))
    with pytest.raises(ConfigError, match=r"r\.toml:\d+: trainer\.ranks = 0"):
        units.restart_trainer("r")


@pytest.mark.parametrize("command", [["scale", "nobody", "2"], ["stop", "nobody"], ["restart", "nobody"]])
def test_a_run_that_nobody_supervises(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path))
    assert main(command) == 1
    assert "run nobody is not up here" in capsys.readouterr().err
    assert main(["scale", "nobody", "-1"]) == 2


class Desk:
    """A control socket in this process, served when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "up.sock"
        self.heard: list[dict[str, object]] = []
        self.control = control.Control(self.path, self.answer)

    def answer(self, request: dict[str, object]) -> dict[str, object]:
        self.heard.append(request)
        if request.get("do") == "refuse":
            raise ConfigError("not so")
        return {"said": "x" * int(str(request.get("size", 1)))}

    def client(self, data: bytes = b"") -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(10)
        client.connect(str(self.path))
        client.sendall(data)
        return client


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.control.close()
    assert not desk.path.exists()


def test_control_answers_one_line_and_hangs_up(desk: Desk) -> None:
    assert desk.path.stat().st_mode & 0o777 == 0o600
    for request, answer in (
        (b'{"do":"it"}\n', {"said": "x"}),
        (b'{"do":"refuse"}\n', {"error": "not so", "code": 78}),
        (b"[1]\n", {"error": "the request is no JSON object"}),
        (b"\xff\n", {"error": "the request is not JSON"}),
        (b"[" * 4000 + b"\n", {"error": "the request is not JSON"}),
        (b'{"size": 100000}\n', {"error": "the answer is too long (100012 bytes)"}),
    ):
        with desk.client(request) as client:
            desk.control.serve()
            data = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert json.loads(data) == answer
    assert len(desk.control.descriptors()) == 1


def test_control_never_waits_for_a_client(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, half, endless, gone = desk.client(), desk.client(b'{"do":'), desk.client(b"x" * 5000), desk.client(b"{}\n")
    gone.close()
    desk.control.serve()
    desk.control.serve()
    assert desk.heard == [{}]
    assert endless.recv(10) == b""
    with desk.client(b"{}\n") as client:  # others are served meanwhile
        desk.control.serve()
        assert client.recv(100) == b'{"said":"x"}\n'
    monkeypatch.setattr(control, "PATIENCE_S", 0.0)
    late = desk.client()
    crowd = [desk.client() for _ in range(control.MAX_CLIENTS)]
    with pytest.raises(control.SilentSupervisor, match="does not answer"):
        control.ask(desk.path, {}, patience=0.1)
    for _ in range(4):
        desk.control.serve()
        assert len(desk.control.descriptors()) <= 1 + control.MAX_CLIENTS
    assert late.recv(10) == b""
    assert half.send(b"1}\n") and silent.send(b"{}\n")
    for _ in range(4):
        desk.control.serve()
    assert {} in desk.heard
    for client in (silent, half, endless, late, *crowd):
        client.close()


def test_a_supervisor_that_is_stopped_has_not_ended(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its terminal takes no more, say: a restart under way says that, not that the run is over."""
    ask = control.ask
    monkeypatch.setattr(scale, "ask", lambda path, request: ask(path, request, patience=0.05))
    wait = scale._Wait("t", desk.path.parent, None, lambda text: None)
    with pytest.raises(PacelineError, match=r"does not answer for 0\.05 s: .*Ctrl-Z.*Ctrl-S"):
        wait.until_restarted(None)


def test_another_users_request_is_not_read(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_peer", lambda connection: os.geteuid() + 1)
    with desk.client(b"{}\n") as client:
        desk.control.serve()
        with pytest.raises(ConnectionResetError):  # the kernel says so as the request is left unread
            client.recv(10)
    assert desk.heard == []


def test_ready_socket_knows_who_speaks(tmp_path: Path) -> None:
    ready = control.ReadySocket(tmp_path / "ready.sock")
    script = "from paceline.common.notify import notify; print(notify('READY=1', 'STATUS=x'), notify('STATUS=READY=1'))"
    child = subprocess.run(
        [sys.executable, "-c", f"import os; print(os.getpid()); {script}"],
        env=os.environ | {"NOTIFY_SOCKET": str(ready.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    pid, *said = child.stdout.split()
    assert said == ["True", "True"] and list(ready.ready()) == [int(pid)]
    ready.close()


def test_a_supervisor_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.common.notify import notify

    ready = control.ReadySocket(tmp_path / "ready.sock")
    monkeypatch.setenv("NOTIFY_SOCKET", str(ready.path))
    deep = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    sent = [notify("STATUS=one a second") for _ in range(deep + 10)]  # would wait for ever for the queue to empty
    assert sent[0] and not sent[-1]
    ready.close()


def test_the_supervisor_stays_one_thread_without_numpy() -> None:
    script = "import sys, os, paceline.common.up; print('numpy' in sys.modules, len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "1"]
