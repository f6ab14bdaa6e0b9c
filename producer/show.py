"""`paceline prepare --show`: prepared rows as a person can check them, supervised tokens told apart."""

import re
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..common.rows import Rows
from .prepare import saved_format

if TYPE_CHECKING:
    from rich.text import Text
    from tokenizers import Tokenizer

OPENING, CLOSING = "⟦", "⟧"  # around supervised tokens where there is no colour
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline; a terminal would obey some


def show(rows: Rows, count: int, *, marks: bool = False) -> Iterator["Text"]:
    """Rows as rich text, `count` of them, from each file in turn: supervised tokens in green, the rest dim.

    marks: supervised tokens stand between ⟦ and ⟧ too, for output without colour. Control characters are escaped."""
    from rich.text import Text
    from tokenizers import Tokenizer

    tokenizer: Tokenizer = Tokenizer.from_str(saved_format(rows.folder).tokenizer)
    yield Text(f"supervised tokens: {OPENING}like this{CLOSING}" if marks else "supervised tokens are green", "bold")
    for index, name in islice(_in_turn(rows), count):
        row = rows.row(index)
        supervised = int(row.mask.sum())
        text = Text(f"\nrow {index:,} ({name}): {len(row.tokens):,} tokens, {supervised:,} supervised\n", style="bold")
        edges = np.flatnonzero(np.diff(row.mask, prepend=2, append=2)).tolist()
        for start, end in pairwise(edges):
            part = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", _decode(tokenizer, row.tokens, start, end))
            if row.mask[start]:
                text.append(f"{OPENING}{part}{CLOSING}" if marks else part, style="not bold green")
            else:
                text.append(part, style="not bold dim")
        yield text


def _in_turn(rows: Rows) -> Iterator[tuple[int, str]]:
    """Indices of rows and the files they are of: the first of each file, then the second of each, and so on."""
    ends = np.cumsum([0, *(file["rows"] for file in rows.meta["files"])])
    for turn in range(len(rows)):
        for (start, end), file in zip(pairwise(ends.tolist()), rows.meta["files"], strict=True):
            if start + turn < end:
                yield start + turn, file["name"]


def _decode(tokenizer: "Tokenizer", tokens: np.ndarray, start: int, end: int) -> str:
    """The text of tokens[start:end], after the token before them, as some decoders strip a leading space."""
    before = tokens[max(start - 1, 0) : start].tolist()
    context = tokenizer.decode(before, skip_special_tokens=False)
    decoded = tokenizer.decode(before + tokens[start:end].tolist(), skip_special_tokens=False)
    return decoded.removeprefix(context)
