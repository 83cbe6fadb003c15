"""The sweepers of Maze: grid search, Nevergrad, Optuna. Optuna is imported when a sweep starts."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from maze.cli.hydra_setup import UsageError, apply_overrides, for_hydra
from maze.cli.launchers import CONSOLE_FILE, LocalLauncher
from maze.cli.sweeps.results import FAILED, STEPS, TrialResult, has_study
from maze.core.annotations import override
from maze.core.errors import MazeError
from maze.core.utils.factory import plain_container

if TYPE_CHECKING:
    from maze.cli.sweeps.study import Plan

SEED_KEYS = ("seeding.env_base_seed", "seeding.agent_base_seed")


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
        if self.objective_step not in STEPS:
            raise UsageError(
                f"hydra.sweeper.objective_step: expected one of {', '.join(STEPS)}, found {self.objective_step!r}."
            )

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    @abstractmethod
    def make_plan(self, arguments: list[str], parser: OverridesParser, seed: int) -> Plan:
        """Return the plan of the sweep.

        :param arguments: The command's overrides.
        :param seed: Seed of random numbers; the same when the sweep is resumed.
        """

    def sweep(self, arguments: list[str]) -> list[TrialResult]:
        from maze.cli.sweeps.study import SweepStudy
        from maze.cli.sweeps.sweep import SweepInProgress

        self.check_options()
        directory = Path(str(self.config.hydra.sweep.dir)).absolute()
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        with ExitStack() as stack:
            study = stack.enter_context(SweepStudy(directory, self.maximize)) if has_study(directory) else None
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
            results = SweepInProgress(plan, study, self.launcher, overrides, directory).run()
        failed = [result for result in results if result.status == FAILED]
        if failed and (self.strict or len(failed) == len(results)):
            which = "all" if len(failed) == len(results) else f"{len(failed)} of {len(results)}"
            raise SweepFailedError(
                f"{which} trials of the sweep failed; the first one: {failed[0].error} The output of the runs is in "
                f"their directories ({CONSOLE_FILE} with hydra/launcher=local)."
            )
        return results

    def _seeds(self) -> list[int | None]:
        if self.seeds is None and self.n_seeds == 1:
            return [None]
        if "seeding" not in self.config:
            raise UsageError("hydra.sweeper.n_seeds: this configuration has no section `seeding`.")
        if self.seeds is not None:
            return list(dict.fromkeys(self.seeds))
        first = OmegaConf.select(self.config, SEED_KEYS[0])
        return [(first or 0) + index for index in range(self.n_seeds)]

    def _seed_overrides(self, seed: int | None) -> list[str]:
        """Return the overrides for the seed of a run; both seeds keep their difference, modulo the range of seeds."""
        if seed is None:
            return []
        env_seed, agent_seed = (OmegaConf.select(self.config, key) for key in SEED_KEYS)
        difference = 0 if env_seed is None or agent_seed is None else agent_seed - env_seed
        return [f"{SEED_KEYS[0]}={seed}", f"{SEED_KEYS[1]}={(seed + difference) % 2**32}"]

    def _check_composition(self, plan: Plan, seeds: Sequence[int | None]) -> None:
        """Find unknown keys and options before the first run: with one value of each key, and all options of groups."""
        groups = set(self.config.hydra.runtime.choices)
        checked: set[tuple[str, ...]] = set()
        for params in plan.space.examples():
            choices = tuple(text for key, text in params.items() if key.lstrip("+") in groups)
            if choices in checked:
                continue
            checked.add(choices)
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
    """A search for good values.

    :param optim: Options of the search: `budget`, `num_workers`, `maximize`, `seed` and those of its kind.
    :param parametrization: The search space.
    """

    name: ClassVar[str]
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
            value = self.optim.get(name, False)
            if not isinstance(value, bool):
                raise UsageError(f"hydra.sweeper.optim.{name}: expected true or false, found {value!r}.")

    @override(MazeSweeper)
    def make_plan(self, arguments: list[str], parser: OverridesParser, seed: int) -> Plan:
        from maze.cli.sweeps.space import parse_space
        from maze.cli.sweeps.study import Plan

        options = {name: value for name, value in self.optim.items() if name != "maximize"}
        options["seed"] = seed if self.optim["seed"] is None else int(self.optim["seed"])
        space = parse_space(self.parametrization, arguments, parser, self.name == NevergradSweep.name)
        return Plan(self.name, space, self.maximize, options)


class NevergradSweep(SearchSweep):
    """Search with an optimizer of Nevergrad."""

    name = "nevergrad"


class OptunaSweep(SearchSweep):
    """Search with a sampler of Optuna."""

    name = "optuna"


def _check_number(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"hydra.sweeper.{name}: expected a whole number of at least 1, found {value!r}.")
