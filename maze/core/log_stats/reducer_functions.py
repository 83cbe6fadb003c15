"""Reduction of values to statistics, for single and vectorised environments.

The decorators of an event are compiled once per level to a plan of inputs and reductions. A :class:`StatsSlot` collects
the values of one event and group until they are reduced. Vectorised simulations keep their values in arrays and reduce
many episodes at once (:meth:`CompiledStat.reduce_each`).
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, ValuesView
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import StatsDefinition, event_definition

logger = logging.getLogger(__name__)

Reducer = Callable[[Any], Any]

_LEVELS = ("step", "episode", "epoch")
# Reducers whose result without the event is 0.
_COUNTS_OCCURRENCES: tuple[Reducer | None, ...] = (len, sum, np.sum)

# Reducers of occurrences only: zeros for absent ones would be wrong.
_OF_OCCURRENCES: tuple[Reducer | None, ...] = (None, len)

# Reducers whose result for an absent event is 0, independent of the length of the period.
_ZERO_OF_ZEROS: tuple[Reducer | None, ...] = (
    *(len, sum, min, max, statistics.mean, statistics.median),
    *(np.sum, np.mean, np.median, np.min, np.max, np.std, np.var),
)


# Reducers whose cumulative statistics need only the last result, not all values.
_ADDED, _COMPARED = (sum, np.sum, len), (max, np.max, min, np.min)
# Whether Python's `sum` of floats adds in order, as for arrays; later versions compensate for rounding.
_ADDS_IN_ORDER = sys.version_info < (3, 12)


class PassedThrough(list[Any]):
    """Several values of one statistic without a reduce function; single values for the level above."""


@dataclass(frozen=True)
class CompiledStat(StatsDefinition):
    """Compiled statistic of an event on one level.

    :param position: Index among the event's statistics of this level, which orders the rows.
    :param counts_absence: Whether a period of the level below without the event counts as well.
    :param of_absence: Function of the zeros of such a period that returns its value; `None`: the value is 0.
    """

    position: int
    counts_absence: bool
    of_absence: Reducer | None

    def reduce(self, values: Any) -> Any:
        """Apply the reduce function.

        :param values: At least one value.
        :return: The result. Without a reduce function: a single value unchanged, several ones as a list.
        """
        if self.reduce_function is None:
            return values[0] if len(values) == 1 else PassedThrough(values)
        result = self.reduce_function(values)
        # The list is reused: a function that returns its argument must not share it.
        return list(values) if result is values else result

    def reduces_arrays(self, dtype: np.dtype[Any]) -> bool:
        """Return whether :meth:`reduce_each` returns an array.

        :param dtype: Type of the array of values.
        """
        return self.reduce_function is len or (self.reduce_function is sum and (dtype.kind in "biu" or _ADDS_IN_ORDER))

    def reduce_each(self, values: np.ndarray, sizes: np.ndarray, n_absent: np.ndarray | None) -> np.ndarray | list[Any]:
        """Reduce the values of many episodes, equivalent to :meth:`reduce` for each of them.

        :param values: The concatenated values of all episodes.
        :param sizes: Number of values of each episode, at least 1, `[n_episodes]`.
        :param n_absent: Number of steps without the event in each episode, `[n_episodes]`; `None`: there are none.
        :return: The result of each episode; numbers as an array, see :meth:`reduces_arrays`.
        """
        if self.reduce_function is len:
            return sizes
        ends = sizes.cumsum()
        if self.reduces_arrays(values.dtype):
            if values.dtype.kind in "biu":
                return np.add.reduceat(values, ends - sizes, dtype=np.int64)
            return np.bincount(np.repeat(np.arange(len(sizes)), sizes), values, len(sizes))
        listed = values.tolist()
        parts = [listed[begin:end] for begin, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]
        if self.counts_absence and n_absent is not None:
            parts = [part + [0] * n_zeros for part, n_zeros in zip(parts, n_absent.tolist(), strict=True)]
        return [self.reduce(part) for part in parts]


@dataclass(frozen=True)
class Variant:
    """The statistics of an event on one level that share their grouping."""

    group_by: str | None
    stats: tuple[CompiledStat, ...]


@dataclass(frozen=True)
class LevelPlan:
    """Reductions of an event on one level.

    :param variants: One per grouping; usually a single one.
    :param grouping: Grouping attributes of the event.
    :param routes: For the output name of the level below: the variants that use it, each with the component of the
        group to keep (`None`: the whole group).
    """

    variants: tuple[Variant, ...]
    grouping: tuple[str, ...]
    routes: dict[str | None, tuple[tuple[int, int | None], ...]]


@cache
def level_plan(event: Callable[..., Any], level: str) -> LevelPlan:
    """Return the plan of an event on one level.

    :param event: The event's interface method.
    :param level: "step", "episode" or "epoch".
    """
    definition = event_definition(event)
    own: list[StatsDefinition] = getattr(definition, level)
    position = _LEVELS.index(level)
    lower: list[StatsDefinition] = getattr(definition, _LEVELS[position - 1]) if position else []
    lowest = definition.step if level == "epoch" else []
    names = [below.output_name for below in lower]
    for stat in own:
        if lower and stat.input_name not in names:
            logger.warning(
                f"{event.__qualname__}: a statistic of each {level} has no values, because input_name="
                f"{stat.input_name!r} is no statistic of each {_LEVELS[position - 1]}; these are {names}."
            )
    by_grouping: dict[str | None, list[CompiledStat]] = {}
    for position, stat in enumerate(own):
        by_grouping.setdefault(stat.group_by, []).append(_compile(position, stat, lower, lowest))
    variants = tuple(Variant(group_by, tuple(stats)) for group_by, stats in by_grouping.items())
    routes = {
        name: tuple(
            (index, _component(event, definition.grouping, lower, variant.group_by, name))
            for index, variant in enumerate(variants)
            if any(stat.input_name == name for stat in variant.stats)
        )
        for name in dict.fromkeys(stat.input_name for stat in own)
    }
    return LevelPlan(variants, definition.grouping, routes)


def stat_value(event: Callable[..., Any], plan: LevelPlan, attributes: dict[str, Any], input_name: str | None) -> Any:
    """Return the value of a fired event for a statistic: one attribute, or all but the grouping.

    :param event: The event.
    :param plan: Statistics of the event on this level.
    :param attributes: Values of the attributes by name.
    :param input_name: The attribute's name; `None`: the only one that is not a grouping.
    :raises ConfigError: The event has no such attribute.
    """
    if input_name is not None:
        try:
            return attributes[input_name]
        except KeyError:
            raise ConfigError(
                f"Event {event.__qualname__} lacks `input_name={input_name!r}`; its attributes {', '.join(attributes)}."
            ) from None
    if plan.grouping:
        attributes = {name: value for name, value in attributes.items() if name not in plan.grouping}
    return next(iter(attributes.values())) if len(attributes) == 1 else attributes


def group_of(
    event: Callable[..., Any], plan: LevelPlan, variant: Variant, attributes: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Return the group of a fired event; `None`: there is no grouping.

    :param event: The event.
    :param plan: Statistics of the event on this level.
    :param variant: The statistics that share the grouping.
    :param attributes: Values of the attributes by name.
    :raises ConfigError: The event lacks a grouping attribute.
    """
    names = plan.grouping if variant.group_by is None else (variant.group_by,)
    if not names:
        return None
    try:
        return tuple(attributes[name] for name in names)
    except KeyError as missing:
        raise ConfigError(
            f"Event {event.__qualname__} is grouped by {missing}, but has the attributes {', '.join(attributes)}."
        ) from None


def _compile(
    position: int, stat: StatsDefinition, lower: list[StatsDefinition], lowest: list[StatsDefinition]
) -> CompiledStat:
    below = _named(stat.input_name, lower)
    counts = below is not None and below.reduce_function in _COUNTS_OCCURRENCES
    of_absence = None
    if below is not None and not counts and below.reduce_function is not None:
        # It counts its periods without the event as zeros, so it has a value even without other periods.
        source = _named(below.input_name, lowest)
        counts = source is not None and source.reduce_function in _COUNTS_OCCURRENCES
        of_absence = None if below.reduce_function in _ZERO_OF_ZEROS else below.reduce_function
    zeros_are_neutral = of_absence is None and stat.reduce_function in (sum, np.sum)
    counts = counts and stat.reduce_function not in _OF_OCCURRENCES and not zeros_are_neutral
    return CompiledStat(**vars(stat), position=position, counts_absence=counts, of_absence=of_absence)


def _named(name: str | None, stats: list[StatsDefinition]) -> StatsDefinition | None:
    return next((stat for stat in stats if stat.output_name == name), None)


def _component(
    event: Callable[..., Any],
    grouping: tuple[str, ...],
    lower: list[StatsDefinition],
    group_by: str | None,
    input_name: str | None,
) -> int | None:
    """Return the component of the group that a variant keeps."""
    below = _named(input_name, lower)
    if group_by is None or below is None:
        return None  # values of fired events have all attributes
    incoming = grouping if below.group_by is None else (below.group_by,)
    if group_by not in incoming:
        raise ConfigError(
            f"Event {event.__qualname__}: statistics are grouped by {group_by!r}, the values of the level below are "
            f"grouped by {', '.join(incoming) or 'nothing'}. Add {group_by!r} to `define_stats_grouping`."
        )
    return incoming.index(group_by)


class StatsSlot:
    """Values of one event and group by input, and their statistics.

    The input lists are never replaced, so that a hot loop may keep their `append`.

    :param variant: The statistics, which share their grouping.
    :param keys: The key of each of the variant's statistics.
    """

    __slots__ = ("_cumulative", "inputs", "keys", "periods", "variant")

    def __init__(self, variant: Variant, keys: tuple[Any, ...]) -> None:
        self.variant = variant
        self.keys = keys
        self.inputs: dict[str | None, list[Any]] = {stat.input_name: [] for stat in variant.stats}
        self.periods: list[int] = []
        """Periods of the level below with values."""
        self._cumulative: dict[int, Any] = {}

    def add(self, name: str | None, value: Any, period: int | None = None) -> None:
        """Add a value of an input.

        :param name: Name of the input.
        :param value: The value.
        :param period: Index of its period of the level below, not below that of the previous call; `None`: none.
        """
        if period is not None and (not self.periods or self.periods[-1] != period):
            self.periods.append(period)
        values = self.inputs.get(name)
        if values is None:
            return
        if type(value) is PassedThrough:
            values.extend(value)
        else:
            values.append(value)

    def add_all(self, name: str | None, values: list[Any], periods: Sequence[int]) -> None:
        """Add one value of each of several periods.

        :param name: Name of the input.
        :param values: The values.
        :param periods: The numbers of the periods, in ascending order.
        """
        if PassedThrough in map(type, values):
            for value in values:
                self.add(name, value)
        elif name in self.inputs:
            self.inputs[name].extend(values)
        if not self.periods or self.periods[-1] < periods[0]:
            self.periods.extend(periods)
        elif not self._counts(periods):  # another group, with values in other periods
            self.periods = sorted({*self.periods, *periods})

    def _counts(self, periods: Sequence[int]) -> bool:
        """Return whether these periods, in ascending order, were counted last."""
        n = len(periods)
        if len(self.periods) < n or (self.periods[-n], self.periods[-1]) != (periods[0], periods[-1]):
            return False
        return isinstance(periods, range) or self.periods[-n:] == periods

    def clear(self) -> None:
        """Drop the inputs; cumulative statistics are kept."""
        for values in self.inputs.values():
            values.clear()
        self.periods.clear()

    def reduce_into(self, stats: dict[Any, Any], n_periods: int, lengths: Sequence[int] = ()) -> None:
        """Calculate the statistics with values and drop the inputs.

        :param n_periods: Number of periods of the level below.
        :param lengths: Number of periods of each of those; 1 for those that are not listed.
        """
        for stat, key in zip(self.variant.stats, self.keys, strict=True):
            values = self.inputs[stat.input_name]
            n_absent = n_periods - (len(self.periods) or len(values)) if stat.counts_absence else 0
            if stat.of_absence is None:
                values = values + [0] * n_absent if n_absent > 0 else values
            elif n_absent > 0:
                present = set(self.periods)
                absent = [length for period, length in enumerate(lengths) if period not in present]
                absent += [1] * (n_absent - len(absent))
                values = values + [stat.of_absence([0] * length) for length in absent]
            if not values:
                continue
            stats[key] = self._accumulate(stat, values) if stat.cumulative else stat.reduce(values)
        self.clear()

    def state(self) -> dict[str, Any]:
        """Return the values that are not reduced yet, and the cumulative statistics."""
        inputs = {name: list(values) for name, values in self.inputs.items()}
        return {"inputs": inputs, "periods": list(self.periods), "cumulative": deepcopy(self._cumulative)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state`."""
        self.clear()
        for name, values in state["inputs"].items():
            if name in self.inputs:
                self.inputs[name].extend(values)
        self.periods.extend(state["periods"])
        self._cumulative = deepcopy(state["cumulative"])  # histories are extended in place

    def _accumulate(self, stat: CompiledStat, values: Any) -> Any:
        function, known = stat.reduce_function, self._cumulative.get(stat.position)
        if function in _ADDED:
            value = stat.reduce(values) + (0 if known is None else known)
        elif function in _COMPARED:
            value = stat.reduce([*([] if known is None else [known]), stat.reduce(values)])
        else:
            history = self._cumulative.setdefault(stat.position, [])
            history.extend(values)
            return stat.reduce(history)
        self._cumulative[stat.position] = value
        return value


_NUMBERS = (int, float, bool)


def histogram(values: Sequence[Any]) -> list[Any] | tuple[list[Any], int]:
    """Return all values, so that writers can show their distribution.

    Nested lists and arrays, as from the levels below, are flattened. For values with a number of categories (such as
    the attributes `value` and `action_dim` of an event), the result is the pair of all values and that number.

    :param values: Numbers, lists of numbers, or attributes of events with one or two values each.
    """
    first = values[0]
    if type(first) in _NUMBERS:  # checks of abstract classes are slow
        return list(values)
    if isinstance(first, list) or (isinstance(first, np.ndarray) and first.ndim):
        joined: list[Any] = []
        for part in values:
            if isinstance(part, np.ndarray):  # bytes are three times as fast
                joined += part.tobytes() if part.dtype == np.uint8 and part.ndim == 1 else part.tolist()
            else:
                joined += part
        return joined
    if not isinstance(first, (tuple, np.ndarray, ValuesView, Mapping)):
        return list(values)
    parts = [_parts(value) for value in values]
    flat = [value for part, _ in parts for value in part]
    sizes = [size for _, size in parts if size is not None]
    return flat if not sizes else (flat, max(sizes))


def _parts(value: Any) -> tuple[Iterable[Any], int | None]:
    if isinstance(value, np.ndarray):
        return (value.tolist() if value.ndim else [value.item()]), None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    items = tuple(value)
    if len(items) == 2 and not isinstance(value, list):
        first, size = items
        return (first if isinstance(first, list) else [first]), int(size)
    return items, None


def categories_of(value: Any) -> tuple[list[Any], int] | None:
    """Return categories and the number of existing ones; `None`: the value has no categories.

    :param value: A result of :func:`histogram`, or pairs of a category and that number.
    """
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], list):
        return value[0], int(value[1])
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], tuple):
        return [category for category, _ in value], int(max(size for _, size in value))
    return None


def histogram_range(samples: np.ndarray, n_bins: int) -> tuple[float, float]:
    """Return the range for the bins of a histogram; it is wider than the samples where these differ by rounding only.

    NumPy refuses bins that are narrower than the distance of two floats.

    :param samples: Finite numbers, at least one, of float64.
    :param n_bins: Number of bins.
    """
    low, high = float(samples.min()), float(samples.max())
    narrowest = 2.0 * n_bins * float(np.spacing(max(-low, high)))
    margin = 0.0 if high - low > narrowest else max(0.5, narrowest)
    return low - margin, high + margin
