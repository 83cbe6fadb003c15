"""The terms of the actor-critic objectives: numbers worked out by hand, and laws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from maze.train.trainers.common.actor_critic.actor_critic_trainer import (
    clipped_surrogate,
    normalize_advantage,
    policy_gradient_loss,
    value_loss,
)
from maze.train.trainers.common.learning import scheduled_lr

floats = st.floats(-3, 3, width=32)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),  # first epoch: nothing is clipped
        (1.5, 2.0, -2.4, 1.0),  # a gain is capped at 1 + clip_range
        (1.5, -2.0, 3.0, 1.0),  # a loss is not: the pessimistic bound wins
        (0.5, 2.0, -1.0, 1.0),
        (0.5, -2.0, 1.6, 1.0),  # moving away from a bad action is capped at 1 - clip_range
    ],
)
def test_clipped_surrogate_matches_hand_computed_values(ratio, advantage, expected, clipped):
    loss = clipped_surrogate(tensor([ratio]).log(), tensor([0.0]), tensor([advantage]), 0.2)
    assert loss.policy.item() == pytest.approx(expected)
    assert loss.clip_fraction.item() == clipped
    assert loss.approx_kl.item() == pytest.approx(ratio - 1 - math.log(ratio))


@pytest.mark.parametrize(("ratio", "advantage", "gradient"), [(1.5, 2.0, 0.0), (1.5, -2.0, 3.0), (1.0, 2.0, -2.0)])
def test_clipped_surrogate_has_no_gradient_where_it_is_capped(ratio, advantage, gradient):
    log_prob = tensor([ratio]).log().requires_grad_()
    clipped_surrogate(log_prob, tensor([0.0]), tensor([advantage]), 0.2).policy.backward()
    assert log_prob.grad.item() == pytest.approx(gradient)


@given(st.lists(st.tuples(floats, floats, floats), min_size=1, max_size=8))
def test_clipped_surrogate_is_never_below_the_unclipped_loss_and_its_kl_is_never_negative(rows):
    log_prob, old_log_prob, advantage = tensor(rows).unbind(-1)
    loss = clipped_surrogate(log_prob, old_log_prob, advantage, 0.2)
    unclipped = -((log_prob - old_log_prob).exp() * advantage).mean()
    assert loss.policy >= unclipped - 1e-4 * (1 + unclipped.abs())
    assert loss.approx_kl >= -1e-5


def test_at_the_sampling_policy_both_policy_losses_have_the_same_gradient():
    advantage = tensor([1.0, -2.0, 0.5])
    gradients = []
    for loss_of in (
        lambda log_prob: clipped_surrogate(log_prob, log_prob.detach(), advantage, 0.2).policy,
        lambda log_prob: policy_gradient_loss(log_prob, advantage),
    ):
        log_prob = tensor([-0.1, -1.0, -2.0], requires_grad=True)
        loss_of(log_prob).backward()
        gradients.append(log_prob.grad)
    assert torch.allclose(*gradients)


def test_policy_gradient_loss_matches_hand_computed_value():
    # -( -0.5 * 2 + -1.0 * -3 ) / 2
    assert policy_gradient_loss(tensor([-0.5, -1.0]), tensor([2.0, -3.0])).item() == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("clip_range", "expected"),
    [
        (None, (4.0 + 1.0) / 2),  # errors of -2 and 1
        (0.5, (2.5**2 + 1.0) / 2),  # the first value moved by 1, half of which counts: 0.5 - 3
        (2.0, (4.0 + 1.0) / 2),  # both moved less than allowed
    ],
)
def test_value_loss_matches_hand_computed_values(clip_range, expected):
    value, target, old_value = tensor([1.0, 2.0]), tensor([3.0, 1.0]), tensor([0.0, 2.0])
    assert value_loss(value, target, old_value, clip_range).item() == pytest.approx(expected)


@given(st.lists(floats, min_size=2, max_size=16), st.floats(0.1, 10), floats)
def test_normalized_advantages_ignore_shift_and_scale(values, scale, shift):
    advantage = tensor(values)
    if advantage.std() < 0.1:
        return
    normalized = normalize_advantage(advantage)
    assert normalized.mean().item() == pytest.approx(0.0, abs=1e-4)
    assert normalized.std(correction=0).item() == pytest.approx(1.0, abs=1e-3)
    assert torch.allclose(normalize_advantage(scale * advantage + shift), normalized, atol=1e-3)


def test_a_single_advantage_is_not_normalized_away():
    assert normalize_advantage(tensor([3.0])).item() == 3.0
    assert torch.equal(normalize_advantage(tensor([2.0, 2.0])), tensor([0.0, 0.0]))


@pytest.mark.parametrize(
    ("schedule", "progress", "expected"),
    [
        ("constant", 0.9, 0.1),
        ("linear", 0.0, 0.1),
        ("linear", 0.75, 0.025),
        ("cosine", 0.5, 0.05),
        ("cosine", 1.0, 0.0),
    ],
)
def test_scheduled_learning_rates_match_hand_computed_values(schedule, progress, expected):
    assert scheduled_lr(schedule, 0.1, progress) == pytest.approx(expected)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 1), st.floats(0, 1))
def test_learning_rates_never_grow(schedule, a, b):
    early, late = sorted((a, b))
    assert scheduled_lr(schedule, 0.1, early) >= scheduled_lr(schedule, 0.1, late) >= 0.0
