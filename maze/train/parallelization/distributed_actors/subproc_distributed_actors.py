"""Actors in worker processes."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle

from maze.core.annotations import override
from maze.core.utils.worker_pool import WorkerPool, env_slices, process_context
from maze.core.utils.worker_process import Host
from maze.core.wrappers.reward_wrappers import load_statistics_states
from maze.train.parallelization.distributed_actors.distributed_actors import (
    ActorsAhead,
    DistributedActors,
    WorkCounter,
)
from maze.train.parallelization.distributed_actors.env_groups import EnvGroup, RolloutPlan
from maze.train.parallelization.distributed_actors.shared_policy import PolicyCopy, SharedPolicyWeights, copied_to_cpu
from maze.train.parallelization.vector_env.env_batch import ActorSpaces, check_same_spaces
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.vector_env_utils import StatsDecoder, StatsEncoder

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class Actor(Host):
    """Collects rollouts in a worker process, one for each ticket.

    :param index: Index of the actor.
    :param env_factories: Each makes one environment.
    :param n_rollout_steps: Number of environment steps of a rollout.
    """

    sends_in_background: ClassVar[bool] = True

    def __init__(self, index: int, env_factories: Sequence[Callable[[], Any]], n_rollout_steps: int) -> None:
        self._index = index
        self.env_factories = env_factories
        self._plan = RolloutPlan(n_rollout_steps, with_logits=True, keeps_terminal=False, begins=False)
        self._encoder = StatsEncoder()
        self._env: SequentialVectorEnv | None = None
        self._n_tickets = self._version = self._loaded_version = 0

    @property
    @override(Host)
    def has_work(self) -> bool:
        return self._n_tickets > 0

    @override(Host)
    def open(self) -> ActorSpaces:
        self._env = SequentialVectorEnv(self.env_factories)
        return ActorSpaces.of(self._env)

    @override(Host)
    def advance(self) -> None:
        if self._version != self._loaded_version:
            self._weights.read(self._version, self._copy.live_weights)
            self._loaded_version = self._version
        start = time.perf_counter()
        packet = self._group.collect(self._copy.policy, self._plan)
        seconds = time.perf_counter() - start
        self._n_tickets -= 1
        self.report((self._group.fragment(packet, self._encoder), self._version, seconds))

    @override(Host)
    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def start(self, pickled_policy: bytes, n_slots: int, agent_seed: Any, env_seeds: list[Any], fd: int) -> None:
        """Receive the policy and the shared memory of its weights.

        :param pickled_policy: The policy.
        :param n_slots: Number of versions of the weights in shared memory.
        :param agent_seed: Seed of the policy.
        :param env_seeds: A seed for each environment.
        :param fd: File descriptor of the shared memory.
        """
        assert self._env is not None
        self._group = EnvGroup(self._env, f"Actor {self._index}", env_seeds)
        self._copy = PolicyCopy(pickled_policy)
        self._copy.policy.seed(agent_seed)
        self._weights = SharedPolicyWeights(self._copy.live_weights, n_slots, fd)

    def add_tickets(self, n_more: int) -> None:
        """Receive tickets.

        :param n_more: Number of further rollouts to collect.
        """
        self._n_tickets += n_more

    def use_version(self, version: int) -> None:
        """Use another version of the policy from the next rollout on.

        :param version: Number of the version.
        """
        self._version = version

    def load_wrappers(self, states: list[Any]) -> None:
        """Load running statistics into the wrappers.

        :param states: States by environment.
        """
        assert self._env is not None
        for env, state in zip(self._env.envs, states, strict=True):
            load_statistics_states(env, state)


class SubprocDistributedActors(ActorsAhead):
    """Collects rollouts in worker processes while the learner learns.

    Each worker has its own pipe. Messages to workers are small and do not block the learner; weights are transferred
    through shared memory. :class:`~maze.train.parallelization.distributed_actors.distributed_actors.RolloutTickets`
    limits how far actors run ahead of the learner.

    :param env_factory: Makes one environment, in the worker.
    :param policy: The policy.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of worker processes.
    :param batch_size: Number of rollouts in a batch.
    :param queue_out_of_sync_factor: Maximum number of finished rollouts in the queue, in units of `batch_size`.
    :param start_method: `forkserver`, `spawn` or `fork`.
    :param actor_env_seeds: A seed for each environment.
    :param actor_agent_seeds: A seed for the policy of each actor.
    :param envs_per_actor: Number of environments that each actor steps together.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        queue_out_of_sync_factor: float,
        start_method: str,
        actor_env_seeds: list[int],
        actor_agent_seeds: list[int],
        *,
        envs_per_actor: int = 1,
    ) -> None:
        super().__init__(
            env_factory,
            policy,
            n_rollout_steps,
            n_actors,
            batch_size,
            queue_out_of_sync_factor,
            actor_env_seeds,
            actor_agent_seeds,
            envs_per_actor=envs_per_actor,
        )
        self.get_multiprocessing_context(start_method)
        if start_method == "forkserver":
            forkserver.ensure_running()  # it imports torch while the learner sets up everything else
        self._start_method = start_method
        self._pool: WorkerPool | None = None
        self._work = WorkCounter()

    @staticmethod
    def get_multiprocessing_context(start_method: str) -> Any:
        """Return the context that starts the worker processes.

        :param start_method: `forkserver`, `spawn` or `fork`.
        :raises ConfigError: The operating system does not support this start method.
        """
        return process_context(start_method, [Actor.__module__])

    @override(DistributedActors)
    def start(self) -> None:
        if self._pool is not None:
            return
        self._open()
        policy = copied_to_cpu(self.policy)
        self._weights = SharedPolicyWeights(policy.state_dict(), self._tickets.max_age + 2)
        slices = list(env_slices(self.n_actors * self.envs_per_actor, self.n_actors))
        factories = [self.env_factory] * self.envs_per_actor
        actors = [Actor(index, factories, self.n_rollout_steps) for index in range(self.n_actors)]
        pool = WorkerPool(actors, slices, self._start_method)
        try:
            spaces: list[ActorSpaces] = pool.gather("building the environments")
            for rows, of_actor in zip(slices, spaces, strict=True):
                check_same_spaces(spaces[0], of_actor, rows.start)
            env_seeds, agent_seeds = self._seeds_now()
            common = (cloudpickle.dumps(policy), self._tickets.max_age + 2)
            arguments = [(*common, seed, env_seeds[rows]) for seed, rows in zip(agent_seeds, slices, strict=True)]
            pool.call_each("start", arguments, self._weights.memory.fd)
        except BaseException:
            pool.close()
            raise
        self._pool, self._spaces = pool, spaces[0]
        self._decoders = [StatsDecoder() for _ in actors]
        self._weights.write(0, policy.state_dict())
        self._restore_wrappers()
        for worker in pool.workers:
            pool.tell(worker, "add_tickets", self._tickets.n_issued(worker.index))

    @override(DistributedActors)
    def stop(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @override(DistributedActors)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        if self._pool is None:
            return  # actors that are started later receive the policy itself
        self._tickets.updated()
        self._weights.write(self._tickets.version, state_dict)
        self._pool.tell_all("use_version", self._tickets.version)

    @override(ActorsAhead)
    def _report_work(self) -> None:
        n_under_way = sum(self._tickets.n_issued(actor) for actor in range(self.n_actors)) - len(self._arrived)
        self._work.report(self.epoch_stats, [platform.node()] * self.n_actors, self.n_actors, n_under_way)

    @override(ActorsAhead)
    def _issue(self, actor: int) -> None:
        assert self._pool is not None
        self._pool.tell(self._pool.workers[actor], "add_tickets", 1)

    @override(ActorsAhead)
    def _receive(self, wait: bool) -> None:
        assert self._pool is not None
        with self._work.waiting():
            results = self._pool.reports(wait)
        for worker, (fragment, version, seconds) in results:
            self._work.done(worker.index, seconds)
            packet = self._take(worker.index, fragment, self._decoders[worker.index])
            self._arrived.append((worker.index, packet, version))

    @override(ActorsAhead)
    def _restore_wrappers(self) -> None:
        if self._pool is not None:
            for worker in self._pool.workers:
                if worker.index in self._learned:
                    self._pool.tell(worker, "load_wrappers", self._learned[worker.index])
