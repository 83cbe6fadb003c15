"""Interface of action distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from maze.core.annotations import override

Reduction = Callable[[torch.Tensor], torch.Tensor]


class ProbabilityDistribution(ABC):
    """Distribution over the actions of one head, or of a dictionary of heads.

    Logits, samples and log-probabilities may have any number of leading batch dimensions.
    """

    def neg_log_prob(self, actions: Any) -> Any:
        """Return the negative of :meth:`log_prob`."""
        return -self.log_prob(actions)

    @abstractmethod
    def log_prob(self, actions: Any) -> Any:
        """Return the log-probability (density for continuous actions), joint over all components of an action.

        :param actions: Actions `[..., *space.shape]`; of joint distributions, those of each part.
        :return: `[...]`.
        """

    @abstractmethod
    def entropy(self) -> Any:
        """Return the entropy, joint over all components of an action."""

    @abstractmethod
    def kl(self, other: Any) -> Any:
        """Return the Kullback-Leibler divergence KL(self || other).

        :param other: A distribution of the same class and space.
        """

    @abstractmethod
    def sample(self) -> Any:
        """Draw actions, without gradients.

        The distributions of Maze take an optional `generator: torch.Generator`; without one they draw from torch's
        global generator.
        """

    @abstractmethod
    def deterministic_sample(self) -> Any:
        """Return the deterministic action `[..., *space.shape]`: the mode, or the mean where the class documents it."""

    def joint_entropy(self) -> Any:
        """Return the entropy of each element of the batch, unlike :meth:`entropy` where that one is reduced further."""
        return self.entropy()

    def joint_kl(self, other: Any) -> Any:
        """Return KL(self || other) by element of the batch, unlike :meth:`kl` where that one is reduced further."""
        return self.kl(other)


class JointProbabilityDistribution(ProbabilityDistribution):
    """Independent distributions of several parts, whose :meth:`entropy` and :meth:`kl` are reduced over the batch.

    `reduce_fun` reduces the joint values of the batch `[...]`; `None`: not at all.
    """

    parts: Sequence[ProbabilityDistribution]
    """The distributions."""

    @override(ProbabilityDistribution)
    def joint_entropy(self) -> torch.Tensor:
        return summed([part.joint_entropy() for part in self.parts])

    @override(ProbabilityDistribution)
    def joint_kl(self, other: Any) -> torch.Tensor:
        return summed([own.joint_kl(others) for own, others in zip(self.parts, other.parts, strict=True)])

    @override(ProbabilityDistribution)
    def entropy(self, reduce_fun: Reduction | None = torch.mean) -> torch.Tensor:
        joint = self.joint_entropy()
        return joint if reduce_fun is None else reduce_fun(joint)

    @override(ProbabilityDistribution)
    def kl(self, other: Any, reduce_fun: Reduction | None = torch.mean) -> torch.Tensor:
        joint = self.joint_kl(other)
        return joint if reduce_fun is None else reduce_fun(joint)


def summed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of the same shape."""
    return values[0] if len(values) == 1 else torch.stack(list(values)).sum(0)
