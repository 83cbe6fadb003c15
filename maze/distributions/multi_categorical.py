"""Distribution over vectors of choices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gymnasium import spaces

from maze.core.annotations import override
from maze.distributions.categorical import CategoricalProbabilityDistribution
from maze.distributions.distribution import JointProbabilityDistribution, ProbabilityDistribution, summed
from maze.distributions.utils import require_space


class MultiCategoricalProbabilityDistribution(JointProbabilityDistribution):
    """Independent categorical distributions for the components of a `MultiDiscrete` space.

    Log-probabilities are joint, i.e. summed over the components. :meth:`entropy` and :meth:`kl` reduce the joint
    values of the batch with `reduce_fun` (`None`: not at all).

    :param logits: `[..., sum of all components' numbers of choices]`.
    :param action_space: The space, starting at 0.
    :param temperature: Divides the logits.
    """

    def __init__(self, logits: torch.Tensor, action_space: spaces.MultiDiscrete, temperature: float = 1.0) -> None:
        self.action_space = action_space
        sizes = action_space.nvec.flatten().tolist()
        self.parts: list[CategoricalProbabilityDistribution] = [
            CategoricalProbabilityDistribution(part, spaces.Discrete(int(size)), temperature)
            for part, size in zip(torch.split(logits, sizes, dim=-1), sizes, strict=True)
        ]

    @classmethod
    def required_logits_shape(cls, action_space: spaces.MultiDiscrete) -> Sequence[int]:
        """Return the shape of the logits, without batch dimensions.

        :param action_space: The space.
        :return: One number: the sum of the numbers of choices.
        :raises ConfigError: It is no `MultiDiscrete` space, or does not start at 0.
        """
        return (int(require_space(action_space, spaces.MultiDiscrete, cls).nvec.sum()),)

    @override(ProbabilityDistribution)
    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        choices = actions.flatten(-self.action_space.nvec.ndim).unbind(-1)
        return summed([part.log_prob(choice) for part, choice in zip(self.parts, choices, strict=True)])

    @override(ProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return self._join([part.sample(generator) for part in self.parts])

    @override(ProbabilityDistribution)
    def deterministic_sample(self) -> torch.Tensor:
        return self._join([part.deterministic_sample() for part in self.parts])

    def _join(self, choices: list[torch.Tensor]) -> torch.Tensor:
        joined = torch.stack(choices, dim=-1)
        return joined.reshape(*joined.shape[:-1], *self.action_space.nvec.shape)


class GreedyMultiCategoricalProbabilityDistribution(MultiCategoricalProbabilityDistribution):
    """Independent categorical distributions that sample greedily."""

    @override(MultiCategoricalProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return self.deterministic_sample()
