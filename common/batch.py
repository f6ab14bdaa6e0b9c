"""Batch ids: what work, records, the ledger and the audit call a batch.

A batch id is (kind, number, index): kind is TRAIN or EVAL, number the epoch or the evaluation's number (the
step after which it runs), index its place in that plan. Packed into one 64-bit word for ring headers and the
wire; the order of words is the order in which work is given out: evaluations first, then epochs, then index.
"""

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    EVAL = 0
    TRAIN = 1


MAX_NUMBER = 2**30 - 1
MAX_INDEX = 2**32 - 1


class BatchId(NamedTuple):
    kind: Kind
    number: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  # tuple's own is never called

    def pack(self) -> int:
        """The id as a word: kind in bit 62, number in bits 32 to 61, index in bits 0 to 31."""
        if not (0 <= self.number <= MAX_NUMBER and 0 <= self.index <= MAX_INDEX):
            raise ValueError(f"batch id out of range: {tuple(self)}")
        return int(self.kind) << 62 | self.number << 32 | self.index

    @classmethod
    def unpack(cls, word: int) -> "BatchId":
        if not 0 <= word < 2**63:
            raise ValueError(f"no batch id: {word:#x}")
        return cls(Kind(word >> 62), word >> 32 & MAX_NUMBER, word & MAX_INDEX)

    def __str__(self) -> str:
        return f"{self.kind.name.lower()}/{self.number}/{self.index}"
