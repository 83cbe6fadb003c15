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
    :return: Advantages ``[n_ticks, n_envs]``.
    """
    n_ticks, n_envs = rewards.shape
    advantages = np.empty_like(values)
    environments = np.arange(n_envs)
    following_value = last_values.astype(values.dtype, copy=True)
    following_advantage = np.zeros_like(following_value)
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
        delta = rewards[tick] + following_value[acting] - values[tick]
        advantages[tick] = delta + gae_lambda * following_advantage[acting]
        following_value[acting] = values[tick]
        following_advantage[acting] = advantages[tick]
    return advantages
