"""Policy loss for choices that a critic judges together with other actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from gymnasium import spaces
from torch import Tensor

from maze.core.agent.state_action_values import masked_log_probs
from maze.train.trainers.sac.target_entropy import choice_logits

JointValue = Callable[[dict[str, Tensor]], Tensor]
"""From actions by head ``[K, B, ...]`` to their values ``[K, B]``."""


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
    :return: ``[B]``; None where there are no choices.
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
    """``[n_options, B, ...]``: the action with each option of one of its components."""
    options = action.unsqueeze(0).repeat(n_options, *[1] * action.dim())
    flat = options.view(n_options, action.shape[0], -1)
    flat[:, :, index] = torch.arange(n_options, device=action.device, dtype=action.dtype).unsqueeze(-1)
    return options
