"""The number that a sweep compares runs by."""

from __future__ import annotations

import math
import re
from statistics import fmean
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from maze.cli.errors import UsageError
from maze.core.annotations import override
from maze.core.errors import ConfigError, did_you_mean
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter
from maze.core.log_stats.stats_format import scalar_value, statistic_name

STEPS = ("best", "last", "mean")


class UnknownObjectiveError(ConfigError):
    """The run logged no statistic of this name."""


class ObjectiveRecorder(LogStatsWriter):
    """Follows the statistics of a run.

    :param name: The statistic, as TensorBoard (`eval_BaseEnvEvents/reward/mean`) or the console
        (`eval BaseEnvEvents reward mean`) shows it.
    :param maximize: Whether more is better.
    :param step: Which log step counts: `best`, `last`, or the `mean` of all.
    :raises UsageError: The step is none of those that an objective may be taken from.
    """

    def __init__(self, name: str, maximize: bool = True, step: str = "best") -> None:
        if step not in STEPS:
            raise UsageError(f"hydra.sweeper.objective_step: expected one of {', '.join(STEPS)}, got {step!r}.")
        self.name = name
        self.maximize = maximize
        self.step = step
        self._wanted = _comparable(name)
        self._values: list[float] = []
        self._seen: set[str] = set()

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        for key, value in stats.items():
            number = scalar_value(value)
            if number is None:
                continue
            tag = statistic_name(key, path, "_")
            self._seen.add(tag)
            if _comparable(tag) == self._wanted:
                self._values.append(float(number))

    def take_rollout(self, runner: Any) -> None:
        """Adds the statistics of a rollout, which are aggregated and printed apart from those of trainings."""
        from maze.core.rollout.recording import STATS_PATH

        stats = getattr(runner, "stats", None)
        if stats:
            self.write(STATS_PATH, 1, stats)

    def value(self) -> float | None:
        """The objective of the run; None: the statistic was never finite.

        :raises UnknownObjectiveError: The run has logged other statistics, but not this one.
        """
        if not self._values:
            raise UnknownObjectiveError(self._unknown())
        values = [value for value in self._values if math.isfinite(value)]
        if not values:
            return None
        if self.step == "best":
            return max(values) if self.maximize else min(values)
        return values[-1] if self.step == "last" else fmean(values)

    def _unknown(self) -> str:
        if not self._seen:
            return f"hydra.sweeper.objective={self.name}: the run logged no statistics at all."
        shown = sorted(self._seen, key=lambda tag: (not tag.startswith("eval"), tag))[:20]
        more = f" and {len(self._seen) - len(shown)} more" if len(self._seen) > len(shown) else ""
        return (
            f"hydra.sweeper.objective={self.name}: the run logged no such statistic."
            f"{did_you_mean(self.name, self._seen)} Known: {', '.join(shown)}{more}."
        )


def recorder_of_sweep() -> ObjectiveRecorder | None:
    """Follows what the running sweep has set as its objective; None outside of sweeps, and for the default one."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    sweeper: Any = HydraConfig.get().sweeper
    name = OmegaConf.select(sweeper, "objective")
    if name is None:
        return None
    maximize = OmegaConf.select(sweeper, "optim.maximize", default=OmegaConf.select(sweeper, "maximize", default=True))
    step = OmegaConf.select(sweeper, "objective_step", default="best")
    return ObjectiveRecorder(str(name), bool(maximize), str(step))


def _comparable(name: str) -> str:
    """The same for all ways to write it: TensorBoard joins the prefix by an underscore, the console by blanks."""
    return re.sub(r"[\s/_.]+", "/", name.strip())
