"""Rollouts in actors of Ray."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from maze.core.annotations import override
from maze.core.env.faults import closed
from maze.train.parallelization.on_ray.ray_envs import decoded
from maze.train.parallelization.vector_env.stats_codec import StatsEncoder
from maze.train.parallelization.vector_env.vector_env_utils import with_stats
from maze.train.trainers.es.distributed.episode_batch import MAX_ENVS, EpisodePlayer
from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts, ESRolloutResult
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import make_player, normalize
from maze.train.trainers.es.distributed.rollout_schedule import Episode, EpisodeSeeds, Outcome, RolloutSchedule
from maze.train.trainers.es.es_utils import get_flat_parameters

if TYPE_CHECKING:
    from maze.train.parallelization.on_ray.crew import Crew, Task
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable

N_SLICES = 2
"""Slices of the population that an actor has before it: one is played, the other one waits."""
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
        self._env_factory, self._shared_noise, self._concurrency = env_factory, shared_noise, concurrency
        self._env = with_stats(env_factory())
        self._player: EpisodePlayer | None = None
        self._token = -1

    def play(
        self,
        token: int,
        policy: np.ndarray,
        parameters: np.ndarray,
        noise_stddev: float,
        max_steps: int | None,
        episodes: list[Episode],
    ) -> list[tuple[Any, float, int]]:
        """Plays episodes.

        :param token: Tells policies apart.
        :param policy: The pickled policy and the statistics for observation normalization, uint8 `[n_bytes]`.
        :param parameters: float32 `[n_parameters]`.
        :param noise_stddev: Standard deviation of the perturbations.
        :param max_steps: Episodes are cut off after this number of environment steps; `None`: never.
        :param episodes: Which episodes.
        :return: Encoded statistics, return and number of steps of each.
        """
        player = self._player_for(token, policy)
        player.configure(parameters.copy(), noise_stddev, max_steps)
        waiting, outcomes = list(reversed(episodes)), dict[int, Outcome]()
        while len(outcomes) < len(episodes):
            while waiting and player.n_free:
                player.start(waiting.pop())
            outcomes.update((episode.number, outcome) for episode, outcome in player.advance())
        encoder, ordered = StatsEncoder(), [outcomes[episode.number] for episode in episodes]
        return [(encoder.encode(outcome.stats), outcome.episode_return, outcome.n_steps) for outcome in ordered]

    def close(self) -> None:
        """Closes the environments."""
        if self._player is not None:
            self._player.close(keep=self._env)
        closed(self._env.close, "environment")

    def _player_for(self, token: int, pickled: np.ndarray) -> EpisodePlayer:
        if self._player is None or token != self._token:
            if self._player is not None:
                self._player.close(keep=self._env)
            policy, normalization_stats = cloudpickle.loads(pickled.tobytes())
            normalize(self._env, normalization_stats)

            def new_env() -> Any:
                env = self._env_factory()
                normalize(env, normalization_stats)
                return env

            self._player = make_player(self._env, new_env, policy, self._shared_noise, self._concurrency)
            self._token = token
        return self._player


class ESRayDistributedRollouts(ESDistributedRollouts):
    """Plays slices of the population in actors of Ray.

    The parameters travel once to each machine and update; of an episode a few integers do. Which actor plays it, and
    how often it has to be asked, has no influence on the results or their order: they are those of
    :class:`~maze.train.trainers.es.distributed.es_dummy_distributed_rollouts.ESDummyDistributedRollouts` with the same
    seeds.

    :param crew: The actors.
    :param env_factory: Makes an environment.
    :param shared_noise: The noise table.
    :param env_seed: Seed that all episodes' seeds are derived from.
    :param agent_seed: Seed of the perturbations.
    :param n_eval_rollouts: Number of episodes of the policy itself for each update.
    :param concurrency: Number of episodes side by side in each actor; 0: as many as it gets, up to 64.
    """

    def __init__(
        self,
        crew: Crew,
        env_factory: Callable[[], Any],
        shared_noise: SharedNoiseTable,
        env_seed: int,
        agent_seed: int,
        *,
        n_eval_rollouts: int = 10,
        concurrency: int = 0,
    ) -> None:
        self.n_eval_rollouts = n_eval_rollouts
        self._crew = crew
        self._seeds = EpisodeSeeds(shared_noise, agent_seed, env_seed)
        self._concurrency = concurrency or MAX_ENVS
        maker = partial(RemotePlayer, env_factory, shared_noise, self._concurrency)
        crew.place(_NAME, [lambda n_starts: maker] * crew.n_actors)
        self._policy: Any = None
        self._structure: Any = None
        self._token = 0
        self._update = 0
        self._n_rollouts, self._n_timesteps = 0, 0

    @override(ESDistributedRollouts)
    def prepare_update(self, update: int, n_rollouts: int, n_timesteps: int) -> None:
        self._update, self._n_rollouts, self._n_timesteps = update, n_rollouts, n_timesteps

    @override(ESDistributedRollouts)
    def generate_rollouts(
        self, policy: Any, max_steps: int | None, noise_stddev: float, normalization_stats: Any
    ) -> Generator[ESRolloutResult, None, None]:
        schedule = RolloutSchedule(self._seeds, self._update, self.n_eval_rollouts, self._n_rollouts, self._n_timesteps)
        self._update += 1  # another one follows, also if nobody prepares it
        if policy is not self._policy:
            pickled = np.frombuffer(cloudpickle.dumps((policy, normalization_stats)), np.uint8)
            self._policy, self._structure = policy, self._crew.put(pickled)
            self._token += 1
        parameters = self._crew.put(get_flat_parameters(policy).numpy())
        common = (self._token, self._structure, parameters, noise_stddev, max_steps)
        share = -(-(self._n_rollouts + self.n_eval_rollouts) // (N_SLICES * self._crew.n_actors))
        size = min(self._concurrency, max(SMALLEST_SLICE, share))
        under_way: dict[Task, list[Episode]] = {}
        while True:
            for actor in range(self._crew.n_actors):
                n_waiting = sum(task.actor == actor for task in under_way)
                while n_waiting < N_SLICES and (episodes := _slice(schedule, size)):
                    under_way[self._crew.submit(actor, _NAME, "play", *common, episodes)] = episodes
                    n_waiting += 1
            if not under_way:  # somebody wants more than was announced
                episodes = [schedule.next_training()]
                under_way[self._crew.submit(0, _NAME, "play", *common, episodes)] = episodes
            for task in self._crew.finished(list(under_way)):
                encoded, returns, n_steps = zip(*task.result, strict=True)
                for episode, *outcome in zip(under_way.pop(task), decoded(encoded), returns, n_steps, strict=True):
                    schedule.record(episode, Outcome(*outcome))
            yield from schedule.results()


def _slice(schedule: RolloutSchedule, size: int) -> list[Episode]:
    """The next episodes of an update, evaluations first; empty: no more are needed, as far as is known."""
    episodes: list[Episode] = []
    while len(episodes) < size and schedule.needs_evaluation:
        episodes.append(schedule.next_evaluation())
    while len(episodes) < size and schedule.needs_training:
        episodes.append(schedule.next_training())
    return episodes
