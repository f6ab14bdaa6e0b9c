"""benchmarks/ablation.py: valid runs, a table of what they measured, and none that is run twice."""

import json

import pytest
from paceline.common.runfile import load
from scripts import load_script, write_tiny_run


@pytest.fixture(scope="module")
def ablation():
    return load_script("ablation")


@pytest.fixture
def run_path(tmp_path, tiny_target_dir, chat_file, monkeypatch):
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return write_tiny_run(tmp_path, tiny_target_dir, chat_file, token_budget=1024, trainer={"max_steps": 2})


def test_every_arm_is_a_valid_run_of_its_own(ablation, run_path, tmp_path):
    """Valid with the tables it needs, in a folder and under a name that no other arm has."""
    runs = [
        load(run_path, ablation.overrides(arm, seed, ablation.folder_of(tmp_path, arm, seed), "cuda:1", 1))
        for arm in ablation.ARMS
        for seed in (0, 1)
    ]
    assert len({run.name for run in runs}) == len({run.output for run in runs}) == len(runs)
    assert {tuple(run.workers.devices + run.trainer.devices) for run in runs} == {("cuda:1", "cuda:1")}
    assert all(run.target.last_hidden for run in runs if run.objective.target_terms)
    assert any(run.objective.target_terms for run in runs)


def test_the_table_says_what_was_measured(ablation, tmp_path):
    for arm, seed, tau in (("ce", 0, 1.5), ("ce", 1, 1.7), ("dpace", 0, 1.8), ("kl", 0, None)):
        folder = ablation.folder_of(tmp_path, arm, seed)
        folder.mkdir()
        lines = [{"event": "start", "step": 0}, {"kind": "train", "step": 1, "total_tokens": 2_000_000}]
        if tau is not None:
            lines += [{"kind": "eval", "step": 1, "tau_chain": 1.0}, {"kind": "eval", "step": 2, "tau_chain": tau}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (ablation.folder_of(tmp_path, "ce", 1) / "eval.json").write_text('{"acceptance_length": {"pooled": 1.9}}')
    pairs = [("ce", 0), ("ce", 1), ("dpace", 0), ("kl", 0), ("tv", 0)]
    ce, dpace = ablation.collect(tmp_path, pairs)
    assert (ce.arm, ce.seeds, ce.tau_chain, ce.acceptance, ce.tokens) == ("ce", [0, 1], [1.5, 1.7], [1.9], 2_000_000)
    assert dpace.tau_chain == [1.8]
    assert ablation.spread(ce.tau_chain) == "1.600 ± 0.100" and ablation.spread([1.8]) == "1.800"
    columns = [list(column.cells) for column in ablation.table([ce, dpace]).columns]
    assert columns[0] == ["dpace", "ce"] and columns[4] == ["-", "1.900"]


def test_a_wrong_setting_is_said_before_anything_runs(ablation, run_path, tmp_path, capsys):
    code = ablation.main([str(run_path), "--out", str(tmp_path / "out"), "--arm", "ce", "--set", "trainer.epoch=1"])
    assert code == 78 and "trainer.epoch" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_arms_on_a_tiny_target(ablation, run_path, tmp_path, monkeypatch):
    """For real, and once more: then nothing runs but what is missing."""
    arguments = [str(run_path), "--out", str(tmp_path / "out"), "--arm", "ce", "--arm", "kl"]
    assert ablation.main(arguments) == 0
    results = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert [result["arm"] for result in results] == ["ce", "kl"]
    assert all(result["tau_chain"][0] >= 1 and result["tokens"] > 0 for result in results)
    monkeypatch.setattr(ablation.Bench, "_command", lambda *_, **__: pytest.fail("it was run again"))
    assert ablation.main(arguments) == 0
