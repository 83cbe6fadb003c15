"""The terms of the actor-critic objectives as plain functions of tensors.

All of them are averages over every element; the sums over sub-steps and the coefficients belong to the trainers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SurrogateLoss(NamedTuple):
    """A policy's objective and, for PPO, two measures of how far an update has moved the policy."""

    policy: Tensor
    """The loss to minimise (scalar)."""
    clip_fraction: Tensor | None = None
    """Share of the elements whose ratio left the clipping range (scalar, no gradient); where there is one."""
    approx_kl: Tensor | None = None
    """Estimate of KL(old || new), never negative (scalar, no gradient); where the ratio is known."""


def clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float) -> SurrogateLoss:
    """Return PPO's clipped objective (Schulman et al. 2017, equation 7).

    :param log_prob: Joint log-probability of the sampled actions under the current policy.
    :param old_log_prob: The same under the policy that sampled them.
    :param advantage: Advantage of the sampled actions, same shape.
    :param clip_range: How far the ratio may move from 1 before it stops earning gradient.
    """
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    policy = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    with torch.no_grad():
        clip_fraction = (ratio != clipped).float().mean()
        approx_kl = (ratio - 1.0 - log_ratio).mean()  # Schulman's low variance estimator
    return SurrogateLoss(policy, clip_fraction, approx_kl)


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return the advantage actor-critic's policy loss (Mnih et al. 2016): raises the probability of better actions.

    :param log_prob: Of the actions, `[batch]`.
    :param advantage: `[batch]`.
    """
    return -(log_prob * advantage).mean()


def value_loss(
    value: Tensor, target: Tensor, old_value: Tensor | None = None, clip_range: float | None = None
) -> Tensor:
    """Return the mean squared error of the values, optionally with their step limited as in PPO's first implementation.

    :param value: Predicted values.
    :param target: Returns to predict, same shape.
    :param old_value: Values predicted when the rollout was valued; needed for clipping only.
    :param clip_range: The largest change that still earns gradient; `None` does not clip.
    """
    squared_error = (value - target).square()
    if clip_range is None or old_value is None:
        return squared_error.mean()
    clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
    return torch.maximum(squared_error, (clipped - target).square()).mean()


def normalize_advantage(advantage: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Shift and scale to mean zero and standard deviation one; a single element has neither and stays as it is.

    :param advantage: `[...]`; the result has the same shape.
    """
    if advantage.numel() < 2:
        return advantage
    std, mean = torch.std_mean(advantage, correction=0)
    return (advantage - mean) / (std + epsilon)
