"""Interface of state critics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maze.core.agent.state_critic_input_output import StateCriticInput, StateCriticOutput
    from maze.core.env.observation_conversion import ObservationType


class StateCritic(ABC):
    """Predict the value of a state, its expected discounted return."""

    @abstractmethod
    def predict_values(self, critic_input: StateCriticInput) -> StateCriticOutput:
        """Return the values of the sub-steps of an environment step.

        :param critic_input: Observations of the sub-steps in their order, tensors `[..., *shape]` by key.
        :return: Values `[...]` of each sub-step; of shared critics, those of the environment step.
        """

    @abstractmethod
    def predict_value(self, observation: ObservationType, critic_id: int | str) -> Any:
        """Return the value of the observations of a single sub-step, `[...]`.

        :param observation: Observations `[..., *shape]` by key.
        :param critic_id: Key of the critic: the step key.
        """
