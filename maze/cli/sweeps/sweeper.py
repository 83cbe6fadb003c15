"""What all sweepers of Maze have in common: seeds, journal, failures, results."""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maze.cli.errors import UsageError, translated
from maze.cli.local_launcher import CONSOLE_FILE, FinishedJob, LocalLauncher
from maze.cli.sweeps.jobs import Jobs, open_jobs
from maze.cli.sweeps.journal import SweepJournal, earlier_settings
from maze.cli.sweeps.objective import STEPS, UnknownObjectiveError
from maze.cli.sweeps.results import RESULTS_FILE, broken_text, number_text, results_table, write_results
from maze.cli.sweeps.strategy import Strategy
from maze.cli.sweeps.trials import COMPLETED, FAILED, PRUNED, SweepRun, SweepTrial, TrialResult, ranked
from maze.core.errors import MazeError
from maze.train.trainers.common.model_selection.best_model_selection import BestScore
from maze.train.utils.progress import read_record

SEED_KEYS = ("seeding.env_base_seed", "seeding.agent_base_seed")
LOOK_INTERVAL = 1.0
"""Seconds after which a search that ends trials early looks at those that run."""
RESULTS_INTERVAL = 1.0
"""Seconds between two versions of the results table while the sweep runs."""


class SweepFailedError(MazeError):
    """A sweep ended without a usable result."""


class MazeSweeper(Sweeper):  # type: ignore[misc, unused-ignore]
    """Runs the trials of a strategy, with all seeds, and writes down what happens.

    :param objective: Statistic that trials are compared by; None: what a training's best evaluation was chosen by, the
        mean reward unless its configuration says otherwise.
    :param objective_step: Which log step of the statistic counts: `best`, `last`, or the `mean` of all.
    :param n_seeds: Number of runs with different seeds per trial.
    :param seeds: The seeds, in place of `n_seeds`.
    :param strict: Whether a failed trial makes the whole command fail at the end.
    """

    def __init__(
        self,
        objective: str | None = None,
        objective_step: str = "best",
        n_seeds: int = 1,
        seeds: Sequence[int] | None = None,
        strict: bool = False,
    ) -> None:
        self.objective = objective
        self.objective_step = objective_step
        self.n_seeds = n_seeds
        self.given_seeds = seeds
        self.strict = strict
        self.batch_size: int | None = None
        self.config: DictConfig
        self.hydra_context: HydraContext
        self.launcher: Launcher

    def check_options(self) -> None:
        """Raises an error for an option that cannot be right; Hydra would wrap one raised by the constructor."""
        n_seeds: Any = self.n_seeds
        seeds: Any = self.given_seeds
        if not isinstance(n_seeds, int) or n_seeds < 1:
            raise UsageError(f"hydra.sweeper.n_seeds: expected a whole number of at least 1, got {n_seeds!r}.")
        is_list = isinstance(seeds, Sequence) and not isinstance(seeds, str)
        if seeds is not None and not (is_list and seeds and all(type(seed) is int for seed in seeds)):
            raise UsageError(f"hydra.sweeper.seeds: expected a list of whole numbers, got {seeds!r}.")
        if self.objective_step not in STEPS:
            raise UsageError(
                f"hydra.sweeper.objective_step: expected one of {', '.join(STEPS)}, got {self.objective_step!r}."
            )

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    @abstractmethod
    def make_strategy(self, arguments: list[str], parser: OverridesParser, seed: int) -> Strategy:
        """What the sweep tries.

        :param arguments: The command's overrides.
        :param seed: For random numbers; the same when the sweep is resumed.
        """

    def on_results(self, directory: Path, results: Sequence[TrialResult], maximize: bool) -> None:
        """Called with the results so far when there are new ones, in the order of the trials."""

    def sweep(self, arguments: list[str]) -> list[TrialResult]:
        self.check_options()
        directory = Path(str(self.config.hydra.sweep.dir)).absolute()
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        # The strategy is made before the journal, so that a wrong command leaves nothing behind.
        earlier = earlier_settings(directory) or {}
        strategy = self.make_strategy(list(arguments), parser, earlier.get("random_seed", secrets.randbits(31)))
        seeds = self._seeds()
        self._check_that_it_can_prune(strategy, seeds)
        self._check_that_it_composes(strategy, seeds)
        directory.mkdir(parents=True, exist_ok=True)
        with SweepJournal(directory) as journal:
            settings = {
                **strategy.settings(),
                "sweeper": strategy.name,
                "overrides": list(strategy.fixed),
                "seeds": seeds,
                "objective": self.objective,
                "objective_step": self.objective_step,
            }
            journal.begin(settings, strategy.may_change)
            OmegaConf.save(self.config, directory / "multirun.yaml")
            progress = _SweepInProgress(self, strategy, journal, seeds, directory)
            results = progress.run()
        self._end(results, strategy)
        return results

    def _seeds(self) -> list[int | None]:
        if self.given_seeds is None and self.n_seeds == 1:
            return [None]
        if "seeding" not in self.config:
            raise UsageError("hydra.sweeper.n_seeds: this configuration has no section `seeding`.")
        if self.given_seeds is not None:
            return list(dict.fromkeys(self.given_seeds))
        first = OmegaConf.select(self.config, SEED_KEYS[0])
        return [(first or 0) + index for index in range(self.n_seeds)]

    def seed_overrides(self, seed: int | None) -> list[str]:
        """Overrides that give a run its seed; the agents' keeps its distance from the environments'."""
        if seed is None:
            return []
        env_seed, agent_seed = (OmegaConf.select(self.config, key) for key in SEED_KEYS)
        distance = 0 if env_seed is None or agent_seed is None else agent_seed - env_seed
        return [f"{SEED_KEYS[0]}={seed}", f"{SEED_KEYS[1]}={seed + distance}"]

    def _check_that_it_composes(self, strategy: Strategy, seeds: Sequence[int | None]) -> None:
        """Finds unknown keys and options before anything is started: with one value of each key, and all of groups."""
        groups = set(self.config.hydra.runtime.choices)
        checked: set[tuple[str, ...]] = set()
        for params in strategy.examples():
            choices = tuple(text for key, text in params.items() if key.lstrip("+") in groups)
            if choices in checked:
                continue
            checked.add(choices)
            overrides = [*strategy.fixed, *(f"{key}={text}" for key, text in params.items())]
            self.hydra_context.config_loader.load_sweep_config(self.config, overrides + self.seed_overrides(seeds[0]))

    def _check_that_it_can_prune(self, strategy: Strategy, seeds: Sequence[int | None]) -> None:
        if not strategy.prunes:
            return
        obstacle = ""
        if not isinstance(self.launcher, LocalLauncher):
            obstacle = "jobs have to be in processes of their own; use hydra/launcher=local or ray"
        elif self.objective is not None:
            obstacle = "trials are compared by their best evaluation; leave hydra.sweeper.objective out"
        elif len(seeds) > 1:
            obstacle = "trials are compared epoch by epoch, one run each; leave hydra.sweeper.n_seeds and seeds out"
        if obstacle:
            raise UsageError(f"hydra.sweeper.optim.pruner: to end trials early, {obstacle}.")

    def _end(self, results: Sequence[TrialResult], strategy: Strategy) -> None:
        failed = [result for result in results if result.status == FAILED]
        if failed and (self.strict or len(failed) == len(results)):
            which = "all" if len(failed) == len(results) else f"{len(failed)} of {len(results)}"
            raise SweepFailedError(
                f"{which} trials of the sweep failed; the first one: {failed[0].error} What the runs printed is in "
                f"their directories ({CONSOLE_FILE} with hydra/launcher=local)."
            )


class _SweepInProgress:
    """One process's part in a sweep."""

    def __init__(
        self,
        sweeper: MazeSweeper,
        strategy: Strategy,
        journal: SweepJournal,
        seeds: Sequence[int | None],
        directory: Path,
    ) -> None:
        self.sweeper = sweeper
        self.strategy = strategy
        self.journal = journal
        self.history = journal.history
        self.seeds = seeds
        self.directory = directory
        self.waiting: deque[tuple[SweepTrial, int | None]] = deque()
        self.open_trials: set[int] = set()
        self.next_run = max(self.history.runs, default=-1) + 1
        self._table_written = -math.inf
        self._reached: dict[int, tuple[int, dict[str, Any]]] = {}
        """Epoch and outcome so far of runs that a search hears of while they run."""
        self._pruned: set[int] = set()

    def run(self) -> list[TrialResult]:
        self._restore()
        n_workers = self.strategy.n_parallel
        size = self.sweeper.batch_size or (n_workers * len(self.seeds) if n_workers else None)
        jobs, capacity = open_jobs(self.sweeper.launcher, size)
        n_trials = max(self.strategy.n_trials, len(self.history.trials))
        print(f"Sweep of {n_trials} trials in {self.directory}", flush=True)
        try:
            while True:
                while jobs.n_running < capacity and (job := self._next()) is not None:
                    self._start(jobs, *job)
                if not jobs.n_running:
                    break
                for finished in jobs.wait(LOOK_INTERVAL if self.strategy.prunes else None):
                    self._finish(finished)
                if self.strategy.prunes:
                    self._prune(jobs)
        finally:
            jobs.close()
            self._write_table()
        results = self.results()
        print(f"\n{results_table(results, self.strategy.maximize)}\n")
        best = next(
            (result for result in ranked(results, self.strategy.maximize) if result.objective is not None), None
        )
        if best is not None:
            shown = number_text(best.objective) + broken_text(best.violation)
            print(f"Best: trial {best.trial}, {shown}: {_shown(best.params)}")
        print(f"All results: {self.directory / RESULTS_FILE}", flush=True)
        return results

    def results(self) -> list[TrialResult]:
        return [self._result(trial) for trial in self.history.trials.values()]

    def _result(self, trial: SweepTrial) -> TrialResult:
        return trial.result(self.seeds, self.strategy.needs_objective)

    def _restore(self) -> None:
        """Takes up what an earlier process left: its results count, its unfinished runs are run again."""
        history = self.history
        if not history.trials:
            return
        events = []
        for kind, number in history.order:
            objective = self._told(history.trials[number]) if kind == "told" else None
            events.append((kind, number, history.trials[number].params, objective))
        self.strategy.restore(events)
        n_done = 0
        for trial in history.trials.values():
            missing = trial.seeds_to_run(self.seeds, self.strategy.retries_failed)
            n_done += not missing
            if missing:
                self.open_trials.add(trial.number)
                self.waiting.extend((trial, seed) for seed in missing)
            elif trial.number not in history.told:
                self._tell(trial)
        print(f"Resuming the sweep in {self.directory}: {n_done} trials are finished.")

    def _next(self) -> tuple[SweepTrial, int | None] | None:
        if self.waiting:
            return self.waiting.popleft()
        limit = self.strategy.n_parallel
        if limit is not None and len(self.open_trials) >= limit:
            return None
        params = self.strategy.propose()
        if params is None:
            return None
        number = len(self.history.trials)
        self.journal.write("proposed", trial=number, params=params)
        trial = self.history.trials[number]
        self.open_trials.add(number)
        self.waiting.extend((trial, seed) for seed in self.seeds)
        return self.waiting.popleft()

    def _start(self, jobs: Jobs, trial: SweepTrial, seed: int | None) -> None:
        number = self.next_run
        self.next_run += 1
        self.journal.write("started", trial=trial.number, run=number, seed=seed, directory=str(number))
        overrides = [*self.strategy.fixed, *trial.overrides, *self.sweeper.seed_overrides(seed)]
        try:
            jobs.start(number, overrides)
        except (HydraException, OmegaConfBaseException) as error:  # a combination of values that does not compose
            self._finish(FinishedJob(number, JobReturn(status=JobStatus.FAILED, _return_value=error), 0.0))

    def _finish(self, job: FinishedJob) -> None:
        trial = next(t for t in self.history.trials.values() if any(run.number == job.number for run in t.runs))
        outcome = _outcome(job.job_return, self.strategy.needs_objective)
        if job.number in self._pruned and outcome["status"] == FAILED:
            epoch, reached = self._reached[job.number]
            outcome = {"status": PRUNED, "error": f"after epoch {epoch}", **reached}
        outcome["directory"] = self._run_directory(job)
        self.journal.write("ended", trial=trial.number, run=job.number, duration=job.duration, **outcome)
        self._announce(trial, job)
        value = job.job_return._return_value
        is_unknown = isinstance(value, UnknownObjectiveError)
        if is_unknown and not any(run.status == COMPLETED for run in self.history.runs.values()):
            raise value  # a misspelt name; every other run would be in vain
        if not trial.seeds_to_run(self.seeds, retry_failed=False):
            self._tell(trial)
            self.open_trials.discard(trial.number)
        if time.monotonic() - self._table_written > RESULTS_INTERVAL:
            self._write_table()

    def _prune(self, jobs: Jobs) -> None:
        """Tells the search how far runs are, and ends those that it gives up."""
        for trial in [self.history.trials[number] for number in self.open_trials]:
            run = trial.runs[-1] if trial.runs else None
            if run is None or run.duration is not None or run.number in self._pruned:
                continue
            record = read_record(self.directory / str(run.number)) or {}
            epoch, score = record.get("epoch", 0), record.get("best_score")
            if score is None or epoch <= self._reached.get(run.number, (0, {}))[0]:
                continue
            outcome: dict[str, Any] = {"objective": score, "violation": record.get("violation")}
            outcome["minimized"] = bool(record.get("minimized"))
            self._reached[run.number] = epoch, outcome
            so_far = SweepTrial(trial.number, trial.params, [SweepRun(run.number, run.seed, "", PRUNED, **outcome)])
            told = so_far.result(self.seeds, needs_objective=True).told(self.strategy.maximize)
            if told is not None and self.strategy.should_stop(trial.number, epoch, told):
                self._pruned.add(run.number)
                jobs.stop(run.number)

    def _run_directory(self, job: FinishedJob) -> str:
        """Where the run wrote, seen from the sweep's directory."""
        place = OmegaConf.select(job.job_return.hydra_cfg or OmegaConf.create(), "hydra.runtime.output_dir")
        return str(job.number) if place is None else os.path.relpath(place, self.directory)

    def _tell(self, trial: SweepTrial) -> None:
        # In the journal before the search knows it: what was told in a process that died is told again.
        self.journal.write("told", trial=trial.number)
        self.strategy.report(trial.number, self._told(trial))

    def _told(self, trial: SweepTrial) -> float | None:
        return self._result(trial).told(self.strategy.maximize)

    def _announce(self, trial: SweepTrial, job: FinishedJob) -> None:
        run = next(run for run in trial.runs if run.number == job.number)
        n_ended = sum(run.duration is not None for run in self.history.runs.values())
        n_runs = max(self.strategy.n_trials, len(self.history.trials)) * len(self.seeds)
        seed = "" if run.seed is None else f", seed {run.seed}"
        value = number_text(run.objective) + broken_text(run.violation)
        what = f"{value}, pruned {run.error}" if run.status == PRUNED else value
        what = f"FAILED: {run.error}" if run.status == FAILED else what
        print(
            f"[{n_ended}/{n_runs}] trial {trial.number}{seed}: {what} ({job.duration:.1f} s; {_shown(trial.params)})",
            flush=True,
        )
        error = job.job_return._return_value
        if run.status == PRUNED:
            return
        if job.job_return.status is JobStatus.FAILED and not isinstance(error, MazeError) and translated(error) is None:
            traceback.print_exception(error, file=sys.stderr)

    def _write_table(self) -> None:
        results = self.results()
        if results:
            write_results(self.directory, results, self.strategy.maximize)
            self.sweeper.on_results(self.directory, results, self.strategy.maximize)
        self._table_written = time.monotonic()


def _outcome(job_return: JobReturn, needs_objective: bool) -> dict[str, Any]:
    """Status, objective and error of a run, as the journal keeps them."""
    value = job_return._return_value
    if job_return.status is not JobStatus.COMPLETED:
        message = translated(value) or value if isinstance(value, BaseException) else value
        return {"status": FAILED, "objective": None, "error": f"{type(message).__name__}: {message}"}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        own = {"violation": value.violation, "minimized": not value.maximize} if isinstance(value, BestScore) else {}
        return {"status": COMPLETED, "objective": float(value), "error": "", **own}
    if value is None and not needs_objective:
        return {"status": COMPLETED, "objective": None, "error": ""}
    what = "nothing was evaluated" if value is None else f"got {value!r}"
    return {"status": FAILED, "objective": None, "error": f"The run has no objective: {what}."}


def _shown(params: dict[str, str]) -> str:
    return " ".join(f"{key}={text}" for key, text in params.items()) or "no overrides"
