"""Base of the distributions over one tensor of actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from gymnasium import spaces
from torch.distributions import Distribution, kl_divergence

from maze.core.annotations import override
from maze.distributions.distribution import ProbabilityDistribution
from maze.distributions.utils import isolated_global_generator

T = TypeVar("T", bound=Distribution)


class TorchProbabilityDistribution(ProbabilityDistribution, Generic[T], ABC):
    """Wrap a torch distribution; all components of an action count as one event.

    :param dist: The torch distribution, whose batch shape ends with the action's shape. `None`: the subclass
        computes everything itself and builds one in `_build_dist` on demand.
    :param action_space: Space of the actions.
    """

    def __init__(self, dist: T | None, action_space: spaces.Space[Any]) -> None:
        self._dist = dist
        self.action_space = action_space
        self._n_event_dims = len(action_space.shape or ())

    @classmethod
    @abstractmethod
    def required_logits_shape(cls, action_space: spaces.Space[Any]) -> Sequence[int]:
        """Return the shape of the logits, without batch dimensions.

        :param action_space: Space of the actions.
        :raises ConfigError: The distribution does not suit the space.
        """

    @property
    def dist(self) -> T:
        """The torch distribution."""
        if self._dist is None:
            self._dist = self._build_dist()
        return self._dist

    def _build_dist(self) -> T:
        raise NotImplementedError

    def _joint(self, per_component: torch.Tensor) -> torch.Tensor:
        """Sum over the components of an action."""
        return per_component.flatten(-self._n_event_dims).sum(-1) if self._n_event_dims else per_component

    @override(ProbabilityDistribution)
    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        return self._joint(self.dist.log_prob(actions))

    @override(ProbabilityDistribution)
    def entropy(self) -> torch.Tensor:
        return self._joint(self.dist.entropy())

    @override(ProbabilityDistribution)
    def kl(self, other: TorchProbabilityDistribution[Any]) -> torch.Tensor:
        return self._joint(kl_divergence(self.dist, other.dist))

    @override(ProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        with torch.no_grad(), isolated_global_generator(generator):
            return self.dist.sample()


class ReparameterisedDistribution(TorchProbabilityDistribution[T], ABC):
    """Distribution whose actions are differentiable functions of its logits and of noise."""

    @abstractmethod
    def rsample_with_log_prob(self, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample actions with gradients with respect to the logits, and return them with their log-probabilities.

        :param generator: Source of the noise; `None`: torch's global generator.
        :return: Actions `[..., *space.shape]`, and their log-probabilities `[...]`.
        """

    def rsample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Sample actions with gradients with respect to the logits.

        :param generator: Source of the noise; `None`: torch's global generator.
        :return: `[..., *space.shape]`.
        """
        return self.rsample_with_log_prob(generator)[0]

    @override(ProbabilityDistribution)
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        with torch.no_grad():
            return self.rsample(generator)
