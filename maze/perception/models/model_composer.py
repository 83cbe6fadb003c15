"""What a model composer is."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium import spaces
from torch import nn

from maze.core.errors import ConfigError
from maze.distributions.distribution_mapper import DistributionMapper

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.structured_env import StepKeyType
    from maze.core.utils.factory import ConfigType

logger = logging.getLogger(__name__)


class BaseModelComposer(ABC):
    """Builds the policy and the critic of a model configuration for the spaces of an environment.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param distribution_mapper_config: See :class:`~maze.distributions.distribution_mapper.DistributionMapper`.
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
            self._distribution_mapper = DistributionMapper(
                joint_action_space(action_spaces_dict), distribution_mapper_config
            )
        except ConfigError as error:
            raise ConfigError(f"model: {error}") from error

    @classmethod
    @abstractmethod
    def check_model_config(cls, model_config: ConfigType) -> None:
        """Checks what can be checked without an environment.

        :raises ConfigError: Names the key.
        """

    @property
    @abstractmethod
    def policy(self) -> TorchPolicy | None:
        """The policy (always the same object); ``None``: the configuration has none."""

    @property
    @abstractmethod
    def critic(self) -> Any:
        """The critic (always the same object); ``None``: the configuration has none."""

    @property
    def distribution_mapper(self) -> DistributionMapper:
        """Distributions of the action heads of all sub-steps."""
        return self._distribution_mapper

    def save_models(self, save_path: str | Path = ".") -> None:
        """Draws the inference graph of every network that has one, e.g. ``policy_0.pdf``.

        :param save_path: Directory to write to.
        """
        from maze.perception.blocks.inference import InferenceBlock, InferenceGraph

        for kind, model in (("policy", self.policy), ("critic", self.critic)):
            networks: Mapping[Any, nn.Module] = {} if model is None else model.networks
            for key, network in networks.items():
                block = next((part for part in network.modules() if isinstance(part, InferenceBlock)), None)
                if block is None:
                    continue
                name = "_".join(map(str, key)) if isinstance(key, tuple) else str(key)
                try:
                    InferenceGraph(block).save(f"{kind}_{name}", save_path)
                except (OSError, ImportError) as error:  # a picture never ends a training
                    logger.warning("The inference graph %s_%s could not be drawn: %s", kind, name, error)


def joint_action_space(action_spaces_dict: Mapping[StepKeyType, spaces.Dict]) -> spaces.Dict:
    """The action heads of all sub-steps.

    :raises ConfigError: Two sub-steps use one name for different spaces.
    """
    heads: dict[str, spaces.Space[Any]] = {}
    owners: dict[str, Any] = {}
    for step_key, space in action_spaces_dict.items():
        for head, subspace in space.spaces.items():
            if head in heads and heads[head] != subspace:
                raise ConfigError(
                    f"The action head `{head}` is {heads[head]} in sub-step {owners[head]!r} and {subspace} in "
                    f"sub-step {step_key!r}. Rename one of them in its action conversion."
                )
            heads[head] = subspace
            owners[head] = step_key
    return spaces.Dict(heads)
