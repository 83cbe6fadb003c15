"""Rollouts of perturbed policies: interface, schedule of the episodes and results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.agent.torch_model import TorchModel
    from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator
    from maze.train.trainers.common.observation_statistics import Moments
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable


_TRAINING, _EVALUATION = 0, 1


class Episode(NamedTuple):
    """An episode of an update."""

    number: int
    """Index of the episode in the update, in the order of results."""
    noise_index: int | None
    """Position of the perturbation in the noise table; `None`: the unperturbed policy."""
    sign: int
    """1: the perturbation is added, -1: it is subtracted; 0: there is none."""
    env_seed: int | None
    """Seed of the environment; `None`: the environment is not seeded."""

    def __str__(self) -> str:
        """Return the name of the episode in messages."""
        seeded = "" if self.env_seed is None else f", seeded with {self.env_seed}"
        if self.noise_index is None:
            return f"an episode of the policy itself{seeded}"
        sign = "added" if self.sign > 0 else "subtracted"
        return f"an episode with perturbation {self.noise_index} of the noise table {sign}{seeded}"


class Outcome(NamedTuple):
    """Result of an episode."""

    stats: LogStats
    episode_return: float
    n_steps: int
    observed: Moments | None = None
    """Observation statistics; `None`: they are not needed."""


class EpisodeSeeds:
    """Perturbations and environment seeds as functions of update and number, independent of other episodes.

    Both policies of a mirrored pair use the same environment seed: common random numbers reduce the variance of the
    difference of their returns.

    :param shared_noise: The noise table.
    :param agent_seed: Seed of the perturbations.
    :param env_seed: Seed of the environment seeds; `None`: environments are not seeded.
    """

    def __init__(self, shared_noise: SharedNoiseTable, agent_seed: int, env_seed: int | None) -> None:
        self.shared_noise = shared_noise
        self._agent_seed = agent_seed
        self._env_seed = env_seed

    def noise_index(self, update: int, pair: int) -> int:
        """Return the position of the perturbation of a mirrored pair in the noise table.

        :param update: Number of the update.
        :param pair: Number of the pair in the update.
        """
        sequence = np.random.SeedSequence((self._agent_seed, update, pair))
        return self.shared_noise.sample_index(np.random.RandomState(np.random.MT19937(sequence)))

    def env_seed(self, update: int, purpose: int, number: int) -> int | None:
        """Return the environment seed of a mirrored pair or of an evaluation; `None`: environments are not seeded.

        :param update: Number of the update.
        :param purpose: Number of the purpose, which separates pairs and evaluations.
        :param number: Number of the pair or of the evaluation in the update.
        """
        if self._env_seed is None:
            return None
        sequence = np.random.SeedSequence((self._env_seed, update, purpose, number))
        return int(sequence.generate_state(1)[0]) >> 1


class RolloutSchedule:
    """Schedule the episodes of one update and order their outcomes.

    :param seeds: Perturbations and environment seeds.
    :param update: Number of the update.
    :param n_evaluations: Number of episodes of the unperturbed policy.
    :param n_rollouts: Minimum number of training episodes.
    :param n_timesteps: Minimum number of environment steps in them.
    """

    def __init__(self, seeds: EpisodeSeeds, update: int, n_evaluations: int, n_rollouts: int, n_timesteps: int) -> None:
        self._seeds = seeds
        self._update = update
        self._n_evaluations = n_evaluations
        self._n_pairs_wanted = -(-n_rollouts // 2)
        self._n_timesteps = n_timesteps
        self._n_pairs = 0
        self._n_training_done = 0
        self._n_steps_done = 0
        # The episodes that come next: evaluations, later the other half of a pair.
        self._waiting = deque(
            Episode(number, None, 0, seeds.env_seed(update, _EVALUATION, number)) for number in range(n_evaluations)
        )
        self._next_result = 0
        self._outcomes: dict[int, tuple[Episode, Outcome]] = {}
        self.n_in_flight = 0
        """Number of scheduled episodes that have not ended."""

    def next_episode(self) -> Episode | None:
        """Schedule the next episode, evaluations first; `None`: no episode is needed now."""
        if not self._waiting:
            if self.n_in_flight and not self._needs_training():  # without any, the caller wants more than it announced
                return None
            pair = self._n_pairs
            self._n_pairs += 1
            env_seed = self._seeds.env_seed(self._update, _TRAINING, pair)
            noise_index = self._seeds.noise_index(self._update, pair)
            episode = Episode(self._n_evaluations + 2 * pair, noise_index, 1, env_seed)
            self._waiting += [episode, episode._replace(number=episode.number + 1, sign=-1)]
        self.n_in_flight += 1
        return self._waiting.popleft()

    def _needs_training(self) -> bool:
        """Return whether to schedule further training episodes, estimated from the lengths of finished ones."""
        if self._n_pairs < self._n_pairs_wanted:
            return True
        if self._n_timesteps == 0 or self._n_steps_done >= self._n_timesteps:
            return False
        if self._n_training_done == 0:
            return True  # no length is known yet
        mean_length = self._n_steps_done / self._n_training_done
        return mean_length * 2 * self._n_pairs < self._n_timesteps

    def record(self, episode: Episode, outcome: Outcome) -> None:
        """Record the outcome of an episode."""
        self.n_in_flight -= 1
        if episode.sign:
            self._n_training_done += 1
            self._n_steps_done += outcome.n_steps
        self._outcomes[episode.number] = (episode, outcome)

    def results(self) -> Iterator[ESRolloutResult]:
        """Yield complete results, in their order."""
        while True:
            is_eval = self._next_result < self._n_evaluations
            numbers = [self._next_result] if is_eval else [self._next_result, self._next_result + 1]
            if not all(number in self._outcomes for number in numbers):
                return
            self._next_result += len(numbers)
            result = ESRolloutResult(is_eval)
            episodes, outcomes = zip(*(self._outcomes.pop(number) for number in numbers), strict=True)
            for outcome in outcomes:
                result.add_episode(*outcome)
            if episodes[0].noise_index is not None:
                result.noise_indices.append(episodes[0].noise_index)
            yield result


class ESRolloutResult:
    """Episodes of one or more mirrored pairs of perturbed policies, or of the unperturbed policy.

    :param is_eval: Whether the episodes are of the unperturbed policy.
    """

    def __init__(self, is_eval: bool) -> None:
        self.is_eval = is_eval
        self.noise_indices: list[int] = []
        """Positions of the perturbations in the noise table, one for each pair; empty for an evaluation."""
        self.episode_stats: list[LogStats] = []
        """Statistics by episode; in a pair, the episode with the added perturbation comes first."""
        self.returns: list[float] = []
        """Sums of rewards, in the same order."""
        self.lengths: list[int] = []
        """Numbers of environment steps, in the same order."""
        self.observed: list[Moments] = []
        """Observation statistics of the episodes that running normalization learns from."""

    def add_episode(
        self, stats: LogStats, episode_return: float, n_steps: int, observed: Moments | None = None
    ) -> None:
        """Add an episode.

        :param stats: Its statistics.
        :param episode_return: Sum of its rewards.
        :param n_steps: Number of its environment steps.
        :param observed: Its observation statistics; `None`: they are not needed.
        """
        self.episode_stats.append(stats)
        self.returns.append(episode_return)
        self.lengths.append(n_steps)
        if observed:
            self.observed.append(observed)


class ESDistributedRollouts(ABC):
    """Evaluate perturbed policies."""

    n_eval_rollouts: int = 0
    """Number of episodes of the unperturbed policy in each update."""

    @abstractmethod
    def generate_rollouts(
        self, policy: Policy | TorchModel, max_steps: int | None, noise_stddev: float, normalization_stats: Any
    ) -> Generator[ESRolloutResult, None, None]:
        """Yield evaluations of the policy first, and then pairs of perturbed policies without end.

        :param policy: The policy to perturb; it must not change during the iteration.
        :param max_steps: Episodes are truncated after this number of environment steps; `None`: never.
        :param noise_stddev: Standard deviation of the perturbations.
        :param normalization_stats: Statistics for environments with observation normalization.
        """

    def prepare_update(self, update: int, n_rollouts: int, n_timesteps: int) -> None:
        """Announce the next call of :meth:`generate_rollouts`; implementations may ignore it.

        :param update: Number of the update. The same update of two runs with the same seeds has the same episodes, also
            if one of them was resumed.
        :param n_rollouts: Minimum number of training episodes.
        :param n_timesteps: Minimum number of environment steps in them.
        """

    def report_work(self, statistics: LogStatsAggregator) -> None:
        """Add the statistics of the actors of a cluster to those of the epoch; without a cluster, do nothing.

        :param statistics: Statistics of the epoch.
        """

    def close(self) -> None:
        """Release environments and processes."""
