"""Self-attention over sequences."""

from __future__ import annotations

from maze.perception.blocks.base import Keys, Shapes
from maze.perception.blocks.feed_forward.multi_head_attention import MultiHeadAttentionBlock


class SelfAttentionSeqBlock(MultiHeadAttentionBlock):
    """Multi-head self-attention over a sequence or set (Vaswani et al. 2017, section 3.2).

    Input `(batch, elements, features)` and optionally a mask, positive where an element counts: `(batch,
    elements)`. Output `(batch, elements, features)`; an optional second output holds the attention weights averaged
    over the heads, `(batch, elements, elements)`. A flat input `(batch, features)` is a sequence of one element,
    and so is its output.

    :param in_keys: Key of the sequence and, optionally, of the mask.
    :param out_keys: Key of the output and, optionally, of the attention weights.
    :param num_heads: Number of heads; divides the number of features.
    :param dropout: Share of attention weights dropped in training; None: none.
    :param add_input_to_output: Whether the input is added to the output.
    :param bias: Whether the projections have a bias.
    :raises ConfigError: The inputs are not one or two, or the heads do not divide the features.
    """

    n_sequences = 1

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        num_heads: int,
        dropout: float | None,
        add_input_to_output: bool,
        bias: bool,
    ) -> None:
        super().__init__(
            in_keys, out_keys, in_shapes, num_heads, dropout, add_input_to_output, bias, use_key_padding_mask=True
        )
