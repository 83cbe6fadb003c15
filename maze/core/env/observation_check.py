"""Checks that observations are what the observation space promises."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.structured_env import StepKeyType
from maze.core.errors import EnvironmentContractError


def check_observation(observation: Any, space: spaces.Space[Any], env_name: str, step_key: StepKeyType) -> None:
    """Raises where an observation does not fit its space; warns where only its values are out of range.

    :param observation: What a conversion gave.
    :param space: What it promised.
    :param env_name: Environment, for messages.
    :param step_key: Sub-step, for messages.
    """
    if not isinstance(space, spaces.Dict):
        return
    where = f"{env_name}, sub-step {step_key!r}"
    if not isinstance(observation, dict):
        raise EnvironmentContractError(
            f"{where}: an observation must be a dictionary with the keys {list(space)}, got {observation!r}."
        )
    if observation.keys() != space.keys():
        raise EnvironmentContractError(
            f"{where}: the observation has the keys {sorted(observation)}, but its space has {sorted(space)}."
        )
    for key, entry in space.items():
        _check_entry(observation[key], entry, f"{where}, observation `{key}`")


def _check_entry(value: Any, space: spaces.Space[Any], where: str) -> None:
    if space.shape is None or space.dtype is None:
        return
    array = np.asarray(value)
    if array.shape != space.shape:
        raise EnvironmentContractError(f"{where}: expected the shape {space.shape}, got {array.shape}.")
    if not np.can_cast(array.dtype, space.dtype, casting="same_kind"):
        raise EnvironmentContractError(
            f"{where}: expected values of type {space.dtype}, got {array.dtype}, which cannot be converted safely."
        )
    if not space.contains(array.astype(space.dtype)):
        warnings.warn(
            f"{where}: values from {array.min()} to {array.max()} are not all in the space {space}.",
            UserWarning,
            stacklevel=6,
        )
