"""Advantages where every actor has a reward and a sequence of decisions of its own."""

from __future__ import annotations

import numpy as np


def actor_stream_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    actors: np.ndarray,
    *,
    last_values: np.ndarray,
    final_values: dict[tuple[int, int], np.ndarray],
    terminated: np.ndarray,
    truncated: np.ndarray,
    step_complete: np.ndarray,
    gamma: float,
    gae_lambda: float,
    actor_done: np.ndarray | None = None,
) -> np.ndarray:
    """Generalized advantage estimation along the decisions of each actor, however irregularly it acts.

    Between two decisions of an actor its rewards add up, discounted by the environment steps completed in between; the
    value that follows a decision is that of the same actor's next one.

    :param rewards: ``[n_ticks, n_envs]``, the reward of the actor that acted.
    :param values: ``[n_ticks, n_envs]``, its value before acting.
    :param actors: ``[n_ticks, n_envs]``, index of the actor that acted.
    :param last_values: ``[n_envs, n_actors]``, each actor's value after the last tick.
    :param final_values: Each actor's value ``[n_actors]`` at the end of truncated episodes, by (tick, environment).
    :param terminated: ``[n_ticks, n_envs]``, the episode ended by itself.
    :param truncated: ``[n_ticks, n_envs]``, the episode was cut off.
    :param step_complete: ``[n_ticks, n_envs]``, the tick completed an environment step, which is what is discounted.
    :param actor_done: ``[n_ticks, n_envs]``, the actor left for good: nothing follows for it.
    :return: Advantages ``[n_ticks, n_envs]``; zero where :func:`has_known_reward` says no.
    """
    n_ticks, n_envs = rewards.shape
    advantages = np.empty_like(values)
    environments = np.arange(n_envs)
    following_value = last_values.astype(values.dtype, copy=True)
    following_advantage = np.zeros_like(following_value)
    is_known = has_known_reward(step_complete)
    for tick in reversed(range(n_ticks)):
        done = terminated[tick] | truncated[tick]
        following_advantage[done] = 0.0
        following_value[done] = 0.0
        for env in np.flatnonzero(truncated[tick] & ~terminated[tick]):
            following_value[env] = final_values[tick, int(env)]
        discount = np.where(step_complete[tick] | done, gamma, 1.0)[:, np.newaxis].astype(values.dtype)
        following_value *= discount
        following_advantage *= discount
        acting = (environments, actors[tick])
        if actor_done is not None:
            left = (environments[actor_done[tick]], actors[tick][actor_done[tick]])
            following_value[left] = following_advantage[left] = 0.0
        delta = rewards[tick] + following_value[acting] - values[tick]
        advantages[tick] = np.where(is_known[tick], delta + gae_lambda * following_advantage[acting], 0.0)
        following_value[acting] = values[tick]
        following_advantage[acting] = advantages[tick]
    return advantages


def has_known_reward(step_complete: np.ndarray) -> np.ndarray:
    """Where actors have been told their rewards, which is when a step is completed: not in one that is under way still.

    :param step_complete: ``[n_ticks, n_envs]``, the tick completed an environment step.
    """
    known: np.ndarray = np.logical_or.accumulate(step_complete[::-1], axis=0)[::-1]
    return known
