"""The forms that conversations come in, read into one.

    messages, conversations, conversation    a list of messages, or the same as JSON text
    {"role": …, "content": …}                a message: text, or a list of parts; reasoning_content, tool_calls, …
    {"from": "human", "value": …}            a message in ShareGPT's words
    tokens | input_ids, with loss_mask | assistant_masks | labels    a row that is tokenised already

beside them `system` (a system prompt), `tools`, `finished` and `chat_template_kwargs`. What comes out is what chat
templates are written for: text content, no null values, reasoning under each of its names, tools and tool calls in
OpenAI's form with arguments as objects. What can't be read is `Refused` with a reason; nothing is guessed or left out.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

_MESSAGES = ("messages", "conversations", "conversation")
_TOKENS = ("tokens", "input_ids")
_MASKS = ("loss_mask", "assistant_masks", "labels")
CARRIERS = (*_MESSAGES, *_TOKENS)
"""The columns that a row can come in: it has one of them at least."""
OPEN_CARRIERS = (*_MESSAGES, "prompt")
"""The columns that `read_open` takes a row from."""
COLUMNS = (*CARRIERS, *_MASKS, "attention_mask", "system", "tools", "finished", "chat_template_kwargs")
"""What is read of a row; other columns are left alone."""

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Unicode noncharacters that mark start and end of a generation block in a rendered text. Data may not hold them."""

_SHOWN = 8  # names, in a refusal
_IGNORED_LABEL = -100  # torch's ignore_index
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_call": "assistant",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = {"thinking": "thinking", "reasoning": "text"}  # and the field that holds their text
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Refused(Exception):
    """A conversation, or one answer of it, that can't be used. `reason` is one of a few that are counted; `detail` says
    more about this one."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


class Encoded(NamedTuple):
    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T], 1 where supervised; the last token is


@dataclass(frozen=True)
class Conversation:
    """messages: in OpenAI's form, content always a text; they end with an answer. answers: indices of the assistant's.
    tools: a list, or None. finished: whether the last answer has ended. variables: for the chat template.
    open_thinking: the last answer as it was written, if it stopped within its thinking."""

    messages: list[dict[str, Any]]
    answers: list[int]
    tools: list[Any] | None
    finished: bool
    variables: Mapping[str, Any]
    open_thinking: str | None


def read(row: Any) -> Conversation | Encoded:
    """A row of a chat file, as JSON or Parquet gave it. Tokens with a mask or labels win over messages beside them.

    The mask of an `Encoded` may be all zero; its tokens are not checked against a vocabulary. Raises Refused."""
    if not isinstance(row, Mapping):
        raise Refused("not a JSON object")
    tokens = next((row[name] for name in _TOKENS if row.get(name) is not None), None)
    masks = [name for name in _MASKS if row.get(name) is not None]
    if tokens is not None and masks:
        return _tokenised(tokens, masks[0], row)
    name = next((name for name in _MESSAGES if row.get(name) is not None), None)
    if name is not None:
        return _conversation(row, row[name], name)
    if tokens is not None:
        raise Refused("tokens without loss_mask or labels")
    raise Refused("no messages", _found(row))


def read_open(row: Any) -> Conversation:
    """A row that need not end with an answer, nor have one: what a target is to answer. A row that is one text under
    `prompt` counts as the user's message. Raises Refused."""
    if not isinstance(row, Mapping):
        raise Refused("not a JSON object")
    name = next((name for name in _MESSAGES if row.get(name) is not None), None)
    if name is not None:
        messages = _all_messages(row, row[name], name)
    elif isinstance(row.get("prompt"), str):
        messages = _all_messages(row, [{"role": "user", "content": row["prompt"]}], "prompt")
    else:
        raise Refused("no messages", _found(row))
    return Conversation(
        messages=messages,
        answers=[at for at, message in enumerate(messages) if message["role"] == "assistant"],
        tools=_tools(row.get("tools")),
        finished=True,
        variables=_variables(row),
        open_thinking=None,
    )


def _found(names: Iterable[Any]) -> str:
    """What stands where something else was looked for, as a refusal's detail."""
    some = [str(name) for name in islice(dict.fromkeys(names), _SHOWN + 1)]
    return f"found {', '.join(some[:_SHOWN])}{', …' * (len(some) > _SHOWN)}" if some else "nothing in it"


# Conversations


def _all_messages(row: Mapping[str, Any], messages: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(messages, str):  # Parquet files sometimes hold them as JSON
        messages = _parsed(messages, name)
    if not isinstance(messages, list) or not messages:
        raise Refused("no messages")
    return _with_system([_message(message, at) for at, message in enumerate(messages)], row.get("system"))


def _variables(row: Mapping[str, Any]) -> Mapping[str, Any]:
    variables = row.get("chat_template_kwargs")
    if isinstance(variables, str):
        variables = _parsed(variables, "chat_template_kwargs") if variables.strip() else None
    if variables is not None and not isinstance(variables, Mapping):
        raise Refused("chat_template_kwargs is not an object")
    return variables or {}


def _conversation(row: Mapping[str, Any], messages: Any, name: str) -> Conversation:
    messages = _all_messages(row, messages, name)
    finished = row.get("finished")
    if finished is not None and not isinstance(finished, bool):
        raise Refused("finished is neither true nor false")
    variables = _variables(row)
    answers = _answers(messages)
    still_open = [at for at in answers if _is_open(messages[at]["content"])]
    if still_open and (finished is not False or still_open != answers[-1:]):
        raise Refused("thinking that is not closed", f"messages[{still_open[0]}]")
    return Conversation(
        messages=messages[: answers[-1] + 1],
        answers=answers,
        tools=_tools(row.get("tools")),
        finished=finished is not False,
        variables=variables,
        open_thinking=messages[answers[-1]]["content"] if still_open else None,
    )


def _is_open(content: str) -> bool:
    return content.lstrip().startswith("<think>") and "</think>" not in content


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """With the system prompt that stands in a column of its own."""
    if system is None or system == "":
        return messages
    message = _message({"role": "system", "content": system}, 0)
    if messages[0]["role"] != "system":
        return [message, *messages]
    if messages[0]["content"] != message["content"]:
        raise Refused("two system prompts", "system and messages[0]")
    return messages


def _answers(messages: list[dict[str, Any]]) -> list[int]:
    """Indices of the assistant's messages; a conversation has some, and something before them."""
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise Refused("no assistant message", f"roles: {', '.join(dict.fromkeys(m['role'] for m in messages))}")
    first = next(at for at, message in enumerate(messages) if message["role"] not in ("system", "developer"))
    if first == answers[0]:
        raise Refused("the first message is the assistant's")
    return answers


def _message(message: Any, at: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise Refused("a message without role", f"messages[{at}]")
    role = message.get("role") or message.get("from")
    if not isinstance(role, str):
        raise Refused("a message without role", f"messages[{at}]")
    clean = {key: value for key, value in message.items() if value is not None and key not in ("from", "value")}
    content = message.get("content")
    content = message.get("value") if content is None else content
    if role == "function_call":
        clean["tool_calls"], content = _named_calls(content, at), None
    clean["role"] = _ROLES.get(role, role)
    clean["content"], reasoning = _content(content, at)
    if (call := clean.pop("function_call", None)) and "tool_calls" not in clean:
        clean["tool_calls"] = _named_calls(call, at)
    if calls := clean.pop("tool_calls", None):
        clean["tool_calls"] = _tool_calls(calls, at)
    if clean.get("weight", 1) not in (0, 1):
        raise Refused("a weight other than 0 and 1", f"messages[{at}]")
    _set_reasoning(clean, reasoning, at)
    _check_characters(clean, f"messages[{at}]")
    return clean


def _named_calls(content: Any, at: int) -> list[Any]:
    """Calls as {"name", "arguments"}, one or a list, or as JSON text: ShareGPT's, and those of OpenAI's former API."""
    calls = _parsed(content, f"messages[{at}]") if isinstance(content, str) else content
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise Refused("a function_call without name", f"messages[{at}]")
    return [{"type": "function", "function": dict(call)} for call in calls]


def _content(content: Any, at: int) -> tuple[str, str]:
    """The text and the reasoning of a message's content, which may come in parts."""
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise Refused("content that is not text", f"messages[{at}]: {type(content).__name__}")
    texts, reasoning = [], []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        value = part.get(_REASONING_PARTS.get(kind, "text")) if isinstance(part, Mapping) else part
        if kind not in _TEXT_PARTS and kind not in _REASONING_PARTS:
            raise Refused("content that is not text", f"messages[{at}]: a part of type {kind}")
        if not isinstance(value, str):
            raise Refused("content that is not text", f"messages[{at}]: a part without text")
        (texts if kind in _TEXT_PARTS else reasoning).append(value)
    return "".join(texts), "".join(reasoning)


def _set_reasoning(message: dict[str, Any], from_parts: str, at: int) -> None:
    """Reasoning goes by several names and templates read one of them: as transformers does, it gets all that matter."""
    given = from_parts or next((message[name] for name in _REASONING if name in message), None)
    if given is None:
        return
    if not isinstance(given, str):
        raise Refused("reasoning that is not text", f"messages[{at}]")
    for name in _REASONING:
        message.pop(name, None)
    if given:
        message |= {"thinking": given, "reasoning_content": given}


def _tool_calls(calls: Any, at: int) -> list[Any]:
    """Tool calls, each one's arguments as an object: the same tokens whether they were given as text or object."""
    if isinstance(calls, str):
        calls = _parsed(calls, f"messages[{at}].tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise Refused("tool_calls is not a list of objects", f"messages[{at}]")
    found = []
    for call in calls:
        call = {key: value for key, value in call.items() if value is not None}
        inner = call.get("function")
        if isinstance(inner, Mapping):
            call["function"] = {**inner, "arguments": _arguments(inner.get("arguments"), at)}
        else:
            call["arguments"] = _arguments(call.get("arguments"), at)
        found.append(call)
    return found


def _arguments(arguments: Any, at: int) -> Any:
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"messages[{at}].tool_calls") if arguments.strip() else None
    return {} if arguments is None else arguments


def _tools(tools: Any) -> list[Any] | None:
    """Tools as a server hands them to the template: bare functions are wrapped."""
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Refused("tools is not a list of objects")
    tools = [_parsed(tool, "tools") if isinstance(tool, str) else tool for tool in tools]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise Refused("tools is not a list of objects")
    _check_characters(tools, "tools")
    bare = [isinstance(tool.get("name"), str) and "function" not in tool and "type" not in tool for tool in tools]
    return [{"type": "function", "function": tool} if b else tool for tool, b in zip(tools, bare, strict=True)] or None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("a field that should hold JSON does not", f"{where}: {first_line(error)}") from error


def _check_characters(value: Any, where: str) -> None:
    """Refuse text that no tokenizer takes or that marks positions here."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Refused("a lone surrogate", f"{where}, character {error.start}") from error
        for character, name in (("\0", "NUL"), (OPEN, "noncharacter"), (CLOSE, "noncharacter")):
            if character in value:
                raise Refused("a NUL or noncharacter", f"{where}: {name} at {value.index(character)}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_characters(key, where)
            _check_characters(item, where)
    elif isinstance(value, list):
        for item in value:
            _check_characters(item, where)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


# Tokenised rows


def _tokenised(tokens: Any, name: str, row: Mapping[str, Any]) -> Encoded:
    """Tokens with a mask of 0 and 1, or with labels: the token itself where supervised, -100 elsewhere."""
    ids = _integers(tokens, "tokens")
    values = _integers(row[name], name)
    if len(values) != len(ids):
        raise Refused("tokens and mask of different lengths", f"{len(ids)} tokens, {len(values)} in {name}")
    if name == "labels":
        mask = values != _IGNORED_LABEL
        if not np.array_equal(values[mask], ids[mask]):
            shifted = len(ids) > 1 and np.array_equal(values[:-1][mask[:-1]], ids[1:][mask[:-1]])
            detail = "shifted by one: a label stands at its own token" if shifted else ""
            raise Refused("labels that are not the row's tokens", detail)
    elif np.any(values & ~1):
        raise Refused("a mask of other values than 0 and 1", name)
    else:
        mask = values == 1
    if (attended := row.get("attention_mask")) is not None:
        ids, mask = _without_padding(ids, mask, _integers(attended, "attention_mask"))
    return Encoded(ids.astype(np.int32), mask.astype(np.uint8))


def _integers(values: Any, name: str) -> np.ndarray:
    """int64 [T], of a list of integers and nothing else."""
    if not isinstance(values, list) or not {type(value) for value in values} <= {int, bool}:
        raise Refused("tokens or mask that are no list of integers", name)
    try:
        array = np.array(values, np.int64)
    except OverflowError as error:
        raise Refused("tokens or mask that are no list of integers", f"{name}: {first_line(error)}") from error
    if name == "tokens" and np.any((array < 0) | (array > np.iinfo(np.int32).max)):
        raise Refused("token ids that the tokenizer lacks", f"{array.min()} to {array.max()}")
    return array


def _without_padding(ids: np.ndarray, mask: np.ndarray, attended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without padding on either side, which a packed batch has no use for."""
    at = np.flatnonzero(attended)
    if len(attended) != len(ids) or (len(at) and not np.all(attended[at[0] : at[-1] + 1] == 1)):
        raise Refused("an attention mask that is not one run of ones")
    kept = slice(at[0], at[-1] + 1) if len(at) else slice(0, 0)
    return ids[kept], mask[kept]
