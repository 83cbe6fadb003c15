"""Events of observations, actions and rewards, for all environments."""

# Event interfaces have no abstract methods: topics implement all methods.

from __future__ import annotations

from abc import ABC
from typing import Any

import numpy as np

from maze.core.log_events.log_create_figure_functions import (
    create_histogram,
    create_relative_bar_plot,
    create_violin_distribution,
)
from maze.core.log_stats.event_decorators import (
    define_episode_stats,
    define_epoch_stats,
    define_plot,
    define_stats_grouping,
    define_step_stats,
)
from maze.core.log_stats.reduction import histogram


class DiscreteActionEvents(ABC):
    """Discrete actions."""

    @define_epoch_stats(histogram)
    @define_episode_stats(histogram)
    @define_step_stats(None)
    @define_stats_grouping("substep", "name")
    def action(self, substep: str, name: str, value: int) -> None:
        """A discrete action was taken.

        :param substep: `substep_` and the sub-step's key.
        :param name: Key of the action in the action space.
        :param value: The action.
        """


class ActionEvents(ABC):
    """Actions by kind, with figures of their distributions."""

    @define_plot(create_relative_bar_plot)
    @define_epoch_stats(histogram)
    @define_episode_stats(histogram)
    @define_step_stats(None)
    @define_stats_grouping("step_key", "agent_name", "name")
    def discrete_action(self, step_key: str, agent_name: str, name: str, value: int, action_dim: int) -> None:
        """A discrete action was taken.

        :param step_key: Key of the sub-step.
        :param agent_name: The agent that acted.
        :param name: Key of the action in the action space.
        :param value: The action.
        :param action_dim: Number of actions.
        """

    @define_plot(create_relative_bar_plot)
    @define_epoch_stats(histogram)
    @define_episode_stats(histogram)
    @define_step_stats(None)
    @define_stats_grouping("step_key", "agent_name", "name")
    def multi_binary_action(
        self, step_key: str, agent_name: str, name: str, value: int, num_binary_actions: int
    ) -> None:
        """One of several binary actions was chosen.

        :param step_key: Key of the sub-step.
        :param agent_name: The agent that acted.
        :param name: Key of the action in the action space.
        :param value: Index of the binary action.
        :param num_binary_actions: Number of binary actions.
        """

    @define_plot(create_violin_distribution)
    @define_epoch_stats(None)
    @define_episode_stats(None)
    @define_step_stats(None)
    @define_stats_grouping("step_key", "agent_name", "name")
    def continuous_action(self, step_key: str, agent_name: str, name: str, value: np.ndarray[Any, Any]) -> None:
        """A continuous action was taken.


        :param step_key: Key of the sub-step.
        :param agent_name: The agent that acted.
        :param name: Key of the action in the action space.
        :param value: The action, `[n_dims]`.
        """


class ObservationEvents(ABC):
    """Observations before and after the wrappers."""

    @define_epoch_stats(None)
    @define_episode_stats(None)
    @define_step_stats(None)
    @define_stats_grouping("step_key", "agent_name", "name")
    def observation_processed(self, step_key: str, agent_name: str, name: str, value: Any) -> None:
        """An agent received an observation.

        :param step_key: Key of the sub-step.
        :param agent_name: The agent that observed.
        :param name: Key of the observation in the observation space.
        :param value: The observation.
        """

    @define_epoch_stats(None)
    @define_episode_stats(None)
    @define_step_stats(None)
    @define_stats_grouping("step_key", "agent_name", "name")
    def observation_original(self, step_key: str, agent_name: str, name: str, value: Any) -> None:
        """The environment returned an observation, before all wrappers.

        :param step_key: Key of the sub-step.
        :param agent_name: The agent that observed.
        :param name: Key of the observation in the observation space.
        :param value: The observation.
        """


class RewardEvents(ABC):
    """Rewards before and after the wrappers."""

    @define_plot(create_histogram)
    @define_epoch_stats(histogram)
    @define_episode_stats(histogram)
    @define_step_stats(None)
    @define_stats_grouping("step_key", "agent_name")
    def reward_processed(self, step_key: str, agent_name: str, value: float) -> None:
        """An agent received a reward.

        :param step_key: Key of the sub-step.
        :param agent_name: The agent that received it.
        :param value: The reward.
        """

    @define_plot(create_histogram)
    @define_epoch_stats(histogram)
    @define_episode_stats(histogram)
    @define_step_stats(None)
    def reward_original(self, value: float) -> None:
        """The environment returned a reward, before all wrappers.

        :param value: The reward.
        """
