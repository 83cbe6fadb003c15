"""Maze's action distributions as RLlib wants them: made of one tensor of logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from ray.rllib.core.distribution.distribution import Distribution

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.distributions.dict import DictProbabilityDistribution
from maze.distributions.distribution_mapper import DistributionMapper


class LogitsLayout:
    """Where the logits of each action head are in one row of logits.

    :param mapper: Knows the shape of each head's logits.
    :param action_space: The heads of one sub-step, in the order of this space.
    """

    def __init__(self, mapper: DistributionMapper, action_space: spaces.Dict) -> None:
        self.shapes = {head: tuple(mapper.required_logits_shape(head)) for head in action_space.spaces}
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]

    @property
    def size(self) -> int:
        """Number of logits of all heads."""
        return sum(self.sizes)

    def join(self, logits: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One tensor `[..., size]` of the logits by head.

        :raises ConfigError: A head is missing, or its logits have another shape.
        """
        missing = [head for head in self.shapes if head not in logits]
        if missing:
            raise ConfigError(
                f"model.policy: the network returned {sorted(logits)}, but no logits for the action heads {missing}."
            )
        flat = []
        for head, shape in self.shapes.items():
            tensor = logits[head]
            if tuple(tensor.shape[tensor.dim() - len(shape) :]) != shape:
                raise ConfigError(
                    f"model.policy: the logits of action head `{head}` have shape {tuple(tensor.shape)}, expected "
                    f"them to end with {shape}."
                )
            flat.append(tensor.flatten(tensor.dim() - len(shape)) if len(shape) != 1 else tensor)
        return torch.cat(flat, dim=-1) if len(flat) > 1 else flat[0]

    def split(self, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inverse of :meth:`join`.

        :param joined: `[..., size]`.
        """
        parts = torch.split(joined, self.sizes, dim=-1)
        return {
            head: part.reshape(*part.shape[:-1], *shape)
            for (head, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


class MazeActionDistribution(Distribution):
    """The joint distribution over the action heads of a sub-step.

    Log-probabilities, entropies and divergences are those of the joint action, one for each row. Use
    :func:`action_distribution_class` to make a subclass for an action space.

    :param logits: `[..., layout.size]`
    :param is_deterministic: Whether :meth:`sample` gives the most likely action.
    """

    mapper: DistributionMapper
    layout: LogitsLayout
    only_head: str | None
    """The head whose actions are given and taken as they are, without a dictionary; `None`: dictionaries."""

    def __init__(self, logits: torch.Tensor, is_deterministic: bool = False) -> None:
        super().__init__()
        self.logits = logits
        self.is_deterministic = is_deterministic
        self._joint: DictProbabilityDistribution | None = None

    @property
    def joint(self) -> DictProbabilityDistribution:
        """The distribution of Maze."""
        if self._joint is None:
            self._joint = self.mapper.logits_dict_to_distribution(self.layout.split(self.logits), temperature=1.0)
        return self._joint

    @override(Distribution)
    def sample(self, *, sample_shape: tuple[int, ...] | None = None, **kwargs: Any) -> Any:
        """Actions, without gradients.

        :raises EnvironmentContractError: All actions of a head are masked.
        """
        if sample_shape:
            raise NotImplementedError("Maze's distributions draw one action for each row of logits.")
        self.joint.require_valid()
        actions = self.joint.deterministic_sample() if self.is_deterministic else self.joint.sample()
        # Copies: a squashed distribution knows its own draws exactly, also where tanh has saturated. The learner knows
        # only the actions, and the ratio of its probabilities to these has to be 1 before the first update.
        return self._given({head: action.clone() for head, action in actions.items()})

    @override(Distribution)
    def rsample(self, *, sample_shape: tuple[int, ...] | None = None, **kwargs: Any) -> Any:
        """Actions with gradients, where all heads can be reparameterised."""
        parts: dict[str, Any] = self.joint.distribution_dict
        return self._given({head: distribution.rsample() for head, distribution in parts.items()})

    @override(Distribution)
    def logp(self, value: Any, **kwargs: Any) -> torch.Tensor:
        return self.joint.joint_log_prob({self.only_head: value} if self.only_head is not None else value)

    @override(Distribution)
    def entropy(self, **kwargs: Any) -> torch.Tensor:
        return self.joint.joint_entropy()

    @override(Distribution)
    def kl(self, other: MazeActionDistribution, **kwargs: Any) -> torch.Tensor:
        return self.joint.joint_kl(other.joint)

    @staticmethod
    @override(Distribution)
    def required_input_dim(space: spaces.Space[Any], **kwargs: Any) -> int:
        raise NotImplementedError("The number of logits depends on the distribution mapper of the model.")

    @classmethod
    @override(Distribution)
    def from_logits(cls, logits: torch.Tensor, **kwargs: Any) -> MazeActionDistribution:
        return cls(logits)

    @override(Distribution)
    def to_deterministic(self) -> MazeActionDistribution:
        return type(self)(self.logits, is_deterministic=True)

    def _given(self, actions: dict[str, torch.Tensor]) -> Any:
        return actions[self.only_head] if self.only_head is not None else actions


def action_distribution_class(
    mapper: DistributionMapper, action_space: spaces.Dict, only_head: str | None = None
) -> type[MazeActionDistribution]:
    """The distribution over the actions of a sub-step.

    :param mapper: Knows the distribution of each head.
    :param action_space: The heads.
    :param only_head: Name of the single head, where RLlib sees its action without a dictionary around it.
    """
    attributes = {"mapper": mapper, "layout": LogitsLayout(mapper, action_space), "only_head": only_head}
    return type("BoundMazeActionDistribution", (MazeActionDistribution,), attributes)
