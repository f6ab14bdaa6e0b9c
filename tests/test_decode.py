"""Speculative decoding: lossless, aligned, and equal to the target alone."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from paceline.common.errors import ConfigError
from paceline.common.loading import find_parts
from paceline.consumer.decode import (
    NARROW,
    Proposals,
    Sampling,
    accept_sampled,
    narrow_linears,
    plain,
    replay,
    speculate,
)
from paceline.consumer.drafter import ContextCache
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel, Qwen3Config

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "sliding": Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2),
}


def tiny(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


@pytest.fixture(params=CONFIGS)
def target(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


class Shape:
    mask_token_id = 1
    num_hidden_layers = 1

    def __init__(self, block_size: int, target_layer_ids: list[int]) -> None:
        self.block_size, self.target_layer_ids = block_size, target_layer_ids


class Oracle:
    """Proposes a known continuation with chosen positions wrong, and checks every state it is given against one
    independent forward over the whole sequence. Good for one request."""

    def __init__(self, model: PreTrainedModel, sequence: list[int], wrong: set[int]) -> None:
        self.config = Shape(6, [0, 2, 3])
        self.sequence, self.wrong, self.seen = sequence, wrong, 0
        self.want = torch.cat(states(model, sequence, self.config.target_layer_ids), -1)
        self.head = find_parts(model).head.weight
        self.table = find_parts(model).embedding.weight

    def draft(self, block_embeds: Tensor, features: Tensor, cache: ContextCache) -> Tensor:
        start, anchor = self.seen, self.seen + features.shape[1]
        self.seen = anchor
        torch.testing.assert_close(features[0], self.want[start:anchor], atol=2e-4, rtol=1e-3)
        block = block_embeds[0]
        assert torch.equal(block[0], self.table[self.sequence[anchor]])
        assert torch.equal(block[1:], self.table[self.config.mask_token_id].expand(block.shape[0] - 1, -1))
        tokens = [self._token(anchor + k) for k in range(block.shape[0])]
        hidden = self.head[tokens]  # a head row is the state whose best logit is that row's own token
        assert (hidden @ self.head.T).argmax(-1).tolist() == tokens
        return hidden[None]

    def _token(self, position: int) -> int:
        token = self.sequence[position] if position < len(self.sequence) else 0
        return (token + 1) % VOCAB if position in self.wrong else token


def states(model: PreTrainedModel, sequence: list[int], layer_ids: list[int]) -> list[Tensor]:
    """Outputs [T, H] of the layers in one forward without a cache."""
    found = {}
    layers = find_parts(model).layers
    hooks = [layers[i].register_forward_hook(lambda _m, _a, out, i=i: found.update({i: out})) for i in layer_ids]
    with torch.no_grad():
        model(torch.tensor([sequence]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return [(found[i][0] if isinstance(found[i], tuple) else found[i])[0] for i in layer_ids]


PROMPT = [5, 9, 23, 4, 61, 8, 90, 33, 12, 50, 2]


def own_output(model: PreTrainedModel, count: int) -> list[int]:
    generated = cast(Any, model).generate(
        torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return generated[0, len(PROMPT) :].tolist()


def test_plain_equals_generate(target: PreTrainedModel) -> None:
    assert plain(target, PROMPT, max_new_tokens=40).tokens == own_output(target, 40)


def test_speculative_greedy_equals_generate_and_states_are_the_targets(target: PreTrainedModel) -> None:
    own = own_output(target, 40)
    wrong = {len(PROMPT) + i for i in (2, 3, 9, 17, 18, 19, 30)}
    drafter = Oracle(target, PROMPT + own, wrong)
    generation = speculate(drafter, target, PROMPT, max_new_tokens=40)
    assert generation.tokens == own
    assert sum(step.produced for step in generation.steps) == 39
    assert [step.accepted for step in generation.steps[:2]] == [1, 0]


def test_full_blocks_are_accepted() -> None:
    model = tiny("llama")
    own = own_output(model, 37)
    generation = speculate(Oracle(model, PROMPT + own, set()), model, PROMPT, max_new_tokens=37)
    assert generation.tokens == own
    assert [step.produced for step in generation.steps] == [6] * 6
    assert generation.acceptance_length == 6


def test_shorter_block_and_length_limit() -> None:
    model = tiny("qwen3")
    own = own_output(model, 21)
    for limit in (1, 2, 3, 9, 10):
        drafter = Oracle(model, PROMPT + own, set())
        generation = speculate(drafter, model, PROMPT, max_new_tokens=limit, block_size=4)
        assert generation.tokens == own[:limit]
        assert all(step.produced <= 4 for step in generation.steps)


def test_stop_token_ends_and_is_kept() -> None:
    model = tiny("llama")
    own = own_output(model, 40)
    stop = own[9]
    end = own.index(stop) + 1
    generation = speculate(Oracle(model, PROMPT + own, set()), model, PROMPT, max_new_tokens=40, stop_ids=[stop])
    assert generation.tokens == own[:end]
    last = generation.steps[-1]
    assert 1 + sum(step.produced for step in generation.steps) == end, "what came after it does not count"
    assert last.drafted == last.accepted == min(5, last.produced) < 5
    assert plain(model, PROMPT, max_new_tokens=40, stop_ids=[stop]).tokens == own[:end]


def test_replay_finds_every_foreign_token() -> None:
    model = tiny("llama")
    own = own_output(model, 12)
    assert replay(model, PROMPT, own).own == own
    changed = [*own[:5], (own[5] + 1) % VOCAB, *own[6:]]
    seen = replay(model, PROMPT, changed)
    assert seen.own[:6] == own[:6]
    assert seen.gap[5] > 0 and seen.gap[:5] == [0] * 5
    assert all(lead >= 0 for lead in seen.lead)


@pytest.mark.parametrize("proposals", ["greedy", "sampled"])
def test_rejection_sampling_keeps_the_targets_distribution(proposals: Proposals) -> None:
    draw = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.2, 0.3, 0.0], [0.1, 0.1, 0.1, 0.7]])
    q = torch.tensor([[0.2, 0.2, 0.1, 0.5]])
    counts, pairs, trials = torch.zeros(4), torch.zeros(4), 3000
    for _ in range(trials):
        draft = torch.multinomial(q[0], 1, generator=draw) if proposals == "sampled" else torch.tensor([1])
        accepted, bonus = accept_sampled(draft, q if proposals == "sampled" else None, p, draw)
        counts[int(draft) if accepted else bonus] += 1
        if accepted:
            pairs[bonus] += 1
    assert torch.allclose(counts / trials, p[0], atol=0.03)  # three sigma
    assert torch.allclose(pairs / pairs.sum(), p[1], atol=0.06)


def test_equal_distributions_accept_everything() -> None:
    draw = torch.Generator().manual_seed(1)
    p = torch.rand(4, 8, generator=draw).softmax(-1)
    for _ in range(200):
        drafts = torch.multinomial(p[:3], 1, generator=draw)[:, 0]
        assert accept_sampled(drafts, p[:3], p, draw)[0] == 3


@pytest.mark.parametrize("proposals", ["greedy", "sampled"])
def test_sampled_decoding_is_seeded_and_follows_the_target(proposals: Proposals) -> None:
    model = tiny("qwen3")
    sampling = Sampling(temperature=1.0, proposals=proposals, seed=7)
    runs = []
    for _ in range(2):
        drafter = Loose(model)
        runs.append(speculate(drafter, model, PROMPT, max_new_tokens=30, sampling=sampling).tokens)
    assert runs[0] == runs[1] and len(runs[0]) == 30
    # With a nucleus so small that one token is left, sampling is greedy.
    narrow = Sampling(temperature=1.0, top_p=1e-6, proposals=proposals, seed=7)
    assert speculate(Loose(model), model, PROMPT, max_new_tokens=30, sampling=narrow).tokens == own_output(model, 30)


class Loose:
    """Drafts from its context alone: the last state given, for every slot."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = Shape(4, [3])
        self.norm = find_parts(model).norm

    def draft(self, block_embeds: Tensor, features: Tensor, cache: ContextCache) -> Tensor:
        return self.norm(features[:, -1:]).expand(1, block_embeds.shape[1], -1)


def test_probabilities_of_top_k_and_nucleus() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert torch.allclose(Sampling(temperature=1).probabilities(logits), logits.exp())
    assert torch.allclose(
        Sampling(temperature=1, top_k=2).probabilities(logits), torch.tensor([[2 / 3, 1 / 3, 0, 0]]), atol=1e-6
    )
    assert torch.allclose(
        Sampling(temperature=1, top_p=0.6).probabilities(logits), torch.tensor([[2 / 3, 1 / 3, 0, 0]]), atol=1e-6
    )
    sharper = Sampling(temperature=0.5).probabilities(logits)[0]
    assert torch.allclose(sharper, logits.exp()[0] ** 2 / (logits.exp()[0] ** 2).sum())


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}])
def test_bad_sampling_is_refused(bad: dict) -> None:
    with pytest.raises(ConfigError):
        Sampling(**bad)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 3), (2, 8), (NARROW + 1,)])
def test_narrow_linears_give_the_same(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain_layer = nn.Linear(24, 40, bias=bias)
    turned = nn.Sequential(nn.Linear(24, 40, bias=bias))
    turned[0].load_state_dict(plain_layer.state_dict())
    narrow_linears(turned)
    x = torch.randn(*shape, 24)
    made = turned(x)
    assert made.shape == (*shape, 40)
    torch.testing.assert_close(made, plain_layer(x))


# The distribution of what is decoded

STATES = 8  # tokens
TOKENS = 4000


class Chain:
    """In place of `TargetDecoder`: a target whose next token depends on the last one alone, by a table of logits, so
    that its output is a Markov chain. States are one-hot tokens; the head turns them into the drafter's logits."""

    device = torch.device("cpu")
    table = 1.5 * torch.randn(STATES, STATES, generator=torch.Generator().manual_seed(11))
    drafts = 1.5 * torch.randn(STATES, STATES, generator=torch.Generator().manual_seed(12))

    def __init__(self, model: Any, layer_ids: Any = ()) -> None:
        self.length = 0

    def forward(self, tokens: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        self.length += len(tokens)
        return self.table[tokens], self.embed(tokens)

    def keep(self, length: int) -> None:
        self.length = length

    def embed(self, tokens: Tensor) -> Tensor:
        return nn.functional.one_hot(tokens, STATES).float()

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.table + self.drafts) / 1.5


class Shifting:
    """Drafts from another row of the head's table in each slot: sometimes near the target's choice, mostly not."""

    config = Shape(5, [0])

    def draft(self, block_embeds: Tensor, features: Tensor, cache: ContextCache) -> Tensor:
        anchor = block_embeds[:, :1]
        return torch.cat([anchor.roll(max(slot - 1, 0), -1) for slot in range(block_embeds.shape[1])], 1)


def transitions(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Counts [S, S] of token pairs in one long speculative decoding, and the target's own probabilities [S, S] in
    float64, computed here from its logits by the definitions of temperature, top-k and nucleus."""
    monkeypatch.setattr("paceline.consumer.decode.TargetDecoder", Chain)
    made = speculate(Shifting(), cast(Any, None), [0, 1, 2], max_new_tokens=TOKENS, sampling=sampling)
    drafted, accepted = sum(s.drafted for s in made.steps), sum(s.accepted for s in made.steps)
    assert 0.03 < accepted / drafted < 0.9, "both rules are at work"
    counts = torch.zeros(STATES, STATES, dtype=torch.float64)
    for before, after in pairwise(made.tokens):
        counts[before, after] += 1
    return counts, torch.stack([own_distribution(row, sampling) for row in Chain.table.double()])


def own_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    p = [math.exp(value / sampling.temperature) for value in logits.tolist()]
    order = sorted(range(STATES), key=lambda token: -p[token])
    kept = order[: sampling.top_k] if sampling.top_k else order
    nucleus, mass, total = [], 0.0, sum(p[token] for token in kept)
    for token in kept:
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += p[token] / total
    whole = sum(p[token] for token in nucleus)
    return torch.tensor([p[token] / whole if token in nucleus else 0.0 for token in range(STATES)], dtype=torch.float64)


def z_score(counts: Tensor, own: Tensor) -> float:
    """Pearson's chi-square of the transitions out of each token against `own`, in standard deviations from its mean
    (Wilson and Hilferty's cube root). Rare cells of a token are taken together."""
    statistic = degrees = 0.0
    for row, p in zip(counts, own, strict=True):
        expected = p * row.sum()
        common = expected >= 5
        cells = [(row[i], expected[i]) for i in range(STATES) if common[i]]
        rest = float(expected[~common].sum())
        if rest >= 5:
            cells.append((row[~common].sum(), expected[~common].sum()))
        if len(cells) > 1:
            statistic += sum(float((seen - wanted) ** 2 / wanted) for seen, wanted in cells)
            degrees += len(cells) - 1
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5


SAMPLINGS = {
    "plain": Sampling(temperature=1.0, seed=1),
    "warm nucleus": Sampling(temperature=1.3, top_p=0.8, seed=2),
    "cool top-k": Sampling(temperature=0.8, top_k=4, seed=3),
    "both": Sampling(temperature=1.6, top_p=0.9, top_k=5, seed=4),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("proposals", ["greedy", "sampled"])
def test_decoding_draws_from_the_targets_distribution(
    proposals: Proposals, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, own = transitions(replace(SAMPLINGS[name], proposals=proposals), monkeypatch)
    assert counts[own == 0].sum() == 0, "tokens outside top-k or nucleus never come"
    assert z_score(counts, own) < 4


@pytest.mark.parametrize("proposals", ["greedy", "sampled"])
def test_the_distribution_test_sees_a_wrong_rule(proposals: Proposals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping a draft that fell in one case of five moves the distribution, and the statistic shows it."""
    honest = accept_sampled

    def lenient(drafts: Tensor, q: Tensor | None, p: Tensor, draw: torch.Generator) -> tuple[int, int]:
        accepted, token = honest(drafts, q, p, draw)
        if accepted < drafts.shape[0] and torch.rand(1, generator=draw) < 0.2:
            token = int(drafts[accepted])
        return accepted, token

    monkeypatch.setattr("paceline.consumer.decode.accept_sampled", lenient)
    counts, own = transitions(Sampling(temperature=1.0, proposals=proposals, seed=1), monkeypatch)
    assert z_score(counts, own) > 6
