"""Distribution over bounded continuous actions: a normal distribution squashed by tanh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch.distributions import Normal
from torch.nn import functional

from maze.core.annotations import override
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.torch_dist import TorchProbabilityDistribution
from maze.distributions.utils import atanh, box_logits_shape, require_bounds, require_space, space_bounds, tensor_clamp

_N_QUADRATURE_NODES = 64


@lru_cache(maxsize=1)
def _quadrature() -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes and weights with which ``sum(weights * f(nodes))`` is the mean of f under a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_N_QUADRATURE_NODES)
    return torch.from_numpy(nodes), torch.from_numpy(weights / math.sqrt(2.0 * math.pi))


def _log_derivative_of_tanh(x: torch.Tensor) -> torch.Tensor:
    """log(1 - tanh(x)^2) without cancellation at large arguments."""
    return 2.0 * (math.log(2.0) - x - functional.softplus(-2.0 * x))


class SquashedGaussianProbabilityDistribution(TorchProbabilityDistribution[Normal]):
    """``tanh`` of independent normal variables, scaled to the bounds of a ``Box``.

    Log-probabilities are densities of the scaled action. The entropy is an estimate (Gauss-Hermite quadrature, with
    gradients and without randomness); the divergence between two distributions on the same box is exactly that of
    their normal variables, because squashing is invertible.

    :param logits: ``[..., 2 * action_space.shape[-1]]``: means, then logarithms of the standard deviations (limited
        to [-20, 2]), both before squashing.
    :param action_space: The space; its bounds are finite.
    :param temperature: Multiplies the variances before squashing.
    """

    def __init__(self, logits: torch.Tensor, action_space: spaces.Box, temperature: float = 1.0) -> None:
        super().__init__(None, action_space)
        require_bounds(action_space, type(self))
        self.normal = _NormalBeforeSquashing(logits, action_space, temperature)
        self.low, self.high = space_bounds(action_space, logits)
        self._half_width = 0.5 * (self.high - self.low)
        self._last_sample: tuple[torch.Tensor, torch.Tensor] | None = None

    @override(TorchProbabilityDistribution)
    def _build_dist(self) -> Normal:
        return self.normal.dist

    @classmethod
    @override(TorchProbabilityDistribution)
    def required_logits_shape(cls, action_space: spaces.Space[Any]) -> Sequence[int]:
        require_space(action_space, spaces.Box, cls)
        assert isinstance(action_space, spaces.Box)
        require_bounds(action_space, cls)
        return box_logits_shape(action_space)

    @override(TorchProbabilityDistribution)
    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        if self._last_sample is not None and actions is self._last_sample[0]:
            unsquashed = self._last_sample[1]  # exact also where tanh has saturated
        else:
            unsquashed = atanh((actions - self.low) / self._half_width - 1.0)
        log_jacobian = _log_derivative_of_tanh(unsquashed) + self._half_width.log()
        return self.normal.log_prob(unsquashed) - self._joint(log_jacobian)

    @override(TorchProbabilityDistribution)
    def deterministic_sample(self) -> torch.Tensor:
        return self._squash(self.normal.mean)

    @override(TorchProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        with torch.no_grad():
            return self.rsample(generator)

    def rsample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draws actions with gradients with respect to the logits (reparameterisation)."""
        unsquashed = self.normal.rsample(generator)
        actions = self._squash(unsquashed)
        self._last_sample = (actions, unsquashed)
        return actions

    def _squash(self, unsquashed: torch.Tensor) -> torch.Tensor:
        return tensor_clamp(self.low + (torch.tanh(unsquashed) + 1.0) * self._half_width, self.low, self.high)

    @override(TorchProbabilityDistribution)
    def entropy(self) -> torch.Tensor:
        nodes, weights = (tensor.to(self.normal.mean) for tensor in _quadrature())
        points = self.normal.mean.unsqueeze(-1) + self.normal.std.unsqueeze(-1) * nodes
        mean_log_derivative = (_log_derivative_of_tanh(points) * weights).sum(-1)
        return self.normal.entropy() + self._joint(mean_log_derivative + self._half_width.log())

    @override(TorchProbabilityDistribution)
    def kl(self, other: TorchProbabilityDistribution[Any]) -> torch.Tensor:
        assert isinstance(other, SquashedGaussianProbabilityDistribution)
        return self.normal.kl(other.normal)


class _NormalBeforeSquashing(DiagonalGaussianProbabilityDistribution):
    max_log_std = 2.0
