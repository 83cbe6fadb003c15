"""The one place that tells a cut-off episode from one that ended by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRUNCATION_KEY = "TimeLimit.truncated"
"""Key of ``info`` that is True where an episode was cut off and did not terminate."""


def is_truncated(done: bool, info: Mapping[Any, Any]) -> bool:
    """Whether the step that gave ``done`` and ``info`` cut the episode off.

    An episode that is over and not truncated has terminated: its last state has no future, and nothing may be
    bootstrapped from it.
    """
    return bool(done) and bool(info.get(TRUNCATION_KEY, False))


def is_terminated(done: bool, info: Mapping[Any, Any]) -> bool:
    """Whether the step that gave ``done`` and ``info`` ended the episode by itself."""
    return bool(done) and not info.get(TRUNCATION_KEY, False)
