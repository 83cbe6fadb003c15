"""Rollouts of perturbed policies in worker processes and in actors of Ray."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import numpy as np

from maze.core.annotations import override
from maze.core.utils.config_utils import whole_number
from maze.core.utils.worker_pool import Worker, WorkerPool
from maze.core.utils.worker_process import Host
from maze.train.parallelization.distributed_actors.shared_policy import MadeOnce
from maze.train.parallelization.on_ray.actor_pool import N_AHEAD, ActorPool
from maze.train.parallelization.vector_env.vector_env_utils import StatsDecoder, StatsEncoder, with_stats
from maze.train.trainers.es.distributed.es_distributed_rollouts import (
    Episode,
    EpisodeSeeds,
    ESDistributedRollouts,
    ESRolloutResult,
    Outcome,
    RolloutSchedule,
    ScheduledRollouts,
)
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import MAX_ENVS, Players
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_utils import get_flat_weights

if TYPE_CHECKING:
    from maze.core.log_stats.log_stats import LogStatsAggregator


class ESWorker(Host):
    """Plays episodes in a worker process, several in parallel.

    :param env_factory: Makes an environment.
    :param n_slots: Number of parallel episodes.
    """

    sends_in_background: ClassVar[bool] = True

    def __init__(self, env_factory: Callable[[], Any], n_slots: int) -> None:
        self._env_factory, self._n_slots = env_factory, n_slots
        self._encoder = StatsEncoder()
        self._env: Any = None
        self._waiting: list[Episode] = []
        self._n_playing = 0

    @property
    @override(Host)
    def has_work(self) -> bool:
        return self._n_playing > 0

    @override(Host)
    def open(self) -> None:
        self._env = with_stats(self._env_factory())
        self._close: Callable[[], None] = self._env.close

    @override(Host)
    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            self._close()

    @override(Host)
    def advance(self) -> None:
        finished = self._player.play_on(self._waiting)
        if finished:
            self._n_playing -= len(finished)
            self.report((self._update, [(episode, *outcome.encoded(self._encoder)) for episode, outcome in finished]))

    def share_noise(self, count: int, seed: int, fd: int) -> None:
        """Receive the noise table.

        :param count: Size of the table.
        :param seed: Seed of the table.
        :param fd: File descriptor of its shared memory.
        """
        self._players = Players(self._env, self._env_factory, SharedNoiseTable(count, seed=seed, fd=fd))
        self._close = self._players.close

    def begin(self, update: int, policy: bytes | None, *arguments: Any) -> None:
        """Start an update; running episodes of the update before are discarded.

        :param update: Number of the update.
        :param policy: The pickled policy and statistics for observation normalization; `None`: as before.
        :param arguments: Arguments of :meth:`EpisodeBatch.configure`.
        """
        self._update = update
        self.stop()
        self._player = self._players.configured(policy, self._n_slots, *arguments)

    def play(self, episodes: list[Episode]) -> None:
        """Play more episodes of the current update."""
        self._waiting += episodes
        self._n_playing += len(episodes)

    def stop(self) -> None:
        """Discard the running episodes."""
        self._waiting.clear()
        self._n_playing = 0


class ESSubprocDistributedRollouts(ScheduledRollouts):
    """Plays episodes in worker processes, several in parallel in each worker.

    Workers receive the parameters once per update and a few integers per episode; they read perturbations from the
    shared noise table. Results and their order do not depend on which worker plays an episode, or when: they equal
    those of :class:`ESDummyDistributedRollouts` with the same seeds.

    :param env_factory: Makes an environment, in the worker.
    :param n_training_workers: Number of processes.
    :param n_eval_workers: Number of further processes; all processes play episodes of all kinds.
    :param shared_noise: The noise table.
    :param env_seeds: Seeds of the environments; the seeds of all episodes are derived from the first one.
    :param agent_seed: Seed of the perturbations.
    :param start_method: `forkserver` (default if available), `spawn` or `fork`.
    :param n_eval_rollouts: Number of episodes of the unperturbed policy in each update.
    :param concurrency: Number of parallel episodes of each worker; 0: at most 64.
    :raises ConfigError: A number of workers is too small.
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
        seeds = EpisodeSeeds(shared_noise, agent_seed, env_seeds[0] if env_seeds else None)
        super().__init__(seeds, n_eval_rollouts)
        self._concurrency = concurrency or MAX_ENVS
        hosts = [ESWorker(env_factory, self._concurrency)] * (n_training_workers + n_eval_workers)
        self._pool = pool = WorkerPool(hosts, start_method=start_method)
        pool.gather("building the environments")
        pool.call("share_noise", shared_noise.count, shared_noise.seed, name="start", fd=shared_noise.memory.fd)
        self._decoders = [StatsDecoder() for _ in pool.workers]
        self._policy: Any = None
        self._n_calls = 0

    @override(ESDistributedRollouts)
    def generate_rollouts(
        self, policy: Any, max_steps: int | None, noise_stddev: float, normalization_stats: Any
    ) -> Generator[ESRolloutResult, None, None]:
        schedule = self._next_schedule()
        self._n_calls += 1
        n_playing = dict.fromkeys(self._pool.workers, 0)
        sent = None if policy is self._policy else cloudpickle.dumps((policy, normalization_stats))
        self._policy = policy
        parameters = get_flat_weights(policy).numpy()
        self._pool.tell("begin", self._n_calls, sent, parameters, noise_stddev, max_steps)
        try:
            while True:
                self._hand_out(schedule, n_playing)
                for worker, episode, outcome in self._outcomes():
                    n_playing[worker] -= 1
                    schedule.record(episode, outcome)
                yield from schedule.results()
        finally:
            if schedule.n_in_flight and self._pool.is_open:
                self._pool.tell("stop")

    @override(ESDistributedRollouts)
    def close(self) -> None:
        self._pool.close()

    def _outcomes(self) -> Iterator[tuple[Worker, Episode, Outcome]]:
        """Wait until episodes have ended; episodes of earlier updates are dropped."""
        for worker, (update, finished) in self._pool.reports(wait=True):
            for episode, stats, *rest in finished:
                # decode dropped episodes as well: later statistics refer to their keys
                decoded = self._decoders[worker.index].decode(stats)
                if update == self._n_calls:
                    yield worker, episode, Outcome(decoded, *rest)

    def _hand_out(self, schedule: RolloutSchedule, n_playing: dict[Worker, int]) -> None:
        """Distribute episodes, the next one to the worker with the fewest."""
        handed_out: dict[Worker, list[Episode]] = {}
        while n_playing[worker := min(n_playing, key=n_playing.__getitem__)] < self._concurrency:
            episode = schedule.next_episode()
            if episode is None:
                break
            n_playing[worker] += 1
            handed_out.setdefault(worker, []).append(episode)
        for worker, episodes in handed_out.items():
            self._pool.tell("play", episodes, workers=[worker])


SMALLEST_SLICE = 16
"""Minimum number of episodes of a slice; the overhead of a call is noticeable below."""
_NAME = "episodes"


class RemotePlayer:
    """Plays slices of a population in an actor of Ray.

    :param env_factory: Makes one environment.
    :param shared_noise: The noise table; each actor draws its numbers itself.
    :param concurrency: Number of parallel episodes.
    """

    def __init__(self, env_factory: Callable[[], Any], shared_noise: SharedNoiseTable, concurrency: int) -> None:
        self._players = Players(with_stats(env_factory()), env_factory, shared_noise)
        self._concurrency = concurrency
        self._token = -1

    def play(
        self, episodes: list[Episode], token: int, policy: np.ndarray, parameters: np.ndarray, *limits: Any
    ) -> list[tuple[Any, ...]]:
        """Play episodes.

        :param episodes: The episodes.
        :param token: Number of the policy.
        :param policy: The pickled policy and the statistics for observation normalization, uint8 `[n_bytes]`.
        :param parameters: Result of :func:`~maze.train.trainers.es.es_utils.get_flat_weights`.
        :param limits: Further arguments of :meth:`EpisodeBatch.configure`.
        :return: The outcomes of the episodes with encoded statistics.
        """
        is_new, self._token = token != self._token, token
        player = self._players.configured(
            policy.tobytes() if is_new else None, self._concurrency, parameters.copy(), *limits
        )
        waiting, outcomes = list(episodes), dict[int, Outcome]()
        while len(outcomes) < len(episodes):
            outcomes.update((episode.number, outcome) for episode, outcome in player.play_on(waiting))
        encoder = StatsEncoder()
        return [outcomes[episode.number].encoded(encoder) for episode in episodes]

    def close(self) -> None:
        """Close the environments."""
        self._players.close()


class ESRayDistributedRollouts(ScheduledRollouts):
    """Plays slices of the population in actors of Ray.

    The parameters are sent once per update to each machine, and a few integers per episode. Results and their order do
    not depend on which actor plays an episode or on repetitions: they equal those of
    :class:`~maze.train.trainers.es.distributed.es_dummy_distributed_rollouts.ESDummyDistributedRollouts` with the same
    seeds.

    :param pool: The actors.
    :param env_factory: Makes an environment.
    :param seeds: Perturbations and environment seeds.
    :param n_eval_rollouts: Number of episodes of the unperturbed policy in each update.
    :param concurrency: Number of parallel episodes of each actor; 0: at most 64.
    """

    def __init__(
        self,
        pool: ActorPool,
        env_factory: Callable[[], Any],
        seeds: EpisodeSeeds,
        n_eval_rollouts: int,
        concurrency: int,
    ) -> None:
        super().__init__(seeds, n_eval_rollouts)
        self._pool, self._concurrency = pool, concurrency or MAX_ENVS
        self._policy: MadeOnce[Any] = MadeOnce()
        pool.host(_NAME, lambda *_: partial(RemotePlayer, env_factory, seeds.shared_noise, self._concurrency))

    @override(ESDistributedRollouts)
    def generate_rollouts(
        self, policy: Any, max_steps: int | None, noise_stddev: float, normalization_stats: Any
    ) -> Generator[ESRolloutResult, None, None]:
        schedule = self._next_schedule()
        sent = self._policy.of(policy, lambda: self._pool.publish((policy, normalization_stats)))
        parameters = self._pool.put(get_flat_weights(policy).numpy())
        common = (self._policy.n_made, sent, parameters, noise_stddev, max_steps)
        share = -(-(self._n_rollouts + self.n_eval_rollouts) // (N_AHEAD * self._pool.n_actors))
        size = min(self._concurrency, max(SMALLEST_SLICE, share))

        def next_slice() -> tuple[Any, ...] | None:
            episodes = list(islice(iter(schedule.next_episode, None), size))
            return (episodes, *common) if episodes else None

        for (episodes, *_), outcomes in self._pool.hand_out(_NAME, "play", next_slice):
            decoder = StatsDecoder()
            for episode, (stats, *rest) in zip(episodes, outcomes, strict=True):
                schedule.record(episode, Outcome(decoder.decode(stats), *rest))
            yield from schedule.results()

    @override(ESDistributedRollouts)
    def report_work(self, statistics: LogStatsAggregator) -> None:
        self._pool.report_work(statistics)
