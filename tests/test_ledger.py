"""The ledger: each batch once, compact, and refusing what does not add up."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.common.batch import BatchId, Kind
from paceline.consumer.ledger import Ledger, LedgerInvalid, Ranges

BATCHES = st.builds(BatchId, st.just(Kind.TRAIN), st.integers(0, 2), st.integers(0, 12))


class Plan:
    epochs = 3

    def batches(self, epoch: int) -> int:
        return 13


def train(epoch: int, index: int) -> BatchId:
    return BatchId(Kind.TRAIN, epoch, index)


@given(st.lists(st.tuples(BATCHES, st.booleans()), unique_by=lambda entry: entry[0], max_size=39))
def test_it_is_the_two_sets_it_says(entries: list[tuple[BatchId, bool]]) -> None:
    ledger = Ledger()
    for batch, is_trained in entries:
        ledger.record([batch] if is_trained else [], {} if is_trained else {batch: "refused"})
    trained = {batch for batch, is_trained in entries if is_trained}
    listed = {batch for batch, is_trained in entries if not is_trained}
    for epoch in range(3):
        everything = {train(epoch, index) for index in range(13)}
        undone = sorted(everything - trained - listed)
        assert [train(epoch, index) for index in ledger.undone(epoch, 13)] == undone
        assert ledger.lowest_undone(Plan(), epoch) == (undone[0] if undone else None)
        assert set(ledger.trained_ids(epoch)) == trained & everything
        assert {batch for batch in everything if ledger.done(batch)} == everything - set(undone)
        assert {batch for batch in everything if ledger.trained(batch)} == trained & everything
    assert ledger.listed.keys() == listed
    assert (ledger.trained_count(), ledger.done_count()) == (len(trained), len(entries))
    assert ledger.complete(Plan()) == (len(entries) == 39)
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


def test_equal_whatever_the_order() -> None:
    one, two = Ledger(), Ledger()
    one.record([train(0, 0), train(0, 1)], {train(0, 2): "zeros"})
    two.record([train(0, 1)], {train(0, 2): "zeros"})
    assert one != two
    two.record([train(0, 0)], {})
    assert one == two
    assert one.copy() == one
    two.record([], {train(0, 3): "zeros"})
    assert one != two


@pytest.mark.parametrize(
    ("trained", "listed"),
    [
        ([train(0, 0)], {}),
        ([train(0, 1)], {}),
        ([], {train(0, 0): "x"}),
        ([train(0, 5), train(0, 5)], {}),
        ([train(0, 5)], {train(0, 5): "x"}),
        ([BatchId(Kind.EVAL, 0, 0)], {}),
    ],
)
def test_a_batch_enters_once(trained: list[BatchId], listed: dict[BatchId, str]) -> None:
    ledger = Ledger()
    ledger.record([train(0, 0)], {train(0, 1): "x"})
    before = ledger.copy()
    with pytest.raises(ValueError, match="batch"):
        ledger.record([train(0, 7), *trained], listed)
    assert ledger == before


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"trained": {}, "listed": [], "more": 1},
        {"trained": [], "listed": []},
        {"trained": {}, "listed": {}},
        {"trained": {"x": [[0, 1]]}, "listed": []},
        {"trained": {"01": [[0, 1]]}, "listed": []},
        {"trained": {"0": []}, "listed": []},
        {"trained": {"0": [[0, 0]]}, "listed": []},
        {"trained": {"0": [[0, 1, 2]]}, "listed": []},
        {"trained": {"0": [[0, True]]}, "listed": []},
        {"trained": {"0": [[0, 2], [2, 3]]}, "listed": []},
        {"trained": {"0": [[5, 6], [0, 1]]}, "listed": []},
        {"trained": {"0": [[0, 2**33]]}, "listed": []},
        {"trained": {"0": [[0, 2]]}, "listed": [[0, 1, "x"]]},
        {"trained": {}, "listed": [[0, 1, "x"], [0, 1, "y"]]},
        {"trained": {}, "listed": [[0, -1, "x"]]},
        {"trained": {}, "listed": [[0, 1]]},
        {"trained": {}, "listed": [[0, 1, 2]]},
    ],
)
def test_a_stored_ledger_that_does_not_add_up_is_refused(body: Any) -> None:
    with pytest.raises(LedgerInvalid):
        Ledger.from_json(body)


def test_its_size_depends_on_the_gaps_only() -> None:
    ranges = Ranges.from_pairs([[0, 10**6]], "here")
    ranges.add(10**6)
    assert list(ranges.pairs()) == [(0, 10**6 + 1)]
    assert len(ranges) == 10**6 + 1
