"""How many anchors a micro-batch has at most, from which its memory follows: of the rows if they are known.

A row has `objective.anchors_per_token` anchors a supervised token and `objective.max_anchors` at most. Of rows that are
supervised throughout those have most for their length that just reach the limit: not the longest ones.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .rows import Rows
    from .runfile import RunFile

Counts = NDArray[np.int64]


class Densest:
    """Of a run's rows; without them, of rows that are supervised throughout and have most anchors for their length.

    row: the length of such a row. longest: the longest row's tokens.
    """

    def __init__(self, run: "RunFile", rows: "Rows | None" = None) -> None:
        objective = run.objective
        self._per_token, self._most = objective.anchors_per_token, objective.max_anchors
        self.row = max(2, min(run.data.max_length, math.ceil(self._most / self._per_token)))
        budget, copies = run.stream.token_budget, 1
        if rows is None:
            self.longest = run.data.max_length
            lengths = np.full(1 + budget // self.row, self.row, np.int64)
            anchors = self.of_rows(lengths)
        else:
            self.longest = int(rows.lengths.max())
            copies = math.ceil(max([weight for _, weight in run.data.mix(rows.meta)], default=1))
            lengths, anchors = rows.lengths.astype(np.int64), self.of_rows(rows.supervised)
        self._row = int(anchors.max())
        order = np.argsort(-anchors / lengths, kind="stable")
        order = order[: 1 + int(np.searchsorted(np.cumsum(lengths[order]), budget))]  # more are in no batch
        self._lengths, self._anchors = (np.repeat(part[order], copies) for part in (lengths, anchors))
        self._tokens = np.cumsum(self._lengths)
        self._sums = np.concatenate([[0], np.cumsum(self._anchors)])

    def of_rows(self, supervised: Counts) -> Counts:
        """Anchors of rows with so many supervised tokens in one piece (anchors.py)."""
        wanted = np.maximum(1, np.round(self._per_token * supervised)).astype(np.int64)
        return np.minimum(np.minimum(wanted, self._most), np.maximum(0, supervised - 1))

    def anchors(self, tokens: int) -> int:
        """No micro-batch of so many tokens has more. It may be one row that is longer."""
        whole = int(np.searchsorted(self._tokens, tokens, side="right"))
        found = int(self._sums[whole])
        if whole < len(self._lengths):
            rest = tokens - int(self._tokens[whole] - self._lengths[whole])
            found += math.ceil(self._anchors[whole] * rest / self._lengths[whole])
        return max(found, self._row)
