"""What the critics say of a batch, and what they should say.

With a step critic, the value of a sub-step is its reward plus the value of the next sub-step of the same environment
step, undiscounted; the last one is followed by the discounted value of the next environment step. A shared critic
values environment steps as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maze.train.trainers.common.replay_buffer.transitions import TensorDict, TransitionBatch
from maze.train.trainers.sac.action_draws import ActionDraw
from maze.train.trainers.sac.losses import soft_bellman_target
from maze.train.trainers.sac.sac_networks import Alphas, SACNetworks
from maze.train.trainers.sac.substep_rows import acted, ended_at, known_next_observations, known_observations

Key = Any


@dataclass
class CriticTarget:
    """Of one output of a critic."""

    key: Key
    q_values: list[Tensor]
    """``[B]`` by each of its networks, with gradients."""
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
            ended, next_value, discount = ended_at(batch, position), next_values[position + 1], 1.0
        target = soft_bellman_target(batch.rewards[:, position], next_value, ended, discount)
        q_values = networks.critic.predict_q_values(
            {actor.step_key: batch.observations[position]}, {actor.step_key: batch.actions[position]}, True
        )[actor.step_key]
        found += _by_head(actor.step_key, q_values, target, acted(batch, position))
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
