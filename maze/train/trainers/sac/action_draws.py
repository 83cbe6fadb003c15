"""Actions drawn by the policy that is being trained, and what SAC needs to know about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor

from maze.core.agent.state_action_values import masked_log_probs
from maze.core.errors import ConfigError
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution
from maze.distributions.utils import sample_with, space_bounds, tensor_clamp
from maze.train.trainers.sac.target_entropy import choice_logits

if TYPE_CHECKING:
    from maze.core.agent.torch_policy_output import PolicySubStepOutput

TensorDict = dict[str, Tensor]


@dataclass
class ActionDraw:
    """One action for each row of a batch, of one sub-step."""

    logits: TensorDict
    actions: TensorDict
    """By head; those of ``Box`` heads with gradients. Empty where expectations over all actions take their place."""
    log_probs: TensorDict
    """Of the drawn actions, by head."""
    expected_log_probs: TensorDict
    """Minus the entropy of each head ``[B]``: exact for choices, that of the drawn action for ``Box``."""

    @property
    def expected_log_prob(self) -> Tensor:
        """Of the joint action: the sum over heads."""
        return (
            torch.stack(list(self.expected_log_probs.values())).sum(0)
            if len(self.expected_log_probs) > 1
            else next(iter(self.expected_log_probs.values()))
        )


def draw_actions(
    output: PolicySubStepOutput, action_space: spaces.Dict, generator: torch.Generator, needs_actions: bool
) -> ActionDraw:
    """Draws from a policy's output.

    :param output: Logits and distributions, perhaps with gradients.
    :param action_space: The heads.
    :param generator: Source of randomness.
    :param needs_actions: Whether choices are drawn as well.
    """
    draw = ActionDraw(output.action_logits, {}, {}, {})
    for head, space in action_space.spaces.items():
        distribution: Any = output.prob_dist.distribution_dict[head]
        if isinstance(space, spaces.Box):
            if hasattr(distribution, "rsample_with_log_prob"):
                action, log_prob = distribution.rsample_with_log_prob(generator)
            else:
                action = distribution.rsample(generator)
                log_prob = distribution.log_prob(action)
            draw.log_probs[head] = draw.expected_log_probs[head] = log_prob
            draw.actions[head] = _as_the_environment_sees_it(action, space, distribution)
            continue
        draw.expected_log_probs[head] = -_entropy(space, output.action_logits[head])
        if needs_actions:
            draw.actions[head] = action = sample_with(distribution, generator)
            draw.log_probs[head] = distribution.log_prob(action).detach()
    return draw


def check_distributions(action_space: spaces.Dict, distribution_classes: Mapping[str, type[Any]]) -> list[str]:
    """Refuses heads whose actions cannot be differentiated.

    :return: Bounded ``Box`` heads whose distribution is not: they train, but worse than with a squashed Gaussian.
    :raises ConfigError: Names the head.
    """
    unbounded = []
    for head, space in action_space.spaces.items():
        if not isinstance(space, spaces.Box):
            continue
        distribution = distribution_classes[head]
        if not hasattr(distribution, "rsample"):
            raise ConfigError(
                f"Action head `{head}`: SAC needs actions with gradients (`rsample`), which {distribution.__name__} "
                "does not have. Use maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution in "
                "`model.distribution_mapper_config`."
            )
        if issubclass(distribution, DiagonalGaussianProbabilityDistribution) and space.is_bounded():
            unbounded.append(head)
    return unbounded


def _as_the_environment_sees_it(action: Tensor, space: spaces.Box, distribution: Any) -> Tensor:
    """Clipped to the bounds, as actions in the buffer are; a squashed one lies within them already."""
    if isinstance(distribution, SquashedGaussianProbabilityDistribution):
        return action
    if space.bounded_below.any() or space.bounded_above.any():
        return tensor_clamp(action, *space_bounds(space, action))
    return action


def _entropy(space: spaces.Space[Any], logits: Tensor) -> Tensor:
    entropies = []
    for component in choice_logits(space, logits):
        log_probs, probs = masked_log_probs(component)
        entropies.append(-(probs * log_probs).sum(-1))
    return entropies[0] if len(entropies) == 1 else torch.stack(entropies).sum(0)
