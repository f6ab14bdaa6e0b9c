"""The soak of benchmarks/soak.py, short: the real pair on a tiny target, under every kind of trouble it draws."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_a_short_soak(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("soak")  # its sockets' paths have to be short
    command = [sys.executable, str(SOAK), "--faults", "6", "--pause", "1", "--seed", "3", "--keep", str(folder)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1500, check=False
    )
    log = folder / "up.log"
    said = done.stdout + done.stderr + (log.read_text() if done.returncode and log.exists() else "")
    assert done.returncode == 0, said
    assert "audit clean" in done.stdout and "lost 0" in done.stdout
    assert "2 rings, 6 slots free + 0 used = 6" in done.stdout
