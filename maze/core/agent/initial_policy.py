"""The policy that a training starts from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.structured_env import ActorID
    from maze.distributions.dict import DictProbabilityDistribution


class InitialPolicy:
    """A copy of a policy that no training changes.

    :param policy: The policy as it is now.
    """

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = copy.deepcopy(policy)
        self.policy.eval()
        for parameter in self.policy.parameters():
            parameter.requires_grad_(False)

    def divergence(
        self, current: DictProbabilityDistribution, observation: Mapping[str, Any], actor_id: ActorID | None
    ) -> Tensor:
        """KL(current || initial) of the joint actions, one value per observation, with the current policy's gradient.

        :param current: Action distributions of the policy that is trained.
        :param observation: What it was asked about, tensors `[B, ...]`, action masks included.
        :param actor_id: Who acted.
        """
        with torch.no_grad():
            initial = self.policy.compute_substep_policy_output(dict(observation), actor_id)
        return current.joint_kl(initial.prob_dist)
