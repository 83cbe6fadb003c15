"""Statistics of the episodes of environments that are stepped at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maze.core.env.base_env_events import BaseEnvEvents, latest
from maze.core.log_stats.log_stats import (
    LogStats,
    LogStatsAggregator,
    LogStatsGroup,
    LogStatsKey,
    LogStatsLevel,
    event_named,
)
from maze.core.log_stats.stats_plan import PassedThrough, group_of, level_plan, stat_value

_PASS_ONE_ON = (None, sum, max, min, latest, np.sum, np.mean, np.median, np.max, np.min)
"""What makes of a single value that value."""

_FIRST_CAPACITY = 1024

_Key = tuple[Callable[..., Any], LogStatsGroup | None, str | None]
"""Event, group, and name of the step statistic."""


class BatchedEpisodeStats:
    """Keeps the values of the running episodes in arrays, and makes the statistics of those that end.

    An event occurs at most once a step in each environment and group; its statistics are those that single
    environments would have.
    """

    def __init__(self, n_envs: int) -> None:
        self.n_envs = n_envs
        self._columns: dict[_Key, _Column] = {}
        self._starts = np.zeros(n_envs, np.int64)
        """Where in the columns the running episode of each environment begins."""
        self._n_steps = 0
        self._capacity = _FIRST_CAPACITY
        self._aggregator = LogStatsAggregator(LogStatsLevel.EPISODE)

    def add(
        self, event: Callable[..., Any], group: LogStatsGroup | None, name: str | None, values: Any, where: Any = None
    ) -> None:
        """Keeps a step statistic of the step under way.

        :param event: Interface method of the event.
        :param group: Its group.
        :param name: Name of the step statistic.
        :param values: `[n_envs]`, or one for all.
        :param where: bool `[n_envs]`: where it occurred; `None`: everywhere.
        """
        column = self._columns.get((event, group, name))
        if column is None:
            column = self._add_column((event, group, name), np.asarray(values).dtype)
        column.set(self._n_steps, values, where)

    def fire(self, event: Callable[..., Any], where: np.ndarray | None, attributes: Mapping[str, Any]) -> None:
        """Keeps the step statistics of an event that occurred.

        :param event: Interface method of the event.
        :param where: bool `[n_envs]`: where it occurred; `None`: everywhere.
        :param attributes: Arrays `[n_envs]` by name, or one value for all; what it is grouped by is the same for all.
        """
        plan = level_plan(event, "step")
        for variant in plan.variants:
            group = group_of(event, plan, variant, dict(attributes))
            for stat in variant.stats:
                values = stat_value(event, plan, dict(attributes), stat.input_name)
                if stat.reduce_function is len:
                    values = 1
                elif stat.reduce_function not in _PASS_ONE_ON:
                    assert stat.reduce_function is not None
                    of_one = stat.reduce_function
                    values = np.array([of_one([value]) for value in np.broadcast_to(values, self.n_envs).tolist()])
                self.add(event, group, stat.output_name, values, where)

    def complete_step(self) -> None:
        """Ends the step under way of all environments."""
        self._n_steps += 1
        if self._n_steps == self._capacity:
            self._make_room()

    def publish(
        self, rows: np.ndarray, kpis: Callable[[np.ndarray], Mapping[str, np.ndarray]] | None = None
    ) -> dict[int, LogStats]:
        """The statistics of episodes that are over; those that follow begin with the next step.

        :param rows: Indices of their environments.
        :param kpis: Gives the key performance indicators of environments, `[n_rows]` by name.
        :return: Statistics by index; environments without a step have none.
        """
        rows = rows[self._starts[rows] < self._n_steps]
        values_of = {} if kpis is None or not len(rows) else kpis(rows)
        dense = [column for column in self._columns.values() if column.is_dense]
        sparse = [(key, column) for key, column in self._columns.items() if not column.is_dense]
        finished = {}
        for position, (row, start) in enumerate(zip(rows.tolist(), self._starts[rows].tolist(), strict=True)):
            stats: LogStats = {}
            for column in dense:
                values = column.array[row, start : self._n_steps].tolist()
                for stat_key, reduce_function in column.reducers:
                    stats[stat_key] = reduce_function(values)
            if sparse or values_of:
                for key, column in sparse:
                    self._feed(*key, column.values(row, start, self._n_steps))
                for name, of_rows in values_of.items():
                    self._feed(BaseEnvEvents.kpi, (name,), None, [float(of_rows[position])])
                stats.update(self._aggregator.reduce(n_periods=self._n_steps - start))
            finished[row] = stats
        self._starts[rows] = self._n_steps
        return finished

    def clear(self) -> None:
        """Forgets the running episodes."""
        self._starts[:] = self._n_steps

    def row_state(self, row: int) -> list[dict[str, Any]]:
        """What is kept of the running episode of an environment, of the step under way at last."""
        start, end = int(self._starts[row]), self._n_steps + 1
        return [
            {
                "event": [event.__module__, event.__qualname__],
                "group": group,
                "name": name,
                "values": column.array[row, start:end].copy(),
                "present": column.present[row, start:end].copy(),
            }
            for (event, group, name), column in self._columns.items()
        ]

    def load_row_state(self, row: int, state: list[dict[str, Any]]) -> None:
        """Goes on from where :meth:`row_state` was.

        :param row: The environment.
        :param state: As :meth:`row_state` gave it.
        """
        n_steps = max((len(entry["values"]) - 1 for entry in state), default=0)
        while self._n_steps + n_steps + 1 >= self._capacity:
            self._resize(2 * self._capacity)
        if self._n_steps < n_steps:
            shift = n_steps - self._n_steps
            self._n_steps += shift
            self._starts += shift
            for column in self._columns.values():
                column.move(0, shift)
        self._starts[row] = start = self._n_steps - n_steps
        loaded: set[_Key] = set()
        for entry in state:
            event = event_named(*entry["event"])
            if event is None:
                continue
            group = None if entry["group"] is None else tuple(entry["group"])
            key = (event, group, entry["name"])
            if key not in self._columns:
                self._add_column(key, entry["values"].dtype, self._n_steps - 1)
            self._columns[key].load(row, start, entry["values"], entry["present"])
            loaded.add(key)
        if n_steps:
            for key in self._columns.keys() - loaded:
                self._columns[key].is_dense = False

    def _add_column(self, key: _Key, dtype: Any, last: int = -1) -> _Column:
        event, group, name = key
        plan = level_plan(event, "episode")
        reducers = [
            (LogStatsKey(event, stat.output_name, group), stat.reduce_function or _as_it_is)
            for variant in plan.variants
            for stat in variant.stats
            if stat.input_name == name
        ]
        is_simple = len(plan.variants) == 1 and plan.variants[0].group_by is None
        column = self._columns[key] = _Column(self._capacity, self.n_envs, dtype, reducers, last)
        column.is_dense = is_simple and last + 1 == self._n_steps
        return column

    def _feed(
        self, event: Callable[..., Any], group: LogStatsGroup | None, name: str | None, values: list[Any]
    ) -> None:
        plan = level_plan(event, "episode")
        if len(plan.routes.get(name, ())) == 1 and plan.routes[name][0][1] is None:
            self._aggregator.input_values(event, name, group).extend(values)
            return
        for value in values:
            self._aggregator.add_value(event, value, name, group)

    def _make_room(self) -> None:
        oldest = int(self._starts.min())
        if oldest < self._capacity // 2:
            self._resize(2 * self._capacity)
            return
        for column in self._columns.values():
            column.move(oldest, -oldest)
        self._starts -= oldest
        self._n_steps -= oldest

    def _resize(self, capacity: int) -> None:
        for column in self._columns.values():
            column.resize(capacity)
        self._capacity = capacity


def _as_it_is(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else PassedThrough(values)


class _Column:
    """Values of one step statistic, `[n_envs, capacity]`, and where there are any.

    :param capacity: Number of steps.
    :param n_envs: Number of environments.
    :param dtype: Type of the values.
    :param reducers: The episode statistics that are made of them alone.
    :param last: The last step that may hold a value already.
    """

    def __init__(
        self,
        capacity: int,
        n_envs: int,
        dtype: Any,
        reducers: list[tuple[LogStatsKey, Callable[[Any], Any]]],
        last: int,
    ) -> None:
        self.array = np.zeros((n_envs, capacity), dtype)
        self.present = np.zeros((n_envs, capacity), np.bool_)
        self.reducers = reducers
        self.is_dense = False
        """Whether there is a value in every step since the first, and statistics ask for nothing else."""
        self._last = last

    def set(self, step: int, values: Any, where: np.ndarray | None) -> None:
        self.array[:, step] = values
        self.present[:, step] = True if where is None else where
        if where is not None or step > self._last + 1:
            self.is_dense = False
        self._last = step

    def load(self, row: int, start: int, values: np.ndarray, present: np.ndarray) -> None:
        self.array[row, start : start + len(values)] = values
        self.present[row, start : start + len(values)] = present
        self._last = max(self._last, start + len(values) - (1 if present[-1] else 2))
        if not present[:-1].all():
            self.is_dense = False

    def values(self, row: int, start: int, end: int) -> list[Any]:
        """The values of an environment, where there are any."""
        values = self.array[row, start:end]
        present = self.present[row, start:end]
        listed: list[Any] = (values if present.all() else values[present]).tolist()
        return listed

    def move(self, start: int, by: int) -> None:
        """Moves what stands from `start` on; what it leaves holds nothing."""
        self._last += by
        n_steps = self.array.shape[1]
        for name in ("array", "present"):
            old = getattr(self, name)
            new = np.zeros_like(old)
            new[:, start + by : n_steps + min(by, 0)] = old[:, start : n_steps - max(by, 0)]
            setattr(self, name, new)

    def resize(self, capacity: int) -> None:
        more = ((0, 0), (0, capacity - self.array.shape[1]))
        self.array, self.present = np.pad(self.array, more), np.pad(self.present, more)
