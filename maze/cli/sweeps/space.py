"""The parameters of a sweep: parsed from `hydra.sweeper.parametrization` and from the command line."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from maze.cli.errors import UsageError, suggestion
from maze.cli.hydra_setup import value_text

PARAMETRIZATION = "hydra.sweeper.parametrization"
SCALAR_FIELDS = ("lower", "upper", "init", "step", "integer", "log")


@dataclass(frozen=True)
class ScalarParameter:
    """A number.

    :param key: Path of the configuration value.
    :param step: Size of a typical change (Nevergrad), distance between the values (Optuna).
    """

    key: str
    lower: float | None = None
    upper: float | None = None
    init: float | None = None
    step: float | None = None
    integer: bool = False
    log: bool = False

    def __post_init__(self) -> None:
        ends = -math.inf if self.lower is None else self.lower, math.inf if self.upper is None else self.upper
        known = [value for value in (self.lower, self.upper, self.init) if value is not None]
        is_inside = ends[0] < ends[1] and (self.init is None or ends[0] <= self.init <= ends[1])
        if not is_inside or (self.step is not None and self.step <= 0) or (self.log and any(v <= 0 for v in known)):
            raise UsageError(
                f"{PARAMETRIZATION}: {self.key}: expected lower < upper, init between them, a positive step, and "
                f"positive values on a logarithmic scale; found {vars(self)}."
            )

    def text(self, value: float) -> str:
        """Return the value as written in an override: within the bounds, six digits."""
        if self.lower is not None:
            value = max(value, self.lower)
        if self.upper is not None:
            value = min(value, self.upper)
        return str(round(value)) if self.integer else f"{value:.6g}"

    def value(self, text: str) -> float:
        """Return the value of such a text."""
        value = int(text) if self.integer else float(text)
        lower = -math.inf if self.lower is None else self.lower
        upper = math.inf if self.upper is None else self.upper
        return min(max(value, lower), upper)  # six digits may lie just beyond a bound

    def distribution(self, unbounded: bool = False) -> BaseDistribution:
        """Return the distribution for Optuna.

        :param unbounded: Whether bounds may be missing, and the step does not restrict the values.
        :raises UsageError: Optuna has no such distribution.
        """
        where = f"{PARAMETRIZATION}: {self.key}"
        lower, upper, step = self.lower, self.upper, self.step
        if unbounded:
            largest = 2**53 if self.integer else sys.float_info.max
            smallest = (1 if self.integer else sys.float_info.min) if self.log else -largest
            lower, upper, step = smallest if lower is None else lower, largest if upper is None else upper, None
        if lower is None or upper is None:
            raise UsageError(f"{where}: Optuna needs lower and upper.")
        if self.log and step is not None:
            raise UsageError(f"{where}: Optuna has no step on a logarithmic scale; leave it out.")
        if self.integer:
            step = 1 if step is None else max(1, round(step))
            return IntDistribution(round(lower), round(upper), self.log, step)
        return FloatDistribution(lower, upper, self.log, step)

    def examples(self) -> list[str]:
        known = [bound for bound in (self.lower, self.upper, self.init) if bound is not None]
        return [self.text(known[0] if known else 1.0)]


@dataclass(frozen=True)
class ChoiceParameter:
    """One of several values.

    :param key: Path of the configuration value, or a group.
    :param options: The values as written in overrides.
    :param ordered: Whether neighbouring values are similar.
    """

    key: str
    options: tuple[str, ...]
    ordered: bool = False

    def __post_init__(self) -> None:
        if not self.options:
            raise UsageError(f"{PARAMETRIZATION}: {self.key}: the list of values is empty.")

    def text(self, value: Any) -> str:
        """Return the value as written in an override."""
        return str(value)

    def value(self, text: str) -> str:
        """Return the value of such a text."""
        return text

    def distribution(self, unbounded: bool = False) -> BaseDistribution:
        """Return the distribution for Optuna."""
        return CategoricalDistribution(self.options)

    def examples(self) -> list[str]:
        return list(self.options)


Parameter = ScalarParameter | ChoiceParameter


@dataclass(frozen=True)
class SearchSpace:
    """The space of a sweep.

    :param parameters: The varied parameters.
    :param fixed: The overrides that all trials have in common.
    """

    parameters: tuple[Parameter, ...]
    fixed: tuple[str, ...]

    def examples(self) -> Iterable[dict[str, str]]:
        """Yield few sets of values in which each listed value occurs."""
        listed = [parameter.examples() for parameter in self.parameters]
        for index in range(max(map(len, listed), default=1)):
            yield {p.key: values[index % len(values)] for p, values in zip(self.parameters, listed, strict=True)}


def parse_space(parametrization: Mapping[str, Any], arguments: Sequence[str], parser: OverridesParser) -> SearchSpace:
    """Read the space of a search; arguments of the command line replace or pin entries of the parametrisation.

    :param parametrization: Keys mapped to scalars, lists and texts in Hydra's grammar.
    :param arguments: The command's overrides, including sweeps.
    :raises UsageError: There are no parameters, or a parameter cannot be searched.
    """
    parameters = {key: _from_config(key, entry, parser) for key, entry in parametrization.items()}
    fixed = []
    for override in parser.parse_overrides(list(arguments)):
        key = override.get_key_element()
        for known in [known for known in parameters if known.lstrip("+") == key.lstrip("+~")]:
            del parameters[known]
        if override.is_sweep_override():
            parameters[key] = _from_override(key, override)
        else:
            fixed.append(_override_text(override))
    if not parameters:
        raise UsageError(
            f"The search space is empty: add parameters to {PARAMETRIZATION}, or on the command line, for instance "
            "'algorithm.lr=tag(log, interval(0.0001, 0.01))'."
        )
    return SearchSpace(tuple(parameters.values()), tuple(fixed))


def parse_grid(params: Mapping[str, str], arguments: Sequence[str], parser: OverridesParser) -> SearchSpace:
    """Read the space of a grid; arguments of the command line replace entries of `params`.

    :param params: Keys mapped to values as on the command line.
    :param arguments: The command's overrides, including sweeps.
    :raises UsageError: The values of a key cannot be listed.
    """
    listed = [f"{key}={text}" for key, text in params.items()]
    overrides = {o.get_key_element(): o for o in parser.parse_overrides(listed)}
    for override in parser.parse_overrides(list(arguments)):
        overrides.pop(override.get_key_element(), None)
        overrides[override.get_key_element()] = override
    swept = {key: override for key, override in overrides.items() if override.is_sweep_override()}
    return SearchSpace(
        tuple(ChoiceParameter(key, tuple(_swept_texts(override))) for key, override in swept.items()),
        tuple(_override_text(override) for key, override in overrides.items() if key not in swept),
    )


def _override_text(override: Override) -> str:
    """Return an override without a sweep, as it is passed to the jobs."""
    key = override.get_key_element()
    if override.is_delete() and override.value() is None:
        return key
    return f"{key}={override.get_value_element_as_str()}"


def _swept_texts(override: Override) -> list[str]:
    """Return the values of a discrete sweep, as written in overrides.

    :raises UsageError: The sweep is an interval, whose values cannot be listed.
    """
    if not override.is_discrete_sweep():
        raise UsageError(
            f"{override.input_line}: a grid needs a list of values. To search an interval, choose "
            "hydra/sweeper=nevergrad or hydra/sweeper=optuna."
        )
    return [str(text) for text in override.sweep_string_iterator()]


def _from_config(key: str, entry: Any, parser: OverridesParser) -> Parameter:
    if isinstance(entry, Mapping):
        return _scalar_from_mapping(key, entry)
    if isinstance(entry, list | tuple):
        return ChoiceParameter(key, tuple(map(value_text, entry)))
    if isinstance(entry, str):
        try:
            override = parser.parse_override(f"{key}={entry}")
        except HydraException as error:
            raise UsageError(f"{PARAMETRIZATION}: {key}: cannot read {entry!r}.") from error
        if override.is_sweep_override():
            return _from_override(key, override)
    raise UsageError(
        f"{PARAMETRIZATION}: {key}: expected bounds ({{lower: 0.1, upper: 1}}), a list of values, or a text such as "
        f"interval(0.1, 1) or choice(a, b); found {entry!r}. A constant value belongs into the configuration."
    )


def _scalar_from_mapping(key: str, entry: Mapping[str, Any]) -> ScalarParameter:
    where = f"{PARAMETRIZATION}: {key}"
    for name, value in entry.items():
        if name not in SCALAR_FIELDS:
            raise UsageError(f"{where}: unknown key {name!r}.{suggestion(str(name), SCALAR_FIELDS)}")
        if name in ("integer", "log") and not isinstance(value, bool):
            raise UsageError(f"{where}.{name}: expected true or false, found {value!r}.")
    numbers = {name: _number(f"{where}.{name}", entry.get(name)) for name in ("lower", "upper", "init", "step")}
    return ScalarParameter(key, **numbers, integer=entry.get("integer", False), log=entry.get("log", False))


def _number(where: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{where}: expected a number, found {value!r}.")
    return number


def _from_override(key: str, override: Override) -> Parameter:
    sweep = override.value()
    tags = set(getattr(sweep, "tags", ()))
    if isinstance(sweep, IntervalSweep):
        lower, upper = _number(key, sweep.start), _number(key, sweep.end)
        return ScalarParameter(key, lower, upper, integer=isinstance(sweep.start, int), log="log" in tags)
    ordered = isinstance(sweep, RangeSweep) or (isinstance(sweep, ChoiceSweep) and "ordered" in tags)
    return ChoiceParameter(key, tuple(_swept_texts(override)), ordered)
