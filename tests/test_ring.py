"""The ring between real processes: exactly once, never torn, and whole after any kill."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paceline.common import ring as ring_module
from paceline.common import ring_layout, space
from paceline.common.errors import ConfigError
from paceline.common.fingerprint import Fingerprint
from paceline.common.locks import FileLock, held_by
from paceline.common.record import checksum
from paceline.common.ring import (
    Ring,
    RingBusy,
    RingForeign,
    RingInvalid,
    RingReader,
    Slot,
    SlotState,
    SlotView,
    remove_ring,
    ring_paths,
)
from waiting import PATIENCE, ownerless

PEER = Path(__file__).with_name("ring_peer.py")
FINGERPRINT = Fingerprint({"target": "tiny", "seed": 0})
FREE, WRITING, READY = SlotState.FREE, SlotState.WRITING, SlotState.READY


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run's ring folder in /dev/shm, not yet made."""
    root = Path("/dev/shm") / f"paceline-test-{os.getpid()}-{tmp_path.name}"
    yield root / "run"
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "w0.ring"


def open_ring(path: Path, slots: int = 4, slot_bytes: int = 8192, **changes: Any) -> Ring:
    """`path`'s ring; a living owner is not waited for."""
    named: dict[str, Any] = {"fingerprint": FINGERPRINT, "patience": 0.0} | changes
    return Ring.open(path, worker=path.stem, slots=slots, slot_bytes=slot_bytes, **named)


def fill(ring: Ring, batch: int, length: int = 100) -> Slot:
    """Commits a record stamped with `batch`."""
    slot = ring.claim(batch)
    assert slot is not None
    slot.payload[:length] = bytes([batch % 256]) * length
    ring.commit(slot, length, checksum(slot.payload, length))
    return slot


def states(reader: RingReader) -> list[SlotState]:
    return [slot.state for slot in reader.scan().slots]


def ready(reader: RingReader) -> list[SlotView]:
    return sorted((slot for slot in reader.scan().slots if slot.state is READY), key=lambda slot: slot.seq)


def peer(role: str, path: Path, *numbers: int, fault: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PEER), role, str(path), *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PACELINE_FAULT": fault},
    )


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# A slot's life


def test_a_slot_goes_from_free_to_ready_and_back(path: Path):
    ring = open_ring(path)
    reader = RingReader.open(path)
    assert states(reader) == [FREE] * 4
    slot = ring.claim(7)
    assert slot is not None
    assert states(reader)[slot.index] is WRITING
    slot.payload[:5] = b"hello"
    before = time.monotonic_ns()
    ring.commit(slot, 5, 123)
    (view,) = ready(reader)
    assert (view.index, view.seq, view.batch, view.length, view.checksum) == (slot.index, slot.seq, 7, 5, 123)
    assert before <= view.committed_at_ns <= time.monotonic_ns()
    assert bytes(reader.payload(view)) == b"hello"
    assert reader.holds(view.index, view.seq) and not reader.holds(view.index, view.seq + 1)
    assert reader.take(view.index, view.seq, trainer=99)
    assert ready(reader)[0].taken == 99
    assert reader.release(view.index, view.seq)
    assert states(reader) == [FREE] * 4
    assert not reader.release(view.index, view.seq) and not reader.take(view.index, view.seq, 99)
    assert reader.scan().produced == 1


def test_an_abandoned_number_is_not_used_again(path: Path):
    ring = open_ring(path)
    first = ring.claim(1)
    assert first is not None
    ring.abandon(first)
    assert [view.state for view in ring.states()] == [FREE] * 4
    second = ring.claim(1)
    assert second is not None and second.seq > first.seq
    with pytest.raises(ValueError, match="not claimed"):
        ring.commit(first, 1, 0)


def test_a_full_ring_has_nothing_to_claim_and_the_last_slot_freed_is_used_first(path: Path):
    ring = open_ring(path)
    reader = RingReader.open(path)
    slots = [fill(ring, batch) for batch in range(4)]
    assert ring.claim(4) is None
    assert reader.scan().credit == 0
    for slot in (slots[0], slots[2], slots[1]):
        assert reader.release(slot.index, slot.seq)
    assert reader.scan().credit == 3
    again = ring.claim(4)
    assert again is not None and again.index == slots[2].index


def test_a_stale_hint_takes_and_frees_nothing(path: Path):
    ring = open_ring(path, slots=1)
    reader = RingReader.open(path)
    old = fill(ring, 1)
    assert reader.release(old.index, old.seq)
    new = fill(ring, 2)
    assert not reader.take(old.index, old.seq, 5) and not reader.release(old.index, old.seq)
    assert not reader.holds(9, new.seq) and not reader.holds(-1, new.seq)
    assert ready(reader)[0].taken == 0
    with pytest.raises(RingInvalid, match="no slot"):
        reader.slot(-1)


def test_a_record_longer_than_the_slot_is_not_committed(path: Path):
    ring = open_ring(path)
    slot = ring.claim(1)
    assert slot is not None
    with pytest.raises(ValueError, match="bytes in a slot"):
        ring.commit(slot, ring.slot_bytes + 1, 0)


def test_all_claimed_slots_are_given_back_at_once(path: Path):
    ring = open_ring(path, slots=3)
    first, second, third = (ring.claim(batch) for batch in (7, 8, 9))
    assert first is not None and second is not None and third is not None
    ring.commit(second, 8, 0)
    assert [slot.batch for slot in ring.claimed] == [7, 9]
    ring.abandon_all()
    assert ring.claimed == ()
    assert sorted(view.state.name for view in ring.states()) == ["FREE", "FREE", "READY"]
    again = ring.claim(7)
    assert again is not None and again.seq > third.seq


# Two processes


@pytest.mark.parametrize(("count", "slot_bytes"), [(12_000, 512), (120, 4 << 20)])
def test_no_record_is_torn_or_lost_over_many_laps(path: Path, count: int, slot_bytes: int):
    """The reader has the words alone to go by: no message, no other synchronisation."""
    writer = peer("write", path, 3, slot_bytes, count)
    while not path.exists():
        assert writer.poll() is None
        time.sleep(0.001)
    reader = RingReader.open(path)
    expected = 0
    while expected < count:
        slots = ready(reader)
        if not slots:
            assert writer.poll() in (None, 0)
            time.sleep(0)
        for slot in slots:
            payload = reader.payload(slot)
            assert slot.batch == expected
            assert slot.length == slot_bytes - slot.batch % 50
            assert checksum(payload, slot.length) == slot.checksum
            assert (np.frombuffer(payload, np.uint64, slot.length // 8) == slot.batch).all()
            assert reader.holds(slot.index, slot.seq)
            assert reader.release(slot.index, slot.seq)
            expected += 1
    assert writer.wait(30) == 0
    scan = ownerless(reader).scan()
    assert scan.produced == count and scan.credit == 3


def test_a_changed_payload_does_not_match_its_checksum(path: Path):
    ring = open_ring(path)
    reader = RingReader.open(path)
    fill(ring, 1, length=3001)
    (slot,) = ready(reader)
    for position in (0, 1500, 3000):
        reader.payload(slot)[position] ^= 1
        assert checksum(reader.payload(slot), slot.length) != slot.checksum
        reader.payload(slot)[position] ^= 1
    assert checksum(reader.payload(slot), slot.length) == slot.checksum


def test_a_second_owner_is_refused_and_told_who_holds_the_ring(path: Path):
    owner = peer("hold", path, 4, 8192)
    assert owner.stdout is not None
    incarnation = int(owner.stdout.readline())
    reader = RingReader.open(path)
    assert reader.probe()
    with pytest.raises(RingBusy, match=rf"pid {owner.pid}\b"):
        open_ring(path)
    with pytest.raises(RingBusy, match=rf"pid {owner.pid}\b"):
        remove_ring(path)
    assert reader.scan().incarnation == incarnation and reader.scan().pid == owner.pid
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    assert not ownerless(reader).scan().alive
    ring = open_ring(path)
    assert reader.scan().incarnation == ring.incarnation != incarnation


def test_an_owner_that_is_still_being_torn_down_is_waited_for(path: Path):
    owner = peer("hold", path, 4, 8192)
    assert owner.stdout is not None
    owner.stdout.readline()
    assert owner.stdin is not None
    owner.stdin.close()  # it leaves soon, not at once
    ring = Ring.open(path, worker="w0", fingerprint=FINGERPRINT, slots=4, slot_bytes=8192, patience=30.0)
    assert owner.wait(10) == 0
    ring.close()


# Kills


@pytest.mark.parametrize(
    ("fault", "produced", "committed"),
    [
        ("ring.half-made", 0, 0),
        ("ring.lock-taken", 1, 1),
        ("ring.writing", 1, 1),
        ("ring.writing:3", 3, 3),
        ("ring.committed", 2, 2),
        ("ring.committed:2", 3, 3),
    ],
)
def test_an_owner_killed_anywhere_leaves_a_ring_to_adopt(path: Path, fault: str, produced: int, committed: int):
    if fault != "ring.half-made":
        ring = open_ring(path)
        fill(ring, 100)
        ring.close()
    writer = peer("write", path, 4, 8192, 3, fault=fault)
    assert writer.wait(20) == -signal.SIGKILL
    ring = open_ring(path, patience=PATIENCE)
    reader = RingReader.open(path)
    assert names(path.parent) == ["w0.ring"]
    assert len(ready(reader)) == committed and reader.scan().produced == produced
    assert [slot.state for slot in ring.states()].count(FREE) == 4 - committed
    for slot in ready(reader):
        assert checksum(reader.payload(slot), slot.length) == slot.checksum
    newest = max(slot.seq for slot in ring.states())
    assert fill(ring, 200).seq > newest


@pytest.mark.parametrize(("fault", "left"), [("ring.taken", 1), ("ring.released", 0)])
def test_a_reader_killed_with_a_record_leaves_it_ready_until_done(path: Path, fault: str, left: int):
    ring = open_ring(path)
    slot = fill(ring, 1)
    taker = peer("take", path, 0, 0, fault=fault)
    assert taker.wait(20) == -signal.SIGKILL
    reader = RingReader.open(path)
    assert len(ready(reader)) == left
    if left:
        assert ready(reader)[0].taken == 77
        assert reader.take(slot.index, slot.seq, 78), "a new trainer takes it over"
        assert ready(reader)[0].taken == 78


def test_ten_kills_leave_one_ring(path: Path):
    points = ("ring.half-made", "ring.writing:2", "ring.committed:2", "ring.lock-taken", "ring.committed:4")
    for slots, fault in ((slots, fault) for slots in (8, 6) for fault in points):
        assert peer("write", path, slots, 4096, 5, fault=fault).wait(20) == -signal.SIGKILL
        if path.exists():
            reader = ownerless(RingReader.open(path))
            for slot in ready(reader):
                reader.release(slot.index, slot.seq)
            reader.close()
    open_ring(path, slots=6, slot_bytes=4096, patience=PATIENCE).close()
    assert names(path.parent) == ["w0.ring"]


def test_adoption_keeps_records_and_drops_what_was_being_written(path: Path):
    ring = open_ring(path)
    kept = fill(ring, 1)
    lost = ring.claim(2)
    assert lost is not None
    ring.close()
    again = open_ring(path)
    assert again.ring_id == ring.ring_id and again.incarnation != ring.incarnation
    reader = RingReader.open(path)
    assert [slot.seq for slot in ready(reader)] == [kept.seq]
    assert states(reader).count(FREE) == 3
    assert fill(again, 3).seq > lost.seq


def test_a_damaged_count_of_records_stops_nobody(path: Path):
    ring = open_ring(path)
    with path.open("r+b") as file:
        file.seek(ring_layout.PRODUCED * 8)
        file.write(b"\xff" * 8)
    fill(ring, 1)
    ring.close()
    fill(open_ring(path), 2)
    assert sorted(slot.batch for slot in ready(RingReader.open(path))) == [1, 2]


# Files that cannot be adopted


def damage_half_made(path: Path) -> None:
    path.write_bytes(bytes(40960))


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def damage_sparse(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 8192)
    os.truncate(path, size)


def damage_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(8, "little"))


def damage_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(24)
        file.write(b"\xff" * 4)


def damage_table(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096 + 64)
        file.write(b"\x77" * 8)


@pytest.mark.parametrize(
    "damage",
    [
        damage_half_made,
        damage_empty,
        damage_truncated,
        damage_sparse,
        damage_version,
        damage_header,
        damage_table,
    ],
)
def test_what_is_no_whole_ring_is_refused_by_readers_and_replaced_by_its_owner(path: Path, damage):
    ring = open_ring(path)
    slot = fill(ring, 1)
    ring.close()
    damage(path)
    with pytest.raises(RingInvalid, match=r"w0\.ring"):
        RingReader.open(path)
    inode = path.stat().st_ino
    again = open_ring(path)
    assert path.stat().st_ino != inode and again.ring_id != ring.ring_id
    assert fill(again, 2).seq > slot.seq
    assert names(path.parent) == ["w0.ring"]


def test_a_ring_under_another_workers_name_is_replaced(path: Path):
    open_ring(path).close()
    other = path.with_name("w1.ring")
    shutil.copyfile(path, other)
    with pytest.raises(RingInvalid, match="the ring of worker 'w0'"):
        RingReader.open(other)
    assert open_ring(other).worker == "w1"


def test_a_ring_of_another_boot_is_replaced(path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(ring_layout, "boot_id", lambda: bytes(16))
        ring = open_ring(path)
        fill(ring, 1)
        ring.close()
    with pytest.raises(RingInvalid, match="before this machine booted"):
        RingReader.open(path)
    assert [slot.state for slot in open_ring(path).states()] == [FREE] * 4


def test_a_ring_of_another_size_is_replaced_under_its_readers(path: Path):
    ring = open_ring(path)
    slot = fill(ring, 1)
    ring.close()
    reader = RingReader.open(path)
    again = open_ring(path, slots=6)
    assert again.slots == 6 and reader.replaced() and not again.vanished()
    assert bytes(reader.payload(ready(reader)[0])) == b"\x01" * 100, "who holds a record of the old file reads on"
    assert fill(again, 2).seq > slot.seq


def test_a_file_that_is_no_ring_is_left_alone(path: Path, tmp_path: Path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"notes of a user, longer than one word" * 200)
    with pytest.raises(ConfigError, match="not a ring: move it away"):
        open_ring(path)
    assert path.read_bytes().startswith(b"notes of a user")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a regular file"):
        open_ring(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        open_ring(path)


def test_records_of_another_fingerprint_are_not_dropped_in_silence(path: Path, monkeypatch: pytest.MonkeyPatch):
    ring = open_ring(path)
    slot = fill(ring, 1)
    ring.close()
    other = Fingerprint({"target": "tiny", "seed": 1})
    with pytest.raises(
        ConfigError, match=r"1 record of .*\(seed is 1 in the run file and 0 in the ring\): go back .*clean RUN.toml`"
    ):
        open_ring(path, fingerprint=other)
    monkeypatch.setattr("paceline.common.ring.DEFAULT_RING_DIR", path.parent.parent)
    with pytest.raises(ConfigError, match="`paceline clean run`"):  # of this run alone
        open_ring(path, fingerprint=other)
    reader = RingReader.open(path)
    assert reader.fingerprint == FINGERPRINT and len(ready(reader)) == 1 and not reader.probe()
    assert reader.release(slot.index, slot.seq)
    again = open_ring(path, fingerprint=other)
    assert again.ring_id != ring.ring_id and reader.replaced()
    assert fill(again, 2).seq > slot.seq


def test_damage_anywhere_is_refused_or_harmless(path: Path):
    """Random bytes over the header and table, one place at a time: no crash, and no record that never was."""
    ring = open_ring(path, slots=4, slot_bytes=4096)
    reader = RingReader.open(path)
    records = {}
    for batch in (1, 2, 3, 4, 5):
        slot = fill(ring, batch)
        records[slot.seq] = (batch, 100, checksum(slot.payload, 100), bytes(slot.payload[:100]))
        if batch in (2, 3):
            assert reader.release(slot.index, slot.seq)
    assert ring.claim(9) is not None
    ring.close()
    reader.close()
    whole = path.read_bytes()
    table_end = 4096 + 4 * 128
    rng, refused = random.Random(0), 0
    for _ in range(600):
        at = rng.choice((rng.randrange(1024), rng.randrange(4096, table_end)))
        data = bytearray(whole)
        width = rng.choice((1, 4, 8))
        data[at : at + width] = rng.choice((bytes(width), rng.randbytes(width), b"\xff" * width))
        with path.open("r+b") as file:
            file.write(data)
        try:
            damaged = RingReader.open(path)
        except RingInvalid:
            refused += 1
            continue
        for slot in ready(damaged):
            data = bytes(damaged.payload(slot))
            if checksum(data, slot.length) == slot.checksum:
                assert records[slot.seq] == (slot.batch, slot.length, slot.checksum, data)
        damaged.close()
    assert refused > 100


def test_an_owner_whose_ring_is_damaged_stops(path: Path):
    ring = open_ring(path)
    with path.open("r+b") as file:
        file.seek(ring_layout.INCARNATION * 8)
        file.write(b"\x01" * 8)
    with pytest.raises(RingInvalid, match="owned by another process"):
        ring.claim(1)


# Room


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MB, where this user may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.parametrize("told_too_late", [False, True])
def test_a_ring_too_large_for_its_tmpfs_is_refused(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch, told_too_late: bool
):
    """Refused by the check, or, when others take the room after it, by the allocation; never by SIGBUS."""
    other = open_ring(small_tmpfs / "w1.ring", slots=2, slot_bytes=2 << 20)
    slot = fill(other, 1)
    used = os.statvfs(small_tmpfs).f_bfree
    if told_too_late:
        monkeypatch.setattr(ring_module, "free_bytes", lambda folder: 1 << 40)
    with pytest.raises(ConfigError, match=r"w0.ring needs \d+ bytes and \d+ are free: lower stream.slots \(4\)"):
        open_ring(small_tmpfs / "w0.ring", slots=4, slot_bytes=2 << 20)
    assert names(small_tmpfs) == ["w1.ring"] and os.statvfs(small_tmpfs).f_bfree == used
    assert bytes(slot.payload[:100]) == b"\x01" * 100


def test_no_room_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(space, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="needs 40960 bytes and 1000 are free"):
        open_ring(path)
    assert names(path.parent) == []


def test_a_replacement_that_does_not_fit_leaves_the_old_ring(path: Path, monkeypatch: pytest.MonkeyPatch):
    ring = open_ring(path)
    fill(ring, 1)
    ring.close()
    monkeypatch.setattr(space, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="are free"):
        open_ring(path, slots=8)
    assert len(ready(RingReader.open(path))) == 1 and names(path.parent) == ["w0.ring"]


def test_all_pages_are_allocated_before_the_ring_is_seen(path: Path):
    open_ring(path, slots=2, slot_bytes=1 << 20).close()
    about = path.stat()
    assert about.st_blocks * 512 >= about.st_size == 8192 + (2 << 20)
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_ring_dir_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"stream\.ring_dir"):
        open_ring(tmp_path / "file" / "run" / "w0.ring")


# Leaving


def test_only_a_retired_drained_and_ownerless_ring_is_removed(path: Path):
    ring = open_ring(path)
    slot = fill(ring, 1)
    reader = RingReader.open(path)
    assert not ring.retired and not reader.remove_if_empty()
    reader.retire()
    assert ring.retired and reader.scan().retired and not reader.remove_if_empty()
    ring.close()
    assert not reader.remove_if_empty(), "a record is left"
    assert reader.release(slot.index, slot.seq)
    assert reader.remove_if_empty() and not path.exists() and reader.replaced()
    assert reader.remove_if_empty(), "twice is as good as once"
    assert open_ring(path).claim(1).seq > slot.seq  # pyright: ignore[reportOptionalMemberAccess]


def test_a_new_owner_of_a_retired_ring_is_not_retired(path: Path):
    ring = open_ring(path)
    reader = RingReader.open(path)
    reader.retire()
    ring.close()
    again = open_ring(path)
    assert again.ring_id == ring.ring_id and not again.retired
    again.close()
    assert not reader.remove_if_empty() and path.exists()


def test_the_owner_notices_that_its_ring_is_gone(path: Path):
    ring = open_ring(path)
    assert not ring.vanished()
    path.unlink()
    assert ring.vanished()


def test_clean_removes_a_dead_ring_and_what_was_half_made(path: Path):
    ring = open_ring(path)
    fill(ring, 1)
    ring.close()
    path.with_name("w0.ring.tmp").write_bytes(bytes(8192))
    assert remove_ring(path) >= 40960
    assert names(path.parent) == [] and remove_ring(path) == 0


def test_clean_leaves_what_is_no_ring(path: Path, tmp_path: Path):
    path.parent.mkdir(parents=True)
    path.write_text("notes of a user" * 1000)
    with pytest.raises(RingForeign, match="not a ring"):
        remove_ring(path)
    other = path.with_name("w1.ring")
    other.symlink_to(tmp_path)
    with pytest.raises(RingForeign, match="not a regular file"):
        remove_ring(other)
    assert path.exists() and other.is_symlink()


def test_rings_are_listed_in_order_of_worker(folder: Path):
    assert ring_paths(folder) == []
    folder.mkdir(parents=True)
    for name in ("w10.ring", "w2.ring", "w0.ring", "w0.ring.tmp", "w3.ring.tmp", "notes"):
        (folder / name).touch()
    assert [path.name for path in ring_paths(folder)] == ["w0.ring", "w2.ring", "w10.ring"]
    assert [path.stem for path in ring_paths(folder, half_made=True)] == ["w0", "w2", "w3", "w10"]


# Locks


def test_a_lock_file_tells_who_holds_it(tmp_path: Path):
    path = tmp_path / "consumer.lock"
    assert held_by(path) is None
    with FileLock(path, "trainer of run demo") as lock:
        assert lock.acquire() and lock.acquire()
        assert held_by(path) == f"trainer of run demo (pid {os.getpid()})"
        assert not FileLock(path, "another").acquire()
        assert path.stat().st_mode & 0o777 == 0o600
    assert held_by(path) is None and path.exists()
    assert FileLock(path, "another").acquire(blocking=True)


def test_a_lock_on_a_full_disk_is_refused_in_words_and_given_back(tmp_path):
    path, before = tmp_path / "consumer.lock", resource.getrlimit(resource.RLIMIT_FSIZE)
    lock = FileLock(path, "trainer of run t")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ConfigError, match=rf"cannot lock {path}: File too large"):
            lock.acquire()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert held_by(path) is None
    assert lock.acquire() and held_by(path)
    lock.release()


@pytest.mark.parametrize("change", [{"slots": 3}, {"slot_bytes": 8192}])
def test_numbers_go_on_in_a_ring_of_another_size_though_the_clock_was_set_back(tmp_path, monkeypatch, change):
    path = tmp_path / "w0.ring"
    size: dict[str, Any] = {"slots": 2, "slot_bytes": 4096}
    now = [2 * 10**18]
    monkeypatch.setattr(ring_module.time, "time_ns", lambda: now[0])
    ring = Ring.open(path, worker="w0", fingerprint=FINGERPRINT, **size)
    first = ring.claim(1)
    assert first is not None
    ring.close()
    now[0] = 10**18
    ring = Ring.open(path, worker="w0", fingerprint=FINGERPRINT, **(size | change))
    again = ring.claim(1)
    assert again is not None and again.seq > first.seq
    del first, again
    ring.close()
