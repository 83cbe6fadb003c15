"""Masking of the logits of invalid actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError, EnvironmentContractError
from maze.perception.blocks.base import FunctionBlock, Keys, PerceptionBlock
from maze.perception.program.network_program import Array, Places, ProgramReader


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
    :raises ConfigError: The keys are not logits, mask and one output, or their shapes do not fit.
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
        if len(self.in_keys) != 2 or len(self.out_keys) != 1:
            raise ConfigAssertionError(
                f"{self.block_name}: expected two input keys (logits, mask) and one output key, "
                f"found {self.in_keys} and {self.out_keys}."
            )
        if num_actors < 1:
            raise ConfigAssertionError(f"{self.block_name}: `num_actors` must be at least 1, found {num_actors}.")
        self.num_actors = num_actors
        self.num_of_actor_actions = num_of_actor_actions
        self.require_valid_action = require_valid_action
        logits_shape, mask_shape = (tuple(shape) for shape in self.in_shapes)
        self._group_sizes = self._sizes_of_groups(logits_shape)
        self._spread_mask = self._spreading(logits_shape, mask_shape)

    @override(FunctionBlock)
    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        logits, mask = tensors
        valid = mask if mask.dtype is torch.bool else mask > 0
        if self.require_valid_action and not torch.compiler.is_compiling():
            self._check_rows(valid)
        if self._spread_mask == "repeat":
            valid = torch.cat([valid] * self.num_actors, dim=-1)
        elif self._spread_mask == "broadcast":
            valid = valid.unsqueeze(-2)
        return logits.masked_fill(~valid, torch.finfo(logits.dtype).min)

    @override(FunctionBlock)
    def in_numpy(self, *arrays: Array) -> Array:
        logits, valid = arrays[0], arrays[1] > 0
        if self.require_valid_action and not valid.any(axis=-1).all():
            self._check_rows(torch.from_numpy(valid))
        return np.where(valid, logits, np.finfo(logits.dtype).min)

    @override(FunctionBlock)
    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        if len(self._group_sizes) > 1 or self._spread_mask is not None:  # `in_numpy` takes a mask of the logits' shape
            raise reader.unreadable()
        return super().describe_forward(reader, inputs)

    @override(PerceptionBlock)
    def extra_repr(self) -> str:
        return f"num_actors: {self.num_actors}, actions: {self.num_of_actor_actions or self._group_sizes[0]}"

    def _check_rows(self, valid: torch.Tensor) -> None:
        if self._spread_mask is not None or len(self._group_sizes) == 1:
            has_action = valid.any(dim=-1)
        else:
            has_action = torch.stack(
                [group.any(dim=-1) for group in torch.split(valid, self._group_sizes, dim=-1)], dim=-1
            )
        if not bool(has_action.all()):
            rows = (~has_action).nonzero()
            error = EnvironmentContractError(
                f"{self.block_name}: the mask {self.in_keys[1]!r} for the logits {self.in_keys[0]!r} leaves no valid "
                f"action in {len(rows)} of {has_action.numel()} rows, first at index {tuple(rows[0].tolist())}. "
                "Each row must hold at least one positive entry: check the mask that the environment computes."
            )
            error.row = int(rows[0][0])
            raise error

    def _sizes_of_groups(self, logits_shape: tuple[int, ...]) -> list[int]:
        """Return the sizes of the parts of the last dimension of the logits that belong to each actor."""
        n_last = logits_shape[-1]
        has_actor_dim = len(logits_shape) > 1 and self.num_actors > 1 and logits_shape[-2] == self.num_actors
        n_actions = self.num_of_actor_actions
        if isinstance(n_actions, Sequence):
            sizes = [int(size) for size in n_actions]
            fits = len(sizes) == self.num_actors and sum(sizes) == n_last
        elif has_actor_dim and n_actions in (None, n_last):
            return [n_last]
        else:
            sizes = [n_last // self.num_actors if n_actions is None else n_actions] * self.num_actors
            fits = sum(sizes) == n_last
        if not fits:
            raise ConfigAssertionError(
                f"{self.block_name}: logits {self.in_keys[0]!r} of shape {logits_shape} do not divide into "
                f"`num_actors` = {self.num_actors} actors with `num_of_actor_actions` = {n_actions} actions each."
            )
        return sizes

    def _spreading(
        self, logits_shape: tuple[int, ...], mask_shape: tuple[int, ...]
    ) -> Literal["repeat", "broadcast"] | None:
        """Return how to extend the mask of one actor to all actors; None: it has the shape of the logits."""
        if mask_shape == logits_shape:
            return None
        equal = len(set(self._group_sizes)) == 1
        if equal and len(self._group_sizes) > 1 and mask_shape == (*logits_shape[:-1], self._group_sizes[0]):
            return "repeat"
        if len(self._group_sizes) == 1 and self.num_actors > 1 and mask_shape == (*logits_shape[:-2], logits_shape[-1]):
            return "broadcast"
        raise ConfigAssertionError(
            f"{self.block_name}: the mask {self.in_keys[1]!r} must have the shape {logits_shape} of the logits "
            f"{self.in_keys[0]!r}, or that of the {self._group_sizes[0]} actions of one actor; found {mask_shape}."
        )
