"""From rollouts in columns to rows of transitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import EnvironmentContractError
from maze.core.rollout.rollout_columns import FinalObservationEntry, RolloutColumns
from maze.train.trainers.common.replay_buffer.transitions import Arrays, TransitionRows


@dataclass
class _Step:
    """An environment step under way, or completed and waiting for what is observed next."""

    observations: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    next_observation: Any = None
    terminated: bool = False
    follows: int = -1
    is_complete: bool = False


class RolloutRows:
    """Turns successive rollouts of the same environments into rows, each of them once.

    Steps of structured environments that a rollout ends in the middle of are finished with the next rollout.

    :param actors: The actors of an environment step, in their order.
    :param observation_spaces_dict: Observation spaces by step key.
    :param action_spaces_dict: Action spaces by step key.
    :param n_envs: Number of environments.
    """

    def __init__(
        self,
        actors: Sequence[ActorID],
        observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        n_envs: int,
    ) -> None:
        self._actors = list(actors)
        self._boxes = {
            actor.step_key: {
                key: (space.low, space.high)
                for key, space in action_spaces_dict[actor.step_key].spaces.items()
                if isinstance(space, spaces.Box) and np.isfinite([space.low, space.high]).any()
            }
            for actor in actors
        }
        self._observation_zeros = [_zeros(observation_spaces_dict[actor.step_key]) for actor in actors]
        self._action_zeros = [_zeros(action_spaces_dict[actor.step_key]) for actor in actors]
        self._steps = [_Step() for _ in range(n_envs)]

    def reset(self) -> None:
        """Drops steps that are under way: the environments are going to be reset."""
        self._steps = [_Step() for _ in self._steps]

    def state(self) -> list[dict[str, Any]]:
        """The steps that are under way, by environment."""
        return [dict(vars(step)) for step in self._steps]

    def load_state(self, state: Sequence[Mapping[str, Any]], new_episodes: Collection[int] = ()) -> None:
        """Continues from a state that :meth:`state` returned.

        :param state: The state.
        :param new_episodes: Environments that begin new episodes instead.
        """
        self._steps = [_Step() if index in new_episodes else _Step(**step) for index, step in enumerate(state)]

    def convert(self, columns: RolloutColumns, first_number: int) -> TransitionRows:
        """The rows of a rollout.

        Actions are clipped to their space, as they were on the way to the environment.

        :param columns: The rollout.
        :param first_number: Number that the first row will get.
        """
        if len(self._actors) == 1 and len(columns.substeps) == 1:
            return self._flat(columns)
        return self._structured(columns, first_number)

    def _flat(self, columns: RolloutColumns) -> TransitionRows:
        actor = self._actors[0]
        substep = columns.substeps[actor.step_key]
        n_rows = columns.n_ticks * columns.n_envs
        following = {key: array[1:] for key, array in substep.observations.items()}
        if columns.final_observations:
            following = {key: array.copy() for key, array in following.items()}
            for entry in columns.final_observations:
                for key, array in following.items():
                    array[entry.tick, entry.env_index] = entry.observation[key]
        return TransitionRows(
            observations=[{key: _by_env(array[:-1], n_rows) for key, array in substep.observations.items()}],
            actions=[{key: self._clip(actor, key, _by_env(array, n_rows)) for key, array in substep.actions.items()}],
            rewards=_by_env(columns.rewards, n_rows)[:, None],
            next_observation={key: _by_env(array, n_rows) for key, array in following.items()},
            terminated=_by_env(columns.terminated, n_rows),
            n_substeps=np.ones(n_rows, np.int64),
        )

    def _structured(self, columns: RolloutColumns, first_number: int) -> TransitionRows:
        finals = {(entry.tick, entry.env_index): entry for entry in columns.final_observations}
        finished: list[_Step] = []
        next_row = dict.fromkeys(columns.substeps, 0)
        for tick in range(columns.n_ticks):
            for step_key, substep in columns.substeps.items():
                row = next_row[step_key]
                if row >= substep.n_rows or substep.ticks[row] != tick:
                    continue
                next_row[step_key] += 1
                for env_index in range(columns.n_envs):
                    if substep.valid is not None and not substep.valid[row, env_index]:
                        continue
                    actor = ActorID(step_key, int(substep.agent_ids[row, env_index]))
                    observation = {key: array[row, env_index].copy() for key, array in substep.observations.items()}
                    action = {
                        key: self._clip(actor, key, np.array(array[row, env_index]))
                        for key, array in substep.actions.items()
                    }
                    self._begin_substep(env_index, actor, observation, finished, first_number)
                    step = self._steps[env_index]
                    step.actions.append(action)
                    step.rewards.append(float(columns.rewards[tick, env_index]))
                    self._end_substep(columns, tick, env_index, finals.get((tick, env_index)), finished, first_number)
        for env_index, actor in enumerate(columns.last_actor_ids):
            self._complete_waiting(env_index, columns, actor, finished, first_number)
        return self._stack(finished)

    def _begin_substep(
        self, env_index: int, actor: ActorID, observation: Any, finished: list[_Step], first_number: int
    ) -> None:
        step = self._steps[env_index]
        if step.is_complete:
            step = self._finish(env_index, observation, finished, first_number)
        position = len(step.observations)
        expected = self._actors[position] if position < len(self._actors) else None
        if actor != expected:
            raise EnvironmentContractError(
                f"Environment {env_index}: sub-step {position} of an environment step was taken by {actor}, expected "
                f"{expected or 'no further sub-step'}. A replay buffer needs steps with the same actors in the same "
                f"order ({self._actors}); train with PPO or A2C instead."
            )
        step.observations.append(observation)

    def _end_substep(
        self,
        columns: RolloutColumns,
        tick: int,
        env_index: int,
        final: FinalObservationEntry | None,
        finished: list[_Step],
        first_number: int,
    ) -> None:
        step = self._steps[env_index]
        if columns.terminated[tick, env_index] or columns.truncated[tick, env_index]:
            step.terminated = bool(columns.terminated[tick, env_index])
            last_observation = None
            if final is not None and len(step.observations) < len(self._actors):
                step.observations.append(final.observation)
            elif final is not None:
                last_observation = final.observation
            self._finish(env_index, last_observation, finished, first_number)
            self._steps[env_index].follows = -1
        else:
            step.is_complete = bool(columns.step_complete[tick, env_index])
            if step.is_complete and len(step.observations) < len(self._actors):
                raise EnvironmentContractError(
                    f"Environment {env_index}: an environment step was complete after {len(step.observations)} of "
                    f"{len(self._actors)} sub-steps. A replay buffer needs steps with the same actors each time."
                )

    def _complete_waiting(
        self, env_index: int, columns: RolloutColumns, actor: ActorID, finished: list[_Step], first_number: int
    ) -> None:
        """The rollout is over: what is observed after it completes the step before."""
        if self._steps[env_index].is_complete:
            row = columns.last_observations[actor.step_key]
            observation = {key: array[env_index].copy() for key, array in row.items()}
            self._finish(env_index, observation, finished, first_number)

    def _finish(self, env_index: int, next_observation: Any, finished: list[_Step], first_number: int) -> _Step:
        step = self._steps[env_index]
        step.next_observation = step.observations[0] if next_observation is None else next_observation
        finished.append(step)
        self._steps[env_index] = following = _Step(follows=first_number + len(finished) - 1)
        return following

    def _stack(self, steps: list[_Step]) -> TransitionRows:
        n_actors = len(self._actors)
        padding = [[0.0] * (n_actors - len(step.rewards)) for step in steps]
        return TransitionRows(
            observations=[
                _stack([_at(step.observations, position) for step in steps], zeros)
                for position, zeros in enumerate(self._observation_zeros)
            ],
            actions=[
                _stack([_at(step.actions, position) for step in steps], zeros)
                for position, zeros in enumerate(self._action_zeros)
            ],
            rewards=np.array(
                [step.rewards + missing for step, missing in zip(steps, padding, strict=True)], np.float32
            ).reshape(len(steps), n_actors),
            next_observation=_stack([step.next_observation for step in steps], self._observation_zeros[0]),
            terminated=np.array([step.terminated for step in steps], np.bool_),
            n_substeps=np.array([len(step.rewards) for step in steps], np.int64),
            follows=np.array([step.follows for step in steps], np.int64),
        )

    def _clip(self, actor: ActorID, key: str, action: np.ndarray) -> np.ndarray:
        bounds = self._boxes[actor.step_key].get(key)
        return action if bounds is None else np.clip(action, *bounds)


def _by_env(array: np.ndarray, n_rows: int) -> np.ndarray:
    """From ``[n_ticks, n_envs, ...]`` to rows, those of one environment after another."""
    return np.swapaxes(array, 0, 1).reshape(n_rows, *array.shape[2:])


def _at(values: list[Any], position: int) -> Any:
    return values[position] if position < len(values) else None


def _zeros(space: spaces.Dict) -> Arrays:
    return {key: np.zeros(sub.shape or (), sub.dtype) for key, sub in space.spaces.items()}


def _stack(values: list[Any], zeros: Arrays) -> Arrays:
    return {
        key: np.stack([zero if value is None else value[key] for value in values])
        if values
        else np.zeros((0, *zero.shape), zero.dtype)
        for key, zero in zeros.items()
    }
