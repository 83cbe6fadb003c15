"""Vector environments of structured environments, and the replay log from which a resumed run restores them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.faults import Seeding
from maze.core.env.space_values import Arrays, zeros
from maze.core.env.structured_env import ActorID, StepKeyType, StructuredEnv
from maze.core.env.structured_env_spaces_mixin import StructuredEnvSpacesMixin
from maze.core.env.time_env_mixin import TimeEnvMixin
from maze.core.errors import EnvironmentContractError
from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator, LogStatsLevel, get_stats_logger
from maze.core.log_stats.log_stats_env import LogStatsEnv
from maze.core.rollout.batched_acting import play_episodes
from maze.train.parallelization.vector_env.vector_env import VectorEnv

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.rollout.rollout_columns import RolloutColumns
    from maze.train.trainers.common.model_selection.model_selection_base import StatisticSource

Out = Mapping[StepKeyType, Mapping[str, np.ndarray]]
"""Arrays `[n_envs, ...]` by sub-step key and observation key."""


class FinalObservation(NamedTuple):
    """The last observation of an episode that has ended.

    :param actor_id: The actor that would have acted next.
    :param observation: Its observation.
    """

    actor_id: ActorID
    observation: dict[str, np.ndarray]


class StructuredVectorEnv(VectorEnv, StructuredEnv, StructuredEnvSpacesMixin, LogStatsEnv, TimeEnvMixin, ABC):
    """Vector environment of structured environments, whose current actors may differ; with automatic resets.

    Besides the result of :meth:`step`, the attributes below describe the last sub-step. The next call overwrites them.

    :param n_envs: Number of environments.
    :param action_spaces_dict: Action spaces by sub-step key, the same for all environments.
    :param observation_spaces_dict: Observation spaces by sub-step key.
    :param agent_counts_dict: Number of agents by sub-step key.
    :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); None: they are not logged.
    """

    n_instances: int = 0
    """Number of instances of the set that the environments play; 0: there is none."""

    rewards: np.ndarray
    """float32 `[n_envs]`"""

    terminated: np.ndarray
    """bool `[n_envs]`: the episode terminated"""

    truncated: np.ndarray
    """bool `[n_envs]`: the episode was truncated; never together with `terminated`"""

    step_complete: np.ndarray
    """bool `[n_envs]`: the sub-step completed an environment step"""

    actor_rewards: list[np.ndarray | None] | None = None
    """By environment the rewards of the actors of a completed step; None: no environment reports them."""

    final_observations: dict[int, FinalObservation]
    """Environment index -> last observation, of episodes that were truncated."""

    keep_terminal_observations: bool = False
    """Whether `final_observations` also contains the last observations of terminated episodes."""

    finished_episodes: Mapping[int, LogStats]
    """Environment index -> statistics of the episode that ended, or that was interrupted by a reset."""

    episode_budget: np.ndarray | None = None
    """By environment, number of its next episodes that count in the epoch statistics; decremented by each finished
    episode. None: all episodes count. With the same number for each environment, short episodes have no larger share
    than long ones."""

    acts: ClassVar[bool] = False
    """Whether the environments collect whole rollouts and episodes with a policy (:meth:`roll_out`,
    :meth:`play_episodes`) and cannot be stepped one step at a time."""

    autoreset_pending: np.ndarray | None = None
    """Indices of environments that reset with the next step: this step ignores their actions and completes no
    environment step, and their current observations are placeholders. None: there are none."""

    is_flat: bool = False
    """Whether there is a single actor, each of whose actions completes an environment step."""

    constrained: tuple[StatisticSource, ...] = ()
    """Statistics whose values are recorded in :attr:`constrained_values`, see :meth:`record_constrained`."""

    constrained_values: np.ndarray
    """float32 `[n_envs, n_statistics]`: their values in the last step, or in the episode that ended with it."""

    def __init__(
        self,
        n_envs: int,
        action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        agent_counts_dict: Mapping[StepKeyType, int],
        logging_prefix: str | None = None,
    ) -> None:
        super().__init__(n_envs)
        self._action_spaces_dict = dict(action_spaces_dict)
        self._observation_spaces_dict = dict(observation_spaces_dict)
        self._agent_counts_dict = dict(agent_counts_dict)
        self.rewards = np.zeros(n_envs, np.float32)
        self.terminated = np.zeros(n_envs, np.bool_)
        self.truncated = np.zeros(n_envs, np.bool_)
        self.step_complete = np.ones(n_envs, np.bool_)
        self.final_observations = {}
        self.finished_episodes = {}
        self.constrained_values = np.zeros((n_envs, 0), np.float32)
        self.epoch_stats = LogStatsAggregator(LogStatsLevel.EPOCH)
        """Statistics of finished episodes; several vector environments may share an aggregator."""
        if logging_prefix is not None:
            self.epoch_stats.register_consumer(get_stats_logger(logging_prefix))

    @override(VectorEnv)
    def step(  # type: ignore[override]
        self, actions: Any, out: Out | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, list[dict[Any, Any]]]:
        """Step all environments.

        :param actions: Arrays `[n_envs, ...]` by action key if all environments are at the same sub-step key.
            Otherwise such dictionaries by sub-step key; only the rows of the environments at that key are used.
        :param out: Arrays `[n_envs, ...]` by sub-step key and observation key. Each environment writes its observation
            into its row of the arrays of its next actor. By default new arrays are returned.
        :return: Observations (by observation key if all environments are at the same sub-step key, otherwise by
            sub-step key first; `out` itself if it was given), rewards, dones, infos. Later calls overwrite them only
            if `out` was given.
        """
        observations: Out = self._new_arrays() if out is None else out
        dones, infos = self._advance(actions, observations)
        if out is None:
            return self._fresh(observations), self.rewards.copy(), dones.copy(), infos
        return out, self.rewards, dones, infos

    @override(VectorEnv)
    def reset(self, out: Out | None = None) -> Any:
        """Reset all environments.

        :param out: Arrays `[n_envs, ...]` by step key and observation key; see :meth:`step`.
        :return: Observations, see :meth:`step`.
        """
        observations: Out = self._new_arrays() if out is None else out
        self._begin(observations)
        return self._fresh(observations) if out is None else out

    @abstractmethod
    def _advance(self, actions: Any, out: Out) -> tuple[np.ndarray, list[dict[Any, Any]]]:
        """Step all environments.

        :param actions: See :meth:`step`.
        :param out: Arrays for the observations.
        :return: Dones, infos.
        """

    @abstractmethod
    def _begin(self, out: Out) -> None:
        """Reset all environments.

        :param out: Arrays for the observations.
        """

    @property
    def n_rollout_envs(self) -> int:
        """Number of environments in a rollout; less than `n_envs` if a rollout does not wait for all groups."""
        return self.n_envs

    @abstractmethod
    def actor_ids(self) -> list[ActorID]:
        """Return the next actor of each environment."""

    @override(StructuredEnv)
    def actor_id(self) -> ActorID:
        """Return the next actor of all environments; raise an error if they differ."""
        actors = self.actor_ids()
        for index, actor in enumerate(actors):
            if actor != actors[0]:
                raise EnvironmentContractError(
                    f"The environments are not at the same actor: {actors[0]} acts next in environment 0, {actor} in "
                    f"environment {index}. Use `actor_ids()` where actors may differ."
                )
        return actors[0]

    @property
    @override(StructuredEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return self._agent_counts_dict

    @abstractmethod
    def is_actor_done(self) -> np.ndarray:  # type: ignore[override]
        """Return whether the last actor is done, bool `[n_envs]`."""

    def get_actor_rewards(self) -> np.ndarray | None:
        """Return the rewards of the actors of the completed step, `[n_envs, n_actors]`; None if there are none."""
        if self.actor_rewards is None or any(rewards is None for rewards in self.actor_rewards):
            return None
        return np.stack([np.asarray(rewards) for rewards in self.actor_rewards])

    @abstractmethod
    def get_env_time(self) -> np.ndarray:  # type: ignore[override]
        """Return the number of completed environment steps of the current episodes, int `[n_envs]`."""

    @property
    @override(StructuredEnvSpacesMixin)
    def action_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        return self._action_spaces_dict

    @property
    @override(StructuredEnvSpacesMixin)
    def observation_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        return self._observation_spaces_dict

    @property
    @override(StructuredEnvSpacesMixin)
    def action_space(self) -> spaces.Dict:
        return self._action_spaces_dict[self.actor_id().step_key]

    @property
    @override(StructuredEnvSpacesMixin)
    def observation_space(self) -> spaces.Dict:
        return self._observation_spaces_dict[self.actor_id().step_key]

    @override(LogStatsEnv)
    def get_stats(self, level: LogStatsLevel) -> LogStatsAggregator:
        if level is not LogStatsLevel.EPOCH:
            raise ValueError(f"A vector environment keeps statistics of epochs only, not on the level {level.name}.")
        return self.epoch_stats

    @override(LogStatsEnv)
    def write_epoch_stats(self) -> None:
        self.report_work()
        super().write_epoch_stats()

    def report_work(self) -> None:
        """Add the statistics of the actors of a cluster to those of the epoch; without a cluster, do nothing."""

    def seeding_at(self, env_index: int, ticks_ago: int) -> Seeding | None:
        """Return the seed of a recent tick of an environment, to reproduce it.

        :param env_index: Index of the environment.
        :param ticks_ago: 1: the latest tick, 0: the next one.
        :return: `None`: the seed is not known.
        """
        return None

    def record_constrained(self, sources: Sequence[StatisticSource]) -> None:
        """Record values of statistics from the next step on.

        :param sources: The statistics.
        """
        self.constrained = tuple(sources)
        self.constrained_values = np.zeros((self.n_envs, len(sources)), np.float32)

    def _record_ended(self) -> None:
        """Record the values of the episodes that have ended."""
        for index, source in enumerate(self.constrained):
            if source.at_end:
                self.constrained_values[:, index] = 0.0
                for env_index, stats in self.finished_episodes.items():
                    self.constrained_values[env_index, index] = source.of(stats)

    def roll_out(self, policy: Policy, columns: RolloutColumns, begins: bool) -> None:
        """Fill columns with a whole rollout; only for vector environments with :attr:`acts`.

        :param policy: The policy.
        :param columns: Columns made for these environments.
        :param begins: Whether the rollout starts with a reset.
        """
        raise EnvironmentContractError(f"{type(self).__name__} cannot collect rollouts itself; use a RolloutGenerator.")

    def play_episodes(self, policy: Policy, budget: np.ndarray, deterministic: bool) -> None:
        """Reset, and play a number of complete episodes; only these count in the epoch statistics.

        :param policy: The policy.
        :param budget: Number of episodes of each environment, `[n_envs]`.
        :param deterministic: Take deterministic actions instead of sampling them.
        """
        play_episodes(policy, self, budget, deterministic)

    def state_dict(self, with_running: bool = True) -> dict[str, Any]:
        """Return the states of the environments and the learned statistics of their wrappers, as numbers and arrays.

        The state can be loaded into this or another vector environment.

        :param with_running: Whether to include the running episodes. Without them, the next episodes are those that
            would follow a :meth:`reset` now.
        """
        problem = f"{type(self).__name__} does not save the states of its environments"
        return {"environments": [{"problem": problem, "wrappers": []} for _ in range(self.n_envs)]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Restore the environments by replaying their actions since their last seeding.

        The next :meth:`reset` keeps the restored states and returns their observations.

        :param state_dict: State from :meth:`state_dict`, possibly of another number of environments.
        :return: Environment index -> reason why this environment starts a new episode instead.
        """
        return dict.fromkeys(range(self.n_envs), f"{type(self).__name__} cannot restore the states of its environments")

    def _count_episodes(self, finished: Mapping[int, LogStats]) -> None:
        """Record finished episodes, and pass those within the episode budget to the epoch statistics."""
        self.finished_episodes = finished
        for env_index, stats in finished.items():
            if self.episode_budget is not None:
                if not self.episode_budget[env_index]:
                    continue
                self.episode_budget[env_index] -= 1
            self.epoch_stats.receive(stats)

    def _new_arrays(self) -> Arrays:
        """Return new arrays `[n_envs, ...]` for the observations of a step."""
        return zeros(self._observation_spaces_dict, (self.n_envs,), "observation")

    def _fresh(self, observations: Out) -> Any:
        step_keys = dict.fromkeys(actor.step_key for actor in self.actor_ids())
        if len(step_keys) == 1:
            return observations[next(iter(step_keys))]
        return {step_key: observations[step_key] for step_key in step_keys}


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


def checked_seeds(seeds: Sequence[Any], n_envs: int) -> list[Any]:
    """Return the seeds as a list, after checking their number.

    :raises ValueError: The number of seeds differs from the number of environments.
    """
    if isinstance(seeds, (int, np.integer, str)) or len(seeds) != n_envs:
        raise ValueError(f"Expected one seed for each of the {n_envs} environments, found {seeds!r}.")
    return list(seeds)


class DividedVectorEnv(StructuredVectorEnv, ABC):
    """A vector environment that consists of smaller ones, its groups, in this process or in others.

    :param groups: Environments of each group among all.
    :param spaces: Object with the spaces of the environments as attributes.
    :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); `None`: they are not logged.
    """

    def __init__(self, groups: Sequence[slice], spaces: Any, logging_prefix: str | None) -> None:
        given = spaces.action_spaces_dict, spaces.observation_spaces_dict, spaces.agent_counts_dict
        super().__init__(groups[-1].stop, *given, logging_prefix)
        self.groups = list(groups)
        self.n_instances = spaces.n_instances

    @abstractmethod
    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of the vector environment of each group and return the results.

        :param method: Name of the method.
        :param arguments: Arguments by group.
        """

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the vector environment of each group with the same arguments."""
        return self._call(method, [arguments] * len(self.groups))

    @override(StructuredVectorEnv)
    def seed(self, seeds: Sequence[Any]) -> None:
        by_env = checked_seeds(seeds, self.n_envs)
        self._call("seed", [(by_env[group],) for group in self.groups])

    @override(StructuredVectorEnv)
    def state_dict(self, with_running: bool = True) -> dict[str, Any]:
        return joint_state(self._call_all("state_dict", with_running))

    @override(StructuredVectorEnv)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        return load_joint_state(
            self.groups, state_dict, lambda states: self._call("load_state_dict", [(state,) for state in states])
        )


# -- replay log ----------------------------------------------------------------------------------------

RESEED_AFTER = 1000
"""Number of ticks after which an environment is seeded again before its next episode."""

MAX_TICKS = 100_000
"""Maximum number of ticks since the last seeding (in a long episode) for which an environment can be restored."""

_MIN_DROPPED = 256

Actions = Mapping[str, np.ndarray]
"""Actions of a sub-step by action key, `[n_envs, ...]`; never modified."""

Tick = Actions | tuple[Sequence[StepKeyType], Mapping[StepKeyType, Actions]]
"""Actions if there is a single step key; otherwise the step key of each environment, and actions by step key."""

EpisodeState = dict[str, Any]
"""State of an environment: seed, number of seedings, actions, statistics and digest for the replay, and the learned
statistics of its wrappers (`wrappers`). With a `problem` (the reason), the environment starts a new episode instead."""


def derived_seed(seed: int, n_seedings: int) -> int:
    """Return the seed of the next seeding of an environment.

    :param seed: Seed of the environment.
    :param n_seedings: Number of earlier seedings; the first one uses the seed itself.
    """
    if n_seedings == 0:
        return seed
    sequence = np.random.SeedSequence((seed % 2**64, n_seedings))
    return int(sequence.generate_state(1)[0]) >> 1  # 31 bits: every generator takes them


class ReplayLog:
    """Seeds and actions of environments that are stepped together, for exact resume.

    The internal state of an environment cannot be saved without pickling code. It is restored by replaying: with the
    same seed and the same actions, a deterministic environment reaches the same state. Seeding takes as long as a few
    steps; therefore an environment is seeded before the first episode that starts `RESEED_AFTER` ticks after the last
    seeding, not before every episode.

    :param n_envs: Number of environments.
    :param only_step_key: The step key where there is only one.
    """

    def __init__(self, n_envs: int, only_step_key: StepKeyType) -> None:
        self._only_step_key = only_step_key
        self.seeds: list[int | None] = [None] * n_envs
        """Seed of each environment; `None`: it was not seeded with an integer and cannot be restored."""
        self.n_seedings = [0] * n_envs
        """Number of seedings of each environment derived from its seed."""
        self.statistics: list[list[dict[str, float]]] = [[] for _ in range(n_envs)]
        """Learned statistics of the wrappers of each environment at its last seeding."""
        self._starts = [0] * n_envs
        # Derived seed and tick of each seeding, by environment.
        self._seedings: list[list[tuple[int, int]]] = [[] for _ in range(n_envs)]
        self._earlier: list[EpisodeState | None] = [None] * n_envs
        self._ticks: list[Tick] = []
        self._first_tick = 0
        self._n_ticks = 0
        self._is_recording = False

    def set_seeds(self, seeds: Sequence[Any]) -> None:
        """Record the seeds of all environments."""
        self.seeds = [
            int(seed) if isinstance(seed, int | np.integer) and not isinstance(seed, bool) else None for seed in seeds
        ]
        self.n_seedings = [0] * len(self.seeds)
        self._seedings = [[] for _ in self.seeds]
        self._is_recording = any(seed is not None for seed in self.seeds)

    def append(self, tick: Tick) -> None:
        """Record the actions of a tick."""
        if self._is_recording:
            self._ticks.append(tick)
            self._n_ticks += 1
            if len(self._ticks) > MAX_TICKS + _MIN_DROPPED:
                self._drop_before(self._n_ticks - MAX_TICKS)

    def is_seed_due(self, index: int) -> bool:
        """Return whether an environment has to be seeded before its next episode."""
        return self._n_ticks - self._starts[index] >= RESEED_AFTER and self.seeds[index] is not None

    def next_seed(self, index: int) -> int | None:
        """Record a seeding and return its seed; `None`: the environment has no seed."""
        seed = self.seeds[index]
        if seed is None:
            return None
        number = self.n_seedings[index]
        self.n_seedings[index] += 1
        self._starts[index] = self._n_ticks
        self._earlier[index] = None
        oldest = max(0, min(self._starts))
        if oldest - self._first_tick >= _MIN_DROPPED:
            self._drop_before(oldest)
        derived = derived_seed(seed, number)
        self._seedings[index].append((derived, self._n_ticks))
        return derived

    def seeding_at(self, index: int, ticks_ago: int) -> Seeding | None:
        """Return the seed of a recent tick of an environment.

        :param index: Index of the environment.
        :param ticks_ago: 1: the latest tick, 0: the next one.
        :return: `None`: the environment was not seeded with an integer.
        """
        tick = self._n_ticks - ticks_ago
        for seed, first_tick in reversed(self._seedings[index]):
            if first_tick <= tick:
                return Seeding(seed, tick - first_tick)
        return None

    def state(self, index: int) -> EpisodeState:
        """Return the state of an environment, without digest."""
        seed = self.seeds[index]
        if seed is None:
            return {"problem": "it was not seeded with an integer"}
        state: EpisodeState = {"seed": seed, "n_seedings": self.n_seedings[index]}
        start = max(0, self._starts[index])
        if start < self._first_tick:
            state["problem"] = f"its episode has more than {MAX_TICKS} steps"
            return state
        return {**state, **self._actions(index, start), "statistics": self.statistics[index]}

    def forget_ticks(self) -> None:
        """Drop all ticks, before the environments are restored."""
        self._ticks.clear()
        self._first_tick = self._n_ticks = 0
        self._starts = [0] * len(self._starts)
        self._seedings = [[] for _ in self._starts]
        self._earlier = [None] * len(self._starts)

    def restore(self, index: int, state: EpisodeState) -> None:
        """Record that an environment was restored by replaying this state."""
        self.adopt_seed(index, state)
        self.statistics[index] = state["statistics"]
        self._earlier[index] = state
        self._starts[index] = -len(state["sequence"])
        seed = derived_seed(state["seed"], state["n_seedings"] - 1)
        self._seedings[index] = [(seed, self._starts[index])]

    def adopt_seed(self, index: int, state: EpisodeState) -> None:
        """Continue with the seeds of a state, in another episode."""
        self.seeds[index], self.n_seedings[index] = state["seed"], state["n_seedings"]
        self._is_recording = True

    def _actions(self, index: int, start: int) -> EpisodeState:
        """Return the actions of an environment by step key, and the sequence of step keys."""
        earlier = self._earlier[index]
        step_keys: list[StepKeyType] = []
        actions: list[dict[str, list[np.ndarray]]] = []
        sequence: list[int] = []
        if earlier is not None:
            step_keys += earlier["step_keys"]
            actions += [{key: list(rows) for key, rows in by_key.items()} for by_key in earlier["actions"]]
            sequence += earlier["sequence"].tolist()
        for tick in self._ticks[start - self._first_tick :]:
            step_key, columns = self._only_step_key, tick
            if isinstance(tick, tuple):
                step_key = tick[0][index]
                columns = tick[1][step_key]
            assert isinstance(columns, Mapping)
            if step_key not in step_keys:
                step_keys.append(step_key)
                actions.append({key: [] for key in columns})
            turn = step_keys.index(step_key)
            sequence.append(turn)
            for key, column in columns.items():
                actions[turn][key].append(column[index])
        return {
            "step_keys": step_keys,
            "sequence": np.array(sequence, np.int16),
            "actions": [{key: np.stack(rows) for key, rows in by_key.items()} for by_key in actions],
        }

    def _drop_before(self, tick: int) -> None:
        del self._ticks[: tick - self._first_tick]
        self._first_tick = tick


def replayed_actions(state: EpisodeState) -> Iterator[tuple[StepKeyType, dict[str, Any]]]:
    """Yield the actions of a state in their order, each with its step key."""
    by_step_key = [
        zip(*by_key.values(), strict=True) if by_key else itertools.repeat(()) for by_key in state["actions"]
    ]
    keys = [list(by_key) for by_key in state["actions"]]
    for turn in state["sequence"].tolist():
        yield state["step_keys"][turn], dict(zip(keys[turn], next(by_step_key[turn]), strict=True))


def begun_anew(state: EpisodeState, reason: str) -> EpisodeState:
    """Return the state of an environment that begins a new episode, not one that it has played before.

    :param state: The state.
    :param reason: Why its episode is not continued.
    """
    kept: dict[str, Any] = {key: state[key] for key in ("seed", "n_seedings", "wrappers") if key in state}
    return {"problem": reason, "begins_anew": True, **kept}


def states_for(state_dict: Mapping[str, Any], n_envs: int) -> list[EpisodeState]:
    """Return one state for each environment.

    :param state_dict: State of a vector environment. If it had another number of environments, all start new episodes,
        additional ones with learned statistics of wrappers in turn.
    :param n_envs: Number of environments.
    """
    states: list[EpisodeState] = list(state_dict["environments"])
    if len(states) == n_envs:
        return states
    reason = f"the interrupted run had {len(states)} environments, this one has {n_envs}"
    learned = [state["wrappers"] for state in states] or [[]]
    kept = [begun_anew(state, reason) for state in states[:n_envs]]
    more = range(len(kept), n_envs)
    return kept + [begun_anew({"wrappers": learned[index % len(learned)]}, reason) for index in more]


def joint_state(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the joint state of several vector environments; see :meth:`StructuredVectorEnv.state_dict`."""
    return {"environments": [of_env for state in states for of_env in state["environments"]]}


def load_joint_state(
    groups: Sequence[slice],
    state_dict: Mapping[str, Any],
    load: Callable[[list[dict[str, Any]]], Iterable[Mapping[int, str]]],
) -> dict[int, str]:
    """Restore a result of :func:`joint_state`; see :meth:`StructuredVectorEnv.load_state_dict`.

    :param groups: Environments of each vector environment among all.
    :param state_dict: The joint state, possibly of another number of environments.
    :param load: Loads the states of all vector environments and returns their problems.
    """
    states = states_for(state_dict, groups[-1].stop)
    answers = load([{"environments": states[group]} for group in groups])
    return {
        group.start + index: problem
        for group, problems in zip(groups, answers, strict=True)
        for index, problem in problems.items()
    }
