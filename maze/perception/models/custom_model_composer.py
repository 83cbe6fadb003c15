"""Composes models from networks that are named explicitly."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.factory import Factory
from maze.perception.models.critics.base_state_action_critic_composer import BaseStateActionCriticComposer
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface
from maze.perception.models.model_composer import BaseModelComposer
from maze.perception.models.network_factory import build
from maze.perception.models.policies.base_policy_composer import BasePolicyComposer

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.structured_env import StepKeyType
    from maze.core.utils.factory import ConfigType

_KEYS = (
    "_target_",
    "distribution_mapper_config",
    "policy",
    "critic",
    "action_spaces_dict",
    "observation_spaces_dict",
    "agent_counts_dict",
)


class CustomModelComposer(BaseModelComposer):
    """Builds the networks that ``policy.networks`` and ``critic.networks`` name.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param distribution_mapper_config: Distributions that differ from the defaults.
    :param policy: A policy composer, or its configuration; ``None``: there is no policy.
    :param critic: A critic composer, or its configuration; ``None``: there is no critic.
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
        if not isinstance(model_config, Mapping):
            raise ConfigError(f"model: expected a mapping, found {model_config!r}.")
        for key in model_config:
            if key not in _KEYS:
                close = difflib.get_close_matches(str(key), _KEYS, n=1)
                hint = f" Did you mean `{close[0]}`?" if close else ""
                raise ConfigError(f"model.{key}: unknown key.{hint} Known: {', '.join(_KEYS[:4])}.")
        if model_config.get("policy") is None:
            raise ConfigError("model.policy: missing. Choose a model, e.g. `model=flatten_concat`.")
        for part in ("policy", "critic"):
            _check_part(model_config.get(part), f"model.{part}")

    @property
    @override(BaseModelComposer)
    def policy(self) -> TorchPolicy | None:
        return None if self._policy_composer is None else self._policy_composer.policy

    @property
    @override(BaseModelComposer)
    def critic(self) -> Any:
        return None if self._critic_composer is None else self._critic_composer.critic

    @cached_property
    def _policy_composer(self) -> BasePolicyComposer | None:
        if self._policy_config is None:
            return None
        return build(
            BasePolicyComposer,  # type: ignore[type-abstract]  # the configuration names a concrete one
            self._policy_config,
            "model.policy",
            action_spaces_dict=self.action_spaces_dict,
            observation_spaces_dict=self.observation_spaces_dict,
            agent_counts_dict=self.agent_counts_dict,
            distribution_mapper=self.distribution_mapper,
        )

    @cached_property
    def _critic_composer(self) -> CriticComposerInterface | None:
        if self._critic_config is None:
            return None
        arguments: dict[str, Any] = {"observation_spaces_dict": self.observation_spaces_dict}
        if self._is_state_action_critic():
            arguments["action_spaces_dict"] = self.action_spaces_dict
        else:
            arguments["agent_counts_dict"] = self.agent_counts_dict
        return build(
            CriticComposerInterface,  # type: ignore[type-abstract]  # the configuration names a concrete one
            self._critic_config,
            "model.critic",
            **arguments,
        )

    def _is_state_action_critic(self) -> bool:
        target = self._critic_config.get("_target_") if isinstance(self._critic_config, Mapping) else None
        if target is None:
            return False
        factory = Factory(CriticComposerInterface)  # type: ignore[type-abstract]  # the target is a concrete one
        composer_type = factory.type_from_name(target, config_path="model.critic._target_")
        return issubclass(composer_type, BaseStateActionCriticComposer)


def _check_part(config: Any, where: str) -> None:
    if not isinstance(config, Mapping):
        return
    for key in ("_target_", "networks"):
        if key not in config:
            raise ConfigError(f"{where}.{key}: missing; found the keys {sorted(map(str, config))}.")
