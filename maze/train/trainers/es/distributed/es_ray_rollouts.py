"""Rollouts in actors of Ray."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from maze.core.annotations import override
from maze.train.parallelization.distributed_actors.shared_policy import MadeOnce
from maze.train.parallelization.on_ray.crew import N_AHEAD, Crew
from maze.train.parallelization.vector_env.stats_codec import StatsDecoder, StatsEncoder
from maze.train.parallelization.vector_env.vector_env_utils import with_stats
from maze.train.trainers.es.distributed.episode_batch import MAX_ENVS
from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts, ESRolloutResult
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import Players
from maze.train.trainers.es.distributed.rollout_schedule import Episode, EpisodeSeeds, Outcome, ScheduledRollouts
from maze.train.trainers.es.es_utils import get_flat_weights

if TYPE_CHECKING:
    from maze.core.log_stats.log_stats import LogStatsAggregator
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable

SMALLEST_SLICE = 16
"""Episodes of a slice, at least: below, what a call costs shows."""
_NAME = "episodes"


class RemotePlayer:
    """Plays slices of a population in an actor.

    :param env_factory: Makes one environment.
    :param shared_noise: The noise table; numbers are drawn where they are needed, and none of them travel.
    :param concurrency: Number of episodes side by side.
    """

    def __init__(self, env_factory: Callable[[], Any], shared_noise: SharedNoiseTable, concurrency: int) -> None:
        self._players = Players(with_stats(env_factory()), env_factory, shared_noise)
        self._concurrency = concurrency
        self._token = -1

    def play(
        self, episodes: list[Episode], token: int, policy: np.ndarray, parameters: np.ndarray, *limits: Any
    ) -> list[tuple[Any, ...]]:
        """Plays episodes.

        :param episodes: Which episodes.
        :param token: Tells policies apart.
        :param policy: The pickled policy and the statistics for observation normalization, uint8 `[n_bytes]`.
        :param parameters: As :func:`~maze.train.trainers.es.es_utils.get_flat_weights` gives them.
        :param limits: The further arguments of :meth:`EpisodePlayer.configure`.
        :return: Of each what came of it, its statistics encoded.
        """
        player = self._players.current
        if player is None or token != self._token:
            sent, normalization_stats = cloudpickle.loads(policy.tobytes())
            player = self._players.make(sent, normalization_stats, self._concurrency)
            self._token = token
        player.configure(parameters.copy(), *limits)
        waiting, outcomes = list(episodes), dict[int, Outcome]()
        while len(outcomes) < len(episodes):
            outcomes.update((episode.number, outcome) for episode, outcome in player.play_on(waiting))
        encoder = StatsEncoder()
        return [outcomes[episode.number].encoded(encoder) for episode in episodes]

    def close(self) -> None:
        """Closes the environments."""
        self._players.close()


class ESRayDistributedRollouts(ScheduledRollouts):
    """Plays slices of the population in actors of Ray.

    The parameters travel once to each machine and update; of an episode a few integers do. Which actor plays it, and
    how often it has to be asked, has no influence on the results or their order: they are those of
    :class:`~maze.train.trainers.es.distributed.es_dummy_distributed_rollouts.ESDummyDistributedRollouts` with the same
    seeds.

    :param crew: The actors.
    :param env_factory: Makes an environment.
    :param seeds: Where perturbations and environment seeds come from.
    :param n_eval_rollouts: Number of episodes of the policy itself for each update.
    :param concurrency: Number of episodes side by side in each actor; 0: as many as it gets, up to 64.
    """

    def __init__(
        self, crew: Crew, env_factory: Callable[[], Any], seeds: EpisodeSeeds, n_eval_rollouts: int, concurrency: int
    ) -> None:
        super().__init__(seeds, n_eval_rollouts)
        self._crew, self._concurrency = crew, concurrency or MAX_ENVS
        self._policy: MadeOnce[Any] = MadeOnce()
        crew.place(_NAME, lambda *_: partial(RemotePlayer, env_factory, seeds.shared_noise, self._concurrency))

    @override(ESDistributedRollouts)
    def generate_rollouts(
        self, policy: Any, max_steps: int | None, noise_stddev: float, normalization_stats: Any
    ) -> Generator[ESRolloutResult, None, None]:
        schedule = self._next_schedule()
        sent = self._policy.of(policy, lambda: self._crew.publish((policy, normalization_stats)))
        parameters = self._crew.put(get_flat_weights(policy).numpy())
        common = (self._policy.n_made, sent, parameters, noise_stddev, max_steps)
        share = -(-(self._n_rollouts + self.n_eval_rollouts) // (N_AHEAD * self._crew.n_actors))
        size = min(self._concurrency, max(SMALLEST_SLICE, share))

        def next_slice() -> tuple[Any, ...] | None:
            episodes = list(islice(iter(schedule.next_episode, None), size))
            return (episodes, *common) if episodes else None

        for (episodes, *_), outcomes in self._crew.hand_out(_NAME, "play", next_slice):
            decoder = StatsDecoder()
            for episode, (stats, *rest) in zip(episodes, outcomes, strict=True):
                schedule.record(episode, Outcome(decoder.decode(stats), *rest))
            yield from schedule.results()

    @override(ESDistributedRollouts)
    def report_work(self, statistics: LogStatsAggregator) -> None:
        self._crew.take_work().report(statistics)
