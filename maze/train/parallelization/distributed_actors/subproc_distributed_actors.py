"""Actors in processes of their own."""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import cloudpickle

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.train.parallelization.distributed_actors.actor_worker import run_actor
from maze.train.parallelization.distributed_actors.distributed_actors import (
    CollectedBatch,
    DistributedActors,
    checked_actor_seeds,
    queue_size_of,
    seed_of_start,
)
from maze.train.parallelization.distributed_actors.rollout_packet import ActorSpaces, RolloutPacket, SubstepPacket
from maze.train.parallelization.distributed_actors.rollout_tickets import RolloutTickets
from maze.train.parallelization.distributed_actors.shared_policy import SharedPolicyWeights
from maze.train.parallelization.vector_env import channel as messages
from maze.train.parallelization.vector_env.env_batch import check_same_spaces
from maze.train.parallelization.vector_env.replay_log import states_for
from maze.train.parallelization.vector_env.stats_codec import StatsDecoder
from maze.train.parallelization.vector_env.worker_pool import Worker, WorkerPool
from maze.utils.process import preload

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class SubprocDistributedActors(DistributedActors):
    """Collects rollouts in worker processes while the learner learns.

    Each worker has a pipe of its own. Messages to workers are small, so the learner never waits for one to be read;
    weights travel through shared memory. How far actors may be ahead is what
    :class:`~maze.train.parallelization.distributed_actors.rollout_tickets.RolloutTickets` says.

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
        super().__init__(env_factory, policy, n_rollout_steps, n_actors, batch_size, envs_per_actor=envs_per_actor)
        self._queue_size = queue_size_of(queue_out_of_sync_factor, batch_size)
        self._env_seeds = checked_actor_seeds(actor_env_seeds, n_actors * envs_per_actor, "actor_env_seeds")
        self._agent_seeds = checked_actor_seeds(actor_agent_seeds, n_actors, "actor_agent_seeds")
        context = self.get_multiprocessing_context(start_method)
        if start_method == "forkserver":
            # a server that has imported torch starts workers in no time; meanwhile the learner sets up the rest
            preload(context, [run_actor.__module__])
            forkserver.ensure_running()
        self._start_method = start_method
        self._pool: ActorPool | None = None
        self._n_starts = 0
        self._learned: dict[int, list[Any]] = {}
        """What the wrappers of an actor's environments have learned."""

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
        self._tickets = RolloutTickets(self.n_actors, self.batch_size, self._queue_size)
        self._arrived: list[tuple[int, RolloutPacket, int]] = []
        policy = copy.deepcopy(self.policy)
        policy.to("cpu")
        self._weights = SharedPolicyWeights(policy.state_dict(), self._tickets.max_age + 2)
        pool = ActorPool(self.env_factory, self.n_actors, self.envs_per_actor, self._start_method)
        try:
            env_seeds = [seed_of_start(seed, self._n_starts) for seed in self._env_seeds]
            agent_seeds = [seed_of_start(seed, self._n_starts) for seed in self._agent_seeds]
            pool.start(
                cloudpickle.dumps(policy), self._weights, self._tickets, self.n_rollout_steps, env_seeds, agent_seeds
            )
        except BaseException:
            pool.close()
            raise
        self._pool = pool
        self._n_starts += 1
        self._weights.write(0, policy.state_dict())
        for worker in pool.workers:
            if worker.index in self._learned:
                pool.tell(worker, "wrapper_statistics", self._learned[worker.index])
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

    @override(DistributedActors)
    def collect_batch(self) -> CollectedBatch:
        self.start()
        pool = self._pool
        assert pool is not None
        start = time.perf_counter()
        self._receive(pool, wait=False)
        n_before = len(self._arrived)
        taken: list[RolloutPacket] = []
        lags: list[int] = []
        while len(taken) < self.batch_size:
            actor = self._tickets.next_of(actor for actor, _, _ in self._arrived)
            if actor is None:
                self._receive(pool, wait=True)
                continue
            position = next(i for i, (other, _, _) in enumerate(self._arrived) if other == actor)
            _, packet, version = self._arrived.pop(position)
            self._tickets.take(actor)
            pool.tell(pool.workers[actor], "rollouts", 1)
            taken.append(packet)
            lags.append(self._tickets.version - version)
        self._tickets.batch_done()
        seconds = time.perf_counter() - start
        return CollectedBatch(self._joined(taken, pool.spaces), n_before, len(self._arrived), seconds, lags)

    @override(DistributedActors)
    def state_dict(self) -> dict[str, Any]:
        problem = "they were in processes of their own, which were ahead of the training"
        known = [states for actor in sorted(self._learned) for states in self._learned[actor]] or [[]]
        n_envs = self.n_actors * self.envs_per_actor
        states = [{"problem": problem, "wrappers": known[index % len(known)]} for index in range(n_envs)]
        return {"n_starts": self._n_starts, "environments": states}

    @override(DistributedActors)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Nothing is repeated: actors that are started again get seeds that they did not have before."""
        self._n_starts = max(self._n_starts, state_dict.get("n_starts", 0))
        n = self.envs_per_actor
        learned = [state["wrappers"] for state in states_for(state_dict, self.n_actors * n)]
        self._learned = {actor: learned[actor * n : (actor + 1) * n] for actor in range(self.n_actors) if any(learned)}
        if self._pool is not None:
            for worker in self._pool.workers:
                if worker.index in self._learned:
                    self._pool.tell(worker, "wrapper_statistics", self._learned[worker.index])
        reason = "actors in processes of their own are ahead of the training, and what they do depends on its speed"
        return dict.fromkeys(range(len(learned)), reason)

    def _receive(self, pool: ActorPool, wait: bool) -> None:
        """Takes in all rollouts that are finished."""
        for worker, (packet, version, finished, states) in pool.results(wait):
            for stats in finished:
                self.epoch_stats.receive(stats)
            if states:
                self._learned[worker.index] = states
            self._arrived.append((worker.index, packet, version))


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
            try:
                events = self._poll.poll(timeout)
            except BaseException:
                self.close()
                raise
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
        packet, version, finished, states = payload
        substeps = {key: SubstepPacket(*substep) for key, substep in packet[0].items()}
        decoder = self._decoders[worker.index]
        return RolloutPacket(substeps, *packet[1:]), version, [decoder.decode(stats) for stats in finished], states
