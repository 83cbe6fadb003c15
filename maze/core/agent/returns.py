"""Advantages and returns: pure functions of time-major arrays, and return functions of whole trajectories.

Pure functions take NumPy arrays or torch tensors `[n_steps, n_envs]` and return what they were given. No gradient
flows through them.

`terminated` and `truncated` are how an episode ended in a step. A terminated state has no future, so nothing is
bootstrapped. A truncated episode would have continued, so it is bootstrapped from the value of its final observation,
which `next_values` holds. Nothing flows backwards over either boundary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from maze.core.annotations import override

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
    :param truncated: The episode was truncated after this step.
    :param gamma: Discount for each environment step.
    :param gae_lambda: 0 gives the temporal difference error, 1 the discounted return minus the value.
    :param step_complete: The sub-step completed an environment step; `None`: each of them did.
    :param acts: Mask of the steps to which `gae_lambda` applies instead, in trajectories of single actors.
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
    sum_up(advantages, decay)
    return advantages


def sum_up(terms: np.ndarray, decay: np.ndarray) -> None:
    """Add up terms from the last step backwards, in place: `terms[t] += decay[t] * terms[t + 1]`.

    :param terms: Terms of each step, `[n_steps, ...]`.
    :param decay: Factors of the sums that follow, of the same shape.
    """
    carried = np.empty_like(terms[0])
    for term, following, factor in zip(terms[-2::-1], terms[:0:-1], decay[-2::-1], strict=True):
        np.multiply(factor, following, out=carried)
        np.add(term, carried, out=term)


def next_values_from(
    values: ArrayOrTensor, last_values: ArrayOrTensor, final_values: Mapping[tuple[int, int], Any] | None = None
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


@dataclass
class Trajectories:
    """Inputs of a return function, time-major `[n_times, n_trajectories]`, without gradients.

    Lists hold an entry for each output of the critic, or (rewards) for each sub-step of an environment step.

    :param rewards: Rewards by sub-step of an environment step.
    :param terminated: Where an episode terminated, bool.
    :param truncated: Where an episode was truncated, bool; never together with `terminated`.
    """

    values: list[torch.Tensor]
    """Value before each decision."""
    next_values: list[torch.Tensor]
    """Value after it, of the final observation where an episode was truncated. Undefined where one terminated."""
    rewards: list[torch.Tensor]
    has_own_rewards: bool
    """Whether the values of a sub-step predict its own entry of `rewards`; otherwise they predict their sum."""
    terminated: torch.Tensor
    truncated: torch.Tensor
    step_complete: torch.Tensor | None = None
    """Entries that complete an environment step, so that the discount applies; `None`: all."""
    acts: torch.Tensor | None = None
    """Entries with decisions; `None`: all. Each actor has a trajectory of its own otherwise."""
    log_rhos: list[torch.Tensor] = field(default_factory=list)
    """Logarithms of the importance weights by sub-step; empty for on-policy returns."""
    places: list[tuple[np.ndarray, np.ndarray] | None] = field(default_factory=list)
    """For each policy network, time and trajectory of its decisions; `None`: everywhere, in the order of time."""


@dataclass
class Returns:
    """Advantages and targets, shaped like the trajectories."""

    advantages: list[torch.Tensor]
    """By sub-step."""
    targets: list[torch.Tensor]
    """By output of the critic."""


class ReturnFunction(ABC):
    """Estimate advantages and targets of values."""

    gamma: float
    is_off_policy: bool = False
    """Whether it needs importance weights: rollouts then hold the logits of the policies that acted."""

    @abstractmethod
    def __call__(self, trajectories: Trajectories) -> Returns:
        """Compute the returns of all decisions."""


@dataclass(frozen=True)
class GAE(ReturnFunction):
    """Generalised advantage estimation (Schulman et al. 2016)."""

    gamma: float
    """Discount for each environment step."""
    gae_lambda: float
    """0: one-step targets, 1: discounted returns."""

    @override(ReturnFunction)
    def __call__(self, trajectories: Trajectories) -> Returns:
        rewards, values = trajectories.rewards, trajectories.values
        of_values = rewards if trajectories.has_own_rewards else [sum(rewards[1:], rewards[0])]
        advantages = [
            gae(
                *(reward, value, next_value, trajectories.terminated, trajectories.truncated),
                *(self.gamma, self.gae_lambda, trajectories.step_complete, trajectories.acts),
            )
            for reward, value, next_value in zip(of_values, values, trajectories.next_values, strict=False)
        ]
        targets = [advantage + value for advantage, value in zip(advantages, values, strict=False)]
        if len(targets) < len(values):  # a delta critic: all sub-steps lead to the same next step
            targets *= len(values)
            advantages += [target - value for target, value in zip(targets[1:], values[1:], strict=True)]
        if len(advantages) < len(rewards):  # a shared critic
            advantages *= len(rewards)
        return Returns(advantages, targets)
