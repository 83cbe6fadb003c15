"""Advantages and returns as pure functions of time-major arrays.

All functions take NumPy arrays or torch tensors ``[n_steps, n_envs]`` and return what they were given. No gradient
flows through them.

``terminated`` and ``truncated`` say how an episode ended in a step. A terminated state has no future, so nothing is
bootstrapped. A truncated episode would have gone on, so it is bootstrapped from the value of its final observation,
which ``next_values`` holds. Nothing flows backwards over either boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

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
) -> ArrayOrTensor:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), one row for each environment step.

    :param rewards: Reward of each step.
    :param values: V of the observation before each step.
    :param next_values: V of the observation after each step; where truncated, of the episode's final observation
        (see :func:`next_values_from`). Ignored where terminated.
    :param terminated: The episode ended by itself in this step.
    :param truncated: The episode was cut off after this step.
    :param gamma: Discount for each step.
    :param gae_lambda: 0 gives the temporal difference error, 1 the discounted return minus the value.
    :return: Advantages.
    """
    return _discounted_sums(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)


def structured_gae(
    rewards: ArrayOrTensor,
    values: ArrayOrTensor,
    next_values: ArrayOrTensor,
    terminated: ArrayOrTensor,
    truncated: ArrayOrTensor,
    step_complete: ArrayOrTensor,
    gamma: float,
    gae_lambda: float,
) -> ArrayOrTensor:
    """Generalised advantage estimation on a stream of sub-steps, one row for each sub-step.

    ``gamma`` and ``gae_lambda`` count environment steps: they apply where a sub-step completed one, and sub-steps of
    the same environment step are not discounted against one another.

    :param step_complete: The sub-step completed an environment step.
    :return: Advantages; the other arguments are those of :func:`gae`.
    """
    return _discounted_sums(
        rewards, values, next_values, terminated, truncated, gamma, gae_lambda, step_complete=step_complete
    )


def next_values_from(
    values: ArrayOrTensor,
    last_values: ArrayOrTensor,
    final_values: Mapping[tuple[int, int], float] | None = None,
) -> ArrayOrTensor:
    """The value of the observation after each step.

    :param values: V of the observation before each step, ``[n_steps, n_envs]``.
    :param last_values: V of the observations after the last step, ``[n_envs]``.
    :param final_values: V of the final observations of truncated episodes, by ``(step, environment index)``.
    """
    if isinstance(values, torch.Tensor):
        next_tensor = torch.cat([values[1:], last_values.unsqueeze(0)]).detach().clone()
        for index, value in (final_values or {}).items():
            next_tensor[index] = value
        return next_tensor
    next_array = np.concatenate([values[1:], last_values[np.newaxis]])
    for index, value in (final_values or {}).items():
        next_array[index] = value
    return next_array


def _discounted_sums(
    rewards: ArrayOrTensor,
    values: ArrayOrTensor,
    next_values: ArrayOrTensor,
    terminated: ArrayOrTensor,
    truncated: ArrayOrTensor,
    gamma: float,
    gae_lambda: float,
    step_complete: ArrayOrTensor | None = None,
) -> ArrayOrTensor:
    if isinstance(values, torch.Tensor):
        advantages = _numpy_discounted_sums(
            _as_array(rewards),
            _as_array(values),
            _as_array(next_values),
            _as_array(terminated),
            _as_array(truncated),
            gamma,
            gae_lambda,
            None if step_complete is None else _as_array(step_complete),
        )
        return torch.from_numpy(advantages).to(values.device)
    return _numpy_discounted_sums(rewards, values, next_values, terminated, truncated, gamma, gae_lambda, step_complete)


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array


def _numpy_discounted_sums(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    gae_lambda: float,
    step_complete: np.ndarray | None,
) -> np.ndarray:
    shapes = {array.shape for array in (rewards, values, next_values, terminated, truncated)}
    if len(shapes) > 1:
        raise ValueError(f"Rewards, values, next values, terminated and truncated differ in shape: {sorted(shapes)}.")
    terminated = terminated.astype(bool, copy=False)
    goes_on = ~(terminated | truncated.astype(bool, copy=False))
    dtype = values.dtype
    discount = np.full(values.shape, gamma, dtype)
    decay = np.full(values.shape, gamma * gae_lambda, dtype)
    if step_complete is not None:
        within_step = ~step_complete.astype(bool, copy=False)
        discount[within_step] = 1.0
        decay[within_step] = 1.0
    decay *= goes_on
    # `where`, because the value after a termination means nothing and need not even be finite
    deltas = rewards + discount * np.where(terminated, 0.0, next_values).astype(dtype, copy=False) - values
    advantages = np.ascontiguousarray(deltas, dtype=dtype)
    if not len(advantages):
        return advantages
    following = advantages[-1]
    carried = np.empty_like(following)
    for advantage, factor in zip(advantages[-2::-1], decay[-2::-1], strict=True):
        np.multiply(factor, following, out=carried)
        np.add(advantage, carried, out=advantage)
        following = advantage
    return advantages
