"""Actors that collect rollouts for a learner: their interface, and actors that are ahead of the learner."""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, LogStatsValue, get_stats_logger
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.utils.update_profile import COLLECTING, timed
from maze.core.wrappers.log_stats_wrapper import stats_value
from maze.train.parallelization.distributed_actors.env_groups import RolloutPacket, join_rollouts
from maze.train.parallelization.vector_env.env_batch import ActorSpaces
from maze.train.parallelization.vector_env.replay_log import states_for

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


class ClusterEvents(ABC):
    """What the actors have done in an epoch."""

    @define_epoch_stats(sum)
    def actor_restarts(self, value: int) -> None:
        """Number of actors that were replaced: they had vanished, or an environment of theirs had failed."""

    @define_epoch_stats(np.mean)
    def actors_busy(self, value: float) -> None:
        """Share of the time in which actors worked; the rest is waiting for the learner, or for other actors."""

    @define_epoch_stats(np.mean)
    def actors_there(self, value: int) -> None:
        """Number of actors, at the end of the epoch: machines that join or leave change it."""

    @define_epoch_stats(np.mean)
    def learner_waiting(self, value: float) -> None:
        """Share of the time in which the learner waited for actors."""

    @define_epoch_stats(np.mean)
    def calls_under_way(self, value: int) -> None:
        """Fragments, or slices of episodes, that actors had before them at the end of the epoch."""

    @define_epoch_stats(np.mean)
    def object_store_megabytes(self, value: float) -> None:
        """Memory in use for weights and fragments at the end of the epoch, on all machines together."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("actor")
    def calls_per_second(self, value: float, actor: int) -> None:
        """Fragments, or slices of episodes, that an actor has completed per second."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("node")
    def calls_per_second_of_node(self, value: float, node: str) -> None:
        """The same for all actors of a machine; those that are lost count where they were."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_epoch_stats(max, output_name="max")
    def fragment_age(self, value: float) -> None:
        """Updates that the policy of a fragment had missed when it arrived, where updates do not wait for all."""

    @define_epoch_stats(sum)
    def fragments_dropped(self, value: int) -> None:
        """Number of fragments that were too old to be learned from."""


class Work(NamedTuple):
    """What actors have done in some time; :class:`ClusterEvents` says what each is."""

    actor_restarts: int
    actors_there: int
    actors_busy: float
    learner_waiting: float
    calls_under_way: int
    object_store_megabytes: float | None
    """`None`: there is no object store."""
    calls_per_second: list[float]
    calls_per_second_of_node: dict[str, float]

    def report(self, statistics: LogStatsAggregator) -> ClusterEvents:
        """Adds it to the statistics of an epoch.

        :return: Takes what else there is to say.
        """
        events = statistics.create_event_topic(ClusterEvents)
        for name in self._fields[:-2]:
            if (value := getattr(self, name)) is not None:
                getattr(events, name)(value=value)
        for actor, rate in enumerate(self.calls_per_second):
            events.calls_per_second(value=rate, actor=actor)
        for node, rate in self.calls_per_second_of_node.items():
            events.calls_per_second_of_node(value=rate, node=node)
        return events


class WorkCounter:
    """Counts what actors do, wherever they are."""

    def __init__(self) -> None:
        self.n_restarts = 0
        """How often an actor was replaced."""
        self._since, self._n_reported = time.monotonic(), 0
        self._n_calls: Counter[int] = Counter()
        self._busy = self._waited = 0.0

    def done(self, actor: int, seconds: float) -> None:
        """An actor has completed a call.

        :param actor: Its number.
        :param seconds: How long it worked.
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

    def take(self, nodes: Sequence[str], n_there: int, n_under_way: int, megabytes: float | None = None) -> Work:
        """What has been done since the last time.

        :param nodes: The machine of each actor.
        :param n_there: Number of actors that can work.
        :param n_under_way: Number of calls that were not completed yet.
        :param megabytes: Memory in use for weights and fragments, where there is an object store.
        """
        now = time.monotonic()
        seconds, self._since = max(now - self._since, 1e-9), now
        n_restarts, self._n_reported = self.n_restarts - self._n_reported, self.n_restarts
        waited, busy, self._waited, self._busy = self._waited, self._busy, 0.0, 0.0
        rates = [self._n_calls[actor] / seconds for actor in range(len(nodes))]
        self._n_calls.clear()
        of_node = dict.fromkeys(nodes, 0.0)
        for node, rate in zip(nodes, rates, strict=True):
            of_node[node] += rate
        share = busy / max(len(nodes), 1) / seconds
        return Work(n_restarts, n_there, share, waited / seconds, n_under_way, megabytes, rates, of_node)


class ActorsAhead(DistributedActors):
    """Collects rollouts while the learner learns. :class:`RolloutTickets` bounds how far actors may be ahead.

    :param env_factory: Makes one environment, where the actor is.
    :param policy: The policy.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param queue_out_of_sync_factor: Times `batch_size`, the number of finished rollouts that may wait.
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
        """What the wrappers of an actor's environments have learned."""
        self._spaces: ActorSpaces

    @abstractmethod
    def _issue(self, actor: int) -> None:
        """Has an actor collect one more rollout."""

    @abstractmethod
    def _receive(self, wait: bool) -> None:
        """Appends all rollouts that are finished to `_arrived`.

        :param wait: Whether to wait for one if there is none.
        """

    @abstractmethod
    def _work_done(self) -> Work:
        """What the actors have done since the last call."""

    @override(DistributedActors)
    def write_epoch_stats(self) -> None:
        self._work_done().report(self.epoch_stats)
        super().write_epoch_stats()

    def _restore_wrappers(self) -> None:
        """Gives wrappers what they had learned, where actors are running."""

    def _open(self) -> None:
        """Begins to count."""
        self._tickets = RolloutTickets(self.n_actors, self.batch_size, self._queue_size)
        self._arrived: list[tuple[int, RolloutPacket, int]] = []
        """Actors, what they have collected, and the version of the policy that acted."""
        self._n_starts += 1

    def _seeds_now(self) -> tuple[list[Any], list[Any]]:
        """Seeds of environments and of policies: other ones after each start."""
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
        problem = "they were in processes of their own, which were ahead of the training"
        known = [states for actor in sorted(self._learned) for states in self._learned[actor]] or [[]]
        n_envs = self.n_actors * self.envs_per_actor
        states = [{"problem": problem, "wrappers": known[index % len(known)]} for index in range(n_envs)]
        return {"n_starts": self._n_starts, "environments": states}

    @override(DistributedActors)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Nothing is repeated: actors that are started again get seeds that they did not have before."""
        self._n_starts = max(self._n_starts, state_dict.get("n_starts", 0))
        n = self.envs_per_actor
        learned = [state["wrappers"] for state in states_for(state_dict, self.n_actors * n)]
        self._learned.clear()
        if any(learned):
            self._learned.update({actor: learned[actor * n : (actor + 1) * n] for actor in range(self.n_actors)})
        self._restore_wrappers()
        reason = "actors in processes of their own are ahead of the training, and what they do depends on its speed"
        return dict.fromkeys(range(len(learned)), reason)


class RolloutTickets:
    """Bounds how old a rollout can be when the learner uses it.

    A rollout is collected on a ticket. Its age is the number of updates since the ticket was issued, which the number
    of updates that its policy has missed cannot exceed. All tickets together are the rollouts in progress, one for
    each actor, and those that may wait (the queue). When the learner takes a rollout, its actor gets a new ticket.

    Finished rollouts are taken as they come, unless that would leave too little room for older ones: then the learner
    waits for those.

    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param queue_size: Number of finished rollouts that may wait.
    """

    def __init__(self, n_actors: int, batch_size: int, queue_size: int) -> None:
        self.n_actors = n_actors
        self.batch_size = batch_size
        self._queue_size = queue_size
        self.max_age = math.ceil((queue_size + n_actors) / batch_size)
        """No rollout is older than this when it is taken."""
        self.version = 0
        """Number of updates so far."""
        shares, rest = divmod(queue_size, n_actors)
        self._issued = [deque([0] * (1 + shares + (actor < rest))) for actor in range(n_actors)]
        self._n_taken = 0

    def add_actor(self) -> None:
        """One more actor collects from now on: a rollout is in progress, as many may wait as before."""
        self.n_actors += 1
        self.max_age = math.ceil((self._queue_size + self.n_actors) / self.batch_size)
        self._issued.append(deque([self.version]))

    def n_issued(self, actor: int) -> int:
        """Number of rollouts that an actor has to collect, or has collected and are waiting."""
        return len(self._issued[actor])

    def next_of(self, waiting: Iterable[int]) -> int | None:
        """The actor whose oldest finished rollout to take next; `None`: wait for others.

        :param waiting: Actors with finished rollouts, those first that finished first.
        """
        candidates = list(waiting)
        if not candidates:
            return None
        latest = self._latest_version()
        # of equally old ones the first that finished
        best = min(candidates, key=lambda actor: self._issued[actor][0])
        return best if self._issued[best][0] <= latest else None

    def take(self, actor: int) -> int:
        """Takes the oldest rollout of an actor into the current batch, and issues it a new ticket.

        :return: The version at which the old ticket was issued.
        """
        version = self._issued[actor].popleft()
        self._issued[actor].append(self.version)
        self._n_taken += 1
        return version

    def batch_done(self) -> None:
        """The current batch is complete."""
        self._n_taken = 0

    def updated(self) -> None:
        """The learner has made an update: later tickets are younger."""
        self.version += 1

    def _latest_version(self) -> int:
        """Issue version of the youngest rollout that can be taken without one of the older ones getting too old."""
        by_version = Counter(version for issued in self._issued for version in issued)
        n_older = 0
        for version in sorted(by_version):
            n_older += by_version[version]
            updates_left = version + self.max_age - self.version
            room = self.batch_size - self._n_taken + updates_left * self.batch_size
            if n_older >= room:
                return version
        return self.version
