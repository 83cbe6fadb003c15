"""Statistics of the actors of a cluster."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING

import numpy as np

from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping

if TYPE_CHECKING:
    from maze.core.log_stats.log_stats import LogStatsAggregator
    from maze.train.parallelization.on_ray.crew import Crew


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


def report_actors(crew: Crew, statistics: LogStatsAggregator) -> ClusterEvents:
    """Adds what the actors have done since the last call.

    :param crew: The actors.
    :param statistics: Those of the epoch.
    :return: Takes what else there is to say.
    """
    events = statistics.create_event_topic(ClusterEvents)
    work = crew.take_work()
    for name in work._fields[:-2]:
        getattr(events, name)(value=getattr(work, name))
    for actor, rate in enumerate(work.calls_per_second):
        events.calls_per_second(value=rate, actor=actor)
    for node, rate in work.calls_per_second_of_node.items():
        events.calls_per_second_of_node(value=rate, node=node)
    return events
