"""State-action critics: hand-worked values, masks, targets, weights."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_action_critic import (
    TorchSharedStateActionCritic,
    TorchStateActionCritic,
    TorchStepStateActionCritic,
    are_all_discrete,
    encode_action,
    encoded_size,
    expected_soft_value,
)
from maze.core.errors import CheckpointError, ConfigError
from maze.distributions.distribution_mapper import DistributionMapper
from tests.train.parallelization.toy_envs import random_walk_env
from tests.train.trainers.sac.sac_models import build_model as build_sac_model

DISCRETE = spaces.Dict({"action": spaces.Discrete(3)})
TWO_HEADS = spaces.Dict({"move": spaces.Discrete(3), "use": spaces.Discrete(2)})
BOX = spaces.Dict({"steer": spaces.Box(-2, 2, (2,), np.float32)})
MIXED = spaces.Dict({"steer": spaces.Box(-2, 2, (2,), np.float32), "gear": spaces.Discrete(3)})
FILL = torch.finfo(torch.float32).min


class ConstantQ(nn.Module):
    """Returns the same values of all actions for every observation."""

    def __init__(self, **values):
        super().__init__()
        self.values = nn.ParameterDict({key: torch.tensor(value) for key, value in values.items()})

    def forward(self, x):
        batch_shape = next(iter(x.values())).shape[:-1]
        return {key: value.expand(*batch_shape, -1) for key, value in self.values.items()}


class SumQ(nn.Module):
    """Adds up all inputs and a bias."""

    def __init__(self, bias):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, x):
        return {"q_value": sum(value.sum(-1, keepdim=True) for value in x.values()) + self.bias}


class LinearQ(nn.Module):
    def __init__(self, n_in, out_key, n_out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 4), nn.BatchNorm1d(4), nn.Linear(4, n_out))
        self.out_key = out_key

    def forward(self, x):
        return {self.out_key: self.net(torch.cat(list(x.values()), dim=-1))}


def step_critic(action_space, network, twin, only_discrete):
    return TorchStepStateActionCritic(
        {0: network}, 1, "cpu", {0: only_discrete}, {0: action_space}, None if twin is None else {0: twin}
    )


def discrete_critic():
    return step_critic(
        DISCRETE,
        ConstantQ(action_q_values=[1.0, 5.0, 3.0]),
        ConstantQ(action_q_values=[2.0, 4.0, 3.0]),
        only_discrete=True,
    )


OBSERVATION = {0: {"observation": torch.zeros(2, 4)}}


# -- discrete actions ------------------------------------------------------------------------------


def test_values_of_all_actions_come_from_both_networks_and_are_gathered_on_demand():
    critic = discrete_critic()
    actions = {0: {"action": torch.tensor([1, 2])}}
    first, second = critic.predict_q_values(OBSERVATION, actions, gather_output=True)[0]
    assert first["action"].tolist() == [5.0, 3.0]
    assert second["action"].tolist() == [4.0, 3.0]
    first, _ = critic.predict_q_values(OBSERVATION, actions, gather_output=False)[0]
    assert first["action"].tolist() == [[1.0, 5.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("logits", "alpha", "expected"),
    [
        # min(Q1, Q2) = (1, 4, 3); uniform policy with entropy log 3
        ([0.0, 0.0, 0.0], 0.5, 8.0 / 3.0 + 0.5 * math.log(3.0)),
        # probabilities 1/4, 3/4 and a masked action, which would be worth 4
        ([0.0, FILL, math.log(3.0)], 0.0, 0.25 * 1.0 + 0.75 * 3.0),
        ([0.0, FILL, math.log(3.0)], 1.0, 2.5 - 0.25 * math.log(0.25) - 0.75 * math.log(0.75)),
        # one action left: no entropy
        ([FILL, FILL, 2.0], 10.0, 3.0),
        ([-math.inf, -math.inf, 2.0], 10.0, 3.0),
    ],
)
def test_the_next_value_is_the_expected_soft_value_under_the_masked_policy(logits, alpha, expected):
    values = discrete_critic().predict_next_q_values(
        OBSERVATION,
        {0: {"action": torch.tensor([0, 0])}},
        {0: {"action": torch.tensor([logits, logits])}},
        {0: {"action": torch.zeros(2)}},
        {0: torch.tensor(alpha)},
    )
    assert values[0]["action"].tolist() == pytest.approx([expected, expected], rel=1e-6)
    assert not values[0]["action"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_masked_actions_make_no_nan_in_any_precision(dtype):
    logits = torch.tensor([[0.5, torch.finfo(dtype).min, 0.5]], dtype=dtype, requires_grad=True)
    value = expected_soft_value(torch.tensor([[1.0, 1e4, 3.0]], dtype=dtype), logits, 1.0)
    value.sum().backward()
    assert value.item() == pytest.approx(2.0 + math.log(2.0), rel=1e-2)
    assert bool(torch.isfinite(logits.grad).all())


def test_several_discrete_heads_have_values_of_their_own():
    network = ConstantQ(move_q_values=[1.0, 2.0, 3.0], use_q_values=[7.0, 9.0])
    critic = step_critic(TWO_HEADS, network, None, only_discrete=True)
    actions = {0: {"move": torch.tensor([0, 2]), "use": torch.tensor([1, 0])}}
    values, _ = critic.predict_q_values(OBSERVATION, actions, gather_output=True)[0]
    assert {head: value.tolist() for head, value in values.items()} == {"move": [1.0, 3.0], "use": [9.0, 7.0]}


# -- joint actions ---------------------------------------------------------------------------------


def test_joint_values_see_all_heads_and_the_entropies_of_all_heads_count():
    critic = step_critic(MIXED, SumQ(0.0), SumQ(-1.0), only_discrete=False)
    observation = {0: {"observation": torch.tensor([[1.0, 2.0]])}}
    action = {0: {"steer": torch.tensor([[0.5, -1.0]]), "gear": torch.tensor([2])}}
    # observation 3, steer -0.5, and the one-hot gear 1
    first, second = critic.predict_q_values(observation, action, gather_output=False)[0]
    assert (first.tolist(), second.tolist()) == ([3.5], [2.5])
    log_probs = {0: {"steer": torch.tensor([-2.0]), "gear": torch.tensor([-0.5])}}
    values = critic.predict_next_q_values(observation, action, {}, log_probs, {0: torch.tensor(0.2)})
    assert values[0].tolist() == pytest.approx([2.5 + 0.2 * 2.5])


def test_gradients_reach_continuous_actions():
    critic = step_critic(BOX, SumQ(0.0), None, only_discrete=False)
    action = torch.zeros(3, 2, requires_grad=True)
    first, _ = critic.compute_state_action_value_step({"observation": torch.ones(3, 4)}, {"steer": action}, 0)
    first.sum().backward()
    assert action.grad.tolist() == [[1.0, 1.0]] * 3


@pytest.mark.parametrize("batch_shape", [(), (5,), (4, 2)])
def test_any_leading_batch_dimensions_pass_through(batch_shape):
    critic = step_critic(MIXED, SumQ(0.0), None, only_discrete=False)
    action = {"steer": torch.zeros(*batch_shape, 2), "gear": torch.zeros(batch_shape, dtype=torch.int64)}
    first, second = critic.compute_state_action_value_step({"observation": torch.ones(*batch_shape, 4)}, action, 0)
    assert first.shape == second.shape == batch_shape


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (spaces.Discrete(3), 1, [0, 1, 0]),
        (spaces.MultiDiscrete([2, 3]), [1, 2], [0, 1, 0, 0, 1]),
        (spaces.MultiBinary(3), [1, 0, 1], [1, 0, 1]),
        (spaces.Box(-1, 1, (2, 2)), [[0.5, 0.0], [-1.0, 1.0]], [0.5, 0.0, -1.0, 1.0]),
        (spaces.Box(-1, 1, ()), 0.25, [0.25]),
    ],
)
def test_actions_are_encoded_with_and_without_batch(space, action, expected):
    encoded = encode_action(space, torch.tensor(action), torch.float32)
    assert encoded.tolist() == expected
    assert encoded_size(space, "action") == len(expected)
    assert encode_action(space, torch.tensor([action] * 4), torch.float32).tolist() == [expected] * 4


def test_which_action_spaces_are_all_discrete():
    assert are_all_discrete(TWO_HEADS)
    assert not are_all_discrete(MIXED)
    with pytest.raises(ConfigError, match="`talk`"):
        encoded_size(spaces.Text(3), "talk")


# -- shared critic ---------------------------------------------------------------------------------


def test_a_shared_critic_judges_the_actions_of_all_substeps_together():
    action_spaces = {"select": DISCRETE, "cut": BOX}
    critic = TorchSharedStateActionCritic({0: SumQ(0.0)}, 2, "cpu", {0: False}, action_spaces, {0: SumQ(10.0)})
    observations = {"select": {"a": torch.tensor([[1.0]])}, "cut": {"b": torch.tensor([[2.0]])}}
    actions = {"select": {"action": torch.tensor([0])}, "cut": {"steer": torch.tensor([[0.5, 0.5]])}}
    first, second = critic.predict_q_values(observations, actions, gather_output=False)[0]
    assert (first.tolist(), second.tolist()) == ([5.0], [15.0])
    log_probs = {"select": {"action": torch.tensor([-1.0])}, "cut": {"steer": torch.tensor([-3.0])}}
    alpha = {"select": torch.tensor(0.1), "cut": torch.tensor(1.0)}
    values = critic.predict_next_q_values(observations, actions, {}, log_probs, alpha)
    assert values[0].tolist() == pytest.approx([5.0 + 0.1 + 3.0])
    assert critic.num_critics == 1


def test_a_shared_critic_weighs_discrete_heads_with_their_own_entropy_coefficient():
    spaces_by_step = {0: spaces.Dict({"a": spaces.Discrete(2)}), 1: spaces.Dict({"b": spaces.Discrete(2)})}
    network = ConstantQ(a_q_values=[1.0, 1.0], b_q_values=[2.0, 2.0])
    critic = TorchSharedStateActionCritic({0: network}, 2, "cpu", {0: True}, spaces_by_step, {0: network})
    observations = {0: {"x": torch.zeros(1, 3)}, 1: {"y": torch.zeros(1, 3)}}
    logits = {0: {"a": torch.zeros(1, 2)}, 1: {"b": torch.zeros(1, 2)}}
    values = critic.predict_next_q_values(observations, {}, logits, {}, {0: torch.tensor(1.0), 1: torch.tensor(0.0)})
    assert values[0]["a"].tolist() == pytest.approx([1.0 + math.log(2.0)])
    assert values[0]["b"].tolist() == [2.0]


def test_a_shared_critic_refuses_heads_of_which_it_would_see_only_one():
    with pytest.raises(ConfigError, match=r"`action` of sub-step 1 .*earlier sub-step"):
        TorchSharedStateActionCritic({0: SumQ(0.0)}, 2, "cpu", {0: False}, {0: DISCRETE, 1: DISCRETE})


# -- weights ---------------------------------------------------------------------------------------


def linear_critic() -> TorchStateActionCritic:
    return step_critic(DISCRETE, LinearQ(4, "action_q_values", 3), None, only_discrete=True)


def weights(networks):
    return torch.cat([p.flatten() for pair in networks.values() for p in pair.parameters()]).detach().clone()


def test_the_twin_starts_with_other_weights_and_targets_with_the_same():
    critic = linear_critic()
    first, second = critic.networks[0]
    assert not torch.equal(first.net[0].weight, second.net[0].weight)
    assert torch.equal(weights(critic.networks), weights(critic.target_networks))
    assert not any(p.requires_grad for pair in critic.target_networks.values() for p in pair.parameters())
    online = {id(p) for p in critic.parameters()}
    assert online == {id(p) for group in critic.per_critic_parameters() for p in group}
    assert not online & {id(p) for pair in critic.target_networks.values() for p in pair.parameters()}


def test_targets_move_by_tau_and_buffers_follow():
    critic = linear_critic()
    before = weights(critic.target_networks)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(1.0)
    critic.train()
    critic.compute_state_action_values_step({"observation": torch.randn(8, 4)}, 0)  # moves the running mean
    critic.update_target_weights(0.25)
    assert torch.allclose(weights(critic.target_networks), before + 0.25)
    pairs = zip(critic.networks[0].buffers(), critic.target_networks[0].buffers(), strict=True)
    assert all(torch.equal(buffer, target) for buffer, target in pairs)
    critic.update_target_weights(1.0)
    assert torch.equal(weights(critic.networks), weights(critic.target_networks))


def test_new_weights_reach_all_networks():
    critic = linear_critic()
    before = weights(critic.networks)
    critic.re_init_networks()
    assert not bool((weights(critic.networks) == before)[:16].any())
    assert torch.equal(weights(critic.networks), weights(critic.target_networks))


def test_weights_and_targets_are_saved_and_loaded_with_the_actor_critic(tmp_path):
    mapper = DistributionMapper(DISCRETE, [])
    policy = TorchPolicy({0: LinearQ(4, "action", 3)}, mapper, "cpu")
    critic, other = linear_critic(), linear_critic()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(1.0)  # targets differ from networks now
    model = TorchActorCritic(policy, critic, "cpu")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    TorchActorCritic(policy, other, "cpu").load_state_dict(loaded)
    assert torch.equal(weights(critic.networks), weights(other.networks))
    assert torch.equal(weights(critic.target_networks), weights(other.target_networks))
    before = weights(other.networks)
    del loaded["target_critics"]
    with pytest.raises(CheckpointError, match="target_critics"):
        other.load_state_dict(loaded)
    assert torch.equal(weights(other.networks), before)


# -- errors ----------------------------------------------------------------------------------------


def test_networks_that_return_something_else_are_named():
    critic = step_critic(DISCRETE, ConstantQ(action=[1.0]), None, only_discrete=True)
    with pytest.raises(ConfigError, match=r"critic.networks\[0\].*expected `action_q_values` that ends with 3"):
        critic.compute_state_action_values_step(OBSERVATION[0], 0)
    critic = step_critic(BOX, ConstantQ(q_value=[1.0, 2.0]), None, only_discrete=False)
    with pytest.raises(ConfigError, match=r"critic.networks\[0\] returned values of shape \(2, 2\).*\(2, 1\)"):
        critic.compute_state_action_value_step(OBSERVATION[0], {"steer": torch.zeros(2, 2)}, 0)
    with pytest.raises(ConfigError, match=r"action head `steer` is missing; found \['stear'\]"):
        critic.compute_state_action_value_step(OBSERVATION[0], {"stear": torch.zeros(2, 2)}, 0)
    with pytest.raises(ConfigError, match="step key 1 is unknown"):
        critic.compute_state_action_value_step(OBSERVATION[0], {"steer": torch.zeros(2, 2)}, 1)


def test_an_actor_critic_with_a_state_action_critic_has_no_state_values():
    policy = TorchPolicy({0: LinearQ(4, "action", 3)}, DistributionMapper(DISCRETE, []), "cpu")
    model = TorchActorCritic(policy, discrete_critic(), "cpu")
    with pytest.raises(ConfigError, match=r"model\.critic"):
        model.bootstrap_values({"observation": torch.zeros(2, 4)}, (0, 0))


def test_a_network_that_was_replaced_in_its_pair_counts():
    critic = build_sac_model(random_walk_env()).critic
    observation, action = {"position": torch.randn(4, 3)}, {"push": torch.rand(4, 3)}
    critic.compute_state_action_value_step(observation, action, 0)
    replacement = copy.deepcopy(critic.networks[0][0])
    with torch.no_grad():
        for parameter in replacement.parameters():
            parameter.fill_(1.0)
    critic.networks[0][0] = replacement
    found = critic.compute_state_action_value_step(observation, action, 0)[0]
    torch.testing.assert_close(found, replacement({**observation, **action})["q_value"].squeeze(-1))
