"""`paceline bench pipeline --live`: where processes go, what a change costs, and a whole small run of it."""

import json
from pathlib import Path
from types import SimpleNamespace

import live
import pytest
from paceline.common import bench, bench_live
from paceline.common.bench import Options
from paceline.common.bench_live import LiveRun, Phase, Report, longest_pause, place_live, rate_curve
from paceline.common.bench_live import bench_live as run_bench
from paceline.common.cli import main
from paceline.common.errors import PacelineError, UsageError
from paceline.common.runfile import load
from standins import LAYERS


def phase(topology: str, began: float, changed: float, window: tuple[float, float]) -> Phase:
    result = dict.fromkeys(("data_wait", "gpu_share", "rings_full", "rings_empty", "ready"), 0.5)
    rates = dict.fromkeys(("target_alone", "trainer_alone", "predicted", "pipeline"), 1000.0)
    return Phase(topology, **rates, **result, began=began, changed=changed, window=window)


def report(folder: Path, steps: list[tuple[int, float]], phases: list[Phase]) -> Report:
    """A run whose steps ended at those times."""
    folder.mkdir(exist_ok=True)
    lines = [{"kind": "train", "step": step, "time": at, "tokens": 100} for step, at in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = Report(folder / "bench.json", SimpleNamespace(output=str(folder)))  # type: ignore[arg-type]
    made.phases, made.origin = phases, 1000.0
    return made


def test_a_worker_stays_where_it_is():
    """Whatever the topology; with more processes than GPUs, workers share with ranks."""
    assert place_live(1, 1, 2) == (["cuda:0"], ["cuda:1"])
    assert place_live(2, 1, 2) == (["cuda:0", "cuda:1"], ["cuda:1"])
    assert place_live(2, 2, 4) == (["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"])
    assert place_live(3, 1, 4) == (["cuda:0", "cuda:1", "cuda:2"], ["cuda:3"])
    assert place_live(5, 3, 8)[1] == ["cuda:5", "cuda:6", "cuda:7"] and place_live(6, 2, 8)[0][5] == "cuda:5"
    assert place_live(2, 1, 1) == (["cuda:0", "cuda:0"], ["cuda:0"])
    assert place_live(2, 2, 0) == (["cpu", "cpu"], ["cpu", "cpu"])
    with pytest.raises(UsageError, match="a GPU for each rank, this machine has 2"):
        place_live(1, 3, 2)


def test_a_pause_is_bounded_by_the_steps_around_it():
    times = [1.0, 2.0, 3.0, 9.0, 10.0]
    assert longest_pause(times, 2.5, 9.5) == 6.0
    assert longest_pause(times, 4.0, 8.0) == 6.0, "it began before and ended after"
    assert longest_pause(times, 9.0, 10.0) == 1.0
    assert longest_pause([], 1.0, 3.0) == 2.0


def test_a_pause_is_seen_in_the_curve():
    timeline = [
        {"t": at, "tokens": 100, "tokens_per_s": 100 / took} for at, took in ((1.0, 1.0), (2.0, 1.0), (12.0, 10.0))
    ]
    assert list(rate_curve(timeline, 2.0)) == [(1.0, 0.1), (2.0, 0.1), (2.0, 0.01), (12.0, 0.01)]


def test_the_timeline_knows_phases_and_pauses(tmp_path):
    made = report(
        tmp_path / "out",
        [(1, 1000.0), (2, 1001.0), (3, 1005.0), (4, 1006.0)],
        [phase("1-1", 0, 0, (0.0, 2.0)), phase("2-1", 2.0, 5.0, (5.0, 6.0))],
    )
    assert [(line["topology"], line["tokens_per_s"]) for line in made.timeline()] == [
        ("1-1", 100.0),
        ("2-1", 25.0),
        ("2-1", 100.0),
    ]
    bench_live.draw(made, tmp_path / "pictures" / "live.png")
    assert (tmp_path / "pictures" / "live.png").read_bytes()[1:4] == b"PNG"


def test_a_missing_step_or_a_lost_batch_is_no_whole_run(tmp_path):
    whole = report(tmp_path / "a", [(1, 1.0), (2, 2.0)], [])
    whole.audit = {"clean": True, "step": 2, "trained": 2, "listed": [], "problems": []}
    assert whole.whole
    whole.audit["clean"] = False
    assert not whole.whole
    gap = report(tmp_path / "b", [(1, 1.0), (3, 2.0)], [])
    gap.audit = {"clean": True, "step": 3}
    assert not gap.whole


def test_wrong_use(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert main(["bench", "pipeline", "--live", "--topology", "1-1", *out]) == 2
    assert "give two --topology at least" in capsys.readouterr().err
    assert main(["bench", "pipeline", "--picture", str(tmp_path / "x.png"), *out]) == 2
    assert "belong to --live" in capsys.readouterr().err


def test_what_cannot_be_written_is_said_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_alone", lambda *_: pytest.fail("it measured"))
    (tmp_path / "file").touch()
    live = ["bench", "pipeline", "--live", "--topology", "1-1", "--topology", "2-1", "--out"]
    for arguments, code, said in (
        ([*live, str(tmp_path / "out"), "--picture", str(tmp_path / "x.txt")], 2, "Format 'txt' is not supported"),
        ([*live, str(tmp_path / "out"), "--picture", "/proc/x.png"], 78, "--picture: cannot write /proc/x.png"),
        ([*live, str(tmp_path / "file")], 78, "--out: cannot make folder"),
        (["bench", "pipeline", "--out", "/proc"], 78, "--out: cannot write in /proc"),
        (["bench", "pipeline", "--profile", "/proc/x"], 78, "--profile: cannot make folder /proc/x"),
        (["bench", "step", "--device", "cpu", "--profile", "/proc/x"], 78, "--profile: cannot make folder /proc/x"),
    ):
        assert main(arguments) == code
        error = capsys.readouterr().err
        assert error.startswith("paceline: ") and said in error and error.count("\n") == 1


def test_a_run_that_ends_is_said_with_its_last_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "t"\noutput = "out"\n[target]\npath = "/nowhere"\n[data]\nrows = "/nowhere/rows"\n'
        "[drafter]\nmask_token_id = 3\n"
    )
    with pytest.raises(PacelineError, match=r"ended with exit code 78: .*nowhere"), LiveRun(path) as run:
        run.wait_for(lambda: False, "what never comes")


@pytest.mark.slow
def test_a_run_through_three_topologies(tmp_path, monkeypatch):
    """More workers, then fewer and more ranks; nothing is lost, and nothing is left behind. Stand-ins compute: the
    supervisor, the trainer, the feed, the workers' loop, scale, restart, stop and audit are the real ones."""
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setenv("LIVE_WORKER", '{"seconds": 0.02}')
    monkeypatch.setattr(bench, "gpu_count", lambda: 0)
    monkeypatch.setattr(bench, "measure_alone", lambda *_: {"producer": 2000.0, "consumer": 9000.0})
    real = bench_live.paceline_command
    monkeypatch.setattr(
        bench_live,
        "paceline_command",
        lambda verb, given: live.command("up", given[:1]) if verb == "up" else real(verb, given),
    )
    options = Options(seconds=2, warm_up=0.5, token_budget=64, max_length=24, layers=2, block_size=4, slots=2)
    model, out = bench.model_folder(tmp_path, "smollm2-135m"), tmp_path / "out"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))  # the stand-in's
    settings = [
        f"stream.ring_dir={tmp_path / 'shm'}",
        "stream.order=strict",
        "target.dtype=float32",
        f"target.layer_ids={list(LAYERS)}",
    ]
    topologies = ["1-1", "2-1", "1-2"]
    phases = run_bench(out, str(model), topologies, options, settle=0.2, picture=out / "live.png", settings=settings)
    assert [one.topology for one in phases] == topologies
    assert [one.predicted for one in phases] == [pytest.approx(1 / (1 / 2000 + 1 / 9000))] * 3, "they share the CPU"
    assert all(one.pipeline > 0 for one in phases)
    assert set(phases[1].parts) == {"workers_up", "first_record"}
    assert set(phases[2].parts) == {"removed", "trainer_up", "first_step"}
    assert phases[1].seconds > 0 and phases[2].seconds > max(0, phases[2].parts["removed"])
    written = json.loads((out / "bench.json").read_text())
    found = written["audit"]
    assert found["clean"] and not found["listed"] and found["step"] < found["trained"] <= 2 * found["step"]
    assert written["batches_per_step"] == 2
    assert [line["step"] for line in written["timeline"]] == list(range(2, found["step"] + 1)), (
        "in order, without a gap"
    )
    by_phase = [line["phase"] for line in written["timeline"]]
    assert by_phase == sorted(by_phase) and set(by_phase) == {0, 1, 2}
    assert len(bench_live.train_steps(out / "live")[-1]["rank_records"]) == 2
    assert (out / "live.png").stat().st_size > 1000
    assert load(out / "live.toml").trainer.ranks == 2
    assert not list((tmp_path / "rt").rglob("workers.json")) and not list((tmp_path / "shm").rglob("*.ring"))
