"""Distribution over bounded continuous actions: a normal distribution squashed by tanh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch.distributions import Normal
from torch.nn import functional

from maze.core.annotations import override
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.numpy_distributions import MAX_LOG_STD_BEFORE_SQUASHING
from maze.distributions.torch_dist import ReparameterisedDistribution, TorchProbabilityDistribution
from maze.distributions.utils import atanh, box_logits_shape, require_bounds, space_bounds

_NODES, _WEIGHTS = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(64))
_WEIGHTS /= math.sqrt(2.0 * math.pi)
"""`sum(_WEIGHTS * f(_NODES))` is the mean of f under a standard normal distribution."""


def _log_derivative_of_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - tanh(x)^2) without cancellation at large arguments."""
    return 2.0 * (math.log(2.0) - x - functional.softplus(-2.0 * x))


class SquashedGaussianProbabilityDistribution(ReparameterisedDistribution[Normal]):
    """`tanh` of independent normal variables, scaled to the bounds of a `Box`.

    Log-probabilities are densities of the scaled action. The entropy is an estimate (Gauss-Hermite quadrature, with
    gradients and without randomness); the divergence between two distributions on the same box is exactly that of
    their normal variables, because squashing is invertible.

    :param logits: `[..., 2 * action_space.shape[-1]]`: means, then logarithms of the standard deviations (limited
        to [-20, 2]), both before squashing.
    :param action_space: The space; its bounds are finite.
    :param temperature: Multiplies the variances before squashing.
    """

    def __init__(self, logits: torch.Tensor, action_space: spaces.Box, temperature: float = 1.0) -> None:
        super().__init__(None, action_space)
        require_bounds(action_space, type(self))
        self.normal: DiagonalGaussianProbabilityDistribution = _NormalBeforeSquashing(logits, action_space, temperature)
        """The distribution before squashing."""
        self.low, self.high = space_bounds(action_space, logits)
        self._half_width = 0.5 * (self.high - self.low)
        self._last_sample: tuple[torch.Tensor, torch.Tensor] | None = None

    @override(ReparameterisedDistribution)
    def _build_dist(self) -> Normal:
        return self.normal.dist

    @classmethod
    @override(ReparameterisedDistribution)
    def required_logits_shape(cls, action_space: spaces.Space[Any]) -> Sequence[int]:
        return box_logits_shape(action_space, cls, is_bounded=True)

    @override(ReparameterisedDistribution)
    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        if self._last_sample is not None and actions is self._last_sample[0]:
            unsquashed = self._last_sample[1]  # exact also where tanh has saturated
        else:
            unsquashed = atanh((actions - self.low) / self._half_width - 1.0)
        return self.normal.log_prob(unsquashed) - self._log_jacobian(unsquashed)

    def _log_jacobian(self, unsquashed: torch.Tensor) -> torch.Tensor:
        return self._joint(_log_derivative_of_tanh(unsquashed) + self._half_width.log())

    def typical_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lower and upper ends `[..., *space.shape]`: those of the distribution before squashing, squashed."""
        low, high = self.normal.typical_range()
        return self._squash(low), self._squash(high)

    @override(ReparameterisedDistribution)
    def deterministic_sample(self) -> torch.Tensor:
        return self._squash(self.normal.mean)

    @override(ReparameterisedDistribution)
    def rsample_with_log_prob(self, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        unsquashed, log_density = self.normal.rsample_with_log_prob(generator)
        actions = self._squash(unsquashed)
        self._last_sample = (actions, unsquashed)
        return actions, log_density - self._log_jacobian(unsquashed)

    def _squash(self, unsquashed: torch.Tensor) -> torch.Tensor:
        scaled = torch.addcmul(self.low, torch.tanh(unsquashed) + 1.0, self._half_width)
        return torch.clamp(scaled, self.low, self.high)

    @override(ReparameterisedDistribution)
    def entropy(self) -> torch.Tensor:
        nodes, weights = _NODES.to(self.normal.mean), _WEIGHTS.to(self.normal.mean)
        points = self.normal.mean.unsqueeze(-1) + self.normal.std.unsqueeze(-1) * nodes
        mean_log_derivative = (_log_derivative_of_tanh(points) * weights).sum(-1)
        return self.normal.entropy() + self._joint(mean_log_derivative + self._half_width.log())

    @override(ReparameterisedDistribution)
    def kl(self, other: TorchProbabilityDistribution[Any]) -> torch.Tensor:
        assert isinstance(other, SquashedGaussianProbabilityDistribution)
        return self.normal.kl(other.normal)


class _NormalBeforeSquashing(DiagonalGaussianProbabilityDistribution):
    max_log_std = MAX_LOG_STD_BEFORE_SQUASHING
