"""`paceline rings`: true, quick, and without a trace."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.common import inspect as rings
from paceline.common import ring_layout
from paceline.common.fingerprint import Fingerprint
from paceline.common.record_head import HEAD, MAGIC
from paceline.common.ring import Ring, RingReader


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run's ring folder in /dev/shm, not yet made."""
    root = Path("/dev/shm") / f"paceline-test-{os.getpid()}-{tmp_path.name}"
    yield root / "demo"
    shutil.rmtree(root, ignore_errors=True)


def open_ring(folder: Path, worker: str, slots: int = 8) -> Ring:
    fingerprint = Fingerprint({"seed": 0})
    return Ring.open(
        folder / f"{worker}.ring",
        worker=worker,
        fingerprint=fingerprint,
        slots=slots,
        slot_bytes=4096,
        device="cuda:1",
    )


def commit(ring: Ring, count: int) -> None:
    for batch in range(count):
        slot = ring.claim(batch)
        assert slot is not None
        ring.commit(slot, 100, 0)


def busy_ring(folder: Path) -> Ring:
    """Five produced, one consumed, one taken, one being written."""
    ring = open_ring(folder, "w0")
    commit(ring, 5)
    reader = RingReader.open(ring.path)
    first, second = reader.scan().slots[:2]
    assert reader.release(first.index, first.seq) and reader.take(second.index, second.seq, 7)
    assert ring.claim(9) is not None
    return ring


def test_the_object_of_json(folder: Path):
    ring = busy_ring(folder)
    (info,) = rings.read_rings(folder)
    found = json.loads(json.dumps(rings.rings_json("demo", [info])))
    (entry,) = found["rings"]
    age = entry.pop("oldest_ready_s")
    assert found["run"] == "demo" and 0 <= age < 10
    assert list(entry.items()) == [
        ("worker", "w0"),
        ("path", str(ring.path)),
        ("pid", os.getpid()),
        ("alive", True),
        ("slots", 8),
        ("free", 3),
        ("writing", 1),
        ("ready", 3),
        ("taken", 1),
        ("slot_bytes", 4096),
        ("produced", 5),
        ("consumed", 1),
    ]
    ring.close()
    (info,) = rings.read_rings(folder)
    assert not info.alive and info.pid == os.getpid() and info.count("writing") == 1


def test_an_empty_ring_has_no_age_and_no_folder_no_rings(folder: Path):
    assert rings.read_rings(folder) == []
    ring = open_ring(folder, "w0")
    (info,) = rings.read_rings(folder)
    assert info.oldest_ready_s is None and info.produced == info.consumed == 0
    ring.close()


def test_a_file_that_is_no_ring_is_named_and_left_out_of_json(folder: Path):
    open_ring(folder, "w0").close()
    (folder / "w1.ring").write_bytes(b"not a ring" * 1000)
    (folder / "w2.ring").write_bytes(bytes(100))
    (folder / "w3.ring").symlink_to("nowhere")
    os.mkfifo(folder / "w4.ring")
    infos = rings.read_rings(folder)
    assert [(info.worker, info.problem and info.problem.rpartition(": ")[2]) for info in infos] == [
        ("w0", None),
        ("w1", "not a ring"),
        ("w2", "half-made ring"),
        ("w4", "not a regular file"),
    ]
    assert [ring["worker"] for ring in rings.rings_json("demo", infos)["rings"]] == ["w0"]


def test_reading_changes_nothing(folder: Path):
    """Neither bytes nor blocks, of whole rings and of sparse files alike."""
    ring = busy_ring(folder)
    sparse = folder / "w1.ring"
    with sparse.open("wb") as file:
        file.write(ring.path.read_bytes()[:8192])
        file.truncate(64 << 20)
    paths = (ring.path, sparse)
    before = [(path.read_bytes(), path.stat()) for path in paths]
    blocks = [path.stat().st_blocks for path in paths]
    for _ in range(3):
        rings.read_rings(folder)
    assert [path.stat().st_blocks for path in paths] == blocks
    for path, (data, about) in zip(paths, before, strict=True):
        assert path.read_bytes() == data
        assert (path.stat().st_mtime_ns, path.stat().st_ino) == (about.st_mtime_ns, about.st_ino)
    assert sorted(path.name for path in folder.iterdir()) == ["w0.ring", "w1.ring"]
    commit(ring, 1)  # the owner's lock was left alone


def test_it_starts_without_numpy_torch_and_pydantic(folder: Path):
    busy_ring(folder)
    code = (
        "import sys\n"
        "from paceline.common import inspect\n"
        f"assert len(inspect.read_rings({str(folder)!r})) == 1\n"
        "print(*sorted({'mmap', 'numpy', 'pydantic', 'rich', 'torch', 'zmq'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_tokens_are_read_from_the_heads_of_ready_records(folder: Path):
    ring = open_ring(folder, "w0")
    slot = ring.claim(7)
    assert slot is not None
    slot.payload[: HEAD.size] = HEAD.pack(MAGIC, 7, 1, 2, 96, 1, 4, 0, 0)
    ring.commit(slot, 1000, 0)
    other = ring.claim(8)  # another batch's head: a slot that is used again just now
    assert other is not None
    other.payload[: HEAD.size] = HEAD.pack(MAGIC, 9, 1, 2, 96, 1, 4, 0, 0)
    ring.commit(other, 1000, 0)
    (info,) = rings.read_rings(folder)
    assert info.records == ((slot.seq, 96),) and info.held == 2


@pytest.mark.parametrize("left", [0, 100, 4096, 4096 + 3, 4096 + 64, 4096 + 1016])
def test_a_ring_that_is_cut_off_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch, left: int):
    """Its size was right when it was checked."""
    ring = open_ring(folder, "w0")
    commit(ring, 2)
    size, decode = ring.path.stat().st_size, ring_layout.decode_header

    def cut(*arguments):
        os.truncate(ring.path, left)
        return decode(*arguments)

    monkeypatch.setattr(ring_layout, "decode_header", cut)
    (info,) = rings.read_rings(folder)
    assert info.problem is not None and "cut off while it was read" in info.problem
    os.truncate(ring.path, size)
