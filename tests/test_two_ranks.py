"""benchmarks/two_ranks.py: valid runs that differ in their ranks alone, what is made of them, and a small one."""

import json
import os
import re

import numpy as np
import pytest
from paceline.common.errors import PacelineError, UsageError
from paceline.common.paths import ring_dir
from paceline.common.rows import Rows, RowsWriter
from paceline.common.runfile import load
from paceline.common.telemetry import read_metrics
from paceline.consumer.audit import audit
from rich.console import Console
from scripts import load_script, write_tiny_run

PATIENCE = 600.0


@pytest.fixture(scope="module")
def two_ranks():
    return load_script("two_ranks")


@pytest.fixture
def run_path(tmp_path, tiny_target_dir, chat_file, monkeypatch):
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return write_tiny_run(tmp_path, tiny_target_dir, chat_file, token_budget=512, optimizer={"lr": 5e-3})


def options(two_ranks, run_path, out, *more):
    return two_ranks.parse([str(run_path), "--out", str(out), *more])


def test_arms_differ_in_their_ranks_alone(two_ranks, run_path, tmp_path, monkeypatch):
    monkeypatch.setattr(two_ranks, "gpu_count", lambda: 4)
    given = options(two_ranks, run_path, tmp_path / "out", "--ranks", "2", "--ranks", "3", "--steps", "9")
    bench = two_ranks.Bench(given, Console())
    two, three = (bench.load(f"ranks-{ranks}", bench._replay_settings(ranks)) for ranks in (2, 3))
    assert (two.trainer.devices, three.trainer.devices) == (["cuda:0", "cuda:1"], ["cuda:0", "cuda:1", "cuda:2"])
    for run in (two, three):
        assert run.workers.devices == ["cpu"], "no GPU is needed to read"
        assert run.trainer.batches_per_step == 6 and run.trainer.max_steps == 9
        assert run.stream.order == "strict" and run.data.held_out == 0 and run.evaluation.every_steps == 0
    same = {"trainer": {"ranks", "devices"}, "name": True, "output": True}
    assert two.model_dump(exclude=same) == three.model_dump(exclude=same)
    recorder = bench.load("record", bench._record_settings())
    assert recorder.workers.devices == ["cuda:0"] and recorder.trainer.devices == ["cuda:1"]
    assert recorder.stream.record_to == two.stream.record_to
    control = bench.load("ranks-2", bench._replay_settings(2, control=True))
    assert control.trainer.micro_tokens == 256 == two.stream.token_budget // 2
    assert control.trainer.devices == two.trainer.devices and control.trainer.max_steps == 9


def test_wrong_use(two_ranks, run_path, tmp_path, monkeypatch, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert two_ranks.main([str(run_path), *out, "--set", "trainer.epoch=1"]) == 78
    assert "trainer.epoch" in capsys.readouterr().err
    monkeypatch.setattr(two_ranks, "gpu_count", lambda: 1)
    assert two_ranks.main([str(run_path), *out]) == 2
    assert "--ranks 2: this machine has 1 GPUs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rings_of_a_comparison_that_was_killed_are_removed_first(two_ranks, run_path, tmp_path, monkeypatch):
    """They may hold records of other data, which a worker refuses to drop by itself."""
    bench = two_ranks.Bench(options(two_ranks, run_path, tmp_path / "out", "--ranks", "1"), Console())
    run = bench.load("ranks-1", [])
    leftover = ring_dir(run) / "w0.ring"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    seen = []

    def up(path, settings, log):
        seen.append(leftover.exists())
        log.write_text("w0      | paceline: no such thing\nup      | w0 ended with exit code 78\n")
        return 78

    monkeypatch.setattr(two_ranks, "up", up)
    with pytest.raises(PacelineError, match=r"ranks-1 ended with exit code 78: no such thing \(.*up\.log\)"):
        bench._run("ranks-1", [])
    assert seen == [False]


def test_the_rows_that_are_recorded_are_so_many_tokens(two_ranks, tmp_path):
    with RowsWriter(tmp_path / "rows") as writer:
        for length in (10, 20, 30):
            writer.add(np.full(length, 7, np.int32), np.ones(length, np.uint8))
        writer.finish({"tokenizer": "t", "vocabulary": "", "target": "x"})
    rows = Rows.open(tmp_path / "rows")
    kept = Rows.open(two_ranks.subset(rows, tmp_path / "kept", 25))
    assert kept.lengths.tolist() == [10, 20] and kept.meta["tokenizer"] == "t"
    with pytest.raises(UsageError, match="the data have 60 tokens, fewer than"):
        two_ranks.subset(rows, tmp_path / "kept", 61)


def step(number, seconds, loss, records=2, **more):
    times = {"seconds": seconds, "reduce_s": 0.1, "reduce_share": 0.1 / seconds, "wait_data": 0.25}
    ranks = {"rank_wait": [0.0, 0.5], "rank_idle": [0.2, 0.0]}
    return {"kind": "train", "step": number, "tokens": 1000, "loss": loss, "records": records, **times, **ranks, **more}


def test_figures_are_of_whole_warm_steps(two_ranks):
    lines = [step(1, 100.0, 4.0), step(2, 1.0, 3.0), step(3, 0.5, 2.5, records=1), step(4, 3.0, 2.0), {"kind": "eval"}]
    found = two_ranks.summarise(2, lines, batches=2, warm=1)
    assert found.tokens_per_s == 500.0 and found.step_ms == 2000.0 and found.reduce_ms == pytest.approx(100.0)
    assert found.idle == [pytest.approx(0.2), pytest.approx(0.5)] and found.losses == [4.0, 3.0, 2.5, 2.0]
    with pytest.raises(PacelineError, match="no whole step of 4 batches"):
        two_ranks.summarise(2, lines, batches=4, warm=1)


def arm(two_ranks, ranks, *losses, **more):
    found = two_ranks.summarise(ranks, [step(n, 1.0, loss) for n, loss in enumerate(losses, 1)], 2, 0)
    return two_ranks.replace(found, **more)


def test_losses_are_compared_step_by_step(two_ranks):
    one, two = arm(two_ranks, 1, 4.0, 2.0), arm(two_ranks, 2, 4.0, 2.0)
    assert two_ranks.difference(two, one) == two_ranks.Difference(0.0, 0.0, 0.0)
    two.losses = [4.0, 2.5]
    two.tokens_per_s *= 1.8
    found = two_ranks.difference(two, one)
    assert (found.largest, found.relative, found.typical) == (0.5, 0.25, pytest.approx((0.25**2 / 2) ** 0.5))
    cells = [list(column.cells) for column in two_ranks.table([one, two]).columns]
    assert cells[2] == ["1.00", "1.80"] and cells[3] == ["1.00", "0.90"] and cells[10] == ["-", "0.25"]
    two.losses.pop()
    with pytest.raises(PacelineError, match="2 ranks did 1 steps, 1 did 2"):
        two_ranks.difference(two, one)


def test_ranks_may_differ_by_what_rounding_makes(two_ranks):
    """A control says how much that is, which adds the same gradients up in another order."""
    one, two = arm(two_ranks, 1, 4.0, 2.0), arm(two_ranks, 2, 4.0, 2.1)
    near, far = (arm(two_ranks, 1, 4.0, loss, control=True) for loss in (2.06, 2.02))
    assert two_ranks.fault([one, two], 0.1) is None
    assert two_ranks.fault([one, two], 0.01) == "the losses of 2 ranks differ by 0.05, more than 0.01"
    assert two_ranks.fault([one, two, near], 0.01) is None
    assert two_ranks.fault([one, two, far], 0.01) == (
        "the losses of 2 ranks differ by 0.05, more than 0.01; "
        "as root mean squares 0.035, more than 2 x the control's 0.0071"
    )
    broken = arm(two_ranks, 2, 4.0, float("nan"))
    assert two_ranks.fault([one, broken, near], 0.01) == "ranks 2: a loss is not a finite number"
    broken = arm(two_ranks, 1, 4.0, float("nan"), control=True)
    assert two_ranks.fault([one, two, broken], 0.01) == "ranks 1, half micro-batches: a loss is not a finite number"


@pytest.mark.slow
def test_one_and_two_ranks_of_a_tiny_target(two_ranks, run_path, tmp_path, fork_server, monkeypatch, capsys):
    """For real, but for the supervisor; then once more: nothing is computed by a target again."""
    forks = fork_server("forked_cli.py")

    def up(path, settings, log):
        """The processes that `paceline up` would start."""
        sets = [part for setting in settings for part in ("--set", setting)]
        environment = {name: os.environ[name] for name in ("PACELINE_RUNTIME_DIR", "PACELINE_CACHE")}
        count = load(path, settings).workers.count
        commands = [["consumer", str(path)], *(["producer", str(path), "--worker", str(n)] for n in range(count))]
        processes = [forks.start("command", *command, *sets, output=log, **environment) for command in commands]
        codes = [process.wait(PATIENCE) for process in processes]
        return max(codes)

    monkeypatch.setattr(two_ranks, "up", up)
    out = tmp_path / "out"
    few = ["--steps", "8", "--warm-steps", "2", "--batches", "5", "--workers", "2", "--tolerance", "1e-4", "--control"]
    assert two_ranks.main([str(run_path), "--out", str(out), *few]) == 0, capsys.readouterr()
    assert "0.00" in capsys.readouterr().out
    one, two, control = json.loads((out / "two_ranks.json").read_text())["results"]
    assert control["control"] and control["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert control["losses"] != one["losses"], "other micro-batches round otherwise"
    assert (one["ranks"], two["ranks"]) == (1, 2) and len(one["idle"]) == 1 and len(two["idle"]) == 2
    assert one["reduce_ms"] == 0 < two["reduce_ms"] and min(one["tokens_per_s"], two["tokens_per_s"]) > 0
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-4) and len(one["losses"]) == 8
    assert one["losses"][-1] < one["losses"][0], "it learns, so equal losses mean equal updates"
    for arm in ("ranks-1", "ranks-2"):
        assert len(re.findall(r": (\d+) of \1 rows are recorded", (out / arm / "up.log").read_text())) == 2, "workers"
        assert audit(max((out / arm / "checkpoints").glob("step-*"))).clean
        assert re.search(r"rank 0 is ready: [\d.]+ s for libraries", (out / arm / "up.log").read_text())
        assert read_metrics(out / arm)[-1]["rank_records"]
    monkeypatch.setattr(two_ranks.Bench, "_run", lambda *_: pytest.fail("it was recorded again"))
    two_ranks.Bench(options(two_ranks, run_path, out, *few), Console()).record()
