"""`paceline eval`: what a drafter is worth in real speculative decoding.

Decodes prompts one at a time with drafter and target (`decode.py`), then lets the target alone replay each output, one
token a forward. That one replay gives both the plain decoding speed and the proof that nothing was lost: in float32
every token must be the target's own; in bfloat16 a block forward and a single-token forward round differently, so
each token that differs is listed with the logit gap, and must be a near-tie.

Acceptance length counts the bonus token everywhere: tokens produced per verification, 1.0 for a useless drafter,
block_size for a perfect one. Pooled: all tokens over all verifications. Mean of requests: mean of each request's own.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from ..common import __version__
from ..common.errors import ConfigError, UsageError
from ..common.loading import compute_dtype, load_causal_lm, stop_tokens
from ..common.target_info import TargetInfo, target_info
from .decode import GREEDY, DraftModel, Generation, Replay, Sampling, narrow_linears, replay, speculate
from .drafter import DrafterConfig
from .export import drafter_source, load_drafter
from .prompts import PromptSet, prompt_ids, read_prompts
from .shortfall import decoding_shortfall

NEAR_TIE_ULPS = 8
"""A differing token is a near-tie if its logit is within so many units in the last place (of the model's dtype, at the
size of the best logit) of the best one. bfloat16 keeps 8 bits: at a logit of 20 the unit is 0.125."""


SLOTS_SHOWN = 6  # of the block, in the table of several sets


@dataclass(frozen=True)
class Difference:
    """A token of the greedy output that is not the target's own choice after the same prefix."""

    prompt: int
    position: int  # among the new tokens
    token: int
    own: int
    gap: float  # logit of own minus logit of token
    near_tie: bool


@dataclass(frozen=True)
class Request:
    """One decoded prompt."""

    prompt_tokens: int
    new_tokens: int
    steps: int
    acceptance_length: float
    produced: list[int]  # tokens of each verification, bonus included
    speculative_seconds: float
    plain_seconds: float
    text: str | None
    prompts: str = ""  # name of the set it is from


@dataclass
class EvalReport:
    """What `evaluate` measured. Times are of decoding alone, prefill left out."""

    drafter: str
    target: str
    device: str
    dtype: str
    block_size: int
    draft_layers: int
    sampling: dict[str, Any]
    max_new_tokens: int
    requests: list[Request]
    drafted: list[int]  # [B-1] verifications that drafted slot k
    reached: list[int]  # [B-1] of these, how many accepted slots 1 to k-1
    accepted: list[int]  # [B-1] of these, how many accepted slots 1 to k
    differences: list[Difference] | None  # None: sampled, nothing to compare
    median_lead: float  # median logit gap between the target's best and second token, for scale
    versions: dict[str, str] = field(default_factory=dict)
    prompts: str = ""  # name of the set, or of all of them
    source: dict[str, Any] = field(default_factory=dict)  # run, run id, step and metrics of the drafter's checkpoint
    leads: list[float] = field(default_factory=list, repr=False)  # the gaps that median_lead is of; not written

    @property
    def steps(self) -> int:
        return sum(request.steps for request in self.requests)

    @property
    def new_tokens(self) -> int:
        return sum(request.new_tokens for request in self.requests)

    @property
    def pooled(self) -> float:
        """Acceptance length over all verifications, the bonus token counted."""
        return sum(sum(request.produced) for request in self.requests) / self.steps if self.steps else 0.0

    @property
    def mean_of_requests(self) -> float:
        lengths = [request.acceptance_length for request in self.requests if request.steps]
        return statistics.fmean(lengths) if lengths else 0.0

    @property
    def per_position(self) -> list[float]:
        """[B-1] share of verifications that accepted slots 1 to k, among those that drafted slot k."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def conditional(self) -> list[float]:
        """[B-1] share of verifications that accepted slot k, among those that drafted it and accepted all before."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def speculative_tokens_per_s(self) -> float:
        return _rate(self._decoded, sum(request.speculative_seconds for request in self.requests))

    @property
    def plain_tokens_per_s(self) -> float:
        return _rate(self._decoded, sum(request.plain_seconds for request in self.requests))

    @property
    def speedup(self) -> float:
        plain = self.plain_tokens_per_s
        return self.speculative_tokens_per_s / plain if plain else 0.0

    @property
    def lossless(self) -> bool:
        """Whether every greedy token is the target's own, near-ties below float32 excepted."""
        return all(difference.near_tie for difference in self.differences or ())

    @property
    def _decoded(self) -> int:
        return self.new_tokens - len(self.requests)  # the first token of each comes from the prefill

    @property
    def warning(self) -> str | None:
        """Said when the held-out rows promised much more than was accepted here, in blocks of the trained size."""
        if self.source.get("block_size", self.block_size) != self.block_size:
            return None
        return decoding_shortfall(self.source, self.pooled)

    def summary(self) -> dict[str, Any]:
        """The figures without the requests."""
        return {
            "warning": self.warning,
            "acceptance_length": {
                "counts": "bonus token included",
                "pooled": self.pooled,
                "mean_of_requests": self.mean_of_requests,
            },
            "per_position": self.per_position,
            "conditional": self.conditional,
            "speed": {
                "speculative_tokens_per_s": self.speculative_tokens_per_s,
                "plain_tokens_per_s": self.plain_tokens_per_s,
                "speedup": self.speedup,
            },
            "new_tokens": self.new_tokens,
            "verifications": self.steps,
            "lossless": self.lossless if self.differences is not None else None,
        }

    def to_json(self) -> dict[str, Any]:
        fields = asdict(replace(self, leads=[]))
        del fields["leads"]
        return self.summary() | fields

    def write(self, path: Path) -> None:
        _write_json(path, self.to_json())

    def lines(self) -> list[str]:
        """The report in a few lines of text."""
        rates = " ".join(f"{rate:.2f}" for rate in self.per_position)
        found = [
            f"acceptance length (bonus token counted): {self.pooled:.3f} pooled, "
            f"{self.mean_of_requests:.3f} mean of {len(self.requests)} requests",
            f"accepted up to slot 1..{self.block_size - 1}: {rates}",
            f"speed: {self.speculative_tokens_per_s:.1f} tokens/s, {self.speedup:.2f} x plain decoding "
            f"({self.plain_tokens_per_s:.1f}) on {self.device} in {self.dtype}",
        ]
        if self.differences is None:
            found.append(f"sampled at temperature {self.sampling['temperature']}: no token comparison")
        else:
            found.append(self._differences_line())
        return found if self.warning is None else [*found, f"WARNING: {self.warning}"]

    def _differences_line(self) -> str:
        differences = self.differences or []
        if not differences:
            return f"output: all {self.new_tokens} tokens are the target's own greedy choice"
        far = [d for d in differences if not d.near_tie]
        widest = max(d.gap for d in differences)
        verdict = "each a near-tie" if not far else f"{len(far)} NOT near-ties: the output is not the target's"
        return (
            f"output: {len(differences)} of {self.new_tokens} tokens differ from the target's own choice, {verdict} "
            f"(widest logit gap {widest:.3f}; the median lead of its best token is {self.median_lead:.2f})"
        )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def near_tie(gap: float, top: float, dtype: torch.dtype) -> bool:
    """Whether logits `gap` below a best logit `top` are equal up to rounding in `dtype`. Never in float32."""
    if dtype == torch.float32:
        return False
    unit = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(top), 1e-6)))
    return gap <= NEAR_TIE_ULPS * unit


def evaluate(drafter: Path, prompts: Path, *, limit: int | None = None, **options: Any) -> EvalReport:
    """`evaluate_sets` on one file of prompts, or its first `limit`."""
    return evaluate_sets(drafter, [PromptSet(prompts.name, read_prompts(prompts, limit))], **options).combined


def evaluate_sets(
    drafter: Path,
    sets: Sequence[PromptSet],
    *,
    target: str | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling = GREEDY,
    block_size: int | None = None,
    dtype: str = "bfloat16",
    device: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> "Evaluation":
    """Loads both models and evaluates the drafter on each set of prompts.

    drafter: a checkpoint or an exported folder. target: folder, GGUF file or hub id; default: the one that the drafter
    was trained for. device: default cuda if there is one; a CPU without fast bfloat16 computes in float32.
    template_kwargs: variables for the chat template. progress(done, all) after each prompt, over all sets.
    """
    source = drafter_source(drafter)
    target = target or source.get("target")
    if target is None:
        raise UsageError(f"{drafter} does not say which target it is for: give --target")
    info = target_info(target)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    number = compute_dtype(dtype, device)
    # Before the target: what is wrong with drafter or prompts shows at once, and a large target takes minutes to load.
    loaded = load_drafter(drafter, dtype=number, device=device, num_target_layers=info.num_layers)
    check_fits(loaded.config, info)
    tokenizer = AutoTokenizer.from_pretrained(info.path, trust_remote_code=trust_remote_code)
    asked = [prompt_ids(tokenizer, found.prompts, template_kwargs) for found in sets]
    model = load_causal_lm(info.path, number, device, trust_remote_code)
    loaded.to(model.dtype)
    total = sum(len(found.prompts) for found in sets)
    starts = accumulate((len(found.prompts) for found in sets), initial=0)
    reports = []
    for found, ids, start in zip(sets, asked, starts, strict=False):
        report = evaluate_models(
            loaded,
            model,
            ids,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_tokens(model, tokenizer),
            sampling=sampling,
            block_size=block_size,
            names=(str(drafter), target),
            decode=lambda ids: str(tokenizer.decode(ids)),
            progress=(lambda done, start=start: progress(start + done, total)) if progress else None,
        )
        requests = [replace(request, prompts=found.name) for request in report.requests]
        reports.append(replace(report, prompts=found.name, source=source, requests=requests))
    return Evaluation(reports)


@dataclass(frozen=True)
class Evaluation:
    """One drafter on several prompt sets: a report each, of the same models and settings."""

    reports: list[EvalReport]

    @property
    def combined(self) -> EvalReport:
        """All requests as if they were of one set."""
        first, *rest = self.reports
        if not rest:
            return first
        starts = accumulate((len(report.requests) for report in self.reports), initial=0)
        differences = None
        if first.differences is not None:
            differences = [
                replace(difference, prompt=start + difference.prompt)
                for report, start in zip(self.reports, starts, strict=False)
                for difference in report.differences or []
            ]
        leads = [lead for report in self.reports for lead in report.leads]
        return replace(
            first,
            prompts=", ".join(report.prompts for report in self.reports),
            requests=[request for report in self.reports for request in report.requests],
            drafted=_sums(report.drafted for report in self.reports),
            reached=_sums(report.reached for report in self.reports),
            accepted=_sums(report.accepted for report in self.reports),
            differences=differences,
            leads=leads,
            median_lead=statistics.median(leads),
        )

    def by_name(self) -> dict[str, EvalReport]:
        return {report.prompts: report for report in self.reports}

    def to_json(self) -> dict[str, Any]:
        """The combined report, and under `sets` the figures of each set."""
        sets = [
            {"prompts": report.prompts, "requests": len(report.requests), **report.summary()} for report in self.reports
        ]
        return self.combined.to_json() | {"sets": sets}

    def write(self, path: Path) -> None:
        _write_json(path, self.to_json())

    def lines(self) -> list[str]:
        """The report as text; several sets as a table, the combined figures under it."""
        if len(self.reports) == 1:
            return self.combined.lines()
        return [*_table(self), "", *self.combined.lines()]


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n")


def _sums(columns: Iterable[list[int]]) -> list[int]:
    return [sum(slot) for slot in zip(*columns, strict=True)]


def _table(evaluation: Evaluation) -> list[str]:
    """A line a set, and one for all. Columns: requests, acceptance length (pooled, mean of requests), speed-up, and the
    share of verifications that accepted slots 1 to k, for the first few k."""
    slots = min(SLOTS_SHOWN, len(evaluation.reports[0].per_position))
    header = ["prompts", "requests", "pooled", "mean", "speed-up", *(f"slot {k}" for k in range(1, slots + 1))]
    rows = [header]
    for report in [*evaluation.reports, replace(evaluation.combined, prompts="all")]:
        figures = [f"{report.pooled:.3f}", f"{report.mean_of_requests:.3f}", f"{report.speedup:.2f}"]
        shares = [f"{rate:.2f}" for rate in report.per_position[:slots]]
        rows.append([report.prompts, str(len(report.requests)), *figures, *shares])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for row in rows
        for cells in [list(zip(row, widths, strict=True))]
    ]


def check_fits(config: DrafterConfig, info: TargetInfo) -> None:
    """ConfigError where the drafter was made for a target of another shape."""
    pairs = {
        "layers": (config.num_target_layers, info.num_layers),
        "hidden size": (config.hidden_size, info.hidden_size),
        "vocabulary rows": (config.vocab_size, info.vocab_size),
    }
    wrong = [f"{name} {ours} against {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if wrong:
        raise ConfigError(f"the drafter does not fit the target {info.path}: {'; '.join(wrong)}")


def evaluate_models(
    drafter: DraftModel,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    stop_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    block_size: int | None = None,
    names: tuple[str, str] = ("", ""),
    decode: Callable[[list[int]], str] | None = None,
    progress: Callable[[int], None] | None = None,
    replays: dict[tuple[int, ...], Replay] | None = None,
) -> EvalReport:
    """Evaluates loaded models on prompts of token ids. `names`: drafter and target, for the report; `decode`: token
    ids to text, to keep the outputs; `progress`: called with the number of prompts done; `replays`: kept between the
    evaluations of several drafters on the same model and prompts, whose outputs are mostly the same."""
    size = block_size or drafter.config.block_size
    if size < 2:
        raise UsageError("block size must be 2 or more, the anchor included")
    if not prompts:
        raise UsageError("no prompts to evaluate on")
    device, dtype = model.device, model.dtype
    for module in (model, drafter):
        if isinstance(module, nn.Module):  # a drafter may also be a stand-in
            narrow_linears(module)
    tally = _Tally(size, dtype, sampling.greedy)
    # The first forwards of each kind pay for kernels and memory; without this the first prompt would carry that.
    warm = speculate(drafter, model, prompts[0], max_new_tokens=size + 1, sampling=sampling, block_size=size)
    replay(model, prompts[0], warm.tokens)
    replays = {} if replays is None else replays
    for number, prompt in enumerate(prompts):
        generation = speculate(
            drafter,
            model,
            prompt,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            sampling=sampling,
            block_size=size,
        )
        text = decode(generation.tokens) if decode else None
        key = (number, *generation.tokens)
        if key not in replays:
            replays[key] = replay(model, prompt, generation.tokens)
        tally.add(number, len(prompt), generation, replays[key], text)
        if progress:
            progress(number + 1)
    return EvalReport(
        drafter=names[0],
        target=names[1],
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        block_size=size,
        draft_layers=drafter.config.num_hidden_layers,
        sampling=asdict(sampling),
        max_new_tokens=max_new_tokens,
        requests=tally.requests,
        drafted=tally.drafted,
        reached=tally.reached,
        accepted=tally.accepted,
        differences=tally.differences if sampling.greedy else None,
        median_lead=statistics.median(tally.leads),
        leads=tally.leads,
        versions=_versions(),
    )


class _Tally:
    """Counts over the requests of one evaluation."""

    def __init__(self, block_size: int, dtype: torch.dtype, greedy: bool) -> None:
        self.requests: list[Request] = []
        self.drafted = [0] * (block_size - 1)
        self.reached = [0] * (block_size - 1)
        self.accepted = [0] * (block_size - 1)
        self.differences: list[Difference] = []
        self.leads: list[float] = []
        self._dtype = dtype
        self._greedy = greedy

    def add(self, number: int, prompt_tokens: int, generation: Generation, alone: Replay, text: str | None) -> None:
        for step in generation.steps:
            for slot in range(step.drafted):
                self.drafted[slot] += 1
                self.reached[slot] += step.accepted >= slot
                self.accepted[slot] += step.accepted > slot
        self.leads += alone.lead
        self.requests.append(
            Request(
                prompt_tokens=prompt_tokens,
                new_tokens=len(generation.tokens),
                steps=len(generation.steps),
                acceptance_length=generation.acceptance_length,
                produced=[step.produced for step in generation.steps],
                speculative_seconds=generation.decode_seconds,
                plain_seconds=alone.decode_seconds,
                text=text,
            )
        )
        if self._greedy:
            self._compare(number, generation.tokens, alone)

    def _compare(self, number: int, tokens: list[int], alone: Replay) -> None:
        for i, (token, own) in enumerate(zip(tokens, alone.own, strict=True)):
            if token != own:
                tie = near_tie(alone.gap[i], alone.top[i], self._dtype)
                self.differences.append(Difference(number, i, token, own, alone.gap[i], tie))


def _versions() -> dict[str, str]:
    return {"paceline": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
