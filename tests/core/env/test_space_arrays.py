"""Rows of arrays that are copied as pieces of memory."""

from __future__ import annotations

import numpy as np
import pytest

from maze.core.env.space_arrays import as_pieces, put_rows


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 4), (5, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_])
def test_rows_are_copied_whatever_their_shape_and_how_they_lie_in_memory(shape, dtype):
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
