"""The objective of a sweep: the number by which runs are compared."""

from __future__ import annotations

import math
import re
from statistics import fmean
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from maze.core.annotations import override
from maze.core.errors import ConfigError, did_you_mean
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter
from maze.core.log_stats.stats_format import scalar_value, statistic_name

STEPS = ("best", "last", "mean")


class UnknownObjectiveError(ConfigError):
    """The run logged no statistic with this name."""


class ObjectiveRecorder(LogStatsWriter):
    """Records a statistic of a run.

    :param name: The statistic, as TensorBoard (`eval_BaseEnvEvents/reward/mean`) or the console
        (`eval BaseEnvEvents reward mean`) shows it.
    :param maximize: Whether more is better.
    :param step: The log step that counts: `best`, `last`, or the `mean` of all. The sweeper has checked it.
    """

    def __init__(self, name: str, maximize: bool = True, step: str = "best") -> None:
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
        """Add the statistics of a rollout, which are not written to the writers of training statistics."""
        from maze.core.rollout.recording import STATS_PATH

        stats = getattr(runner, "stats", None)
        if stats:
            self.write(STATS_PATH, 1, stats)

    def value(self) -> float | None:
        """Return the objective of the run; None: the statistic was never finite.

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
    """Return a recorder of the running sweep's objective; None outside of sweeps, and for the default objective."""
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
    """Return the same text for all spellings: TensorBoard joins the prefix by an underscore, the console by blanks."""
    return re.sub(r"[\s/_.]+", "/", name.strip())
