"""What a rank says of its start."""

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
from paceline.common.errors import PacelineError
from paceline.consumer import rank, trainer


class Restoring:
    """A learner of which a checkpoint has been read, or not."""

    folder: Path | None = None

    def restore(self, folder: Path) -> None:
        self.folder = folder


def test_a_resumed_rank_is_ready_once_its_checkpoint_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made: Any = object.__new__(rank.DFlash)
    made._rank, made._took, made._learner = 0, [1.0, 2.0, 0.0], Restoring()
    made.restore(tmp_path)
    assert made._learner.folder == tmp_path
    [said] = caplog.messages
    assert said.startswith("rank 0 is ready: 1.0 s for libraries, 2.0 s for weights, 0.0 s for a rehearsal, ")
    assert said.endswith(" s for the checkpoint")


class OneRound:
    """Ranks that run for one round of the loop."""

    ranks: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.rounds = [True, False]
        self.told: list[Any] = []

    @property
    def running(self) -> bool:
        return self.rounds.pop(0)

    def poll(self, seconds: float) -> list[Any]:
        return []

    def signal(self, number: Any) -> None:
        self.told.append(number)


class FailedFeed:
    def check(self) -> None:
        raise PacelineError("the socket is gone")


def test_a_feed_that_fails_stops_the_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: Any = object.__new__(trainer.Trainer)
    made._ranks, made._failure = OneRound(), None
    for name in ("_look_at_ranks", "_look_at_signals", "_enforce"):
        monkeypatch.setattr(made, name, lambda: None, raising=False)
    for name in ("_tick", "_limit"):
        monkeypatch.setattr(made, name, lambda _: None, raising=False)
    made._watch(FailedFeed())
    assert str(made._failure) == "the socket is gone" and made._ranks.told == [signal.SIGTERM]
    assert capsys.readouterr().err == "stopping all ranks: the feed failed\n"
