"""What a torch policy returns for learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from maze.distributions.dict import DictProbabilityDistribution

if TYPE_CHECKING:
    from maze.core.env.structured_env import ActorID


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
    """Who acted."""

    @property
    def entropy(self) -> torch.Tensor:
        """Joint entropy (sum over the action heads) of each sample, in the shape of the batch."""
        return self.prob_dist.joint_entropy()


class PolicyOutput:
    """Outputs for the sub-steps of one environment step, in their order."""

    def __init__(self) -> None:
        self._substep_outputs: list[PolicySubStepOutput] = []

    def __getitem__(self, index: int) -> PolicySubStepOutput:
        return self._substep_outputs[index]

    def __len__(self) -> int:
        return len(self._substep_outputs)

    def append(self, value: PolicySubStepOutput) -> None:
        """Adds the next sub-step."""
        self._substep_outputs.append(value)

    def actor_ids(self) -> list[ActorID | None]:
        """Who acted in each sub-step."""
        return [output.actor_id for output in self._substep_outputs]

    @property
    def substep_outputs(self) -> list[PolicySubStepOutput]:
        """The outputs themselves."""
        return self._substep_outputs

    @property
    def action_logits(self) -> list[dict[str, torch.Tensor]]:
        """Logits by action head, for each sub-step.

        :return: Each `[..., *logits_shape]`.
        """
        return [output.action_logits for output in self._substep_outputs]

    @property
    def prob_dist(self) -> list[DictProbabilityDistribution]:
        """Joint action distribution of each sub-step."""
        return [output.prob_dist for output in self._substep_outputs]

    @property
    def entropies(self) -> list[torch.Tensor]:
        """Joint entropy of each sample, for each sub-step.

        :return: Each `[...]`, the batch.
        """
        return [output.entropy for output in self._substep_outputs]

    @property
    def embedding_logits(self) -> list[dict[str, torch.Tensor] | None]:
        """Shared embeddings of each sub-step.

        :return: Each `[..., features]`.
        """
        return [output.embedding_logits for output in self._substep_outputs]

    def log_probs_for_actions(self, actions: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Log-probability of each action head, for each sub-step.

        :return: Each `[...]`, the batch.
        """
        self._check_length(actions)
        return [out.prob_dist.log_prob(action) for out, action in zip(self._substep_outputs, actions, strict=True)]

    def joint_log_probs_for_actions(self, actions: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Log-probability of the whole dictionary action (sum over its heads), for each sub-step.

        :return: Each `[...]`, the batch.
        """
        self._check_length(actions)
        return [
            out.prob_dist.joint_log_prob(action) for out, action in zip(self._substep_outputs, actions, strict=True)
        ]

    def _check_length(self, actions: list[dict[str, torch.Tensor]]) -> None:
        if len(actions) != len(self._substep_outputs):
            raise ValueError(f"{len(actions)} actions were given for {len(self._substep_outputs)} sub-steps.")
