"""The window of readings: rates, shares, and the bottleneck in words."""

from dataclasses import replace
from pathlib import Path

import pytest
from paceline.common import window
from paceline.common.inspect import RingInfo
from paceline.common.window import Rates, TrainerState, Window, judge

TRAINING = TrainerState(True, {"state": "training", "wait_data": 0.41})
FULL, EMPTY, HALF = ("ready",) * 4, ("free",) * 4, ("ready", "ready", "writing", "free")


def info(worker: str = "w0", **changes) -> RingInfo:
    whole = RingInfo(
        worker=worker,
        path=Path(f"/dev/shm/paceline/demo/{worker}.ring"),
        pid=1234,
        device="cuda:0",
        alive=True,
        states=HALF,
        slot_bytes=3 << 20,
        produced=100,
        ring_id=hash(worker),
        oldest_ready_s=2.5,
        read_at=50.0,
    )
    return replace(whole, **changes)


def watched(states, *, seconds: int = 20, step: float = 0.5, per_second: float = 1.0, trainer=TRAINING, **changes):
    """A window that saw one ring whose slots are `states(second)`, with `per_second` records produced."""
    seen = Window()
    for place in range(int(seconds / step) + 1):
        at = place * step
        made = 100 + int(at * per_second)
        ring = info(states=states(at), produced=made, read_at=at, **changes)
        seen.add(at, [ring], trainer)
    return seen


def test_rates_come_from_two_readings_of_one_ring():
    before = [info("w0"), info("w1"), info("w2")]
    now = [
        info("w0", produced=104, states=EMPTY, read_at=52.0),
        info("w1", ring_id=5, produced=3, read_at=52.0),
        info("w3", read_at=52.0),
    ]
    assert window.rates(before, now) == {"w0": Rates(produced=2.0, consumed=3.0)}
    assert window.rates(now, now) == {}


def test_rates_of_a_window_with_the_mean_length_of_the_records_seen():
    seen = Window()
    seen.add(0.0, [info(read_at=0.0, records=((1, 100), (2, 300)))])
    seen.add(10.0, [info(read_at=10.0, produced=120, records=((2, 300), (3, 500)))])
    assert seen.rates() == {"w0": Rates(2.0, 2.0, 600.0, 600.0)}  # 900 tokens in three records
    seen.add(31.0, [info(read_at=31.0, produced=141)])
    assert seen.rates()["w0"].produced == pytest.approx(1.0), "the first reading has left the window"


def test_a_ring_made_anew_starts_its_rates_again():
    seen = Window()
    seen.add(0.0, [info(read_at=0.0, produced=1000)])
    seen.add(1.0, [info(read_at=1.0, produced=3, ring_id=9)])
    assert seen.rates() == {}
    seen.add(3.0, [info(read_at=3.0, produced=7, ring_id=9)])
    assert seen.rates()["w0"].produced == 2.0


def test_shares():
    seen = Window()
    for at, states in enumerate((FULL, FULL, EMPTY, ("taken",) * 3 + ("writing",))):
        seen.add(float(at), [info(states=states, read_at=float(at))])
    shares = seen.shares()["w0"]
    assert (shares.full, shares.empty, shares.levels) == (0.5, 0.5, (1.0, 1.0, 0.0, 0.75))


def test_drafters_are_the_bottleneck():
    verdict = watched(lambda at: FULL if at >= 1.5 else HALF).verdict()
    assert (verdict.kind, verdict.text) == (
        "drafters",
        "drafters are the bottleneck: rings full 93% of the time",
    )


def test_targets_are_the_bottleneck():
    verdict = watched(lambda at: EMPTY if at >= 2.5 else HALF).verdict()
    assert verdict.kind == "targets"
    assert verdict.text == "targets are the bottleneck: rings empty 88% of the time, trainer waits 41%"


@pytest.mark.parametrize(
    ("full", "empty", "wait", "kind"),
    [
        (0.93, 0.0, 0.0, "drafters"),
        (0.93, 0.0, None, "drafters"),
        (0.0, 0.9, None, "targets"),
        (0.0, 0.9, 0.4, "targets"),
        (0.0, 0.9, 0.02, "balanced"),  # taken as soon as they come, and in time
        (0.2, 0.3, 0.05, "balanced"),
        (0.4, 0.6, 0.3, "targets"),
    ],
)
def test_judging(full: float, empty: float, wait: float | None, kind: str):
    assert judge(full, empty, wait).kind == kind


def test_too_little_is_said_to_be_too_little():
    assert "too few" in watched(lambda at: FULL, seconds=5).verdict().text, "seconds"
    assert "too few" in watched(lambda at: FULL, seconds=19, per_second=0.1).verdict().text, "records"
    assert "too few" in watched(lambda at: FULL, step=5.0).verdict().text, "readings"


def test_stalled():
    still = watched(lambda at: FULL if at else HALF, seconds=40, per_second=0.0)
    assert still.verdict().text == "stalled: no record moved for 39s; rings are full and the trainer takes nothing"
    empty = watched(lambda at: EMPTY, seconds=40, per_second=0.0)
    assert empty.verdict().text == "stalled: no record moved for 40s; rings are empty and the workers make nothing"


def test_a_slow_run_is_not_stalled():
    """A record every 25 s is this run's pace: 40 s without one prove nothing."""
    slow = watched(lambda at: HALF, seconds=115, per_second=0.04)
    assert slow.verdict().kind == "measuring"


def test_nobody_there():
    down = TrainerState(False, None)
    texts = {
        "no trainer is up: workers wait with full rings": watched(lambda at: FULL, trainer=down),
        "no trainer is up: workers fill their rings and will wait": watched(lambda at: HALF, trainer=down),
        "nobody works on this run; 2 records wait for a trainer": watched(lambda at: HALF, trainer=down, alive=False),
        "no worker is up: the trainer can only use what is in the rings": watched(lambda at: HALF, alive=False),
    }
    for text, seen in texts.items():
        assert seen.verdict() == window.Verdict("waiting", text)
    starting = TrainerState(True, {"state": "starting"})
    assert "rings are full meanwhile" in watched(lambda at: FULL, trainer=starting).verdict().text
    assert "rings fill meanwhile" in watched(lambda at: HALF, trainer=starting).verdict().text
    assert Window().verdict().kind == "none"


def test_only_a_present_status_counts():
    status = {"updated": 100.0, "wait_data": 0.5}
    assert TrainerState.of(True, status, 105.0).get("wait_data") == 0.5
    assert TrainerState.of(None, status, 105.0).get("wait_data") == 0.5
    assert TrainerState.of(True, status, 120.0).status is None
    assert TrainerState.of(False, status, 105.0).status is None, "its trainer is dead"
    assert TrainerState.of(True, {}, 105.0).status is None


def test_files_that_are_no_rings_do_not_count():
    seen = Window()
    for at in range(20):
        seen.add(float(at), [RingInfo("w9", Path("w9.ring"), problem="w9.ring: not a ring")])
    assert seen.verdict().kind == "none" and seen.rates() == {} and seen.shares() == {}


@pytest.mark.parametrize(("silent", "kind"), [(60, "measuring"), (110, "stalled")])
def test_records_that_take_long_are_not_missed_before_their_time(silent: int, kind: str):
    """Twenty seconds a record: a minute without one is no stall yet."""
    window = Window()
    for second in range(0, 61 + silent, 1):
        produced = min(second, 60) // 20
        window.add(float(second), [info(produced=produced, read_at=float(second))], TRAINING)
    assert window.verdict().kind == kind
