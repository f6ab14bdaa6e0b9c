"""What both sides agree on: run file, ring, wire messages, telemetry and the command line.

Nothing here imports torch, except `target.py`.
"""

__version__ = "0.1.0"
