"""Masking of the logits of invalid actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError, EnvironmentContractError
from maze.perception.blocks.base import FunctionBlock, Keys
from maze.perception.program.network_program import Array, Places, ProgramReader, UnreadableError


class ActionMaskingBlock(FunctionBlock):
    """Replace the logits of invalid actions by the smallest finite number of their data type.

    The first input holds the logits, the second the mask: positive where an action is valid, zero where it is not.
    The logits of several actors (`MultiDiscrete`: one for each of its actions) are concatenated in the last dimension,
    or the actors have the dimension before it. The mask has the shape of the logits, or that of one actor's actions,
    and then applies to all actors.

    An actor without any valid action is an error: all its actions would otherwise have equal probability. The check
    costs one reduction of the mask per forward pass (on a GPU also a synchronisation), and is left out of exported or
    compiled graphs, which cannot branch on values. `MultiBinary` needs `require_valid_action=False`,
    because all bits at zero is an action.

    :param in_keys: Keys of the logits and of the mask.
    :param in_shapes: Shapes of the logits and of the mask.
    :param num_actors: Number of actors, each of which takes one action.
    :param num_of_actor_actions: Number of actions of each actor; a sequence where they differ; None: the logits are
        divided equally.
    :param require_valid_action: Whether an actor without any valid action is an error.
    :raises ConfigError: The shapes do not fit.
    """

    def __init__(
        self,
        in_keys: list[str],
        out_keys: Keys,
        in_shapes: Sequence[Sequence[int]],
        num_actors: int,
        num_of_actor_actions: int | Sequence[int] | None,
        require_valid_action: bool = True,
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        self.num_actors = num_actors
        n_each: Any = num_of_actor_actions
        self.num_of_actor_actions = n_each = np.ravel(n_each).tolist() if np.ndim(n_each) else n_each  # maybe `nvec`
        self.require_valid_action = require_valid_action
        logits_shape, mask_shape = (tuple(shape) for shape in self.in_shapes)
        n_logits = logits_shape[-1]
        has_actor_dim = num_actors > 1 and logits_shape[-2:-1] == (num_actors,) and n_each in (None, n_logits)
        if has_actor_dim:
            self._group_sizes = [n_logits]
        elif isinstance(n_each, Sequence):
            self._group_sizes = [int(size) for size in n_each]
        else:
            self._group_sizes = [n_each or n_logits // max(1, num_actors)] * num_actors
        of_one_actor = (*logits_shape[: -1 - has_actor_dim], *self._group_sizes[:1])
        self._is_for_all = mask_shape == of_one_actor != logits_shape
        fits = self._is_for_all and len(set(self._group_sizes)) == 1
        if sum(self._group_sizes) != n_logits or not (mask_shape == logits_shape or fits):
            raise ConfigAssertionError(
                f"{self.block_name}: expected logits for `num_actors` = {num_actors} with `num_of_actor_actions` = "
                f"{num_of_actor_actions}, and a mask of their shape or of that of one actor's actions; found "
                f"{dict(zip(self.in_keys, self.in_shapes, strict=True))}."
            )

    @override(FunctionBlock)
    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        logits, mask = tensors
        valid = mask if mask.dtype is torch.bool else mask > 0
        if self.require_valid_action and not torch.compiler.is_compiling():
            self._check_rows(valid)
        if self._is_for_all:
            valid = valid.unsqueeze(-2) if len(self._group_sizes) == 1 else torch.cat([valid] * self.num_actors, -1)
        return logits.masked_fill(~valid, torch.finfo(logits.dtype).min)

    @override(FunctionBlock)
    def in_numpy(self, *arrays: Array) -> Array:
        logits, valid = arrays[0], arrays[1] > 0
        if self.require_valid_action and not valid.any(axis=-1).all():
            self._check_rows(torch.from_numpy(valid))
        return np.where(valid, logits, np.finfo(logits.dtype).min)

    @override(FunctionBlock)
    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        if len(self._group_sizes) > 1 or self._is_for_all:  # `in_numpy` takes a mask of the logits' shape
            raise UnreadableError
        return super().describe_forward(reader, inputs)

    def _check_rows(self, valid: torch.Tensor) -> None:
        has_action = valid.any(dim=-1)
        if len(self._group_sizes) > 1 and not self._is_for_all:
            groups = torch.split(valid, self._group_sizes, dim=-1)
            has_action = torch.stack([group.any(dim=-1) for group in groups], dim=-1)
        if not bool(has_action.all()):
            rows = (~has_action).nonzero()
            error = EnvironmentContractError(
                f"{self.block_name}: the mask {self.in_keys[1]!r} for the logits {self.in_keys[0]!r} leaves no valid "
                f"action in {len(rows)} of {has_action.numel()} rows, first at index {tuple(rows[0].tolist())}. "
                "Each row must hold at least one positive entry: check the mask that the environment computes."
            )
            error.row = int(rows[0][0]) if valid.dim() > 1 else 0
            raise error
