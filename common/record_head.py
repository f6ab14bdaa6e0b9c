"""The first words of a record, apart from the rest of it, so that the inspector reads them without numpy."""

import struct

MAGIC = int.from_bytes(b"PACEREC1", "little")
# magic, batch, fingerprint, rows, tokens, layers, hidden size, dtype, last hidden
HEAD = struct.Struct("=9Q")


def head_tokens(head: bytes, batch: int, length: int) -> int | None:
    """Tokens of the record of `length` bytes for packed batch id `batch` that starts with `head`.

    None if that is no head of such a record, for instance because the slot has been used again since.
    """
    if len(head) < HEAD.size:
        return None
    magic, found, _, _, tokens, *_ = HEAD.unpack_from(head)
    return tokens if (magic, found) == (MAGIC, batch) and 0 < tokens < length else None
