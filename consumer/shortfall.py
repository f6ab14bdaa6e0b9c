"""When figures of training promise more than decoding keeps: two comparisons and what to say of them.

    rows trained on -> held-out rows    at the end of training, both by tau: the drafter knows its rows by heart
    held-out rows -> real decoding      `paceline eval`, tau_chain against acceptance length: a mismatch of the two

Both compare drafted tokens accepted a verification, the bonus token left out. Imports no torch.
"""

from collections.abc import Mapping
from typing import Any

SHARE = 0.5  # keeping less than this of what was promised is far below; prompts of another kind alone rarely cost half
PROMISE = 1.3  # an acceptance length below this promises too little to miss it by much


def far_below(promised: float, reached: float) -> bool:
    """Of two acceptance lengths, the bonus token counted."""
    return promised >= PROMISE and reached - 1 < SHARE * (promised - 1)


def held_out_shortfall(trained: Mapping[str, Any], held_out: Mapping[str, Any]) -> str | None:
    """What to say when held-out rows accept far less than rows trained on. Both: `tau` and `acc`, where measured."""
    if "tau" not in trained or "tau" not in held_out or not far_below(trained["tau"], held_out["tau"]):
        return None
    accuracies = (
        f" (accuracy {trained['acc']:.2f} and {held_out['acc']:.2f})" if "acc" in trained and "acc" in held_out else ""
    )
    return (
        f"rows trained on reach tau {trained['tau']:.2f}, held-out rows {held_out['tau']:.2f}{accuracies}: the drafter "
        "knows its rows by heart. More rows, or fewer trainer.epochs, help; `FOLDER/best` is the best checkpoint kept"
    )


def decoding_shortfall(source: Mapping[str, Any], pooled: float) -> str | None:
    """What to say when the acceptance length `pooled` of real decoding is far below the tau_chain that the checkpoint
    was evaluated with. source: `export.drafter_source`; nothing is promised where it holds no evaluation."""
    metrics = source.get("metrics") or {}
    promised = metrics.get("tau_chain")
    if source.get("evaluated") != source.get("step") or promised is None or not far_below(promised, pooled):
        return None
    accuracy = metrics.get("eval_acc")
    right = f", {accuracy:.0%} of all slots right" if accuracy is not None else ""
    return (
        f"training promised an acceptance length of {promised:.2f} (tau_chain on held-out rows{right}) and real "
        f"decoding reaches {pooled:.2f}. Are these prompts of the kind trained on, with the same chat template and "
        "thinking mode, and the rows answers of this very target? If so, hidden states or positions differ between "
        "training and decoding"
    )
