"""The padded step in plain PyTorch is the same step as the packed one: same loss, same gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from drafting import CONFIG, SLIDING, make_drafter, make_head, make_rows, make_run
from paceline.common.errors import ConfigError
from paceline.consumer.learner import DFlashLearner
from paceline.consumer.padded import (
    LENGTH,
    EagerPaddedLearner,
    PaddedLearner,
    attend,
    dense_mask,
    flex_mask,
    pad_blocks,
)

LENGTHS = 9, 40, 4, 17, 30


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def rows_of(lengths=LENGTHS):
    """Some rows have two answers, so that blocks end before their row does."""
    rows = make_rows(*lengths, prompt=1)
    rows.mask[rows.cu_seqlens[1] + 11 : rows.cu_seqlens[1] + 19] = 0
    return rows


def learner_of(kind, *, config=CONFIG, device="cpu", dtype=torch.float32, **sections):
    run = make_run(**{"trainer": {"micro_tokens": 2 * LENGTH}} | sections)
    return kind(run, make_drafter(config), make_head(), device=device, dtype=dtype)


def trained(learner, rows, epoch=0):
    learner.train_record(rows.meta([3, 1, 4, 6, 5]), rows.memory(), epoch)
    return learner.sums(), learner.weights.gradients.clone()


@pytest.mark.parametrize("ahead", [False, True])
def test_loss_and_gradients_are_those_of_packed_rows(ahead):
    rows, packed, padded = rows_of(), learner_of(DFlashLearner), learner_of(PaddedLearner)
    for epoch in (0, 1):
        if ahead:
            padded.prepare(rows.meta([3, 1, 4, 6, 5]), rows.memory(), epoch)
        (sums, gradient), (others, other) = trained(packed, rows, epoch), trained(padded, rows, epoch)
        assert sums[1] > 10, "the weight of a good number of slots"
        np.testing.assert_allclose(others[:2], sums[:2], rtol=1e-5)
        torch.testing.assert_close(other, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
        steps = [learner.step(learner.sums(), 1e-2) for learner in (packed, padded)]
        assert steps[0].finite and steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=1e-4)
        torch.testing.assert_close(padded.weights.masters, packed.weights.masters, rtol=1e-3, atol=1e-3)


def test_every_slot_is_computed_and_those_that_count_are_the_packed_ones():
    """By hand: a row of 6 with anchors 1 and 4, one of 3 with anchor 1, blocks of 4."""
    rows = [np.arange(10, 16, dtype=np.int32), np.arange(20, 23, dtype=np.int32)]
    masks = [np.array([0, 1, 1, 0, 1, 1], np.uint8), np.array([0, 1, 1], np.uint8)]
    anchors = [np.array([1, 4]), np.array([1])]
    tables = pad_blocks(rows, masks, anchors, blocks=2, block_size=4, mask_token_id=60, gamma=2.0)
    assert tables.ids.tolist() == [[11, 60, 60, 60, 14, 60, 60, 60], [21, 60, 60, 60, 20, 60, 60, 60]]
    assert tables.positions.tolist() == [[1, 2, 3, 4, 4, 5, 6, 7], [1, 2, 3, 4, 0, 1, 2, 3]]
    assert tables.before.tolist() == [[1, 1, 1, 1, 4, 4, 4, 4], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert tables.own.tolist() == [[0, 0, 0, 0, 4, 4, 4, 4]] * 2
    assert tables.until.tolist() == [[4, 4, 4, 4, 6, 6, 7, 8], [2, 2, 3, 4, 5, 6, 7, 8]]
    assert tables.weights.tolist() == [[0, 1, 0, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert [int(tables.labels[at]) for at in zip(*np.nonzero(tables.weights), strict=True)] == [12, 15, 22]
    assert tables.place.tolist() == [0, 1, 2, 3, 4, 5, LENGTH, LENGTH + 1, LENGTH + 2]


def tables_of(lengths=LENGTHS):
    learner = learner_of(PaddedLearner, trainer={"micro_tokens": 5 * LENGTH})
    ((_, host),) = learner._tables(rows_of(lengths).meta([3, 1, 4, 6, 5]), 0)
    return learner._sent(host)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_the_dense_mask_says():
    tables = tables_of()
    rows, slots = tables.ids.shape
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, heads, n, 16, generator=draw)
        for heads, n in ((4, slots), (2, LENGTH + slots), (2, LENGTH + slots))
    )
    dense = dense_mask(tables)
    assert dense.shape == (rows, 1, slots, LENGTH + slots) and dense.any(-1).all()
    with torch.no_grad():
        found, wanted = attend(q, k, v, flex_mask(tables)), attend(q, k, v, dense)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "sections"),
    [
        (SLIDING, {}),
        (CONFIG, {"objective": {"ce": 0.5, "confidence": 0.1}}),
        (CONFIG, {"objective": {"noise": 0.1}}),
    ],
)
def test_other_steps_are_refused(config, sections):
    with pytest.raises(ConfigError, match=r"padded-plain: only for full attention and objective\.ce alone"):
        learner_of(PaddedLearner, config=config, **sections)


def test_all_layers_and_steps_share_what_is_compiled():
    """Each graph more, of a layer at that, is half a minute of a benchmark; the first layer has one of its own, as
    nothing asks for the gradient of its input."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    config = replace(CONFIG, num_hidden_layers=4, layer_types=("full_attention",) * 4)
    plain, compiled = (learner_of(PaddedLearner, config=config) for _ in range(2))
    torch.compiler.reset()
    compiled.compile_step(backend)
    rows = make_rows(9, 40, 30, 17, prompt=1)
    meta = rows.meta([3, 1, 4, 6])
    for epoch in (0, 1):
        for learner in (compiled, plain):
            learner.train_record(meta, rows.memory(), epoch)
    assert len(graphs) == 4, "features, first layer, other layers, loss"
    torch.testing.assert_close(compiled.weights.gradients, plain.weights.gradients)


def test_nothing_but_the_attention_is_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    plain, eager = learner_of(PaddedLearner), learner_of(EagerPaddedLearner)
    torch.compiler.reset()
    eager.compile_step(backend)
    rows = make_rows(9, 40, 30, 17, prompt=1)
    for learner in (eager, plain):
        learner.train_record(rows.meta([3, 1, 4, 6]), rows.memory(), 0)
    (graph,) = graphs
    called = [node.name for node in graph.graph.nodes if node.op == "call_function"]
    assert called == ["scaled_dot_product_attention"]
    torch.testing.assert_close(eager.weights.gradients, plain.weights.gradients)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [PaddedLearner, EagerPaddedLearner])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_step_on_a_gpu(dtype, kind):
    """flex_attention and torch.compile give the packed step's loss and gradients on the CPU."""
    rows = rows_of()
    sums, gradient = trained(learner_of(DFlashLearner), rows)
    others, other = trained(learner_of(kind, device="cuda", dtype=dtype), rows)
    limit = 0.02 if dtype == torch.float32 else 0.1  # TF32 and bfloat16 products
    np.testing.assert_allclose(others[:2], sums[:2], rtol=limit)
    assert float((other.cpu() - gradient).norm() / gradient.norm()) < limit


@pytest.mark.parametrize(("lengths", "rows"), [((9,) * 6, [3, 3]), ((9,) * 5, [3, 2]), ((9,) * 4, [4])])
def test_micro_batches_are_of_one_size_where_rows_divide(lengths, rows):
    meta = make_rows(*lengths, prompt=1).meta(list(range(len(lengths))))
    micros = learner_of(PaddedLearner, trainer={"micro_tokens": 4 * LENGTH})._tables(meta, 0)
    assert [len(tables.ids) for _, tables in micros] == rows
