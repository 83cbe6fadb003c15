"""What collects rollouts for a learner."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, LogStatsValue, get_stats_logger
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.wrappers.log_stats_wrapper import stats_value
from maze.train.parallelization.distributed_actors.rollout_packet import ActorSpaces, RolloutPacket, join_rollouts

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.rollout.rollout_columns import RolloutColumns


@dataclass
class CollectedBatch:
    """A batch of rollouts for the learner."""

    columns: RolloutColumns
    """The rollouts side by side, with the logits of the policies that acted; valid until the next batch."""
    queue_size_before: int
    """Finished rollouts that waited for the learner."""
    queue_size_after: int
    """Finished rollouts that wait still."""
    waiting_time: float
    """Seconds until enough rollouts were finished."""
    policy_lags: list[int]
    """For each rollout, how many updates its policy had missed when the batch was made."""


class EpisodeCollector:
    """What collects the episodes of a training, and keeps their statistics."""

    def __init__(self) -> None:
        self.epoch_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        """Statistics of the episodes that ended in this epoch."""

    def get_epoch_stats_aggregator(self) -> LogStatsAggregator:
        """The statistics of all environments together."""
        return self.epoch_stats

    def get_stats_value(
        self, event: Callable[..., Any], level: LogStatsLevel, name: str | None = None
    ) -> LogStatsValue:
        """One value of the last epoch's statistics.

        :param event: Interface method of the event.
        :param level: Level of the statistics: there are those of epochs only.
        :param name: Output name of the statistic.
        :raises ValueError: The level is not that of epochs.
        """
        if level is not LogStatsLevel.EPOCH:
            raise ValueError(f"Distributed actors keep statistics of epochs only, not on the level {level.name}.")
        value: LogStatsValue = stats_value(self.epoch_stats, event, name)
        return value

    def write_epoch_stats(self) -> None:
        """Passes the statistics of the epoch on to the writers, and begins the next one."""
        self.epoch_stats.reduce()


class DistributedActors(EpisodeCollector, ABC):
    """Actors that collect rollouts with a policy which a learner updates meanwhile.

    Between :meth:`start` and :meth:`stop` each actor steps its own environments, rollout after rollout.

    :param env_factory: Makes one environment.
    :param policy: The policy; actors use copies of it on the CPU.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param envs_per_actor: Number of environments that each actor steps together.
    :raises ConfigError: There are no actors, or rollouts have no steps.
    """

    is_vectorized = True

    def __init__(
        self,
        env_factory: Callable[[], Any],
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        *,
        envs_per_actor: int = 1,
    ) -> None:
        sizes = {"n_rollout_steps": n_rollout_steps, "n_actors": n_actors, "batch_size": batch_size}
        for name, value in (*sizes.items(), ("envs_per_actor", envs_per_actor)):
            if value < 1:
                raise ConfigError(f"{name}: distributed actors need at least 1, found {value}.")
        self.env_factory = env_factory
        self.policy = policy
        self.n_rollout_steps = n_rollout_steps
        self.n_actors = n_actors
        self.batch_size = batch_size
        self.envs_per_actor = envs_per_actor
        super().__init__()
        self._batch: RolloutColumns | None = None

    @abstractmethod
    def start(self) -> None:
        """Begins to collect rollouts; nothing happens if that has begun already."""

    @abstractmethod
    def stop(self) -> None:
        """Ends all actors and their environments."""

    @abstractmethod
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        """Hands out the next version of the policy, which actors use from their next rollout on.

        :param state_dict: Weights of the policy.
        """

    @abstractmethod
    def collect_batch(self) -> CollectedBatch:
        """The next batch of rollouts; waits until enough of them are finished."""

    def collect_outputs(self, learner_device: str) -> tuple[StructuredSpacesRecord, float, float, float]:
        """The next batch of rollouts, where the actors of all environments act in the same fixed order.

        :param learner_device: Where the tensors go.
        :return: The rollouts stacked, `[n_rollout_steps, batch_size, ...]`; number of finished rollouts that waited
            before and after; seconds spent on waiting.
        """
        batch = self.collect_batch()
        record = copy.deepcopy(batch.columns.structured_record()).to_torch(learner_device)
        return record, batch.queue_size_before, batch.queue_size_after, batch.waiting_time

    # -- what a trainer wants of a vector environment ------------------------------------------------------------------

    @property
    def env(self) -> DistributedActors:
        """The environments of a batch, as far as trainers need them: their number, statistics and wrappers' states."""
        return self

    @property
    def n_envs(self) -> int:
        """Number of environments whose steps a batch holds."""
        return self.batch_size * self.envs_per_actor

    @property
    def n_rollout_envs(self) -> int:
        """The same, as vector environments call it."""
        return self.n_envs

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Where the actors' environments are, as far as that is known, and what their wrappers have learned."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Brings the environments to where they were.

        :param state_dict: As :meth:`state_dict` gave it, perhaps of other actors.
        :return: Why environments begin new episodes instead, by their index.
        """

    def reset(self) -> None:
        """Actors go on where they are; only trainers' other sources of rollouts have to be told."""

    # -- for the implementations ---------------------------------------------------------------------------------------

    def _joined(self, packets: Sequence[RolloutPacket], spaces: ActorSpaces) -> RolloutColumns:
        if self._batch is None:
            self._batch = spaces.columns(self.n_envs, self.n_rollout_steps, self.policy)
        join_rollouts(packets, self._batch)
        return self._batch


def queue_size_of(queue_out_of_sync_factor: float, batch_size: int) -> int:
    """Number of finished rollouts that may wait for the learner."""
    return math.ceil(queue_out_of_sync_factor * batch_size)


def checked_actor_seeds(seeds: Sequence[Any], n_needed: int, name: str) -> list[Any]:
    """One seed for each of the actors (or their environments), or an error.

    :param seeds: Seeds.
    :param n_needed: How many there have to be.
    :param name: What they are called, for the error message.
    :raises EnvironmentContractError: There are too few, or too many.
    """
    if len(seeds) != n_needed:
        raise EnvironmentContractError(f"{name}: expected {n_needed} seeds, found {len(seeds)}.")
    return list(seeds)


def seed_of_start(seed: Any, n_starts: int) -> Any:
    """The seed when actors are started again: their episodes are not to be those of the first time.

    :param seed: Seed for the first start.
    :param n_starts: How often they were started before.
    """
    if n_starts == 0 or seed is None:
        return seed
    return int(np.random.SeedSequence([int(seed), n_starts]).generate_state(1)[0])
