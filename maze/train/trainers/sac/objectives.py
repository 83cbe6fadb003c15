"""Losses and targets of soft actor-critic (Haarnoja et al. 2018) as functions of tensors, and the actions they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional

from maze.core.agent.torch_state_action_critic import masked_log_probs
from maze.core.errors import ConfigError
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution
from maze.distributions.utils import sample_with, space_bounds, tensor_clamp
from maze.train.trainers.common.learning import mean_of
from maze.train.trainers.common.replay_buffer.transitions import TensorDict

if TYPE_CHECKING:
    from maze.core.agent.torch_policy_output import PolicySubStepOutput
    from maze.distributions.distribution_mapper import DistributionMapper


DISCRETE_SHARE = 0.98


def soft_bellman_target(reward: Tensor, next_value: Tensor, ended: Tensor, discount: float) -> Tensor:
    """Compute the target of a state-action value: `reward + discount * next_value`.

    :param reward: `[B]`
    :param next_value: Soft value of what followed; after a truncation that of the true last observation.
    :param ended: Whether the episode *terminated*, so that nothing follows; the content of `next_value` is ignored.
    :param discount: 1 between sub-steps of one environment step.
    """
    return reward + discount * next_value.masked_fill(ended, 0.0)


def critic_loss(q_values: Sequence[Tensor], target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return half the mean squared error (equation 5), summed over the networks of a critic.

    :param weight: 0 or 1 for each element; `None`: all of them count.
    :param target: `[batch]`, as values and weight.
    """
    if weight is None:
        losses = [functional.mse_loss(q_value, target) for q_value in q_values]
    else:
        losses = [mean_of((q_value - target).square(), weight) for q_value in q_values]
    return 0.5 * sum(losses[1:], losses[0])


def continuous_policy_loss(log_prob: Tensor, q_value: Tensor, alpha: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return `alpha * log_prob - Q` of reparameterised actions (equation 9), averaged.

    :param log_prob: Joint log-probabilities of the actions, `[batch]` as all others, with gradients.
    :param q_value: The smaller value of both networks, with gradients through the actions.
    """
    return mean_of(alpha * log_prob - q_value, weight)


def discrete_policy_loss(logits: Tensor, q_values: Tensor, alpha: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the expectation of `alpha * log p - Q` over all allowed actions, averaged over the batch.

    :param logits: `[..., n]`; those of masked actions are the minimum of their type, or minus infinity.
    :param q_values: `[..., n]`, the smaller values of both networks; no gradient passes through them.
    """
    log_probs, probs = masked_log_probs(logits)
    return mean_of((probs * (alpha * log_probs - q_values.detach())).sum(-1), weight)


def entropy_coef_loss(
    log_alpha: Tensor, log_prob: Tensor, target_entropy: Tensor | float, weight: Tensor | None = None
) -> Tensor:
    """Return the loss of the entropy coefficient: it rises where the entropy is below its target, and falls above.

    :param log_alpha: Logarithm of the entropy coefficient (scalar).
    :param log_prob: (Expected) log-probabilities of the policy's actions.
    :param target_entropy: A number, or one for each element.
    """
    return -log_alpha * mean_of((log_prob + target_entropy).detach(), weight)


# -- how much entropy ---------------------------------------------------------------------------------


def target_entropy(action_space: spaces.Dict, logits: Mapping[str, Tensor], multiplier: float) -> Tensor | float:
    """Return the target for the joint entropy of a sub-step's actions: a number, or `[B]` where action masks differ.

    That of continuous actions is a density of the action in its own unit.

    :param action_space: The heads.
    :param logits: Logits of each head; masked actions have the minimum of their type.
    :param multiplier: Factor of the targets.
    """
    total: Tensor | float = 0.0
    for head, space in action_space.spaces.items():
        if isinstance(space, spaces.Box):
            half_widths = 0.5 * (space.high.astype(np.float64) - space.low.astype(np.float64))
            bounded = half_widths[space.bounded_below & space.bounded_above]
            total = total - multiplier * math.prod(space.shape) + float(np.log(bounded).sum())
        else:
            for component in choice_logits(space, logits[head]):
                n_allowed = (component > torch.finfo(component.dtype).min).sum(-1).to(component.dtype)
                total = total + multiplier * DISCRETE_SHARE * n_allowed.log()
    return total


def choice_logits(space: spaces.Space[Any], logits: Tensor) -> list[Tensor]:
    """Return logits `[..., n]` of each choice that makes up a head's action."""
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
    """Return the sum over choices of the expected value of their alternatives, all else being as it was drawn.

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
            options = alternatives[head].clone()
            each_option = torch.arange(n_options, device=options.device, dtype=options.dtype)
            options.view(n_options, len(probs), -1)[:, :, index] = each_option.unsqueeze(-1)
            alternatives[head] = options
            with torch.no_grad():
                values = joint_value(alternatives)
            expected = (probs * values.transpose(0, 1)).sum(-1)
            total = expected if total is None else total + expected
    return total


# -- actions to learn from ----------------------------------------------------------------------------


@dataclass
class ActionDraw:
    """One action for each row of a batch, of one sub-step."""

    logits: TensorDict
    actions: TensorDict = field(default_factory=dict)
    """By head; those of `Box` heads with gradients. Empty where expectations over all actions take their place."""
    log_probs: TensorDict = field(default_factory=dict)
    """Of the drawn actions, by head."""
    expected_log_probs: TensorDict = field(default_factory=dict)
    """Minus the entropy of each head `[B]`: exact for choices, that of the drawn action for `Box`."""

    @property
    def expected_log_prob(self) -> Tensor:
        """Of the joint action: the sum over heads.

        :return: `[batch]`.
        """
        first, *others = self.expected_log_probs.values()
        return torch.stack([first, *others]).sum(0) if others else first


def draw_actions(
    output: PolicySubStepOutput, action_space: spaces.Dict, generator: torch.Generator, needs_actions: bool
) -> ActionDraw:
    """Draw from a policy's output.

    :param output: Logits and distributions, perhaps with gradients.
    :param action_space: The heads.
    :param generator: Source of randomness.
    :param needs_actions: Whether choices are drawn as well.
    """
    draw = ActionDraw(output.action_logits)
    for head, space in action_space.spaces.items():
        distribution: Any = output.prob_dist.distribution_dict[head]
        if isinstance(space, spaces.Box):
            if hasattr(distribution, "rsample_with_log_prob"):
                action, log_prob = distribution.rsample_with_log_prob(generator)
            else:
                action = distribution.rsample(generator)
                log_prob = distribution.log_prob(action)
            draw.log_probs[head] = draw.expected_log_probs[head] = log_prob
            is_squashed = isinstance(distribution, SquashedGaussianProbabilityDistribution)
            if not is_squashed and (space.bounded_below.any() or space.bounded_above.any()):
                action = tensor_clamp(action, *space_bounds(space, action))  # as actions in the buffer are
            draw.actions[head] = action
            continue
        pairs = [masked_log_probs(component) for component in choice_logits(space, output.action_logits[head])]
        entropies = [-(probs * log_probs).sum(-1) for log_probs, probs in pairs]
        draw.expected_log_probs[head] = -(entropies[0] if len(entropies) == 1 else torch.stack(entropies).sum(0))
        if needs_actions:
            draw.actions[head] = action = sample_with(distribution, generator)
            draw.log_probs[head] = distribution.log_prob(action).detach()
    return draw


def check_distributions(action_space: spaces.Dict, mapper: DistributionMapper) -> None:
    """Refuse heads whose actions cannot be differentiated.

    :raises ConfigError: Names the head.
    """
    for head, space in action_space.spaces.items():
        distribution = mapper.distribution_class(head)
        if isinstance(space, spaces.Box) and not hasattr(distribution, "rsample"):
            raise ConfigError(
                f"Action head `{head}`: SAC needs actions with gradients (`rsample`), which {distribution.__name__} "
                "does not have. Use maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution in "
                "`model.distribution_mapper_config`."
            )
