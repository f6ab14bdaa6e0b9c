"""A run over files with weights, from its run file to what workers send and ranks accept."""

import json

import numpy as np
import pytest
from paceline.common import record
from paceline.common.dataset import prepared_rows
from paceline.common.plan import plan_from
from paceline.common.runfile import load
from paceline.common.wire import WorkItem
from paceline.consumer.check import RecordCheck
from paceline.producer.worker import WorkQueue
from paceline.producer.worker import prepare as read_ahead
from standins import EXPECTED, make_meta, stamp


@pytest.fixture
def run(tmp_path, tiny_tokenizer_dir, monkeypatch):
    """Ten conversations used twice an epoch and eight of which each epoch uses a quarter."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    for name, count in (("often", 10), ("rarely", 8)):
        chats = [
            [{"role": "user", "content": f"The river {n}?"}, {"role": "assistant", "content": f"The {name} {n}."}]
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "run.toml").write_text(
        f'name = "mix"\noutput = "out"\n[target]\npath = "{tiny_tokenizer_dir}"\n'
        "[data]\nheld_out = 0\nmax_length = 64\n"
        '[[data.files]]\npath = "often.jsonl"\nweight = 2\n[[data.files]]\npath = "rarely.jsonl"\nweight = 0.25\n'
        "[stream]\ntoken_budget = 256\n[trainer]\nepochs = 4\n"
    )
    return load(tmp_path / "run.toml")


def test_every_use_of_a_row_goes_through(run):
    rows = prepared_rows(run)
    plan = plan_from(run, rows)
    queue, check = WorkQueue(rows, run.stream.token_budget, 1), RecordCheck(plan, rows, EXPECTED)
    uses = np.zeros(len(rows), int)
    try:
        for batch in (batch for epoch in range(plan.epochs) for batch in plan.ids(epoch)):
            ids = tuple(plan.rows(batch).tolist())
            item = WorkItem(batch.pack(), ids)
            assert queue.fault(item) is None
            assert read_ahead(rows, item).row_ids.tolist() == list(ids)
            meta = make_meta(plan, rows, batch)
            payload = memoryview(bytearray(record.record_bytes(meta)))
            offset = record.write_meta(payload, meta)
            payload[offset:] = stamp(meta.tokens, meta.cu_seqlens, meta.planes, meta.hidden_size).tobytes()
            assert check(payload, batch)[0].row_ids.tolist() == list(ids)
            uses += np.bincount(plan.indices(batch), minlength=len(rows))
    finally:
        queue.close()
    assert uses.tolist() == [8] * 10 + [1] * 8
    assert plan.rows(next(plan.ids(0))).max() >= len(rows), "further uses have row ids of their own"
