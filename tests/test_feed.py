"""The feed's decision: in place of the model's rules under every schedule, and rule by rule in hand-made views."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from feed_model import Feed, Model, Record, Rules, State, explore, free_slot, replaced, unread
from feed_world import FINGERPRINT, evaluation, one_row_batches, train
from paceline.common import wire
from paceline.common.batch import BatchId, Kind
from paceline.common.ring import RingScan, SlotState, SlotView
from paceline.consumer.feed import (
    Action,
    Assign,
    Assignment,
    Free,
    Give,
    GiveExhausted,
    Grant,
    Outcome,
    Phase,
    Place,
    Reap,
    RemoveRing,
    Request,
    Resend,
    View,
    WorkerHint,
    decide,
    eval_after,
    train_records,
)
from paceline.consumer.feedstate import FeedBroken, FeedState
from paceline.consumer.ledger import Ledger

# ---- under every schedule


class RealFeed(Model):
    """The model with the real decision as its feed: all that one decision returns is one step."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self.plan = one_row_batches(self.epoch_size, epochs=self.epochs, group=self.ranks)

    def feed_steps(self, state: State, feed: Feed) -> Iterator[tuple[str, bool, State]]:
        actions = [action for action in decide(self.view(state, feed)) if not isinstance(action, GiveExhausted)]
        if not actions:
            return
        after, sent = state, []
        for action in actions:
            after = self.apply(after, action)
            if isinstance(action, Assign | Resend):
                sent.append((action, self.number(action.batch), int(action.worker[1:])))
        label = ", ".join(self.describe(action) for action in actions)
        yield label, False, self.delivered(after, sent)
        for at, (action, batch, w) in enumerate(sent):
            if isinstance(action, Assign):  # one of the messages meets a fault
                others = self.delivered(after, sent[:at] + sent[at + 1 :])
                for what, fault, result in self.send(f"{label}, {batch} to w{w}", others, batch, w):
                    if fault:
                        yield what, True, result

    def delivered(self, state: State, sent: list) -> State:
        assert state.feed is not None
        for _, batch, w in sent:
            state = self.deliver(state, (w, state.workers[w].incarnation, state.feed.id, batch))
        return state

    def word(self, batch: int) -> int:
        return train(*divmod(batch, self.epoch_size))

    def number(self, word: int) -> int:
        batch = BatchId.unpack(word)
        return batch.number * self.epoch_size + batch.index

    def describe(self, action: Action) -> str:
        match action:
            case Assign(batch, worker) | Resend(batch, worker):
                return f"{type(action).__name__} {self.number(batch)} to {worker}"
            case Free(place, batch, why):
                return f"free {self.number(batch)} of {place.worker} ({why})"
            case Give(request, place, batch):
                return f"give {self.number(batch)} of {place.worker} to rank {request.rank}"
            case _:
                return type(action).__name__

    def view(self, state: State, feed: Feed) -> View:
        ledger = Ledger()
        ledger.record([BatchId.unpack(self.word(batch)) for batch in feed.trained], {})
        done = [self.number_in_epoch(feed, epoch) for epoch in range(self.epochs)]
        epoch = next((e for e in range(self.epochs) if done[e] < self.plan.batches(e)), None)
        phase = (
            None if epoch is None else Phase(Kind.TRAIN, self.plan.first_step(epoch) + -(-done[epoch] // self.ranks))
        )
        grants: dict[Phase, list[Grant]] = {}
        requests: list[Request] = []
        if phase is not None:
            following = Phase(Kind.TRAIN, phase.number + 1)
            for r, rank in enumerate(feed.ranks):
                for at, record in zip((phase, following), rank, strict=False):
                    place = Place(f"w{record.worker}", 1, record.slot, record.seq)
                    grants.setdefault(at, []).append(Grant(r, 0, place, self.word(record.batch), 0, Outcome.ACCEPTED))
            for r, rank in enumerate(feed.ranks):
                if not rank:
                    requests.append(Request(r, phase, 0))
                elif len(rank) == 1 and following.number < self.plan.total_steps:
                    requests.append(Request(r, following, 0))
        return View(
            plan=self.plan,
            ledger=ledger,
            phase=phase,
            strict=self.strict,
            ranks=self.ranks,
            prefetch=self.slots,
            rings=[self.scan(state, w) for w in range(len(state.workers)) if state.rings[w] is not None],
            workers={f"w{w}": self.hint(state, w) for w, worker in enumerate(state.workers) if worker.up},
            assignments=[Assignment(self.word(b), f"w{w}", i, 0.0) for b, w, i in sorted(feed.assigned)],
            grants=grants,
            lagging={Place(f"w{w}", 1, slot, seq) for w, slot, seq in feed.lagging},
            requests=requests,
            refused_by={},
        )

    def number_in_epoch(self, feed: Feed, epoch: int) -> int:
        return sum(self.epoch(batch) == epoch for batch in feed.trained)

    def hint(self, state: State, w: int) -> WorkerHint:
        worker = state.workers[w]
        assert state.feed is not None
        held = frozenset(map(self.word, worker.queue)) if worker.feed == state.feed.id else frozenset()
        return WorkerHint(worker.incarnation, held, 1.0, 0.0)

    def scan(self, state: State, w: int) -> RingScan:
        worker = state.workers[w]
        slots = [
            slot_view(at, slot.seq, slot.commit, slot.done, self.word(slot.batch) if slot.batch >= 0 else 0)
            for at, slot in enumerate(state.rings[w] or ())
        ]
        return ring(f"w{w}", *slots, incarnation=worker.incarnation, alive=worker.up, retired=worker.retired)

    def apply(self, state: State, action: Action) -> State:
        feed = state.feed
        assert feed is not None
        match action:
            case Assign(batch, worker, incarnation):
                added = feed.assigned | {(self.number(batch), int(worker[1:]), incarnation)}
                return state._replace(feed=feed._replace(assigned=added))
            case Reap(assignment):
                over = (self.number(assignment.batch), int(assignment.worker[1:]), assignment.incarnation)
                return state._replace(feed=feed._replace(assigned=feed.assigned - {over}))
            case Free(place):
                w = int(place.worker[1:])
                assert (w, place.slot) not in feed.taken, "the feed frees a slot that a rank holds"
                return free_slot(state, w, place.slot)
            case Give(request, place, batch):
                record = Record(int(place.worker[1:]), place.slot, place.seq, self.number(batch))
                ranks = replaced(feed.ranks, request.rank, (*feed.ranks[request.rank], record))
                return state._replace(feed=feed._replace(ranks=ranks))
            case RemoveRing(worker):
                assert not unread(state, int(worker[1:]))
                return state._replace(rings=replaced(state.rings, int(worker[1:]), None))
            case _:
                return state


def slot_view(index: int, seq: int, commit: int, done: int, batch: int) -> SlotView:
    state = SlotState.WRITING if commit != seq else SlotState.FREE if done == seq else SlotState.READY
    return SlotView(index, seq, commit, 0, done, batch, 16, 0, 0, state)


def ring(
    worker: str, *slots: SlotView, incarnation: int = 1, alive: bool = True, retired: bool = False, ring_id: int = 1
) -> RingScan:
    return RingScan(
        worker=worker,
        path=Path(f"{worker}.ring"),
        ring_id=ring_id,
        incarnation=incarnation,
        pid=1,
        device="cpu",
        alive=alive,
        retired=retired,
        fingerprint=FINGERPRINT,
        produced=0,
        slots=slots,
    )


SCHEDULES = [
    pytest.param(dict(batches=3, kills=1), id="strict, a kill"),
    pytest.param(dict(batches=2, kills=1, message_faults=1), id="strict, a kill, a doubled message"),
    pytest.param(dict(batches=3, slots=2, kills=0, message_faults=1, strict=False), id="arrival, a doubled message"),
    pytest.param(dict(batches=3, kills=1, late_release=True, losses=False), id="late release"),
    pytest.param(dict(batches=3, kills=0, retires=1, strict=False), id="a retired ring"),
    pytest.param(dict(batches=4, epochs=2, ranks=2, strict=False, kills=0), id="two epochs, two ranks"),
    pytest.param(dict(batches=3, ranks=2, strict=True, kills=1, losses=False), id="strict, two ranks"),
]
LONG_SCHEDULES = [
    pytest.param(dict(batches=3, kills=2), id="strict, two kills"),
    pytest.param(dict(batches=3, slots=2, kills=1), id="strict, two slots"),
    pytest.param(dict(batches=4, epochs=2, ranks=2, strict=False, kills=1, losses=False), id="two epochs, a kill"),
    pytest.param(dict(batches=4, ranks=2, strict=True, kills=1, losses=False), id="strict, two ranks, a kill"),
    pytest.param(dict(batches=3, epochs=3, ranks=2, kills=1, retires=1, strict=False, losses=False), id="short epochs"),
]


@pytest.mark.parametrize("shape", SCHEDULES)
def test_every_schedule_ends_with_everything_trained_once(shape: dict[str, Any]) -> None:
    verdict = explore(RealFeed(**shape))
    assert verdict.problem is None, verdict.trace


@pytest.mark.slow
@pytest.mark.parametrize("shape", LONG_SCHEDULES)
def test_every_longer_schedule_ends_with_everything_trained_once(shape: dict[str, Any]) -> None:
    verdict = explore(RealFeed(**shape))
    assert verdict.problem is None, verdict.trace


def test_the_rules_hold_in_the_model() -> None:
    assert explore(Rules(batches=2, kills=1)).problem is None


@pytest.mark.parametrize(
    ("without", "shape", "problem"),
    [
        ({"dedup"}, dict(batches=2, slots=2, kills=1, strict=False), "trained twice"),
        ({"resend"}, dict(batches=2, kills=0), "deadlock"),
        ({"resend", "incarnation"}, dict(batches=2, slots=2, kills=1, losses=False), "deadlock"),
        ({"evict"}, dict(batches=4, kills=1), "deadlock"),
        ({"evict", "urgent"}, dict(batches=4, epochs=2, kills=1, strict=False), "deadlock"),
    ],
)
def test_the_model_shows_what_each_rule_prevents(without: set[str], shape: dict[str, Any], problem: str) -> None:
    verdict = explore(Rules(without=frozenset(without), **shape))
    assert verdict.problem is not None
    assert problem in verdict.problem
