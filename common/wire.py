"""The messages between workers, feed and ranks, and their strict encoding.

Messages are hints: they may be lost, doubled or reordered, and nothing is believed because one said it (the feed
derives its state from rings and locks). Each is a small frozen dataclass without tensors; on the wire it is one
msgpack map `{"v": version, "t": type name, ...fields}` of at most MAX_BYTES. Anything else raises `WireError`, which
receivers count, log and drop.

Every integer is a 63-bit word (0 to 2**63 - 1) and every text is at most MAX_TEXT characters.

    worker -> feed   Hello, Want, Ready, Bye          feed -> worker   Work, StopWorker
    rank   -> feed   RankHello, RankWant, Refused, Done   feed -> rank     Take, Exhausted, StopRank
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

WIRE_VERSION = 1
MAX_BYTES = 1 << 20
MAX_TEXT = 1000
MAX_WORD = 2**63 - 1


class WireError(ValueError):
    """A message that is malformed, too large, of another version or of an unknown type."""


# A phase is what ranks work on together: one optimiser step (kind TRAIN, number = step, from 0) or one evaluation
# (kind EVAL, number = steps done). Requests are keyed (kind, number, rank, index) and replies are repeatable.


@dataclass(frozen=True)
class Hello:
    """A worker is up and warm; `held` are the batch ids it has been given and not committed."""

    worker: str
    incarnation: int
    held: tuple[int, ...]


@dataclass(frozen=True)
class Want:
    """Sent when the queue shrinks and every second: what the worker holds, so that lost work is sent again."""

    worker: str
    incarnation: int
    held: tuple[int, ...]
    waited: float  # seconds since start spent waiting for a free slot or for work
    tokens_per_s: float


@dataclass(frozen=True)
class Ready:
    worker: str
    incarnation: int
    slot: int
    seq: int
    batch: int


@dataclass(frozen=True)
class Bye:
    """The worker is leaving: probe its lock now."""

    worker: str
    incarnation: int


@dataclass(frozen=True)
class WorkItem:
    batch: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """Batches for one incarnation from one feed; a worker ignores other incarnations, and a new feed id makes it
    drop what it has not started."""

    incarnation: int
    feed: int
    items: tuple[WorkItem, ...]


@dataclass(frozen=True)
class StopWorker:
    """`finished`: the run is done, exit 0. `retired`: this worker was scaled away, exit 0."""

    incarnation: int
    reason: str


@dataclass(frozen=True)
class RankHello:
    rank: int
    trainer: int  # the trainer's incarnation


@dataclass(frozen=True)
class RankWant:
    rank: int
    trainer: int
    kind: int
    number: int
    index: int  # the rank's own count of requests in this phase, refused ones included
    refused: tuple[int, ...] = ()  # earlier indices whose records were refused: all others of them were accepted


@dataclass(frozen=True)
class Refused:
    """The record given for (kind, number, rank, index) does not check out."""

    rank: int
    trainer: int
    kind: int
    number: int
    index: int
    batch: int
    reason: str


@dataclass(frozen=True)
class Listed:
    batch: int
    reason: str


@dataclass(frozen=True)
class Done:
    """A phase is complete on all ranks (sent by rank 0, repeated with each RankWant until answered)."""

    rank: int
    trainer: int
    kind: int
    number: int
    trained: tuple[int, ...]
    listed: tuple[Listed, ...]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Take:
    """The answer to a RankWant: one READY record. `refusals`: how often this batch's states were refused before."""

    trainer: int
    kind: int
    number: int
    index: int
    worker: str
    ring: int  # the ring's id
    slot: int
    seq: int
    batch: int
    refusals: int


@dataclass(frozen=True)
class Exhausted:
    """The answer to a RankWant: every record of the phase has been given out and accepted by its rank."""

    trainer: int
    kind: int
    number: int
    index: int


@dataclass(frozen=True)
class StopRank:
    trainer: int
    reason: str  # "finished", "stop" or why the run must end


Message = (
    Hello | Want | Ready | Bye | Work | StopWorker | RankHello | RankWant | Refused | Done | Take | Exhausted | StopRank
)

_Check = Callable[[Any, str], Any]


def encode(message: Message) -> bytes:
    """The message as bytes. A long `reason` is cut; anything else that `decode` would refuse raises WireError."""
    name = type(message).__name__
    if name not in _MESSAGES:
        raise WireError(f"not a message: {name}")
    body = _plain(message)
    assert isinstance(body, dict)
    _MESSAGES[name](body, name)
    data = bytes(msgpack.packb({"v": WIRE_VERSION, "t": name, **body}, use_bin_type=True) or b"")
    if len(data) > MAX_BYTES:
        raise WireError(f"{name} takes {len(data)} bytes, at most {MAX_BYTES} are sent")
    return data


def decode(data: bytes) -> Message:
    """The message in `data`; WireError if it is not exactly one well-formed message of this version."""
    if len(data) > MAX_BYTES:
        raise WireError(f"{len(data)} bytes, at most {MAX_BYTES} are read")
    try:
        body = msgpack.unpackb(data, use_list=True, raw=False, strict_map_key=True, object_pairs_hook=_pairs)
    except WireError:
        raise
    except (ValueError, OverflowError) as error:  # every complaint of msgpack is one of these, bad UTF-8 included
        raise WireError(f"not msgpack: {error}") from None
    if not isinstance(body, dict):
        raise WireError(f"a map was expected, not {_kind(body)}")
    version, name = body.pop("v", None), body.pop("t", None)
    if type(version) is not int or version != WIRE_VERSION:
        raise WireError(f"version {_show(version)}, {WIRE_VERSION} was expected")
    if not isinstance(name, str) or name not in _MESSAGES:
        raise WireError(f"unknown message {_show(name)}")
    return _MESSAGES[name](body, name)


def _pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise WireError("a field is given twice")
    return body


def _plain(value: Any) -> Any:
    """Dataclasses to maps, tuples to lists, enums to ints; a long `reason` is cut, since it only informs."""
    if dataclasses.is_dataclass(value):
        body = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(body.get("reason"), str):
            body["reason"] = body["reason"].encode("utf-8", "replace").decode()[:MAX_TEXT]
        return body
    if isinstance(value, IntEnum):
        return int(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _kind(value: Any) -> str:
    return type(value).__name__


def _show(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, str | int | float | None) else _kind(value)


def _word(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_WORD:
        raise WireError(f"{where}: {_show(value)} is no 63-bit word")
    return value


def _text(value: Any, where: str) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise WireError(f"{where}: {_kind(value)} is no text of at most {MAX_TEXT} characters")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise WireError(f"{where}: a lone surrogate")
    return value


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float):
        raise WireError(f"{where}: {_show(value)} is no number")
    try:
        return float(value)
    except OverflowError:
        raise WireError(f"{where}: {_show(value)} is no number") from None


def _amount(value: Any, where: str) -> float:
    """A time or a rate. (A metric, unlike these, may be NaN.)"""
    number = _number(value, where)
    if not math.isfinite(number) or number < 0:
        raise WireError(f"{where}: {number} is not a finite number from 0")
    return number


def _metrics(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise WireError(f"{where}: {_kind(value)} is no map")
    return {_text(key, where): _number(number, where) for key, number in value.items()}


def _list_of(item: _Check) -> _Check:
    def check(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise WireError(f"{where}: {_kind(value)} is no list")
        return tuple(item(entry, where) for entry in value)

    return check


def _record_of(cls: type) -> _Check:
    """Checks a map that holds exactly the fields of the dataclass, each of its type, and builds it."""
    checks = {name: _check_of(hint) for name, hint in get_type_hints(cls).items()}

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise WireError(f"{where}: {_kind(value)} is no map")
        if value.keys() != checks.keys():
            odd = sorted(map(str, value.keys() ^ checks.keys()))
            raise WireError(f"{where}: fields missing or unknown: {', '.join(odd)[:200]}")
        return cls(**{name: one(value[name], f"{where}.{name}") for name, one in checks.items()})

    return check


_SIMPLE: dict[Any, _Check] = {int: _word, str: _text, float: _amount, dict[str, float]: _metrics}


def _check_of(hint: Any) -> _Check:
    if get_origin(hint) is tuple:
        return _list_of(_check_of(get_args(hint)[0]))
    return _SIMPLE[hint] if hint in _SIMPLE else _record_of(hint)


_MESSAGES: dict[str, _Check] = {cls.__name__: _record_of(cls) for cls in get_args(Message)}
