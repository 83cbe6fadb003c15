"""Targets of the critics and losses of the policy for a batch.

With a step critic, the value of a sub-step is its reward plus the value of the next sub-step of the same environment
step, undiscounted; the last one is followed by the discounted value of the next environment step. A shared critic
values environment steps as a whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional

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
from maze.train.trainers.common.learning import Key, mean_of
from maze.train.trainers.common.replay_buffer.transitions import TensorDict, TransitionBatch

if TYPE_CHECKING:
    from maze.core.agent.torch_policy_output import PolicySubStepOutput


DISCRETE_SHARE = 0.98


def soft_bellman_target(reward: Tensor, next_value: Tensor, ended: Tensor, discount: float) -> Tensor:
    """Compute the target of a state-action value: `reward + discount * next_value`.

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
    """Return the number of actions that are not masked, `[...]`."""
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
    """Draw from a policy's output.

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
    """Refuse heads whose actions cannot be differentiated.

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
                f"model.critic: a shared state-action critic distinguishes actors by their step keys, but some of "
                f"{actors} have the same. Use maze.perception.models.critics.StateActionCriticComposer."
            )
        self.shared_key: Key = next(iter(self.critic.networks))
        self.all_discrete = [
            self.critic.only_discrete_spaces[self.critic_key(position)] for position in range(len(actors))
        ]
        self._check_distributions()
        self.generator = seeded_generator(seed, model.device)

    def critic_key(self, position: int) -> Key:
        """Return the critic that judges an actor."""
        return self.shared_key if self.is_shared else self.actors[position].step_key

    def draw(self, position: int, observation: TensorDict) -> ActionDraw:
        """Actions of an actor, with gradients."""
        output = self.policy.compute_substep_policy_output(observation, self.actors[position])
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


# -- critics ------------------------------------------------------------------------------------------


@dataclass
class CriticTarget:
    """Of one output of a critic."""

    key: Key
    q_values: list[Tensor]
    """`[B]` by each of its networks, with gradients."""
    target: Tensor
    weight: Tensor | None
    """0 or 1: which rows count; None: all of them."""


def critic_targets(
    networks: SACNetworks, batch: TransitionBatch, draws: list[ActionDraw], alphas: Alphas, gamma: float
) -> list[CriticTarget]:
    """Values and targets of all outputs of the critic.

    :param draws: Actions for the observations of the batch, by actor.
    :param gamma: Discount per environment step.
    """
    if networks.is_shared:
        return _of_shared_critic(networks, batch, alphas, gamma)
    next_values = [_next_value(networks, batch.next_observations[0], alphas)]
    next_values += [
        networks.soft_value([position], [batch.observations[position]], [draws[position]], alphas)
        for position in range(1, len(networks.actors))
    ]
    found = []
    last = len(networks.actors) - 1
    for position, actor in enumerate(networks.actors):
        if position == last:
            ended, next_value, discount = batch.terminated, next_values[0], gamma
        else:  # the rest of the step follows, unless the episode ended here
            ended, next_value, discount = batch.ended_at(position), next_values[position + 1], 1.0
        target = soft_bellman_target(batch.rewards[:, position], next_value, ended, discount)
        q_values = networks.critic.predict_q_values(
            {actor.step_key: batch.observations[position]}, {actor.step_key: batch.actions[position]}, True
        )[actor.step_key]
        found += _by_head(actor.step_key, q_values, target, batch.acted(position))
    return found


def _of_shared_critic(
    networks: SACNetworks, batch: TransitionBatch, alphas: Alphas, gamma: float
) -> list[CriticTarget]:
    positions = list(range(len(networks.actors)))
    with torch.no_grad():
        draws = [networks.draw(position, batch.next_observations[position]) for position in positions]
    next_value = networks.soft_value(positions, batch.next_observations, draws, alphas)
    target = soft_bellman_target(batch.rewards.sum(-1), next_value, batch.terminated, gamma)
    # what followed has to be known, unless nothing did
    weight = None if batch.has_next_step is None else (batch.has_next_step | batch.terminated).float()
    keys = [actor.step_key for actor in networks.actors]
    q_values = networks.critic.predict_q_values(
        dict(zip(keys, batch.observations, strict=True)), dict(zip(keys, batch.actions, strict=True)), True
    )[networks.shared_key]
    return _by_head(networks.shared_key, q_values, target, weight)


@torch.no_grad()
def _next_value(networks: SACNetworks, observation: TensorDict, alphas: Alphas) -> Tensor:
    return networks.soft_value([0], [observation], [networks.draw(0, observation)], alphas)


def _by_head(key: Key, q_values: list[Any], target: Tensor, weight: Tensor | None) -> list[CriticTarget]:
    """Where all heads are discrete, each has values of its own, for the same target."""
    if not isinstance(q_values[0], dict):
        return [CriticTarget(key, q_values, target, weight)]
    return [CriticTarget(key, [of_network[head] for of_network in q_values], target, weight) for head in q_values[0]]


# -- policy -------------------------------------------------------------------------------------------


def policy_losses(
    networks: SACNetworks, batch: TransitionBatch, draws: list[ActionDraw], alphas: Alphas
) -> list[tuple[int, Tensor]]:
    """Position of each actor and its loss.

    :param draws: Actions for the observations of the batch, with gradients, by actor.
    :return: Losses are scalars `[]`.
    """
    n_actors = len(networks.actors)
    groups = [list(range(n_actors))] if networks.is_shared else [[position] for position in range(n_actors)]
    losses: list[tuple[int, Tensor]] = []
    for positions in groups:
        of_group = _discrete_losses if networks.all_discrete[positions[0]] else _joint_losses
        losses += of_group(networks, batch, draws, alphas, positions)
    return losses


def _discrete_losses(
    networks: SACNetworks, batch: TransitionBatch, draws: list[ActionDraw], alphas: Alphas, positions: list[int]
) -> list[tuple[int, Tensor]]:
    """Losses where a critic values all actions at once."""
    observations = _by_step_key(networks, positions, batch.observations)
    with torch.no_grad():
        first, second = networks.critic.predict_q_values(observations, {key: {} for key in observations}, False)[
            networks.critic_key(positions[0])
        ]
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    found = []
    for position in positions:
        alpha, weight = alphas[networks.actors[position].step_key], batch.acted(position)
        losses = [
            discrete_policy_loss(draws[position].logits[head], torch.minimum(first[head], second[head]), alpha, weight)
            for head in networks.spaces[position].spaces
        ]
        found.append((position, sum(losses[1:], losses[0])))
    return found


def _joint_losses(
    networks: SACNetworks, batch: TransitionBatch, draws: list[ActionDraw], alphas: Alphas, positions: list[int]
) -> list[tuple[int, Tensor]]:
    """Losses where a critic values the drawn joint action; the value counts for the first of the sub-steps."""
    observations = _by_step_key(networks, positions, batch.observations)
    drawn = _by_step_key(networks, positions, [draw.actions for draw in draws])
    critic_key = networks.critic_key(positions[0])

    def value(observed: Mapping[Key, TensorDict], actions: dict[Key, TensorDict]) -> Tensor:
        first, second = networks.critic.predict_q_values(dict(observed), actions, True)[critic_key]
        assert isinstance(first, Tensor)
        assert isinstance(second, Tensor)
        return torch.minimum(first, second)

    losses = []
    weight = batch.acted(positions[-1])
    for index, (key, position) in enumerate(zip(observations, positions, strict=True)):
        draw, space = draws[position], networks.spaces[position]
        objective = value(observations, drawn) if index == 0 else torch.zeros((), device=networks.device)

        def alternatives(actions: TensorDict, key: Key = key) -> Tensor:
            n_options = len(next(iter(actions.values())))

            def for_each(tensors: TensorDict) -> TensorDict:
                # one batch dimension: networks with convolutions or normalization take no other
                return {
                    name: tensor.detach().expand(n_options, *tensor.shape).flatten(0, 1)
                    for name, tensor in tensors.items()
                }

            expanded = {step_key: for_each(entry) for step_key, entry in observations.items()}
            others = {step_key: for_each(entry) for step_key, entry in drawn.items()}
            own = {name: tensor.flatten(0, 1) for name, tensor in actions.items()}
            return value(expanded, {**others, key: own}).view(n_options, -1)

        of_choices = choice_values(space, draw.logits, draw.actions, alternatives)
        if of_choices is not None:
            objective = objective + of_choices - of_choices.detach()  # contributes its gradient only
        losses.append((position, continuous_policy_loss(draw.expected_log_prob, objective, alphas[key], weight)))
    return losses


def _by_step_key(networks: SACNetworks, positions: list[int], values: list[TensorDict]) -> dict[Key, TensorDict]:
    return {networks.actors[position].step_key: values[position] for position in positions}
