"""A small world for the feed's tests: real ring files, the real decision and memory of the feed, and the rest simulated
in one process: workers, ranks, a network that loses, doubles and reorders messages, and kills of either side.

Each method of `World` is one step of one party. The world checks as it goes that no batch is trained twice in the
timeline that survives, that a record a rank holds never moves, and that steps are what the order of work promises.
`settle` then plays on without faults and demands the end of the run.
"""

import random
import shutil
import tempfile
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from paceline.common import wire
from paceline.common.batch import BatchId, Kind
from paceline.common.fingerprint import Fingerprint
from paceline.common.plan import Plan, PlanSpec
from paceline.common.ring import Ring, RingReader, RingScan, Slot, SlotState, ring_paths
from paceline.consumer.feed import Action, Assign, Free, Give, GiveExhausted, Phase, RemoveRing, Resend, decide
from paceline.consumer.feedstate import FeedState
from paceline.consumer.ledger import Ledger

FINGERPRINT = Fingerprint({"target": "tiny", "seed": 0})
RECORD_BYTES = 16
HELD = 2  # records that a rank holds at most
GARBAGE = 2**64 - 1
SHARED_MEMORY = Path("/dev/shm")


def one_row_batches(batches: int, *, epochs: int = 1, group: int = 1, held_out: int = 0, eval_every: int = 0) -> Plan:
    """A plan whose batches are single rows."""
    spec = PlanSpec("digest", 0, 8, 8, "sequential", held_out)
    lengths = np.full(batches + held_out, 8)
    return Plan(spec, lengths, batches_per_step=group, epochs=epochs, eval_every=eval_every)


def train(epoch: int, index: int) -> int:
    return BatchId(Kind.TRAIN, epoch, index).pack()


def evaluation(number: int, index: int) -> int:
    return BatchId(Kind.EVAL, number, index).pack()


def over_the_wire(message: wire.Message) -> wire.Message:
    """The message as it arrives."""
    return _sent(message) if isinstance(message, wire.Done) else _sent_before(message)


def _sent(message: wire.Message) -> wire.Message:
    return wire.decode(wire.encode(message))


_sent_before = lru_cache(1024)(_sent)  # most messages are repeated until they are answered


class SimWorker:
    """A target worker. All but its ring is lost when it is killed."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.gone = False  # scaled away: never started again
        self.ring: Ring | None = None

    def start(self) -> None:
        world = self.world
        self.ring = Ring.open(
            world.folder / f"{self.name}.ring",
            worker=self.name,
            fingerprint=FINGERPRINT,
            slots=world.slots,
            slot_bytes=RECORD_BYTES,
        )
        self.feed = 0
        self.queue: set[int] = set()
        self.writing: deque[Slot] = deque()  # oldest claim first
        world.tell_feed(wire.Hello(self.name, self.ring.incarnation, ()))

    @property
    def held(self) -> tuple[int, ...]:
        return (*sorted(self.queue), *(slot.batch for slot in self.writing))

    def hear(self, message: wire.Work | wire.StopWorker) -> None:
        if self.ring is None or message.incarnation != self.ring.incarnation or not isinstance(message, wire.Work):
            return
        if message.feed != self.feed:
            self.feed = message.feed
            self.queue.clear()
        committed = {slot.batch for slot in self.ring.states() if slot.state is SlotState.READY}
        for item in message.items:
            assert list(item.rows) == self.world.plan.rows(BatchId.unpack(item.batch)).tolist()
            if item.batch not in committed and item.batch not in {slot.batch for slot in self.writing}:
                self.queue.add(item.batch)

    def want(self) -> None:
        if self.ring is not None:
            self.world.tell_feed(wire.Want(self.name, self.ring.incarnation, self.held, 0.0, 1.0))

    def work(self, garbage: bool = False) -> bool:
        """Claim a slot, or commit the oldest record in the making; False if there is nothing to do."""
        ring = self.ring
        if ring is None:
            return False
        if ring.retired:
            self.world.tell_feed(wire.Bye(self.name, ring.incarnation))
            self.kill()
            self.gone = True
            return True
        if self.queue and len(self.writing) < self.world.making and (slot := ring.claim(min(self.queue))) is not None:
            self.queue.discard(slot.batch)
            self.writing.append(slot)
            return True
        if self.writing:
            slot = self.writing.popleft()
            np.frombuffer(slot.payload, np.uint64, 2)[:] = (
                GARBAGE if garbage or slot.batch in self.world.poison else slot.batch
            )
            ring.commit(slot, RECORD_BYTES, 0)
            self.world.tell_feed(wire.Ready(self.name, ring.incarnation, slot.index, slot.seq, slot.batch))
            return True
        return False

    def kill(self) -> None:
        if self.ring is not None:
            self.ring.close()
            self.ring = None


@dataclass
class Held:
    phase: Phase
    take: wire.Take
    trained: bool = False  # read, and not released yet


@dataclass
class SimRank:
    """A trainer rank: its fetch thread (`hear`, `ask`) and its training loop (`train`)."""

    world: "World"
    number: int
    phase: Phase | None  # whose records it asks for
    index: int = 0
    held: deque[Held] = field(default_factory=deque)
    refused: list[wire.Refused] = field(default_factory=list)
    listed: dict[Phase, dict[int, str]] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)  # in the phase in training
    exhausted: set[Phase] = field(default_factory=set)
    done: deque[wire.Done] = field(default_factory=lambda: deque(maxlen=2))

    def request(self) -> wire.RankWant | None:
        if self.phase is None or len(self.held) >= HELD:
            return None
        indices = tuple(r.index for r in self.refused if (r.kind, r.number) == self.phase)
        return wire.RankWant(self.number, self.world.trainer, *self.phase, self.index, indices)

    def ask(self) -> None:
        """Say again what the feed must know, and what is wanted."""
        for message in (*self.refused, *self.done):
            self.world.tell_feed(message)
        if (request := self.request()) is not None:
            self.world.tell_feed(request)

    def hear(self, message: wire.Take | wire.Exhausted | wire.StopRank) -> None:
        if isinstance(message, wire.StopRank) or message.trainer != self.world.trainer:
            return
        if self.phase is None or (message.kind, message.number, message.index) != (*self.phase, self.index):
            return
        if isinstance(message, wire.Exhausted):
            self.exhausted.add(self.phase)
            following = self.world.plan.next_phase(*self.phase)
            self.phase, self.index = None if following is None else Phase(*following), 0
        elif len(self.held) < HELD:
            self._accept(message, self.phase)
            self.index += 1
        self.ask()

    def _accept(self, take: wire.Take, phase: Phase) -> None:
        reader = self.world.reader(take)
        if self.world.payload(take) == take.batch:
            assert reader.take(take.slot, take.seq, self.world.trainer)
            self.held.append(Held(phase, take))
            return
        assert reader.release(take.slot, take.seq)
        self.refused.append(wire.Refused(self.number, take.trainer, *phase, take.index, take.batch, "garbage"))
        if take.refusals:
            self.listed.setdefault(phase, {})[take.batch] = "garbage"

    def train(self, phase: Phase) -> bool:
        """Train on the next held record of the phase."""
        held = next((held for held in self.held if not held.trained and held.phase == phase), None)
        if held is None:
            return False
        assert self.world.payload(held.take) == held.take.batch, "a held record was overwritten"
        held.trained = True
        self.trained.append(held.take.batch)
        return True

    def release(self) -> bool:
        """Free the oldest record that was trained on."""
        if not self.held or not self.held[0].trained:
            return False
        take = self.held.popleft().take
        assert self.world.reader(take).release(take.slot, take.seq), "a held record was moved"
        self.ask()
        return True


class World:
    def __init__(
        self,
        plan: Plan,
        *,
        workers: int = 2,
        ranks: int = 1,
        slots: int = 2,
        prefetch: int = 2,
        strict: bool = True,
        making: int = 2,
    ) -> None:
        """making: records that a worker fills at once."""
        base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-test-", dir=base))
        self.plan = plan
        self.slots, self.prefetch, self.strict, self.ranks_wanted = slots, prefetch, strict, ranks
        self.making = making
        self.now = 0.0
        self.to_feed: list[wire.Message] = []
        self.to_workers: list[tuple[str, wire.Work | wire.StopWorker]] = []
        self.to_ranks: list[tuple[int, wire.Take | wire.Exhausted | wire.StopRank]] = []
        self.trainer = 0
        self.feed: FeedState | None = None
        self.ranks: list[SimRank] = []
        self.readers: dict[str, RingReader] = {}
        self.checkpoint_: tuple[Ledger, Phase | None] = (Ledger(), Phase(Kind.TRAIN, 0))
        self.ledger = Ledger()
        self.phase: Phase | None = None  # the phase in training
        self.poison: set[int] = set()  # batches whose records never check out
        self.workers: dict[str, SimWorker] = {}
        for _ in range(workers):
            self.add_worker()

    def close(self) -> None:
        self.kill_trainer()
        for worker in self.workers.values():
            worker.kill()
        shutil.rmtree(self.folder)

    # ---- messages

    def tell_feed(self, message: wire.Message) -> None:
        self.to_feed.append(message)

    def hear_feed(self, message: wire.Message) -> None:
        """The feed hears one message, as Feeder does."""
        feed = self.feed
        if feed is None:
            return
        message = over_the_wire(message)
        match message:
            case wire.Hello() | wire.Want():
                scan = self.scan_of(message.worker)
                if scan is not None and scan.alive and scan.incarnation == message.incarnation:
                    feed.heard(message.worker, message.incarnation, message.held, None, self.now)
            case wire.RankWant():
                answer = feed.want(message)
                if answer is not None:
                    self.to_ranks.append((message.rank, answer))
            case wire.Refused():
                feed.refused(message)
            case wire.Done():
                feed.done(message)
            case _:
                pass

    def queue(self, to: str) -> list:
        return {"feed": self.to_feed, "worker": self.to_workers, "rank": self.to_ranks}[to]

    def deliver(self, to: str, at: int = 0, *, keep: bool = False) -> bool:
        """Deliver one message of a direction; `keep` leaves a double of it on the way."""
        queue = self.queue(to)
        if not queue:
            return False
        message = queue[at % len(queue)]
        if not keep:
            del queue[at % len(queue)]
        if to == "feed":
            self.hear_feed(message)
        elif to == "worker":
            self.workers[message[0]].hear(message[1])
        elif message[0] < len(self.ranks):
            self.ranks[message[0]].hear(message[1])
        return True

    # ---- rings

    def scan(self) -> list[RingScan]:
        for name, reader in list(self.readers.items()):
            if reader.replaced():
                self.readers.pop(name).close()
        for path in ring_paths(self.folder):
            if path.stem not in self.readers:
                self.readers[path.stem] = RingReader.open(path)
        return [reader.scan() for reader in self.readers.values()]

    def scan_of(self, worker: str) -> RingScan | None:
        """One worker's ring, if there is one."""
        reader, path = self.readers.get(worker), self.folder / f"{worker}.ring"
        if reader is not None and reader.replaced():
            self.readers.pop(worker).close()
            reader = None
        if reader is None and path.exists():
            reader = self.readers[worker] = RingReader.open(path)
        return None if reader is None else reader.scan()

    def reader(self, take: wire.Take) -> RingReader:
        reader = self.readers[take.worker]
        assert reader.ring_id == take.ring
        return reader

    def payload(self, take: wire.Take) -> int:
        reader = self.reader(take)
        assert reader.holds(take.slot, take.seq), "a record that was given out has moved"
        view = reader.payload(reader.slot(take.slot))
        return int(np.frombuffer(view, np.uint64)[0])

    def check_held(self) -> None:
        """No taken slot moves: each record that a rank holds is where it was."""
        for rank in self.ranks:
            for held in rank.held:
                assert self.payload(held.take) == held.take.batch

    # ---- the trainer

    def start_trainer(self, ranks: int | None = None) -> None:
        if self.feed is not None:
            return
        self.trainer += 1
        self.ledger, self.phase = self.checkpoint_[0].copy(), self.checkpoint_[1]
        count = ranks or self.ranks_wanted
        self.feed = FeedState(
            self.plan,
            self.ledger,
            self.phase,
            trainer=self.trainer,
            ranks=count,
            strict=self.strict,
            prefetch=self.prefetch,
        )
        self.ranks = [SimRank(self, number, self.phase) for number in range(count)]
        for rank in self.ranks:
            rank.ask()

    def kill_trainer(self) -> None:
        self.feed = None
        self.ranks = []
        for reader in self.readers.values():
            reader.close()
        self.readers = {}

    def checkpoint(self) -> None:
        if self.feed is not None:
            self.checkpoint_ = (self.ledger.copy(), self.phase)

    def turn(self) -> list[Action]:
        """One decision of the feed, carried out."""
        feed = self.feed
        if feed is None:
            return []
        actions = decide(feed.view(self.scan()))
        work: dict[tuple[str, int], list[int]] = {}
        for action in actions:
            answer = feed.apply(action, self.now)
            match action:
                case Give(request) | GiveExhausted(request):
                    assert answer is not None
                    self.to_ranks.append((request.rank, answer))
                case Free(place):
                    held = [h.take for rank in self.ranks for h in rank.held]
                    assert (place.worker, place.seq) not in {(t.worker, t.seq) for t in held}
                    assert self.readers[place.worker].release(place.slot, place.seq)
                case Assign() | Resend():
                    work.setdefault((action.worker, action.incarnation), []).append(action.batch)
                case RemoveRing(worker):
                    if self.readers[worker].remove_if_empty():
                        self.readers.pop(worker).close()
                case _:
                    pass
        for (worker, incarnation), batches in work.items():
            rows = [tuple(self.plan.rows(BatchId.unpack(batch)).tolist()) for batch in batches]
            items = tuple(wire.WorkItem(batch, own) for batch, own in zip(batches, rows, strict=True))
            self.to_workers.append((worker, wire.Work(incarnation, self.trainer, items)))
        return actions

    def train(self, number: int) -> bool:
        return self.phase is not None and number < len(self.ranks) and self.ranks[number].train(self.phase)

    def finish_phase(self) -> bool:
        """The ranks meet: if none gets more records of the phase, it ends for all."""
        phase = self.phase
        if phase is None or not self.ranks:
            return False
        untrained = [held for rank in self.ranks for held in rank.held if held.phase == phase and not held.trained]
        if untrained or not all(phase in rank.exhausted for rank in self.ranks):
            return False
        trained = [batch for rank in self.ranks for batch in rank.trained]
        listed = {batch: why for rank in self.ranks for batch, why in rank.listed.get(phase, {}).items()}
        self._check_phase(phase, trained, listed)
        if phase.kind is Kind.TRAIN:
            names = {BatchId.unpack(batch): why for batch, why in listed.items()}
            self.ledger.record(map(BatchId.unpack, trained), names)
        entries = tuple(wire.Listed(batch, why) for batch, why in listed.items())
        done = wire.Done(0, self.trainer, phase.kind, phase.number, tuple(trained), entries, {"loss": 0.5})
        for rank in self.ranks:
            rank.trained = []
            rank.refused = [one for one in rank.refused if (one.kind, one.number) != phase]
        following = self.plan.next_phase(*phase)
        self.phase = None if following is None else Phase(*following)
        self.ranks[0].done.append(done)
        self.ranks[0].ask()
        return True

    def _check_phase(self, phase: Phase, trained: list[int], listed: dict[int, str]) -> None:
        batches = sorted((*trained, *listed))
        if phase.kind is Kind.EVAL:
            assert batches == [evaluation(phase.number, index) for index in range(self.plan.eval_batches)]
            return
        epoch = self.plan.epoch_of(phase.number)
        assert len(batches) == self.plan.step_batches(phase.number)
        assert all(BatchId.unpack(batch)[:2] == (Kind.TRAIN, epoch) for batch in batches)
        if self.strict:
            first = (phase.number - self.plan.first_step(epoch)) * self.plan.batches_per_step
            step = [train(epoch, first + j) for j in range(len(batches))]
            assert batches == step
            for rank in self.ranks:
                dealt = step[(rank.number - epoch - first) % len(self.ranks) :: len(self.ranks)]
                mine = [batch for batch in dealt if batch not in listed]
                assert rank.trained == mine, "strict order: records are dealt in turn, on over an epoch, and in order"

    # ---- workers

    def add_worker(self) -> None:
        name = f"w{len(self.workers)}"
        self.workers[name] = SimWorker(self, name)
        self.workers[name].start()

    def restart_worker(self, name: str) -> None:
        worker = self.workers[name]
        if worker.ring is None and not worker.gone:
            worker.start()

    def retire(self, name: str) -> None:
        """`paceline scale` takes the worker away."""
        if (self.folder / f"{name}.ring").exists():
            reader = RingReader.open(self.folder / f"{name}.ring")
            reader.retire()
            reader.close()
            if self.workers[name].ring is None:
                self.workers[name].gone = True

    # ---- to the end

    @property
    def finished(self) -> bool:
        return self.feed is not None and self.feed.phase is None and self.phase is None

    def settle(self, rounds: int = 600, order: random.Random | None = None) -> None:
        """Play on without faults until the run is over; AssertionError if it isn't in so many rounds."""
        for worker in list(self.workers.values()):
            self.restart_worker(worker.name)
        if all(w.gone or (w.ring is not None and w.ring.retired) for w in self.workers.values()):
            self.add_worker()
        self.start_trainer()
        for _ in range(rounds):
            self.round(order)
            if self.finished:
                break
        else:
            raise AssertionError(f"no end: {self.describe()}")
        self.check_end()

    def round(self, order: random.Random | None) -> None:
        """Everyone does one thing and hears what is on the way to them."""
        self.now += 1.0
        steps = [
            *(worker.work for worker in self.workers.values()),
            *(worker.want for worker in self.workers.values()),
            *(step for rank in self.ranks for step in (rank.ask, rank.release)),
            *(lambda number=number: self.train(number) for number in range(len(self.ranks))),
            self.finish_phase,
            self.turn,
        ]
        if order is not None:
            order.shuffle(steps)
        for step in steps:
            step()
        for to in ("worker", "rank", "feed"):
            for _ in range(len(self.queue(to))):
                self.deliver(to)
        self.check_held()

    def check_end(self) -> None:
        assert self.feed is not None
        assert self.ledger == self.feed.ledger
        plan = {batch for epoch in range(self.plan.epochs) for batch in self.plan.ids(epoch)}
        trained = {batch for epoch in range(self.plan.epochs) for batch in self.ledger.trained_ids(epoch)}
        assert trained.isdisjoint(self.ledger.listed.keys())
        assert trained | self.ledger.listed.keys() == plan
        for _ in range(3 + max(map(len, (w.held for w in self.workers.values() if w.ring)), default=0) * 2):
            self.round(None)  # workers empty their queues into rings, the feed frees
        ready = [slot for scan in self.scan() for slot in scan.slots if slot.state is SlotState.READY]
        assert not ready, "records are left over at the end of the run"
        for worker in self.workers.values():
            if worker.gone:
                assert not (self.folder / f"{worker.name}.ring").exists(), "a retired ring is left over"

    def describe(self) -> str:
        feed = self.feed
        slots = {
            scan.worker: [f"{s.state.value}:{BatchId.unpack(s.batch)}" for s in scan.slots] for scan in self.scan()
        }
        held = {w.name: [str(BatchId.unpack(b)) for b in w.held] for w in self.workers.values() if w.ring}
        ranks = [(r.phase, r.index, [str(BatchId.unpack(h.take.batch)) for h in r.held]) for r in self.ranks]
        view = feed and feed.view([])
        return (
            f"phase {self.phase}, feed at {feed and feed.phase}, rings {slots}, workers hold {held}, ranks {ranks}, "
            f"requests {view and view.requests}, assigned {view and list(view.assignments)}, "
            f"grants {view and dict(view.grants)}, lagging {view and list(view.lagging)}"
        )


def random_run(seed: int, steps: int = 250, faults: float = 0.15) -> World:
    """A world of a random shape, after so many random steps and faults; not settled."""
    draw = random.Random(seed)
    plan = one_row_batches(
        draw.randint(1, 9),
        epochs=draw.randint(1, 3),
        group=draw.randint(1, 4),
        held_out=draw.choice([0, 0, 1, 3]),
        eval_every=draw.choice([0, 1, 2]),
    )
    world = World(
        plan,
        workers=draw.randint(1, 3),
        ranks=draw.randint(1, 3),
        slots=draw.randint(1, 3),
        prefetch=draw.randint(1, 3),
        strict=draw.random() < 0.5,
        making=draw.randint(1, 2),
    )
    world.start_trainer()
    for _ in range(steps):
        fault(world, draw) if draw.random() < faults else step(world, draw)
        world.check_held()
    return world


def step(world: World, draw: random.Random) -> None:
    """One random step of somebody, or one of everybody, without a fault."""
    world.now += 0.3
    if draw.random() < 0.15:
        world.round(draw)
        return
    if draw.random() < 0.4:
        to = draw.choice(["feed", "worker", "rank"])
        for _ in range(draw.choice([1, len(world.queue(to))])):
            world.deliver(to)
        return
    worker = world.workers[draw.choice(sorted(world.workers))]
    worker_steps = [worker.work, worker.work, worker.want, lambda: world.restart_worker(worker.name)]
    rank_steps = [rank_step for rank in world.ranks for rank_step in (rank.ask, rank.release)]
    rank_steps += [lambda number=number: world.train(number) for number in range(len(world.ranks))]
    trainer_steps = [world.turn, world.turn, world.finish_phase, world.start_trainer]
    draw.choice([*worker_steps, *rank_steps, *trainer_steps])()
    if draw.random() < 0.03:
        world.checkpoint()


def fault(world: World, draw: random.Random) -> None:
    name = draw.choice(sorted(world.workers))
    to, at = draw.choice(["feed", "worker", "rank"]), draw.randint(0, 50)
    if draw.random() < 0.05:
        batch = draw.choice([train(0, 0), train(0, 1), train(1, 0), evaluation(1, 0)])
        draw.choice([lambda: world.retire(name), world.add_worker, lambda: world.poison.add(batch)])()
        return
    choices = [
        world.workers[name].kill,
        lambda: world.deliver(to, at),
        lambda: world.deliver(to, at, keep=True),
        lambda: lose(world, to, at),
        lambda: lose(world, "worker", at),
        lambda: world.workers[name].work(garbage=True),
    ]
    if draw.random() < 0.1:
        choices = [world.kill_trainer, lambda: (world.kill_trainer(), world.start_trainer(draw.randint(1, 3)))]
    draw.choice(choices)()


def lose(world: World, to: str, at: int) -> None:
    queue = world.queue(to)
    if queue:
        del queue[at % len(queue)]
