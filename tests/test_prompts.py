"""Prompts of chat files: whatever `prepare` and `regenerate` read, `eval` reads too."""

import gzip
import json
import os
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import ALTERNATES
from paceline.common.errors import ConfigError
from paceline.consumer.prompts import Prompt, prompt_ids, read_prompts
from paceline.producer.regenerate import _read
from transformers import AutoTokenizer

USER, ANSWER = {"role": "user", "content": "The river opens?"}, {"role": "assistant", "content": "It does."}
SYSTEM = {"role": "system", "content": "The teacher measures well."}
CALL = {"name": "opens", "arguments": {"what": "river"}}
CALLS = [{"type": "function", "function": CALL}]
TOOL = {"name": "opens", "parameters": {"type": "object", "properties": {}}}
SAID = {"role": "tool", "content": "yes"}


def write(path, *rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": USER["content"]}, [USER]),
        ({"task_id": "HumanEval/0", "prompt": USER["content"], "test": "", "entry_point": "f"}, [USER]),
        ({"messages": [USER, ANSWER]}, [USER]),
        ({"messages": json.dumps([USER, ANSWER])}, [USER]),
        ({"conversation": [USER]}, [USER]),
        ({"conversations": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "x"}]}, [USER]),
        ({"system": SYSTEM["content"], "messages": [USER]}, [SYSTEM, USER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}]}, [USER]),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, SAID]},
            [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, SAID],
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": None,
                        "name": None,
                        "tool_calls": [{"type": "function", "function": CALL | {"arguments": '{"what": "river"}'}}],
                    },
                    SAID,
                ]
            },
            [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, SAID],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": USER["content"]},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "yes"},
                ]
            },
            [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, SAID],
        ),
        ({"prompt": USER["content"], "messages": None, "tools": None}, [USER]),
    ],
)
def test_a_row_in_each_of_its_forms(row, messages, tmp_path):
    assert read_prompts(write(tmp_path / "a.jsonl", row)) == [Prompt(messages)]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_in_each_of_their_forms(tools, tmp_path):
    [prompt] = read_prompts(write(tmp_path / "a.jsonl", {"prompt": "x", "tools": tools}))
    assert prompt.tools == [{"type": "function", "function": TOOL}]


def test_a_file_in_each_of_its_forms(tmp_path):
    rows = [{"messages": [USER, ANSWER]}, {"messages": [SYSTEM, USER]}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    array = "\ufeff" + json.dumps(rows, indent=1)
    for name, text in (("a.jsonl", "\ufeff" + lines), ("b.json", array), ("prompts of mine ü.txt", lines)):
        (tmp_path / name).write_text(text)
    for name, text in (("c.jsonl", lines), ("d.json", array)):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        with pa.CompressedOutputStream(str(tmp_path / f"{name}.zst"), "zstd") as stream:
            stream.write(text.encode())
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "e.parquet")
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 8
    for path in paths:
        assert read_prompts(path) == [Prompt([USER]), Prompt([SYSTEM, USER])], path
        assert read_prompts(path, 1) == [Prompt([USER])], path


def test_prompts_in_a_column_of_parquet(tmp_path):
    pq.write_table(pa.table({"prompt": [USER["content"]], "other": [1]}), tmp_path / "a.parquet")
    assert read_prompts(tmp_path / "a.parquet") == [Prompt([USER])]
    [asked] = _read([tmp_path / "a.parquet"])  # as `regenerate` has it
    assert asked.row == {"prompt": USER["content"]}


def test_prompts_through_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=write, args=(tmp_path / "pipe", {"prompt": USER["content"]}))
    writer.start()
    assert read_prompts(tmp_path / "pipe") == [Prompt([USER])]
    writer.join()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([], "not a JSON object"),
        ({"text": "x"}, r"no messages \(found text\)"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "content that is not text"),
        ({"messages": [{"content": "x"}]}, "a message without role"),
        ({"messages": [ANSWER]}, "no message before the answer"),
        ({"messages": [USER, ANSWER | {"tool_calls": [{"function": {"arguments": "{"}}]}]}, "should hold JSON"),
        ({"prompt": "x", "chat_template_kwargs": 3}, "chat_template_kwargs is not an object"),
        ({"prompt": "a\0b"}, "a NUL or noncharacter"),
        ({"input_ids": [1, 2]}, "tokens without loss_mask or labels"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "no tokens before the answer"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no supervised token"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_file_and_place(row, said, tmp_path):
    write(tmp_path / "a.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: .*{said}"):
        read_prompts(tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_text(json.dumps([{"prompt": "fine"}, row]))
    with pytest.raises(ConfigError, match=rf"b\.json\[1\]: .*{said}"):
        read_prompts(tmp_path / "b.json")
    assert len(read_prompts(tmp_path / "a.jsonl", 1)) == 1  # nobody asked for the second


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b"", "no prompts in it"),
        ("a.jsonl", b"\xff\xfe{", ":1: not UTF-8"),
        ("a.jsonl.gz", b"not gzip", ":1: the file cannot be read further"),
        ("a.jsonl.zst", b"not zstd", ":1: the file cannot be read further"),
        ("a.parquet", b"not Parquet", ":1: the file cannot be read further"),
        ("a.json", b"{\n", "an object over several lines"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(name, data, said, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        read_prompts(tmp_path / name)
    with pytest.raises(ConfigError, match="is a folder"):
        read_prompts(tmp_path)


def test_a_tokenised_row_is_asked_up_to_its_last_answer(tmp_path, tiny_tokenizer_dir):
    row = {"input_ids": [1, 2, 3, 4, 5, 6, 7], "loss_mask": [0, 0, 1, 1, 0, 1, 1]}
    labels = {"tokens": [1, 2, 3], "labels": [-100, 2, 3]}
    prompts = read_prompts(write(tmp_path / "a.jsonl", row, labels, row | {"messages": [USER]}))
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    assert prompt_ids(tokenizer, prompts[:2]) == [[1, 2, 3, 4, 5], [1]] and prompts[2] == Prompt([USER])
    foreign = read_prompts(write(tmp_path / "b.jsonl", {"tokens": [1 << 30, 2], "loss_mask": [0, 1]}))
    with pytest.raises(ConfigError, match=r"b\.jsonl:1: token ids that the tokenizer lacks"):
        prompt_ids(tokenizer, foreign)


def test_calls_with_arguments_as_text_reach_the_template_as_objects(tmp_path, tiny_tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.chat_template = "{{ messages[1].content + messages[1].tool_calls[0].function.arguments.what }}"
    rows = [
        {"messages": [USER, {"role": "assistant", "content": content, "tool_calls": [{"function": call}]}, SAID]}
        for content, call in (("", CALL), (None, CALL | {"arguments": json.dumps(CALL["arguments"])}))
    ]
    first, second = prompt_ids(tokenizer, read_prompts(write(tmp_path / "a.jsonl", *rows)))
    assert first == second and tokenizer.decode(first) == "river"


def test_variables_of_a_row_win(tmp_path, tiny_tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.chat_template = "{{ enable_thinking | default('unset') }}"
    row = {"prompt": "x", "chat_template_kwargs": {"enable_thinking": True}}
    ids = prompt_ids(tokenizer, read_prompts(write(tmp_path / "a.jsonl", row, {"prompt": "x"})), {"enable_thinking": 0})
    assert [tokenizer.decode(one) for one in ids] == ["True", "0"]


@pytest.mark.parametrize("row", [{"messages": [USER, USER]}, {"prompt": "x", "chat_template_kwargs": {"tools": []}}])
def test_a_prompt_that_the_template_cannot_render_is_named(row, tmp_path, make_tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(ALTERNATES))
    prompts = read_prompts(write(tmp_path / "a.jsonl", {"prompt": "fine"}, row))
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: the chat template raises on it \(.+\)"):
        prompt_ids(tokenizer, prompts)


def test_a_limit_beyond_counting_takes_all(tmp_path):
    assert len(read_prompts(write(tmp_path / "a.jsonl", {"prompt": "x"}), 10**30)) == 1
