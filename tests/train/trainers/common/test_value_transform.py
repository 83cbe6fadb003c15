"""Value transformations: inverses, ranges and hand-worked numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maze.train.trainers.common.value_transform import ReduceScaleValueTransform, scalar_to_support, support_to_scalar


@given(st.floats(-1e4, 1e4), st.sampled_from([0.0, 1e-3, 1e-2, 1.0]))
def test_inverse_undoes_the_transformation_for_numbers_arrays_and_tensors(value, epsilon):
    transform = ReduceScaleValueTransform(epsilon)
    for x in (value, np.array([value]), torch.tensor([value], dtype=torch.float64)):
        restored = transform.transform_value_inv(transform.transform_value(x))
        assert type(restored) in (float, np.float64, type(x))
        assert np.asarray(restored).item() == pytest.approx(value, rel=1e-5, abs=1e-6)


@given(st.floats(2.0**-20, 2.0**20, width=32), st.sampled_from([0.0, 1e-4, 1e-3, 1e-2, 1.0]), st.sampled_from([1, -1]))
def test_in_single_precision_no_digits_get_lost(value, epsilon, sign):
    transform = ReduceScaleValueTransform(epsilon)
    x = sign * torch.tensor(value)
    exact = transform.transform_value(x.double())
    assert transform.transform_value(x).item() == pytest.approx(exact.item(), rel=1e-6)
    assert transform.transform_value_inv(transform.transform_value(x)).item() == pytest.approx(x.item(), rel=5e-6)


def test_transformation_matches_hand_computed_values():
    transform = ReduceScaleValueTransform(0.001)
    assert transform.transform_value(0.0) == 0.0
    assert transform.transform_value(99.0) == pytest.approx(9.0 + 0.099)
    assert transform.transform_value(-99.0) == pytest.approx(-9.099)


def test_a_scalar_is_shared_between_its_neighbours_in_the_support():
    support = scalar_to_support(torch.tensor([0.25, -2.0, 7.0]), (-2, 2))
    expected = [[0, 0, 0.75, 0.25, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]  # 7 is beyond the range
    assert torch.allclose(support, torch.tensor(expected))


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=6))
def test_expectation_of_the_support_is_the_scalar(values):
    scalar = torch.tensor(values)
    support = scalar_to_support(scalar, (-5, 5))
    assert torch.allclose(support.sum(-1), torch.ones(len(values)))
    assert torch.allclose(support_to_scalar(support.clamp_min(1e-30).log(), (-5, 5)), scalar, atol=1e-4)


def test_logits_that_do_not_match_the_support_are_refused():
    with pytest.raises(ValueError, match="needs 5 logits, found 4"):
        support_to_scalar(torch.zeros(3, 4), (-2, 2))
