"""Arrays of values of spaces: casts, and rows that are copied as pieces of memory."""

from __future__ import annotations

import numpy as np
import pytest

from maze.core.env.space_values import Cast, as_pieces, put_rows
from maze.core.errors import EnvironmentContractError


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 4), (5, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_])
def test_rows_of_any_shape_and_memory_layout_are_copied(shape, dtype):
    rng = np.random.default_rng(0)
    source = rng.integers(0, 2, shape).astype(dtype)
    source[...] = source if dtype is np.bool_ else source + np.arange(5, dtype=dtype).reshape(5, *[1] * len(shape[1:]))
    rows = np.array([3, 0, 4])
    expected = np.zeros(shape, dtype)
    expected[rows] = source[rows]
    strided = np.zeros((2, *shape), dtype)[1] if len(shape) == 1 else np.zeros(shape, dtype, order="F")
    for target in (np.zeros(shape, dtype), strided, np.zeros((10, *shape[1:]), dtype)[::2]):
        put_rows(target, rows, source, as_pieces(source))
        np.testing.assert_array_equal(target, expected)


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
