"""Vector environment of a vectorised simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.faults import USER_CODE_ERRORS, Place, Seeding, fail
from maze.core.env.space_values import ArraySpec, action_column, array_specs, split_rows, zeros
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import EnvironmentContractError
from maze.core.log_events.monitoring_events import DiscreteActionEvents
from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator
from maze.train.parallelization.vector_env import structured_vector_env
from maze.train.parallelization.vector_env.batched_stats import BatchedEpisodeStats, StatColumn

_NONE_FINISHED: Mapping[int, LogStats] = MappingProxyType({})


class BatchedVectorEnv(structured_vector_env.StructuredVectorEnv):
    """Step a :class:`~maze.core.env.batched_core_env.BatchedCoreEnv`.

    Seeds, episodes and statistics equal those of single environments of the same problem.

    :param simulation: The simulation.
    :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); None: they are not logged.
    """

    # The statistics of ended episodes; `None`: they are calculated on access.
    _finished: Mapping[int, LogStats] | None

    def __init__(self, simulation: BatchedCoreEnv, logging_prefix: str | None = None) -> None:
        n_envs = simulation.n_envs
        spaces_dicts = simulation.action_spaces, simulation.observation_spaces
        super().__init__(n_envs, *spaces_dicts, dict.fromkeys(simulation.step_keys, 1), logging_prefix)
        self.simulation = simulation
        self.n_instances = simulation.n_instances
        self.is_flat = len(simulation.step_keys) == 1
        specs = array_specs(simulation.action_spaces, "action")
        self._heads = {
            key: [_Head(n_envs, key, name, space, specs[key][name]) for name, space in heads.items()]
            for key, heads in simulation.action_spaces.items()
        }
        self._actors = {key: [ActorID(key, 0)] * n_envs for key in simulation.step_keys}
        self._infos: list[dict[Any, Any]] = [{} for _ in range(n_envs)]
        self._seen = zeros(simulation.observation_spaces, (n_envs,), "observation")
        self._stats = BatchedEpisodeStats(n_envs, self._deliver)
        self._kpis = simulation.kpis if simulation.has_kpis else None
        self._reward_stats: StatColumn | None = None
        self._receiver: LogStatsAggregator | None = None
        self._seeds: list[int | None] = [None] * n_envs
        self._n_seedings = [0] * n_envs
        # Number of sub-steps of each environment since its last seeding.
        self._since_seeding = np.zeros(n_envs, np.int64)
        # Rewards of the current step.
        self._step_rewards = np.zeros(n_envs)
        self._is_reset = False
        self._is_restored = False

    @override(structured_vector_env.StructuredVectorEnv)
    def step(self, actions: Any, out: structured_vector_env.Out | None = None) -> Any:
        try:
            return super().step(actions, out)
        except USER_CODE_ERRORS as error:
            self._fail(error, "step")

    @override(structured_vector_env.StructuredVectorEnv)
    def reset(self, out: structured_vector_env.Out | None = None) -> Any:
        try:
            return super().reset(out)
        except USER_CODE_ERRORS as error:
            self._fail(error, "reset")

    def _fail(self, error: BaseException, call: str) -> NoReturn:
        at = ActorID(self.simulation.step_keys[self.simulation.substep], 0)
        fail(error, Place(f"{self.simulation} ({self.n_envs} environments)", at), call)

    @override(structured_vector_env.StructuredVectorEnv)
    def _advance(self, actions: Any, out: structured_vector_env.Out) -> tuple[np.ndarray, list[dict[Any, Any]]]:
        if not self._is_reset:
            raise EnvironmentContractError("`reset` has to be called before the first `step`.")
        simulation = self.simulation
        step_key = simulation.step_keys[simulation.substep]
        given = structured_vector_env.actions_at(step_key, actions)
        taken = {head.name: head.column(given) for head in self._heads[step_key]}
        paused = simulation.autoreset_pending
        rewards, terminated, truncated = simulation.advance(taken)
        is_complete = simulation.substep == 0
        self.step_complete[:] = is_complete
        if paused is not None:
            self.step_complete[paused] = False
        self.rewards[...] = rewards
        self.terminated[...] = terminated
        self.truncated = truncated
        if simulation.seeds_rows:
            self._since_seeding += 1
        self._note(step_key, taken, rewards, is_complete)
        if self.final_observations:
            self.final_observations = {}
        done = self.terminated if truncated is simulation.no_rows else terminated | truncated
        rows = done.nonzero()[0]
        if len(rows):
            self._finish_episodes(rows)
        else:
            self._finished = _NONE_FINISHED
        if self.constrained:
            self._record_ended()
        self.autoreset_pending = simulation.autoreset_pending
        simulation.observe(out[simulation.step_keys[simulation.substep]])
        return done, self._infos

    @override(structured_vector_env.StructuredVectorEnv)
    def _begin(self, out: structured_vector_env.Out) -> None:
        self.rewards[:] = 0.0
        self.terminated[:] = False
        self.truncated = self.simulation.no_rows
        self.step_complete[:] = True
        self.final_observations = {}
        self._finished = _NONE_FINISHED
        if not self._is_restored:
            self._step_rewards[:] = 0.0
            self.simulation.substep = 0
            everyone = np.arange(self.n_envs)
            if len(rows := self._stats.begun().nonzero()[0]):
                self._count_episodes_of(rows, self._kpis(rows) if self._kpis else None)
            for index in range(self.n_envs):
                self._seed_next(index)
            self.simulation.begin(everyone)
            self._stats.begin(everyone)
        self.autoreset_pending = self.simulation.autoreset_pending
        self._is_reset, self._is_restored = True, False
        self.simulation.observe(out[self.simulation.step_keys[self.simulation.substep]])

    @override(structured_vector_env.StructuredVectorEnv)
    def seed(self, seeds: Sequence[Any]) -> None:
        for index, seed in enumerate(structured_vector_env.checked_seeds(seeds, self.n_envs)):
            if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
                raise EnvironmentContractError(f"environment {index}: expected an integer as the seed, found {seed!r}.")
            self._adopt_seed(index, int(seed), 0)
            self.simulation.seed_row(index, int(seed))
        self._is_restored = False

    @override(structured_vector_env.StructuredVectorEnv)
    def close(self) -> None:
        self.simulation.close()

    @override(structured_vector_env.StructuredVectorEnv)
    def actor_ids(self) -> list[ActorID]:
        return self._actors[self.simulation.step_keys[self.simulation.substep]]

    @override(structured_vector_env.StructuredVectorEnv)
    def is_actor_done(self) -> np.ndarray:  # type: ignore[override]
        return np.zeros(self.n_envs, np.bool_)

    @override(structured_vector_env.StructuredVectorEnv)
    def get_env_time(self) -> np.ndarray:  # type: ignore[override]
        return np.array(self.simulation.elapsed)

    @override(structured_vector_env.StructuredVectorEnv)
    def seeding_at(self, env_index: int, ticks_ago: int) -> Seeding | None:
        seed, n_ticks = self._seeds[env_index], int(self._since_seeding[env_index]) - ticks_ago
        if seed is None or n_ticks < 0 or not self.simulation.seeds_rows:  # negative: it was seeded since then
            return None
        return Seeding(structured_vector_env.derived_seed(seed, max(0, self._n_seedings[env_index] - 1)), n_ticks)

    @override(structured_vector_env.StructuredVectorEnv)
    def state_dict(self, with_running: bool = True) -> dict[str, Any]:
        states = []
        problem = self.simulation.why_not_kept() if with_running else None
        for index in range(self.n_envs):
            state: dict[str, Any] = {"problem": problem or "it was in a vectorised simulation", "wrappers": []}
            if self._seeds[index] is not None:
                state |= {"seed": self._seeds[index], "n_seedings": self._n_seedings[index]}
            if problem is not None:
                state["begins_anew"] = True
            elif with_running and self._is_reset:
                state["batched"] = {
                    **self.simulation.row_state(index),
                    "substep": self.simulation.substep,
                    "since_seeding": int(self._since_seeding[index]),
                    "step_reward": float(self._step_rewards[index]),
                    "statistics": self._stats.row_state(index),
                }
            states.append(state)
        return {"environments": states}

    @override(structured_vector_env.StructuredVectorEnv)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        states = structured_vector_env.states_for(state_dict, self.n_envs)
        running_ones = ["batched" in state for state in states]
        is_any_running = any(running_ones) if self.simulation.seeds_rows else all(running_ones)
        problems: dict[int, str] = {}
        self._stats.clear()
        for index, state in enumerate(states):
            if "seed" in state:
                self._adopt_seed(index, state["seed"], state["n_seedings"])
                self.simulation.seed_row(index, state["seed"])
            running = state.get("batched") if is_any_running else None
            if running is None:
                if is_any_running or "seed" not in state or {"digest", "batched", "begins_anew"} & state.keys():
                    problems[index] = state.get("problem", "it was not in a vectorised simulation")
                if is_any_running:
                    self._seed_next(index)
                    self.simulation.begin(np.array([index]))
                continue
            self.simulation.load_row_state(index, running)
            self.simulation.substep = running["substep"]
            self._since_seeding[index] = running["since_seeding"]
            self._step_rewards[index] = running["step_reward"]
            self._stats.load_row_state(index, running["statistics"])
        if self.simulation.autoreset_pending is not None:
            self._stats.begin(self.simulation.autoreset_pending, pauses=True)
        self._is_restored = is_any_running
        return problems

    def _note(
        self, step_key: StepKeyType, taken: Mapping[str, np.ndarray], rewards: np.ndarray, is_complete: bool
    ) -> None:
        """Record the values that statistics are calculated from."""
        stats = self._stats
        step = stats.n_steps
        for head in self._heads[step_key]:
            if head.stats is not None:
                head.stats.set(step, taken[head.name])
            elif head.group is not None:
                head.stats = stats.column(DiscreteActionEvents.action, head.group, None, head.stats_dtype)
                head.stats.set(step, taken[head.name])
        if is_complete:
            if not self.is_flat:
                rewards = self._step_rewards + rewards
                self._step_rewards[:] = 0.0
            if self._reward_stats is None:
                self._reward_stats = stats.column(BaseEnvEvents.reward, None, None, rewards.dtype)
            self._reward_stats.set(step, rewards)
        else:
            self._step_rewards += rewards
        for event, where, attributes in self.simulation.fired:
            stats.fire(event, where, attributes)
        if self.constrained:
            current = stats.step_in_progress() if is_complete else {}
            for index, source in enumerate(self.constrained):
                self.constrained_values[:, index] = 0.0 if source.at_end else source.of(current)
        if is_complete:
            stats.complete_step()

    def _finish_episodes(self, rows: np.ndarray) -> None:
        simulation = self.simulation
        if self.keep_terminal_observations or self.truncated is not simulation.no_rows:
            cut_off = rows if self.keep_terminal_observations else self.truncated.nonzero()[0]
            step_key = simulation.step_keys[simulation.substep]
            seen = self._seen[step_key]
            simulation.observe(seen)
            actor = ActorID(step_key, 0)
            kept = split_rows({key: array[cut_off] for key, array in seen.items()})
            finals = (structured_vector_env.FinalObservation(actor, observation) for observation in kept)
            self.final_observations = dict(zip(cut_off.tolist(), finals, strict=True))
        kpis = self._kpis(rows) if self._kpis else None
        if simulation.seeds_rows:
            for row in rows[self._since_seeding[rows] >= structured_vector_env.RESEED_AFTER].tolist():
                if self._seeds[row] is not None:
                    self._seed_next(row)
        simulation.begin(rows)
        self._count_episodes_of(rows, kpis, simulation.autoreset_pending is not None)

    def _count_episodes_of(self, rows: np.ndarray, kpis: Mapping[str, np.ndarray] | None, pauses: bool = False) -> None:
        """Record finished episodes, and register those within the episode budget with the epoch statistics."""
        self._finished = None
        if self._receiver is not self.epoch_stats:
            self._deliver()
        counts = None
        if (budget := self.episode_budget) is not None:
            counts = budget[rows] > 0
            budget[rows] -= counts
        self._stats.end(rows, kpis, pauses, counts)
        if self._receiver is None:
            self._receiver = self.epoch_stats
            self._receiver.receive_later(self._deliver)

    def _deliver(self) -> None:
        """Pass finished episodes to the epoch statistics, many at once, which is faster."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._stats.deliver(receiver)

    @property
    def finished_episodes(self) -> Mapping[int, LogStats]:
        if self._finished is None:
            self._finished = self._stats.finished()
        return self._finished

    @finished_episodes.setter
    def finished_episodes(self, finished: Mapping[int, LogStats]) -> None:
        self._finished = finished

    def _adopt_seed(self, index: int, seed: int, n_seedings: int) -> None:
        self._seeds[index], self._n_seedings[index] = seed, n_seedings
        self._since_seeding[index] = 0

    def _seed_next(self, index: int) -> None:
        """Seed an environment before an episode, like single environments; see `ReplayLog`."""
        seed = self._seeds[index]
        if seed is not None:
            self.simulation.seed_row(index, structured_vector_env.derived_seed(seed, self._n_seedings[index]))
            self._n_seedings[index] += 1
            self._since_seeding[index] = 0


class _Head:
    """One action head of a sub-step.

    :param n_envs: Number of environments.
    :param step_key: The sub-step.
    :param name: The action's key.
    :param space: Its space.
    :param spec: Shape and type of its values.
    """

    def __init__(
        self, n_envs: int, step_key: StepKeyType, name: str, space: spaces.Space[Any], spec: ArraySpec
    ) -> None:
        shape, dtype = spec
        self.name = name
        self.group = (f"substep_{step_key}", name) if isinstance(space, spaces.Discrete) else None
        self._step_key = step_key
        self._shape = (n_envs, *shape)
        self._dtype = dtype
        self._space = space
        self._lowest, self._n = (int(space.start), int(space.n)) if isinstance(space, spaces.Discrete) else (0, 0)
        self.stats: StatColumn | None = None
        self.stats_dtype = np.min_scalar_type(self._lowest + self._n - 1) if self._lowest >= 0 else dtype
        # An array, because a number would be converted in each comparison; unsigned, so negative values are too large.
        self._limit = np.array(self._n, f"u{dtype.itemsize}") if isinstance(space, spaces.Discrete) else None
        self._bounds = None
        if isinstance(space, spaces.Box) and (space.bounded_below.any() or space.bounded_above.any()):
            self._bounds = space.low, space.high

    def column(self, actions: Mapping[str, Any]) -> np.ndarray:
        """Return the actions of all environments, `[n_envs, ...]`; actions of bounded boxes are clipped."""
        column = action_column(actions, self._step_key, self.name, self._shape, self._dtype)
        if (limit := self._limit) is not None:
            from_zero = column - self._lowest if self._lowest else column
            if np.count_nonzero(from_zero.view(limit.dtype) >= limit):
                row = int(np.flatnonzero((from_zero < 0) | (from_zero >= self._n))[0])
                raise EnvironmentContractError(
                    f"environment {row}: action `{self.name}` of sub-step {self._step_key!r}: expected an element of "
                    f"{self._space}, found {column[row]}."
                )
        elif self._bounds is not None:
            np.clip(column, *self._bounds, out=column)
        return column
