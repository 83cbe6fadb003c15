"""Actors that collect rollouts for a learner: interface, and asynchronous actors."""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, LogStatsValue, get_stats_logger
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.utils.update_profile import COLLECTING, timed
from maze.core.wrappers.log_stats_wrapper import stats_value
from maze.train.parallelization.distributed_actors.env_groups import (
    Fragment,
    RolloutPacket,
    RolloutPlan,
    join_rollouts,
)
from maze.train.parallelization.vector_env.replay_log import states_for
from maze.train.parallelization.vector_env.vector_env_utils import ActorSpaces, StatsDecoder

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.rollout.rollout_columns import RolloutColumns


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


class EpisodeCollector:
    """Base of classes that collect training episodes; keeps the epoch statistics of these episodes."""

    def __init__(self) -> None:
        self.epoch_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        """Statistics of the episodes that ended in the current epoch."""

    def get_epoch_stats_aggregator(self) -> LogStatsAggregator:
        """Return the epoch statistics of all environments together."""
        return self.epoch_stats

    def get_stats_value(
        self, event: Callable[..., Any], level: LogStatsLevel, name: str | None = None
    ) -> LogStatsValue:
        """Return one value of the statistics of the last epoch.

        :param event: Interface method of the event.
        :param level: Level of the statistics; only `LogStatsLevel.EPOCH` is available.
        :param name: Output name of the statistic.
        :raises ValueError: Another level is requested.
        """
        if level is not LogStatsLevel.EPOCH:
            raise ValueError(f"Distributed actors keep statistics of epochs only, not on the level {level.name}.")
        value: LogStatsValue = stats_value(self.epoch_stats, event, name)
        return value

    def write_epoch_stats(self) -> None:
        """Pass the statistics of the epoch to the writers and start the next epoch."""
        self.epoch_stats.reduce()


class DistributedActors(EpisodeCollector, ABC):
    """Actors that collect rollouts while a learner updates the policy.

    Between :meth:`start` and :meth:`stop` each actor steps its own environments, rollout after rollout.

    :param env_factory: Makes one environment.
    :param policy: The policy; actors use copies of it on the CPU.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param envs_per_actor: Number of environments that each actor steps together.
    :raises ConfigError: A number is below 1.
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
        self._plan = RolloutPlan(n_rollout_steps, with_logits=True, keeps_terminal=False, begins=False)
        self._batch: RolloutColumns | None = None

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
        record = copy.deepcopy(batch.columns.structured_record()).to_torch(learner_device)
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

    @property
    def n_rollout_envs(self) -> int:
        """Same as :attr:`n_envs`."""
        return self.n_envs

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

    def _joined(self, packets: Sequence[RolloutPacket], spaces: ActorSpaces) -> RolloutColumns:
        if self._batch is None:
            self._batch = spaces.columns(self.n_envs, self.n_rollout_steps, self.policy)
        join_rollouts(packets, self._batch)
        return self._batch


def queue_size_of(queue_out_of_sync_factor: float, batch_size: int) -> int:
    """Return the number of finished rollouts that may wait for the learner."""
    return math.ceil(queue_out_of_sync_factor * batch_size)


def checked_actor_seeds(seeds: Sequence[Any], n_needed: int, name: str) -> list[Any]:
    """Return the seeds as a list, after checking their number.

    :param seeds: Seeds.
    :param n_needed: Expected number of seeds.
    :param name: Name of the argument, for the error message.
    :raises EnvironmentContractError: The number of seeds is wrong.
    """
    if len(seeds) != n_needed:
        raise EnvironmentContractError(f"{name}: expected {n_needed} seeds, found {len(seeds)}.")
    return list(seeds)


def seed_of_start(seed: Any, n_starts: int) -> Any:
    """Return the seed for a restart, so that the episodes differ from those of earlier starts.

    :param seed: Seed of the first start.
    :param n_starts: Number of earlier starts.
    """
    if n_starts == 0 or seed is None:
        return seed
    return int(np.random.SeedSequence([int(seed), n_starts]).generate_state(1)[0])


class ClusterEvents(ABC):
    """Statistics of the actors in worker processes or on a cluster, per epoch."""

    @define_epoch_stats(sum)
    def actor_restarts(self, value: int) -> None:
        """Number of actors that were replaced after the actor was lost or one of its environments failed."""

    @define_epoch_stats(np.mean)
    def actors_busy(self, value: float) -> None:
        """Share of the time in which actors worked; the rest is time waiting for the learner or other actors."""

    @define_epoch_stats(np.mean)
    def actors_there(self, value: int) -> None:
        """Number of actors at the end of the epoch; it changes when machines join or leave."""

    @define_epoch_stats(np.mean)
    def learner_waiting(self, value: float) -> None:
        """Share of the time in which the learner waited for actors."""

    @define_epoch_stats(np.mean)
    def calls_under_way(self, value: int) -> None:
        """Number of rollout fragments or population slices in progress or queued at the end of the epoch."""

    @define_epoch_stats(np.mean)
    def object_store_megabytes(self, value: float) -> None:
        """Memory in use for weights and fragments at the end of the epoch, summed over all machines."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("actor")
    def calls_per_second(self, value: float, actor: int) -> None:
        """Rollout fragments or population slices that an actor completed per second."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_epoch_stats(max, output_name="max")
    def fragment_age(self, value: float) -> None:
        """Number of updates that the policy of a fragment had missed on arrival, if updates do not wait for all."""

    @define_epoch_stats(sum)
    def fragments_dropped(self, value: int) -> None:
        """Number of fragments that were dropped because they were too old."""


class WorkCounter:
    """Counts the calls of actors in worker processes or on a cluster, for :class:`ClusterEvents`."""

    def __init__(self) -> None:
        self.n_restarts = 0
        """Number of actors that were replaced."""
        self._since, self._n_reported = time.monotonic(), 0
        self._n_calls: Counter[int] = Counter()
        self._busy = self._waited = 0.0

    def done(self, actor: int, seconds: float) -> None:
        """Count a completed call.

        :param actor: Index of the actor.
        :param seconds: Duration of the call.
        """
        self._n_calls[actor] += 1
        self._busy += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the learner waits for actors."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - start

    def report(
        self,
        statistics: LogStatsAggregator,
        n_actors: int,
        n_there: int,
        n_under_way: int,
        megabytes: float | None = None,
    ) -> ClusterEvents:
        """Add the counts since the last report to the statistics of an epoch.

        :param statistics: Statistics of the epoch.
        :param n_actors: Number of actors, including lost ones.
        :param n_there: Number of running actors.
        :param n_under_way: Number of calls that are not completed.
        :param megabytes: Memory in use in the object store; `None`: there is no object store.
        :return: The event topic, for further events.
        """
        events = statistics.create_event_topic(ClusterEvents)
        now = time.monotonic()
        seconds, self._since = max(now - self._since, 1e-9), now
        events.actor_restarts(value=self.n_restarts - self._n_reported)
        events.actors_there(value=n_there)
        events.actors_busy(value=self._busy / max(n_actors, 1) / seconds)
        events.learner_waiting(value=self._waited / seconds)
        events.calls_under_way(value=n_under_way)
        if megabytes is not None:
            events.object_store_megabytes(value=megabytes)
        for actor in range(n_actors):
            events.calls_per_second(value=self._n_calls[actor] / seconds, actor=actor)
        self._n_reported, self._busy, self._waited = self.n_restarts, 0.0, 0.0
        self._n_calls.clear()
        return events


class ActorsAhead(DistributedActors):
    """Asynchronous actors. :class:`RolloutTickets` limits how far they run ahead of the learner.

    :param env_factory: Makes one environment, in the process of the actor.
    :param policy: The policy.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param queue_out_of_sync_factor: Maximum number of finished rollouts in the queue, in units of `batch_size`.
    :param actor_env_seeds: A seed for each environment.
    :param actor_agent_seeds: A seed for the policy of each actor.
    :param envs_per_actor: Number of environments that each actor steps together.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        queue_out_of_sync_factor: float,
        actor_env_seeds: list[int],
        actor_agent_seeds: list[int],
        *,
        envs_per_actor: int = 1,
    ) -> None:
        super().__init__(env_factory, policy, n_rollout_steps, n_actors, batch_size, envs_per_actor=envs_per_actor)
        self._queue_size = queue_size_of(queue_out_of_sync_factor, batch_size)
        self._env_seeds = checked_actor_seeds(actor_env_seeds, n_actors * envs_per_actor, "actor_env_seeds")
        self._agent_seeds = checked_actor_seeds(actor_agent_seeds, n_actors, "actor_agent_seeds")
        self._n_starts = 0
        self._learned: dict[int, list[Any]] = {}
        """Actor -> statistics that the wrappers of its environments have learned."""
        self._spaces: ActorSpaces

    @abstractmethod
    def _issue(self, actor: int) -> None:
        """Request one more rollout from an actor."""

    @abstractmethod
    def _receive(self, wait: bool) -> None:
        """Append all finished rollouts to `_arrived`.

        :param wait: Wait for a rollout if none is finished.
        """

    def _take(self, actor: int, fragment: Fragment, decoder: StatsDecoder) -> RolloutPacket:
        """Return the rollout of a fragment after recording its statistics.

        :param actor: Index of the actor.
        :param fragment: The fragment.
        :param decoder: Decodes the statistics of its episodes.
        """
        for encoded in fragment.episodes:
            self.epoch_stats.receive(decoder.decode(encoded))
        if fragment.wrappers:
            self._learned[actor] = fragment.wrappers
        assert fragment.packet is not None, "actors collect rollouts"
        return fragment.packet

    @abstractmethod
    def _report_work(self) -> None:
        """Add what the actors have done since the last call to the epoch statistics."""

    @override(DistributedActors)
    def write_epoch_stats(self) -> None:
        self._report_work()
        super().write_epoch_stats()

    def _open(self) -> None:
        """Reset tickets and queue before the actors start."""
        self._tickets = RolloutTickets(self.n_actors, self.batch_size, self._queue_size)
        self._arrived: list[tuple[int, RolloutPacket, int]] = []
        """Queue of finished rollouts: actor, rollout, version of its policy."""
        self._n_starts += 1

    def _seeds_now(self) -> tuple[list[Any], list[Any]]:
        """Return the seeds of environments and policies; they differ after each start."""
        n_starts = self._n_starts - 1
        of_envs, of_agents = (
            [seed_of_start(s, n_starts) for s in seeds] for seeds in (self._env_seeds, self._agent_seeds)
        )
        return of_envs, of_agents

    @override(DistributedActors)
    @timed(COLLECTING)
    def collect_batch(self) -> CollectedBatch:
        self.start()
        start = time.perf_counter()
        self._receive(wait=False)
        n_before = len(self._arrived)
        taken: list[RolloutPacket] = []
        lags: list[int] = []
        while len(taken) < self.batch_size:
            actor = self._tickets.next_of(actor for actor, _, _ in self._arrived)
            if actor is None:
                self._receive(wait=True)
                continue
            position = next(i for i, (other, _, _) in enumerate(self._arrived) if other == actor)
            _, packet, version = self._arrived.pop(position)
            self._tickets.take(actor)
            self._issue(actor)
            taken.append(packet)
            lags.append(self._tickets.version - version)
        self._tickets.batch_done()
        seconds = time.perf_counter() - start
        return CollectedBatch(self._joined(taken, self._spaces), n_before, len(self._arrived), seconds, lags)

    @override(DistributedActors)
    def state_dict(self) -> dict[str, Any]:
        problem = "it was stepped by an asynchronous actor, which ran ahead of the learner"
        known = [states for actor in sorted(self._learned) for states in self._learned[actor]] or [[]]
        n_envs = self.n_actors * self.envs_per_actor
        states = [{"problem": problem, "wrappers": known[index % len(known)]} for index in range(n_envs)]
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
    upper bound of the policy lag. There are as many tickets as rollouts in progress (one for each actor) and places in
    the queue. When the learner takes a rollout, its actor gets a new ticket.

    Finished rollouts are taken in the order of their arrival, unless older ones would then exceed the maximum age: in
    that case the learner waits for the older ones.

    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param queue_size: Number of finished rollouts that may wait.
    """

    def __init__(self, n_actors: int, batch_size: int, queue_size: int) -> None:
        self.n_actors = n_actors
        self.batch_size = batch_size
        self._queue_size = queue_size
        self.max_age = math.ceil((queue_size + n_actors) / batch_size)
        """Maximum age of a rollout when it is taken."""
        self.version = 0
        """Number of updates so far."""
        shares, rest = divmod(queue_size, n_actors)
        self._issued = [deque([0] * (1 + shares + (actor < rest))) for actor in range(n_actors)]
        self._n_taken = 0

    def add_actor(self) -> None:
        """Add an actor with one rollout in progress; the size of the queue does not change."""
        self.n_actors += 1
        self.max_age = math.ceil((self._queue_size + self.n_actors) / self.batch_size)
        self._issued.append(deque([self.version]))

    def n_issued(self, actor: int) -> int:
        """Return the number of rollouts of an actor that are in progress or in the queue."""
        return len(self._issued[actor])

    def next_of(self, waiting: Iterable[int]) -> int | None:
        """Return the actor whose oldest finished rollout is taken next; `None`: wait for other actors.

        :param waiting: Actors with finished rollouts, in the order of their arrival.
        """
        candidates = list(waiting)
        if not candidates:
            return None
        latest = self._latest_version()
        # of equally old ones the first that finished
        best = min(candidates, key=lambda actor: self._issued[actor][0])
        return best if self._issued[best][0] <= latest else None

    def take(self, actor: int) -> int:
        """Take the oldest rollout of an actor into the current batch and issue a new ticket.

        :return: The version at which the old ticket was issued.
        """
        version = self._issued[actor].popleft()
        self._issued[actor].append(self.version)
        self._n_taken += 1
        return version

    def batch_done(self) -> None:
        """Complete the current batch."""
        self._n_taken = 0

    def updated(self) -> None:
        """Count an update of the learner."""
        self.version += 1

    def _latest_version(self) -> int:
        """Return the version of the youngest ticket that can be taken before the older ones exceed the maximum age."""
        by_version = Counter(version for issued in self._issued for version in issued)
        n_older = 0
        for version in sorted(by_version):
            n_older += by_version[version]
            updates_left = version + self.max_age - self.version
            room = self.batch_size - self._n_taken + updates_left * self.batch_size
            if n_older >= room:
                return version
        return self.version
