"""A policy for one sub-step, without knowledge of actors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maze.core.env.maze_env import ActionType
    from maze.core.env.observation_conversion import ObservationType


class FlatPolicy(ABC):
    """Choose the actions of one sub-step; :class:`~maze.core.agent.default_policy.DefaultPolicy` joins several.

    A flat policy that draws random numbers may implement `seed(seed: int) -> None`; `DefaultPolicy.seed` calls it.
    """

    @abstractmethod
    def compute_action(self, observation: ObservationType, deterministic: bool) -> ActionType:
        """Choose one action.

        :param observation: Observation of the sub-step, arrays `[*space.shape]` by key.
        :param deterministic: Return the deterministic (greedy) action instead of sampling.
        :return: The action, by action head.
        """

    @abstractmethod
    def compute_top_action_candidates(
        self, observation: ObservationType, num_candidates: int | None
    ) -> tuple[Sequence[ActionType], Sequence[float]]:
        """Rank actions, best first.

        :param observation: Observation of the sub-step, arrays `[*space.shape]` by key.
        :param num_candidates: Maximum number of actions; `None`: all.
        :return: The actions, and their probabilities or scores in the same order.
        """
