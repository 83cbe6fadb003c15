"""The mathematics of SAC against numbers worked out by hand."""

import math

import pytest
import torch
from gymnasium import spaces

from maze.train.trainers.sac.sac_trainer import (
    choice_values,
    continuous_policy_loss,
    critic_loss,
    discrete_policy_loss,
    entropy_coef_loss,
    soft_bellman_target,
    target_entropy,
)

MASKED = torch.finfo(torch.float32).min


def test_a_target_is_bootstrapped_unless_the_episode_terminated():
    reward, next_value = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0])
    target = soft_bellman_target(reward, next_value, torch.tensor([False, True]), 0.9)
    assert target.tolist() == pytest.approx([10.0, 2.0])


def test_values_after_a_termination_do_not_enter_the_target():
    target = soft_bellman_target(torch.ones(1), torch.tensor([math.inf]), torch.tensor([True]), 0.9)
    assert target.item() == 1.0


def test_the_critic_loss_is_half_the_squared_error_of_both_networks():
    values = [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])]
    assert critic_loss(values, torch.tensor([2.0, 1.0])).item() == pytest.approx(0.5 * (1 + 4) / 2 + 0.5 * (0 + 1) / 2)
    weight = torch.tensor([1.0, 0.0])
    assert critic_loss(values, torch.tensor([2.0, 1.0]), weight).item() == pytest.approx(0.5)


def test_the_continuous_policy_loss_weighs_entropy_against_value():
    loss = continuous_policy_loss(torch.tensor([-1.0, 2.0]), torch.tensor([3.0, 5.0]), torch.tensor(0.5))
    assert loss.item() == pytest.approx(((-0.5 - 3.0) + (1.0 - 5.0)) / 2)


def test_the_discrete_policy_loss_is_an_expectation_over_all_actions():
    logits = torch.tensor([[math.log(0.25), math.log(0.75)]])
    loss = discrete_policy_loss(logits, torch.tensor([[4.0, 8.0]]), torch.tensor(0.2))
    expected = 0.25 * (0.2 * math.log(0.25) - 4.0) + 0.75 * (0.2 * math.log(0.75) - 8.0)
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("fill", [MASKED, -math.inf])
def test_a_masked_action_has_no_part_in_loss_and_gradient(fill):
    free = torch.tensor([[0.3, -0.2]], requires_grad=True)
    masked = torch.tensor([[0.3, fill, -0.2]], requires_grad=True)
    alpha = torch.tensor(0.2)
    without = discrete_policy_loss(free, torch.tensor([[1.0, 2.0]]), alpha)
    with_mask = discrete_policy_loss(masked, torch.tensor([[1.0, 1e30, 2.0]]), alpha)
    torch.autograd.backward([without, with_mask])
    assert with_mask.item() == pytest.approx(without.item())
    assert masked.grad[0, [0, 2]].tolist() == pytest.approx(free.grad[0].tolist())
    assert masked.grad[0, 1] == 0.0


def test_the_entropy_coefficient_grows_where_the_entropy_is_too_small():
    log_alpha = torch.tensor(math.log(0.5), requires_grad=True)
    loss = entropy_coef_loss(log_alpha, torch.tensor([0.0, 2.0]), target_entropy=3.0)
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(0.5) * 4.0)
    assert log_alpha.grad.item() == pytest.approx(-4.0), "entropy -1 is below its target 3: alpha goes up"


def test_the_target_entropy_counts_valid_actions():
    space = spaces.Dict({"a": spaces.Discrete(4)})
    logits = {"a": torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, MASKED, 0.0, -math.inf], [MASKED, 1.0, MASKED, MASKED]])}
    found = target_entropy(space, logits, 0.5)
    assert found.tolist() == pytest.approx([0.49 * math.log(4), 0.49 * math.log(2), 0.0])


def test_the_target_entropy_of_continuous_actions_belongs_to_actions_of_unit_scale():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Box(0, 10, (1,))})
    assert target_entropy(space, {}, 2.0) == pytest.approx(-2.0 * 4 + math.log(5.0))
    unbounded = spaces.Dict({"a": spaces.Box(-math.inf, math.inf, (2,))})
    assert target_entropy(unbounded, {}, 1.0) == -2.0


def test_target_entropies_of_heads_add_up():
    space = spaces.Dict({"a": spaces.MultiDiscrete([2, 3]), "b": spaces.MultiBinary(2), "c": spaces.Box(-1, 1, (1,))})
    logits = {"a": torch.zeros(1, 5), "b": torch.zeros(1, 2)}
    expected = 0.98 * (math.log(2) + math.log(3) + 2 * math.log(2)) - 1
    assert target_entropy(space, logits, 1.0).item() == pytest.approx(expected)


def test_alternatives_give_the_exact_gradient_of_the_expected_value():
    """Averaged over the drawn actions with their probabilities, it is the gradient of the expectation itself."""
    space = spaces.Dict({"a": spaces.MultiDiscrete([2, 3])})
    table = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    logits = torch.tensor([[0.3, -0.1, 0.5, 0.0, -0.7]], requires_grad=True)

    def joint_value(actions):
        return table[actions["a"][..., 0], actions["a"][..., 1]]

    first, second = torch.softmax(logits[0, :2], 0), torch.softmax(logits[0, 2:], 0)
    exact = torch.autograd.grad((first[:, None] * second * table).sum(), logits)[0]
    estimate = torch.zeros_like(exact)
    for i in range(2):
        for j in range(3):
            value = choice_values(space, {"a": logits}, {"a": torch.tensor([[i, j]])}, joint_value)
            weight = (first[i] * second[j]).item()
            estimate += weight * torch.autograd.grad(value.sum(), logits)[0]
    assert torch.allclose(estimate, exact, atol=1e-6)
