"""Statistics: aggregation on three levels, and the way to the writers."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.events.event_record import EventRecord
from maze.core.events.event_topic_factory import event_topic_factory
from maze.core.log_stats.reduction import LevelPlan, StatsSlot, group_of, level_plan, stat_value

if TYPE_CHECKING:
    from maze.core.log_events.log_events_writer import LogEventsWriter

T = TypeVar("T")

LogStatsValue = int | float | np.ndarray | dict  # type: ignore[type-arg]
"""Value of one statistic."""
LogStatsGroup = tuple[str | int, ...]
"""Values of the attributes that a statistic is grouped by, in the order of `define_stats_grouping`."""


class LogStatsKey(NamedTuple):
    """Identifies a statistic: the event's interface method, the statistic's name, the group."""

    event: Callable[..., Any]
    output_name: str | None
    group: LogStatsGroup | None


LogStats = dict[LogStatsKey, Any]
"""Statistics of a step, an episode or an epoch."""

_STEP_COUNT = LogStatsKey(BaseEnvEvents.reward, "count", None)
"""Among the statistics of every episode that an environment played."""


class LogStatsLevel(Enum):
    """Over what a statistic is calculated."""

    STEP = 1
    EPISODE = 2
    EPOCH = 3


class LogStatsConsumer(ABC):
    """Receives statistics."""

    @abstractmethod
    def receive(self, stat: LogStats) -> None:
        """Takes the statistics of one step, episode or epoch."""


class LogStatsAggregator(LogStatsConsumer):
    """Collects values of one level and reduces them to its statistics.

    Values come from fired events (:meth:`add_event`, or a topic from :meth:`create_event_topic`), from the level below
    (:meth:`receive`) or one by one (:meth:`add_value`). Rows keep the order in which events and groups occurred first.

    :param level: The level whose decorators apply.
    :param consumers: Receive the statistics at every :meth:`reduce`; usually the level above or a logger.
    """

    joins_samples: ClassVar[bool] = True
    """Whether :meth:`receive_columns` takes arrays of samples of many periods where a statistic is a list of them."""

    def __init__(self, level: LogStatsLevel, *consumers: LogStatsConsumer) -> None:
        self.level = level
        self.last_stats: LogStats = {}
        """The result of the last :meth:`reduce`."""
        self._level_name = level.name.lower()
        self._consumers: list[LogStatsConsumer] = list(consumers)
        self._slots: dict[tuple[Any, ...], StatsSlot] = {}
        self._touched: list[StatsSlot] = []
        self._lengths: list[int] = []
        """How many steps (1 for a step itself) each received period had."""
        self._deferred: list[Callable[[], None]] = []

    def receive_later(self, deliver: Callable[[], None]) -> None:
        """Register a source that delivers statistics before the next ones are read or received.

        :param deliver: Called once.
        """
        self._deferred.append(deliver)

    def _take_deferred(self) -> None:
        while self._deferred:
            self._deferred.pop(0)()

    @override(LogStatsConsumer)
    def receive(self, stats: LogStats) -> None:
        self._take_deferred()
        period = len(self._lengths)
        self._lengths.append(stats.get(_STEP_COUNT, 1) if self.level is LogStatsLevel.EPOCH else 1)
        for (event, name, group), value in stats.items():
            for slot in self._add(event, value, name, group):
                slot.count_period(period)

    def receive_columns(
        self,
        columns: Mapping[LogStatsKey, np.ndarray | list[Any]],
        n_periods: int,
        occurrences: Mapping[LogStatsKey, np.ndarray] | None = None,
    ) -> None:
        """Take the statistics of several periods, as :meth:`receive` would one after the other.

        :param columns: The values of the periods by statistic; numbers may be an array.
        :param n_periods: Number of periods.
        :param occurrences: For statistics that not all periods have: the indices of those that have a value.
        """
        self._take_deferred()
        first = len(self._lengths)
        lengths = columns.get(_STEP_COUNT, [1] * n_periods)
        self._lengths.extend(lengths.tolist() if isinstance(lengths, np.ndarray) else lengths)
        for key, values in columns.items():
            periods: Sequence[int] = range(first, first + n_periods)
            if occurrences and key in occurrences:
                periods = (occurrences[key] + first).tolist()
            if not len(periods):
                continue
            plan = level_plan(key.event, self._level_name)
            for index, component in plan.routes.get(key.output_name, ()):
                group = key.group if component is None or key.group is None else (key.group[component],)
                slot = self._touch(key.event, plan, index, group)
                slot.add_all(key.output_name, values, periods)

    @property
    def has_received(self) -> bool:
        """Whether statistics of the level below wait to be reduced."""
        self._take_deferred()
        return bool(self._lengths)

    def clear_inputs(self) -> None:
        """Drops what was collected since the last :meth:`reduce`."""
        self._take_deferred()
        for slot in self._slots.values():
            slot.clear()
        self._touched.clear()
        self._lengths.clear()

    def add_event(self, event_record: EventRecord) -> None:
        """Adds a fired event to the statistics of this level."""
        event, attributes = event_record.interface_method, event_record.attributes
        plan = level_plan(event, self._level_name)
        for index, variant in enumerate(plan.variants):
            slot = self._touch(event, plan, index, group_of(event, plan, variant, attributes))
            for name, values in slot.inputs.items():
                values.append(stat_value(event, plan, attributes, name))

    def add_value(
        self, event: Callable[..., Any], value: Any, name: str | None = None, group: LogStatsGroup | None = None
    ) -> None:
        """Adds one value.

        :param event: Interface method of the event.
        :param value: The value.
        :param name: Which input of the event's statistics it is (their `input_name`).
        :param group: The group it belongs to.
        """
        self._add(event, value, name, group)

    def input_values(
        self, event: Callable[..., Any], name: str | None = None, group: LogStatsGroup | None = None
    ) -> list[Any]:
        """The list that collects the values of one input, for loops in which a call per value is too much.

        It stays the same list as long as the aggregator lives. Takes the event's row in the order of rows.
        """
        plan = level_plan(event, self._level_name)
        index, _ = plan.routes[name][0]
        return self._slot(event, plan, index, group).values(name)

    def pending(self, event: Callable[..., Any], name: str | None = None) -> dict[LogStatsGroup | None, list[Any]]:
        """The values of one input that wait to be reduced, by group.

        :param event: Interface method of the event.
        :param name: Which input of the event's statistics.
        """
        self._take_deferred()
        return {
            group: list(slot.values(name))
            for (known, _, group), slot in list(self._slots.items())
            if known is event and name in slot.inputs
        }

    def register_consumer(self, consumer: LogStatsConsumer) -> None:
        self._consumers.append(consumer)

    def remove_consumer(self, consumer: LogStatsConsumer) -> None:
        self._consumers.remove(consumer)

    def reduce(self, n_periods: int = 0) -> LogStats:
        """Calculates the statistics, hands them to the consumers and begins anew.

        :param n_periods: How many steps (episodes) the episode (epoch) had, where the received statistics do not tell.
        """
        self._take_deferred()
        stats: LogStats = {}
        if self.level is LogStatsLevel.STEP:
            for slot in self._touched:
                slot.reduce_into(stats, 0)
        else:
            for slot in self._slots.values():
                # Without the event an episode has no statistics of it, whether an earlier one had or not.
                if self.level is LogStatsLevel.EPOCH or any(slot.inputs.values()):
                    slot.reduce_into(stats, n_periods or len(self._lengths), self._lengths)
            self._lengths.clear()
        self._touched.clear()
        self.last_stats = stats
        for consumer in self._consumers:
            consumer.receive(stats)
        return stats

    def create_event_topic(self, interface_class: type[T]) -> T:
        """An object with the interface's methods that adds the events fired through it."""
        return event_topic_factory(interface_class, self.add_event)

    def copy_inputs_from(self, other: LogStatsAggregator) -> None:
        """Takes over what another aggregator of the same level has collected so far."""
        self.clear_inputs()
        other._take_deferred()
        for key, slot in other._slots.items():
            own = self._slots.setdefault(key, StatsSlot(slot.variant, slot.keys))
            own.copy_from(slot)
        self._lengths.extend(other._lengths)

    def state(self) -> dict[str, Any]:
        """What was collected since the last :meth:`reduce`, row by row, with the names of the events."""
        self._take_deferred()
        rows = [
            {"event": [event.__module__, event.__qualname__], "index": index, "group": group, **slot.state()}
            for (event, index, group), slot in self._slots.items()
        ]
        return {"lengths": list(self._lengths), "rows": rows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state` returned; rows of events that nobody has imported are left out."""
        self.clear_inputs()
        self._lengths.extend(state.get("lengths", ()))
        for row in state.get("rows", ()):
            event = event_named(*row["event"])
            if event is not None:
                plan = level_plan(event, self._level_name)
                self._slot(event, plan, row["index"], row["group"]).load_state(row)

    def _add(
        self, event: Callable[..., Any], value: Any, name: str | None, group: LogStatsGroup | None
    ) -> list[StatsSlot]:
        plan = level_plan(event, self._level_name)
        slots = []
        for index, component in plan.routes.get(name, ()):
            kept = group if component is None or group is None else (group[component],)
            slot = self._touch(event, plan, index, kept)
            slot.add(name, value)
            slots.append(slot)
        return slots

    def _touch(self, event: Callable[..., Any], plan: LevelPlan, index: int, group: LogStatsGroup | None) -> StatsSlot:
        slot = self._slot(event, plan, index, group)
        if not slot.is_touched:
            slot.is_touched = True
            self._touched.append(slot)
        return slot

    def _slot(self, event: Callable[..., Any], plan: LevelPlan, index: int, group: LogStatsGroup | None) -> StatsSlot:
        slot = self._slots.get((event, index, group))
        if slot is None:
            variant = plan.variants[index]
            keys = tuple(LogStatsKey(event, stat.output_name, group) for stat in variant.stats)
            slot = self._slots[event, index, group] = StatsSlot(variant, keys)
        return slot


def split_columns(
    columns: Mapping[LogStatsKey, np.ndarray | list[Any]],
    n_periods: int,
    occurrences: Mapping[LogStatsKey, np.ndarray] | None = None,
) -> list[LogStats]:
    """Return the statistics of each period; see :meth:`LogStatsAggregator.receive_columns`."""
    each: list[LogStats] = [{} for _ in range(n_periods)]
    for key, values in columns.items():
        periods = range(n_periods) if not occurrences or key not in occurrences else occurrences[key].tolist()
        for period, value in zip(periods, values.tolist() if isinstance(values, np.ndarray) else values, strict=True):
            each[period][key] = value
    return each


def event_named(module: str, qualified_name: str) -> Callable[..., Any] | None:
    """The interface method of an event; `None` where nobody has imported it.

    :param module: Name of its module.
    :param qualified_name: Its name there.
    """
    event: Any = sys.modules.get(module)
    for part in qualified_name.split("."):
        event = getattr(event, part, None)
    return event if callable(event) else None


class LogStatsWriter(ABC):
    """Writes statistics somewhere. An `OSError` silences the writer with one warning; it never ends a training."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """What silences it; other errors end the run, as they should where they are faults of somebody's writer."""

    @abstractmethod
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        """Writes the statistics of one log step.

        :param path: Prefix such as "train" or "eval".
        :param step: Number of the log step.
        :param stats: The statistics.
        """

    def close(self) -> None:
        """Finishes writing."""
        return

    def on_log_step_increment(self) -> None:
        """Called when a log step is finished."""
        return


class RunPlace(NamedTuple):
    """Where a run works.

    :param directory: Its directory.
    :param project: The directory that it was started from.
    :param group: The sweep that it belongs to; empty: none.
    """

    directory: Path
    project: Path
    group: str = ""


class StatsContext:
    """Writers, log step and hooks of one run.

    `with StatsContext() as stats:` gives the code inside writers and a step counter of its own; on leaving, its
    writers are closed. The functions below act on the active context: the one entered last in the same thread (or
    task); in a thread that entered none, the innermost one of the only thread that did; otherwise a default one.
    """

    def __init__(self) -> None:
        self.step = 1
        """Number of the current log step, counted from 1."""
        self.n_env_steps: int | None = None
        """Environment steps that the training has taken so far; `None`: nobody counts them."""
        self.writers: list[LogStatsWriter] = []
        self.hooks: list[Callable[[], Any]] = []
        """Called whenever a log step is finished."""
        self.event_writers: list[LogEventsWriter] = []
        """Receive the event log of every finished episode."""
        self.place: RunPlace | None = None
        """Where the run works; `None`: in the working directory."""
        self._epochs: list[weakref.ref[Any]] = []
        self._silenced: set[int] = set()
        self._tokens: list[Token[StatsContext | None]] = []
        self._lock = threading.RLock()

    @staticmethod
    def active() -> StatsContext:
        """The context that the module's functions act on."""
        context = _entered.get()
        if context is not None:
            return context
        threads = {thread for thread, _ in _open_contexts}
        return _open_contexts[-1][1] if len(threads) == 1 else _DEFAULT

    def __enter__(self) -> StatsContext:
        self._tokens.append(_entered.set(self))
        _open_contexts.append((threading.get_ident(), self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _entered.reset(self._tokens.pop())
        _open_contexts.remove((threading.get_ident(), self))
        if not self._tokens:
            self.close()

    def register_writer(self, writer: LogStatsWriter) -> None:
        self.writers.append(writer)

    def write(self, stats: LogStats, path: str | None) -> None:
        """Hands statistics to all writers, with the number of the current log step."""
        with self._lock:
            for writer in self.writers:
                self.guarded(writer, partial(writer.write, path, self.step, stats))

    def register_epoch(self, env: Any) -> None:
        """Has `env.finish_epoch()` called whenever a log step is finished, as long as somebody holds it."""
        self._epochs = [known for known in self._epochs if known() is not None]
        self._epochs.append(weakref.ref(env))

    def finish_step(self) -> None:
        """Completes the epochs of environments, runs the hooks and begins the next log step."""
        with self._lock:
            for env in [known() for known in self._epochs]:
                if env is not None:
                    env.finish_epoch()
            for hook in self.hooks:
                hook()
            for writer in self.writers:
                self.guarded(writer, writer.on_log_step_increment)
            self.step += 1

    def guarded(self, writer: object, write: Callable[[], Any]) -> None:
        """Calls `write`; if the disk does not take it, one warning is logged and the writer is not used again."""
        if id(writer) in self._silenced:
            return
        try:
            write()
        except getattr(writer, "failures", OSError) as error:
            self._silenced.add(id(writer))
            with suppress(getattr(writer, "failures", OSError)):  # for the same reason; one warning is enough
                getattr(writer, "close", _nothing)()
            what = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            _LOGGER.warning("%s cannot write (%s); it is switched off for this run.", type(writer).__name__, what)

    def reset(self) -> None:
        """Back to the state of a new context."""
        self.close()
        self.step = 1
        self.n_env_steps = None
        self.hooks = []

    def close(self) -> None:
        """Closes and forgets all writers."""
        with self._lock:
            for writer in self.writers:
                self.guarded(writer, writer.close)
            self.writers = []
            self.event_writers = []
            self._silenced.clear()


def _nothing() -> None:
    """Stands for the missing `close` of writers that hold nothing open."""


_LOGGER = logging.getLogger(__name__)
_DEFAULT = StatsContext()
_entered: ContextVar[StatsContext | None] = ContextVar("maze_stats", default=None)
_open_contexts: list[tuple[int, StatsContext]] = []  # with the entering thread; for threads that entered none


class _ActiveContextView(type):
    """Lets the class attributes show the active context's lists."""

    @property
    def global_log_stats_writers(cls) -> list[LogStatsWriter]:
        return StatsContext.active().writers

    @global_log_stats_writers.setter
    def global_log_stats_writers(cls, writers: list[LogStatsWriter]) -> None:
        StatsContext.active().writers = writers

    @property
    def hook_on_log_step(cls) -> list[Callable[[], Any]]:
        return StatsContext.active().hooks

    @hook_on_log_step.setter
    def hook_on_log_step(cls, hooks: list[Callable[[], Any]]) -> None:
        StatsContext.active().hooks = hooks

    @property
    def global_step(cls) -> int:
        return StatsContext.active().step

    @global_step.setter
    def global_step(cls, step: int) -> None:
        StatsContext.active().step = step


class GlobalLogState(metaclass=_ActiveContextView):
    """`global_log_stats_writers`, `hook_on_log_step` and `global_step` of the active context, to read and set."""


class LogStatsLogger(LogStatsConsumer):
    """Passes statistics on to the writers of the active context.

    :param path: Prefix of the statistics, such as "train".
    """

    def __init__(self, path: str | None) -> None:
        self.path = path

    @override(LogStatsConsumer)
    def receive(self, stat: LogStats) -> None:
        log_stats(stat, self.path)


def register_log_stats_writer(writer: LogStatsWriter) -> None:
    """Adds a writer to the active context."""
    StatsContext.active().register_writer(writer)


def log_stats(stats: LogStats, path: str | None) -> None:
    """Hands statistics to the writers of the active context.

    :param stats: The statistics.
    :param path: Prefix such as "train" or "eval".
    """
    StatsContext.active().write(stats, path)


def increment_log_step() -> None:
    """Finishes the current log step of the active context."""
    StatsContext.active().finish_step()


def get_stats_logger(path: str | None = None) -> LogStatsConsumer:
    """A consumer that passes what it receives on to the writers.

    :param path: Prefix of the statistics.
    """
    return LogStatsLogger(path)
