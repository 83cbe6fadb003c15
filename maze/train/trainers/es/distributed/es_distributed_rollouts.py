"""Where the trainer gets its rollouts from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.agent.torch_model import TorchModel
    from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator
    from maze.train.trainers.common.observed_rows import Moments


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
