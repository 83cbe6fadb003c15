"""Composer of models with explicitly configured networks."""

from __future__ import annotations

from functools import cached_property

from gymnasium import spaces

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.structured_env import StepKeyType
from maze.core.utils.factory import ConfigType
from maze.perception.builders.base import embedding_spaces
from maze.perception.models import model_composer
from maze.perception.models.critics import BaseStateActionCriticComposer

_PART_KEYS = ("_target_", "networks")


class CustomModelComposer(model_composer.BaseModelComposer):
    """Build the networks of `policy.networks` and `critic.networks`.

    Outputs of a policy network other than its action heads are embeddings shared with the critic: the critic's network
    of the same sub-step gets their shapes in `obs_shapes`, and the tensors, with gradients, next to the observations.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param distribution_mapper_config: Distributions that differ from the defaults.
    :param policy: A policy composer, or its configuration; `None`: there is no policy.
    :param critic: A critic composer, or its configuration; `None`: there is no critic.
    """

    def __init__(
        self,
        action_spaces_dict: dict[StepKeyType, spaces.Dict],
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        distribution_mapper_config: ConfigType = None,
        policy: ConfigType = None,
        critic: ConfigType = None,
    ) -> None:
        super().__init__(action_spaces_dict, observation_spaces_dict, agent_counts_dict, distribution_mapper_config)
        self._policy_config = policy
        self._critic_config = critic

    @classmethod
    @override(model_composer.BaseModelComposer)
    def check_model_config(cls, model_config: ConfigType) -> None:
        model_composer.check_keys(cls, model_config, {"policy": _PART_KEYS, "critic": _PART_KEYS})

    @cached_property
    @override(model_composer.BaseModelComposer)
    def policy(self) -> TorchPolicy | None:
        return self._compose_policy(self._policy_config)

    @cached_property
    @override(model_composer.BaseModelComposer)
    def critic(self) -> model_composer.Critic | None:
        if self._critic_config is None:
            return None
        model_composer.check_part(self._critic_config, "model.critic", _PART_KEYS)
        composer_type = model_composer.critic_composer_type(self._critic_config)
        judges_actions = composer_type is not None and issubclass(composer_type, BaseStateActionCriticComposer)
        if self.policy is None or judges_actions:
            return self._compose_critic(self._critic_config, self.observation_spaces_dict)
        embeddings = embedding_spaces(self.policy, self.observation_spaces_dict)
        inputs = {
            key: spaces.Dict({**space.spaces, **embeddings[key]}) if embeddings[key] else space
            for key, space in self.observation_spaces_dict.items()
        }
        return self._compose_critic(self._critic_config, inputs)
