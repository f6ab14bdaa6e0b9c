"""The chunked head against plain autograd, and what is counted beside it, by hand."""

import weakref

import numpy as np
import pytest
import torch
from paceline.consumer import losses, objective
from paceline.consumer.losses import (
    SCALARS,
    Scored,
    Summary,
    accepted,
    accepted_lazily,
    block_sums,
    even_chunk,
    head_cross_entropy,
    head_hits,
    sums_size,
)
from torch.nn import functional as F


@pytest.fixture
def slots():
    """Hidden states, head, labels and weights of 37 slots; some labels are the argmax."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(37, 16, generator=generator), torch.randn(101, 16, generator=generator)
    labels = torch.randint(0, 101, (37,), generator=generator)
    labels[::3] = (hidden @ head.T).argmax(-1)[::3]
    return hidden.requires_grad_(), head, labels, torch.rand(37, generator=generator)


def plain(hidden, head, labels, weights):
    logits = hidden @ head.T
    return (F.cross_entropy(logits, labels, reduction="none") * weights).sum(), logits


@pytest.mark.parametrize("chunk_bytes", [1, 5 * 4 * 101, 2**26])
def test_chunked_equals_plain_autograd(slots, chunk_bytes):
    hidden, head, labels, weights = slots
    loss, logits = plain(hidden, head, labels, weights)
    (expected,) = torch.autograd.grad(3 * loss, hidden)
    scored = head_cross_entropy(hidden, head, labels, weights, chunk_bytes=chunk_bytes)
    (gradient,) = torch.autograd.grad(3 * scored.loss, hidden)
    torch.testing.assert_close(scored.loss, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
    torch.testing.assert_close(scored.ce, F.cross_entropy(logits, labels, reduction="none").detach())
    assert torch.equal(scored.hits, logits.argmax(-1) == labels)
    assert torch.equal(head_hits(hidden, head, labels, chunk_bytes=chunk_bytes), scored.hits)
    assert 13 <= int(scored.hits.sum()) < 37


@pytest.mark.parametrize("through", ["plain", "objective"])
def test_a_chunk_of_logits_is_gone_before_the_next_is_made(slots, monkeypatch, through):
    """On a GPU a chunk is the widest thing beside the activations."""
    hidden, head, labels, weights = slots
    module = {"plain": losses, "objective": objective}[through]
    made, beside = [], []

    def noted(*arguments):
        beside.append(sum(one() is not None for one in made))
        logits = head_logits(*arguments)
        made.append(weakref.ref(logits))
        return logits

    head_logits = module.head_logits
    monkeypatch.setattr(module, "head_logits", noted)
    if through == "plain":
        scored = head_cross_entropy(hidden, head, labels, weights, chunk_bytes=10 * 4 * 101)
    else:
        block = np.repeat(np.arange(37), 1)
        cells = torch.arange(37) * 4 + 1
        own = objective.Slots(labels, weights, cells, 37, 4, objective.whole_blocks(block, 10))
        scored = objective.score_through_head(hidden, head, own, objective.Objective(confidence=0.1), None)
    assert beside == [0, 0, 0, 0]
    assert scored.loss.isfinite()


def test_gradcheck():
    torch.manual_seed(0)
    hidden, head, weights = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 4), (7, 4), (5,)))
    labels = torch.tensor([0, 6, 3, 3, 1])
    assert torch.autograd.gradcheck(
        lambda h: head_cross_entropy(h, head, labels, weights, chunk_bytes=2 * 4 * 7).loss, hidden.requires_grad_()
    )


def test_bfloat16_keeps_the_gradient_of_a_sure_slot():
    """p = 1 - 1e-3 rounds to 1 in bfloat16: the gradient would be 0 if the label were subtracted after rounding."""
    hidden = torch.tensor([[6.9]], dtype=torch.bfloat16, requires_grad=True)
    head = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    head_cross_entropy(hidden, head, torch.tensor([0]), torch.ones(1)).loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(-1e-3, rel=0.05)


def test_no_slots(slots):
    hidden, head, labels, weights = (t[:0] if t.shape[0] == 37 else t for t in slots)
    scored = head_cross_entropy(hidden, head, labels, weights)
    scored.loss.backward()
    assert scored.loss.item() == 0
    assert len(scored.hits) == len(head_hits(hidden, head, labels)) == 0


def test_no_gradient_is_computed_without_one_asked(slots):
    hidden, head, labels, weights = slots
    with torch.no_grad():
        assert not head_cross_entropy(hidden, head, labels, weights).loss.requires_grad


# Three blocks of 4: all right; right, wrong, right; and one cut after its only label, wrong.
CELLS = torch.tensor([1, 2, 3, 5, 6, 7, 9])
HITS = torch.tensor([1, 1, 1, 1, 0, 1, 0], dtype=torch.bool)


def test_accepted_by_hand():
    assert accepted(HITS, CELLS, 3, 4).tolist() == [3, 1, 0]


def test_sums_and_averages_by_hand():
    losses = torch.arange(7.0)
    weights = torch.tensor([1, 0.5, 0.25, 1, 0.5, 0.25, 1])
    scored = Scored((losses * weights).sum(), losses, HITS, weights)
    sums = block_sums(scored, CELLS, blocks=3, block_size=4, context_tokens=50)
    assert len(sums) == sums_size(4)
    summary = Summary.of((2 * sums).numpy())  # two equal ranks
    assert summary.loss == pytest.approx(13.25 / 4.5)
    assert summary.accuracy_per_slot == pytest.approx((2 / 3, 1 / 2, 1))
    assert summary.accuracy == pytest.approx(5 / 7)
    assert summary.tau == pytest.approx(1 + 4 / 3)
    assert summary.tau_chain is None
    assert (summary.weight, summary.scored_slots, summary.blocks, summary.context_tokens) == (9, 14, 6, 100)


def test_averages_over_nothing():
    summary = Summary.of(np.zeros(sums_size(4)))
    assert (summary.loss, summary.accuracy, summary.tau, summary.tau_chain) == (0, 0, 0, None)
    assert summary.accuracy_per_slot == (0, 0, 0)


def test_tau_chain_is_a_mean_over_chained_blocks():
    sums = np.zeros(sums_size(4))
    sums[SCALARS.index("chain_accepted")], sums[SCALARS.index("chain_blocks")] = 3, 4
    assert Summary.of(sums).tau_chain == 1.75


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused form runs on CUDA")
def test_fused_equals_plain_on_cuda(slots):
    hidden, head, labels, weights = slots
    scored = head_cross_entropy(hidden, head, labels, weights)
    (expected,) = torch.autograd.grad(scored.loss, hidden)
    moved = [t.detach().cuda() for t in slots]
    fused = head_cross_entropy(moved[0].requires_grad_(), *moved[1:], chunk_bytes=5 * 4 * 101)
    (gradient,) = torch.autograd.grad(fused.loss, moved[0])
    torch.testing.assert_close(fused.ce.cpu(), scored.ce, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_lazy_acceptance_is_the_whole_ones(right: float):
    """Scored slots of 50 blocks of 6, cut at various lengths; labels agree with the head's choice at the given rate."""
    generator = torch.Generator().manual_seed(3)
    blocks, size, vocab = 50, 6, 23
    lengths = torch.randint(0, size, (blocks,), generator=generator).tolist()
    cells = torch.tensor([block * size + slot for block in range(blocks) for slot in range(1, 1 + lengths[block])])
    hidden = torch.randn(len(cells), 8, generator=generator)
    head = torch.randn(vocab, 8, generator=generator)
    best = (hidden @ head.T).argmax(-1)
    labels = torch.where(torch.rand(len(cells), generator=generator) < right, best, (best + 1) % vocab)
    whole = accepted(head_hits(hidden, head, labels), cells, blocks, size)
    assert torch.equal(accepted_lazily(hidden, head, labels, cells, blocks, size), whole)
    assert bool(whole.any()) == (right > 0)
    assert right < 1 or whole.sum() == sum(lengths)


@pytest.mark.parametrize("processors", [1, 8, 132])
@pytest.mark.parametrize(("rows", "most"), [(7660, 2208), (2209, 2208), (60000, 6826), (3, 1)])
def test_even_chunks_are_no_larger_than_allowed(rows, most, processors):
    size = even_chunk(rows, most, 4096, 151936, processors)
    assert 1 <= size <= most
    assert rows % size == 0 or size - rows % size < -(-rows // size)  # equal, but for what does not divide


def test_a_chunk_fills_its_last_wave():
    """Back through the head 1,532 rows of 4,096 are 192 tiles, two waves on 132 processors, as are the 240 tiles of
    1,915 rows; 958 rows are 128 tiles, one wave."""
    assert even_chunk(7660, 2208, 4096, 151936, 132) == 1915
    assert even_chunk(7660, 1766, 4096, 151936, 132) == 958
