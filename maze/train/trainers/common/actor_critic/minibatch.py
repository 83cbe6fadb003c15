"""Minibatches of an actor-critic: rows of observations and actions with advantages and targets."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.train.trainers.common.actor_critic.sequences import Index, Sequences

if TYPE_CHECKING:
    from maze.core.agent.state_critic_input_output import StateCriticOutput
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy_output import PolicyOutput
    from maze.core.rollout.rollout_columns import RolloutColumns


@dataclass
class PolicyBatch:
    """Decisions of the same environment steps: row i of everything belongs to the same environment step.

    Where all environments take the same sub-steps, one of these holds the whole rollout; otherwise there is one with a
    single sub-step for each policy network.
    """

    record: StructuredSpacesRecord
    """Observations and actions of each sub-step, `[n_rows, ...]`."""
    old_values: list[Tensor]
    """For each output of the critic `[n_rows]`: its prediction before the update."""
    old_log_probs: list[Tensor]
    """For each sub-step `[n_rows]`: joint log-probability of the action under the policy that sampled it."""
    advantages: list[Tensor] = field(default_factory=list)
    """For each sub-step `[n_rows]`."""
    targets: list[Tensor] = field(default_factory=list)
    """For each output of the critic `[n_rows]`: the returns that it should have predicted."""
    log_rhos: list[Tensor] = field(default_factory=list)
    """For each sub-step `[n_rows]`: logarithm of the importance weight; empty for on-policy returns."""
    index: Index | None = None
    """Ticks and environments of the rows; `None`: all of a dense rollout, in the order of time."""
    outputs: tuple[PolicyOutput, StateCriticOutput] | None = None
    """Outputs of the networks for all rows, with gradients; `None`: to be computed."""
    sequences: Sequences | None = None
    """Sequences that recurrent networks are unrolled over."""

    @property
    def n_rows(self) -> int:
        """Number of environment steps (of actions of one policy network, where there is a single sub-step)."""
        return len(self.old_log_probs[0])

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.old_log_probs[0].device

    def rows(self, rows: Tensor | slice) -> PolicyBatch:
        """Select rows: views for a slice, copies for a tensor of indices `[n_selected]`."""

        def chosen(tensor: Tensor) -> Tensor:
            return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)  # faster than tensor[rows]

        def of(tensors: Mapping[str, Any] | None) -> dict[str, Any]:
            return {key: chosen(tensor) for key, tensor in (tensors or {}).items()}

        record = StructuredSpacesRecord(
            [SpacesRecord(one.actor_id, of(one.observation), of(one.action)) for one in self.record.substep_records]
        )
        values, log_probs, advantages, targets = (
            [chosen(tensor) for tensor in tensors]
            for tensors in (self.old_values, self.old_log_probs, self.advantages, self.targets)
        )
        return PolicyBatch(record, values, log_probs, advantages, targets)

    def minibatches(self, n: int, generator: torch.Generator) -> Iterator[PolicyBatch | None]:
        """Divide all rows in random order as evenly as possible; whole sequences stay together.

        :param n: Number of minibatches; `None` takes the place of an empty one.
        :param generator: Source of the order.
        """
        if self.sequences is not None:
            for chosen in self.sequences.minibatches(n, generator):
                yield None if chosen is None else self.in_sequences(*chosen)
            return
        order = torch.randperm(self.n_rows, generator=generator).to(self.device)
        for index in range(n):
            start, stop = (self.n_rows * i // n for i in (index, index + 1))
            yield self.rows(order[start:stop]) if stop > start else None

    def in_sequences(self, rows: np.ndarray, sequences: Sequences | None) -> PolicyBatch:
        """Select rows together with their sequences.

        :param rows: Indices `[n_selected]`.
        :param sequences: The sequences of these rows; `None`: the model is not recurrent.
        """
        return replace(self.rows(torch.from_numpy(rows).to(self.device)), sequences=sequences)

    def evaluate(self, model: TorchActorCritic) -> tuple[PolicyOutput, StateCriticOutput]:
        """Compute the outputs of the networks for all rows.

        :param model: Policy and critic.
        """
        runs = None if self.sequences is None else self.sequences.all_at_once(model.device)
        return self.outputs or model.compute_actor_critic_output(self.record, runs=runs)


@dataclass
class RolloutBatch:
    """A rollout, or a minibatch of it, with advantages and targets."""

    parts: list[PolicyBatch]
    n_steps: int
    """Number of environment steps, over all environments."""

    @property
    def n_rows(self) -> int:
        """Number of rows of all parts together."""
        return sum(part.n_rows for part in self.parts)

    def shuffled(self, batch_size: int, generator: torch.Generator) -> Iterator[RolloutBatch]:
        """Divide the whole batch in random order evenly into minibatches.

        :param batch_size: Largest number of environment steps in a minibatch.
        :param generator: Source of the order.
        """
        # Where environments wait for different actors, no part may have a row for each of so many minibatches.
        n_minibatches = min(-(-self.n_steps // batch_size), max(part.n_rows for part in self.parts))
        parts = [part.minibatches(n_minibatches, generator) for part in self.parts]
        for together in zip(*parts, strict=True):
            if selected := [part for part in together if part is not None]:
                yield RolloutBatch(selected, self.n_steps // n_minibatches)


def records_by_policy(
    columns: RolloutColumns, separate_agents: Container[Any], device: str
) -> Iterator[tuple[StructuredSpacesRecord, Index | None]]:
    """Yield observations and actions of each policy network in the order of time, with their ticks and environments.

    A dense rollout is one record for all networks, with a record of each sub-step, and has no index (`None`). On the
    CPU its tensors share memory with the columns.

    :param columns: The rollout.
    :param separate_agents: Keys of the sub-steps whose agents have networks of their own.
    :param device: Device of the tensors.
    """

    def record_of(actor: Any, *arrays: Mapping[str, Any] | None) -> SpacesRecord:
        tensors: Any = ({key: _tensor(a, device) for key, a in (of_kind or {}).items()} for of_kind in arrays)
        observation, action, logits = tensors
        return SpacesRecord(actor, observation=observation, action=action, logits=logits or None)

    if columns.is_dense():
        substeps = [
            record_of(substep.actor_id, *map(_flattened, (substep.observation, substep.action, substep.logits)))
            for substep in columns.structured_record().substep_records
        ]
        yield StructuredSpacesRecord(substeps), None
        return
    for of_key in columns.substeps.values():
        for actor, place in of_key.entries_by_actor(are_separate=of_key.step_key in separate_agents):
            arrays = (
                {key: array[place] for key, array in (each or {}).items()}
                for each in (of_key.observations, of_key.actions, of_key.logits)
            )
            yield StructuredSpacesRecord([record_of(actor, *arrays)]), (of_key.ticks[place[0]], place[1])


def _flattened(arrays: Mapping[str, Any] | None) -> dict[str, Any]:
    """`[n_steps, n_envs, ...]` as rows."""
    return {key: array.reshape(-1, *array.shape[2:]) for key, array in (arrays or {}).items()}


def _tensor(array: Any, device: str) -> Tensor:
    """Small integers, such as pixels, keep their type until a network sees them; float64 and the like are converted."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype is torch.float64:
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.to(device)
