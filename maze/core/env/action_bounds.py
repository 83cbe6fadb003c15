"""Bounds of continuous actions."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

_minimum, _maximum = np.minimum, np.maximum  # once per environment step: looking the names up shows


class ActionBounds:
    """The bounded ``Box`` heads of an action space, and actions clipped to them.

    Distributions without bounds draw actions beyond those of a space. Their log-probabilities are those of the draw;
    what the environment carries out, and what a replay buffer holds, is the clipped action.

    :param space: An action space.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        heads = space.spaces if isinstance(space, spaces.Dict) else {}
        self._by_head = {
            head: (entry.low, entry.high)
            for head, entry in heads.items()
            if isinstance(entry, spaces.Box) and bool(entry.bounded_below.any() or entry.bounded_above.any())
        }
        self._items = tuple(self._by_head.items())

    def __bool__(self) -> bool:
        """Whether there is anything to clip."""
        return bool(self._by_head)

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
        :param values: ``[..., *shape]``
        """
        bounds = self._by_head.get(head)
        return values if bounds is None else _minimum(_maximum(values, bounds[0]), bounds[1])
