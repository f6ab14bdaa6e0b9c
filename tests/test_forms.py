"""The forms of conversations, and templates with the traits of well-known ones, through to tokens and masks."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import (
    ALTERNATES,
    BRACKETS,
    CHANNELS,
    MARKED,
    NO_SYSTEM,
    OPENS_THINKING,
    PARTS_ONLY,
    PLAIN,
    REASONS,
    TOOLS,
)
from paceline.common import chatfiles
from paceline.common.errors import ConfigError, PacelineError
from paceline.common.forms import Encoded, Refused, read
from paceline.common.rows import Rows
from paceline.producer.chat import ChatEncoder, thinking_variables
from paceline.producer.prepare import load_format, prepare

QUESTION, ANSWER = "The river carries the garden today.", "The market repairs the planet again."
AGAIN, SECOND = "The letter opens?", "The kitchen watches the forest."
TURNS = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": AGAIN},
    {"role": "assistant", "content": SECOND},
]
SYSTEM = {"role": "system", "content": "The teacher measures well."}
TOOL = {"name": "opens", "description": "Opens it.", "parameters": {"type": "object", "properties": {}}}


def share_gpt(messages):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[message["role"]], "value": message["content"]} for message in messages]


@pytest.fixture(scope="module")
def encoder(make_tokenizer):
    """encoder(template, **options) -> ChatEncoder"""
    return lambda template=PLAIN, **options: ChatEncoder(load_format(str(make_tokenizer(template))), **options)


def encode(chat, row):
    """The rows of a conversation of which nothing is refused."""
    rows = chat.encode(row)
    assert all(isinstance(made, Encoded) for made in rows)
    return rows


def text(chat, row):
    return chat.tokenizer.decode(row.tokens.tolist(), skip_special_tokens=False)


def spoken(chat, row):
    """The text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(row.mask, prepend=0, append=0)).reshape(-1, 2).tolist()
    return [chat.tokenizer.decode(row.tokens[a:b].tolist(), skip_special_tokens=False) for a, b in edges]


def same(one, other):
    return [row.tokens.tolist() for row in one] == [row.tokens.tolist() for row in other] and [
        row.mask.tolist() for row in one
    ] == [row.mask.tolist() for row in other]


def reason(chat, row):
    with pytest.raises(Refused) as refused:
        chat.encode(row)
    return f"{refused.value.reason}: {refused.value.detail}"


# Conversations


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [SYSTEM, *TURNS]},
        {"conversation": [SYSTEM, *TURNS]},
        {"conversations": share_gpt([SYSTEM, *TURNS])},
        {"conversations": share_gpt(TURNS), "system": SYSTEM["content"]},
        {"messages": TURNS, "system": SYSTEM["content"]},
        {"messages": [SYSTEM, *TURNS], "system": SYSTEM["content"]},
        {"messages": json.dumps([SYSTEM, *TURNS])},
        {"messages": None, "conversations": json.dumps(share_gpt([SYSTEM, *TURNS]))},
        {
            "messages": [
                message | {"content": [{"type": "text", "text": message["content"]}]} for message in [SYSTEM, *TURNS]
            ]
        },
        {"messages": [SYSTEM, *TURNS], "id": 7, "source": "here", "tokens": None, "finished": None, "tools": []},
        {"messages": [SYSTEM, *TURNS, {"role": "user", "content": "The end?"}]},
    ],
)
def test_forms_give_the_same_tokens(encoder, row):
    chat = encoder()
    made = encode(chat, row)
    assert same(made, encode(chat, {"messages": [SYSTEM, *TURNS]}))
    assert spoken(chat, made[0]) == [ANSWER + "<|im_end|>", SECOND + "<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": TURNS, "system": "a", "conversations": []}, None),
        ({"messages": [SYSTEM, *TURNS], "system": "another"}, "two system prompts"),
        (
            {"conversations": [{"from": "human"}, {"from": "gpt", "value": 3}]},
            "content that is not text: messages[1]: int",
        ),
        ({"conversations": [{"value": "x"}]}, "a message without role: messages[0]"),
        ({"prompt": "x", "completion": "y"}, "no messages: found prompt, completion"),
        ({str(at): at for at in range(20)}, "no messages: found 0, 1, 2, 3, 4, 5, 6, 7, …"),
        ({}, "no messages: nothing in it"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "Assistant", "content": "y"}]},
            "no assistant message: roles: user, Assistant",
        ),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 0.5}]}, "a weight other than 0 and 1: messages[1]"),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 0}]}, "answers of weight 0 alone"),
        ({"messages": [TURNS[0], TURNS[1] | {"function_call": "{"}]}, "a field that should hold JSON does not"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, TURNS[1]]},
            "content that is not text: messages[0]: a part of type image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}, TURNS[1]]},
            "content that is not text: messages[0]: a part without text",
        ),
        (
            {"messages": [TURNS[0], TURNS[1] | {"reasoning_content": {"a": 1}}]},
            "reasoning that is not text: messages[1]",
        ),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "{}"}]},
            "a function_call without name",
        ),
        ({"messages": TURNS, "tools": "[1]"}, "tools is not a list of objects"),
        ({"messages": TURNS, "tools": [TOOL | {"description": "\0"}]}, "a NUL or noncharacter: tools"),
        ({"messages": TURNS, "chat_template_kwargs": "[]"}, "chat_template_kwargs is not an object"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(encoder, row, expected):
    if expected is None:
        assert encode(encoder(), row)
    else:
        assert reason(encoder(), row).startswith(expected)


def test_tools_as_a_list_as_text_and_bare(encoder):
    chat = encoder(TOOLS)
    wrapped = {"type": "function", "function": TOOL}
    forms = ([wrapped], json.dumps([wrapped]), [TOOL], json.dumps([TOOL]), [json.dumps(TOOL)])
    first, *others = (encode(chat, {"messages": TURNS, "tools": tools}) for tools in forms)
    assert json.dumps(wrapped) in text(chat, first[0])
    assert all(same(first, other) for other in others)


def test_tool_calls_in_both_dialects(encoder):
    chat = encoder(TOOLS)
    arguments = {"noun": "river"}
    function = {"name": "opens", "arguments": json.dumps(arguments)}
    ours = [
        TURNS[0],
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": "It opens.", "tool_call_id": "1"},
        TURNS[1],
    ]
    theirs = [
        {"from": "human", "value": QUESTION},
        {"from": "function_call", "value": json.dumps({"name": "opens", "arguments": arguments})},
        {"from": "observation", "value": "It opens."},
        {"from": "gpt", "value": ANSWER},
    ]
    former = [
        TURNS[0],
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "opens", "content": "It opens."},
        TURNS[1] | {"function_call": None},
    ]
    made = encode(chat, {"messages": ours, "tools": [TOOL]})
    assert spoken(chat, made[0]) == ['<call>opens {"noun": "river"}</call><|im_end|>', ANSWER + "<|im_end|>"]
    assert "None" not in text(chat, made[0])
    assert same(made, encode(chat, {"conversations": theirs, "tools": json.dumps([TOOL])}))
    assert same(made, encode(chat, {"messages": former, "tools": [TOOL]}))


def test_a_call_that_the_template_leaves_out_is_refused(encoder):
    call = {"function": {"name": "opens", "arguments": {}}}
    row = {"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}, *TURNS[2:]]}
    for chat in (encoder(PLAIN), encoder(MARKED)):
        assert reason(chat, row) == "the template leaves out the answer's tool calls: messages[1]: opens"


@pytest.mark.parametrize("template", [PLAIN, MARKED, REASONS])
def test_answers_of_weight_0_are_context(encoder, template):
    chat = encoder(template)
    unlearned = [TURNS[0], TURNS[1] | {"weight": 0}, TURNS[2], TURNS[3] | {"weight": 1}]
    [row] = encode(chat, {"messages": unlearned})
    [said] = spoken(chat, row)
    assert said.endswith(SECOND + "<|im_end|>") and ANSWER not in said and ANSWER in text(chat, row)
    [row] = encode(chat, {"messages": [*TURNS[:3], TURNS[3] | {"weight": 0}], "finished": False})
    [said] = spoken(chat, row)
    assert said.endswith(ANSWER + "<|im_end|>") and text(chat, row).endswith(said)


def test_only_the_last_answer(encoder):
    for template in (PLAIN, MARKED, CHANNELS, REASONS):
        chat = encoder(template, supervise="last")
        [row] = encode(chat, {"messages": TURNS})
        [said] = spoken(chat, row)
        assert SECOND in said and ANSWER not in said and ANSWER in text(chat, row)


# Tokenised rows


TOKENS = [1, 20, 21, 22, 1, 30, 31, 32, 2, 1, 40, 41, 42, 2, 0, 0]
MASK = [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0]
LABELS = [token if supervised else -100 for token, supervised in zip(TOKENS, MASK, strict=True)]


@pytest.mark.parametrize(
    "row",
    [
        {"tokens": TOKENS, "loss_mask": MASK},
        {"input_ids": TOKENS, "assistant_masks": [bool(supervised) for supervised in MASK]},
        {"input_ids": TOKENS, "labels": LABELS},
        {"input_ids": TOKENS, "labels": LABELS, "attention_mask": [1] * 14 + [0] * 2, "messages": TURNS},
        {"input_ids": [0] * 3 + TOKENS, "labels": [-100] * 3 + LABELS, "attention_mask": [0] * 3 + [1] * 16},
    ],
)
def test_tokenised_rows_are_taken_as_they_are(encoder, row):
    [made] = encode(encoder(), row)
    assert made.tokens.tolist() == TOKENS[:14] and made.mask.tolist() == MASK[:14]
    assert made.tokens.dtype == np.int32 and made.mask.dtype == np.uint8
    [last] = encode(encoder(supervise="last"), row)
    assert last.mask.tolist() == [0] * 11 + [1] * 3


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"tokens": TOKENS}, "tokens without loss_mask or labels"),
        ({"tokens": TOKENS, "loss_mask": MASK[1:]}, "tokens and mask of different lengths: 16 tokens, 15 in loss_mask"),
        ({"tokens": TOKENS, "loss_mask": [2] * 16}, "a mask of other values than 0 and 1: loss_mask"),
        ({"tokens": TOKENS, "loss_mask": [0.5] * 16}, "tokens or mask that are no list of integers: loss_mask"),
        ({"tokens": "1 2 3", "loss_mask": MASK}, "tokens or mask that are no list of integers: tokens"),
        ({"tokens": [2**70] * 16, "loss_mask": MASK}, "tokens or mask that are no list of integers: tokens"),
        ({"tokens": [-1] * 16, "loss_mask": MASK}, "token ids that the tokenizer lacks: -1 to -1"),
        ({"tokens": [512] * 16, "loss_mask": MASK}, "token ids that the tokenizer lacks: 512, the largest is 395"),
        ({"tokens": TOKENS, "labels": [*LABELS[1:], -100]}, "labels that are not the row's tokens: shifted by one"),
        ({"tokens": TOKENS, "labels": [7] * 16}, "labels that are not the row's tokens"),
        (
            {"tokens": TOKENS, "labels": LABELS, "attention_mask": [1, 0] * 8},
            "an attention mask that is not one run of ones",
        ),
    ],
)
def test_tokenised_rows_that_are_refused(encoder, row, expected):
    assert reason(encoder(), row).startswith(expected)


def test_messages_are_used_where_tokens_have_no_mask(encoder):
    chat = encoder()
    assert same(encode(chat, {"input_ids": TOKENS, "messages": TURNS}), encode(chat, {"messages": TURNS}))


# Templates with the traits of well-known ones


def thinking(content, thought):
    """An answer with its reasoning in each of the forms that it comes in."""
    yield {"role": "assistant", "content": content, "reasoning_content": thought}
    yield {"role": "assistant", "content": content, "reasoning": thought}
    yield {"role": "assistant", "content": content, "thinking": thought}
    yield {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": thought}, {"type": "text", "text": content}],
    }
    yield {"role": "assistant", "content": [{"type": "reasoning", "text": thought}, {"type": "text", "text": content}]}
    yield {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{content}"}


def test_reasoning_is_supervised_in_each_of_its_forms(encoder):
    chat = encoder(REASONS)
    thoughts = ("The copper follows.", "The window paints.")
    for first, second in zip(thinking(ANSWER, thoughts[0]), thinking(SECOND, thoughts[1]), strict=True):
        rows = encode(chat, {"messages": [TURNS[0], first, TURNS[2], second]})
        assert [spoken(chat, row) for row in rows] == [
            [f"<think>\n{thoughts[0]}\n</think>\n\n{ANSWER}<|im_end|>"],
            [f"<think>\n{thoughts[1]}\n</think>\n\n{SECOND}<|im_end|>"],
        ]
        assert ANSWER in text(chat, rows[1]) and thoughts[0] not in text(chat, rows[1])


def test_reasoning_between_tool_calls_stays_in_one_row(encoder):
    chat = encoder(REASONS)
    call = {"type": "function", "function": {"name": "opens", "arguments": "{}"}}
    messages = [
        TURNS[0],
        {"role": "assistant", "content": "", "reasoning_content": "It sells.", "tool_calls": [call]},
        {"role": "tool", "content": "It opens."},
        {"role": "assistant", "content": ANSWER, "reasoning_content": "It opens well."},
    ]
    [row] = encode(chat, {"messages": messages, "tools": [TOOL]})
    assert spoken(chat, row) == [
        "<think>\nIt sells.\n</think>\n\n\n<tool_call>opens{}</tool_call><|im_end|>",
        f"<think>\nIt opens well.\n</think>\n\n{ANSWER}<|im_end|>",
    ]


def test_the_thinking_mode_decides_what_is_prompt(encoder):
    [row] = encode(on := encoder(REASONS), {"messages": TURNS[:2]})
    assert spoken(on, row) == [f"<think>\n\n</think>\n\n{ANSWER}<|im_end|>"]
    off = encoder(REASONS, template_kwargs=thinking_variables(False))
    [row] = encode(off, {"messages": TURNS[:2]})
    assert spoken(off, row) == [f"{ANSWER}<|im_end|>"]
    with_reasoning = {"messages": [TURNS[0], TURNS[1] | {"reasoning_content": "It opens."}]}
    assert reason(off, with_reasoning).startswith("the generation prompt is no prefix of the rendered answer")


def test_reasoning_that_a_template_leaves_out_is_refused(encoder):
    for answer in thinking(ANSWER, "It opens."):
        if "</think>" in answer["content"]:
            expected = "the generation prompt is no prefix of the rendered answer"
            assert reason(encoder(OPENS_THINKING), {"messages": [TURNS[0], answer]}).startswith(expected)
        else:
            expected = "the template leaves out the answer's reasoning"
            assert reason(encoder(), {"messages": [TURNS[0], answer]}).startswith(expected)
    inline = {"role": "assistant", "content": f"<think>It opens.</think>{ANSWER}"}
    plain_prompt = encoder(OPENS_THINKING.replace("<think>\n'", "'"))
    expected = "the template leaves out the answer's reasoning: messages[1]"
    assert reason(plain_prompt, {"messages": [TURNS[0], inline]}) == expected


@pytest.mark.parametrize(
    ("template", "before"), [(PLAIN, TURNS[:3]), (MARKED, TURNS[:3]), (REASONS, TURNS[:3]), (OPENS_THINKING, TURNS[:1])]
)
def test_an_answer_that_stopped_within_its_thinking(encoder, template, before):
    chat = encoder(template)
    started = "<think>\nThe copper follows\nthe"
    row = {"messages": [*before, {"role": "assistant", "content": started}], "finished": False}
    rows = encode(chat, row)
    opened = "<think>\n" if template == OPENS_THINKING else ""
    assert spoken(chat, rows[-1])[-1] == started.removeprefix(opened)
    assert text(chat, rows[-1]).endswith(f"<|im_start|>assistant\n{started}")
    assert reason(chat, row | {"finished": True}) == f"thinking that is not closed: messages[{len(before)}]"


@pytest.mark.parametrize(
    ("template", "said"),
    [(REASONS, "<think>\nThe copper follows"), (CHANNELS, " analysis\nThe copper follows")],
)
def test_reasoning_that_was_cut_is_not_closed(encoder, template, said):
    chat = encoder(template)
    cut = {"role": "assistant", "content": None, "reasoning_content": "The copper follows"}
    [row] = encode(chat, {"messages": [TURNS[0], cut], "finished": False})
    assert spoken(chat, row) == [said]
    cut = cut | {"content": ANSWER[:9]}
    [row] = encode(chat, {"messages": [TURNS[0], cut], "finished": False})
    assert spoken(chat, row)[0].startswith(said) and spoken(chat, row)[0].endswith(ANSWER[:9])


def test_channels_and_two_end_tokens(encoder):
    chat = encoder(CHANNELS)
    reasoned = TURNS[3] | {"reasoning_content": "It opens."}
    rows = encode(chat, {"messages": [{"role": "developer", "content": "Be brief."}, *TURNS[:3], reasoned]})
    assert [spoken(chat, row) for row in rows] == [
        [f" final\n{ANSWER}<|endoftext|>"],
        [f" analysis\nIt opens.<|im_end|><|im_start|>assistant final\n{SECOND}<|endoftext|>"],
    ]
    assert text(chat, rows[1]).startswith(
        "<|im_start|>system\nThe current date: 2025-01-01<|im_end|><|im_start|>developer\n"
    )
    late = {"messages": [*TURNS[:2], SYSTEM, *TURNS[2:]]}
    assert reason(chat, late) == "the chat template raises on it: instructions come first"


def test_no_generation_prompt_and_a_system_prompt_that_moves(encoder):
    chat = encoder(BRACKETS)
    [row] = encode(chat, {"messages": TURNS})
    assert spoken(chat, row) == [f" {ANSWER}<|im_end|>", f" {SECOND}<|im_end|>"]
    rows = encode(chat, {"messages": [SYSTEM, *TURNS]})
    assert [spoken(chat, row) for row in rows] == [[f" {ANSWER}<|im_end|>"], [f" {SECOND}<|im_end|>"]]
    for row in rows:
        assert text(chat, row).count(SYSTEM["content"]) == 1


def test_other_names_for_roles_and_no_system_prompt(encoder):
    chat = encoder(NO_SYSTEM)
    [row] = encode(chat, {"messages": [TURNS[0], TURNS[1] | {"content": f"  {ANSWER}\n"}]})
    assert spoken(chat, row) == [f"{ANSWER}<|im_end|>"]
    assert text(chat, row).endswith(f"<|im_start|>model\n{ANSWER}<|im_end|>")
    expected = "the chat template raises on it: System role not supported"
    assert reason(chat, {"messages": [SYSTEM, *TURNS]}) == expected


def test_a_template_that_reads_parts_only(encoder):
    parts, plain = encoder(PARTS_ONLY), encoder()
    assert same(encode(parts, {"messages": [SYSTEM, *TURNS]}), encode(plain, {"messages": [SYSTEM, *TURNS]}))


def test_rows_that_a_template_raises_on_leave_the_others_alone(tmp_path, make_tokenizer):
    target = str(make_tokenizer(ALTERNATES))
    good, bad = {"messages": TURNS}, {"messages": [TURNS[0], *TURNS]}
    for name, rows in (("mixed", [good, bad, good]), ("good", [good, good])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed, alone = (prepare([tmp_path / f"{name}.jsonl"], target=target, cache=tmp_path) for name in ("mixed", "good"))
    assert mixed.examples == [
        f"{tmp_path}/mixed.jsonl:2: the chat template raises on it (Conversation roles must alternate)"
    ]
    assert Rows.open(mixed.folder).digest == Rows.open(alone.folder).digest


# Files


def test_arrays_lines_and_columns_give_the_same_rows(tmp_path, tiny_tokenizer_dir, monkeypatch):
    monkeypatch.setattr(chatfiles, "_BLOCK", 100)  # so that elements lie across blocks
    rows = [{"conversations": share_gpt([SYSTEM, *TURNS]), "tools": None, "n": n, "é": "ü"} for n in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.json").write_text(json.dumps(rows, ensure_ascii=False))
    (tmp_path / "c.json").write_text("\ufeff" + json.dumps(rows, indent=2, ensure_ascii=False))
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "e.parquet")
    digests = set()
    for path in sorted(tmp_path.iterdir()):
        report = prepare([path], target=str(tiny_tokenizer_dir), cache=tmp_path / "cache")
        assert (report.conversations, report.kept) == (30, 30)
        digests.add(Rows.open(report.folder).digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("", "[3]: the file cannot be read further (not JSON: the array is not closed)"),
        (', {"messages": [}]', "[3]: the file cannot be read further (not JSON: Expecting value)"),
        (', {"messages": [], "a": "\udcff"}]', "[3]: not UTF-8 (byte "),
        (", 7]", "[3]: not a JSON object"),
    ],
)
def test_a_broken_array_gives_what_comes_before(tmp_path, tiny_tokenizer_dir, tail, expected):
    path = tmp_path / "chats.json"
    whole = json.dumps([{"messages": TURNS}] * 3)[:-1] + tail
    path.write_bytes(whole.encode(errors="surrogateescape"))
    report = prepare([path], target=str(tiny_tokenizer_dir), cache=tmp_path)
    assert report.kept == 3 and len(report.examples) == 1
    assert report.examples[0].startswith(f"{path}{expected}")


def test_a_line_without_end_is_left_out(tmp_path, tiny_tokenizer_dir, monkeypatch):
    monkeypatch.setattr(chatfiles, "MAX_BYTES", 1 << 20)
    row = json.dumps({"messages": TURNS})
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{row}\n" + '{"messages": "' + "x" * (5 << 20) + f'"}}\n{row}\n')
    report = prepare([path], target=str(tiny_tokenizer_dir), cache=tmp_path)
    assert report.kept == 2
    assert report.examples == [f"{path}:2: not JSON (a line of more than 1 MiB)"]


def test_chunks_are_bounded_in_rows_and_in_bytes(tmp_path, monkeypatch):
    path = tmp_path / "chats.jsonl"
    lengths = [100] * 600 + [3000] * 5
    path.write_text("".join(json.dumps("x" * length) + "\n" for length in lengths))
    monkeypatch.setattr(chatfiles, "CHUNK_BYTES", 1 << 16)
    chunks = [list(chunk.rows()) for chunk in chatfiles.read_chunks([path])]
    assert [place for chunk in chunks for place, _ in chunk] == [f":{line}" for line in range(1, 606)]
    assert max(map(len, chunks)) == 256
    monkeypatch.setattr(chatfiles, "CHUNK_BYTES", 6000)
    assert {len(chunk) for chunk in chatfiles.read_chunks([path])} == {59, 12, 2, 1}


def test_tokenised_rows_in_parquet(tmp_path, tiny_tokenizer_dir):
    table = pa.table({"input_ids": [TOKENS, TOKENS], "labels": [LABELS, [7] * 16], "text": ["x", "y"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    report = prepare([tmp_path / "rows.parquet"], target=str(tiny_tokenizer_dir), cache=tmp_path)
    assert report.examples == [f"{tmp_path}/rows.parquet:2: labels that are not the row's tokens"]
    row = Rows.open(report.folder).row(0)
    assert row.tokens.tolist() == TOKENS[:14] and row.mask.tolist() == MASK[:14]


def test_each_file_is_counted(tmp_path, tiny_tokenizer_dir):
    row, files = json.dumps({"messages": TURNS}), []
    for name, lines in (("a", [row, "{", row]), ("b", [row]), ("empty", [])):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(line + "\n" for line in lines))
    report = prepare(files, target=str(tiny_tokenizer_dir), cache=tmp_path)
    counts = [(file.conversations, file.rows, file.dropped) for file in report.files]
    assert counts == [(3, 2, 1), (1, 1, 0), (0, 0, 0)]
    assert sum(file.tokens for file in report.files) == report.tokens
    assert sum(file.supervised for file in report.files) == report.supervised
    with pytest.raises(PacelineError, match="no usable row among 0 conversations"):
        prepare(files[2:], target=str(tiny_tokenizer_dir), cache=tmp_path)


def test_parquet_without_a_known_column(tmp_path, tiny_tokenizer_dir):
    pq.write_table(pa.table({"text": ["x"], "labels": [[1]]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match=r"no column messages, .* or input_ids \(found labels, text\)"):
        prepare([tmp_path / "other.parquet"], target=str(tiny_tokenizer_dir), cache=tmp_path)


def test_reading_leaves_the_row_alone():
    row = {"messages": [TURNS[0], TURNS[1] | {"thinking": "x", "tool_calls": [{"function": {"name": "f"}}]}]}
    before = json.dumps(row)
    read(row)
    assert json.dumps(row) == before
