"""The feed's protocol as an explicit-state model: workers, rings, late messages, feed, ranks, checkpoints, kills.

The oracle of the feed's tests. `explore` visits every state that any schedule of steps and faults can reach and checks:

- no batch is trained twice in the timeline that survives, and steps never mix epochs;
- a record that a rank holds and has not read never moves;
- every fault-free continuation of every state ends with all batches trained and checkpointed: the graph of fault-free
  steps has no cycle (no livelock) and no other ends (no deadlock), whoever is scheduled when.

The feed is a parameter. `Rules` is design.md's rules 1 to 14 written down as plainly as possible, allowing all that
they allow; dropping one (`without`) shows the counterexample that it prevents. test_feed.py runs the real `decide` in
its place. It abstracts from time, bytes and memory ordering; a scan and its decision are one step. An optimiser step
takes one record for each rank, and a rank holds the record in training and one of the next step.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Worker(NamedTuple):
    """A worker's memory, lost when it is killed. The incarnation is its ring's word and survives."""

    up: bool = True
    gone: bool = False  # never started again
    retired: bool = False
    incarnation: int = 1
    queue: tuple[int, ...] = ()
    writing: tuple[int, ...] = ()  # slots, oldest claim first
    feed: int = 0  # the newest feed id it has heard


class Slot(NamedTuple):
    seq: int = 0
    commit: int = 0
    done: int = 0
    batch: int = -1

    @property
    def ready(self) -> bool:
        return self.commit == self.seq > self.done


class Record(NamedTuple):
    """A record given to a rank; `read`: copied and released."""

    worker: int
    slot: int
    seq: int
    batch: int
    read: bool = False

    @property
    def place(self) -> tuple[int, int, int]:
        return self[:3]


Assigned = tuple[int, int, int]  # batch, worker, incarnation
Work = tuple[int, int, int, int]  # worker, incarnation, feed, batch


class Feed(NamedTuple):
    """What feed and ranks remember, lost when the trainer is killed. ranks[r]: in training, one of the next step."""

    id: int
    trained: frozenset[int]
    assigned: frozenset[Assigned] = frozenset()
    ranks: tuple[tuple[Record, ...], ...] = ()
    lagging: frozenset[tuple[int, int, int]] = frozenset()  # read, not released yet

    @property
    def held(self) -> set[int]:
        return {record.batch for rank in self.ranks for record in rank}

    @property
    def taken(self) -> set[tuple[int, int]]:
        """Slots that a rank will free."""
        unread = {record[:2] for rank in self.ranks for record in rank if not record.read}
        return unread | {place[:2] for place in self.lagging}


class State(NamedTuple):
    workers: tuple[Worker, ...]
    rings: tuple[tuple[Slot, ...] | None, ...]  # None: removed
    late: frozenset[Work]  # messages that were delayed or doubled
    feed: Feed | None
    checkpoint: frozenset[int]
    kills: int
    message_faults: int
    retires: int
    feeds: int  # trainers started so far


Step = tuple[str, bool, State]  # what happens, whether it is a fault, what it leads to


class Broken(Exception):
    """An invariant does not hold."""


class Model:
    def __init__(
        self,
        *,
        workers: int = 2,
        slots: int = 1,
        batches: int = 3,
        epochs: int = 1,
        ranks: int = 1,
        strict: bool = True,
        kills: int = 1,
        message_faults: int = 0,
        losses: bool = True,
        retires: int = 0,
        late_release: bool = False,
        making: int = 1,
    ) -> None:
        """making: records that a worker may be writing at once."""
        self.making = making
        self.slots, self.batches, self.ranks, self.strict = slots, batches, ranks, strict
        self.epochs, self.epoch_size = epochs, -(-batches // epochs)
        self.losses, self.late_release = losses, late_release
        ring = (Slot(),) * slots
        self.start = State(
            (Worker(),) * workers, (ring,) * workers, frozenset(), None, frozenset(), kills, message_faults, retires, 0
        )

    def epoch(self, batch: int) -> int:
        return batch // self.epoch_size

    def goal(self, state: State) -> bool:
        return len(state.checkpoint) == self.batches

    def undone(self, feed: Feed) -> list[int]:
        return [batch for batch in range(self.batches) if batch not in feed.trained and batch not in feed.held]

    # ---- every step

    def steps(self, state: State) -> Iterator[Step]:
        yield from self._worker_steps(state)
        for message in state.late:
            rest = state._replace(late=state.late - {message})
            yield f"late {message}", False, self.deliver(rest, message)
        if state.feed is None:
            feed = Feed(state.feeds + 1, state.checkpoint, ranks=((),) * self.ranks)
            yield "start trainer", False, state._replace(feed=feed, feeds=state.feeds + 1)
            return
        if state.kills:
            yield "kill trainer", True, state._replace(feed=None, kills=state.kills - 1)
        yield from self.feed_steps(state, state.feed)
        yield from self._rank_steps(state, state.feed)
        if state.feed.trained != state.checkpoint:
            yield "checkpoint", False, state._replace(checkpoint=state.feed.trained)

    def feed_steps(self, state: State, feed: Feed) -> Iterator[Step]:
        raise NotImplementedError

    def _worker_steps(self, state: State) -> Iterator[Step]:
        others_gone = any(worker.gone for worker in state.workers)
        for w, worker in enumerate(state.workers):
            ring = state.rings[w]
            if not worker.up:
                if not worker.gone:
                    born = Worker(incarnation=worker.incarnation + 1)
                    yield f"start w{w}", False, set_worker(state, w, born)
                continue
            assert ring is not None
            waiting = set(worker.queue) - self.written(ring, worker)
            if waiting and len(worker.writing) < self.making:
                batch = min(waiting)
                free = (i for i, slot in enumerate(ring) if slot.done == slot.seq or slot.commit != slot.seq)
                at = next((i for i in free if i not in worker.writing), None)
                if at is not None:
                    slot = ring[at]._replace(seq=max(slot.seq for slot in ring) + 1, batch=batch)
                    claimed = worker._replace(writing=(*worker.writing, at))
                    after = set_worker(set_slot(state, w, at, slot), w, claimed)
                    yield f"w{w} claims slot {at} for {batch}", False, after
            if worker.writing:
                at, *others = worker.writing
                slot = ring[at]
                queue = tuple(batch for batch in worker.queue if batch != slot.batch)
                committed = set_slot(state, w, at, slot._replace(commit=slot.seq))
                yield (
                    f"w{w} commits {slot.batch}",
                    False,
                    set_worker(committed, w, worker._replace(queue=queue, writing=tuple(others))),
                )
            dead = worker._replace(up=False, queue=(), writing=(), feed=0)
            if state.kills:
                killed = state._replace(kills=state.kills - 1)
                yield f"kill w{w}", True, set_worker(killed, w, dead)
                if not others_gone:
                    yield f"kill w{w} for ever", True, set_worker(killed, w, dead._replace(gone=True))
            if state.retires and not worker.writing and not others_gone:
                retired = state._replace(retires=state.retires - 1)
                yield f"retire w{w}", True, set_worker(retired, w, dead._replace(gone=True, retired=True))

    @staticmethod
    def written(ring: tuple[Slot, ...], worker: Worker) -> set[int]:
        """Batches of the records that the worker is writing."""
        return {ring[at].batch for at in worker.writing}

    def deliver(self, state: State, message: Work) -> State:
        w, incarnation, feed, batch = message
        worker = state.workers[w]
        if not worker.up or worker.incarnation != incarnation or feed < worker.feed:
            return state
        queue = set(worker.queue)
        if feed > worker.feed:  # a new feed: what isn't started is dropped
            ring = state.rings[w]
            queue = self.written(ring, worker) if ring else set()
        return set_worker(state, w, worker._replace(queue=tuple(sorted(queue | {batch})), feed=feed))

    def send(self, label: str, before: State, batch: int, w: int) -> Iterator[Step]:
        """A message to a worker: delivered, lost, delayed or doubled."""
        assert before.feed is not None
        message = (w, before.workers[w].incarnation, before.feed.id, batch)
        after = self.deliver(before, message)
        yield label, False, after
        if self.losses:
            yield f"{label} (lost)", True, before
        if before.message_faults:
            late, left = before.late | {message}, before.message_faults - 1
            yield f"{label} (delayed)", True, before._replace(late=late, message_faults=left)
            yield f"{label} (doubled)", True, after._replace(late=late, message_faults=left)

    def _rank_steps(self, state: State, feed: Feed) -> Iterator[Step]:
        for place in feed.lagging:
            released = state._replace(feed=feed._replace(lagging=feed.lagging - {place}))
            yield f"late release {place}", False, free_slot(released, *place[:2])
        for r, rank in enumerate(feed.ranks):
            for at, record in enumerate(rank):
                if record.read:
                    continue
                ring = state.rings[record.worker]
                if ring is None or not ring[record.slot].ready or ring[record.slot].seq != record.seq:
                    raise Broken(f"rank {r} holds {record}, and the slot is {ring and ring[record.slot]}")
                if at == 0:
                    copied = feed._replace(ranks=replaced(feed.ranks, r, (record._replace(read=True), *rank[1:])))
                    if self.late_release:
                        copied = copied._replace(lagging=feed.lagging | {record.place})
                        yield f"rank {r} copies {record.batch}", False, state._replace(feed=copied)
                    else:
                        after = free_slot(state._replace(feed=copied), record.worker, record.slot)
                        yield f"rank {r} copies and releases {record.batch}", False, after
        current = [rank[0] for rank in feed.ranks if rank]
        if current and all(record.read for record in current):
            epoch = self.epoch(current[0].batch)
            more = [batch for batch in self.undone(feed) if self.epoch(batch) == epoch]
            if len(current) == self.ranks or not more:
                yield self._train(state, feed, [record.batch for record in current])

    def _train(self, state: State, feed: Feed, batches: list[int]) -> Step:
        if len(set(batches)) < len(batches) or feed.trained & set(batches):
            raise Broken(f"trained twice: {batches}, trained already {sorted(feed.trained)}")
        if len({self.epoch(batch) for batch in batches}) > 1:
            raise Broken(f"a step mixes epochs: {batches}")
        if self.strict and min(batches) != min(set(range(self.batches)) - feed.trained):
            raise Broken(f"out of order: {batches}")
        ranks = tuple(rank[1:] for rank in feed.ranks)
        return (
            f"step {batches}",
            False,
            state._replace(feed=feed._replace(trained=feed.trained | set(batches), ranks=ranks)),
        )

    # ---- equal states

    def key(self, state: State) -> object:
        """What makes two states the same: sequence numbers only matter as "the slot's" or "stale", slots by content."""
        taken = state.feed.taken if state.feed else set()
        rings = []
        for w, ring in enumerate(state.rings):
            contents = []
            for i, slot in enumerate(ring or ()):
                writing = i in state.workers[w].writing
                kind = 2 if slot.ready else 1 if writing else 0
                contents.append((kind, slot.batch if kind else -1, kind == 2 and (w, i) in taken))
            rings.append(None if ring is None else tuple(sorted(contents)))
        feed_id = state.feed.id if state.feed else state.feeds
        workers = tuple(
            worker._replace(
                incarnation=0,
                feed=worker.feed == feed_id,
                writing=tuple(ring[at].batch for at in worker.writing) if ring else (),
            )
            for worker, ring in zip(state.workers, state.rings, strict=True)
        )
        late = frozenset(
            (w, incarnation == state.workers[w].incarnation, feed == feed_id, batch)
            for w, incarnation, feed, batch in state.late
        )
        return rings.__repr__(), workers, late, self._feed_key(state), state[4:8]

    def _feed_key(self, state: State) -> object:
        feed = state.feed
        if feed is None:
            return None
        assigned = frozenset(
            (batch, w) for batch, w, incarnation in live_assignments(state, feed, self) if incarnation is not None
        )
        ranks = tuple(tuple((r.batch, r.read, -1 if r.read else r.worker) for r in rank) for rank in feed.ranks)
        return feed.trained, assigned, ranks, frozenset(place[0] for place in feed.lagging)


class Rules(Model):
    """The rules of design.md as the feed; `without` drops some of them."""

    def __init__(self, *, without: frozenset[str] = frozenset(), **shape: int | bool) -> None:
        super().__init__(**shape)  # type: ignore[arg-type]
        self.without = without

    def feed_steps(self, state: State, feed: Feed) -> Iterator[Step]:
        feed = feed._replace(assigned=frozenset(live_assignments(state, feed, self)))  # rules 1 and 5
        state = state._replace(feed=feed)
        ready = ready_records(state, feed)
        ranks, takeable = self.open_ranks(feed)
        assigned = {batch for batch, _, _ in feed.assigned}
        in_rings = {record.batch for record in ready}
        need = [batch for batch in self.undone(feed) if batch not in in_rings and batch not in assigned]
        wanted = bool(ranks) and not any(record.batch in takeable for record in ready)
        live = [w for w, worker in enumerate(state.workers) if worker.up]
        if need:
            yield from self._assign(state, feed, need[0], live, takeable, in_rings | assigned)
        if "resend" not in self.without:
            yield from self._resend(state, feed)
        if "evict" not in self.without and wanted:
            yield from self._evict(state, feed, ready, takeable)
        if "dedup" not in self.without:
            yield from self._free(state, feed, ready)
        for record in ready:
            if record.batch in takeable or "dedup" in self.without:  # rule 2
                for r in ranks[:1] if self.strict else ranks:
                    given = feed._replace(ranks=replaced(feed.ranks, r, (*feed.ranks[r], record)))
                    yield f"give {record.batch} of w{record.worker} to rank {r}", False, state._replace(feed=given)
        for w, worker in enumerate(state.workers):  # rule 13
            if worker.retired and state.rings[w] is not None and not unread(state, w) and not taken_in(feed, w):
                yield f"remove w{w}", False, state._replace(rings=replaced(state.rings, w, None))

    def open_ranks(self, feed: Feed) -> tuple[list[int], set[int]]:
        """Ranks that may be given a record now, and the batches that are takeable (rules 9 and 10)."""
        undone = self.undone(feed)
        if not undone:
            return [], set()
        epoch = self.epoch(undone[0])
        empty = [r for r, rank in enumerate(feed.ranks) if not rank]
        if empty:
            current = [self.epoch(rank[0].batch) for rank in feed.ranks if rank]
            ranks = empty if not current or current[0] == epoch else []
        else:
            ranks = [r for r, rank in enumerate(feed.ranks) if len(rank) == 1]
            ahead = [self.epoch(rank[1].batch) for rank in feed.ranks if len(rank) == 2]
            ranks = ranks if not ahead or ahead[0] == epoch else []
        return ranks, {undone[0]} if self.strict else {batch for batch in undone if self.epoch(batch) == epoch}

    def _assign(
        self, state: State, feed: Feed, batch: int, live: list[int], takeable: set[int], coming: set[int]
    ) -> Iterator[Step]:
        counts = {w: sum(1 for a in feed.assigned if a[1] == w) for w in live}
        able = [w for w in live if self.slots - unread(state, w) > counts[w]]  # rule 6
        urgent = not able and "urgent" not in self.without and batch in takeable and not takeable & coming  # rule 7
        for w in live if urgent else able:
            given = feed._replace(assigned=feed.assigned | {(batch, w, state.workers[w].incarnation)})
            yield from self.send(f"assign {batch} to w{w}", state._replace(feed=given), batch, w)

    def _resend(self, state: State, feed: Feed) -> Iterator[Step]:
        for batch, w, _ in feed.assigned:
            worker = state.workers[w]
            if batch not in worker.queue or worker.feed < feed.id:
                again = self.deliver(state, (w, worker.incarnation, feed.id, batch))
                yield f"resend {batch} to w{w}", False, again

    def _evict(self, state: State, feed: Feed, ready: list[Record], takeable: set[int]) -> Iterator[Step]:
        for batch, w, _ in feed.assigned:
            if batch in takeable and unread(state, w) == self.slots and not taken_in(feed, w):
                victim = max((record for record in ready if record.worker == w), key=lambda record: record.batch)
                yield f"evict {victim.batch} from w{w}", False, free_slot(state, w, victim.slot)

    def _free(self, state: State, feed: Feed, ready: list[Record]) -> Iterator[Step]:
        seen: set[int] = set()
        for record in ready:
            if record.batch in feed.trained or record.batch in feed.held or record.batch in seen:
                freed = free_slot(state, record.worker, record.slot)
                yield f"free {record.batch} of w{record.worker}", False, freed
            seen.add(record.batch)


# ---- parts of a state


def replaced(items: tuple, at: int, value: object) -> tuple:
    return (*items[:at], value, *items[at + 1 :])


def set_worker(state: State, w: int, worker: Worker) -> State:
    return state._replace(workers=replaced(state.workers, w, worker))


def set_slot(state: State, w: int, at: int, slot: Slot) -> State:
    return state._replace(rings=replaced(state.rings, w, replaced(state.rings[w] or (), at, slot)))


def free_slot(state: State, w: int, at: int) -> State:
    ring = state.rings[w]
    assert ring is not None
    return set_slot(state, w, at, ring[at]._replace(done=ring[at].seq))


def unread(state: State, w: int) -> int:
    """READY slots of a ring, taken ones included."""
    return sum(slot.ready for slot in state.rings[w] or ())


def taken_in(feed: Feed, w: int) -> bool:
    return any(worker == w for worker, _ in feed.taken)


def ready_records(state: State, feed: Feed) -> list[Record]:
    """READY records that no rank holds."""
    return [
        Record(w, i, slot.seq, slot.batch)
        for w, ring in enumerate(state.rings)
        for i, slot in enumerate(ring or ())
        if slot.ready and (w, i) not in feed.taken
    ]


def live_assignments(state: State, feed: Feed, model: Model) -> set[Assigned]:
    """Assignments that still bring a record: owner alive, batch needed, and not READY in the owner's ring."""
    made = {(record.batch, record.worker) for record in ready_records(state, feed)}
    over = feed.trained | feed.held
    incarnation_matters = not (isinstance(model, Rules) and "incarnation" in model.without)
    return {
        (batch, w, incarnation)
        for batch, w, incarnation in feed.assigned
        if state.workers[w].up
        and (not incarnation_matters or state.workers[w].incarnation == incarnation)
        and batch not in over
        and (batch, w) not in made
    }


# ---- all schedules


class Verdict(NamedTuple):
    problem: str | None
    trace: list[str]
    states: int


def explore(model: Model, most: int = 2_000_000) -> Verdict:
    """Visit every reachable state. RuntimeError if there are more than `most`."""
    states = [model.start]
    numbers = {model.key(model.start): 0}
    came_from: list[tuple[int, str]] = [(-1, "")]
    edges: list[list[int]] = []

    def trace(at: int) -> list[str]:
        labels: list[str] = []
        while at >= 0:
            at, label = came_from[at]
            labels.append(label)
        return labels[-2::-1]

    while len(edges) < len(states):
        at = len(edges)
        onward: list[int] = []
        over = model.goal(states[at])
        try:
            steps = [] if over else list(model.steps(states[at]))
        except Broken as broken:
            return Verdict(str(broken), trace(at), len(states))
        for label, fault, after in steps:
            key = model.key(after)
            if key not in numbers:
                numbers[key] = len(states)
                states.append(after)
                came_from.append((at, label))
            if not fault and numbers[key] != at:
                onward.append(numbers[key])
        if not over and not onward:
            return Verdict("deadlock", trace(at), len(states))
        if len(states) > most:
            raise RuntimeError(f"more than {most} states")
        edges.append(onward)
    cycle = _on_a_cycle(edges)
    return Verdict(None if cycle is None else "livelock", [] if cycle is None else trace(cycle), len(states))


def _on_a_cycle(edges: list[list[int]]) -> int | None:
    """A node on a cycle, if there is one (depth first, without recursion)."""
    white, grey, black = 0, 1, 2
    colour = [white] * len(edges)
    for root in range(len(edges)):
        if colour[root] != white:
            continue
        colour[root] = grey
        stack = [(root, iter(edges[root]))]
        while stack:
            at, onward = stack[-1]
            following = next(onward, None)
            if following is None:
                colour[at] = black
                stack.pop()
            elif colour[following] == grey:
                return following
            elif colour[following] == white:
                colour[following] = grey
                stack.append((following, iter(edges[following])))
    return None
