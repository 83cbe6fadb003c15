"""Statistics of the episodes of environments that are stepped at once."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from maze.core.env.base_env_events import BaseEnvEvents, latest
from maze.core.errors import EnvironmentContractError
from maze.core.log_stats.log_stats import (
    LogStats,
    LogStatsAggregator,
    LogStatsGroup,
    LogStatsKey,
    LogStatsLevel,
    event_named,
)
from maze.core.log_stats.reducer_functions import histogram
from maze.core.log_stats.stats_plan import PassedThrough, group_of, level_plan, stat_value

_PASS_ONE_ON = (None, sum, max, min, latest, np.sum, np.mean, np.median, np.max, np.min)
"""What makes of a single value that value."""

_FIRST_CAPACITY = 1024

_VALUES_AT_ONCE = 16384
"""Episodes with so many values are reduced together, which fit into the processor's cache."""

_ADDS_IN_ORDER = sys.version_info < (3, 12)
"""Whether Python's `sum` of floats adds one to the other, as arrays are added; later it compensates for rounding."""

_Key = tuple[Callable[..., Any], LogStatsGroup | None, str | None]
"""Event, group, and name of the step statistic."""


@functools.cache
def _kpi_key(name: str) -> LogStatsKey:
    return LogStatsKey(BaseEnvEvents.kpi, None, (name,))


class _Episodes(NamedTuple):
    """Episodes that are over, in the order in which they ended.

    :param rows: Their environments, `[n_episodes]`.
    :param starts: Their first steps.
    :param lengths: How many steps they have.
    :param known: Statistics that are known already, `[n_episodes]` each.
    """

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    known: Mapping[LogStatsKey, np.ndarray]

    def some(self, which: slice | np.ndarray) -> _Episodes:
        """Some of them, in their order."""
        known = {key: values[which] for key, values in self.known.items()}
        return _Episodes(self.rows[which], self.starts[which], self.lengths[which], known)


class BatchedEpisodeStats:
    """Keeps the values of the running episodes in arrays, and makes the statistics of those that end.

    An event occurs at most once a step in each environment and group; its statistics are those that single
    environments would have. What ends is noted; its statistics are made when somebody asks, of many episodes at once.

    :param n_envs: Number of environments.
    :param before_moving: Called before values of episodes that are over are given up; to :meth:`deliver` them.
    """

    def __init__(self, n_envs: int, before_moving: Callable[[], None] = lambda: None) -> None:
        self.n_envs = n_envs
        self._row_type = np.min_scalar_type(n_envs)
        """Small numbers are sorted in a fraction of the time."""
        self._before_moving = before_moving
        self._columns: dict[_Key, StatColumn] = {}
        self._starts = np.zeros(n_envs, np.int64)
        """Where in the columns the running episode of each environment begins, as far as it was looked for."""
        self._over = np.zeros((_FIRST_CAPACITY, n_envs), np.bool_)
        """Which episodes ended with a step, of those that were not looked at since."""
        self._pauses = np.zeros(_FIRST_CAPACITY, np.bool_)
        """Whether those that follow left out a step."""
        self._left_out: list[tuple[int, np.ndarray]] = []
        """Steps, and environments whose episodes that ended with them do not count."""
        self._n_settled = 0
        """Steps that were looked at."""
        self._kpis: list[Mapping[str, np.ndarray]] = []
        self._undelivered: list[_Episodes] = []
        self._latest: _Episodes | None = None
        """The episodes that ended last."""
        self.n_steps = 0
        """Steps that were kept; the number of the one under way."""
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
        column = self._columns.get((event, group, name)) or self.column(event, group, name, np.asarray(values).dtype)
        column.set(self.n_steps, values, where)

    def column(
        self, event: Callable[..., Any], group: LogStatsGroup | None, name: str | None, dtype: Any
    ) -> StatColumn:
        """Where a step statistic is kept; it is there as long as this object.

        :param event: Interface method of the event.
        :param group: Its group.
        :param name: Name of the step statistic.
        :param dtype: Type of its values, where there are none yet.
        """
        key = (event, group, name)
        return self._columns.get(key) or self._add_column(key, dtype)

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
        self.n_steps += 1
        if self.n_steps == self._capacity:
            self._make_room()

    def begin(self, rows: np.ndarray, pauses: bool = False) -> None:
        """Episodes begin with the step under way; what was kept of earlier ones in their environments is forgotten.

        :param rows: Their indices.
        :param pauses: They begin with the step after that.
        """
        self._settle()
        self._starts[rows] = self.n_steps + pauses

    def begun(self) -> np.ndarray:
        """In which environments the running episode has a step, bool `[n_envs]`."""
        self._settle()
        return self._starts < self.n_steps

    def end(
        self,
        over: np.ndarray,
        kpis: Mapping[str, np.ndarray] | None = None,
        pauses: bool = False,
        left_out: np.ndarray | None = None,
    ) -> None:
        """Episodes are over with the step completed last, others follow.

        :param over: bool `[n_envs]`: in which environments, which have taken a step each.
        :param kpis: Their key performance indicators, `[n_ended]` by name, the same names each time.
        :param pauses: Whether the episodes that follow begin with the step after the next one.
        :param left_out: Indices of environments whose episodes are not to be delivered; `None`: there are none.
        """
        step = self.n_steps - 1
        self._n_settled = min(self._n_settled, step)
        self._over[step] = over
        if pauses:
            self._pauses[step] = True
        if kpis is not None:
            self._kpis.append(kpis)
        if left_out is not None:
            self._left_out.append((step, left_out))

    def finished(self) -> dict[int, LogStats]:
        """Statistics of the episodes that ended last, by environment; as long as no further step is completed."""
        self._settle()
        if self._latest is None:
            return {}
        return dict(zip(self._latest.rows.tolist(), self._singly(self._latest), strict=True))

    def deliver(self, receiver: LogStatsAggregator) -> None:
        """Hands on the statistics of the episodes that have ended since the last time.

        :param receiver: Takes them.
        """
        self._settle()
        waiting, self._undelivered = self._undelivered, []
        for episodes in waiting:
            if not len(episodes.rows):
                continue
            if all(column.is_dense(self.n_steps) for column in self._columns.values()):
                receiver.receive_columns(self._columns_of(episodes, joins=True), len(episodes.rows))
            else:
                receiver.receive_all(self._singly(episodes))

    def _settle(self) -> None:
        """Finds out where the episodes began that were said to be over."""
        first, self._n_settled = self._n_settled, self.n_steps
        over = self._over[first : self.n_steps]
        ended = over.ravel().nonzero()[0]
        if not len(ended):
            return
        steps, rows = np.divmod(ended, self.n_envs)
        ends = steps + (first + 1)
        following = ends + self._pauses[first : self.n_steps][steps]
        known = {}
        if self._kpis:
            names = self._kpis[0]
            known = {_kpi_key(name): np.concatenate([kpis[name] for kpis in self._kpis], dtype=float) for name in names}
            self._kpis.clear()
        # An episode begins where the one before in its environment was followed.
        order = rows.astype(self._row_type).argsort(kind="stable")
        of_row = rows[order]
        is_first = np.append(True, of_row[1:] != of_row[:-1])
        starts = np.empty_like(ends)
        starts[order[1:]] = following[order[:-1]]
        starts[order[is_first]] = self._starts[of_row[is_first]]
        is_last = np.append(is_first[1:], True)
        self._starts[of_row[is_last]] = following[order[is_last]]
        episodes = _Episodes(rows, starts, ends - starts, known)
        if np.count_nonzero(episodes.lengths <= 0):
            raise EnvironmentContractError(
                f"environment {rows[episodes.lengths.argmin()]}: its episode was over before it had a step; one that "
                "is to begin with the coming step cannot end before."
            )
        self._latest = episodes.some(ends == ends[-1])
        if self._left_out:
            counts = over.copy()
            for step, left_out in self._left_out:
                counts[step - first, left_out] = False
            episodes = episodes.some(counts.ravel()[ended])
            self._left_out.clear()
        self._undelivered.append(episodes)
        over[...] = False
        self._pauses[first : self.n_steps] = False

    def _singly(self, episodes: _Episodes) -> list[LogStats]:
        """The statistics of each episode; events may be missing in some of its steps."""
        columns = {
            key: values.tolist() if isinstance(values, np.ndarray) else values
            for key, values in self._columns_of(episodes).items()
        }
        sparse = [(key, column) for key, column in self._columns.items() if not column.is_dense(self.n_steps)]
        each = []
        places = zip(episodes.rows.tolist(), episodes.starts.tolist(), episodes.lengths.tolist(), strict=True)
        for index, (row, start, length) in enumerate(places):
            stats = {key: values[index] for key, values in columns.items()}
            if sparse:
                for key, column in sparse:
                    self._feed(*key, column.values(row, start, start + length))
                stats.update(self._aggregator.reduce(n_periods=length))
            each.append(stats)
        return each

    def _columns_of(self, episodes: _Episodes, joins: bool = False) -> dict[LogStatsKey, np.ndarray | list[Any]]:
        """The statistics of events that occur in each step, and those that are known.

        :param episodes: The episodes.
        :param joins: Whether lists of which an epoch makes one list are joined already, into arrays.
        :return: The values of all episodes by statistic, numbers as arrays.
        """
        parts: dict[LogStatsKey, list[Any]] = {}
        dense = [column for column in self._columns.values() if column.is_dense(self.n_steps)]
        ends = episodes.lengths.cumsum()
        at_once = np.arange(_VALUES_AT_ONCE, ends[-1], _VALUES_AT_ONCE)
        edges = np.unique([0, *ends.searchsorted(at_once), len(ends)]).tolist()
        for first, last in itertools.pairwise(edges):
            places = _Places(episodes.some(slice(first, last)), self.n_envs)
            for column in dense:
                column.reduce_into(parts, places, joins)
        numbers = {key for column in dense for key in column.numbers}
        columns = {key: np.concatenate(values) if key in numbers else values for key, values in parts.items()}
        return {**episodes.known, **columns}

    def clear(self) -> None:
        """Forgets the running episodes."""
        self._give_up()
        self.begin(np.arange(self.n_envs))

    def row_state(self, row: int) -> list[dict[str, Any]]:
        """What is kept of the running episode of an environment, of the step under way at last.

        As bytes: a checkpoint of hundreds of environments has thousands of these, and each tensor in it takes its time.
        """
        self._settle()
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
        """Goes on from where :meth:`row_state` was.

        :param row: The environment.
        :param state: As :meth:`row_state` gave it.
        """
        self._give_up()
        n_steps = max((len(entry["present"]) - 1 for entry in state), default=0)
        while self.n_steps + n_steps + 1 >= self._capacity:
            self._resize(2 * self._capacity)
        if self.n_steps < n_steps:
            shift = n_steps - self.n_steps
            self.n_steps += shift
            self._n_settled += shift
            self._starts += shift
            for column in self._columns.values():
                column.move(0, shift)
        self._starts[row] = start = self.n_steps - n_steps
        loaded: set[_Key] = set()
        for entry in state:
            event = event_named(*entry["event"])
            if event is None:
                continue
            group = None if entry["group"] is None else tuple(entry["group"])
            key = (event, group, entry["name"])
            if key not in self._columns:
                self._add_column(key, np.dtype(entry["dtype"]), self.n_steps - 1)
            values = np.frombuffer(entry["values"], entry["dtype"])
            self._columns[key].load(row, start, values, np.frombuffer(entry["present"], np.bool_))
            loaded.add(key)
        if n_steps:
            for key in self._columns.keys() - loaded:
                self._columns[key].forget(row, start)

    def _add_column(self, key: _Key, dtype: Any, last: int = -1) -> StatColumn:
        event, group, name = key
        plan = level_plan(event, "episode")
        reducers = [
            _Reducer(
                LogStatsKey(event, stat.output_name, group),
                stat.reduce_function or _as_it_is,
                stat.reduce_function is histogram and _is_joined(event, stat.output_name),
            )
            for variant in plan.variants
            for stat in variant.stats
            if stat.input_name == name
        ]
        is_simple = len(plan.variants) == 1 and plan.variants[0].group_by is None
        column = self._columns[key] = StatColumn(
            self._capacity, self.n_envs, dtype, reducers, last, self._before_moving
        )
        if not is_simple or last + 1 < self.n_steps:
            column.become_sparse()
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

    def _give_up(self) -> None:
        """Takes leave of the episodes that are over, whose values may then be moved."""
        self._before_moving()
        self._settle()
        self._undelivered.clear()
        self._latest = None

    def _make_room(self) -> None:
        self._give_up()
        oldest = int(self._starts.min())
        if oldest < self._capacity // 2:
            self._resize(2 * self._capacity)
            return
        for column in self._columns.values():
            column.move(oldest, -oldest)
        self._starts -= oldest
        self.n_steps -= oldest
        self._n_settled -= oldest

    def _resize(self, capacity: int) -> None:
        for column in self._columns.values():
            column.resize(capacity)
        self._over = np.pad(self._over, ((0, capacity - self._capacity), (0, 0)))
        self._pauses = np.pad(self._pauses, (0, capacity - self._capacity))
        self._capacity = capacity


def _as_it_is(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else PassedThrough(values)


class _Reducer(NamedTuple):
    """An episode statistic that is made of the values of one step statistic.

    :param key: The statistic.
    :param function: What makes it of a list of values.
    :param is_joined: Epochs make nothing of it but one list of all values.
    """

    key: LogStatsKey
    function: Callable[[Any], Any]
    is_joined: bool


def _is_joined(event: Callable[..., Any], name: str | None) -> bool:
    stats = [stat for variant in level_plan(event, "epoch").variants for stat in variant.stats]
    return all(stat.reduce_function is histogram for stat in stats if stat.input_name == name)


class _Places:
    """Where the values of episodes stand in arrays `[capacity, n_envs]`.

    :param episodes: The episodes.
    :param n_envs: Number of environments.
    """

    def __init__(self, episodes: _Episodes, n_envs: int) -> None:
        self.lengths = episodes.lengths
        ends = self.lengths.cumsum()
        self.offsets = ends - self.lengths
        """Where the values of each episode begin among those of all, `[n_episodes]`."""
        self.index = np.repeat((episodes.starts - self.offsets) * n_envs + episodes.rows, self.lengths)
        """Where each value stands in a flat array, episode by episode, `[n_values]`."""
        self.index += np.arange(0, len(self.index) * n_envs, n_envs)

    def split(self, values: list[Any]) -> list[list[Any]]:
        """The values of each episode."""
        begins = self.offsets.tolist()
        return [values[begin:end] for begin, end in zip(begins, [*begins[1:], len(values)], strict=True)]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """The sum of each episode, the values added in their order; `[n_episodes]`."""
        if values.dtype.kind in "biu":
            return np.add.reduceat(values, self.offsets, dtype=np.int64)
        return np.bincount(np.repeat(np.arange(len(self.lengths)), self.lengths), values, len(self.lengths))


class StatColumn:
    """Values of one step statistic, `[capacity, n_envs]`, and where there are any.

    :param capacity: Number of steps.
    :param n_envs: Number of environments.
    :param dtype: Type of the values.
    :param reducers: The episode statistics that are made of them alone.
    :param last: The last step that may hold a value already.
    :param before_moving: Called before values of episodes that are over are given up.
    """

    def __init__(
        self,
        capacity: int,
        n_envs: int,
        dtype: Any,
        reducers: list[_Reducer],
        last: int,
        before_moving: Callable[[], None],
    ) -> None:
        self._before_moving = before_moving
        self.array = np.zeros((capacity, n_envs), dtype)
        self.present: np.ndarray | None = None
        """`None`: there is a value in every step up to the last, and statistics ask for nothing else."""
        self.last = last
        """The last step that may hold a value."""
        self._reducers = reducers
        made_at_once = (len, sum) if np.dtype(dtype).kind in "biu" or _ADDS_IN_ORDER else (len,)
        self.numbers = {reducer.key for reducer in reducers if reducer.function in made_at_once}
        """The episode statistics that are made of many episodes at once."""

    def is_dense(self, n_steps: int) -> bool:
        """Whether so many steps have a value each."""
        return self.present is None and self.last + 1 >= n_steps

    def become_sparse(self) -> None:
        """From now on steps may lack a value."""
        if self.present is None:
            self._before_moving()
            self.present = np.zeros(self.array.shape, np.bool_)
            self.present[: self.last + 1] = True

    def set(self, step: int, values: Any, where: np.ndarray | None = None) -> None:
        self.array[step] = values
        if where is not None or self.present is not None or step > self.last + 1:
            self.become_sparse()
            assert self.present is not None
            self.present[step] = True if where is None else where
        self.last = step

    def reduce_into(self, parts: dict[LogStatsKey, list[Any]], places: _Places, joins: bool) -> None:
        """Calculates the statistics of episodes that have a value in each step.

        :param parts: Takes the values of the episodes by statistic; of those in :attr:`numbers` an array of them.
        :param places: The episodes.
        :param joins: Whether lists of which an epoch makes one list are joined, into an array.
        """
        values: np.ndarray | None = None
        listed: list[Any] | None = None
        for key, function, is_joined in self._reducers:
            column = parts.setdefault(key, [])
            if function is len:
                column.append(places.lengths)
                continue
            if values is None:
                values = self.array.ravel().take(places.index)
            if key in self.numbers:
                column.append(places.sums(values))
                continue
            if joins and is_joined:
                column.append(values)
                continue
            if listed is None:
                listed = values.tolist()
            if function is histogram:
                column += places.split(listed)
            else:
                column += [function(part) for part in places.split(listed)]

    def load(self, row: int, start: int, values: np.ndarray, present: np.ndarray) -> None:
        if not present[:-1].all():
            self.become_sparse()
        self.array[start : start + len(values), row] = values
        if self.present is not None:
            self.present[start : start + len(values), row] = present
        self.last = max(self.last, start + len(values) - (1 if present[-1] else 2))

    def forget(self, row: int, start: int) -> None:
        """There are no values of an environment from a step on."""
        self.become_sparse()
        assert self.present is not None
        self.present[start:, row] = False

    def presence(self, row: int, start: int, end: int) -> np.ndarray:
        """Where an environment has values, bool `[end - start]`."""
        present: np.ndarray
        present = np.arange(start, end) <= self.last if self.present is None else self.present[start:end, row].copy()
        return present

    def values(self, row: int, start: int, end: int) -> list[Any]:
        """The values of an environment, where there are any."""
        listed: list[Any] = self.array[start:end, row][self.presence(row, start, end)].tolist()
        return listed

    def move(self, start: int, by: int) -> None:
        """Moves what stands from `start` on; what it leaves holds nothing."""
        self.last += by
        self.array = _moved(self.array, start, by)
        if self.present is not None:
            self.present = _moved(self.present, start, by)

    def resize(self, capacity: int) -> None:
        more = ((0, capacity - len(self.array)), (0, 0))
        self.array = np.pad(self.array, more)
        if self.present is not None:
            self.present = np.pad(self.present, more)


def _moved(old: np.ndarray, start: int, by: int) -> np.ndarray:
    new = np.zeros_like(old)
    new[start + by : len(old) + min(by, 0)] = old[start : len(old) - max(by, 0)]
    return new
