"""Stepping environments one after another and writing what comes of it into arrays.

The one implementation of the semantics of vector environments: used in process and inside worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.env.core_env import CoreEnv
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.env.truncation import is_truncated
from maze.core.errors import EnvironmentContractError
from maze.core.log_stats.log_stats import LogStatsConsumer, LogStatsLevel
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymCoreEnv
from maze.train.parallelization.vector_env.space_arrays import array_specs, check_observation
from maze.train.parallelization.vector_env.structured_vector_env import FinalObservation
from maze.train.parallelization.vector_env.vector_env_utils import disable_epoch_level_stats

if TYPE_CHECKING:
    from maze.core.env.maze_env import MazeEnv

Out = Mapping[StepKeyType, Mapping[str, np.ndarray]]

_FLAT_RULES = (CoreEnv.is_step_complete, GymCoreEnv.is_step_complete)
"""With a single actor these complete a step with every action; what overrides them is asked after each."""

N_CHECKED_STEPS = 8
"""Observations are held against their spaces in the first steps only; later the check would cost more than the step."""


class EnvBatch:
    """Environments of the same spaces, stepped one after another. :meth:`build` makes them.

    :param first_index: Index of the first of these environments among all of the vector environment.
    """

    def __init__(self, first_index: int = 0) -> None:
        self.envs: list[Any] = []
        self.first_index = first_index
        self.current_index = 0
        """The environment at work when an exception left this object (counted within this batch)."""
        self.actor_ids: list[ActorID] = []
        self.actor_rewards: list[np.ndarray | None] | None = None
        self.final_observations: dict[int, FinalObservation] = {}
        self.keep_terminal_observations = False
        self._n_checks_left = N_CHECKED_STEPS
        self._is_any_done = False

    def build(self, env_factories: Sequence[Callable[[], MazeEnv[Any]]], stats_consumer: LogStatsConsumer) -> None:
        """Make the environments.

        :param env_factories: Each makes one environment.
        :param stats_consumer: Receives the statistics of finished episodes.
        """
        for index, factory in enumerate(env_factories):
            self.current_index = index
            self.envs.append(_with_stats(factory(), stats_consumer))
        first = self.envs[0]
        self.observation_spaces_dict = dict(first.observation_spaces_dict)
        self.action_spaces_dict = dict(first.action_spaces_dict)
        self.agent_counts_dict = dict(first.agent_counts_dict)
        for index, env in enumerate(self.envs):
            check_same_spaces(self, env, self.first_index + index)
        self._observation_specs = array_specs(self.observation_spaces_dict, "observation")
        self._action_specs = array_specs(self.action_spaces_dict, "action")
        self.is_flat = all(is_flat_env(env) for env in self.envs)
        self._steps = [env.step for env in self.envs]
        self._contexts = [env.context for env in self.envs]

    def attach(
        self, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, step_complete: np.ndarray
    ) -> None:
        """Write the results of coming steps into these arrays `[n_envs]`."""
        self.rewards, self.terminated, self.truncated, self.step_complete = (
            rewards,
            terminated,
            truncated,
            step_complete,
        )
        step_complete[:] = True

    def seed(self, seeds: Sequence[Any]) -> None:
        """Seed the environments, one seed each."""
        for env, seed in zip(self.envs, seeds, strict=True):
            env.seed(seed)

    def reset(self, out: Out) -> None:
        """Reset all environments and write their first observations."""
        self._clear_flags()
        self.rewards[:] = 0.0
        self.step_complete[:] = True
        self.actor_ids = []
        for index, env in enumerate(self.envs):
            self.current_index = index
            observation = env.reset()
            self.actor_ids.append(env.actor_id())
            self._write_checked(index, observation, out)

    def step(self, actions: Mapping[Any, Any], out: Out) -> list[dict[Any, Any]]:
        """Step all environments and write what they observe next.

        :param actions: As in :meth:`StructuredVectorEnv.step`; may be whole arrays of which only the rows count.
        :param out: Arrays by sub-step key and observation key.
        :return: One info per environment.
        """
        if not self.actor_ids:
            raise EnvironmentContractError("`reset` has to be called before the first `step`.")
        if self._is_any_done:
            self._clear_flags()
        if self.is_flat and not self._n_checks_left:
            return self._step_flat(actions, out)
        return self._step_structured(actions, out)

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()

    def _clear_flags(self) -> None:
        self.terminated[:] = False
        self.truncated[:] = False
        self.final_observations = {}
        self._is_any_done = False

    def _step_flat(self, actions: Mapping[Any, Any], out: Out) -> list[dict[Any, Any]]:
        step_key = self.actor_ids[0].step_key
        columns = list(out[step_key].items())
        rewards = self.rewards
        infos: list[dict[Any, Any]] = []
        index = 0
        try:
            for step, action in zip(self._steps, self._split(step_key, _of_step(step_key, actions)), strict=True):
                observation, reward, done, info = step(action)
                rewards[index] = reward
                if done:
                    observation = self._finish_episode(index, observation, info)
                for key, column in columns:
                    column[index] = observation[key]
                infos.append(info)
                index += 1
        finally:
            self.current_index = index
        return infos

    def _step_structured(self, actions: Mapping[Any, Any], out: Out) -> list[dict[Any, Any]]:
        step_keys = {actor.step_key for actor in self.actor_ids}
        if len(step_keys) == 1:
            step_key = next(iter(step_keys))
            by_key = {step_key: self._split(step_key, _of_step(step_key, actions))}
        else:
            by_key = {step_key: self._split(step_key, self._actions_at(step_key, actions)) for step_key in step_keys}
        self.actor_rewards = None
        infos = []
        for index, env in enumerate(self.envs):
            self.current_index = index
            observation, reward, done, info = self._steps[index](by_key[self.actor_ids[index].step_key][index])
            self.rewards[index] = reward
            is_complete = bool(done or self._contexts[index].is_step_complete)
            self.step_complete[index] = is_complete
            if is_complete and (actor_rewards := env.get_actor_rewards()) is not None:
                self.actor_rewards = self.actor_rewards or [None] * len(self.envs)
                self.actor_rewards[index] = np.array(actor_rewards)
            if done:
                observation = self._finish_episode(index, observation, info)
            self.actor_ids[index] = actor = env.actor_id()
            if self._n_checks_left:
                self._write_checked(index, observation, out)
            else:
                for key, column in out[actor.step_key].items():
                    column[index] = observation[key]
            infos.append(info)
        self._n_checks_left = max(0, self._n_checks_left - 1)
        return infos

    def _actions_at(self, step_key: StepKeyType, actions: Mapping[Any, Any]) -> Mapping[str, Any]:
        if step_key not in actions:
            raise EnvironmentContractError(
                f"Environments stand at different sub-steps, one of them at {step_key!r}; expected actions by sub-step "
                f"key, found the keys {list(actions)}."
            )
        of_step: Mapping[str, Any] = actions[step_key]
        return of_step

    def _split(self, step_key: StepKeyType, actions: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One action dictionary per environment."""
        specs = self._action_specs[step_key]
        if len(specs) == 1:
            (key, (shape, dtype)) = next(iter(specs.items()))
            column = np.asarray(actions[key], dtype)
            # Rows of a copy: an environment may keep its action longer than the caller its array.
            return [{key: action} for action in (column.copy() if shape else column)]
        columns = []
        for key, (shape, dtype) in specs.items():
            column = np.asarray(actions[key], dtype)
            columns.append(column.copy() if shape else column)
        return [dict(zip(specs, action, strict=True)) for action in zip(*columns, strict=True)]

    def _finish_episode(self, index: int, observation: Any, info: dict[Any, Any]) -> Any:
        """Note how the episode ended and start the next one.

        :return: Its first observation.
        """
        env = self.envs[index]
        self._is_any_done = True
        truncated = is_truncated(True, info)
        if truncated:
            self.truncated[index] = True
        else:
            self.terminated[index] = True
        if truncated or self.keep_terminal_observations:
            actor = env.actor_id()
            if self._n_checks_left:
                check_observation(observation, actor, self._observation_specs, self.first_index + index)
            specs = self._observation_specs[actor.step_key]
            last = {key: np.array(observation[key], dtype) for key, (_, dtype) in specs.items()}
            self.final_observations[self.first_index + index] = FinalObservation(actor, last)
        return env.reset()

    def _write_checked(self, index: int, observation: Any, out: Out) -> None:
        actor = self.actor_ids[index]
        check_observation(observation, actor, self._observation_specs, self.first_index + index)
        for key, column in out[actor.step_key].items():
            column[index] = observation[key]


def check_same_spaces(reference: Any, env: Any, env_index: int) -> None:
    """Raise an error if an environment has other spaces than the first one."""
    for name in ("observation_spaces_dict", "action_spaces_dict", "agent_counts_dict"):
        expected, found = getattr(reference, name), dict(getattr(env, name))
        if found != expected:
            raise EnvironmentContractError(
                f"environment {env_index}: all environments of a vector environment need the same `{name}`. "
                f"Environment 0 has {expected}, this one {found}."
            )


def _of_step(step_key: StepKeyType, actions: Mapping[Any, Any]) -> Mapping[str, Any]:
    """The actions of a sub-step at which all environments stand: given as they are, or by sub-step key."""
    nested = actions.get(step_key)
    return nested if isinstance(nested, Mapping) else actions


def _with_stats(env: Any, consumer: LogStatsConsumer) -> Any:
    wrapped = env if isinstance(env, LogStatsWrapper) else LogStatsWrapper.wrap(env)
    disable_epoch_level_stats(wrapped)
    wrapped.get_stats(LogStatsLevel.EPISODE).register_consumer(consumer)
    return wrapped


def is_flat_env(env: Any) -> bool:
    """Whether always the same actor acts and each of its actions completes an environment step."""
    core_env = getattr(env, "core_env", None)
    return (
        len(env.observation_spaces_dict) == 1
        and list(env.agent_counts_dict.values()) == [1]
        and core_env is not None
        and type(core_env).is_step_complete in _FLAT_RULES
    )
