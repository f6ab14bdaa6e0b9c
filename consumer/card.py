"""The model card (README.md) of an exported drafter: how to serve it, what it accepts, how it was trained.

Says only what the checkpoint, the run file in it and the reports of `paceline eval` say; serving commands are those
that the engines' documentation gives.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common import __version__
from ..common.errors import ConfigError
from .checkpoint import FOLDER, CheckpointState
from .drafter import SLIDING, DrafterConfig

CARD = "README.md"
RECIPE = ("drafter", "objective", "optimizer", "trainer")  # tables of the run file
DATA = ("data", "stream")
_OF_THE_MACHINE = frozenset(
    f"{table}.{key}"
    for table, keys in (
        ("trainer", ("ranks", "devices", "threads", "hang_seconds", "skip_limit")),
        ("stream", ("ring_dir", "slots", "prefetch")),
    )
    for key in keys
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

Evaluation = Mapping[str, Any]  # `EvalReport.to_json`


def model_card(
    state: CheckpointState, config: DrafterConfig, format: str, *, target: str, evaluations: Sequence[Evaluation] = ()
) -> str:
    """The card's Markdown. target: what engines call the target."""
    sections = [
        _head(state, config, format, target),
        _serving(config, format, target),
        _acceptance(state, evaluations),
        _settings("Recipe", state, RECIPE, _recipe_facts(state)),
        _settings("Data", state, DATA, _data_facts(state)),
    ]
    return "\n".join(line for section in sections for line in [*section, ""]).rstrip() + "\n"


def _head(state: CheckpointState, config: DrafterConfig, format: str, target: str) -> Iterator[str]:
    yield "---"
    if _HUB_ID.fullmatch(target) and not Path(target).exists():
        yield f"base_model: {target}"
    yield "tags: [dflash, speculative-decoding, draft-model]"
    yield "---"
    yield ""
    yield f"# {state.name}: a DFlash drafter for {_short(target)}"
    yield ""
    kinds = sum(kind == SLIDING for kind in config.layer_types)
    window = f" ({kinds} of them with a sliding window of {config.sliding_window})" if kinds else ""
    taps, layers = config.target_layer_ids, config.num_hidden_layers
    yield (
        f"Drafts {config.block_size - 1} tokens at once (block size {config.block_size}, the anchor included) from the "
        f"target's hidden states after layer{'s' * (len(taps) > 1)} {', '.join(map(str, taps))} of "
        f"{config.num_target_layers}, counted from 0, with {layers} draft layer{'s' * (layers > 1)}{window}. Mask "
        f"token {config.mask_token_id}. It holds no embedding and no head: engines take the target's, and it is of use "
        "with this target alone."
    )
    yield ""
    yield f"Format {format}, {config.dtype}; step {state.step} of run `{state.run_id}`, paceline {__version__}."


# Serving


def _serving(config: DrafterConfig, format: str, target: str) -> Iterator[str]:
    yield "## Serving"
    yield ""
    yield "`DRAFTER` is this folder. The commands are those of the engines' documentation."
    yield ""
    yield from _block("vLLM", vllm_commands(config, format, target))
    if format == "zlab":
        yield ""
        yield from _block("SGLang", sglang_commands(config, target))
    else:
        yield ""
        yield "SGLang documents no loading of this format: export with `--format zlab` for it."


def vllm_commands(config: DrafterConfig, format: str, target: str) -> list[str]:
    """vLLM's docs: features/speculative_decoding (method dflash) and, for speculators, its tutorial serve_vllm."""
    method = json.dumps(
        {"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": config.block_size - 1}, ensure_ascii=False
    )
    named = f"vllm serve {shlex.quote(target)} \\\n    --speculative-config {shlex.quote(method)}"
    if len(set(config.layer_types)) > 1:  # vLLM's own error message for layers of both kinds
        named = f"VLLM_USE_V2_MODEL_RUNNER=1 {named}"
    return [named] if format == "zlab" else ["vllm serve DRAFTER", named]


def sglang_commands(config: DrafterConfig, target: str) -> list[str]:
    """z-lab's README and model cards: --speculative-num-draft-tokens is the block size."""
    return [
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} \\\n"
        "    --speculative-algorithm DFLASH --speculative-draft-model-path DRAFTER \\\n"
        f"    --speculative-num-draft-tokens {config.block_size}"
    ]


def _block(title: str, commands: Sequence[str]) -> Iterator[str]:
    yield f"{title}:"
    yield ""
    yield "```bash"
    yield "\n# or, naming the target:\n".join(commands)
    yield "```"


# Acceptance


def find_evaluations(checkpoint: Path, state: CheckpointState, given: Sequence[Path] = ()) -> list[Evaluation]:
    """Reports of `paceline eval --out` on this checkpoint or an export of it: those given, and any JSON files in the
    run's output folder that name its run and step.

    Raises:
        ConfigError: one that was given cannot be read or is of another checkpoint.
    """
    found = [_given(path, state) for path in given]
    root = checkpoint.absolute().parent.parent if checkpoint.absolute().parent.name == FOLDER else None
    paths = sorted([*root.glob("*.json"), *root.glob("eval*/*.json")]) if root else []
    known = {path.resolve() for path in given}
    for path in paths:
        report = _report(path)
        if report is not None and path.resolve() not in known and _names(report, state):
            found.append(report)
    return found


def _given(path: Path, state: CheckpointState) -> Evaluation:
    report = _report(path)
    if report is None:
        problem = f"{path} is no report of `paceline eval --out`" if path.exists() else f"there is no file {path}"
        raise ConfigError(f"--eval: {problem}: give one that it wrote")
    source = report.get("source") or {}
    if source and not _names(report, state):
        raise ConfigError(
            f"{path} is of step {source.get('step')} of run {source.get('run_id')}, not of step {state.step} of "
            f"{state.run_id}"
        )
    return report


def _report(path: Path) -> Evaluation | None:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) and "acceptance_length" in report and "per_position" in report else None


def _names(report: Evaluation, state: CheckpointState) -> bool:
    source = report.get("source") or {}
    return (source.get("run_id"), source.get("step")) == (state.run_id, state.step)


def _acceptance(state: CheckpointState, evaluations: Sequence[Evaluation]) -> Iterator[str]:
    yield "## Acceptance"
    yield ""
    yield "Tokens produced per verification, the bonus token counted: from 1 (useless) to the block size (perfect)."
    yield ""
    if state.evaluated == state.step and "tau_chain" in state.metrics:
        accuracy = state.metrics.get("eval_acc")
        right = f", {accuracy:.1%} of all slots right" if accuracy is not None else ""
        yield (
            f"On the run's {state.run['data']['held_out']} held-out rows, from recorded states: "
            f"{state.metrics['tau_chain']:.2f} with chained anchors (`tau_chain`){right}."
        )
    else:
        yield "These weights were not evaluated on the run's held-out rows."
    yield ""
    if not evaluations:
        yield "Not measured in real decoding: `paceline eval DRAFTER --out FILE` before the export puts a table here."
        return
    yield "In real decoding (`paceline eval`), one request at a time:"
    yield ""
    yield "| prompts | requests | pooled | mean of requests | decoding | accepted up to slot 1, 2, … |"
    yield "|---|---|---|---|---|---|"
    for report, requests in (row for evaluation in evaluations for row in _by_set(evaluation)):
        lengths, sampling = report["acceptance_length"], report["sampling"]
        how = "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']}"
        slots = " ".join(f"{rate:.2f}" for rate in report["per_position"])
        yield (
            f"| {report.get('prompts') or 'not named'} | {requests} | {lengths['pooled']:.3f} | "
            f"{lengths['mean_of_requests']:.3f} | {how}, {report['max_new_tokens']} new tokens, {report['dtype']} on "
            f"{report['device']} | {slots} |"
        )


def _by_set(report: Evaluation) -> Iterator[tuple[Evaluation, int]]:
    """An evaluation on several prompt sets as one of each, with its number of requests."""
    sets = report.get("sets", [])
    if len(sets) < 2:
        yield report, len(report["requests"])
    else:
        yield from (({**report, **figures}, figures["requests"]) for figures in sets)


# How it was trained


def _recipe_facts(state: CheckpointState) -> Iterator[tuple[str, str]]:
    yield "optimiser steps", f"{state.step:,}"
    yield "context tokens trained on", f"{state.tokens:,}"
    yield "training time", f"{state.seconds / 3600:.2f} h"
    yield "written by", ", ".join(f"{name} {version}" for name, version in sorted(state.versions.items()))


def _data_facts(state: CheckpointState) -> Iterator[tuple[str, str]]:
    data = state.run["data"]
    sources = [*(file["path"] for file in data.get("files", ())), *([data["rows"]] if data.get("rows") else [])]
    yield "sources", ", ".join(_short(source) for source in sources)
    if "dataset" in state.fingerprint:
        yield "digest of the prepared rows", f"`{state.fingerprint['dataset']}`"


def _settings(
    title: str, state: CheckpointState, tables: Sequence[str], facts: Iterator[tuple[str, str]]
) -> Iterator[str]:
    """The run file's tables, every setting that has a value, without the machine's."""
    yield f"## {title}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in facts:
        yield f"| {name} | {value} |"
    for table in tables:
        for name, value in state.run.get(table, {}).items():
            key = f"{table}.{name}"
            if value not in (None, []) and key not in _OF_THE_MACHINE and key not in ("data.files", "data.rows"):
                yield f"| `{key}` | {_short(value) if isinstance(value, str) else json.dumps(value)} |"


def _short(name: str) -> str:
    """A path's last part; anything else as it is. Paths of the machine that trained are nobody's business."""
    return Path(name).name if name.startswith(("/", "~", "./", "../")) else name
