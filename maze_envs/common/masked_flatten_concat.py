"""Dense networks whose logits are masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.perception.blocks.general.action_masking import ActionMaskingBlock
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet


class MaskedFlattenConcatPolicyNet(FlattenConcatPolicyNet):
    """Flatten and concatenate the observations, feed them to dense layers, and mask the logits.

    :param obs_shapes: Shapes of the observations.
    :param action_logits_shapes: Shapes of the logits by action.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation.
    :param masks: The observation that masks each action; actions without one are free.
    """

    def __init__(
        self,
        obs_shapes: dict[str, Sequence[int]],
        action_logits_shapes: dict[str, Sequence[int]],
        hidden_units: list[int],
        non_lin: str | type[nn.Module],
        masks: Mapping[str, str],
    ) -> None:
        super().__init__(obs_shapes, action_logits_shapes, hidden_units, non_lin)
        for head, mask in masks.items():
            if head not in action_logits_shapes or mask not in obs_shapes:
                raise ConfigError(
                    f"masks: `{head}: {mask}` must name an action of {list(action_logits_shapes)} and an observation "
                    f"of {list(obs_shapes)}."
                )
        self._masks = dict(masks)
        self.maskings = nn.ModuleDict(
            {
                head: ActionMaskingBlock(
                    in_keys=[head, mask],
                    out_keys=head,
                    in_shapes=[action_logits_shapes[head], obs_shapes[mask]],
                    num_actors=1,
                    num_of_actor_actions=None,
                )
                for head, mask in masks.items()
            }
        )

    @override(FlattenConcatPolicyNet)
    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits = super().forward(x)
        for head, block in self.maskings.items():
            logits.update(block({head: logits[head], self._masks[head]: x[self._masks[head]]}))
        return logits
