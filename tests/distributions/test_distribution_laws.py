"""Laws that every distribution obeys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.distributions.bernoulli import BernoulliProbabilityDistribution
from maze.distributions.beta import BetaProbabilityDistribution
from maze.distributions.categorical import CategoricalProbabilityDistribution
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.multi_categorical import MultiCategoricalProbabilityDistribution
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution

BOUNDED = spaces.Box(np.array([-2.0, 0.0, 5.0], np.float32), np.array([2.0, 0.5, 100.0], np.float32))

CASES = [
    pytest.param(CategoricalProbabilityDistribution, spaces.Discrete(5), id="categorical"),
    pytest.param(MultiCategoricalProbabilityDistribution, spaces.MultiDiscrete([3, 2, 4]), id="multi-categorical"),
    pytest.param(
        MultiCategoricalProbabilityDistribution, spaces.MultiDiscrete([[3, 2], [4, 5]]), id="multi-categorical-matrix"
    ),
    pytest.param(BernoulliProbabilityDistribution, spaces.MultiBinary(4), id="bernoulli"),
    pytest.param(BernoulliProbabilityDistribution, spaces.MultiBinary((2, 3)), id="bernoulli-matrix"),
    pytest.param(DiagonalGaussianProbabilityDistribution, spaces.Box(-np.inf, np.inf, (3,)), id="gaussian"),
    pytest.param(DiagonalGaussianProbabilityDistribution, spaces.Box(-np.inf, np.inf, ()), id="gaussian-scalar"),
    pytest.param(DiagonalGaussianProbabilityDistribution, spaces.Box(-1, 1, (2, 3)), id="gaussian-matrix"),
    pytest.param(SquashedGaussianProbabilityDistribution, BOUNDED, id="squashed"),
    pytest.param(SquashedGaussianProbabilityDistribution, spaces.Box(-1, 1, (2, 3)), id="squashed-matrix"),
    pytest.param(BetaProbabilityDistribution, BOUNDED, id="beta"),
    pytest.param(BetaProbabilityDistribution, spaces.Box(0, 1, ()), id="beta-scalar"),
]
BATCH_SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def build(dist_type, space, batch_shape=(), seed=0, scale=1.0, temperature=1.0):
    shape = dist_type.required_logits_shape(space)
    logits = scale * torch.randn(*batch_shape, *shape, generator=generator(seed))
    return dist_type(logits=logits, action_space=space, temperature=temperature)


@pytest.mark.parametrize(("dist_type", "space"), CASES)
@settings(max_examples=15, deadline=None)
@given(batch_shape=BATCH_SHAPES)
def test_all_results_have_the_shape_of_the_batch(dist_type, space, batch_shape):
    dist = build(dist_type, space, batch_shape)
    sample = dist.sample(generator=generator())
    assert sample.shape == (*batch_shape, *space.shape)
    assert dist.deterministic_sample().shape == sample.shape
    for result in (dist.log_prob(sample), dist.neg_log_prob(sample), dist.joint_entropy(), dist.joint_kl(dist)):
        assert result.shape == batch_shape


@pytest.mark.parametrize(("dist_type", "space"), CASES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 1e4])
def test_samples_lie_in_the_space_and_everything_is_finite_at_extreme_logits(dist_type, space, scale):
    dist, other = build(dist_type, space, (64,), scale=scale), build(dist_type, space, (64,), seed=1, scale=scale)
    sample = dist.sample(generator=generator())
    for actions in (sample, dist.deterministic_sample()):
        for action in actions.numpy():
            # samples of a normal distribution are clipped on their way to the environment only
            unclipped = isinstance(dist, DiagonalGaussianProbabilityDistribution)
            assert unclipped or space.contains(np.asarray(action, space.dtype))
        assert torch.isfinite(dist.log_prob(actions)).all()
    assert torch.isfinite(dist.joint_entropy()).all()
    if scale <= 10.0:
        assert torch.isfinite(dist.joint_kl(other)).all()


@pytest.mark.parametrize(("dist_type", "space"), CASES)
def test_gradients_are_finite_at_extreme_logits(dist_type, space):
    logits = (1e3 * torch.randn(16, *dist_type.required_logits_shape(space), generator=generator())).requires_grad_()
    dist = dist_type(logits=logits, action_space=space, temperature=1.0)
    action = dist.sample(generator=generator())
    (gradient,) = torch.autograd.grad(dist.joint_entropy().sum(), logits, retain_graph=True)
    assert torch.isfinite(gradient).all()
    (gradient,) = torch.autograd.grad(dist.log_prob(action).sum(), logits)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("dist_type", "space"), CASES)
def test_entropy_is_the_mean_negative_log_probability_of_samples(dist_type, space):
    n = 40_000
    single = build(dist_type, space, seed=3)
    logits = torch.randn(*dist_type.required_logits_shape(space), generator=generator(3))
    many = dist_type(logits=logits.expand(n, *logits.shape), action_space=space, temperature=1.0)
    information = many.neg_log_prob(many.sample(generator=generator(4)))
    standard_error = float(information.std()) / math.sqrt(n)
    assert float(single.joint_entropy()) == pytest.approx(float(information.mean()), abs=5 * standard_error + 1e-4)


@pytest.mark.parametrize(("dist_type", "space"), CASES)
def test_divergence_is_the_mean_log_ratio_of_samples(dist_type, space):
    n = 40_000
    shape = dist_type.required_logits_shape(space)
    logits = [0.5 * torch.randn(*shape, generator=generator(seed)) for seed in (5, 6)]
    own, other = (dist_type(logits=part.expand(n, *shape), action_space=space, temperature=1.0) for part in logits)
    actions = own.sample(generator=generator(7))
    log_ratio = own.log_prob(actions) - other.log_prob(actions)
    standard_error = float(log_ratio.std()) / math.sqrt(n)
    divergence = float(own.joint_kl(other)[0])
    assert divergence > 0.0
    assert divergence == pytest.approx(float(log_ratio.mean()), abs=5 * standard_error + 1e-4)
    assert float(own.joint_kl(own)[0]) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(("dist_type", "space"), CASES)
def test_the_same_generator_state_gives_the_same_samples_and_the_global_generator_is_left_alone(dist_type, space):
    dist = build(dist_type, space, (10,))
    before = torch.get_rng_state()
    first = dist.sample(generator=generator(11))
    assert torch.equal(first, dist.sample(generator=generator(11)))
    own = generator(11)
    dist.sample(generator=own)
    assert not torch.equal(own.get_state(), generator(11).get_state())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("dist_type", "space"), CASES)
def test_a_high_temperature_raises_and_a_low_one_lowers_the_entropy(dist_type, space):
    entropies = []
    for temperature in (0.2, 1.0, 1.3):
        dist = build(dist_type, space, seed=2, temperature=temperature)
        if isinstance(dist, SquashedGaussianProbabilityDistribution):  # squashed, much variance piles up at the bounds
            dist = dist.normal
        entropies.append(float(dist.joint_entropy()))
    assert entropies[0] < entropies[1] < entropies[2]


@pytest.mark.parametrize("dist_type", [SquashedGaussianProbabilityDistribution, BetaProbabilityDistribution])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 0.001), (5.0, 100.0), (-3.0, -2.0)])
def test_densities_of_bounded_actions_integrate_to_one(dist_type, low, high):
    space = spaces.Box(low, high, (1,), np.float64)
    logits = torch.tensor([0.3, -0.7], dtype=torch.float64)
    n = 200_000
    width = (high - low) / n
    grid = (low + width * (torch.arange(n, dtype=torch.float64) + 0.5)).unsqueeze(-1)
    dist = dist_type(logits=logits.expand(n, 2), action_space=space, temperature=1.0)
    assert float(dist.log_prob(grid).exp().sum() * width) == pytest.approx(1.0, abs=1e-3)


def test_probabilities_of_discrete_actions_sum_to_one():
    space = spaces.MultiDiscrete([2, 3])
    actions = torch.tensor([[a, b] for a in range(2) for b in range(3)])
    single = build(MultiCategoricalProbabilityDistribution, space, seed=1)
    probabilities = [float(single.log_prob(action).exp()) for action in actions]
    assert sum(probabilities) == pytest.approx(1.0, abs=1e-5)


DRAWN_AT_ONCE = [
    (DiagonalGaussianProbabilityDistribution, spaces.Box(-1, 1, (2,))),
    (SquashedGaussianProbabilityDistribution, spaces.Box(np.float32([-2, 0]), np.float32([2, 10]))),
    (SquashedGaussianProbabilityDistribution, spaces.Box(-3, 1, (2, 3))),
    (SquashedGaussianProbabilityDistribution, spaces.Box(-3, 1, ())),
]


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize(("dist_type", "space"), DRAWN_AT_ONCE)
@pytest.mark.parametrize("batch_shape", [(), (7,), (2, 3)])
def test_sampling_with_log_probabilities_equals_sampling_and_evaluating_them(
    dist_type, space, batch_shape, temperature
):
    shape = (*batch_shape, *dist_type.required_logits_shape(space))
    logits = (3.0 * torch.randn(shape, generator=generator(2))).requires_grad_()  # some deviations are clipped
    dist = dist_type(logits=logits, action_space=space, temperature=temperature)
    expected_action = dist.rsample(generator(5))
    expected_log_prob = dist.log_prob(expected_action)
    action, log_prob = dist.rsample_with_log_prob(generator(5))
    torch.testing.assert_close(action, expected_action)
    torch.testing.assert_close(log_prob, expected_log_prob, rtol=1e-4, atol=1e-4)
    weights = torch.randn(action.shape, generator=generator(6))
    for found, expected in (
        ((weights * action).sum(), (weights * expected_action).sum()),
        (log_prob.square().sum(), expected_log_prob.square().sum()),
        ((weights * action).sum() + log_prob.sum(), (weights * expected_action).sum() + expected_log_prob.sum()),
    ):
        (ours,) = torch.autograd.grad(found, logits, retain_graph=True)
        (theirs,) = torch.autograd.grad(expected, logits, retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dist_type", "space"), DRAWN_AT_ONCE)
def test_sampling_with_log_probabilities_is_finite_at_extreme_logits(dist_type, space):
    logits = (1e3 * torch.randn(64, *dist_type.required_logits_shape(space), generator=generator())).requires_grad_()
    action, log_prob = dist_type(logits=logits, action_space=space).rsample_with_log_prob(generator())
    if dist_type is SquashedGaussianProbabilityDistribution:
        assert all(space.contains(np.asarray(one, space.dtype)) for one in action.detach().numpy())
    (gradient,) = torch.autograd.grad(action.sum() + log_prob.sum(), logits)
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(gradient).all()


def test_bounds_are_those_of_the_space_regardless_of_earlier_calls():
    for low, high in ((-1.0, 1.0), (-2.0, 2.0), (-1.0, 1.0)):
        space = spaces.Box(low, high, (1,))
        with torch.inference_mode():
            SquashedGaussianProbabilityDistribution(torch.zeros(4, 2), space).sample()
        logits = torch.tensor([[50.0, -20.0]], requires_grad=True)
        action = SquashedGaussianProbabilityDistribution(logits, space).rsample()
        assert action.item() == high
        action.sum().backward()


def test_a_distribution_that_was_sampled_without_gradients_has_them_afterwards():
    logits = torch.zeros(3, 2, requires_grad=True)
    dist = SquashedGaussianProbabilityDistribution(logits, spaces.Box(-1, 1, (1,)))
    action = dist.sample()
    assert torch.autograd.grad(dist.log_prob(action).sum(), logits)[0].abs().sum() > 0
