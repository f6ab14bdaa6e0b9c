"""The run's fingerprint: what must be equal for a record to belong to a run.

It is in every ring, record and checkpoint; a mismatch is refused with both values shown.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

MAX_JSON_BYTES = 3000  # it shares the ring's header page


@dataclass(frozen=True)
class Fingerprint:
    """Named values (str or int), compared as a whole by `digest` and one by one by `differences`."""

    fields: Mapping[str, str | int]

    @cached_property
    def digest(self) -> int:
        """63 bits of BLAKE2b over the canonical JSON; never 0."""
        word = int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest(), "little")
        return (word & (2**63 - 1)) or 1

    @property
    def hex(self) -> str:
        return f"{self.digest:016x}"

    def differences(self, other: "Fingerprint") -> list[str]:
        """One `name: own value, not other's value` for each field that differs, in order of name."""
        names = sorted(self.fields.keys() | other.fields.keys())
        pairs = ((name, self.fields.get(name, "absent"), other.fields.get(name, "absent")) for name in names)
        return [f"{name}: {mine}, not {theirs}" for name, mine, theirs in pairs if mine != theirs]

    def to_json(self) -> str:
        """Canonical JSON (sorted, ASCII). Raises ValueError over MAX_JSON_BYTES."""
        text = json.dumps(dict(self.fields), sort_keys=True, separators=(",", ":"))
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"fingerprint of {len(text)} bytes; at most {MAX_JSON_BYTES}")
        return text

    @classmethod
    def from_json(cls, text: str) -> "Fingerprint":
        """Raises ValueError unless `text` is an object of strings and integers."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or not all(
            isinstance(value, str | int) and not isinstance(value, bool) for value in fields.values()
        ):
            raise ValueError("a fingerprint is a JSON object of strings and integers")
        return cls(fields)
