"""Rollouts in the process of the trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.env.faults import closed
from maze.train.parallelization.vector_env.vector_env_utils import with_stats
from maze.train.trainers.es.distributed.episode_batch import (
    MAX_ENVS,
    EpisodeBatch,
    EpisodePlayer,
    SingleEpisodePlayer,
    obstacle_to_batching,
    population_size,
)
from maze.train.trainers.es.distributed.es_distributed_rollouts import (
    EpisodeSeeds,
    ESDistributedRollouts,
    ESRolloutResult,
    ScheduledRollouts,
)
from maze.train.trainers.es.es_utils import get_flat_weights

if TYPE_CHECKING:
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable

logger = logging.getLogger(__name__)


class ESDummyDistributedRollouts(ScheduledRollouts):
    """Plays all episodes in this process: side by side where environments can be made, else one after another.

    :param env: An environment; it is used as the first one.
    :param n_eval_rollouts: Number of episodes of the policy itself for each update.
    :param shared_noise: The noise table.
    :param agent_instance_seed: Seed of the perturbations.
    :param env_factory: Makes further environments; `None`: there is only the one.
    :param env_seed: Each episode begins with a seed derived from this one; `None`: the environment is not seeded.
    :param concurrency: Number of episodes side by side; 0: as many as an update has, up to 64.
    """

    def __init__(
        self,
        env: Any,
        n_eval_rollouts: int,
        shared_noise: SharedNoiseTable,
        agent_instance_seed: int,
        *,
        env_factory: Callable[[], Any] | None = None,
        env_seed: int | None = None,
        concurrency: int = 0,
    ) -> None:
        super().__init__(EpisodeSeeds(shared_noise, agent_instance_seed, env_seed), n_eval_rollouts)
        self.shared_noise = shared_noise
        self._players = Players(with_stats(env), env_factory, shared_noise)
        self._concurrency = concurrency

    @property
    def env(self) -> Any:
        """The first environment."""
        return self._players.env

    @override(ESDistributedRollouts)
    def generate_rollouts(
        self, policy: Any, max_steps: int | None, noise_stddev: float, normalization_stats: Any
    ) -> Generator[ESRolloutResult, None, None]:
        schedule, player = self._next_schedule(), self._players.current
        if player is None or player.policy is not policy:
            n_wanted = min(MAX_ENVS, self.n_eval_rollouts + (self._n_rollouts or MAX_ENVS))
            player = self._players.make(policy, normalization_stats, self._concurrency or n_wanted)
        player.configure(get_flat_weights(policy).numpy(), noise_stddev, max_steps)
        while True:
            while player.n_free and (episode := schedule.next_episode()) is not None:
                player.start(episode)
            for episode, outcome in player.advance():
                schedule.record(episode, outcome)
            yield from schedule.results()

    @override(ESDistributedRollouts)
    def close(self) -> None:
        self._players.close()


class Players:
    """Makes what plays episodes, anew for each policy, around an environment that stays.

    :param env: The environment.
    :param env_factory: Makes further ones; `None`: there is only the one.
    :param shared_noise: The noise table.
    """

    def __init__(self, env: Any, env_factory: Callable[[], Any] | None, shared_noise: SharedNoiseTable) -> None:
        self.env = env
        self._env_factory, self._shared_noise = env_factory, shared_noise
        self.current: EpisodePlayer | None = None
        """The one of the latest policy."""

    def make(self, policy: Any, normalization_stats: Any, n_wanted: int) -> EpisodePlayer:
        """Makes the player of a policy; the one before is closed.

        :param policy: The policy.
        :param normalization_stats: Statistics for observation normalization, for environments that want them.
        :param n_wanted: Number of episodes side by side.
        """
        self._close_current()
        normalize(self.env, normalization_stats)
        factory = self._env_factory

        def new_env() -> Any:
            assert factory is not None, "it is asked for further ones where there is one"
            env = factory()
            normalize(env, normalization_stats)
            return env

        self.current = make_player(self.env, None if factory is None else new_env, policy, self._shared_noise, n_wanted)
        return self.current

    def close(self) -> None:
        """Closes all environments; nothing happens the second time."""
        self._close_current()
        env, self.env = self.env, None
        if env is not None:
            closed(env.close, "environment")

    def _close_current(self) -> None:
        player, self.current = self.current, None
        if player is not None:
            player.close(keep=self.env)


def make_player(
    env: Any, env_factory: Callable[[], Any] | None, policy: Any, shared_noise: SharedNoiseTable, n_wanted: int
) -> EpisodePlayer:
    """Plays episodes side by side if environments can be made and the policy allows it, else one after another.

    :param env: The first environment.
    :param env_factory: Makes further ones.
    :param policy: The policy.
    :param shared_noise: The noise table.
    :param n_wanted: Number of episodes side by side.
    """
    obstacle = obstacle_to_batching(policy, env.observation_spaces_dict)
    if obstacle is not None:
        logger.info("Perturbed policies are evaluated one after another: %s.", obstacle)
        return SingleEpisodePlayer(env, policy, shared_noise)
    n_slots = 1 if env_factory is None else population_size(policy, n_wanted)
    return EpisodeBatch(env_factory or (lambda: env), policy, shared_noise, n_slots, first_env=env)


def normalize(env: Any, normalization_stats: Any) -> None:
    """Gives an environment that wants them the statistics for observation normalization."""
    if normalization_stats is not None and hasattr(env, "set_normalization_statistics"):
        env.set_normalization_statistics(normalization_stats)
