"""A target behind an OpenAI-compatible chat API: vLLM, SGLang, or whatever else speaks it.

Many questions are asked at once over kept connections (asyncio), as many as `concurrency`: the server batches them.
What can pass is tried again, with a pause that doubles and is drawn at random, so that the questions of a server that
comes back do not all come in one moment:

    no connection                   as long as it takes: the server is away. After `patience` seconds the job ends
    cut off, 429, 502, 503, 504     as long as it takes: it is busy. After `patience` seconds without any answer, and
                                    no less than `timeout`, the job ends
    408, 409, 425, other 5xx        `tries` times
    no answer within `timeout`      likewise
    200 without a usable answer     likewise
    401, 403, 404, redirects        never: the job ends
    other 4xx                       never: the question is refused, with the server's words

A pause is the server's own Retry-After where it names one. Of several servers, one that is away is passed over.

After `tries` the question is `Unanswered`: it keeps its place, and another run asks it again.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from ..common.errors import ConfigError, PacelineError, UsageError, counted
from ..common.forms import Refused
from .replies import Question, Reply, Sampling, Unanswered

MOST_BYTES = 32 << 20  # of one response; more is no answer but a fault
LONGEST_PAUSE = 60.0
BETWEEN_VISITS = 10.0  # seconds between two requests to a server that is away while another answers
LONGEST_RETRY_AFTER = 300.0  # a server that asks for more is asked again after this
_AWAY = frozenset({429, 502, 503, 504})
_PASSING = frozenset({408, 409, 425})


@dataclass(frozen=True)
class EndpointOptions:
    """Where and how to ask.

    urls: base URLs of servers of the same model, asked in turn. model: its name there (None: the only one served).
    timeout: seconds for one whole answer. patience: seconds that the servers may be away before the job ends (at least
    `timeout` if they take connections, as an answer may be under way). body: fields added to each request. pause:
    seconds before a second try.
    """

    urls: tuple[str, ...]
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 64
    tries: int = 6
    timeout: float = 600.0
    patience: float = 600.0
    body: Mapping[str, Any] = field(default_factory=dict)
    pause: float = 1.0


class _TryAgain(Exception):
    """A fault that may pass. `after`: seconds that the server asked to wait. `counts`: whether it uses up a try."""

    def __init__(self, reason: str, after: float | None = None, counts: bool = True) -> None:
        super().__init__(reason)
        self.after = after
        self.counts = counts


def base_url(text: str) -> str:
    """The base of an API: "/v1" is added to a bare host. UsageError if it is no http(s) URL."""
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise UsageError(f"--endpoint {text}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(f"--endpoint {text}: give a URL such as http://localhost:8000/v1")
    path = url.path.rstrip("/").removesuffix("/chat/completions")
    return str(url.copy_with(path=path or "/v1", query=None, fragment=None))


@dataclass
class _Absence:
    """A server that does not answer: since when, how often in a row, and when it is to be tried beside others.

    until: when it is given up. lost: since when it takes no connection (None: it did at the last try)."""

    since: float
    until: float = 0.0
    lost: float | None = None
    faults: int = 0
    next_try: float = 0.0


class _Servers:
    """Which server to ask: each in turn, those that are away only now and then, unless all are."""

    def __init__(self, urls: Sequence[str], patience: float, timeout: float, say: Callable[[str], None]) -> None:
        self.urls = list(urls)
        self._patience, self._timeout = patience, timeout
        self._say = say
        self._turn = 0
        self._away: dict[str, _Absence] = {}

    def pick(self) -> str:
        now = time.monotonic()
        ready = [url for url in self.urls if url not in self._away or self._away[url].next_try <= now]
        if not ready:
            ready = self.urls
        url = ready[self._turn % len(ready)]
        self._turn += 1
        if url in self._away:
            self._away[url].next_try = now + BETWEEN_VISITS
        return url

    def answered(self, url: str) -> None:
        absence = self._away.pop(url, None)
        if absence is not None and absence.faults > 1:
            self._say(f"{url}: back")

    def failed(self, url: str, fault: str, *, connected: bool) -> None:
        """Says so at the second time: a kept connection may close by itself. PacelineError if all are away too long."""
        now = time.monotonic()
        absence = self._away.setdefault(url, _Absence(now, next_try=now + BETWEEN_VISITS))
        absence.faults += 1
        if connected:  # its answers to others may be under way, and take up to `timeout`
            absence.lost, absence.until = None, absence.since + max(self._patience, self._timeout)
        elif absence.lost is None:
            absence.lost, absence.until = now, now + self._patience
        if absence.faults == 2:
            self._say(f"{url}: {fault}; trying again, for {max(absence.until - now, 0.0):.0f} s")
        if self.left() <= 0:
            silent = now - max(absence.since for absence in self._away.values())
            raise PacelineError(f"{url}: {fault}; no answer for {silent:.0f} s, so the job ends here")

    def left(self) -> float:
        """Seconds until all servers are given up; infinite while one answers."""
        if len(self._away) < len(self.urls):
            return math.inf
        return max(absence.until for absence in self._away.values()) - time.monotonic()


class Endpoint:
    """One job's connection to its servers. An async context manager; `answer` may run many times at once.

    say: told in a line when the servers can't be reached, and when they are back.
    """

    def __init__(self, options: EndpointOptions, sampling: Sampling, say: Callable[[str], None]) -> None:
        self.options = options
        self.model = options.model
        self._sampling = sampling
        self.urls = [base_url(url) for url in options.urls]
        self._servers = _Servers(self.urls, options.patience, options.timeout, say)
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else {},
            # The whole answer has its own limit.
            timeout=httpx2.Timeout(None, connect=min(10.0, max(options.patience, 1.0))),
            limits=httpx2.Limits(
                max_connections=options.concurrency, max_keepalive_connections=options.concurrency, keepalive_expiry=4.0
            ),
        )

    async def __aenter__(self) -> "Endpoint":
        try:
            self.model = self.model or await self._only_model()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def answer(self, question: Question) -> Reply:
        """The target's reply. Raises Refused where the server will never answer this, Unanswered where it did not this
        time; ConfigError and PacelineError end the job."""
        body = {**self._request(question), **self.options.body}

        async def ask() -> Reply:
            return _reply(await self._send("POST", "/chat/completions", body))

        return await self._again(ask)

    def _request(self, question: Question) -> dict[str, Any]:
        sampling = self._sampling
        found: dict[str, Any] = {
            "model": self.model,
            "messages": [_wire_message(message) for message in question.messages],
            "max_tokens": sampling.max_new_tokens,
        }
        optional = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k == 0 else sampling.top_k,  # as vLLM and SGLang spell "all"
            "seed": question.seed,
            "tools": question.tools,
            "chat_template_kwargs": question.template_kwargs or None,
        }
        return found | {name: value for name, value in optional.items() if value is not None}

    async def _only_model(self) -> str:
        async def ask() -> list[str]:
            listed = await self._send("GET", "/models", None)
            try:
                return [str(model["id"]) for model in listed["data"]]
            except (KeyError, TypeError):
                raise _TryAgain("its list of models is none") from None

        try:
            names = await self._again(ask)
        except Unanswered as error:
            raise PacelineError(f"{self.urls[0]}/models: {error}; name the model with --model") from None
        if len(names) != 1:
            served = ", ".join(names) or "none"
            raise UsageError(
                f"{self.urls[0]} serves {counted(len(names), 'model')} ({served}): choose one with --model"
            )
        return names[0]

    async def _again(self, ask: Callable[[], Any]) -> Any:
        """Calls `ask` until it gives something, as the module's table says."""
        tried, pause = 0, self.options.pause
        while True:
            try:
                async with asyncio.timeout(self.options.timeout):
                    return await ask()
            except TimeoutError:
                fault = _TryAgain(f"no answer within {self.options.timeout:g} s")
            except _TryAgain as error:
                fault = error
            tried += fault.counts
            if tried >= self.options.tries:
                raise Unanswered(f"{fault} ({counted(tried, 'try', 'tries')})")
            wait = fault.after if fault.after is not None else pause * random.uniform(0.5, 1.0)
            pause = min(2 * pause, LONGEST_PAUSE)
            if fault.after is None:
                wait = min(wait, max(self._servers.left(), 0.0))  # the last try is when patience ends
            await asyncio.sleep(wait)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """The JSON of one response with status 200. Raises _TryAgain, Refused or ConfigError for the rest."""
        base = self._servers.pick()
        try:
            async with self._client.stream(method, base + path, json=body) as response:
                content = bytearray()
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > MOST_BYTES:
                        raise _TryAgain(f"an answer of more than {MOST_BYTES >> 20} MB")
        except httpx2.DecodingError as error:
            raise _TryAgain(f"a garbled response ({error})") from None
        except httpx2.RequestError as error:
            fault = _connection_fault(error)
            connected = not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            self._servers.failed(base, fault, connected=connected)
            raise _TryAgain(fault, counts=False) from None
        if response.status_code in _AWAY:
            fault = _told(response, content)
            self._servers.failed(base, fault, connected=True)
            raise _TryAgain(fault, retry_after(response.headers.get("retry-after")), counts=False)
        self._servers.answered(base)
        if response.status_code != 200:
            raise _status_fault(base, response, content)
        try:
            return json.loads(content)
        except ValueError:
            raise _TryAgain("a response that is not JSON") from None


def _connection_fault(error: httpx2.RequestError) -> str:
    what = " ".join(str(error).split())
    return what or {"ReadError": "the connection was cut", "ConnectError": "no connection"}.get(
        type(error).__name__, type(error).__name__
    )


def _told(response: httpx2.Response, content: bytes | bytearray) -> str:
    words = server_words(content)
    return f"HTTP {response.status_code}" + (f": {words}" if words else "")


def _status_fault(base: str, response: httpx2.Response, content: bytes | bytearray) -> Exception:
    status, text = response.status_code, _told(response, content)
    if status in _PASSING or status >= 500:
        return _TryAgain(text, retry_after(response.headers.get("retry-after")))
    if status in (401, 403):
        return ConfigError(f"{base}: {text}; name the variable that holds the key with --api-key-env")
    if status == 404:
        return ConfigError(f"{base}: {text}; is the URL that of an OpenAI-compatible API, and the model served there?")
    if status < 400:
        return ConfigError(f"{base}: {text} and no answer (to {response.headers.get('location', 'nowhere')})")
    return Refused("the endpoint refuses it", text)


def server_words(content: bytes | bytearray) -> str:
    """What the server says went wrong, in one short line."""
    text = content[:4096].decode(errors="replace")
    try:
        found = json.loads(content)
        error = found.get("error", found)
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, AttributeError):
        pass
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if len(line) <= 200 else line[:199] + "…"


def retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header, which holds seconds or a date."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER) if seconds == seconds else None


def _wire_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the API wants it: arguments of tool calls as JSON text, each call with an id and a type."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    wired = []
    for number, call in enumerate(calls):
        function = call.get("function", {key: call[key] for key in ("name", "arguments") if key in call})
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        wired.append(
            {
                "id": str(call.get("id", f"call_{number}")),
                "type": "function",
                "function": {**function, "arguments": text},
            }
        )
    return {**message, "tool_calls": wired}


def _reply(response: Any) -> Reply:
    """The answer in a chat completion. Raises _TryAgain if there is none, Refused if it can't be trained on."""
    try:
        choice = response["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        content, calls = message.get("content") or "", message.get("tool_calls") or []
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    except (KeyError, IndexError, TypeError, AttributeError):
        raise _TryAgain("a response without an answer in it") from None
    if not (isinstance(content, str) and isinstance(reasoning, str) and isinstance(calls, list)):
        raise _TryAgain("a response without an answer in it")
    if reason not in ("stop", "length", "tool_calls"):
        raise _TryAgain(f"the answer was broken off (finish_reason {reason!r})")
    finished = reason != "length"
    if not finished and calls:
        raise Refused("the length limit cut a tool call")
    if not (content.strip() or reasoning.strip() or calls) or (finished and not (content.strip() or calls)):
        raise Refused("the answer is empty")
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = calls
    return Reply(found, finished, _token_count(response))


def _token_count(response: Mapping[str, Any]) -> int | None:
    usage = response.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else None
