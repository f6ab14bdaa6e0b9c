"""Messages lost on purpose, so that a soak can prove that none is needed.

`PACELINE_DROP=0.1` makes each process lose a tenth of the messages that it sends on the sockets of feed, workers and
ranks; `0.1:7` draws from seed 7 and the process id. Unset, a send costs one comparison.
"""

import os
import random


def _setting() -> tuple[float, random.Random]:
    share, _, seed = os.environ.get("PACELINE_DROP", "").partition(":")
    return float(share or 0), random.Random(f"{seed}:{os.getpid()}")


_share, _draw = _setting()


def lost() -> bool:
    """True if the message about to be sent is one of those that get lost."""
    return _share > 0 and _draw.random() < _share
