"""The most anchors of a micro-batch: never fewer than a run's own micro-batches have, and hardly more."""

import numpy as np
import pytest
from drafting import make_run
from paceline.common.batch import BatchId, Kind
from paceline.common.densest import Densest
from paceline.common.footprint import micro_tokens, slots_of
from paceline.common.plan import plan_from
from paceline.common.rows import MIN_ROW_TOKENS, Rows, RowsWriter
from paceline.consumer.anchors import draw_anchors
from paceline.consumer.learner import micro_batches

SETTINGS = {"trainer": {"micro_tokens": 300, "epochs": 3}, "stream": {"token_budget": 1024}}


def write(folder, lengths, supervised, files=()):
    with RowsWriter(folder) as writer:
        for length, count in zip(lengths, supervised, strict=True):
            mask = np.zeros(length, np.uint8)
            mask[length - count :] = 1
            writer.add(np.full(length, 7, np.int32), mask)
        writer.finish({"tokenizer": "t", "vocabulary": "", "target": "x", "files": list(files)})
    return Rows.open(folder)


def largest(run, rows, draw=draw_anchors):
    """Most anchors of any micro-batch that the run will train."""
    plan, most = plan_from(run, rows), 0
    for epoch in range(plan.epochs):
        for index in range(plan.batches(epoch)):
            ids = plan.rows(BatchId(Kind.TRAIN, epoch, index))
            found = [rows.row(int(row)) for row in ids]
            counts = [
                len(draw(row.mask, seed=0, epoch=epoch, row_id=int(one), per_token=0.25, most=40))
                for one, row in zip(ids, found, strict=True)
            ]
            lengths = np.array([len(row.tokens) for row in found])
            runs = micro_batches(lengths, np.array(counts) > 0, run.trainer.micro_tokens)
            most = max([most, *(sum(counts[first:past]) for first, past in runs)])
    return most


@pytest.mark.parametrize("seed", range(8))
def test_no_micro_batch_has_more(tmp_path, seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(MIN_ROW_TOKENS, 400, 60)
    rows = write(tmp_path / "rows", lengths, [draw.integers(0, length + 1) for length in lengths])
    data = {"rows": str(rows.folder), "max_length": 400, "held_out": 0}
    run = make_run(data=data, objective={"anchors_per_token": 0.25, "max_anchors": 40}, **SETTINGS)
    densest = Densest(run, rows)
    assert largest(run, rows) <= densest.anchors(micro_tokens(run, densest)) <= Densest(run).anchors(400)
    assert densest.longest == lengths.max()


def test_of_alike_rows_it_is_what_they_have(tmp_path):
    """60 % supervised: 15 anchors in 100 tokens, where all tokens would have 25."""
    rows = write(tmp_path / "rows", 40 * [100], 40 * [60])
    run = make_run(
        data={"rows": str(rows.folder), "max_length": 400, "held_out": 0},
        objective={"anchors_per_token": 0.25},
        **SETTINGS,
    )
    densest = Densest(run, rows)
    assert (densest.anchors(300), densest.anchors(50), densest.anchors(320)) == (45, 15, 48)
    assert densest.anchors(1024) == 10 * 15 + 4, "the token budget is no multiple of a row"
    assert largest(run, rows) == 45 and micro_tokens(run, densest) == 300
    assert Densest(run).anchors(400) == 100


def test_rows_that_just_reach_the_limit_have_most():
    """Four rows of 2,048 tokens have 512 anchors each; of the longest ones, 3,072 tokens, there is room for fewer."""
    data, objective = {"rows": "rows", "max_length": 3072}, {"anchors_per_token": 0.25, "max_anchors": 512}
    run = make_run(data=data, objective=objective, stream={"token_budget": 16384}, trainer={"micro_tokens": 8192})
    assert Densest(run).anchors(8192) == 4 * 512 and Densest(run).row == 2048
    assert slots_of(run, 8192) == 4 * 512 * run.drafter.block_size
    few = make_run(data=data, objective=objective, stream={"token_budget": 16384}, trainer={"micro_tokens": 64})
    assert micro_tokens(few) == 3072, "a row is never parted"
    more = make_run(data=data, objective=objective, stream={"token_budget": 4096}, trainer={"micro_tokens": 8192})
    assert micro_tokens(more) == 4096, "nor is there more than a record"


def test_a_row_counts_as_often_as_an_epoch_uses_it(tmp_path):
    """One dense row among sparse ones: with weight 2.5 it may come three times into one micro-batch."""
    rows = write(tmp_path / "rows", [100, 100, 100, 100], [100, 20, 20, 20], [{"rows": 4}])
    once, often = (
        make_run(data={"rows": None, "files": [{"path": "a.jsonl", "weight": weight}], "max_length": 400}, **SETTINGS)
        for weight in (1, 2.5)
    )
    each = Densest(once, rows).of_rows(rows.supervised).tolist()
    assert Densest(once, rows).anchors(300) == each[0] + 2 * each[1]
    assert Densest(often, rows).anchors(300) == 3 * each[0]


def test_rows_without_an_anchor(tmp_path):
    rows = write(tmp_path / "rows", [50, 50], [0, 1])
    run = make_run(data={"rows": str(rows.folder), "max_length": 400, "held_out": 0}, **SETTINGS)
    assert Densest(run, rows).anchors(300) == 0 and rows.supervised.tolist() == [0, 1]
