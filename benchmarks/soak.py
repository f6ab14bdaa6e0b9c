"""A long run of the real pair under constant trouble: nothing lost, nothing doubled, nothing leaked.

    python benchmarks/soak.py [--faults 200] [--seed 0] [--drop 0.1] [--pause 1.5] [--keep FOLDER]

`paceline up` trains a real drafter from a real, tiny, random Llama on the CPU. Meanwhile processes get SIGKILL, or
SIGSTOP and a while later SIGCONT; workers are added and removed through the supervisor's control socket; everything is
stopped and started again; and each process loses a tenth of the messages that it sends. Then the run is let to its end.
Exits 1 unless

    audit      every batch of the plan trained once or listed, none missing and none twice
    rings      in the end every slot of every ring is free again, and no ring of a removed worker is left
    flat       memory and descriptors of the processes that are up, bytes in the ring folder for each ring, and files in
               the run directory do not grow with the number of faults
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from paceline.common import paths
from paceline.common.control import NoSupervisor, ask
from paceline.common.dataset import tokenizer_digest
from paceline.common.errors import PacelineError
from paceline.common.inspect import RingInfo, read_rings
from paceline.common.locks import held_by
from paceline.common.progress import PlainView
from paceline.common.rows import RowsWriter
from paceline.common.runfile import RunFile, load
from paceline.common.telemetry import read_status
from paceline.common.up import Policy, up
from paceline.consumer import checkpoint
from paceline.consumer.audit import AuditReport, audit
from rich.console import Console
from rich.table import Table

MOST_WORKERS = 3
MOST_WITHOUT_STEP = 16  # faults; then the run is given the time for one
VOCABULARY, MASK = 512, 3
PATIENCE_S = 1800.0  # that the run may take for any one thing, on a busy machine
MEGABYTE = 1 << 20
# What a series may grow by in a hundred faults and still be called flat.
FLAT = {"MiB": 8.0, "descriptors": 2.0, "files": 1.0, "bytes": 1.0}

RUN_FILE = """\
name = "soak"
output = "out"
[target]
path = "target"
dtype = "float32"
[data]
rows = "rows"
max_length = 96
held_out = 8
[stream]
token_budget = 256
slots = 3
ring_dir = {rings}
[workers]
count = 2
devices = ["cpu"]
threads = 1
[trainer]
epochs = 1000
batches_per_step = 2
dtype = "float32"
devices = ["cpu"]
threads = 1
[drafter]
layers = 1
block_size = 4
mask_token_id = 3
[checkpoint]
every_steps = 5
every_minutes = "none"
keep_last = 2
[evaluation]
every_steps = 50
[logging]
log_every = 10
"""


def write_run(folder: Path) -> Path:
    """A random target, random rows and a run file that trains on them for ever."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    target = folder / "target"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    (target / "tokenizer.json").write_text("{}")  # the rows are made here, without a tokenizer
    draw = np.random.default_rng(0)
    with RowsWriter(folder / "rows") as writer:
        for length in draw.integers(24, 97, 400).tolist():
            tokens = draw.integers(MASK + 1, VOCABULARY, length).astype(np.int32)
            writer.add(tokens, (np.arange(length) >= length // 3).astype(np.uint8))
        writer.finish({"tokenizer": tokenizer_digest(str(target)), "vocabulary": "", "target": str(target)})
    path = folder / "run.toml"
    path.write_text(RUN_FILE.format(rings=json.dumps(str(Path("/dev/shm") / f"paceline-soak-{os.getpid()}"))))
    return path


def supervise(path: str) -> int:
    """`paceline up`, whose patience with children that are killed has no end."""
    return up(path, view=PlainView(), policy=Policy(limit=10**9, quick_limit=10**9, first_pause=0.2, longest_pause=0.5))


@dataclass
class Soak:
    """One run, what was done to it, and what was measured meanwhile."""

    folder: Path
    path: Path
    drop: float
    draw: random.Random
    pause: float
    done: Counter[str] = field(default_factory=Counter)
    series: dict[tuple[str, str], list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    process: "subprocess.Popen[bytes] | None" = None
    stopped: list[tuple[float, int]] = field(default_factory=list)  # (when to continue, pid)
    steps: int = 0
    last_step: int = 0

    def __post_init__(self) -> None:
        self.run: RunFile = load(self.path)
        self.run_dir = paths.run_dir(self.run.name)

    # The run

    def start(self) -> None:
        with (self.folder / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--supervise", str(self.path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PACELINE_DROP": f"{self.drop}:{self.draw.random()}"},
            )

    def ask(self, **request: Any) -> dict[str, Any]:
        return ask(paths.up_socket(self.run_dir), request)

    def until(self, what: Callable[[], Any], why: str) -> Any:
        """Waits while the supervisor lives; what has been stopped goes on in its time."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := what()):
            self.continue_due()
            self.count_steps()
            if self.process is None or self.process.poll() is not None:
                sys.exit(f"the run ended while waiting for {why}: see {self.folder / 'up.log'}")
            if time.monotonic() > deadline:
                sys.exit(f"no {why} within {PATIENCE_S:.0f} s: see {self.folder / 'up.log'}")
            time.sleep(0.1)
        return found

    def count_steps(self) -> None:
        """Steps trained in all, those that a killed trainer had not saved counted again."""
        step = self.trained()
        self.steps += max(0, step - self.last_step)
        self.last_step = step

    def trained(self) -> int:
        return (read_status(paths.status_path(self.run)) or {}).get("step", 0)

    def shown(self) -> dict[str, Any] | None:
        try:
            return self.ask(do="show")
        except NoSupervisor:
            return None

    def rings(self) -> list[RingInfo]:
        return read_rings(paths.ring_dir(self.run))

    def stop(self) -> None:
        assert self.process is not None
        self.continue_due(all_of_them=True)
        with contextlib.suppress(NoSupervisor):
            self.ask(do="stop")
        self.process.wait(PATIENCE_S)

    def stop_at_once(self) -> None:
        """Whatever happened here, nothing of the run stays behind."""
        self.continue_due(all_of_them=True)
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            self.process.send_signal(signal.SIGINT)
            self.process.wait()

    # What is done to it

    def trouble(self, faults: int) -> None:
        kinds = {
            "SIGKILL, worker": (20, lambda: self._signal_worker(signal.SIGKILL)),
            "SIGSTOP, worker": (20, lambda: self._signal_worker(signal.SIGSTOP)),
            "worker added": (18, lambda: self._scale(1)),
            "worker removed": (18, lambda: self._scale(-1)),
            "SIGKILL, rank": (5, lambda: self._signal(self._rank(), signal.SIGKILL)),
            "SIGSTOP, rank": (9, lambda: self._signal(self._rank(), signal.SIGSTOP)),
            "SIGKILL, trainer": (4, lambda: self._signal(self._trainer(), signal.SIGKILL)),
            "SIGSTOP, trainer": (5, lambda: self._signal(self._trainer(), signal.SIGSTOP)),
            "all stopped and started": (1, self._restart),
        }
        names, weights = list(kinds), [weight for weight, _ in kinds.values()]
        last_death = last_step = (0, 0)  # (faults, steps): of the trainer, and whenever there was a new step
        while self.done.total() < faults:
            kind = self.draw.choices(names, weights)[0]
            ends_trainer = kind in ("SIGKILL, rank", "SIGKILL, trainer", "all stopped and started")
            if ends_trainer and self.steps == last_death[1]:
                continue  # trouble in training is looked for: it has to begin again first
            if kinds[kind][1]():
                self.done[kind] += 1
                if ends_trainer:
                    last_death = self.done.total(), self.steps
                if self.done.total() % 20 == 0:
                    print(f"{self.done.total()} faults, {self.steps} steps", file=sys.stderr, flush=True)
            if self.steps > last_step[1]:
                last_step = self.done.total(), self.steps
            elif self.done.total() - last_step[0] >= MOST_WITHOUT_STEP:
                self.heal()
            until = time.monotonic() + self.draw.expovariate(1 / self.pause)
            self.until(lambda until=until: time.monotonic() >= until, "next fault")
            self.sample()

    def heal(self) -> None:
        """Lets the run come to a further step, on a machine too slow to do so between faults."""
        begun = self.steps
        if (self.shown() or {"count": 0})["count"] == 0:
            self._scale(1)
        self.until(lambda: self.steps > begun, "further step")

    def continue_due(self, all_of_them: bool = False) -> None:
        now = time.monotonic()
        due = [pid for at, pid in self.stopped if all_of_them or now >= at]
        self.stopped = [(at, pid) for at, pid in self.stopped if pid not in due]
        for pid in due:
            with contextlib.suppress(ProcessLookupError):  # killed, and collected, while it was stopped
                os.kill(pid, signal.SIGCONT)

    def _signal(self, pid: int | None, number: signal.Signals) -> bool:
        if pid is None or any(pid == other for _, other in self.stopped):
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        if number is signal.SIGSTOP:
            self.stopped.append((time.monotonic() + self.draw.uniform(0.2, 4.0), pid))
        return True

    def _signal_worker(self, number: signal.Signals) -> bool:
        workers = [w["pid"] for w in (self.shown() or {"workers": []})["workers"] if w["state"] == "running"]
        return bool(workers) and self._signal(self.draw.choice(workers), number)

    def _trainer(self) -> int | None:
        shown = self.shown()
        return shown["trainer"]["pid"] if shown and shown["trainer"]["state"] == "running" else None

    def _rank(self) -> int | None:
        lock = paths.rank_lock(self.run, 0)
        return int(lock.read_text().split()[0]) if held_by(lock) else None

    def _scale(self, by: int) -> bool:
        count = (self.shown() or {"count": -1})["count"]
        if count < 0 or not 0 <= count + by <= MOST_WORKERS:
            return False
        try:
            self.ask(do="scale", count=count + by, gpus=[])
        except PacelineError:  # it is preparing or stopping
            return False
        return True

    def _restart(self) -> bool:
        self.stop()
        self.start()
        return True

    # What is measured

    def sample(self) -> None:
        at, shown = self.done.total(), self.shown()
        if shown is None or self.process is None:
            return
        pids = {"supervisor": [self.process.pid]}
        pids["worker"] = [worker["pid"] for worker in shown["workers"] if worker["ready"]]
        if shown["trainer"]["ready"]:
            pids |= {"trainer": [shown["trainer"]["pid"]], "rank": [pid for pid in [self._rank()] if pid]}
        for role, found in pids.items():
            for pid in found:
                with contextlib.suppress(OSError):
                    self._note(role, "MiB", at, _resident(pid) / MEGABYTE)
                    self._note(role, "descriptors", at, len(list(Path(f"/proc/{pid}/fd").iterdir())))
        rings = [path for path in paths.ring_dir(self.run).glob("*.ring") if path.exists()]
        self._note("run directory", "files", at, len(list(self.run_dir.iterdir())))
        if rings:
            with contextlib.suppress(OSError):
                size = sum(path.stat().st_blocks * 512 for path in rings) / len(rings)
                self._note("/dev/shm, each ring", "bytes", at, size)
                self._note("/dev/shm", "rings", at, len(list(paths.ring_dir(self.run).iterdir())))

    def _note(self, what: str, unit: str, at: int, value: float) -> None:
        self.series[what, unit].append((at, value))

    # Its end

    def finish(self) -> tuple[AuditReport, list[RingInfo]]:
        """Lets the run go to its end with two workers, which is made to be near."""
        self.continue_due(all_of_them=True)
        self.until(lambda: self._scale_to(2), "supervisor that takes a request")
        before = self.trained()
        self.until(lambda: self.trained() > before, "step after the last fault")
        self.until(lambda: [ring.alive for ring in self.rings()] == [True, True], "two rings of two live workers")
        self.stop()
        newest, _ = checkpoint.newest_complete(paths.checkpoint_dir(self.run))
        assert newest is not None
        last = checkpoint.load_state(newest).step + 20
        self.path.write_text(self.path.read_text().replace("[trainer]\n", f"[trainer]\nmax_steps = {last}\n"))
        self.start()
        assert self.process is not None
        if self.process.wait(PATIENCE_S):
            sys.exit(f"the run did not finish: see {self.folder / 'up.log'}")
        newest, skipped = checkpoint.newest_complete(paths.checkpoint_dir(self.run))
        assert newest is not None and not skipped
        return audit(newest), self.rings()

    def _scale_to(self, count: int) -> bool:
        try:
            self.ask(do="scale", count=count, gpus=[])
        except PacelineError:
            return False
        return True


def _resident(pid: int) -> int:
    """Anonymous memory: what is mapped of rings and libraries comes and goes with them."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"process {pid} has ended")


def slope(points: list[tuple[int, float]]) -> float:
    """Growth in a hundred faults, by the median of slopes between early and late samples (Theil-Sen)."""
    at, value = np.array(points, float).T
    half = len(at) // 2
    run = at[None, half:] - at[:half, None]
    rise = value[None, half:] - value[:half, None]
    return float(np.median(rise[run > 0] / run[run > 0]) * 100) if (run > 0).any() else 0.0


def show(soak: Soak, report: AuditReport, rings: list[RingInfo], seconds: float) -> bool:
    """Prints the tables; whether all is well."""
    console = Console()
    faults = Table(title=f"{soak.done.total()} faults in {seconds / 60:.0f} min, {soak.drop:.0%} of the messages lost")
    faults.add_column("fault")
    faults.add_column("times", justify="right")
    for kind, count in soak.done.most_common():
        faults.add_row(kind, str(count))
    console.print(faults)
    growth = Table(title="while processes are up")
    for column in ("what", "unit", "samples", "median", "highest", "in 100 faults"):
        growth.add_column(column, justify="left" if column in ("what", "unit") else "right")
    flat = True
    for (what, unit), points in soak.series.items():
        values, rises = [value for _, value in points], slope(points)
        flat &= rises <= FLAT.get(unit, float("inf")) or soak.done.total() < 100
        row = f"{len(points)}", f"{np.median(values):,.1f}", f"{max(values):,.1f}", f"{rises:+,.2f}"
        growth.add_row(what, unit, *row)
    console.print(growth)
    free = sum(ring.count("free") for ring in rings)
    total = sum(len(ring.states) for ring in rings)
    used = sum(ring.count(state) for ring in rings for state in ("writing", "ready", "taken"))
    rings_in_order = free == total and all(ring.problem is None for ring in rings) and len(rings) == 2
    lost = report.remaining
    print(
        f"{report.step} steps, {report.trained} batches trained, {len(report.listed)} listed; lost {lost}, problems "
        f"{len(report.problems)}; audit {'clean' if report.clean else 'NOT CLEAN'}\n"
        f"{len(rings)} rings, {free} slots free + {used} used = {total}; flat: {flat}"
    )
    return report.clean and report.finished and lost == 0 and rings_in_order and flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drop", type=float, default=0.1, help="share of the messages that are lost")
    parser.add_argument("--pause", type=float, default=1.5, help="mean seconds from one fault to the next")
    parser.add_argument("--keep", type=Path, help="folder of logs and checkpoints; default: a temporary one")
    parser.add_argument("--supervise", metavar="RUN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.supervise:
        sys.exit(supervise(options.supervise))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clears up
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp")))
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["PACELINE_RUNTIME_DIR"] = str(folder / "rt")
        soak = Soak(folder, write_run(folder), options.drop, random.Random(options.seed), options.pause)
        stack.callback(_remove_rings, soak)
        stack.callback(soak.stop_at_once)
        soak.start()
        soak.until(lambda: soak.trained() >= 2, "first steps")
        begun = time.monotonic()
        soak.trouble(options.faults)
        seconds = time.monotonic() - begun
        report, rings = soak.finish()
        sys.exit(0 if show(soak, report, rings, seconds) else 1)


def _remove_rings(soak: Soak) -> None:
    folder = paths.ring_dir(soak.run)
    for path in folder.glob("*.ring*"):
        path.unlink()
    for empty in (folder, folder.parent):
        with contextlib.suppress(OSError):
            empty.rmdir()


if __name__ == "__main__":
    main()
