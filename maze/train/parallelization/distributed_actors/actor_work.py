"""Statistics of actors, in processes of this machine or on a cluster."""

from __future__ import annotations

import time
from abc import ABC
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping

if TYPE_CHECKING:
    from maze.core.log_stats.log_stats import LogStatsAggregator


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
