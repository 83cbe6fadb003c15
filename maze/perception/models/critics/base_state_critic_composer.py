"""Composers of state critics."""

from __future__ import annotations

from typing import ClassVar

from gymnasium import spaces
from torch import nn

from maze.core.agent import torch_state_critic
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError
from maze.core.utils.factory import CollectionOfConfigType, ConfigType
from maze.perception.builders.base import build, networks_by_key, only_network
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface
from maze.perception.perception_utils import flatten_spaces, observation_spaces_to_in_shapes

NETWORKS = "model.critic.networks"


class BaseStateCriticComposer(CriticComposerInterface):
    """Build a state critic. A derived class sets `_critic`.

    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    """

    _critic: torch_state_critic.TorchStateCritic

    def __init__(
        self, observation_spaces_dict: dict[StepKeyType, spaces.Dict], agent_counts_dict: dict[StepKeyType, int]
    ) -> None:
        self._obs_shapes = observation_spaces_to_in_shapes(observation_spaces_dict)


class StepStateCriticComposer(BaseStateCriticComposer):
    """Build a critic with one network for each sub-step.

    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param networks: Networks, or configurations of them: a mapping from step keys, or a list in their order.
    """

    critic_class: ClassVar[type[torch_state_critic.TorchStateCritic]] = torch_state_critic.TorchStepStateCritic
    """Critic that is built from the networks."""

    def __init__(
        self,
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        networks: CollectionOfConfigType,
    ) -> None:
        super().__init__(observation_spaces_dict, agent_counts_dict)
        built = {
            key: build(nn.Module, config, where, obs_shapes=self._obs_shapes[key])
            for key, (config, where) in networks_by_key(networks, observation_spaces_dict, NETWORKS).items()
        }
        self._critic = self.critic_class(built, observation_spaces_dict, "cpu")


class DeltaStateCriticComposer(StepStateCriticComposer):
    """Build a critic that predicts the first sub-step's value and the others' differences from it.

    The arguments are those of :class:`StepStateCriticComposer`.
    """

    critic_class = torch_state_critic.TorchDeltaStateCritic


class SharedStateCriticComposer(BaseStateCriticComposer):
    """Build a critic whose one network values all sub-steps and agents of an environment step together.

    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param networks: The network or its configuration, also as the only item of a list or mapping.
    :param stack_observations: Stack what several sub-steps or agents observe under the same key; the network then gets
        the shape `(number of observations, *shape)` for it.
    """

    def __init__(
        self,
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        networks: ConfigType,
        stack_observations: bool,
    ) -> None:
        super().__init__(observation_spaces_dict, agent_counts_dict)
        key, config = only_network(networks, NETWORKS)
        shapes = flatten_spaces(self._obs_shapes.values())
        for name, shape in shapes.items() if stack_observations else ():
            found = {step: shapes[name] for step, shapes in self._obs_shapes.items() if name in shapes}
            counts = {step: agent_counts_dict.get(step, 1) for step in found}
            if min(counts.values()) < 1 or any(other != shape for other in found.values()):
                raise ConfigError(
                    f"model.critic.stack_observations: observation `{name}` cannot be stacked: expected fixed numbers "
                    f"of agents and equal shapes, found {counts} and {found}. Use a step critic."
                )
            shapes[name] = (sum(counts.values()), *shape) if sum(counts.values()) > 1 else shape
        network = build(nn.Module, config, f"{NETWORKS}[0]", obs_shapes=shapes)
        self._critic = torch_state_critic.TorchSharedStateCritic(
            {key: network}, observation_spaces_dict, "cpu", stack_observations
        )
