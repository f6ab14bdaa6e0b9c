"""Looking at a run changes nothing of it, and nothing that happens to a run meanwhile hurts who looks."""

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.common import paths
from paceline.common.fingerprint import Fingerprint
from paceline.common.locks import FileLock, OfdLock
from paceline.common.ring import Ring, RingReader
from paceline.common.telemetry import write_status

PEER = Path(__file__).with_name("ring_peer.py")
PATIENCE = 120.0

# Runs every command that looks, in one process that notes each attempt to write, make, rename, remove or map a file.
LOOK = """
import os, sys
noted = []
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.utime", "os.link",
           "os.symlink", "os.chown", "os.setxattr", "shutil.rmtree", "os.posix_fallocate", "tempfile.mkstemp")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def note(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        if str(arguments[0]) not in ("/dev/null", "/dev/tty"):
            noted.append((event, *map(str, arguments)))
    elif event in CHANGES or (event == "mmap.__new__" and arguments[0] >= 0):
        noted.append((event, *map(str, arguments)))

from paceline.common import doctor, metrics, rings_screen  # what importing does to caches is not looked at
from paceline.common.cli import main
from paceline.common.locks import OfdLock
import paceline.common.record, paceline.common.runfile, paceline.common.status, encodings.idna, gguf
doctor.torch_facts = lambda: {"error": "not asked"}
run, folder = sys.argv[1], __import__("pathlib").Path(sys.argv[2])
sys.addaudithook(note)
main(["rings", run]); main(["rings", run, "--json"]); main(["status", run]); main(["status", run, "--json"])
main(["doctor", run]); main(["doctor", run, "--json"]); main(["clean", run, "--dry-run"])
main(["rings"]); main(["status"])
for _ in range(3):
    list(metrics.RunCollector("demo", folder).collect())
    list(doctor.leftovers(folder))

class Enough(BaseException): pass
frames = []
class Console(rings_screen.QuietConsole):
    def print(self, *arguments, **options):
        frames.append(arguments)
        if len(frames) == 4:
            raise Enough
try:
    rings_screen.watch(lambda: ["demo"], folder, Console(width=120), 0.1)
except Enough:
    pass
assert len(frames) == 4
print("noted", noted, file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The parent of ring folders, in /dev/shm; its run is "demo"."""
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME", tmp_path / "no-system-runs")
    root = Path("/dev/shm") / f"paceline-look-{os.getpid()}-{tmp_path.name}"
    yield root
    shutil.rmtree(root, ignore_errors=True)


def open_ring(folder: Path, worker: str) -> Ring:
    path = folder / f"demo/{worker}.ring"
    return Ring.open(path, worker=worker, fingerprint=Fingerprint({"seed": 0}), slots=4, slot_bytes=1 << 16)


def commit(ring: Ring, batch: int) -> None:
    slot = ring.claim(batch)
    if slot is not None:
        ring.commit(slot, 1000, 0)


def everything(*roots: Path) -> dict[str, object]:
    """Bytes, blocks, times, identity and lock of every file and folder."""
    found: dict[str, object] = {}
    for path in (one for root in roots for one in [root, *sorted(root.rglob("*"))]):
        about = path.lstat()
        locked = None
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            locked = (OfdLock.holder(fd), os.pread(fd, 1 << 17, 0))
            os.close(fd)
        times = (about.st_mtime_ns, about.st_ctime_ns)
        found[str(path)] = (about.st_ino, about.st_mode, about.st_size, about.st_blocks, times, locked)
    return found


@pytest.fixture
def run_path(tmp_path: Path, folder: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        f'name = "demo"\noutput = "out"\n[target]\npath = "org/m"\n[data]\nfiles = ["d.jsonl"]\n'
        f'[stream]\nring_dir = "{folder}"\n'
    )
    return path


@pytest.mark.parametrize("trainer", [True, False])
def test_looking_changes_nothing(folder: Path, run_path: Path, tmp_path: Path, trainer: bool):
    """Of rings with a live and a dead owner, of a sparse, a foreign and a half-made file, of locks and of status.json;
    no file is opened to write and none is mapped."""
    ring, dead = open_ring(folder, "w0"), open_ring(folder, "w1")
    for batch in range(3):
        commit(ring, batch)
        commit(dead, 10 + batch)
    reader = RingReader.open(ring.path)
    first = reader.scan().slots[0]
    assert reader.take(first.index, first.seq, 7) and ring.claim(9) is not None
    reader.close()
    dead.close()
    with (folder / "demo/w2.ring").open("wb") as file:
        file.write(ring.path.read_bytes()[:8192])
        file.truncate(64 << 20)
    (folder / "demo/w3.ring").write_bytes(b"not a ring" * 1000)
    (folder / "demo/w4.ring.tmp").write_bytes(bytes(4096))
    run_dir = paths.run_dir("demo")
    write_status(run_dir / "status.json", {"state": "training", "step": 1, "updated": time.time(), "wait_data": 0.5})
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(home)}
    lock = FileLock(run_dir / "consumer.lock", "trainer of run demo")
    assert lock.acquire()
    if not trainer:
        lock.release()
    before = everything(folder, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(run_path), str(folder)],
        capture_output=True,
        text=True,
        cwd=home,
        env=environment,
    )
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "noted []", done.stderr
    after = everything(folder, tmp_path)
    lock.release()
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == set()
    commit(ring, 20)  # the owner goes on
    ring.close()


WATCH = """
import sys, time
from pathlib import Path
from paceline.common import doctor, metrics, rings_screen, status
import io
from rich.console import Console
folder, stop = Path(sys.argv[1]), Path(sys.argv[2])
watcher = rings_screen.Watcher(lambda: ["demo"], folder)
console = Console(file=io.StringIO(), width=120)
rounds, problems, alive = 0, set(), set()
print("ready", flush=True)
while not stop.exists():
    watcher.sample()
    console.print(watcher.frame(120, 24))
    for state in status.run_states(None, folder):
        status.status_text(state), status.status_table(state), state.json()
        problems |= {ring.problem.partition(": ")[2] for ring in state.rings if ring.problem}
        alive |= {(ring.worker, ring.alive) for ring in state.rings}
    list(metrics.RunCollector(None, folder).collect())
    list(doctor.leftovers(folder))
    rounds += 1
assert rounds > 3
print(sorted(problems), sorted(alive))
"""


@pytest.mark.slow
def test_nothing_that_happens_to_a_ring_hurts_who_looks(folder: Path, tmp_path: Path):
    """A worker is killed and started again in the middle of its writes; a ring vanishes, comes back as a new file, is
    cut off, is of another layout version, is a folder, is a link."""
    stop = tmp_path / "stop"
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCH, str(folder), str(stop)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watcher.stdout is not None and watcher.stdout.readline() == "ready\n"
    path = folder / "demo/w1.ring"
    for round_ in range(4):
        peer = subprocess.Popen(
            [sys.executable, str(PEER), "write", str(folder / "demo/w0.ring"), "4", "65536", "1000"]
        )
        deadline = time.monotonic() + PATIENCE
        while not (folder / "demo/w0.ring").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for _ in range(10):
            ring = open_ring(folder, "w1")
            commit(ring, 1)
            time.sleep(0.01)
            harm(path, round_)
            time.sleep(0.03)
            remove(path)
            ring.close()
        peer.send_signal(signal.SIGKILL)
        peer.wait()
    stop.touch()
    out, errors = watcher.communicate(timeout=PATIENCE)
    assert watcher.returncode == 0 and errors == "", errors
    assert "('w0', True)" in out and "('w1', True)" in out
    assert "ring layout 99" in out and "not a regular file" in out, out


def harm(path: Path, kind: int) -> None:
    if kind == 0:
        os.truncate(path, 4096 + 200)
    elif kind == 1:
        with path.open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("=Q", 99))
    elif kind == 2:
        path.unlink()
        path.mkdir()
    else:
        path.unlink()
        path.symlink_to("/proc/self/mem")


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()
