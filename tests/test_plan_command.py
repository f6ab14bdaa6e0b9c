"""`paceline plan`: bytes against what was measured and what is really made, and splits against the arithmetic."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from drafting import CONFIG, HIDDEN, INFO, make_drafter, make_head, make_rows, make_run
from paceline.common import paths, planner
from paceline.common.bench import model_folder
from paceline.common.cli import main
from paceline.common.densest import Densest
from paceline.common.errors import UsageError
from paceline.common.fingerprint import Fingerprint
from paceline.common.footprint import (
    RANK_CONTEXT,
    Shape,
    activation_bytes,
    active_weights,
    checkpoint_bytes,
    largest_micro_batch,
    layer_weights,
    rank_parts,
    ring_bytes,
    target_weights,
    worker_parts,
)
from paceline.common.forecast import Rates, advice, forecast, live_rates, placed_rate, splits
from paceline.common.planner import Gpu, make_plan, plan_json, plan_lines, target_flops
from paceline.common.record import max_rows, slot_bytes
from paceline.common.ring import Ring
from paceline.common.rows import RowsWriter
from paceline.common.target_info import target_info
from paceline.common.telemetry import bottleneck, write_status
from paceline.consumer.learner import DFlashLearner
from safetensors.torch import save_file

GIB = 2**30
QWEN3_8B = Shape(4096, 12288, 5, 4096, 1024, 5, 151936, 16, tied=False)
SMOLLM2 = Shape(576, 1536, 5, 576, 192, 5, 49152, 16, tied=True)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setattr(planner, "list_gpus", list)


# Which split ---------------------------------------------------------------------------------------------------------


def test_a_target_of_a_quarter_of_the_drafters_speed_takes_three_of_four():
    best, *others = splits(Rates(0.08, 0.33), 4)
    assert (str(best), best.bound) == ("3-1", "targets")
    assert best.rate == pytest.approx(0.24)
    assert [str(split) for split in others] == ["2-2", "1-3"]


def test_eight_gpus_with_drafters_as_the_bottleneck():
    ranked = [str(split) for split in splits(Rates(4.5, 6.5), 8)]
    assert [name for name in ranked if name in ("6-2", "5-3", "4-4")] == ["5-3", "4-4", "6-2"]
    assert ranked[0] == "5-3"
    found = forecast(Rates(4.5, 6.5), 6, 2)
    assert (found.rate, found.bound) == (13.0, "drafters")
    assert found.idle_targets == pytest.approx(1 - 13 / 27) and found.idle_drafters == 0


def test_the_rate_of_a_placement_has_the_splits_as_special_cases():
    rates = Rates(4.5, 6.5)
    for workers, ranks in ((6, 2), (5, 3), (1, 1)):
        apart = placed_rate(rates, [f"w{n}" for n in range(workers)], [f"r{n}" for n in range(ranks)])
        assert apart == pytest.approx(forecast(rates, workers, ranks).rate)
    assert placed_rate(rates, ["a"], ["a"]) == pytest.approx(splits(rates, 1)[0].rate)


def test_a_worker_on_a_ranks_gpu_has_the_time_that_is_left_there():
    rates = Rates(10.0, 30.0)
    rate = placed_rate(rates, ["a", "b"], ["b"])
    assert rate == pytest.approx(15.0), "a makes 10, b trains 15 in half of its time and makes 5 in the other"
    assert placed_rate(rates, ["a", "a"], ["b"]) == 10.0, "two on one GPU are as fast as one"


def test_a_worker_on_a_ranks_gpu_takes_its_part_of_full_rings_from_the_ranks_time():
    """Both rings are full: half of the records are made on the rank's GPU. Of two H200 with Qwen3-8B's shape 45.4 and
    23.1 Ktok/s were measured alone, 17.8 together, and 22.8 with one worker."""
    assert placed_rate(Rates(100.0, 50.0), ["a", "b"], ["b"]) == pytest.approx(40.0), "1/50 + 0.5/100 of b's time"
    assert placed_rate(Rates(45.4, 23.1), ["a", "b"], ["b"]) == pytest.approx(17.8, rel=0.05)
    assert placed_rate(Rates(100.0, 50.0), ["a", "b"], ["b", "c"]) == pytest.approx(200 / 3), "c waits for b's steps"
    assert placed_rate(Rates(1e9, 50.0), ["a", "b"], ["b"]) == pytest.approx(50.0), "what costs nothing takes nothing"


@pytest.mark.parametrize("workers", [["a"], ["a", "b"], ["a", "a", "b"]])
def test_the_rate_of_a_placement_never_jumps_or_falls_with_a_faster_side(workers):
    for ranks in (["b"], ["b", "c"]):
        for name in ("target", "drafter"):
            speeds = [20.0 * 1.002**n for n in range(1500)]
            found = [placed_rate(Rates(20.0, 20.0)._replace(**{name: speed}), workers, ranks) for speed in speeds]
            assert all(before * 0.9999 <= after <= before * 1.0021 for before, after in pairwise(found))


def test_one_gpu_is_shared():
    (only,) = splits(Rates(30.0, 15.0), 1)
    assert only.shared and only.rate == pytest.approx(10.0) and only.bound == "both"


@pytest.mark.parametrize("gpus", range(2, 9))
def test_no_split_is_faster_than_the_first(gpus):
    rates = Rates(1.7, 2.9)
    found = splits(rates, gpus)
    assert len(found) == gpus - 1
    assert found[0].rate == max(forecast(rates, n, gpus - n).rate for n in range(1, gpus))


def status(**values):
    base = {"target_bps": 0.16, "drafter_bps": 0.16, "worker_wait": 0.0, "wait_data": 0.76, "workers": 2, "ranks": 2}
    return {**base, **values}


def test_live_rates_take_the_waiting_out():
    """The lines of a real run: 2-2, targets at 0.08 batch/s each, drafters busy 24 % of their time."""
    rates = live_rates(status())
    assert rates is not None
    assert rates.target == pytest.approx(0.08) and rates.drafter == pytest.approx(0.16 / 0.24 / 2)
    assert advice(rates, 2, 2) == "move one GPU from drafters to targets: +50 %"
    said = bottleneck(status())
    assert "targets are the bottleneck" in said and "move one GPU from drafters to targets: +50 %" in said


def test_live_advice_the_other_way():
    said = bottleneck(status(target_bps=13.0, drafter_bps=13.0, worker_wait=0.52, wait_data=0.0, workers=6))
    assert "drafters are the bottleneck" in said
    assert "move one GPU from targets to drafters: +50 %" in said


@pytest.mark.parametrize(
    "values", [{"workers": 1, "ranks": 1}, {"wait_data": 0.99}, {"target_bps": 0.0}, {"worker_wait": None}]
)
def test_no_move_where_none_can_be_told(values):
    said = bottleneck(status(**values))
    assert "move" not in said and "add workers" in said


def test_a_move_that_gains_nothing_is_not_proposed():
    assert advice(Rates(1.0, 1.0), 2, 2) == ""
    assert advice(Rates(1.0, 1.0), 1, 1) == ""


def test_without_a_worker_nobody_is_the_bottleneck():
    assert bottleneck(status(workers=0)).startswith("no worker is up")


# Bytes ---------------------------------------------------------------------------------------------------------------


QWEN3_06B = Shape(1024, 3072, 5, 2048, 1024, 5, 151936, 16, tied=True)


@pytest.mark.parametrize(
    ("shape", "micro", "anchors", "peak"),
    [
        (QWEN3_8B, 3072, 512, 26.1),
        (QWEN3_8B, 6144, 1024, 31.3),
        (QWEN3_8B, 8192, 1607, 37.46),
        (QWEN3_06B, 8192, 1607, 7.79),
    ],
)
def test_memory_measured_on_an_h200(monkeypatch, shape, micro, anchors, peak):
    """GiB in tensors at the peak, which docs/performance.md gives, of micro-batches with so many anchors; for the last
    one less the second chunk of logits that was there then."""
    run = make_run(
        data={"rows": "rows", "max_length": 3072},
        stream={"token_budget": 16384},
        trainer={"micro_tokens": micro, "dtype": "bfloat16"},
        drafter={"layers": 5, "block_size": 16},
    )
    densest = Densest(run)
    monkeypatch.setattr(densest, "anchors", lambda tokens: anchors)
    found = rank_parts(run, shape, micro, densest=densest).total - RANK_CONTEXT
    assert found == pytest.approx(peak * GIB, rel=0.025)


def test_memory_follows_from_the_rows_if_they_are_known(tmp_path):
    """A third of each row is supervised: a third of the anchors."""
    with RowsWriter(tmp_path / "rows") as writer:
        for _ in range(40):
            writer.add(np.full(300, 7, np.int32), np.arange(300) >= 200)
        writer.finish({"tokenizer": "t", "vocabulary": "", "target": "x"})
    plans = []
    for rows in ("nowhere", str(tmp_path / "rows")):
        run = make_run(
            data={"rows": rows, "max_length": 600},
            stream={"token_budget": 4096},
            trainer={"micro_tokens": 3000},
            objective={"anchors_per_token": 0.24},
            drafter={"layers": 2, "block_size": 4},
        )
        plans.append(make_plan(run, INFO, [0, 1], live=False))
    throughout, known = plans
    assert (throughout.slots, known.slots) == (5 * 144 * 4, 10 * 24 * 4)
    assert known.rank.total < throughout.rank.total
    said = "micro-batches of up to 3,000 tokens and {} draft positions"
    assert said.format("960") in plan_lines(known)
    assert said.format("2,880") + ", if rows are supervised throughout" in plan_lines(throughout)
    assert [plan_json(plan)["of_rows"] for plan in plans] == [False, True]


@pytest.mark.parametrize(
    ("slots", "gpus", "records"),
    [(4, 1, 2), (1, 1, 1), (4, 2, 1)],
    ids=["two in the making", "one slot", "a shared target"],
)
def test_a_worker_has_room_for_the_states_of_the_records_in_the_making(slots, gpus, records):
    run = make_run(
        data={"rows": "rows", "max_length": 64},
        stream={"token_budget": 256, "slots": slots},
        target={"path": "nowhere", "dtype": "bfloat16"},
        workers={"gpus_per_worker": gpus},
    )
    found = worker_parts(run, INFO, 1, 3).parts["states on their way to the ring"]
    assert found == records * 3 * 256 * INFO.hidden_size * 2
    assert worker_parts(run, INFO, 1, 3, "cpu").parts["states on their way to the ring"] == 0


def test_the_weights_are_those_of_the_drafter():
    drafter = make_drafter(CONFIG)
    shape = Shape.of(make_run(drafter={"intermediate_size": CONFIG.intermediate_size}), INFO, 2)
    matrices = sum(p.numel() for p in drafter.parameters() if p.ndim == 2)
    assert shape.weights == matrices


def test_activations_are_what_autograd_keeps():
    """Tensors saved for backward by a real forward of the draft layers, each storage once and without the dense mask.

    The count is of the compiled form, which GPUs run; the plain one fuses nothing and keeps up to three quarters more.
    """
    run = make_run(
        trainer={"micro_tokens": 400},
        data={"rows": "rows", "max_length": 400},
        stream={"token_budget": 400},
        drafter={"layers": 2, "block_size": 4},
        objective={"anchors_per_token": 0.9},
    )
    learner = DFlashLearner(run, make_drafter(CONFIG), make_head(3), device="cpu", dtype=torch.float32)
    rows = make_rows(400, prompt=0)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and tensor.shape[-1] < packed.slots:  # the dense mask is wider
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in learner.drafter.parameters()}
    micro = learner._micro_batches(rows.meta([1]), 0)[0]
    packed = learner._pack(micro, micro.anchors)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        context = learner.drafter.project_context(rows.features, learner._context_positions(micro, 400))
        hidden = learner._hidden(learner._ready(packed, 400), context)
    assert hidden.requires_grad
    found = sum(size for at, size in kept.items() if at not in own)
    shape = Shape(HIDDEN, 64, 2, 64, 32, 2, 61, 4, tied=False)
    assert 1 <= found / (4 * activation_bytes(shape, packed.slots, 400)) <= 1.75


def test_the_largest_micro_batch_is_the_largest():
    run = make_run(
        data={"rows": "rows", "max_length": 1024},
        stream={"token_budget": 16384},
        trainer={"micro_tokens": 8192, "dtype": "bfloat16"},
        drafter={"layers": 5, "block_size": 16},
        objective={"anchors_per_token": 0.25},
    )
    memory = 40 * GIB
    found = largest_micro_batch(run, QWEN3_8B, memory)
    assert 1024 <= found < 16384
    assert rank_parts(run, QWEN3_8B, found).total <= memory < rank_parts(run, QWEN3_8B, found + 256).total
    assert largest_micro_batch(run, QWEN3_8B, 20 * GIB) == 0
    assert largest_micro_batch(run, SMOLLM2, memory) == 16384


def test_soft_labels_take_a_second_chunk():
    plain = make_run(drafter={"layers": 5, "block_size": 16})
    soft = make_run(
        drafter={"layers": 5, "block_size": 16}, target={"path": "x", "last_hidden": True}, objective={"kl": 1.0}
    )
    chunks = [rank_parts(run, SMOLLM2, 64).parts["logits chunk"] for run in (plain, soft)]
    assert chunks[1] == 2 * chunks[0] > 0


def test_ring_bytes_are_those_of_the_file(tmp_path):
    run = make_run(stream={"token_budget": 256, "slots": 3})
    size = slot_bytes(256, max_rows(256), 2, HIDDEN, "bfloat16")
    path = tmp_path / "t/w0.ring"
    with_ring = Ring.open(path, worker="w0", fingerprint=Fingerprint({"seed": 0}), slots=3, slot_bytes=size)
    assert ring_bytes(run, 2, HIDDEN) == path.stat().st_size
    with_ring.close()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_checkpoint_bytes_are_those_of_the_files(tmp_path, name):
    """But for norms and headers, which are a few kilobytes."""
    run = make_run(optimizer={"name": name}, drafter={"intermediate_size": CONFIG.intermediate_size})
    learner = DFlashLearner(run, make_drafter(CONFIG), make_head(3), device="cpu", dtype=torch.float32)
    learner.snapshot()(tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    counted = checkpoint_bytes(run, Shape.of(run, INFO, 2))
    norms = 4 * 3 * sum(p.numel() for p in learner.drafter.parameters() if p.ndim == 1)
    assert counted <= written <= counted + norms + 8192


def test_checkpoints_that_the_disk_cannot_hold_are_said(tmp_path, monkeypatch):
    """Three newest, the best, and one that is being written; those that are there need no more room."""
    run = make_run(checkpoint={"keep_last": 3}).model_copy(update={"output": str(tmp_path / "out")})
    each = checkpoint_bytes(run, Shape.of(run, INFO, 2))
    monkeypatch.setattr(planner, "free_bytes", lambda folder: 5 * each if "out" in str(folder) else 2**40)
    monkeypatch.setattr(planner, "_nearest", lambda folder: folder)
    made = make_plan(run, INFO, [0, 1], live=False)
    assert made.fits and any("checkpoints: 5 x" in line and "fits (" in line for line in plan_lines(made))
    assert plan_json(made)["checkpoints"]["bytes"] == 5 * each
    monkeypatch.setattr(planner, "free_bytes", lambda folder: 5 * each - 1 if "out" in str(folder) else 2**40)
    made = make_plan(run, INFO, [0, 1], live=False)
    assert not made.fits
    said = "DOES NOT FIT .*: lower checkpoint.keep_last, or set output to a larger disk"
    assert any(re.search(said, line) for line in plan_lines(made) if line.startswith("checkpoints:"))
    (tmp_path / "out/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "out/checkpoints/step-00000001/model.safetensors").write_bytes(bytes(8192))
    assert make_plan(run, INFO, [0, 1], live=False).fits


def test_the_targets_weights_are_read_from_the_headers(tmp_path):
    tensors = {
        "model.embed_tokens.weight": torch.zeros(10, 4),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(8, 4),
        "model.layers.2.mlp.up_proj.weight": torch.zeros(8, 4),
        "lm_head.weight": torch.zeros(10, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    info = replace(INFO, path=str(tmp_path))
    assert target_weights(info, 1) == 40 + 32
    assert target_weights(info, 2) == 40 + 64
    dense = target_weights(replace(INFO, path=str(tmp_path / "none")), 0)
    assert dense == 61 * 48 + 48 * (2 * 64 + 2 * 32 + 3 * 64)


def test_a_token_passes_its_own_experts_of_a_mixture(tmp_path):
    """Of 8 experts 2, whether they are a tensor each or stacked, or MXFP4's two weights a byte with a scale for 32."""
    mixture = {"experts": 8, "experts_per_token": 2, "expert_size": 16}
    common = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}
    experts = {
        "each": {f"model.layers.0.mlp.experts.{n}.up_proj.weight": torch.zeros(16, 4) for n in range(8)},
        "stacked": {"model.layers.0.mlp.experts.up_proj": torch.zeros(8, 16, 4)},
        "mxfp4": {
            "model.layers.0.mlp.experts.up_proj_blocks": torch.zeros(8, 16, 2, dtype=torch.uint8),
            "model.layers.0.mlp.experts.up_proj_scales": torch.zeros(8, 16, 1, dtype=torch.uint8),
        },
    }
    for name, tensors in experts.items():
        (tmp_path / name).mkdir()
        save_file(common | tensors, tmp_path / name / "model.safetensors")
        info = replace(INFO, path=str(tmp_path / name), **mixture)
        assert (target_weights(info, 0), layer_weights(info, 0)) == (16 + 8 * 64, 16)
        assert active_weights(info, 0) == 16 + 2 * 64
        assert target_flops(info, 0, 100) == 2 * (16 + 2 * 64) + 4 * 64 * 50
        hybrid = replace(info, layer_types=("linear_attention", "full_attention"))
        assert target_flops(hybrid, 0, 100) == 2 * (16 + 2 * 64), "no attention over the row"
    shape = replace(INFO, path=str(tmp_path / "none"), **mixture)
    layer = 48 * (2 * 64 + 2 * 32)
    assert target_weights(shape, 0) == 61 * 48 + layer + 8 * 3 * 48 * 16
    assert active_weights(shape, 0) == layer + 2 * 3 * 48 * 16


@pytest.mark.parametrize(
    ("kind", "mixture"), [("qwen3_moe", (4, 2, 64)), ("gpt_oss", (4, 2, 128)), ("llama", (0, 0, 0))]
)
def test_a_mixture_is_known_from_its_config(make_tiny_target, kind, mixture):
    info = target_info(str(make_tiny_target(kind)))
    assert (info.experts, info.experts_per_token, info.expert_size) == mixture
    assert info.intermediate_size == 128, "a dense layer's, or the experts' if they are as wide as one"


def test_a_mixture_of_narrow_experts_has_the_width_that_a_token_passes(tmp_path):
    """gpt-oss: four experts of 2,880 at a hidden size of 2,880."""
    info = target_info(str(model_folder(tmp_path, "gpt-oss-20b")))
    assert (info.expert_size, info.intermediate_size) == (2880, 11520)
    assert target_info(str(model_folder(tmp_path, "qwen3-30b-a3b"))).intermediate_size == 8 * 768 == 6144


# The command ---------------------------------------------------------------------------------------------------------


def planned(run=None, **options):
    run = run or make_run(workers={"count": 2}, trainer={"ranks": 2})
    return make_plan(run, INFO, [1, 3], **options)


def test_the_table_marks_the_runs_own_split():
    text = "\n".join(plan_lines(planned(gpus=4, memory=40.0, target_rate="0.08b", drafter_rate="0.33b")))
    assert "best split of 4 GPUs: 3-1, +50 % over 2-2" in text
    (own,) = [line for line in text.splitlines() if "<- this run" in line]
    assert own.split()[:2] == ["2-2", "0.16"]
    assert "batches/s (as given)" in text and "4 x GPU, 40 GiB each" in text


def test_what_does_not_fit_is_said_and_fails():
    made = planned(gpus=4, memory=0.5)
    assert not made.fits
    assert "DOES NOT FIT" in "\n".join(plan_lines(made))
    assert planned(gpus=4, memory=40.0).fits


def test_rings_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(planner, "free_bytes", lambda _: 1000)
    made = planned()
    assert not made.fits
    assert any("DOES NOT FIT (1000 B free): lower stream.slots" in line for line in plan_lines(made))


def test_both_sides_on_one_gpu_share_its_memory():
    made = planned(make_run(), gpus=1, memory=40.0)
    assert made.shared and made.needed == made.rank.total + made.worker.total


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({"target_rate": "4.5"}, "give both"),
        ({"target_rate": "4.5", "drafter_rate": "0.3b"}, "must both be"),
        ({"target_rate": "fast", "drafter_rate": "3"}, "rates are numbers"),
        ({"target_rate": "0", "drafter_rate": "3"}, "above 0"),
    ],
)
def test_rates_that_cannot_be(rates, said):
    with pytest.raises(UsageError, match=said):
        planned(**rates)


def test_a_trainers_own_rates_are_used(tmp_path):
    run = make_run(workers={"count": 2}, trainer={"ranks": 2})
    assert planned(run).speed is None
    path = paths.status_path(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_status(path, status(step=40))
    speed = planned(run, gpus=4).speed
    assert speed is not None and speed.rates.target == pytest.approx(0.08)
    assert speed.source == "measured by this run's trainer up to step 40"


LARGE = replace(
    INFO,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_layers=36,
    vocab_size=151936,
)


def test_an_estimate_says_so_and_is_not_made_for_small_targets(monkeypatch):
    monkeypatch.setattr(planner, "list_gpus", lambda: [Gpu("NVIDIA H200", 140 * GIB)] * 4)
    assert "too small for an estimate" in planned().why_no_speed
    run = make_run(
        drafter={"layers": 5, "block_size": 16},
        data={"rows": "rows", "max_length": 3072},
        stream={"token_budget": 16384},
        trainer={"dtype": "bfloat16"},
        objective={"anchors_per_token": 0.25},
    )
    made = make_plan(run, LARGE, [1, 9, 17, 25, 33], supervised=0.667)
    assert made.speed is not None and made.speed.source == "estimated for NVIDIA H200 from the shapes"
    # docs/performance.md: full rows of 3,072 tokens; of the drafter positions/s, 512 × 16 a row
    measured = {
        (True, False): (41.6, 68.4),
        (False, False): (32.0, 68.4),
        (True, True): (63.8, 91.9),
        (False, True): (37.2, 91.9),
    }
    for (compiled, fp8), (target, positions) in measured.items():
        changed = {
            "target": run.target.model_copy(update={"compile": compiled, "fp8": fp8}),
            "trainer": run.trainer.model_copy(update={"fp8": fp8}),
        }
        made = make_plan(run.model_copy(update=changed), LARGE, [1, 9, 17, 25, 33], supervised=0.667)
        assert made.speed is not None
        assert made.speed.rates.target == pytest.approx(target, rel=0.05)
        assert made.speed.rates.drafter == pytest.approx(positions * 3072 / (512 * 16), rel=0.05)


def test_muons_update_is_counted_where_steps_are_small(monkeypatch):
    """By hand: one layer, [6, 4] and twice [6, 2] for q, o and k, v, [6, 8] thrice, and fc of one plane, [6, 6]."""
    shape = Shape(hidden=6, inner=8, layers=1, queries=4, keys=2, planes=1, vocabulary=9, block=4, tied=False)
    each = {(4, 6): 2, (2, 6): 2, (6, 8): 3, (6, 6): 1}
    by_hand = sum(n * 5 * (2 * 2 * r * r * c + 2 * r**3) for (r, c), n in each.items())
    assert planner.update_flops(make_run(optimizer={"name": "muon"}), shape) == by_hand
    monkeypatch.setattr(planner, "list_gpus", lambda: [Gpu("NVIDIA H200", 140 * GIB)])
    rates = {}
    for name, batches, ranks in (("adamw", 1, 1), ("muon", 1, 1), ("muon", 16, 1), ("muon", 2, 2)):
        run = make_run(
            drafter={"layers": 5, "block_size": 16},
            data={"rows": "rows", "max_length": 3072},
            stream={"token_budget": 16384},
            trainer={"dtype": "bfloat16", "batches_per_step": batches, "ranks": ranks},
            objective={"anchors_per_token": 0.25},
            optimizer={"name": name},
        )
        made = make_plan(run, LARGE, [1, 9, 17, 25, 33], supervised=0.8)
        assert made.speed is not None
        rates[name, batches] = made.speed.rates.drafter / rates.get(("adamw", 1), 1)
        assert ("muon's updates between ranks" in made.rank.parts) == (ranks > 1)
    assert 0.7 < rates["muon", 1] < 0.85 < 0.98 < rates["muon", 16] < 1
    assert 1 / rates["muon", 2] - 1 == pytest.approx((1 / rates["muon", 1] - 1) / 2), "two ranks share the work"


def test_the_supervised_share_is_the_rows_own(tmp_path):
    from paceline.common.rows import RowsWriter

    run = make_run(data={"rows": str(tmp_path / "rows"), "max_length": 64})
    assert planner.supervised_share(run) is None
    with RowsWriter(tmp_path / "rows") as writer:
        writer.add(np.arange(10, dtype=np.int32), np.array([0] * 6 + [1] * 4, np.uint8))
        writer.finish({})
    assert planner.supervised_share(run) == pytest.approx(0.4)


def test_the_command_on_a_run_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "target").mkdir()
    config = Path(__file__).parents[1] / "common/bench_configs/qwen3-8b.json"
    (tmp_path / "target/config.json").write_text(config.read_text())
    (tmp_path / "target/paceline.json").write_text(json.dumps({"identity": "random", "weights": "random"}))
    (tmp_path / "run.toml").write_text(
        f'name = "q"\noutput = "out"\n[target]\npath = "{tmp_path / "target"}"\n[data]\nrows = "rows"\n'
        f'[stream]\ntoken_budget = 4096\nring_dir = "{tmp_path / "rings"}"\n[drafter]\nmask_token_id = 151669\n'
    )
    command = ["plan", str(tmp_path / "run.toml"), "--gpus", "4", "--gpu-memory", "141", "--json"]
    assert main([*command, "--target-rate", "4.5", "--drafter-rate", "6.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["splits"][0]["split"] == "2-2"
    assert found["rank"]["bytes"] == sum(found["rank"]["parts"].values())
    assert plan_json(planned())["speed"] is None
    assert main([*command[:-2], "1", "--json"]) == 1  # GiB
    assert not json.loads(capsys.readouterr().out)["fits"]
    # From a machine without GPUs, of one whose name is known.
    assert main([*command, "--gpu-name", "nvidia h200"]) == 0
    speed = json.loads(capsys.readouterr().out)["speed"]
    assert speed["source"] == "estimated for H200 from the shapes" and speed["target"] > 30 and speed["drafter"] > 15
    assert main([*command, "--gpu-name", "H2000"]) == 2
    assert "H2000: nothing is known of its speed; known are B200, GH200, H200" in capsys.readouterr().err
    monkeypatch.setattr(planner, "list_gpus", list)
    assert main([*command[:2], "--gpu-name", "H200"]) == 2
    assert "say --gpu-memory GIB as well" in capsys.readouterr().err
