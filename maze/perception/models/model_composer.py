"""Base of model composers."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gymnasium import spaces
from torch import nn

from maze.core.agent.random_policy import candidates_of
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_action_critic import TorchStateActionCritic
from maze.core.agent.torch_state_critic import TorchStateCritic
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError, EnvironmentContractError, did_you_mean
from maze.core.utils.factory import TARGET_KEY, ConfigType, Factory
from maze.core.utils.structured_env_utils import flat_structured_space
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.builders.base import build
from maze.perception.models.critics import BaseStateActionCriticComposer, CriticComposerInterface
from maze.perception.models.policies.base_policy_composer import BasePolicyComposer

logger = logging.getLogger(__name__)

# Arguments of composers that configurations do not state.
_SPACES = ("action_spaces_dict", "observation_spaces_dict", "agent_counts_dict")

Critic: TypeAlias = "TorchStateCritic | TorchStateActionCritic"

CriticKind = Literal["state", "sub-step state", "state-action"]
"""Input of a critic: states, states as observed in each sub-step, or pairs of states and actions."""

CRITIC_OPTIONS: Mapping[CriticKind, tuple[str, str]] = {
    "state": ("flatten_concat_shared", "template_state"),
    "sub-step state": ("flatten_concat_step", "template_state"),
    "state-action": ("flatten_concat_state_action", "template_state_action"),
}
"""Options of the group `critic` of each kind: with explicit networks, and by the template of the model."""

SUITABLE_CRITICS: Mapping[CriticKind, str] = {
    kind: f"a {kind} critic, such as critic={own!r} or critic={template!r}"
    for kind, (own, template) in CRITIC_OPTIONS.items()
}
"""Descriptions of suitable critics, for messages."""


class BaseModelComposer(ABC):
    """Build the policy and the critic of a model configuration for the spaces of an environment.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param distribution_mapper_config: See :class:`~maze.distributions.distribution_mapper.DistributionMapper`.
    :raises ConfigError: The distributions that are configured do not fit the actions.
    """

    def __init__(
        self,
        action_spaces_dict: dict[StepKeyType, spaces.Dict],
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        distribution_mapper_config: ConfigType,
    ) -> None:
        self.action_spaces_dict = action_spaces_dict
        self.observation_spaces_dict = observation_spaces_dict
        self.agent_counts_dict = agent_counts_dict
        try:
            heads = flat_structured_space(action_spaces_dict)
            self.distribution_mapper = DistributionMapper(heads, distribution_mapper_config)
            """Distributions of the action heads of all sub-steps."""
        except (ConfigError, EnvironmentContractError) as error:
            raise ConfigError(f"model: {error}") from error
        self.distribution_mapper.candidate_heads = frozenset(candidates_of(action_spaces_dict, observation_spaces_dict))

    @classmethod
    @abstractmethod
    def check_model_config(cls, model_config: ConfigType) -> None:
        """Check the configuration as far as possible without an environment.

        :param model_config: The section `model` of a run: `_target_` and arguments of the composer.
        :raises ConfigError: A key is unknown, missing or has a wrong value; the message names it.
        """

    @property
    def policy(self) -> TorchPolicy | None:
        """The policy (always the same object); `None`: the configuration has none."""
        return None

    @property
    def critic(self) -> Critic | None:
        """The critic (always the same object); `None`: the configuration has none."""
        return None

    def parts_for(self, trainer: str, critic_kind: CriticKind | None) -> tuple[TorchPolicy, Critic | None]:
        """Return policy and critic for a trainer.

        :param trainer: The trainer's name, for messages.
        :param critic_kind: Kind of critic that it needs; `None`: no critic.
        :raises ConfigError: The model lacks one of them, or its critic is of another kind.
        """
        policy, critic = self.policy, None if critic_kind is None else self.critic
        missing = "policy" if policy is None else "critic"
        if policy is None or (critic is None and critic_kind is not None):
            needs = "a policy" if critic_kind is None else f"a policy and a {critic_kind} critic"
            advice = "" if critic_kind is None else f" and `critic={CRITIC_OPTIONS[critic_kind][0]}`"
            raise ConfigError(
                f"model.{missing}: {trainer} needs a model with {needs}, but no {missing} is configured. Choose one, "
                f"for instance with `model=flatten_concat`{advice}."
            )
        if critic_kind is not None and isinstance(critic, TorchStateActionCritic) != (critic_kind == "state-action"):
            raise ConfigError(
                f"model.critic: {trainer} needs {SUITABLE_CRITICS[critic_kind]}; found a {type(critic).__name__}."
            )
        return policy, critic

    def save_models(self, save_path: str | Path = ".") -> None:
        """Draw the inference graph of every network that has one, e.g. `policy_0.pdf`.

        A graph that cannot be drawn, for instance without a drawing library, is logged as a warning.

        :param save_path: Output directory.
        """
        from maze.perception.blocks.inference import InferenceGraph, drawable

        for kind, model in (("policy", self.policy), ("critic", self.critic)):
            networks: Mapping[Any, nn.Module] = {} if model is None else model.networks
            for key, network in networks.items():
                block = drawable(network)
                if block is None:
                    continue
                name = "_".join(map(str, key)) if isinstance(key, tuple) else str(key)
                try:
                    InferenceGraph(block).save(f"{kind}_{name}", save_path, formats=("pdf",))
                except Exception as error:  # a missing drawing library never ends a run
                    logger.warning("The inference graph %s_%s could not be drawn: %s", kind, name, error)

    def _compose_policy(self, config: Any, **networks: Any) -> TorchPolicy | None:
        """Build the policy of a configuration; `None`: it has none.

        :param networks: Default of `networks`.
        """
        if config is None:
            return None
        return build(
            BasePolicyComposer,
            config,
            "model.policy",
            action_spaces_dict=self.action_spaces_dict,
            observation_spaces_dict=self.observation_spaces_dict,
            agent_counts_dict=self.agent_counts_dict,
            distribution_mapper=self.distribution_mapper,
            **networks,
        ).policy

    def _compose_critic(
        self, config: Any, observation_spaces_dict: Mapping[StepKeyType, spaces.Dict], **networks: Any
    ) -> Critic:
        """Build the critic of a configuration.

        :param observation_spaces_dict: Inputs of the critic.
        :param networks: Default of `networks`.
        """
        arguments: dict[str, Any] = {"observation_spaces_dict": observation_spaces_dict, **networks}
        composer_type = critic_composer_type(config)
        if composer_type is not None and issubclass(composer_type, BaseStateActionCriticComposer):
            arguments["action_spaces_dict"] = self.action_spaces_dict
        else:
            arguments["agent_counts_dict"] = self.agent_counts_dict
        critic: Critic = build(CriticComposerInterface, config, "model.critic", **arguments).critic
        return critic


def critic_composer_type(config: Any) -> type[CriticComposerInterface] | None:
    """Return the class that a critic's configuration names; `None`: it names none.

    :param config: A mapping with `_target_`, or a composer, whose class is returned.
    :raises ConfigError: There is no such class, or it is not that of a critic composer.
    """
    target = config.get(TARGET_KEY) if isinstance(config, Mapping) else None
    if target is None:
        return None if config is None or isinstance(config, Mapping) else type(config)
    return Factory(CriticComposerInterface).type_from_name(target, config_path="model.critic._target_")


def check_keys(composer: type[BaseModelComposer], model_config: Any, parts: Mapping[str, Sequence[str]]) -> None:
    """Check the keys of a model configuration, which are the arguments of its composer.

    :param composer: Class of the composer.
    :param model_config: The configuration.
    :param parts: Keys that a part of the configuration needs, if it is a mapping.
    :raises ConfigError: It is not a mapping, or a key is unknown or missing; names the key.
    """
    if not isinstance(model_config, Mapping):
        raise ConfigError(f"model: expected a mapping, found {model_config!r}.")
    known = [TARGET_KEY, *inspect.signature(composer).parameters]
    for key in model_config:
        if key not in known:
            shown = ", ".join(name for name in known if name not in _SPACES)
            raise ConfigError(f"model.{key}: unknown key.{did_you_mean(key, known)} Known: {shown}.")
    if model_config.get("policy") is None:
        raise ConfigError("model.policy: missing. Choose a model, e.g. `model=flatten_concat`.")
    for part, needed in parts.items():
        check_part(model_config.get(part), f"model.{part}", needed)


def check_part(config: Any, where: str, needed: Sequence[str]) -> None:
    """Check that a part of a model configuration has the keys that it needs, if it is a mapping.

    :param config: The part.
    :param where: Its key, for messages.
    :param needed: The keys.
    :raises ConfigError: Names the missing key.
    """
    for key in needed if isinstance(config, Mapping) else ():
        if key not in config:
            template = "" if key == TARGET_KEY else " Only a template model (such as model=auto) makes its networks."
            raise ConfigError(f"{where}.{key}: missing; found the keys {sorted(map(str, config))}.{template}")
