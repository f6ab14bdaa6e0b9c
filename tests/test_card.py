"""The model card of an export: what is known of the drafter, and no more."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exporting import checkpoint, config
from paceline.common.errors import ConfigError
from paceline.consumer.card import find_evaluations, model_card
from paceline.consumer.checkpoint import load_state
from paceline.consumer.export import export
from paceline.consumer.first_weights import init_drafter

DRAFTER = init_drafter(config(), seed=1)


def report(path: Path, run_id: str = "tiny-0123", step: int = 3, **changes: Any) -> Path:
    """A report as `paceline eval --out` writes it."""
    values = {
        "acceptance_length": {"counts": "bonus token included", "pooled": 2.345, "mean_of_requests": 2.456},
        "per_position": [0.8, 0.5, 0.25, 0.125],
        "sampling": {"temperature": 0.0},
        "max_new_tokens": 128,
        "dtype": "bfloat16",
        "device": "some GPU",
        "requests": [{}] * 16,
        "prompts": "code.jsonl",
        "source": {"run_id": run_id, "step": step},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values | changes))
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    metrics = {"tau_chain": 1.78, "eval_acc": 0.456}
    return checkpoint(tmp_path / "run" / "checkpoints", DRAFTER, evaluated=3, metrics=metrics)


def card(saved: Path, format: str = "zlab", shape=DRAFTER.config, target: str = "Org/Model-8B") -> str:
    state = load_state(saved)
    return model_card(state, shape, format, target=target, evaluations=find_evaluations(saved, state))


def test_says_what_was_trained_and_nothing_of_the_machine(saved: Path) -> None:
    text = card(saved)
    for said in (
        "base_model: Org/Model-8B",
        "# tiny: a DFlash drafter for Org/Model-8B",
        "after layers 1, 3 of 6",
        "step 3 of run `tiny-0123`",
        "| context tokens trained on | 123,456 |",
        "| training time | 1.50 h |",
        "| sources | chats.jsonl |",
        "| digest of the prepared rows | `d1ge57` |",
        "| `optimizer.lr` | 0.0006 |",
        "| `data.held_out` | 7 |",
        "On the run's 7 held-out rows, from recorded states: 1.78 with chained anchors (`tau_chain`), 45.6% of",
    ):
        assert said in text, said
    for kept in ("/secret", "/models", "ring_dir", "trainer.threads"):
        assert kept not in text
    assert "base_model" not in card(saved, target="/models/tiny")


def test_serving_commands(saved: Path) -> None:
    zlab, speculators = card(saved), card(saved, "speculators")
    config = '{"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": 4}'
    for text in (zlab, speculators):
        assert f"vllm serve Org/Model-8B \\\n    --speculative-config '{config}'" in text
    assert "--speculative-algorithm DFLASH --speculative-draft-model-path DRAFTER" in zlab
    assert "--speculative-num-draft-tokens 5" in zlab
    assert "\nvllm serve DRAFTER\n" in speculators and "launch_server" not in speculators
    mixed = replace(DRAFTER.config, layer_types=("sliding_attention", "full_attention"), sliding_window=9)
    assert "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve" in card(saved, shape=mixed) and "window of 9" in card(
        saved, shape=mixed
    )


def test_evaluations_of_this_very_checkpoint_are_found(saved: Path, tmp_path: Path) -> None:
    assert "Not measured in real decoding" in card(saved)
    report(tmp_path / "run" / "eval.json")
    report(tmp_path / "run" / "evals" / "math.json", prompts="math.jsonl", sampling={"temperature": 0.7})
    report(tmp_path / "run" / "earlier.json", step=2, prompts="earlier.jsonl")
    report(tmp_path / "run" / "other.json", run_id="other", prompts="other.jsonl")
    (tmp_path / "run" / "demo.json").write_text("{}")
    (tmp_path / "run" / "torn.json").write_text("{")
    text = card(saved)
    greedy = "greedy, 128 new tokens, bfloat16 on some GPU | 0.80 0.50 0.25 0.12 |"
    assert f"| code.jsonl | 16 | 2.345 | 2.456 | {greedy}" in text
    assert "| math.jsonl | 16 | 2.345 | 2.456 | temperature 0.7," in text
    assert "earlier.jsonl" not in text and "other.jsonl" not in text and "Not measured" not in text


def test_evaluations_that_are_given(saved: Path, tmp_path: Path) -> None:
    made = export(saved, tmp_path / "out", evaluations=[report(tmp_path / "mine.json")])
    text = (made.folder / "README.md").read_text()
    assert made.evaluations == 1 and "| code.jsonl | 16 |" in text and "for tiny" in text
    with pytest.raises(ConfigError, match=r"is of step 2 of run tiny-0123, not of step 3"):
        export(saved, tmp_path / "two", evaluations=[report(tmp_path / "old.json", step=2)])
    with pytest.raises(ConfigError, match="no report of `paceline eval --out`"):
        export(saved, tmp_path / "two", evaluations=[saved / "state.json"])
    assert not (tmp_path / "two").exists()


def test_weights_without_an_evaluation(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "run", DRAFTER, evaluated=2, metrics={"tau_chain": 9.9})
    assert "These weights were not evaluated" in card(saved) and "9.9" not in card(saved)
