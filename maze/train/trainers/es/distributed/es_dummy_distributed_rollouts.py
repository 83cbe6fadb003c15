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
)
from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts, ESRolloutResult
from maze.train.trainers.es.distributed.population import obstacle_to_batching, population_size
from maze.train.trainers.es.distributed.rollout_schedule import EpisodeSeeds, RolloutSchedule
from maze.train.trainers.es.es_utils import get_flat_parameters

if TYPE_CHECKING:
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable

logger = logging.getLogger(__name__)


class ESDummyDistributedRollouts(ESDistributedRollouts):
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
        self.env = with_stats(env)
        self.n_eval_rollouts = n_eval_rollouts
        self.shared_noise = shared_noise
        self._env_factory = env_factory
        self._seeds = EpisodeSeeds(shared_noise, agent_instance_seed, env_seed)
        self._concurrency = concurrency
        self._player: EpisodePlayer | None = None
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
        player = self._player_for(policy, normalization_stats)
        player.configure(get_flat_parameters(policy).numpy(), noise_stddev, max_steps)
        while True:
            while player.n_free and schedule.needs_evaluation:
                player.start(schedule.next_evaluation())
            while player.n_free and schedule.needs_training:
                player.start(schedule.next_training())
            if schedule.n_in_flight == 0:  # somebody wants more than was announced
                player.start(schedule.next_training())
            for episode, outcome in player.advance():
                schedule.record(episode, outcome)
            yield from schedule.results()

    @override(ESDistributedRollouts)
    def close(self) -> None:
        if self._player is not None:
            self._player.close(keep=self.env)
        closed(self.env.close, "environment")

    def _player_for(self, policy: Any, normalization_stats: Any) -> EpisodePlayer:
        if self._player is None or self._player.policy is not policy:
            if self._player is not None:
                self._player.close(keep=self.env)
            normalize(self.env, normalization_stats)
            self._player = make_player(
                self.env,
                self._new_env(normalization_stats),
                policy,
                self.shared_noise,
                self._concurrency or min(MAX_ENVS, self.n_eval_rollouts + (self._n_rollouts or MAX_ENVS)),
            )
        return self._player

    def _new_env(self, normalization_stats: Any) -> Callable[[], Any] | None:
        factory = self._env_factory
        if factory is None:
            return None

        def make() -> Any:
            env = factory()
            normalize(env, normalization_stats)
            return env

        return make


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
