"""Vector environment that steps its environments one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from maze.core.annotations import override
from maze.core.env.base_env import is_truncated
from maze.core.env.faults import USER_CODE_ERRORS, Place, Seeding, closed, fail, made_by
from maze.core.env.maze_env import MazeEnv
from maze.core.env.space_values import Cast, action_column, array_specs, check_observation, split_rows
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import EnvironmentContractError
from maze.core.log_stats.log_stats import LogStats, LogStatsConsumer, LogStatsLevel
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import count_instances
from maze.core.wrappers.return_normalization_reward_wrapper import (
    ReturnNormalizationRewardWrapper,
    load_statistics_states,
    statistics_states,
    wrappers_with_statistics,
)
from maze.train.parallelization.vector_env.structured_vector_env import (
    EpisodeState,
    FinalObservation,
    Out,
    ReplayLog,
    StructuredVectorEnv,
    actions_at,
    checked_seeds,
    derived_seed,
    replayed_actions,
    states_for,
)
from maze.train.parallelization.vector_env.vector_env_utils import check_same_spaces, is_flat_env, with_stats

if TYPE_CHECKING:
    from maze.train.trainers.common.model_selection.model_selection_base import StatisticSource

ndarray = np.ndarray
N_CHECKED_STEPS = 8
"""Keys and shapes of observations are checked in the first steps only; later the check would cost more than the step.
Their dtypes are checked always (:class:`~maze.core.env.space_values.Cast`)."""


class _FinishedEpisodes(LogStatsConsumer):
    """Receive the statistics of an environment's episodes, which a vector environment passes on after its step."""

    def __init__(self, vector_env: SequentialVectorEnv, index: int) -> None:
        self._vector_env, self._index = vector_env, index

    @override(LogStatsConsumer)
    def receive(self, stat: LogStats) -> None:
        self._vector_env.finished_episodes[self._index] = stat  # type: ignore[index]  # a dictionary here


class SequentialVectorEnv(StructuredVectorEnv):
    """Step its environments one after another in this process: the fastest choice for cheap environments.

    :param env_factories: Each makes one environment. Environments without statistics are wrapped.
    :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); None: they are not logged.
    :param first_index: Index of the first environment, for messages, in a worker process with a part of all
        environments.
    :raises ValueError: There is no environment.
    """

    def __init__(
        self,
        env_factories: Sequence[Callable[[], MazeEnv[Any]]],
        logging_prefix: str | None = None,
        first_index: int = 0,
    ) -> None:
        if not env_factories:
            raise ValueError("A vector environment needs at least one environment factory.")
        self._first_index = first_index
        self._is_closed = False
        self.envs: list[Any] = []
        try:
            self._build(env_factories)
        except BaseException:
            self.close()
            raise
        first = self.envs[0]
        spaces = first.action_spaces_dict, first.observation_spaces_dict, first.agent_counts_dict
        super().__init__(len(self.envs), *spaces, logging_prefix)
        self.n_instances = count_instances(first)
        self.is_flat = all(is_flat_env(env) for env in self.envs)
        self._actor_ids: list[ActorID] = []
        self._n_checks_left = N_CHECKED_STEPS
        self._is_any_done = self._is_restored = False
        # Of the environments whose episode has just ended: whether the last actor was done, before the reset.
        self._actors_done: dict[int, bool] = {}
        # Whether an environment has reported per-actor rewards in the checked steps.
        self._has_actor_rewards = False
        self._observation_specs = array_specs(self.observation_spaces_dict, "observation")
        self._casts = {
            step_key: {key: Cast(dtype, f"observation `{key}`") for key, (_, dtype) in specs.items()}
            for step_key, specs in self._observation_specs.items()
        }
        self._action_columns = {
            step_key: [(key, (self.n_envs, *shape), dtype) for key, (shape, dtype) in specs.items()]
            for step_key, specs in array_specs(self.action_spaces_dict, "action").items()
        }
        self._steps = [env.step for env in self.envs]
        self._are_actors_done = [env.is_actor_done for env in self.envs]
        self._contexts = [env.context for env in self.envs]
        self._learning: list[list[ReturnNormalizationRewardWrapper]] = [
            list(wrappers_with_statistics(env)) for env in self.envs
        ]
        self._last: list[Any] = [None] * self.n_envs
        self._log = ReplayLog(self.n_envs, next(iter(self.action_spaces_dict)))

    def _build(self, env_factories: Sequence[Callable[[], MazeEnv[Any]]]) -> None:
        for index, factory in enumerate(env_factories):
            env = with_stats(made_by(factory, self._name(index)))
            env.get_stats(LogStatsLevel.EPISODE).register_consumer(_FinishedEpisodes(self, index))
            self.envs.append(env)
            check_same_spaces(self.envs[0], env, self._name(index))

    @override(StructuredVectorEnv)
    def _advance(self, actions: Any, out: Out) -> tuple[np.ndarray, list[dict[Any, Any]]]:
        if not self._actor_ids:
            raise EnvironmentContractError("`reset` has to be called before the first `step`.")
        if self._is_any_done or self.finished_episodes:  # a reset may have interrupted episodes
            self._clear_flags()
        is_flat = self.is_flat and not self._n_checks_left and not self._has_actor_rewards
        infos = self._step_flat(actions, out) if is_flat else self._step_structured(actions, out)
        if self.constrained:
            for env, is_complete, values in zip(self.envs, self.step_complete, self.constrained_values, strict=True):
                stats = env.get_stats(LogStatsLevel.STEP).last_stats if is_complete else {}
                values[:] = [0.0 if source.at_end else source.of(stats) for source in self.constrained]
            self._record_ended()
        if self.finished_episodes:
            self._count_episodes(self.finished_episodes)
        return self.terminated | self.truncated, infos

    @override(StructuredVectorEnv)
    def _begin(self, out: Out) -> None:
        self._clear_flags()
        self.rewards[:] = 0.0
        self.step_complete[:] = True
        self.actor_rewards = None
        self._actor_ids = []
        for index, env in enumerate(self.envs):
            if not self._is_restored:
                self._last[index] = self._first_observation(index)
            try:
                self._actor_ids.append(env.actor_id())
            except USER_CODE_ERRORS as error:
                self._fail(error, "actor_id", index)
            self._write(index, self._last[index], out, is_checked=True)
        self._is_restored = False
        self._count_episodes(self.finished_episodes)

    @override(StructuredVectorEnv)
    def seed(self, seeds: Sequence[Any]) -> None:
        """Seed the environments.

        Further seeds are derived from each seed, and the environment is seeded with them from time to time, so that its
        state can be restored by replaying few steps (:meth:`state_dict`).

        :param seeds: One seed per environment.
        """
        for index, seed in enumerate(checked_seeds(seeds, self.n_envs)):
            env = self.envs[index]
            try:
                env.seed(seed)
            except USER_CODE_ERRORS as error:
                fail(error, Place(self._name(index)), f"seed({seed!r})")
        self._log.set_seeds(seeds)
        self._is_restored = False

    @override(StructuredVectorEnv)
    def record_constrained(self, sources: Sequence[StatisticSource]) -> None:
        super().record_constrained(sources)
        for env in self.envs if sources else ():
            env.get_stats(LogStatsLevel.STEP)  # from now on they are calculated

    @override(StructuredVectorEnv)
    def actor_ids(self) -> list[ActorID]:
        return list(self._actor_ids) or [env.actor_id() for env in self.envs]

    @override(StructuredVectorEnv)
    def is_actor_done(self) -> np.ndarray:  # type: ignore[override]
        before_reset = self._actors_done
        return np.array([before_reset.get(i, env.is_actor_done()) for i, env in enumerate(self.envs)], np.bool_)

    @override(StructuredVectorEnv)
    def get_env_time(self) -> np.ndarray:  # type: ignore[override]
        return np.array([env.get_env_time() for env in self.envs], np.int64)

    @override(StructuredVectorEnv)
    def seeding_at(self, env_index: int, ticks_ago: int) -> Seeding | None:
        return self._log.seeding_at(env_index, ticks_ago)

    @override(StructuredVectorEnv)
    def state_dict(self, with_running: bool = True) -> dict[str, Any]:
        states = []
        for index, env in enumerate(self.envs):
            state = self._log.state(index)
            if "problem" in state or not with_running or not (self._actor_ids or self._is_restored):
                state = {key: state[key] for key in ("seed", "n_seedings", "problem") if key in state}
            else:
                state["digest"] = self._digest(index, env)
            states.append({**state, "wrappers": statistics_states(env)})
        return {"environments": states}

    @override(StructuredVectorEnv)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        states = states_for(state_dict, self.n_envs)
        problems: dict[int, str] = {}
        self._actor_ids = []
        self._log.forget_ticks()
        is_any_running = any("digest" in state for state in states)
        for index, state in enumerate(states):
            problem = state.get("problem")
            if "digest" in state:
                self._contexts[index].is_replaying = True
                problem = self._replay(index, state)
                if problem is not None:
                    self.envs[index].discard_episode()  # the failed replay must not count as an episode
            elif "seed" in state:
                self._log.adopt_seed(index, state)
                if state["n_seedings"] == 0:
                    self.envs[index].seed(state["seed"])
            if problem is not None:
                problems[index] = problem
            if is_any_running and (problem is not None or "digest" not in state):
                self._last[index] = self._first_observation(index)
            self._contexts[index].is_replaying = False
        self._is_restored = is_any_running
        for env, state in zip(self.envs, states, strict=True):
            if state["wrappers"]:
                load_statistics_states(env, state["wrappers"])
        return problems

    @override(StructuredVectorEnv)
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
        self._actors_done = {}
        self._is_any_done = False

    def _step_flat(self, actions: Mapping[Any, Any], out: Out) -> list[dict[Any, Any]]:
        step_key = self._actor_ids[0].step_key
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
        return infos

    def _step_structured(self, actions: Mapping[Any, Any], out: Out) -> list[dict[Any, Any]]:
        step_keys = {actor.step_key for actor in self._actor_ids}
        is_common = len(step_keys) == 1
        taken = {key: self._columns(key, actions_at(key, actions, is_common)) for key in step_keys}
        self._log.append(([actor.step_key for actor in self._actor_ids], taken))
        by_key = {step_key: split_rows(columns) for step_key, columns in taken.items()}
        self.actor_rewards = None
        infos = []
        for index, env in enumerate(self.envs):
            try:
                observation, reward, done, info = self._steps[index](by_key[self._actor_ids[index].step_key][index])
                self.rewards[index] = reward
                is_complete = bool(done or self._contexts[index].is_step_complete)
                self.step_complete[index] = is_complete
                if is_complete and (actor_rewards := env.get_actor_rewards()) is not None:
                    self._has_actor_rewards = True
                    self.actor_rewards = self.actor_rewards or [None] * len(self.envs)
                    self.actor_rewards[index] = np.array(actor_rewards)
                if done:
                    observation = self._finish_episode(index, observation, info)
                self._last[index] = observation
                self._actor_ids[index] = env.actor_id()
                self._write(index, observation, out, self._n_checks_left > 0)
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
                    self._last[index], self._actor_ids[index], self._observation_specs, self._first_index + index
                )
            except EnvironmentContractError as misfit:
                error = misfit
        seeding = self._log.seeding_at(index, 1 if call == "step" else 0)
        fail(error, Place.of(self.envs[index], self._name(index), seeding), call)

    def _name(self, index: int) -> str:
        return f"environment {self._first_index + index}"

    def _finish_episode(self, index: int, observation: Any, info: dict[Any, Any]) -> Any:
        """Record the end of an episode and start the next one.

        :return: First observation of the next episode.
        """
        env = self.envs[index]
        self._is_any_done, self._actors_done[index] = True, self._are_actors_done[index]()
        truncated = is_truncated(True, info)
        (self.truncated if truncated else self.terminated)[index] = True
        if truncated or self.keep_terminal_observations:
            actor = env.actor_id()
            if self._n_checks_left:
                check_observation(observation, actor, self._observation_specs, self._first_index + index)
            last = {key: np.array(cast(observation[key])) for key, cast in self._casts[actor.step_key].items()}
            self.final_observations[index] = FinalObservation(actor, last)
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
            if (seed := self._log.next_seed(index)) is not None:
                self._log.statistics[index] = [wrapper.statistics_state() for wrapper in self._learning[index]]
                if self._log.n_seedings[index] > 1:  # the first seed was set by `seed`
                    self._apply_seed(index, seed)
            return env.reset()
        except USER_CODE_ERRORS as error:
            self._fail(error, "reset", index)

    def _apply_seed(self, index: int, seed: int) -> None:
        """Seed an environment; the ids of its episodes are unique for the seed."""
        self.envs[index].seed(seed)
        if (number := self._log.n_seedings[index]) > 1:
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
        return env.reset()

    def _digest(self, index: int, env: Any) -> str:
        """Return a hash of the current observation."""
        digest = hashlib.blake2b(digest_size=16)
        for key, (_, dtype) in sorted(self._observation_specs[env.actor_id().step_key].items()):
            value = np.ascontiguousarray(self._last[index][key], dtype)
            digest.update(f"{key}{value.dtype.str}{value.shape}".encode())
            digest.update(value.tobytes())
        return digest.hexdigest()

    def _write(self, index: int, observation: Any, out: Out, is_checked: bool) -> None:
        actor = self._actor_ids[index]
        if is_checked:
            check_observation(observation, actor, self._observation_specs, self._first_index + index)
        casts = self._casts[actor.step_key]
        for key, column in out[actor.step_key].items():
            column[index] = casts[key](observation[key])


def vectorized(generator: Any) -> Any:
    """Return a rollout generator of a vector environment; a single environment is wrapped in one.

    :param generator: A `RolloutGenerator`, or actors with the same interface.
    """
    if generator.is_vectorized:
        return generator
    return RolloutGenerator(SequentialVectorEnv([lambda: generator.env], logging_prefix="train"))


def in_sequence(env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None) -> SequentialVectorEnv:
    """Make a :class:`SequentialVectorEnv` of equal environments.

    :param env_factory: Makes one environment; called `n_envs` times.
    :param n_envs: Number of environments.
    :param logging_prefix: Prefix of the epoch statistics; `None`: they are not logged.
    """
    return SequentialVectorEnv([env_factory] * n_envs, logging_prefix)
