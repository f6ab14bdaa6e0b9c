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
        feed = state.feed.id
        for _, batch, w in sent:
            state = self.deliver(state, (w, state.workers[w].incarnation, feed, batch))
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


ARRIVAL = {"strict": False}
NO_LOSS = {"losses": False}
SCHEDULES = [
    pytest.param({"batches": 3, "kills": 1}, id="strict, a kill"),
    pytest.param({"batches": 2, "kills": 1, "message_faults": 1}, id="strict, a kill, a doubled message"),
    pytest.param({"batches": 3, "slots": 2, "kills": 0, "message_faults": 1, **ARRIVAL}, id="a doubled message"),
    pytest.param({"batches": 3, "kills": 1, "late_release": True, **NO_LOSS}, id="late release"),
    pytest.param({"batches": 3, "kills": 0, "retires": 1, **ARRIVAL}, id="a retired ring"),
    pytest.param({"batches": 4, "epochs": 2, "ranks": 2, "kills": 0, **ARRIVAL}, id="two epochs, two ranks"),
    pytest.param({"batches": 3, "ranks": 2, "kills": 1, **NO_LOSS}, id="strict, two ranks"),
    pytest.param({"batches": 2, "slots": 2, "making": 2, "kills": 1}, id="strict, two records in the making"),
]
LONG_SCHEDULES = [
    pytest.param({"batches": 3, "kills": 2}, id="strict, two kills"),
    pytest.param({"batches": 3, "slots": 2, "kills": 1}, id="strict, two slots"),
    pytest.param({"batches": 3, "slots": 2, "making": 2, "kills": 1}, id="two records in the making"),
    pytest.param({"batches": 4, "epochs": 2, "ranks": 2, "kills": 1, **ARRIVAL, **NO_LOSS}, id="two epochs, a kill"),
    pytest.param({"batches": 4, "ranks": 2, "kills": 1, **NO_LOSS}, id="strict, two ranks, a kill"),
    pytest.param(
        {"batches": 3, "epochs": 3, "ranks": 2, "kills": 1, "retires": 1, **ARRIVAL, **NO_LOSS}, id="short epochs"
    ),
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
    assert explore(Rules(batches=2, slots=2, making=2, kills=1)).problem is None


@pytest.mark.parametrize(
    ("without", "shape", "problem"),
    [
        ({"dedup"}, {"batches": 2, "slots": 2, "kills": 1, "strict": False}, "trained twice"),
        ({"resend"}, {"batches": 2, "kills": 0}, "deadlock"),
        ({"resend", "incarnation"}, {"batches": 2, "slots": 2, "kills": 1, "losses": False}, "deadlock"),
        ({"evict"}, {"batches": 4, "kills": 1}, "deadlock"),
        ({"evict", "urgent"}, {"batches": 4, "epochs": 2, "kills": 1, "strict": False}, "deadlock"),
    ],
)
def test_the_model_shows_what_each_rule_prevents(without: set[str], shape: dict[str, Any], problem: str) -> None:
    verdict = explore(Rules(without=frozenset(without), **shape))
    assert verdict.problem is not None
    assert problem in verdict.problem


# ---- rule by rule


def ready(index: int, seq: int, batch: int) -> SlotView:
    return slot_view(index, seq, seq, 0, batch)


def free(index: int) -> SlotView:
    return slot_view(index, 0, 0, 0, 0)


PLAN = one_row_batches(8, epochs=2, group=2, held_out=3, eval_every=2)  # steps 0 to 3 and 4 to 7; eval after 2, 4, 6, 8
STEP = [Phase(Kind.TRAIN, number) for number in range(8)]
EVAL = {number: Phase(Kind.EVAL, number) for number in (2, 4, 6, 8)}


def ledger_of(steps: int) -> Ledger:
    ledger = Ledger()
    for step in range(steps):
        epoch = PLAN.epoch_of(step)
        first = (step - PLAN.first_step(epoch)) * 2
        ledger.record([BatchId.unpack(train(epoch, first)), BatchId.unpack(train(epoch, first + 1))], {})
    return ledger


def view(*rings: RingScan, steps: int = 0, **changes: Any) -> View:
    """PLAN after so many steps, in arrival order, with every live worker known; `changes` as in View."""
    named = {
        "plan": PLAN,
        "ledger": ledger_of(steps),
        "phase": STEP[steps] if steps < 8 else None,
        "strict": False,
        "ranks": 1,
        "prefetch": 4,
        "rings": rings,
        "workers": {scan.worker: WorkerHint(scan.incarnation, frozenset(), 0.0, 0.0) for scan in rings if scan.alive},
        "assignments": [],
        "grants": {},
        "lagging": (),
        "requests": [],
        "refused_by": {},
    }
    return View(**{**named, **changes})  # type: ignore[arg-type]


def of(kind: type, actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def assigned(actions: list[Action]) -> list[str]:
    return [f"{BatchId.unpack(action.batch)} {action.worker}" for action in of(Assign, actions)]


def grant(rank: int, index: int, batch: int, outcome: Outcome = Outcome.ACCEPTED, *, seq: int = 99, refusals: int = 0):
    return Grant(rank, index, Place("w0", 1, 0, seq), batch, refusals, outcome)


def test_work_is_given_lowest_first_within_credit_and_prefetch() -> None:
    actions = decide(view(ring("w0", free(0), free(1)), ring("w1", *map(free, range(5))), prefetch=1))
    assert assigned(actions) == ["train/0/0 w0", "train/0/1 w1", "train/0/2 w0", "train/0/3 w1"]
    assert not any(action.urgent for action in of(Assign, actions))


def test_credit_is_what_is_neither_ready_nor_assigned() -> None:
    scan = ring("w0", ready(0, 5, train(0, 0)), free(1), slot_view(2, 7, 6, 6, 0))
    actions = decide(view(scan, assignments=[Assignment(train(0, 1), "w0", 1, 0.0)]))
    assert assigned(actions) == ["train/0/2 w0"]


def test_a_faster_worker_gets_more() -> None:
    hints = {"w0": WorkerHint(1, frozenset(), 0.0, 100.0), "w1": WorkerHint(1, frozenset(), 0.0, 300.0)}
    slots = [free(i) for i in range(4)]
    actions = decide(view(ring("w0", *slots), ring("w1", *slots), workers=hints, prefetch=3))
    assert [line.split()[1] for line in assigned(actions)].count("w1") == 4
    assert assigned(actions)[0] == "train/0/0 w1"


def test_a_worker_that_is_dead_retired_or_not_heard_of_gets_nothing() -> None:
    rings = [ring("w0", free(0), alive=False), ring("w1", free(0), retired=True), ring("w2", free(0), incarnation=2)]
    hints = {name: WorkerHint(1, frozenset(), 0.0, 0.0) for name in ("w0", "w1", "w2")}
    assert decide(view(*rings, workers=hints, requests=[Request(0, STEP[0], 0)])) == []


@pytest.mark.parametrize(
    "scan",
    [
        ring("w0", free(0), alive=False),
        ring("w0", free(0), incarnation=2),
        ring("w0", free(0), retired=True),
        ring("w1", free(0)),
    ],
)
def test_assignments_of_an_incarnation_that_is_over_go_to_others(scan: RingScan) -> None:
    assignment = Assignment(train(0, 0), "w0", 1, 0.0)
    actions = decide(view(scan, ring("w9", free(0)), assignments=[assignment]))
    assert of(Reap, actions) == [Reap(assignment)]
    assert "train/0/0" in {line.split()[0] for line in assigned(actions)}


def test_a_dead_workers_ready_record_is_consumed() -> None:
    scan = ring("w0", ready(0, 5, train(0, 3)), alive=False)
    actions = decide(view(scan, requests=[Request(0, STEP[0], 0)]))
    assert actions == [Give(Request(0, STEP[0], 0), Place("w0", 1, 0, 5), train(0, 3))]


def test_records_that_nobody_needs_are_freed() -> None:
    scan = ring(
        "w0",
        ready(0, 10, train(0, 0)),  # trained
        ready(1, 11, train(0, 2)),  # held by a rank
        ready(2, 12, train(2, 0)),  # past the last epoch
        ready(3, 13, train(1, 8)),  # past the epoch's last batch
        ready(4, 14, evaluation(4, 0)),  # not the coming evaluation
        ready(5, 15, evaluation(2, 3)),  # no such batch
        ready(6, 16, evaluation(2, 0)),
        ready(7, 17, train(1, 0)),
        alive=False,
    )
    actions = decide(view(scan, steps=1, grants={STEP[1]: [grant(0, 0, train(0, 2))]}))
    why = {action.place.slot: action.why for action in of(Free, actions)}
    assert why == {0: "done", 1: "held", 2: "foreign", 3: "foreign", 4: "evaluation", 5: "evaluation"}


def test_a_second_copy_is_freed_and_rather_a_live_workers() -> None:
    live = ring("w0", ready(0, 5, train(0, 0)))
    dead = ring("w1", ready(0, 6, train(0, 0)), alive=False)
    for rings in ([live, dead], [dead, live]):
        assert of(Free, decide(view(*rings))) == [Free(Place("w0", 1, 0, 5), train(0, 0), "duplicate")]


def test_what_a_rank_holds_or_has_not_released_is_left_alone() -> None:
    scan = ring("w0", ready(0, 5, train(0, 0)), ready(1, 6, train(0, 1)), ready(2, 7, train(0, 2)), alive=False)
    held = Grant(0, 0, Place("w0", 1, 0, 5), train(0, 0), 0, Outcome.GIVEN)
    refused = Grant(0, 1, Place("w0", 1, 1, 6), train(0, 1), 0, Outcome.REFUSED)
    lagging = [Place("w0", 1, 2, 7)]
    request = Request(0, STEP[0], 2)
    actions = decide(view(scan, grants={STEP[0]: [held, refused]}, lagging=lagging, requests=[request]))
    assert actions == []


def test_a_refused_batch_is_made_again_by_another_worker() -> None:
    rings = [ring("w0", free(0), free(1)), ring("w1", free(0))]
    refused = grant(0, 0, train(0, 0), Outcome.REFUSED)
    actions = decide(view(*rings, grants={STEP[0]: [refused]}, refused_by={train(0, 0): "w0"}))
    assert assigned(actions)[0] == "train/0/0 w1"
    alone = decide(view(rings[0], grants={STEP[0]: [refused]}, refused_by={train(0, 0): "w0"}))
    assert assigned(alone)[0] == "train/0/0 w0"


def test_arrival_order_takes_any_record_of_the_epoch_and_no_other() -> None:
    scan = ring("w0", ready(0, 5, train(1, 0)), ready(1, 6, train(0, 7)), ready(2, 7, train(0, 5)), alive=False)
    actions = decide(view(scan, requests=[Request(0, STEP[0], 0)]))
    assert [action.batch for action in of(Give, actions)] == [train(0, 5)]


def test_strict_order_takes_each_ranks_next_and_no_other() -> None:
    scan = ring("w0", ready(0, 5, train(0, 1)), ready(1, 6, train(0, 2)), alive=False)
    requests = [Request(0, STEP[0], 0), Request(1, STEP[0], 0)]
    actions = decide(view(scan, strict=True, ranks=2, requests=requests))
    assert of(Give, actions) == [Give(requests[1], Place("w0", 1, 0, 5), train(0, 1))]


def test_strict_order_gives_each_rank_its_own_records_in_plan_order() -> None:
    plan = one_row_batches(10, group=5)
    scan = ring("w0", *(ready(i, 5 + i, train(0, i)) for i in range(10)), alive=False)
    grants: list[Grant] = []
    got: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(3):
        requests = [Request(rank, STEP[0], len(got[rank])) for rank in (1, 0)]
        actions = decide(view(scan, plan=plan, strict=True, ranks=2, requests=requests, grants={STEP[0]: grants}))
        for give in of(Give, actions):
            grants.append(Grant(give.request.rank, 0, give.place, give.batch, 0, Outcome.ACCEPTED))
            got[give.request.rank].append(BatchId.unpack(give.batch).index)
    assert got == {0: [0, 2, 4], 1: [1, 3]}


def test_no_rank_takes_more_than_its_share_of_a_step() -> None:
    scan = ring("w0", ready(0, 5, train(0, 1)), alive=False)
    fast = view(scan, ranks=2, grants={STEP[0]: [grant(0, 0, train(0, 0))]}, requests=[Request(0, STEP[0], 1)])
    assert decide(fast) == []


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("group", "ranks"), [(1, 3), (2, 3), (4, 3), (8, 3), (3, 2), (5, 4)])
def test_ranks_get_as_many_records_however_fast_they_ask(strict: bool, group: int, ranks: int) -> None:
    """Rank 0 always asks first, and gets no more than the last one; steps do not divide by the ranks."""
    plan = one_row_batches(61, group=group)
    state = FeedState(plan, Ledger(), STEP[0], trainer=7, ranks=ranks, strict=strict, prefetch=4)
    left = {train(0, index): 5 + index for index in range(61)}
    counts = [0] * ranks
    while state.phase is not None:
        phase, given = state.phase, []
        index, over = [0] * ranks, [False] * ranks
        while not all(over):
            for rank in range(ranks):
                if not over[rank]:
                    state.want(wire.RankWant(rank, 7, phase.kind, phase.number, index[rank]))
            rings = [ring("w0", *(ready(at, seq, batch) for at, (batch, seq) in enumerate(left.items())), alive=False)]
            for action in decide(state.view(rings)):
                state.apply(action, 0.0)
                if isinstance(action, Give):
                    given.append(action.batch)
                    index[action.request.rank] += 1
                    counts[action.request.rank] += 1
                elif isinstance(action, GiveExhausted):
                    over[action.request.rank] = True
        assert state.done(wire.Done(0, 7, phase.kind, phase.number, tuple(given), (), {}))
        left = {batch: seq for batch, seq in left.items() if batch not in given}
        assert max(counts) - min(counts) <= 1, f"after step {phase.number}: {counts}"


def test_a_phase_is_exhausted_once_all_is_given_and_accepted() -> None:
    request = Request(1, STEP[0], 0)
    given = [grant(0, 0, train(0, 0)), grant(0, 1, train(0, 1), Outcome.GIVEN)]
    assert of(GiveExhausted, decide(view(ranks=2, grants={STEP[0]: given}, requests=[request]))) == []
    for outcome in (Outcome.ACCEPTED, Outcome.LISTED):
        given = [grant(0, 0, train(0, 0)), grant(0, 1, train(0, 1), outcome)]
        assert decide(view(ranks=2, grants={STEP[0]: given}, requests=[request])) == [GiveExhausted(request)]


def test_an_epoch_that_ends_with_fewer_records_than_ranks_exhausts_the_others() -> None:
    plan = one_row_batches(5, group=4, epochs=2)
    requests = [Request(rank, STEP[1], 0) for rank in (1, 2, 3)]
    ledger = Ledger()
    ledger.record([BatchId.unpack(train(0, index)) for index in range(4)], {})
    for strict in (False, True):
        actions = decide(
            view(
                *(),
                plan=plan,
                ledger=ledger,
                phase=STEP[1],
                strict=strict,
                ranks=4,
                grants={STEP[1]: [grant(0, 0, train(0, 4))]},
                requests=requests,
            )
        )
        assert actions == [GiveExhausted(request) for request in requests]


@pytest.mark.parametrize("strict", [False, True])
def test_one_record_of_the_next_phase_is_given_ahead_and_only_when_the_current_one_is_settled(strict: bool) -> None:
    scan = ring("w0", *(ready(i, 5 + i, train(0, 2 + i)) for i in range(4)), alive=False)

    def given(grants: dict[Phase, list[Grant]], index: int = 0) -> list[int]:
        requests = [Request(0, STEP[1], index)]
        return [give.batch for give in of(Give, decide(view(scan, strict=strict, grants=grants, requests=requests)))]

    assert given({STEP[0]: [grant(0, 0, train(0, 0)), grant(0, 1, train(0, 1), Outcome.GIVEN)]}) == []
    settled = {STEP[0]: [grant(0, 0, train(0, 0)), grant(0, 1, train(0, 1))]}
    assert given(settled) == [train(0, 2)]
    assert given({**settled, STEP[1]: [grant(0, 0, train(0, 2))]}, 1) == []


def test_what_ranks_wait_for_is_made_beyond_credit_and_the_highest_record_gives_way() -> None:
    full = ring("w0", ready(0, 5, train(1, 0)), ready(1, 6, train(1, 3)))
    actions = decide(view(full, requests=[Request(0, STEP[0], 0)]))
    assert of(Assign, actions) == [Assign(train(0, 0), "w0", 1, True)]
    assert of(Free, actions) == [Free(Place("w0", 1, 1, 6), train(1, 3), "evicted")]


def test_nothing_is_evicted_while_a_rank_will_free_a_slot_or_none_waits() -> None:
    full = ring("w0", ready(0, 5, train(1, 0)), ready(1, 6, train(1, 3)))
    request = Request(0, STEP[0], 0)
    assert of(Free, decide(view(full, requests=[request], lagging=[Place("w0", 1, 0, 5)]))) == []
    assert decide(view(full)) == []
    coming = ring("w1", free(0))
    assignments = [Assignment(train(0, 0), "w1", 1, 0.0)]
    assert of(Free, decide(view(full, coming, requests=[request], assignments=assignments))) == []


def test_only_what_a_worker_does_not_list_is_sent_again_and_not_at_once() -> None:
    scan = ring("w0", free(0), free(1), free(2))
    assignments = [Assignment(train(0, i), "w0", 1, sent) for i, sent in enumerate((10.0, 10.0, 12.0))]
    hints = {"w0": WorkerHint(1, frozenset([train(0, 0)]), 12.0, 0.0)}
    actions = decide(view(scan, assignments=assignments, workers=hints))
    assert actions == [Resend(train(0, 1), "w0", 1)]


def test_a_retired_ring_is_removed_when_it_is_drained() -> None:
    request = Request(0, STEP[0], 0)
    scan = ring("w0", ready(0, 5, train(0, 0)), alive=False, retired=True)
    assert of(RemoveRing, decide(view(scan))) == []
    assert of(RemoveRing, decide(view(scan, requests=[request]))) == []
    assert of(RemoveRing, decide(view(scan, steps=1))) == [RemoveRing("w0", 1)]
    assert of(RemoveRing, decide(view(ring("w0", free(0), retired=True)))) == []


def test_a_finished_run_frees_everything_and_asks_for_nothing() -> None:
    scan = ring("w0", ready(0, 5, train(1, 7)), ready(1, 6, evaluation(8, 0)), free(2))
    actions = decide(view(scan, steps=8, assignments=[Assignment(train(1, 7), "w0", 1, 0.0)]))
    assert [action.why for action in of(Free, actions)] == ["done", "evaluation"]
    assert len(of(Reap, actions)) == 1
    assert of(Assign, actions) == []


def test_evaluation_batches_are_made_in_the_order_in_which_they_are_wanted() -> None:
    slots = [free(i) for i in range(12)]
    actions = decide(view(ring("w0", *slots), prefetch=12))
    made = [line.split()[0] for line in assigned(actions)]
    assert made[:7] == [*(f"train/0/{i}" for i in range(4)), *(f"eval/2/{i}" for i in range(3))]
    assert made[7:] == [*(f"train/0/{i}" for i in range(4, 8)), "train/1/0"]


def test_an_evaluation_takes_its_own_records_and_the_next_step_is_made_meanwhile() -> None:
    scan = ring("w0", ready(0, 5, train(0, 4)), ready(1, 6, evaluation(2, 1)), free(2), free(3), free(4))
    request = Request(0, EVAL[2], 0)
    actions = decide(view(scan, steps=2, phase=EVAL[2], requests=[request]))
    assert of(Give, actions) == [Give(request, Place("w0", 1, 1, 6), evaluation(2, 1))]
    assert [line.split()[0] for line in assigned(actions)] == ["eval/2/0", "eval/2/2", "train/0/5"]


def test_the_coming_evaluation_and_the_records_before_it() -> None:
    assert [eval_after(PLAN, done) for done in (0, 1, 2, 7, 8)] == [2, 2, 4, 8, None]
    assert eval_after(one_row_batches(4, held_out=1), 0) == 4
    assert eval_after(one_row_batches(4, eval_every=1), 0) is None
    plan = one_row_batches(5, epochs=3, group=2)  # steps of 2, 2 and 1 records
    for start in range(9):
        for stop in range(start, 10):
            assert train_records(plan, start, stop, 100) == sum(map(plan.step_batches, range(start, stop)))


def test_a_retired_ring_does_not_wait_for_a_distant_evaluation() -> None:
    """Its training records are soon taken; the coming evaluation's, which others can make, would keep it for hours."""
    slots = ready(0, 5, train(0, 1)), ready(1, 6, evaluation(2, 0))
    for alive, retired in ((False, False), (True, True), (True, False)):
        assert of(Free, decide(view(ring("w0", *slots, alive=alive, retired=retired)))) == []
    freed = of(Free, decide(view(ring("w0", *slots, alive=False, retired=True))))
    assert [(free.batch, free.why) for free in freed] == [(evaluation(2, 0), "evaluation")]
    now = view(ring("w0", *slots, alive=False, retired=True), steps=2, phase=EVAL[2])
    assert not any(free.why == "evaluation" for free in of(Free, decide(now)))


# ---- the feed's memory


class Desk:
    """A FeedState with one drained worker, and short names for what happens to it."""

    def __init__(self, *, ranks: int = 1, steps: int = 0) -> None:
        self.state = FeedState(PLAN, ledger_of(steps), STEP[steps], trainer=7, ranks=ranks, strict=False, prefetch=4)
        self.seq = 100

    def want(self, number: int, index: int, *, rank: int = 0, kind: int = 1, refused: tuple[int, ...] = ()) -> Any:
        return self.state.want(wire.RankWant(rank, 7, kind, number, index, refused))

    def decide(self, *batches: int) -> list[Any]:
        """One decision with these batches READY; what is sent to ranks."""
        slots = []
        for at, batch in enumerate(batches):
            self.seq += 1
            slots.append(ready(at, self.seq, batch))
        actions = decide(self.state.view([ring("w0", *slots, alive=False)]))
        return [answer for action in actions if (answer := self.state.apply(action, 0.0)) is not None]

    def done(self, number: int, trained: list[int], listed: list[int] | None = None, *, kind: int = 1) -> bool:
        entries = tuple(wire.Listed(batch, "why") for batch in listed or ())
        return self.state.done(wire.Done(0, 7, kind, number, tuple(trained), entries, {}))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_answers_are_repeatable(desk: Desk) -> None:
    assert desk.want(0, 0) is None
    (take,) = desk.decide(train(0, 0))
    assert desk.want(0, 0) == take
    assert desk.want(0, 1) is None
    (second,) = desk.decide(train(0, 1))
    assert desk.want(0, 2) is None
    (exhausted,) = desk.decide()
    assert isinstance(exhausted, wire.Exhausted)
    assert [desk.want(0, index) for index in (0, 1, 2)] == [take, second, exhausted]
    assert desk.want(0, 4) is None
    assert desk.done(0, [train(0, 0), train(0, 1)])
    assert isinstance(desk.want(0, 2), wire.Exhausted), "a phase that is over has no more records"


def test_requests_of_others_are_not_noted(desk: Desk) -> None:
    desk.want(5, 0)
    desk.want(0, 0, rank=1)
    desk.want(0, 0, kind=2)
    desk.state.want(wire.RankWant(0, 6, 1, 0, 0))
    assert desk.state.waiting_ranks == []


@pytest.mark.parametrize("told_by_request", [False, True])
def test_a_refused_batch_is_needed_again_and_listed_the_second_time(desk: Desk, told_by_request: bool) -> None:
    for index, refusals in ((0, 0), (1, 1)):
        desk.want(0, index, refused=tuple(range(index)) if told_by_request else ())
        (take,) = desk.decide(train(0, 0))
        assert (take.batch, take.refusals) == (train(0, 0), refusals)
        refusal = wire.Refused(0, 7, 1, 0, index, train(0, 0), "zeros")
        assert told_by_request or desk.state.refused(refusal)
    desk.want(0, 2, refused=(0, 1) if told_by_request else ())
    (take,) = desk.decide(train(0, 0), train(0, 1))
    assert take.batch == train(0, 1), "a listed batch is not given out again"
    desk.want(0, 3, refused=(0, 1))
    (exhausted,) = desk.decide()
    assert isinstance(exhausted, wire.Exhausted)
    with pytest.raises(FeedBroken, match="phase 0"):
        desk.done(0, [train(0, 0), train(0, 1)])  # no rank can have trained it
    assert desk.done(0, [train(0, 1)], [train(0, 0)])
    assert list(desk.state.ledger.listed) == [BatchId.unpack(train(0, 0))]
    assert (desk.state.counters.refused, desk.state.counters.listed) == (2, 1)


def test_a_refusal_is_heard_once(desk: Desk) -> None:
    desk.want(0, 0)
    desk.decide(train(0, 0))
    refusal = wire.Refused(0, 7, 1, 0, 0, train(0, 0), "zeros")
    assert [desk.state.refused(refusal) for _ in range(2)] == [True, False]
    desk.want(0, 1)
    desk.decide(train(0, 1))
    desk.want(0, 2)
    assert not desk.state.refused(wire.Refused(0, 7, 1, 0, 1, train(0, 1), "late")), "it was accepted since"


def test_a_phase_ends_once_and_must_add_up(desk: Desk) -> None:
    for index in (0, 1):
        desk.want(0, index)
        desk.decide(train(0, index))
    desk.want(0, 2)
    desk.decide()
    for trained, listed in (([0], []), ([0, 2], []), ([0, 1], [1]), ([], [])):
        with pytest.raises(FeedBroken, match="phase 0"):
            desk.done(0, [train(0, i) for i in trained], [train(0, i) for i in listed])
    assert not desk.done(1, [])
    assert desk.done(0, [train(0, 0)], [train(0, 1)])
    assert not desk.done(0, [train(0, 0)], [train(0, 1)])
    assert desk.state.phase == STEP[1]
    assert desk.state.ledger.done_count() == 2


def test_the_places_of_a_phase_stay_untouched_until_they_are_released(desk: Desk) -> None:
    for index in (0, 1):
        desk.want(0, index)
        desk.decide(train(0, index))
    desk.want(0, 2)
    desk.decide()
    desk.done(0, [train(0, 0), train(0, 1)])
    place = Place("w0", 1, 0, 102)  # of the second record
    late = desk.state.view([ring("w0", ready(0, 102, train(0, 1)), alive=False)])
    assert set(late.lagging) == {place}
    assert decide(late) == []
    assert not desk.state.view([ring("w0", free(0), alive=False)]).lagging


def test_after_the_last_phase_nothing_is_left_to_do() -> None:
    desk = Desk(steps=7)
    for index in (0, 1):
        desk.want(7, index)
        desk.decide(train(1, 6 + index))
    desk.want(7, 2)
    desk.decide()
    assert desk.done(7, [train(1, 6), train(1, 7)])
    assert desk.state.phase == EVAL[8]
    for index in range(3):
        desk.want(8, index, kind=0)
        (take,) = desk.decide(evaluation(8, index))
        assert take.batch == evaluation(8, index)
    desk.want(8, 3, kind=0)
    desk.decide()
    assert desk.done(8, [evaluation(8, index) for index in range(3)], kind=0)
    assert desk.state.phase is None
    assert desk.state.ledger.complete(PLAN)


def test_a_ledger_that_does_not_fit_the_phase_is_refused() -> None:
    for steps, phase in ((1, STEP[0]), (0, STEP[1]), (3, STEP[4]), (2, EVAL[4]), (7, None)):
        with pytest.raises(FeedBroken, match="does not fit"):
            FeedState(PLAN, ledger_of(steps), phase, trainer=7, ranks=1, strict=True, prefetch=1)
    for steps, phase in ((0, STEP[0]), (4, STEP[4]), (2, EVAL[2]), (2, STEP[2]), (8, EVAL[8]), (8, None)):
        FeedState(PLAN, ledger_of(steps), phase, trainer=7, ranks=1, strict=True, prefetch=1)
