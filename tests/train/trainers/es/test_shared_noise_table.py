"""The noise table: the same numbers for everyone, at no cost before they are looked at."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.core.errors import ConfigError
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable


@given(st.integers(0, 49_999), st.integers(1, 20_000), st.integers(0, 49_999))
@settings(max_examples=30, deadline=None)
def test_numbers_depend_on_their_position_only(index, dim, looked_at_before):
    plain, other = SharedNoiseTable(50_000), SharedNoiseTable(50_000)
    whole = plain.get(0, 50_000)
    other.get(looked_at_before, 5)
    expected = np.take(whole, range(index, index + dim), mode="wrap")
    np.testing.assert_array_equal(other.get(index, dim), expected)


def test_numbers_are_standard_normal():
    numbers = SharedNoiseTable(200_000).get(0, 200_000)
    assert abs(numbers.mean()) < 0.01
    assert abs(numbers.std() - 1.0) < 0.01
    assert abs((np.abs(numbers) < 1.96).mean() - 0.95) < 0.005


def test_another_seed_gives_other_numbers():
    assert not np.array_equal(SharedNoiseTable(100).get(0, 50), SharedNoiseTable(100, seed=1).get(0, 50))


def test_the_documented_size_takes_no_memory_before_it_is_used():
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1])
    table = SharedNoiseTable(count=250_000_000)
    table.get(249_999_990, 20)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1]) - before
    assert pages * os.sysconf("SC_PAGE_SIZE") < 20_000_000


def test_numbers_cannot_be_changed_by_accident():
    table = SharedNoiseTable(100)
    for numbers in (table.get(10, 20), table.get(90, 20)):
        with pytest.raises(ValueError, match="read-only"):
            numbers[0] = 1.0


def test_indices_are_sampled_from_the_whole_table():
    table = SharedNoiseTable(50)
    drawn = {table.sample_index(np.random.RandomState(seed)) for seed in range(500)}
    assert drawn == set(range(50))


def test_a_table_smaller_than_the_model_is_refused():
    with pytest.raises(ConfigError, match="perturbation of 200 parameters does not fit into a table of 100"):
        SharedNoiseTable(100).get(0, 200)
    with pytest.raises(ConfigError, match=r"runner\.shared_noise_table_size"):
        SharedNoiseTable(0)


def test_a_received_table_shares_memory():
    table = SharedNoiseTable(10_000, seed=5)
    received = SharedNoiseTable(10_000, seed=5, fd=os.dup(table.memory.fd))
    numbers = table.get(0, 10)
    assert np.array_equal(received._numbers[:10], numbers)  # before the other side has drawn anything
    np.testing.assert_array_equal(received.get(9_000, 2_000), table.get(9_000, 2_000))


def test_a_pickled_table_has_the_same_numbers():
    table = SharedNoiseTable(10_000, seed=5)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(table)).get(7, 100), table.get(7, 100))
