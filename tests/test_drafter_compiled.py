"""The drafter's compiled parts: the plain ones' numbers, from one graph each whatever the sizes."""

from dataclasses import replace

import pytest
import torch
from paceline.consumer import drafter as drafter_module
from paceline.consumer import kernels, linears
from paceline.consumer.blocks import DenseAttention
from paceline.consumer.drafter import PLAIN_PARTS, DrafterConfig, picked
from paceline.consumer.first_weights import init_drafter
from paceline.consumer.optim import MasterWeights
from test_attention import long_blocks
from torch._dynamo.utils import counters

CONFIG = DrafterConfig(
    block_size=16,
    mask_token_id=3,
    target_layer_ids=(0, 1),
    num_target_layers=8,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=100,
)
SIZES = ((60, 45, 20), (64, 64, 128), (77, 50, 90))  # 256 tokens and others: whole tiles, and none


@pytest.mark.parametrize("fp8", [False, True])
def test_one_graph_each_whatever_the_sizes(fp8):
    torch.compiler.reset()
    drafter = init_drafter(CONFIG, seed=0)
    weights = MasterWeights(drafter, dtype=torch.bfloat16, device="cpu")
    for name, module in drafter.named_modules():
        if isinstance(module, linears.DraftMLP):
            module.joint = (weights.joined([f"{name}.gate_proj.weight", f"{name}.up_proj.weight"]),)
    if fp8:
        linears.use_fp8(drafter)
    drafter.compile_parts(backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    for step, lengths in enumerate(SIZES):
        blocks, context = long_blocks(lengths=lengths, counts=(12, 4, 6))
        generator = torch.Generator().manual_seed(step)
        features = torch.randn(context, CONFIG.features, generator=generator).bfloat16()
        embeds = torch.randn(blocks.slots, CONFIG.hidden_size, generator=generator).bfloat16()
        found = []
        for parts in (drafter._parts, PLAIN_PARTS):
            drafter._parts, own = parts, drafter._parts
            weights.gradients.zero_()
            pairs = drafter.project_context(features, torch.arange(context))
            positions, scored = (torch.from_numpy(column) for column in (blocks.positions, blocks.scored))
            out = drafter.decode(embeds, positions, pairs, DenseAttention(blocks), scored)
            out.float().square().sum().backward()
            found.append((out.detach().float(), weights.gradients.clone()))
            drafter._parts = own
        for compiled, plain in zip(*found, strict=True):
            assert float((compiled - plain).norm() / plain.norm()) < (0.05 if fp8 else 0.02)
    assert counters["stats"]["unique_graphs"] - before == len(PLAIN_PARTS)


def test_states_of_some_slots_are_those_of_all():
    drafter = init_drafter(CONFIG, seed=0)
    blocks, context = long_blocks()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(context, CONFIG.features, generator=generator)
    embeds = torch.randn(blocks.slots, CONFIG.hidden_size, generator=generator)
    positions, scored = torch.from_numpy(blocks.positions), torch.from_numpy(blocks.scored)
    assert 0 < len(scored) < blocks.slots
    found = []
    for wanted in (scored, None):
        pairs = drafter.project_context(features, torch.arange(context))
        states = drafter.decode(embeds, positions, pairs, DenseAttention(blocks), wanted)
        states = states if wanted is not None else states[scored]
        slope = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
        found.append([states.detach(), *torch.autograd.grad((states * slope).sum(), list(drafter.parameters()))])
    for ours, all_of_them in zip(*found, strict=True):
        torch.testing.assert_close(ours, all_of_them, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        again = drafter.decode(embeds, positions, pairs, DenseAttention(blocks), scored)
    torch.testing.assert_close(again, found[0][0])


def test_slopes_of_picked_rows():
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 3), (7, 2, 2))]
    for rows in ([0, 2, 6], [], list(range(7))):
        index = torch.tensor(rows, dtype=torch.int64)
        assert torch.autograd.gradcheck(lambda *given, i=index: tuple(picked(given, i)), tensors)


def test_a_token_count_that_equals_the_hidden_size():
    """Must not make a symbol of the hidden size: every other count would be compiled anew."""
    torch.compiler.reset()
    drafter = init_drafter(CONFIG, seed=0)
    drafter.compile_parts(backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    for tokens in (CONFIG.hidden_size, 100, 37):
        drafter.project_context(torch.randn(tokens, CONFIG.features), torch.arange(tokens))
    assert counters["stats"]["unique_graphs"] - before == 1


def test_slopes_through_the_activation_are_autograds():
    """`_SwigluDown` against autograd through the same formula, in float64."""
    both, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 14), (3, 7)))
    found = linears._SwigluDown.apply(both, weight)
    gate, up = both.chunk(2, -1)
    plain = (torch.nn.functional.silu(gate) * up) @ weight.t()
    torch.testing.assert_close(found, plain)
    outer = torch.randn_like(plain)
    for ours, wanted in zip(*(torch.autograd.grad(y, (both, weight), outer) for y in (found, plain)), strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("shape", [(3, 40), (1, 2500), (0, 8)])
def test_the_activations_kernel_equals_the_plain_form(shape):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    both, inner = (torch.randn(shape[0], width, device=device) for width in (2 * shape[1], shape[1]))
    plain = linears.swiglu_slopes(both.cpu(), inner.cpu())
    spread = torch.empty(shape[0], 2 * shape[1], device=device)[:, : shape[1]].copy_(
        inner
    )  # rows that are further apart
    for ours, wanted in zip(kernels.swiglu_slopes(both, spread), plain, strict=True):
        torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-5, atol=1e-6)


def test_inductor_is_told_to_make_no_guards_of_sizes():
    assert drafter_module.unguarded() == {"triton.mix_order_reduction_non_strict_mode": True}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_few_rows_and_many_share_a_graph_on_a_gpu():
    """1,000 and 40,000 rows of 256 are on either side of what Inductor calls many."""
    torch.compiler.reset()
    drafter = init_drafter(replace(CONFIG, hidden_size=256), seed=0).cuda()
    drafter.compile_parts()
    before = counters["stats"]["unique_graphs"]
    for tokens in (1000, 40000, 300):
        features = torch.randn(tokens, 2 * 256, device="cuda")
        pairs = drafter.project_context(features, torch.arange(tokens, device="cuda"))
        torch.stack([t.square().sum() for pair in pairs for t in pair]).sum().backward()
    assert counters["stats"]["unique_graphs"] - before == 1
