"""The trials of a sweep: a study of Optuna on disk, from which an interrupted sweep resumes; samplers and pruners."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution, distribution_to_json
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from maze.cli.hydra_setup import UsageError, suggestion
from maze.cli.sweeps.results import STUDY_FILE, SweepRun, SweepTrial, TrialResult, reported_value
from maze.cli.sweeps.space import SearchSpace, text_of, texts_of, value_of
from maze.core.annotations import override
from maze.core.errors import CheckpointError, ConfigError, MazeError, did_you_mean, optional_package

STUDY_NAME = "sweep"
optuna.logging.set_verbosity(optuna.logging.WARNING)

SAMPLERS: dict[str, Callable[..., BaseSampler]] = {"tpe": TPESampler, "random": RandomSampler}
"""The samplers by their names in the configuration."""
PRUNERS: dict[str, Callable[[], BasePruner]] = {
    "median": MedianPruner,
    "halving": SuccessiveHalvingPruner,
    "hyperband": HyperbandPruner,
}
"""`median` ends trials below the median of the others at the same epoch. `halving` continues ever fewer trials for ever
more epochs, `hyperband` does so with several initial numbers of epochs."""
COMMON_OPTIMIZERS = ("OnePlusOne", "TwoPointsDE", "CMA", "NGOpt", "TBPSA", "PSO", "RandomSearch", "ScrHammersleySearch")
NO_RESULT_YET = 1e6
"""Loss of a failed trial for Nevergrad as long as no other trial has finished."""


class Nevergrad(BaseSampler):
    """An optimizer of Nevergrad behind Optuna's interface. A failed trial counts as the worst result so far.

    Its state depends on all its proposals and reports, and is not stored, because it is a pickle. In a resumed sweep,
    all earlier proposals and reports are repeated in their order: with the same random seed, the optimizer is then in
    the state in which the sweep was interrupted. If it proposes other values than before (another version of its
    package), the recorded values are reported.

    :param space: The searched parameters.
    :param optimizer: Name in Nevergrad's registry.
    :param noisy: Whether results of the same values differ; some optimizers then evaluate them again.
    :raises UsageError: Nevergrad has no such optimizer.
    """

    def __init__(
        self, seed: int, space: SearchSpace, maximize: bool, optimizer: str, noisy: bool, budget: int, num_workers: int
    ) -> None:
        self._distributions = dict(space.distributions)
        self._proposals: dict[int, Any] = {}
        self._reported: set[int] = set()
        ng = optional_package("nevergrad", "hpo", "hydra/sweeper=nevergrad needs the package nevergrad")
        registry = ng.optimizers.registry
        if optimizer not in registry:
            raise UsageError(
                f"hydra.sweeper.optim.optimizer={optimizer}: Nevergrad has no such optimizer."
                f"{did_you_mean(optimizer, registry)} Often used: {', '.join(COMMON_OPTIMIZERS)}; all "
                f"{len(registry)}: nevergrad.optimizers.registry."
            )
        self._not_supported = ng.errors.TellNotAskedNotSupportedError
        self._maximize = maximize
        self._worst = -math.inf
        parametrization = ng.p.Dict(
            **{key: _parameter(ng, each, space.hints.get(key, {})) for key, each in space.distributions.items()}
        )
        parametrization.function.deterministic = not noisy
        parametrization.random_state.seed(seed)
        self._optimizer = registry[optimizer](parametrization=parametrization, budget=budget, num_workers=num_workers)

    @override(BaseSampler)
    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._distributions

    @override(BaseSampler)
    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        trials = study.get_trials(deepcopy=False)
        complete = [other for other in trials if len(other.params) == len(self._distributions)]
        values: dict[str, Any] = {}
        for proposed in [*(other for other in complete if other.number not in self._proposals), trial]:
            for other in complete:
                ended, started = other.datetime_complete, proposed.datetime_start
                was_known = ended is not None and started is not None and ended <= started
                if was_known and other.number < proposed.number and other.number not in self._reported:
                    self._reported.add(other.number)
                    value = reported_value(other.value, other.constraints.get("violation"), self._maximize)
                    self._tell(self._proposals[other.number], other.params, value)
            proposal, values = self._ask()
            is_repeated = proposed is trial or values == proposed.params
            self._proposals[proposed.number] = proposal if is_repeated else None
        return values

    @override(BaseSampler)
    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise ValueError(f"{param_name}: the optimizer proposed a value outside of {param_distribution}")

    def _ask(self) -> tuple[Any, dict[str, Any]]:
        """Return a proposal in the optimizer's form, and its values."""
        candidate = self._optimizer.ask()
        values = {}
        for key, each in self._distributions.items():
            value = candidate.value[key]
            value = each.choices[int(value)] if isinstance(each, CategoricalDistribution) else float(value)
            values[key] = value_of(each, text_of(each, value))
        return candidate, values

    def _tell(self, proposal: Any, params: Mapping[str, Any], value: float | None) -> None:
        """Report a result to the optimizer.

        :param proposal: Proposal of the optimizer; `None`: it did not propose these values.
        :param value: Objective; `None`: the trial failed.
        """
        loss = self._worst if value is None else -value if self._maximize else value
        self._worst = max(self._worst, loss)
        if proposal is None:
            values = {
                key: each.choices.index(params[key]) if isinstance(each, CategoricalDistribution) else params[key]
                for key, each in self._distributions.items()
            }
            proposal = self._optimizer.parametrization.spawn_child(new_value=values)
        # Designs that are drawn beforehand (Hammersley and similar) take no results of other values.
        with suppress(self._not_supported):
            self._optimizer.tell(proposal, NO_RESULT_YET if loss == -math.inf else loss)


def _parameter(ng: Any, distribution: Any, hint: Mapping[str, Any]) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return (ng.p.TransitionChoice if hint.get("ordered") else ng.p.Choice)(range(len(distribution.choices)))
    bounds = {"lower": distribution.low, "upper": distribution.high, **hint}
    step = bounds.pop("step", None)
    scalar = ng.p.Log(**bounds, exponent=step) if distribution.log else ng.p.Scalar(**bounds)
    if step is not None and not distribution.log:
        scalar.set_mutation(sigma=step)
    return scalar.set_integer_casting() if isinstance(distribution, IntDistribution) else scalar


def _locked(path: Path) -> IO[bytes]:
    """Open the file of a study for reading, which no other process can open then; it is created if it is missing."""
    if not path.exists():
        path.touch()
    file = open(path, "rb")  # noqa: SIM115 (closed with the study)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"hydra.sweep.dir: another process runs the sweep in {path.parent}. Wait until it ends, or choose another "
            "directory."
        ) from error
    return file


@dataclass
class Plan:
    """The trials of a sweep and their order.

    :param name: `grid`, `optuna` or `nevergrad`.
    :param space: The varied parameters.
    :param maximize: Whether a larger objective is better.
    :param options: Further options of a search, see :class:`maze.cli.sweeps.sweepers.SearchSweep`.
    """

    name: str
    space: SearchSpace
    maximize: bool
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.distributions = dict(self.space.distributions)
        if self.is_grid:
            return
        for option, known in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
            name = self.options.get(option)
            if name is not None and name not in known:
                raise UsageError(
                    f"hydra.sweeper.optim.{option}={name}: there is no such {option}.{suggestion(name, known)}"
                )
        with self.quietly():
            self.pruner = PRUNERS[self.options["pruner"]]() if self.prunes else NopPruner()
            self.sampler(0)

    @property
    def is_grid(self) -> bool:
        return self.name == "grid"

    @property
    def prunes(self) -> bool:
        """Whether trials end early."""
        return self.options.get("pruner") is not None

    def settings(self) -> dict[str, Any]:
        """Return the settings that are compared when the sweep is resumed; JSON."""
        if self.is_grid:
            return {}
        space = {key: distribution_to_json(each) for key, each in self.distributions.items()}
        return {**self.options, "space": space, "hints": self.space.hints, "maximize": self.maximize}

    @property
    def combinations(self) -> Iterator[dict[str, str]]:
        """The trials of a grid, in the order of Hydra's basic sweeper."""
        listed = {key: texts_of(each) for key, each in self.distributions.items()}
        return (dict(zip(listed, texts, strict=True)) for texts in itertools.product(*listed.values()))

    @property
    def n_trials(self) -> int:
        if not self.is_grid:
            return int(self.options["budget"])
        return math.prod(len(texts_of(each)) for each in self.distributions.values())

    def sampler(self, number: int) -> BaseSampler:
        """Return the sampler for the next trial of a search.

        Samplers without a state of their own get another seed for each trial, so that a resumed search makes the same
        proposals.

        :param number: Number of the trial.
        """
        seed = self.options["seed"] % 2**32
        if self.name == "nevergrad":
            options = {name: self.options[name] for name in ("optimizer", "noisy", "budget", "num_workers")}
            return Nevergrad(seed, self.space, self.maximize, **options)
        return SAMPLERS[self.options["sampler"]](seed=(seed + number * 0x9E3779B1) % 2**32)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Ignore warnings of Optuna and Nevergrad, and name the option in their errors."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            except MazeError:
                raise
            except (ImportError, ValueError, RuntimeError, TypeError) as error:
                option = "optimizer" if self.name == "nevergrad" else "sampler"
                raise ConfigError(
                    f"hydra.sweeper.optim.{option}={self.options.get(option)} does not work with this search "
                    f"({type(error).__name__}: {error}). Choose another one."
                ) from error


class SweepStudy:
    """The trials of a running sweep; no other process can open them meanwhile.

    A trial of the sweep is a trial of the study, with its runs as a user attribute. A finished trial of a study cannot
    change: where a grid runs a trial again, a further trial with the same number (`trial`) replaces it.

    :param directory: Directory of the sweep.
    :param maximize: Direction of a new study.
    :raises CheckpointError: The file is damaged.
    """

    def __init__(self, directory: Path, maximize: bool) -> None:
        self.trials: dict[int, SweepTrial] = {}
        """By their number."""
        self._open: dict[int, optuna.Trial] = {}
        """Trials without a stored result, by their number."""
        self._sampler: BaseSampler | None = None
        self._path = directory / STUDY_FILE
        self._file = _locked(self._path)
        self._maximize = maximize
        self.settings: dict[str, Any] = {}
        self._is_new = b"\n" not in self._file.read()
        if self._is_new:
            return
        try:
            self._storage = JournalStorage(JournalFileBackend(str(self._path)))
            self._study = optuna.load_study(study_name=STUDY_NAME, storage=self._storage)
            self.settings.update(self._study.user_attrs.get("settings", {}))
            self._read_trials()
        except BaseException as error:
            self._file.close()
            if isinstance(error, MazeError | OSError) or not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"{self._path} cannot be read as the study of a sweep ({type(error).__name__}: {error}). Start a new "
                "sweep in another directory."
            ) from error

    def __enter__(self) -> SweepStudy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    @property
    def open_trials(self) -> list[SweepTrial]:
        """Trials whose result is not stored so far."""
        return [self.trials[number] for number in self._open]

    @property
    def runs(self) -> list[SweepRun]:
        return [run for trial in self.trials.values() for run in trial.runs]

    def begin(self, plan: Plan, settings: Mapping[str, Any]) -> None:
        """Store the settings of a new sweep; check that a resumed sweep has the settings it was started with.

        :param settings: Settings besides those of the plan.
        :raises UsageError: The resumed sweep was started with other settings.
        """
        plain: dict[str, Any] = json.loads(json.dumps({**plan.settings(), "sweeper": plan.name, **settings}))
        may_change = ("seeds",) if plan.is_grid else ("budget", "num_workers")
        for name in plain if self.settings else ():
            if name not in may_change and self.settings.get(name) != plain[name]:
                raise UsageError(
                    f"hydra.sweep.dir: the sweep in {self._path.parent} was started with another {name}: "
                    f"{self.settings.get(name)!s:.120}, now {plain[name]!s:.120}. Resume it with the command it was "
                    "started with (its multirun.yaml has all overrides), or choose another directory."
                )
        self._remove_torn_line()
        if self._is_new:
            self._storage = JournalStorage(JournalFileBackend(str(self._path)))
            direction = StudyDirection.MAXIMIZE if self._maximize else StudyDirection.MINIMIZE
            self._study = optuna.create_study(study_name=STUDY_NAME, storage=self._storage, direction=direction)
            self._is_new = False
        self._study.set_user_attr("settings", plain)
        self.settings, self.plan = plain, plan
        if plan.is_grid:
            known = {tuple(trial.params.items()) for trial in self.trials.values()}
            self._combinations = (params for params in plan.combinations if tuple(params.items()) not in known)
        else:
            self._study.pruner = plan.pruner

    def _remove_torn_line(self) -> None:
        """Remove the line that a killed process has begun; until then the file is only read."""
        content = self._path.read_bytes()
        n_whole = content.rfind(b"\n") + 1
        if n_whole < len(content):
            with open(self._path, "r+b") as file:
                file.truncate(n_whole)

    def propose(self) -> SweepTrial | None:
        """Return the next trial; None: no trials are left."""
        number = len(self.trials)
        with self.plan.quietly():
            if self.plan.is_grid:
                if (params := next(self._combinations, None)) is None:
                    return None
                return self._add(SweepTrial(number, params), self._begun(params, self.plan.distributions))
            if number >= self.plan.n_trials:
                return None
            if not isinstance(self._sampler, Nevergrad):
                self._sampler = self._study.sampler = self.plan.sampler(number)
            proposed = self._study.ask(self.plan.distributions)
            texts = {key: text_of(each, proposed.params[key]) for key, each in self.plan.distributions.items()}
            return self._add(SweepTrial(number, texts), proposed)

    def reopen(self, trial: SweepTrial) -> None:
        """Prepare a finished trial of a grid for further runs."""
        stored = self._study.get_trials(deepcopy=False)
        previous = next(s for s in reversed(stored) if s.user_attrs.get("trial") == trial.number)
        self._add(trial, self._begun(previous.params, previous.distributions))

    def _begun(self, params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]) -> optuna.Trial:
        """Begin a trial of a grid; `ask` refuses values that are not among the choices of earlier trials."""
        begun = create_trial(state=TrialState.RUNNING, params=dict(params), distributions=dict(distributions))
        study_id = self._storage.get_study_id_from_name(STUDY_NAME)
        return optuna.Trial(self._study, self._storage.create_new_trial(study_id, begun))

    def save(self, trial: SweepTrial) -> None:
        """Store the runs of an unfinished trial."""
        self._open[trial.number].set_user_attr("runs", _attributes(trial)["runs"])

    def finish(self, trial: SweepTrial, result: TrialResult) -> None:
        """Store the result of a trial, which the search takes into account from then on."""
        stored = self._open.pop(trial.number)
        value = result.signed(self.plan.maximize)
        with self.plan.quietly():
            if result.violation is not None:
                stored.set_constraint("violation", result.violation)
            self._study.tell(stored, value, TrialState.FAIL if value is None else TrialState.COMPLETE)

    def should_stop(self, trial: SweepTrial, epoch: int, objective: float) -> bool:
        """Return whether the pruner ends a running trial.

        :param epoch: Number of epochs so far.
        :param objective: The best objective so far, see :func:`reported_value`.
        """
        with self.plan.quietly():
            self._open[trial.number].report(objective, epoch)
            return self._open[trial.number].should_prune()

    def _add(self, trial: SweepTrial, proposed: optuna.Trial) -> SweepTrial:
        for name, value in _attributes(trial).items():
            proposed.set_user_attr(name, value)
        self.trials[trial.number], self._open[trial.number] = trial, proposed
        return trial

    def _read_trials(self) -> None:
        study_id = self._storage.get_study_id_from_name(STUDY_NAME)
        for stored in self._study.get_trials(deepcopy=False):
            attributes = stored.user_attrs
            if "runs" not in attributes:  # interrupted while the trial was written
                continue
            runs = [SweepRun(**run) for run in attributes["runs"]]
            trial = SweepTrial(attributes["trial"], dict(attributes["overrides"]), runs)
            self.trials[trial.number] = trial
            if not stored.state.is_finished():
                trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, stored.number)
                self._open[trial.number] = optuna.Trial(self._study, trial_id)


def _attributes(trial: SweepTrial) -> dict[str, Any]:
    return {"trial": trial.number, "overrides": trial.params, "runs": [asdict(run) for run in trial.runs]}
