"""Casts of values of spaces."""

from __future__ import annotations

import numpy as np
import pytest

from maze.core.env.space_values import Cast
from maze.core.errors import EnvironmentContractError


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.uint8, np.array([1, 255])),
        (np.uint8, [7.0, 8.0]),
        (np.int8, np.array([True, False])),
        (np.int64, 5),
        (np.bool_, np.array([0, 1])),
        (np.float32, np.array([0.1, 1e9])),
        (np.float32, [1, 2]),
    ],
)
def test_a_cast_keeps_numbers(dtype, value):
    array = Cast(np.dtype(dtype), "here")(value)
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, np.asarray(value).astype(dtype))
    assert Cast(np.dtype(dtype), "here")(array) is array


@pytest.mark.parametrize(
    ("dtype", "value", "found"),
    [
        (np.uint8, np.array([5, 300]), "300"),
        (np.uint8, np.array([5, 300], np.uint16), "300"),
        (np.uint8, 300, "300"),
        (np.uint8, np.array([-1]), "-1"),
        (np.uint8, np.array([0.7]), "0.7"),
        (np.int64, np.array([np.nan]), "nan"),
        (np.int32, np.array([2**40]), str(2**40)),
        (np.int64, 10**30, str(10**30)),
        (np.bool_, np.array([2]), "2"),
    ],
)
def test_a_value_that_conversion_would_change_is_refused(dtype, value, found):
    with pytest.raises(EnvironmentContractError, match=rf"here: expected values of dtype .*{found}"):
        Cast(np.dtype(dtype), "here")(value)
