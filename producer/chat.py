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
- `finished: false`: the last answer stopped at a length limit. It is supervised, but no end token follows it. If it
  stopped within its thinking, the rendering is the prompt and the answer as it is: a template would close the thinking.

Templates run in the sandbox of transformers' own renderer with the same filters and globals (a test compares the two),
but with a fixed date, so that the same data give the same tokens on any day. Neither transformers nor torch is needed
once the `ChatFormat` is there, so the processes that tokenise stay small.
"""

import bisect
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
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
from tokenizers import Encoding, Tokenizer

from ..common.errors import ConfigError
from ..common.forms import CLOSE, OPEN, Conversation, Encoded, Refused, first_line, read

FIXED_DATE = datetime(2025, 1, 1)
"""Today's date, to templates that ask."""

_GROUP_CHARACTERS = 1 << 18
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


class _Answer(NamedTuple):
    """Where an answer is in a rendering, in characters, and the end token that follows it.

    written: of an answer that was cut, where what was written ends; it may have been cut within its thinking, and have
    no end token in the rendering either ("")."""

    start: int
    end: int
    end_token: str
    written: int | None = None


class Outline(NamedTuple):
    """A row before it is tokenised: its text, and its supervised answers, each with its message's index."""

    text: str
    answers: list[tuple[int, _Answer]]


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer and its chat templates, as values that can be sent to another process.

    tokenizer: JSON of a `tokenizers.Tokenizer`. templates: by name, "default" and perhaps "tool_use".
    special_tokens: what templates see as bos_token, eos_token and so on.
    """

    tokenizer: str
    templates: Mapping[str, str]
    special_tokens: Mapping[str, Any]


def thinking_variables(thinking: bool | None) -> dict[str, Any]:
    """The template variables of a thinking mode, by both names that templates read. None: the template's default."""
    return {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}


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
        self._takes_parts: dict[str, bool] = {}

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

    @cached_property
    def vocabulary_bound(self) -> int:
        """One more than the tokenizer's largest token id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, row: Any) -> list[Encoded | Refused]:
        """The rows of a conversation, in any of the forms of `forms.read`: one, or one per answer. Tokenised rows are
        taken as they are. Raises Refused if none of it can be used."""
        outlines = self.outline(row)
        made = iter(self.tokenise([outline for outline in outlines if isinstance(outline, Outline)]))
        rows = [next(made) if isinstance(outline, Outline) else outline for outline in outlines]
        if len(rows) == 1 and isinstance(rows[0], Refused):
            raise rows[0]
        return rows

    def outline(self, row: Any) -> "list[Outline | Encoded | Refused]":
        """What `encode` does before it tokenises."""
        conversation = read(row)
        if isinstance(conversation, Encoded):
            return [self._take(conversation)]
        chosen = conversation.answers if self.supervise == "all" else conversation.answers[-1:]
        chosen = [at for at in chosen if conversation.messages[at].get("weight", 1)]
        if not chosen:
            raise Refused("answers of weight 0 alone")
        renderings, end = _Renderings(self, conversation), chosen[-1] + 1
        unfinished = None if conversation.finished else conversation.answers[-1]
        whole = renderings.text(end)
        if all(whole.startswith(renderings.text(at + 1)) for at in chosen[:-1]):
            return [renderings.outline(end, chosen, chosen[-1] != unfinished)]
        rows: list[Outline | Encoded | Refused] = []
        for at in chosen:
            try:
                rows.append(renderings.outline(at + 1, [at], at != unfinished))
            except Refused as refused:
                rows.append(refused)
        return rows

    def tokenise(self, outlines: "Sequence[Outline]") -> list[Encoded | Refused]:
        """The row of each outline. Many at once take less time each: the tokenizer's tables stay in the CPU's cache."""
        rows: list[Encoded | Refused] = []
        for group in _groups(outlines):
            texts = [outline.text for outline in group]
            for outline, encoding in zip(
                group, self.tokenizer.encode_batch(texts, add_special_tokens=False), strict=True
            ):
                try:
                    rows.append(self._mask(outline, encoding))
                except Refused as refused:
                    rows.append(refused)
        return rows

    def _take(self, row: Encoded) -> Encoded:
        """A tokenised row, cut after the last supervised token."""
        if len(row.tokens) and row.tokens.max() >= self.vocabulary_bound:
            detail = f"{row.tokens.max()}, the largest is {self.vocabulary_bound - 1}"
            raise Refused("token ids that the tokenizer lacks", detail)
        mask = row.mask
        if self.supervise == "last":
            before = np.flatnonzero(mask[:-1] < mask[1:])  # the last run of supervised tokens starts after the last
            mask = np.where(np.arange(len(mask)) > before[-1], mask, 0).astype(np.uint8) if len(before) else mask
        return cut_after_supervised(row.tokens, mask)

    def _mask(self, outline: "Outline", encoding: Encoding) -> Encoded:
        """The tokens of an outline, its answers supervised, cut after the last supervised token."""
        ids, whole = encoding.ids, outline.text
        mask = np.zeros(len(ids), np.uint8)
        for at, answer in outline.answers:
            text = whole[answer.start : answer.end]
            first = _token_at(encoding, answer.start)
            if answer.written is None:
                last = _token_at(encoding, answer.end)
                start, _ = encoding.token_to_chars(last) or (len(whole), 0)
                if start != answer.end or ids[last] != self.end_tokens[answer.end_token]:
                    raise Refused("the end token is not a token of its own", f"messages[{at}]")
                past = last + 1
            else:
                # Up to the last token that lies within what was written.
                ends = [end for _, end in encoding.offsets]
                last = past = bisect.bisect_right(ends, answer.written)
                text = whole[answer.start : ends[last - 1]] if last > first else ""
            self._check_decoding(ids, first, last, text, at)
            mask[first:past] = 1
        return cut_after_supervised(np.array(ids, np.int32), mask)

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
        name = self._template_name(tools)
        if name not in self._takes_parts:
            self._takes_parts[name] = self._wants_parts(name)
        if self._takes_parts[name]:
            messages = [message | {"content": _parts(message["content"])} for message in messages]
        return self._render(name, messages, tools, variables, prompt)

    def _render(self, name: str, messages: list[dict[str, Any]], tools: Any, variables: Any, prompt: bool) -> str:
        arguments = {**self.chat.special_tokens, **self.template_kwargs, **variables}
        try:
            return self._templates[name].render(
                **arguments | {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            )
        except _TEMPLATE_ERRORS as error:
            raise Refused("the chat template raises on it", first_line(error)) from error

    def _wants_parts(self, name: str) -> bool:
        """Whether a template reads content as a list of parts only, as some of multimodal models do: such a one leaves
        out or raises on a text, and renders the same text as a part."""
        word = "paceline-probe"

        def renders(content: Any) -> bool:
            try:
                return word in self._render(name, [{"role": "user", "content": content}], None, {}, False)
            except Refused:
                return False

        return not renders(word) and renders(_parts(word))

    def prompt_text(self, asked: Conversation) -> str:
        """What a target reads before it answers: the messages and the generation prompt. Raises Refused."""
        return _unmarked(self.render(asked.messages, asked.tools, asked.variables, True))

    def answer_text(self, row: Mapping[str, Any]) -> str:
        """What comes after that in the rendering of a row that ends with an answer; a cut answer's end is as in
        `encode`. Raises Refused if the prompt's text is no prefix of the row's."""
        conversation = read(row)
        assert isinstance(conversation, Conversation)
        renderings, end = _Renderings(self, conversation), len(conversation.messages)
        prompt, whole = renderings.text(end - 1, prompt=True), renderings.text(end)
        if not whole.startswith(prompt):
            raise Refused("the generation prompt is no prefix of the rendered answer", f"messages[{end - 1}]")
        return whole[len(prompt) :]

    def marks(self, tools: Any) -> bool:
        """Whether the template for these tools has generation markers."""
        return self._template_name(tools) in self._marked

    def _template_name(self, tools: Any) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"


class _Renderings:
    """The renderings of a conversation's beginnings, messages[:end], each made once; they tell where answers are."""

    def __init__(self, encoder: ChatEncoder, conversation: Conversation) -> None:
        self.encoder = encoder
        self.messages = conversation.messages
        self._conversation = conversation
        self._marked: dict[tuple[int, bool], str] = {}

    def text(self, end: int, prompt: bool = False) -> str:
        """The text of messages[:end], with the generation prompt if `prompt`."""
        return _unmarked(self._render(end, prompt))

    def _render(self, end: int, prompt: bool) -> str:
        if not prompt and end == len(self.messages) and self._conversation.open_thinking is not None:
            return _continued(self._render(end - 1, True), self._conversation.open_thinking)
        if (end, prompt) not in self._marked:
            tools, variables = self._conversation.tools, self._conversation.variables
            self._marked[end, prompt] = self.encoder.render(self.messages[:end], tools, variables, prompt)
        return self._marked[end, prompt]

    def outline(self, end: int, chosen: list[int], finished: bool) -> Outline:
        """The row of messages[:end] with the answers `chosen`, the last of which has ended or not."""
        whole, answers = self.text(end), self.answers(end, chosen)
        for at, answer in zip(chosen, answers, strict=True):
            if answer.end_token:
                _check_text(whole[answer.start : answer.end], self.messages[at], at)
        if not finished:
            last = answers[-1]
            written = last.start + _written(whole[last.start : last.end], self.messages[chosen[-1]])
            answers[-1] = last._replace(written=written)
        return Outline(whole, list(zip(chosen, answers, strict=True)))

    def answers(self, end: int, chosen: list[int]) -> list[_Answer]:
        """The answers messages[k], k in `chosen`, in the text of messages[:end]. Refused where one can't be told."""
        whole = self.text(end)
        spans = self._marked_spans(end) if self.encoder.marks(self._conversation.tools) else None
        found = []
        for at in chosen:
            if at == len(self.messages) - 1 and self._conversation.open_thinking is not None:
                found.append(_Answer(len(self.text(at, prompt=True)), len(whole), ""))
                continue
            start, past = spans[at] if spans else self._span_between_prefixes(whole, at)
            found.append(self._without_end_token(whole, start, past, at))
        return found

    def _span_between_prefixes(self, whole: str, at: int) -> tuple[int, int]:
        before, after = self.text(at, prompt=True), self.text(at + 1)
        if not (after.startswith(before) and whole.startswith(after)):
            raise Refused("the generation prompt is no prefix of the rendered answer", f"messages[{at}]")
        return len(before), len(after)

    def _marked_spans(self, end: int) -> dict[int, tuple[int, int]]:
        """Spans of the generation blocks by the message they belong to."""
        spans: list[tuple[int, int]] = []
        open_at = length = 0
        for piece in re.split(f"([{OPEN}{CLOSE}])", self._render(end, False)):
            if piece == OPEN:
                open_at = length
            elif piece == CLOSE:
                spans.append((open_at, length))
            else:
                length += len(piece)
        written = end - (end == len(self.messages) and self._conversation.open_thinking is not None)
        answers = [at for at in self._conversation.answers if at < written]
        if len(spans) != len(answers):
            raise Refused("the template's generation markers do not match the answers", f"{len(spans)} blocks")
        return dict(zip(answers, spans, strict=True))

    def _without_end_token(self, whole: str, start: int, end: int, at: int) -> _Answer:
        text = whole[start:end].rstrip()
        for token in self.encoder.end_tokens:
            if text.endswith(token):
                text = text[: -len(token)]
                if token in text:
                    raise Refused("the answer contains its end token", f"messages[{at}]: {token}")
                return _Answer(start, start + len(text), token)
        raise Refused("the template puts no end token after the answer", f"messages[{at}]")


# The text


def _check_text(text: str, message: Mapping[str, Any], at: int) -> None:
    """The rendered answer holds the reasoning and tool calls given and ends in the content given; templates may trim
    them, put reasoning elsewhere in the answer, and append tool calls."""
    thought, closing, content = message["content"].rpartition("</think>")
    kept = content.strip() in text if "tool_calls" in message else text.rstrip().endswith(content.strip())
    if not kept:
        raise Refused("the template changes the answer", f"messages[{at}]")
    reasoning = message.get("reasoning_content") or (thought.rpartition("<think>")[2] if closing else "")
    if reasoning.strip() not in text:
        raise Refused("the template leaves out the answer's reasoning", f"messages[{at}]")
    for call in message.get("tool_calls", ()):
        inner = call.get("function")
        name = str((inner if isinstance(inner, Mapping) else call).get("name", ""))
        if name not in text and json.dumps(name)[1:-1] not in text:
            raise Refused("the template leaves out the answer's tool calls", f"messages[{at}]: {name}")


def _written(text: str, message: Mapping[str, Any]) -> int:
    """How much of a rendered answer, in characters, was written before it was cut: a template closes reasoning that is
    all there is, but the target had not."""
    reasoning = message.get("reasoning_content", "").strip()
    if message["content"].strip() or "tool_calls" in message or not reasoning:
        return len(text)
    return text.rindex(reasoning) + len(reasoning)


def _continued(prompt: str, answer: str) -> str:
    """A prompt and what the target wrote after it; the prompt may have opened its thinking."""
    opened = prompt.rstrip().endswith("<think>")
    return prompt + (answer.removeprefix("<think>").lstrip("\n") if opened else answer)


def _groups(outlines: Sequence[Outline]) -> Iterator[list[Outline]]:
    """In groups of a quarter of a million characters: a token of an encoding takes a hundred bytes and more."""
    group, size = [], 0
    for outline in outlines:
        group.append(outline)
        size += len(outline.text)
        if size >= _GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def cut_after_supervised(tokens: np.ndarray, mask: np.ndarray) -> Encoded:
    """A row without what follows its last supervised token; empty if there is none."""
    supervised = np.flatnonzero(mask)
    length = int(supervised[-1]) + 1 if len(supervised) else 0
    return Encoded(tokens[:length], mask[:length])


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _token_at(encoding: Encoding, position: int) -> int:
    """The first token at or after a character position. Raises Refused if a token lies across it."""
    token = encoding.char_to_token(position)  # far less than all offsets as Python values
    if token is None:  # no token holds the character there
        token = bisect.bisect_left(encoding.offsets, (position, 0))
        start, end = encoding.offsets[token - 1] if token else (position, position)
    else:
        start, end = encoding.token_to_chars(token) or (position, position)
        while token and encoding.token_to_chars(token - 1) == (position, position):
            token -= 1  # tokens of no characters are what comes after, too
    if start < position < end:
        raise Refused("a token lies across an answer's boundary", f"character {position}")
    return token


def _unmarked(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "") if OPEN in text else text


# The template


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: its body between two marks."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: jinja2.runtime.Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


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
