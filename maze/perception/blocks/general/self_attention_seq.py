"""Self-attention over sequences."""

from __future__ import annotations

from torch import nn

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, Shapes, TensorDict, count_keys
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.blocks.tensor_functions import check_heads, masked_attention, sequence_dims


class SelfAttentionSeqBlock(ShapeNormalizationBlock):
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
        expected = "the sequence and, optionally, of a mask"
        n_inputs, n_outputs = count_keys(in_keys, out_keys, type(self).__name__, (1, 2), expected)
        in_num_dims = sequence_dims(in_shapes, n_inputs, [3, 2][:n_inputs])
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims, out_num_dims=[in_num_dims[0], 3][:n_outputs])
        self._is_flat = in_num_dims[0] == 2
        embed_dim = self.output_features = self.in_shapes[0][-1]
        check_heads(self.block_name, num_heads, embed_dim)
        self.num_heads = num_heads
        self.add_input_to_output = add_input_to_output
        self.self_attn = nn.MultiheadAttention(
            embed_dim, num_heads, dropout=dropout or 0.0, bias=bias, batch_first=True
        )

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        sequence, *masks = (block_input[key] for key in self.in_keys)
        valid = masks[0] if masks else None
        if self._is_flat:
            sequence = sequence.unsqueeze(1)
        output, weights = masked_attention(
            self.self_attn, sequence, sequence, sequence, valid=valid, need_weights=len(self.out_keys) == 2
        )
        if self.add_input_to_output:
            output = output + sequence
        outputs = {self.out_keys[0]: output.squeeze(1) if self._is_flat else output}
        if weights is not None:
            outputs[self.out_keys[1]] = weights
        return outputs

    @override(ShapeNormalizationBlock)
    def extra_repr(self) -> str:
        return f"num_heads: {self.num_heads}" + (", plus input" if self.add_input_to_output else "")
