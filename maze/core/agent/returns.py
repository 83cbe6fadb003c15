"""Advantages and returns as pure functions of time-major arrays.

All functions take NumPy arrays or torch tensors `[n_steps, n_envs]` and return what they were given. No gradient
flows through them.

`terminated` and `truncated` say how an episode ended in a step. A terminated state has no future, so nothing is
bootstrapped. A truncated episode would have gone on, so it is bootstrapped from the value of its final observation,
which `next_values` holds. Nothing flows backwards over either boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

ArrayOrTensor = TypeVar("ArrayOrTensor", np.ndarray, torch.Tensor)


def gae(
    rewards: ArrayOrTensor,
    values: ArrayOrTensor,
    next_values: ArrayOrTensor,
    terminated: ArrayOrTensor,
    truncated: ArrayOrTensor,
    gamma: float,
    gae_lambda: float,
    step_complete: ArrayOrTensor | None = None,
    acts: ArrayOrTensor | None = None,
) -> ArrayOrTensor:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), one row for each environment step or sub-step.

    `gamma` and `gae_lambda` count environment steps: they apply where a sub-step completed one, and sub-steps of
    the same environment step are not discounted against one another.

    :param rewards: Reward of each step.
    :param values: V of the observation before each step.
    :param next_values: V of the observation after each step; where truncated, of the episode's final observation
        (see :func:`next_values_from`). Ignored where terminated.
    :param terminated: The episode ended by itself in this step.
    :param truncated: The episode was cut off after this step.
    :param gamma: Discount for each environment step.
    :param gae_lambda: 0 gives the temporal difference error, 1 the discounted return minus the value.
    :param step_complete: The sub-step completed an environment step; `None`: each of them did.
    :param acts: Where `gae_lambda` applies instead, in the streams of single actors (:func:`actor_streams`).
    :return: Advantages.
    :raises ValueError: The arrays differ in shape.
    """
    given: Any = (rewards, values, next_values, terminated, truncated, step_complete, acts)
    if isinstance(values, torch.Tensor):
        arrays: Any = [None if tensor is None else tensor.detach().cpu().numpy() for tensor in given]
        arguments: list[Any] = [*arrays[:5], gamma, gae_lambda, *arrays[5:]]
        return torch.from_numpy(gae(*arguments)).to(values.device)
    shapes = {array.shape for array in given[:5]}
    if len(shapes) > 1:
        raise ValueError(f"Rewards, values, next values, terminated and truncated differ in shape: {sorted(shapes)}.")
    terminated = terminated.astype(bool, copy=False)
    dtype = values.dtype
    discount = np.full(values.shape, gamma, dtype)
    decay = np.full(values.shape, gamma * gae_lambda, dtype)
    if step_complete is not None:
        within_step = ~step_complete.astype(bool, copy=False)
        discount[within_step] = 1.0
        decay[within_step] = 1.0
    if acts is not None:
        decay = discount * np.where(acts, gae_lambda, 1.0).astype(dtype)
    decay *= ~(terminated | truncated.astype(bool, copy=False))
    # `where`, because the value after a termination means nothing and need not even be finite
    deltas = rewards + discount * np.where(terminated, 0.0, next_values).astype(dtype, copy=False) - values
    advantages = np.ascontiguousarray(deltas, dtype=dtype)
    carried = np.empty(advantages.shape[1:], dtype)
    for advantage, following, factor in zip(advantages[-2::-1], advantages[:0:-1], decay[-2::-1], strict=True):
        np.multiply(factor, following, out=carried)
        np.add(advantage, carried, out=advantage)
    return advantages


def next_values_from(
    values: ArrayOrTensor,
    last_values: ArrayOrTensor,
    final_values: Mapping[tuple[int, int], float] | None = None,
) -> ArrayOrTensor:
    """The value of the observation after each step.

    :param values: V of the observation before each step, `[n_steps, n_envs]`.
    :param last_values: V of the observations after the last step, `[n_envs]`.
    :param final_values: V of the final observations of truncated episodes, by `(step, environment index)`.
    """
    following: Any = (values[1:], last_values[None])
    is_tensor = isinstance(values, torch.Tensor)
    next_values: Any = torch.cat(following).detach() if is_tensor else np.concatenate(following)
    for index, value in (final_values or {}).items():
        next_values[index] = value
    return next_values  # type: ignore[no-any-return]  # of the kind of the values


class ActorStreams(NamedTuple):
    """What happens to each actor of each environment, `[n_ticks, n_envs, n_actors]`."""

    values: np.ndarray
    """Its value before its decision; where others act, the discounted value of what follows for it."""
    next_values: np.ndarray
    """Its value after the tick."""
    log_rhos: np.ndarray
    """Logarithm of the importance weight of all decisions from its own to the one before its next."""


def actor_streams(
    values: np.ndarray,
    acts: np.ndarray,
    ends: Mapping[tuple[int, int], tuple[int, float]],
    terminated: np.ndarray,
    truncated: np.ndarray,
    step_complete: np.ndarray,
    gamma: float,
    log_rhos: np.ndarray | None = None,
) -> ActorStreams:
    """The decisions of each actor as a stream of its own, however irregularly it acts.

    A tick in which another actor acts only passes time: where it completes an environment step, what follows is
    discounted, and it changes nothing else. So estimators of returns need not know of it.

    Nobody knows an actor's value after the end of a rollout or of a truncated episode unless it is the one to act
    next; its latest value stands in.

    :param values: `[n_ticks, n_envs]`, value of the actor that acted, before it did.
    :param acts: bool `[n_ticks, n_envs, n_actors]`, who acted.
    :param ends: Who was to act next, and its value: after the rollout by `(n_ticks, environment index)`, at the end
        of truncated episodes by the tick they ended with.
    :param terminated: `[n_ticks, n_envs]`, the episode ended by itself.
    :param truncated: `[n_ticks, n_envs]`, the episode was cut off.
    :param step_complete: `[n_ticks, n_envs]`, the tick completed an environment step.
    :param gamma: Discount for each environment step.
    :param log_rhos: `[n_ticks, n_envs]`, logarithm of each decision's importance weight; `None`: all are 1.
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
    return ActorStreams(own_values, next_values, weights)


def has_known_reward(step_complete: np.ndarray) -> np.ndarray:
    """Where actors have been told their rewards, which is when a step is completed: not in one that is under way still.

    :param step_complete: `[n_ticks, n_envs]`, the tick completed an environment step.
    """
    known: np.ndarray = np.logical_or.accumulate(step_complete[::-1], axis=0)[::-1]
    return known
