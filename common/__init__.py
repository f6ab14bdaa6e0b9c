"""What both sides agree on: run file, ring, wire messages, telemetry and the command line.

Nothing here loads torch, except `target.py`, `loading.py` and what is theirs alone (tests/test_layout.py).
"""

__version__ = "0.1.0"
