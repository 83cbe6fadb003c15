"""Interface of state critics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maze.core.agent.state_critic_input_output import StateCriticInput, StateCriticOutput
    from maze.core.env.observation_conversion import ObservationType


class StateCritic(ABC):
    """Predict how much discounted reward is still to come from a state."""

    @abstractmethod
    def predict_values(self, critic_input: StateCriticInput) -> StateCriticOutput:
        """Return values of the observations of one environment step's sub-steps, with any leading batch dimensions."""

    @abstractmethod
    def predict_value(self, observation: ObservationType, critic_id: int | str) -> Any:
        """Return the value of the observations of a single sub-step.

        :param critic_id: Key of the critic: the step key.
        """
