"""Composes delta state critics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymnasium import spaces

from maze.core.agent.torch_state_critic import TorchDeltaStateCritic
from maze.core.annotations import override
from maze.perception.models.critics.base_state_critic_composer import BaseStateCriticComposer

if TYPE_CHECKING:
    from maze.core.env.structured_env import StepKeyType
    from maze.core.utils.factory import CollectionOfConfigType


class DeltaStateCriticComposer(BaseStateCriticComposer):
    """Builds a critic that predicts the first sub-step's value and the others' differences from it.

    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param networks: Networks, or configurations of them: a mapping from step keys, or a list in their order.
    """

    def __init__(
        self,
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        networks: CollectionOfConfigType,
    ) -> None:
        super().__init__(observation_spaces_dict, agent_counts_dict)
        self._critic = TorchDeltaStateCritic(self._networks_by_step_key(networks), observation_spaces_dict, "cpu")

    @property
    @override(BaseStateCriticComposer)
    def critic(self) -> TorchDeltaStateCritic:
        return self._critic
