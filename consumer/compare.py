"""A trained drafter beside the same drafter before its first step, in real decoding on held-out prompts.

What `paceline demo` ends with: two evaluations of one checkpoint's run, their table and their picture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from ..common.loading import compute_dtype, load_causal_lm, stop_tokens
from ..common.runfile import RunFile
from ..common.target_info import target_info
from .checkpoint import load_state
from .decode import Replay
from .drafter import Drafter
from .evaluate import EvalReport, evaluate_models
from .export import load_drafter
from .plots import draw_evaluation
from .prompts import prompt_ids, read_prompts
from .start import first_drafter

SLOTS = 3  # of the block shown in the table


@dataclass(frozen=True)
class Comparison:
    untrained: EvalReport
    trained: EvalReport

    def rows(self) -> list[tuple[str, ...]]:
        """The table, a header first: one line a drafter. At most `SLOTS` columns say how often blocks get so far."""
        slots = min(SLOTS, len(self.trained.per_position))
        header = (
            "drafter",
            "acceptance length",
            "mean of requests",
            *(f"slot {i + 1}" for i in range(slots)),
            "tokens/s",
        )
        found: list[tuple[str, ...]] = [header]
        for name, report in (("untrained", self.untrained), ("trained", self.trained)):
            shares = [f"{rate:.0%}" for rate in report.per_position[:slots]]
            shares += ["-"] * (slots - len(shares))
            figures = (f"{report.pooled:.3f}", f"{report.mean_of_requests:.3f}", *shares)
            found.append((name, *figures, f"{report.speculative_tokens_per_s:.1f}"))
        plain = f"{self.trained.plain_tokens_per_s:.1f}"
        return [*found, ("target alone", "1.000", "1.000", *[""] * slots, plain)]


def compare(
    checkpoint: Path,
    drafter: Path,
    prompts: Path,
    picture: Path,
    *,
    max_new_tokens: int,
    device: str,
    progress: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Decodes the prompts greedily with the exported `drafter` and with the first weights of the checkpoint's run.

    progress(which, done, all) after each prompt. Writes the picture.
    """
    run = RunFile.model_validate(load_state(checkpoint).run)
    info = target_info(run.target.path, run.target.trust_remote_code)
    dtype = compute_dtype(run.target.dtype, device)
    model = load_causal_lm(info.path, dtype, device, run.target.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(info.path)
    ids = prompt_ids(tokenizer, read_prompts(prompts))
    trained = load_drafter(drafter, dtype=model.dtype, device=device)
    first = first_drafter(run, info, trained.config.target_layer_ids)
    first = first.to(device=device, dtype=model.dtype).eval().requires_grad_(False)
    replays: dict[tuple[int, ...], Replay] = {}

    def report(which: str, weights: Drafter) -> EvalReport:
        return evaluate_models(
            weights,
            model,
            ids,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_tokens(model, tokenizer),
            names=(which, info.path),
            decode=lambda tokens: str(tokenizer.decode(tokens)),
            progress=partial(_tell, progress, which, len(ids)) if progress else None,
            replays=replays,
        )

    found = Comparison(report("untrained", first), report("trained", trained))
    draw_evaluation({"untrained": found.untrained, "trained": found.trained}, picture)
    return found


def _tell(progress: Callable[[str, int, int], None], which: str, count: int, done: int) -> None:
    progress(which, done, count)
