"""The run's fingerprint: what must be equal for a record to belong to a run.

It is in every ring, record and checkpoint; a mismatch is refused with both values shown.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rows import Rows
    from .runfile import RunFile
    from .target_info import TargetInfo

MAX_JSON_BYTES = 3000  # it shares the ring's header page
_SHOWN = 12  # characters of a digest, in messages
_MAX_MIX = 300  # characters of the files' rows and weights; a hash stands for longer ones


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

    def differences(self, other: "Fingerprint", where: str) -> str:
        """`name is value in the run file and value in where`, of each field that differs, in order of name; empty if
        none does. This is the run file's, `where` says whose the other is."""
        names = sorted(self.fields.keys() | other.fields.keys())
        pairs = ((name, self.fields.get(name, "absent"), other.fields.get(name, "absent")) for name in names)
        return "; ".join(
            f"{name} is {_short(mine)} in the run file and {_short(theirs)} in {where}"
            for name, mine, theirs in pairs
            if mine != theirs
        )

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


def _short(value: str | int) -> str | int:
    return value[:_SHOWN] if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32,}", value) else value


def run_fingerprint(run: "RunFile", rows: "Rows", info: "TargetInfo", layer_ids: Sequence[int]) -> Fingerprint:
    """What decides a run's records and batches: target, prepared rows, what is recorded, the plan's inputs and G.

    How long a run lasts, how many processes it has and how the drafter learns may change under it; these may not.
    """
    mix = " ".join(f"{rows}x{weight!r}" for rows, weight in run.data.mix(rows.meta))
    if len(mix) > _MAX_MIX:
        mix = hashlib.sha256(mix.encode()).hexdigest()
    return Fingerprint(
        {
            "target": info.identity,
            "dataset": rows.digest,
            "layer_ids": ",".join(map(str, layer_ids)),
            "dtype": run.target.dtype,
            "last_hidden": int(run.target.last_hidden),
            "token_budget": run.stream.token_budget,
            "max_length": run.data.max_length,
            "seed": run.trainer.seed,
            "packer": run.stream.packer,
            "held_out": run.data.held_out,
            "batches_per_step": run.trainer.batches_per_step,
            **({"weights": mix} if mix else {}),
            **({"fp8": 1} if run.target.fp8 else {}),
            **({"payload": run.stream.payload} if run.stream.payload != "full" else {}),
        }
    )
