"""Advantages and returns as pure functions of time-major arrays.

All functions take NumPy arrays or torch tensors `[n_steps, n_envs]` and return what they were given. No gradient
flows through them.

`terminated` and `truncated` are how an episode ended in a step. A terminated state has no future, so nothing is
bootstrapped. A truncated episode would have continued, so it is bootstrapped from the value of its final observation,
which `next_values` holds. Nothing flows backwards over either boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

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
    """Estimate generalised advantages (Schulman et al. 2016, eq. 16), one row for each environment step or sub-step.

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
    :param acts: Where `gae_lambda` applies instead, in trajectories of single actors.
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
    final_values: Mapping[tuple[int, int], Any] | None = None,
) -> ArrayOrTensor:
    """Return the value of the observation after each step.

    :param values: V of the observation before each step, `[n_steps, n_envs, ...]`.
    :param last_values: V of the observations after the last step, `[n_envs, ...]`.
    :param final_values: V of the final observations of truncated episodes, by `(step, environment index)`.
    """
    following: Any = (values[1:], last_values[None])
    is_tensor = isinstance(values, torch.Tensor)
    next_values: Any = torch.cat(following).detach() if is_tensor else np.concatenate(following)
    for index, value in (final_values or {}).items():
        next_values[index] = value
    return next_values  # type: ignore[no-any-return]  # of the kind of the values
