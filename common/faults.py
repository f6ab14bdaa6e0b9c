"""Named points where a test kills the process, to prove that what is left behind can be picked up.

`PACELINE_FAULT=name` makes the first arrival at point `name` end in SIGKILL; `name:3` the third. Unset, a point costs
one comparison.
"""

import os
import signal

_name, _, _count = os.environ.get("PACELINE_FAULT", "").partition(":")
_left = int(_count or 1)


def point(name: str) -> None:
    """Kills this process if the environment says that it dies here."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
