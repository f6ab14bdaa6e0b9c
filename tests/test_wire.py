"""The wire's encoding: every message survives a round trip, and nothing else is taken for one."""

import contextlib
import dataclasses
import math
import pickle
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.common import wire
from paceline.common.wire import MAX_BYTES, MAX_TEXT, WireError, decode, encode

WORDS = st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def values(hint: Any) -> st.SearchStrategy[Any]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: values(inner) for name, inner in get_type_hints(hint).items()})
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=4).map(tuple)
    if get_origin(hint) is dict:
        return st.dictionaries(TEXTS, st.floats(allow_nan=False), max_size=4)
    return {int: WORDS, str: TEXTS, float: st.floats(0, allow_infinity=False)}[hint]


MESSAGES = st.one_of([values(cls) for cls in get_args(wire.Message)])
HELLO = {"v": 1, "t": "Hello", "worker": "w0", "incarnation": 7, "held": [1, 2]}


@given(MESSAGES)
def test_round_trip(message: wire.Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@given(MESSAGES, st.data())
def test_damaged_messages_decode_or_raise_wire_error(message: wire.Message, data: st.DataObject) -> None:
    whole = bytearray(encode(message))
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole[at] = data.draw(st.integers(0, 255))
    else:
        del whole[at:]
    with contextlib.suppress(WireError):
        assert type(decode(bytes(whole))) in get_args(wire.Message)


@pytest.mark.parametrize(
    "body",
    [
        {1: 2},
        [],
        None,
        7,
        "Hello",
        {**HELLO, "extra": 1},
        {k: v for k, v in HELLO.items() if k != "held"},
        {k: v for k, v in HELLO.items() if k != "v"},
        {**HELLO, "v": 2},
        {**HELLO, "v": True},
        {**HELLO, "v": 1.0},
        {**HELLO, "t": "WireError"},
        {**HELLO, "t": "WorkItem"},
        {**HELLO, "t": ["Hello"]},
        {**HELLO, "incarnation": -1},
        {**HELLO, "incarnation": 2**63},
        {**HELLO, "incarnation": True},
        {**HELLO, "incarnation": 7.0},
        {**HELLO, "worker": b"w0"},
        {**HELLO, "worker": "w" * (MAX_TEXT + 1)},
        {**HELLO, "held": [1, -2]},
        {**HELLO, "held": [[1]]},
        {**HELLO, "held": {"0": 1}},
        {**HELLO, "held": msgpack.ExtType(5, b"1")},
        {**HELLO, "held": msgpack.Timestamp(0)},
        {"v": 1, "t": "Work", "incarnation": 1, "feed": 1, "items": [{"batch": 1}]},
        {"v": 1, "t": "Work", "incarnation": 1, "feed": 1, "items": [1]},
        {**HELLO, "t": "Want", "waited": math.nan, "tokens_per_s": 0.0},
        {**HELLO, "t": "Want", "waited": -1.0, "tokens_per_s": 0.0},
        {**HELLO, "t": "Want", "waited": "0", "tokens_per_s": 0.0},
    ],
)
def test_refused(body: object) -> None:
    with pytest.raises(WireError):
        decode(bytes(msgpack.packb(body) or b""))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps({"v": 1}),
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion items
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\x91" * 100_000,  # nested too deep
        encode(wire.Bye("w0", 1)) + b"\xc0",
        b"\x82\xa1v\x01\xa1v\x01",
        b"\x81\xa1\xff\x01",  # no UTF-8
        bytes(MAX_BYTES + 1),
    ],
)
def test_hostile_bytes(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_the_largest_message_is_bounded_at_the_sender() -> None:
    rows = tuple(range(2**20))
    with pytest.raises(WireError, match="bytes"):
        encode(wire.Work(1, 1, (wire.WorkItem(1, rows),)))


def test_a_long_reason_is_cut_and_lone_surrogates_replaced() -> None:
    sent = wire.StopRank(1, "x\ud800" + "y" * 2 * MAX_TEXT)
    got = decode(encode(sent))
    assert isinstance(got, wire.StopRank)
    assert len(got.reason) == MAX_TEXT
    assert got.reason.startswith("x?y")


def test_metrics_may_be_nan_and_whole_numbers_become_floats() -> None:
    done = decode(encode(wire.Done(0, 1, 1, 3, (5,), (wire.Listed(6, "not finite"),), {"loss": math.nan, "acc": 1})))
    assert isinstance(done, wire.Done)
    assert math.isnan(done.metrics["loss"])
    assert type(done.metrics["acc"]) is float
    assert done.listed == (wire.Listed(6, "not finite"),)


def test_a_sender_cannot_send_what_a_receiver_would_refuse() -> None:
    with pytest.raises(WireError):
        encode(wire.Bye("w0", -1))
    with pytest.raises(WireError):
        encode(wire.WorkItem(1, ()))  # type: ignore[arg-type]


def test_a_message_beyond_the_bound_is_refused_though_it_is_well_formed():
    """No socket of a worker refuses it before: it would never connect again."""
    fields = {"worker": "w0", "incarnation": 1}
    for count, fits in ((MAX_BYTES // 9 - 100, True), (MAX_BYTES // 9 + 1, False)):
        body = {"v": wire.WIRE_VERSION, "t": "Hello", **fields, "held": [2**62] * count}
        data = msgpack.packb(body)
        assert data is not None
        if fits:
            assert decode(data) == wire.Hello("w0", 1, (2**62,) * count)
        else:
            with pytest.raises(WireError, match=f"at most {MAX_BYTES} are read"):
                decode(data)
