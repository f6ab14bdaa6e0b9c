"""The run file: loading, overrides, messages, writing back, and its reference."""

import json
import re
from pathlib import Path

import pytest
from paceline.common.errors import ConfigError, UsageError
from paceline.common.init import choose_split, run_text, suggest_mask_token, write_run_file
from paceline.common.runfile import RunFile, keys, load, reference_markdown, to_toml

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))

TEXT = """\
name = "demo"
output = "runs/demo"

[target]
path = "org/model"

[data]
files = ["a.jsonl", "/abs/b.parquet"]

[trainer]
epochs = 2
"""


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return path


def test_defaults_and_absolute_paths(run_path: Path) -> None:
    run = load(run_path)
    assert run.trainer.epochs == 2 and run.trainer.ranks == 1
    assert run.output == str(run_path.parent / "runs/demo")
    assert [file.path for file in run.data.files] == [str(run_path.parent / "a.jsonl"), "/abs/b.parquet"]
    assert {file.weight for file in run.data.files} == {1.0}
    assert run.target.path == "org/model", "a hub id is no path"


def test_files_with_weights(run_path: Path, tmp_path: Path) -> None:
    mixed = 'files = ["a.jsonl", {path = "b.json", weight = 0.25}]'
    run_path.write_text(TEXT.replace('files = ["a.jsonl", "/abs/b.parquet"]', mixed))
    run = load(run_path)
    folder = run_path.parent
    assert [(file.path, file.weight) for file in run.data.files] == [
        (str(folder / "a.jsonl"), 1.0),
        (str(folder / "b.json"), 0.25),
    ]
    tables = '\n[[data.files]]\npath = "a.jsonl"\n[[data.files]]\npath = "b.json"\nweight = 0.25\n'
    run_path.write_text(TEXT.replace('files = ["a.jsonl", "/abs/b.parquet"]', "") + tables)
    assert load(run_path) == run
    again = tmp_path / "again.toml"
    again.write_text(to_toml(run))
    assert load(again) == run
    assert load(run_path, ['data.files=[{path="/c.jsonl", weight=2}]']).data.files[0].weight == 2.0
    run_path.write_text(TEXT + tables.replace("0.25", "0"))
    with pytest.raises(ConfigError, match="not TOML"):  # files twice
        load(run_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ('[[data.files]]\npath = "a"\nweight = 0', r"run\.toml:10: data\.files\.weight = 0: must be greater than 0$"),
        ('[[data.files]]\npath = "a"\nwieght = 2', r"run\.toml:10: .*wieght; did you mean data\.files\.weight\?$"),
        ("[[data.files]]\nweight = 2", r"run\.toml:8: data\.files\.path is missing$"),
        ("files = [3]", r"run\.toml:8: data\.files has 3: must be a text or a table$"),
        ('files = "a.jsonl"', r"run\.toml:8: data\.files = \"a\.jsonl\": must be a list, such as \[\"a\.jsonl\"\]$"),
    ],
)
def test_bad_files_of_a_mix(run_path: Path, files: str, message: str) -> None:
    head = TEXT.partition("files =")[0].replace("[data]\n", "" if files.startswith("[[") else "[data]\n")
    run_path.write_text(head + ("\n" if files.startswith("[[") else "") + files + "\n")
    with pytest.raises(ConfigError, match=message):
        load(run_path)


def test_a_target_in_a_folder_is_a_path(run_path: Path) -> None:
    (run_path.parent / "org/model").mkdir(parents=True)
    assert load(run_path).target.path == str(run_path.parent / "org/model")


def test_overrides(run_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run = load(
        run_path,
        [
            "trainer.epochs=7",
            "optimizer.lr = 1e-3",
            "stream.order=strict",
            'workers.devices=["cuda:0", "cpu"]',
            "checkpoint.every_steps=none",
            "output=here",
            "name=7",
            "logging.wandb=2026",
            'optimizer={schedule="wsd", decay=0.5}',
        ],
    )
    assert (run.trainer.epochs, run.optimizer.lr, run.stream.order) == (7, 1e-3, "strict")
    assert run.workers.devices == ["cuda:0", "cpu"] and run.checkpoint.every_steps is None
    assert run.output == str(elsewhere / "here"), "relative to the current folder, unlike paths in the file"
    assert (run.name, run.logging.wandb) == ("7", "2026")
    assert (run.optimizer.schedule, run.optimizer.decay, run.optimizer.lr) == ("wsd", 0.5, 1e-3)


@pytest.mark.parametrize("text", ["trainer.epochs", "=3", "a b=3", "trainer..epochs=1"])
def test_malformed_override(run_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="key=value"):
        load(run_path, [text])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epoch = 3", r"run\.toml:12: unknown key trainer\.epoch; did you mean trainer\.epochs\?$"),
        ("lr = 3", r"run\.toml:12: unknown key trainer\.lr; did you mean optimizer\.lr\?$"),
        ("zzzz = 3", r"run\.toml:12: unknown key trainer\.zzzz$"),
        ("[trainers]\nranks = 1", r"run\.toml:12: unknown key trainers; did you mean trainer"),
        ("ranks = 0", r"run\.toml:12: trainer\.ranks = 0: must be greater than 0$"),
        ("ranks = true", r"run\.toml:12: trainer\.ranks = true: must be a valid integer$"),
        ('ranks = "2"', r'run\.toml:12: trainer\.ranks = "2": must be a valid integer$'),
        ("max_hours = inf", r"run\.toml:12: trainer\.max_hours = Infinity: must be a finite number$"),
        ('dtype = "int8"', r"run\.toml:12: trainer\.dtype = \"int8\": must be 'float32', 'bfloat16' or 'float16'$"),
        ('devices = ["gpu"]', r'run\.toml:12: trainer\.devices = "gpu": must be "cpu", "cuda" or "cuda:N"'),
        ("[drafter]\nblock_size = 1\nlayers = 0", r"run\.toml:14: drafter\.layers = 0: .* \(and 1 more\)$"),
        ("ranks 3", r"run\.toml:12: not TOML: "),
        (
            "[stream]\ntoken_budget = 64",
            r"run\.toml: stream\.token_budget \(64\) is less than data\.max_length \(3072\)",
        ),
        ('[optimizer]\nschedule = "wsd"\nwarmup = 0.5\ndecay = 0.6', r"more than the whole run"),
        ("[[optimizer]]", r"run\.toml:12: optimizer must be a table, \[optimizer\]$"),
    ],
)
def test_bad_files_are_named_by_line(run_path: Path, line: str, message: str) -> None:
    run_path.write_text(TEXT + line + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        load(run_path)
    assert "\n" not in str(caught.value)


def test_bad_overrides_are_named(run_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--set: unknown key stream\.slot; did you mean stream\.slots\?$"):
        load(run_path, ["stream.slot=3"])
    with pytest.raises(ConfigError, match=r"^--set: stream\.slots = \"many\": must be a valid integer$"):
        load(run_path, ["stream.slots=many"])


EMPTY = {
    "output": 'output = ""',
    "target.path": '[target]\npath = " "',
    "data.files": '[data]\nfiles = ["a.jsonl", ""]',
    "data.files.path": '[[data.files]]\npath = ""\nweight = 2',
    "data.rows": '[data]\nrows = ""\nfiles = ["a.jsonl"]',
    "stream.ring_dir": '[stream]\nring_dir = ""',
    "stream.record_to": '[stream]\nrecord_to = "\\t"',
    "drafter.init_from": '[drafter]\ninit_from = ""',
}


@pytest.mark.parametrize("key", EMPTY)
def test_an_empty_path_is_no_folder(run_path: Path, key: str) -> None:
    tables = {"output": 'output = "out"', "target": '[target]\npath = "org/m"', "data": '[data]\nfiles = ["a.jsonl"]'}
    run_path.write_text("\n".join(['name = "demo"', *(tables | {key.partition(".")[0]: EMPTY[key]}).values()]) + "\n")
    with pytest.raises(ConfigError, match=rf"run\.toml:\d+: {key}(\.path)? = \"( |\\t)?\": must ") as caught:
        load(run_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["output", "target.path", "data.rows", "stream.ring_dir", "stream.record_to"])
def test_an_empty_path_is_no_override(run_path: Path, key: str) -> None:
    for value in ("", '""', "' '"):
        with pytest.raises(ConfigError, match=rf'^--set: {key} = " ?": must not be empty'):
            load(run_path, [f"{key}={value}"])


def test_missing_keys_and_files(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match=r"run\.toml: no such run file \(`paceline init` writes one\)"):
        load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a text file"):
        load(path)
    path.write_text('name = "x"\noutput = "o"\n[target]\n[data]\nfiles = ["a"]\n')
    with pytest.raises(ConfigError, match=r"run\.toml:3: target\.path is missing"):
        load(path)
    path.write_text('name = "x"\noutput = "o"\n[target]\npath = "t"\n[data]\n')
    with pytest.raises(ConfigError, match=r"give exactly one of data\.files and data\.rows"):
        load(path)
    path.write_text('name = "../x"\noutput = "o"\n[target]\npath = "t"\n[data]\nrows = "r"\n')
    with pytest.raises(ConfigError, match=r'run\.toml:1: name = "\.\./x": must be lower-case letters, digits, - and _'):
        load(path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("workers.devices=cpu", 'workers.devices = "cpu": must be a list, such as ["cpu"]'),
        ("target.layer_ids=1", "target.layer_ids = 1: must be a list, such as [1]"),
        ('workers.devices=["gpu0"]', 'workers.devices = "gpu0": must be "cpu", "cuda" or "cuda:N"'),
        ("worker.count=2", "unknown key worker; did you mean workers?"),
        ("Trainer.epochs=2", "unknown key Trainer; did you mean trainer?"),
    ],
)
def test_what_would_be_right_is_said(run_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(run_path, [override])
    assert str(caught.value) == f"--set: {said}"


def test_a_file_of_another_editor(run_path: Path) -> None:
    run = load(run_path)
    text = run_path.read_text()
    run_path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load(run_path) == run
    run_path.write_text("# a\u2028b\n" + text)
    with pytest.raises(ConfigError, match=r"run\.toml:6: unknown key target\.pth"):
        run_path.write_text(run_path.read_text().replace("[target]\npath", "[target]\npth = 1\npath"))
        load(run_path)


def test_a_resolved_run_loads_as_itself(run_path: Path, tmp_path: Path) -> None:
    run = load(run_path, ["evaluation.at_end=false", "checkpoint.every_minutes=none", "target.layer_ids=[1, 3]"])
    again = tmp_path / "other" / "again.toml"
    again.parent.mkdir()
    again.write_text(to_toml(run))
    assert load(again) == run
    odd = run.model_copy(update={"output": '/a "b"\\c\x7f\té'})
    again.write_text(to_toml(odd))
    assert load(again) == odd


def test_reference_is_current() -> None:
    assert (ROOT / "docs/runfile.md").read_text() == reference_markdown(), "run `make reference`"


def test_reference_has_every_key() -> None:
    text = reference_markdown()
    assert all(f"| `{key}` |" in text for key in keys())
    assert "None" not in text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path: Path) -> None:
    run = load(path)
    assert run.drafter.mask_token_id is not None
    assert run.trainer.batches_per_step % run.trainer.ranks == 0, "each rank has the same number of batches a step"


def test_there_are_examples() -> None:
    assert {"smollm2.toml", "qwen3-8b-3-1.toml", "qwen3-8b-5-3.toml"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize(
    ("gpus", "split"),
    [(0, "2-1"), (1, "1-1"), (2, "1-1"), (3, "2-1"), (4, "3-1"), (6, "4-2"), (8, "5-3"), (16, "10-6")],
)
def test_init(tmp_path: Path, gpus: int, split: str) -> None:
    assert str(choose_split(gpus)) == split
    path = tmp_path / "run.toml"
    write_run_file(path, run_text("Qwen/Qwen3-8B", gpus))
    run = load(path)
    assert f"{run.workers.count}-{run.trainer.ranks}" == split
    assert (run.name, run.drafter.mask_token_id) == ("qwen3-8b", 151669)
    assert run.target.path == "Qwen/Qwen3-8B"
    with pytest.raises(ConfigError, match="--force"):
        write_run_file(path, path.read_text())


def test_init_with_a_chosen_split(tmp_path: Path) -> None:
    text = run_text("some/thing", 8, split="6-2", data="chat.jsonl", name="mine")
    path = tmp_path / "run.toml"
    write_run_file(path, text)
    run = load(path)
    assert (run.workers.count, run.trainer.ranks, run.name) == (6, 2, "mine")
    assert run.drafter.mask_token_id is None and "# mask_token_id" in text
    with pytest.raises(UsageError, match=r"^--split 6:2: give it as WORKERS-RANKS"):
        run_text("t", 8, split="6:2")
    with pytest.raises(UsageError, match=r"^--name Mine: lower-case letters, digits"):
        run_text("t", 8, name="Mine")


@pytest.mark.parametrize(
    ("rows", "added", "token"),
    [(8, [], 4), (4, ["<|reserved_0|>"], 3), (4, ["<eos>"], None)],
)
def test_mask_token_from_a_local_target(tmp_path: Path, rows: int, added: list[str], token: int | None) -> None:
    vocabulary = {str(index): index for index in range(4 - len(added))}
    tokens = [{"id": 3, "content": text} for text in added]
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": {"vocab": vocabulary}}))
    assert suggest_mask_token(str(tmp_path)) == token


def test_run_file_is_frozen(run_path: Path) -> None:
    run = load(run_path)
    assert isinstance(run, RunFile)
    with pytest.raises(ValueError, match="frozen"):
        run.name = "other"


def test_every_setting_is_described() -> None:
    rows = [line for line in reference_markdown().splitlines() if line.startswith("| `")]
    assert not [row for row in rows if re.search(r"\| *(None)? *\|$", row)]
