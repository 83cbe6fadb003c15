"""Distribution over unbounded (or externally clipped) continuous actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch.distributions import Normal

from maze.core.annotations import override
from maze.distributions.numpy_distributions import MAX_LOG_STD, MIN_LOG_STD
from maze.distributions.torch_dist import ReparameterisedDistribution
from maze.distributions.utils import box_logits_shape, split_box_logits

HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


class DiagonalGaussianProbabilityDistribution(ReparameterisedDistribution[Normal]):
    """Independent normal distributions for the components of a `Box`; the first half of the logits are the means,
    the second half the logarithms of the standard deviations (limited to [-20, 20]).

    Samples may lie outside the box: the action on its way to the environment is clipped, the log-probability is that
    of the sample.

    :param logits: `[..., 2 * action_space.shape[-1]]`, see :meth:`required_logits_shape`.
    :param action_space: The space.
    :param temperature: Multiplies the variances, which is what raising the density to `1 / temperature` does.
    """

    max_log_std = MAX_LOG_STD

    def __init__(self, logits: torch.Tensor, action_space: spaces.Box, temperature: float = 1.0) -> None:
        super().__init__(None, action_space)
        self.mean, log_std = split_box_logits(logits, action_space)
        log_std = log_std.clamp(MIN_LOG_STD, self.max_log_std)
        self.log_std = log_std if temperature == 1.0 else log_std + 0.5 * math.log(temperature)
        self.std = self.log_std.exp()

    @override(ReparameterisedDistribution)
    def _build_dist(self) -> Normal:
        return Normal(self.mean, self.std, validate_args=False)

    @classmethod
    @override(ReparameterisedDistribution)
    def required_logits_shape(cls, action_space: spaces.Space[Any]) -> Sequence[int]:
        return box_logits_shape(action_space, cls)

    @override(ReparameterisedDistribution)
    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        standardised = (actions - self.mean) / self.std
        return self._joint(-0.5 * standardised.square() - self.log_std - HALF_LOG_2_PI)

    def typical_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lower and upper ends `[..., *space.shape]`, one standard deviation from the mean."""
        return self.mean - self.std, self.mean + self.std

    @override(ReparameterisedDistribution)
    def deterministic_sample(self) -> torch.Tensor:
        return self.mean

    @override(ReparameterisedDistribution)
    def rsample_with_log_prob(self, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        log_density = torch.sub(-HALF_LOG_2_PI - 0.5 * noise.square(), self.log_std)
        return torch.addcmul(self.mean, self.std, noise), self._joint(log_density)

    @override(ReparameterisedDistribution)
    def entropy(self) -> torch.Tensor:
        return self._joint(self.log_std + (0.5 + HALF_LOG_2_PI))
