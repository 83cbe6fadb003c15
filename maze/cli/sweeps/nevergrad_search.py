"""Search with the optimizers of Nevergrad."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from maze.cli.errors import UsageError
from maze.cli.sweeps.space import ChoiceParameter, Parameter, ScalarParameter, SearchSpace
from maze.cli.sweeps.strategy import Search, required
from maze.core.annotations import override
from maze.core.errors import ConfigError, did_you_mean

COMMON = ("OnePlusOne", "TwoPointsDE", "CMA", "NGOpt", "TBPSA", "PSO", "RandomSearch", "ScrHammersleySearch")
NO_RESULT_YET = 1e6
"""Loss of a failed trial as long as no other one has finished."""


class NevergradSearch(Search):
    """Asks and tells an optimizer of Nevergrad. A failed trial counts as the worst result so far.

    :param optimizer: Name in Nevergrad's registry.
    :param noisy: Whether results of the same values differ; some optimizers then evaluate them again.
    :raises UsageError: Nevergrad has no such optimizer.
    """

    name = "nevergrad"

    def __init__(
        self,
        space: SearchSpace,
        budget: int,
        num_workers: int,
        maximize: bool,
        seed: int,
        optimizer: str = "OnePlusOne",
        noisy: bool = False,
    ) -> None:
        super().__init__(space, budget, num_workers, maximize, seed)
        self._nevergrad = required("nevergrad", "hydra/sweeper=nevergrad")
        self.optimizer_name = optimizer
        self.noisy = noisy
        registry = self._nevergrad.optimizers.registry
        if optimizer not in registry:
            raise UsageError(
                f"hydra.sweeper.optim.optimizer={optimizer}: Nevergrad has no such optimizer."
                f"{did_you_mean(optimizer, registry)} "
                f"Often used: {', '.join(COMMON)}; it has {len(registry)} in all (nevergrad.optimizers.registry)."
            )
        self._reset()

    @override(Search)
    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "optimizer": self.optimizer_name, "noisy": self.noisy}

    @override(Search)
    def _reset(self) -> None:
        ng = self._nevergrad
        self._worst: float | None = None
        with self._quietly():
            parameters = {parameter.key: _parameter(ng, parameter) for parameter in self.space.parameters}
            parametrization = ng.p.Dict(**parameters)
            parametrization.function.deterministic = not self.noisy
            parametrization.random_state.seed(self.seed % 2**32)
            self._optimizer: Any = ng.optimizers.registry[self.optimizer_name](
                parametrization=parametrization, budget=self.n_trials, num_workers=self.n_parallel or 1
            )

    @override(Search)
    def _ask(self) -> tuple[Any, dict[str, str]]:
        with self._quietly():
            candidate = self._optimizer.ask()
        return candidate, {p.key: _text(p, candidate.value[p.key]) for p in self.space.parameters}

    @override(Search)
    def _tell(self, handle: Any, objective: float | None) -> None:
        with self._quietly():
            self._optimizer.tell(handle, self._loss(objective))

    @override(Search)
    def _tell_unasked(self, params: Mapping[str, str], objective: float | None) -> None:
        values = {p.key: _value(p, params[p.key]) for p in self.space.parameters}
        loss = self._loss(objective)
        # Designs that are drawn beforehand (Hammersley and its like) do without results.
        with self._quietly(), suppress(self._nevergrad.errors.TellNotAskedNotSupportedError):
            self._optimizer.tell(self._optimizer.parametrization.spawn_child(new_value=values), loss)

    def _loss(self, objective: float | None) -> float:
        if objective is None:
            return NO_RESULT_YET if self._worst is None else self._worst
        loss = -objective if self.maximize else objective
        self._worst = loss if self._worst is None else max(self._worst, loss)
        return loss

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Its warnings are about its own choices; its errors say which optimizer cannot do what."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            except (ImportError, ValueError, RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"hydra.sweeper.optim.optimizer={self.optimizer_name} does not work with this search "
                    f"({type(error).__name__}: {error}). Try another one, for instance {', '.join(COMMON[:3])}."
                ) from error


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


def _text(parameter: Parameter, value: Any) -> str:
    return parameter.options[int(value)] if isinstance(parameter, ChoiceParameter) else parameter.text(float(value))


def _value(parameter: Parameter, text: str) -> Any:
    if isinstance(parameter, ScalarParameter):
        return parameter.value(text)
    return parameter.options.index(text)
