"""Self-attention over images."""

from __future__ import annotations

import torch
from torch import nn

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, Shapes, TensorDict, key_list
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock


class SelfAttentionConvBlock(ShapeNormalizationBlock):
    """Self-attention between all pixels of a feature map (Zhang et al. 2018, section 3).

    Input and output `(batch, channels, height, width)`. An optional second input is a mask, positive where a pixel
    counts: `(batch, height, width)`. An optional second output holds the attention weights `(batch, pixels,
    pixels)`. With `add_input_to_output` the output is `input + gamma * attention` with a learned `gamma` that
    starts at 0: the block starts as the identity.

    :param in_keys: Key of the feature map and, optionally, of the mask.
    :param out_keys: Key of the output and, optionally, of the attention weights.
    :param embed_dim: Number of channels in which pixels are compared.
    :param dropout: Share of attention weights dropped in training; None: none.
    :param add_input_to_output: Whether the input is added to the scaled output.
    :param bias: Whether the projections have a bias.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        embed_dim: int,
        dropout: float | None,
        add_input_to_output: bool,
        bias: bool,
    ) -> None:
        n_inputs, n_outputs = len(key_list(in_keys)), len(key_list(out_keys))
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=[4, 3][:n_inputs], out_num_dims=[4, 3][:n_outputs])
        channels = self.output_channels = self.in_shapes[0][-3]
        self.embed_dim = embed_dim
        self.add_input_to_output = add_input_to_output
        self.query = nn.Conv2d(channels, embed_dim, kernel_size=1, bias=bias)
        self.key = nn.Conv2d(channels, embed_dim, kernel_size=1, bias=bias)
        self.value = nn.Conv2d(channels, channels, kernel_size=1, bias=bias)
        self.dropout = nn.Dropout(dropout or 0.0)
        if add_input_to_output:
            self.gamma = nn.Parameter(torch.zeros(1))

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        image = block_input[self.in_keys[0]]
        query, key, value = (conv(image).flatten(start_dim=2) for conv in (self.query, self.key, self.value))
        scores = torch.bmm(query.transpose(1, 2), key)
        if len(self.in_keys) == 2:
            ignored = (block_input[self.in_keys[1]] <= 0).flatten(start_dim=1).unsqueeze(1)
            scores = scores.masked_fill(ignored, torch.finfo(scores.dtype).min)
            weights = scores.softmax(dim=-1).masked_fill(ignored, 0.0)  # zeros where no pixel counts
        else:
            weights = scores.softmax(dim=-1)  # row: weights of the pixels that a pixel attends to
        output = torch.bmm(value, self.dropout(weights).transpose(1, 2)).reshape(image.shape)
        if self.add_input_to_output:
            output = image + self.gamma * output
        outputs = {self.out_keys[0]: output}
        if len(self.out_keys) == 2:
            outputs[self.out_keys[1]] = weights
        return outputs
