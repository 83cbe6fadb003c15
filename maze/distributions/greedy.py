"""Distributions of policies that always take their best action, such as those whose logits are values of actions."""

from __future__ import annotations

import torch

from maze.core.annotations import override
from maze.distributions.categorical import CategoricalProbabilityDistribution
from maze.distributions.multi_categorical import MultiCategoricalProbabilityDistribution


class GreedyCategoricalProbabilityDistribution(CategoricalProbabilityDistribution):
    """A categorical distribution from which the most probable action is drawn.

    Probabilities, and the ranking of candidates, are those of the softmax of the logits.
    """

    @override(CategoricalProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return self.deterministic_sample()


class GreedyMultiCategoricalProbabilityDistribution(MultiCategoricalProbabilityDistribution):
    """Independent categorical distributions from which the most probable choices are drawn."""

    @override(MultiCategoricalProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return self.deterministic_sample()
