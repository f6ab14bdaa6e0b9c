import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.common.batch import BatchId, Kind
from paceline.common.errors import ConfigError
from paceline.common.plan import Plan, PlanSpec
from paceline.common.record import MIN_ROW_TOKENS


def make_plan(lengths, *, budget=64, packer="first-fit", held_out=0, seed=0, group=2, epochs=2, mix=(), **limits):
    spec = PlanSpec("digest", seed, budget, budget, packer, held_out, mix)
    return Plan(spec, np.asarray(lengths), batches_per_step=group, epochs=epochs, **limits)


plans = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 64), min_size=1, max_size=60),
        "packer": st.sampled_from(["first-fit", "sequential"]),
        "seed": st.integers(0, 2**70),
        "group": st.integers(1, 5),
        "epochs": st.integers(1, 3),
    }
)


@given(plans, st.integers(0, 5))
@settings(deadline=None)
def test_each_epoch_holds_every_row_once_within_the_budget(arguments, held_out):
    lengths = arguments["lengths"]
    held_out = min(held_out, len(lengths) - 1)
    plan = make_plan(**arguments, held_out=held_out)
    eval_rows = [row for batch in plan.eval_ids(plan.total_steps) for row in plan.rows(batch)]
    assert len(eval_rows) == held_out
    assert plan.epochs == arguments["epochs"]
    for epoch in range(plan.epochs):
        rows = [plan.rows(batch) for batch in plan.ids(epoch)]
        assert sorted([*np.concatenate(rows).tolist(), *eval_rows]) == list(range(len(lengths)))
        for batch, members in zip(plan.ids(epoch), rows, strict=True):
            tokens = sum(lengths[row] for row in members)
            assert 0 < tokens <= 64
            assert plan.tokens(batch) == tokens
            assert len(members) <= 64 // MIN_ROW_TOKENS


@given(plans)
@settings(deadline=None)
def test_steps_partition_each_epoch(arguments):
    plan = make_plan(**arguments)
    assert plan.first_step(0) == 0
    assert plan.first_step(plan.epochs) == plan.total_steps
    for epoch in range(plan.epochs):
        steps = range(plan.first_step(epoch), plan.first_step(epoch + 1))
        assert {plan.epoch_of(step) for step in steps} == {epoch}
        sizes = [plan.step_batches(step) for step in steps]
        assert sum(sizes) == plan.batches(epoch)
        assert all(size == plan.batches_per_step for size in sizes[:-1]) and sizes[-1] > 0


@given(plans, st.integers(1, 40))
@settings(deadline=None)
def test_a_plan_with_a_step_limit_is_a_prefix(arguments, max_steps):
    whole = make_plan(**arguments)
    cut = make_plan(**arguments, max_steps=max_steps)
    assert cut.total_steps == min(max_steps, whole.total_steps)
    ids = [batch for epoch in range(cut.epochs) for batch in cut.ids(epoch)]
    assert ids == [batch for epoch in range(whole.epochs) for batch in whole.ids(epoch)][: len(ids)]
    assert all(np.array_equal(cut.rows(batch), whole.rows(batch)) for batch in ids)
    assert len(ids) == sum(cut.step_batches(step) for step in range(cut.total_steps)) == cut.total_batches
    assert cut.total_tokens == sum(cut.tokens(batch) for batch in ids)


@given(plans, st.integers(1, 3000))
@settings(deadline=None)
def test_a_token_limit_stops_after_the_step_that_reaches_it(arguments, max_tokens):
    plan = make_plan(**arguments, max_tokens=max_tokens)
    whole = make_plan(**arguments)
    by_step = []
    for step in range(plan.total_steps):
        epoch = plan.epoch_of(step)
        first = (step - plan.first_step(epoch)) * plan.batches_per_step
        ids = [BatchId(Kind.TRAIN, epoch, first + i) for i in range(plan.step_batches(step))]
        by_step.append(sum(plan.tokens(batch) for batch in ids))
    assert plan.total_tokens == sum(by_step)
    assert sum(by_step[:-1]) < max_tokens
    assert sum(by_step) >= max_tokens or plan.total_steps == whole.total_steps


@given(plans, st.integers(0, 4), st.integers(0, 3), st.booleans(), st.integers(1, 20))
@settings(deadline=None)
def test_phases_walk_every_step_and_every_evaluation_once(arguments, held_out, eval_every, at_end, max_steps):
    held_out = min(held_out, len(arguments["lengths"]) - 1)
    plan = make_plan(**arguments, held_out=held_out, eval_every=eval_every, eval_at_end=at_end, max_steps=max_steps)
    phase, walked = (Kind.TRAIN, 0), []
    while phase is not None:
        walked.append(phase)
        phase = plan.next_phase(*phase)
    total = plan.total_steps
    due = {n for n in range(1, total + 1) if (eval_every and n % eval_every == 0) or (at_end and n == total)}
    expected = []
    for step in range(total):
        expected.append((Kind.TRAIN, step))
        if held_out and step + 1 in due:
            expected.append((Kind.EVAL, step + 1))
    assert walked == expected


mixes = st.lists(st.tuples(st.integers(0, 12), st.floats(0.05, 4, allow_nan=False)), min_size=1, max_size=4)


@given(mixes, st.integers(0, 3), st.sampled_from(["first-fit", "sequential"]), st.integers(0, 9))
@settings(deadline=None)
def test_weights_say_how_often_rows_are_used(mix, held_out, packer, seed):
    count, epochs = sum(rows for rows, _ in mix), 6
    held_out = min(held_out, count - 1)
    try:
        plan = make_plan([8] * count, mix=tuple(mix), held_out=held_out, packer=packer, seed=seed, epochs=epochs)
    except ConfigError as error:
        assert "no rows" in str(error) or "without a row" in str(error)
        return
    per_epoch = [np.concatenate([plan.rows(batch) for batch in plan.ids(epoch)]) for epoch in range(plan.epochs)]
    for ids in per_epoch:
        assert len(set(ids.tolist())) == len(ids), "each use has an id of its own"
    first = 0
    for rows, weight in mix:
        training = np.setdiff1d(np.arange(first, first + rows), plan.eval_rows)
        total = np.zeros(count, int)
        for epoch, ids in enumerate(per_epoch, 1):
            uses = np.bincount(ids % count, minlength=count)
            assert set(uses[training].tolist()) <= {int(weight), int(weight) + 1, -(-weight // 1)}
            total += uses
            assert total[training].sum() == math.floor(epoch * Fraction(str(weight)) * len(training))
            assert np.ptp(total[training]) <= 1 if len(training) else True, "none twice before all others once"
        first += rows
    assert not set(plan.eval_rows.tolist()) & {int(row) % count for ids in per_epoch for row in ids}


def test_weights_by_hand():
    plan = make_plan([8] * 6, mix=((2, 2.0), (4, 0.5)), packer="sequential", epochs=3)
    halves = [[int(row) for batch in plan.ids(epoch) for row in plan.rows(batch)] for epoch in range(3)]
    for half in halves:
        assert half[:2] == [0, 1] and half[4:] == [6, 7], "both rows of the first file twice"
    assert sorted(halves[0][2:4] + halves[1][2:4]) == [2, 3, 4, 5] and halves[2] == halves[0]
    with pytest.raises(ConfigError, match=r"the weights of data\.files leave epoch 0 without a row"):
        make_plan([8] * 4, mix=((4, 0.1),))


def test_weights_of_one_change_nothing():
    plain, weighted = make_plan([8] * 9, held_out=2), make_plan([8] * 9, mix=((4, 1.0), (5, 1.0)), held_out=2)
    ids = list(plain.ids(0))
    assert [plain.rows(batch).tolist() for batch in ids] == [weighted.rows(batch).tolist() for batch in ids]


def test_membership():
    plan = make_plan([20] * 10, held_out=2, epochs=2, eval_every=2, max_steps=3)
    assert (plan.batches(0), plan.eval_batches, plan.total_steps) == (3, 1, 3)
    assert BatchId(Kind.TRAIN, 0, 2) in plan
    assert BatchId(Kind.TRAIN, 0, 3) not in plan
    assert BatchId(Kind.TRAIN, 1, 1) in plan
    assert BatchId(Kind.TRAIN, 1, 2) not in plan  # after the cut
    assert BatchId(Kind.TRAIN, 2, 0) not in plan
    assert [n for n in range(6) if BatchId(Kind.EVAL, n, 0) in plan] == [2, 3]
    assert BatchId(Kind.EVAL, 2, 1) not in plan
    with pytest.raises(KeyError, match="train/1/2"):
        plan.rows(BatchId(Kind.TRAIN, 1, 2))


def test_the_same_plan_on_every_platform():
    plan = make_plan(np.arange(8, 40), held_out=3, seed=7)
    assert plan.eval_rows.tolist() == [8, 16, 29]
    assert plan.rows(BatchId(Kind.TRAIN, 0, 0)).tolist() == [26, 18]
    assert plan.rows(BatchId(Kind.TRAIN, 1, 3)).tolist() == [9, 27, 1]


def test_epochs_differ_unless_sequential():
    shuffled = make_plan([8] * 64)
    first = BatchId(Kind.TRAIN, 0, 0), BatchId(Kind.TRAIN, 1, 0)
    assert shuffled.rows(first[0]).tolist() != shuffled.rows(first[1]).tolist()
    assert shuffled.rows(first[0]).tolist() != make_plan([8] * 64, seed=1).rows(first[0]).tolist()
    sequential = make_plan([8] * 64, packer="sequential")
    assert [sequential.rows(batch).tolist() for batch in first] == [list(range(8))] * 2


def test_first_fit_fills_earlier_batches():
    lengths = np.random.default_rng(0).integers(8, 600, 5000)
    fitted, sequential = (make_plan(lengths, budget=1024, packer=name) for name in ("first-fit", "sequential"))
    assert fitted.batches(0) < sequential.batches(0)
    assert fitted.batches(0) <= 1.03 * lengths.sum() / 1024


def test_packs_dropped_from_memory_come_back_equal(monkeypatch):
    monkeypatch.setattr("paceline.common.plan._KEPT_INTS", 1)
    plan = make_plan(np.arange(8, 60), epochs=5)
    whole = make_plan(np.arange(8, 60), epochs=1)
    assert np.array_equal(plan.rows(BatchId(Kind.TRAIN, 0, 4)), whole.rows(BatchId(Kind.TRAIN, 0, 4)))


def test_what_cannot_be_planned():
    with pytest.raises(ConfigError, match=r"longest row has 65 tokens, more than stream.token_budget \(64\)"):
        make_plan([65, 8])
    with pytest.raises(ConfigError, match=r"held_out \(2\) leaves none of the dataset's 2 rows"):
        make_plan([8, 8], held_out=2)
    with pytest.raises(ConfigError, match="no rows"):
        make_plan([])
    plan = make_plan([8])
    with pytest.raises(IndexError, match="step 2"):
        plan.epoch_of(2)
