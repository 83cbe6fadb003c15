"""Vector environment in worker processes, with shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from maze.core.annotations import override
from maze.core.env.space_values import Arrays, ArraySpec, action_column, array_specs, copy_rows
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_stats.log_stats import LogStats
from maze.core.utils.worker_pool import ProcessPool, env_slices, n_available_cores
from maze.train.parallelization.vector_env import structured_vector_env, vector_env_utils
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv

if TYPE_CHECKING:
    from maze.core.env.faults import Seeding
    from maze.core.env.maze_env import MazeEnv
    from maze.train.trainers.common.model_selection.model_selection_base import StatisticSource


_ALIGNMENT = 64  # size of a cache line: workers write in parallel


class SharedArrays:
    """Arrays `[n_envs, ...]` in shared memory for actions and results of a step.

    :param n_envs: Number of environments.
    :param spaces: Object with the spaces as attributes.
    :param memory: The shared memory, uint8 `[n_bytes]`; `None`: arrays of this process, from which the size is
        computed.
    """

    def __init__(self, n_envs: int, spaces: Any, memory: np.ndarray | None = None) -> None:
        self.n_envs = n_envs
        self.n_bytes = 0
        self._memory = memory
        self.step_keys: list[StepKeyType] = list(spaces.observation_spaces_dict)
        self.observations = self._allocate_all(array_specs(spaces.observation_spaces_dict, "observation"))
        self.actions = self._allocate_all(array_specs(spaces.action_spaces_dict, "action"))
        self.rewards = self._allocate(_FLOAT)
        self.terminated = self._allocate(_FLAG)
        self.truncated = self._allocate(_FLAG)
        self.step_complete = self._allocate(_FLAG)
        self.actors = self._allocate(_ACTOR)
        """Index of the sub-step key and agent id of the next actor of each environment."""

    def _allocate(self, spec: ArraySpec) -> np.ndarray:
        shape, dtype = (self.n_envs, *spec[0]), spec[1]
        offset, size = self.n_bytes, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.n_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        array: np.ndarray = np.ndarray(shape, dtype, self._memory, offset)
        return array

    def _allocate_all(self, specs: dict[StepKeyType, dict[str, ArraySpec]]) -> Arrays:
        return {
            step_key: {key: self._allocate(spec) for key, spec in by_key.items()} for step_key, by_key in specs.items()
        }


_FLOAT: ArraySpec = ((), np.dtype(np.float32))
_FLAG: ArraySpec = ((), np.dtype(np.bool_))
_ACTOR: ArraySpec = ((2,), np.dtype(np.int64))


_NAME = "environments"


class EnvWorker(SequentialVectorEnv):
    """Step environments in a worker process, with actions and results in shared memory.

    :param env_factories: Each makes one environment.
    :param first_index: Index of the first environment among all.
    """

    def __init__(self, env_factories: Sequence[Callable[[], MazeEnv[Any]]], first_index: int) -> None:
        super().__init__(env_factories, first_index=first_index)
        self._rows = slice(first_index, first_index + self.n_envs)

    def spaces(self) -> tuple[vector_env_utils.ActorSpaces, bool]:
        """Return the spaces, and whether the environments are flat."""
        return vector_env_utils.ActorSpaces.of(self), self.is_flat

    def share(self, n_envs: int, memory: np.ndarray) -> None:
        """Receive the shared memory.

        :param n_envs: Number of all environments.
        :param memory: See :class:`SharedArrays`.
        """
        rows = self._rows
        shared = self._shared = SharedArrays(n_envs, self, memory)
        self._observations, self._actions = (
            {step_key: {key: array[rows] for key, array in by_key.items()} for step_key, by_key in arrays.items()}
            for arrays in (shared.observations, shared.actions)
        )
        self.rewards, self.step_complete = shared.rewards[rows], shared.step_complete[rows]
        self.terminated, self.truncated = shared.terminated[rows], shared.truncated[rows]
        self.step_complete[:] = True

    @override(SequentialVectorEnv)
    def step(self) -> Any:  # type: ignore[override]  # actions and observations are in the shared memory
        return self._reported(self._advance(self._actions, self._observations)[1])

    @override(SequentialVectorEnv)
    def reset(self) -> Any:  # type: ignore[override]
        self._begin(self._observations)
        return self._reported([])

    @override(SequentialVectorEnv)
    def _count_episodes(self, finished: Mapping[int, LogStats]) -> None:
        """Do nothing: the parent counts them."""

    def _reported(self, infos: list[dict[Any, Any]]) -> Any:
        """Return the results that are not in shared memory; `None`: there are none."""
        first = self._first_index
        if not self.is_flat or not infos:
            keys = self._shared.step_keys
            self._shared.actors[self._rows] = [(keys.index(key), agent_id) for key, agent_id in self.actor_ids()]
        with_info = {index: info for index, info in enumerate(infos, first) if info}
        finished = {
            first + index: vector_env_utils.PortableStats(stats) for index, stats in self.finished_episodes.items()
        }
        if not (with_info or finished or self.final_observations or self.actor_rewards or self.constrained):
            return None
        finals = {first + index: tuple(final) for index, final in self.final_observations.items()}
        return finished, with_info, finals, self.actor_rewards, self.constrained_values


class CloudpickleWrapper:
    """Make objects picklable by value, including closures, lambdas and classes of scripts.

    :param var: The object.
    """

    def __init__(self, var: Any) -> None:
        self.var = var

    def __getstate__(self) -> bytes:
        return bytes(cloudpickle.dumps(self.var))

    def __setstate__(self, state: bytes) -> None:
        self.var = cloudpickle.loads(state)


class SubprocVectorEnv(structured_vector_env.DividedVectorEnv):
    """Step its environments in worker processes, several in each, with actions and results in shared memory.

    Worth it where an environment's step takes longer than about a tenth of a millisecond; for cheaper ones
    :class:`~maze.train.parallelization.vector_env.sequential_vector_env.SequentialVectorEnv` is faster. With the same
    seeds both give the same trajectories.

    :param env_factories: Each makes one environment, in the worker.
    :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); None: they are not logged.
    :param start_method: `forkserver` (default if available), `spawn` or `fork`. A forked worker inherits the
        state of this process, with everything that threads hold at that moment.
    :param n_workers: Number of processes; by default one per CPU core, but not more than environments.
    :param timeout: Seconds that a call may take in a worker before it counts as hanging; None: any time.
    """

    def __init__(
        self,
        env_factories: Sequence[Callable[[], MazeEnv[Any]]],
        logging_prefix: str | None = None,
        start_method: str | None = None,
        n_workers: int | None = None,
        timeout: float | None = None,
    ) -> None:
        n_envs, n_workers = len(env_factories), n_available_cores() if n_workers is None else n_workers
        if min(n_envs, n_workers) < 1:
            raise ConfigError(
                f"A vector environment needs an environment factory and a worker process; found {n_envs} factories and "
                f"n_workers={n_workers}."
            )
        slices = env_slices(n_envs, n_workers)
        self._pool = pool = ProcessPool(len(slices), start_method, slices, timeout, n_slots=1, modules=[__name__])
        try:
            pool.host(_NAME, lambda index, _: partial(EnvWorker, env_factories[slices[index]], slices[index].start))
            replies: list[tuple[vector_env_utils.ActorSpaces, bool]] = pool.call(_NAME, "spaces", [()] * len(slices))
            super().__init__(slices, replies[0][0], logging_prefix)
            for rows, (spaces, _) in zip(slices, replies, strict=True):
                vector_env_utils.check_same_spaces(self, spaces, f"environment {rows.start}")
            self.is_flat = all(is_flat for _, is_flat in replies)
            memory = pool.put(np.zeros(SharedArrays(n_envs, self).n_bytes, np.uint8))
            self._shared = shared = SharedArrays(n_envs, self, memory.of(pool.memory))
            pool.call(_NAME, "share", [(n_envs, memory)] * len(slices))
        except BaseException:
            pool.close()
            raise
        # the result arrays of this object are the arrays that the workers write
        self.rewards, self.step_complete = shared.rewards, shared.step_complete
        self.terminated, self.truncated = shared.terminated, shared.truncated
        self._actor_ids: list[ActorID] = []
        self._is_keeping_terminal_observations = False

    @override(structured_vector_env.StructuredVectorEnv)
    def _advance(self, actions: Any, out: structured_vector_env.Out) -> tuple[np.ndarray, list[dict[Any, Any]]]:
        if not self._actor_ids:
            raise EnvironmentContractError("`reset` has to be called before the first `step`.")
        if self.keep_terminal_observations != self._is_keeping_terminal_observations:
            self._is_keeping_terminal_observations = self.keep_terminal_observations
            self._call_all("__setattr__", "keep_terminal_observations", self.keep_terminal_observations)
        step_keys = {actor.step_key for actor in self._actor_ids} if not self.is_flat else {self._actor_ids[0].step_key}
        for step_key in step_keys:
            given = structured_vector_env.actions_at(step_key, actions, len(step_keys) == 1)
            for key, shared in self._shared.actions[step_key].items():
                shared[...] = action_column(given, step_key, key, shared.shape, shared.dtype)
        infos = self._take(self._pool.call_short("step"), out)
        return self.terminated | self.truncated, infos

    @override(structured_vector_env.StructuredVectorEnv)
    def _begin(self, out: structured_vector_env.Out) -> None:
        self._actor_ids = []
        self._take(self._pool.call_short("reset"), out)

    @override(structured_vector_env.StructuredVectorEnv)
    def record_constrained(self, sources: Sequence[StatisticSource]) -> None:
        super().record_constrained(sources)
        self._call_all("record_constrained", sources)

    @override(structured_vector_env.StructuredVectorEnv)
    def close(self) -> None:
        """Close all environments and end the workers, by force if needed; returns within five seconds."""
        self._pool.close()

    @override(structured_vector_env.StructuredVectorEnv)
    def actor_ids(self) -> list[ActorID]:
        return list(self._actor_ids) or [
            ActorID(*actor) for of_group in self._call_all("actor_ids") for actor in of_group
        ]

    @override(structured_vector_env.StructuredVectorEnv)
    def is_actor_done(self) -> np.ndarray:  # type: ignore[override]
        return np.concatenate(self._call_all("is_actor_done"))

    @override(structured_vector_env.StructuredVectorEnv)
    def get_env_time(self) -> np.ndarray:  # type: ignore[override]
        return np.concatenate(self._call_all("get_env_time"))

    @override(structured_vector_env.StructuredVectorEnv)
    def seeding_at(self, env_index: int, ticks_ago: int) -> Seeding | None:
        local = [(max(0, min(env_index, rows.stop - 1) - rows.start), ticks_ago) for rows in self.groups]
        answers: list[Seeding | None] = self._call("seeding_at", local)
        return next(answer for rows, answer in zip(self.groups, answers, strict=True) if env_index < rows.stop)

    @override(structured_vector_env.DividedVectorEnv)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        self._actor_ids = []  # only the workers know the actors until the next reset
        return super().load_state_dict(state_dict)

    @override(structured_vector_env.DividedVectorEnv)
    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._pool.call(_NAME, method, arguments)

    def _take(self, replies: list[Any], out: structured_vector_env.Out) -> list[dict[Any, Any]]:
        """Record the results of the workers, write the observations, and return the infos."""
        self.final_observations = {}
        self.actor_rewards = None
        finished_episodes: dict[int, LogStats] = {}
        infos: list[dict[Any, Any]] = [{} for _ in range(self.n_envs)]
        if not self.is_flat or not self._actor_ids:
            keys = self._shared.step_keys
            self._actor_ids = [ActorID(keys[index], agent_id) for index, agent_id in self._shared.actors.tolist()]
        for rows, reply in zip(self.groups, replies, strict=True):
            if reply is None:
                continue
            finished, with_info, finals, actor_rewards, constrained_values = reply
            self.constrained_values[rows] = constrained_values
            finished_episodes |= finished
            for index, info in with_info.items():
                infos[index] = info
            for index, (actor, observation) in finals.items():
                self.final_observations[index] = structured_vector_env.FinalObservation(ActorID(*actor), observation)
            if actor_rewards is not None:
                self.actor_rewards = self.actor_rewards or [None] * self.n_envs
                self.actor_rewards[rows] = actor_rewards
        self._count_episodes(finished_episodes)
        copy_rows(self._shared.observations, out, self._actor_ids[:1] if self.is_flat else self._actor_ids)
        return infos
