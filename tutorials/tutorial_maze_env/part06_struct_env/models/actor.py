"""Policy networks of the two sub-steps, with and without masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from maze.perception.blocks.base import NonLinearity
from maze.perception.blocks.general.action_masking import ActionMaskingBlock
from maze.perception.blocks.general.functional import FunctionalBlock
from maze.perception.blocks.inference import InferenceBlock
from maze.perception.blocks.output.linear import LinearOutputBlock
from maze.perception.weight_init import make_module_init_normc
from tutorial_maze_env.part06_struct_env.models.embedding import Blocks, Shapes, cut_embedding, piece_embedding


def drop_last_axis(scores: torch.Tensor) -> torch.Tensor:
    """From one score per piece, `(..., slots, 1)`, to logits `(..., slots)`."""
    return scores.squeeze(-1)


class PolicyNet(nn.Module):
    """Logits computed by perception blocks.

    :param obs_shapes: Shapes of the observations.
    :param blocks: All blocks.
    :param heads: Keys of the logits.
    """

    def __init__(self, obs_shapes: Shapes, blocks: Blocks, heads: list[str]) -> None:
        super().__init__()
        in_keys = list(obs_shapes)
        self.perception_net = InferenceBlock(
            in_keys=in_keys,
            out_keys=heads,
            in_shapes=[obs_shapes[key] for key in in_keys],
            perception_blocks=blocks,
        )
        self.perception_net.apply(make_module_init_normc(1.0))
        for block in blocks.values():
            if isinstance(block, LinearOutputBlock):
                block.apply(make_module_init_normc(0.01))  # starts close to the uniform policy

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Logits by action."""
        return self.perception_net(x)  # type: ignore[no-any-return]  # nn.Module.__call__


class PieceSelectionPolicyNet(PolicyNet):
    """Scores each piece on stock by the same network.

    :param obs_shapes: Shapes of the observations.
    :param action_logits_shapes: Shapes of the logits.
    :param non_lin: Activation.
    :param hidden_units: Widths of the hidden layers.
    :param use_masking: Whether to apply `inventory_mask`.
    """

    def __init__(
        self,
        obs_shapes: Shapes,
        action_logits_shapes: Shapes,
        non_lin: NonLinearity,
        hidden_units: Sequence[int],
        use_masking: bool = False,
    ) -> None:
        blocks = piece_embedding(obs_shapes, non_lin, hidden_units)
        blocks["scores"] = LinearOutputBlock("pieces", "scores", blocks["pieces"].out_shapes(), output_units=1)
        logits_key = "piece_idx_logits" if use_masking else "piece_idx"
        blocks[logits_key] = FunctionalBlock("scores", logits_key, blocks["scores"].out_shapes(), drop_last_axis)
        if use_masking:
            blocks["piece_idx"] = ActionMaskingBlock(
                in_keys=[logits_key, "inventory_mask"],
                out_keys="piece_idx",
                in_shapes=[*blocks[logits_key].out_shapes(), obs_shapes["inventory_mask"]],
                num_actors=1,
                num_of_actor_actions=None,
            )
        super().__init__(obs_shapes, blocks, list(action_logits_shapes))


class CuttingPolicyNet(PolicyNet):
    """Decides how the selected piece is cut.

    :param obs_shapes: Shapes of the observations.
    :param action_logits_shapes: Shapes of the logits.
    :param non_lin: Activation.
    :param hidden_units: Widths of the hidden layers.
    :param use_masking: Whether to apply `cutting_mask`.
    """

    def __init__(
        self,
        obs_shapes: Shapes,
        action_logits_shapes: Shapes,
        non_lin: NonLinearity,
        hidden_units: Sequence[int],
        use_masking: bool = False,
    ) -> None:
        blocks = cut_embedding(obs_shapes, non_lin, hidden_units)
        for head, shape in action_logits_shapes.items():
            is_masked = use_masking and head == "cut_rotation"
            key = f"{head}_logits" if is_masked else head
            blocks[key] = LinearOutputBlock("cut", key, blocks["cut"].out_shapes(), output_units=math.prod(shape))
            if is_masked:
                blocks[head] = ActionMaskingBlock(
                    in_keys=[key, "cutting_mask"],
                    out_keys=head,
                    in_shapes=[*blocks[key].out_shapes(), obs_shapes["cutting_mask"]],
                    num_actors=1,
                    num_of_actor_actions=None,
                )
        super().__init__(obs_shapes, blocks, list(action_logits_shapes))
