"""Actions as features: what a network of state-action values gets to see of an action."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch.nn import functional

from maze.core.errors import ConfigError


def are_all_discrete(action_space: spaces.Dict) -> bool:
    """Whether all heads are ``Discrete``, so that a network can return the values of all actions at once."""
    return all(isinstance(space, spaces.Discrete) for space in action_space.spaces.values())


def encoded_size(space: spaces.Space[Any], head: str) -> int:
    """Number of features that :func:`encode_action` gives for one action head.

    :raises ConfigError: The space has no encoding.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return max(1, torch.Size(space.shape or ()).numel())
    raise ConfigError(f"Action head `{head}`: state-action critics cannot process {space}.")


def encode_action(space: spaces.Space[Any], action: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Choices as one-hot vectors, numbers as they are (with their gradients).

    >>> encode_action(spaces.MultiDiscrete([2, 3]), torch.tensor([1, 0]), torch.float32)
    tensor([0., 1., 1., 0., 0.])

    :param space: Space of one action head.
    :param action: ``[..., *space.shape]`` with any leading batch dimensions.
    :param dtype: Floating type of the features.
    :return: ``[..., encoded_size(space)]``
    """
    n_dims = len(space.shape or ())
    if isinstance(space, spaces.Discrete):
        return functional.one_hot(action.long(), int(space.n)).to(dtype)
    flat = action.flatten(action.dim() - n_dims) if n_dims else action.unsqueeze(-1)
    if isinstance(space, spaces.MultiDiscrete):
        sizes = [int(size) for size in space.nvec.flatten()]
        parts = [functional.one_hot(flat[..., index].long(), size) for index, size in enumerate(sizes)]
        return torch.cat(parts, dim=-1).to(dtype)
    return flat.to(dtype)
