"""State critics of the two sub-steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from maze.perception.blocks.base import NonLinearity
from maze.perception.blocks.feed_forward.dense import DenseBlock
from maze.perception.blocks.general.masked_global_pooling import MaskedGlobalPoolingBlock
from maze.perception.blocks.inference import InferenceBlock
from maze.perception.blocks.output.linear import LinearOutputBlock
from maze.perception.weight_init import make_module_init_normc
from tutorial_maze_env.part06_struct_env.models.embedding import Blocks, Shapes, cut_embedding, piece_embedding


class ValueNet(nn.Module):
    """A value computed by perception blocks.

    :param obs_shapes: Shapes of the observations.
    :param blocks: Blocks that produce the key `latent`.
    """

    def __init__(self, obs_shapes: Shapes, blocks: Blocks) -> None:
        super().__init__()
        in_keys = list(obs_shapes)
        value = LinearOutputBlock("latent", "value", blocks["latent"].out_shapes(), output_units=1)
        self.perception_net = InferenceBlock(
            in_keys=in_keys,
            out_keys="value",
            in_shapes=[obs_shapes[key] for key in in_keys],
            perception_blocks={**blocks, "value": value},
        )
        self.perception_net.apply(make_module_init_normc(1.0))

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The value of the state."""
        return self.perception_net(x)  # type: ignore[no-any-return]  # nn.Module.__call__


class PieceSelectionCriticNet(ValueNet):
    """Values the whole stock: embeds each piece with the order, and averages.

    :param obs_shapes: Shapes of the observations.
    :param non_lin: Activation.
    :param hidden_units: Widths of the hidden layers, before and after averaging.
    """

    def __init__(self, obs_shapes: Shapes, non_lin: NonLinearity, hidden_units: Sequence[int]) -> None:
        blocks = piece_embedding(obs_shapes, non_lin, hidden_units)
        blocks["stock"] = MaskedGlobalPoolingBlock(
            "pieces", "stock", blocks["pieces"].out_shapes(), pooling_func="sum", pooling_dim=1
        )
        blocks["latent"] = DenseBlock("stock", "latent", blocks["stock"].out_shapes(), hidden_units, non_lin)
        super().__init__(obs_shapes, blocks)


class CuttingCriticNet(ValueNet):
    """Values the selected piece with the order.

    :param obs_shapes: Shapes of the observations.
    :param non_lin: Activation.
    :param hidden_units: Widths of the hidden layers.
    """

    def __init__(self, obs_shapes: Shapes, non_lin: NonLinearity, hidden_units: Sequence[int]) -> None:
        blocks = cut_embedding(obs_shapes, non_lin, hidden_units)
        blocks["latent"] = DenseBlock("cut", "latent", blocks["cut"].out_shapes(), hidden_units, non_lin)
        super().__init__(obs_shapes, blocks)
