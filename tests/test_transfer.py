"""States on their way to a GPU: which buffer is filled when, and that no copy is under way where memory may go."""

import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline.common import paths
from paceline.consumer import transfer
from paceline.consumer.bench_step import ResidentReader
from paceline.consumer.transfer import Reading, StateReader, register_host, unregister_host

LAYERS, HIDDEN = 2, 4
CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def record(seed: int, *lengths: int, last: bool = False, scaled: bool = False, hidden: int = HIDDEN) -> Reading:
    """Random states, in micro-batches of these lengths, with a token between them that nothing reads."""
    draw = torch.Generator().manual_seed(seed)
    ends = torch.tensor([length + 1 for length in lengths]).cumsum(0).tolist()
    spans = [(end - length - 1, end - 1) for end, length in zip(ends, lengths, strict=True)]
    states = torch.randn(LAYERS + last, sum(lengths) + len(lengths), hidden, generator=draw)
    if not scaled:
        return Reading(states, LAYERS, spans)
    return Reading(states.to(torch.float8_e4m3fn), LAYERS, spans, torch.rand(states.shape[:2], generator=draw))


def read(reader: StateReader, reading: Reading, key: Any = None) -> list[torch.Tensor]:
    return [part.cpu() for both in reader.features(reading, key) for part in both if part is not None]


def same(found: list[torch.Tensor], reading: Reading) -> bool:
    expected = read(StateReader(CPU, torch.float32), reading)
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


class Buffers:
    """A landing that copies at once, and fails where a GPU would read the wrong states."""

    made: int = 0

    def __init__(self, device: torch.device, like: Reading) -> None:
        Buffers.made += 1
        self.filled, self.longest, self.planes = 0, like.longest, len(like.states)
        self.sides: dict[int, tuple[int, Reading]] = {}
        self.taken = {-1, -2}

    def holds(self, reading: Reading) -> bool:
        return len(reading.states) == self.planes and reading.longest <= self.longest

    def fill(self, reading: Reading, i: int) -> None:
        assert self.holds(reading)
        assert self.filled - 2 in self.taken, "its buffer has not been read"
        start, stop = reading.spans[i]
        piece = Reading(reading.states[:, start:stop].clone(), LAYERS, [(0, stop - start)])
        self.sides[self.filled % 2] = self.filled, piece
        self.filled += 1

    def take(self, number: int, reading: Reading, i: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        held, piece = self.sides[number % 2]
        assert held == number
        self.taken.add(number)
        return next(StateReader(CPU, dtype).features(piece))

    def take_back(self) -> None:
        self.filled -= 1

    def wait(self, number: int | None = None) -> None:
        return


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> StateReader:
    """Of a GPU whose buffers are memory, with buffers made by a first record."""
    monkeypatch.setattr(transfer, "_Landing", Buffers)
    Buffers.made = 0
    made = StateReader(torch.device("cuda"), torch.float32)
    assert same(read(made, reading := record(0, 9, 9, 9)), reading)
    return made


def filled(reader: StateReader) -> int:
    assert reader._landing is not None
    return reader._landing.filled


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_the_next_record_lands_when_the_last_micro_batch_of_the_present_one_computes(reader: StateReader, pieces: int):
    """Announced before the present record is read, or while it is, or after."""
    present, coming = record(1, *[5] * pieces), record(2, 4, 6)
    for when in (-1, *range(pieces + 1)):
        before = filled(reader)
        if when == -1:
            reader.expect("coming", coming)  # known, but the present record comes first
        for i, _ in enumerate(reader.features(present)):
            if i == when:
                reader.expect("coming", coming)
            announced = when <= i
            assert filled(reader) - before == min(i + 2, pieces) + (announced and i == pieces - 1)
        if when == pieces:
            reader.expect("coming", coming)
        assert filled(reader) - before == pieces + 1
        assert same(read(reader, coming, "coming"), coming)
        assert filled(reader) - before == pieces + 2, "what had landed was not copied again"


def test_records_are_read_in_the_order_in_which_they_were_announced(reader: StateReader):
    """Those that were passed over never come, and what had landed of one is given up; as is that of another memory."""
    records = [record(seed, 3, 5) for seed in range(4)]
    for key, one in enumerate(records):
        reader.expect(key, one)
    assert same(read(reader, records[2], 2), records[2])
    assert list(reader._coming) == [3] and reader._begun == 3
    moved = Reading(records[3].states.clone().mul_(2), LAYERS, records[3].spans)
    assert same(read(reader, moved, 3), moved)
    reader.expect(4, records[0])
    reader.expect(4, records[1])  # once more, from another slot
    assert same(read(reader, records[1], 4), records[1])
    assert not reader._coming and Buffers.made == 1


def test_a_record_that_does_not_fit_waits_for_larger_buffers(reader: StateReader):
    large, small = record(1, 9, 30), record(2, 7)
    reader.expect("large", large)
    reader.expect("small", small)
    assert reader._begun is None
    assert same(read(reader, large, "large"), large)
    assert reader._begun == "small" and Buffers.made == 2
    wide = record(3, 9, last=True)  # not announced, and of another shape, while the small one is landing
    assert same(read(reader, wide), wide)
    assert same(read(reader, small, "small"), small)


def test_memory_that_goes_is_forgotten(reader: StateReader):
    gone, kept = record(1, 5, 5), record(2, 6)
    for key, one in (("gone", gone), ("kept", kept), ("also gone", gone)):
        reader.expect(key, one)
    assert reader._begun == "gone"
    before = filled(reader)
    reader.forget(gone.states.data_ptr(), gone.states.nbytes)
    assert list(reader._coming) == ["kept"] and reader._begun is None and filled(reader) == before - 1
    assert same(read(reader, kept, "kept"), kept)


def test_a_record_left_in_the_middle_does_not_disturb_the_next(reader: StateReader):
    coming = record(2, 4, 6)
    reader.expect("coming", coming)
    reader.forget(coming.states.data_ptr(), 1)
    pieces = reader.features(record(1, 5, 5, 5))
    next(pieces)
    reader.expect("coming", coming)
    del pieces
    assert reader._begun is None, "its buffer is not free"
    assert isinstance(reader._landing, Buffers)
    reader._landing.taken |= set(range(filled(reader)))
    assert same(read(reader, coming, "coming"), coming)


def test_announcing_while_another_thread_reads(reader: StateReader):
    """Whatever the moment, each record's states are its own."""
    draw = random.Random(3)
    records = [record(seed, *draw.choices(range(1, 10), k=draw.randrange(1, 5))) for seed in range(300)]
    announced = [threading.Event() for _ in records]
    free = threading.Semaphore(2)

    def announce() -> None:
        for key, one in enumerate(records):
            free.acquire()
            if key % 7:
                reader.expect(key, one)
            if not key % 11:
                reader.forget(one.states.data_ptr(), one.states.nbytes)
            announced[key].set()

    thread = threading.Thread(target=announce, daemon=True)
    thread.start()
    for key, one in enumerate(records):
        assert announced[key].wait(60)
        assert same(read(reader, one, key), one)
        free.release()
    thread.join()


def test_a_cpu_copies_nothing_ahead_but_keeps_the_books():
    reader = StateReader(CPU, torch.float32)
    records = [record(seed, 3, 5) for seed in range(3)]
    for key, one in enumerate(records):
        reader.expect(key, one)
    assert same(read(reader, records[1], 1), records[1]) and list(reader._coming) == [2]
    reader.forget(records[2].states.data_ptr(), 1)
    assert not reader._coming
    reader.expect("empty", Reading(records[0].states, LAYERS, []))
    assert not reader._coming and not read(reader, Reading(records[0].states, LAYERS, []), "empty")


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ring() -> Iterator[torch.Tensor]:
    """Page-locked float32 [4 records, 2 planes, 2048, 64], as a ring's mapping is."""
    memory = mmap.mmap(-1, 4 << 20)
    values = torch.frombuffer(memory, dtype=torch.float32)
    values.copy_(torch.randn(len(values), generator=torch.Generator().manual_seed(0)))
    register_host(values.data_ptr(), len(memory))
    yield values.view(4, 2, 2048, 64)
    unregister_host(values.data_ptr(), len(memory))


def read_behind(reader: StateReader, present: Reading, coming: Reading) -> torch.cuda.Event:
    """Reads `present` on a GPU that is busy for seconds, during which the copy ahead of `coming` has to wait for a
    buffer; the event of that copy's end."""
    read(reader, present)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)
    pieces = reader.features(present)
    next(pieces)
    reader.expect("coming", coming)
    assert len(list(pieces)) == 1
    landing = reader._landing
    assert landing is not None and reader._begun == "coming"
    return landing._copied[(landing.filled - 1) % 2]


@needs_cuda
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_gpu_reads_the_same_states_copied_ahead(last: bool, scaled: bool):
    reader = StateReader(torch.device("cuda"), torch.float32)
    lengths = [(900,), (900, 70), (30, 1000, 80, 5), (1,), (700, 700, 700)]
    records = [record(i, *some, last=last, scaled=scaled, hidden=64) for i, some in enumerate(lengths)]
    pinned = [one._replace(states=one.states.pin_memory()) for one in records]
    read(reader, pinned[2])  # makes the buffers
    for key, one in enumerate(pinned):
        reader.expect(key, one)
    for key, one in enumerate(pinned):
        torch.cuda._sleep(10_000_000)
        assert reader._begun == key
        assert same(read(reader, one, key), records[key])


@needs_cuda
def test_a_record_ends_before_the_copy_of_the_next_one(ring: torch.Tensor):
    """So its slot is free as early as if none were copied ahead."""
    reader = StateReader(torch.device("cuda"), torch.float32)
    present, coming = Reading(ring[0], LAYERS, [(0, 1000), (1000, 2000)]), Reading(ring[1], LAYERS, [(5, 900)])
    copied = read_behind(reader, present, coming)
    assert not copied.query()
    ring[0].zero_()
    assert same(read(reader, coming, "coming"), coming)


@needs_cuda
def test_memory_goes_under_a_copy_ahead(ring: torch.Tensor):
    """What gives it up waits for the copy, and what is read afterwards is right."""
    reader = StateReader(torch.device("cuda"), torch.float32)
    present = record(1, 1000, 1000, hidden=64)
    coming = Reading(ring[1], LAYERS, [(0, 1000)])
    copied = read_behind(reader, present._replace(states=present.states.pin_memory()), coming)
    assert not copied.query()
    reader.forget(ring.data_ptr(), ring.nbytes)
    assert copied.query()
    unregister_host(ring.data_ptr(), ring.nbytes)
    ring.zero_()
    assert same(read(reader, present), present)


@needs_cuda
def test_gpu_memory_is_held_in_segments_that_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What workers and ranks set is what this version of torch looks at."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    for variable in paths.ALLOCATOR:
        monkeypatch.delenv(variable, raising=False)
    code = "import torch; kept = torch.zeros(9, device='cuda'); print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    environment = os.environ | paths.torch_environment()
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True" and not found.stderr


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_resident_states_are_those_of_the_first_time(device: str, scaled: bool, monkeypatch: pytest.MonkeyPatch):
    """On a CPU there is no other place to be: a copy stands for it."""
    real = torch.Tensor.to

    def moved(tensor: torch.Tensor, *to: Any, **options: Any) -> torch.Tensor:
        return tensor.clone() if to == (CPU,) else real(tensor, *to, **options)

    monkeypatch.setattr(torch.Tensor, "to", moved)
    readings = [record(seed, 5, 9, scaled=scaled) for seed in (1, 2)]
    reader = ResidentReader(torch.device(device), torch.float32)
    wanted = [read(reader, reading, n) for n, reading in enumerate(readings)]
    monkeypatch.undo()
    assert all(same(found, reading) for found, reading in zip(wanted, readings, strict=True))
    for n, reading in enumerate(readings):
        reading.states.zero_()
        reader.expect(n, reading)
        assert all(map(torch.equal, read(reader, reading, n), wanted[n]))
