"""Rollouts in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle

from maze.core.annotations import override
from maze.core.errors import ConfigError, NonFiniteError
from maze.train.parallelization.distributed_actors.shared_policy import MadeOnce, SharedPolicyWeights
from maze.train.parallelization.vector_env import channel as messages
from maze.train.parallelization.vector_env.stats_codec import StatsDecoder
from maze.train.parallelization.vector_env.worker_pool import Worker, WorkerPool
from maze.train.trainers.es.distributed.episode_batch import MAX_ENVS
from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts, ESRolloutResult
from maze.train.trainers.es.distributed.es_worker import N_PARAMETER_SLOTS, run_es_worker
from maze.train.trainers.es.distributed.rollout_schedule import (
    Episode,
    EpisodeSeeds,
    Outcome,
    RolloutSchedule,
    ScheduledRollouts,
)
from maze.train.trainers.es.es_utils import get_flat_weights

if TYPE_CHECKING:
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable


class ESSubprocDistributedRollouts(ScheduledRollouts):
    """Plays episodes in worker processes, several side by side in each.

    Workers read the parameters once per update from shared memory, the perturbations from the shared noise table, and
    get a few integers per episode. Which worker plays an episode, and when, has no influence on the results or their
    order: they are those of :class:`ESDummyDistributedRollouts` with the same seeds.

    :param env_factory: Makes an environment, in the worker.
    :param n_training_workers: Number of processes for perturbed policies.
    :param n_eval_workers: Number of processes for the policy itself; 0: the others evaluate it as well.
    :param shared_noise: The noise table.
    :param env_seeds: Seeds of the environments; all episodes' seeds are derived from the first one.
    :param agent_seed: Seed of the perturbations.
    :param start_method: `forkserver` (default where there is one), `spawn` or `fork`.
    :param n_eval_rollouts: Number of episodes of the policy itself for each update.
    :param concurrency: Number of episodes side by side in each worker; 0: as many as it gets, up to 64.
    :raises ConfigError: There are too few workers, or episodes side by side.
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
        if n_training_workers < 1:
            raise ConfigError(f"runner.n_train_workers: expected at least 1, got {n_training_workers}.")
        if n_eval_workers < 0:
            raise ConfigError(f"runner.n_eval_workers: expected at least 0, got {n_eval_workers}.")
        seeds = EpisodeSeeds(shared_noise, agent_seed, env_seeds[0] if env_seeds else None)
        super().__init__(seeds, n_eval_rollouts)
        self._concurrency = concurrency or MAX_ENVS
        self._pool = pool = ESWorkerPool(env_factory, n_training_workers + n_eval_workers, start_method, shared_noise)
        self._training_workers = pool.workers[:n_training_workers]
        self._eval_workers = pool.workers[n_training_workers:] or self._training_workers
        self._n_playing = [0] * len(pool.workers)
        self._policy: MadeOnce[SharedPolicyWeights] = MadeOnce()
        self._n_calls = 0

    @override(ESDistributedRollouts)
    def generate_rollouts(
        self, policy: Any, max_steps: int | None, noise_stddev: float, normalization_stats: Any
    ) -> Generator[ESRolloutResult, None, None]:
        schedule = self._next_schedule()
        shared = self._policy.of(
            policy, lambda: self._pool.share_policy(policy, normalization_stats, self._concurrency)
        )
        self._n_calls += 1
        self._n_playing = [0] * len(self._pool.workers)
        shared.write(self._n_calls, {"parameters": get_flat_weights(policy)})
        self._pool.tell_all("update", (self._n_calls, noise_stddev, max_steps))
        try:
            while True:
                self._hand_out(schedule)
                for worker, episode, outcome in self._pool.outcomes(self._n_calls):
                    self._n_playing[worker.index] -= 1
                    schedule.record(episode, outcome)
                yield from schedule.results()
        finally:
            if schedule.n_in_flight and self._pool.is_open:
                self._pool.tell_all("stop", ())

    @override(ESDistributedRollouts)
    def close(self) -> None:
        self._pool.close()

    def _hand_out(self, schedule: RolloutSchedule) -> None:
        """Gives all workers something to do, those with little first."""
        handed_out: dict[int, list[tuple[Any, ...]]] = {}
        while schedule.needs_evaluation and (worker := self._least_busy(self._eval_workers)) is not None:
            self._assign(worker, schedule.next_evaluation(), handed_out)
        while schedule.needs_training and (worker := self._least_busy(self._training_workers)) is not None:
            self._assign(worker, schedule.next_training(), handed_out)
        if schedule.n_in_flight == 0:  # somebody wants more than was announced
            self._assign(self._training_workers[0], schedule.next_training(), handed_out)
        for index, episodes in handed_out.items():
            self._pool.tell(self._pool.workers[index], "play", (episodes,))

    def _assign(self, worker: Worker, episode: Episode, handed_out: dict[int, list[tuple[Any, ...]]]) -> None:
        self._n_playing[worker.index] += 1
        handed_out.setdefault(worker.index, []).append(tuple(episode))

    def _least_busy(self, workers: list[Worker]) -> Worker | None:
        worker = min(workers, key=lambda worker: self._n_playing[worker.index])
        return worker if self._n_playing[worker.index] < self._concurrency else None


class ESWorkerPool(WorkerPool):
    """Worker processes that play episodes and report each when it ends.

    :param env_factory: Makes an environment.
    :param n_workers: Number of processes.
    :param start_method: See :class:`ESSubprocDistributedRollouts`.
    :param shared_noise: The noise table.
    """

    _worker_main = staticmethod(run_es_worker)
    _self_explanatory = (NonFiniteError,)

    def __init__(
        self,
        env_factory: Callable[[], Any],
        n_workers: int,
        start_method: str | None,
        shared_noise: SharedNoiseTable,
    ) -> None:
        super().__init__([env_factory] * n_workers, start_method, n_workers, timeout=None)
        self._decoders = [StatsDecoder() for _ in self.workers]
        self.gather("building the environments")
        for worker in self.workers:
            with self._watching(worker, "start"):
                worker.channel.send(messages.DONE)
                shared_noise.send_to(worker.channel.connection, worker.process.pid)
        self.gather("start")

    @property
    def is_open(self) -> bool:
        """Whether the workers are there."""
        return bool(self._finalizer.still_active())

    def share_policy(self, policy: Any, normalization_stats: Any, concurrency: int) -> SharedPolicyWeights:
        """Hand out a policy.

        :param policy: The policy.
        :param normalization_stats: Statistics for observation normalization.
        :param concurrency: Number of episodes side by side in each worker.
        :return: The memory for its parameters.
        """
        weights = SharedPolicyWeights({"parameters": get_flat_weights(policy)}, N_PARAMETER_SLOTS)
        pickled = cloudpickle.dumps(policy)
        for worker in self.workers:
            self.tell(worker, "policy", (pickled, normalization_stats, concurrency))
            with self._watching(worker, "policy"):
                weights.send_to(worker.channel.connection, worker.process.pid)
        return weights

    def tell(self, worker: Worker, method: str, arguments: tuple[Any, ...]) -> None:
        """Tells a worker something that it does not answer at once."""
        self._check_open()
        with self._watching(worker, method):
            worker.channel.send(messages.CALL, (method, arguments))

    def tell_all(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Tells all workers the same."""
        for worker in self.workers:
            self.tell(worker, method, arguments)

    def outcomes(self, update: int) -> Iterator[tuple[Worker, Episode, Outcome]]:
        """Waits until episodes have ended.

        :param update: Which update they have to belong to; those of earlier ones are dropped.
        """
        for fd, _ in self._events():
            worker = self._worker_of[fd]
            if fd != worker.channel.fd:
                self._fail_dead(worker, "rollout")
            its_update, finished = self._receive(worker, "rollout")
            for episode, stats, *rest in finished:
                # of dropped episodes as well: later statistics refer to keys that came with them
                decoded = self._decoders[worker.index].decode(stats)
                if its_update == update:
                    yield worker, Episode(*episode), Outcome(decoded, *rest)
