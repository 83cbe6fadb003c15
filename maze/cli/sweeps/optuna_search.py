"""Search with the samplers of Optuna."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maze.cli.errors import UsageError, suggestion
from maze.cli.sweeps.space import PARAMETRIZATION, ChoiceParameter, Parameter, SearchSpace
from maze.cli.sweeps.strategy import Search, Strategy, required
from maze.cli.sweeps.trials import TrialResult
from maze.core.annotations import override

SAMPLERS = ("tpe", "cmaes", "random")
PRUNERS = {"median": "MedianPruner", "halving": "SuccessiveHalvingPruner", "hyperband": "HyperbandPruner"}
"""Names in the configuration, and those of the classes."""
STUDY_FILE = "optuna_study.log"
STUDY_NAME = "sweep"


class OptunaSearch(Search):
    """Asks and tells a study of Optuna in memory. Failed trials are left out of account.

    :param sampler: `tpe`, `cmaes` or `random`.
    :param pruner: `median` ends trials that are worse than half of the others at the same epoch, `halving` leaves ever
        fewer trials ever more epochs, `hyperband` does that with several first numbers of epochs; `None`: no trial ends
        early.
    :raises UsageError: There is no such sampler or pruner.
    """

    name = "optuna"

    def __init__(
        self,
        space: SearchSpace,
        budget: int,
        num_workers: int,
        maximize: bool,
        seed: int,
        sampler: str = "tpe",
        pruner: str | None = None,
    ) -> None:
        super().__init__(space, budget, num_workers, maximize, seed)
        if sampler not in SAMPLERS:
            raise UsageError(
                f"hydra.sweeper.optim.sampler={sampler}: there is no such sampler.{suggestion(sampler, SAMPLERS)}"
            )
        if pruner is not None and pruner not in PRUNERS:
            raise UsageError(
                f"hydra.sweeper.optim.pruner={pruner}: there is no such pruner.{suggestion(pruner, PRUNERS)}"
            )
        self._pruner_name, self.prunes = pruner, pruner is not None
        self._optuna = required("optuna", "hydra/sweeper=optuna")
        if sampler == "cmaes":
            required("cmaes", "hydra.sweeper.optim.sampler=cmaes")
        self.sampler_name = sampler
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._distributions = {p.key: _distribution(self._optuna, p) for p in space.parameters}
        self._reset()

    @override(Search)
    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "sampler": self.sampler_name,
            **({"pruner": self._pruner_name} if self.prunes else {}),
        }

    @override(Search)
    def _reset(self) -> None:
        samplers = self._optuna.samplers
        seed = self.seed % 2**32
        with _without_warnings():
            if self.sampler_name == "tpe":
                sampler = samplers.TPESampler(seed=seed)
            elif self.sampler_name == "cmaes":
                sampler = samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
            else:
                sampler = samplers.RandomSampler(seed=seed)
            pruner = getattr(self._optuna.pruners, PRUNERS.get(str(self._pruner_name), "NopPruner"))()
            self._study = self._optuna.create_study(sampler=sampler, pruner=pruner, direction=self._direction)

    @property
    def _direction(self) -> str:
        return "maximize" if self.maximize else "minimize"

    @override(Search)
    def _ask(self) -> tuple[Any, dict[str, str]]:
        with _without_warnings():
            trial = self._study.ask(self._distributions)
        return trial, {p.key: _text(p, trial.params[p.key]) for p in self.space.parameters}

    @override(Strategy)
    def should_stop(self, trial: int, epoch: int, objective: float) -> bool:
        handle = self._handles[trial]
        if not isinstance(handle, self._optuna.Trial):  # of an earlier process
            return False
        with _without_warnings():
            handle.report(objective, epoch)
            return bool(handle.should_prune())

    @override(Search)
    def _tell(self, handle: Any, objective: float | None) -> None:
        states = self._optuna.trial.TrialState
        with _without_warnings():
            if objective is None:
                self._study.tell(handle, state=states.FAIL)
            else:
                self._study.tell(handle, objective)

    @override(Search)
    def _tell_unasked(self, params: Mapping[str, str], objective: float | None) -> None:
        with _without_warnings():
            self._study.add_trial(self._finished_trial(params, objective))

    def write_study(self, directory: Path, results: Sequence[TrialResult]) -> None:
        """Writes the trials as a study that Optuna's own tools read (its `JournalStorage`).

        :param results: Results in the order of their trials; those that the file has already are left as they are.
        """
        path = directory / STUDY_FILE
        # Nobody else writes here as long as the sweep's journal is locked; a lock is what a killed process left.
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        try:
            self._complete_study(path, results)
        except (ValueError, KeyError) as error:
            print(f"{path} is damaged ({type(error).__name__}); it is written anew.")
            path.replace(path.with_suffix(".damaged"))
            self._complete_study(path, results)

    def _complete_study(self, path: Path, results: Sequence[TrialResult]) -> None:
        storages = self._optuna.storages
        with _without_warnings():
            backend = storages.journal.JournalFileBackend(
                str(path), lock_obj=storages.journal.JournalFileOpenLock(str(path))
            )
            study = self._optuna.create_study(
                study_name=STUDY_NAME,
                storage=storages.JournalStorage(backend),
                direction=self._direction,
                load_if_exists=True,
            )
            known = {trial.user_attrs.get("trial") for trial in study.get_trials(deepcopy=False)}
            for result in results:
                if result.trial not in known:
                    study.add_trial(self._stored_trial(result))

    def _stored_trial(self, result: TrialResult) -> Any:
        attributes: dict[str, Any] = {
            "trial": result.trial,
            "run_dirs": list(result.run_dirs),
            "error": result.error,
            "objective": result.objective,
        }
        constraints = {} if result.violation is None else {"violation": result.violation}
        return self._finished_trial(result.params, result.signed(self.maximize), attributes, constraints)

    def _finished_trial(
        self,
        params: Mapping[str, str],
        objective: float | None,
        attributes: Mapping[str, Any] | None = None,
        constraints: Mapping[str, float] | None = None,
    ) -> Any:
        states = self._optuna.trial.TrialState
        return self._optuna.trial.create_trial(
            state=states.FAIL if objective is None else states.COMPLETE,
            value=objective,
            params={p.key: _value(p, params[p.key]) for p in self.space.parameters},
            distributions=self._distributions,
            user_attrs=dict(attributes or {}),
            constraints=dict(constraints or {}),
        )


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about features of Optuna that it calls experimental
        yield


def _distribution(optuna: Any, parameter: Parameter) -> Any:
    distributions = optuna.distributions
    if isinstance(parameter, ChoiceParameter):
        return distributions.CategoricalDistribution(parameter.options)
    if parameter.lower is None or parameter.upper is None:
        raise UsageError(f"{PARAMETRIZATION}: {parameter.key}: Optuna needs lower and upper.")
    if parameter.log and parameter.step is not None:
        raise UsageError(
            f"{PARAMETRIZATION}: {parameter.key}: Optuna has no step on a logarithmic scale; leave it out."
        )
    if parameter.integer:
        step = 1 if parameter.step is None else max(1, round(parameter.step))
        return distributions.IntDistribution(round(parameter.lower), round(parameter.upper), parameter.log, step)
    return distributions.FloatDistribution(parameter.lower, parameter.upper, parameter.log, parameter.step)


def _text(parameter: Parameter, value: Any) -> str:
    return str(value) if isinstance(parameter, ChoiceParameter) else parameter.text(float(value))


def _value(parameter: Parameter, text: str) -> Any:
    return text if isinstance(parameter, ChoiceParameter) else parameter.value(text)
