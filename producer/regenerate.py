"""`paceline regenerate`: the target answers the prompts itself.

A drafter learns to guess its target, so its data should be the target's own answers, with the chat template, thinking
mode and sampling that will be served. Reads what `paceline prepare` reads, and rows that are prompts alone; writes what
`paceline prepare` reads (`answers.py` says how, and how a job that was killed goes on).

    turns = "last"    the answer that ends a conversation is replaced, or written where the last message asks for one
    turns = "all"     every answer is replaced, in order, each after the new ones before it

Everything before an answer is kept: system prompts, tools, earlier turns. An answer whose tool results follow is always
kept, as the results belong to its calls. A conversation ends with the first answer that a length limit cut
(`finished: false`) or that calls a tool, as what follows it in the input answers something else.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..common.chatfiles import PROMPT_CARRIERS, check_names, first_rows, read_chunks
from ..common.dataset import file_digest
from ..common.errors import ConfigError, PacelineError, counted
from ..common.forms import Refused, read_open
from .answers import Answers, RowId
from .replies import Question, Reply, Sampling, Unanswered

if TYPE_CHECKING:
    from .endpoint import Endpoint, EndpointOptions
    from .generate import LocalTarget

WINDOW = 8  # batches read ahead, of which rows of like length are put together
HOPELESS = 20  # rows refused before any answer, or left without an answer one after another, that end the job
_OWN = ("messages", "conversations", "conversation", "prompt", "system", "finished", "tools", "regenerated")


@dataclass
class Progress:
    """How far a job is. rows: of the input. left: to be asked yet. answered, refused: with those of earlier runs.
    failed: in this run, to be asked again by another. new, tokens: rows and answer tokens of this run."""

    rows: int
    left: int
    answered: int = 0
    refused: int = 0
    failed: int = 0
    new: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since it started asking."""
        return time.monotonic() - self.started

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta(self) -> float | None:
        """Seconds to the end at the mean rate of this run; None before the first row."""
        return self.left * self.seconds / self.new if self.new else None


@dataclass(frozen=True)
class RegenerateReport:
    """What the file holds now. unfinished: answers that the length limit cut. failed: rows without an answer yet."""

    path: Path
    rows: int
    answered: int
    unfinished: int
    refused: int
    failed: int
    tokens: int


@dataclass(frozen=True)
class Listener:
    """What a job tells: `say` a line now and then, `progress` after each row."""

    say: Callable[[str], None] = lambda text: None
    progress: Callable[[Progress], None] = lambda progress: None


def regenerate(
    files: Sequence[str | Path],
    out: Path,
    *,
    target: str | None = None,
    endpoint: "EndpointOptions | None" = None,
    turns: str = "last",
    sampling: Sampling | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    limit: int | None = None,
    dtype: str = "bfloat16",
    device: str | None = None,
    batch_size: int = 32,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> RegenerateReport:
    """Lets a target answer the prompts of chat files, and writes them with its answers to the JSONL file `out`.

    target: a folder, GGUF file or hub id, loaded here (with dtype, device, batch_size); or endpoint: servers to ask.
    template_kwargs: variables for the chat template, such as enable_thinking; a row's own win, and the rows written
    carry them. limit: only the first so many rows of the input.

    An `out` begun before is gone on with. ConfigError if files, target or endpoint do not fit, or if `out` was begun
    with others; PacelineError if the endpoint stays away or the disk is full; what is written then stands.
    """
    if (target is None) == (endpoint is None):
        raise ConfigError("give either a target to load here or an endpoint to ask")
    sampling, listener = sampling or Sampling(), listener or Listener()
    paths = [Path(file) for file in files]
    check_names(paths)
    settings = {
        "target": target,
        "turns": turns,
        "template_kwargs": dict(template_kwargs or {}),
        **sampling.to_json(),
        **({"body": dict(endpoint.body)} if endpoint else {}),
    }
    about = {
        "files": [{"name": str(path), "sha256": file_digest(path)} for path in paths],
        "settings": settings,
    }
    with Answers(out, about) as answers:
        job = _Job(paths, answers, turns, dict(template_kwargs or {}), sampling, limit, listener)
        if not job.progress.left:
            return job.report()
        if endpoint is not None:
            _ask_endpoint(job, endpoint)
        else:
            from .generate import LocalTarget

            listener.say(f"loading {target}")
            _ask_here(
                job,
                LocalTarget.load(
                    str(target),
                    sampling=sampling,
                    template_kwargs=job.template_kwargs,
                    dtype=dtype,
                    device=device,
                    batch_size=batch_size,
                    trust_remote_code=trust_remote_code,
                ),
            )
        return job.report()


# A conversation


class Source(NamedTuple):
    """A row of the input: its id, its file and place in words, and what it holds."""

    id: RowId
    where: str
    row: Any


def _read(paths: Sequence[Path]) -> Iterator[Source]:
    for chunk in read_chunks(paths, PROMPT_CARRIERS):
        for place, row in chunk.rows():
            number = int(place.strip(":[]")) + place.startswith("[")  # elements of an array count from 0
            yield Source(RowId(chunk.file, number), f"{paths[chunk.file]}{place}", row)


class Dialogue:
    """One row on its way: asks question by question, each with the answers so far. Refused if it asks nothing."""

    def __init__(self, source: Source, turns: str, template_kwargs: Mapping[str, Any], seed: int | None) -> None:
        if isinstance(source.row, Refused):
            raise source.row
        row = source.row
        self.source = source
        self.tokens: int | None = 0
        self._row = dict(row) if isinstance(row, Mapping) else row
        given = read_open(row)
        self._given = [_without_alias(message) for message in given.messages]
        self._tools = given.tools
        self._kwargs = {**template_kwargs, **given.variables}
        self._seed = seed
        self._asked = _turns_to_answer(self._given, turns)
        self._next = 0  # of _asked
        self._made: list[dict[str, Any]] = self._given[: self._asked[0]]
        self._finished = True

    @property
    def done(self) -> bool:
        return self._next == len(self._asked)

    def question(self) -> Question:
        """What the target is to answer now."""
        seed = None if self._seed is None else _row_seed(self._seed, self.source.id, self._next)
        return Question(list(self._made), self._tools, self._kwargs, seed)

    def take(self, reply: Reply) -> None:
        """Adds an answer and what the input has up to the next question. Raises Refused for an answer that no row may
        have, such as half a character."""
        read_open({"messages": [*self._made, reply.message], "tools": self._tools})
        self._made.append(reply.message)
        self._finished = reply.finished
        self.tokens = None if reply.tokens is None or self.tokens is None else self.tokens + reply.tokens
        at, self._next = self._asked[self._next], self._next + 1
        if not reply.finished or "tool_calls" in reply.message:
            self._next = len(self._asked)
        elif not self.done:
            self._made += self._given[at + 1 : self._asked[self._next]]

    def row(self) -> dict[str, Any]:
        """The row with its answers; fields of the input that are no part of the conversation are kept."""
        row = {name: value for name, value in self._row.items() if name not in _OWN}
        row |= {"messages": self._made, "finished": self._finished}
        row.pop("chat_template_kwargs", None)
        optional = {"tools": self._tools, "chat_template_kwargs": self._kwargs or None}
        return row | {name: value for name, value in optional.items() if value is not None}


def _without_alias(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under one name: templates get their others when a row is read."""
    return {key: value for key, value in message.items() if key != "thinking" or "reasoning_content" not in message}


def _turns_to_answer(messages: Sequence[Mapping[str, Any]], turns: str) -> list[int]:
    """Indices of the messages that the target is to write; the last may be one past the end. Raises Refused."""
    roles = [message["role"] for message in messages]
    spoken = [at for at, role in enumerate(roles) if role not in ("system", "developer")]
    if not spoken:
        raise Refused("nothing to answer: no user message")
    if roles[spoken[0]] == "assistant":
        raise Refused("the first message is the assistant's")
    ends_open = roles[-1] != "assistant"
    if turns == "last":
        return [len(roles) if ends_open else len(roles) - 1]
    following = [*roles[1:], None]
    written = [at for at, role in enumerate(roles) if role == "assistant" and following[at] != "tool"]
    return [*written, len(roles)] if ends_open else written


def _row_seed(seed: int, row: RowId, turn: int) -> int:
    """One seed for each answer of a job, the same whichever run asks for it (below 2^31, as servers want it)."""
    digest = hashlib.sha256(f"{seed} {row.file} {row.line} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


# The job


class _Job:
    """What both ways of asking share: the rows to ask, and what becomes of them."""

    def __init__(
        self,
        paths: list[Path],
        answers: Answers,
        turns: str,
        template_kwargs: dict[str, Any],
        sampling: Sampling,
        limit: int | None,
        listener: Listener,
    ) -> None:
        self.template_kwargs = template_kwargs
        self.listener = listener
        self._paths = paths
        self._answers = answers
        self._turns = turns
        self.sampling = sampling
        self._limit = limit
        self._barren = 0  # rows in a row without an answer
        self._held: list[tuple[Source, Refused]] = []  # refusals before the first answer
        rows, left = self._count_rows()
        self.progress = Progress(rows, left, answers.answered, answers.refused)

    def _count_rows(self) -> tuple[int, int]:
        """How many rows there are, and how many of them are not done."""
        rows = left = 0
        for source in self._sources():
            rows += 1
            left += not self._answers.has(source.id)
        return rows, left

    def _sources(self) -> Iterator[Source]:
        return first_rows(_read(self._paths), self._limit)

    def dialogues(self) -> Iterator[Dialogue]:
        """The rows that are not done, in order. Those that ask nothing are refused on the way."""
        for source in self._sources():
            if self._answers.has(source.id):
                continue
            try:
                yield Dialogue(source, self._turns, self.template_kwargs, self.sampling.seed)
            except Refused as refused:
                self.reject(source, refused)

    def finish(self, dialogue: Dialogue) -> None:
        self.relent()
        self._answers.add(dialogue.source.id, dialogue.row(), dialogue.tokens)
        self.progress.answered += 1
        self.progress.left -= 1
        self.progress.new += 1
        self.progress.tokens += dialogue.tokens or 0
        self.listener.progress(self.progress)

    def reject(self, source: Source, refused: Refused) -> None:
        """A row that can't be asked, or one that the target can't answer."""
        reason = str(refused)
        self._answers.refuse(source.id, source.where, reason)
        self.progress.refused += 1
        self.progress.left -= 1
        self.listener.say(f"{source.where}: refused: {reason}")
        self.listener.progress(self.progress)

    def refuse(self, dialogue: Dialogue, refused: Refused) -> None:
        """A row that the target does not answer. Many before the first answer are no fault of the rows: they end the
        job, and are not written down."""
        if self.progress.new:
            self.reject(dialogue.source, refused)
            return
        self._held.append((dialogue.source, refused))
        if len(self._held) >= HOPELESS:
            raise ConfigError(f"the first {HOPELESS} answers are of no use; the last: {refused}")

    def fail(self, dialogue: Dialogue, error: Unanswered) -> None:
        """A row that another run is to ask again."""
        self.progress.failed += 1
        self.progress.left -= 1
        self.listener.say(f"{dialogue.source.where}: no answer: {error}")
        self.listener.progress(self.progress)
        self._barren += 1
        if self._barren >= HOPELESS:
            raise PacelineError(
                f"{self._barren} rows in a row have no answer; the last: {error}. The same command goes on from here"
            )

    def relent(self) -> None:
        """The target answers: what it refused before was the rows' fault."""
        self._barren = 0
        for source, refused in self._held:
            self.reject(source, refused)
        self._held.clear()

    def served_by(self, model: str) -> None:
        self._answers.served_by(model)

    def report(self) -> RegenerateReport:
        self.relent()
        if not self._answers.answered and not self.progress.failed:
            raise PacelineError(
                f"none of {counted(self.progress.rows, 'row')} could be answered; {self._answers.refused_path}"
            )
        found = self._answers
        return RegenerateReport(
            path=found.path,
            rows=self.progress.rows,
            answered=found.answered,
            unfinished=found.unfinished,
            refused=found.refused,
            failed=self.progress.failed,
            tokens=found.tokens,
        )


# Asking a target here


def _ask_here(job: _Job, target: "LocalTarget") -> None:
    """Batches of like length out of a window of rows; what has further turns goes into the next window."""
    job.listener.say(f"{counted(job.progress.left, 'row')} to answer on {target.model.device}, {target.described()}")
    job.progress.started = time.monotonic()
    source, window = job.dialogues(), []
    while True:
        window += islice(source, max(WINDOW * target.batch_size - len(window), 0))
        if not window:
            return
        window = _answer_window(job, target, window)


def _answer_window(job: _Job, target: "LocalTarget", window: list[Dialogue]) -> list[Dialogue]:
    """Answers one question of each; returns those that have another."""
    asked = []
    for dialogue in window:
        question = dialogue.question()
        try:
            asked.append((dialogue, question, target.prompt(question)))
        except Refused as refused:
            job.reject(dialogue.source, refused)
    again = []
    for batch in target.batches([prompt for _, _, prompt in asked]):
        chosen = [asked[index] for index in batch]
        replies = target.answer([question for _, question, _ in chosen], [prompt for _, _, prompt in chosen])
        for (dialogue, _, _), reply in zip(chosen, replies, strict=True):
            try:
                if isinstance(reply, Refused):
                    raise reply
                dialogue.take(reply)
            except Refused as refused:
                job.refuse(dialogue, refused)
                continue
            if dialogue.done:
                job.finish(dialogue)
            else:
                again.append(dialogue)
    return again


# Asking servers


def _ask_endpoint(job: _Job, options: "EndpointOptions") -> None:
    try:
        asyncio.run(_ask_all(job, options))
    except ExceptionGroup as group:
        raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _ask_all(job: _Job, options: "EndpointOptions") -> None:
    """As many rows at once as `concurrency`, each taken from the input when another is done: memory stays bounded."""
    from .endpoint import Endpoint

    async with Endpoint(options, job.sampling, job.listener.say) as endpoint:
        job.served_by(str(endpoint.model))
        job.listener.say(
            f"{counted(job.progress.left, 'row')} to answer by {endpoint.model} at {', '.join(endpoint.urls)}"
        )
        job.progress.started = time.monotonic()
        source = job.dialogues()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(options.concurrency, job.progress.left)):
                group.create_task(_ask_in_turn(job, endpoint, source))


async def _ask_in_turn(job: _Job, endpoint: "Endpoint", source: Iterator[Dialogue]) -> None:
    for dialogue in source:
        try:
            while not dialogue.done:
                dialogue.take(await endpoint.answer(dialogue.question()))
        except Refused as refused:
            job.refuse(dialogue, refused)
        except Unanswered as error:
            job.fail(dialogue, error)
        else:
            job.finish(dialogue)
