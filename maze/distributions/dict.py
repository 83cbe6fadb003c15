"""Joint distribution over a dictionary of action heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from maze.core.annotations import override
from maze.distributions.distribution import JointProbabilityDistribution, ProbabilityDistribution, summed
from maze.distributions.utils import sample_with


class DictProbabilityDistribution(JointProbabilityDistribution):
    """Independent distributions for the heads of a dictionary action.

    :meth:`log_prob` answers by head and :meth:`joint_log_prob` for the whole action. :meth:`entropy` and :meth:`kl` are
    sums over the heads, whose values for the batch `reduce_fun` reduces (`None`: not at all).

    :param distribution_dict: A distribution for each action head.
    """

    def __init__(self, distribution_dict: dict[str, ProbabilityDistribution]) -> None:
        self.distribution_dict = distribution_dict
        self.parts = list(distribution_dict.values())

    @override(ProbabilityDistribution)
    def neg_log_prob(self, actions: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {head: -log_prob for head, log_prob in self.log_prob(actions).items()}

    @override(ProbabilityDistribution)
    def log_prob(self, actions: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {head: dist.log_prob(actions[head]) for head, dist in self.distribution_dict.items()}

    def joint_log_prob(self, actions: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probability of the whole action: the sum over its heads.

        :param actions: `[..., *space.shape]` by head.
        :return: `[...]`, the batch.
        """
        return summed([dist.log_prob(actions[head]) for head, dist in self.distribution_dict.items()])

    @override(ProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
        return {head: sample_with(dist, generator) for head, dist in self.distribution_dict.items()}

    @override(ProbabilityDistribution)
    def deterministic_sample(self) -> dict[str, torch.Tensor]:
        return {head: dist.deterministic_sample() for head, dist in self.distribution_dict.items()}
