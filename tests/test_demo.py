"""The demo, shrunk: a tiny target, real processes, one worker killed, audit, export, decoding and pictures."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.common import demo as module
from paceline.common import inspect
from paceline.common.demo import CPU, DATA, Timeline, Victim, demo, find_target
from paceline.common.errors import ConfigError
from paceline.common.runfile import load
from paceline.consumer.prompts import read_prompts
from rich.console import Console

TINY = dataclasses.replace(
    CPU, layer_ids=None, max_length=64, token_budget=64,
    max_steps=1500, epochs=30, held_out=4, evaluate_every=500, new_tokens=4,
    mask_token=3, dtype="float32", lr=1e-3, kill_at=0.02, pass_mark=1.0,
)  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A run directory, a cache and rings of the test's own. Sockets need a short path."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "NAME", f"demo-{os.getpid()}")
    with tempfile.TemporaryDirectory(prefix="paceline-") as runtime:
        monkeypatch.setenv("PACELINE_RUNTIME_DIR", runtime)
        yield


@pytest.mark.slow
def test_demo_end_to_end(tiny_target_dir: Path, chat_file: Path, tmp_path: Path, machine: None) -> None:
    out = tmp_path / "out"
    console = Console(file=(tmp_path / "said").open("w"), width=100)
    code = demo(out, target=str(tiny_target_dir), data=chat_file, recipe=TINY, console=console, plain=True)
    said = (tmp_path / "said").read_text()
    assert code == 0, said
    assert {"acceptance.png", "timeline.png", "training.png", "run.toml", "demo.json"} <= {
        p.name for p in out.iterdir()
    }
    values = json.loads((out / "demo.json").read_text())
    assert [what.split()[1] for _, what in values["events"]] == ["killed", "is"]
    assert values["trained"]["lossless"] and values["untrained"]["lossless"]
    assert "clean: every batch" in said and "target alone" in said
    assert (out / "drafter" / "config.json").is_file()
    assert not list(Path("/dev/shm/paceline").glob(f"{module.NAME}/*"))


def test_run_file_of_each_recipe_is_valid(tmp_path: Path) -> None:
    for number, recipe in enumerate((module.CPU, module.GPU, dataclasses.replace(CPU, layer_ids=(8, 14), gamma=2.0))):
        path = module._write_run(tmp_path / str(number), "/models/some.gguf", None, recipe, number)
        run = load(path)
        assert run.drafter.block_size == recipe.block_size and run.output == str(tmp_path / str(number))
        assert run.target.layer_ids == (None if recipe.layer_ids is None else list(recipe.layer_ids))
        assert run.objective.gamma == recipe.gamma and Path(run.data.files[0].path).is_file()


def test_only_an_earlier_demos_folder_is_replaced(tmp_path: Path) -> None:
    module._write_run(tmp_path / "out", "/models/some.gguf", None, CPU, 0)
    (tmp_path / "out" / "old").touch()
    module._write_run(tmp_path / "out", "/models/some.gguf", None, CPU, 0)
    assert not (tmp_path / "out" / "old").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="not empty"):
        module._write_run(tmp_path / "mine", "/models/some.gguf", None, CPU, 0)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "x", Path("/proc/x"), tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=r"OUT: (cannot make folder|.*File name too long)"):
            module._write_run(out, "/models/some.gguf", None, CPU, 0)
    assert (tmp_path / "file").is_file()


def test_the_slice_and_the_prompts() -> None:
    prompts = {prompt.messages[0]["content"] for prompt in read_prompts(DATA / "prompts.jsonl")}
    assert len(prompts) == 16
    assert (DATA / "answers.jsonl.gz").stat().st_size < 500_000
    assert set(CPU.sources) <= set(module.GPU.sources)


def test_prompts_are_held_out(tmp_path: Path) -> None:
    path = module._training_file(tmp_path, module.GPU.sources)
    import gzip

    with gzip.open(path, "rt") as file:
        asked = {json.loads(line)["messages"][0]["content"] for line in file}
    assert len(asked) > 1000
    assert not asked & {prompt.messages[0]["content"] for prompt in read_prompts(DATA / "prompts.jsonl")}


def test_target_is_found_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", "paceline-no-such-package")
    with pytest.raises(ConfigError, match="pip install --no-deps"):
        find_target()


def test_a_worker_is_back_when_its_new_process_made_a_record() -> None:
    def ring(pid: int, produced: int, alive: bool = True) -> list[inspect.RingInfo]:
        return [inspect.RingInfo("w1", Path("w1.ring"), pid=pid, alive=alive, produced=produced)]

    victim = Victim("w1", pid=10, produced=5)
    assert not victim.works_again([])
    assert not victim.works_again(ring(10, 6))
    assert not victim.works_again(ring(11, 5))
    assert not victim.works_again(ring(11, 6, alive=False))
    assert victim.works_again(ring(11, 6))


def test_timeline_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline()
    for second in range(4):
        ring = inspect.RingInfo(
            "w0", Path("w0.ring"), produced=3 * second, ring_id=7, read_at=float(second), states=("ready", "free")
        )
        timeline.sample([ring], {"drafter_bps": 2.5, "step": second})
    assert timeline.samples[-1]["workers"] == {"w0": 3.0}
    assert timeline.samples[-1]["ready"] == 1 and timeline.samples[-1]["trainer"] == 2.5
    timeline.mark("w0 killed")
    assert not timeline.came_back


def test_a_relative_folder_is_found_from_the_run_file(
    tiny_target_dir: Path, tmp_path: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` gives one, and paths in a run file are relative to the run file."""
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "up", lambda path, view: seen.append(load(path)) or 5)
    assert demo(Path("out"), target=str(tiny_target_dir), recipe=TINY, plain=True) == 5
    (run,) = seen
    assert [Path(file.path).is_file() for file in run.data.files] == [True] and Path(
        run.output
    ).resolve() == tmp_path / "out"
