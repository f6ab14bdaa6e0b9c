"""What the two ways of asking a target share: how to sample, and what an answer is.

`generate.py` asks a target loaded here, `endpoint.py` one behind an OpenAI-compatible API; `regenerate.py` drives both.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..common.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. None leaves a choice to the target: to its generation config here, to the server there.

    temperature: 0 is greedy. top_k: 0 keeps all. seed: of the whole job; None draws anew each time.
    """

    max_new_tokens: int = 1024
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError("max_new_tokens must be 1 or more")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ConfigError("temperature must be finite and not negative")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError("top_p must be in (0, 1]")
        if self.top_k is not None and self.top_k < 0:
            raise ConfigError("top_k must not be negative")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Question(NamedTuple):
    """A conversation up to where the target speaks, as chat templates and chat APIs take it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    seed: int | None = None

    def to_row(self) -> dict[str, Any]:
        return {"messages": self.messages, "tools": self.tools, "chat_template_kwargs": self.template_kwargs}


class Reply(NamedTuple):
    """An answer: an assistant message, whether it ended by itself, and its length in tokens (None: not told)."""

    message: dict[str, Any]
    finished: bool
    tokens: int | None


class Unanswered(Exception):
    """A question got no answer this time, by no fault of its own; another run asks it again."""
