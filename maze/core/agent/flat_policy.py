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
        """Choose one action."""

    @abstractmethod
    def compute_top_action_candidates(
        self, observation: ObservationType, num_candidates: int | None
    ) -> tuple[Sequence[ActionType], Sequence[float]]:
        """Rank at most `num_candidates` actions (`None`: all of them), best first, with their probabilities."""
