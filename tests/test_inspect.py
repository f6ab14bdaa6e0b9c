"""`paceline rings`: true, quick, and without a trace."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from paceline.common import inspect as rings
from paceline.common.fingerprint import Fingerprint
from paceline.common.ring import Ring, RingReader
from rich.console import Console

STATES = ("ready",) * 3 + ("taken", "writing") + ("free",) * 3


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


def info(worker: str = "w0", **changes) -> rings.RingInfo:
    whole = rings.RingInfo(
        worker=worker,
        path=Path(f"/dev/shm/paceline/demo/{worker}.ring"),
        pid=1234,
        device="cuda:0",
        alive=True,
        states=STATES,
        slot_bytes=3 << 20,
        produced=100,
        ring_id=hash(worker),
        oldest_ready_s=2.5,
        read_at=50.0,
    )
    return replace(whole, **changes)


def test_rates_come_from_two_readings_of_one_ring():
    before = [info("w0"), info("w1"), info("w2")]
    now = [
        info("w0", produced=104, states=("free",) * 8, read_at=52.0),
        info("w1", ring_id=5, produced=3, read_at=52.0),
        info("w3", read_at=52.0),
    ]
    assert rings.rates(before, now) == {"w0": rings.Rates(produced=2.0, consumed=4.0)}
    assert rings.rates(now, now) == {}


def drawn(width: int, *, ascii_only: bool = False) -> list[str]:
    infos = [
        info("w0"),
        info("w1", alive=False, states=("ready",) * 60 + ("taken",) + ("free",) * 3),
        info("w2", alive=False, retired=True, oldest_ready_s=None),
        rings.RingInfo("w3", Path("w3.ring"), problem="w3.ring: not a ring"),
    ]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(rings.table("demo", infos, {"w0": rings.Rates(1.5, 2.25)}, width=width, ascii_only=ascii_only))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [20, 39, 40, 63, 64, 80, 95, 96, 127, 128, 200])
def test_the_table_fits_its_terminal(width: int):
    lines = drawn(width)
    assert all(len(line) <= width for line in lines)
    rows = {line.split()[0]: line for line in lines if line.startswith("w")}
    assert "███▓▒···" in rows["w0"] or ("█" in rows["w0"] and width < 32)
    assert {"w0", "w1", "w2"} <= rows.keys()
    assert "not a ring" in " ".join(lines).replace("  ", " ")
    bar = "".join(character for character in rows["w1"] if character in "█▓▒·")
    assert "█" in bar and "▓" in bar and "·" in bar and len(bar) == min(24, max(4, width // 4))
    if width >= 40:
        assert "1.50" in rows["w0"] and "2.25" in rows["w0"] and "2.5s" in rows["w0"]
    if width >= 64:
        assert "pid 1234" in rows["w0"] and "dead" in rows["w1"] and "retired" in rows["w2"]
    if width >= 128:
        assert "cuda:0" in rows["w0"] and "3 MiB" in rows["w0"]
    assert "…" not in "".join(lines) or width < 40


def test_the_table_in_ascii():
    assert all(line.isascii() for width in (30, 80, 130) for line in drawn(width, ascii_only=True))


def test_watching_prints_table_after_table_where_there_is_no_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    ring = busy_ring(folder)
    sleeps = iter((lambda: commit(ring, 1), lambda: None))

    def sleep(seconds: float) -> None:
        act = next(sleeps, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    monkeypatch.setattr(rings.time, "sleep", sleep)
    with (tmp_path / "out").open("w") as file, pytest.raises(KeyboardInterrupt):
        rings.watch("demo", folder, Console(file=file, width=100))
    text = (tmp_path / "out").read_text()
    assert text.count("demo: 1 rings") == 3 and "in/s" in text
