"""Multi-head attention."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, Shapes, TensorDict, key_list, shape_list
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock


class MultiHeadAttentionBlock(ShapeNormalizationBlock):
    """PyTorch's multi-head attention as a block.

    Inputs query `(batch, queries, features)`, key `(batch, keys, kdim)`, value `(batch, keys, vdim)` and
    optionally a mask, positive where a key counts: `(batch, queries, keys)`, or `(batch, keys)` with
    `use_key_padding_mask`. Output `(batch, queries, features)`; an optional second output holds the attention
    weights averaged over the heads, `(batch, queries, keys)`. A query without any valid key gets zeros. Flat
    inputs `(batch, features)` are sequences of one element, and so is the output of a flat query.

    :param in_keys: Keys of query, key, value and, optionally, mask.
    :param out_keys: Key of the output and, optionally, of the attention weights.
    :param num_heads: Number of heads; divides the number of features.
    :param dropout: Share of attention weights dropped in training; None: none.
    :param add_input_to_output: Whether the query is added to the output.
    :param bias: Whether the projections have a bias.
    :param add_bias_kv: Whether a learned key and value are appended.
    :param add_zero_attn: Whether a key and value of zeros are appended.
    :param kdim: Number of features of the key; None: as in `in_shapes`.
    :param vdim: Number of features of the value; None: as in `in_shapes`.
    :param use_key_padding_mask: Whether the mask holds for all queries alike.
    :raises ConfigError: The inputs are not three or four, or the heads do not divide the features.
    """

    n_sequences: ClassVar[int] = 3
    """Number of inputs besides the mask: query, key and value, or one sequence that is all of them."""

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        num_heads: int,
        dropout: float | None,
        add_input_to_output: bool,
        bias: bool,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        use_key_padding_mask: bool = False,
    ) -> None:
        n = self.n_sequences
        shapes = shape_list(in_shapes, len(key_list(in_keys)))
        n_dims = zip([*[3] * n, 2 if use_key_padding_mask else 3], shapes, strict=False)
        in_num_dims = [2 if len(shape) == 1 else expected for expected, shape in n_dims]
        out_num_dims = [in_num_dims[0], 3][: len(key_list(out_keys))]
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims, out_num_dims)
        self._is_flat = [n_dims == 2 for n_dims in in_num_dims[:n]]
        self._is_flat += [n_dims == 2 and not use_key_padding_mask for n_dims in in_num_dims[n:]]
        embed_dim = self.output_features = self.in_shapes[0][-1]
        self.num_heads = num_heads
        self.add_input_to_output = add_input_to_output
        self.self_attn = nn.MultiheadAttention(
            embed_dim,
            num_heads,
            dropout=dropout or 0.0,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim or self.in_shapes[1 % n][-1],
            vdim=vdim or self.in_shapes[2 % n][-1],
            batch_first=True,
        )

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        tensors = [
            block_input[in_key].unsqueeze(1) if is_flat else block_input[in_key]
            for in_key, is_flat in zip(self.in_keys, self._is_flat, strict=True)
        ]
        query, key, value = (tensors[index % self.n_sequences] for index in range(3))
        options: dict[str, Any] = {"need_weights": len(self.out_keys) == 2}
        nothing_valid = None
        if len(tensors) > self.n_sequences:
            ignored = tensors[self.n_sequences] <= 0
            nothing_valid = ignored.all(dim=-1, keepdim=True)
            ignored = ignored & ~nothing_valid  # avoids NaN; the result is replaced below
            if ignored.dim() == 3:  # a mask for each query
                options["attn_mask"] = ignored.repeat_interleave(self.num_heads, dim=0)
            else:
                options["key_padding_mask"], nothing_valid = ignored, nothing_valid.unsqueeze(-1)
        output, weights = self.self_attn(query, key, value, **options)
        if nothing_valid is not None:
            output = output.masked_fill(nothing_valid, 0.0)
            weights = None if weights is None else weights.masked_fill(nothing_valid, 0.0)
        if self.add_input_to_output:
            output = output + query
        outputs = {self.out_keys[0]: output.squeeze(1) if self._is_flat[0] else output}
        if weights is not None:
            outputs[self.out_keys[1]] = weights
        return outputs
