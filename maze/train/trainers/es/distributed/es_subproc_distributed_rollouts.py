"""Rollouts of perturbed policies in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maze.core.annotations import override
from maze.core.utils.config_utils import whole_number
from maze.core.utils.worker_pool import ProcessPool
from maze.train.trainers.es.distributed.es_distributed_rollouts import EpisodeSeeds, ESDistributedRollouts
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import Players, PooledRollouts
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable


class ESSubprocDistributedRollouts(PooledRollouts):
    """Rollouts in worker processes; the noise table is shared memory.

    :param env_factory: Makes one environment.
    :param n_training_workers: Number of processes.
    :param n_eval_workers: Number of further processes; all processes play episodes of all kinds.
    :param shared_noise: The noise table.
    :param env_seeds: The first seed is that of the environment seeds; empty: environments are not seeded.
    :param agent_seed: Seed of the perturbations.
    :param start_method: `forkserver`, `spawn` or `fork`; `None`: `forkserver` if available.
    :param n_eval_rollouts: Number of episodes of the unperturbed policy in each update.
    :param concurrency: Maximum number of parallel episodes of a process; 0: 64.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        n_training_workers: int,
        n_eval_workers: int,
        shared_noise: SharedNoiseTable,
        env_seeds: list[int],
        agent_seed: int,
        start_method: str | None = None,
        *,
        n_eval_rollouts: int = 10,
        concurrency: int = 0,
    ) -> None:
        for name, number, minimum in (("train", n_training_workers, 1), ("eval", n_eval_workers, 0)):
            whole_number(f"runner.n_{name}_workers", number, at_least=minimum)
        maker = Players.maker(env_factory, shared_noise, concurrency)
        seeds = EpisodeSeeds(shared_noise, agent_seed, env_seeds[0] if env_seeds else None)
        pool = ProcessPool(n_training_workers + n_eval_workers, start_method, modules=[Players.__module__])
        super().__init__(pool, maker, seeds, n_eval_rollouts)

    @override(ESDistributedRollouts)
    def close(self) -> None:
        self.pool.close()
