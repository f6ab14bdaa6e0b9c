"""`paceline bench stream`'s ring between two processes, held to bounds.

    python benchmarks/ring.py [--record-mb 64] [--rounds 8] [--check]

`--check` exits 1 unless touch >= 0.8 x memcpy, copy >= 0.5 x memcpy and the median latency is under 300 us.
"""

import argparse
import sys

from paceline.common.bench_parts import StreamOptions, bench_stream, stream_tables
from rich.console import Console

TOUCH_FLOOR, COPY_FLOOR, LATENCY_CEILING_US = 0.8, 0.5, 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description="The ring against memcpy and iceoryx2")
    parser.add_argument("--record-mb", type=int, default=64, help="MiB in a record")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bound is missed")
    options = parser.parse_args()
    report = bench_stream(StreamOptions("cpu", record_mb=options.record_mb, rounds=options.rounds))
    console = Console()
    for part in stream_tables(report):
        console.print(part)
    ways = report["speeds"]["between processes"]
    bounds = {
        f"touch >= {TOUCH_FLOOR} x memcpy": ways["ring touch"]["of_ceiling"] >= TOUCH_FLOOR,
        f"copy >= {COPY_FLOOR} x memcpy": ways["ring copy"]["of_ceiling"] >= COPY_FLOOR,
        f"announce + ack p50 < {LATENCY_CEILING_US:.0f} us": report["latency_us"]["p50"] < LATENCY_CEILING_US,
    }
    for bound, met in bounds.items():
        console.print(f"{'met   ' if met else 'MISSED'} {bound}")
    return 1 if options.check and not all(bounds.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
