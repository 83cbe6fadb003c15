"""Events of observations, actions and rewards, for all environments."""

# Event interfaces have no abstract methods: topics implement all methods.

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from maze.core.log_events import log_create_figure_functions as figures
from maze.core.log_stats import event_decorators
from maze.core.log_stats.reducer_functions import histogram

EventMethod = TypeVar("EventMethod", bound=Callable[..., Any])


def _reduced_by(
    function: Callable[[Any], Any] | None,
    plot: Callable[..., Any] | None = None,
    groups: Sequence[str] = ("step_key", "agent_name", "name"),
) -> Callable[[EventMethod], EventMethod]:
    """Define statistics of all levels that are reduced by one function, `None`: that keep all values.

    :param function: Reduces the statistics of steps and those of episodes.
    :param plot: Draws the statistics of an epoch.
    :param groups: Attributes of the event that its statistics are grouped by.
    """

    def decorate(event: EventMethod) -> EventMethod:
        event = event_decorators.define_step_stats(None)(event_decorators.define_stats_grouping(*groups)(event))
        event = event_decorators.define_epoch_stats(function)(event_decorators.define_episode_stats(function)(event))
        return event if plot is None else event_decorators.define_plot(plot)(event)

    return decorate


class DiscreteActionEvents(ABC):
    """Discrete actions."""

    @_reduced_by(histogram, groups=("substep", "name"))
    def action(self, substep: str, name: str, value: int) -> None:
        """A discrete action was taken.

        :param substep: `substep_` and the sub-step's key.
        :param name: Key of the action in the action space.
        :param value: The action.
        """


class ActionEvents(ABC):
    """Actions by kind, with figures of their distributions."""

    @_reduced_by(histogram, figures.create_relative_bar_plot)
    def discrete_action(self, step_key: str, agent_name: str, name: str, value: int, action_dim: int) -> None:
        """A discrete action was taken.

        :param step_key: Key of the sub-step.
        :param agent_name: The agent that acted.
        :param name: Key of the action in the action space.
        :param value: The action.
        :param action_dim: Number of actions.
        """

    @_reduced_by(histogram, figures.create_relative_bar_plot)
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

    @_reduced_by(None, figures.create_violin_distribution)
    def continuous_action(self, step_key: str, agent_name: str, name: str, value: np.ndarray[Any, Any]) -> None:
        """A continuous action was taken.

        :param step_key: Key of the sub-step.
        :param agent_name: The agent that acted.
        :param name: Key of the action in the action space.
        :param value: The action, `[n_dims]`.
        """


class ObservationEvents(ABC):
    """Observations before and after the wrappers."""

    @_reduced_by(None)
    def observation_processed(self, step_key: str, agent_name: str, name: str, value: Any) -> None:
        """An agent received an observation.

        :param step_key: Key of the sub-step.
        :param agent_name: The agent that observed.
        :param name: Key of the observation in the observation space.
        :param value: The observation.
        """

    @_reduced_by(None)
    def observation_original(self, step_key: str, agent_name: str, name: str, value: Any) -> None:
        """The environment returned an observation, before all wrappers.

        :param step_key: Key of the sub-step.
        :param agent_name: The agent that observed.
        :param name: Key of the observation in the observation space.
        :param value: The observation.
        """


class RewardEvents(ABC):
    """Rewards before and after the wrappers."""

    @_reduced_by(histogram, figures.create_histogram, groups=("step_key", "agent_name"))
    def reward_processed(self, step_key: str, agent_name: str, value: float) -> None:
        """An agent received a reward.

        :param step_key: Key of the sub-step.
        :param agent_name: The agent that received it.
        :param value: The reward.
        """

    @_reduced_by(histogram, figures.create_histogram, groups=())
    def reward_original(self, value: float) -> None:
        """The environment returned a reward, before all wrappers.

        :param value: The reward.
        """
