"""Where blocks start: anchors drawn afresh each epoch from (seed, epoch, row id), and where decoding would start.

An anchor is a position t whose tokens t and t+1 are both supervised: the block's first label is then supervised.
Pure numpy; nothing here knows of models or devices, and no global random state is read.
"""

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


def candidates(mask: NDArray[np.uint8]) -> Positions:
    """Positions t of a row with mask[t] and mask[t+1] set, ascending."""
    return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int64)


def draw_anchors(
    mask: NDArray[np.uint8], *, seed: int, epoch: int, row_id: int, per_token: float, most: int
) -> Positions:
    """Anchors of one row, ascending and distinct; empty when the row has no two supervised tokens in a row.

    mask [t] uint8: 1 where the token is supervised. Draws per_token anchors a supervised token, at least one and at
    most `most`, without replacement. Ascending order keeps the blocks of a tile near the same context, so that most
    tiles of the attention mask are full or empty.
    """
    places = candidates(mask)
    count = min(most, len(places), max(1, round(per_token * int(np.count_nonzero(mask)))))
    if count == len(places):
        return places
    draw = np.random.default_rng([seed, epoch, row_id])
    return np.sort(draw.choice(places, size=count, replace=False))


def chain_starts(mask: NDArray[np.uint8]) -> Positions:
    """First anchor of every run of at least two supervised tokens: where decoding of an answer begins."""
    places = candidates(mask)
    return places[np.diff(places, prepend=-2) != 1]
