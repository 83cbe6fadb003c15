"""Ranks, gradient, optimizers and flat parameters, against numbers worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from maze.core.errors import CheckpointError
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_utils import centered_ranks, es_gradient, get_flat_parameters, set_flat_parameters
from maze.train.trainers.es.optimizers.adam import Adam
from maze.train.trainers.es.optimizers.sgd import SGD
from tests.train.parallelization.toy_envs import two_step_env
from tests.train.trainers.es.populations import build_policy


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([3.0, 1.0, 2.0], [0.5, -0.5, 0.0]),
        ([[10.0, -5.0], [1e9, 0.0]], [[1 / 6, -0.5], [0.5, -1 / 6]]),  # an outlier counts as the best, not more
        ([7.0, 7.0, 7.0, 7.0], [0.0, 0.0, 0.0, 0.0]),  # nothing to learn from
        ([1.0, 2.0, 2.0, 3.0], [-0.5, 0.0, 0.0, 0.5]),  # ties share a rank
        ([5.0, 5.0, 0.0], [0.25, 0.25, -0.5]),
        ([4.0], [0.0]),
    ],
)
def test_centered_ranks_match_hand_computed_values(returns, expected):
    np.testing.assert_allclose(centered_ranks(np.array(returns)), expected)


@given(arrays(np.float64, st.integers(2, 40), elements=st.floats(-1e6, 1e6)))
@settings(max_examples=50)
def test_ranks_sum_to_zero_and_keep_the_order_of_the_returns(returns):
    ranks = centered_ranks(returns)
    assert ranks.sum() == pytest.approx(0.0, abs=1e-9)
    assert ranks.min() >= -0.5
    assert ranks.max() <= 0.5
    differences = np.sign(np.subtract.outer(returns, returns))
    assert (np.sign(np.subtract.outer(ranks, ranks)) == differences).all()


def test_gradient_matches_hand_computed_value():
    table = SharedNoiseTable(100)
    first, second = table.get(3, 4), table.get(20, 4)
    # ranks of (4, 1, 2, 3): (0.5, -0.5, -1/6, 1/6); pairs weigh 1 and -1/3, divided by four episodes
    gradient = es_gradient(table, [3, 20], np.array([[4.0, 1.0], [2.0, 3.0]]), 4)
    np.testing.assert_allclose(gradient, 0.25 * first - second / 12, rtol=1e-6, atol=1e-7)


def test_gradient_vanishes_when_all_episodes_are_equally_good():
    gradient = es_gradient(SharedNoiseTable(100), [3, 20], np.full((2, 2), 500.0), 4)
    assert (gradient == 0.0).all()


def test_gradient_points_to_where_returns_grow():
    table = SharedNoiseTable(1_000_000)
    direction = np.array([1.0, -2.0, 0.5], np.float32)
    indices = list(range(0, 3000, 3))
    returns = np.array([[table.get(i, 3) @ direction, -table.get(i, 3) @ direction] for i in indices])
    gradient = es_gradient(table, indices, returns, 3)
    cosine = gradient @ direction / np.linalg.norm(gradient) / np.linalg.norm(direction)
    assert cosine > 0.99


def optimized(optimizer, gradients, start=(1.0, -2.0)):
    """Parameters and update ratios after steps down these gradients."""
    policy = build_policy(two_step_env())
    vector = torch.zeros(policy.num_params)
    vector[:2] = torch.tensor(start)
    set_flat_parameters(policy, vector)
    optimizer.setup(policy)
    ratios = []
    for gradient in gradients:
        full = np.zeros(policy.num_params, np.float32)
        full[:2] = gradient
        ratios.append(optimizer.update(full))
    return get_flat_parameters(policy)[:2].tolist(), ratios


def test_adam_moves_each_parameter_by_the_step_size_at_first():
    parameters, ratios = optimized(Adam(step_size=0.1), [(3.0, -0.01)])
    assert parameters == pytest.approx([0.9, -1.9], abs=1e-5)
    assert ratios == [pytest.approx(0.1 * 2**0.5 / 5**0.5, rel=1e-4)]


def test_adam_follows_its_paper_over_several_steps():
    gradients = [(3.0, -0.01), (-1.0, 0.5), (0.2, 0.0)]
    parameters, _ = optimized(Adam(step_size=0.1, beta1=0.8, beta2=0.9), gradients)
    expected, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for t, gradient in enumerate(np.array(gradients), start=1):  # algorithm 1 of the paper
        m = 0.8 * m + 0.2 * gradient
        v = 0.9 * v + 0.1 * gradient**2
        expected -= 0.1 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
    assert parameters == pytest.approx(expected.tolist(), rel=1e-4)


def test_sgd_follows_the_mean_of_the_gradients():
    # velocities 0.5 * 2 = 1 and 0.5 * 1 + 0.5 * 4 = 2.5
    parameters, _ = optimized(SGD(step_size=0.1, momentum=0.5), [(2.0, 0.0), (4.0, 0.0)])
    assert parameters == pytest.approx([1.0 - 0.1 - 0.25, -2.0])


@pytest.mark.parametrize("make", [lambda: Adam(0.1), lambda: SGD(0.1)])
def test_an_optimizer_continues_exactly_from_its_state(make):
    gradients = [(2.0, 1.0), (-1.0, 0.5), (0.3, -0.2)]
    uninterrupted, _ = optimized(make(), gradients)
    first = make()
    halfway, _ = optimized(first, gradients[:2])
    second = make()
    policy = build_policy(two_step_env())
    vector = torch.zeros(policy.num_params)
    vector[:2] = torch.tensor(halfway)
    set_flat_parameters(policy, vector)
    second.setup(policy)
    second.load_state_dict(first.state_dict())
    full = np.zeros(policy.num_params, np.float32)
    full[:2] = gradients[2]
    second.update(full)
    assert get_flat_parameters(policy)[:2].tolist() == uninterrupted


def test_an_optimizer_refuses_the_state_of_another_one():
    policy = build_policy(two_step_env())
    adam, sgd = Adam(0.1), SGD(0.1)
    adam.setup(policy)
    sgd.setup(policy)
    for one, other in ((adam, sgd), (sgd, adam)):  # both have an average `v`, of other things
        with pytest.raises(CheckpointError, match="State of the optimizer: expected the shapes"):
            one.load_state_dict(other.state_dict())


def test_flat_parameters_are_a_copy_and_come_back_in_place():
    policy = build_policy(two_step_env())
    flat = get_flat_parameters(policy)
    first = policy.parameters()[0]
    set_flat_parameters(policy, flat + 1.0)
    assert first is policy.parameters()[0]
    assert torch.equal(get_flat_parameters(policy), flat + 1.0)
    with pytest.raises(ValueError, match=f"has {len(flat)} parameters"):
        set_flat_parameters(policy, flat[1:])
