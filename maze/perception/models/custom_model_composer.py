"""Composes models from networks that are named explicitly."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.perception.models.critics import BaseStateActionCriticComposer, CriticComposerInterface
from maze.perception.models.model_composer import BaseModelComposer, check_keys, critic_composer_type
from maze.perception.models.network_factory import embedding_spaces
from maze.perception.models.policies.base_policy_composer import BasePolicyComposer

if TYPE_CHECKING:
    from maze.core.env.structured_env import StepKeyType
    from maze.core.utils.factory import ConfigType

_KEYS = ("_target_", "distribution_mapper_config", "policy", "critic")
_SPACES = ("action_spaces_dict", "observation_spaces_dict", "agent_counts_dict")


class CustomModelComposer(BaseModelComposer):
    """Builds the networks that `policy.networks` and `critic.networks` name.

    What a policy network returns besides its action heads is an embedding shared with the critic: the critic's network
    for the same sub-step finds its shape in `obs_shapes`, and the tensor, with gradients, next to the observations.

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
    @override(BaseModelComposer)
    def check_model_config(cls, model_config: ConfigType) -> None:
        config = check_keys(model_config, (*_KEYS, *_SPACES), shown=_KEYS)
        for part in ("policy", "critic"):
            _check_part(config.get(part), f"model.{part}")

    @cached_property
    @override(BaseModelComposer)
    def _policy_composer(self) -> BasePolicyComposer | None:
        return None if self._policy_config is None else self._compose_policy(self._policy_config)

    @cached_property
    @override(BaseModelComposer)
    def _critic_composer(self) -> CriticComposerInterface | None:
        if self._critic_config is None:
            return None
        _check_part(self._critic_config, "model.critic")
        return self._compose_critic(self._critic_config, self._critic_observation_spaces())

    def _critic_observation_spaces(self) -> dict[StepKeyType, spaces.Dict]:
        """Observations and, for a state critic, the embeddings that the policy shares."""
        composer_type = critic_composer_type(self._critic_config)
        judges_actions = composer_type is not None and issubclass(composer_type, BaseStateActionCriticComposer)
        if self.policy is None or judges_actions:
            return self.observation_spaces_dict
        embeddings = embedding_spaces(self.policy, self.observation_spaces_dict)
        return {
            key: spaces.Dict({**space.spaces, **embeddings[key]}) if embeddings[key] else space
            for key, space in self.observation_spaces_dict.items()
        }


def _check_part(config: Any, where: str) -> None:
    if not isinstance(config, Mapping):
        return
    for key in ("_target_", "networks"):
        if key not in config:
            raise ConfigError(
                f"{where}.{key}: missing; found the keys {sorted(map(str, config))}. Only a template model (such as "
                "`model=vector_obs`) builds networks that are not named."
            )
