"""Distribution over bounded continuous actions: a Beta distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import _standard_gamma
from torch.distributions import Beta
from torch.nn import functional

from maze.core.annotations import override
from maze.distributions.numpy_distributions import MAX_CONCENTRATION
from maze.distributions.torch_dist import TorchProbabilityDistribution
from maze.distributions.utils import box_logits_shape, require_bounds, space_bounds, split_box_logits, tensor_clamp


class BetaProbabilityDistribution(TorchProbabilityDistribution[Beta]):
    """Independent Beta distributions, scaled to the bounds of a `Box`.

    The concentrations are `1 + softplus(logits)`, so that the density has one peak and is finite. Log-probabilities
    and entropies are those of the scaled action.

    :param logits: `[..., 2 * action_space.shape[-1]]`: of the upper end's, then of the lower end's concentrations.
    :param action_space: The space; its bounds are finite.
    :param temperature: Raises the density to `1 / temperature`: divides what the concentrations exceed 1 by.
    """

    def __init__(self, logits: torch.Tensor, action_space: spaces.Box, temperature: float = 1.0) -> None:
        super().__init__(None, action_space)
        require_bounds(action_space, type(self))
        upper, lower = split_box_logits(functional.softplus(logits) / temperature, action_space)
        self.alpha = (1.0 + upper).clamp(max=MAX_CONCENTRATION)
        self.beta = (1.0 + lower).clamp(max=MAX_CONCENTRATION)
        self.low, self.high = space_bounds(action_space, logits)

    @override(TorchProbabilityDistribution)
    def _build_dist(self) -> Beta:
        # in float32, differences of large logarithms of the gamma function would lose up to five digits
        return Beta(self.alpha.double(), self.beta.double(), validate_args=False)

    @classmethod
    @override(TorchProbabilityDistribution)
    def required_logits_shape(cls, action_space: spaces.Space[Any]) -> Sequence[int]:
        return box_logits_shape(action_space, cls, is_bounded=True)

    @override(TorchProbabilityDistribution)
    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        width = self.high - self.low
        position = _inside((actions - self.low) / width).double()
        return super().log_prob(position).to(width.dtype) - self._joint(width.log())

    def typical_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lower and upper ends `[..., *space.shape]`, one standard deviation from the mean."""
        mean, std = (each.to(self.low.dtype) for each in (self.dist.mean, self.dist.stddev))
        return self._scale(mean - std), self._scale(mean + std)

    @override(TorchProbabilityDistribution)
    def deterministic_sample(self) -> torch.Tensor:
        return self._scale(self.alpha / (self.alpha + self.beta))

    @override(TorchProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        with torch.no_grad():
            upper = _standard_gamma(self.alpha, generator=generator)
            lower = _standard_gamma(self.beta, generator=generator)
            return self._scale(_inside(upper / (upper + lower)))

    def _scale(self, position: torch.Tensor) -> torch.Tensor:
        return tensor_clamp(self.low + position * (self.high - self.low), self.low, self.high)

    @override(TorchProbabilityDistribution)
    def entropy(self) -> torch.Tensor:
        return super().entropy().to(self.low.dtype) + self._joint((self.high - self.low).log())

    @override(TorchProbabilityDistribution)
    def kl(self, other: TorchProbabilityDistribution[Any]) -> torch.Tensor:
        return super().kl(other).to(self.low.dtype)


def _inside(position: torch.Tensor) -> torch.Tensor:
    eps = torch.finfo(position.dtype).eps
    return position.clamp(eps, 1.0 - eps)
