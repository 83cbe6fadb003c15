"""Spaces of several sub-steps as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from gymnasium import spaces

from maze.core.env.structured_env import StepKeyType
from maze.core.errors import EnvironmentContractError

T = TypeVar("T")


def flat_structured_space(structured_space_dict: Mapping[StepKeyType, spaces.Dict]) -> spaces.Dict:
    """Return all sub-steps' spaces in one dictionary space.

    :param structured_space_dict: Dictionary space of each sub-step. Entries of the same name must be equal.
    """
    return spaces.Dict(_merged({key: space.spaces for key, space in structured_space_dict.items()}, "space"))


def flat_structured_shapes(shapes: Mapping[StepKeyType, Mapping[str, Sequence[int]]]) -> dict[str, Sequence[int]]:
    """Return all sub-steps' shapes in one dictionary.

    :param shapes: Shapes of each sub-step by name. Entries of the same name must be equal.
    """
    return _merged(shapes, "shape")


def _merged(by_step_key: Mapping[StepKeyType, Mapping[str, T]], what: str) -> dict[str, T]:
    merged: dict[str, T] = {}
    for step_key, entries in by_step_key.items():
        for name, entry in entries.items():
            if name in merged and merged[name] != entry:
                other = f"{merged[name]} in another sub-step; rename one of them in its conversion"
                raise EnvironmentContractError(
                    f"`{name}` of sub-step {step_key!r} has the {what} {entry}, but {other}."
                )
            merged[name] = entry
    return merged
