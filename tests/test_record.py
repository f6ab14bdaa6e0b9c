"""Records: what is written is what is read, and nothing else is read."""

import random
from dataclasses import replace

import numpy as np
import pytest
from paceline.common.record import (
    CHUNK_WORDS,
    RecordInvalid,
    RecordMeta,
    RunningChecksum,
    checksum,
    max_rows,
    read_meta,
    record_bytes,
    slot_bytes,
    write_meta,
)


def make_meta(lengths: tuple[int, ...] = (8, 20, 11), **changes) -> RecordMeta:
    tokens = sum(lengths)
    meta = RecordMeta(
        batch=5,
        row_ids=np.arange(100, 100 + len(lengths), dtype=np.int64),
        cu_seqlens=np.cumsum((0, *lengths), dtype=np.int32),
        tokens=np.arange(tokens, dtype=np.int32),
        mask=(np.arange(tokens) % 3 > 0).astype(np.uint8),
        layer_ids=(1, 4, 7),
        dtype="bfloat16",
        hidden_size=64,
        last_hidden="none",
        fingerprint=12345,
    )
    return replace(meta, **changes)


@pytest.mark.parametrize("last_hidden", ["none", "before_norm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_record_comes_back_as_it_was_written(dtype: str, last_hidden: str):
    meta = make_meta(dtype=dtype, last_hidden=last_hidden)
    payload = bytearray(b"\xff" * record_bytes(meta))
    offset = write_meta(payload, meta)
    assert offset % 4096 == 0
    assert len(payload) - offset == np.prod(meta.states_shape) * (4 if dtype == "float32" else 2)
    assert bytes(payload[offset:]) == b"\xff" * (len(payload) - offset), "the states are the caller's"
    found, states = read_meta(payload, len(payload))
    assert states == offset
    for field in ("row_ids", "cu_seqlens", "tokens", "mask"):
        np.testing.assert_array_equal(getattr(found, field), getattr(meta, field))
        assert getattr(found, field).dtype == getattr(meta, field).dtype
    for field in ("batch", "layer_ids", "dtype", "hidden_size", "last_hidden", "fingerprint", "planes"):
        assert getattr(found, field) == getattr(meta, field)
    payload[:offset] = bytes(offset)
    assert found.tokens[3] == 3, "the meta does not point into the slot"


def test_layout_is_layer_major_after_the_meta():
    meta = make_meta(last_hidden="before_norm")
    assert meta.planes == 4 and meta.states_shape == (4, 39, 64)


@pytest.mark.parametrize(("planes", "dtype"), [(3, "float32"), (5, "bfloat16"), (1, "float16")])
def test_the_largest_record_of_a_budget_fits_its_slot(planes: int, dtype: str):
    budget, hidden = 4096, 48
    size = slot_bytes(budget, max_rows(budget), planes, hidden, dtype)
    assert size % 4096 == 0
    for lengths in ((8,) * max_rows(budget), (budget,), (9,) * 455):
        meta = make_meta(lengths, layer_ids=tuple(range(planes)), dtype=dtype, hidden_size=hidden)
        assert record_bytes(meta) <= size
        assert record_bytes(replace(meta, layer_ids=meta.layer_ids[1:], last_hidden="before_norm")) <= size


def test_a_record_that_does_not_fit_is_not_written():
    meta = make_meta()
    payload = bytearray(record_bytes(meta) - 1)
    with pytest.raises(ValueError, match="in a slot of"):
        write_meta(payload, meta)
    assert not any(payload)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cu_seqlens": np.array([0, 8, 8, 39], np.int32)}, "cu_seqlens"),
        ({"cu_seqlens": np.array([0, 8, 28, 40], np.int32)}, "cu_seqlens"),
        ({"cu_seqlens": np.array([0, 2**31 - 1, -1, 39], np.int32)}, "cu_seqlens"),
        ({"cu_seqlens": np.array([1, 8, 28, 39], np.int32)}, "cu_seqlens"),
        ({"cu_seqlens": np.array([0, 8, 28, 39], np.int64)}, "dtypes"),
        ({"mask": np.full(39, 2, np.uint8)}, "mask"),
        ({"mask": np.ones(38, np.uint8)}, "mask"),
        ({"tokens": np.full(39, -1, np.int32)}, "negative"),
        ({"row_ids": np.array([1, -2, 3], np.int64)}, "negative"),
        ({"layer_ids": (1, 1)}, "layer ids"),
        ({"layer_ids": (-1,)}, "layer ids"),
        ({"layer_ids": ()}, "0 planes"),
        ({"dtype": "int8"}, "int8"),
        ({"last_hidden": "after_norm"}, "after_norm"),
        ({"hidden_size": 0}, "size 0"),
        ({"batch": 2**63}, "batch"),
    ],
)
def test_a_meta_whose_parts_do_not_fit_is_refused(change: dict, reason: str):
    with pytest.raises(RecordInvalid, match=reason):
        write_meta(bytearray(1 << 20), make_meta(**change))


def test_only_the_exact_length_is_read():
    meta = make_meta()
    payload = bytearray(record_bytes(meta) + 4096)
    write_meta(payload, meta)
    for length in (0, 8, 72, record_bytes(meta) - 1, record_bytes(meta) + 1, len(payload), len(payload) + 1):
        with pytest.raises(RecordInvalid):
            read_meta(payload, length)


def test_damage_to_the_meta_is_refused_or_harmless():
    meta = make_meta()
    whole = bytearray(record_bytes(meta))
    offset = write_meta(whole, meta)
    rng, refused = random.Random(0), 0
    for _ in range(2000):
        payload = bytearray(whole)
        at = rng.randrange(0, 600)
        payload[at : at + 4] = rng.choice((rng.randbytes(4), b"\xff" * 4, bytes(4)))
        try:
            found, states = read_meta(payload, len(payload))
        except RecordInvalid:
            refused += 1
            continue
        assert states == offset and found.cu_seqlens[-1] == len(found.tokens)
        assert payload == whole or checksum(payload, len(payload)) != checksum(whole, len(whole))
    assert refused > 500


def plain_checksum(data: bytes) -> int:
    """`checksum`'s definition, word by word."""
    whole = len(data) // 8
    words = [int.from_bytes(data[i * 8 : i * 8 + 8], "little") for i in range(whole)]
    chunks = whole // CHUNK_WORDS
    sums = [sum(words[i * CHUNK_WORDS : (i + 1) * CHUNK_WORDS]) for i in range(chunks)]
    sums += [sum(words[chunks * CHUNK_WORDS :]), int.from_bytes(data[whole * 8 :], "little")]
    weighted = sum(value * (2 * i + 1) * 0x9E3779B97F4A7C15 for i, value in enumerate(sums))
    return (weighted + len(data) * 0xD6E8FEB86659FD93) % 2**64


@pytest.mark.parametrize("size", [1, 7, 8, 4096, 65536, 65537, 3 * 65536, 200_003])
def test_the_checksum_is_its_definition(size: int):
    data = random.Random(size).randbytes(size)
    assert checksum(data, size) == plain_checksum(data)
    assert checksum(data + b"more", size) == checksum(data, size)


def test_a_checksum_of_pieces_is_that_of_the_whole():
    """In any order, from several threads' shares, with pieces that end within chunks and bytes never told of."""
    chunk = 8 * CHUNK_WORDS
    data = np.random.default_rng(1).bytes(9 * chunk + 1000)
    for pieces in (
        [(0, len(data))],
        [(5 * chunk + 3, 8 * chunk), (100, 3 * chunk - 1)],
        [(2 * chunk, 2 * chunk + 50)],
        [],
    ):
        running = RunningChecksum(data, len(data))
        for start, stop in pieces:
            for share in range(3):
                running.add(start, stop, (share, 3))
        assert running.result() == checksum(data, len(data)) == plain_checksum(data)


def test_bytes_are_summed_when_they_are_told_of():
    """A chunk that changes afterwards is not read again: the sum shows that the record is not what was told."""
    data = bytearray(np.random.default_rng(2).bytes(4 * 8 * CHUNK_WORDS))
    before = checksum(data, len(data))
    running = RunningChecksum(data, len(data))
    running.add(0, len(data))
    data[0] ^= 1
    assert running.result() == before != checksum(data, len(data))


def test_the_checksum_sees_every_byte_and_the_order_of_chunks():
    size = 5 * 65536 + 13
    data = bytearray(random.Random(1).randbytes(size))
    expected = checksum(data, size)
    for at in (0, 1, 65535, 65536, 300_000, size - 14, size - 13, size - 1):
        data[at] ^= 0x40
        assert checksum(data, size) != expected
        data[at] ^= 0x40
    swapped = data[65536 : 2 * 65536] + data[:65536] + data[2 * 65536 :]
    assert checksum(swapped, size) != expected
    assert checksum(data, size - 1) != expected
    zeros = bytes(size)
    assert checksum(zeros, size) != checksum(zeros, size - 8)
    with pytest.raises(ValueError, match="checksum over"):
        checksum(data, size + 1)
