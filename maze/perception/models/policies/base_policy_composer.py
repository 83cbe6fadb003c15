"""Base of policy composers."""

from __future__ import annotations

from abc import ABC

from gymnasium import spaces

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.structured_env import StepKeyType
from maze.distributions.distribution_mapper import DistributionMapper


class BasePolicyComposer(ABC):
    """Build a policy for the spaces of an environment. A derived class sets `_policy`.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param distribution_mapper: Distributions of all action heads.
    """

    _policy: TorchPolicy

    def __init__(
        self,
        action_spaces_dict: dict[StepKeyType, spaces.Dict],
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        distribution_mapper: DistributionMapper,
    ) -> None:
        self._action_spaces_dict = action_spaces_dict
        self._distribution_mapper = distribution_mapper

    @property
    def policy(self) -> TorchPolicy:
        """The policy (always the same object)."""
        return self._policy
