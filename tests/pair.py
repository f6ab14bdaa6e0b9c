"""The real worker, trainer and rank on a stand-in target and drafter, each process forked in milliseconds.

Starting Python with numpy, zmq and pydantic takes most of a second; a test of hundreds of kills cannot pay that for
every process. So one process imports everything (torch is not among it), starts no thread, holds no lock, and forks
whatever it is asked to start: `Forks` is a test's side of it, `serve` its own. A trainer's ranks are forked by a helper
that the trainer forked before it took its locks, and are then its own children, as spawned ones would be.

The states are stamped (standins.py) and `SumLearner` checks every one of them.
"""

import ctypes
import gc
import itertools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from paceline.common import faults
from paceline.common.batch import BatchId
from paceline.common.dataset import prepared_rows, tokenizer_digest
from paceline.common.errors import PacelineError
from paceline.common.fingerprint import Fingerprint, run_fingerprint
from paceline.common.plan import Plan, plan_from
from paceline.common.record import RecordMeta, max_rows, slot_bytes
from paceline.common.ring import Ring
from paceline.common.rows import Rows, RowsWriter
from paceline.common.runfile import RunFile
from paceline.common.target_info import TargetInfo
from paceline.consumer import feed, feeder, rank, ranks, source, trainer
from paceline.consumer.describe import RunFacts
from paceline.consumer.group import Group, LocalGroup
from paceline.consumer.job import RankJob, versions
from paceline.producer import prepare, worker
from paceline.producer.chat import ChatFormat
from standins import EXPECTED, HIDDEN, LAYERS, SocketGroup, SumLearner, make_meta, stamp
from worker_peer import stand_in_info

VOCAB = 512
_PDEATHSIG, _SUBREAPER = 1, 36  # prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)


# The stand-in target ------------------------------------------------------------------------------------------------


def target(run: RunFile) -> TargetInfo:
    return replace(stand_in_info(run.target.path), vocab_size=VOCAB)


class StampSource:
    """The target of a worker: states that tell where they belong."""

    def __init__(self, run: RunFile):
        self.info = target(run)

    def register(self, address: int, length: int) -> None:
        return

    def record(self, tokens: np.ndarray, cu_seqlens: np.ndarray, out: memoryview, progress: Callable[[], None]) -> bool:
        out[:] = stamp(tokens, cu_seqlens, len(LAYERS), HIDDEN).tobytes()
        return True

    def close(self) -> None:
        return


def describe(run: RunFile, alive: Callable[[], object] = lambda: None) -> RunFacts:
    rows = prepared_rows(run)
    fields = dict(run_fingerprint(run, rows, target(run), LAYERS).fields)
    return RunFacts(str(rows.folder), fields, list(LAYERS), HIDDEN)


def describer(run: RunFile) -> tuple[Plan, Callable[[BatchId], RecordMeta]]:
    """The run's plan, and what a worker of the run writes before the states of a batch."""
    facts = describe(run)
    rows = Rows.open(facts.rows)
    plan = plan_from(run, rows)
    expected = replace(EXPECTED, fingerprint=Fingerprint(facts.fingerprint).digest)
    return plan, lambda batch: make_meta(plan, rows, batch, expected)


def ring_of(run: RunFile, name: str) -> Ring:
    """The ring that worker `name` of the run would open."""
    budget = run.stream.token_budget
    return Ring.open(
        Path(run.stream.ring_dir) / run.name / f"{name}.ring",
        worker=name,
        fingerprint=Fingerprint(describe(run).fingerprint),
        slots=run.stream.slots,
        slot_bytes=slot_bytes(budget, max_rows(budget), len(LAYERS), HIDDEN, "float32"),
    )


def write_toy(folder: Path, count: int = 40, seed: int = 0) -> None:
    """The stand-in target and its rows, of 8 to 24 tokens; the second half of each is supervised."""
    target = folder / "target"
    target.mkdir()
    (target / "tokenizer.json").write_text("{}")
    draw = np.random.default_rng(seed)
    with RowsWriter(folder / "rows") as writer:
        for _ in range(count):
            length = int(draw.integers(8, 25))
            mask = (np.arange(length) >= length // 2).astype(np.uint8)
            writer.add(draw.integers(4, VOCAB, length).astype(np.int32), mask)
        writer.finish({"tokenizer": tokenizer_digest(str(target)), "vocabulary": "", "target": str(target)})


def toy_settings(folder: Path) -> dict[str, Any]:
    """A run of a few steps on what `write_toy` wrote, all in `folder`."""
    return {
        "name": "toy",
        "output": str(folder / "out"),
        "target": {"path": str(folder / "target"), "dtype": "float32", "layer_ids": list(LAYERS)},
        "data": {"rows": str(folder / "rows"), "max_length": 24, "held_out": 4},
        "stream": {
            "token_budget": 64,
            "order": "strict",
            "slots": 2,
            "prefetch": 2,
            "ring_dir": str(folder / "shm"),
        },
        "workers": {"devices": ["cpu"]},
        "trainer": {"batches_per_step": 2, "epochs": 1, "dtype": "float32", "devices": ["cpu"], "skip_limit": 3},
        "checkpoint": {"every_steps": 2, "every_minutes": None, "keep_last": 2, "keep_best": False},
        "evaluation": {"every_steps": 3},
    }


def load_format(target_path: str, trust_remote_code: bool = False) -> ChatFormat:
    """What transformers would read from the tokenizer's folder."""
    folder = Path(target_path)
    template = (folder / "chat_template.jinja").read_text()
    return ChatFormat((folder / "tokenizer.json").read_text(), {"default": template}, {"eos_token": "<|im_end|>"})


# The processes ------------------------------------------------------------------------------------------------------


def run_worker(run: RunFile, index: str) -> int:
    return worker.main(run, int(index), source=StampSource(run))


def run_trainer(run: RunFile, rank_fault: str = "", victim: str = "0") -> int:
    """Rank `victim` dies at `rank_fault`."""
    _fork_ranks_from_here({int(victim): rank_fault})
    return trainer.main(run, describe=describe)


def run_rank(run: RunFile) -> int:
    seconds = float(os.environ.get("SECONDS_PER_RECORD", "0"))
    return rank.main(lambda job, run, rows: SumLearner(seconds), _group)


def _group(job: RankJob) -> Group:
    return LocalGroup() if job.world == 1 else SocketGroup(job.rank, job.world, Path(job.store))


def run_prepare(run: RunFile) -> int:
    files = [file.path for file in run.data.files]
    prepare.prepare(files, target=run.target.path, max_length=run.data.max_length, processes=1)
    return 0


ROLES: dict[str, Callable[..., int]] = {
    "worker": run_worker,
    "trainer": run_trainer,
    "rank": run_rank,
    "prepare": run_prepare,
}


def _shorten_waits() -> None:
    """What is looked at each second in production is looked at ten times as often here."""
    worker.TICK_S, worker.RETRY_S = 0.1, 0.02
    feeder.RESCAN_S = feed.RESEND_AFTER_S = source.RESEND_SECONDS = 0.1
    trainer._TICK = source._WAIT_SECONDS = 0.02


def _become(role: str, run: RunFile | None, arguments: list[str], fault: str) -> int:
    """What a freshly started process does; its exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s", force=True)
    try:
        faults.arm(fault)
        code = ROLES[role](run, *arguments)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    assert "torch" not in sys.modules
    return code


def _in_child(main: Callable[[], int]) -> None:
    """Ends this forked process with what `main` returns; a failure shows its traceback, as in any Python."""
    code = 1
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# A trainer's ranks --------------------------------------------------------------------------------------------------


def _fork_ranks_from_here(faults_of: dict[int, str]) -> None:
    """From now on this process's `subprocess.Popen` of a rank is a fork of it as it is now."""
    _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        here.close()
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _in_child(lambda: _serve_ranks(there, parent, faults_of))
    there.close()
    ranks.subprocess = _Popens(here)  # pyright: ignore[reportAttributeAccessIssue]


def _serve_ranks(requests: socket.socket, parent: int, faults_of: dict[int, str]) -> int:
    for number in itertools.count():  # ranks are started in order
        data, fds, _, _ = socket.recv_fds(requests, 4096, 3)
        if not data:
            break
        fault = faults_of.get(number, "")
        requests.send(str(_fork_rank(requests, fds, int(data), parent, fault)).encode())
        for fd in fds:
            os.close(fd)
    return 0


def _fork_rank(requests: socket.socket, fds: list[int], reports: int, parent: int, fault: str) -> int:
    """The pid of a rank that is a child of the trainer: of the one that forked it, which ends, and so of the reaper."""
    answer, pid = os.pipe()
    if (between := os.fork()) == 0:
        if (child := os.fork()) == 0:
            _in_child(lambda: _forked_rank(requests, fds, reports, parent, fault))
        os.write(pid, str(child).encode())
        os._exit(0)
    os.waitpid(between, 0)
    found = int(os.read(answer, 32))
    os.close(answer)
    os.close(pid)
    return found


def _forked_rank(requests: socket.socket, fds: list[int], reports: int, parent: int, fault: str) -> int:
    os.setpgid(0, 0)
    requests.close()
    stdin, stdout, pipe = (os.dup2(fd, 200 + at) for at, fd in enumerate(fds))
    for fd in fds:
        os.close(fd)
    for fd, number in ((stdin, 0), (stdout, 1), (stdout, 2), (pipe, reports)):
        os.dup2(fd, number)
    for fd in (stdin, stdout, pipe):
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    while os.getppid() != parent:
        time.sleep(0.0005)
    return _become("rank", None, [], fault)


class _Popens:
    """In place of the module `subprocess` in ranks.py."""

    PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT

    def __init__(self, helper: socket.socket) -> None:
        self._helper = helper

    def Popen(self, command: list[str], *, pass_fds: list[int], **options: Any) -> "_ForkedRank":
        return _ForkedRank(self._helper, pass_fds[0])


class _ForkedRank:
    """What `RankSet` uses of a Popen."""

    def __init__(self, helper: socket.socket, reports: int) -> None:
        (stdin, write), (read, stdout) = os.pipe(), os.pipe()
        socket.send_fds(helper, [str(reports).encode()], [stdin, stdout, reports])
        self.pid = int(helper.recv(32))
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(write, "wb"), os.fdopen(read, "rb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


# The process that forks, and a test's side of it --------------------------------------------------------------------


def serve() -> None:
    """Starts, waits for and collects processes, as told on standard input; its answers are its standard output."""
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prepare.load_format = load_format
    _shorten_waits()
    _ = versions(), np.random.default_rng(), np.ma.array  # loaded at first use, else by each process
    gc.freeze()  # else each child's collector would copy every page that it looks at
    for line in sys.stdin:
        request = json.loads(line)
        answer = _start(request) if "role" in request else _wait(request["wait"], request["seconds"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _start(request: dict[str, Any]) -> int:
    if child := os.fork():
        return child
    os.environ |= request["environment"]
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd, number in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(fd, number)
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    run = RunFile.model_validate_json(request["run"])
    _in_child(lambda: _become(request["role"], run, request["arguments"], request["fault"]))
    raise AssertionError


def _wait(pid: int, seconds: float) -> int | None:
    """The exit code, negative for a signal; None if it lives on."""
    fd = os.pidfd_open(pid)
    try:
        if not select.select([fd], [], [], seconds)[0]:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(fd)


class Process:
    """A process started by `Forks`."""

    def __init__(self, forks: "Forks", pid: int, output: Path) -> None:
        self._forks, self.pid, self._output = forks, pid, output
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.wait(0.0)

    def wait(self, seconds: float) -> int | None:
        """The exit code (negative: the signal that killed it), or None after `seconds`."""
        if self.code is None:
            self.code = self._forks.ask({"wait": self.pid, "seconds": seconds})
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(10.0)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")


class Forks:
    """Starts processes of a run. `close` ends them all."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._number = 0

    def start(
        self, role: str, run: RunFile, folder: Path, *arguments: str, fault: str = "", **environment: str
    ) -> Process:
        """Role worker (arguments: index), trainer (the point at which a rank dies, and which rank) or prepare. Output
        goes to a file in `folder`."""
        self._number += 1
        output = folder / f"{self._number:04d}-{role}.log"
        output.touch()
        request = {
            "role": role,
            "run": run.model_dump_json(),
            "arguments": list(arguments),
            "fault": fault,
            "environment": environment,
            "output": str(output),
        }
        return Process(self, self.ask(request), output)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the process that forks is gone"
        return json.loads(answer)

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()


if __name__ == "__main__":
    serve()
