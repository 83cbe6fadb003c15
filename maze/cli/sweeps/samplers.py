"""The samplers and pruners of searches: Optuna's own, and the optimizers of Nevergrad."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from maze.cli.errors import UsageError
from maze.cli.sweeps.results import reported_value
from maze.cli.sweeps.space import ChoiceParameter, Parameter
from maze.core.annotations import override
from maze.core.errors import did_you_mean, optional_package

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

    :param distributions: All parameters of the search.

    :param parameters: The searched parameters.
    :param optimizer: Name in Nevergrad's registry.
    :param noisy: Whether results of the same values differ; some optimizers then evaluate them again.
    :raises UsageError: Nevergrad has no such optimizer.
    """

    def __init__(
        self,
        seed: int,
        distributions: Mapping[str, BaseDistribution],
        maximize: bool,
        parameters: Sequence[Parameter],
        optimizer: str,
        noisy: bool,
        budget: int,
        num_workers: int,
    ) -> None:
        self._distributions = dict(distributions)
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
        self._parameters = parameters
        self._sign = -1 if maximize else 1
        self._worst = -math.inf
        parametrization = ng.p.Dict(**{parameter.key: _parameter(ng, parameter) for parameter in parameters})
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
                if _was_finished(other, proposed) and other.number not in self._reported:
                    self._reported.add(other.number)
                    value = reported_value(
                        other.value, other.constraints.get("violation"), study.direction is StudyDirection.MAXIMIZE
                    )
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
        for p in self._parameters:
            value = candidate.value[p.key]
            text = p.options[int(value)] if isinstance(p, ChoiceParameter) else p.text(float(value))
            values[p.key] = p.value(text)
        return candidate, values

    def _tell(self, proposal: Any, params: Mapping[str, Any], value: float | None) -> None:
        """Report a result to the optimizer.

        :param proposal: None: the optimizer did not propose these values.
        :param value: None: the trial failed.
        """
        loss = self._worst if value is None else self._sign * value
        self._worst = max(self._worst, loss)
        if proposal is None:
            values = {
                p.key: p.options.index(params[p.key]) if isinstance(p, ChoiceParameter) else params[p.key]
                for p in self._parameters
            }
            proposal = self._optimizer.parametrization.spawn_child(new_value=values)
        # Designs that are drawn beforehand (Hammersley and similar) take no results of other values.
        with suppress(self._not_supported):
            self._optimizer.tell(proposal, NO_RESULT_YET if loss == -math.inf else loss)


def _was_finished(trial: FrozenTrial, proposed: FrozenTrial) -> bool:
    """Return whether the result of a trial was known when another trial was proposed."""
    ended, started = trial.datetime_complete, proposed.datetime_start
    return trial.number < proposed.number and ended is not None and started is not None and ended <= started


def _parameter(ng: Any, parameter: Parameter) -> Any:
    if isinstance(parameter, ChoiceParameter):
        kind = ng.p.TransitionChoice if parameter.ordered else ng.p.Choice
        return kind(range(len(parameter.options)))
    bounds = {"lower": parameter.lower, "upper": parameter.upper, "init": parameter.init}
    if parameter.log:
        if parameter.init is None and (parameter.lower is None or parameter.upper is None):
            raise UsageError(f"{parameter.key}: a logarithmic scale needs lower and upper, or init.")
        scalar = ng.p.Log(**bounds, exponent=parameter.step)
    else:
        scalar = ng.p.Scalar(**bounds)
        if parameter.step is not None:
            scalar.set_mutation(sigma=parameter.step)
    if parameter.integer:
        scalar.set_integer_casting()
    return scalar
