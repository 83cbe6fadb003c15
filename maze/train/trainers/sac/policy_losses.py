"""What the policy is to make small, by actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from maze.train.trainers.common.replay_buffer.transitions import TensorDict, TransitionBatch
from maze.train.trainers.sac.action_draws import ActionDraw
from maze.train.trainers.sac.choice_gradients import choice_values
from maze.train.trainers.sac.losses import continuous_policy_loss, discrete_policy_loss
from maze.train.trainers.sac.sac_networks import Alphas, SACNetworks
from maze.train.trainers.sac.substep_rows import acted

Key = Any


def policy_losses(
    networks: SACNetworks, batch: TransitionBatch, draws: list[ActionDraw], alphas: Alphas
) -> list[tuple[int, Tensor]]:
    """Position of each actor and its loss.

    :param draws: Actions for the observations of the batch, with gradients, by actor.
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
        alpha, weight = alphas[networks.actors[position].step_key], acted(batch, position)
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
        with networks.critic.gradients_of_actions_alone():
            first, second = networks.critic.predict_q_values(dict(observed), actions, True)[critic_key]
        assert isinstance(first, Tensor)
        assert isinstance(second, Tensor)
        return torch.minimum(first, second)

    losses = []
    weight = acted(batch, positions[-1])
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
