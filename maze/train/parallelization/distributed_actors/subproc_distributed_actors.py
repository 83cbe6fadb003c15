"""Actors in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.utils.worker_pool import ProcessPool, env_slices, process_context
from maze.train.parallelization.distributed_actors.distributed_actors import ActorsAhead, DistributedActors
from maze.train.parallelization.distributed_actors.env_groups import EnvGroups
from maze.train.parallelization.vector_env.sequential_vector_env import in_sequence


class SubprocDistributedActors(ActorsAhead):
    """Collect rollouts in worker processes while the learner learns.

    Each worker has its own pipe. Messages to workers are small and do not block the learner; weights are transferred
    through shared memory. :class:`~maze.train.parallelization.distributed_actors.distributed_actors.RolloutTickets`
    limits how far actors run ahead of the learner.

    :param env_factory: Makes one environment, in the worker.
    :param policy: The policy.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of actors, each in a worker process by default.
    :param batch_size: Number of rollouts in a batch.
    :param queue_out_of_sync_factor: Maximum number of finished rollouts in the queue, in units of `batch_size`.
    :param start_method: `forkserver`, `spawn` or `fork`.
    :param actor_env_seeds: A seed for each environment.
    :param actor_agent_seeds: A seed for the policy of each actor.
    :param envs_per_actor: Number of environments that each actor steps together.
    :param limits: Time limit, replacements and threads of the processes: arguments of
        :class:`~maze.core.utils.worker_pool.ProcessPool`.
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
        **limits: Any,
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
            make_groups=self._groups_in_processes,
        )
        self.get_multiprocessing_context(start_method)
        if start_method == "forkserver":
            forkserver.ensure_running()  # it imports torch while the learner sets up everything else
        self._start_method, self._limits = start_method, limits

    @staticmethod
    def get_multiprocessing_context(start_method: str) -> Any:
        """Return the context that starts the worker processes.

        :param start_method: `forkserver`, `spawn` or `fork`.
        :raises ConfigError: The operating system does not support this start method.
        """
        return process_context(start_method, [EnvGroups.__module__])

    def _groups_in_processes(self) -> EnvGroups:
        pool = ProcessPool(
            self.n_actors,
            self._start_method,
            env_slices(self.n_actors * self.envs_per_actor, self.n_actors),
            n_slots=self._tickets.max_age + 2,
            in_background=True,
            modules=[EnvGroups.__module__],
            **self._limits,
        )
        return EnvGroups(pool, "rollouts", in_sequence, "Actor")

    @override(DistributedActors)
    def stop(self) -> None:
        if self._groups is not None:
            self._groups.pool.close()
        super().stop()
