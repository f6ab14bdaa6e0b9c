"""Every fault point, on every side that reaches it, in every order of restarts: nothing lost, nothing trained twice.

The processes are the real ones, forked, on a stand-in target and drafter (pair.py). A case kills one of them at a point
(and proves that it died there), kills the other side too or leaves it, starts again what is dead, and lets the run end.
Then the audit is clean, the toy weight is exactly that of a run to which nothing happened, every slot is free and
nothing is left over.
"""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forking import Forks, Process
from paceline.common import faults, paths
from paceline.common.batch import BatchId, Kind
from paceline.common.errors import ConfigError
from paceline.common.locks import held_by
from paceline.common.plan import PlanSpec
from paceline.common.record import RecordMeta
from paceline.common.ring import RingReader, SlotState, ring_paths
from paceline.common.runfile import RunFile
from paceline.consumer import checkpoint as ck
from paceline.consumer.audit import audit
from pair import describer, ring_of, toy_settings, write_toy
from safetensors.numpy import load_file
from standins import SumLearner, commit, stamp
from waiting import ownerless, until

ROOT = Path(faults.__file__).parents[1]
PATIENCE = 60.0  # seconds that anything may take on a loaded machine
WEIGHTS: dict[PlanSpec, float] = {}  # of undisturbed runs, by what decides their batches
ORDERS = ("alone", "worker first", "trainer first", "together")


# The registry -------------------------------------------------------------------------------------------------------


def points_in(path: Path) -> set[str]:
    """The names given to `point(...)` or `faults.point(...)` in a module."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    named = (call for call in calls if ast.unparse(call.func) in ("point", "faults.point"))
    return {str(argument.value) for call in named for argument in call.args if isinstance(argument, ast.Constant)}


def test_the_registry_holds_exactly_the_points_of_the_code():
    modules = [path for side in ("common", "producer", "consumer") for path in (ROOT / side).glob("*.py")]
    assert set().union(*map(points_in, modules)) == set(faults.POINTS)
    assert {side for point in faults.POINTS.values() for side in point.sides} == {
        "worker",
        "trainer",
        "rank",
        "prepare",
    }


def test_a_typo_is_an_error_that_lists_the_names(tmp_path: Path):
    environment = os.environ | {faults.VARIABLE: "worker.snt", "PACELINE_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "paceline.common.cli", "rings"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert len(done.stderr.splitlines()) == 1
    assert "'worker.snt' (did you mean worker.sent?)" in done.stderr
    assert all(name in done.stderr for name in faults.POINTS)


@pytest.mark.parametrize("text", ["worker.sent:0", "worker.sent:x", "worker.sent:-1", "worker.sent:1:1"])
def test_a_count_is_a_number_from_one(text: str):
    with pytest.raises(ConfigError, match="PACELINE_FAULT"):
        faults.arm(text)


# The matrix ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def forks(fork_server: Callable[[str], Forks]) -> Forks:
    return fork_server("pair.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in /dev/shm: rings belong there, and an fsync costs nothing."""
    folder = Path("/dev/shm") / f"paceline-test-{os.getpid()}-{tmp_path.name[:20]}"
    folder.mkdir()
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("PACELINE_CACHE", str(folder / "cache"))
    yield folder
    shutil.rmtree(folder)


class Play:
    """One run: the processes on its stage, and what must hold when they have left."""

    def __init__(self, folder: Path, forks: Forks) -> None:
        self.folder, self._forks = folder, forks
        write_toy(folder)
        self.settings = toy_settings(folder)
        self.rings = {"w0.ring"}
        self.processes: dict[str, Process] = {}
        self._started = 0

    @property
    def run(self) -> RunFile:
        return RunFile.model_validate(self.settings)

    def meta(self, index: int) -> RecordMeta:
        """Of training batch `index`."""
        return describer(self.run)[1](BatchId(Kind.TRAIN, 0, index))

    def start(self, role: str, fault: str = "", rank_fault: str = "", victim: int = 0, **more: str) -> Process:
        arguments = {"worker": ["0"], "trainer": [rank_fault, str(victim)], "prepare": []}[role]
        environment = {name: os.environ[name] for name in ("PACELINE_RUNTIME_DIR", "PACELINE_CACHE")} | more
        self._started += 1
        output = self.folder / f"{self._started:04d}-{role}.log"
        run = self.run.model_dump_json()
        process = self._forks.start(role, run, *arguments, output=output, fault=fault, **environment)
        self.processes[role] = process
        return process

    def up(self, role: str) -> None:
        """Wait until a process has what makes it that of its side, or has found that there is nothing to do."""
        process = self.processes[role]

        until(lambda: process.poll() is not None or self._is_up(process, role), PATIENCE)

    def _is_up(self, process: Process, role: str) -> bool:
        if role == "worker":
            return "ready, ring" in process.output
        return str(process.pid) in (held_by(paths.consumer_lock(self.run)) or "")

    def end(self, role: str, code: int = 0) -> None:
        process = self.processes[role]
        assert process.wait(PATIENCE) == code, self.story()

    def story(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in logs)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()

    # What must hold at the end

    def check(self) -> None:
        run = self.run
        newest, skipped = ck.newest_complete(paths.checkpoint_dir(run))
        assert newest is not None and skipped == (), self.story()
        report = audit(newest)
        assert report.finished and report.listed == (), report.text()
        # Two ranks add up in another order.
        close = 0.0 if run.trainer.ranks == 1 else 1e-12
        assert float(load_file(newest / ck.MODEL)["weight"][0]) == pytest.approx(expected_weight(run), rel=close, abs=0)
        assert {path.name for path in paths.ring_dir(run).iterdir()} == self.rings
        for path in ring_paths(paths.ring_dir(run)):
            reader = RingReader.open(path)
            scan = ownerless(reader).scan()
            assert [slot.state for slot in scan.slots] == [SlotState.FREE] * run.stream.slots, self.story()
            reader.close()
        self._check_leftovers(run)

    def _check_leftovers(self, run: RunFile) -> None:
        locks = {f"rank-{rank}.lock" for rank in range(run.trainer.ranks)}
        kept = {"consumer.lock", "status.json", "finished", *locks}
        assert {path.name for path in paths.run_dir(run.name).iterdir()} == kept
        assert all(path.name.startswith("step-") for path in paths.checkpoint_dir(run).iterdir())
        assert len(ck.folders(paths.checkpoint_dir(run))) <= run.checkpoint.keep_last
        for cache in (self.folder / "cache" / "rows", self.folder):
            assert not [path.name for path in cache.glob(".*")]


def expected_weight(run: RunFile) -> float:
    """What training in plan order gives, computed without any of the machinery."""
    plan, meta_of = describer(run)
    if plan.spec not in WEIGHTS:
        learner = SumLearner()
        for step in range(plan.total_steps):
            first = step * plan.batches_per_step
            for index in range(first, first + plan.step_batches(step)):
                meta = meta_of(BatchId(Kind.TRAIN, 0, index))
                states = stamp(meta.tokens, meta.cu_seqlens, meta.planes, meta.hidden_size)
                learner.train_record(meta, memoryview(states.tobytes()), 0)
            learner.step(learner.sums(), step, plan.total_steps)
        WEIGHTS[plan.spec] = learner.weight
    return WEIGHTS[plan.spec]


@pytest.fixture
def play(folder: Path, forks: Forks) -> Iterator[Play]:
    play = Play(folder, forks)
    yield play
    play.close()


# What a point needs to be reached


def a_ring(play: Play) -> None:
    """A dead worker's ring: two records that are worth keeping, one of them taken by a dead trainer."""
    ring = ring_of(play.run, "w0")
    for index in range(2):
        commit(ring, play.meta(index))
    reader = RingReader.open(ring.path)
    first = next(slot for slot in ring.states() if slot.state is SlotState.READY)
    reader.take(first.index, first.seq, 5)
    reader.close()
    ring.close()


def a_half_written_slot(play: Play) -> None:
    """A dead worker's ring: a record, and a slot that it was writing."""
    ring = ring_of(play.run, "w0")
    commit(ring, play.meta(1))
    assert ring.claim(BatchId(Kind.TRAIN, 0, 0).pack()) is not None
    ring.close()


def a_retired_ring(play: Play) -> None:
    """Worker w1 was scaled away and left a record."""
    ring = ring_of(play.run, "w1")
    commit(ring, play.meta(0))
    reader = RingReader.open(ring.path)
    reader.retire()
    reader.close()
    ring.close()


def a_bad_record(play: Play) -> None:
    """A dead worker w1 left a record whose checksum is wrong."""
    ring = ring_of(play.run, "w1")
    commit(ring, play.meta(0), checksum=1)
    ring.close()
    play.rings.add("w1.ring")


def a_stale_record(play: Play) -> None:
    """A dead worker w1 left a record of an evaluation that is long over."""
    ring = ring_of(play.run, "w1")
    slot = ring.claim(BatchId(Kind.EVAL, 9999, 0).pack())
    assert slot is not None
    ring.commit(slot, 8, 0)
    ring.close()
    play.rings.add("w1.ring")


def a_damaged_checkpoint(play: Play) -> None:
    """A folder of a checkpoint's name, which is none."""
    (ck.step_folder(paths.checkpoint_dir(play.run), 2)).mkdir(parents=True)


def a_dead_trainers_sockets(play: Play) -> None:
    """A trainer was killed while it waited for a worker."""
    trainer = play.start("trainer", fault="trainer.ranks-started")
    assert trainer.wait(PATIENCE) == -signal.SIGKILL


def a_checkpoint(play: Play) -> None:
    """A trainer was killed some steps after its first checkpoint."""
    trainer, worker = play.start("trainer", rank_fault="rank.stepped-not-told:5"), play.start("worker")
    assert trainer.wait(PATIENCE) == 1
    worker.kill()


def data_files(play: Play) -> None:
    """The rows are prepared from chats, into the cache."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(play.folder / "target" / "tokenizer.json"))
    (play.folder / "target" / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    chats = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i} times {i} is {i * i}."}]
        for i in range(36)
    ]
    file = play.folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    play.settings["data"] = {"files": [str(file)], "max_length": 64, "held_out": 4}
    play.settings["stream"]["token_budget"] = 128


def damaged_rows(play: Play) -> None:
    """The cache holds the rows of these chats, damaged."""
    data_files(play)
    play.start("prepare")
    play.end("prepare")
    folder = next(path for path in (play.folder / "cache" / "rows").iterdir() if path.is_dir())
    (folder / "rows.arrow").write_bytes(b"ARROW1")


BEFORE: dict[str, Callable[[Play], None]] = {
    "ring.lock-taken": a_ring,
    "ring.adopted": a_half_written_slot,
    "ring.removing": a_retired_ring,
    "ring.removed": a_retired_ring,
    "ring.released trainer": a_stale_record,
    "rank.refusing": a_bad_record,
    "rank.refused": a_bad_record,
    "feed.refusal-heard": a_bad_record,
    "feed.before-bind": a_dead_trainers_sockets,
    "trainer.resumed": a_checkpoint,
    "trainer.marker-removed": a_checkpoint,
    "rank.restored": a_checkpoint,
    "checkpoint.between-renames": a_damaged_checkpoint,
    "rows.half-written": data_files,
    "rows.before-rename": data_files,
    "rows.between-renames": damaged_rows,
    "rows.renamed": damaged_rows,
    "lock.taken prepare": data_files,
}

# Points that are passed often: where in the run the process dies. 1 where nothing is said.
COUNT = {
    "ring.numbered": 2,
    "ring.writing": 3,
    "ring.described": 4,
    "ring.committed": 5,
    "ring.taking": 2,
    "ring.taken": 6,
    "ring.released rank": 5,
    "worker.work-received": 2,
    "worker.filled": 3,
    "worker.committed-not-sent": 7,
    "worker.sent": 4,
    "feed.assigned-not-sent": 2,
    "feed.work-sent": 3,
    "feed.given-not-sent": 4,
    "feed.given": 5,
    "feed.exhausted-not-sent": 4,
    "feed.done-heard": 3,
    "feed.done-recorded": 4,
    "rank.asked": 6,
    "rank.take-received": 5,
    "rank.copied-not-released": 4,
    "rank.released-not-told": 5,
    "rank.collected-not-gathered": 3,
    "rank.gathered-not-stepped": 4,
    "rank.stepped-not-recorded": 3,
    "rank.stepped-not-told": 5,
    "rank.told": 4,
    "checkpoint.begun": 2,
    "checkpoint.before-manifest": 2,
    "checkpoint.after-manifest": 2,
    "checkpoint.before-rename": 2,
    "checkpoint.after-rename": 2,
    "checkpoint.before-removal": 3,
}

CASES = [
    pytest.param(point, side, order, id=f"{side}-{point}-{order.replace(' ', '-')}")
    for point, about in faults.POINTS.items()
    for side in about.sides
    for order in ORDERS
    if (side, order) != ("prepare", "alone")  # who needs the rows prepares them
]


def nothing(play: Play) -> None:
    return


def chosen(table: dict[str, Any], point: str, side: str, otherwise: Any) -> Any:
    """The entry of a point on one side, or of the point on any."""
    return table.get(f"{point} {side}", table.get(point, otherwise))


@pytest.mark.parametrize(("point", "side", "order"), CASES)
def test_killed_anywhere_and_started_again(play: Play, point: str, side: str, order: str):
    chosen(BEFORE, point, side, nothing)(play)
    kill_at(play, point, side)
    start_again(play, side, order)
    play.end("trainer")
    play.end("worker")
    play.check()


def kill_at(play: Play, point: str, side: str) -> None:
    """One process of a pair dies at the point; proof that it died there."""
    fault = f"{point}:{chosen(COUNT, point, side, 1)}"
    if side == "prepare":
        victim = play.start("prepare", fault=fault)
        del play.processes["prepare"]
    else:
        trainer = play.start("trainer", fault if side == "trainer" else "", fault if side == "rank" else "")
        worker = play.start("worker", fault if side == "worker" else "")
        victim = worker if side == "worker" else trainer
    code = victim.wait(PATIENCE)
    assert f"paceline: killed at fault point {point}\n" in victim.output, play.story()
    if side == "rank":  # the main process tells of its rank's death, and ends
        assert code == 1 and "rank 0 was killed by SIGKILL" in victim.output, play.story()
    else:
        assert code == -signal.SIGKILL


def start_again(play: Play, side: str, order: str) -> None:
    """Start what is dead; in every order but "alone" the other side was killed as well."""
    dead = "worker" if side == "worker" else "trainer"
    if order == "alone":
        play.start(dead)
        return
    play.close()
    first, second = ("trainer", "worker") if order == "trainer first" else ("worker", "trainer")
    play.start(first)
    if order != "together":
        play.up(first)
    play.start(second)


BETWEEN_RANKS = [
    "ring.taken:2",
    "rank.copied-not-released:2",
    "rank.released-not-told:2",
    "rank.collected-not-gathered:3",
    "rank.gathered-not-stepped:3",
    "rank.stepped-not-recorded:3",
    "rank.stepped-not-told:3",
]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", BETWEEN_RANKS)
def test_one_of_two_ranks_is_killed(play: Play, fault: str, victim: int):
    """Whichever of the two has moved its weights already: both go on from one boundary."""
    play.settings["trainer"] |= {"ranks": 2, "devices": ["cpu", "cpu"]}
    trainer = play.start("trainer", rank_fault=fault, victim=victim)
    play.start("worker")
    assert trainer.wait(PATIENCE) == 1
    assert f"rank {victim} was killed by SIGKILL" in trainer.output, play.story()
    assert f"paceline: killed at fault point {fault.partition(':')[0]}\n" in trainer.output
    play.start("trainer")
    play.end("trainer")
    play.end("worker")
    play.check()


def test_a_ring_truncated_under_a_copy(play: Play):
    """The one thing that no check can prevent: the process that copies dies of it. The run does not."""
    trainer, worker = play.start("trainer", SECONDS_PER_RECORD="0.5"), play.start("worker")
    path = paths.ring_dir(play.run) / "w0.ring"
    until(path.exists)
    reader = RingReader.open(path)
    until(lambda: any(slot.taken for slot in reader.scan().slots))
    os.truncate(path, 4096)
    assert trainer.wait(PATIENCE) == 1 and "rank 0 was killed by SIGBUS" in trainer.output, play.story()
    code = worker.wait(PATIENCE)
    assert (code == 1 and "truncated" in worker.output) or code == -signal.SIGBUS, play.story()
    reader.close()
    for role in ("trainer", "worker"):
        play.start(role)
    play.end("trainer")
    play.end("worker")
    play.check()
