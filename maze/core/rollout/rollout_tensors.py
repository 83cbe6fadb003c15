"""What networks are asked about a collected rollout: its records as tensors, and the observations at its ends."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maze.core.env.structured_env import ActorID
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord

Place = tuple[int, int]
"""(tick, environment)"""

Index = tuple[np.ndarray, np.ndarray]
"""Ticks and environments of rows."""


def records_by_policy(
    columns: RolloutColumns, separate_agents: Container[Any], device: str
) -> Iterator[tuple[StructuredSpacesRecord, Index | None]]:
    """All that one policy network did, in the order of time, and where it did so.

    In a dense rollout the sub-steps of an environment step stay together, in one record for all networks, whose rows
    are everywhere (`None`) in the order of time; on the CPU its tensors share memory with the columns.

    :param columns: The rollout.
    :param separate_agents: Keys of the sub-steps whose agents have networks of their own.
    :param device: Where the tensors go.
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
            arrays = (_select(each or {}, place) for each in (of_key.observations, of_key.actions, of_key.logits))
            yield StructuredSpacesRecord([record_of(actor, *arrays)]), (of_key.ticks[place[0]], place[1])


class OpenEnds(NamedTuple):
    """Observations of one actor that nobody acted on: after the rollout, and where episodes were cut off."""

    actor_id: ActorID
    places: list[Place]
    """Where: after the rollout at `(n_ticks, environment)`."""
    observation: dict[str, np.ndarray]
    """`[n_places, ...]` by key."""
    known_substeps: list[dict[str, Tensor]] | None
    """Observations of all sub-steps in the step before, where steps have several in a fixed order."""
    position: int
    """Which of these sub-steps the actor's own is."""


def open_ends(columns: RolloutColumns, substeps: Sequence[SpacesRecord] = ()) -> Iterator[OpenEnds]:
    """What has to be valued because nothing is recorded after it, by actor.

    :param columns: The rollout.
    :param substeps: The sub-steps of a dense rollout, if there are several.
    """
    places: dict[ActorID, list[Place]] = {}
    observations: dict[ActorID, list[dict[str, np.ndarray]]] = {}
    for actor in dict.fromkeys(columns.last_actor_ids):
        envs = [env for env, other in enumerate(columns.last_actor_ids) if other == actor]
        places[actor] = [(columns.n_ticks, env) for env in envs]
        row = columns.last_observations[actor.step_key]
        observations[actor] = [row if len(envs) == columns.n_envs else _select(row, envs)]
    for entry in columns.final_observations:
        places.setdefault(entry.actor_id, []).append((entry.tick, entry.env_index))
        expanded = {key: np.asarray(value)[np.newaxis] for key, value in entry.observation.items()}
        observations.setdefault(entry.actor_id, []).append(expanded)
    actors = [substep.actor_id for substep in substeps]
    for actor, rows in observations.items():
        joined = rows[0] if len(rows) == 1 else {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
        known = None
        if substeps:
            steps = [
                min(tick, columns.n_ticks - 1) // len(substeps) * columns.n_envs + env for tick, env in places[actor]
            ]
            known = [_select(substep.observation or {}, steps) for substep in substeps]
        yield OpenEnds(actor, places[actor], joined, known, actors.index(actor) if actor in actors else 0)


def numbered_actors(columns: RolloutColumns) -> tuple[dict[ActorID, int], np.ndarray]:
    """Numbers of all actors, and who acted in each environment and tick (-1: nobody).

    :return: The numbers, and an array `[n_ticks, n_envs]`.
    """
    numbers: dict[ActorID, int] = {}
    actors = np.full(columns.rewards.shape, -1)
    for substep in columns.substeps.values():
        for actor, (rows, envs) in substep.entries_by_actor():
            actors[substep.ticks[rows], envs] = numbers.setdefault(actor, len(numbers))
    return numbers, actors


def columns_as_tensors(columns: RolloutColumns) -> dict[str, Any]:
    """A rollout in a form that files hold without pickled objects."""
    substeps = {
        key: {
            "observations": _copied(substep.observations),
            "actions": _copied(substep.actions),
            **_copied({"agent_ids": substep.agent_ids, "ticks": substep.ticks}),
        }
        for key, substep in columns.substeps.items()
    }
    flags = ("rewards", "terminated", "truncated", "step_complete")
    return {"substeps": substeps, **_copied({name: getattr(columns, name) for name in flags})}


def _flattened(arrays: Mapping[str, Any] | None) -> dict[str, Any]:
    """`[n_steps, n_envs, ...]` as rows."""
    return {key: array.reshape(-1, *array.shape[2:]) for key, array in (arrays or {}).items()}


def _select(arrays: Mapping[str, Any], index: Any) -> dict[str, Any]:
    return {key: array[index] for key, array in arrays.items()}


def _copied(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(array.copy()) for key, array in arrays.items()}


def _tensor(array: Any, device: str) -> Tensor:
    """Small integers, such as pixels, keep their type until a network sees them; float64 and the like are converted."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype is torch.float64:
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.to(device)
