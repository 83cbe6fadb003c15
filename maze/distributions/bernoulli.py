"""Distribution over binary vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch.distributions import Bernoulli
from torch.nn import functional

from maze.core.annotations import override
from maze.distributions.torch_dist import TorchProbabilityDistribution
from maze.distributions.utils import require_space


class BernoulliProbabilityDistribution(TorchProbabilityDistribution[Bernoulli]):
    """Independent coins for the components of a `MultiBinary` space, from logits `[..., *action_space.shape]`.

    :param logits: Log-odds of a one.
    :param action_space: The space.
    :param temperature: Divides the logits.
    """

    def __init__(self, logits: torch.Tensor, action_space: spaces.MultiBinary, temperature: float = 1.0) -> None:
        super().__init__(None, action_space)
        self.logits = logits if temperature == 1.0 else logits / temperature

    @override(TorchProbabilityDistribution)
    def _build_dist(self) -> Bernoulli:
        return Bernoulli(logits=self.logits, validate_args=False)

    @classmethod
    @override(TorchProbabilityDistribution)
    def required_logits_shape(cls, action_space: spaces.Space[Any]) -> Sequence[int]:
        return require_space(action_space, spaces.MultiBinary, cls).shape

    @override(TorchProbabilityDistribution)
    def log_prob(self, actions: torch.Tensor, per_bit: bool = False) -> torch.Tensor:
        """Return the log-probability of the actions.

        :param actions: `[..., *action_space.shape]`.
        :param per_bit: Whether to return that of each component, `[..., *action_space.shape]`, instead of their sum.
        """
        # log sigmoid(logit) for a one, log sigmoid(-logit) for a zero
        bits = functional.logsigmoid(self.logits * (2.0 * actions.to(self.logits.dtype) - 1.0))
        return bits if per_bit else self._joint(bits)

    @override(TorchProbabilityDistribution)
    def deterministic_sample(self) -> torch.Tensor:
        return (self.logits > 0).to(torch.int8)

    @override(TorchProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        with torch.no_grad():
            uniform = torch.empty_like(self.logits).uniform_(generator=generator)
            return (uniform < torch.sigmoid(self.logits)).to(torch.int8)

    @override(TorchProbabilityDistribution)
    def entropy(self) -> torch.Tensor:
        # H = softplus(l) - l * sigmoid(l); clamped because infinity times zero is not a number
        logits = self.finite_logits()
        return self._joint(functional.softplus(logits) - logits * torch.sigmoid(logits))

    @override(TorchProbabilityDistribution)
    def kl(self, other: TorchProbabilityDistribution[Any]) -> torch.Tensor:
        assert isinstance(other, BernoulliProbabilityDistribution)
        own, others = self.finite_logits(), other.finite_logits()
        return self._joint(torch.sigmoid(own) * (own - others) + functional.softplus(others) - functional.softplus(own))

    def finite_logits(self) -> torch.Tensor:
        """Return the logits, without infinite ones."""
        limit = torch.finfo(self.logits.dtype).max / 4
        return self.logits.clamp(-limit, limit)
