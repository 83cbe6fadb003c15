"""Dispatching rules for job shops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze_envs.common.array_policy import ArrayPolicy
from maze_envs.scheduling.job_shop import FEATURES

_Feature: TypeAlias = Callable[[str], np.ndarray]

RULES: dict[str, Callable[[_Feature], np.ndarray]] = {
    "SPT": lambda of: of("duration"),
    "LPT": lambda of: -of("duration"),
    "MWKR": lambda of: -of("work_left"),
    "LWKR": lambda of: of("work_left"),
    "MOPNR": lambda of: -of("operations_left"),
    "FIFO": lambda of: -of("waited"),
    "FDD/MWKR": lambda of: of("flow_due") / np.maximum(of("work_left"), 1e-9),
}
"""Priorities by rule: the lowest one starts. Shortest and longest processing time, most and least work remaining, most
operations remaining, first in first out, and the smallest ratio of flow due date (the job's work up to the end of its
next operation) and work remaining (Sels et al. 2012,
A comparison of priority rules for the job shop scheduling problem, International Journal of Production Research 50)."""


class DispatchingRule(ArrayPolicy):
    """Start the waiting job of the highest priority; of equal ones the first. No machine waits while a job does.

    :param rule: A key of :data:`RULES`.
    :param action: Name of the action.
    :raises ConfigError: There is no such rule.
    """

    def __init__(self, rule: str = "MWKR", action: str = "job") -> None:
        if rule not in RULES:
            raise ConfigError(f"policy.rule: expected one of {', '.join(RULES)}, found {rule!r}.")
        self.rule = rule
        self.action = action

    @override(ArrayPolicy)
    def choose(self, observation: Mapping[str, np.ndarray], step_key: object) -> dict[str, np.ndarray]:
        seen = observation[f"{self.action}_candidates"]

        def feature(name: str) -> np.ndarray:
            found: np.ndarray = seen[..., FEATURES.index(name)]
            return found

        starts = np.where(observation[f"{self.action}_mask"] > 0, feature("until_it_can_start"), np.inf)
        is_first = starts == starts.min(axis=1, keepdims=True)
        priorities = np.where(is_first, RULES[self.rule](feature), np.inf)
        return {self.action: priorities.argmin(axis=1)}
