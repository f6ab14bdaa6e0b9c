"""The real rings, the real decision and the real memory of the feed under schedules that hypothesis chooses.

See feed_world.py for what is simulated and what each step checks. Whatever happened, a continuation without faults ends
with every batch of the plan trained or listed, once, with no record and no retired ring left over.
"""

import random

import pytest
from feed_world import World, evaluation, lose, one_row_batches, random_run, train
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paceline.common.batch import BatchId

WORKER = st.integers(0, 3)
RANK = st.integers(0, 2)
DIRECTION = st.sampled_from(["feed", "worker", "rank"])
PLACE = st.integers(0, 30)


class FeedMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        batches=st.integers(1, 7),
        epochs=st.integers(1, 3),
        group=st.integers(1, 4),
        held_out=st.sampled_from([0, 0, 1, 3]),
        eval_every=st.integers(0, 2),
        workers=st.integers(1, 3),
        ranks=st.integers(1, 3),
        slots=st.integers(1, 3),
        prefetch=st.integers(1, 3),
        strict=st.booleans(),
        making=st.integers(1, 2),
    )
    def begin(
        self, batches, epochs, group, held_out, eval_every, workers, ranks, slots, prefetch, strict, making
    ) -> None:
        plan = one_row_batches(batches, epochs=epochs, group=group, held_out=held_out, eval_every=eval_every)
        self.world = World(
            plan, workers=workers, ranks=ranks, slots=slots, prefetch=prefetch, strict=strict, making=making
        )
        self.world.start_trainer()

    def worker(self, number: int):
        names = sorted(self.world.workers)
        return self.world.workers[names[number % len(names)]]

    # Steps.

    @rule(seed=st.integers(0, 9), rounds=st.integers(1, 6))
    def everybody(self, seed: int, rounds: int) -> None:
        for _ in range(rounds):
            self.world.round(random.Random(seed))

    @rule(number=WORKER)
    def work(self, number: int) -> None:
        self.worker(number).work()

    @rule(number=WORKER)
    def want(self, number: int) -> None:
        self.worker(number).want()

    @rule(to=DIRECTION)
    def deliver_all(self, to: str) -> None:
        for _ in range(len(self.world.queue(to))):
            self.world.deliver(to)

    @rule()
    def decide(self) -> None:
        self.world.now += 0.4
        self.world.turn()

    @rule(number=RANK)
    def train_record(self, number: int) -> None:
        self.world.train(number)

    @rule(number=RANK)
    def release_and_ask(self, number: int) -> None:
        if number < len(self.world.ranks):
            self.world.ranks[number].release()
            self.world.ranks[number].ask()

    @rule()
    def finish_phase(self) -> None:
        self.world.finish_phase()

    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    # Faults.

    @rule(number=WORKER)
    def kill_worker(self, number: int) -> None:
        self.worker(number).kill()

    @rule(number=WORKER)
    def restart_worker(self, number: int) -> None:
        self.world.restart_worker(self.worker(number).name)

    @rule()
    def kill_trainer(self) -> None:
        self.world.kill_trainer()

    @rule(ranks=st.integers(1, 3))
    def start_trainer(self, ranks: int) -> None:
        self.world.start_trainer(ranks)

    @rule(to=DIRECTION, at=PLACE)
    def lose_message(self, to: str, at: int) -> None:
        lose(self.world, to, at)

    @rule(to=DIRECTION, at=PLACE, keep=st.booleans())
    def deliver_out_of_order(self, to: str, at: int, keep: bool) -> None:
        self.world.deliver(to, at, keep=keep)

    @rule(number=WORKER)
    def garbage(self, number: int) -> None:
        self.worker(number).work(garbage=True)

    @rule(batch=st.sampled_from([train(0, 0), train(0, 2), train(1, 0), evaluation(1, 0)]))
    def poison(self, batch: int) -> None:
        self.world.poison.add(batch)

    @rule(number=WORKER)
    def retire_worker(self, number: int) -> None:
        self.world.retire(self.worker(number).name)

    @precondition(lambda self: len(self.world.workers) < 4)
    @rule()
    def add_worker(self) -> None:
        self.world.add_worker()

    @invariant()
    def no_taken_slot_moves(self) -> None:
        if hasattr(self, "world"):
            self.world.check_held()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.settle(order=random.Random(0))
        finally:
            self.world.close()


TestFeed = FeedMachine.TestCase
TestFeed.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class LongFeedMachine(FeedMachine):
    pass


TestFeedLong = pytest.mark.slow(LongFeedMachine.TestCase)
TestFeedLong.settings = settings(
    max_examples=200, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def run(seed: int) -> World:
    world = random_run(seed)
    try:
        world.settle(order=random.Random(seed))
    finally:
        world.close()
    return world


@pytest.mark.parametrize("first", [0, 20])
def test_random_schedules(first: int) -> None:
    for seed in range(first, first + 20):
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1300, 100))
def test_many_random_schedules(first: int) -> None:
    for seed in range(first, first + 100):
        run(seed)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_without_faults_no_record_is_made_twice(ranks: int, strict: bool) -> None:
    plan = one_row_batches(11, epochs=2, group=4, held_out=3, eval_every=2)
    world = World(plan, workers=3, ranks=ranks, slots=3, strict=strict)
    try:
        world.settle()
        assert world.feed is not None
        evaluations = sum(plan.eval_due(done) for done in range(1, plan.total_steps + 1))
        counters = world.feed.counters
        assert counters.given == 22 + 3 * evaluations
        assert sum(worker.produced for worker in world.scan()) == counters.given + counters.evicted
        assert (counters.duplicates, counters.refused, counters.evicted) == (0, 0, 0)
    finally:
        world.close()


def test_strict_order_is_the_same_for_any_history() -> None:
    orders = []
    for seed in range(6):
        world = World(one_row_batches(6, epochs=2, group=2), workers=1 + seed % 3, ranks=2, slots=1 + seed % 2)
        draw = random.Random(seed)
        history: list[list[BatchId]] = []
        try:
            while not world.finished:
                world.start_trainer()
                for worker in world.workers.values():
                    world.restart_worker(worker.name)
                before = world.phase
                world.round(draw)
                if world.feed is not None and world.phase != before:
                    world.checkpoint()
                    history.append([*world.ledger.trained_ids(0), *world.ledger.trained_ids(1)])
                if draw.random() < 0.1 and not world.finished:
                    draw.choice([world.kill_trainer, *(worker.kill for worker in world.workers.values())])()
        finally:
            world.close()
        orders.append(history)
    assert all(order == orders[0] for order in orders)


if __name__ == "__main__":
    import sys

    for one in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            run(one)
        except BaseException:
            print("seed", one)
            raise
