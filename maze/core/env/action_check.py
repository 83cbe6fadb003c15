"""Says what is wrong with an action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces


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
