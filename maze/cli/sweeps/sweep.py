"""The loop of a sweep: starts jobs, reports and records their results."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maze.cli.hydra_setup import for_hydra, translated
from maze.cli.launchers import FinishedJob, Jobs, LocalLauncher, outcome
from maze.cli.sweeps.results import (
    COMPLETED,
    FAILED,
    PRUNED,
    RESULTS_FILE,
    SweepRun,
    SweepTrial,
    TrialResult,
    UnknownObjectiveError,
    number_text,
    ranked,
    results_frame,
    results_table,
    violation_text,
    write_optimum,
)
from maze.cli.sweeps.study import Plan, SweepStudy
from maze.core.errors import WorkerError
from maze.core.utils.files import write_whole
from maze.train.trainers.common.model_selection.best_model_selection import BestScore
from maze.train.utils.run_process import read_record

POLL_INTERVAL = 1.0
"""Seconds between two inspections of running trials by a search with a pruner."""
RESULTS_INTERVAL = 1.0
"""Seconds between two versions of the results table while the sweep runs."""


class BatchedJobs:
    """Jobs of launchers that only take batches: :meth:`wait` runs all jobs started before.

    :param launcher: Any launcher of Hydra.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._waiting: list[tuple[int, list[str]]] = []

    @property
    def n_running(self) -> int:
        return len(self._waiting)

    def start(self, number: int, overrides: list[str]) -> None:
        self._waiting.append((number, overrides))

    def stop(self, number: int) -> None:
        """Do nothing: batches are not pruned."""

    def wait(self, timeout: float | None = None) -> list[FinishedJob]:
        batch, self._waiting = self._waiting, []
        start = time.monotonic()
        try:
            returns = self._launcher.launch(
                [for_hydra(overrides) for _, overrides in batch], initial_job_idx=batch[0][0]
            )
        except Exception as error:
            failure = WorkerError(f"{type(self._launcher).__name__}: {type(error).__name__}: {error}")
            returns = [JobReturn(status=JobStatus.FAILED, _return_value=failure)] * len(batch)
        duration = time.monotonic() - start
        return [FinishedJob(number, result, duration) for (number, _), result in zip(batch, returns, strict=True)]

    def close(self) -> None:
        self._waiting.clear()


@dataclass
class SweepInProgress:
    """A running sweep.

    :param plan: Its trials.
    :param study: The trials so far; some may be unfinished.
    :param launcher: Starts the runs.
    :param seed_overrides: Seeds of each trial, with the overrides that set them.
    :param directory: Directory of the sweep.
    """

    plan: Plan
    study: SweepStudy
    launcher: Launcher
    seed_overrides: Mapping[int | None, Sequence[str]]
    directory: Path

    def __post_init__(self) -> None:
        self.seeds = list(self.seed_overrides)
        self.waiting: deque[tuple[SweepTrial, int | None]] = deque()
        self.open_trials: dict[int, SweepTrial] = {}
        self._table_written = -math.inf
        # Epochs reported to the search, by run.
        self._epochs: dict[int, int] = {}
        # State of runs when the pruner ended them.
        self._pruned: dict[int, SweepRun] = {}

    def run(self) -> list[TrialResult]:
        """Run the remaining trials.

        :return: The results of all trials in their order.
        """
        self._restore()
        jobs, capacity = self._open_jobs()
        maximize = self.plan.maximize
        print(f"Sweep of {self._n_trials} trials in {self.directory}", flush=True)
        try:
            while True:
                while jobs.n_running < capacity and (job := self._next()) is not None:
                    self._start(jobs, *job)
                if not jobs.n_running:
                    break
                for finished in jobs.wait(POLL_INTERVAL if self.plan.prunes else None):
                    self._finish(finished)
                if self.plan.prunes:
                    self._prune(jobs)
        finally:
            jobs.close()
            self._write_table()
        results = self.results()
        print(f"\n{results_table(results_frame(results, maximize))}\n")
        best = next((result for result in ranked(results, maximize) if result.objective is not None), None)
        if best is not None:
            shown = number_text(best.objective) + violation_text(best.violation)
            print(f"Best: trial {best.trial}, {shown}: {_shown(best.params)}")
        print(f"All results: {self.directory / RESULTS_FILE}", flush=True)
        return results

    def results(self) -> list[TrialResult]:
        return [self._result(trial) for trial in self.study.trials.values()]

    @property
    def _n_trials(self) -> int:
        return max(self.plan.n_trials, len(self.study.trials))

    def _result(self, trial: SweepTrial) -> TrialResult:
        return trial.result(self.seeds, not self.plan.is_grid)

    def _open_jobs(self) -> tuple[Jobs | BatchedJobs, int]:
        """Return the jobs of the launcher, and the number of jobs to start before waiting."""
        if isinstance(self.launcher, LocalLauncher):
            jobs: Jobs = self.launcher.open()
            return jobs, self.launcher.n_jobs
        is_sequential = type(self.launcher).__module__.startswith("hydra._internal.")
        n_parallel = self.plan.n_parallel
        size = n_parallel * len(self.seeds) if n_parallel else 10**9
        return BatchedJobs(self.launcher), 1 if is_sequential else size

    def _restore(self) -> None:
        """Take over the results of an earlier process; repeat its unfinished runs."""
        trials = self.study.trials
        if not trials:
            return
        for trial in list(trials.values()):
            missing = trial.seeds_to_run(self.seeds, self.plan.is_grid)
            if not missing and not trial.is_reported:
                self.study.finish(trial, self._result(trial))
            elif missing:
                if trial.is_reported:
                    self.study.reopen(trial)
                self._open(trial, missing)
        n_done = len(trials) - len(self.open_trials)
        print(f"Resuming the sweep in {self.directory}: {n_done} trials are finished.")

    def _open(self, trial: SweepTrial, seeds: Sequence[int | None]) -> None:
        self.open_trials[trial.number] = trial
        self.waiting.extend((trial, seed) for seed in seeds)

    def _next(self) -> tuple[SweepTrial, int | None] | None:
        if not self.waiting:
            limit = self.plan.n_parallel
            trial = self.study.propose() if limit is None or len(self.open_trials) < limit else None
            if trial is None:
                return None
            self._open(trial, self.seeds)
        return self.waiting.popleft()

    def _start(self, jobs: Jobs | BatchedJobs, trial: SweepTrial, seed: int | None) -> None:
        number = max((run.number for run in self.study.runs), default=-1) + 1
        trial.runs.append(SweepRun(number, seed, str(number)))
        self.study.save(trial)
        overrides = [*self.plan.space.fixed, *trial.overrides, *self.seed_overrides[seed]]
        try:
            jobs.start(number, overrides)
        except (HydraException, OmegaConfBaseException) as error:  # a combination of values that does not compose
            self._finish(FinishedJob(number, JobReturn(status=JobStatus.FAILED, _return_value=error), 0.0))

    def _finish(self, job: FinishedJob) -> None:
        trial, run = next((t, run) for t in self.open_trials.values() for run in t.runs if run.number == job.number)
        ended = _ended(run, job.job_return, needs_objective=not self.plan.is_grid)
        if job.number in self._pruned and ended.status == FAILED:
            ended = self._pruned[job.number]
        place = OmegaConf.select(job.job_return.hydra_cfg or OmegaConf.create(), "hydra.runtime.output_dir")
        ended.directory = str(job.number) if place is None else os.path.relpath(place, self.directory)
        ended.duration = job.duration
        trial.runs[trial.runs.index(run)] = ended
        self.study.save(trial)
        self._announce(trial, ended)
        value = outcome(job.job_return)
        if isinstance(value, UnknownObjectiveError) and not any(r.status == COMPLETED for r in self.study.runs):
            raise value  # a misspelt name: all other runs would fail as well
        if not trial.seeds_to_run(self.seeds, retry_failed=False):
            self.study.finish(trial, self._result(trial))
            del self.open_trials[trial.number]
        if time.monotonic() - self._table_written > RESULTS_INTERVAL:
            self._write_table()

    def _prune(self, jobs: Jobs | BatchedJobs) -> None:
        """Report the progress of running trials to the pruner, and end the trials that it selects."""
        for trial in self.open_trials.values():
            run = trial.runs[-1] if trial.runs else None
            if run is None or run.duration is not None or run.number in self._pruned:
                continue
            progress = read_record(self.directory / str(run.number)) or {}
            epoch, score = progress.get("epoch", 0), progress.get("best_score")
            if score is None or epoch <= self._epochs.get(run.number, 0):
                continue
            self._epochs[run.number] = epoch
            so_far = replace(run, status=PRUNED, error=f"after epoch {epoch}", objective=score)
            so_far.violation, so_far.minimized = progress.get("violation"), bool(progress.get("minimized"))
            value = self._result(replace(trial, runs=[so_far])).reported(self.plan.maximize)
            if value is not None and self.study.should_stop(trial, epoch, value):
                self._pruned[run.number] = so_far
                jobs.stop(run.number)

    def _announce(self, trial: SweepTrial, run: SweepRun) -> None:
        n_ended = sum(run.duration is not None for run in self.study.runs)
        seed = "" if run.seed is None else f", seed {run.seed}"
        what = f"FAILED: {run.error}" if run.status == FAILED else number_text(run.objective)
        what += violation_text(run.violation) + (f", pruned {run.error}" if run.status == PRUNED else "")
        print(
            f"[{n_ended}/{self._n_trials * len(self.seeds)}] trial {trial.number}{seed}: {what} "
            f"({run.duration:.1f} s; {_shown(trial.params)})",
            flush=True,
        )

    def _write_table(self) -> None:
        results = self.results()
        if results:
            frame = results_frame(results, self.plan.maximize)
            write_whole(self.directory / RESULTS_FILE, frame.to_csv(index=False))
            if not self.plan.is_grid:
                write_optimum(self.directory, self.plan.name, results, self.plan.maximize)
        self._table_written = time.monotonic()


def _ended(run: SweepRun, job_return: JobReturn, needs_objective: bool) -> SweepRun:
    """Return the run with the status, objective and error of its job."""
    value = outcome(job_return)
    if job_return.status is not JobStatus.COMPLETED:
        message = translated(value) or value if isinstance(value, BaseException) else value
        return replace(run, status=FAILED, error=f"{type(message).__name__}: {message}")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        score = value if isinstance(value, BestScore) else BestScore(value)
        minimized = not score.maximize
        return replace(run, status=COMPLETED, objective=float(value), violation=score.violation, minimized=minimized)
    if value is None and not needs_objective:
        return replace(run, status=COMPLETED)
    what = "nothing was evaluated" if value is None else f"found {value!r}"
    return replace(run, status=FAILED, error=f"The run has no objective: {what}.")


def _shown(params: dict[str, str]) -> str:
    return " ".join(f"{key}={text}" for key, text in params.items()) or "no overrides"
