"""Records and rows of transitions, one made from the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.env.base_env import is_truncated
from maze.core.env.space_checks import ActionBounds
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.train.trainers.common.replay_buffer.transitions import Arrays, TransitionBatch, TransitionRows


class _Row(NamedTuple):
    """One environment step; `None` where an actor did not act."""

    observations: list[Any]
    actions: list[Any]
    rewards: list[float]
    next_observation: Any
    terminated: bool


def rows_of_records(
    records: Sequence[StructuredSpacesRecord],
    actors: Sequence[ActorID],
    first_number: int,
    action_spaces: Sequence[spaces.Dict] | None = None,
) -> TransitionRows:
    """Rows of successive steps of one environment.

    Actions are clipped to their space, as they were on the way to the environment. The observation after a step that
    terminated its episode is replaced by a valid one of the same episode: nothing of it counts, and that it allows no
    action is no fault.

    :param records: Unbatched steps; what followed the last one is in its last `next_observation`, which has to be
        that of the actor to act then.
    :param actors: The actors of a complete step.
    :param first_number: Number that the first row will get.
    :param action_spaces: By actor; `None`: they are not known.
    :raises EnvironmentContractError: Steps of other actors, or an action that is no element of its space.
    :raises NonFiniteError: A number is NaN or infinite.
    """
    rows = [_row(record, records[index + 1 : index + 2], actors, index) for index, record in enumerate(records)]
    is_last = [_is_done(record) for record in records]
    follows = [first_number + index - 1 if index and not is_last[index - 1] else -1 for index in range(len(rows))]
    positions = range(len(actors))
    stacked = TransitionRows(
        observations=[_stack([row.observations[position] for row in rows]) for position in positions],
        actions=[_stack([row.actions[position] for row in rows]) for position in positions],
        rewards=np.array([row.rewards for row in rows], np.float32),
        next_observation=_stack([row.next_observation for row in rows]),
        terminated=np.array([row.terminated for row in rows], np.bool_),
        n_substeps=np.array([len(record.substep_records) for record in records], np.int64),
        follows=np.array(follows, np.int64),
    )
    if action_spaces is not None:
        for position, space in enumerate(action_spaces):
            stacked.actions[position] = _within(space, stacked.actions[position], stacked.n_substeps > position)
    _require_finite(stacked)
    return stacked


def record_of_batch(batch: TransitionBatch) -> StructuredSpacesRecord:
    """A batch as records: one for each actor that acted in any of its rows, with its next observation."""
    record = StructuredSpacesRecord()
    last = len(batch.actors) - 1
    for position, actor in enumerate(batch.actors):
        if (acted := batch.acted(position)) is not None and not acted.any():
            break
        following = batch.next_observations[0] if position == last else batch.observations[position + 1]
        record.append(
            SpacesRecord(
                actor_id=actor,
                observation=dict(batch.observations[position]),
                action=dict(batch.actions[position]),
                reward=batch.rewards[:, position],
                done=batch.ended_at(position),
                next_observation=dict(following),
                batch_shape=[len(batch.terminated)],
            )
        )
    return record


def _row(
    record: StructuredSpacesRecord,
    following: Sequence[StructuredSpacesRecord],
    actors: Sequence[ActorID],
    index: int,
) -> _Row:
    substeps = record.substep_records
    where = f"Step {index} of the rollout"
    found = [substep.actor_id for substep in substeps]
    if not found or found != list(actors[: len(found)]) or (len(found) < len(actors) and not _is_done(record)):
        raise EnvironmentContractError(
            f"{where}: expected the actors {list(actors)} in this order, found {found}. A replay buffer needs steps "
            "with the same actors in the same order."
        )
    last = substeps[-1]
    is_done, truncated = bool(last.done), is_truncated(bool(last.done), _info(last))
    after = last.next_observation
    if after is None and following and not is_done:
        after = following[0].substep_records[0].observation
    observations: list[Any] = [substep.observation for substep in substeps]
    if after is None and not (is_done and not truncated):
        raise ConfigError(
            f"{where}: it is not known what was observed after it. Record rollouts with "
            "`record_next_observations=True`, and load data sets with the trajectory processor "
            "IdentityWithNextObservationTrajectoryProcessor."
        )
    if truncated and after is not None and len(found) == len(actors) and set(after) != set(observations[0]):
        raise EnvironmentContractError(
            f"{where}: it cut the episode off, and what was observed after it has the keys {sorted(after)}, expected "
            f"those of {actors[0]}, which is to act then: {sorted(observations[0])}. Have `actor_id()` of the "
            "environment move on at the end of an episode as well, or record without next observations."
        )
    observations += [None] * (len(actors) - len(observations))
    if len(found) < len(actors):
        if truncated:
            observations[len(found)] = after
        after = None
    if after is None or (is_done and not truncated):
        after = observations[0]
    actions = [substep.action for substep in substeps] + [None] * (len(actors) - len(found))
    rewards = [float(substep.reward) for substep in substeps] + [0.0] * (len(actors) - len(found))  # type: ignore[arg-type]
    return _Row(observations, actions, rewards, after, is_done and not truncated)


def _within(space: spaces.Dict, actions: Arrays, acted: np.ndarray) -> Arrays:
    """The actions, those of `Box` heads clipped, where they are elements of their space."""
    bounds, checked = ActionBounds(space), dict(actions)
    for head, values in actions.items():
        entry = space.spaces.get(head)
        if isinstance(entry, spaces.Box) and values.shape[1:] == entry.shape:
            checked[head] = bounds.clip_rows(head, values)
            continue
        lowest, highest = _choices(entry)
        if lowest is None or values.shape[1:] != (entry.shape if entry is not None else None):
            continue  # shapes are checked by the columns
        with np.errstate(invalid="ignore"):
            is_wrong = ~((values >= lowest) & (values <= highest) & (values == np.rint(values)))
        wrong = np.flatnonzero(is_wrong.reshape(len(values), -1).any(-1) & acted)
        if len(wrong):
            raise EnvironmentContractError(
                f"Step {wrong[0]} of a rollout for the replay buffer: action head `{head}` is "
                f"{values[wrong[0]].tolist()}, expected an element of {entry}. Does the experience come from another "
                "environment, or from one with other wrappers?"
            )
    return checked


def _choices(space: spaces.Space[Any] | None) -> tuple[Any, Any]:
    """Smallest and largest choice; None: these are no choices."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return (0, 1) if isinstance(space, spaces.MultiBinary) else (None, None)


def _info(record: SpacesRecord) -> dict[Any, Any]:
    return record.info if isinstance(record.info, dict) else {}


def _is_done(record: StructuredSpacesRecord) -> bool:
    return bool(record.substep_records and record.substep_records[-1].done)


def _stack(dictionaries: Sequence[Mapping[str, Any] | None]) -> Arrays:
    """Arrays by key; zeros for what is missing."""
    example = next((entry for entry in dictionaries if entry is not None), None)
    if example is None:
        return {}
    zeros = {key: np.zeros_like(np.asarray(value)) for key, value in example.items()}
    rows = [zeros if entry is None else entry for entry in dictionaries]
    try:
        return {key: np.stack([np.asarray(row[key]) for row in rows]) for key in example}
    except (KeyError, ValueError) as error:
        raise EnvironmentContractError(
            f"The steps of a rollout have observations or actions of different keys or shapes: {error}."
        ) from error


def _require_finite(rows: TransitionRows) -> None:
    groups = {f"observation of actor {index}": part for index, part in enumerate(rows.observations)}
    groups |= {f"action of actor {index}": part for index, part in enumerate(rows.actions)}
    groups |= {"reward": {"reward": rows.rewards}, "next observation": rows.next_observation}
    for name, arrays in groups.items():
        for key, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                place = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
                raise NonFiniteError(
                    f"Step {place[0]} of a rollout for the replay buffer: {name}, `{key}`, index {list(place[1:])} is "
                    f"{array[place]}. Look at what recorded it."
                )
