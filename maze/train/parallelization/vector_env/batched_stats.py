"""Episode statistics of vectorised simulations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from maze.core.env.base_env_events import BaseEnvEvents, latest
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_stats.log_stats import (
    LogStats,
    LogStatsAggregator,
    LogStatsGroup,
    LogStatsKey,
    event_named,
    split_columns,
)
from maze.core.log_stats.reducer_functions import CompiledStat, group_of, histogram, level_plan, stat_value

# Reducers whose result for a single value is that value.
_PASS_ONE_ON = (None, sum, max, min, latest, np.sum, np.mean, np.median, np.max, np.min)

_FIRST_CAPACITY = 1024

# Number of values that are reduced together, to fit into the processor's cache.
_VALUES_AT_ONCE = 16384

# Event, group, and name of the step statistic.
_Key = tuple[Callable[..., Any], LogStatsGroup | None, str | None]


# Episodes that ended together: environments, first steps, step after the last one, KPIs, mask of those to deliver.
_Ended = tuple[np.ndarray, np.ndarray, int, Mapping[str, np.ndarray] | None, np.ndarray | None]


class _Episodes(NamedTuple):
    """Ended episodes, in the order in which they ended.

    :param rows: Their environments, `[n_episodes]`.
    :param starts: Their first steps.
    :param lengths: Their numbers of steps.
    :param kpis: Their key performance indicators by name, `[n_episodes]` each.
    """

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    kpis: Mapping[str, np.ndarray]

    def some(self, which: slice | np.ndarray) -> _Episodes:
        """Return some of them, in their order."""
        kpis = {name: values[which] for name, values in self.kpis.items()}
        return _Episodes(self.rows[which], self.starts[which], self.lengths[which], kpis)


class BatchedEpisodeStats:
    """Store the values of running episodes in arrays, and reduce those of ended episodes.

    An event occurs at most once per step in each environment and group; statistics are equal to those of single
    environments. They are calculated on request, for many ended episodes at once.

    :param n_envs: Number of environments.
    :param before_moving: Called before values of ended episodes are dropped; calls :meth:`deliver`.
    """

    def __init__(self, n_envs: int, before_moving: Callable[[], None] = lambda: None) -> None:
        self.n_envs = n_envs
        self._before_moving = before_moving
        self._columns: dict[_Key, StatColumn] = {}
        self._sources: dict[tuple[Any, ...], _Source] = {}
        # First step of the running episode of each environment.
        self._starts = np.zeros(n_envs, np.int64)
        self._undelivered: list[_Ended] = []
        # The episodes that ended last.
        self._latest: _Ended | None = None
        self.n_steps = 0
        """Number of stored steps, which is the index of the step in progress."""
        self._capacity = _FIRST_CAPACITY

    def add(
        self, event: Callable[..., Any], group: LogStatsGroup | None, name: str | None, values: Any, where: Any = None
    ) -> None:
        """Store a step statistic of the step in progress.

        :param event: Interface method of the event.
        :param group: Its group.
        :param name: Name of the step statistic.
        :param values: `[n_envs]`, or one for all.
        :param where: bool `[n_envs]`: environments in which it occurred; `None`: all.
        """
        self.column(event, group, name, np.asarray(values).dtype).set(self.n_steps, values, where)

    def column(
        self, event: Callable[..., Any], group: LogStatsGroup | None, name: str | None, dtype: Any
    ) -> StatColumn:
        """Return the column of a step statistic, which is never replaced.

        :param event: Interface method of the event.
        :param group: Its group.
        :param name: Name of the step statistic.
        :param dtype: Type of its values, if the column is new.
        """
        key = (event, group, name)
        return self._columns.get(key) or self._add_column(key, dtype)

    def fire(self, event: Callable[..., Any], where: np.ndarray | None, attributes: Mapping[str, Any]) -> None:
        """Store the step statistics of an event.

        :param event: Interface method of the event.
        :param where: bool `[n_envs]`: environments in which it occurred; `None`: all.
        :param attributes: Arrays `[n_envs]` by name, or one value for all; grouping attributes are common to all.
        """
        plan, given = level_plan(event, "step"), dict(attributes)
        for variant in plan.variants:
            group = group_of(event, plan, variant, given)
            for stat in variant.stats:
                values = stat_value(event, plan, given, stat.input_name)
                if stat.reduce_function is len:
                    values = 1
                elif stat.reduce_function not in _PASS_ONE_ON:
                    each = np.broadcast_to(values, self.n_envs).tolist()
                    values = np.array([stat.reduce([value]) for value in each])
                self.add(event, group, stat.output_name, values, where)

    def step_in_progress(self) -> dict[LogStatsKey, np.ndarray]:
        """Return the step statistics of the step in progress, `[n_envs]`; 0 where the event did not occur."""
        step, found = self.n_steps, {}
        for (event, group, name), column in self._columns.items():
            if column.last >= step:
                values = column.array[step]
                occurred = True if column.present is None else column.present[step]
                found[LogStatsKey(event, name, group)] = np.where(occurred, values, 0)
        return found

    def complete_step(self) -> None:
        """Complete the step in progress of all environments."""
        self.n_steps += 1
        if self.n_steps < self._capacity:
            return
        self._drop_ended()
        oldest = int(self._starts.min())
        if oldest < self._capacity // 2:
            self._move(0, 2 * self._capacity)
        else:
            self._move(-oldest)

    def begin(self, rows: np.ndarray, pauses: bool = False) -> None:
        """Begin episodes with the step in progress; values of earlier ones in their environments are dropped.

        :param rows: Indices of the environments.
        :param pauses: Whether the episodes begin one step later, because of a pending autoreset.
        """
        self._starts[rows] = self.n_steps + pauses

    def begun(self) -> np.ndarray:
        """Return the environments whose running episode has a step, bool `[n_envs]`."""
        return np.asarray(self._starts < self.n_steps)

    def end(
        self,
        rows: np.ndarray,
        kpis: Mapping[str, np.ndarray] | None = None,
        pauses: bool = False,
        counts: np.ndarray | None = None,
    ) -> None:
        """End episodes with the last completed step, and begin the next ones.

        :param rows: Indices of the environments.
        :param kpis: Their key performance indicators, `[n_ended]` by name, with the same names in each call.
        :param pauses: Whether the next episodes begin one step later, because of a pending autoreset.
        :param counts: Mask of the episodes to deliver, bool `[n_ended]`; `None`: all.
        """
        # Called in nearly every step; all other work is done for many episodes at once.
        self._latest = ended = (rows, self._starts[rows], self.n_steps, kpis, counts)
        self._undelivered.append(ended)
        self._starts[rows] = self.n_steps + pauses

    def finished(self) -> dict[int, LogStats]:
        """Return the statistics of the last ended episodes by environment; valid until the next step is completed."""
        if self._latest is None:
            return {}
        rows, starts, end, kpis, _ = self._latest
        columns, occurrences = self._reduced(_Episodes(rows, starts, end - starts, kpis or {}), joins=False)
        return dict(zip(rows.tolist(), split_columns(columns, len(rows), occurrences), strict=True))

    def deliver(self, receiver: LogStatsAggregator) -> None:
        """Deliver the statistics of the episodes that have ended since the last call.

        :param receiver: Receives them.
        """
        waiting, self._undelivered = self._undelivered, []
        if not waiting:
            return
        rows, starts, ends, kpis, counts = zip(*waiting, strict=True)
        lengths = np.repeat(ends, [*map(len, rows)])
        lengths -= (joined_starts := np.concatenate(starts))
        joined_kpis = {name: np.concatenate([of_some[name] for of_some in kpis]) for name in kpis[0] or ()}
        episodes = _Episodes(np.concatenate(rows), joined_starts, lengths, joined_kpis)
        if any(of_some is not None for of_some in counts):
            of_each = [np.ones(len(r), np.bool_) if c is None else c for r, c in zip(rows, counts, strict=True)]
            episodes = episodes.some(np.concatenate(of_each))
        if len(episodes.rows):
            columns, occurrences = self._reduced(episodes, joins=True)
            receiver.receive_columns(columns, len(episodes.rows), occurrences)

    def _reduced(
        self, episodes: _Episodes, joins: bool
    ) -> tuple[dict[LogStatsKey, np.ndarray | list[Any]], dict[LogStatsKey, np.ndarray]]:
        """Calculate the statistics of episodes.

        :param episodes: The episodes.
        :param joins: Whether statistics that epochs only concatenate are returned as arrays of many episodes.
        :return: The values by statistic, numbers as arrays; for statistics that some episodes lack, the indices of the
            episodes with a value.
        """
        if episodes.lengths.min() <= 0:
            raise EnvironmentContractError(
                f"environment {episodes.rows[episodes.lengths.argmin()]}: expected at least one step in an "
                "episode, but it ended before its first step."
            )
        parts: dict[LogStatsKey, list[Any]] = {}
        indices: dict[LogStatsKey, list[np.ndarray]] = {}
        ends = episodes.lengths.cumsum()
        at_once = np.arange(_VALUES_AT_ONCE, ends[-1], _VALUES_AT_ONCE)
        edges = np.unique([0, *ends.searchsorted(at_once), len(ends)]).tolist()
        for first, last in itertools.pairwise(edges):
            rows, starts, lengths, _ = episodes.some(slice(first, last))
            # indices of the values in flat arrays `[capacity * n_envs]`, by episode, `[n_values]`
            index = np.repeat((starts - lengths.cumsum() + lengths) * self.n_envs + rows, lengths)
            index += np.arange(0, len(index) * self.n_envs, self.n_envs)
            for source in self._sources.values():
                values, sizes, n_absent = source.values(index, lengths, self.n_steps)
                where = None
                if n_absent is not None:
                    where = sizes.nonzero()[0]
                    sizes, n_absent = sizes[where], n_absent[where]
                for key, stat, is_joined in source.stats:
                    # As one list of arrays, which the epoch's histogram converts faster than single values.
                    of_each = [values] if joins and is_joined else stat.reduce_each(values, sizes, n_absent)
                    parts.setdefault(key, []).append(of_each)
                    if where is not None:
                        indices.setdefault(key, []).append(where + first)
        columns = {key: _joined(of_key) for key, of_key in parts.items()}
        for name, values in episodes.kpis.items():
            columns[LogStatsKey(BaseEnvEvents.kpi, None, (name,))] = values.astype(float)
        return columns, {key: np.concatenate(of_key) for key, of_key in indices.items()}

    def clear(self) -> None:
        """Drop the running episodes."""
        self._drop_ended()
        self.begin(np.arange(self.n_envs))

    def row_state(self, row: int) -> list[dict[str, Any]]:
        """Return the values of the running episode of an environment, those of the step in progress last.

        As bytes: a checkpoint of hundreds of environments has thousands of them, and tensors are slower to store.
        """
        start, end = min(int(self._starts[row]), self.n_steps), self.n_steps + 1
        return [
            {
                "event": [event.__module__, event.__qualname__],
                "group": group,
                "name": name,
                "dtype": column.array.dtype.str,
                "values": column.array[start:end, row].tobytes(),
                "present": column.presence(row, start, end).tobytes(),
            }
            for (event, group, name), column in self._columns.items()
        ]

    def load_row_state(self, row: int, state: list[dict[str, Any]]) -> None:
        """Restore a result of :meth:`row_state`.

        :param row: The environment.
        :param state: The state.
        """
        self._drop_ended()
        n_steps = max((len(entry["present"]) - 1 for entry in state), default=0)
        capacity = self._capacity
        while self.n_steps + n_steps + 1 >= capacity:
            capacity *= 2
        if n_steps > self.n_steps or capacity > self._capacity:
            self._move(max(0, n_steps - self.n_steps), capacity)
        self._starts[row] = start = self.n_steps - n_steps
        loaded: set[_Key] = set()
        for entry in state:
            event = event_named(*entry["event"])
            if event is None:
                continue
            group = None if entry["group"] is None else tuple(entry["group"])
            key = (event, group, entry["name"])
            column = self._columns.get(key) or self._add_column(key, np.dtype(entry["dtype"]), self.n_steps - 1)
            values = np.frombuffer(entry["values"], entry["dtype"])
            column.load(row, start, values, np.frombuffer(entry["present"], np.bool_))
            loaded.add(key)
        if n_steps:
            for key in self._columns.keys() - loaded:
                self._columns[key].forget(row, start)

    def _add_column(self, key: _Key, dtype: Any, last: int = -1) -> StatColumn:
        event, group, name = key
        plan = level_plan(event, "episode")
        column = self._columns[key] = StatColumn(self._capacity, self.n_envs, dtype, last)
        for index, component in plan.routes.get(name, ()):
            kept = group if component is None or group is None else (group[component],)
            source = self._sources.setdefault((event, index, kept, name), _Source([], []))
            source.columns.append(column)
            if len(source.columns) > 1:
                continue
            for stat in plan.variants[index].stats:
                if stat.cumulative:
                    raise ConfigError(
                        f"Event {event.__qualname__}: cumulative episode statistics refer to one environment and "
                        "are not available for vectorised simulations."
                    )
                if stat.input_name == name:
                    of_epochs = [each for variant in level_plan(event, "epoch").variants for each in variant.stats]
                    # whether epochs only concatenate the values
                    is_joined = stat.reduce_function is histogram and all(
                        each.reduce_function is histogram for each in of_epochs if each.input_name == stat.output_name
                    )
                    source.stats.append((LogStatsKey(event, stat.output_name, kept), stat, is_joined))
        return column

    def _drop_ended(self) -> None:
        """Deliver ended episodes, whose values may be moved afterwards."""
        self._before_moving()
        self._undelivered.clear()
        self._latest = None

    def _move(self, by: int, capacity: int = 0) -> None:
        """Move all steps by a number of steps, those before the first one out of the arrays, or give them more room."""
        self._capacity = capacity or self._capacity
        for column in self._columns.values():
            column.move(by, self._capacity)
        self._starts += by
        self.n_steps += by


def _joined(parts: list[Any]) -> np.ndarray | list[Any]:
    if isinstance(parts[0], np.ndarray):
        joined: np.ndarray = np.concatenate(parts)
        return joined
    return list(itertools.chain.from_iterable(parts))


class StatColumn:
    """Values of one step statistic, `[capacity, n_envs]`, and a mask of existing values.

    :param capacity: Number of steps.
    :param n_envs: Number of environments.
    :param dtype: Type of the values.
    :param last: The last step that may have a value.
    """

    def __init__(self, capacity: int, n_envs: int, dtype: Any, last: int = -1) -> None:
        self.array = np.zeros((capacity, n_envs), dtype)
        self.present: np.ndarray | None = None
        """Mask of existing values; `None`: all steps up to the last have values."""
        self.last = last
        """The last step that may have a value."""

    def become_sparse(self) -> np.ndarray:
        """Return the mask of existing values, which is created if necessary."""
        if self.present is None:
            self.present = np.zeros(self.array.shape, np.bool_)
            self.present[: self.last + 1] = True
        return self.present

    def set(self, step: int, values: Any, where: np.ndarray | None = None) -> None:
        """Store the values of a step, `[n_envs]`.

        :param step: Index of the step.
        :param values: The values.
        :param where: Mask of existing values, bool `[n_envs]`; `None`: all exist.
        """
        self.array[step] = values
        if where is not None or self.present is not None or step > self.last + 1:
            self.become_sparse()[step] = True if where is None else where
        self.last = step

    def load(self, row: int, start: int, values: np.ndarray, present: np.ndarray) -> None:
        """Store the values of an environment from a step on.

        :param row: Index of the environment.
        :param start: First step.
        :param values: `[n_steps]`.
        :param present: Mask of existing values, bool `[n_steps]`.
        """
        if not present[:-1].all():
            self.become_sparse()
        self.array[start : start + len(values), row] = values
        if self.present is not None:
            self.present[start : start + len(values), row] = present
        self.last = max(self.last, start + len(values) - (1 if present[-1] else 2))

    def forget(self, row: int, start: int) -> None:
        """Drop the values of an environment from a step on."""
        self.become_sparse()[start:, row] = False

    def presence(self, row: int, start: int, end: int) -> np.ndarray:
        """Return the mask of existing values of an environment, bool `[end - start]`."""
        steps = np.arange(start, end)
        present: np.ndarray = steps <= self.last if self.present is None else self.present[steps, row]
        return present

    def take(self, index: np.ndarray, n_steps: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the values at indices of the flat array, and the mask of existing ones; `None`: all exist.

        :param index: Indices, int64.
        :param n_steps: Number of steps that the indices refer to.
        """
        values: np.ndarray = self.array.ravel().take(index)
        if self.present is None and self.last + 1 >= n_steps:
            return values, None
        is_present: np.ndarray = self.become_sparse().ravel().take(index)
        return values, is_present

    def move(self, by: int, capacity: int) -> None:
        """Move the values by a number of steps into arrays of a capacity; free steps have no values.

        :param by: Number of steps; negative: the first steps are dropped.
        :param capacity: Number of steps.
        """
        self.last += by
        self.array = _moved(self.array, by, capacity)
        if self.present is not None:
            self.present = _moved(self.present, by, capacity)


class _Source(NamedTuple):
    """Values of episode statistics.

    :param columns: Their columns; several if episode statistics drop a part of the group.
    :param stats: The statistics with their keys, and whether epochs only concatenate their values.
    """

    columns: list[StatColumn]
    stats: list[tuple[LogStatsKey, CompiledStat, bool]]

    def values(
        self, index: np.ndarray, lengths: np.ndarray, n_steps: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the concatenated values of episodes, their counts, and the counts of steps without a value.

        :param index: Indices of the values in a flat array, one for each step.
        :param lengths: Number of steps of each episode.
        :param n_steps: Number of stored steps.
        :return: The last element is `None` if each step has one value.
        """
        taken = [column.take(index, n_steps) for column in self.columns]
        (values, is_present), *others = taken
        if is_present is None and not others:
            return values, lengths, None
        episode = np.repeat(np.arange(len(lengths)), lengths)
        everywhere = np.ones(len(index), np.bool_)
        masks = [everywhere if mask is None else mask for _, mask in taken]
        episodes = np.concatenate([episode[mask] for mask in masks])
        values = np.concatenate([of_column[mask] for (of_column, _), mask in zip(taken, masks, strict=True)])
        if others:
            values = values[episodes.argsort(kind="stable")]
        n_present = np.bincount(episode[np.logical_or.reduce(masks)], minlength=len(lengths))
        return values, np.bincount(episodes, minlength=len(lengths)), lengths - n_present


def _moved(old: np.ndarray, by: int, capacity: int) -> np.ndarray:
    new = np.zeros((capacity, *old.shape[1:]), old.dtype)
    kept = old[max(0, -by) : capacity - by]
    new[max(0, by) :][: len(kept)] = kept
    return new
