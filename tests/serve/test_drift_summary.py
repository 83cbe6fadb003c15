"""What training observations look like, in numbers worked out by hand."""

from __future__ import annotations

import numpy as np

from maze.serve.drift import bins, components, entry_summaries, summary


def test_numbers_are_summed_up_by_deciles():
    (component,) = summary(np.arange(101.0)[:, None], is_large=False)["components"]
    assert component["edges"] == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert (component["min"], component["max"]) == (0, 100)
    # 0 to 9, 10 to 19, ..., and 90 to 100
    assert np.allclose(np.array(component["shares"]) * 101, [10] * 9 + [11])


def test_a_constant_is_in_one_bin():
    (component,) = summary(np.full((7, 1), 2.5), is_large=False)["components"]
    assert component["shares"] == [0] * 9 + [1]
    assert bins(component["edges"], [2.4, 2.5, 2.6]).tolist() == [0, 9, 9]


def test_whole_numbers_are_counted_and_large_entries_have_features():
    samples = {"kind": [components(np.int64(kind)) for kind in (1, 3, 3, 3)]}
    images = np.stack([np.full((10, 10), fill, np.uint8) for fill in (0, 10, 20, 30)])
    samples["image"] = [components(image) for image in images]
    found = entry_summaries(samples, {"kind": 1, "image": 100})
    assert found["kind"]["components"] == [{"values": [1, 3], "shares": [0.25, 0.75]}]
    assert found["image"]["features"] == ["mean", "std", "min", "max"]
    assert [each["max"] for each in found["image"]["components"]] == [30, 0, 30, 30]
