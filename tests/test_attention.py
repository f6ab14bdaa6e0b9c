"""The attention kernels against SDPA with the mask spelt out: compiled on a GPU, interpreted on a CPU."""

import numpy as np
import pytest
import torch
from drafting import make_rows
from paceline.consumer.anchors import candidates
from paceline.consumer.attention import MAX_HEAD_DIM, TUNED, Launch, RangeAttention, Tuning, key_ranges, tuned
from paceline.consumer.blocks import DenseAttention, Span, attention, dense_mask, pack_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Launch(32, 32, 4, 1)  # a tile, for rows of little more than a few
CASES = {  # window, block size, heads, kv heads, heads of a program
    "full": (None, 16, 4, 2, 1),
    "window": (90, 5, 4, 2, 0),
    "narrow": (3, 16, 2, 2, 1),
    "one kv head": (None, 7, 3, 1, 0),
}


def long_blocks(block_size=16, lengths=(110, 45, 70), counts=(9, 3, 4)):
    rows = make_rows(*lengths, prompt=9)
    draw = np.random.default_rng(0)
    places = [candidates(rows.mask[row]) for row in rows.rows]
    anchors = [np.sort(draw.choice(at, n, replace=False)) for at, n in zip(places, counts, strict=True)]
    blocks = pack_blocks(
        rows.tokens, rows.mask, rows.cu_seqlens, anchors, block_size=block_size, mask_token_id=60, gamma=7.0
    )
    return blocks, len(rows.tokens)


def qkv(blocks, context, dim, heads, kv_heads, dtype=torch.float32, device=DEVICE):
    """Laid out as the projections write them, [n, heads, D], and seen as [heads, n, D]."""
    generator = torch.Generator().manual_seed(dim)

    def normal(heads, n):
        made = torch.randn(n, heads, dim, generator=generator).to(dtype).to(device)
        return made.transpose(0, 1).requires_grad_()

    return (
        normal(heads, blocks.slots),
        (normal(kv_heads, context), normal(kv_heads, context)),
        (normal(kv_heads, blocks.slots), normal(kv_heads, blocks.slots)),
    )


def through(attend, q, context, block, window):
    """Output and the five gradients of a sum whose weights differ everywhere."""
    out = attend(q, context, block, window)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, *context, *block))]


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_dense_form(case):
    window, block_size, heads, kv_heads, each = CASES[case]
    blocks, context = long_blocks(block_size)
    assert context % SMALL.keys and blocks.slots % SMALL.slots  # last tiles are not whole
    ranged = RangeAttention(blocks, context, DEVICE, Tuning(SMALL, SMALL, Launch(16, 32, 4, 1), each))
    found, wanted = (
        through(attend, *qkv(blocks, context, 24, heads, kv_heads), window)  # 24: padded to 32
        for attend in (ranged, DenseAttention(blocks, DEVICE))
    )
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tuned_kernels_equal_the_dense_form(dim, window, dtype):
    """bfloat16 is held against float32 on the same rounded inputs."""
    blocks, context = long_blocks(lengths=(389, 45, 1400, 33), counts=(60, 20, 200, 20))
    tensors = qkv(blocks, context, dim, 8, 2, dtype)
    found = through(RangeAttention(blocks, context, DEVICE), *tensors, window)
    q, ctx, own = tensors
    wide = [t.detach().float().requires_grad_() for t in (q, *ctx, *own)]
    wanted = through(DenseAttention(blocks, DEVICE), wide[0], (wide[1], wide[2]), (wide[3], wide[4]), window)
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-3
    for ours, plain in zip(found, wanted, strict=True):
        assert float((ours.float() - plain).norm() / plain.norm()) < limit


@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize("block_size", [5, 16])
def test_ranges_say_what_the_dense_mask_says(window, block_size):
    blocks, context = long_blocks(block_size)
    mask = dense_mask(blocks, Span(0, context, 0, blocks.slots), window)
    tile = 32
    low, high, own_low, own_high, *tables = key_ranges(blocks, context, window, tile)
    keys, slots = np.arange(context), np.arange(blocks.slots)
    np.testing.assert_array_equal(mask[:, :context], (keys >= low[:, None]) & (keys < high[:, None]))
    np.testing.assert_array_equal(mask[:, context:], (slots >= own_low[:, None]) & (slots < own_high[:, None]))
    for part, first, past in ((mask[:, :context], *tables[:2]), (mask[:, context:], *tables[2:])):
        assert len(first) == len(past) == -(-part.shape[1] // tile)
        for i, (a, b) in enumerate(zip(first, past, strict=True)):
            seeing = np.flatnonzero(part[:, i * tile : (i + 1) * tile].any(1))
            assert not len(seeing) or (a <= seeing[0] and seeing[-1] < b)
    assert (tables[1] - tables[0]).mean() < 0.6 * blocks.slots  # and not much more than those


def test_no_slots():
    blocks, context = long_blocks(counts=(0, 0, 0))
    q, ctx, own = qkv(blocks, context, 16, 4, 2)
    found = through(RangeAttention(blocks, context, DEVICE), q, ctx, own, None)
    assert found[0].shape == (4, 0, 16) and not found[2].any() and found[2].shape == ctx[0].shape


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_tiles_fit_the_shared_memory_of_a_multiprocessor(head_dim, item_bytes):
    """227 KiB on the data-centre GPUs of today: what stays, and the tiles of two operands in flight at every stage."""
    tuning, row = tuned(head_dim, item_bytes), head_dim * item_bytes
    forward, queries, keys = tuning.forward, tuning.queries, tuning.keys
    used = [
        forward.slots * row + forward.stages * 2 * forward.keys * row,
        3 * queries.slots * row + queries.stages * 2 * queries.keys * row,
        2 * keys.keys * row + keys.stages * 2 * keys.slots * row,
    ]
    assert max(used) <= 227 * 1024


def test_heads_that_the_kernels_do_not_take():
    assert tuned(24, 2) == tuned(64, 2) == TUNED[128] and tuned(96, 2) == TUNED[256] and tuned(256, 2) == TUNED[512]
    assert tuned(64, 4) == TUNED[256] and tuned(256, 4) == TUNED[1024]
    with pytest.raises(ValueError, match="257"):
        tuned(MAX_HEAD_DIM + 1, 2)
    blocks, context = long_blocks()
    assert isinstance(attention(blocks, context, torch.device("cuda"), 320), DenseAttention)
    assert isinstance(attention(blocks, context, torch.device("cuda"), 128), RangeAttention)
    assert isinstance(attention(blocks, context, torch.device("cpu"), 128), DenseAttention)
