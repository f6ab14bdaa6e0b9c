"""`paceline regenerate` with a target loaded here: batches change nothing, and rows say what the target said."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import NOUNS
from paceline.common.cli import main
from paceline.common.errors import ConfigError, PacelineError
from paceline.common.forms import Refused
from paceline.common.loading import load_causal_lm
from paceline.common.rows import Rows
from paceline.producer import generate as module
from paceline.producer.chat import ChatEncoder
from paceline.producer.generate import LocalTarget, generation_config
from paceline.producer.prepare import load_format, prepare
from paceline.producer.regenerate import Listener, regenerate
from paceline.producer.replies import Question, Reply, Sampling
from transformers import AutoModelForCausalLM, AutoTokenizer

GREEDY = Sampling(max_new_tokens=12, temperature=0)


def load(folder: Path, sampling: Sampling = GREEDY, **options: Any) -> LocalTarget:
    return LocalTarget.load(
        str(folder), sampling=sampling, template_kwargs={}, dtype="float32", device="cpu", **options
    )


def ask(text: str) -> Question:
    return Question([{"role": "user", "content": text}], None, {})


@pytest.fixture(scope="module")
def talking_target(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a head that gives letters, spaces and, often, the end token: text that a template keeps."""
    folder = tmp_path_factory.mktemp("talking") / "target"
    shutil.copytree(tiny_target_dir, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    quiet = [i for i in range(model.config.vocab_size) if not tokenizer.decode([i]).strip().isalpha()]
    with torch.no_grad():
        end = model.lm_head.weight[2].clone()
        model.lm_head.weight[quiet] = 0
        model.lm_head.weight[2] = 8 * end
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": " ".join(NOUNS[: 1 + i % len(NOUNS)]) + f" {i}"} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Batches


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "qwen3",
        "gemma3",
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        pytest.param("qwen3_5", marks=pytest.mark.slow),
    ],
)
def test_greedy_batches_equal_generate_alone(kind: str, make_tiny_target: Callable[[str], Path]) -> None:
    folder = make_tiny_target(kind)
    target = load(folder)
    assert target.pads
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 500, (n,), generator=draw).tolist() for n in (3, 40, 17, 1, 24)]
    model: Any = load_causal_lm(str(folder), "float32", "cpu")
    together = target.generate(prompts)
    for prompt, made in zip(prompts, together, strict=True):
        alone = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert made == alone[0, len(prompt) :].tolist()
    assert any(len(made) == 12 for made in together)


def test_an_answer_ends_with_its_end_token(talking_target: Path) -> None:
    target = load(talking_target, Sampling(max_new_tokens=60, temperature=0))
    questions = [ask(f"engine {i}") for i in range(12)]
    prompts = [target.prompt(question) for question in questions]
    made = target.generate([prompt.tokens for prompt in prompts])
    replies = target.answer(questions, prompts)
    ended = [tokens[-1] == 2 for tokens in made]
    assert True in ended and False in ended
    for tokens, reply in zip(made, replies, strict=True):
        assert isinstance(reply, Reply)
        assert 2 not in tokens[:-1] and reply.tokens == len(tokens) and reply.finished == (tokens[-1] == 2)
        assert target.encoder.tokenizer.encode(reply.message["content"]).ids[:3] or not reply.message["content"]


def test_batches_hold_rows_of_like_length(talking_target: Path) -> None:
    target = load(talking_target, batch_size=3)
    prompts = [module.Prompt("", [0] * n) for n in (5, 9, 1, 9, 3, 7, 9)]
    assert [[len(prompts[i].tokens) for i in batch] for batch in target.batches(prompts)] == [[9, 9, 9], [7, 5, 3], [1]]
    target.pads = False
    assert [[len(prompts[i].tokens) for i in batch] for batch in target.batches(prompts)] == [
        [9] * 3,
        [7],
        [5],
        [3],
        [1],
    ]


def test_a_target_that_padding_changes_is_found_out(talking_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LocalTarget._run

    def unmasked(self: LocalTarget, prompts: Any, config: Any, **options: Any) -> Any:
        longest = max(map(len, prompts))
        return run(self, [[7] * (longest - len(prompt)) + list(prompt) for prompt in prompts], config, **options)

    assert load(talking_target).pads
    monkeypatch.setattr(LocalTarget, "_run", unmasked)
    assert not load(talking_target).pads


def test_short_memory_halves_the_batch(talking_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load(talking_target, batch_size=8)
    questions = [ask(f"engine {i}") for i in range(8)]
    prompts = [target.prompt(question) for question in questions]
    whole = target.answer(questions, prompts)
    generate = LocalTarget.generate

    def short(self: LocalTarget, rows: Any) -> Any:
        if len(rows) > limit:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return generate(self, rows)

    monkeypatch.setattr(LocalTarget, "generate", short)
    limit = 3
    assert target.answer(questions, prompts) == whole and target.batch_size == 2
    limit = 0
    assert [str(reply) for reply in target.answer(questions[:1], prompts[:1])] == [
        str(Refused("the device's memory is too small for it", f"{len(prompts[0].tokens)} tokens"))
    ]


# What the target is asked, and what it said


def test_prompts_and_answers_are_those_of_prepared_rows(
    talking_target: Path, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    sampling = Sampling(max_new_tokens=30, temperature=0)
    report = regenerate(
        [prompts_file], out, target=str(talking_target), sampling=sampling, dtype="float32", device="cpu"
    )
    assert report.answered == 40 and report.refused == 0 and 0 < report.unfinished < 40
    made = prepare([out], target=str(talking_target), out=tmp_path / "rows", cache=tmp_path)
    assert made.kept + sum(made.dropped.values()) == 40
    assert set(made.dropped) <= {"no two supervised tokens in a row"}, "answers of one token"
    written = [json.loads(line) for line in out.read_text().splitlines()]
    rows = Rows.open(made.folder)
    encoder, target = ChatEncoder(load_format(str(talking_target))), load(talking_target, sampling)
    texts = {encoder.tokenizer.decode(rows.row(i).tokens.tolist(), skip_special_tokens=False) for i in range(len(rows))}
    found = 0
    for row in written:
        question = Question(row["messages"][:-1], None, {})
        end = "<|im_end|>" if row["finished"] else ""
        found += target.prompt(question).text + row["messages"][-1]["content"].rstrip() + end in texts
    assert found == made.kept


def test_every_turn_is_answered_here(talking_target: Path, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "river"}, {"role": "assistant", "content": "old"}]
    path.write_text(json.dumps({"messages": [*turns, {"role": "user", "content": "garden"}]}) + "\n")
    options: dict[str, Any] = {"target": str(talking_target), "dtype": "float32", "device": "cpu"}
    sampling = Sampling(max_new_tokens=40, temperature=0)
    regenerate([path], tmp_path / "out.jsonl", turns="all", sampling=sampling, **options)
    [row] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    target = load(talking_target, sampling)
    for at in range(1, len(row["messages"]), 2):
        question = Question(row["messages"][:at], None, {})
        [reply] = target.answer([question], [target.prompt(question)])
        assert isinstance(reply, Reply) and reply.message == row["messages"][at]
    assert row["messages"][1]["content"] != "old"


def test_it_goes_on_where_it_was_stopped(talking_target: Path, prompts_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options: dict[str, Any] = {"target": str(talking_target), "sampling": GREEDY, "dtype": "float32", "device": "cpu"}

    class Stop(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.new == 9:
            raise Stop

    with pytest.raises(Stop):
        regenerate([prompts_file], out, batch_size=4, listener=Listener(progress=stop), **options)
    first = out.read_text()
    assert first.count("\n") == 9
    assert regenerate([prompts_file], out, batch_size=4, **options).answered == 40
    assert out.read_text().startswith(first)
    whole = tmp_path / "whole.jsonl"
    regenerate([prompts_file], whole, **options)
    assert sorted(out.read_text().splitlines()) == sorted(whole.read_text().splitlines())


def test_a_prompt_without_room_is_refused(talking_target: Path, prompts_file: Path, tmp_path: Path) -> None:
    with prompts_file.open("a") as file:
        file.write(json.dumps({"prompt": "river " * 3000}) + "\n")
    said: list[str] = []
    report = regenerate(
        [prompts_file],
        tmp_path / "out.jsonl",
        target=str(talking_target),
        sampling=GREEDY,
        dtype="float32",
        device="cpu",
        listener=Listener(said.append),
    )
    assert (report.answered, report.refused) == (40, 1)
    assert any(f"{prompts_file}:41: refused: the prompt leaves no room" in line for line in said)


def test_a_template_that_changes_answers_ends_the_job(
    talking_target: Path, prompts_file: Path, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(talking_target, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("message['content']", "'~' + message['content']"))
    with pytest.raises(ConfigError, match="first 20 answers are of no use; the last: the chat template does not give"):
        regenerate(
            [prompts_file],
            tmp_path / "out.jsonl",
            target=str(folder),
            sampling=Sampling(max_new_tokens=30, temperature=0),
            dtype="float32",
            device="cpu",
        )


THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{{ '<think>\\n' }}"
    "{% if '</think>' in message['content'] %}"
    "{{ message['content'].split('</think>')[0].split('<think>')[-1].strip('\\n') }}{% endif %}"
    "{{ '\\n</think>\\n\\n' + message['content'].split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)


def test_thinking_that_the_prompt_opens(talking_target: Path, prompts_file: Path, tmp_path: Path) -> None:
    """Cut within it, an answer is a row without end token or closed thinking; ended within it, none."""
    folder = tmp_path / "target"
    shutil.copytree(talking_target, folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    sampling, out = Sampling(max_new_tokens=30, temperature=0), tmp_path / "out.jsonl"
    said: list[str] = []
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "listener": Listener(said.append)}
    report = regenerate([prompts_file], out, target=str(folder), sampling=sampling, **options)
    assert report.answered == report.unfinished > 0 and report.answered + report.refused == 40
    assert all("thinking that is not closed" in line for line in said if "refused" in line)
    rows = Rows.open(prepare([out], target=str(folder), out=tmp_path / "rows", cache=tmp_path).folder)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    encoder, target = ChatEncoder(load_format(str(folder))), load(folder, sampling)
    for index, row in enumerate(written):
        prompt = target.prompt(Question(row["messages"][:-1], None, {}))
        [made] = target.generate([prompt.tokens])
        text = encoder.tokenizer.decode(made, skip_special_tokens=False)
        assert row["messages"][-1]["content"] == "<think>\n" + text
        tokens, mask = rows.row(index)
        assert encoder.tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == prompt.text + text
        assert encoder.tokenizer.decode(tokens[mask == 1].tolist(), skip_special_tokens=False) == text


def test_a_character_that_the_limit_cut_is_left_out(talking_target: Path) -> None:
    target = load(talking_target)
    tokens = target.encoder.tokenizer.encode("Grüß", add_special_tokens=False).ids
    assert target._decoded([1], tokens, True) == "Grüß"
    assert target._decoded([1], tokens[:-1], False) == "Grü"
    with pytest.raises(Refused, match="the answer is empty"):
        target._decoded([1], [], True)


# Sampling


def test_sampling_is_the_targets_own_unless_chosen(talking_target: Path) -> None:
    model = load_causal_lm(str(talking_target), "float32", "cpu")
    config: Any = generation_config(model, [2], Sampling())
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 1.0, 1.0, 0), "as engines do"
    own = cast(Any, model).generation_config
    own.update(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    config = generation_config(model, [2], Sampling())
    assert (config.temperature, config.top_p, config.top_k, config.repetition_penalty) == (0.6, 0.95, 20, 1.1)
    config = generation_config(model, [2], Sampling(temperature=0.2, top_p=1.0, top_k=0))
    assert (config.temperature, config.top_p, config.top_k) == (0.2, 1.0, 0)
    assert generation_config(model, [2], Sampling(temperature=0)).do_sample is False
    config = generation_config(model, [2], Sampling(temperature=1e-300))
    assert torch.isfinite(torch.tensor(100.0) / config.temperature), "no infinities that make NaN of a softmax"


def test_sampled_answers_follow_the_seed(talking_target: Path) -> None:
    questions = [ask(f"engine {i}") for i in range(4)]

    def answers(seed: int) -> list[Any]:
        target = load(talking_target, Sampling(max_new_tokens=20, temperature=1.5, seed=seed))
        return target.answer(questions, [target.prompt(question) for question in questions])

    assert answers(1) == answers(1) != answers(2)


def test_a_target_without_end_token_is_refused(
    talking_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "stop_tokens", lambda model, tokenizer: [])
    with pytest.raises(ConfigError, match="names no end token"):
        load(talking_target)


def test_command(talking_target: Path, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    command = ["regenerate", str(prompts_file), "--out", str(out), "--target", str(talking_target), "--limit", "6"]
    command += [
        "--max-new-tokens",
        "9",
        "--temperature",
        "0.7",
        "--top-k",
        "5",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "6 of 6 rows answered" in shown.out and f"--target {talking_target}" in shown.out
    assert "6 rows to answer on cpu, temperature 0.7, top_k 5" in shown.err
    assert main([*command, "--seed", "1"]) == 78
    assert "was begun with seed null, now it is 1" in capsys.readouterr().err
    with pytest.raises(PacelineError):
        regenerate([prompts_file], out)
