"""Rewards computed from events and states."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import numpy as np

from maze.core.annotations import override
from maze.core.env.maze_state import MazeStateType
from maze.core.events.pubsub import Subscriber


class RewardAggregatorInterface(Subscriber):
    """Compute the reward of a step from its events, the state after it, or both.

    Registered with the core environment's :class:`~maze.core.events.pubsub.Pubsub`, which passes it the events of the
    interfaces in :meth:`get_interfaces`.
    """

    @override(Subscriber)
    def get_interfaces(self) -> list[type[ABC]]:
        """Return the required event interfaces. Default: none, for rewards that depend on the state only."""
        return []

    @abstractmethod
    def summarize_reward(self, maze_state: MazeStateType | None = None) -> float | np.ndarray:
        """Return the reward of the current step.

        :param maze_state: State after the step; aggregators that use events only ignore it.
        :return: A number; or `[n_actors]`, one for each of the step's actors.
        """

    def clone_from(self, reward_aggregator: RewardAggregatorInterface) -> None:
        """Take over the state of another aggregator, including its events.

        :param reward_aggregator: An aggregator of the same class. All of its attributes are copied deeply, so those
            that must be shared (large tables, handles) need an override of this method.
        """
        for name, value in vars(reward_aggregator).items():
            setattr(self, name, copy.deepcopy(value))
