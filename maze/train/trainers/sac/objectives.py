"""What the critics and the policy are to learn from a batch.

With a step critic, the value of a sub-step is its reward plus the value of the next sub-step of the same environment
step, undiscounted; the last one is followed by the discounted value of the next environment step. A shared critic
values environment steps as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maze.train.trainers.common.learning import Key
from maze.train.trainers.common.replay_buffer.transitions import TensorDict, TransitionBatch
from maze.train.trainers.sac.losses import (
    choice_values,
    continuous_policy_loss,
    discrete_policy_loss,
    soft_bellman_target,
)
from maze.train.trainers.sac.sac_networks import ActionDraw, Alphas, SACNetworks

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
        networks.soft_value([position], [known_observations(batch, position)], [draws[position]], alphas)
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
        draws = [networks.draw(position, known_next_observations(batch, position)) for position in positions]
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


# -- rows: episodes may end in the middle of an environment step ---------------------------------------


def known_observations(batch: TransitionBatch, position: int) -> TensorDict:
    """What the actor saw; where it saw nothing, what it saw in another row, so that it is valid at least."""
    return _known(batch.observations[position], _observed(batch, position))


def known_next_observations(batch: TransitionBatch, position: int) -> TensorDict:
    """The same of the environment step after."""
    return _known(batch.next_observations[position], _observed_next(batch, position))


def _observed(batch: TransitionBatch, position: int) -> Tensor | None:
    """Where there is an observation of the actor: it acted, or the episode was cut off when it was to act."""
    if batch.n_substeps is None or position == 0:
        return None
    return (batch.n_substeps > position) | ((batch.n_substeps == position) & ~batch.terminated)


def _observed_next(batch: TransitionBatch, position: int) -> Tensor | None:
    """Where there is an observation of the actor in the next step, or at least in this one."""
    if batch.n_substeps is None or batch.has_next_step is None or position == 0:
        return None
    return batch.has_next_step | (batch.n_substeps > position)


def _known(observation: TensorDict, is_known: Tensor | None) -> TensorDict:
    if is_known is None or not bool(is_known.any()):
        return observation
    rows = torch.arange(len(is_known), device=is_known.device)
    rows = torch.where(is_known, rows, is_known.to(torch.uint8).argmax())
    return {key: tensor[rows] for key, tensor in observation.items()}
