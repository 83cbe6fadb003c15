"""The parameters of a sweep: parsed from `hydra.sweeper.parametrization` and from the command line."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from maze.cli.hydra_setup import UsageError, suggestion
from maze.core.utils.config_utils import value_text

PARAMETRIZATION = "hydra.sweeper.parametrization"
SCALAR_FIELDS = ("lower", "upper", "init", "step", "integer", "log")
Hints = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class SearchSpace:
    """The space of a sweep.

    :param distributions: Distribution of each varied key; choices are texts as written in overrides.
    :param fixed: The overrides that all trials have in common.
    :param hints: How Nevergrad changes a key: `lower`, `upper`, `init` and `step` of numbers, `None` where not given;
        `ordered` of choices whose neighbours are similar.
    """

    distributions: Mapping[str, BaseDistribution]
    fixed: tuple[str, ...]
    hints: Hints = field(default_factory=dict)

    def examples(self, groups: Container[str]) -> Iterator[dict[str, str]]:
        """Yield the first value of each key, and then the same with another option of one group.

        :param groups: Names of configuration groups.
        """
        listed = {key: texts_of(distribution) for key, distribution in self.distributions.items()}
        first = {key: texts[0] for key, texts in listed.items()}
        yield first
        for key, texts in listed.items():
            yield from ({**first, key: text} for text in texts[1:] if key.lstrip("+") in groups)


def texts_of(distribution: Any) -> list[str]:
    """Return all choices as written in overrides, or one number."""
    is_choice = isinstance(distribution, CategoricalDistribution)
    return list(distribution.choices) if is_choice else [text_of(distribution, distribution.low)]


def text_of(distribution: Any, value: Any) -> str:
    """Return a value as written in an override; numbers are within the bounds and have six digits."""
    if isinstance(distribution, CategoricalDistribution):
        return str(value)
    value = min(max(value, distribution.low), distribution.high)
    return str(round(value)) if isinstance(distribution, IntDistribution) else f"{value:.6g}"


def value_of(distribution: Any, text: str) -> str | int | float:
    """Return the value of such a text."""
    if isinstance(distribution, CategoricalDistribution):
        return text
    if isinstance(distribution, IntDistribution):
        return int(text)
    value: float = min(max(float(text), distribution.low), distribution.high)  # six digits may be just beyond a bound
    return value


def parse_space(
    parametrization: Mapping[str, Any], arguments: Sequence[str], parser: OverridesParser, is_nevergrad: bool = False
) -> SearchSpace:
    """Read the space of a search; arguments of the command line replace or pin entries of the parametrisation.

    :param parametrization: Keys mapped to scalars, lists and texts in Hydra's grammar.
    :param arguments: The command's overrides, including sweeps.
    :param is_nevergrad: Numbers may have no bounds, and `step` is the size of a typical change; otherwise both bounds
        are needed, and `step` is the distance of values.
    :raises UsageError: There are no parameters, or a parameter cannot be searched.
    """
    hints: Hints | None = {} if is_nevergrad else None
    found = {key: _from_config(key, entry, parser, hints) for key, entry in parametrization.items()}
    fixed = []
    for override in parser.parse_overrides(list(arguments)):
        key = override.get_key_element()
        found = {known: each for known, each in found.items() if known.lstrip("+") != key.lstrip("+~")}
        if override.is_sweep_override():
            found[key] = _from_override(key, override, hints)
        else:
            fixed.append(_override_text(override))
    if not found:
        raise UsageError(
            f"The search space is empty: add parameters to {PARAMETRIZATION}, or on the command line, for instance "
            "'algorithm.lr=tag(log, interval(0.0001, 0.01))'."
        )
    return SearchSpace(found, tuple(fixed), {key: hint for key, hint in (hints or {}).items() if key in found})


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
        {key: CategoricalDistribution(_swept_texts(override)) for key, override in swept.items()},
        tuple(_override_text(override) for key, override in overrides.items() if key not in swept),
    )


def _override_text(override: Override) -> str:
    """Return an override without a sweep, as it is passed to the jobs."""
    key = override.get_key_element()
    if override.is_delete() and override.value() is None:
        return key
    return f"{key}={override.get_value_element_as_str()}"


def _swept_texts(override: Override) -> tuple[str, ...]:
    """Return the values of a discrete sweep, as written in overrides.

    :raises UsageError: The sweep is an interval, whose values cannot be listed.
    """
    if not override.is_discrete_sweep():
        raise UsageError(
            f"{override.input_line}: a grid needs a list of values. To search an interval, choose "
            "hydra/sweeper=nevergrad or hydra/sweeper=optuna."
        )
    return tuple(map(str, override.sweep_string_iterator()))


def _from_config(key: str, entry: Any, parser: OverridesParser, hints: Hints | None) -> BaseDistribution:
    where = f"{PARAMETRIZATION}: {key}"
    if isinstance(entry, Mapping):
        for name in entry:
            if name not in SCALAR_FIELDS:
                raise UsageError(f"{where}: unknown key {name!r}.{suggestion(str(name), SCALAR_FIELDS)}")
        return _numbers(key, hints, **entry)
    if isinstance(entry, list | tuple) and entry:
        return CategoricalDistribution(tuple(map(value_text, entry)))
    if isinstance(entry, str):
        try:
            override = parser.parse_override(f"{key}={entry}")
        except HydraException as error:
            raise UsageError(f"{where}: cannot read {entry!r}.") from error
        if override.is_sweep_override():
            return _from_override(key, override, hints)
    raise UsageError(
        f"{where}: expected bounds ({{lower: 0.1, upper: 1}}), a list of values, or a text such as "
        f"interval(0.1, 1) or choice(a, b); found {entry!r}. A constant value belongs into the configuration."
    )


def _from_override(key: str, override: Override, hints: Hints | None) -> BaseDistribution:
    sweep = override.value()
    tags = getattr(sweep, "tags", ())
    if isinstance(sweep, IntervalSweep):
        return _numbers(key, hints, sweep.start, sweep.end, integer=isinstance(sweep.start, int), log="log" in tags)
    if hints is not None:
        hints[key] = {"ordered": isinstance(sweep, RangeSweep) or "ordered" in tags}
    return CategoricalDistribution(_swept_texts(override))


def _numbers(
    key: str,
    hints: Hints | None,
    lower: Any = None,
    upper: Any = None,
    init: Any = None,
    step: Any = None,
    integer: Any = False,
    log: Any = False,
) -> BaseDistribution:
    """Return the distribution of a number; Optuna checks its bounds, step and scale."""
    given = {"lower": lower, "upper": upper, "init": init, "step": step}
    try:
        numbers = {name: None if value is None else float(value) for name, value in given.items()}
        if not all(value is None or math.isfinite(value) for value in numbers.values()):
            raise ValueError("numbers must be finite")
        if {type(integer), type(log)} != {bool}:
            raise ValueError("integer and log must be true or false")
        low, high, start, distance = numbers.values()
        if hints is not None:
            if (distance is not None and distance <= 0) or (log and start is None and None in (low, high)):
                raise ValueError("the step must be positive; a logarithmic scale needs both bounds, or init")
            hints[key] = numbers
            most = 2**53 if integer else sys.float_info.max
            least = (1 if integer else sys.float_info.min) if log else -most
            low, high, distance = least if low is None else low, most if high is None else high, None
        if low is None or high is None or not low <= (low if start is None else start) <= high:
            raise ValueError("both bounds are needed" if None in (low, high) else "init must lie between the bounds")
        if integer:
            return IntDistribution(round(low), round(high), log, round(distance or 1))
        return FloatDistribution(low, high, log, distance)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{PARAMETRIZATION}: {key}: expected lower, upper, and optionally init, step, integer and log ({error}), "
            f"found { ({**given, 'integer': integer, 'log': log}) }."
        ) from error
