from __future__ import annotations

import pickle
from abc import ABC

import cloudpickle

from maze.core.log_stats.log_stats import LogStatsKey
from maze.train.parallelization.vector_env.vector_env_utils import PortableStats


class Events(ABC):
    def happened(self, value: int) -> None:
        """Something happened."""


def send(stats):
    return pickle.loads(pickle.dumps(PortableStats(stats)))


def test_the_receiver_sees_its_own_event_methods_even_if_the_sender_has_copies_of_them():
    # what a worker has of a class of the user's script, which travelled by value
    copy = cloudpickle.loads(cloudpickle.dumps(lambda self, value: None))
    copy.__module__, copy.__qualname__ = Events.__module__, "Events.happened"
    assert copy is not Events.happened
    first = send({LogStatsKey(copy, "mean", ("a", 1)): 2.0})
    assert first == {LogStatsKey(Events.happened, "mean", ("a", 1)): 2.0}


def test_statistics_are_the_same_after_the_transfer():
    stats = {LogStatsKey(Events.happened, None, None): 1, LogStatsKey(Events.happened, "mean", None): [1, 2]}
    assert send(stats) == stats


def test_event_classes_unknown_to_the_receiver_are_sent_by_value():
    def local(value):
        """An event of an interface made in a function."""

    (key,) = first = send({LogStatsKey(local, "sum", None): 1})
    assert send({LogStatsKey(local, "sum", None): 1}) == first, "one event, not two"
    assert key.event.__qualname__ == local.__qualname__
    assert key.output_name == "sum"
