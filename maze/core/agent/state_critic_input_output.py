"""Inputs and outputs of state critics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from maze.core.agent.torch_policy_output import PolicyOutput, PolicySubStepOutput, Substeps
from maze.core.annotations import override

if TYPE_CHECKING:
    from maze.core.env.structured_env import ActorID
    from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
    from maze.perception.blocks.recurrent.recurrent_cell import Run


@dataclass
class StateCriticStepOutput:
    """Values of the observations of one sub-step, in the shape of their batch."""

    values: torch.Tensor
    """Values with gradients."""
    detached_values: torch.Tensor
    """The same without gradients."""
    actor_id: ActorID | None
    """The actor."""


class StateCriticOutput(Substeps[StateCriticStepOutput]):
    """Values for the sub-steps of one environment step, in their order."""

    @property
    def actor_ids(self) -> list[ActorID | None]:
        """The actor of each sub-step."""
        return [output.actor_id for output in self]

    @property
    def values(self) -> list[torch.Tensor]:
        """Values with gradients, for each sub-step.

        :return: Each `[...]`, the batch.
        """
        return [output.values for output in self]

    @property
    def detached_values(self) -> list[torch.Tensor]:
        """Values without gradients, for each sub-step.

        :return: Each `[...]`, the batch.
        """
        return [output.detached_values for output in self]

    def reshape(self, shape: Sequence[int]) -> None:
        """Give all values another shape, in place.

        :param shape: The shape, with as many elements as the batch; -1 stands for the remaining ones.
        """
        for output in self:
            output.values = output.values.reshape(tuple(shape))
            output.detached_values = output.detached_values.reshape(tuple(shape))


@dataclass
class StateCriticStepInput:
    """Observations, and embeddings shared by the policy, of one sub-step."""

    tensor_dict: dict[str, Any]
    """Observations and shared embeddings by key."""
    actor_id: ActorID | None
    """The actor."""
    run: Run | None = None
    """Source of the hidden states; required by recurrent networks."""

    @classmethod
    def build(cls, policy_step_output: PolicySubStepOutput, observation: dict[str, Any]) -> StateCriticStepInput:
        """Join the observation with the embeddings that the policy has already computed.

        :param policy_step_output: Output of the policy for the sub-step.
        :param observation: Observations `[..., *shape]` by key.
        """
        embeddings = policy_step_output.embedding_logits
        return cls({**observation, **embeddings} if embeddings else observation, policy_step_output.actor_id)


class StateCriticInput(Substeps[StateCriticStepInput]):
    """Inputs for the sub-steps of one environment step, in their order."""

    @override(Substeps)
    def append(self, item: StateCriticStepInput) -> None:  # the documented name of the argument
        super().append(item)

    @property
    def tensor_dict(self) -> list[dict[str, Any]]:
        """Observations and shared embeddings, for each sub-step."""
        return [step_input.tensor_dict for step_input in self]

    @property
    def actor_ids(self) -> list[ActorID | None]:
        """The actor of each sub-step."""
        return [step_input.actor_id for step_input in self]

    @property
    def substep_inputs(self) -> list[StateCriticStepInput]:
        """The inputs themselves."""
        return self

    @classmethod
    def build(cls, policy_output: PolicyOutput, record: StructuredSpacesRecord) -> StateCriticInput:
        """Join the observations of a record with the embeddings that the policy has already computed.

        :param policy_output: Outputs of the policy for all sub-steps of the record.
        :param record: Observations of the same sub-steps, as tensors.
        """
        return cls.of_substeps(policy_output, record.substep_records)

    @classmethod
    def of_substeps(
        cls, policy_output: PolicyOutput, substeps: Sequence[Any], runs: Sequence[Run] = ()
    ) -> StateCriticInput:
        """Join the observations of sub-steps with the embeddings that the policy has already computed.

        :param policy_output: Output of the policy for the sub-steps.
        :param substeps: Records or rows with the observations of each sub-step.
        :param runs: Of a recurrent critic, where its hidden states come from; a shared critic has one entry.
        """
        pairs = zip(policy_output, substeps, strict=True)
        items = [StateCriticStepInput.build(output, substep.observation or {}) for output, substep in pairs]
        for item, run in zip(items, runs, strict=False):
            item.run = run
        return cls(items)
