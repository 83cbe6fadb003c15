"""The mathematics of SAC (Haarnoja et al. 2018, 1812.05905; for discrete actions Christodoulou 2019) as functions.

How much entropy a tuned policy shall keep, per action head, times `target_entropy_multiplier`:

* choices (`Discrete`, and each component of `MultiDiscrete` and `MultiBinary`): 98 % of the largest entropy there
  is, the logarithm of the number of *valid* actions;
* `Box`: minus the number of components, for actions scaled to [-1, 1]. Log-probabilities are densities of the action
  in its own unit, so that the logarithms of the half widths of bounded components are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional

from maze.core.agent.state_action_values import masked_log_probs
from maze.train.trainers.common.learning import mean_of

DISCRETE_SHARE = 0.98


def soft_bellman_target(reward: Tensor, next_value: Tensor, ended: Tensor, discount: float) -> Tensor:
    """What a state-action value should be: `reward + discount * next_value`.

    :param reward: `[B]`
    :param next_value: Soft value of what followed; after a truncation that of the true last observation.
    :param ended: Whether the episode *terminated*, so that nothing follows; what stands in `next_value` is ignored.
    :param discount: 1 between sub-steps of one environment step.
    """
    return reward + discount * next_value.masked_fill(ended, 0.0)


def critic_loss(q_values: Sequence[Tensor], target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Half the mean squared error (equation 5), summed over the networks of a critic.

    :param weight: 0 or 1 for each element; `None`: all of them count.
    :param target: `[batch]`, as values and weight.
    """
    if weight is None:
        losses = [functional.mse_loss(q_value, target) for q_value in q_values]
    else:
        losses = [mean_of((q_value - target).square(), weight) for q_value in q_values]
    return 0.5 * sum(losses[1:], losses[0])


def continuous_policy_loss(log_prob: Tensor, q_value: Tensor, alpha: Tensor, weight: Tensor | None = None) -> Tensor:
    """`alpha * log_prob - Q` of reparameterised actions (equation 9), averaged.

    :param log_prob: Joint log-probabilities of the actions, `[batch]` as all others, with gradients.
    :param q_value: The smaller value of both networks, with gradients through the actions.
    """
    return mean_of(alpha * log_prob - q_value, weight)


def discrete_policy_loss(logits: Tensor, q_values: Tensor, alpha: Tensor, weight: Tensor | None = None) -> Tensor:
    """Expectation of `alpha * log p - Q` over all actions, averaged over the batch; masked actions have no part.

    :param logits: `[..., n]`; those of masked actions are the minimum of their type, or minus infinity.
    :param q_values: `[..., n]`, the smaller values of both networks; no gradient passes through them.
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


# -- how much entropy ---------------------------------------------------------------------------------


def target_entropy(action_space: spaces.Dict, logits: Mapping[str, Tensor], multiplier: float) -> Tensor | float:
    """Target for the joint entropy of a sub-step's actions: a number, or `[B]` where action masks differ.

    :param action_space: The heads.
    :param logits: Logits of each head; masked actions have the minimum of their type.
    :param multiplier: Factor of the targets.
    """
    total: Tensor | float = 0.0
    for head, space in action_space.spaces.items():
        if isinstance(space, spaces.Box):
            total = total + box_target(space, multiplier)
        else:
            for component in choice_logits(space, logits[head]):
                total = total + multiplier * DISCRETE_SHARE * valid_actions(component).log()
    return total


def box_target(space: spaces.Box, multiplier: float) -> float:
    """Target for continuous actions, as a density of the action in its own unit."""
    half_widths = 0.5 * (space.high.astype(np.float64) - space.low.astype(np.float64))
    bounded = half_widths[space.bounded_below & space.bounded_above]
    return -multiplier * math.prod(space.shape) + float(np.log(bounded).sum())


def valid_actions(logits: Tensor) -> Tensor:
    """Number of actions that are not masked, `[...]`."""
    return (logits > torch.finfo(logits.dtype).min).sum(-1).to(logits.dtype)


def choice_logits(space: spaces.Space[Any], logits: Tensor) -> list[Tensor]:
    """Logits `[..., n]` of each choice that makes up a head's action."""
    if isinstance(space, spaces.Discrete):
        return [logits]
    if isinstance(space, spaces.MultiDiscrete):
        return list(torch.split(logits, [int(n) for n in space.nvec.flatten()], dim=-1))
    flat = logits.flatten(logits.dim() - len(space.shape or ()))
    return [torch.stack([torch.zeros_like(one), one], dim=-1) for one in flat.unbind(-1)]


# -- choices that a critic judges together with other actions -----------------------------------------

JointValue = Callable[[dict[str, Tensor]], Tensor]
"""From actions by head `[K, B, ...]` to their values `[K, B]`."""


def choice_values(
    action_space: spaces.Dict, logits: Mapping[str, Tensor], actions: Mapping[str, Tensor], joint_value: JointValue
) -> Tensor | None:
    """For each choice the expected value of its alternatives, everything else being as it was drawn; summed.

    The gradient with respect to the logits is an unbiased estimate of that of the expected value of the joint action:
    choices are independent of one another given the state, and alternatives are weighted with their probabilities
    instead of being drawn.

    :param action_space: The heads.
    :param logits: By head, with gradients.
    :param actions: The drawn actions by head.
    :param joint_value: Values of joint actions; no gradient is taken through them.
    :return: `[B]`; None where there are no choices.
    """
    total: Tensor | None = None
    drawn = {head: action.detach() for head, action in actions.items()}
    for head, space in action_space.spaces.items():
        if isinstance(space, spaces.Box):
            continue
        for index, component in enumerate(choice_logits(space, logits[head])):
            _, probs = masked_log_probs(component)
            n_options = component.shape[-1]
            alternatives = {key: action.expand(n_options, *action.shape) for key, action in drawn.items()}
            alternatives[head] = _with_each_option(space, drawn[head], index, n_options)
            with torch.no_grad():
                values = joint_value(alternatives)
            expected = (probs * values.transpose(0, 1)).sum(-1)
            total = expected if total is None else total + expected
    return total


def _with_each_option(space: spaces.Space[object], action: Tensor, index: int, n_options: int) -> Tensor:
    """`[n_options, B, ...]`: the action with each option of one of its components."""
    options = action.unsqueeze(0).repeat(n_options, *[1] * action.dim())
    flat = options.view(n_options, action.shape[0], -1)
    flat[:, :, index] = torch.arange(n_options, device=action.device, dtype=action.dtype).unsqueeze(-1)
    return options
