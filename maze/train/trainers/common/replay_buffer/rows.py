"""Environment steps of rollouts, in columns or as records, as rows of transitions; and batches of rows as records."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np
from gymnasium import spaces

from maze.core.env.action_conversion import ActionBounds
from maze.core.env.base_env import is_truncated
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.train.trainers.common.replay_buffer.transitions import Arrays, TransitionBatch, TransitionRows, usual_steps

logger = logging.getLogger(__name__)

Missing = Sequence[Sequence[Union[Arrays, None]]]
"""Values in place of missing observations and actions, by actor."""

# Stands for the number of the row before of the same environment, which has none yet.
_ROW_BEFORE = -2


@dataclass
class _Step:
    """An environment step in progress, or completed and without its next observation."""

    observations: list[Any] = field(default_factory=list)
    """Observations of the actors that acted, and of the next one where the episode was truncated between sub-steps."""
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    next_observation: Any = None
    terminated: bool = False
    follows: int = -1
    is_complete: bool = False


def _stacked(steps: Sequence[_Step], n_actors: int, missing: Missing | None = None) -> TransitionRows:
    """Convert steps to rows.

    :param steps: The steps.
    :param n_actors: Number of actors of a complete step.
    :param missing: Values in place of missing observations and actions, by actor; `None`: those of another step.
    """
    no_observations, no_actions = missing or [[None] * n_actors] * 2

    def stacked(values: Sequence[list[Any]], missing: Sequence[Arrays | None]) -> list[Arrays]:
        """Return arrays by actor."""
        each = [[of_step[index] if index < len(of_step) else None for of_step in values] for index in range(n_actors)]
        return [_stack(*pair) for pair in zip(each, missing, strict=True)]

    padding = [[0.0] * (n_actors - len(step.rewards)) for step in steps]
    rewards = [step.rewards + zeros for step, zeros in zip(steps, padding, strict=True)]
    return TransitionRows(
        observations=stacked([step.observations for step in steps], no_observations),
        actions=stacked([step.actions for step in steps], no_actions),
        rewards=np.array(rewards, np.float32).reshape(len(steps), n_actors),
        next_observation=_stack([step.next_observation for step in steps], no_observations[0]),
        terminated=np.array([step.terminated for step in steps], np.bool_),
        n_substeps=np.array([len(step.rewards) for step in steps], np.int64),
        follows=np.array([step.follows for step in steps], np.int64),
    )


def _stack(dictionaries: Sequence[Mapping[str, Any] | None], missing: Mapping[str, Any] | None) -> Arrays:
    """Return arrays by key.

    :param missing: In place of missing entries; `None`: the first one that is there.
    """
    if missing is None:
        missing = next((entry for entry in dictionaries if entry is not None), {})
    rows = [missing if entry is None else entry for entry in dictionaries]
    if not rows:
        return {key: np.zeros((0, *value.shape), value.dtype) for key, value in missing.items()}
    try:
        return {key: np.stack([np.asarray(row[key]) for row in rows]) for key in missing}
    except (KeyError, ValueError) as error:
        raise EnvironmentContractError(
            f"The steps of a rollout have observations or actions of different keys or shapes: {error}."
        ) from error


def _clipped(bounds: ActionBounds, actions: Arrays) -> Arrays:
    """Return the actions, those of `Box` heads within their bounds, as they were on the way to the environment."""
    return {head: bounds.clip_rows(head, values) for head, values in actions.items()}


class _StepAssembler:
    """Join decisions to environment steps, and number the steps that are whole items.

    :param actors: The actors of an environment step, in their order.
    :param n_envs: Number of environments.
    :param item_length: So many successive steps of one environment are taken together.
    """

    def __init__(self, actors: Sequence[ActorID], n_envs: int, item_length: int = 1) -> None:
        self.actors = list(actors)
        self.item_length = item_length
        self.steps = [_Step() for _ in range(n_envs)]
        """The step under way of each environment."""
        self.finished: list[list[_Step]] = [[] for _ in range(n_envs)]
        """Steps that wait until they are an item."""

    def decide(self, env_index: int, actor: ActorID, observation: Any, action: Any, reward: float, where: str) -> None:
        """Add a sub-step. Its observation completes the step before, if that waits for one."""
        if self.steps[env_index].is_complete:
            self.finish(env_index, observation)
        step = self.steps[env_index]
        self.check_actor(len(step.observations), actor, where)
        step.observations.append(observation)
        step.actions.append(action)
        step.rewards.append(reward)

    def check_actor(self, position: int, actor: ActorID, where: str) -> None:
        """Raise an error if another actor than expected takes a sub-step."""
        expected = self.actors[position] if position < len(self.actors) else None
        if actor != expected:
            raise EnvironmentContractError(
                f"{where}: sub-step {position} of an environment step was taken by {actor}, expected "
                f"{expected or 'no further sub-step'}. A replay buffer needs steps with the same actors in the same "
                f"order ({self.actors}); train with PPO or A2C instead."
            )

    def complete(self, env_index: int, where: str) -> None:
        """Complete the environment step; the next observation is not known yet."""
        step = self.steps[env_index]
        step.is_complete = True
        if len(step.observations) < len(self.actors):
            raise EnvironmentContractError(
                f"{where}: an environment step was complete after {len(step.observations)} of {len(self.actors)} "
                "sub-steps. A replay buffer needs steps with the same actors each time, in the same order."
            )

    def end_episode(self, env_index: int, terminated: bool, last_observation: Any) -> None:
        """Finish the last step of an episode.

        :param last_observation: Of the next actor where the episode was truncated; `None`: the episode terminated.
        """
        step = self.steps[env_index]
        step.terminated = terminated
        if last_observation is not None and len(step.observations) < len(self.actors):
            step.observations.append(last_observation)
            last_observation = None
        self.finish(env_index, last_observation)
        self.steps[env_index] = _Step()

    def finish(self, env_index: int, next_observation: Any) -> None:
        """Finish a step; `next_observation` may be `None` where it is not used."""
        step = self.steps[env_index]
        step.next_observation = step.observations[0] if next_observation is None else next_observation
        self.finished[env_index].append(step)
        self.steps[env_index] = _Step(follows=_ROW_BEFORE)

    def take(self, first_number: int) -> list[_Step]:
        """Take finished steps that make up whole items; now they have numbers that the next steps can refer to."""
        taken: list[_Step] = []
        for finished, under_way in zip(self.finished, self.steps, strict=True):
            n_taken = len(finished) - len(finished) % self.item_length
            for step, following in zip(finished[:n_taken], [*finished[1:], under_way], strict=False):
                if following.follows == _ROW_BEFORE:
                    following.follows = first_number + len(taken)
                taken.append(step)
            del finished[:n_taken]
        return taken


# -- rollouts in columns -----------------------------------------------------------------------------


class RolloutRows(_StepAssembler):
    """Turn successive rollouts of the same environments into rows, each of them once.

    Steps of structured environments that a rollout ends in the middle of are finished with the next rollout.

    The last observation of a truncated episode is that of the actor that would have acted. Where the environment names
    another actor (it may keep its actor at the end of an episode), the observation of that actor is unknown, and the
    last step of the episode is left out.

    :param actors: The actors of an environment step, in their order.
    :param observation_spaces_dict: Observation spaces by step key.
    :param action_spaces_dict: Action spaces by step key.
    :param n_envs: Number of environments.
    :param item_length: So many successive rows of one environment belong together; incomplete ones wait for the next
        rollout.
    """

    def __init__(
        self,
        actors: Sequence[ActorID],
        observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        n_envs: int,
        item_length: int = 1,
    ) -> None:
        super().__init__(actors, n_envs, item_length)
        self._bounds = {actor.step_key: ActionBounds(action_spaces_dict[actor.step_key]) for actor in actors}
        self._missing = usual_steps(actors, observation_spaces_dict, action_spaces_dict)

    def state(self) -> list[dict[str, Any]]:
        """Return the steps that are under way, by environment, and those that wait until they are an item."""
        return [
            {**vars(step), "waiting": [dict(vars(one)) for one in finished]}
            for step, finished in zip(self.steps, self.finished, strict=True)
        ]

    def load_state(
        self, state: Sequence[Mapping[str, Any]], new_episodes: Collection[int] = (), with_numbers: bool = True
    ) -> None:
        """Continue from a state that :meth:`state` returned.

        :param state: The state.
        :param new_episodes: Environments that begin new episodes instead.
        :param with_numbers: Whether the buffer has the rows that the steps continue.
        """
        self.steps, self.finished = [_Step() for _ in self.steps], [[] for _ in self.steps]
        for index, entry in enumerate(state):
            steps = [_Step(**step) for step in (*entry["waiting"], {k: v for k, v in entry.items() if k != "waiting"})]
            for step in steps:
                step.follows = step.follows if with_numbers else min(step.follows, -1)
            *self.finished[index], under_way = steps
            if index not in new_episodes:
                self.steps[index] = under_way

    def convert(self, columns: RolloutColumns, first_number: int) -> TransitionRows:
        """Return the rows of a rollout, those of one environment after another, in arrays of their own.

        Actions are clipped to their space, as they were on the way to the environment.

        :param columns: The rollout.
        :param first_number: Number that the first row will get.
        """
        for env_index in columns.renewed:
            self.steps[env_index] = _Step()
        is_flat = len(self.actors) == 1 and len(columns.substeps) == 1
        # with pauses between episodes, items may be spread over rollouts
        if is_flat and (self.item_length == 1 or (columns.is_dense() and not any(self.finished))):
            return self._flat(columns, first_number)
        return self._structured(columns, first_number)

    def _flat(self, columns: RolloutColumns, first_number: int) -> TransitionRows:
        actor = self.actors[0]
        substep = columns.substeps[actor.step_key]
        n_rows = columns.n_ticks * columns.n_envs
        following = {key: array[1:] for key, array in substep.observations.items()}
        if columns.final_observations:
            following = {key: array.copy() for key, array in following.items()}
            for entry in columns.final_observations:
                for key, array in following.items():
                    array[entry.tick, entry.env_index] = entry.observation[key]
        actions = {key: _by_env(array, n_rows) for key, array in substep.actions.items()}
        rows = TransitionRows(
            observations=[{key: _by_env(array[:-1], n_rows) for key, array in substep.observations.items()}],
            actions=[_clipped(self._bounds[actor.step_key], actions)],
            rewards=_by_env(columns.rewards, n_rows)[:, None],
            next_observation={key: _by_env(array, n_rows) for key, array in following.items()},
            terminated=_by_env(columns.terminated, n_rows),
            n_substeps=np.ones(n_rows, np.int64),
            follows=self._flat_follows(columns, substep.valid, first_number),
        )
        return rows if substep.valid is None else rows.select(substep.valid.T.ravel())

    def _flat_follows(self, columns: RolloutColumns, valid: np.ndarray | None, first_number: int) -> np.ndarray:
        """Return numbers of the rows that those of flat environments continue."""
        counted = np.ones(columns.n_envs * columns.n_ticks, np.int64) if valid is None else valid.T.ravel()
        numbers = first_number - 1 + counted.cumsum().reshape(columns.n_envs, columns.n_ticks)
        follows = np.empty_like(numbers)
        follows[:, 0] = [step.follows for step in self.steps]
        follows[:, 1:] = numbers[:, :-1]
        is_end = (columns.terminated | columns.truncated).T
        if valid is not None:
            is_end = is_end | ~valid.T
        follows[:, 1:][is_end[:, :-1]] = -1
        for env_index, step in enumerate(self.steps):
            step.follows = -1 if is_end[env_index, -1] else int(numbers[env_index, -1])
        return follows.ravel()

    def _structured(self, columns: RolloutColumns, first_number: int) -> TransitionRows:
        finals = {(entry.tick, entry.env_index): entry for entry in columns.final_observations}
        in_order = sorted(
            (int(substep.ticks[row]), int(env_index), int(row), step_key)
            for step_key, substep in columns.substeps.items()
            for row, env_index in zip(*substep.entries(), strict=True)
        )
        for tick, env_index, row, step_key in in_order:
            substep = columns.substeps[step_key]
            actor = ActorID(step_key, int(substep.agent_ids[row, env_index]))
            observation = {key: array[row, env_index].copy() for key, array in substep.observations.items()}
            action = {key: np.array(array[row, env_index]) for key, array in substep.actions.items()}
            reward, where = float(columns.rewards[tick, env_index]), f"Environment {env_index}"
            self.decide(env_index, actor, observation, action, reward, where)
            if columns.terminated[tick, env_index] or columns.truncated[tick, env_index]:
                terminated, final = bool(columns.terminated[tick, env_index]), finals.get((tick, env_index))
                next_actor = self.actors[len(self.steps[env_index].observations) % len(self.actors)]
                if terminated or final is None:
                    self.end_episode(env_index, terminated, None)
                elif final.actor_id == next_actor:
                    self.end_episode(env_index, terminated, final.observation)
                else:  # the environment left its actor as it was
                    self.steps[env_index] = _Step()
            elif columns.step_complete[tick, env_index]:
                self.complete(env_index, where)
        for env_index, actor in enumerate(columns.last_actor_ids):
            if self.steps[env_index].is_complete:  # the observation after the rollout completes the step before
                self.check_actor(0, actor, f"Environment {env_index}")
                last = columns.last_observations[actor.step_key]
                self.finish(env_index, {key: array[env_index].copy() for key, array in last.items()})
        rows = _stacked(self.take(first_number), len(self.actors), self._missing)
        bounds = [self._bounds[actor.step_key] for actor in self.actors]
        rows.actions = [_clipped(*pair) for pair in zip(bounds, rows.actions, strict=True)]
        return rows


def _by_env(array: np.ndarray, n_rows: int) -> np.ndarray:
    """Copy `[n_ticks, n_envs, ...]` to rows, those of one environment after another."""
    return np.array(np.swapaxes(array, 0, 1), order="C").reshape(n_rows, *array.shape[2:])


# -- records -----------------------------------------------------------------------------------------


def rows_of_records(
    records: Sequence[StructuredSpacesRecord],
    actors: Sequence[ActorID],
    first_number: int,
    action_spaces: Sequence[spaces.Dict] | None = None,
    missing: Missing | None = None,
) -> TransitionRows:
    """Return rows of successive steps of one environment.

    Actions are clipped to their space, as they were on the way to the environment. The observation after a step that
    terminated its episode is replaced by a valid one of the same episode: its value is not used, and it may allow no
    action.

    :param records: Unbatched steps; the last `next_observation` follows the last one and has to be that of the actor to
        act then.
    :param actors: The actors of a complete step.
    :param first_number: Number that the first row will get.
    :param action_spaces: By actor; `None`: they are not known.
    :param missing: Values in place of missing observations and actions, by actor; `None`: those of another step.
    :raises EnvironmentContractError: Steps of other actors, or an action that is not an element of its space.
    :raises NonFiniteError: A number is NaN or infinite.
    """
    steps = _StepAssembler(actors, n_envs=1)
    for index, record in enumerate(records):
        where = f"Step {index} of the rollout"
        for substep in record.substep_records:
            reward: Any = substep.reward
            steps.decide(0, substep.actor_id, substep.observation, substep.action, float(reward), where)
        is_done, truncated = bool(substep.done), is_truncated(bool(substep.done), substep.info or {})
        after: Any = substep.next_observation
        if after is None and (truncated or (not is_done and index + 1 == len(records))):
            raise ConfigError(
                f"{where}: its next observation is missing. Record rollouts with "
                "`record_next_observations=True`, and load data sets with the trajectory processor "
                "IdentityWithNextObservationTrajectoryProcessor."
            )
        first = steps.steps[0].observations
        if truncated and len(first) == len(actors) and set(after) != set(first[0]):
            raise EnvironmentContractError(
                f"{where}: it cut the episode off, and what was observed after it has the keys {sorted(after)}, "
                f"expected those of {actors[0]}, which is to act then: {sorted(first[0])}. Have `actor_id()` of the "
                "environment move on at the end of an episode as well, or record without next observations."
            )
        if is_done:
            steps.end_episode(0, not truncated, after if truncated else None)
        else:
            steps.complete(0, where)
            if after is not None:
                steps.finish(0, after)
    rows = _stacked(steps.take(first_number), len(actors), missing)
    for arrays in (*rows.observations, *rows.actions, {"reward": rows.rewards}, rows.next_observation):
        for key, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                place = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
                raise NonFiniteError(
                    f"Step {place[0]} of a rollout for the replay buffer: `{key}`, index {list(place[1:])} is "
                    f"{array[place]}. Check the environment or data set that it was recorded from."
                )
    if action_spaces is not None:
        for position, space in enumerate(action_spaces):
            rows.actions[position] = _checked_actions(space, rows.actions[position], rows.n_substeps > position)
    return rows


def record_of_batch(batch: TransitionBatch) -> StructuredSpacesRecord:
    """Return a batch as records: one for each actor that acted in any of its rows, with its next observation."""
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


def record_of_row(rows: TransitionRows, row: int, actors: Sequence[ActorID]) -> StructuredSpacesRecord:
    """Return a step of a single actor as an unbatched record.

    :param rows: The steps.
    :param row: Index of the row.
    :param actors: The actor.
    """
    observation, action, after = (
        {key: array[row] for key, array in arrays.items()}
        for arrays in (rows.observations[0], rows.actions[0], rows.next_observation)
    )
    reward, done = float(rows.rewards[row, 0]), bool(rows.terminated[row])
    return StructuredSpacesRecord([SpacesRecord(actors[0], observation, action, reward, done, next_observation=after)])


def _checked_actions(space: spaces.Dict, actions: Arrays, acted: np.ndarray) -> Arrays:
    """Return the actions, those of `Box` heads clipped, where they are elements of their space."""
    bounds, checked = ActionBounds(space), dict(actions)
    for head, entry in space.spaces.items():
        values = actions.get(head)
        if values is None or values.shape[1:] != entry.shape:
            continue  # keys and shapes are checked by the columns
        if isinstance(entry, spaces.Box):
            checked[head] = bounds.clip_rows(head, values)
            continue
        cast = values.astype(entry.dtype)
        for row in np.flatnonzero(acted):
            if not (entry.contains(cast[row]) and np.array_equal(cast[row], values[row])):
                raise EnvironmentContractError(
                    f"Step {row} of a rollout for the replay buffer: action head `{head}` is {values[row].tolist()}, "
                    f"expected an element of {entry}. Does the experience come from another environment, or from one "
                    "with other wrappers?"
                )
    return checked
