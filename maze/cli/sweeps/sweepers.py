"""The sweepers of Maze (grid search, Nevergrad, Optuna) and the loop of a sweep. Optuna is imported when one starts."""

from __future__ import annotations

import math
import os
import secrets
import shlex
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maze.cli.hydra_setup import UsageError, apply_overrides, as_written, for_hydra, translated
from maze.cli.launchers import CONSOLE_FILE, FinishedJob, Jobs, LocalLauncher, outcome
from maze.cli.sweeps import results
from maze.core.annotations import override
from maze.core.errors import MazeError, WorkerError
from maze.core.utils.config_utils import value_text
from maze.core.utils.factory import plain_container
from maze.core.utils.files import write_whole
from maze.train.utils.run_process import read_record

if TYPE_CHECKING:
    from maze.cli.sweeps.study import Plan, SweepStudy

SEED_KEYS = ("seeding.env_base_seed", "seeding.agent_base_seed")
POLL_INTERVAL = 1.0
"""Seconds between two inspections of running trials by a search with a pruner."""
RESULTS_INTERVAL = 1.0
"""Seconds between two versions of the results table while the sweep runs."""


class SweepFailedError(MazeError):
    """A sweep ended without a usable result."""


@dataclass(kw_only=True, eq=False)
class MazeSweeper(Sweeper):  # type: ignore[misc, unused-ignore]
    """Run the trials of a plan with all seeds and record them.

    :param objective: Statistic by which trials are compared; None: the statistic that selects a run's best
        evaluation, the mean reward unless its configuration names another one.
    :param objective_step: The log step of the statistic that counts: `best`, `last`, or the `mean` of all.
    :param n_seeds: Number of runs with different seeds per trial.
    :param seeds: The seeds, in place of `n_seeds`.
    :param strict: Whether one failed trial makes the command fail at the end.
    :param maximize: Whether a larger objective is better.
    """

    objective: str | None = None
    objective_step: str = "best"
    n_seeds: int = 1
    seeds: Any = None
    strict: bool = False
    maximize: bool = True
    config: DictConfig = field(init=False)
    hydra_context: HydraContext = field(init=False)
    launcher: Launcher = field(init=False)

    def check_options(self) -> None:
        """Raise an error for an invalid option. Hydra would wrap an error of the constructor."""
        self.seeds = seeds = plain_container(self.seeds, "hydra.sweeper.seeds")
        _check_number("n_seeds", self.n_seeds)
        if seeds is not None and not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
            raise UsageError(f"hydra.sweeper.seeds: expected a list of whole numbers, found {seeds!r}.")
        if self.objective_step not in results.STEPS:
            raise UsageError(
                f"hydra.sweeper.objective_step: expected one of {', '.join(results.STEPS)}, "
                f"found {self.objective_step!r}."
            )

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    @abstractmethod
    def make_plan(self, arguments: list[str], parser: OverridesParser, seed: int) -> Plan:
        """Return the plan of the sweep.

        :param arguments: The command's overrides.
        :param seed: Seed of random numbers; the same when the sweep is resumed.
        """

    def sweep(self, arguments: list[str]) -> list[results.TrialResult]:
        from maze.cli.sweeps.study import SweepStudy

        self.check_options()
        directory = Path(str(self.config.hydra.sweep.dir)).absolute()
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        with ExitStack() as stack:
            study = stack.enter_context(SweepStudy(directory, self.maximize)) if results.has_study(directory) else None
            seed = study.settings.get("seed") if study else None
            plan = self.make_plan(list(arguments), parser, seed if isinstance(seed, int) else secrets.randbits(31))
            seeds = self._seeds()
            self._check_pruner(plan, seeds)
            self._check_composition(plan, seeds)
            if study is None:  # created after the checks: a wrong command leaves no directory
                directory.mkdir(parents=True, exist_ok=True)
                study = stack.enter_context(SweepStudy(directory, self.maximize))
            settings = {"seeds": seeds, "objective": self.objective, "objective_step": self.objective_step}
            study.begin(plan, {**settings, "overrides": list(plan.space.fixed)})
            OmegaConf.save(self.config, directory / "multirun.yaml")
            overrides = {seed: self._seed_overrides(seed) for seed in seeds}
            try:
                trials = SweepInProgress(plan, study, self.launcher, overrides, directory).run()
            except KeyboardInterrupt:
                given = (each for each in as_written(sys.argv[1:]) if not each.startswith("hydra.sweep.dir="))
                command = shlex.join(["maze-run", *given, f"hydra.sweep.dir={value_text(directory)}"])
                print(f"Resume it:\n  {command}", flush=True)
                raise
        failed = [result for result in trials if result.status == results.FAILED]
        if failed and (self.strict or len(failed) == len(trials)):
            which = "all" if len(failed) == len(trials) else f"{len(failed)} of {len(trials)}"
            raise SweepFailedError(
                f"{which} trials of the sweep failed; the first one: {failed[0].error} The output of the runs is in "
                f"their directories ({CONSOLE_FILE} with hydra/launcher=local)."
            )
        return trials

    def _seeds(self) -> list[int | None]:
        if self.seeds is None and self.n_seeds == 1:
            return [None]
        if "seeding" not in self.config:
            raise UsageError("hydra.sweeper.n_seeds: this configuration has no section `seeding`.")
        if self.seeds is not None:
            return list(dict.fromkeys(self.seeds))
        return [(OmegaConf.select(self.config, SEED_KEYS[0]) or 0) + index for index in range(self.n_seeds)]

    def _seed_overrides(self, seed: int | None) -> list[str]:
        """Return the overrides for the seed of a run; both seeds keep their difference, modulo the range of seeds."""
        if seed is None:
            return []
        env_seed, agent_seed = (OmegaConf.select(self.config, key) for key in SEED_KEYS)
        difference = 0 if env_seed is None or agent_seed is None else agent_seed - env_seed
        return [f"{SEED_KEYS[0]}={seed}", f"{SEED_KEYS[1]}={(seed + difference) % 2**32}"]

    def _check_composition(self, plan: Plan, seeds: Sequence[int | None]) -> None:
        """Find unknown keys and options before the first run: with one value of each key, and all options of groups."""
        for params in plan.space.examples(self.config.hydra.runtime.choices):
            overrides = [*plan.space.fixed, *(f"{key}={text}" for key, text in params.items())]
            overrides = for_hydra(overrides + self._seed_overrides(seeds[0]))
            apply_overrides(self.hydra_context.config_loader.load_sweep_config(self.config, overrides))

    def _check_pruner(self, plan: Plan, seeds: Sequence[int | None]) -> None:
        is_possible = isinstance(self.launcher, LocalLauncher) and self.objective is None and len(seeds) == 1
        if plan.prunes and not is_possible:
            raise UsageError(
                "hydra.sweeper.optim.pruner: to end trials early, use hydra/launcher=local or ray, and one run per "
                "trial (no n_seeds, no seeds), and leave hydra.sweeper.objective out."
            )


@dataclass(kw_only=True, eq=False)
class GridSweep(MazeSweeper):
    """All combinations of the values that the command line and `params` list.

    :param params: Keys mapped to values as on the command line, for instance `"0.1,0.2"`.
    """

    params: Mapping[str, str] | None = None

    @override(MazeSweeper)
    def make_plan(self, arguments: list[str], parser: OverridesParser, seed: int) -> Plan:
        from maze.cli.sweeps.space import parse_grid
        from maze.cli.sweeps.study import Plan

        return Plan("grid", parse_grid(dict(self.params or {}), arguments, parser), self.maximize, {})


@dataclass(kw_only=True, eq=False)
class SearchSweep(MazeSweeper):
    """A search for good values, by an optimizer of Nevergrad or a sampler of Optuna.

    :param optim: Options of the search: `budget`, `num_workers`, `maximize`, `seed` and those of its kind.
    :param parametrization: The search space.
    """

    optim: dict[str, Any]
    parametrization: dict[str, Any]

    @override(MazeSweeper)
    def check_options(self) -> None:
        super().check_options()
        self.optim = plain_container(self.optim, "hydra.sweeper.optim")
        self.parametrization = plain_container(self.parametrization, "hydra.sweeper.parametrization")
        self.maximize = self.optim["maximize"]
        for name in ("budget", "num_workers"):
            _check_number(f"optim.{name}", self.optim[name])
        for name in ("maximize", "noisy"):
            if not isinstance(value := self.optim.get(name, False), bool):
                raise UsageError(f"hydra.sweeper.optim.{name}: expected true or false, found {value!r}.")

    @override(MazeSweeper)
    def make_plan(self, arguments: list[str], parser: OverridesParser, seed: int) -> Plan:
        from maze.cli.sweeps.space import parse_space
        from maze.cli.sweeps.study import Plan

        options = {name: value for name, value in self.optim.items() if name != "maximize"}
        options["seed"] = seed if self.optim["seed"] is None else int(self.optim["seed"])
        is_nevergrad = "optimizer" in options
        space = parse_space(self.parametrization, arguments, parser, is_nevergrad)
        return Plan("nevergrad" if is_nevergrad else "optuna", space, self.maximize, options)


def _check_number(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"hydra.sweeper.{name}: expected a whole number of at least 1, found {value!r}.")


# -- the loop ----------------------------------------------------------------------------------------------------------


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
            returns = self._launcher.launch([for_hydra(overrides) for _, overrides in batch], batch[0][0])
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
        self._n_parallel: int | None = self.plan.options.get("num_workers")  # None: any number of trials
        self.waiting: deque[tuple[results.SweepTrial, int | None]] = deque()
        self._table_written = -math.inf
        # Epochs reported to the search, by run.
        self._epochs: dict[int, int] = {}
        # State of runs when the pruner ended them.
        self._pruned: dict[int, results.SweepRun] = {}

    def run(self) -> list[results.TrialResult]:
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
        trials = self.trial_results()
        print(f"\n{results.results_table(results.results_frame(trials, maximize))}\n")
        best = next((result for result in results.ranked(trials, maximize) if result.objective is not None), None)
        if best is not None:
            shown = results.number_text(best.objective) + results.violation_text(best.violation)
            print(f"Best: trial {best.trial}, {shown}: {_shown(best.params)}")
        print(f"All results: {self.directory / results.RESULTS_FILE}", flush=True)
        return trials

    def trial_results(self) -> list[results.TrialResult]:
        return [self._result(trial) for trial in self.study.trials.values()]

    @property
    def _n_trials(self) -> int:
        return max(self.plan.n_trials, len(self.study.trials))

    def _result(self, trial: results.SweepTrial) -> results.TrialResult:
        return trial.result(self.seeds)

    def _open_jobs(self) -> tuple[Jobs | BatchedJobs, int]:
        """Return the jobs of the launcher, and the number of jobs to start before waiting."""
        if isinstance(self.launcher, LocalLauncher):
            jobs: Jobs = self.launcher.open()
            return jobs, self.launcher.n_jobs
        is_sequential = type(self.launcher).__module__.startswith("hydra._internal.")
        size = self._n_parallel * len(self.seeds) if self._n_parallel else 10**9
        return BatchedJobs(self.launcher), 1 if is_sequential else size

    def _restore(self) -> None:
        """Take over the results of an earlier process; repeat its unfinished runs."""
        if not (trials := self.study.trials):
            return
        were_open = {trial.number for trial in self.study.open_trials}
        for trial in list(trials.values()):
            missing = trial.seeds_to_run(self.seeds, self.plan.is_grid)
            if missing and trial.number not in were_open:
                self.study.reopen(trial)
            elif not missing and trial.number in were_open:
                self.study.finish(trial, self._result(trial))
            self.waiting.extend((trial, seed) for seed in missing)
        n_done = len(trials) - len(self.study.open_trials)
        print(f"Resuming the sweep in {self.directory}: {n_done} trials are finished.")

    def _next(self) -> tuple[results.SweepTrial, int | None] | None:
        if not self.waiting:
            is_full = self._n_parallel is not None and len(self.study.open_trials) >= self._n_parallel
            if is_full or (trial := self.study.propose()) is None:
                return None
            self.waiting.extend((trial, seed) for seed in self.seeds)
        return self.waiting.popleft()

    def _start(self, jobs: Jobs | BatchedJobs, trial: results.SweepTrial, seed: int | None) -> None:
        number = max((run.number for run in self.study.runs), default=-1) + 1
        trial.runs.append(results.SweepRun(number, seed, str(number)))
        self.study.save(trial)
        overrides = [*self.plan.space.fixed, *trial.overrides, *self.seed_overrides[seed]]
        try:
            jobs.start(number, overrides)
        except (HydraException, OmegaConfBaseException) as error:  # a combination of values that does not compose
            self._finish(FinishedJob(number, JobReturn(status=JobStatus.FAILED, _return_value=error), 0.0))

    def _finish(self, job: FinishedJob) -> None:
        trial, run = next((t, run) for t in self.study.open_trials for run in t.runs if run.number == job.number)
        ended = _ended(run, job.job_return, needs_objective=not self.plan.is_grid)
        if job.number in self._pruned and ended.status == results.FAILED:
            ended = self._pruned[job.number]
        place = OmegaConf.select(job.job_return.hydra_cfg or OmegaConf.create(), "hydra.runtime.output_dir")
        ended.directory = str(job.number) if place is None else os.path.relpath(place, self.directory)
        ended.duration = job.duration
        trial.runs[trial.runs.index(run)] = ended
        self.study.save(trial)
        self._announce(trial, ended)
        value = outcome(job.job_return)
        has_completed = any(run.status == results.COMPLETED for run in self.study.runs)
        if isinstance(value, results.UnknownObjectiveError) and not has_completed:
            raise value  # a misspelt name: all other runs would fail as well
        if not trial.seeds_to_run(self.seeds, retry_failed=False):
            self.study.finish(trial, self._result(trial))
        if time.monotonic() - self._table_written > RESULTS_INTERVAL:
            self._write_table()

    def _prune(self, jobs: Jobs | BatchedJobs) -> None:
        """Report the progress of running trials to the pruner, and end the trials that it selects."""
        for trial in self.study.open_trials:
            run = trial.runs[-1] if trial.runs else None
            if run is None or run.duration is not None or run.number in self._pruned:
                continue
            progress = read_record(self.directory / str(run.number)) or {}
            epoch, score = progress.get("epoch", 0), progress.get("best_score")
            if score is None or epoch <= self._epochs.get(run.number, 0):
                continue
            self._epochs[run.number] = epoch
            so_far = replace(run, status=results.PRUNED, error=f"after epoch {epoch}", objective=score)
            so_far.violation, so_far.minimized = progress.get("violation"), bool(progress.get("minimized"))
            value = self._result(replace(trial, runs=[so_far])).reported(self.plan.maximize)
            if value is not None and self.study.should_stop(trial, epoch, value):
                self._pruned[run.number] = so_far
                jobs.stop(run.number)

    def _announce(self, trial: results.SweepTrial, run: results.SweepRun) -> None:
        n_ended = sum(run.duration is not None for run in self.study.runs)
        seed = "" if run.seed is None else f", seed {run.seed}"
        what = f"FAILED: {run.error}" if run.status == results.FAILED else results.number_text(run.objective)
        what += results.violation_text(run.violation)
        what += f", pruned {run.error}" if run.status == results.PRUNED else ""
        print(
            f"[{n_ended}/{self._n_trials * len(self.seeds)}] trial {trial.number}{seed}: {what} "
            f"({run.duration:.1f} s; {_shown(trial.params)})",
            flush=True,
        )

    def _write_table(self) -> None:
        if trials := self.trial_results():
            frame = results.results_frame(trials, self.plan.maximize)
            write_whole(self.directory / results.RESULTS_FILE, frame.to_csv(index=False))
            if not self.plan.is_grid:
                results.write_optimum(self.directory, self.plan.name, trials, self.plan.maximize)
        self._table_written = time.monotonic()


def _ended(run: results.SweepRun, job_return: JobReturn, needs_objective: bool) -> results.SweepRun:
    """Return the run with the status, objective and error of its job."""
    from maze.train.trainers.common.model_selection.best_model_selection import BestScore  # for sweeps alone

    value = outcome(job_return)
    if job_return.status is not JobStatus.COMPLETED:
        message = translated(value) or value if isinstance(value, BaseException) else value
        return replace(run, status=results.FAILED, error=f"{type(message).__name__}: {message}")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        score = value if isinstance(value, BestScore) else BestScore(value)
        ended = replace(run, status=results.COMPLETED, objective=float(value))
        return replace(ended, violation=score.violation, minimized=not score.maximize)
    if value is None and not needs_objective:
        return replace(run, status=results.COMPLETED)
    what = "nothing was evaluated" if value is None else f"found {value!r}"
    return replace(run, status=results.FAILED, error=f"The run has no objective: {what}.")


def _shown(params: dict[str, str]) -> str:
    return " ".join(f"{key}={text}" for key, text in params.items()) or "no overrides"
