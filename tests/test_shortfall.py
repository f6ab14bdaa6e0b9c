"""When training's figures promise more than decoding keeps."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from paceline.consumer.shortfall import decoding_shortfall, far_below, held_out_shortfall
from paceline.consumer.trainer import Trainer


@pytest.mark.parametrize(
    ("promised", "reached", "far"),
    [(3.0, 1.02, True), (3.0, 1.9, True), (3.0, 2.1, False), (3.0, 3.4, False), (1.2, 1.0, False), (1.3, 1.1, True)],
)
def test_far_below_leaves_the_bonus_token_out(promised: float, reached: float, far: bool) -> None:
    assert far_below(promised, reached) == far


def source(**changes: Any) -> dict[str, Any]:
    return {"step": 9, "evaluated": 9, "metrics": {"tau_chain": 3.21, "eval_acc": 0.64, "acc": 0.9}} | changes


def test_training_good_and_decoding_bad() -> None:
    """Shifted states or labels: everything looks right in training, and 1.02 is accepted when served."""
    said = decoding_shortfall(source(), 1.02)
    assert said is not None and "3.21" in said and "64%" in said and "1.02" in said
    assert decoding_shortfall(source(), 2.9) is None


@pytest.mark.parametrize("changes", [{"evaluated": 6}, {"evaluated": None}, {"metrics": {}}, {"metrics": None}])
def test_nothing_is_promised_without_an_evaluation_of_these_weights(changes: dict[str, Any]) -> None:
    assert decoding_shortfall(source(**changes), 1.0) is None
    assert decoding_shortfall({}, 1.0) is None


def test_rows_known_by_heart() -> None:
    said = held_out_shortfall({"tau": 4.0, "acc": 0.93}, {"tau": 1.4, "acc": 0.31, "tau_chain": 1.3})
    assert said is not None and "tau 4.00" in said and "0.93 and 0.31" in said
    assert held_out_shortfall({"tau": 4.0, "acc": 0.93}, {"tau": 3.0, "acc": 0.7}) is None
    assert held_out_shortfall({}, {"tau": 1.0}) is None and held_out_shortfall({"tau": 3.0}, {}) is None


@pytest.mark.parametrize(("step", "warned"), [(5, False), (9, True)])
def test_the_trainer_says_it_after_the_last_step(step: int, warned: bool, capsys: pytest.CaptureFixture[str]) -> None:
    progress = SimpleNamespace(status={"tau": 4.0, "acc": 0.93})
    start = SimpleNamespace(plan=SimpleNamespace(total_steps=9))
    values = {"loss": 5.0, "acc": 0.2, "tau": 1.3, "tau_chain": 1.2}
    Trainer._say_evaluation(cast(Trainer, SimpleNamespace(_progress=progress, _start=start)), step, values)
    said = capsys.readouterr().out
    assert f"evaluation at step {step}: loss=5.000" in said and ("WARNING: rows trained on reach" in said) == warned
