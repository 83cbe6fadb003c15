"""Trials of a sweep, their runs, and the tables of their results."""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev

from omegaconf import OmegaConf

from maze.core.utils.files import write_whole

STUDY_FILE = "optuna_study.log"
"""The trials of a sweep, in its directory: a study of Optuna."""
PREVIOUS_FORMAT = "sweep.jsonl"
"""The trials in an earlier format, which cannot be resumed."""
RESULTS_FILE = "results.csv"
OPTIMUM_FILE = "optimization_results.yaml"
MAX_CELL, MAX_ERROR = 28, 60

COMPLETED, FAILED, UNFINISHED = "completed", "failed", "unfinished"
PRUNED = "pruned"
"""Ended early because others did better; what it had reached counts."""


def has_study(directory: Path) -> bool:
    """Whether a sweep was started in this directory."""
    return any((directory / name).is_file() for name in (STUDY_FILE, PREVIOUS_FORMAT))


@dataclass
class SweepRun:
    """One job: a trial's overrides with one seed.

    :param number: Number of the job in the sweep; names its directory.
    :param seed: Base seed of the run; None: the configured one.
    :param duration: Seconds; None: the run has not ended.
    :param violation: By how much the run breaks its constraints; None: it has none.
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
    :param params: Keys of the configuration mapped to values, as they are written in overrides.
    :param is_told: Whether the search has received the result.
    """

    number: int
    params: dict[str, str]
    runs: list[SweepRun] = field(default_factory=list)
    is_told: bool = False

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
        """The result over all seeds; a trial fails with any of its runs."""
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
    """The result of a trial.

    :param objective: Mean over the seeds; None where there is none.
    :param objective_std: Standard deviation over the seeds.
    :param duration: Seconds, summed over the seeds.
    :param violation: By how much the constraints are broken, mean over the seeds; None: there are none.
    :param minimized: Whether the runs' own configuration minimises the objective.
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
        """The objective for a search in this direction: its negative where the runs minimise and the search maximises.

        :param maximize: Direction of the sweep.
        """
        return -self.objective if self.objective is not None and self.minimized and maximize else self.objective

    def told(self, maximize: bool) -> float | None:
        """The objective as it is reported to a search in this direction.

        :param maximize: Direction of the sweep.
        """
        return reported_value(self.signed(maximize), self.violation, maximize)


def reported_value(objective: float | None, violation: float | None, maximize: bool) -> float | None:
    """The value that is reported to a search: trials that fulfil their constraints are better than all others.

    No penalty ensures that for objectives of unknown size. With constraints, objectives are therefore squeezed into
    (-1, 1), in their order, and violations lie beyond.

    :param objective: None: the trial failed.
    :param violation: None: there are no constraints.
    :param maximize: Direction of the sweep.
    """
    if objective is None or violation is None:
        return objective
    if violation > 0:
        return -1.0 - violation if maximize else 1.0 + violation
    return objective / (1.0 + abs(objective))


def ranked(results: Sequence[TrialResult], maximize: bool) -> list[TrialResult]:
    """Best first: without violation, then by violation; without an objective last."""

    def rank(result: TrialResult) -> tuple[bool, float, float, int]:
        value = result.signed(maximize)
        cost = 0.0 if value is None else -value if maximize else value
        return (value is None, result.violation or 0.0, cost, result.trial)

    return sorted(results, key=rank)


def write_results(directory: Path, results: Sequence[TrialResult], maximize: bool) -> None:
    """Writes `results.csv`: one line per trial, best first."""
    keys = _keys(results)
    text = io.StringIO(newline="")
    table = csv.writer(text)
    columns = ("seeds", "objective", "objective_std", "violation", "duration", "status", "error", "run_dir")
    table.writerow(["trial", *keys, *columns])
    for result in ranked(results, maximize):
        table.writerow(
            [
                result.trial,
                *(_unquoted(result.params.get(key, "")) for key in keys),
                " ".join(map(str, result.seeds)),
                _exact(result.objective),
                _exact(result.objective_std),
                _exact(result.violation),
                "" if result.duration is None else f"{result.duration:.3f}",
                result.status,
                result.error,
                " ".join(result.run_dirs),
            ]
        )
    write_whole(directory / RESULTS_FILE, text.getvalue())


def write_optimum(directory: Path, name: str, results: Sequence[TrialResult], maximize: bool) -> None:
    """Writes the best values found so far, in the form that Hydra's search plugins use."""
    best = ranked(results, maximize)[0]
    if best.objective is None:
        return
    values = {key: _typed(text) for key, text in best.params.items()}
    optimum = {"name": name, "best_evaluated_params": values, "best_evaluated_result": best.objective}
    if best.violation is not None:
        optimum["best_evaluated_violation"] = best.violation
    write_whole(directory / OPTIMUM_FILE, OmegaConf.to_yaml(OmegaConf.create(optimum)))


def results_table(results: Sequence[TrialResult], maximize: bool, n_rows: int = 50) -> str:
    """The table for the console.

    :param n_rows: Further trials are only counted.
    """
    keys = _keys(results)
    names = _short_names(keys)
    has_constraints = any(result.violation is not None for result in results)
    header = ["trial", *names, "objective", *(["violation"] if has_constraints else []), "duration", "status", "run"]
    rows = [_row(result, keys, has_constraints) for result in ranked(results, maximize)]
    left_out = len(rows) - n_rows
    rows = rows[:n_rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    width = shutil.get_terminal_size((160, 24)).columns
    lines = [" | ".join(f"{cell:>{size}}" for cell, size in zip(line, widths, strict=True)) for line in (header, *rows)]
    lines.insert(1, "-+-".join("-" * size for size in widths))
    lines = [line if len(line) <= max(width, 80) else line[: max(width, 80) - 1] + "…" for line in lines]
    if left_out > 0:
        lines.append(f"... and {left_out} more in {RESULTS_FILE}")
    return "\n".join(lines)


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def broken_text(violation: float | None) -> str:
    return f" (constraints are broken by {violation:.5g})" if violation else ""


def _row(result: TrialResult, keys: Sequence[str], has_constraints: bool) -> list[str]:
    spread = "" if result.objective_std is None else f" ± {result.objective_std:.3g}"
    return [
        str(result.trial),
        *(_cut(_unquoted(result.params.get(key, "")), MAX_CELL) for key in keys),
        number_text(result.objective) + spread,
        *([number_text(result.violation)] if has_constraints else []),
        "-" if result.duration is None else f"{result.duration:.1f} s",
        result.status + (f": {_cut(result.error.splitlines()[0], MAX_ERROR)}" if result.error else ""),
        " ".join(result.run_dirs),
    ]


def _keys(results: Sequence[TrialResult]) -> list[str]:
    return list(dict.fromkeys(key for result in results for key in result.params))


def _short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each key, where it is unique."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]


def _unquoted(text: str) -> str:
    is_quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else re.sub(r"\\(.)", r"\1", text)


def _typed(text: str) -> int | float | str:
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None
    if not is_number:
        return _unquoted(text)
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def _exact(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
