"""Steps environments one after another and writes the results into arrays.

All vector environments of single environments use it, in the training process and in worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from maze.core.annotations import override
from maze.core.env.base_env import is_truncated
from maze.core.env.core_env import CoreEnv
from maze.core.env.faults import USER_CODE_ERRORS, Place, closed, fail
from maze.core.env.space_arrays import Cast, action_column, array_specs, check_observation, split_rows
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import EnvironmentContractError
from maze.core.log_stats.log_stats import LogStats, LogStatsConsumer, LogStatsLevel
from maze.core.rollout.batched_acting import logits_shapes_of
from maze.core.rollout.rollout_columns import RolloutColumns, substeps_per_step
from maze.core.trajectory_recording.writers.trajectory_writer_registry import TrajectoryWriterRegistry
from maze.core.utils.config_utils import count_instances
from maze.core.wrappers.maze_gym_env_wrapper import GymCoreEnv
from maze.core.wrappers.reward_wrappers import (
    RunningStatistics,
    load_statistics_states,
    statistics_states,
    wrappers_with_statistics,
)
from maze.train.parallelization.vector_env.replay_log import (
    EpisodeState,
    ReplayLog,
    derived_seed,
    digest_of,
    replayed_actions,
)
from maze.train.parallelization.vector_env.structured_vector_env import FinalObservation
from maze.train.parallelization.vector_env.vector_env_utils import with_stats

if TYPE_CHECKING:
    from maze.core.env.faults import Seeding
    from maze.core.env.maze_env import MazeEnv

ndarray = np.ndarray
Out = Mapping[StepKeyType, Mapping[str, np.ndarray]]

_FLAT_RULES = (CoreEnv.is_step_complete, GymCoreEnv.is_step_complete)
"""With a single actor, these methods complete a step with every action; overriding methods are called after each."""

N_CHECKED_STEPS = 8
"""Keys and shapes of observations are checked in the first steps only; later the check would cost more than the step.
Their dtypes are checked always (:class:`~maze.core.env.space_arrays.Cast`)."""


class EnvBatch:
    """Environments of the same spaces, stepped one after another. :meth:`build` makes them.

    :param first_index: Index of the first of these environments among all of the vector environment.
    """

    def __init__(self, first_index: int = 0) -> None:
        self.envs: list[Any] = []
        self.first_index = first_index
        self.current_index = 0
        """Index, within this batch, of the environment that raised an exception."""
        self.actor_ids: list[ActorID] = []
        self.actor_rewards: list[np.ndarray | None] | None = None
        self.final_observations: dict[int, FinalObservation] = {}
        self.finished_episodes: dict[int, LogStats] = {}
        """Index among all environments -> statistics of the episode that ended, or was reset, in the last call."""
        self.keep_terminal_observations = False
        self._n_checks_left = N_CHECKED_STEPS
        self._is_any_done = False
        self._is_restored = False
        self._is_closed = False

    def build(self, env_factories: Sequence[Callable[[], MazeEnv[Any]]]) -> None:
        """Make the environments.

        :param env_factories: Each makes one environment.
        :raises Exception: The error of a factory, with the name of the environment.
        """
        for index, factory in enumerate(env_factories):
            self.current_index = index
            try:
                env = with_stats(factory())
            except USER_CODE_ERRORS as error:
                fail(error, Place(self._name(index)), "the factory")
            env.get_stats(LogStatsLevel.EPISODE).register_consumer(_EpisodeReport(self, self.first_index + index))
            self.envs.append(env)
        first = self.envs[0]
        self.observation_spaces_dict = dict(first.observation_spaces_dict)
        self.action_spaces_dict = dict(first.action_spaces_dict)
        self.agent_counts_dict = dict(first.agent_counts_dict)
        self.n_instances = count_instances(first)
        for index, env in enumerate(self.envs):
            check_same_spaces(self, env, self.first_index + index)
        self._observation_specs = array_specs(self.observation_spaces_dict, "observation")
        self._casts = {
            step_key: {key: Cast(dtype, f"observation `{key}`") for key, (_, dtype) in specs.items()}
            for step_key, specs in self._observation_specs.items()
        }
        n_envs = len(self.envs)
        self._action_columns = {
            step_key: [(key, (n_envs, *shape), dtype) for key, (shape, dtype) in specs.items()]
            for step_key, specs in array_specs(self.action_spaces_dict, "action").items()
        }
        self.is_flat = all(is_flat_env(env) for env in self.envs)
        self._steps = [env.step for env in self.envs]
        self._contexts = [env.context for env in self.envs]
        self._learning: list[list[RunningStatistics]] = [list(wrappers_with_statistics(env)) for env in self.envs]
        self._last: list[Any] = [None] * len(self.envs)
        self._log = ReplayLog(len(self.envs), next(iter(self.action_spaces_dict)))

    def attach(
        self, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, step_complete: np.ndarray
    ) -> None:
        """Set the arrays `[n_envs]` that receive the results of steps."""
        self.rewards, self.terminated, self.truncated, self.step_complete = (
            rewards,
            terminated,
            truncated,
            step_complete,
        )
        step_complete[:] = True

    def seed(self, seeds: Sequence[Any]) -> None:
        """Seed the environments.

        Further seeds are derived from each seed, and the environment is seeded with them from time to time, so that its
        state can be restored by replaying few steps (:meth:`states`).

        :param seeds: One seed per environment.
        :raises Exception: The error of an environment, with its name and its seed.
        """
        for index, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
            self.current_index = index
            try:
                env.seed(seed)
            except USER_CODE_ERRORS as error:
                fail(error, Place(self._name(index)), f"seed({seed!r})")
        self._log.set_seeds(seeds)
        self._is_restored = False

    def reset(self, out: Out) -> None:
        """Reset all environments and write their first observations; restored environments keep their states.

        :param out: Arrays by sub-step key and observation key.
        :raises Exception: The error of an environment, with its name.
        """
        self._clear_flags()
        self.rewards[:] = 0.0
        self.step_complete[:] = True
        self.actor_ids = []
        for index, env in enumerate(self.envs):
            self.current_index = index
            if not self._is_restored:
                self._last[index] = self._first_observation(index)
            try:
                self.actor_ids.append(env.actor_id())
            except USER_CODE_ERRORS as error:
                self._fail(error, "actor_id", index)
            self._write_checked(index, self._last[index], out)
        self._is_restored = False

    def step(self, actions: Mapping[Any, Any], out: Out) -> list[dict[Any, Any]]:
        """Step all environments and write their next observations.

        :param actions: See :meth:`StructuredVectorEnv.step`.
        :param out: Arrays by sub-step key and observation key.
        :return: One info per environment.
        :raises EnvironmentContractError: The environments were never reset.
        """
        if not self.actor_ids:
            raise EnvironmentContractError("`reset` has to be called before the first `step`.")
        if self._is_any_done or self.finished_episodes:  # a reset may have interrupted episodes
            self._clear_flags()
        if self.is_flat and not self._n_checks_left:
            return self._step_flat(actions, out)
        return self._step_structured(actions, out)

    def keep_terminal(self, is_kept: bool) -> None:
        """Set whether `final_observations` also contains the last observations of terminated episodes."""
        self.keep_terminal_observations = is_kept

    def of_each(self, method: str) -> list[Any]:
        """Call a method of each environment and return the results."""
        return [getattr(env, method)() for env in self.envs]

    def seeding_at(self, env_index: int, ticks_ago: int) -> Seeding | None:
        """Return the seed of a recent tick, see :meth:`ReplayLog.seeding_at`.

        :param env_index: Index of the environment among all.
        :param ticks_ago: 1: the latest tick, 0: the next one.
        :return: `None`: unknown, or an environment of another batch.
        """
        index = env_index - self.first_index
        return self._log.seeding_at(index, ticks_ago) if 0 <= index < len(self.envs) else None

    def states(self, with_running: bool = True) -> list[EpisodeState]:
        """Return the state of each environment and the learned statistics of its wrappers, for :meth:`load_states`.

        :param with_running: Whether to include the running episodes; without them, the next episodes are those that
            would follow a reset.
        """
        states = []
        for index, env in enumerate(self.envs):
            state = self._log.state(index)
            if "problem" in state or not with_running or not (self.actor_ids or self._is_restored):
                state = {key: state[key] for key in ("seed", "n_seedings", "problem") if key in state}
            else:
                state["digest"] = self._digest(index, env)
            states.append({**state, "wrappers": statistics_states(env)})
        return states

    def load_states(self, states: Sequence[EpisodeState]) -> dict[int, str]:
        """Restore the states of the environments; the next reset keeps them.

        :param states: States from :meth:`states`.
        :return: Index among all environments -> reason why this environment starts a new episode instead.
        """
        problems: dict[int, str] = {}
        self.actor_ids = []
        self._log.forget_ticks()
        is_any_running = any("digest" in state for state in states)
        for index, state in enumerate(states):
            self.current_index = index
            problem = state.get("problem")
            if "digest" in state:
                problem = self._replay(index, state)
                if problem is not None:
                    self.envs[index].discard_episode()  # the failed replay must not count as an episode
            elif "seed" in state:
                self._log.adopt_seed(index, state)
                if state["n_seedings"] == 0:
                    self.envs[index].seed(state["seed"])
            if problem is not None:
                problems[self.first_index + index] = problem
            if is_any_running and (problem is not None or "digest" not in state):
                self._last[index] = self._first_observation(index)
        self._is_restored = is_any_running
        for env, state in zip(self.envs, states, strict=True):
            if state["wrappers"]:
                load_statistics_states(env, state["wrappers"])
        return problems

    def close(self) -> None:
        """Close all environments; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for index, env in enumerate(self.envs):
            closed(env.close, self._name(index))

    def _clear_flags(self) -> None:
        self.terminated[:] = False
        self.truncated[:] = False
        self.final_observations = {}
        self.finished_episodes = {}
        self._is_any_done = False

    def _step_flat(self, actions: Mapping[Any, Any], out: Out) -> list[dict[Any, Any]]:
        step_key = self.actor_ids[0].step_key
        casts = self._casts[step_key]
        columns = [(key, column, column.dtype, casts[key]) for key, column in out[step_key].items()]
        rewards, last = self.rewards, self._last
        taken = self._columns(step_key, actions_at(step_key, actions))
        self._log.append(taken)
        infos: list[dict[Any, Any]] = []
        index = 0
        try:
            for step, action in zip(self._steps, split_rows(taken), strict=True):
                observation, reward, done, info = step(action)
                rewards[index] = reward
                if done:
                    observation = self._finish_episode(index, observation, info)
                last[index] = observation
                for key, column, dtype, cast in columns:
                    value = observation[key]  # mostly an array of the right dtype: a call shows in the step's time
                    column[index] = value if value.__class__ is ndarray and value.dtype is dtype else cast(value)
                infos.append(info)
                index += 1
        except USER_CODE_ERRORS as error:
            self._fail(error, "step", index)
        finally:
            self.current_index = index
        return infos

    def _step_structured(self, actions: Mapping[Any, Any], out: Out) -> list[dict[Any, Any]]:
        step_keys = {actor.step_key for actor in self.actor_ids}
        is_common = len(step_keys) == 1
        taken = {key: self._columns(key, actions_at(key, actions, is_common)) for key in step_keys}
        self._log.append(([actor.step_key for actor in self.actor_ids], taken))
        by_key = {step_key: split_rows(columns) for step_key, columns in taken.items()}
        self.actor_rewards = None
        infos = []
        for index, env in enumerate(self.envs):
            self.current_index = index
            try:
                observation, reward, done, info = self._steps[index](by_key[self.actor_ids[index].step_key][index])
                self.rewards[index] = reward
                is_complete = bool(done or self._contexts[index].is_step_complete)
                self.step_complete[index] = is_complete
                if is_complete and (actor_rewards := env.get_actor_rewards()) is not None:
                    self.actor_rewards = self.actor_rewards or [None] * len(self.envs)
                    self.actor_rewards[index] = np.array(actor_rewards)
                if done:
                    observation = self._finish_episode(index, observation, info)
                self._last[index] = observation
                self.actor_ids[index] = env.actor_id()
                if self._n_checks_left:
                    self._write_checked(index, observation, out)
                else:
                    self._write(index, observation, out)
            except USER_CODE_ERRORS as error:
                self._fail(error, "step", index)
            infos.append(info)
        self._n_checks_left = max(0, self._n_checks_left - 1)
        return infos

    def _columns(self, step_key: StepKeyType, actions: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return copies of the actions: the replay log and environments keep them."""
        return {
            key: action_column(actions, step_key, key, shape, dtype)
            for key, shape, dtype in self._action_columns[step_key]
        }

    def _fail(self, error: BaseException, call: str, index: int) -> NoReturn:
        """Raise the error that names a failed environment, or one whose observation does not fit its space."""
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # not raised by the environment
            try:
                check_observation(
                    self._last[index], self.actor_ids[index], self._observation_specs, self.first_index + index
                )
            except EnvironmentContractError as misfit:
                error = misfit
        seeding = self._log.seeding_at(index, 1 if call == "step" else 0)
        fail(error, Place.of(self.envs[index], self._name(index), seeding), call)

    def _name(self, index: int) -> str:
        return f"environment {self.first_index + index}"

    def _finish_episode(self, index: int, observation: Any, info: dict[Any, Any]) -> Any:
        """Record the end of an episode and start the next one.

        :return: First observation of the next episode.
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
            last = {key: np.array(cast(observation[key])) for key, cast in self._casts[actor.step_key].items()}
            self.final_observations[self.first_index + index] = FinalObservation(actor, last)
        if self._log.is_seed_due(index):
            return self._first_observation(index)
        try:
            return env.reset()
        except USER_CODE_ERRORS as error:
            self._fail(error, "reset", index)

    def _first_observation(self, index: int) -> Any:
        """Start an episode with the next derived seed, if the environment was seeded."""
        env = self.envs[index]
        try:
            env.publish_episode()  # before seeding, since its statistics belong to the finished episode
            self._seed_next(index)
            return env.reset()
        except USER_CODE_ERRORS as error:
            self._fail(error, "reset", index)

    def _seed_next(self, index: int) -> None:
        log = self._log
        is_first = log.n_seedings[index] == 0
        seed = log.next_seed(index)
        if seed is None:
            return
        log.statistics[index] = [wrapper.statistics_state() for wrapper in self._learning[index]]
        if not is_first:  # the first seed was set by `seed`
            self._apply_seed(index, seed)

    def _apply_seed(self, index: int, seed: int) -> None:
        """Seed an environment; the ids of its episodes are unique for the seed."""
        self.envs[index].seed(seed)
        number = self._log.n_seedings[index]
        if number > 1:
            self._contexts[index].set_seed(f"{self._log.seeds[index]}/{number}")

    def _replay(self, index: int, state: EpisodeState) -> str | None:
        """Restore an environment by replaying the actions of a state.

        :return: The problem; `None`: the environment is restored.
        """
        env = self.envs[index]
        log = self._log
        log.adopt_seed(index, state)
        now = statistics_states(env)
        try:
            load_statistics_states(env, state["statistics"])
            self._apply_seed(index, derived_seed(state["seed"], state["n_seedings"] - 1))
            observation = self._reset_for_replay(env)
            for position, (step_key, action) in enumerate(replayed_actions(state)):
                actor = env.actor_id()
                if actor.step_key != step_key:
                    return f"in step {position} of the replay {actor} acts; expected sub-step {step_key!r}"
                observation, _, done, _ = env.step(action)
                if done:
                    observation = self._reset_for_replay(env)
        except Exception as error:  # a non-deterministic environment may raise anything
            load_statistics_states(env, now)
            return f"replaying its actions raised {type(error).__name__}: {error}"
        self._last[index] = observation
        if self._digest(index, env) != state["digest"]:
            load_statistics_states(env, now)
            return "its replay ends with another observation: the environment is not deterministic under its seed"
        log.restore(index, state)
        return None

    @staticmethod
    def _reset_for_replay(env: Any) -> Any:
        """Reset an environment without counting and recording its episode, which the interrupted run did."""
        env.discard_episode()
        writers = TrajectoryWriterRegistry.writers[:]
        TrajectoryWriterRegistry.writers.clear()
        try:
            return env.reset()
        finally:
            TrajectoryWriterRegistry.writers.extend(writers)

    def _digest(self, index: int, env: Any) -> str:
        actor = env.actor_id()
        specs = self._observation_specs[actor.step_key]
        return digest_of({key: np.asarray(self._last[index][key], dtype) for key, (_, dtype) in specs.items()})

    def _write_checked(self, index: int, observation: Any, out: Out) -> None:
        check_observation(observation, self.actor_ids[index], self._observation_specs, self.first_index + index)
        self._write(index, observation, out)

    def _write(self, index: int, observation: Any, out: Out) -> None:
        step_key = self.actor_ids[index].step_key
        casts = self._casts[step_key]
        for key, column in out[step_key].items():
            column[index] = casts[key](observation[key])


class _EpisodeReport(LogStatsConsumer):
    """Receives the episode statistics of one environment.

    :param batch: The batch of the environment.
    :param env_index: Index of the environment among all.
    """

    def __init__(self, batch: EnvBatch, env_index: int) -> None:
        self._batch = batch
        self._env_index = env_index

    @override(LogStatsConsumer)
    def receive(self, stat: LogStats) -> None:
        self._batch.finished_episodes[self._env_index] = stat


class ActorSpaces(NamedTuple):
    """Spaces, agent counts and number of given instances, the same for all environments of a run."""

    observation_spaces_dict: dict[StepKeyType, Any]
    action_spaces_dict: dict[StepKeyType, Any]
    agent_counts_dict: dict[StepKeyType, int]
    n_instances: int = 0

    @classmethod
    def of(cls, env: Any) -> ActorSpaces:
        """Return the spaces of an environment or vector environment."""
        spaces = dict(env.observation_spaces_dict), dict(env.action_spaces_dict), dict(env.agent_counts_dict)
        return cls(*spaces, count_instances(env))

    def columns(self, n_envs: int, n_steps: int, policy: Any) -> RolloutColumns:
        """Return columns for rollouts with the logits of a policy."""
        return RolloutColumns(
            self.observation_spaces_dict,
            self.action_spaces_dict,
            n_envs,
            n_steps * substeps_per_step(self.agent_counts_dict),
            logits_shapes_of(policy, self.action_spaces_dict),
        )


class CheckedEnvFactory:
    """Environment factory with named errors: the environment cannot be made, or has unexpected spaces.

    :param env_factory: Makes one environment.
    :param spaces: Object with the expected spaces as attributes, such as an environment.
    """

    def __init__(self, env_factory: Callable[[], Any], spaces: Any) -> None:
        self.env_factory = env_factory
        self.spaces = spaces

    def __call__(self) -> Any:
        try:
            env = self.env_factory()
        except USER_CODE_ERRORS as error:
            fail(error, Place("environment"), "the factory")
        name, expected, found = other_spaces(self.spaces, env)
        if name:
            raise EnvironmentContractError(
                f"environment: all environments of a run need the same `{name}`. Expected {expected}, as in the first "
                f"environment, found {found}."
            )
        return env


def check_same_spaces(reference: Any, env: Any, env_index: int) -> None:
    """Raise an error if the spaces of an environment differ from those of the first one."""
    name, expected, found = other_spaces(reference, env)
    if name:
        raise EnvironmentContractError(
            f"environment {env_index}: all environments of a vector environment need the same `{name}`. "
            f"Expected {expected}, as in environment 0, found {found}."
        )


def other_spaces(reference: Any, env: Any) -> tuple[str, Any, Any]:
    """Return the name of the attribute in which two environments differ, and both values; an empty name: none."""
    for name in ("observation_spaces_dict", "action_spaces_dict", "agent_counts_dict"):
        expected, found = getattr(reference, name), dict(getattr(env, name))
        if found != expected:
            return name, expected, found
    return "", None, None


def actions_at(step_key: StepKeyType, actions: Mapping[Any, Any], is_common: bool = True) -> Mapping[str, Any]:
    """Return the actions of a sub-step.

    :param step_key: The sub-step.
    :param actions: Actions by sub-step key; directly by action key if all environments are at the same sub-step.
    :param is_common: Whether all environments are at the same sub-step.
    :raises EnvironmentContractError: There are no actions for the sub-step.
    """
    nested = actions.get(step_key)
    if isinstance(nested, Mapping):
        return nested
    if is_common:
        return actions
    raise EnvironmentContractError(
        f"The environments are at different sub-steps, one of them at {step_key!r}; expected actions by sub-step key, "
        f"found the keys {list(actions)}."
    )


def is_flat_env(env: Any) -> bool:
    """Return whether there is a single actor, each of whose actions completes an environment step."""
    core_env = getattr(env, "core_env", None)
    return (
        len(env.observation_spaces_dict) == 1
        and list(env.agent_counts_dict.values()) == [1]
        and core_env is not None
        and type(core_env).is_step_complete in _FLAT_RULES
    )
