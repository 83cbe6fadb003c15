"""Masking of the logits of invalid actions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maze.core.annotations import override
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.perception.blocks.base import Keys, PerceptionBlock, TensorDict


class ActionMaskingBlock(PerceptionBlock):
    """Replaces the logits of invalid actions by the smallest finite number of their data type.

    The first input holds the logits, the second the mask: positive where an action is valid, zero where it is not. Both
    hold ``num_actors * num_of_actor_actions`` entries in their last dimension (``MultiDiscrete``: one actor for each of
    its actions), or have the actors in a dimension of their own. A mask of the actions of one actor holds for all.

    An actor without any valid action is an error: it would be offered all of them with equal probability. This costs
    one reduction of the mask per forward pass; ``require_valid_action=False`` leaves it out, which ``MultiBinary``
    needs, where all bits at zero is an action.

    :param in_keys: Keys of the logits and of the mask.
    :param in_shapes: Shapes of the logits and of the mask.
    :param num_actors: Number of groups of logits, one action is chosen from each.
    :param num_of_actor_actions: Number of actions of each actor, or one number for each actor; None: the logits are
        divided equally.
    :param require_valid_action: Whether an actor without any valid action is an error.
    """

    def __init__(
        self,
        in_keys: list[str],
        out_keys: Keys,
        in_shapes: list[Sequence[int]],
        num_actors: int,
        num_of_actor_actions: int | Sequence[int] | None,
        require_valid_action: bool = True,
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        if len(self.in_keys) != 2 or len(self.out_keys) != 1:
            raise ConfigError(
                f"{self.block_name}: expected two input keys (logits, mask) and one output key, "
                f"found {self.in_keys} and {self.out_keys}."
            )
        self.num_actors = num_actors
        self.num_of_actor_actions = num_of_actor_actions
        self.require_valid_action = require_valid_action
        logits_shape, mask_shape = (tuple(shape) for shape in self.in_shapes)
        self._group_sizes = self._actions_per_actor(logits_shape)
        self._repeat_mask = mask_shape != logits_shape
        if self._repeat_mask and mask_shape != (*logits_shape[:-1], self._group_sizes[0]) and mask_shape != (
            *logits_shape[:-2],
            self._group_sizes[0],
        ):
            raise ConfigError(
                f"{self.block_name}: the mask {self.in_keys[1]!r} must have the shape {logits_shape} of the logits "
                f"{self.in_keys[0]!r}, or that of the actions of one actor, ({self._group_sizes[0]},); "
                f"found {mask_shape}."
            )
