"""Distributions against torch's own, hand-worked numbers, and at the edges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy import stats
from torch import distributions as td

from maze.core.errors import ConfigError
from maze.distributions.bernoulli import BernoulliProbabilityDistribution
from maze.distributions.beta import BetaProbabilityDistribution
from maze.distributions.categorical import CategoricalProbabilityDistribution
from maze.distributions.dict import DictProbabilityDistribution
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.multi_categorical import MultiCategoricalProbabilityDistribution
from maze.distributions.numpy_distributions import most_probable
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution
from maze.distributions.utils import atanh, tensor_clamp


@pytest.mark.parametrize("shape", [(7, 4), (600, 4), (2, 300, 15), (600, 30)])  # torch computes few choices by columns
def test_categorical_agrees_with_torch(shape):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    actions = torch.arange(math.prod(shape[:-1])).view(shape[:-1]) % shape[-1]
    mine, reference = (
        CategoricalProbabilityDistribution(logits, spaces.Discrete(shape[-1]), 2.0),
        td.Categorical(logits=logits / 2),
    )
    assert torch.allclose(mine.log_prob(actions), reference.log_prob(actions))
    of_mine, of_reference = (
        torch.autograd.grad(each.log_prob(actions).square().mean(), logits)[0] for each in (mine, reference)
    )
    assert torch.allclose(of_mine, of_reference, atol=1e-8)
    assert torch.allclose(mine.entropy(), reference.entropy())
    assert torch.allclose(mine.dist.logits, reference.logits)


@pytest.mark.parametrize("n_best", [1, 2, 7, None])
def test_the_most_probable_combinations_are_those_of_an_enumeration(n_best):
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = [rng.integers(1, 4, size=n) for n in rng.integers(1, 5, size=3)]  # with ties
        factors = [each / each.sum() for each in weights]
        every = list(itertools.product(*(range(len(factor)) for factor in factors)))
        known = {choices: math.prod(factor[i] for factor, i in zip(factors, choices, strict=True)) for choices in every}
        found = most_probable(factors, n_best)
        assert [probability for _, probability in found] == pytest.approx(sorted(known.values(), reverse=True)[:n_best])
        assert [known[choices] for choices, _ in found] == pytest.approx([probability for _, probability in found])
        assert len({choices for choices, _ in found}) == len(found)


def test_bernoulli_sums_over_its_components():
    dist = BernoulliProbabilityDistribution(torch.tensor([[0.0, math.log(3.0)]]), spaces.MultiBinary(2))
    assert dist.log_prob(torch.tensor([[1, 1]])).item() == pytest.approx(math.log(0.5 * 0.75))
    assert dist.log_prob(torch.tensor([[0, 0]])).item() == pytest.approx(math.log(0.5 * 0.25))
    reference = td.Bernoulli(logits=torch.tensor([0.0, math.log(3.0)]))
    assert dist.entropy().item() == pytest.approx(reference.entropy().sum().item())


def test_gaussian_agrees_with_torch():
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    actions = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    dist = DiagonalGaussianProbabilityDistribution(logits, spaces.Box(-1, 1, (3,)), 1.0)
    reference = td.Independent(td.Normal(logits[:, :3], logits[:, 3:].exp()), 1)
    assert torch.allclose(dist.log_prob(actions), reference.log_prob(actions), atol=1e-5)
    assert torch.allclose(dist.entropy(), reference.entropy())


def test_beta_agrees_with_torch_on_the_scaled_interval():
    logits = torch.tensor([0.5, 1.5])
    dist = BetaProbabilityDistribution(logits, spaces.Box(-3.0, 5.0, (1,)), 1.0)
    alpha, beta = (1 + torch.nn.functional.softplus(logits)).tolist()
    reference = td.TransformedDistribution(td.Beta(alpha, beta), td.AffineTransform(-3.0, 8.0))
    for action in (-2.5, 0.0, 4.9):
        expected = reference.log_prob(torch.tensor(action)).item()
        assert dist.log_prob(torch.tensor([action])).item() == pytest.approx(expected, abs=1e-5)
    expected_entropy = td.Beta(alpha, beta).entropy().item() + math.log(8.0)
    assert dist.entropy().item() == pytest.approx(expected_entropy, abs=1e-5)


@pytest.mark.parametrize("concentrations", [(1e4, 1e4), (9000.0, 700.0), (1e4, 1.5)])
def test_narrow_beta_distributions_are_exact_to_five_digits(concentrations):
    """In float32, logarithms of the gamma function of 8e4 leave errors of 0.015 to 0.03."""
    exceeding = torch.tensor(concentrations, dtype=torch.float64) - 1
    logits = torch.log(torch.expm1(exceeding.clamp(max=30))).where(exceeding < 30, exceeding).float()
    logits.requires_grad_()
    dist = BetaProbabilityDistribution(logits, spaces.Box(0.0, 1.0, (1,)), 1.0)
    action = dist.sample(torch.Generator().manual_seed(0))
    other = BetaProbabilityDistribution(logits * 0.9, spaces.Box(0.0, 1.0, (1,)), 1.0)
    reference = stats.beta(*(each.item() for each in (dist.alpha, dist.beta)))
    expected_kl = td.kl_divergence(*(td.Beta(each.alpha.double(), each.beta.double()) for each in (dist, other)))
    for found, expected in (
        (dist.entropy(), reference.entropy()),
        (dist.log_prob(action), reference.logpdf(action.item())),
        (dist.kl(other), expected_kl.item()),
    ):
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(expected, rel=2e-5, abs=2e-5)
        assert torch.autograd.grad(found, logits, retain_graph=True)[0].isfinite().all()


def test_squashed_gaussian_keeps_the_sample_before_squashing():
    # a mean of 12 saturates tanh in float32: the action alone no longer says where it came from
    dist = SquashedGaussianProbabilityDistribution(torch.tensor([12.0, -1.0]), spaces.Box(-1, 1, (1,)), 1.0)
    action = dist.sample(torch.Generator().manual_seed(0))
    assert action.item() == 1.0
    with_memory, without = dist.log_prob(action).item(), dist.log_prob(action.clone()).item()
    assert math.isfinite(with_memory)
    assert math.isfinite(without)
    # exact: the density of the normal at the kept sample over the slope of tanh, log(4) - 2 x for large x
    kept = dist._last_sample[1].item()
    expected = td.Normal(12.0, math.exp(-1.0)).log_prob(torch.tensor(kept)).item() - (math.log(4.0) - 2.0 * kept)
    assert with_memory == pytest.approx(expected, rel=1e-4)


def test_squashed_gaussian_has_an_entropy_and_a_divergence():
    space = spaces.Box(-1, 1, (1,))
    narrow = SquashedGaussianProbabilityDistribution(torch.tensor([0.0, -2.0]), space, 1.0)
    wide = SquashedGaussianProbabilityDistribution(torch.tensor([0.0, 0.0]), space, 1.0)
    assert narrow.entropy().item() < wide.entropy().item() < math.log(2.0)  # the uniform distribution has the most
    # almost no squashing around zero: that of the normal
    assert narrow.entropy().item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e) - 2.0, abs=0.02)
    assert narrow.kl(wide).item() == pytest.approx(0.5 * (math.exp(-4.0) - 1.0) + 2.0, abs=1e-5)


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -torch.inf])
def test_masked_actions_are_never_sampled_and_do_not_enter_the_entropy(fill):
    logits = torch.tensor([[0.0, fill, 0.0, fill]]).repeat(2000, 1).requires_grad_()
    dist = CategoricalProbabilityDistribution(logits, spaces.Discrete(4), 1.0)
    assert set(dist.sample(torch.Generator().manual_seed(0)).tolist()) == {0, 2}
    assert torch.allclose(dist.entropy(), torch.tensor(math.log(2.0)))
    assert torch.allclose(dist.kl(dist), torch.tensor(0.0))
    (gradient,) = torch.autograd.grad(dist.entropy().sum() + dist.log_prob(torch.zeros(2000)).sum(), logits)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masks_hold_in_half_precision(dtype):
    logits = torch.tensor([[1.0, torch.finfo(dtype).min]], dtype=dtype)
    dist = CategoricalProbabilityDistribution(logits, spaces.Discrete(2), 1.0)
    assert dist.entropy().item() == pytest.approx(0.0, abs=1e-3)
    assert dist.log_prob(torch.tensor([0])).item() == pytest.approx(0.0, abs=1e-3)


def test_thousands_of_actions_stay_normalised():
    logits = 5.0 * torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
    dist = CategoricalProbabilityDistribution(logits, spaces.Discrete(50_000), 1.0)
    assert torch.allclose(dist.log_probs.exp().sum(-1), torch.ones(2), atol=1e-4)
    assert dist.sample(torch.Generator().manual_seed(0)).shape == (2,)


def test_log_probabilities_broadcast_over_further_actions():
    dist = CategoricalProbabilityDistribution(torch.tensor([0.0, math.log(3.0)]), spaces.Discrete(2), 1.0)
    assert dist.log_prob(torch.tensor([[0], [1]])).exp().flatten().tolist() == pytest.approx([0.25, 0.75])


def test_the_joint_distribution_sums_over_heads():
    heads = {
        "move": CategoricalProbabilityDistribution(torch.zeros(3, 4), spaces.Discrete(4), 1.0),
        "use": BernoulliProbabilityDistribution(torch.zeros(3, 2), spaces.MultiBinary(2), 1.0),
        "tune": MultiCategoricalProbabilityDistribution(torch.zeros(3, 5), spaces.MultiDiscrete([2, 3]), 1.0),
    }
    dist = DictProbabilityDistribution(heads)
    action = dist.sample(torch.Generator().manual_seed(0))
    expected = {"move": math.log(4), "use": 2 * math.log(2), "tune": math.log(6)}
    for head, log_prob in dist.log_prob(action).items():
        assert log_prob.tolist() == pytest.approx([-expected[head]] * 3)
    assert dist.neg_log_prob(action)["use"].tolist() == pytest.approx([expected["use"]] * 3)
    total = sum(expected.values())
    assert dist.joint_log_prob(action).tolist() == pytest.approx([-total] * 3)
    assert dist.joint_entropy().tolist() == pytest.approx([total] * 3)
    assert dist.entropy().item() == pytest.approx(total)
    assert dist.entropy(reduce_fun=torch.sum).item() == pytest.approx(3 * total)
    assert dist.kl(dist).item() == pytest.approx(0.0)
    for joint in (dist, heads["tune"]):
        assert joint.entropy(reduce_fun=None).shape == joint.kl(joint, reduce_fun=None).shape == (3,)
        assert joint.entropy(reduce_fun=None).tolist() == joint.joint_entropy().tolist()
    assert dist.deterministic_sample()["tune"].tolist() == [[0, 0]] * 3


def test_the_log_probability_of_binary_vectors_is_given_by_bit_on_request():
    dist = BernoulliProbabilityDistribution(torch.tensor([[0.0, math.log(3.0)]] * 2), spaces.MultiBinary(2))
    actions = torch.tensor([[1, 1], [0, 0]])
    assert dist.log_prob(actions, per_bit=True).exp().flatten().tolist() == pytest.approx([0.5, 0.75, 0.5, 0.25])
    assert dist.log_prob(actions).exp().tolist() == pytest.approx([0.375, 0.125])


@pytest.mark.parametrize("dist_type", [SquashedGaussianProbabilityDistribution, BetaProbabilityDistribution])
def test_bounded_distributions_refuse_unbounded_and_empty_boxes(dist_type):
    with pytest.raises(ConfigError, match="finite bounds"):
        dist_type(torch.zeros(2), spaces.Box(-np.inf, 1.0, (1,)), 1.0)
    with pytest.raises(ConfigError, match="low < high"):
        dist_type.required_logits_shape(spaces.Box(1.0, 1.0, (1,)))
    widest = float(np.finfo(np.float32).max)
    for low, high in ((-widest, widest), (-2 * widest, 2 * widest), (0.0, 1e-60)):
        with pytest.raises(ConfigError, match="a width within the range of float32"):
            dist_type.required_logits_shape(spaces.Box(low, high, (1,), np.float64))


def test_integer_boxes_and_shifted_discrete_spaces_are_refused():
    with pytest.raises(ConfigError, match="int64"):
        DiagonalGaussianProbabilityDistribution.required_logits_shape(spaces.Box(0, 5, (2,), np.int64))
    with pytest.raises(ConfigError, match="start at 0"):
        CategoricalProbabilityDistribution.required_logits_shape(spaces.Discrete(3, start=1))
    with pytest.raises(ConfigError, match="needs a Discrete space"):
        CategoricalProbabilityDistribution.required_logits_shape(spaces.MultiBinary(3))


def test_atanh_is_the_finite_inverse_of_tanh():
    x = torch.tensor([-2.0, 0.0, 0.5])
    assert torch.allclose(atanh(torch.tanh(x)), x, atol=1e-5)
    assert torch.isfinite(atanh(torch.tensor([-1.0, 1.0]))).all()


def test_tensor_clamp_uses_a_bound_for_each_element():
    clamped = tensor_clamp(
        torch.tensor([-5.0, 0.5, 9.0]), torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 2.0])
    )
    assert clamped.tolist() == [-1.0, 0.5, 2.0]
