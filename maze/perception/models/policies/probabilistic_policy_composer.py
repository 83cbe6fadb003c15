"""Compose policies that draw their actions from distributions."""

from __future__ import annotations

import copy
from typing import Any

from gymnasium import spaces
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError, unknown_key_error
from maze.core.utils.factory import CollectionOfConfigType
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.builders.base import build, networks_by_key
from maze.perception.models.policies.base_policy_composer import BasePolicyComposer
from maze.perception.perception_utils import observation_spaces_to_in_shapes

_WHERE = "model.policy.networks"


class ProbabilisticPolicyComposer(BasePolicyComposer):
    """Build one network for each sub-step, with `obs_shapes` and `action_logits_shapes` as arguments.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param distribution_mapper: Distributions of all action heads.
    :param networks: Networks, or configurations of them: a mapping from step keys, or a list in their order.
    :param substeps_with_separate_agent_nets: Step keys where each agent gets a network of its own.
    :raises ConfigError: A sub-step is unknown.
    """

    def __init__(
        self,
        action_spaces_dict: dict[StepKeyType, spaces.Dict],
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        distribution_mapper: DistributionMapper,
        networks: CollectionOfConfigType,
        substeps_with_separate_agent_nets: list[StepKeyType] | None = None,
    ) -> None:
        super().__init__(action_spaces_dict, observation_spaces_dict, agent_counts_dict, distribution_mapper)
        self._obs_shapes = observation_spaces_to_in_shapes(observation_spaces_dict)
        separate = list(substeps_with_separate_agent_nets or [])
        unknown = [key for key in separate if key not in action_spaces_dict]
        if unknown:
            where = "model.policy.substeps_with_separate_agent_nets: sub-step"
            raise unknown_key_error(where, unknown[0], action_spaces_dict)
        built: dict[Any, nn.Module] = {}
        for step_key, (config, where) in networks_by_key(networks, action_spaces_dict, _WHERE).items():
            if step_key in separate:
                if (count := agent_counts_dict.get(step_key, 0)) < 1:
                    raise ConfigError(
                        f"model.policy.substeps_with_separate_agent_nets: sub-step {step_key!r} has no fixed number of "
                        f"agents (agent_counts_dict says {count}), so its agents cannot have separate networks."
                    )
                for agent_id in range(count):
                    network = self._build(step_key, config, where)
                    built[step_key, agent_id] = copy.deepcopy(network) if network is config else network
            else:
                built[step_key] = self._build(step_key, config, where)
        self._policy = TorchPolicy(built, distribution_mapper, "cpu", separate)

    def _build(self, step_key: StepKeyType, config: Any, where: str) -> nn.Module:
        heads = self._action_spaces_dict[step_key].spaces
        return build(
            nn.Module,
            config,
            where,
            obs_shapes=self._obs_shapes[step_key],
            action_logits_shapes={head: self._distribution_mapper.required_logits_shape(head) for head in heads},
        )
