"""A rollout as tensors to learn from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord

if TYPE_CHECKING:
    from maze.core.rollout.rollout_columns import RolloutColumns

Rows = Tensor | slice


@dataclass
class AlignedSubsteps:
    """Sub-steps of the same environment steps: row i of everything belongs to the same environment step.

    Where all environments take the same sub-steps, one of these holds the whole rollout; otherwise there is one of a
    single sub-step for each policy.
    """

    record: StructuredSpacesRecord
    """Observations and actions of each sub-step, `[n_rows, ...]`."""

    advantages: list[Tensor]
    """For each sub-step `[n_rows]`."""

    old_log_probs: list[Tensor]
    """For each sub-step `[n_rows]`: joint log-probability of the action under the policy that sampled it."""

    targets: list[Tensor]
    """For each output of the critic `[n_rows]`: the returns it should have predicted."""

    old_values: list[Tensor]
    """For each output of the critic `[n_rows]`: what it predicted when the rollout was valued."""

    @property
    def n_rows(self) -> int:
        """Number of environment steps (of one policy's actions, where there is a single sub-step)."""
        return len(self.advantages[0])

    @property
    def actions(self) -> list[dict[str, Tensor]]:
        """Actions of each sub-step.

        :return: Each `[batch, *space.shape]` by head.
        """
        return self.record.actions

    def rows(self, rows: Rows) -> AlignedSubsteps:
        """A selection: views for a slice, copies for a tensor of indices."""
        return AlignedSubsteps(
            record=StructuredSpacesRecord(
                [
                    SpacesRecord(
                        substep.actor_id,
                        observation=_rows_of_dict(substep.observation, rows),
                        action=_rows_of_dict(substep.action, rows),
                    )
                    for substep in self.record.substep_records
                ]
            ),
            advantages=_rows_of_list(self.advantages, rows),
            old_log_probs=_rows_of_list(self.old_log_probs, rows),
            targets=_rows_of_list(self.targets, rows),
            old_values=_rows_of_list(self.old_values, rows),
        )


@dataclass
class RolloutBatch:
    """All that was collected in a rollout, with the targets to learn."""

    parts: list[AlignedSubsteps]
    n_steps: int
    """Number of environment steps, over all environments."""

    @property
    def n_rows(self) -> int:
        """Number of rows of all parts together."""
        return sum(part.n_rows for part in self.parts)

    def shuffled(self, batch_size: int, generator: torch.Generator) -> Iterator[RolloutBatch]:
        """The whole batch in random order, divided evenly into minibatches.

        :param batch_size: Largest number of environment steps in a minibatch.
        :param generator: Source of the order.
        """
        # Where environments wait for different actors, no part may have a row for each of so many minibatches.
        n_minibatches = min(-(-self.n_steps // batch_size), max(part.n_rows for part in self.parts))
        permuted = [part.rows(_permutation(part, generator)) for part in self.parts]
        for index in range(n_minibatches):
            selected = []
            for part in permuted:
                start, stop = (part.n_rows * i // n_minibatches for i in (index, index + 1))
                if stop > start:
                    selected.append(part.rows(slice(start, stop)))
            yield RolloutBatch(selected, self.n_steps // n_minibatches)


def _permutation(part: AlignedSubsteps, generator: torch.Generator) -> Tensor:
    permutation = torch.randperm(part.n_rows, generator=generator)
    return permutation.to(part.advantages[0].device)


def _rows_of_dict(tensors: Mapping[str, Any] | None, rows: Rows) -> dict[str, Any]:
    return {key: tensor[rows] for key, tensor in (tensors or {}).items()}


def _rows_of_list(tensors: list[Tensor], rows: Rows) -> list[Tensor]:
    return [tensor[rows] for tensor in tensors]


def columns_as_tensors(columns: RolloutColumns) -> dict[str, Any]:
    """A rollout in a form that files hold without pickled objects."""
    substeps = {
        key: {
            "observations": _copied(substep.observations),
            "actions": _copied(substep.actions),
            "agent_ids": torch.from_numpy(substep.agent_ids.copy()),
            "ticks": torch.from_numpy(substep.ticks.copy()),
        }
        for key, substep in columns.substeps.items()
    }
    flags = ("rewards", "terminated", "truncated", "step_complete")
    return {"substeps": substeps, **_copied({name: getattr(columns, name) for name in flags})}


def _copied(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(array.copy()) for key, array in arrays.items()}
