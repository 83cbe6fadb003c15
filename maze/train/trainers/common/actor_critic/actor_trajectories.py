"""Trajectories of single actors, where actors come and go and a critic predicts the rewards of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from maze.core.agent.returns import Trajectories
from maze.core.env.structured_env import ActorID
from maze.core.rollout.rollout_columns import RolloutColumns, has_known_reward
from maze.train.trainers.common.actor_critic.sequences import Index, Place


def trajectories_of_actors(
    columns: RolloutColumns,
    values: Tensor,
    log_rhos: Tensor | None,
    ends: Mapping[Place, tuple[ActorID, float]],
    places: Sequence[Index | None],
    gamma: float,
    are_joint: bool,
) -> Trajectories:
    """Return one trajectory for each actor of each environment.

    The last decisions of a rollout may have no reward yet. They are not learned from; their values are the next values
    of the decisions before.

    :param columns: The rollout, with per-actor rewards.
    :param values: Values before each decision, `[n_ticks, n_envs]`.
    :param log_rhos: Logarithms of the importance weights, likewise; `None`: all are 0.
    :param ends: The next actor and its value at the ends of the rollout and of truncated episodes.
    :param places: Ticks and environments of the decisions of each policy network.
    :param gamma: Discount for each environment step.
    :param are_joint: Whether all actors get the rewards of a tick.
    """
    assert columns.actor_rewards is not None
    numbers: dict[ActorID, int] = {}
    actors = np.full(columns.rewards.shape, -1)  # -1: none acts
    for substep in columns.substeps.values():
        for actor, (rows, envs) in substep.entries_by_actor():
            actors[substep.ticks[rows], envs] = numbers.setdefault(actor, len(numbers))
    acts = actors[..., np.newaxis] == np.arange(len(numbers))
    known_ends = {place: (numbers[actor], value) for place, (actor, value) in ends.items() if actor in numbers}
    complete, terminated, truncated = columns.step_complete | columns.truncated, columns.terminated, columns.truncated
    weights = None if log_rhos is None else log_rhos.cpu().numpy()
    own_values, next_values, own_log_rhos = actor_trajectories(
        values.cpu().numpy(), acts, known_ends, terminated, truncated, complete, gamma, weights
    )
    is_known = has_known_reward(complete)
    is_last_known = complete & ~np.append(is_known[1:], np.zeros_like(is_known[:1]), axis=0)
    has_left = False if columns.actor_done is None else acts & columns.actor_done[..., np.newaxis]

    def joined(grid: np.ndarray) -> Tensor:
        """Join environments and actors in one axis; repeat what all actors of an environment have in common."""
        filled = np.broadcast_to(grid if grid.ndim == 3 else grid[..., np.newaxis], acts.shape)
        return torch.from_numpy(filled.reshape(len(filled), -1).copy()).to(values.device)

    return Trajectories(
        values=[joined(own_values)],
        next_values=[joined(next_values)],
        rewards=[joined(np.where(acts | are_joint, columns.actor_rewards[..., np.newaxis], np.float32(0.0)))],
        has_own_rewards=True,
        terminated=joined(terminated[..., np.newaxis] | has_left),
        truncated=joined(truncated | is_last_known),
        step_complete=joined(complete),
        acts=joined(acts),
        log_rhos=[] if log_rhos is None else [joined(own_log_rhos)],
        places=[(ticks, envs * len(numbers) + actors[ticks, envs]) for ticks, envs in filter(None, places)],
    )


def actor_trajectories(
    values: np.ndarray,
    acts: np.ndarray,
    ends: Mapping[tuple[int, int], tuple[int, float]],
    terminated: np.ndarray,
    truncated: np.ndarray,
    step_complete: np.ndarray,
    gamma: float,
    log_rhos: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the decisions of each actor as a trajectory of its own, however irregularly it acts.

    A tick in which another actor acts only passes time: where it completes an environment step, later rewards are
    discounted, and it changes nothing else. Return functions therefore treat all ticks alike.

    The value of an actor after the end of a rollout or of a truncated episode is known only if the actor acts next;
    otherwise its latest value stands in.

    :param values: `[n_ticks, n_envs]`, value of the actor that acted, before it did.
    :param acts: bool `[n_ticks, n_envs, n_actors]`, who acted.
    :param ends: Who was to act next, and its value: after the rollout by `(n_ticks, environment index)`, at the end
        of truncated episodes by the tick they ended with.
    :param terminated: `[n_ticks, n_envs]`, the episode ended by itself.
    :param truncated: `[n_ticks, n_envs]`, the episode was cut off.
    :param step_complete: `[n_ticks, n_envs]`, the tick completed an environment step.
    :param gamma: Discount for each environment step.
    :param log_rhos: `[n_ticks, n_envs]`, logarithm of each decision's importance weight; `None`: all are 1.
    :return: `[n_ticks, n_envs, n_actors]` each: an actor's value before its decision (where others act, the discounted
        value of what follows for it); its value after the tick; and the logarithm of the importance weight of all
        decisions from its own to the one before its next.
    """
    n_ticks = len(acts)
    own_values = np.where(acts, values[..., np.newaxis], 0).astype(values.dtype)
    acted_last = np.maximum.accumulate(np.where(acts, np.arange(n_ticks)[:, np.newaxis, np.newaxis], 0), axis=0)
    at_ends = np.take_along_axis(own_values, acted_last, axis=0)
    following = at_ends[-1].copy()
    for (tick, env), (actor, value) in ends.items():
        (following if tick == n_ticks else at_ends[tick])[env, actor] = value
    discounts = np.where(step_complete, gamma, 1.0)[..., np.newaxis].astype(values.dtype)
    weights = np.zeros_like(own_values)
    weight = np.zeros_like(following)
    next_values = np.empty_like(own_values)
    for tick in reversed(range(n_ticks)):
        following[terminated[tick]] = 0.0
        is_cut_off = truncated[tick] & ~terminated[tick]
        following[is_cut_off] = at_ends[tick, is_cut_off]
        next_values[tick] = following
        own_values[tick] = following = np.where(acts[tick], own_values[tick], discounts[tick] * following)
        if log_rhos is not None:
            weight[terminated[tick] | truncated[tick]] = 0.0
            weight += log_rhos[tick, :, np.newaxis]
            weights[tick] = np.where(acts[tick], weight, 0.0)
            weight[acts[tick]] = 0.0
    return own_values, next_values, weights
