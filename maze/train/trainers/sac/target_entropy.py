"""How much entropy a tuned policy shall keep.

Per action head, times ``target_entropy_multiplier``:

* choices (``Discrete``, and each component of ``MultiDiscrete`` and ``MultiBinary``): 98 % of the largest entropy there
  is, the logarithm of the number of *valid* actions;
* ``Box``: minus the number of components, for actions scaled to [-1, 1]. Log-probabilities are densities of the action
  in its own unit, so that the logarithms of the half widths of bounded components are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

DISCRETE_SHARE = 0.98


def target_entropy(action_space: spaces.Dict, logits: Mapping[str, Tensor], multiplier: float) -> Tensor | float:
    """Target for the joint entropy of a sub-step's actions: a number, or ``[B]`` where action masks differ.

    :param action_space: The heads.
    :param logits: Logits of each head; masked actions have the minimum of their type.
    :param multiplier: Factor of the targets.
    """
    total: Tensor | float = 0.0
    for head, space in action_space.spaces.items():
        if isinstance(space, spaces.Box):
            total = total + box_target(space, multiplier)
        else:
            for component in choice_logits(space, logits[head]):
                total = total + multiplier * DISCRETE_SHARE * valid_actions(component).log()
    return total


def box_target(space: spaces.Box, multiplier: float) -> float:
    """Target for continuous actions, as a density of the action in its own unit."""
    half_widths = 0.5 * (space.high.astype(np.float64) - space.low.astype(np.float64))
    bounded = half_widths[space.bounded_below & space.bounded_above]
    return -multiplier * math.prod(space.shape) + float(np.log(bounded).sum())


def valid_actions(logits: Tensor) -> Tensor:
    """Number of actions that are not masked, ``[...]``."""
    return (logits > torch.finfo(logits.dtype).min).sum(-1).to(logits.dtype)


def choice_logits(space: spaces.Space[Any], logits: Tensor) -> list[Tensor]:
    """Logits ``[..., n]`` of each choice that makes up a head's action."""
    if isinstance(space, spaces.Discrete):
        return [logits]
    if isinstance(space, spaces.MultiDiscrete):
        return list(torch.split(logits, [int(n) for n in space.nvec.flatten()], dim=-1))
    flat = logits.flatten(logits.dim() - len(space.shape or ()))
    return [torch.stack([torch.zeros_like(one), one], dim=-1) for one in flat.unbind(-1)]
