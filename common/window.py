"""What the last half minute of a run says: rates of each ring, and in words which side waits for which.

A `Window` is fed readings of the rings and of status.json and keeps those of the last `SECONDS`. It judges by counting
(in how many readings a ring was full, in how many there was nothing to take), and says so as long as it has seen too
little. Pure: it opens no file and reads no clock.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .errors import counted
from .inspect import RingInfo
from .telemetry import STALE_SECONDS, duration

SECONDS = 30.0  # that rates and shares are taken over
ENOUGH_SECONDS, ENOUGH_READINGS, ENOUGH_RECORDS = 10.0, 10, 4  # before a bottleneck is named
FULL_SHARE, EMPTY_SHARE, WAIT_SHARE = 0.4, 0.5, 0.1  # from which a side counts as waiting
STALL_SECONDS, STALL_GAPS = 20.0, 5.0  # no record for so long, and for so many of the longest gap seen

Kind = Literal["none", "measuring", "targets", "drafters", "balanced", "stalled", "waiting"]


@dataclass(frozen=True)
class Rates:
    """Into and out of one ring, between two readings; tokens are records times the mean length of those seen."""

    produced: float  # records/s
    consumed: float
    produced_tokens: float | None = None  # tokens/s
    consumed_tokens: float | None = None


@dataclass(frozen=True)
class Shares:
    """How often one ring was full and how often it had nothing to take, of the readings in the window."""

    full: float
    empty: float
    levels: tuple[float, ...]  # records per slot, 0 to 1, oldest reading first


@dataclass(frozen=True)
class TrainerState:
    """What can be known of a run's trainer from outside. `alive` is None where its lock cannot be read."""

    alive: bool | None = None
    status: Mapping[str, Any] | None = None  # status.json if it is of now

    @classmethod
    def of(cls, alive: bool | None, status: Mapping[str, Any] | None, now: float) -> "TrainerState":
        """`status` counts if it is younger than STALE_SECONDS at `now` (seconds since the epoch)."""
        fresh = status is not None and now - (status.get("updated") or 0.0) <= STALE_SECONDS
        return cls(alive, status if fresh and alive is not False else None)

    def get(self, key: str) -> Any:
        return None if self.status is None else self.status.get(key)


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    text: str


@dataclass(frozen=True)
class _Reading:
    at: float  # seconds, monotonic
    rings: tuple[RingInfo, ...]


class Window:
    """The readings of one run of late."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._readings: deque[_Reading] = deque()
        self._tokens: dict[tuple[int, int], int] = {}  # (ring id, sequence number): tokens of a record seen
        self._counts: dict[int, tuple[int, int]] = {}
        self._begun: float | None = None
        self._moved_at = 0.0
        self._gap = 0.0  # longest time between two movements seen
        self._moves = 0
        self.trainer = TrainerState()

    def add(self, at: float, rings: Iterable[RingInfo], trainer: TrainerState | None = None) -> None:
        """Note a reading taken `at` (seconds, monotonic, ascending)."""
        reading = _Reading(at, tuple(ring for ring in rings if ring.problem is None))
        if self._begun is None:
            self._begun = self._moved_at = at
        if self._moved(reading):
            self._gap = max(self._gap, at - self._moved_at) if self._moves else 0.0
            self._moved_at, self._moves = at, self._moves + 1
        self._readings.append(reading)
        while self._readings[0].at < at - self._seconds:
            self._readings.popleft()
        self._note_tokens(reading)
        self.trainer = trainer or TrainerState()

    def _moved(self, reading: _Reading) -> bool:
        counts = {ring.ring_id: (ring.produced, ring.consumed) for ring in reading.rings}
        moved = any(self._counts.get(key, count) != count for key, count in counts.items())
        self._counts = counts
        return moved

    def _note_tokens(self, reading: _Reading) -> None:
        for ring in reading.rings:
            self._tokens |= {(ring.ring_id, seq): tokens for seq, tokens in ring.records}
        present = {ring.ring_id for ring in reading.rings}
        if len(self._tokens) > 4096:  # the newest few hundred of each ring are enough for a mean
            kept = sorted(key for key in self._tokens if key[0] in present)[-2048:]
            self._tokens = {key: self._tokens[key] for key in kept}

    @property
    def seconds(self) -> float:
        """How long the window is so far."""
        return self._readings[-1].at - self._readings[0].at if self._readings else 0.0

    @property
    def rings(self) -> tuple[RingInfo, ...]:
        """The newest reading's whole rings."""
        return self._readings[-1].rings if self._readings else ()

    def rates(self) -> dict[str, Rates]:
        """By worker, since the oldest reading in the window of the same ring file."""
        found = {}
        for ring in self.rings:
            if (rate := rate_between(self._past(ring.ring_id)[0], ring)) is not None:
                lengths = [tokens for (ring_id, _), tokens in self._tokens.items() if ring_id == ring.ring_id]
                mean = sum(lengths) / len(lengths) if lengths else None
                tokens = (None, None) if mean is None else (rate.produced * mean, rate.consumed * mean)
                found[ring.worker] = Rates(rate.produced, rate.consumed, *tokens)
        return found

    def shares(self) -> dict[str, Shares]:
        """By worker, over the readings in the window of the same ring file."""
        found = {}
        for ring in self.rings:
            past = [old for reading in self._readings for old in reading.rings if old.ring_id == ring.ring_id]
            full, empty = (
                sum(flags) / len(past) for flags in ([r.full for r in past], [not r.count("ready") for r in past])
            )
            found[ring.worker] = Shares(full, empty, tuple(old.held / max(1, len(old.states)) for old in past))
        return found

    def verdict(self) -> Verdict:
        """Which side waits for which, or why that cannot be said."""
        if not self.rings:
            return Verdict("none", "no rings")
        return self._nobody() or self._starting() or self._stalled() or self._too_little() or self._bottleneck()

    def _nobody(self) -> Verdict | None:
        worker = any(ring.alive for ring in self.rings)
        if self.trainer.alive is False:
            records = sum(ring.held for ring in self.rings)
            if worker:
                full = all(ring.full for ring in self.rings if ring.alive)
                does = "workers wait with full rings" if full else "workers fill their rings and will wait"
                return Verdict("waiting", f"no trainer is up: {does}")
            held = f"{counted(records, 'record')} {'waits' if records == 1 else 'wait'} for a trainer"
            return Verdict("waiting", f"nobody works on this run; {held}")
        if not worker:
            return Verdict("waiting", "no worker is up: the trainer can only use what is in the rings")
        return None

    def _starting(self) -> Verdict | None:
        if self.trainer.get("state") != "starting":
            return None
        full = all(ring.full for ring in self.rings if ring.alive)
        return Verdict("waiting", f"the trainer is starting; rings {'are full' if full else 'fill'} meanwhile")

    def _stalled(self) -> Verdict | None:
        still = self._readings[-1].at - self._moved_at
        if still < max(STALL_SECONDS, STALL_GAPS * self._gap):
            return None
        live = [ring for ring in self.rings if ring.alive]
        where = "some rings are full, some not"
        if all(ring.full for ring in live):
            where = "rings are full and the trainer takes nothing"
        elif not any(ring.count("ready") for ring in self.rings):
            where = "rings are empty and the workers make nothing"
        return Verdict("stalled", f"stalled: no record moved for {duration(still)}; {where}")

    def _too_little(self) -> Verdict | None:
        pairs = [(self._past(ring.ring_id)[0], ring) for ring in self.rings]
        records = sum(last.produced - first.produced + max(0, last.consumed - first.consumed) for first, last in pairs)
        enough = self.seconds >= ENOUGH_SECONDS and len(self._readings) >= ENOUGH_READINGS
        if enough and records >= ENOUGH_RECORDS:
            return None
        moved = counted(records, "movement")
        return Verdict("measuring", f"measuring: {moved} in {self.seconds:.0f} s are too few to name a bottleneck")

    def _past(self, ring_id: int) -> list[RingInfo]:
        """What the window saw of one ring file, oldest first."""
        return [ring for reading in self._readings for ring in reading.rings if ring.ring_id == ring_id]

    def _bottleneck(self) -> Verdict:
        live = [[ring for ring in reading.rings if ring.alive] for reading in self._readings]
        full = _mean([sum(ring.full for ring in rings) / len(rings) for rings in live if rings])
        empty = _mean([not any(ring.count("ready") for ring in reading.rings) for reading in self._readings])
        return judge(full, empty, self.trainer.get("wait_data"))


def judge(full: float, empty: float, wait: float | None) -> Verdict:
    """`full`: mean share of time that a worker's ring is full; `empty`: share that no ring has a record to take;
    `wait`: share of the trainer's time without one, if it is known. An empty ring alone proves nothing: the trainer may
    be busy with what it took."""
    waits = "" if wait is None else f", trainer waits {wait:.0%}"
    if full >= FULL_SHARE and full > empty:
        return Verdict("drafters", f"drafters are the bottleneck: rings full {full:.0%} of the time")
    if empty >= EMPTY_SHARE and (wait is None or wait >= WAIT_SHARE):
        return Verdict("targets", f"targets are the bottleneck: rings empty {empty:.0%} of the time{waits}")
    return Verdict("balanced", f"balanced: rings full {full:.0%}, empty {empty:.0%} of the time{waits}")


def rates(before: Sequence[RingInfo], now: Sequence[RingInfo]) -> dict[str, Rates]:
    """Records a second by worker, for the rings that are in both readings and the same file."""
    earlier = {ring.ring_id: ring for ring in before if ring.problem is None}
    pairs = ((ring, earlier.get(ring.ring_id)) for ring in now if ring.problem is None)
    found = ((ring.worker, rate_between(past, ring)) for ring, past in pairs if past is not None)
    return {worker: rate for worker, rate in found if rate is not None}


def rate_between(past: RingInfo, ring: RingInfo) -> Rates | None:
    """Records a second between two readings of one ring; None if no time passed."""
    seconds = ring.read_at - past.read_at
    if seconds <= 0:
        return None
    # A record that is freed while a table is read may count one reading late, never as less than nothing.
    consumed = max(0, ring.consumed - past.consumed)
    return Rates((ring.produced - past.produced) / seconds, consumed / seconds)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
