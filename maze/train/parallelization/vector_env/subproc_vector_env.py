"""Environments stepped in worker processes.

Where a policy allows it, whole rollouts are taken there: copies of the policy step the environments of each worker,
without a message for each step. Every copy draws from the policy's own generator and chooses for all environments, and
the worker takes the rows of its own. So the rollouts equal those of a policy that acts for all of them here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np

from maze.core.annotations import override
from maze.core.env.space_arrays import Arrays, ArraySpec, SpacesDict, action_column, array_specs, copy_rows, zeros
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_stats.log_stats import LogStats
from maze.core.rollout.batched_acting import ActingFunction, Row, acting_function
from maze.core.rollout.rollout_columns import FinalObservationEntry
from maze.core.utils.worker_pool import WorkerPool, env_slices, map_memory
from maze.core.utils.worker_process import Host
from maze.train.parallelization.vector_env.env_batch import ActorSpaces, EnvBatch, check_same_spaces
from maze.train.parallelization.vector_env.structured_vector_env import (
    BatchVectorEnv,
    FinalObservation,
    StructuredVectorEnv,
)
from maze.train.parallelization.vector_env.vector_env_utils import StatsDecoder, StatsEncoder

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.faults import Seeding
    from maze.core.env.maze_env import MazeEnv
    from maze.core.rollout.rollout_columns import RolloutColumns


_ALIGNMENT = 64  # a cache line: workers write side by side


class SharedArrays:
    """Arrays `[n_envs, ...]` for everything that one step exchanges.

    :param n_envs: Number of environments.
    :param observation_spaces_dict: Observation spaces by sub-step key.
    :param action_spaces_dict: Action spaces by sub-step key.
    :param fd: Memory of another process; by default new memory is created.
    """

    def __init__(
        self, n_envs: int, observation_spaces_dict: SpacesDict, action_spaces_dict: SpacesDict, fd: int | None = None
    ) -> None:
        self.n_envs = n_envs
        self.step_keys: list[StepKeyType] = list(observation_spaces_dict)
        observation_specs = array_specs(observation_spaces_dict, "observation")
        action_specs = array_specs(action_spaces_dict, "action")
        specs = [
            spec for part in (observation_specs, action_specs) for by_key in part.values() for spec in by_key.values()
        ]
        size = sum(self._size(spec) for spec in specs) + self._size(_ACTOR) + 4 * self._size(_FLOAT)
        self.memory = map_memory(size, fd)
        """Its descriptor gives another process access."""
        self._offset = 0
        self.observations = self._allocate_all(observation_specs)
        self.actions = self._allocate_all(action_specs)
        self.rewards = self._allocate(_FLOAT)
        self.terminated = self._allocate(_FLAG)
        self.truncated = self._allocate(_FLAG)
        self.step_complete = self._allocate(_FLAG)
        self._actors = self._allocate(_ACTOR)

    def write_actors(self, rows: slice, actors: list[ActorID]) -> None:
        """Publishes who acts next.

        :param rows: The environments.
        :param actors: One actor for each of them.
        """
        self._actors[rows] = [(self.step_keys.index(actor.step_key), actor.agent_id) for actor in actors]

    def read_actors(self) -> list[ActorID]:
        """Who acts next, by environment."""
        return [ActorID(self.step_keys[key_index], agent_id) for key_index, agent_id in self._actors.tolist()]

    def _size(self, spec: ArraySpec) -> int:
        shape, dtype = spec
        size = self.n_envs * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def _allocate(self, spec: ArraySpec) -> np.ndarray:
        shape, dtype = spec
        array: np.ndarray = np.ndarray((self.n_envs, *shape), dtype, buffer=self.memory.map, offset=self._offset)
        self._offset += self._size(spec)
        return array

    def _allocate_all(self, specs: dict[StepKeyType, dict[str, ArraySpec]]) -> Arrays:
        return {
            step_key: {key: self._allocate(spec) for key, spec in by_key.items()} for step_key, by_key in specs.items()
        }


_FLOAT: ArraySpec = ((), np.dtype(np.float32))
_FLAG: ArraySpec = ((), np.dtype(np.bool_))
_ACTOR: ArraySpec = ((2,), np.dtype(np.int64))


def rows_of(arrays: Arrays, rows: slice) -> Arrays:
    """Views on some environments' rows of all arrays.

    :param arrays: Arrays `[n_envs, ...]`.
    :param rows: The environments.
    """
    return {step_key: {key: array[rows] for key, array in by_key.items()} for step_key, by_key in arrays.items()}


class Order(NamedTuple):
    """What a worker needs to know for a rollout."""

    n_steps: int
    pickled_policy: bytes | None
    """`None`: that of the rollout before."""
    weights: list[np.ndarray]
    """All tensors of its networks, in their order."""
    numpy_state: dict[str, int]
    """State of the generator that it draws from."""

    @classmethod
    def of(cls, policy: TorchPolicy, n_steps: int, is_new: bool) -> Order:
        """The order to roll a policy out.

        :param policy: The policy, in the mode that it acts in.
        :param n_steps: Number of steps of each environment.
        :param is_new: Whether workers do not have it yet.
        """
        pickled = cloudpickle.dumps(policy) if is_new else None
        return cls(n_steps, pickled, [tensor.numpy() for tensor in _tensors(policy)], policy.rng_state()["numpy"])


class WorkerRollout(NamedTuple):
    """What the environments of one worker have done, arrays `[n_steps, n_own_envs, ...]`."""

    observations: Row
    """One row more: the last one is not answered yet."""
    actions: Row
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    events: list[tuple[int, list[tuple[int, Any]], dict[int, tuple[Any, ...]]]]
    """By step, where there are some: statistics of finished episodes, and final observations, by environment."""
    numpy_state: dict[str, int]
    """State of the generator that the policy draws from next."""


def acts_alike(policy: Policy) -> bool:
    """Whether copies of a policy draw the same, whatever they see in the rows of others, and keep nothing in mind."""
    from maze.core.agent.torch_policy import TorchPolicy

    return type(policy) is TorchPolicy and not policy.is_recurrent and policy.device == "cpu" and policy.draws_by_shape


def set_numpy_state(policy: TorchPolicy, numpy_state: dict[str, int]) -> None:
    """Has a policy draw from where an order or a rollout says; its other generator is not used."""
    policy.set_rng_state({**policy.rng_state(), "numpy": numpy_state})


class ActingWorker:
    """Steps a worker's environments by a policy.

    :param batch: The environments; they are flat.
    :param rows: Which of all environments they are.
    :param n_envs: Number of all environments.
    """

    def __init__(self, batch: EnvBatch, rows: slice, n_envs: int) -> None:
        self._batch = batch
        self._rows = rows
        own = range(rows.start, rows.stop)
        self._places = [index if index in own else rows.start for index in range(n_envs)]
        self._policy: Any = None
        self._act: ActingFunction

    def roll_out(self, order: Order, current: Row, encode: Any) -> WorkerRollout:
        """Takes the steps of a rollout.

        :param order: What to do.
        :param current: What the environments observe, `[n_own_envs, ...]`; afterwards, what they observe then.
        :param encode: Makes something to be sent of the statistics of an episode.
        """
        if order.pickled_policy is not None:
            import torch

            torch.set_num_threads(1)  # several processes with several threads each get in one another's way
            self._policy = cloudpickle.loads(order.pickled_policy)
            self._act = acting_function(self._policy, self)
        _load(self._policy, order)
        batch, rows, n_steps = self._batch, self._rows, order.n_steps
        actor = batch.actor_ids[0]
        n_all, n_own = len(self._places), len(batch.envs)

        def arrays(spaces: Any, kind: str, *shape: int) -> Row:
            return zeros({actor.step_key: spaces[actor.step_key]}, shape, kind)[actor.step_key]

        seen = arrays(batch.observation_spaces_dict, "observation", n_all)
        chosen = arrays(batch.action_spaces_dict, "action", n_all)
        observations = arrays(batch.observation_spaces_dict, "observation", n_steps + 1, n_own)
        actions = arrays(batch.action_spaces_dict, "action", n_steps, n_own)
        rewards = np.empty((n_steps, n_own), np.float32)
        terminated, truncated = np.empty((2, n_steps, n_own), np.bool_)
        events = []
        for key, array in observations.items():
            array[0] = current[key]
        for step in range(n_steps):
            for key, array in seen.items():
                array[:] = observations[key][step, 0]  # the others only have to be something that one can act on
                array[rows] = observations[key][step]
            self._act(seen, actor, chosen, None, self._places)
            for key, array in actions.items():
                array[step] = chosen[key][rows]
            taken = {key: array[step] for key, array in actions.items()}
            batch.step(taken, {actor.step_key: {key: array[step + 1] for key, array in observations.items()}})
            rewards[step], terminated[step], truncated[step] = batch.rewards, batch.terminated, batch.truncated
            if batch.finished_episodes or batch.final_observations:
                finished = [(index, encode(stats)) for index, stats in batch.finished_episodes.items()]
                finals = {index: tuple(final) for index, final in batch.final_observations.items()}
                events.append((step, finished, finals))
        for key, array in observations.items():
            current[key][...] = array[n_steps]
        numpy_state = self._policy.rng_state()["numpy"]
        return WorkerRollout(observations, actions, rewards, terminated, truncated, events, numpy_state)

    # -- the methods of a vector environment that name the place where a policy fails -------------------

    def get_env_time(self) -> dict[int, int]:
        """Number of steps of the running episodes, by environment."""
        return dict(enumerate(self._batch.of_each("get_env_time"), self._rows.start))

    def seeding_at(self, env_index: int, ticks_ago: int) -> Seeding | None:
        """See :meth:`EnvBatch.seeding_at`."""
        return self._batch.seeding_at(env_index, ticks_ago)


def _tensors(policy: TorchPolicy) -> Sequence[Any]:
    return [tensor for network in policy.networks.values() for tensor in network.state_dict().values()]


def _load(policy: TorchPolicy, order: Order) -> None:
    for tensor, values in zip(_tensors(policy), order.weights, strict=True):
        tensor.numpy()[...] = values
    set_numpy_state(policy, order.numpy_state)


class EnvWorker(Host):
    """Steps environments in a worker process, through shared memory.

    :param env_factories: Each makes one environment.
    :param first_index: Index of the first of them among all environments.
    """

    def __init__(self, env_factories: Sequence[Callable[[], MazeEnv[Any]]], first_index: int) -> None:
        self.env_factories = env_factories
        self._batch = EnvBatch(first_index)
        self._is_building = False
        self._encoder = StatsEncoder()
        self._acting: ActingWorker | None = None

    @property
    @override(Host)
    def env_index(self) -> int | None:
        return self._batch.first_index + self._batch.current_index if self._is_building else None

    @override(Host)
    def open(self) -> tuple[ActorSpaces, bool]:
        self._is_building = True
        self._batch.build(self.env_factories)
        return ActorSpaces.of(self._batch), self._batch.is_flat

    @override(Host)
    def method(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self if name in _METHODS_OF_WORKER else self._batch, name)
        return method

    @override(Host)
    def close(self) -> None:
        self._batch.close()

    def share(self, n_envs: int, start: int, stop: int, fd: int) -> None:
        """Take the memory that steps are exchanged through.

        :param n_envs: Number of all environments.
        :param start: Index of the first own one.
        :param stop: Index of the first one after them.
        :param fd: The memory.
        """
        batch = self._batch
        rows = self._rows = slice(start, stop)
        shared = self._shared = SharedArrays(n_envs, batch.observation_spaces_dict, batch.action_spaces_dict, fd)
        self._observations = rows_of(shared.observations, rows)
        self._actions = rows_of(shared.actions, rows)
        batch.attach(shared.rewards[rows], shared.terminated[rows], shared.truncated[rows], shared.step_complete[rows])

    def step(self) -> Any:
        """Step the environments with the actions in the shared memory."""
        return self._reported(self._batch.step(self._actions, self._observations))

    def reset(self) -> Any:
        """Reset the environments."""
        self._batch.reset(self._observations)
        return self._reported([])

    def roll_out(self, order: Order) -> WorkerRollout:
        """Take the steps of a rollout; see :meth:`ActingWorker.roll_out`."""
        if self._acting is None:
            self._acting = ActingWorker(self._batch, self._rows, len(self._shared.rewards))
        current = self._observations[self._batch.actor_ids[0].step_key]
        return self._acting.roll_out(order, current, self._encoder.encode)

    def _reported(self, infos: list[dict[Any, Any]]) -> Any:
        """What there is to report besides the shared memory; `None`: nothing."""
        batch = self._batch
        if not batch.is_flat or not infos:
            self._shared.write_actors(self._rows, batch.actor_ids)
        told = {index: info for index, info in enumerate(infos, batch.first_index) if info}
        finished = [(index, self._encoder.encode(stats)) for index, stats in batch.finished_episodes.items()]
        if not (told or finished or batch.final_observations or batch.actor_rewards):
            return None
        finals = {index: tuple(final) for index, final in batch.final_observations.items()}
        return finished, told, finals, batch.actor_rewards


_METHODS_OF_WORKER = frozenset({"share", "step", "reset", "roll_out"})
"""The others are those of its :class:`EnvBatch`."""


class CloudpickleWrapper:
    """Makes anything picklable for another process: closures, lambdas and classes of scripts included.

    :param var: What is sent.
    """

    def __init__(self, var: Any) -> None:
        self.var = var

    def __getstate__(self) -> bytes:
        return bytes(cloudpickle.dumps(self.var))

    def __setstate__(self, state: bytes) -> None:
        self.var = cloudpickle.loads(state)


class SubprocVectorEnv(BatchVectorEnv):
    """Steps its environments in worker processes, several environments in each, through shared memory.

    Worth it where an environment's step takes longer than about a tenth of a millisecond; for cheaper ones
    :class:`~maze.train.parallelization.vector_env.sequential_vector_env.SequentialVectorEnv` is faster. With the same
    seeds both give the same trajectories.

    :param env_factories: Each makes one environment, in the worker.
    :param logging_prefix: Where epoch statistics are logged (`train`, `eval`); None: nowhere.
    :param start_method: `forkserver` (default where there is one), `spawn` or `fork`. A forked worker inherits the
        state of this process, with everything that threads hold at that moment.
    :param n_workers: Number of processes; by default one per CPU core, but not more than environments.
    :param timeout: Seconds that a call may take in a worker before it counts as hanging; None: any time.
    :param acts: Whether policies that can may act in the workers, where nothing limits the time of a call. Workers
        import torch then.
    """

    def __init__(
        self,
        env_factories: Sequence[Callable[[], MazeEnv[Any]]],
        logging_prefix: str | None = None,
        start_method: str | None = None,
        n_workers: int | None = None,
        timeout: float | None = None,
        *,
        acts: bool = False,
    ) -> None:
        self._acts = acts and timeout is None
        self._acting_policy: Policy | None = None
        preloads = ["maze.core.agent.torch_policy"] if self._acts else []
        n_envs = len(env_factories)
        slices = list(env_slices(n_envs, _worker_count(n_workers, n_envs)))
        hosts = [EnvWorker(env_factories[rows], rows.start) for rows in slices]
        self._pool = pool = WorkerPool(hosts, slices, start_method, timeout, preloads)
        try:
            replies: list[tuple[ActorSpaces, bool]] = pool.gather("building the environments")
            observation_spaces, action_spaces, agent_counts = replies[0][0]
            super().__init__(n_envs, action_spaces, observation_spaces, agent_counts, logging_prefix)
            for rows, (spaces, _) in zip(slices, replies, strict=True):
                check_same_spaces(self, spaces, rows.start)
            self.is_flat = all(is_flat for _, is_flat in replies)
            self._shared = shared = SharedArrays(n_envs, observation_spaces, action_spaces)
            pool.call_each("share", [(n_envs, rows.start, rows.stop) for rows in slices], shared.memory.fd)
        except BaseException:
            pool.close()
            raise
        # what the workers write is what users of this object read
        self.rewards, self.step_complete = shared.rewards, shared.step_complete
        self.terminated, self.truncated = shared.terminated, shared.truncated
        self._decoders = [StatsDecoder() for _ in pool.workers]
        self._actor_ids: list[ActorID] = []
        self._is_keeping_terminal_observations = False

    @override(StructuredVectorEnv)
    def step(  # type: ignore[override]
        self, actions: Any, out: Mapping[StepKeyType, Mapping[str, np.ndarray]] | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, list[dict[Any, Any]]]:
        if not self._actor_ids:
            raise EnvironmentContractError("`reset` has to be called before the first `step`.")
        if self.keep_terminal_observations != self._is_keeping_terminal_observations:
            self._is_keeping_terminal_observations = self.keep_terminal_observations
            self._pool.call("keep_terminal", self.keep_terminal_observations)
        self._write_actions(actions)
        infos = self._take(self._pool.call("step"))
        observations = self._read_observations(out)
        if out is None:
            return self._returned(observations, infos)
        return out, self.rewards, self.terminated | self.truncated, infos

    @override(StructuredVectorEnv)
    def reset(self, out: Mapping[StepKeyType, Mapping[str, np.ndarray]] | None = None) -> Any:
        self._actor_ids = []
        self._take(self._pool.call("reset"))
        observations = self._read_observations(out)
        return out if out is not None else self._fresh(observations)

    @override(StructuredVectorEnv)
    def collects(self, policy: Policy, columns: RolloutColumns) -> bool:
        records_more = columns.infos is not None or any(part.logits for part in columns.substeps.values())
        is_plain = self.is_flat and not records_more and not self.keep_terminal_observations
        is_known = policy is self._acting_policy
        return self._acts and is_plain and columns.n_ticks > 1 and (is_known or acts_alike(policy))

    @override(StructuredVectorEnv)
    def collect(self, policy: TorchPolicy, columns: RolloutColumns) -> None:
        order = Order.of(policy, columns.n_ticks, is_new=policy is not self._acting_policy)
        replies: list[WorkerRollout] = self._pool.call("roll_out", order, name="step")
        self._acting_policy = policy
        set_numpy_state(policy, replies[0].numpy_state)
        step_key = self._actor_ids[0].step_key
        of_step: dict[int, dict[int, LogStats]] = {}
        for worker, decoder, reply in zip(self._pool.workers, self._decoders, replies, strict=True):
            rows, substep = worker.rows, columns.substeps[step_key]
            for target, source in ((substep.observations, reply.observations), (substep.actions, reply.actions)):
                for key, array in source.items():
                    target[key][: len(array), rows] = array
            columns.rewards[:, rows] = reply.rewards
            columns.terminated[:, rows], columns.truncated[:, rows] = reply.terminated, reply.truncated
            for step, finished, finals in reply.events:
                of_step.setdefault(step, {}).update((index, decoder.decode(encoded)) for index, encoded in finished)
                columns.final_observations += [
                    FinalObservationEntry(step, index, ActorID(*actor), last) for index, (actor, last) in finals.items()
                ]
        columns.final_observations.sort(key=lambda entry: entry[:2])
        for step in sorted(of_step):
            self._count_episodes(of_step[step])

    @override(StructuredVectorEnv)
    def close(self) -> None:
        """Closes all environments and ends the workers; returns within five seconds, whatever state they are in."""
        self._pool.close()

    @override(StructuredVectorEnv)
    def actor_ids(self) -> list[ActorID]:
        if not self._actor_ids:
            return [ActorID(*actor) for actor in self._of_each("actor_id")]
        return list(self._actor_ids)

    @override(StructuredVectorEnv)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        self._actor_ids = []  # until the next reset, workers know
        return super().load_state_dict(state_dict)

    @override(BatchVectorEnv)
    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        return self._pool.call(method, *arguments)

    @override(BatchVectorEnv)
    def _tell(self, method: str, by_env: list[Any]) -> list[Any]:
        return self._pool.call_each(method, [(by_env[worker.rows],) for worker in self._pool.workers])

    def _write_actions(self, actions: Mapping[Any, Any]) -> None:
        step_keys = {actor.step_key for actor in self._actor_ids} if not self.is_flat else {self._actor_ids[0].step_key}
        for step_key in step_keys:
            given = actions.get(step_key)
            if not isinstance(given, Mapping):
                given = actions
                if len(step_keys) > 1:
                    raise EnvironmentContractError(
                        f"Environments stand at different sub-steps, one of them at {step_key!r}; expected actions by "
                        f"sub-step key, found the keys {list(actions)}."
                    )
            for key, shared in self._shared.actions[step_key].items():
                shared[...] = action_column(given, step_key, key, shared.shape, shared.dtype)

    def _take(self, replies: list[Any]) -> list[dict[Any, Any]]:
        """Takes in what the workers report besides what is in the shared memory."""
        self.final_observations = {}
        self.actor_rewards = None
        finished_episodes: dict[int, LogStats] = {}
        infos: list[dict[Any, Any]] = [{} for _ in range(self.n_envs)]
        if not self.is_flat or not self._actor_ids:
            self._actor_ids = self._shared.read_actors()
        for worker, decoder, reply in zip(self._pool.workers, self._decoders, replies, strict=True):
            if reply is None:
                continue
            finished, told, finals, actor_rewards = reply
            finished_episodes.update((index, decoder.decode(encoded)) for index, encoded in finished)
            for index, info in told.items():
                infos[index] = info
            for index, (actor, observation) in finals.items():
                self.final_observations[index] = FinalObservation(ActorID(*actor), observation)
            if actor_rewards is not None:
                self.actor_rewards = self.actor_rewards or [None] * self.n_envs
                self.actor_rewards[worker.rows] = actor_rewards
        self._count_episodes(finished_episodes)
        return infos

    def _read_observations(self, out: Any) -> Any:
        target = out if out is not None else zeros(self._observation_spaces_dict, (self.n_envs,), "observation")
        copy_rows(self._shared.observations, target, self._actor_ids[:1] if self.is_flat else self._actor_ids)
        return target


def _worker_count(n_workers: int | None, n_envs: int) -> int:
    if n_envs == 0:
        raise ValueError("A vector environment needs at least one environment factory.")
    if n_workers is None:
        affinity = getattr(os, "sched_getaffinity", None)
        n_workers = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    if n_workers < 1:
        raise ConfigError(f"n_workers: expected at least 1, found {n_workers}.")
    return min(n_workers, n_envs)
