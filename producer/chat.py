"""Conversations to tokens with an exact loss mask, through the target tokenizer's own chat template.

A conversation is rendered as text, tokenised once, and the character spans of its answers mapped to tokens:

    <|im_start|>user\\nWho?<|im_end|>\\n<|im_start|>assistant\\nMe.<|im_end|>\\n
    `------------ the prompt, generation prompt included -----------'^  ^         ^
                                                    supervised: answer  end token, the row ends after it

- A template with generation markers says itself where its answers are. For others an answer is what the rendering of
  messages[:k+1] adds to that of messages[:k] with the generation prompt.
- Where the rendering of messages[:k+1] is no prefix of the whole (templates that strip earlier thinking, or end the
  last answer differently), each answer becomes a row of its own, rendered as the conversation that ends with it.
- An answer's span ends with its end token (`<|im_end|>`), not with white space after it. Decoding the tokens of the
  span must give the answer's text and end token exactly. What doesn't is `Refused` with a reason, never guessed.
- `finished: false`: the last answer stopped at a length limit. It is supervised, but no end token follows it.

Templates run in the sandbox of transformers' own renderer with the same filters and globals (a test compares the two),
but with a fixed date, so that the same data give the same tokens on any day. Neither transformers nor torch is needed
once the `ChatFormat` is there, so the processes that tokenise stay small.
"""

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import numpy as np
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ..common.errors import ConfigError

FIXED_DATE = datetime(2025, 1, 1)
"""Today's date, to templates that ask."""

# Unicode noncharacters that mark where a generation block starts and ends in the rendered text.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# What a template raises on messages it can't render: its own errors and those of the Python values it works on.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class Refused(Exception):
    """A conversation, or one answer of it, that can't be used. `reason` is one of a few that are counted; `detail` says
    more about this one."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Encoded(NamedTuple):
    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T], 1 where supervised; the last token is


class _Answer(NamedTuple):
    """Where an answer is in a rendering, in characters, and the end token that follows it."""

    start: int
    end: int
    end_token: str


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer and its chat templates, as values that can be sent to another process.

    tokenizer: JSON of a `tokenizers.Tokenizer`. templates: by name, "default" and perhaps "tool_use".
    special_tokens: what templates see as bos_token, eos_token and so on.
    """

    tokenizer: str
    templates: Mapping[str, str]
    special_tokens: Mapping[str, Any]


class ChatEncoder:
    """Encodes conversations in one chat format. ConfigError if a template has a syntax error.

    supervise: "all" answers or only the "last" of each conversation.
    template_kwargs: variables for the template, such as enable_thinking; a row's own `chat_template_kwargs` win.
    """

    def __init__(self, chat: ChatFormat, *, supervise: str = "all", template_kwargs: Mapping[str, Any] | None = None):
        self.chat = chat
        self.supervise = supervise
        self.template_kwargs = dict(template_kwargs or {})
        # A post-processor only adds special tokens, which the template writes itself, and trims offsets.
        self.tokenizer: Tokenizer = Tokenizer.from_str(
            json.dumps(json.loads(chat.tokenizer) | {"post_processor": None, "truncation": None, "padding": None})
        )
        self._templates = {name: _compile(text) for name, text in chat.templates.items()}
        self._marked = {name for name, text in chat.templates.items() if _GENERATION_TAG.search(text)}

    @cached_property
    def end_tokens(self) -> dict[str, int]:
        """Text and id of the tokens that may end an answer: the special ones, longest first."""
        special = {
            token.content: index for index, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        }
        eos = self.chat.special_tokens.get("eos_token")
        if isinstance(eos, str) and (index := self.tokenizer.token_to_id(eos)) is not None:
            special[eos] = index
        return dict(sorted(special.items(), key=lambda item: -len(item[0])))

    def encode(self, row: Any) -> list[Encoded | Refused]:
        """The rows of a conversation: one, or one per answer. `row`: a dict with `messages` and optionally `finished`,
        `tools` and `chat_template_kwargs`. Raises Refused if none of it can be used."""
        messages = _messages(row)
        finished = row.get("finished", True)
        if not isinstance(finished, bool):
            raise Refused("finished is neither true nor false")
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        _check_answers(messages, answers)
        messages = messages[: answers[-1] + 1]
        rendering = _Rendering(self, messages, _tools(row), _template_kwargs(row))
        if all(rendering.whole.startswith(rendering.text(at + 1)) for at in answers[:-1]):
            chosen = answers if self.supervise == "all" else answers[-1:]
            return [self._encode_answers(rendering, chosen, finished)]
        rows: list[Encoded | Refused] = []
        for at in answers if self.supervise == "all" else answers[-1:]:
            ends_here = _Rendering(self, messages[: at + 1], rendering.tools, rendering.variables)
            try:
                rows.append(self._encode_answers(ends_here, [at], finished or at != answers[-1]))
            except Refused as refused:
                rows.append(refused)
        return rows

    def _encode_answers(self, rendering: "_Rendering", chosen: list[int], finished: bool) -> Encoded:
        """One row of a rendering, the answers `chosen` supervised, cut after the last supervised token."""
        encoding = self.tokenizer.encode(rendering.whole, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), np.uint8)
        last = 0
        for at, answer in zip(chosen, rendering.answers(chosen), strict=True):
            text = rendering.whole[answer.start : answer.end]
            _check_text(text, rendering.messages[at], at)
            first, last = _token_at(starts, ends, answer.start), _token_at(starts, ends, answer.end)
            if last == len(ids) or starts[last] != answer.end or ids[last] != self.end_tokens[answer.end_token]:
                raise Refused("the end token is not a token of its own", f"messages[{at}]")
            self._check_decoding(encoding.ids, first, last, text, at)
            mask[first : last + 1] = 1
        if not finished:
            mask[last] = 0
        supervised = np.flatnonzero(mask)
        length = supervised[-1] + 1 if len(supervised) else 0
        return Encoded(ids[:length], mask[:length])

    def _check_decoding(self, ids: list[int], first: int, last: int, text: str, at: int) -> None:
        """Decoding ids[first:last] gives `text`; after the token before it, as some decoders strip a leading space."""
        before = ids[max(first - 1, 0) : first]
        context = self.tokenizer.decode(before, skip_special_tokens=False)
        decoded = self.tokenizer.decode(before + ids[first:last], skip_special_tokens=False).removeprefix(context)
        if decoded == text:
            return
        # A normalizer may have composed characters; the text is still the same to Unicode.
        normalized = self.tokenizer.normalizer is not None
        if normalized and unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", text):
            return
        raise Refused("the answer's tokens do not decode to its text", f"messages[{at}]")

    def render(self, messages: list[dict[str, Any]], tools: Any, variables: Mapping[str, Any], prompt: bool) -> str:
        """The text of `messages`, with the generation prompt if `prompt`; generation blocks between marks."""
        template = self._templates[self._template_name(tools)]
        arguments = {**self.chat.special_tokens, **self.template_kwargs, **variables}
        try:
            return template.render(
                **arguments | {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            )
        except _TEMPLATE_ERRORS as error:
            raise Refused("the chat template raises on it", _first_line(error)) from error

    def marks(self, tools: Any) -> bool:
        """Whether the template for these tools has generation markers."""
        return self._template_name(tools) in self._marked

    def _template_name(self, tools: Any) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"


class _Rendering:
    """The renderings of one conversation that finding its answers takes."""

    def __init__(
        self, encoder: ChatEncoder, messages: list[dict[str, Any]], tools: Any, variables: Mapping[str, Any]
    ) -> None:
        self.encoder = encoder
        self.messages = messages
        self.tools = tools
        self.variables = variables
        self._marked_whole = encoder.render(messages, tools, variables, False)
        self.whole = _unmarked(self._marked_whole)

    def text(self, count: int, prompt: bool = False) -> str:
        """The rendering of messages[:count]."""
        return _unmarked(self.encoder.render(self.messages[:count], self.tools, self.variables, prompt))

    def answers(self, chosen: list[int]) -> list[_Answer]:
        """The answers messages[k], k in `chosen`. Raises Refused where one can't be told."""
        spans = self._marked_spans() if self.encoder.marks(self.tools) else None
        found = []
        for at in chosen:
            start, end = spans[at] if spans else self._span_between_prefixes(at)
            found.append(self._without_end_token(start, end, at))
        return found

    def _span_between_prefixes(self, at: int) -> tuple[int, int]:
        before, after = self.text(at, prompt=True), self.text(at + 1)
        if not (after.startswith(before) and self.whole.startswith(after)):
            raise Refused("the generation prompt is no prefix of the rendered answer", f"messages[{at}]")
        return len(before), len(after)

    def _marked_spans(self) -> dict[int, tuple[int, int]]:
        """Spans of the generation blocks by the message they belong to."""
        spans: list[tuple[int, int]] = []
        open_at = length = 0
        for piece in re.split(f"([{_OPEN}{_CLOSE}])", self._marked_whole):
            if piece == _OPEN:
                open_at = length
            elif piece == _CLOSE:
                spans.append((open_at, length))
            else:
                length += len(piece)
        answers = [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(spans) != len(answers):
            raise Refused("the template's generation markers do not match the answers", f"{len(spans)} blocks")
        return dict(zip(answers, spans, strict=True))

    def _without_end_token(self, start: int, end: int, at: int) -> _Answer:
        text = self.whole[start:end].rstrip()
        for token in self.encoder.end_tokens:
            if text.endswith(token):
                text = text[: -len(token)]
                if token in text:
                    raise Refused("the answer contains its end token", f"messages[{at}]: {token}")
                return _Answer(start, start + len(text), token)
        raise Refused("the template puts no end token after the answer", f"messages[{at}]")


# The input


def _messages(row: Any) -> list[dict[str, Any]]:
    """The messages of a row as templates want them: text content, no null values, tool arguments as objects."""
    if not isinstance(row, Mapping):
        raise Refused("not a JSON object")
    messages = row.get("messages")
    if isinstance(messages, str):  # Parquet files sometimes hold them as JSON
        messages = _parsed(messages, "messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("no messages")
    return [_message(message, at) for at, message in enumerate(messages)]


def _message(message: Any, at: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refused("a message without role", f"messages[{at}]")
    clean = {key: value for key, value in message.items() if value is not None}
    clean["content"] = _content(message.get("content"), at)
    if calls := clean.pop("tool_calls", None):
        clean["tool_calls"] = _tool_calls(calls, at)
    # As transformers does: reasoning goes by several names, and templates read one of them.
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((clean[name] for name in names if name in clean), None)
    if reasoning is not None:
        clean = {"thinking": reasoning, **clean, "reasoning_content": reasoning}
    _check_characters(clean, at)
    return clean


def _content(content: Any, at: int) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    if not isinstance(content, str):
        raise Refused("content that is not text", f"messages[{at}]")
    return content


def _tool_calls(calls: Any, at: int) -> list[Any]:
    """Tool calls, each one's arguments as an object: the same tokens whether they were given as text or object."""
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


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("a field that should hold JSON does not", f"{where}: {_first_line(error)}") from error


def _check_characters(value: Any, at: int) -> None:
    """Refuse text that no tokenizer takes or that marks positions here."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Refused("a lone surrogate", f"messages[{at}], character {error.start}") from error
        for character, name in (("\0", "NUL"), (_OPEN, "noncharacter"), (_CLOSE, "noncharacter")):
            if character in value:
                raise Refused("a NUL or noncharacter", f"messages[{at}]: {name} at {value.index(character)}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_characters(key, at)
            _check_characters(item, at)
    elif isinstance(value, list):
        for item in value:
            _check_characters(item, at)


def _check_answers(messages: list[dict[str, Any]], answers: list[int]) -> None:
    if not answers:
        raise Refused("no assistant message")
    first = next(at for at, message in enumerate(messages) if message["role"] not in ("system", "developer"))
    if first == answers[0]:
        raise Refused("the first message is the assistant's")


def _tools(row: Mapping[str, Any]) -> Any:
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise Refused("tools is not a list of objects")
    _check_characters(tools, 0)
    return tools or None


def _template_kwargs(row: Mapping[str, Any]) -> Mapping[str, Any]:
    variables = row.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise Refused("chat_template_kwargs is not an object")
    return variables or {}


def _check_text(text: str, message: Mapping[str, Any], at: int) -> None:
    """The rendered answer ends in the content given; templates may trim it, move thinking, and append tool calls."""
    content = message["content"].rpartition("</think>")[2].strip()
    kept = content in text if "tool_calls" in message else text.rstrip().endswith(content)
    if not kept:
        raise Refused("the template changes the answer", f"messages[{at}]")


# The text


def _token_at(starts: np.ndarray, ends: np.ndarray, position: int) -> int:
    """The first token at or after a character position. Raises Refused if a token lies across it."""
    token = int(np.searchsorted(starts, position))
    if token > 0 and ends[token - 1] > position and starts[token - 1] < position:
        raise Refused("a token lies across an answer's boundary", f"character {position}")
    return token


def _unmarked(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "") if _OPEN in text else text


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


# The template


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: its body between two marks."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: jinja2.runtime.Macro) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Dict:
    """`dict` without the methods a template could break out with."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` whose names can't start with an underscore, which keeps templates from Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=...)` works
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace attribute may not start with an underscore: {name}")


def _strftime_now(format: str) -> str:
    return FIXED_DATE.strftime(format)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compile(text: str) -> jinja2.Template:
    """The template in the environment that transformers documents for chat templates (utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the tokenizer's chat template, line {error.lineno}: {error.message}") from error
