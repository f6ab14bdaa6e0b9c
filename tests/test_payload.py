"""stream.payload = "fp8": states as eight bits and a scale, from the worker's copy to the rank's features and the disk.

The oracle is the format itself: every number of e4m3 by its definition, and the nearest of them, even ones at a tie.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafting import HIDDEN, make_drafter, make_head, make_rows, make_run
from paceline.common.eightbit import quantise
from paceline.common.footprint import ring_bytes
from paceline.common.record import (
    FP8,
    ITEM_BYTES,
    RecordMeta,
    max_rows,
    read_meta,
    record_bytes,
    scales_offset,
    slot_bytes,
    states_bytes,
    write_meta,
)
from paceline.common.runfile import RunFile
from paceline.common.target_info import target_info
from paceline.consumer.check import RecordRefused, check_states
from paceline.consumer.learner import DFlashLearner
from paceline.consumer.rehearsal import rehearse
from paceline.consumer.transfer import Reading, StateReader, view_scales, view_states
from paceline.producer.capture import TargetSource
from paceline.producer.recording import Recording, RecordingSource, StateKind
from paceline.producer.source import Filled

LAYER_IDS = [0, 2]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def e4m3() -> np.ndarray:
    """The 256 numbers of the format, by its definition; NaN where it has none."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    size[(bits & 127) == 127] = np.nan
    return np.where(bits >> 7 == 1, -size, size)


def nearest(values: np.ndarray) -> np.ndarray:
    """Bits of the number of e4m3 nearest to each value, float64; of two, the one with an even fraction."""
    table = e4m3()
    positive = np.arange(127)  # the last is NaN
    size = np.abs(values)
    above = np.searchsorted(table[positive], size).clip(1, 126)
    below = above - 1
    up, down = table[above] - size, size - table[below]
    chosen = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (chosen + np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def reference(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bits [..., H] and scales [...] of states [..., H] float32."""
    scales = np.maximum(np.abs(states).max(-1), np.float32(1e-12)) / np.float32(448)
    return nearest((states / scales[..., None]).astype(np.float64)), scales


def restored(bits: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return (e4m3()[bits] * scales[..., None]).astype(np.float32)


def packed(states: torch.Tensor) -> memoryview:
    """States [planes, T, H] as the bytes of a record."""
    bits, scales = reference(states.numpy())
    planes, tokens, hidden = states.shape
    out = bytearray(states_bytes(planes, tokens, hidden, FP8))
    out[: bits.size] = bits.tobytes()
    out[scales_offset(planes, tokens, hidden) :] = scales.astype(np.float32).tobytes()
    return memoryview(out)


def make_meta(lengths: tuple[int, ...] = (8, 20, 11), **changes) -> RecordMeta:
    tokens = sum(lengths)
    meta = RecordMeta(
        batch=5,
        row_ids=np.arange(len(lengths), dtype=np.int64),
        cu_seqlens=np.cumsum((0, *lengths), dtype=np.int32),
        tokens=np.arange(5, 5 + tokens, dtype=np.int32),  # 0 is a padding token: its embedding is zero
        mask=np.ones(tokens, np.uint8),
        layer_ids=(1, 4, 7),
        dtype=FP8,
        hidden_size=7,
        last_hidden="none",
        fingerprint=12345,
    )
    return replace(meta, **changes)


# The numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_is_the_nearest_number_of_the_format(dtype):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(50, 333, generator=generator) * torch.logspace(-10, 30, 50)[:, None]
    states[3] = 0
    states = states.to(dtype)
    before = states.clone()
    eight, scale = quantise(states)
    bits, scales = reference(states.float().numpy())
    assert torch.equal(states, before), "the target goes on computing with them"
    np.testing.assert_array_equal(scale[:, 0].numpy(), scales)
    np.testing.assert_array_equal(eight.view(torch.uint8).numpy(), bits)
    error = np.abs(restored(bits, scales) - states.float().numpy())
    assert (error <= np.maximum(np.abs(states.float().numpy()) / 16, scales[:, None] * 2**-10)).all()
    assert (restored(bits, scales)[3] == 0).all()


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_has_such_a_scale(fault):
    states = torch.ones(2, 8)
    states[1, 3] = fault
    _, scale = quantise(states)
    assert torch.isfinite(scale).tolist() == [[True], [False]]


# The record


def test_codes_of_dtypes_stay_as_they_were_written():
    assert list(ITEM_BYTES) == ["float32", "bfloat16", "float16", "float8_e4m3fn"]


@pytest.mark.parametrize("last_hidden", ["none", "before_norm"])
def test_a_record_has_room_for_its_scales(last_hidden):
    meta = make_meta(last_hidden=last_hidden)
    planes, tokens, hidden = meta.states_shape
    payload = bytearray(record_bytes(meta))
    start = write_meta(payload, meta)
    found, offset = read_meta(payload, len(payload))
    assert (found.dtype, offset) == (FP8, start)
    assert scales_offset(*meta.states_shape) % 8 == 0
    assert len(payload) - offset == -(-planes * tokens * hidden // 8) * 8 + 4 * planes * tokens
    assert slot_bytes(tokens, max_rows(tokens), planes, hidden, FP8) >= len(payload)


def test_rings_are_about_half_as_large():
    full, half = (make_run(stream={"token_budget": 4096, "payload": payload}) for payload in ("full", "fp8"))
    assert ring_bytes(half, 5, 4096) == pytest.approx(0.5 * ring_bytes(full, 5, 4096), rel=0.01)


def check(states: torch.Tensor, change=lambda bits, scales: None) -> None:
    meta = make_meta(hidden_size=64)
    data = packed(states)
    change(np.frombuffer(data, np.uint8, 39 * 3 * 64), view_scales(data, meta.states_shape).numpy())
    check_states(data, meta)


def test_wrong_states_are_refused():
    states = torch.randn(3, 39, 64, generator=torch.Generator().manual_seed(1))
    check(states)
    zero = states.clone()
    zero[1, 0] = 0
    with pytest.raises(RecordRefused, match=r"layer 4: the states of token 0 \(row 0\) are all zero"):
        check(zero)

    def nan(bits, _scales):
        bits[(2 * 39 + 9) * 64 + 5] = 0xFF

    def scale(value):
        def change(_bits, scales):
            scales[0, 10] = value

        return change

    with pytest.raises(RecordRefused, match=r"layer 7: the states of token 9 .* not finite"):
        check(states, nan)
    for value in (np.inf, np.nan, 0.0, -1.0):
        with pytest.raises(RecordRefused, match=r"layer 1: the states of token 10 \(row 1\) are not finite"):
            check(states, scale(value))


# Both ends


@pytest.mark.parametrize("last", [False, True])
def test_features_are_the_states_restored(last):
    states = torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(2))
    data, shape = packed(states), (3, 40, 16)
    values, scales = view_states(data, shape, torch.float8_e4m3fn), view_scales(data, shape)
    expected = torch.from_numpy(restored(*reference(states.numpy())))
    reader = StateReader(torch.device("cpu"), torch.float32)
    spans = [(0, 7), (12, 40)]
    reading = Reading(values[: 2 + last], 2, spans, scales[: 2 + last])
    for (start, stop), (features, hidden) in zip(spans, reader.features(reading), strict=True):
        assert torch.equal(features, expected[:2, start:stop].transpose(0, 1).reshape(stop - start, 32))
        assert (hidden is not None) == last
        if hidden is not None:
            assert torch.equal(hidden, expected[2, start:stop])


@needs_cuda
@pytest.mark.parametrize("last", [False, True])
def test_a_gpu_restores_what_a_cpu_does(last):
    states = torch.randn(3, 3000, 64, generator=torch.Generator().manual_seed(2))
    data, shape = packed(states), (3, 3000, 64)
    values, scales = view_states(data, shape, torch.float8_e4m3fn), view_scales(data, shape)
    spans = [(0, 1000), (1000, 2900), (2900, 3000)]
    reading = Reading(values[: 2 + last], 2, spans, scales[: 2 + last])
    found = [
        [(a.cpu().clone(), None if b is None else b.cpu().clone()) for a, b in reader.features(reading)]
        for reader in (StateReader(torch.device(device), torch.bfloat16) for device in ("cpu", "cuda"))
    ]
    for (features, hidden), (on_gpu, hidden_gpu) in zip(*found, strict=True):
        assert torch.equal(features, on_gpu)
        assert hidden is hidden_gpu is None or (hidden is not None and torch.equal(hidden, hidden_gpu))
    eight, scale = quantise(states.cuda().flatten(0, 1))
    bits, by = reference(states.numpy())
    np.testing.assert_allclose(scale.cpu().numpy(), by.reshape(-1, 1), rtol=1e-6)
    assert (
        eight.view(torch.uint8).cpu().numpy() == bits.reshape(-1, 64)
    ).mean() > 0.999  # a scale may differ in its last bit


def record(folder: Path, payload: str, last_hidden: bool) -> tuple[memoryview, RecordMeta]:
    """A record's states by a worker's source."""
    run = RunFile.model_validate(
        {
            "name": "toy",
            "output": "out",
            "target": {"path": str(folder), "dtype": "float32", "layer_ids": LAYER_IDS, "last_hidden": last_hidden},
            "data": {"rows": "rows", "max_length": 32},
            "stream": {"token_budget": 128, "payload": payload},
        }
    )
    source = TargetSource.load(run, target_info(str(folder)), LAYER_IDS, "cpu")
    meta = make_meta(
        layer_ids=tuple(LAYER_IDS),
        hidden_size=64,
        dtype=run.record_dtype,
        last_hidden="before_norm" if last_hidden else "none",
    )
    out = memoryview(bytearray(meta.states_bytes))
    assert source.begin(meta.tokens, meta.cu_seqlens, out, lambda: None).finish()
    return out, meta


@pytest.mark.parametrize(("kind", "last_hidden"), [("qwen3", False), ("gemma2", True)])
def test_a_worker_writes_the_states_rounded(make_tiny_target, kind, last_hidden):
    """Packed rows at once (qwen3), or row by row (gemma2)."""
    full, meta = record(make_tiny_target(kind), "full", last_hidden)
    eight, meta8 = record(make_tiny_target(kind), "fp8", last_hidden)
    states = view_states(full, meta.states_shape, torch.float32)
    assert bytes(eight) == bytes(packed(states))
    check_states(eight, meta8)


def test_a_step_on_rounded_states_is_a_step_on_what_they_restore_to():
    """The learner does with an fp8 record exactly what it does with a full one of the restored states."""
    rows = make_rows(20, 30, 9)
    exact = replace(rows, states=torch.from_numpy(restored(*reference(rows.states.numpy()))))
    found = []
    for payload, memory in ((FP8, packed(rows.states)), ("float32", exact.memory())):
        learner = DFlashLearner(make_run(), make_drafter(), make_head(3), device="cpu", dtype=torch.float32)
        learner.train_record(replace(rows.meta([1, 2, 3]), dtype=payload), memory, 1)
        found.append((learner.weights.gradients.clone(), learner.sums()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][0].abs().sum() > 0
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("payload", ["float32", FP8])
def test_gradients_are_the_same_bits_when_records_are_prepared_ahead(device, payload):
    records, every = [], make_rows(20, 30, 9, 25, 41)
    for batch, group in enumerate([(0, 1, 2, 3, 4), (4,), (1, 2), (3, 0, 1)]):
        rows = every.pick(*group)
        meta = replace(rows.meta(list(group)), batch=batch, dtype=payload)
        records.append((meta, packed(rows.states) if payload == FP8 else rows.memory(), 1))
    if device == "cuda":
        held = [torch.frombuffer(states, dtype=torch.uint8).pin_memory() for _, states, _ in records]
        records = [(meta, there.numpy().data, epoch) for (meta, _, epoch), there in zip(records, held, strict=True)]
    found = []
    for ahead in (0, 2):
        run = make_run(trainer={"micro_tokens": 50}, stream={"payload": "fp8" if payload == FP8 else "full"})
        learner = DFlashLearner(run, make_drafter(), make_head(3), device=device, dtype=torch.float32)
        rehearse(learner)
        for record in records[:ahead]:
            learner.prepare(*record)
        for i, record in enumerate(records):
            learner.train_record(*record)
            for later in records[i + 2 : i + 3] if ahead else ():
                learner.prepare(*later)
        found.append(learner.weights.gradients.clone())
    assert torch.equal(*found) and found[0].abs().sum() > 0


def test_a_rehearsal_is_of_such_records():
    learner = DFlashLearner(
        make_run(stream={"token_budget": 256, "payload": "fp8"}),
        make_drafter(),
        make_head(3),
        device="cpu",
        dtype=torch.float32,
    )
    rehearse(learner)
    assert not learner.weights.gradients.any()


# The disk


class Target:
    """Rounds states that tell the token and the plane."""

    info = None
    batches = 0

    def register(self, address: int, length: int) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None: ...

    def begin(self, tokens, cu_seqlens, out, progress, landed=None) -> Filled:
        self.batches += 1
        out[:] = packed(states_of(tokens))
        progress()
        return Filled(True)


def states_of(tokens: np.ndarray) -> torch.Tensor:
    draw = torch.from_numpy(np.sin(np.outer(tokens + 1.0, np.arange(1.0, HIDDEN + 1))).astype(np.float32))
    return torch.stack([draw, 3 * draw + 1])


def test_rows_are_kept_on_disk_with_their_scales(tmp_path):
    """Recorded in one packing, read in another."""
    kind = StateKind("some target", (1, 4), last_hidden=False, dtype=FP8, hidden_size=HIDDEN)
    rows = [np.arange(start, start + length, dtype=np.int32) for start, length in ((0, 5), (40, 9), (7, 1))]
    for order, batches in (([0, 1, 2], 1), ([2, 0], 0), ([1], 0)):
        target = Target()
        source = RecordingSource(SimpleNamespace(), Recording(tmp_path, kind, "w0"), lambda target=target: target)  # pyright: ignore[reportArgumentType]
        tokens = np.concatenate([rows[i] for i in order])
        out = memoryview(bytearray(states_bytes(2, len(tokens), HIDDEN, FP8)))
        cu_seqlens = np.cumsum([0, *(len(rows[i]) for i in order)]).astype(np.int32)
        assert source.begin(tokens, cu_seqlens, out, lambda: None).finish()
        assert bytes(out) == bytes(packed(states_of(tokens)))
        assert target.batches == batches
        source.close()
