"""The most likely actions of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from gymnasium import spaces

from maze.core.errors import ConfigError

if TYPE_CHECKING:
    from maze.core.env.maze_env import ActionType
    from maze.distributions.distribution_mapper import DistributionMapper


def top_candidates(
    logits: Mapping[str, torch.Tensor], distribution_mapper: DistributionMapper, num_candidates: int | None
) -> tuple[list[ActionType], list[float]]:
    """The most likely joint actions of discrete heads, best first, with their probabilities.

    The heads are independent, so the k best joint actions are made of the k best actions of each head.

    :param logits: ``[1, n]`` for each head.
    :param num_candidates: How many at most; ``None``: all combinations.
    :raises ConfigError: A head is not discrete, or ``num_candidates`` is less than 1.
    """
    if num_candidates is not None and num_candidates < 1:
        raise ConfigError(f"`num_candidates` must be at least 1 or None, got {num_candidates}.")
    candidates: list[tuple[float, ActionType]] = [(1.0, {})]
    for head, head_logits in logits.items():
        space = distribution_mapper.action_space.spaces[head]
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"Action head `{head}`: candidates can be ranked for Discrete spaces only, found {space}. "
                "Ask for a single action instead."
            )
        probabilities = torch.softmax(head_logits.detach().double().flatten(), dim=-1).cpu().numpy()
        best = np.argsort(-probabilities, kind="stable")[:num_candidates]
        joint = [
            (probability * float(probabilities[choice]), {**action, head: np.int64(choice)})
            for probability, action in candidates
            for choice in best
        ]
        joint.sort(key=lambda candidate: -candidate[0])
        candidates = joint[:num_candidates]
    return [action for _, action in candidates], [probability for probability, _ in candidates]
