"""The values of one event and group that wait to be reduced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from maze.core.log_stats.stats_plan import CompiledStat, PassedThrough, Reducer, Variant

_Fold = tuple[Callable[[Any, Any], Any], Reducer]

# Cumulative statistics that can be continued without keeping every value since the beginning.
_FOLDS: dict[Any, _Fold] = {
    sum: (operator.add, sum),
    np.sum: (operator.add, sum),
    len: (operator.add, len),
    max: (max, max),
    np.max: (max, max),
    min: (min, min),
    np.min: (min, min),
}


_MAKE_ARRAYS = (np.mean, np.std, np.var, np.median)
"""They make an array of a list first, which takes longer than all the rest where it is long."""
_LONG = 32


class StatsSlot:
    """Inputs by name and the statistics to calculate from them.

    The input lists live as long as the slot, so that a hot loop may hold on to their `append`.

    :param keys: The key of each of the variant's statistics.
    """

    __slots__ = ("_arrays", "_cumulative", "inputs", "is_touched", "keys", "periods", "variant")

    def __init__(self, variant: Variant, keys: tuple[Any, ...]) -> None:
        self.variant = variant
        self.keys = keys
        self.inputs: dict[str | None, list[Any]] = {stat.input_name: [] for stat in variant.stats}
        self._arrays: dict[str | None, list[np.ndarray]] = {}
        """Numbers that came as arrays, after those in `inputs`."""
        self.periods: list[int] = []
        """Which periods of the level below delivered values."""
        self.is_touched = False
        self._cumulative: dict[int, Any] = {}

    def values(self, name: str | None) -> list[Any]:
        """All values of an input, in the list that collects them."""
        values = self.inputs[name]
        for array in self._arrays.pop(name, ()):
            values += array.tolist()
        return values

    def add(self, name: str | None, value: Any) -> None:
        values = self.inputs.get(name)
        if values is None:
            return
        if self._arrays:
            values = self.values(name)
        if type(value) is PassedThrough:
            values.extend(value)
        else:
            values.append(value)

    def add_all(self, name: str | None, values: np.ndarray | list[Any], periods: Sequence[int]) -> None:
        """Adds one value of each of several periods.

        :param name: Which input they are.
        :param values: The values; an array of numbers stays one until somebody asks for a list.
        :param periods: The numbers of the periods, rising.
        """
        if isinstance(values, np.ndarray):
            if name in self.inputs:
                self._arrays.setdefault(name, []).append(values)
        elif PassedThrough in map(type, values):
            for value in values:
                self.add(name, value)
        elif name in self.inputs:
            self.values(name).extend(values)
        is_counted = self.periods and self.periods[-1] >= periods[0]
        if not is_counted:
            self.periods.extend(periods)

    def count_period(self, period: int) -> None:
        """Notes that a period of the level below delivered a value; several values of one count once."""
        if not self.periods or self.periods[-1] != period:
            self.periods.append(period)

    def clear(self) -> None:
        """Drops the inputs; what cumulative statistics have already counted stays."""
        for values in self.inputs.values():
            values.clear()
        if self._arrays:
            self._arrays.clear()
        if self.periods:
            self.periods.clear()
        self.is_touched = False

    def reduce_into(self, stats: dict[Any, Any], n_periods: int, lengths: Sequence[int] = ()) -> None:
        """Calculates the statistics for which there are values and drops the inputs.

        :param n_periods: How many periods of the level below there were.
        :param lengths: How many periods each of those had itself, by its number; 1 for those that are not listed.
        """
        arrays: dict[str | None, np.ndarray] = {}
        if self._arrays:
            arrays = {name: np.concatenate(parts) for name, parts in self._arrays.items() if not self.inputs[name]}
        for stat, key in zip(self.variant.stats, self.keys, strict=True):
            values: Any = self.values(stat.input_name) if self._arrays else self.inputs[stat.input_name]
            if stat.counts_absence:
                n_absent = n_periods - (len(self.periods) or len(values))
                if n_absent > 0:
                    values = values + self._of_absence(stat, n_absent, lengths)
            if not values:
                continue
            if (
                len(values) > _LONG
                and stat.reduce_function in _MAKE_ARRAYS
                and not (stat.cumulative or stat.counts_absence)
            ):
                if stat.input_name not in arrays:
                    arrays[stat.input_name] = np.asanyarray(values)
                values = arrays[stat.input_name]
            stats[key] = self._accumulate(stat, values) if stat.cumulative else reduce_values(stat, values)
        self.clear()

    def copy_from(self, other: StatsSlot) -> None:
        self.clear()
        for name in other.inputs:
            self.inputs[name].extend(other.values(name))
        self.periods.extend(other.periods)
        self.is_touched = other.is_touched
        self._cumulative = dict(other._cumulative)

    def state(self) -> dict[str, Any]:
        """What waits to be reduced, and what cumulative statistics have counted so far."""
        inputs = {name: list(self.values(name)) for name in self.inputs}
        return {"inputs": inputs, "periods": list(self.periods), "cumulative": dict(self._cumulative)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state` returned."""
        self.clear()
        for name, values in state["inputs"].items():
            if name in self.inputs:
                self.inputs[name].extend(values)
        self.periods.extend(state["periods"])
        self._cumulative = dict(state["cumulative"])

    def _of_absence(self, stat: CompiledStat, n_absent: int, lengths: Sequence[int]) -> list[Any]:
        """The values of the periods without the event."""
        if stat.of_absence is None:
            return [0] * n_absent
        present = set(self.periods)
        absent = [length for period, length in enumerate(lengths) if period not in present]
        absent += [1] * (n_absent - len(absent))
        return [stat.of_absence([0] * length) for length in absent]

    def _accumulate(self, stat: CompiledStat, values: Any) -> Any:
        fold = _FOLDS.get(stat.reduce_function) if stat.reduce_function is not None else None
        if fold is None:
            history = self._cumulative.setdefault(stat.position, [])
            history.extend(values)
            return reduce_values(stat, history)
        combine, reduce_function = fold
        value = reduce_function(values)
        if stat.position in self._cumulative:
            value = combine(self._cumulative[stat.position], value)
        self._cumulative[stat.position] = value
        return value


def reduce_values(stat: CompiledStat, values: Any) -> Any:
    """Applies a statistic's reduce function; without one a single value passes as it is."""
    if stat.reduce_function is None:
        return values[0] if len(values) == 1 else PassedThrough(values)
    result = stat.reduce_function(values)
    # The list is used again: a function that returns its argument must not hand it out.
    return list(values) if result is values else result
