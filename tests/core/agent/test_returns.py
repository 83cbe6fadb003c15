"""Advantages: numbers worked out by hand, and laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.core.agent.returns import gae, next_values_from


def column(*values, dtype=np.float64):
    return np.array(values, dtype).reshape(-1, 1)


def flags(n, *positions):
    result = np.zeros((n, 1), bool)
    result[list(positions)] = True
    return result


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        (flags(4, 1), flags(4), [-4.68, -19.0, 11.32, 6.0]),
        (flags(4), flags(4, 1), [11.52, 3.5, 11.32, 6.0]),
        (flags(4, 1), flags(4, 1), [-4.68, -19.0, 11.32, 6.0]),  # terminated wins
    ],
)
def test_the_fixture_with_a_boundary_after_the_second_step(terminated, truncated, expected, as_tensors):
    values = column(10, 20, 30, 40)
    next_values = next_values_from(values, np.array([50.0]), {(1, 0): 25.0})
    arrays = [np.ones((4, 1)), values, next_values, terminated, truncated]
    if as_tensors:
        arrays = [torch.from_numpy(array) for array in arrays]
    advantages = gae(*arrays, gamma=0.9, gae_lambda=0.8)
    assert isinstance(advantages, torch.Tensor if as_tensors else np.ndarray)
    assert advantages.flatten().tolist() == pytest.approx(expected)


def test_next_values_are_the_following_row_the_last_value_or_the_final_observations():
    values = np.array([[1.0, 10.0], [2.0, 20.0]])
    next_values = next_values_from(values, np.array([3.0, 30.0]), {(0, 1): -7.0})
    assert next_values.tolist() == [[2.0, -7.0], [3.0, 30.0]]
    assert values.tolist() == [[1.0, 10.0], [2.0, 20.0]]
    tensors = next_values_from(torch.from_numpy(values), torch.tensor([3.0, 30.0]), {(0, 1): -7.0})
    assert tensors.tolist() == next_values.tolist()


@st.composite
def rollouts(draw):
    n_steps, n_envs = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    end = rng.random((n_steps, n_envs))
    rewards, values, next_values = rng.normal(size=(3, n_steps, n_envs))
    return rewards, values, next_values, end < 0.2, (end >= 0.2) & (end < 0.4)


def consistent(rollout):
    """With next values that are the next row's inside an episode, as in any real rollout."""
    rewards, values, next_values, terminated, truncated = rollout
    goes_on = ~(terminated | truncated)[:-1]
    next_values[:-1][goes_on] = values[1:][goes_on]
    return rewards, values, next_values, terminated, truncated


@settings(max_examples=50, deadline=None)
@given(rollout=rollouts(), gamma=st.floats(0.0, 1.0))
def test_lambda_one_is_the_discounted_return_minus_the_value(rollout, gamma):
    rewards, values, next_values, terminated, truncated = consistent(rollout)
    returns = np.zeros_like(values)
    following = next_values[-1]
    for step in reversed(range(len(values))):
        following = np.where(truncated[step], next_values[step], following)
        following = rewards[step] + gamma * np.where(terminated[step], 0.0, following)
        returns[step] = following
    advantages = gae(rewards, values, next_values, terminated, truncated, gamma, 1.0)
    np.testing.assert_allclose(advantages, returns - values, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(rollout=rollouts(), gamma=st.floats(0.0, 1.0))
def test_lambda_zero_is_the_temporal_difference_error(rollout, gamma):
    rewards, values, next_values, terminated, _ = rollout
    errors = rewards + gamma * next_values * ~terminated - values
    np.testing.assert_allclose(gae(*rollout, gamma, 0.0), errors, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(rollout=rollouts(), boundary=st.integers(0, 10), kind=st.sampled_from(["terminated", "truncated"]))
def test_no_value_leaks_across_an_episode_boundary(rollout, boundary, kind):
    rewards, values, next_values, terminated, truncated = rollout
    boundary = min(boundary, len(values) - 1)
    (terminated if kind == "terminated" else truncated)[boundary] = True
    before = gae(rewards, values, next_values, terminated, truncated, 0.99, 0.95)[: boundary + 1].copy()
    for later in (rewards, values, next_values):
        later[boundary + 1 :] = 1e6
    after = gae(rewards, values, next_values, terminated, truncated, 0.99, 0.95)[: boundary + 1]
    np.testing.assert_array_equal(before, after)


def test_the_value_after_a_termination_need_not_be_finite():
    advantages = gae(column(1), column(2), column(np.nan), flags(1, 0), flags(1), 0.9, 0.9)
    assert advantages.item() == -1.0


def test_substeps_of_one_environment_step_are_not_discounted_against_one_another():
    # two steps of two sub-steps; the reward comes with the second sub-step; gamma 0.5, lambda 0.5
    rewards, values = column(0, 1, 0, 2), column(10, 20, 30, 40)
    next_values = next_values_from(values, np.array([50.0]))
    complete = flags(4, 1, 3)
    advantages = gae(rewards, values, next_values, flags(4), flags(4), 0.5, 0.5, complete)
    # tick 3: 2 + 0.5 * 50 - 40 = -13;              tick 2: 0 + 40 - 30 + (-13) = -3
    # tick 1: 1 + 0.5 * 30 - 20 + 0.25 * (-3) = -4.75; tick 0: 0 + 20 - 10 + (-4.75) = 5.25
    assert advantages.flatten().tolist() == pytest.approx([5.25, -4.75, -3.0, -13.0])


def test_a_truncation_in_the_middle_of_a_step_cuts_and_bootstraps_undiscounted():
    # the episode is cut off after the first of two sub-steps; V(final observation) = 7 belongs to the same step
    rewards, values = column(1, 1, 1), column(10, 20, 30)
    next_values = next_values_from(values, np.array([40.0]), {(0, 0): 7.0})
    advantages = gae(rewards, values, next_values, flags(3), flags(3, 0), 0.5, 0.5, flags(3, 2))
    # tick 0: 1 + 7 - 10 = -2; tick 2: 1 + 20 - 30 = -9; tick 1: 1 + 30 - 20 - 9 = 2
    assert advantages.flatten().tolist() == pytest.approx([-2.0, 2.0, -9.0])


@settings(max_examples=30, deadline=None)
@given(rollout=rollouts())
def test_with_every_substep_complete_the_structured_form_is_the_plain_one(rollout):
    complete = np.ones_like(rollout[3])
    np.testing.assert_array_equal(gae(*rollout, 0.9, 0.8, complete), gae(*rollout, 0.9, 0.8))


def test_single_precision_stays_single_precision_and_no_gradient_flows():
    tensors = [torch.ones(3, 2, requires_grad=True) for _ in range(3)]
    none = torch.zeros(3, 2, dtype=torch.bool)
    advantages = gae(*tensors, none, none, 0.9, 0.9)
    assert advantages.dtype is torch.float32
    assert not advantages.requires_grad


def test_arrays_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="differ in shape"):
        gae(np.ones((2, 1)), np.ones((2, 1)), np.ones((1, 1)), flags(2), flags(2), 0.9, 0.9)
