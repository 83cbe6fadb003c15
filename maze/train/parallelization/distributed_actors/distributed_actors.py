"""Actors that collect rollouts for a learner: interface, and asynchronous actors."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger
from maze.core.log_stats.log_stats_env import LogStatsEnv
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.rollout.rollout_generator import record_of
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.utils.update_profile import COLLECTING, timed
from maze.core.utils.worker_pool import Task, env_slices
from maze.train.parallelization.distributed_actors import env_groups
from maze.train.parallelization.vector_env.structured_vector_env import checked_seeds, states_for
from maze.train.parallelization.vector_env.vector_env_utils import ActorSpaces


@dataclass
class CollectedBatch:
    """A batch of rollouts for the learner."""

    columns: RolloutColumns
    """The rollouts side by side, with the logits of the behaviour policies; valid until the next batch."""
    queue_size_before: int
    """Number of finished rollouts in the queue before the batch was taken."""
    queue_size_after: int
    """Number of finished rollouts in the queue afterwards."""
    waiting_time: float
    """Seconds until enough rollouts were finished."""
    policy_lags: list[int]
    """For each rollout, the number of updates that its policy had missed when the batch was made."""


class EpisodeCollector(LogStatsEnv):
    """Base of classes that collect training episodes; keeps the epoch statistics of these episodes."""

    def __init__(self) -> None:
        self.epoch_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        """Statistics of the episodes that ended in the current epoch."""

    def get_epoch_stats_aggregator(self) -> LogStatsAggregator:
        """Return the epoch statistics of all environments together."""
        return self.epoch_stats

    @override(LogStatsEnv)
    def get_stats(self, level: LogStatsLevel) -> LogStatsAggregator:
        if level is not LogStatsLevel.EPOCH:
            raise ValueError(f"Distributed actors keep statistics of epochs only, not on the level {level.name}.")
        return self.epoch_stats


@dataclass(eq=False)
class DistributedActors(EpisodeCollector, ABC):
    """Actors that collect rollouts while a learner updates the policy.

    Between :meth:`start` and :meth:`stop` each actor steps its own environments, rollout after rollout.

    :param env_factory: Makes one environment.
    :param policy: The policy; actors use copies of it on the CPU.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param envs_per_actor: Number of environments that each actor steps together.
    """

    is_vectorized = True

    env_factory: Callable[[], Any]
    policy: TorchPolicy
    n_rollout_steps: int
    n_actors: int
    batch_size: int
    envs_per_actor: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__init__()
        self._plan = env_groups.RolloutPlan(self.n_rollout_steps, with_logits=True, keeps_terminal=False, begins=False)
        self._batch: RolloutColumns | None = None
        # Whether environments have begun new episodes since the previous batch other than by ending one.
        self._begins_anew = False

    @abstractmethod
    def start(self) -> None:
        """Start collecting rollouts; a second call does nothing."""

    @abstractmethod
    def stop(self) -> None:
        """Stop all actors and close their environments."""

    @abstractmethod
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        """Publish the next version of the policy; actors use it from their next rollout on.

        :param state_dict: Weights of the policy.
        """

    @abstractmethod
    def collect_batch(self) -> CollectedBatch:
        """Wait for enough finished rollouts and return them as a batch."""

    def collect_outputs(self, learner_device: str) -> tuple[StructuredSpacesRecord, float, float, float]:
        """Return the next batch as a record; the actors of all environments have to act in the same fixed order.

        :param learner_device: Device of the tensors.
        :return: The rollouts stacked, `[n_rollout_steps, batch_size, ...]`; number of finished rollouts in the queue
            before and after; seconds spent waiting.
        """
        batch = self.collect_batch()
        record = record_of(batch.columns).stack().to_torch(learner_device)
        return record, batch.queue_size_before, batch.queue_size_after, batch.waiting_time

    # -- the interface of a rollout generator and its vector environment -----------------------------------------------

    @property
    def env(self) -> DistributedActors:
        """This object: it provides what trainers use of a vector environment (size, statistics, wrapper states)."""
        return self

    @property
    def n_envs(self) -> int:
        """Number of environments whose steps a batch contains."""
        return self.batch_size * self.envs_per_actor

    n_rollout_envs = n_envs

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the states of the environments, as far as known, and the statistics of their wrappers."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Restore the states of the environments.

        :param state_dict: State from :meth:`state_dict`, possibly of other actors.
        :return: Environment index -> reason why this environment starts a new episode instead.
        """

    def reset(self) -> None:
        """Do nothing: actors continue their episodes."""

    def _joined(self, rollouts: Sequence[RolloutColumns], spaces: ActorSpaces) -> RolloutColumns:
        if self._batch is None:
            self._batch = spaces.columns(self.n_envs, self.n_rollout_steps, self.policy)
        env_groups.join_rollouts(rollouts, self._batch)
        if self._begins_anew:
            self._batch.renewed, self._begins_anew = list(range(self.n_envs)), False
        return self._batch


@dataclass(eq=False)
class ActorsAhead(DistributedActors):
    """Asynchronous actors of a pool. :class:`RolloutTickets` limits how far they run ahead of the learner.

    A rollout is one call with the newest policy at the time when its ticket is issued. Pools that replace actors repeat
    lost calls, and actors that join later take part. An actor seeds its policy once, at its start.

    :param env_factory: Makes one environment, in the process of the actor.
    :param policy: The policy.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param queue_out_of_sync_factor: Maximum number of finished rollouts in the queue, in units of `batch_size`.
    :param actor_env_seeds: A seed for each environment.
    :param actor_agent_seeds: A seed for the policy of each actor.
    :param envs_per_actor: Number of environments that each actor steps together.
    :param make_groups: Makes the groups of environments at each start; their pool has at least `n_actors` actors.
    """

    queue_out_of_sync_factor: float
    actor_env_seeds: list[int]
    actor_agent_seeds: list[int]
    make_groups: Callable[[], env_groups.EnvGroups] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._queue_size = math.ceil(self.queue_out_of_sync_factor * self.batch_size)
        checked_seeds(self.actor_env_seeds, self.n_actors * self.envs_per_actor)
        checked_seeds(self.actor_agent_seeds, self.n_actors)
        self._n_starts = 0
        # Actor -> statistics that the wrappers of its environments have learned.
        self._learned: dict[int, list[Any]] = {}
        self._groups: env_groups.EnvGroups | None = None

    @override(DistributedActors)
    def start(self) -> None:
        if self._groups is not None:
            return
        self._n_starts += 1
        self._tickets = RolloutTickets(self.n_actors, self.batch_size, self._queue_size)
        # Rollouts in progress.
        self._tasks: list[Task] = []
        # Queue of finished rollouts: actor, rollout.
        self._arrived: list[tuple[int, RolloutColumns]] = []
        # Seed of the policy of each actor.
        self._seeds: list[int] = []
        self._groups = groups = self.make_groups()
        groups.learned = self._learned
        self._may_join, self._begins_anew = groups.pool.n_first == self.n_actors, True
        env_seeds = [env_groups.seed_of_start(seed, self._n_starts - 1) for seed in self.actor_env_seeds]
        try:
            slices = env_slices(len(env_seeds), self.n_actors)
            self._spaces = groups.open(self.env_factory, slices, lambda: env_seeds, self._may_join)
            self._weights = groups.hand_over(self.policy)
            self._begin_new(groups)
        except BaseException:
            self.stop()
            raise

    @override(DistributedActors)
    def stop(self) -> None:
        """Discard the rollouts in progress."""
        self._groups = None

    @override(DistributedActors)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        if self._groups is not None:  # actors that are started later receive the policy itself
            self._tickets.updated()
            self._weights = self._groups.hand_over(self.policy)

    @override(DistributedActors)
    def write_epoch_stats(self) -> None:
        if self._groups is not None:
            self._groups.pool.report_work(self.epoch_stats)
        super().write_epoch_stats()

    @override(DistributedActors)
    @timed(COLLECTING)
    def collect_batch(self) -> CollectedBatch:
        self.start()
        assert self._groups is not None
        groups, start = self._groups, time.perf_counter()
        self._receive(groups, wait=False)
        n_before = len(self._arrived)
        taken: list[RolloutColumns] = []
        lags: list[int] = []
        while len(taken) < self.batch_size:
            actor = self._tickets.next_of(actor for actor, _ in self._arrived)
            if actor is None:
                self._receive(groups, wait=True)
                continue
            position = next(i for i, (other, _) in enumerate(self._arrived) if other == actor)
            taken.append(self._arrived.pop(position)[1])
            lags.append(self._tickets.version - self._tickets.take(actor))
            self._issue(groups)
        seconds = time.perf_counter() - start
        return CollectedBatch(self._joined(taken, self._spaces), n_before, len(self._arrived), seconds, lags)

    def _issue(self, groups: env_groups.EnvGroups) -> None:
        """Request further rollouts."""
        for actor in self._tickets.issue():
            generators = env_groups.Generators(seed=self._seeds[actor], continues=True)
            self._tasks.append(groups.submit(actor, "collect", *self._weights, generators, self._plan))

    def _receive(self, groups: env_groups.EnvGroups, wait: bool) -> None:
        """Append all finished rollouts to the queue.

        :param wait: Wait for a rollout if none is finished.
        """
        groups.pool.join_new()
        self._begin_new(groups)
        for task in groups.pool.finished(self._tasks, wait=wait):
            self._tasks.remove(task)
            self._arrived.append((task.actor, groups.take(task.actor, task.result, self.epoch_stats)))
            self._tickets.finished(task.actor)

    def _begin_new(self, groups: env_groups.EnvGroups) -> None:
        """Seed new actors and request further rollouts."""
        n_actors = groups.pool.n_actors if self._may_join else self.n_actors
        for actor in range(len(self._seeds), n_actors):
            seed = env_groups.seed_of_start(self.actor_agent_seeds[actor % self.n_actors], self._n_starts - 1)
            self._seeds.append(env_groups.seed_of_start(seed, actor // self.n_actors))
            if actor >= self._tickets.n_actors:
                self._tickets.add_actor()
        self._issue(groups)

    @override(DistributedActors)
    def state_dict(self) -> dict[str, Any]:
        states = env_groups.asynchronous_states(self._learned, self.n_actors * self.envs_per_actor)
        return {"n_starts": self._n_starts, "environments": states}

    @override(DistributedActors)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Restore the statistics of wrappers; episodes are not restored: restarted actors get new seeds."""
        self._n_starts = max(self._n_starts, state_dict.get("n_starts", 0))
        n = self.envs_per_actor
        learned = [state["wrappers"] for state in states_for(state_dict, self.n_actors * n)]
        self._learned.clear()
        if any(learned):
            self._learned.update({actor: learned[actor * n : (actor + 1) * n] for actor in range(self.n_actors)})
        self.stop()  # actors that are started again continue from the statistics
        reason = "asynchronous actors run ahead of the learner; their state depends on timing and cannot be restored"
        return dict.fromkeys(range(len(learned)), reason)


class RolloutTickets:
    """Limit the age of rollouts at the time when the learner uses them.

    Each rollout is collected on a ticket. Its age is the number of updates since the ticket was issued; this is an
    upper bound of the policy lag. There are as many tickets as actors and places in the queue together. A ticket is
    free again when the learner takes the rollout. Free tickets are issued to the actors with the fewest unfinished
    rollouts, so that fast actors use those that slow ones do not need.

    Finished rollouts are taken in the order of their arrival, unless older ones would then exceed the maximum age: in
    that case the learner waits for the older ones.

    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param queue_size: Number of finished rollouts that may wait.
    """

    def __init__(self, n_actors: int, batch_size: int, queue_size: int) -> None:
        self.batch_size = batch_size
        self.n_actors = 0
        self.version = 0
        """Number of updates so far."""
        self._queue_size = queue_size
        # Versions of the rollouts of each actor that are unfinished or in the queue, and number of the unfinished ones.
        self._issued: list[deque[int]] = []
        self._n_unfinished: list[int] = []
        self._n_taken = 0
        for _ in range(n_actors):
            self.add_actor()

    def add_actor(self) -> None:
        """Add an actor and a ticket; the size of the queue does not change."""
        self.n_actors += 1
        self.max_age = math.ceil((self._queue_size + self.n_actors) / self.batch_size)
        """Maximum age of a rollout when it is taken."""
        self._issued.append(deque())
        self._n_unfinished.append(0)

    def issue(self) -> list[int]:
        """Issue free tickets and return the actors of the new rollouts.

        An actor has no more unfinished rollouts than are needed to collect a batch while the learner learns: a rollout
        that waits for its actor ages.
        """
        actors: list[int] = []
        for _ in range(self._queue_size + self.n_actors - sum(map(len, self._issued))):
            actor = min(range(self.n_actors), key=self._n_unfinished.__getitem__)
            if self._n_unfinished[actor] > self.batch_size // self.n_actors:
                break
            self._n_unfinished[actor] += 1
            self._issued[actor].append(self.version)
            actors.append(actor)
        return actors

    def finished(self, actor: int) -> None:
        """Note that an actor has finished a rollout, which enters the queue."""
        self._n_unfinished[actor] -= 1

    def next_of(self, waiting: Iterable[int]) -> int | None:
        """Return the actor whose oldest finished rollout is taken next; `None`: wait for other actors.

        :param waiting: Actors with finished rollouts, in the order of their arrival.
        """
        # of equally old ones the first that finished
        best = min(waiting, key=lambda actor: self._issued[actor][0], default=None)
        if best is None:
            return None
        oldest = self._issued[best][0]
        older = sorted(version for versions in self._issued for version in versions if version < oldest)
        for n_older, version in enumerate(older, 1):  # they must be taken before they exceed the maximum age
            updates_left = version + self.max_age - self.version
            if n_older >= self.batch_size - self._n_taken + updates_left * self.batch_size:
                return None
        return best

    def take(self, actor: int) -> int:
        """Take the oldest rollout of an actor into the current batch.

        :return: The version at which its ticket was issued.
        """
        self._n_taken = (self._n_taken + 1) % self.batch_size
        return self._issued[actor].popleft()

    def updated(self) -> None:
        """Count an update of the learner."""
        self.version += 1
