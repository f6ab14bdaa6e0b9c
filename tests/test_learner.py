"""The learner on records: one gradient however the work is split, slots released, chains, checkpoints."""

import json
import math
import shutil
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drafting import CONFIG, MASK_ID, SLIDING, make_drafter, make_head, make_rows, make_run, plain_block
from exporting import checkpoint
from paceline.common.densest import Densest
from paceline.common.errors import ConfigError, PacelineError
from paceline.common.rows import Rows, RowsWriter
from paceline.common.target_info import target_info
from paceline.consumer.anchors import chain_starts, draw_anchors
from paceline.consumer.blocks import default_gamma
from paceline.consumer.drafter import ContextCache
from paceline.consumer.learner import AHEAD, CHAIN_BLOCKS, DFlashLearner, build_learner, drafter_dtype, micro_batches
from paceline.consumer.linears import DraftMLP
from paceline.consumer.losses import Summary
from paceline.consumer.rehearsal import check_compiled, rehearse
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.nn import functional as F

HEAD = make_head(3)
ROWS = make_rows(20, 30, 9, 25, 41)
IDS = [11, 4, 7, 30, 2]


def make_learner(config=CONFIG, *, dtype=torch.float32, device="cpu", head=HEAD, **sections):
    return DFlashLearner(make_run(**sections), make_drafter(config), head, device=device, dtype=dtype)


def train(learner, *groups, epoch=1):
    """Trains records of the given rows; returns the gradients, divided by the weight."""
    for group in groups:
        learner.train_record(ROWS.pick(*group).meta([IDS[row] for row in group]), ROWS.pick(*group).memory(), epoch)
    return learner


def mean_gradient(learners):
    weight = sum(learner.sums()[1] for learner in learners)
    return torch.stack([learner.weights.gradients for learner in learners]).sum(0) / weight


@pytest.fixture(scope="module")
def whole():
    """All rows as one record in one micro-batch."""
    learner = train(make_learner(trainer={"micro_tokens": 1000}), (0, 1, 2, 3, 4))
    return mean_gradient([learner]), learner.sums()


def test_a_rehearsal_leaves_no_trace():
    """Weights, gradients, sums, the generators' state and the next step are those of a learner that had none."""
    fresh, rehearsed = make_learner(), make_learner()
    state = torch.get_rng_state()
    rehearse(rehearsed)
    assert torch.equal(torch.get_rng_state(), state)
    assert not rehearsed.sums().any() and not rehearsed.weights.gradients.any()
    for learner in (fresh, rehearsed):
        train(learner, (0, 1, 2))
        assert learner.step(learner.sums(), 1e-2).finite
    assert torch.equal(fresh.weights.masters, rehearsed.weights.masters)


def test_compiled_gradients_are_compared_with_plain_ones_at_the_start(monkeypatch):
    """In fp8 too, which is off by some per cent; nothing is left of it."""
    monkeypatch.setattr("paceline.consumer.learner.check_fp8", lambda _: None)
    seen: list[tuple[bool, bool]] = []
    for fp8 in (False, True):
        learner = make_learner(replace(CONFIG, vocab_size=64), head=make_head(vocab=64), trainer={"fp8": fp8})
        train_record = learner.train_record

        def noted(*given, learner=learner, train_record=train_record):
            inside = any(getattr(module, "fp8", False) for module in learner.drafter.modules())
            seen.append((inside, learner._eight is not None))
            train_record(*given)

        monkeypatch.setattr(learner, "train_record", noted)
        learner.drafter.compile_parts("eager")
        rehearse(learner)
        assert seen == [(fp8, fp8), (False, False), (fp8, fp8)], "the largest micro-batch, plain, compiled"
        seen.clear()
        assert not learner.sums().any() and not learner.weights.gradients.any()


def test_a_comparison_takes_nothing_that_was_prepared_for_a_record():
    learner = make_learner()
    meta = replace(ROWS.meta(IDS), batch=0)
    learner.prepare(meta, ROWS.memory(), 0)
    learner.drafter.compile_parts("eager")
    check_compiled(learner)
    assert list(learner._ahead) == [(0, 0)]


def test_a_comparison_that_fails_leaves_the_learner_as_it_was(monkeypatch):
    monkeypatch.setattr("paceline.consumer.learner.check_fp8", lambda _: None)
    learner = make_learner(replace(CONFIG, vocab_size=64), head=make_head(vocab=64), trainer={"fp8": True})
    learner.drafter.compile_parts("eager")
    monkeypatch.setattr(learner, "_score", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check_compiled(learner)
    assert learner._eight is not None and any(getattr(part, "fp8", False) for part in learner.drafter.modules())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda mixed: mixed.detach() + 0 * mixed, "cosine 0"),
        (lambda mixed: 3 * mixed - 2 * mixed.detach(), "times as large"),
    ],
    ids=["cut", "scaled"],
)
def test_a_compiler_that_loses_gradients_is_found(monkeypatch, wrong, words):
    """As torch 2.11 did with products in fp8: the loss is right and all but the last norm never learns."""

    def backend(graph, inputs):
        def run(*given):
            results = graph(*given)
            return tuple(wrong(one) if one.requires_grad and one.ndim == 2 else one for one in results)

        return run

    learner = make_learner()
    learner.drafter.compile_parts(backend)
    with pytest.raises(ConfigError, match=rf"^the drafter compiled by torch .* has wrong gradients: .*{words}"):
        rehearse(learner)
    assert not learner.weights.gradients.any()


def test_a_rehearsal_is_of_the_largest_micro_batch(monkeypatch):
    """As many tokens as may come, every one supervised, in rows that have most anchors; or one row if it is longer."""
    seen = []

    def note(_self, meta, states, _epoch):
        seen.append((np.diff(meta.cu_seqlens).tolist(), int(meta.mask.sum()), len(states)))

    monkeypatch.setattr(DFlashLearner, "train_record", note)
    rehearse(make_learner(trainer={"micro_tokens": 150}, data={"max_length": 64}))
    rehearse(make_learner(trainer={"micro_tokens": 32}, data={"max_length": 64}))
    rehearse(make_learner(trainer={"micro_tokens": 100}, data={"max_length": 64}, objective={"max_anchors": 10}))
    of_64, one, dense = [64, 64, 22], [64], [20, 20, 20, 20, 20]
    assert seen == [(of_64, 150, 2 * 150 * 48 * 2), (one, 64, 2 * 64 * 48 * 2), (dense, 100, 2 * 100 * 48 * 2)]


@pytest.mark.parametrize("supervised", [20, 33, 60])
def test_a_rehearsal_has_the_anchors_that_the_rows_can_have(tmp_path, monkeypatch, supervised):
    with RowsWriter(tmp_path / "rows") as writer:
        for _ in range(50):
            writer.add(np.full(60, 7, np.int32), np.arange(60) >= 60 - supervised)
        writer.finish({"tokenizer": "t", "vocabulary": "", "target": "x"})
    learner = make_learner(trainer={"micro_tokens": 300}, data={"max_length": 64}, stream={"token_budget": 512})
    densest, seen = Densest(learner.run, Rows.open(tmp_path / "rows")), []
    monkeypatch.setattr(
        learner, "train_record", lambda meta, _states, epoch: seen.append(learner._anchors(meta, epoch))
    )
    rehearse(learner, densest)
    found = sum(map(len, seen[0]))
    assert densest.anchors(300) == 5 * round(0.5 * supervised)
    assert densest.anchors(300) <= found <= densest.anchors(300) + len(seen[0])


def test_a_micro_batch_that_does_not_fit_says_what_to_change(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of ..."
        )

    learner = make_learner()
    monkeypatch.setattr(learner, "_score", full)
    with pytest.raises(ConfigError, match=r"64 tokens .* CUDA out of memory\. Lower trainer\.micro_tokens \(64\)"):
        rehearse(learner)


def test_gradient_equals_the_plain_drafters():
    """Σ w·CE / Σ w by the formulas, block by block in float64, and its autograd gradient."""
    learner = train(make_learner(), (0, 2))
    gradient, sums = mean_gradient([learner]), learner.sums()
    drafter = make_drafter().double()
    head, embedding = HEAD.head_weight.double(), HEAD.embed_weight.double()
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for row, row_id in ((ROWS.rows[0], IDS[0]), (ROWS.rows[2], IDS[2])):
        tokens, mask = torch.from_numpy(ROWS.tokens[row]).long(), ROWS.mask[row]
        for a in draw_anchors(mask, seed=0, epoch=1, row_id=row_id, per_token=0.5, most=512):
            ids = torch.full((min(4, len(tokens) - a),), MASK_ID)
            ids[0] = tokens[a]
            hidden = plain_block(drafter, ROWS.features[row].double(), embedding[ids], int(a))
            for k in range(1, len(ids)):
                w = math.exp(-(k - 1) / default_gamma(4))
                total = total + w * F.cross_entropy(head @ hidden[k], tokens[a + k])
                weight += w
    (total / weight).backward()
    assert sums[:2] == pytest.approx([total.item(), weight], rel=1e-5)
    parts = learner.weights.views(gradient)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parts[name].double(), parameter.grad, rtol=1e-4, atol=1e-6)


SPLITS = {
    "micro-batches": ({"micro_tokens": 50}, [[(0, 1, 2, 3, 4)]]),
    "a row at a time": ({"micro_tokens": 1}, [[(0, 1, 2, 3, 4)]]),
    "records": ({}, [[(4,), (2, 0), (1, 3)]]),
    "two ranks": ({}, [[(4, 1)], [(2,), (0, 3)]]),
    "a rank without records": ({}, [[(0, 1, 2, 3, 4)], []]),
}


@pytest.mark.parametrize("split", SPLITS)
def test_gradient_does_not_depend_on_the_split(whole, split):
    trainer, ranks = SPLITS[split]
    learners = [train(make_learner(trainer=trainer), *groups) for groups in ranks]
    assert (mean_gradient(learners) - whole[0]).norm() < 1e-6 * whole[0].norm()
    np.testing.assert_allclose(sum(learner.sums() for learner in learners), whole[1], rtol=1e-5)


def test_ranks_take_the_same_step(whole):
    class TwoRanks:
        """Adds up the gradients of the two learners, as a group does."""

        rank, world = 0, 2

        def __init__(self, learners):
            self.total = torch.stack([learner.weights.gradients for learner in learners]).sum(0)

        def all_reduce(self, values):
            time.sleep(0.01)
            values.copy_(self.total)

    alone = train(make_learner(), (0, 1, 2, 3, 4))
    expected = alone.step(alone.sums(), 1e-2)
    ranks = [train(make_learner(), (4, 1)), train(make_learner(), (2, 0, 3))]
    total, group = ranks[0].sums() + ranks[1].sums(), TwoRanks(ranks)
    for rank in ranks:
        rank.reduce(group)
        result = rank.step(total, 1e-2)
        assert result.finite and rank.reduce_seconds() >= 0.01
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert result.summary.loss == pytest.approx(expected.summary.loss, rel=1e-6)
        assert not rank.sums().any()
    assert torch.equal(ranks[0].weights.masters, ranks[1].weights.masters)
    torch.testing.assert_close(ranks[0].weights.masters, alone.weights.masters, rtol=1e-4, atol=1e-5)


def test_epochs_draw_other_anchors():
    one, two = (train(make_learner(), (1, 4), epoch=epoch) for epoch in (0, 1))
    assert one.sums()[1] > 0
    assert not torch.equal(one.weights.gradients, two.weights.gradients)


def test_the_slot_is_free_after_a_record():
    learner, rows = make_learner(), ROWS.pick(0, 1)
    memory = rows.memory()
    learner.train_record(rows.meta([1, 2]), memory, 0)
    gradients = learner.weights.gradients.clone()
    memory[:] = bytes(len(memory))
    memory.release()
    assert torch.equal(learner.weights.gradients, gradients)


def test_a_recorded_last_hidden_state_is_not_a_feature(whole):
    learner = make_learner()
    three = make_rows(20, 30, 9, 25, 41, planes=3)
    three.states[:2] = ROWS.states
    learner.train_record(replace(three.meta(IDS), last_hidden="before_norm"), three.memory(), 1)
    torch.testing.assert_close(mean_gradient([learner]), whole[0], rtol=1e-5, atol=1e-6)


def test_records_without_anchors_add_nothing():
    learner, rows = make_learner(), make_rows(9, 9, prompt=9)
    learner.train_record(rows.meta([1, 2]), rows.memory(), 0)
    learner.eval_record(rows.meta([1, 2]), rows.memory())
    assert not learner.sums().any()
    before = learner.weights.masters.clone()
    result = learner.step(learner.sums(), 0.1)
    assert (result.finite, result.grad_norm, result.summary.loss) == (True, 0.0, 0.0)
    assert torch.equal(learner.weights.masters, before)


@pytest.mark.parametrize(("lengths", "prompt"), [((3, 4), 1), ((9, 8), 6), ((40,), 0)])
def test_answers_shorter_than_a_block_and_rows_without_a_prompt(lengths, prompt):
    learner, rows = make_learner(objective={"anchors_per_token": 1.0}), make_rows(*lengths, prompt=prompt)
    learner.train_record(rows.meta(list(range(len(lengths)))), rows.memory(), 0)
    sums = learner.sums()
    assert Summary.of(sums).blocks == sum(n - prompt - 1 for n in lengths)
    assert learner.step(sums, 1e-3).finite


def test_states_that_are_no_numbers_skip_the_step():
    learner = make_learner()
    bad = ROWS.pick(0)
    bad.states[0, 1, 2] = math.nan
    before = learner.weights.masters.clone()
    train(learner, (1,))
    learner.train_record(bad.meta([5]), bad.memory(), 0)
    assert not learner.step(learner.sums(), 0.1).finite
    assert torch.equal(learner.weights.masters, before)
    train(learner, (1,))
    assert learner.step(learner.sums(), 0.1).finite


def test_discard_drops_an_unfinished_step(whole):
    learner = train(make_learner(), (3,), (1,))
    learner.discard()
    train(learner, (0, 1, 2, 3, 4))
    torch.testing.assert_close(mean_gradient([learner]), whole[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("per_token", "most"), [(0.5, 100), (0.01, 64), (1.0, 149)])
def test_an_evaluations_chains_take_no_more_blocks_at_a_time_than_training(monkeypatch, per_token, most):
    """Two rows of 100 supervised tokens have 198 blocks in chains; so has an evaluation no memory of its own."""
    learner, seen = make_learner(objective={"anchors_per_token": per_token}, trainer={"micro_tokens": 200}), []
    monkeypatch.setitem(CHAIN_BLOCKS, "cpu", 149)
    pack = learner._pack

    def noted(rows, anchors):
        seen.append(sum(map(len, anchors)))
        return pack(rows, anchors)

    monkeypatch.setattr(learner, "_pack", noted)
    rows = make_rows(100, 100, prompt=0)
    learner.eval_record(rows.meta([1, 2]), rows.memory())
    drawn, *chained = seen
    assert drawn == {0.5: 100, 0.01: 2, 1.0: 198}[per_token]
    assert max(chained) == most and sum(chained) == 198


@pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])
def test_chains_are_what_a_decoding_loop_accepts(config):
    """Half of the head's answers are made right, so that chains accept something; then a loop over `draft`."""
    learner = make_learner(config)
    for _ in range(15):
        train(learner, (0, 1))
        learner.step(learner.sums(), 1e-2)
    rows = ROWS.pick(0, 1, 2)
    learner.eval_record(rows.meta([11, 4, 7]), rows.memory())
    blocks = right = 0
    for row in rows.rows:
        tokens, mask = torch.from_numpy(rows.tokens[row]).long(), rows.mask[row]
        (a,), cache = chain_starts(mask).tolist(), ContextCache()
        while a + 1 < len(tokens):
            ids = torch.tensor([int(tokens[a]), MASK_ID, MASK_ID, MASK_ID])[: len(tokens) - a]
            features = rows.features[row][None, cache.length : a]
            with torch.no_grad():
                hidden = learner.drafter.draft(HEAD.embed_weight[ids][None], features, cache)
            hits = (hidden[0, 1:] @ HEAD.head_weight.T).argmax(-1) == tokens[a + 1 : a + 4]
            taken = int(hits.int().cumprod(0).sum())
            blocks, right, a = blocks + 1, right + taken, a + taken + 1
    summary = Summary.of(learner.sums())
    assert right > 5
    assert summary.tau_chain == pytest.approx(1 + right / blocks)
    assert summary.tau > 1


def test_evaluation_is_the_same_each_time_and_leaves_no_gradient():
    learner, seen = make_learner(), []
    for _ in range(2):
        learner.eval_record(ROWS.meta(IDS), ROWS.memory())
        seen.append(learner.sums())
        learner.discard()
    assert not learner.weights.gradients.any()
    np.testing.assert_array_equal(*seen)


def test_loss_falls_in_bfloat16():
    learner, losses = make_learner(dtype=torch.bfloat16), []
    for _ in range(12):
        train(learner, (0, 1, 2, 3, 4))
        losses.append(learner.step(learner.sums(), 5e-3).summary.loss)
    assert losses[-1] < 0.7 * losses[0]


def test_snapshot_and_restore_continue_exactly(tmp_path):
    learner = make_learner()
    for _ in range(2):
        train(learner, (0, 1))
        learner.step(learner.sums(), 1e-2)
    write = learner.snapshot()
    train(learner, (2, 3))
    learner.step(learner.sums(), 1e-2)
    write(tmp_path)  # after the next step: a snapshot does not change any more
    resumed = make_learner()
    train(resumed, (4,))
    resumed.restore(tmp_path)
    train(resumed, (2, 3))
    resumed.step(resumed.sums(), 1e-2)
    assert torch.equal(resumed.weights.masters, learner.weights.masters)
    assert torch.equal(resumed.weights.compute, learner.weights.compute)


def test_a_checkpoint_of_another_drafter_is_refused(tmp_path):
    make_learner().snapshot()(tmp_path)
    learner = make_learner(replace(CONFIG, intermediate_size=32))
    before = learner.weights.masters.clone()
    with pytest.raises(PacelineError, match="does not fit this drafter"):
        learner.restore(tmp_path)
    assert torch.equal(learner.weights.masters, before)
    with pytest.raises(PacelineError, match="unreadable"):
        learner.restore(tmp_path / "none")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama's folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    shape: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=61, num_hidden_layers=6, head_dim=16, pad_token_id=0, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("init_from", ["random", "target"])
def test_built_from_a_target_folder(llama, init_from):
    run = make_run(target={"path": str(llama)}, drafter={"init_from": init_from})
    one, two = (build_learner(run, target_info(str(llama)), [1, 3], device="cpu") for _ in range(2))
    assert torch.equal(one.weights.masters, two.weights.masters)
    q_proj = load_file(llama / "model.safetensors")["model.layers.4.self_attn.q_proj.weight"]
    assert torch.equal(one.drafter.state_dict()["layers.0.self_attn.q_proj.weight"], q_proj) == (init_from == "target")
    train(one, (0, 1))
    assert one.step(one.sums(), 1e-3).finite


def test_built_from_another_drafter_and_resumed_without_it(llama, tmp_path):
    start = make_drafter(seed=6)
    saved = checkpoint(tmp_path / "other", start)
    run = make_run(target={"path": str(llama)}, drafter={"init_from": str(saved)})
    info = target_info(str(llama))
    learner = build_learner(run, info, [1, 3], device="cpu")
    masters = learner.weights.views(learner.weights.masters)
    assert all(torch.equal(masters[name], parameter) for name, parameter in start.named_parameters())
    train(learner, (0, 1))
    assert learner.step(learner.sums(), 1e-3).finite
    own = checkpoint(tmp_path / "own", start)
    learner.snapshot()(own)
    shutil.rmtree(saved)
    resumed = build_learner(run, info, [1, 3], device="cpu", resumed=own)
    resumed.restore(own)
    assert torch.equal(resumed.weights.masters, learner.weights.masters)
    with pytest.raises(ConfigError, match="there is no folder"):
        build_learner(run, info, [1, 3], device="cpu")


@pytest.mark.parametrize(("token", "words"), [(0, "pad"), (2, "eos"), (9, "occurs in the data")])
def test_a_mask_token_in_use_is_refused(llama, token, words):
    run = make_run(target={"path": str(llama)}, drafter={"mask_token_id": token})
    with pytest.raises(ConfigError, match=words):
        build_learner(run, target_info(str(llama)), [1, 3], device="cpu", used_token=lambda token: token == 9)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_mask_token_that_is_one_of_several_end_tokens_is_refused(llama, tmp_path, file):
    """Llama 3 lists three, of which data use one or two: the third must not be learnt as "fill in this slot"."""
    folder = shutil.copytree(llama, tmp_path / "target")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | {"eos_token_id": [2, 11, 12]}))
    run = make_run(target={"path": str(folder)}, drafter={"mask_token_id": 11})
    with pytest.raises(ConfigError, match="mask_token_id = 11 is the target's eos token"):
        build_learner(run, target_info(str(folder)), [1, 3], device="cpu")


def test_micro_batches_are_runs_of_wanted_rows():
    lengths = np.array([10, 10, 10, 50, 5, 5])
    every = np.ones(6, bool)
    assert micro_batches(lengths, every, 20) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert micro_batches(lengths, every, 1000) == [(0, 6)]
    assert micro_batches(lengths, np.array([1, 0, 1, 0, 0, 1], bool), 1000) == [(0, 1), (2, 3), (5, 6)]
    assert micro_batches(lengths, ~every, 20) == []


def test_what_was_prepared_ahead_is_used_and_changes_nothing(whole, monkeypatch):
    learner = make_learner()
    meta = ROWS.meta(IDS)
    learner.prepare(meta, ROWS.memory(), 1)
    for other in range(6):
        learner.prepare(replace(meta, batch=meta.batch + 1 + other % 2), ROWS.memory(), 1)  # never come
    assert len(learner._ahead) == 3
    monkeypatch.setattr(learner, "_micro_batches", lambda *_: pytest.fail("drawn once more"))
    learner.train_record(meta, ROWS.memory(), 1)
    torch.testing.assert_close(mean_gradient([learner]), whole[0])


def test_records_that_never_come_are_forgotten():
    learner = make_learner()
    meta = ROWS.meta(IDS)
    for batch in range(3 * AHEAD):
        learner.prepare(replace(meta, batch=batch), ROWS.memory(), 1)
    assert list(learner._ahead) == [(batch, 1) for batch in range(2 * AHEAD, 3 * AHEAD)]


def test_joined_projections_change_nothing(whole):
    plain = make_learner(trainer={"micro_tokens": 1000})
    for module in plain.drafter.modules():
        if isinstance(module, DraftMLP):
            assert module.joint
            module.joint = ()
    train(plain, (0, 1, 2, 3, 4))
    torch.testing.assert_close(mean_gradient([plain]), whole[0])


def test_compiling_in_the_middle_of_a_run_is_told(caplog):
    learner = make_learner()
    for step in range(6):
        train(learner, (0, 1))
        counters["stats"]["unique_graphs"] += step in (0, 4)  # the first is the warm-up's
        learner.step(learner.sums(), 1e-3)
    learner.eval_record(ROWS.meta(IDS), ROWS.memory())
    assert [record.getMessage() for record in caplog.records] == [
        "the drafter was compiled anew at the 5th step of this process"
    ]


def test_float16_is_refused():
    with pytest.raises(ConfigError, match="bfloat16"):
        drafter_dtype("float16", torch.device("cpu"))


def pinned(states):
    """A record's states in page-locked memory, from which a copy is asynchronous."""
    held = torch.frombuffer(bytearray(states), dtype=torch.uint8).pin_memory().numpy()
    return held.data


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_records_are_trained_without_waiting_for_the_gpu_or_compiling_again():
    """Once some records have been trained, others of any size cost no synchronisation, no new graph and no kernel."""
    learner = make_learner(device="cuda", dtype=torch.bfloat16, trainer={"micro_tokens": 50})
    for group in ((0, 1, 2), (3, 4), (0,)):
        train(learner, group)
        learner.step(learner.sums(), 1e-3)
    compiled = learner.compiled()
    records = [
        (ROWS.pick(*g).meta([IDS[row] for row in g]), pinned(ROWS.pick(*g).memory())) for g in ((1, 4), (2,), (0, 3, 4))
    ]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ahead in (False, True):
            for meta, states in records:
                if ahead:
                    learner.prepare(meta, states, 2)
                learner.train_record(meta, states, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled > 0 and learner.compiled() == compiled
    assert np.isfinite(learner.sums()).all()


def test_a_record_that_never_came_is_not_read_once_its_ring_went():
    learner, meta, states = make_learner(), ROWS.meta(IDS), ROWS.memory()
    address = torch.frombuffer(states, dtype=torch.uint8).data_ptr()
    learner.prepare(meta, states, 1)
    learner.forget(address + len(states), len(states))  # another ring
    assert list(learner._reader._coming) == [(meta.batch, 1)]
    learner.forget(address, len(states))
    assert not learner._reader._coming
    train(learner, (0, 1, 2, 3, 4))  # what was packed is still good
    assert np.isfinite(learner.sums()).all()


def test_an_evaluation_takes_what_was_prepared_for_it(monkeypatch):
    learner, other = make_learner(), make_learner()
    other.eval_record(ROWS.meta(IDS), ROWS.memory())
    learner.prepare(ROWS.meta(IDS), ROWS.memory(), 0)  # to train on, which sees less
    learner.prepare(ROWS.meta(IDS), ROWS.memory(), None)
    monkeypatch.setattr(learner, "_micro_batches", lambda *_: pytest.fail("drawn once more"))
    learner.eval_record(ROWS.meta(IDS), ROWS.memory())
    assert np.array_equal(learner.sums(), other.sums())


@needs_gpu
@pytest.mark.parametrize("ahead", [False, True])
def test_cuda_gradient_equals_the_cpus(whole, ahead):
    learner = make_learner(device="cuda", trainer={"micro_tokens": 50})
    if ahead:
        learner.prepare(ROWS.pick(0, 1, 2, 3, 4).meta(IDS), ROWS.memory(), 1)
    train(learner, (0, 1, 2, 3, 4))
    torch.testing.assert_close(mean_gradient([learner]).cpu(), whole[0], rtol=5e-3, atol=5e-4)
    np.testing.assert_allclose(learner.sums()[:2], whole[1][:2], rtol=1e-3)
