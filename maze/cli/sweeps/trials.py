"""Trials of a sweep, the runs they consist of, and what came out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

COMPLETED, FAILED, UNFINISHED = "completed", "failed", "unfinished"


@dataclass
class SweepRun:
    """One job: a trial's overrides with one seed.

    :param number: Number of the job in the sweep; names its directory.
    :param seed: Base seed of the run; None: whatever the configuration says.
    """

    number: int
    seed: int | None
    directory: str = ""
    status: str = UNFINISHED
    objective: float | None = None
    duration: float | None = None
    error: str = ""


@dataclass
class SweepTrial:
    """One set of values.

    :param number: Counted from 0.
    :param params: Keys of the configuration mapped to values, as they are written in overrides.
    """

    number: int
    params: dict[str, str]
    runs: list[SweepRun] = field(default_factory=list)

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={text}" for key, text in self.params.items()]

    def run_of(self, seed: int | None) -> SweepRun | None:
        """The latest run with this seed."""
        return next((run for run in reversed(self.runs) if run.seed == seed), None)

    def seeds_to_run(self, seeds: Sequence[int | None], retry_failed: bool) -> list[int | None]:
        """Seeds without a finished run.

        :param retry_failed: Whether a failed run counts as none.
        """
        done = (COMPLETED,) if retry_failed else (COMPLETED, FAILED)
        return [seed for seed in seeds if (run := self.run_of(seed)) is None or run.status not in done]

    def result(self, seeds: Sequence[int | None], needs_objective: bool) -> TrialResult:
        """What came out, over all seeds; a trial fails with any of its runs."""
        runs = [run for run in map(self.run_of, seeds) if run is not None]
        errors = [run.error for run in runs if run.status == FAILED]
        values = [run.objective for run in runs if run.status == COMPLETED and run.objective is not None]
        is_complete = len(runs) == len(seeds) and all(run.status == COMPLETED for run in runs)
        status = FAILED if errors else COMPLETED if is_complete else UNFINISHED
        error = errors[0] if errors else ""
        if len(seeds) > 1 and errors:
            error = f"{len(errors)} of {len(seeds)} seeds failed: {error}"
        has_all = status == COMPLETED and len(values) == len(seeds)
        if status == COMPLETED and needs_objective and not has_all:
            status, error = FAILED, "the run has no objective: nothing was evaluated."
        durations = [run.duration for run in runs if run.duration is not None]
        return TrialResult(
            trial=self.number,
            params=dict(self.params),
            seeds=tuple(run.seed for run in runs if run.seed is not None),
            status=status,
            objective=fmean(values) if has_all else None,
            objective_std=pstdev(values) if has_all and len(values) > 1 else None,
            duration=math.fsum(durations) if durations else None,
            error=error,
            run_dirs=tuple(run.directory for run in runs),
        )


@dataclass(frozen=True)
class TrialResult:
    """What came out of a trial.

    :param objective: Mean over the seeds; None where there is none.
    :param objective_std: Standard deviation over the seeds.
    :param duration: Seconds, summed over the seeds.
    """

    trial: int
    params: dict[str, str]
    seeds: tuple[int, ...]
    status: str
    objective: float | None
    objective_std: float | None
    duration: float | None
    error: str
    run_dirs: tuple[str, ...]


def ranked(results: Sequence[TrialResult], maximize: bool) -> list[TrialResult]:
    """Best first; those without an objective last, in their order."""

    def rank(result: TrialResult) -> tuple[bool, float, int]:
        value = result.objective
        return (value is None, 0.0 if value is None else -value if maximize else value, result.trial)

    return sorted(results, key=rank)
