"""Which distribution belongs to which head."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.core.errors import ConfigError
from maze.distributions.bernoulli import BernoulliProbabilityDistribution
from maze.distributions.beta import BetaProbabilityDistribution
from maze.distributions.categorical import CategoricalProbabilityDistribution
from maze.distributions.distribution_mapper import DistributionMapper
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.multi_categorical import MultiCategoricalProbabilityDistribution
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution

BETA = "maze.distributions.beta.BetaProbabilityDistribution"
SQUASHED = "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution"
SPACE = spaces.Dict(
    {
        "move": spaces.Discrete(4),
        "use": spaces.MultiBinary(16),
        "tune": spaces.MultiDiscrete([2, 3]),
        "steer": spaces.Box(-1, 1, (3,)),
        "special_action": spaces.Box(-2, 2, (2, 2)),
    }
)


class HalvedCategorical(CategoricalProbabilityDistribution):
    """A user's own distribution."""


def test_every_space_type_has_a_default():
    mapper = DistributionMapper(SPACE, {})
    assert {head: mapper.distribution_class(head) for head in mapper.action_heads} == {
        "move": CategoricalProbabilityDistribution,
        "use": BernoulliProbabilityDistribution,
        "tune": MultiCategoricalProbabilityDistribution,
        "steer": DiagonalGaussianProbabilityDistribution,
        "special_action": DiagonalGaussianProbabilityDistribution,
    }
    shapes = {head: mapper.required_logits_shape(head) for head in mapper.action_heads}
    assert shapes == {"move": (4,), "use": (16,), "tune": (5,), "steer": (6,), "special_action": (2, 4)}


def test_an_entry_for_bounded_heads_leaves_others_alone():
    space = spaces.Dict({"steer": spaces.Box(-1, 1, (3,)), "half": spaces.Box(0, np.inf), "move": spaces.Discrete(4)})
    mapper = DistributionMapper(space, [{"action_space": "Box", "bounded": True, "distribution": SQUASHED}])
    assert mapper.distribution_class("steer") is SquashedGaussianProbabilityDistribution
    assert mapper.distribution_class("half") is DiagonalGaussianProbabilityDistribution
    assert mapper.distribution_class("move") is CategoricalProbabilityDistribution


@pytest.mark.parametrize("box", ["gym.spaces.Box", "gymnasium.spaces.Box", "Box", gym.spaces.Box])
def test_later_entries_win(box):
    general = {"action_space": box, "distribution": BETA}
    special = {"action_head": "special_action", "distribution": SQUASHED}
    mapper = DistributionMapper(SPACE, [general, special])
    assert mapper.distribution_class("steer") is BetaProbabilityDistribution
    assert mapper.distribution_class("special_action") is SquashedGaussianProbabilityDistribution
    assert mapper.distribution_class("move") is CategoricalProbabilityDistribution
    assert (
        DistributionMapper(SPACE, [special, general]).distribution_class("special_action")
        is BetaProbabilityDistribution
    )


def test_own_classes_are_found_by_import_path_or_object():
    for entry in (HalvedCategorical, f"{__name__}.HalvedCategorical"):
        mapper = DistributionMapper(SPACE, [{"action_space": "gym.spaces.Discrete", "distribution": entry}])
        assert mapper.distribution_class("move").__name__ == "HalvedCategorical"
        assert type(mapper.action_head_distribution("move", torch.zeros(4), 1.0)).__name__ == "HalvedCategorical"


def test_the_documented_example_samples_an_action():
    mapper = DistributionMapper(
        action_space=spaces.Dict(spaces={"my_action": spaces.Discrete(2)}), distribution_mapper_config={}
    )
    dist = mapper.logits_dict_to_distribution({"my_action": torch.randn(2)}, temperature=1.0)
    assert dist.sample()["my_action"].item() in (0, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            [{"action_space": "gym.spaces.Bix", "distribution": BETA}],
            r"\[0\]\.action_space.*has no `Bix`",
        ),
        ([{"action_head": "special_actoin", "distribution": BETA}], r"action_head.*Did you mean `special_action`"),
        (
            [{"action_space": "gym.spaces.Box", "distribution": BETA[:-1]}],
            r"distribution.*Did you mean `maze.dist.*Beta",
        ),
        ([{"action_space": "gym.spaces.Box", "distribution": "nowhere.Beta"}], "there is no package `nowhere`"),
        (
            [{"action_space": "gym.spaces.Box", "distribution": "torch.nn.Linear"}],
            "not a subclass of ProbabilityDistribution",
        ),
        ([{"action_space": "gym.spaces.Box"}], "expected `distribution`"),
        ([{"action_space": "gym.spaces.Discrete", "distribution": BETA}], "Action head `move`: Beta.* needs a Box"),
        (["nonsense"], "expected a mapping with `distribution`"),
    ],
)
def test_mistakes_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        DistributionMapper(SPACE, config)


def test_heads_without_a_distribution_and_wrong_logits_are_named():
    with pytest.raises(ConfigError, match="Action head `text`"):
        DistributionMapper(spaces.Dict({"text": spaces.Text(5)}), [])
    with pytest.raises(ConfigError, match="Dict of action heads"):
        DistributionMapper(spaces.Discrete(2), [])
    mapper = DistributionMapper(SPACE, [])
    with pytest.raises(ConfigError, match=r"`move`.*\(7, 3\).*\(4,\)"):
        mapper.action_head_distribution("move", torch.zeros(7, 3), 1.0)
    with pytest.raises(ConfigError, match=r"action head 'mvoe' is unknown. Did you mean `move`"):
        mapper.required_logits_shape("mvoe")
