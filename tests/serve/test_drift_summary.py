"""Summaries of training observations, in hand-worked numbers."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from maze.serve.drift import components, effective_samples, entry_summaries, summary


def test_numbers_are_summed_up_by_deciles():
    (component,) = summary(np.arange(101.0)[:, None], is_large=False)["components"]
    assert component["edges"] == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert (component["min"], component["max"]) == (0, 100)
    # 0 to 9, 10 to 19, ..., and 90 to 100
    assert np.allclose(np.array(component["shares"]) * 101, [10] * 9 + [11])


def test_a_constant_is_in_one_bin():
    (component,) = summary(np.full((7, 1), 2.5), is_large=False)["components"]
    assert component["shares"] == [0] * 9 + [1]
    assert np.digitize([2.4, 2.5, 2.6], component["edges"]).tolist() == [0, 9, 9]


def test_whole_numbers_are_counted_and_large_entries_have_features():
    samples = {"kind": [components(np.int64(kind)) for kind in (1, 3, 3, 3)]}
    images = np.stack([np.full((10, 10), fill, np.uint8) for fill in (0, 10, 20, 30)])
    samples["image"] = [components(image) for image in images]
    samples["nothing"] = [components(np.zeros((2, 0), np.float32))] * 4
    shapes = {"image": spaces.Box(0, 255, (10, 10), np.uint8), "nothing": spaces.Box(0, 1, (2, 0))}
    found = entry_summaries(samples, {"kind": spaces.Discrete(4), **shapes})
    assert found.keys() == {"kind", "image"}, "an entry without numbers cannot drift"
    assert found["kind"]["components"] == [{"values": [1, 3], "shares": [0.25, 0.75]}]
    assert found["image"]["features"] == ["mean", "std", "min", "max"]
    assert [each["max"] for each in found["image"]["components"]] == [30, 0, 30, 30]


def test_samples_that_come_in_groups_of_equal_ones_count_by_groups():
    groups = np.random.default_rng(0).integers(10, size=1000)
    assert 250 < effective_samples(groups) <= 1000, "few long batches find something in independent samples, too"
    assert effective_samples(groups, 1, [50]) > 600
    for size in (2, 5, 10):
        found = effective_samples(np.repeat(groups, size), 1, [20])
        assert 0.4 < found / 1000 < 1.1
    assert effective_samples(np.zeros(50, int)) == 50


def test_a_shift_is_no_autocorrelation_if_parts_are_estimated_separately():
    places = np.random.default_rng(0).integers(5, size=1000)
    places[700:] += 5
    assert effective_samples(places, 1, [10]) < 100
    assert effective_samples(places, 2, [10]) > 400


def test_summaries_contain_the_effective_sample_size():
    samples = np.random.default_rng(0).normal(size=(500, 2))
    samples[:, 1] = np.repeat(samples[::50, 1], 50)
    fast, slow = summary(samples, is_large=False)["n_effective"]
    assert fast > 100
    assert slow < 10
