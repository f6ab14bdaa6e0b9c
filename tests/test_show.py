"""What `paceline prepare` prints: counts, faults and rows."""

import json

import pytest
from paceline.common.cli import main
from paceline.common.errors import ConfigError
from paceline.common.rows import Rows
from paceline.common.runfile import load
from paceline.consumer.describe import describe
from paceline.producer.prepare import prepare
from paceline.producer.show import show

QUESTION, ANSWER = "Who sells\x1b[2J it?", "The  market.\nIt opens é well."


def chat(question, answer):
    return json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})


@pytest.fixture
def files(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text("\n".join([chat(QUESTION, ANSWER), "{", chat("The river?", "The garden opens.")]))
    two.write_text(chat("The planet?", "The engine sells."))
    return [one, two]


@pytest.fixture
def target(tiny_tokenizer_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return str(tiny_tokenizer_dir)


def test_supervised_tokens_are_green(files, target):
    rows = Rows.open(prepare(files, target=target).folder)
    legend, first, second = show(rows, 2)
    assert "green" in legend.plain
    green = [first.plain[span.start : span.end] for span in first.spans if "green" in str(span.style)]
    assert green == [ANSWER + "<|im_end|>"]
    assert "\\x1b[2J" in first.plain and "\x1b" not in first.plain
    assert f"row 2 ({files[1]}): " in second.plain, "files in turn"


def test_marks_stand_in_for_colour(files, target, capsys):
    assert main(["prepare", *map(str, files), "--target", target, "--show", "9"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "supervised tokens: ⟦like this⟧\n" in out
    assert out.count("\nrow ") == 3
    assert f"<|im_start|>assistant\n⟦{ANSWER}<|im_end|>⟧\n" in out
    whole, marked = (part[part.index("\nrow 0") :] for part in (out.replace("⟦", "").replace("⟧", ""), out))
    rows = Rows.open(prepare(files, target=target).folder)
    assert "".join(text.plain + "\n" for text in list(show(rows, 9))[1:]) == whole
    assert marked.count("⟦") == marked.count("⟧") == 3


def test_what_was_made_is_told(files, target, capsys, monkeypatch):
    command = ["prepare", *map(str, files), "--target", target]
    assert main(command) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("3 rows of 4 conversations in ") and not out[0].endswith("(prepared before)")
    assert out[1].endswith("% supervised; 0 rows cut") or "supervised; 0 rows cut" in out[1]
    assert out[2].startswith(f"    {files[0]}: 2 rows, ") and out[2].endswith(" tokens, 1 dropped")
    assert out[4:] == [
        "1 dropped: not JSON",
        f"    {files[0]}:2: not JSON (an object over several lines: each row is one line, or an element of an array)",
    ]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("(prepared before)")


def test_copies_are_told(files, target, capsys):
    """What a run holds out may then be among what it trains on."""
    assert main(["prepare", str(files[0]), str(files[0]), "--target", target]) == 0
    said = "2 rows the same as an earlier one: what is held out may be trained on too"
    assert capsys.readouterr().out.splitlines()[2] == said
    assert main(["prepare", str(files[0]), "--target", target]) == 0
    assert "the same as" not in capsys.readouterr().out


def test_a_run_of_weighted_files(files, target, tiny_target_dir, tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(
        f'name = "t"\noutput = "out"\n[target]\npath = "{tiny_target_dir}"\nlayer_ids = [1, 2]\n[drafter]\nlayers = 2\n'
        '[data]\nheld_out = 0\nfiles = ["one.jsonl", {path = "two.jsonl", weight = 3}]\n'
    )
    assert main(["prepare", str(path), "--show", "1"]) == 0
    out = capsys.readouterr().out
    spare = "set drafter.mask_token_id to a token that these data never use: 396 past the tokenizer, 3 <|mask|>"
    assert out.splitlines()[-1] == spare
    assert f"    {files[1]}: 1 row, " in out and "weight 3: about 3 uses in an epoch\n" in out
    assert out.count("\nrow ") == 1


@pytest.mark.parametrize(
    ("token", "said"), [(9999, "outside the target's"), (2, "is the target's eos token"), (1, "occurs in the data")]
)
def test_a_mask_token_that_cannot_serve_is_said_before_a_run(files, tiny_target_dir, tmp_path, capsys, token, said):
    path = tmp_path / "run.toml"
    path.write_text(
        f'name = "t"\noutput = "out"\n[target]\npath = "{tiny_target_dir}"\n[data]\nheld_out = 0\n'
        f'files = ["one.jsonl"]\n[drafter]\nlayers = 1\nmask_token_id = {token}\n'
    )
    assert main(["prepare", str(path)]) == 78
    assert said in capsys.readouterr().err
    with pytest.raises(ConfigError, match=said):
        describe(load(path))
