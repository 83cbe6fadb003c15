"""Actors in processes of their own."""

from __future__ import annotations

import multiprocessing
import platform
from collections.abc import Callable
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import cloudpickle

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.train.parallelization.distributed_actors.actor_work import Work, WorkCounter
from maze.train.parallelization.distributed_actors.actor_worker import run_actor
from maze.train.parallelization.distributed_actors.actors_ahead import ActorsAhead, RolloutTickets
from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
from maze.train.parallelization.distributed_actors.rollout_packet import ActorSpaces, RolloutPacket, SubstepPacket
from maze.train.parallelization.distributed_actors.shared_policy import SharedPolicyWeights, copied_to_cpu
from maze.train.parallelization.vector_env import channel as messages
from maze.train.parallelization.vector_env.env_batch import check_same_spaces
from maze.train.parallelization.vector_env.stats_codec import StatsDecoder
from maze.train.parallelization.vector_env.worker_pool import Worker, WorkerPool
from maze.utils.process import preload

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class SubprocDistributedActors(ActorsAhead):
    """Collects rollouts in worker processes while the learner learns.

    Each worker has a pipe of its own. Messages to workers are small, so the learner never waits for one to be read;
    weights travel through shared memory. How far actors may be ahead is what
    :class:`~maze.train.parallelization.distributed_actors.actors_ahead.RolloutTickets` says.

    :param env_factory: Makes one environment, in the worker.
    :param policy: The policy.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of worker processes.
    :param batch_size: Number of rollouts in a batch.
    :param queue_out_of_sync_factor: Times `batch_size`, the number of finished rollouts that may wait.
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
        context = self.get_multiprocessing_context(start_method)
        if start_method == "forkserver":
            # a server that has imported torch starts workers in no time; meanwhile the learner sets up the rest
            preload(context, [run_actor.__module__])
            forkserver.ensure_running()
        self._start_method = start_method
        self._pool: ActorPool | None = None
        self._work = WorkCounter()

    @staticmethod
    def get_multiprocessing_context(start_method: str) -> Any:
        """How processes are started.

        :param start_method: `forkserver`, `spawn` or `fork`.
        :raises ConfigError: The operating system cannot start processes in this way.
        """
        available = multiprocessing.get_all_start_methods()
        if start_method not in available:
            hint = " Without processes there is SequentialDistributedActors." if start_method == "dummy" else ""
            raise ConfigError(f"start_method: expected one of {', '.join(available)}, found {start_method!r}.{hint}")
        return multiprocessing.get_context(start_method)

    @override(DistributedActors)
    def start(self) -> None:
        if self._pool is not None:
            return
        self._open()
        policy = copied_to_cpu(self.policy)
        self._weights = SharedPolicyWeights(policy.state_dict(), self._tickets.max_age + 2)
        pool = ActorPool(self.env_factory, self.n_actors, self.envs_per_actor, self._start_method)
        try:
            pool.start(
                cloudpickle.dumps(policy), self._weights, self._tickets, self.n_rollout_steps, *self._seeds_now()
            )
        except BaseException:
            pool.close()
            raise
        self._pool, self._spaces = pool, pool.spaces
        self._weights.write(0, policy.state_dict())
        self._restore_wrappers()
        for worker in pool.workers:
            pool.tell(worker, "rollouts", self._tickets.n_issued(worker.index))

    @override(DistributedActors)
    def stop(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @override(DistributedActors)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        if self._pool is None:
            return  # those who start later take the policy itself
        self._tickets.updated()
        self._weights.write(self._tickets.version, state_dict)
        for worker in self._pool.workers:
            self._pool.tell(worker, "version", self._tickets.version)

    @override(ActorsAhead)
    def _work_done(self) -> Work:
        n_under_way = sum(self._tickets.n_issued(actor) for actor in range(self.n_actors)) - len(self._arrived)
        return self._work.take([platform.node()] * self.n_actors, self.n_actors, n_under_way)

    @override(ActorsAhead)
    def _issue(self, actor: int) -> None:
        assert self._pool is not None
        self._pool.tell(self._pool.workers[actor], "rollouts", 1)

    @override(ActorsAhead)
    def _receive(self, wait: bool) -> None:
        assert self._pool is not None
        with self._work.waiting():
            results = self._pool.results(wait)
        for worker, (packet, version, finished, states, seconds) in results:
            self._work.done(worker.index, seconds)
            for stats in finished:
                self.epoch_stats.receive(stats)
            if states:
                self._learned[worker.index] = states
            self._arrived.append((worker.index, packet, version))

    @override(ActorsAhead)
    def _restore_wrappers(self) -> None:
        if self._pool is not None:
            for worker in self._pool.workers:
                if worker.index in self._learned:
                    self._pool.tell(worker, "wrapper_statistics", self._learned[worker.index])


class ActorPool(WorkerPool):
    """Worker processes that collect rollouts.

    :param env_factory: Makes one environment.
    :param n_actors: Number of processes.
    :param envs_per_actor: Number of environments in each.
    :param start_method: `forkserver`, `spawn` or `fork`.
    """

    _worker_main = staticmethod(run_actor)

    def __init__(self, env_factory: Callable[[], Any], n_actors: int, envs_per_actor: int, start_method: str) -> None:
        super().__init__([env_factory] * (n_actors * envs_per_actor), start_method, n_actors, timeout=None)
        self._decoders = [StatsDecoder() for _ in self.workers]

    def start(
        self,
        pickled_policy: bytes,
        weights: SharedPolicyWeights,
        tickets: RolloutTickets,
        n_rollout_steps: int,
        env_seeds: list[Any],
        agent_seeds: list[Any],
    ) -> None:
        """Waits for the environments, then hands out the policy."""
        all_spaces = [ActorSpaces(*spaces) for spaces in self.gather("building the environments")]
        self.spaces = all_spaces[0]
        for worker, spaces in zip(self.workers, all_spaces, strict=True):
            check_same_spaces(self.spaces, spaces, worker.rows.start)
        for worker, agent_seed in zip(self.workers, agent_seeds, strict=True):
            n_slots = tickets.max_age + 2
            arguments = (worker.index, pickled_policy, n_slots, n_rollout_steps, agent_seed, env_seeds[worker.rows])
            self.tell(worker, "start", *arguments)
            with self._watching(worker, "start"):
                weights.send_to(worker.channel.connection, worker.process.pid)
        self.gather("start")

    def tell(self, worker: Worker, method: str, *arguments: Any) -> None:
        """Tells a worker something that it does not answer at once."""
        self._check_open()
        with self._watching(worker, method):
            worker.channel.send(messages.CALL, (method, arguments))

    def results(self, wait: bool) -> list[tuple[Worker, Any]]:
        """The rollouts that have arrived.

        :param wait: Whether to wait for one if there is none.
        """
        self._check_open()
        received: list[tuple[Worker, Any]] = []
        timeout = None if wait else 0
        while True:
            events = self._events(timeout)
            if not events:
                return received
            for fd, _ in events:
                worker = self._worker_of[fd]
                if fd != worker.channel.fd:
                    if not worker.channel.connection.poll(0):
                        self._fail_dead(worker, "rollout")
                    continue
                received.append((worker, self._decoded(worker, self._receive(worker, "rollout"))))
            timeout = 0

    def _decoded(self, worker: Worker, payload: Any) -> Any:
        packet, version, finished, *rest = payload
        substeps = {key: SubstepPacket(*substep) for key, substep in packet[0].items()}
        decoder = self._decoders[worker.index]
        return RolloutPacket(substeps, *packet[1:]), version, [decoder.decode(stats) for stats in finished], *rest
