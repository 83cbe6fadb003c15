"""What a state critic composer is."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from gymnasium import spaces
from torch import nn

from maze.core.annotations import override
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface
from maze.perception.models.network_factory import build, networks_by_key
from maze.perception.perception_utils import observation_spaces_to_in_shapes

if TYPE_CHECKING:
    from maze.core.agent.torch_state_critic import TorchStateCritic
    from maze.core.env.structured_env import StepKeyType
    from maze.core.utils.factory import CollectionOfConfigType

NETWORKS = "model.critic.networks"


class BaseStateCriticComposer(CriticComposerInterface):
    """Builds a state critic.

    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    """

    def __init__(
        self, observation_spaces_dict: dict[StepKeyType, spaces.Dict], agent_counts_dict: dict[StepKeyType, int]
    ) -> None:
        self._observation_spaces_dict = observation_spaces_dict
        self._agent_counts_dict = agent_counts_dict
        self._obs_shapes = observation_spaces_to_in_shapes(observation_spaces_dict)

    @property
    @abstractmethod
    @override(CriticComposerInterface)
    def critic(self) -> TorchStateCritic:
        """The critic (always the same object)."""

    def _networks_by_step_key(self, networks: Any) -> dict[Any, nn.Module]:
        """One network for each sub-step, with its `obs_shapes` as argument."""
        configs = networks_by_key(networks, self._observation_spaces_dict, NETWORKS)
        return {
            key: build(
                nn.Module,
                config,
                f"{NETWORKS}[{index if isinstance(key, int) else key}]",
                obs_shapes=self._obs_shapes[key],
            )
            for index, (key, config) in enumerate(configs.items())
        }


class StepNetworksCriticComposer(BaseStateCriticComposer):
    """Builds a critic of one network for each sub-step.

    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param networks: Networks, or configurations of them: a mapping from step keys, or a list in their order.
    """

    critic_class: ClassVar[type[TorchStateCritic]]
    """What is built from the networks."""

    def __init__(
        self,
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        networks: CollectionOfConfigType,
    ) -> None:
        super().__init__(observation_spaces_dict, agent_counts_dict)
        self._critic = self.critic_class(self._networks_by_step_key(networks), observation_spaces_dict, "cpu")

    @property
    @override(BaseStateCriticComposer)
    def critic(self) -> TorchStateCritic:
        return self._critic
