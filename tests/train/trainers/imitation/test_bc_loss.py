"""The loss of behavioural cloning for every kind of action, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.trainers.imitation.bc_loss import BCLoss
from maze.train.trainers.imitation.imitation_events import ImitationEvents

ACTOR = ActorID(0, 0)


class Constant(nn.Module):
    """Gives the same logits for whatever it sees."""

    def __init__(self, **logits):
        super().__init__()
        self.logits = nn.ParameterDict({key: nn.Parameter(torch.tensor(value)) for key, value in logits.items()})

    def forward(self, x):
        n_rows = len(next(iter(x.values())))
        return {key: value.expand(n_rows, *value.shape) for key, value in self.logits.items()}


def loss_of(space, logits, actions, entropy_coef=0.0, mapper_config=()):
    action_space = spaces.Dict({"action": space} if not isinstance(space, dict) else space)
    if not isinstance(space, dict):
        logits, actions = {"action": logits}, {"action": actions}
    policy = TorchPolicy({0: Constant(**logits)}, DistributionMapper(action_space, list(mapper_config)), "cpu")
    stats = LogStatsAggregator(LogStatsLevel.EPOCH)
    tensors = {key: torch.as_tensor(np.array(value)) for key, value in actions.items()}
    observation = {"observation": torch.zeros(len(next(iter(tensors.values()))), 1)}
    loss = BCLoss({0: action_space}, entropy_coef).calculate_loss(
        policy, [observation], [tensors], [ACTOR], stats.create_event_topic(ImitationEvents)
    )
    values = {(key.event.__name__, *(key.group or ())[1:]): value for key, value in stats.reduce().items()}
    return loss, values, policy


def test_discrete_loss_is_the_mean_cross_entropy():
    loss, values, policy = loss_of(spaces.Discrete(2), [math.log(3.0), 0.0], [0, 1])  # probabilities 3/4, 1/4
    assert loss.item() == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)
    assert values["policy_loss",] == pytest.approx(loss.item())
    assert values["discrete_accuracy", "action"] == 0.5
    assert ("discrete_top_5_accuracy", "action") not in values
    loss.backward()
    assert policy.parameters()[0].grad.abs().sum() > 0


def test_top_accuracies_are_reported_if_there_are_more_classes():
    logits = [float(-i) for i in range(12)]
    _, values, _ = loss_of(spaces.Discrete(12), logits, [0, 3, 7, 11])
    assert values["discrete_accuracy", "action"] == 0.25
    assert values["discrete_top_5_accuracy", "action"] == 0.5
    assert values["discrete_top_10_accuracy", "action"] == 0.75


def test_multi_discrete_loss_is_the_sum_over_its_choices():
    logits = [math.log(3.0), 0.0, 0.0, 0.0, 0.0]
    loss, values, _ = loss_of(spaces.MultiDiscrete([2, 3]), logits, [[1, 0]])
    assert loss.item() == pytest.approx(-math.log(0.25) - math.log(1 / 3))
    assert values["discrete_accuracy", "action"] == 0.5


def test_multi_binary_loss_is_the_binary_cross_entropy():
    loss, values, _ = loss_of(spaces.MultiBinary(2), [math.log(3.0), 0.0], [[1, 1], [0, 1]])
    expected = -(math.log(0.75) + math.log(0.5) + math.log(0.25) + math.log(0.5)) / 4
    assert loss.item() == pytest.approx(expected)
    assert values["multi_binary_accuracy", "action"] == 0.25


def test_box_loss_is_the_squared_distance_to_the_mean_action():
    space = spaces.Box(-10, 10, (2,), np.float32)
    loss, values, _ = loss_of(space, [1.0, -2.0, 0.0, 0.0], np.array([[1.0, 1.0], [4.0, -2.0]], np.float32))
    assert loss.item() == pytest.approx((9 + 9) / 4)
    assert values["box_mean_abs_deviation", "action"] == pytest.approx(1.5)


def softplus_inverse(value):
    return math.log(math.exp(value) - 1.0)


@pytest.mark.parametrize(
    ("distribution", "logits", "action"),
    [
        # concentrations of 1 + 3 and 1 + 1: mean 4 / 6 of the way from -1 to 1
        ("beta.BetaProbabilityDistribution", [softplus_inverse(3.0), softplus_inverse(1.0)], 1 / 3),
        ("squashed_gaussian.SquashedGaussianProbabilityDistribution", [math.atanh(0.5), 0.1], 0.5),
    ],
)
def test_bounded_distributions_are_compared_by_the_action_within_the_bounds(distribution, logits, action):
    mapper = [{"action_space": "gymnasium.spaces.Box", "distribution": f"maze.distributions.{distribution}"}]
    space = spaces.Box(-1, 1, (1,), np.float32)
    loss, values, policy = loss_of(space, logits, np.array([[1.0], [-1.0]], np.float32), mapper_config=mapper)
    assert loss.item() == pytest.approx(((1 - action) ** 2 + (1 + action) ** 2) / 2, rel=1e-5)
    assert values["box_mean_abs_deviation", "action"] == pytest.approx(1.0)
    loss.backward()
    assert policy.parameters()[0].grad.abs().sum() > 0


def test_masked_actions_have_no_part_in_the_loss():
    masked = torch.finfo(torch.float32).min
    loss, values, policy = loss_of(spaces.Discrete(3), [math.log(3.0), masked, 0.0], [0, 2])
    assert loss.item() == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)
    assert values["policy_entropy",] == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    loss.backward()
    assert torch.isfinite(policy.parameters()[0].grad).all()


def test_a_demonstrated_action_that_is_masked_is_refused():
    masked = torch.finfo(torch.float32).min
    with pytest.raises(ConfigError, match=r"runner\.dataset: sub-step 0: .* action mask .* excludes them"):
        loss_of(spaces.Discrete(3), [0.0, masked, 0.0], [0, 1] + [2] * 98)


def test_substeps_add_up_and_report_for_themselves():
    heads = {"choose": spaces.Dict({"a": spaces.Discrete(2)}), "cut": spaces.Dict({"b": spaces.Discrete(4)})}
    mapper = DistributionMapper(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(4)}), [])
    policy = TorchPolicy({"choose": Constant(a=[math.log(3.0), 0.0]), "cut": Constant(b=[0.0] * 4)}, mapper, "cpu")
    stats = LogStatsAggregator(LogStatsLevel.EPOCH)
    loss = BCLoss(heads, entropy_coef=0.0).calculate_loss(
        policy,
        [{"observation": torch.zeros(2, 1)}, {"observation": torch.zeros(1, 1)}],  # one step ended after its first part
        [{"a": torch.tensor([0, 0])}, {"b": torch.tensor([3])}],
        [ActorID("choose", 0), ActorID("cut", 0)],
        stats.create_event_topic(ImitationEvents),
    )
    assert loss.item() == pytest.approx(-math.log(0.75) + math.log(4))
    values = {(key.event.__name__, *(key.group or ())): value for key, value in stats.reduce().items()}
    assert values["policy_loss", "choose"] == pytest.approx(-math.log(0.75))
    assert values["policy_loss", "cut"] == pytest.approx(math.log(4))
    assert values["policy_entropy", "cut"] == pytest.approx(math.log(4))
    assert values["discrete_accuracy", "choose", "a"] == 1.0


def test_heads_add_up_and_the_entropy_bonus_is_subtracted():
    space = {"a": spaces.Discrete(2), "b": spaces.Discrete(4)}
    logits = {"a": [0.0, 0.0], "b": [0.0] * 4}
    loss, values, _ = loss_of(space, logits, {"a": [0], "b": [3]}, entropy_coef=0.1)
    assert values["policy_loss",] == pytest.approx(math.log(2) + math.log(4))
    assert values["policy_entropy",] == pytest.approx(math.log(2) + math.log(4))
    assert loss.item() == pytest.approx(0.9 * math.log(8))


def test_an_unknown_kind_of_action_is_named():
    loss = BCLoss({0: spaces.Dict({"word": spaces.Text(3)})}, 0.0)
    with pytest.raises(ConfigError, match=r"Action `word`: .* found Text"):
        loss._head_loss(_OutputOf("word"), "word", spaces.Text(3), torch.zeros(1))


class _OutputOf:
    def __init__(self, head):
        self.action_logits = {head: torch.zeros(1, 1)}
