"""The model of a cluster: figures worked out by hand, and laws."""

from __future__ import annotations

import pytest

from benchmarks.cluster_model import Cluster, asynchronous, synchronous


def test_rates_of_even_steps_match_hand_worked_values() -> None:
    cluster = Cluster(actors=10, step_ms=5, learner_us=10, weights_mb=0)
    # fragments of 100 steps take 0.5 s; 10 calls 0.01 s; 1000 samples 0.01 s
    rate, limit = synchronous(cluster)
    assert rate == pytest.approx(1000 / 0.52)
    assert limit == "environments"
    assert asynchronous(cluster) == (2000, "environments")


def test_the_slowest_part_limits_throughput() -> None:
    assert asynchronous(Cluster(actors=1024, step_ms=5)) == (50_000, "learner")
    assert asynchronous(Cluster(actors=1024, step_ms=0.1, learner_us=1, fragment=50)) == (50_000, "calls")
    assert asynchronous(Cluster(actors=64, step_ms=5, weights_mb=1000))[1] == "weights"
    assert synchronous(Cluster(actors=1024, step_ms=5))[1] == "learner"


def test_free_actions_limit_no_actor() -> None:
    free = Cluster(actors=1024, step_ms=5, learner_us=0, call_ms=0, weights_mb=0)
    assert asynchronous(free) == (free.alone, "environments")
    assert synchronous(free) == (pytest.approx(free.alone), "environments")


def test_uneven_step_times_delay_only_waiting_workers() -> None:
    even, uneven = (Cluster(actors=64, step_ms=5, sigma=sigma) for sigma in (0.0, 1.0))
    assert asynchronous(even) == asynchronous(uneven)
    assert synchronous(uneven)[0] < 0.9 * synchronous(even)[0] < 0.9 * even.alone


def test_the_delivery_of_first_fragments_matches_hand_worked_values() -> None:
    even = Cluster(actors=10, step_ms=5, fragment=100)
    assert even.collecting_seconds() == pytest.approx(0.5)
    assert Cluster(actors=10, step_ms=5, wait_for=0.9).n_samples == 900
    # wait for the first of two actors; the other one continues meanwhile, so no time is lost
    one = Cluster(actors=2, step_ms=5, sigma=1, wait_for=0.5)
    first, second = one.fragment_seconds()[0]
    assert Cluster(actors=2, step_ms=5, sigma=1).collecting_seconds() > one.collecting_seconds()
    assert one.collecting_seconds(pause=1e9) == pytest.approx(min(first, second) / 50)  # what is late is there


def test_partial_waiting_is_faster_with_short_fragments_and_many_actors() -> None:
    def gain(actors: int, fragment: int, envs: int = 1) -> float:
        every, first = (Cluster(actors, 5, 1, envs, fragment, wait_for=share) for share in (1.0, 0.9))
        return first.n_samples / first.collecting_seconds() * every.collecting_seconds() / every.n_samples

    assert gain(32, 50) > gain(16, 50) > 1.25 > gain(10, 50) > 1.1
    assert gain(16, 20) > gain(16, 50) > gain(16, 200)
    assert gain(16, 50, envs=8) < 1.15  # eight environments one after the other are as even as longer fragments
