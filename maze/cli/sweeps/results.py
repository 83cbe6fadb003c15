"""Objective of a sweep, its trials and their runs, and the tables of their results."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from maze.core.annotations import override
from maze.core.errors import ConfigError, did_you_mean
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter
from maze.core.log_stats.stats_format import scalar_value, statistic_name
from maze.core.utils.files import write_whole

if TYPE_CHECKING:
    import pandas as pd

STUDY_FILE = "optuna_study.log"
"""The Optuna study that holds the trials of a sweep, in the sweep's directory."""
RESULTS_FILE = "results.csv"
OPTIMUM_FILE = "optimization_results.yaml"
MAX_ERROR = 60

COMPLETED, FAILED, UNFINISHED = "completed", "failed", "unfinished"
PRUNED = "pruned"
"""Ended early by the pruner; the best objective so far counts."""
FINISHED = (COMPLETED, PRUNED)


def has_study(directory: Path) -> bool:
    """Return whether a sweep was started in this directory."""
    return (directory / STUDY_FILE).is_file()


@dataclass
class SweepRun:
    """One job: a trial's overrides with one seed.

    :param number: Number of the job in the sweep; names its directory.
    :param seed: Base seed of the run; None: the configured one.
    :param duration: Seconds; None: the run has not ended.
    :param violation: Size of the constraint violation; None: the run has no constraints.
    :param minimized: Whether the run's own configuration minimises the objective.
    """

    number: int
    seed: int | None
    directory: str = ""
    status: str = UNFINISHED
    objective: float | None = None
    duration: float | None = None
    error: str = ""
    violation: float | None = None
    minimized: bool = False


@dataclass
class SweepTrial:
    """One set of values.

    :param number: Counted from 0.
    :param params: Keys of the configuration mapped to values, as written in overrides.
    """

    number: int
    params: dict[str, str]
    runs: list[SweepRun] = field(default_factory=list)

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={text}" for key, text in self.params.items()]

    def run_of(self, seed: int | None) -> SweepRun | None:
        """Return the latest run with this seed."""
        return next((run for run in reversed(self.runs) if run.seed == seed), None)

    def seeds_to_run(self, seeds: Sequence[int | None], retry_failed: bool) -> list[int | None]:
        """Return the seeds without a finished run.

        :param retry_failed: Whether a failed run is repeated.
        """
        done = FINISHED if retry_failed else (*FINISHED, FAILED)
        return [seed for seed in seeds if (run := self.run_of(seed)) is None or run.status not in done]

    def result(self, seeds: Sequence[int | None]) -> TrialResult:
        """Return the result over all seeds; a trial fails if any of its runs fails."""
        return TrialResult(self, seeds)


class TrialResult:
    """The result of a trial over several seeds.

    :param trial: The trial.
    :param seeds: The seeds.
    """

    def __init__(self, trial: SweepTrial, seeds: Sequence[int | None]) -> None:
        runs = [run for run in map(trial.run_of, seeds) if run is not None]
        errors = [run.error for run in runs if run.status == FAILED]
        pruned = [run.error for run in runs if run.status == PRUNED]
        finished = [run for run in runs if run.status in FINISHED]
        is_finished = len(finished) == len(seeds)
        objectives = [run.objective for run in finished if run.objective is not None]
        values = objectives if len(objectives) == len(seeds) else []
        violations = [run.violation for run in finished if run.violation is not None]
        durations = [run.duration for run in runs if run.duration is not None]
        self.trial, self.params = trial.number, dict(trial.params)
        self.seeds = [run.seed for run in runs if run.seed is not None]
        self.run_dirs = [run.directory for run in runs]
        self.status = FAILED if errors else UNFINISHED if not is_finished else PRUNED if pruned else COMPLETED
        self.error = next(iter(errors or pruned), "")
        if len(seeds) > 1 and errors:
            self.error = f"{len(errors)} of {len(seeds)} seeds failed: {self.error}"
        self.objective = fmean(values) if values else None
        """Mean over the seeds; None: no objective."""
        self.objective_std = pstdev(values) if len(values) > 1 else None
        self.violation = fmean(violations) if values and violations else None
        """Mean constraint violation over the seeds; None: no constraints."""
        self.duration = math.fsum(durations) if durations else None
        """Seconds, summed over the seeds."""
        self.minimized = any(run.minimized for run in finished)
        """Whether the runs' own configuration minimises the objective."""

    def signed(self, maximize: bool) -> float | None:
        """Return the objective, negated if the runs minimise it and the sweep maximises.

        :param maximize: Direction of the sweep.
        """
        return -self.objective if self.objective is not None and self.minimized and maximize else self.objective

    def reported(self, maximize: bool) -> float | None:
        """Return the value that is reported to a search, see :func:`reported_value`.

        :param maximize: Direction of the sweep.
        """
        return reported_value(self.signed(maximize), self.violation, maximize)


def reported_value(objective: float | None, violation: float | None, maximize: bool) -> float | None:
    """Return the value that is reported to a search. Trials that satisfy their constraints rank above all others.

    No penalty ensures that for objectives of unknown size. With constraints, objectives are therefore squeezed into
    (-1, 1), in their order; violations lie beyond.

    :param objective: Objective; `None`: the trial failed.
    :param violation: Violation of the constraints; `None`: no constraints.
    :param maximize: Direction of the sweep.
    """
    if objective is None or violation is None:
        return objective
    if violation > 0:
        return -1.0 - violation if maximize else 1.0 + violation
    return objective / (1.0 + abs(objective))


def ranked(results: Sequence[TrialResult], maximize: bool) -> list[TrialResult]:
    """Sort results: without violation first, then by violation; without an objective last."""

    def rank(result: TrialResult) -> tuple[bool, float, float, int]:
        value = result.signed(maximize)
        cost = 0.0 if value is None else -value if maximize else value
        return (value is None, result.violation or 0.0, cost, result.trial)

    return sorted(results, key=rank)


def results_frame(results: Sequence[TrialResult], maximize: bool) -> pd.DataFrame:
    """Return the content of `results.csv`: one row per trial, best first."""
    import pandas as pd

    keys = dict.fromkeys(key for result in results for key in result.params)
    rows = [
        {
            "trial": result.trial,
            **{key: _unquoted(result.params.get(key, "")) for key in keys},
            "seeds": " ".join(map(str, result.seeds)) or None,
            "objective": result.objective,
            "objective_std": result.objective_std,
            "violation": result.violation,
            "duration": None if result.duration is None else round(result.duration, 3),
            "status": result.status,
            "error": result.error or None,
            "run_dir": " ".join(result.run_dirs),
        }
        for result in ranked(results, maximize)
    ]
    frame: pd.DataFrame = pd.DataFrame(rows)
    return frame


def write_optimum(directory: Path, name: str, results: Sequence[TrialResult], maximize: bool) -> None:
    """Write the best values found so far in the format of Hydra's search plugins."""
    best = ranked(results, maximize)[0]
    if best.objective is None:
        return
    values = {key: _typed(text) for key, text in best.params.items()}
    optimum = {"name": name, "best_evaluated_params": values, "best_evaluated_result": best.objective}
    if best.violation is not None:
        optimum["best_evaluated_violation"] = best.violation
    write_whole(directory / OPTIMUM_FILE, OmegaConf.to_yaml(OmegaConf.create(optimum)))


def results_table(frame: pd.DataFrame, n_rows: int = 50) -> str:
    """Return the table for the console, without empty columns.

    :param frame: See :func:`results_frame`.
    :param n_rows: Number of rows; further trials are only counted.
    """
    shown = frame.head(n_rows).dropna(axis="columns", how="all")
    text = shown.to_string(index=False, na_rep="", max_colwidth=MAX_ERROR, float_format="{:.6g}".format)
    return text if len(frame) <= n_rows else f"{text}\n... and {len(frame) - n_rows} more in {RESULTS_FILE}"


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def violation_text(violation: float | None) -> str:
    return f" (constraints are violated by {violation:.5g})" if violation else ""


def _unquoted(text: str) -> str:
    is_quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else re.sub(r"\\(.)", r"\1", text)


def _typed(text: str) -> int | float | str:
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        return _unquoted(text)
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


STEPS = ("best", "last", "mean")


class UnknownObjectiveError(ConfigError):
    """The run logged no statistic with this name."""


class ObjectiveRecorder(LogStatsWriter):
    """Record a statistic of a run.

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
            if (number := scalar_value(value)) is None:
                continue
            tag = statistic_name(key, path, "_")
            self._seen.add(tag)
            if _comparable(tag) == self._wanted:
                self._values.append(float(number))

    def value(self) -> float | None:
        """Return the objective of the run; None: the statistic was never finite.

        :raises UnknownObjectiveError: The run has logged other statistics, but not this one.
        """
        if not self._values:
            raise UnknownObjectiveError(
                f"hydra.sweeper.objective={self.name}: the run logged no such statistic."
                f"{did_you_mean(self.name, self._seen)} Known: {', '.join(sorted(self._seen)) or 'none'}."
            )
        values = [value for value in self._values if math.isfinite(value)]
        if not values:
            return None
        if self.step == "best":
            return max(values) if self.maximize else min(values)
        return values[-1] if self.step == "last" else fmean(values)


def recorder_of_sweep() -> ObjectiveRecorder | None:
    """Return a recorder of the running sweep's objective; None outside of sweeps, and for the default objective."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    sweeper: Any = HydraConfig.get().sweeper
    if (name := OmegaConf.select(sweeper, "objective")) is None:
        return None
    maximize = OmegaConf.select(sweeper, "optim.maximize", default=OmegaConf.select(sweeper, "maximize", default=True))
    step = OmegaConf.select(sweeper, "objective_step", default="best")
    return ObjectiveRecorder(str(name), bool(maximize), str(step))


def _comparable(name: str) -> str:
    """Return the same text for all spellings: TensorBoard joins the prefix by an underscore, the console by blanks."""
    return re.sub(r"[\s/_.]+", "/", name.strip())
