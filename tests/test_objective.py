"""Objectives against autograd in float64, in plain torch and in Triton's interpreter; weights and noise by hand."""

import importlib.util
import os
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from drafting import CONFIG, HIDDEN, make_drafter, make_head, make_rows, make_run
from hypothesis import given
from hypothesis import strategies as st
from paceline.common.errors import ConfigError
from paceline.common.runfile import ObjectiveSettings, RunFile
from paceline.consumer.learner import DFlashLearner
from paceline.consumer.linears import SLOPE
from paceline.consumer.losses import SLOPE_MAX, head_cross_entropy
from paceline.consumer.objective import (
    PLAIN,
    Objective,
    Slots,
    dpace_weights,
    first_wrong,
    score,
    score_through_head,
    slot_slopes,
    slot_stats,
    whole_blocks,
)
from torch.nn import functional as F

VOCAB, WIDTH, SIZE = 53, 12, 4
BLOCK = np.array([0, 0, 0, 1, 2, 2, 4, 4, 4])  # of each scored slot: one block has none, two are cut short
CELLS = torch.tensor([1, 2, 3, 5, 9, 10, 17, 18, 19])
BLOCKS = 5
DECAY = torch.tensor([1.0, 0.7, 0.5, 1.0, 1.0, 0.7, 1.0, 0.7, 0.5], dtype=torch.float64)

OBJECTIVES = {
    "ce": Objective(),
    "kl": Objective(ce=0, kl=1),
    "tv": Objective(ce=0, tv=1),
    "lk": Objective(ce=0, lk=1),
    "lk_hybrid": Objective(ce=0, lk_hybrid=1),
    "mix": Objective(ce=0.3, kl=0.7, tv=0.2, lk=0.1, lk_hybrid=0.4),
    "confidence": Objective(confidence=0.5),
    "first_error": Objective(first_error=0.3),
    "dpace": Objective(dpace=0.5),
    "all": Objective(ce=0.5, kl=0.4, lk_hybrid=0.3, confidence=0.2, first_error=0.3, dpace=0.3),
}


@pytest.fixture(scope="module")
def batch():
    """Hidden states of draft and target, head and labels in float64; about half of the slots are right."""
    generator = torch.Generator().manual_seed(5)
    draw = {"generator": generator, "dtype": torch.float64}
    hidden, target = torch.randn(9, WIDTH, **draw), torch.randn(9, WIDTH, **draw)
    head = torch.randn(VOCAB, WIDTH, **draw) * 0.4
    labels = torch.randint(0, VOCAB, (9,), generator=generator)
    right = [0, 1, 4, 6, 8]
    labels[right] = (hidden @ head.T).argmax(-1)[right]
    return hidden, target, head, labels


def oracle(objective, hidden, target, head, labels):
    """The objective's numerator by the formulas of the literature, slot by slot; and the sum of its weights."""
    z = hidden @ head.T
    q, log_q = z.softmax(-1), z.log_softmax(-1)
    p, log_p = (target @ head.T).softmax(-1), (target @ head.T).log_softmax(-1)
    ce = F.cross_entropy(z, labels, reduction="none")
    right = z.argmax(-1) == labels
    weights = DECAY.clone()
    if objective.dpace is not None:
        smooth = ((1 - objective.dpace) * (-ce).exp() + objective.dpace).detach()
        for j in range(9):
            ahead = [m for m in range(9) if BLOCK[m] == BLOCK[j] and m >= j]
            same = [i for i in range(9) if BLOCK[i] == BLOCK[j]]
            weights[j] = sum(torch.stack([smooth[i] for i in same if i <= m]).prod() for m in ahead)
    total = torch.zeros((), dtype=torch.float64)
    for j in range(9):
        alpha = torch.minimum(p[j], q[j]).sum()
        kl = (p[j] * (log_p[j] - log_q[j])).sum()
        blend = torch.exp(-3 * alpha.detach())
        terms = objective.ce * ce[j] + objective.kl * kl + objective.tv * (1 - alpha) - objective.lk * alpha.log()
        terms = terms + objective.lk_hybrid * (blend * kl + (1 - blend) * (1 - alpha))
        if right[j]:
            terms = terms - objective.confidence * (q[j] * log_q[j]).sum()
        total = total + weights[j] * terms
        if not right[j] and all(right[i] for i in range(j) if BLOCK[i] == BLOCK[j]):
            total = total + objective.first_error * ce[j]
    return total, weights.sum()


def slots_of(labels, weights, most=100):
    return Slots(labels, weights, CELLS, BLOCKS, SIZE, whole_blocks(BLOCK, most))


@pytest.mark.parametrize("most", [100, 4, 1])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_equal_autograds(batch, name, most):
    hidden, target, head, labels = batch
    objective, hidden = OBJECTIVES[name], hidden.clone().requires_grad_()
    loss, weight = oracle(objective, hidden, target, head, labels)
    (expected,) = torch.autograd.grad(3 * loss, hidden)
    own = target if objective.needs_target else None
    scored = score_through_head(hidden, head, slots_of(labels, DECAY, most), objective, own)
    (gradient,) = torch.autograd.grad(3 * scored.loss, hidden)
    torch.testing.assert_close(scored.loss, loss.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(scored.weights.sum(), weight, rtol=1e-10, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-11)
    assert int(scored.hits.sum()) == 5


def test_the_oracles_terms_are_all_told_apart(batch):
    """Else a term could be missing on both sides."""
    hidden, target, head, labels = batch
    losses = {name: oracle(o, hidden, target, head, labels)[0].item() for name, o in OBJECTIVES.items()}
    assert len({round(value, 6) for value in losses.values()}) == len(OBJECTIVES)


def test_plain_cross_entropy_is_the_same_as_the_special_case(batch):
    hidden, _, head, labels = batch
    for dtype in (torch.float64, torch.float32):
        h, w, own = hidden.to(dtype).requires_grad_(), head.to(dtype), DECAY.to(dtype)
        one = head_cross_entropy(h, w, labels, own)
        two = score_through_head(h, w, slots_of(labels, own, 4), Objective(), None)
        first, second = (torch.autograd.grad(scored.loss, h)[0] for scored in (one, two))
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one.ce, two.ce)
        assert torch.equal(one.hits, two.hits)


def test_a_target_term_without_the_targets_states_is_refused(batch):
    hidden, _, head, labels = batch
    with pytest.raises(ValueError, match="last hidden states"):
        score_through_head(hidden, head, slots_of(labels, DECAY), Objective(kl=1), None)


def test_no_slot_at_all(batch):
    hidden, target, head, labels = batch
    none = Slots(labels[:0], DECAY[:0], CELLS[:0], 0, SIZE, whole_blocks(BLOCK[:0], 4))
    scored = score_through_head(hidden[:0].requires_grad_(), head, none, OBJECTIVES["all"], target[:0])
    scored.loss.backward()
    assert (scored.loss.item(), scored.weights.numel()) == (0.0, 0)


# Weights --------------------------------------------------------------------------------------------------------------


def test_dpace_weights_by_hand():
    """Two scored slots with q = 1 and 0.5, α = 0.5: q̃ = 1 and 0.75; a block of one slot with q = 0."""
    ce = torch.tensor([0.0, float(np.log(2)), float("inf")], dtype=torch.float64)
    weights = dpace_weights(ce, torch.tensor([1, 2, 5]), 2, 4, 0.5)
    torch.testing.assert_close(weights, torch.tensor([1.75, 0.75, 0.5], dtype=torch.float64))


def test_dpace_weights_fall_along_a_block():
    weights = dpace_weights(torch.rand(9), CELLS, BLOCKS, SIZE, 0.5)
    for block in np.unique(BLOCK):
        own = weights[torch.from_numpy(block == BLOCK)]
        assert bool((own[1:] < own[:-1]).all()) and float(own[-1]) > 0


def test_first_wrong_by_hand():
    right = torch.tensor([True, False, False, False, True, True, False, True, False])
    assert first_wrong(right, CELLS, BLOCKS, SIZE).tolist() == [0, 1, 0, 1, 0, 0, 1, 0, 0]


@given(st.lists(st.integers(1, 6), max_size=12), st.integers(1, 20))
def test_runs_never_part_a_block(counts, most):
    block = np.repeat(np.arange(len(counts)), counts)
    runs = whole_blocks(block, most)
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(block)))
    for run in runs:
        inside = set(block[run].tolist())
        assert all(set(np.flatnonzero(block == b)) <= set(range(run.start, run.stop)) for b in inside)
        assert run.stop - run.start <= most or len(inside) == 1


# The kernels ----------------------------------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def kernels():
    """The kernels: compiled on a GPU, interpreted on a CPU. The switch counts when triton is imported first."""
    if DEVICE == "cpu":
        assert os.environ.get("TRITON_INTERPRET") == "1", "conftest.py sets it before anything imports triton"
    from paceline.consumer import kernels

    return kernels


@pytest.fixture(params=[97, 4096, 5001])
def chunk(request):
    """Logits [8, V] of draft and target in float32, with a tie for the maximum in one row and a label in each block."""
    generator = torch.Generator().manual_seed(request.param)
    size = request.param
    z, t = (torch.randn(8, size, generator=generator) * 3 for _ in range(2))
    z[2, 5] = z[2, size - 3] = z[2].max() + 1
    labels = torch.randint(0, size, (8,), generator=generator)
    labels[2], labels[3], labels[4] = 5, size - 1, int(z[4].argmax())
    return z.to(DEVICE), t.to(DEVICE), labels.to(DEVICE)


EIGHT = SLOPE if DEVICE == "cuda" else torch.float32  # the interpreter rounds to eight bits wrongly


def in_eight_bits(values, scale, wanted):
    """Two bits of mantissa are off by at most an eighth; what is below the format's smallest number by half of it."""
    found, smallest = values.float() * scale[:, None], torch.finfo(SLOPE).smallest_normal / 4
    assert bool(((found - wanted).abs() <= wanted.abs() / 8 * 1.001 + scale[:, None] * smallest).all())
    assert float((found - wanted).norm() / wanted.norm()) < 0.1


@needs_triton
def test_kernel_of_cross_entropy(kernels, chunk):
    z, _, labels = chunk
    weights = torch.linspace(0.2, 1.7, 8, device=DEVICE)
    expected = F.cross_entropy(z, labels, reduction="none")
    slopes = weights[:, None] * (z.softmax(-1) - F.one_hot(labels, z.shape[1]))
    kept = z.clone()
    ce, right = kernels.cross_entropy(kept, labels, None)
    assert torch.equal(kept, z)
    torch.testing.assert_close(ce, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(right, z.argmax(-1) == labels) and bool(right[2]) and bool(right[4])
    again, _ = kernels.cross_entropy(kept, labels, weights)
    assert torch.equal(again, ce)
    torch.testing.assert_close(kept, slopes, rtol=1e-5, atol=1e-7)
    eight, kept = torch.empty_like(z, dtype=EIGHT), z.clone()
    assert torch.equal(kernels.cross_entropy(kept, labels, weights, eight)[0], ce) and torch.equal(kept, z)
    in_eight_bits(eight.to(SLOPE), weights / SLOPE_MAX, slopes)


@needs_triton
@pytest.mark.parametrize("name", OBJECTIVES)
def test_kernels_of_any_objective(kernels, chunk, name):
    z, t, labels = chunk
    objective = OBJECTIVES[name]
    own = t if objective.needs_target else None
    stats, plain = kernels.slot_stats(z, labels, own), slot_stats(z, labels, own)
    for field, one, two in zip(stats._fields, stats, plain, strict=True):
        if two is None:
            assert one is None
        else:
            torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-5, msg=lambda m, field=field: f"{field}: {m}")
    cells = torch.tensor([1, 2, 3, 5, 6, 9, 13, 14], device=DEVICE)
    scores = score(objective, plain, torch.linspace(0.2, 1.7, 8, device=DEVICE), cells, 4, 4)
    expected = slot_slopes(z, labels, own, plain, scores.factors).values
    logits = z.clone()
    for form, kind in ((slot_slopes, SLOPE), (kernels.slot_slopes, EIGHT)):
        slopes, scale = form(logits, labels, own, plain, scores.factors, kind)
        assert slopes.dtype == kind and bool((slopes.float().abs() <= SLOPE_MAX).all()) and torch.equal(z, logits)
        in_eight_bits(slopes.to(SLOPE), scale, expected)
    found, scale = kernels.slot_slopes(logits, labels, own, stats, scores.factors)
    assert found.data_ptr() == logits.data_ptr() and scale is None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@needs_triton
def test_kernels_take_half_precision_logits(kernels, chunk):
    """Softmaxes stay float32: against the plain form on the same rounded logits."""
    z, t, labels = (part.bfloat16() if part.is_floating_point() else part for part in chunk)
    stats, plain = kernels.slot_stats(z, labels, t), slot_stats(z, labels, t)
    for one, two in zip(stats, plain, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-5)
    ce, _ = kernels.cross_entropy(z.clone(), labels, None)
    torch.testing.assert_close(ce, plain.ce, rtol=2e-5, atol=2e-5)
    scores = score(OBJECTIVES["mix"], plain, torch.ones(8, device=DEVICE), torch.arange(1, 9, device=DEVICE), 1, 9)
    expected = slot_slopes(z, labels, t, plain, scores.factors).values
    found = kernels.slot_slopes(z.clone(), labels, t, stats, scores.factors).values
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=1e-6)


@needs_triton
def test_kernels_see_a_logit_that_is_no_number(kernels, chunk):
    z, t, labels = chunk
    z = z.clone()
    z[1, 7] = float("nan")
    ce, _ = kernels.cross_entropy(z.clone(), labels, torch.ones(8, device=DEVICE))
    assert bool(ce[1].isnan()) and bool(ce[[0, 2, 3]].isfinite().all())
    assert bool(kernels.slot_stats(z, labels, t).ce[1].isnan())


@needs_triton
def test_kernels_refuse_logits_of_other_strides(kernels, chunk):
    z, t, labels = chunk
    with pytest.raises(ValueError, match="stride"):
        kernels.slot_stats(z.T.contiguous().T, labels, None)
    with pytest.raises(ValueError, match="same shape"):
        kernels.slot_stats(z, labels, t[:, :-1])


# In the learner -------------------------------------------------------------------------------------------------------

HEAD = make_head(3)
ROWS = make_rows(20, 30, 9, 25, 41, planes=3)
IDS = [11, 4, 7, 30, 2]
EVERYTHING = {
    "ce": 0.5,
    "kl": 0.4,
    "lk_hybrid": 0.3,
    "confidence": 0.2,
    "first_error": 0.3,
    "weighting": "dpace",
}


def make_learner(micro_tokens: int = 64, **objective: Any):
    run = make_run(
        target={"path": "nowhere", "last_hidden": True},
        trainer={"micro_tokens": micro_tokens},
        objective=objective,
    )
    # This seed's drafter has some tokens right, without which `confidence` would have nothing to say.
    return DFlashLearner(run, make_drafter(CONFIG, seed=2), HEAD, device="cpu", dtype=torch.float32)


def train(learner, *groups, done=0.0):
    for group in groups:
        rows = ROWS.pick(*group)
        meta = replace(rows.meta([IDS[row] for row in group]), last_hidden="before_norm")
        learner.train_record(meta, rows.memory(), 1, done)
    return learner.weights.gradients.clone(), learner.sums()


def test_every_term_reaches_the_learners_gradient():
    """Each setting of the run file moves the gradient, and the plain objective is what no setting gives."""
    base, _ = train(make_learner(), (0, 1, 2, 3, 4))
    seen = [base]
    settings = [
        {"kl": 0.5},
        {"ce": 0.0, "tv": 1.0},
        {"ce": 0.0, "lk": 1.0},
        {"ce": 0.0, "lk_hybrid": 1.0},
        {"weighting": "dpace"},
        {"weighting": "dpace", "dpace_alpha": 0.2},
        {"confidence": 0.4},
        {"first_error": 0.3},
        {"noise": 0.05},
    ]
    for setting in settings:
        gradient, _ = train(make_learner(**setting), (0, 1, 2, 3, 4))
        assert all((gradient - other).abs().max() > 1e-4 for other in seen), setting
        seen.append(gradient)


def test_splits_change_neither_gradient_nor_sums():
    """Weights that depend on the slots of a block, the target's states and noise included."""
    settings: dict[str, Any] = {**EVERYTHING, "noise": 0.1}
    whole, sums = train(make_learner(1000, **settings), (0, 1, 2, 3, 4))
    for groups in [((0, 1), (2, 3, 4)), ((4,), (3,), (2,), (1,), (0,))]:
        gradient, other = train(make_learner(32, **settings), *groups)
        torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-5 * whole.abs().max().item())
        np.testing.assert_allclose(other, sums, rtol=1e-5)


def test_soft_labels_come_from_the_row_before_the_label():
    """A target whose last hidden states say the label's own token with certainty: kl falls to the cross-entropy.

    With states moved by one row it does not (the usual silent mistake), nor without the final norm."""

    def loss(shift, norm=True):
        rows = make_rows(20, 30, 9, 25, 41, planes=3)
        following = np.r_[rows.tokens[1:], 0]
        eye = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1)))[0]
        head = make_head(3)
        head.head_weight = torch.cat([eye, -eye])[: head.head_weight.shape[0]] * 40
        wanted = head.head_weight[torch.from_numpy(following).long()]
        rows.states[2] = torch.roll(wanted, shift, 0) if norm else wanted * 1e-3
        run = make_run(
            target={"path": "nowhere", "last_hidden": True},
            trainer={"micro_tokens": 1000},
            objective={"ce": 0.0, "kl": 1.0},
        )
        learner = DFlashLearner(run, make_drafter(CONFIG), head, device="cpu", dtype=torch.float32)
        learner.train_record(replace(rows.meta(IDS), last_hidden="before_norm"), rows.memory(), 1, 0.0)
        plain = DFlashLearner(
            make_run(trainer={"micro_tokens": 1000}), make_drafter(CONFIG), head, device="cpu", dtype=torch.float32
        )
        plain.train_record(rows.meta(IDS), rows.memory(), 1, 0.0)
        return learner.sums()[0], plain.sums()[0]

    kl, ce = loss(0)
    assert kl == pytest.approx(ce, rel=1e-3)
    assert loss(0, norm=False)[0] == pytest.approx(ce, rel=1e-3)  # the norm takes the scale away
    moved, ce = loss(1)
    assert moved != pytest.approx(ce, rel=0.02)


def test_an_evaluation_scores_with_the_same_objective():
    learner = make_learner(**EVERYTHING)
    rows = ROWS.pick(0, 1, 2, 3, 4)
    learner.eval_record(replace(rows.meta(IDS), last_hidden="before_norm"), rows.memory())
    sums = learner.sums()
    assert sums[0] > 0 and not learner.weights.gradients.any()


def test_noise_falls_to_nothing_and_repeats():
    settings: dict[str, Any] = {"noise": 0.2}
    quiet, _ = train(make_learner(), (0, 1, 2, 3, 4))
    first, again, later, last = (
        train(make_learner(**settings), (0, 1, 2, 3, 4), done=done)[0] for done in (0.0, 0.0, 0.5, 1.0)
    )
    assert torch.equal(first, again)
    assert torch.equal(last, quiet)
    assert 0 < (later - quiet).norm() < (first - quiet).norm()


# Settings -------------------------------------------------------------------------------------------------------------


def test_settings_become_the_objective():
    settings = ObjectiveSettings.model_validate({**EVERYTHING, "dpace_alpha": 0.3})
    assert Objective.of(settings) == OBJECTIVES["all"]
    assert Objective.of(ObjectiveSettings()).plain
    assert not any(value for name, value in asdict(Objective.of(ObjectiveSettings())).items() if name != "ce" and value)
    assert PLAIN.stats is slot_stats


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"objective": {"kl": 1.0, "tv": 0.5}}, "objective.kl and objective.tv needs target.last_hidden = true"),
        ({"objective": {"ce": 0.0}}, "positive weight"),
        ({"objective": {"kll": 1.0}}, "kll"),
        ({"objective": {"ce": -1.0}}, "greater than or equal to 0"),
        ({"drafter": {"sliding_layers": [0]}}, "sliding_window"),
        ({"drafter": {"layers": 2, "sliding_window": 8, "sliding_layers": [2]}}, "below layers"),
    ],
)
def test_settings_that_cannot_be(sections, said):
    with pytest.raises((ConfigError, ValueError), match=said):
        make_run(**sections)


def test_sliding_layers_of_a_run_file():
    def slides(**drafter) -> tuple[bool, ...]:
        run: RunFile = make_run(drafter={"layers": 3, **drafter})
        return run.drafter.slides

    assert slides() == (False, False, False)
    assert slides(sliding_window=16) == (True, True, True)
    assert slides(sliding_window=16, sliding_layers=[0, 1]) == (True, True, False)
