"""`paceline export --check`: does an engine's own code make of an exported folder what was trained?

    zlab         z-lab's `dflash`: its model class, and its decoding loop
    speculators  the library's config and model class, its masks and embedding, in our decoding loop (it has none)

Looked at, each a line of the report: the settings that the engine reads, every tensor bit by bit, RoPE to the last
position, logits on the target's real states, and whole answers, verification by verification. All is computed in
float32, where two right implementations differ by rounding alone. The other side of each comparison is the trainer's
`Drafter`, with the checkpoint's config and its masters rounded to the folder's dtype; without a checkpoint, the folder
as it is read here.
"""

import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from ..common.errors import ConfigError, PacelineError, UsageError, first_line
from ..common.loading import load_causal_lm, quiet_loading, stop_tokens
from ..common.target_info import target_info
from .decode import Generation, TargetDecoder, narrow_linears, speculate
from .drafter import SLIDING, ContextCache, Drafter, DrafterConfig, blank_drafter
from .evaluate import check_fits
from .export import drafter_target, read_drafter, torch_dtype
from .formats import is_speculators, read_config
from .prompts import prompt_ids, read_prompts

PACKAGES = {"zlab": ("dflash",), "speculators": ("speculators", "hs-connectors")}
BLOCKS = 8  # compared in each answer
TOLERANCE = 1e-4
"""Largest difference of float32 logits, as a share of the largest logit: some thousand times what rounding makes, and
far below what one wrong bit of a mask, a position or a base makes."""


@dataclass(frozen=True)
class Finding:
    passed: bool
    text: str


@dataclass
class CheckReport:
    """What the engine made of the folder."""

    engine: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def add(self, passed: bool, text: str) -> bool:
        """Returns `passed`."""
        self.findings.append(Finding(passed, text))
        return passed

    def lines(self) -> list[str]:
        return [f"{'ok  ' if one.passed else 'FAIL'}  {one.text}" for one in self.findings]


@dataclass(frozen=True)
class Answer:
    """A prompt, the target's greedy answer to it, and the target's states: features [T, K·H] of all T tokens."""

    prompt: list[int]
    generation: Generation
    tokens: Tensor
    features: Tensor


class Engine(ABC):
    """An engine's drafter, loaded from the folder by the engine's own code; in float32 once its tensors are kept."""

    name: str
    _model: Any
    _loaded: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Its drafter's tensors as they were loaded, by the folder's names."""
        return self._loaded

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Its cosines and sines at positions [n]: two of [n, D]."""
        cos, sin = self._model.rotary_emb(torch.zeros(1, device=positions.device), positions[None])
        return cos[0], sin[0]

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What it read: the keys of `trained_settings`."""

    @abstractmethod
    def logits(self, answer: Answer, anchors: Sequence[int]) -> Tensor:
        """Its logits [blocks, B, V] of the blocks at these anchors."""

    @abstractmethod
    def decode(self, prompt: list[int], new_tokens: int, stop_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """New tokens of a greedy answer, and how many each verification produced."""


def require_engine(format: str) -> None:
    """PacelineError that says what to install, where the engine of a format is missing."""
    for package in PACKAGES[format]:
        try:
            version(package)
        except PackageNotFoundError:
            raise PacelineError(
                f"--check of the {format} format needs {package}: pip install --no-deps {' '.join(PACKAGES[format])} "
                "(docs/checkpoints.md lists what speculators imports)"
            ) from None


@torch.no_grad()
def check_export(
    folder: Path,
    prompts: Path,
    *,
    checkpoint: Path | None = None,
    target: str | None = None,
    limit: int = 3,
    new_tokens: int = 32,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> CheckReport:
    """Checks `folder` in its engine, on the first `limit` prompts of a JSONL file, `new_tokens` each.

    checkpoint: what it was exported from, whose masters its tensors are then compared with. target: folder, GGUF file
    or hub id; default: the one that the folder names. Takes as much memory as target and drafter in float32.

    Raises:
        ConfigError, UsageError: folder, target or prompts cannot be read or do not fit each other.
        PacelineError: the engine is not installed.
    """
    target = target or drafter_target(folder)
    if target is None:
        raise UsageError(f"{folder} does not say which target it is for: give --target")
    format = "speculators" if is_speculators(folder) else "zlab"
    require_engine(format)
    info = target_info(target, trust_remote_code)
    config, stored = read_drafter(folder, info.num_layers)
    check_fits(config, info)
    messages = read_prompts(prompts, limit)
    model = load_causal_lm(info.path, torch.float32, device, trust_remote_code)
    narrow_linears(model)  # for the one target that either side decodes with
    tokenizer = AutoTokenizer.from_pretrained(info.path, trust_remote_code=trust_remote_code)
    trained, weights = _trained(checkpoint, config, stored)
    ours = blank_drafter(trained)
    ours.load_state_dict(weights)
    ours = ours.to(device).eval().requires_grad_(False)
    with quiet_loading():
        engine = _load(format, folder, model, info.path)
    stops = stop_tokens(model, tokenizer)
    report = CheckReport(engine.name)
    if checkpoint is not None:
        _check_masters(report, trained, weights, config, stored)
    if not _check_settings(report, engine, trained):
        return report  # what it would compute has another shape or meaning
    _check_tensors(report, engine, config, stored)
    _check_rope(report, engine, ours, device)
    answers = [_answer(ours, model, ids, new_tokens, stops) for ids in prompt_ids(tokenizer, messages)]
    _check_logits(report, engine, ours, model, answers)
    _check_decoding(report, engine, answers, new_tokens, stops)
    return report


# The checks


def trained_settings(config: DrafterConfig) -> dict[str, Any]:
    """What every engine has to read as it was trained."""
    sliding = [kind == SLIDING for kind in config.layer_types]
    return {
        "block size": config.block_size,
        "mask token": config.mask_token_id,
        "target layers": list(config.target_layer_ids),
        "windows": [config.sliding_window if slides else None for slides in sliding],
        "causal inside the block": sliding,
    }


def _trained(
    checkpoint: Path | None, config: DrafterConfig, stored: dict[str, Tensor]
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """The other side of every comparison: the checkpoint in the folder's dtype, or else the folder as read here."""
    if checkpoint is None:
        return config, stored
    trained, masters = read_drafter(checkpoint)
    dtype = torch_dtype(config.dtype)
    return dataclasses.replace(trained, dtype=config.dtype), {name: one.to(dtype) for name, one in masters.items()}


def _check_masters(
    report: CheckReport,
    trained: DrafterConfig,
    weights: dict[str, Tensor],
    config: DrafterConfig,
    stored: dict[str, Tensor],
) -> None:
    wrong = sorted(name for name in weights.keys() | stored.keys() if not _same(weights.get(name), stored.get(name)))
    said = dataclasses.asdict(config)
    wrong += [
        f"{key} {said[key]}, trained with {value}"
        for key, value in dataclasses.asdict(trained).items()
        if said[key] != value
    ]
    text = f"config and tensors are the checkpoint's: {len(stored)} float32 masters in {config.dtype}"
    report.add(not wrong, text if not wrong else f"not the checkpoint's in {config.dtype}: {', '.join(wrong)}")


def _check_settings(report: CheckReport, engine: Engine, trained: DrafterConfig) -> bool:
    read, wanted = engine.settings(), trained_settings(trained)
    wrong = [f"{name} {read.get(name)}, not {value}" for name, value in wanted.items() if read.get(name) != value]
    said = ", ".join(f"{name} {wanted[name]}" for name in ("block size", "mask token", "target layers"))
    text = f"{said}, windows and causality as trained" if not wrong else "; ".join(wrong)
    return report.add(not wrong, f"{engine.name} reads {text}")


def _check_tensors(report: CheckReport, engine: Engine, config: DrafterConfig, stored: dict[str, Tensor]) -> None:
    loaded = engine.tensors()
    wrong = sorted(name for name in stored.keys() | loaded.keys() if not _same(stored.get(name), loaded.get(name)))
    odd = sorted({str(one.dtype).removeprefix("torch.") for one in stored.values()} - {config.dtype})
    wrong += [f"tensors of {name} under a config of {config.dtype}" for name in odd]
    text = f"{engine.name} has every tensor of the folder, bit by bit, and no other: {len(stored)} of {config.dtype}"
    report.add(not wrong, text if not wrong else f"{engine.name} loads other tensors: {', '.join(wrong)}")


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other.to(one.device))


def _check_rope(report: CheckReport, engine: Engine, ours: Drafter, device: str) -> None:
    last = max(1, ours.config.max_position_embeddings) - 1
    positions = torch.linspace(0, last, min(last + 1, 257), device=device).long()
    cos, sin = ours.rope(torch.zeros(1, device=device), positions)
    their_cos, their_sin = engine.rope(positions)
    worst = max(float((cos[:, 0] - their_cos).abs().max()), float((sin[:, 0] - their_sin).abs().max()))
    report.add(
        worst < 1e-6,
        f"RoPE of base {ours.config.rope_theta:g}, positions 0 to {last}: largest difference {worst:.1e}",
    )


def _answer(ours: Drafter, model: PreTrainedModel, prompt: list[int], new_tokens: int, stops: Sequence[int]) -> Answer:
    generation = speculate(ours, model, prompt, max_new_tokens=new_tokens, stop_ids=stops)
    tokens = torch.tensor([*prompt, *generation.tokens], device=model.device)
    _, features = TargetDecoder(model, ours.config.target_layer_ids).forward(tokens)
    assert features is not None
    return Answer(prompt, generation, tokens, features)


def _check_logits(
    report: CheckReport, engine: Engine, ours: Drafter, model: PreTrainedModel, answers: Sequence[Answer]
) -> None:
    decoder, blocks, worst, largest = TargetDecoder(model), 0, 0.0, 0.0
    for answer in answers:
        anchors = _anchors(answer, engine, ours.config)
        if not anchors:
            continue
        wanted = torch.stack([_our_logits(ours, decoder, answer, anchor) for anchor in anchors])
        found = engine.logits(answer, anchors)
        blocks += len(anchors)
        largest = max(largest, float(wanted.abs().max()))
        worst = max(worst, float((wanted - found).nan_to_num(torch.inf).abs().max()))
    if not blocks:
        report.add(False, "logits: no prompt is short enough to compare any")
        return
    report.add(
        worst <= TOLERANCE * largest,
        f"logits of {blocks} blocks on the target's own states: largest difference to the trainer's {worst:.1e}, of "
        f"logits up to {largest:.1f}",
    )


def _anchors(answer: Answer, engine: Engine, config: DrafterConfig) -> list[int]:
    """Places in the answer; those alone at which the engine's masks are meant to be ours."""
    first, last = len(answer.prompt), len(answer.tokens) - 1
    spread = sorted({int(place) for place in torch.linspace(first, last, BLOCKS).tolist()})
    limit = getattr(engine, "most_context", None)
    return [place for place in spread if limit is None or place <= limit]


def _our_logits(ours: Drafter, decoder: TargetDecoder, answer: Answer, anchor: int) -> Tensor:
    """[B, V] of the block at `anchor`."""
    block = _block(ours.config, answer, anchor)
    hidden = ours.draft(decoder.embed(block)[None], answer.features[None, :anchor], ContextCache())
    return decoder.head(hidden[0])


def _block(config: DrafterConfig, answer: Answer, anchor: int) -> Tensor:
    block = torch.full((config.block_size,), config.mask_token_id, device=answer.tokens.device)
    block[0] = answer.tokens[anchor]
    return block


def _check_decoding(
    report: CheckReport, engine: Engine, answers: Sequence[Answer], new_tokens: int, stops: Sequence[int]
) -> None:
    wrong, steps, produced = [], 0, 0
    for number, answer in enumerate(answers, 1):
        tokens, lengths = engine.decode(answer.prompt, new_tokens, stops)
        ours = [step.produced for step in answer.generation.steps]
        steps, produced = steps + len(ours), produced + sum(ours)
        if (tokens, lengths) != (answer.generation.tokens, ours):
            wrong.append(f"prompt {number} verifications of {lengths} tokens, not {ours}")
    accepted = f"acceptance length {produced / max(1, steps):.3f} pooled over {steps} verifications"
    text = f"{engine.name} decodes {len(answers)} prompts token by token and verification by verification as we do"
    report.add(not wrong, f"{text}: {accepted}" if not wrong else f"{engine.name} decodes {'; '.join(wrong)}")


# The engines


def _load(format: str, folder: Path, model: PreTrainedModel, target: str) -> Engine:
    return SpeculatorsEngine(folder, model, target) if format == "speculators" else ZlabEngine(folder, model)


class ZlabEngine(Engine):
    """z-lab's `DFlashDraftModel`."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        from dflash.model import DFlashDraftModel, dflash_generate

        self.name = f"dflash {version('dflash')}"
        self._generate, self._target = dflash_generate, model
        dtype = torch_dtype(read_config(folder).dtype)
        try:
            self._model = cast(Any, DFlashDraftModel.from_pretrained(folder, dtype=dtype))
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.name} does not load {folder}: {first_line(error)}") from error
        self._model = self._model.to(model.device).eval()
        self._loaded = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._model.float()

    def settings(self) -> dict[str, Any]:
        attention = [layer.self_attn for layer in self._model.layers]
        return {
            "block size": self._model.block_size,
            "mask token": self._model.mask_token_id,
            "target layers": list(self._model.target_layer_ids),
            "windows": [one.sliding_window for one in attention],
            "causal inside the block": [one.is_causal for one in attention],
        }

    def logits(self, answer: Answer, anchors: Sequence[int]) -> Tensor:
        size, decoder = self._model.block_size, TargetDecoder(self._target)
        found = []
        for anchor in anchors:
            block = answer.tokens.new_full((size,), self._model.mask_token_id)
            block[0] = answer.tokens[anchor]
            hidden = self._model(
                position_ids=torch.arange(anchor + size, device=block.device)[None],
                noise_embedding=decoder.embed(block)[None],
                target_hidden=answer.features[None, :anchor],
            )
            found.append(self._model.compute_logits(hidden[0], decoder.head))
        return torch.stack(found)

    def decode(self, prompt: list[int], new_tokens: int, stop_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """By `dflash_generate`. Its own statistics need CUDA; where each verification begins tells as much."""
        starts: list[int] = []

        def note(_module: nn.Module, _args: Any, options: dict[str, Any]) -> None:
            starts.append(int(options["position_ids"][0, 0]))

        watch = self._target.register_forward_pre_hook(note, with_kwargs=True)
        try:
            ids = cast(torch.LongTensor, torch.tensor([prompt], device=self._target.device))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # how it names the target's cache
                output = self._generate(self._model, self._target, ids, new_tokens, list(stop_ids) or None)
        finally:
            watch.remove()
        tokens = cast(Tensor, output)[0, len(prompt) :].tolist()
        places = [*starts[1:], len(prompt) + len(tokens) - 1]  # the first call is the prefill
        return tokens, [after - before for before, after in pairwise(places)]


class SpeculatorsEngine(Engine):
    """The `speculators` library's `DFlashDraftModel`, in the place of a `DraftModel` of our decoding loop."""

    def __init__(self, folder: Path, model: PreTrainedModel, target: str) -> None:
        from loguru import logger

        logger.disable("speculators")
        from speculators import SpeculatorModel, SpeculatorModelConfig

        self.name = f"speculators {version('speculators')}"
        self._target = model
        try:
            config: Any = SpeculatorModelConfig.from_pretrained(folder)
            config.speculators_config.verifier.name_or_path = target  # here; a GGUF file it could not read
            config.transformer_layer_config._attn_implementation = "sdpa"  # its own default has no CPU kernel
            dtype = torch_dtype(read_config(folder).dtype)
            self._model = SpeculatorModel.from_pretrained(folder, config=config, dtype=dtype)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.name} does not load {folder}: {first_line(error)}") from error
        self._model = self._model.to(model.device).eval()
        self.config = read_config(folder)
        targets = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.")
        state = self._model.state_dict()
        self._loaded = {name: one.clone() for name, one in state.items() if not name.startswith(targets)}
        self._model.float()
        # What it took from the target it holds in the folder's dtype; the other side embeds in float32.
        self._model.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        self._cache: ContextCache | None = None
        self._features: list[Tensor] = []

    @property
    def most_context(self) -> int | None:
        """It counts a window from the anchor and engines count it from the slot: the same while it holds all."""
        sliding = SLIDING in self.config.layer_types
        return (self.config.sliding_window or 0) - self.config.block_size if sliding else None

    def settings(self) -> dict[str, Any]:
        model, config = self._model, self._model.config
        slides = [i in model.sliding_window_indices for i in range(len(model.layers))]
        return {
            "block size": config.block_size if not config.sample_from_anchor else None,
            "mask token": model.mask_token_id,
            "target layers": [layer_id - 1 for layer_id in model.target_layer_ids],
            "windows": [model.sliding_window if one else None for one in slides],
            "causal inside the block": [one and not model.sliding_window_non_causal for one in slides],
        }

    def logits(self, answer: Answer, anchors: Sequence[int]) -> Tensor:
        hidden = self._blocks(answer.features, answer.tokens, anchors, self.config.block_size)
        return TargetDecoder(self._target).head(hidden)

    def decode(self, prompt: list[int], new_tokens: int, stop_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        generation = speculate(self, self._target, prompt, max_new_tokens=new_tokens, stop_ids=stop_ids)
        return generation.tokens, [step.produced for step in generation.steps]

    def draft(self, block_embeds: Tensor, features: Tensor, cache: ContextCache) -> Tensor:
        """As `Drafter.draft`, by the library's forward over the whole context."""
        if cache is not self._cache:
            self._cache, self._features = cache, []
        self._features.append(features[0])
        context = torch.cat(self._features)
        table = self._model.embed_tokens.weight
        tokens = torch.zeros(len(context) + 1, dtype=torch.long, device=table.device)
        tokens[-1] = (table == block_embeds[0, 0]).all(-1).nonzero()[0, 0]  # the anchor, which it embeds itself
        return self._blocks(context, tokens, [len(context)], block_embeds.shape[1])

    def _blocks(self, features: Tensor, tokens: Tensor, anchors: Sequence[int], size: int) -> Tensor:
        """States [blocks, size, H] of blocks at `anchors`, by its training forward.

        It draws anchors where its loss mask is 1 and leaves out the last block of the row: a mask of just these
        anchors, and a row that is longer by a block, make the draw certain.
        """
        length = max(len(features), len(tokens)) + size + 1
        states = features.new_zeros(1, length, features.shape[1])
        states[0, : len(features)] = features
        ids = tokens.new_zeros(1, length)
        ids[0, : len(tokens)] = tokens
        wanted = torch.zeros(1, length, device=features.device)
        wanted[0, list(anchors)] = 1
        self._model.block_size = size
        hidden, _, _, _, places = self._model._backbone_forward(
            hidden_states=states,
            input_ids=ids,
            loss_mask=wanted,
            verifier_last_hidden_states=features.new_zeros(1, length, self.config.hidden_size),
            document_ids=tokens.new_zeros(1, length),
            max_anchors=len(anchors),
        )
        if places.view(-1, size)[:, 0].tolist() != list(anchors):
            raise PacelineError(f"{self.name} drew other anchors than it was given")
        return hidden.view(len(anchors), size, -1)
