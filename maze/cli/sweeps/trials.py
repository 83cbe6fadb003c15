"""Trials of a sweep, the runs they consist of, and what came out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

COMPLETED, FAILED, UNFINISHED = "completed", "failed", "unfinished"
PRUNED = "pruned"
"""Ended early, since it did worse than others; what it had reached counts."""


@dataclass
class SweepRun:
    """One job: a trial's overrides with one seed.

    :param number: Number of the job in the sweep; names its directory.
    :param seed: Base seed of the run; None: whatever the configuration says.
    :param violation: How far it is from fulfilling its constraints; None: it has none.
    :param minimized: Whether its own configuration asks for less of the objective.
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
        done = (COMPLETED, PRUNED) if retry_failed else (COMPLETED, PRUNED, FAILED)
        return [seed for seed in seeds if (run := self.run_of(seed)) is None or run.status not in done]

    def result(self, seeds: Sequence[int | None], needs_objective: bool) -> TrialResult:
        """What came out, over all seeds; a trial fails with any of its runs."""
        runs = [run for run in map(self.run_of, seeds) if run is not None]
        errors = [run.error for run in runs if run.status == FAILED]
        completed = [run for run in runs if run.status in (COMPLETED, PRUNED)]
        values = [run.objective for run in completed if run.objective is not None]
        violations = [run.violation for run in completed if run.violation is not None]
        is_complete = len(completed) == len(seeds)
        pruned = [run.error for run in runs if run.status == PRUNED]
        status = FAILED if errors else UNFINISHED if not is_complete else PRUNED if pruned else COMPLETED
        error = next(iter(errors or pruned), "")
        if len(seeds) > 1 and errors:
            error = f"{len(errors)} of {len(seeds)} seeds failed: {error}"
        has_all = status in (COMPLETED, PRUNED) and len(values) == len(seeds)
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
            violation=fmean(violations) if has_all and violations else None,
            minimized=any(run.minimized for run in completed),
        )


@dataclass(frozen=True)
class TrialResult:
    """What came out of a trial.

    :param objective: Mean over the seeds; None where there is none.
    :param objective_std: Standard deviation over the seeds.
    :param duration: Seconds, summed over the seeds.
    :param violation: How far it is from fulfilling its constraints, mean over the seeds; None: there are none.
    :param minimized: Whether the runs' own configuration asks for less of the objective.
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
    violation: float | None = None
    minimized: bool = False

    def signed(self, maximize: bool) -> float | None:
        """The objective for a search in this direction: its negative where the runs ask for the other one.

        :param maximize: Direction of the sweep.
        """
        return -self.objective if self.objective is not None and self.minimized and maximize else self.objective

    def told(self, maximize: bool) -> float | None:
        """What a search in this direction hears: trials that fulfil their constraints are better than all others.

        No penalty could do that for objectives of unknown size; so with constraints, objectives are squeezed into
        (-1, 1), in their order, and violations lie beyond.

        :param maximize: Direction of the sweep.
        """
        value = self.signed(maximize)
        if value is None or self.violation is None:
            return value
        if self.violation > 0:
            return -1.0 - self.violation if maximize else 1.0 + self.violation
        return value / (1.0 + abs(value))


def ranked(results: Sequence[TrialResult], maximize: bool) -> list[TrialResult]:
    """Best first: those that fulfil their constraints, then those that come near; without an objective last."""

    def rank(result: TrialResult) -> tuple[bool, float, float, int]:
        value = result.signed(maximize)
        cost = 0.0 if value is None else -value if maximize else value
        return (value is None, result.violation or 0.0, cost, result.trial)

    return sorted(results, key=rank)
