from __future__ import annotations

import pickle
from abc import ABC

import cloudpickle

from maze.core.log_stats.log_stats import LogStatsKey
from maze.train.parallelization.vector_env.vector_env_utils import StatsDecoder, StatsEncoder


class Events(ABC):
    def happened(self, value: int) -> None:
        """Something happened."""


def send(value):
    return pickle.loads(pickle.dumps(value))


def test_the_receiver_sees_its_own_event_methods_even_if_the_sender_has_copies_of_them():
    # what a worker has of a class of the user's script, which travelled by value
    copy = cloudpickle.loads(cloudpickle.dumps(lambda self, value: None))
    copy.__module__, copy.__qualname__ = Events.__module__, "Events.happened"
    assert copy is not Events.happened
    encoder, decoder = StatsEncoder(), StatsDecoder()
    first = decoder.decode(send(encoder.encode({LogStatsKey(copy, "mean", ("a", 1)): 2.0})))
    assert first == {LogStatsKey(Events.happened, "mean", ("a", 1)): 2.0}


def test_keys_travel_once():
    encoder, decoder = StatsEncoder(), StatsDecoder()
    stats = {LogStatsKey(Events.happened, None, None): 1, LogStatsKey(Events.happened, "mean", None): [1, 2]}
    assert decoder.decode(send(encoder.encode(stats))) == stats
    again = encoder.encode(stats)
    assert again[0] == []
    assert decoder.decode(send(again)) == stats


def test_events_that_only_the_sender_knows_travel_by_value():
    def local(value):
        """An event of an interface made in a function."""

    (key,) = StatsDecoder().decode(send(StatsEncoder().encode({LogStatsKey(local, "sum", None): 1})))
    assert key.event.__qualname__ == local.__qualname__
    assert key.output_name == "sum"
