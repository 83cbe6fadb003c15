"""Composers of state critics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from gymnasium import spaces
from torch import nn

from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchSharedStateCritic, TorchStepStateCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface
from maze.perception.models.network_factory import build, networks_by_key, only_network
from maze.perception.perception_utils import observation_spaces_to_in_shapes

if TYPE_CHECKING:
    from maze.core.agent.torch_state_critic import TorchStateCritic
    from maze.core.env.structured_env import StepKeyType
    from maze.core.utils.factory import CollectionOfConfigType, ConfigType

NETWORKS = "model.critic.networks"


class BaseStateCriticComposer(CriticComposerInterface):
    """Build a state critic. A derived class sets `_critic`.

    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    """

    _critic: TorchStateCritic

    def __init__(
        self, observation_spaces_dict: dict[StepKeyType, spaces.Dict], agent_counts_dict: dict[StepKeyType, int]
    ) -> None:
        self._observation_spaces_dict = observation_spaces_dict
        self._agent_counts_dict = agent_counts_dict
        self._obs_shapes = observation_spaces_to_in_shapes(observation_spaces_dict)

    @property
    @override(CriticComposerInterface)
    def critic(self) -> TorchStateCritic:
        return self._critic


class StepNetworksCriticComposer(BaseStateCriticComposer):
    """Build a critic of one network for each sub-step.

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
        built = {
            key: build(nn.Module, config, where, obs_shapes=self._obs_shapes[key])
            for key, (config, where) in networks_by_key(networks, observation_spaces_dict, NETWORKS).items()
        }
        self._critic = self.critic_class(built, observation_spaces_dict, "cpu")


class StepStateCriticComposer(StepNetworksCriticComposer):
    """Build a critic with one network for each sub-step.

    The arguments are those of :class:`StepNetworksCriticComposer`.
    """

    critic_class = TorchStepStateCritic


class DeltaStateCriticComposer(StepNetworksCriticComposer):
    """Build a critic that predicts the first sub-step's value and the others' differences from it.

    The arguments are those of :class:`StepNetworksCriticComposer`.
    """

    critic_class = TorchDeltaStateCritic


class SharedStateCriticComposer(BaseStateCriticComposer):
    """Build a critic whose one network values all sub-steps and agents of an environment step together.

    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param networks: The one network, or its configuration; also as the only item of a list or mapping.
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
        network = build(nn.Module, config, f"{NETWORKS}[0]", obs_shapes=self._merged_shapes(stack_observations))
        self._critic = TorchSharedStateCritic({key: network}, observation_spaces_dict, "cpu", stack_observations)

    def _merged_shapes(self, stack_observations: bool) -> dict[str, Sequence[int]]:
        shapes: dict[str, Sequence[int]] = {}
        counts: dict[str, int] = {}
        for step_key, step_shapes in self._obs_shapes.items():
            n_agents = self._agent_counts_dict.get(step_key, 1)
            if stack_observations and n_agents < 1:
                raise ConfigError(
                    f"model.critic.stack_observations: sub-step {step_key!r} has no fixed number of agents "
                    f"(agent_counts_dict says {n_agents}), so their observations cannot be stacked. Use a step critic."
                )
            for key, shape in step_shapes.items():
                if stack_observations and tuple(shapes.get(key, shape)) != tuple(shape):
                    raise ConfigError(
                        f"model.critic.stack_observations: observation `{key}` has the shape {tuple(shape)} in "
                        f"sub-step {step_key!r}, but {tuple(shapes[key])} in another; they cannot be stacked."
                    )
                shapes.setdefault(key, shape)
                counts[key] = counts.get(key, 0) + n_agents
        if not stack_observations:
            return shapes
        return {key: (counts[key], *shape) if counts[key] > 1 else shape for key, shape in shapes.items()}
