"""What the README and docs/ tell people to type is there: commands, options, settings, files, run files."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import click
import pytest
from paceline.common.cli import cli
from paceline.common.runfile import RunFile

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def typed(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and words of each indented command of ours, without what is said beside it."""
    joined = page.read_text().replace("\\\n", "\0")  # a command's next line, which still counts
    number = 0
    for line in joined.splitlines():
        number += 1 + line.count("\0")
        if not re.match(r"    (sudo )?paceline \w", line) or " [-" in line:  # the latter is a synopsis
            continue
        parts = [re.split(r"\s{3,}", part.strip())[0] for part in line.split("\0")]
        words = shlex.split(" ".join(parts), comments=True)
        yield (
            number - len(parts) + 1,
            [word for word in words[words.index("paceline") + 1 :] if word not in ("&", "...")],
        )


COMMANDS = {f"{page.name}:{number}": words for page in PAGES for number, words in typed(page)}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_is_one_of_ours(words):
    """Its options and their number of values, and the settings that are overridden."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"{command.name} has no command {name!r}"
        command = found
        context = click.Context(command, parent=context, info_name=name)
    values, rest, _ = command.make_parser(context).parse_args(list(words))  # raises click.UsageError
    assert not rest, f"{command.name} takes no {rest}"
    for parameter in command.params:
        given = values.get(parameter.name or "")
        if isinstance(parameter.type, click.Choice) and given is not None:
            for value in given if parameter.multiple else [given]:
                parameter.type.convert(value, parameter, context)
    for setting in values.get("overrides") or ():
        section, _, key = setting.partition("=")[0].partition(".")
        field = RunFile.model_fields[section]
        assert not key or key in getattr(field.annotation, "model_fields", {}), f"there is no setting {setting}"


@pytest.mark.parametrize(
    "words",
    [
        ["rings", "--wach"],
        ["ring"],
        ["status", "one", "two"],
        ["bench", "step", "--rows-kind", "short"],
        ["up", "run.toml", "--set", "trainer.epoch=2"],
    ],
)
def test_what_is_not_ours_is_found(words):
    with pytest.raises((click.UsageError, AssertionError)):
        test_a_command_is_one_of_ours(words)


def test_commands_were_found():
    names = {words[0] for words in COMMANDS.values()}
    assert {"up", "prepare", "regenerate", "eval", "export", "plan", "scale", "bench"} <= names and len(COMMANDS) > 50


def test_every_reason_for_a_refusal_is_in_the_table():
    code = "".join(
        (ROOT / name).read_text()
        for name in ("producer/chat.py", "producer/prepare.py", "common/chatfiles.py", "common/forms.py")
    )
    reasons = {reason.partition("{")[0] for reason in re.findall(r'Refused\(\s*f?"([^"]+)', code)}
    table = (ROOT / "docs/data.md").read_text().partition("## What is refused")[2]
    said = table.replace("tool_calls or tools is not", "tool_calls is not a list of objects, tools is not")
    assert len(reasons) > 30 and sorted(reason for reason in reasons if reason not in said) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_to_is_there(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
    for script in re.findall(r"python (benchmarks/\w+\.py)", page.read_text()):
        assert (ROOT / script).exists(), script


def test_the_run_file_of_the_readme_is_one():
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("    name = "))
    block = takewhile(lambda line: not line or line.startswith("    "), lines[start:])
    run = RunFile.model_validate(tomllib.loads("\n".join(line.removeprefix("    ") for line in block)))
    assert (run.workers.count, run.trainer.ranks, run.drafter.block_size) == (3, 1, 16)
