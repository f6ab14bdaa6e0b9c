"""Speculative decoding of one request with a drafter and its target.

Owns the decoding loop and the rule that accepts drafted tokens; `evaluate.py` counts and times it. The loop, for a
prompt of P tokens and a block of B slots:

    prefill: target(prompt) -> first token; its layers' outputs are the drafter's context
    repeat:  block = [last token, MASK × (B-1)]
             drafter(states of the tokens accepted last, block)      appends their keys to its cache, drafts B-1 tokens
             target([last token, proposals])                         one forward gives B next-token distributions
             accept the longest right prefix, add the target's own next token (the bonus), drop the rejected keys

The drafter's cache holds context keys only, and only of accepted tokens, so it never needs a rollback; the target's
is cropped after each verification. The hidden states are taken from the target's own forwards by hooks on the
recorded layers (before the final norm, whatever the layer), exactly what a worker records.

Greedy output is the target's own greedy output: a drafted token stays only where it equals the target's argmax. With
a temperature the rejection rule of Leviathan et al. (2211.17192) keeps the target's distribution exactly, for sampled
and for greedy proposals (a point mass).
"""

import inspect
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from ..common.errors import ConfigError
from ..common.loading import find_parts
from .drafter import ContextCache

Proposals = Literal["greedy", "sampled"]


class DraftShape(Protocol):
    """What decoding needs of a drafter's config (`DrafterConfig` has it)."""

    @property
    def block_size(self) -> int: ...
    @property
    def mask_token_id(self) -> int: ...
    @property
    def target_layer_ids(self) -> Sequence[int]: ...
    @property
    def num_hidden_layers(self) -> int: ...


class DraftModel(Protocol):
    """What decoding needs of a drafter (`Drafter` has it)."""

    @property
    def config(self) -> DraftShape: ...

    def draft(self, block_embeds: Tensor, features: Tensor, cache: ContextCache) -> Tensor:
        """States [1, b, H] after the final norm of one block; appends `features` [1, t, K·H] to the cache."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature 0 is greedy; `top_p` in (0, 1]; `top_k` 0 keeps all. `proposals` says how
    the drafter's tokens are drawn when there is a temperature."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    proposals: Proposals = "greedy"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ConfigError("temperature must be finite and not negative, as top_k, and top_p in (0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Distribution [n, V] (float32) of logits [n, V]: temperature, then the top k, then the nucleus."""
        scores = logits.float() / max(self.temperature, 1e-30)  # of less float32 makes infinities
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        probabilities = scores.softmax(-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            outside = ordered.cumsum(-1) - ordered >= self.top_p  # mass before it already fills the nucleus
            probabilities = probabilities.scatter(-1, order, ordered.masked_fill(outside, 0))
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities


GREEDY = Sampling()


@dataclass(frozen=True)
class Step:
    """One verification: slots drafted, drafted tokens accepted, tokens produced (with the bonus). Slots after a stop
    token or the length limit are not counted."""

    drafted: int
    accepted: int
    produced: int


@dataclass
class Generation:
    """New tokens of one request (the stop token included) and how they came about. The first token comes from the
    prefill and belongs to no step."""

    tokens: list[int]
    steps: list[Step] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification produced on average, the bonus token counted (0 without a verification)."""
        return sum(step.produced for step in self.steps) / len(self.steps) if self.steps else 0.0


class TargetDecoder:
    """The target, its key/value cache for one request, and taps on the layers that the drafter reads."""

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int] = ()) -> None:
        self.model = model
        self.device = model.device
        self.layer_ids = list(layer_ids)
        self.length = 0
        self._parts = find_parts(model)
        self._states: dict[int, Tensor] = {}
        self._cache, self._recording = new_target_cache(model)
        names = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # transformers before 5.24: the latter

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the embedding table, unscaled, as the drafter was trained on."""
        return F.embedding(tokens, self._parts.embedding.weight)

    def head(self, hidden: Tensor) -> Tensor:
        return self._parts.head(hidden)

    def forward(self, tokens: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Appends tokens [n] to the cache. Returns logits [n, V] (the last row only with `last_only`) and, where
        layers are tapped, their states [n, K*H]."""
        options = {self._cache_name: self._cache, "use_cache": True, "return_dict": True}
        options |= self._last_only if last_only else {}
        with self._taps():
            output = self.model(input_ids=tokens[None], **options)
        self.length += tokens.shape[0]
        if not self.layer_ids:
            return output.logits[0], None
        return output.logits[0], torch.cat([self._states[i] for i in self.layer_ids], dim=-1)

    def keep(self, length: int) -> None:
        """Drops the keys of every token after the first `length`."""
        surplus = self.length - length
        # A recording cache trims what it no longer needs in crop, also in crop(0); a plain one has nothing to do there.
        if surplus or self._recording:
            self._cache.crop(-surplus)
        self.length = length

    @contextmanager
    def _taps(self) -> Iterator[None]:
        handles = [self._parts.layers[i].register_forward_hook(self._tap(i)) for i in self.layer_ids]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _tap(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._states[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook


NARROW = 16  # rows of a product up to which `narrow_linears` turns it round


def narrow_linears(model: nn.Module) -> None:
    """Makes a CPU model's linear layers quicker where they have few rows to multiply, as in decoding.

    torch's x @ W.T repacks all of W for 2 to 16 rows; W @ x.T reads it once, three times as fast on the x86 CPUs
    measured, and the sums are the same up to rounding. Other devices keep what they have.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.device.type == "cpu":
            module.forward = partial(_narrow_forward, module)  # pyright: ignore[reportAttributeAccessIssue]


def _narrow_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if not 1 < rows <= NARROW:
        return F.linear(x, layer.weight, layer.bias)
    y = (layer.weight @ x.reshape(rows, -1).T).T.reshape(*x.shape[:-1], -1)
    return y if layer.bias is None else y + layer.bias


def new_target_cache(model: PreTrainedModel) -> tuple[Any, bool]:
    """A cache that can be cropped, and whether it records the past to do so.

    Attention layers keep every key, sliding ones too (the model's masks apply the window). Layers with a recurrent
    state can only go back if the cache records it, which recent transformers do; else ConfigError.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if all("attention" in kind and "linear" not in kind for kind in kinds):
        return DynamicCache(), False
    cache = cast(Any, DynamicCache(config=config))
    if not hasattr(cache, "activate_past_recording"):
        raise ConfigError(
            f"{config.model_type}: layers of kind {', '.join(sorted(kinds))} keep a state that this transformers "
            "cannot roll back; speculative decoding needs a newer one"
        )
    cache.activate_past_recording()
    return cache, True


@torch.inference_mode()
def speculate(
    drafter: DraftModel,
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    block_size: int | None = None,
) -> Generation:
    """Decodes one prompt of token ids. `block_size` (default: the drafter's) counts the anchor; 2 or more."""
    size = drafter.config.block_size if block_size is None else block_size
    target = TargetDecoder(model, drafter.config.target_layer_ids)
    draw = torch.Generator(target.device).manual_seed(sampling.seed)
    stops = frozenset(stop_ids)
    clock = _Clock(target.device)

    logits, features = target.forward(_ids(prompt, target.device), last_only=True)
    first = _choose(logits[-1:], sampling, draw)
    generation = Generation([int(first.item())], prefill_seconds=clock.lap())
    anchor, cache = first, ContextCache()
    while len(generation.tokens) < max_new_tokens and generation.tokens[-1] not in stops:
        room = max_new_tokens - len(generation.tokens)
        slots = min(size - 1, room - 1)  # the bonus token takes the last place
        assert features is not None
        drafts, q = _propose(drafter, target, features, anchor, slots, cache, sampling, draw)
        logits, states = target.forward(torch.cat([anchor, drafts]))
        accepted, tokens = _verify(drafts, q, logits, sampling, draw)
        step, produced = _settle(tokens, accepted, slots, stops)
        generation.tokens += produced
        generation.steps.append(step)
        # The last token produced has no keys yet: it is the next anchor. One that stopped the request early (a stop
        # token among the drafted ones) ends the loop.
        target.keep(target.length - (slots + 1) + step.produced)
        assert states is not None
        features = states[: step.produced]
        anchor = _ids(produced[-1:], target.device)
    generation.decode_seconds = clock.lap()
    return generation


@torch.inference_mode()
def plain(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
) -> Generation:
    """The target alone, one token a forward, with the same cache and sampling."""
    target = TargetDecoder(model)
    draw = torch.Generator(target.device).manual_seed(sampling.seed)
    stops = frozenset(stop_ids)
    clock = _Clock(target.device)
    logits, _ = target.forward(_ids(prompt, target.device), last_only=True)
    token = _choose(logits[-1:], sampling, draw)
    generation = Generation([int(token.item())], prefill_seconds=clock.lap())
    while len(generation.tokens) < max_new_tokens and generation.tokens[-1] not in stops:
        logits, _ = target.forward(token)
        target.keep(target.length)
        token = _choose(logits, sampling, draw)
        generation.tokens.append(int(token.item()))
    generation.decode_seconds = clock.lap()
    return generation


@dataclass(frozen=True)
class Replay:
    """What the target alone, one token a forward, would have chosen greedily after each prefix of given tokens.

    own[i]: its argmax where tokens[i] stands. gap[i]: logit of own[i] minus logit of tokens[i] (0 where they agree).
    lead[i]: logit of own[i] minus the second best. top[i]: logit of own[i].
    """

    own: list[int]
    gap: list[float]
    lead: list[float]
    top: list[float]
    decode_seconds: float


@torch.inference_mode()
def replay(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> Replay:
    """Feeds `tokens` to the target one at a time, as plain decoding would. Where own == tokens throughout, they are
    the target's own greedy output (by induction), and the time is that of plain decoding."""
    target = TargetDecoder(model)
    given = _ids(tokens, target.device)
    clock = _Clock(target.device)
    logits, _ = target.forward(_ids(prompt, target.device), last_only=True)
    rows, own = [logits[-1]], [int(logits[-1].argmax().item())]
    clock.lap()
    for i in range(len(tokens) - 1):
        logits, _ = target.forward(given[i : i + 1])
        target.keep(target.length)
        rows.append(logits[-1])
        own.append(int(logits[-1].argmax().item()))  # the wait for each token is part of plain decoding
    seconds = clock.lap()
    scores = torch.stack(rows).float()
    best = scores.topk(2, dim=-1).values
    chosen = scores.gather(-1, given[:, None])[:, 0]
    gap, lead = best[:, 0] - chosen, best[:, 0] - best[:, 1]
    return Replay(own, gap.tolist(), lead.tolist(), best[:, 0].tolist(), seconds)


def _propose(
    drafter: DraftModel,
    target: TargetDecoder,
    features: Tensor,
    anchor: Tensor,
    slots: int,
    cache: ContextCache,
    sampling: Sampling,
    draw: torch.Generator,
) -> tuple[Tensor, Tensor | None]:
    """Drafted tokens [slots] and, if they were sampled, the distributions [slots, V] they came from."""
    if not slots:
        return anchor[:0], None
    masks = anchor.new_full((slots,), drafter.config.mask_token_id)
    block = target.embed(torch.cat([anchor, masks]))
    logits = target.head(drafter.draft(block[None], features[None], cache)[0, 1:])
    if sampling.greedy or sampling.proposals == "greedy":
        return logits.argmax(-1), None
    q = sampling.probabilities(logits)
    return torch.multinomial(q, 1, generator=draw)[:, 0], q


def _verify(
    drafts: Tensor, q: Tensor | None, logits: Tensor, sampling: Sampling, draw: torch.Generator
) -> tuple[int, list[int]]:
    """How many of drafts [n] stand, and these tokens with the bonus token after them."""
    if sampling.greedy:
        own = logits.argmax(-1)
        accepted = (drafts == own[:-1]).cumprod(0).sum()
        both = torch.cat([accepted[None], own]).tolist()  # one transfer; accepted drafts equal the target's own tokens
        return both[0], both[1 : both[0] + 2]
    p = sampling.probabilities(logits)
    accepted, bonus = accept_sampled(drafts, q, p, draw)
    return accepted, [*drafts[:accepted].tolist(), bonus]


def accept_sampled(drafts: Tensor, q: Tensor | None, p: Tensor, draw: torch.Generator) -> tuple[int, int]:
    """Lossless rejection sampling (2211.17192, algorithm 1).

    drafts [n]; q [n, V] the distributions they were drawn from (None: a point mass on each); p [n+1, V] the target's.
    Draft i stands with probability min(1, p/q); the first that falls is replaced by a draw from max(0, p - q),
    normalised; when all stand, the bonus is drawn from p[n]. Returns (accepted, that last token).
    """
    count = drafts.shape[0]
    wanted = p[:count].gather(-1, drafts[:, None])[:, 0]
    offered = torch.ones_like(wanted) if q is None else q.gather(-1, drafts[:, None])[:, 0]
    chance = torch.rand(count, generator=draw, device=p.device)
    accepted = int((chance * offered < wanted).cumprod(0).sum().item())
    rest = p[accepted]
    if accepted < count:
        fallen = F.one_hot(drafts[accepted], p.shape[-1]).to(p.dtype) if q is None else q[accepted]
        rest = (rest - fallen).clamp_min(0)
        if not bool(rest.sum() > 0):  # p == q up to rounding: a rejection there has probability 0
            rest = p[accepted]
    return accepted, int(torch.multinomial(rest, 1, generator=draw).item())


def _settle(tokens: list[int], accepted: int, slots: int, stops: frozenset[int]) -> tuple[Step, list[int]]:
    """Cuts a verification's tokens after a stop token."""
    for i, token in enumerate(tokens):
        if token in stops:
            end = i + 1
            return Step(min(slots, end), min(accepted, end), end), tokens[:end]
    return Step(slots, accepted, len(tokens)), tokens


def _choose(logits: Tensor, sampling: Sampling, draw: torch.Generator) -> Tensor:
    """One token [1] from logits [1, V]."""
    if sampling.greedy:
        return logits.argmax(-1)
    return torch.multinomial(sampling.probabilities(logits), 1, generator=draw)[:, 0]


def _ids(tokens: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.long, device=device)


class _Clock:
    """Wall time between laps, with the device's work done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()

    def lap(self) -> float:
        last, self._last = self._last, self._now()
        return self._last - last

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
