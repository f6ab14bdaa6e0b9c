"""The real worker, trainer and rank on a stand-in target and drafter, each process forked in milliseconds (forking.py).

The states are stamped (standins.py) and `SumLearner` checks every one of them. Torch is not imported.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from forking import fork_ranks_from_here, serve
from paceline.common.batch import BatchId
from paceline.common.dataset import prepared_rows, tokenizer_digest
from paceline.common.fingerprint import Fingerprint, run_fingerprint
from paceline.common.plan import Plan, plan_from
from paceline.common.record import RecordMeta, max_rows, slot_bytes
from paceline.common.ring import Ring
from paceline.common.rows import Rows, RowsWriter
from paceline.common.runfile import RunFile
from paceline.common.target_info import TargetInfo
from paceline.consumer import feed, feeder, rank, source, trainer
from paceline.consumer.describe import RunFacts
from paceline.consumer.group import Group, LocalGroup
from paceline.consumer.job import RankJob, versions
from paceline.producer import prepare, worker
from paceline.producer.chat import ChatFormat
from paceline.producer.source import Filled
from standins import EXPECTED, HIDDEN, LAYERS, SocketGroup, SumLearner, make_meta, stamp
from worker_peer import stand_in_info

VOCAB = 512


# The stand-in target ------------------------------------------------------------------------------------------------


def target(run: RunFile) -> TargetInfo:
    return replace(stand_in_info(run.target.path), vocab_size=VOCAB)


class StampSource:
    """The target of a worker: states that tell where they belong."""

    def __init__(self, run: RunFile):
        self.info = target(run)

    def register(self, address: int, length: int) -> None:
        return

    def begin(
        self,
        tokens: np.ndarray,
        cu_seqlens: np.ndarray,
        out: memoryview,
        progress: Callable[[], None],
        landed: Any = None,
    ) -> Filled:
        out[:] = stamp(tokens, cu_seqlens, len(LAYERS), HIDDEN).tobytes()
        return Filled(True)

    def settle(self) -> None:
        return

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
    fork_ranks_from_here(run_rank, lambda number: rank_fault if number == int(victim) else "")
    return trainer.main(run, describe=describe)


def run_rank() -> int:
    seconds = float(os.environ.get("SECONDS_PER_RECORD", "0"))
    code = rank.main(lambda job, run, rows: SumLearner(seconds), _group)
    assert "torch" not in sys.modules
    return code


def _group(job: RankJob) -> Group:
    return LocalGroup() if job.world == 1 else SocketGroup(job.rank, job.world, Path(job.store))


def run_prepare(run: RunFile) -> int:
    files = [file.path for file in run.data.files]
    prepare.prepare(files, target=run.target.path, max_length=run.data.max_length, processes=1)
    return 0


def _role(main: Callable[..., int]) -> Callable[..., int]:
    """A role for `serve`: its first argument is the run file as JSON."""

    def role(run: str, *arguments: str) -> int:
        code = main(RunFile.model_validate_json(run), *arguments)
        assert "torch" not in sys.modules
        return code

    return role


def _shorten_waits() -> None:
    """What is looked at each second in production is looked at ten times as often here."""
    worker.TICK_S, worker.RETRY_S = 0.1, 0.02
    feeder.RESCAN_S = feed.RESEND_AFTER_S = source.RESEND_SECONDS = 0.1
    trainer._TICK = source._WAIT_SECONDS = 0.02


if __name__ == "__main__":
    prepare.load_format = load_format
    _shorten_waits()
    _ = versions(), np.random.default_rng(), np.ma.array  # loaded at first use, else by each process
    serve({"worker": _role(run_worker), "trainer": _role(run_trainer), "prepare": _role(run_prepare)})
