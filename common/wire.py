"""The messages between workers, feed and ranks, and their strict encoding.

Messages are hints: they may be lost, doubled or reordered, and nothing is believed because one said it (the feed
derives its state from rings and locks). Each is a small frozen dataclass without tensors; on the wire it is one
msgpack map `{"v": version, "t": type name, ...fields}` of at most MAX_BYTES. Anything else raises `WireError`, which
receivers count, log and drop.

    worker -> feed   Hello, Want, Ready, Bye          feed -> worker   Work, StopWorker
    rank   -> feed   RankHello, RankWant, Refused, Done   feed -> rank     Take, Exhausted, StopRank
"""

from dataclasses import dataclass

WIRE_VERSION = 1
MAX_BYTES = 1 << 20


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
