"""Bundles compared with their trained policies; `python -m benchmarks.bundle_equality` has the full numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from benchmarks.bundle_equality import CASES, TRUSTED, chi_square, compared, trained
from maze.distributions.distribution_mapper import DistributionMapper
from maze.distributions.numpy_distributions import sampler_of
from maze.serve.bundle import PolicyBundle

BOX = spaces.Box(np.float32([-2, 0.5]), np.float32([1, 0.75]))
HEADS = {
    "categorical": (spaces.Discrete(4), "categorical.Categorical"),
    "greedy": (spaces.Discrete(4), "categorical.GreedyCategorical"),
    "multi_categorical": (spaces.MultiDiscrete([3, 2, 4]), "multi_categorical.MultiCategorical"),
    "bernoulli": (spaces.MultiBinary(3), "bernoulli.Bernoulli"),
    "gaussian": (BOX, "gaussian.DiagonalGaussian"),
    "squashed_gaussian": (BOX, "squashed_gaussian.SquashedGaussian"),
    "beta": (BOX, "beta.Beta"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(900)
def test_a_bundle_acts_as_the_trained_policy(case, tmp_path):
    run = trained(case, tmp_path / "run")
    n_steps = 50 if case == "pixels" else 300
    path = PolicyBundle.from_run(run, trusted_packages=TRUSTED, n_steps=n_steps).save(tmp_path / "policy.maze")
    difference = compared(PolicyBundle.load(path), run, n_steps)
    assert difference.n_actions == 0
    assert difference.logits < 1e-5
    assert difference.draws > 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("head", HEADS)
def test_samplers_draw_from_the_distributions_of_torch(head, temperature):
    space, distribution = HEADS[head]
    path = f"maze.distributions.{distribution}ProbabilityDistribution"
    mapper = DistributionMapper(spaces.Dict({"a": space}), [{"action_head": "a", "distribution": path}])
    description = mapper.describe_head("a")
    assert description is not None
    rng = np.random.default_rng(4)
    logits = rng.normal(size=mapper.required_logits_shape("a")).astype(np.float32)
    many = np.repeat(logits[None], 20_000, axis=0)
    exact = mapper.action_head_distribution("a", torch.from_numpy(many), temperature)
    sampler = sampler_of(description)
    torch.manual_seed(0)
    drawn, expected = sampler(many, rng, temperature), exact.sample().numpy()
    assert drawn.dtype == space.dtype
    for found, component in zip(drawn.reshape(20_000, -1).T, expected.reshape(20_000, -1).T, strict=True):
        assert chi_square(found, component) > 1e-4
    best = sampler(many[:1], None, temperature)
    np.testing.assert_allclose(best[0], exact.deterministic_sample()[0].numpy(), rtol=1e-5)


@pytest.mark.parametrize("head", ["categorical", "multi_categorical", "bernoulli"])
@pytest.mark.parametrize("temperature", [0.2, 5.0])
def test_samplers_never_choose_masked_actions_at_any_temperature(head, temperature):
    space, distribution = HEADS[head]
    path = f"maze.distributions.{distribution}ProbabilityDistribution"
    mapper = DistributionMapper(spaces.Dict({"a": space}), [{"action_head": "a", "distribution": path}])
    shape = mapper.required_logits_shape("a")
    description = mapper.describe_head("a")
    assert description is not None
    logits = np.zeros((1000, *shape), np.float32)
    logits[:, 1] = np.finfo(np.float32).min
    with np.errstate(all="raise"):
        drawn = sampler_of(description)(logits, np.random.default_rng(0), temperature).reshape(1000, -1)
    if head == "bernoulli":
        assert not drawn[:, 1].any()
        assert drawn[:, 0].any()
    else:
        assert set(drawn[:, 0]) == set(range(3 + (head == "categorical"))) - {1}
