"""Holds observations and actions against their spaces."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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


def action_problem(action: Any, space: spaces.Space[Any]) -> str | None:
    """What makes an action no element of its space; None: nothing.

    :param action: The action, perhaps with arrays of one number where the space has numbers.
    :param space: The action space of the actor that acted.
    """
    if not isinstance(space, spaces.Dict):
        return _entry_problem(action, space)
    if not isinstance(action, Mapping):
        return f"an action must be a dictionary with the keys {list(space)}, got {action!r}"
    missing = [key for key in space if key not in action]
    if missing:
        return f"an action must have the keys {list(space)}, got the keys {list(action)}"
    problems = ((key, _entry_problem(action[key], entry)) for key, entry in space.items())
    return next((f"action `{key}`: {problem}" for key, problem in problems if problem is not None), None)


def _entry_problem(value: Any, space: spaces.Space[Any]) -> str | None:
    expected = f"expected an element of {space}, got {value!r}"
    if isinstance(space, spaces.Dict):
        return action_problem(value, space)
    if space.shape is None or space.dtype is None:
        return None if space.contains(value) else expected
    try:
        array = np.asarray(value)
        converted = array.astype(space.dtype).reshape(space.shape)
        is_element = np.can_cast(array.dtype, space.dtype, "same_kind")
        is_element = is_element and space.contains(converted[()] if space.shape == () else converted)
    except (TypeError, ValueError):
        is_element = False
    return None if is_element else expected


_minimum, _maximum = np.minimum, np.maximum  # once per environment step: looking the names up shows


class ActionBounds:
    """The bounded `Box` heads of an action space, and actions clipped to them.

    Distributions without bounds draw actions beyond those of a space. Their log-probabilities are those of the draw;
    what the environment carries out, and what a replay buffer holds, is the clipped action.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        heads = space.spaces if isinstance(space, spaces.Dict) else {}
        self.by_head = {
            head: (entry.low, entry.high)
            for head, entry in heads.items()
            if isinstance(entry, spaces.Box) and bool(entry.bounded_below.any() or entry.bounded_above.any())
        }
        """Lower and upper bounds of the bounded heads."""
        self._items = tuple(self.by_head.items())

    def __bool__(self) -> bool:
        """Whether there is anything to clip."""
        return bool(self.by_head)

    def clip(self, action: Any) -> Any:
        """The action with its heads clipped; the given one stays as it is. NaN stays NaN, so that it is noticed.

        :param action: A dictionary. What is none, and heads of a wrong shape, is for others to refuse.
        """
        if not isinstance(action, dict):
            return action
        clipped = action.copy()
        for head, bounds in self._items:
            value = action.get(head)
            if value is None:
                continue
            low, high = bounds
            if value.__class__ is not np.ndarray or value.shape != low.shape:
                value = np.asarray(value)
                if value.size != low.size:
                    continue
                low, high = low.reshape(value.shape), high.reshape(value.shape)
            clipped[head] = _minimum(_maximum(value, low), high)
        return clipped

    def clip_rows(self, head: str, values: np.ndarray) -> np.ndarray:
        """Clipped values of one head.

        :param head: The head, bounded or not.
        :param values: `[..., *shape]`
        """
        bounds = self.by_head.get(head)
        return values if bounds is None else _minimum(_maximum(values, bounds[0]), bounds[1])
