"""Chained anchors: where greedy speculative decoding of the recorded answers would put its blocks.

A chain starts at the first token of a run of supervised tokens (an assistant turn), as decoding does after its
prefill. With n drafted tokens accepted at anchor a, the next anchor is a + n + 1: the accepted tokens and the target's
bonus token. The chain ends when the run holds no further label. Drawn anchors weigh all positions alike; decoding
meets hard positions more often, because it steps over the easy ones, so tau_chain is the lower and the honest figure.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .anchors import candidates, chain_starts


class ChainSums(NamedTuple):
    accepted: int  # drafted tokens accepted, all chains; bonus tokens not counted
    blocks: int


def run_chains(
    masks: Sequence[NDArray[np.uint8]], accept: Callable[[list[NDArray[np.int64]]], NDArray[np.int64]]
) -> ChainSums:
    """Runs all chains of several rows side by side, one block of each a round.

    masks: one supervision mask a row. accept(anchors): takes one ascending array of anchors a row, and returns the
    accepted drafted tokens of each block in that order. Rounds end when every chain has.
    """
    starts = [chain_starts(mask) for mask in masks]
    row = np.repeat(np.arange(len(masks)), [len(s) for s in starts])
    at = np.concatenate([*starts, np.zeros(0, np.int64)])
    last = np.concatenate([*(_last_anchors(mask) for mask in masks), np.zeros(0, np.int64)])
    right = blocks = 0
    while len(at):
        taken = accept([at[row == r] for r in range(len(masks))])
        right, blocks = right + int(taken.sum()), blocks + len(at)
        at = at + taken + 1
        going = at <= last
        row, at, last = row[going], at[going], last[going]
    return ChainSums(right, blocks)


def accept_everywhere(
    masks: Sequence[NDArray[np.uint8]], accept: Callable[[list[NDArray[np.int64]]], NDArray[np.int64]], most: int
) -> Callable[[list[NDArray[np.int64]]], NDArray[np.int64]]:
    """`accept` for `run_chains`, answered from a table of every anchor there can be, `most` blocks at a time.

    A block depends on its anchor and the context alone, not on the chain. A drafter that is often wrong steps through
    nearly all anchors anyway, and hundreds of rounds of a few blocks, each reading the whole head, cost far more.
    """
    places = [candidates(mask) for mask in masks]
    row = np.repeat(np.arange(len(masks)), [len(p) for p in places])
    at = np.concatenate([*places, np.zeros(0, np.int64)])
    table = [np.zeros(len(mask), np.int64) for mask in masks]
    for first in range(0, len(at), most):
        part = slice(first, first + most)
        anchors = [at[part][row[part] == r] for r in range(len(masks))]
        counts = np.split(accept(anchors), np.cumsum([len(a) for a in anchors])[:-1])
        for answers, where, found in zip(table, anchors, counts, strict=True):
            answers[where] = found
    return lambda anchors: np.concatenate([answers[a] for answers, a in zip(table, anchors, strict=True)])


def _last_anchors(mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Last anchor of the run of each of `chain_starts`."""
    places = candidates(mask)
    return places[np.diff(places, append=len(mask) + 1) != 1]
