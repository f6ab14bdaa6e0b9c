"""How many workers and ranks: the speed of a split from the speed of one of each, and which split is best.

A run is a queue between two sides, so it goes at the speed of the slower one:

    N workers of T and M ranks of D          min(N·T, M·D)
    one GPU that both sides share            1 / (1/T + 1/D)
    workers on A GPUs, B of the ranks there  A·T / (1 + B·T / (M·D)), but not more than a rank's GPU can do

In the last the workers are the slower side, and those on a rank's GPU have what it leaves of its time. Where ranks are,
rings are full and each worker makes as much as any other, so a rank that shares its GPU with b of N workers trains at
1 / (1/(M·D) + b/(N·T)) of the whole; with processes that always want to compute a GPU goes round, so a rank has
1/(1 + b) of it at least. The others are special cases. T and D are what one worker or rank does when it never waits, in
any unit, both in the same. On a live run they follow from the rates and the shares of time that each side waits. Pure
arithmetic; `paceline plan` and `paceline status` show it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

WORTH = 0.05  # a move that gains less is not proposed
BUSY = 0.02  # least share of its time that a side must work for its speed to be known


class Rates(NamedTuple):
    """What one worker and one rank do when they never wait."""

    target: float
    drafter: float


@dataclass(frozen=True)
class Split:
    """`rate` in the unit of the rates; idle: share of its time that each side waits for the other."""

    workers: int
    ranks: int
    rate: float
    idle_targets: float
    idle_drafters: float
    shared: bool = False  # both sides on one GPU

    def __str__(self) -> str:
        return f"{self.workers}-{self.ranks}"

    @property
    def bound(self) -> str:
        """Which side the other waits for."""
        if self.shared or max(self.idle_targets, self.idle_drafters) < 0.02:
            return "both"
        return "targets" if self.idle_drafters > self.idle_targets else "drafters"


def forecast(rates: Rates, workers: int, ranks: int) -> Split:
    """A split on GPUs of its own."""
    made, trained = workers * rates.target, ranks * rates.drafter
    rate = min(made, trained)
    return Split(workers, ranks, rate, 1 - rate / made, 1 - rate / trained)


def placed_rate(rates: Rates, workers: Sequence[str], ranks: Sequence[str]) -> float:
    """Rate of a run by the device of each worker and rank, where devices are shared as well. Both have one at least.

    Workers that share a device are as fast together as one of them alone.
    """
    shared = sum(device in workers for device in ranks)
    trained, all_workers = len(ranks) * rates.drafter, len(workers) * rates.target
    made = len(set(workers)) * rates.target / (1 + shared * rates.target / trained)
    there = Counter(workers)
    full = (
        max(1 / (count / trained + there[device] / all_workers), trained / (count + there[device]))
        for device, count in Counter(ranks).items()
    )
    return min(made, *full)


def splits(rates: Rates, gpus: int) -> list[Split]:
    """All splits of so many GPUs, the fastest first; of equal ones that with more workers."""
    if gpus == 1:
        rate = 1 / (1 / rates.target + 1 / rates.drafter)
        return [Split(1, 1, rate, 1 - rate / rates.target, 1 - rate / rates.drafter, shared=True)]
    found = [forecast(rates, workers, gpus - workers) for workers in range(1, gpus)]
    return sorted(found, key=lambda split: (-split.rate, -split.workers))


def live_rates(status: Mapping[str, Any]) -> Rates | None:
    """One worker's and one rank's speed from status.json; None while that cannot be known.

    A side that waits most of its time shows too little of its own speed.
    """
    names = ("target_bps", "drafter_bps", "worker_wait", "wait_data", "workers", "ranks")
    made, trained, worker_wait, data_wait, workers, ranks = (status.get(name) for name in names)
    if not (made and trained and workers and ranks) or worker_wait is None or data_wait is None:
        return None
    if min(1 - worker_wait, 1 - data_wait) < BUSY:
        return None
    return Rates(made / (1 - worker_wait) / workers, trained / (1 - data_wait) / ranks)


def advice(rates: Rates, workers: int, ranks: int) -> str:
    """The one move of a GPU that gains most, or empty: "move one GPU from drafters to targets: +38 %"."""
    now = forecast(rates, workers, ranks).rate
    moves = {
        "move one GPU from drafters to targets": (workers + 1, ranks - 1),
        "move one GPU from targets to drafters": (workers - 1, ranks + 1),
    }
    gains = {
        what: forecast(rates, *split).rate / now - 1 for what, split in moves.items() if min(split) > 0 and now > 0
    }
    best = max(gains, key=lambda what: gains[what], default=None)
    return f"{best}: {gains[best]:+.0%}".replace("%", " %") if best is not None and gains[best] >= WORTH else ""
