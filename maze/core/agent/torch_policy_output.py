"""Outputs of torch policies for learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.distributions.dict import DictProbabilityDistribution

T = TypeVar("T")


@dataclass
class PolicySubStepOutput:
    """A policy's output for one sub-step, over any number of leading batch dimensions."""

    action_logits: dict[str, torch.Tensor]
    """Logits of each action head."""
    prob_dist: DictProbabilityDistribution
    """Joint distribution of the action heads."""
    embedding_logits: dict[str, torch.Tensor] | None
    """Outputs of the network that are not action heads: embeddings shared with the critic. `None`: there are none."""
    actor_id: ActorID | None
    """The actor."""

    @property
    def entropy(self) -> torch.Tensor:
        """Joint entropy (sum over the action heads) of each sample, in the shape of the batch."""
        return self.prob_dist.joint_entropy()


class Substeps(list[T]):
    """Entries of the sub-steps of one environment step, in their order."""

    @override(list)
    def append(self, value: T) -> None:  # the documented name of the argument
        super().append(value)


class PolicyOutput(Substeps[PolicySubStepOutput]):
    """Outputs for the sub-steps of one environment step, in their order."""

    def actor_ids(self) -> list[ActorID | None]:
        """Return the actor of each sub-step."""
        return [output.actor_id for output in self]

    @property
    def substep_outputs(self) -> list[PolicySubStepOutput]:
        """The outputs themselves."""
        return self

    @property
    def action_logits(self) -> list[dict[str, torch.Tensor]]:
        """Logits by action head, for each sub-step.

        :return: Each `[..., *logits_shape]`.
        """
        return [output.action_logits for output in self]

    @property
    def prob_dist(self) -> list[DictProbabilityDistribution]:
        """Joint action distribution of each sub-step."""
        return [output.prob_dist for output in self]

    @property
    def entropies(self) -> list[torch.Tensor]:
        """Joint entropy of each sample, for each sub-step.

        :return: Each `[...]`, the batch.
        """
        return [output.entropy for output in self]

    @property
    def embedding_logits(self) -> list[dict[str, torch.Tensor] | None]:
        """Shared embeddings of each sub-step.

        :return: Each `[..., features]`.
        """
        return [output.embedding_logits for output in self]

    def log_probs_for_actions(self, actions: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Return the log-probability of each action head, for each sub-step.

        :param actions: Actions `[..., *shape]` by head, for each sub-step.
        :return: Each `[...]`, the batch.
        """
        return [dist.log_prob(action) for dist, action in zip(self.prob_dist, actions, strict=True)]

    def joint_log_probs_for_actions(self, actions: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the log-probability of the whole dictionary action (sum over its heads), for each sub-step.

        :param actions: Actions `[..., *shape]` by head, for each sub-step.
        :return: Each `[...]`, the batch.
        """
        return [dist.joint_log_prob(action) for dist, action in zip(self.prob_dist, actions, strict=True)]
