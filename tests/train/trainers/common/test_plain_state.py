"""What training states are made of: plain values and tensors, which load without running code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maze.core.log_stats.reducer_functions import PassedThrough
from maze.core.utils.checkpoint import load_state, save_state
from maze.train.utils.train_utils import from_plain, to_plain

VALUES = [
    np.zeros((0, 3), np.float32),
    np.float32(3.5),
    np.array(2),
    np.arange(6.0).reshape(2, 3).T,
    np.array([True, False]),
    np.arange(70_000, dtype=np.uint8).reshape(7, -1),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.dtype}{list(value.shape)}")
def test_arrays_small_and_large_come_back_as_they_were(value, tmp_path):
    save_state(tmp_path / "state.pt", to_plain({"value": value}))
    found = from_plain(load_state(tmp_path / "state.pt"))["value"]
    assert (type(found), found.dtype, found.shape) == (type(value), value.dtype, value.shape)
    np.testing.assert_array_equal(found, value)
    if isinstance(found, np.ndarray):
        found[...] = 0  # memory of its own


def test_containers_round_trip_and_other_types_are_refused():
    state = {"a": [1, (None, "x", 2.5)], 3: PassedThrough([np.int64(4)]), "bytes": b"\xff"}
    found = from_plain(to_plain(state))
    assert found == state
    assert type(found[3]) is PassedThrough
    with pytest.raises(TypeError, match="a set cannot be saved"):
        to_plain({"a": [{1}]})


def test_arrays_that_earlier_releases_wrote_as_tensors_are_read():
    assert from_plain({"__array__": torch.arange(3)}).tolist() == [0, 1, 2]
    assert from_plain({"__scalar__": torch.tensor(7)}) == np.int64(7)
