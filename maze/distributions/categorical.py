"""Distribution over one of n actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch.distributions import Categorical

from maze.core.annotations import override
from maze.distributions.torch_dist import TorchProbabilityDistribution
from maze.distributions.utils import require_space

# Rows from which, and choices up to which, torch takes a fifth to four fifths of the time by columns.
_ROWS, _FEW = 512, 15


class CategoricalProbabilityDistribution(TorchProbabilityDistribution[Categorical]):
    """Categorical distribution over a `Discrete` space, from logits `[..., n]`.

    Logits at the finite minimum of their dtype (or minus infinity) are masked actions: they are never sampled and add
    nothing to entropy and divergence.

    :param logits: Unnormalised log-probabilities.
    :param action_space: The space, starting at 0.
    :param temperature: Divides the logits.
    """

    def __init__(self, logits: torch.Tensor, action_space: spaces.Discrete, temperature: float = 1.0) -> None:
        super().__init__(None, action_space)
        self.logits = logits
        self.log_probs = _log_softmax(logits if temperature == 1.0 else logits / temperature)

    @override(TorchProbabilityDistribution)
    def _build_dist(self) -> Categorical:
        return Categorical(logits=self.log_probs, validate_args=False)

    @classmethod
    @override(TorchProbabilityDistribution)
    def required_logits_shape(cls, action_space: spaces.Space[Any]) -> Sequence[int]:
        return (int(require_space(action_space, spaces.Discrete, cls).n),)

    @override(TorchProbabilityDistribution)
    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        indices = actions.long().unsqueeze(-1)
        log_probs = self.log_probs
        if indices.dim() != log_probs.dim() or indices.shape[:-1] != log_probs.shape[:-1]:
            batch_shape = (indices[..., 0] + log_probs[..., 0]).shape  # broadcast against one another
            indices = indices.expand(*batch_shape, 1)
            log_probs = log_probs.expand(*batch_shape, log_probs.shape[-1])
        return log_probs.gather(-1, indices).squeeze(-1)

    @override(TorchProbabilityDistribution)
    def deterministic_sample(self) -> torch.Tensor:
        return self.log_probs.argmax(-1)

    @override(TorchProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return an exponential race: the action with the smallest (exponential / probability) wins."""
        with torch.no_grad():
            noise = torch.empty_like(self.log_probs).exponential_(generator=generator)
            noise.clamp_(min=torch.finfo(noise.dtype).tiny)
            return (self.log_probs - noise.log_()).argmax(-1)

    @override(TorchProbabilityDistribution)
    def entropy(self) -> torch.Tensor:
        return -(self.log_probs.exp() * self.finite_log_probs()).sum(-1)

    @override(TorchProbabilityDistribution)
    def kl(self, other: TorchProbabilityDistribution[Any]) -> torch.Tensor:
        assert isinstance(other, CategoricalProbabilityDistribution)
        return (self.log_probs.exp() * (self.finite_log_probs() - other.finite_log_probs())).sum(-1)

    def finite_log_probs(self) -> torch.Tensor:
        """Return log-probabilities limited to half of the range, so that 0 * log(0) is 0 and differences are finite."""
        return self.log_probs.clamp(min=torch.finfo(self.log_probs.dtype).min / 2)


class GreedyCategoricalProbabilityDistribution(CategoricalProbabilityDistribution):
    """A categorical distribution that samples greedily.

    Probabilities, and the ranking of candidates, are those of the softmax of the logits.
    """

    @override(CategoricalProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return self.deterministic_sample()


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    n = logits.shape[-1]
    if n > _FEW or logits.numel() < _ROWS * n:
        return torch.log_softmax(logits, dim=-1)
    return torch.log_softmax(logits.movedim(-1, 0), dim=0).movedim(0, -1)
