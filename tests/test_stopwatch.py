"""How long a device works, and how long it has nothing to do."""

import time

import pytest
import torch
from paceline.consumer import stopwatch
from paceline.consumer.stopwatch import Gaps, Stopwatch


def test_on_a_cpu_the_clock_is_the_hosts(monkeypatch):
    times = iter([1.0, 3.5, 10.0, 11.0, 14.0, 15.0, 15.5, 20.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(times))
    watch, gaps = Stopwatch(torch.device("cpu")), Gaps(torch.device("cpu"))
    watch.start()
    watch.stop()
    assert watch.seconds() == 2.5
    for piece in (gaps.begin, gaps.end, gaps.begin, gaps.end, gaps.begin):
        piece()
    assert gaps.take() == [3.0, 0.5]
    gaps.begin()  # a phase that was left while its first record was trained
    assert gaps.take() == [] == gaps.take()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_that_is_still_busy_has_no_gap():
    device = torch.device("cuda")
    gaps, big = Gaps(device), torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    gaps.begin()
    for _ in range(40):
        torch.mm(big, big)
    gaps.end()
    began = time.perf_counter()
    gaps.begin()
    torch.cuda.synchronize()
    work = time.perf_counter() - began
    gaps.end()
    time.sleep(0.3)
    gaps.begin()
    busy, idle = gaps.take()
    assert busy < work / 2 and idle > 0.25
