"""Anchors, blocks and masks: tables by hand."""

import math

import numpy as np
import pytest
from paceline.consumer.anchors import candidates, chain_starts, draw_anchors
from paceline.consumer.blocks import (
    Span,
    default_gamma,
    dense_mask,
    pack_blocks,
)
from paceline.consumer.chains import accept_everywhere, run_chains


def bits(text: str) -> np.ndarray:
    return np.array([int(c) for c in text], np.uint8)


def pack(tokens, mask, cu, anchors, block_size=4, gamma=4.0):
    return pack_blocks(
        np.array(tokens, np.int32),
        mask,
        np.array(cu, np.int32),
        [np.array(row, np.int64) for row in anchors],
        block_size=block_size,
        mask_token_id=99,
        gamma=gamma,
    )


def test_labels_and_weights_by_hand():
    """ids [10, 11, 12 | 20 .. 27], B = 4: slot k is asked for the token at a + k; the prompt has no weight."""
    ids, mask = [10, 11, 12, 20, 21, 22, 23, 24, 25, 26, 27], bits("00011111111")
    one, two, three = 1.0, math.exp(-1 / 4), math.exp(-2 / 4)
    anchors = candidates(mask)
    assert anchors.tolist() == [3, 4, 5, 6, 7, 8, 9]
    blocks = pack(ids, mask, [0, 11], [[3, 6, 8, 9]])
    expected = [
        (3, 4, 21, one), (3, 5, 22, two), (3, 6, 23, three),
        (6, 7, 24, one), (6, 8, 25, two), (6, 9, 26, three),
        (8, 9, 26, one), (8, 10, 27, two),
        (9, 10, 27, one),
    ]  # fmt: skip
    assert [row[:3] for row in blocks.table()] == [row[:3] for row in expected]
    assert [row[3] for row in blocks.table()] == pytest.approx([row[3] for row in expected], rel=1e-6)
    assert blocks.ids.tolist() == [20, 99, 99, 99, 23, 99, 99, 99, 25, 99, 99, 26, 99]
    assert blocks.positions.tolist() == [3, 4, 5, 6, 6, 7, 8, 9, 8, 9, 10, 9, 10]


def test_weight_ends_at_the_first_unsupervised_label():
    """The slots after it exist (the document goes on) and are not scored, even where a later turn is supervised."""
    blocks = pack(range(8), bits("01100111"), [0, 8], [[1, 5]], block_size=6)
    assert [(a, at) for a, at, _, _ in blocks.table()] == [(1, 2), (5, 6), (5, 7)]
    assert blocks.slots == 6 + 3


def test_packed_rows_count_from_their_own_start():
    blocks = pack(range(100, 120), bits("0011111111" * 2), [0, 10, 20], [[2, 8], [3]])
    assert blocks.anchors.tolist() == [2, 8, 13]
    assert blocks.positions.tolist() == [2, 3, 4, 5, 8, 9, 3, 4, 5, 6]
    assert blocks.see_from.tolist() == [0] * 6 + [10] * 4
    assert blocks.see_to.tolist() == [2] * 4 + [8] * 2 + [13] * 4
    assert blocks.spans == (Span(0, 8, 0, 6), Span(10, 13, 6, 10))
    assert blocks.cells.tolist() == [1, 2, 3, 5, 9, 10, 11]


@pytest.mark.parametrize("anchors", [[[], []], [[], [2]]])
def test_rows_without_anchors(anchors):
    blocks = pack(range(20), bits("0011111111" * 2), [0, 10, 20], anchors)
    assert blocks.count == sum(map(len, anchors))
    assert len(blocks.table()) == 3 * blocks.count
    assert len(blocks.spans) == blocks.count


def test_anchors_are_drawn_from_seed_epoch_and_row_alone():
    mask = bits("0" * 20 + "1" * 200)

    def draw(seed=1, epoch=2, row_id=3, per_token=0.25, most=512):
        return draw_anchors(mask, seed=seed, epoch=epoch, row_id=row_id, per_token=per_token, most=most).tolist()

    np.random.seed(5)
    first = draw()
    np.random.seed(6)
    assert draw() == first == sorted(set(first))
    assert len(first) == 50
    assert set(first) <= set(candidates(mask).tolist())
    assert all(draw(**other) != first for other in ({"seed": 2}, {"epoch": 3}, {"row_id": 4}))
    assert len(draw(most=24)) == 24
    assert draw(per_token=1.0) == candidates(mask).tolist()


@pytest.mark.parametrize(("mask", "count"), [("0000", 0), ("0100", 0), ("0101", 0), ("0110", 1), ("1", 0)])
def test_short_answers(mask, count):
    assert len(draw_anchors(bits(mask), seed=0, epoch=0, row_id=0, per_token=0.25, most=9)) == count


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (4, 2), (32, 14)])
def test_default_gamma(block_size, gamma):
    assert default_gamma(block_size) == gamma


def test_dense_mask_by_hand():
    blocks = pack(range(12), bits("001111001111"), [0, 6, 12], [[2, 4], [3]], block_size=3)
    assert dense_mask(blocks, blocks.spans[0], None).astype(int).tolist() == [
        [1, 1, 0, 0, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 1, 0, 0, 0, 1, 1],
    ]
    assert dense_mask(blocks, blocks.spans[1], 3).astype(int).tolist() == [
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]


def test_chain_starts():
    assert chain_starts(bits("0011101101100")).tolist() == [2, 6, 9]
    assert chain_starts(bits("1100")).tolist() == [0]
    assert chain_starts(bits("0100")).tolist() == []


def test_chains_step_over_accepted_tokens_and_the_bonus():
    """Rows of 7 and 4 supervised tokens (the second in two turns), and one without; what is accepted is scripted."""
    masks = [bits("0001111111"), bits("0110110"), bits("0000000000")]
    script = {(0, 3): 1, (0, 5): 0, (0, 6): 2, (1, 1): 1, (1, 4): 0}
    asked = []

    def accept(anchors):
        pairs = [(row, int(a)) for row, at in enumerate(anchors) for a in at]
        asked.append(pairs)
        return np.array([script[pair] for pair in pairs], np.int64)

    assert run_chains(masks, accept) == (4, 5)
    assert asked == [[(0, 3), (1, 1), (1, 4)], [(0, 5)], [(0, 6)]]


@pytest.mark.parametrize("most", [1, 4, 100])
def test_chains_from_a_table_of_all_anchors(most: int):
    masks = [bits("0001111111"), bits("0110110"), bits("0000000000")]
    asked: list[tuple[int, int]] = []

    def accept(anchors):
        pairs = [(row, int(a)) for row, at in enumerate(anchors) for a in at]
        assert len(pairs) <= most
        asked.extend(pairs)
        return np.array([(3 * row + a) % 3 for row, a in pairs], np.int64)

    table = accept_everywhere(masks, accept, most)
    assert sorted(asked) == [(0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (0, 8), (1, 1), (1, 4)]
    most = 100
    assert run_chains(masks, table) == run_chains(masks, accept)
