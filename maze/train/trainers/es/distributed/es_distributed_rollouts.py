"""Where the trainer gets its rollouts from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maze.core.annotations import override

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.agent.torch_model import TorchModel
    from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator
    from maze.train.parallelization.vector_env.vector_env_utils import EncodedStats, StatsEncoder
    from maze.train.trainers.common.observation_statistics import Moments
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable


_TRAINING, _EVALUATION = 0, 1


class Episode(NamedTuple):
    """An episode to be played."""

    number: int
    """Counts the episodes of an update, in the order of their results."""
    noise_index: int | None
    """Position of the perturbation in the noise table; `None`: the policy as it is."""
    sign: int
    """1: the perturbation is added, -1: it is subtracted; 0: there is none."""
    env_seed: int | None
    """Seed of the environment; `None`: it goes on with its generator as it is."""

    @staticmethod
    def unperturbed(number: int = 0, env_seed: int | None = None) -> Episode:
        """An episode of the policy itself."""
        return Episode(number, None, 0, env_seed)

    def __str__(self) -> str:
        """Which episode it is, in messages."""
        seeded = "" if self.env_seed is None else f", seeded with {self.env_seed}"
        if self.noise_index is None:
            return f"an episode of the policy itself{seeded}"
        sign = "added" if self.sign > 0 else "subtracted"
        return f"an episode with perturbation {self.noise_index} of the noise table {sign}{seeded}"


class Outcome(NamedTuple):
    """What came of an episode."""

    stats: LogStats
    episode_return: float
    n_steps: int
    observed: Moments | None = None
    """Statistics of what was observed; `None`: nobody learns from that."""

    def encoded(self, encoder: StatsEncoder) -> tuple[EncodedStats, float, int, Moments | None]:
        """The same for another process."""
        return encoder.encode(self.stats), *self[1:]


class EpisodeSeeds:
    """Perturbations and environment seeds as functions of update and number: no other episode influences them.

    Both policies of a mirrored pair meet the same environment seed, so that their returns differ by what the
    perturbation does and less by luck.

    :param shared_noise: The noise table.
    :param agent_seed: Seed of the perturbations.
    :param env_seed: Seed of the environment seeds; `None`: environments are not seeded.
    """

    def __init__(self, shared_noise: SharedNoiseTable, agent_seed: int, env_seed: int | None) -> None:
        self.shared_noise = shared_noise
        self._agent_seed = agent_seed
        self._env_seed = env_seed

    def noise_index(self, update: int, pair: int) -> int:
        """Perturbation of a mirrored pair."""
        sequence = np.random.SeedSequence((self._agent_seed, update, pair))
        return self.shared_noise.sample_index(np.random.RandomState(np.random.MT19937(sequence)))

    def env_seed(self, update: int, purpose: int, number: int) -> int | None:
        """Seed of a pair's environments, or of an evaluation's."""
        if self._env_seed is None:
            return None
        sequence = np.random.SeedSequence((self._env_seed, update, purpose, number))
        return int(sequence.generate_state(1)[0]) >> 1


class RolloutSchedule:
    """Hands out the episodes of one update, and puts their outcomes in order.

    :param seeds: Where perturbations and environment seeds come from.
    :param update: Number of the update.
    :param n_evaluations: Number of episodes of the policy itself.
    :param n_rollouts: Smallest number of training episodes.
    :param n_timesteps: Smallest number of environment steps in them.
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
        self._mirrored: Episode | None = None
        self._next_evaluation = 0
        self._next_result = 0
        self._outcomes: dict[int, tuple[Episode, Outcome]] = {}
        self.n_in_flight = 0
        """Number of episodes that were handed out and have not ended."""

    @property
    def needs_evaluation(self) -> bool:
        """Whether evaluations are left to be handed out."""
        return self._next_evaluation < self._n_evaluations

    @property
    def needs_training(self) -> bool:
        """Whether training episodes should be started, judging by the lengths of those that have ended."""
        if self._mirrored is not None or self._n_pairs < self._n_pairs_wanted:
            return True
        if self._n_timesteps == 0 or self._n_steps_done >= self._n_timesteps:
            return False
        if self._n_training_done == 0:
            return True  # nothing is known yet
        mean_length = self._n_steps_done / self._n_training_done
        return mean_length * 2 * self._n_pairs < self._n_timesteps

    def next_evaluation(self) -> Episode:
        """Hands out an episode of the policy itself."""
        number = self._next_evaluation
        self._next_evaluation += 1
        self.n_in_flight += 1
        return Episode.unperturbed(number, self._seeds.env_seed(self._update, _EVALUATION, number))

    def next_training(self) -> Episode:
        """Hands out an episode of a perturbed policy, whether or not one is needed."""
        self.n_in_flight += 1
        if self._mirrored is not None:
            episode, self._mirrored = self._mirrored, None
            return episode
        pair = self._n_pairs
        self._n_pairs += 1
        episode = Episode(
            self._n_evaluations + 2 * pair,
            self._seeds.noise_index(self._update, pair),
            1,
            self._seeds.env_seed(self._update, _TRAINING, pair),
        )
        self._mirrored = episode._replace(number=episode.number + 1, sign=-1)
        return episode

    def next_episode(self) -> Episode | None:
        """Hands out the next episode, evaluations first; `None`: no more are needed, as far as is known."""
        if self.needs_evaluation:
            return self.next_evaluation()
        if self.needs_training or self.n_in_flight == 0:  # somebody wants more than was announced
            return self.next_training()
        return None

    def record(self, episode: Episode, outcome: Outcome) -> None:
        """Takes the outcome of an episode."""
        self.n_in_flight -= 1
        if episode.sign:
            self._n_training_done += 1
            self._n_steps_done += outcome.n_steps
        self._outcomes[episode.number] = (episode, outcome)

    def results(self) -> Iterator[ESRolloutResult]:
        """Results that are complete, as are all before them."""
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
    """Episodes: of one or more mirrored pairs of perturbed policies, or of the policy itself.

    :param is_eval: Whether the policy itself was rolled out.
    """

    def __init__(self, is_eval: bool) -> None:
        self.is_eval = is_eval
        self.noise_indices: list[int] = []
        """Positions of the perturbations in the noise table, one for each pair; empty for an evaluation."""
        self.episode_stats: list[LogStats] = []
        """Statistics by episode. Of a pair, first come those with the perturbation added, then with it subtracted."""
        self.returns: list[float] = []
        """Sums of rewards, in the same order."""
        self.lengths: list[int] = []
        """Numbers of environment steps, in the same order."""
        self.observed: list[Moments] = []
        """Statistics of what was observed, of those episodes that running normalization learns from."""

    def add_episode(
        self, stats: LogStats, episode_return: float, n_steps: int, observed: Moments | None = None
    ) -> None:
        """Adds an episode.

        :param stats: Its statistics.
        :param episode_return: Sum of its rewards.
        :param n_steps: Number of its environment steps.
        :param observed: Statistics of what was observed in it; `None`: nobody learns from that.
        """
        self.episode_stats.append(stats)
        self.returns.append(episode_return)
        self.lengths.append(n_steps)
        if observed:
            self.observed.append(observed)


class ESDistributedRollouts(ABC):
    """Evaluates perturbed policies, here or elsewhere."""

    @abstractmethod
    def generate_rollouts(
        self,
        policy: Policy | TorchModel,
        max_steps: int | None,
        noise_stddev: float,
        normalization_stats: Any,
    ) -> Generator[ESRolloutResult, None, None]:
        """Yields evaluations of the policy first, and then pairs of perturbed policies for as long as it is asked.

        :param policy: The policy that is perturbed; it does not change meanwhile.
        :param max_steps: Episodes are cut off after this number of environment steps; `None`: never.
        :param noise_stddev: Standard deviation of the perturbations.
        :param normalization_stats: Statistics for observation normalization, for environments that want them.
        """

    def prepare_update(self, update: int, n_rollouts: int, n_timesteps: int) -> None:
        """Tells what the coming call of :meth:`generate_rollouts` is for; nothing needs to be done about it.

        :param update: Number of the update. The same update of two trainings with the same seeds gets the same
            episodes, also if one of them was resumed in between.
        :param n_rollouts: Smallest number of training episodes that will be asked for.
        :param n_timesteps: Smallest number of environment steps in them.
        """
        return

    def report_work(self, statistics: LogStatsAggregator) -> None:
        """Adds what the processes of a cluster have done for an update; there is none here.

        :param statistics: Those of the epoch.
        """
        return

    def close(self) -> None:
        """Releases environments and processes."""
        return


class ScheduledRollouts(ESDistributedRollouts, ABC):
    """Rollouts that are the same wherever their episodes are played, since those follow from seeds.

    :param seeds: Where perturbations and environment seeds come from.
    :param n_eval_rollouts: Number of episodes of the policy itself for each update.
    """

    def __init__(self, seeds: EpisodeSeeds, n_eval_rollouts: int) -> None:
        self.n_eval_rollouts = n_eval_rollouts
        self._seeds = seeds
        self._update = self._n_rollouts = self._n_timesteps = 0

    @override(ESDistributedRollouts)
    def prepare_update(self, update: int, n_rollouts: int, n_timesteps: int) -> None:
        self._update, self._n_rollouts, self._n_timesteps = update, n_rollouts, n_timesteps

    def _next_schedule(self) -> RolloutSchedule:
        """The episodes of the coming update; another one follows, also if nobody prepares it."""
        self._update += 1
        return RolloutSchedule(self._seeds, self._update - 1, self.n_eval_rollouts, self._n_rollouts, self._n_timesteps)
