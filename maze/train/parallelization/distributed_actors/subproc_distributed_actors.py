"""Actors in worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any, ClassVar

from maze.core.annotations import override
from maze.core.utils.worker_pool import WorkerPool, env_slices, process_context
from maze.core.utils.worker_process import Host
from maze.train.parallelization.distributed_actors.distributed_actors import (
    ActorsAhead,
    DistributedActors,
    WorkCounter,
)
from maze.train.parallelization.distributed_actors.env_groups import EnvGroup, RolloutPlan
from maze.train.parallelization.distributed_actors.shared_policy import SharedPolicyWeights, copied_to_cpu
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.vector_env_utils import (
    ActorSpaces,
    StatsDecoder,
    StatsEncoder,
    check_same_spaces,
)

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class Actor(Host):
    """Collects rollouts in a worker process, one for each ticket.

    :param env_factories: Each makes one environment.
    :param group: Further arguments of :class:`EnvGroup`: name, seeds and statistics of wrappers.
    :param policy: The policy.
    :param policy_seed: Seed of its random generators.
    :param plan: Parameters of the rollouts.
    :param n_slots: Number of versions of the weights in shared memory.
    """

    sends_in_background: ClassVar[bool] = True

    def __init__(
        self,
        env_factories: Sequence[Callable[[], Any]],
        group: tuple[str, list[Any], list[Any]],
        policy: TorchPolicy,
        policy_seed: Any,
        plan: RolloutPlan,
        n_slots: int,
    ) -> None:
        self._env_factories, self._of_group = env_factories, group
        self._policy, self._policy_seed, self._plan, self._n_slots = policy, policy_seed, plan, n_slots
        self._encoder = StatsEncoder()
        self._group: EnvGroup | None = None
        self._n_tickets = self._version = self._loaded_version = 0

    @property
    @override(Host)
    def has_work(self) -> bool:
        return self._n_tickets > 0

    @override(Host)
    def open(self) -> ActorSpaces:
        self._policy.seed(self._policy_seed)
        self._group = EnvGroup(SequentialVectorEnv(self._env_factories), *self._of_group)
        return self._group.spaces()

    @override(Host)
    def advance(self) -> None:
        assert self._group is not None, "`open` comes first"
        if self._version != self._loaded_version:
            self._weights.read(self._version, self._live_weights)
            self._loaded_version = self._version
        start = time.perf_counter()
        packet = self._group.collect(self._policy, self._plan)
        seconds = time.perf_counter() - start
        self._n_tickets -= 1
        self.report((self._group.fragment(packet, self._encoder), self._version, seconds))

    @override(Host)
    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def share_weights(self, fd: int) -> None:
        """Receive the shared memory of the weights.

        :param fd: Its file descriptor.
        """
        self._live_weights = self._policy.state_dict()
        self._weights = SharedPolicyWeights(self._live_weights, self._n_slots, fd)

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
        sizes = (n_rollout_steps, n_actors, batch_size, queue_out_of_sync_factor)
        super().__init__(env_factory, policy, *sizes, actor_env_seeds, actor_agent_seeds, envs_per_actor=envs_per_actor)
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
        actors = []
        env_seeds, agent_seeds = self._seeds_now()
        for index, rows in enumerate(slices):
            group = (f"Actor {index}", env_seeds[rows], self._learned.get(index, []))
            factories, policy_seed = [self.env_factory] * self.envs_per_actor, agent_seeds[index]
            actors.append(Actor(factories, group, policy, policy_seed, self._plan, self._tickets.max_age + 2))
        self._pool = pool = WorkerPool(actors, slices, self._start_method)
        try:
            spaces: list[ActorSpaces] = pool.gather("building the environments")
            for rows, of_actor in zip(slices, spaces, strict=True):
                check_same_spaces(spaces[0], of_actor, f"environment {rows.start}")
            pool.call("share_weights", fd=self._weights.memory.fd)
        except BaseException:
            self.stop()
            raise
        self._spaces = spaces[0]
        self._decoders = [StatsDecoder() for _ in actors]
        for worker in pool.workers:
            pool.tell("add_tickets", self._tickets.n_issued(worker.index), workers=[worker])

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
        self._pool.tell("use_version", self._tickets.version)

    @override(ActorsAhead)
    def _report_work(self) -> None:
        n_under_way = sum(self._tickets.n_issued(actor) for actor in range(self.n_actors)) - len(self._arrived)
        self._work.report(self.epoch_stats, self.n_actors, self.n_actors, n_under_way)

    @override(ActorsAhead)
    def _issue(self, actor: int) -> None:
        assert self._pool is not None
        self._pool.tell("add_tickets", 1, workers=[self._pool.workers[actor]])

    @override(ActorsAhead)
    def _receive(self, wait: bool) -> None:
        assert self._pool is not None
        with self._work.waiting():
            results = self._pool.reports(wait)
        for worker, (fragment, version, seconds) in results:
            self._work.done(worker.index, seconds)
            packet = self._take(worker.index, fragment, self._decoders[worker.index])
            self._arrived.append((worker.index, packet, version))
