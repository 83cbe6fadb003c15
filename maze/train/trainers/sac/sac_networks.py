"""Policy and critics the way SAC asks them, and the actions that it draws."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_state_action_critic import (
    TorchSharedStateActionCritic,
    TorchStateActionCritic,
    masked_log_probs,
)
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.utils.seeding import seeded_generator
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution
from maze.distributions.utils import sample_with, space_bounds, tensor_clamp
from maze.perception.program.network_program import JointEvaluation
from maze.train.trainers.common.learning import Key
from maze.train.trainers.common.replay_buffer.transitions import TensorDict
from maze.train.trainers.sac.losses import choice_logits

if TYPE_CHECKING:
    from maze.core.agent.torch_policy_output import PolicySubStepOutput

logger = logging.getLogger(__name__)

Alphas = dict[Key, Tensor]


@dataclass
class ActionDraw:
    """One action for each row of a batch, of one sub-step."""

    logits: TensorDict
    actions: TensorDict
    """By head; those of `Box` heads with gradients. Empty where expectations over all actions take their place."""
    log_probs: TensorDict
    """Of the drawn actions, by head."""
    expected_log_probs: TensorDict
    """Minus the entropy of each head `[B]`: exact for choices, that of the drawn action for `Box`."""

    @property
    def expected_log_prob(self) -> Tensor:
        """Of the joint action: the sum over heads.

        :return: `[batch]`.
        """
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

    :return: Bounded `Box` heads whose distribution is not: they train, but worse than with a squashed Gaussian.
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


class SACNetworks:
    """The networks of an actor-critic whose actors act in a fixed order.

    :param model: Policy and state-action critic, on their device.
    :param actors: The actors of an environment step, in their order.
    :param seed: Seed of the actions drawn for learning.
    :raises ConfigError: The critic is none of state-action values, or does not fit the actors.
    """

    def __init__(self, model: TorchActorCritic, actors: list[ActorID], seed: int | None) -> None:
        if not isinstance(model.critic, TorchStateActionCritic):
            raise ConfigError(
                f"model.critic: SAC needs a state-action critic, found a {type(model.critic).__name__}. Choose one "
                "with `critic=flatten_concat_state_action` or `critic=template_state_action`."
            )
        self.policy = model.policy
        self.critic: TorchStateActionCritic = model.critic
        self.device = model.device
        self.actors = actors
        self.spaces = [self.critic.action_spaces_dict[actor.step_key] for actor in actors]
        self.step_keys = list(dict.fromkeys(actor.step_key for actor in actors))
        self.is_shared = isinstance(self.critic, TorchSharedStateActionCritic)
        if self.is_shared and len(self.step_keys) < len(actors):
            raise ConfigError(
                f"model.critic: a shared state-action critic tells the actors of a step by their step keys, but some "
                f"of {actors} have the same. Use maze.perception.models.critics.StateActionCriticComposer."
            )
        self.shared_key: Key = next(iter(self.critic.networks))
        self.all_discrete = [
            self.critic.only_discrete_spaces[self.critic_key(position)] for position in range(len(actors))
        ]
        self._check_distributions()
        self._policy_networks = [JointEvaluation([self.policy.network_for(actor)]) for actor in actors]
        self.generator = seeded_generator(seed, model.device)

    def critic_key(self, position: int) -> Key:
        """The critic that judges an actor."""
        return self.shared_key if self.is_shared else self.actors[position].step_key

    def draw(self, position: int, observation: TensorDict) -> ActionDraw:
        """Actions of an actor, with gradients."""
        network = self._policy_networks[position]
        output = self.policy.substep_output_by(lambda x: network(x)[0], observation, self.actors[position])
        return draw_actions(output, self.spaces[position], self.generator, not self.all_discrete[position])

    def soft_value(
        self, positions: list[int], observations: list[TensorDict], draws: list[ActionDraw], alphas: Alphas
    ) -> Tensor:
        """Value of states by the target networks, with the entropy of all action heads, `[B]`."""
        keys = [self.actors[position].step_key for position in positions]

        def by_key(values: list[TensorDict]) -> dict[Key, TensorDict]:
            detached = [{name: tensor.detach() for name, tensor in entry.items()} for entry in values]
            return dict(zip(keys, detached, strict=True))

        value = self.critic.predict_next_q_values(
            by_key(observations),
            by_key([draw.actions for draw in draws]),
            by_key([draw.logits for draw in draws]),
            by_key([draw.log_probs for draw in draws]),
            alphas,
        )[self.critic_key(positions[0])]
        if isinstance(value, Tensor):
            return value
        # by head, each with its own entropy only: the mean of the values, and the entropies of all heads
        bonuses = {
            head: -alphas[key] * log_prob.detach()
            for key, draw in zip(keys, draws, strict=True)
            for head, log_prob in draw.expected_log_probs.items()
        }
        if len(bonuses) == 1:
            return next(iter(value.values()))
        bonus = torch.stack(list(bonuses.values()))
        return torch.stack([value[head] for head in bonuses]).mean(0) - bonus.mean(0) + bonus.sum(0)

    def _check_distributions(self) -> None:
        mapper = self.policy.distribution_mapper
        for space in {id(space): space for space in self.spaces}.values():
            classes = {head: mapper.distribution_class(head) for head in space.spaces}
            for head in check_distributions(space, classes):
                logger.warning(
                    "Action head `%s` is bounded, its distribution is not: SAC learns better with a squashed one. Set "
                    "model.distribution_mapper_config=[{action_head: %s, distribution: "
                    "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution}].",
                    head,
                    head,
                )
