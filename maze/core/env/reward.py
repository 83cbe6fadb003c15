"""Rewards computed from events and states."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import numpy as np

from maze.core.annotations import override
from maze.core.env.maze_state import MazeStateType
from maze.core.events.pubsub import Subscriber


class RewardAggregatorInterface(Subscriber):
    """Turns the events of a step, the state after it, or both into the step's reward.

    Registered with the core environment's :class:`~maze.core.events.pubsub.Pubsub`, which passes it the events of the
    interfaces it asks for.
    """

    @override(Subscriber)
    def get_interfaces(self) -> list[type[ABC]]:
        """The event interfaces of interest. Default: none, for rewards that depend on the state only."""
        return []

    @abstractmethod
    def summarize_reward(self, maze_state: MazeStateType | None = None) -> float | np.ndarray:
        """The reward of the current step.

        :param maze_state: State after the step; aggregators that use events only ignore it.
        :return: A number; or `[n_actors]`, one for each of the step's actors.
        """

    def clone_from(self, reward_aggregator: RewardAggregatorInterface) -> None:
        """Takes over the state of another aggregator, the events it has collected included."""
        for name, value in vars(reward_aggregator).items():
            setattr(self, name, copy.deepcopy(value))
