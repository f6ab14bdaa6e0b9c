"""Floating-point operations of the work itself, counted from shapes: what shares of a matmul ceiling are shares of.

Model FLOPs: matrix products and attention alone, two for each multiply-add, nothing that is computed twice to save
memory. Attention counts the keys that a mask lets through. A backward pass has two products for each of the forward's,
one where an input needs no gradient.
"""

from collections.abc import Sequence

from .footprint import Shape


def step_flops(shape: Shape, *, context: int, slots: int, seen: int, scored: int) -> int:
    """Forward and backward of a drafter.

    context: tokens that some block sees; slots: block slots, 0 included; seen: keys that they attend, context and own
    block together, added up; scored: slots that go through the frozen head, and through what the last layer does after
    its attention.
    """
    features = 4 * context * shape.planes * shape.hidden * shape.hidden  # its input needs no gradient
    keys_values = 6 * context * shape.hidden * 2 * shape.keys
    layer = keys_values + 6 * slots * shape.layer_weights + 12 * shape.queries * seen
    unscored = 6 * (slots - scored) * shape.hidden * (shape.queries + 3 * shape.inner)
    head = 4 * scored * shape.hidden * shape.vocabulary  # logits and dh: the head is frozen
    return features + shape.layers * layer - unscored + head


def forward_flops(weights: int, queries: int, attention_layers: int, lengths: Sequence[int]) -> int:
    """A target's forward over rows of these lengths.

    weights: of all linear layers that run, which each token passes once; queries: heads x head_dim of an attention
    layer. Linear attention's recurrence is not counted, nor are a sliding window's savings.
    """
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return 2 * weights * sum(lengths) + 4 * queries * attention_layers * pairs
