"""The mathematics of SAC (Haarnoja et al. 2018, 1812.05905; for discrete actions Christodoulou 2019) as functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from maze.core.agent.state_action_values import masked_log_probs


def soft_bellman_target(reward: Tensor, next_value: Tensor, ended: Tensor, discount: float) -> Tensor:
    """What a state-action value should be: ``reward + discount * next_value``.

    :param reward: ``[B]``
    :param next_value: Soft value of what followed; after a truncation that of the true last observation.
    :param ended: Whether the episode *terminated*, so that nothing follows; what stands in ``next_value`` is ignored.
    :param discount: 1 between sub-steps of one environment step.
    """
    return reward + discount * next_value.masked_fill(ended, 0.0)


def critic_loss(q_values: Sequence[Tensor], target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Half the mean squared error (equation 5), summed over the networks of a critic.

    :param weight: 0 or 1 for each element; ``None``: all of them count.
    """
    if weight is None:
        losses = [functional.mse_loss(q_value, target) for q_value in q_values]
    else:
        losses = [mean_of((q_value - target).square(), weight) for q_value in q_values]
    return 0.5 * sum(losses[1:], losses[0])


def continuous_policy_loss(log_prob: Tensor, q_value: Tensor, alpha: Tensor, weight: Tensor | None = None) -> Tensor:
    """``alpha * log_prob - Q`` of reparameterised actions (equation 9), averaged.

    :param log_prob: Joint log-probabilities of the actions, with gradients.
    :param q_value: The smaller value of both networks, with gradients through the actions.
    """
    return mean_of(alpha * log_prob - q_value, weight)


def discrete_policy_loss(logits: Tensor, q_values: Tensor, alpha: Tensor, weight: Tensor | None = None) -> Tensor:
    """Expectation of ``alpha * log p - Q`` over all actions, averaged over the batch; masked actions have no part.

    :param logits: ``[..., n]``; those of masked actions are the minimum of their type, or minus infinity.
    :param q_values: ``[..., n]``, the smaller values of both networks; no gradient passes through them.
    """
    log_probs, probs = masked_log_probs(logits)
    return mean_of((probs * (alpha * log_probs - q_values.detach())).sum(-1), weight)


def entropy_coef_loss(
    log_alpha: Tensor, log_prob: Tensor, target_entropy: Tensor | float, weight: Tensor | None = None
) -> Tensor:
    """Its gradient raises alpha where the entropy is below its target, and lowers it where it is above.

    :param log_alpha: Logarithm of the entropy coefficient (scalar).
    :param log_prob: (Expected) log-probabilities of the policy's actions.
    :param target_entropy: A number, or one for each element.
    """
    return -log_alpha * mean_of((log_prob + target_entropy).detach(), weight)


@torch.no_grad()
def polyak_update(targets: Iterable[Tensor], sources: Iterable[Tensor], tau: float) -> None:
    """Moves each target towards its source: ``target <- (1 - tau) * target + tau * source``."""
    torch._foreach_lerp_(list(targets), list(sources), tau)


def mean_of(values: Tensor, weight: Tensor | None) -> Tensor:
    """Mean of the elements of weight 1; 0 if there are none."""
    if weight is None:
        return values.mean()
    return (values * weight).sum() / weight.sum().clamp(min=1.0)
