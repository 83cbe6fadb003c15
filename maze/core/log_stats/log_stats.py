"""Statistics: aggregation on three levels, contexts and writers."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from maze.core.log_stats.reducer_functions import LevelPlan, StatsSlot, group_of, level_plan, stat_value

if TYPE_CHECKING:
    from maze.core.log_events.log_events_writer import LogEventsWriter

T = TypeVar("T")

LogStatsValue = int | float | np.ndarray | dict  # type: ignore[type-arg]
"""Value of one statistic."""
LogStatsGroup = tuple[str | int, ...]
"""Values of the grouping attributes of a statistic, in the order of `define_stats_grouping`."""


class LogStatsKey(NamedTuple):
    """Identity of a statistic: the event's interface method, the statistic's name, the group."""

    event: Callable[..., Any]
    output_name: str | None
    group: LogStatsGroup | None


LogStats = dict[LogStatsKey, Any]
"""Statistics of a step, an episode or an epoch."""

# Contained in the statistics of every episode.
_STEP_COUNT = LogStatsKey(BaseEnvEvents.reward, "count", None)


class LogStatsLevel(Enum):
    """Level of a statistic."""

    STEP = 1
    EPISODE = 2
    EPOCH = 3


class LogStatsConsumer(ABC):
    """Receive statistics."""

    @abstractmethod
    def receive(self, stat: LogStats) -> None:
        """Receive the statistics of one step, episode or epoch.

        :param stat: Values by key. The dictionary is shared with other consumers and must not be modified.
        """


class LogStatsAggregator(LogStatsConsumer):
    """Collect values of one level and reduce them to its statistics.

    Values come from fired events (:meth:`add_event`, or a topic from :meth:`create_event_topic`), from the level below
    (:meth:`receive`) or one by one (:meth:`add_value`). Rows keep the order in which events and groups occurred first.

    :param level: The level whose decorators apply.
    :param consumers: Receive the statistics at every :meth:`reduce`; usually the level above or a logger.
    """

    def __init__(self, level: LogStatsLevel, *consumers: LogStatsConsumer) -> None:
        self.level = level
        self.last_stats: LogStats = {}
        """The result of the last :meth:`reduce`."""
        self._level_name = level.name.lower()
        self._consumers: list[LogStatsConsumer] = list(consumers)
        self._slots: dict[tuple[Any, ...], StatsSlot] = {}
        # Slots with values of a step, in the order of their first values.
        self._touched: dict[StatsSlot, None] = {}
        # Number of steps of each received period; 1 for a step.
        self._lengths: list[int] = []
        self._deferred: list[Callable[[], None]] = []

    def receive_later(self, deliver: Callable[[], None]) -> None:
        """Register a source that delivers its statistics before the next ones are read or received.

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
            for slot in self._slots_of(event, name, group):
                slot.add(name, value, period)

    def receive_columns(
        self,
        columns: Mapping[LogStatsKey, np.ndarray | list[Any]],
        n_periods: int,
        occurrences: Mapping[LogStatsKey, np.ndarray] | None = None,
    ) -> None:
        """Receive the statistics of several periods, equivalent to :meth:`receive` for each of them.

        :param columns: The values of the periods by statistic; numbers may be an array.
        :param n_periods: Number of periods.
        :param occurrences: For statistics that some periods lack: the indices of the periods with a value.
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
            listed = values.tolist() if isinstance(values, np.ndarray) else values
            for slot in self._slots_of(*key):
                slot.add_all(key.output_name, listed, periods)

    @property
    def has_received(self) -> bool:
        """Whether there are statistics of the level below to reduce."""
        self._take_deferred()
        return bool(self._lengths)

    def clear_inputs(self) -> None:
        """Drop the values collected since the last :meth:`reduce`."""
        self._take_deferred()
        for slot in self._slots.values():
            slot.clear()
        self._touched.clear()
        self._lengths.clear()

    def add_event(self, event_record: EventRecord) -> None:
        """Add a fired event to the statistics of this level.

        :param event_record: Record of the event.
        """
        event, attributes = event_record.interface_method, event_record.attributes
        plan = level_plan(event, self._level_name)
        for index, variant in enumerate(plan.variants):
            slot = self._slot(event, plan, index, group_of(event, plan, variant, attributes))
            for name, values in slot.inputs.items():
                values.append(stat_value(event, plan, attributes, name))

    def add_value(
        self, event: Callable[..., Any], value: Any, name: str | None = None, group: LogStatsGroup | None = None
    ) -> None:
        """Add one value.

        :param event: Interface method of the event.
        :param value: The value.
        :param name: Input of the event's statistics (their `input_name`).
        :param group: Its group.
        """
        for slot in self._slots_of(event, name, group):
            slot.add(name, value)

    def input_values(
        self, event: Callable[..., Any], name: str | None = None, group: LogStatsGroup | None = None
    ) -> list[Any]:
        """Return the list that collects the values of one input, for loops in which a call per value is too slow.

        The list is the same for the lifetime of the aggregator. The call determines the position of the row.

        :param event: Interface method of the event.
        :param name: Input of the event's statistics (their `input_name`).
        :param group: Group of the values; `None`: no grouping.
        """
        plan = level_plan(event, self._level_name)
        index, _ = plan.routes[name][0]
        return self._slot(event, plan, index, group).inputs[name]

    def register_consumer(self, consumer: LogStatsConsumer) -> None:
        self._consumers.append(consumer)

    def remove_consumer(self, consumer: LogStatsConsumer) -> None:
        self._consumers.remove(consumer)

    def reduce(self, n_periods: int = 0) -> LogStats:
        """Calculate the statistics, pass them to the consumers and drop the values.

        :param n_periods: Number of steps (episodes) of the episode (epoch), if it is not that of received statistics.
        """
        self._take_deferred()
        stats: LogStats = {}
        if self.level is LogStatsLevel.STEP:
            for slot in self._touched:
                slot.reduce_into(stats, 0)
        else:
            for slot in self._slots.values():
                # An episode without the event has no statistics of it, even if an earlier one has.
                if self.level is LogStatsLevel.EPOCH or any(slot.inputs.values()):
                    slot.reduce_into(stats, n_periods or len(self._lengths), self._lengths)
            self._lengths.clear()
        self._touched.clear()
        self.last_stats = stats
        for consumer in self._consumers:
            consumer.receive(stats)
        return stats

    def last_value(self, event: Callable[..., Any], name: str | None = None) -> Any:
        """Return one ungrouped value of the last :meth:`reduce`.

        :param event: The event's interface method.
        :param name: The statistic's output name.
        :raises KeyError: There is no such statistic; the message lists the existing ones.
        """
        key = LogStatsKey(event, name, None)
        if key not in self.last_stats:
            known = sorted({f"{k.event.__qualname__}/{k.output_name}" for k in self.last_stats}) or ["(none yet)"]
            raise KeyError(
                f"No {self._level_name} statistic {event.__qualname__}/{name}. Calculated last: {', '.join(known)}."
            )
        return self.last_stats[key]

    def create_event_topic(self, interface_class: type[T]) -> T:
        """Return an object with the methods of an event interface; a call adds an event.

        :param interface_class: The event interface.
        """
        return event_topic_factory(interface_class, self.add_event)

    def copy_inputs_from(self, other: LogStatsAggregator) -> None:
        """Take over the collected values of another aggregator of the same level; own collected values are dropped.

        :param other: The other aggregator, which keeps its values.
        """
        self.clear_inputs()
        other._take_deferred()
        for key, slot in other._slots.items():
            own = self._slots.setdefault(key, StatsSlot(slot.variant, slot.keys))
            own.load_state(slot.state())
        self._lengths.extend(other._lengths)

    def state(self) -> dict[str, Any]:
        """Return the values collected since the last :meth:`reduce`, by row, with the names of the events."""
        self._take_deferred()
        rows = [
            {"event": [event.__module__, event.__qualname__], "index": index, "group": group, **slot.state()}
            for (event, index, group), slot in self._slots.items()
        ]
        return {"lengths": list(self._lengths), "rows": rows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state`; own collected values are dropped.

        :param state: The state, which is copied. Rows of events whose modules are not imported are left out.
        """
        self.clear_inputs()
        self._lengths.extend(state.get("lengths", ()))
        for row in state.get("rows", ()):
            event = event_named(*row["event"])
            if event is not None:
                plan = level_plan(event, self._level_name)
                self._slot(event, plan, row["index"], row["group"]).load_state(row)

    def _slots_of(
        self, event: Callable[..., Any], name: str | None, group: LogStatsGroup | None
    ) -> Iterator[StatsSlot]:
        """Yield the slots that collect a value of the level below."""
        plan = level_plan(event, self._level_name)
        for index, component in plan.routes.get(name, ()):
            kept = group if component is None or group is None else (group[component],)
            yield self._slot(event, plan, index, kept)

    def _slot(self, event: Callable[..., Any], plan: LevelPlan, index: int, group: LogStatsGroup | None) -> StatsSlot:
        slot = self._slots.get((event, index, group))
        if slot is None:
            variant = plan.variants[index]
            keys = tuple(LogStatsKey(event, stat.output_name, group) for stat in variant.stats)
            slot = self._slots[event, index, group] = StatsSlot(variant, keys)
        self._touched[slot] = None
        return slot


def split_columns(
    columns: Mapping[LogStatsKey, np.ndarray | list[Any]],
    n_periods: int,
    occurrences: Mapping[LogStatsKey, np.ndarray] | None = None,
) -> list[LogStats]:
    """Return the statistics of each period.

    The arguments are those of :meth:`LogStatsAggregator.receive_columns`.

    :param columns: The values of the periods by statistic.
    :param n_periods: Number of periods.
    :param occurrences: For statistics that some periods lack: the indices of the periods with a value.
    :return: `n_periods` dictionaries; numbers of arrays become Python's.
    """
    each: list[LogStats] = [{} for _ in range(n_periods)]
    for key, values in columns.items():
        periods = range(n_periods) if not occurrences or key not in occurrences else occurrences[key].tolist()
        for period, value in zip(periods, values.tolist() if isinstance(values, np.ndarray) else values, strict=True):
            each[period][key] = value
    return each


def event_named(module: str, qualified_name: str) -> Callable[..., Any] | None:
    """Return the interface method of an event; `None`: its module is not imported.

    :param module: Name of its module.
    :param qualified_name: Its qualified name.
    """
    event: Any = sys.modules.get(module)
    for part in qualified_name.split("."):
        event = getattr(event, part, None)
    return event if callable(event) else None


class LogStatsWriter(ABC):
    """Writer of statistics. After an `OSError` it is disabled with one warning; the run continues."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """Exceptions that disable the writer; others end the run."""

    @abstractmethod
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        """Write the statistics of one log step.

        :param path: Prefix such as "train" or "eval".
        :param step: Number of the log step.
        :param stats: The statistics.
        """

    def close(self) -> None:
        """Finish writing."""

    def on_log_step_increment(self) -> None:
        """Complete the current log step."""


class RunPlace(NamedTuple):
    """Directories of a run.

    :param directory: Its directory.
    :param project: Working directory at its start.
    :param group: Name of its sweep; empty: none.
    """

    directory: Path
    project: Path
    group: str = ""


class StatsContext:
    """Writers, log step and hooks of one run.

    Code in `with StatsContext() as stats:` has its own writers and step counter; at the end the writers are closed. The
    functions of this module use the active context: the last one entered in the same thread (or task); in a thread
    without one, the innermost one of the only thread that entered one; otherwise a default one.

    :param stays_open: Keep the writers open until :meth:`close`, so that the context can be entered again.
    """

    def __init__(self, stays_open: bool = False) -> None:
        self.step = 1
        """Number of the current log step, counted from 1."""
        self.n_env_steps: int | None = None
        """Environment steps of the training run so far; `None`: they are not counted."""
        self.writers: list[LogStatsWriter] = []
        self.hooks: list[Callable[[], Any]] = []
        """Functions that are called at the end of each log step."""
        self.event_writers: list[LogEventsWriter] = []
        """Writers of the event log of each finished episode."""
        self.place: RunPlace | None = None
        """Directories of the run; `None`: the working directory."""
        self.error: BaseException | None = None
        """Error that ended the run, or disables a writer, while writers are closed; `None`: none."""
        self._stays_open = stays_open
        self._epochs = weakref.WeakKeyDictionary[Any, None]()
        self._silenced: weakref.WeakSet[Any] = weakref.WeakSet()
        self._tokens: list[Token[StatsContext | None]] = []
        self._lock = threading.RLock()

    @staticmethod
    def active() -> StatsContext:
        """Return the active context."""
        context = _entered.get()
        if context is not None:
            return context
        threads = {thread for thread, _ in _open_contexts}
        return _open_contexts[-1][1] if len(threads) == 1 else _DEFAULT

    def __enter__(self) -> StatsContext:
        self._tokens.append(_entered.set(self))
        _open_contexts.append((threading.get_ident(), self))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _entered.reset(self._tokens.pop())
        _open_contexts.remove((threading.get_ident(), self))
        if not (self._tokens or self._stays_open):
            self.close(exc_info[1])

    def register_writer(self, writer: LogStatsWriter) -> None:
        self.writers.append(writer)

    def write(self, stats: LogStats, path: str | None) -> None:
        """Pass statistics to all writers, with the number of the current log step.

        :param stats: The statistics.
        :param path: Their prefix, such as `train`; `None`: none.
        """
        with self._lock:
            for writer in self.writers:
                self.guarded(writer, partial(writer.write, path, self.step, stats))

    def register_epoch(self, env: Any) -> None:
        """Call `env.finish_epoch()` at the end of each log step.

        :param env: Any object with that method. It is referenced weakly: a deleted one is skipped.
        """
        self._epochs[env] = None

    def finish_step(self) -> None:
        """Complete the epochs of environments, run the hooks and begin the next log step."""
        with self._lock:
            for env in list(self._epochs):
                env.finish_epoch()
            for hook in self.hooks:
                hook()
            for writer in self.writers:
                self.guarded(writer, writer.on_log_step_increment)
            self.step += 1

    def guarded(self, writer: object, write: Callable[[], Any]) -> None:
        """Call `write`; on an `OSError`, such as a full disk, log one warning and disable the writer.

        :param writer: The writer; its attribute `failures`, if it has one, names the exceptions instead of `OSError`.
            For a disabled writer nothing is called.
        :param write: Function without arguments. Its other exceptions are raised.
        """
        if self.is_disabled(writer):
            return
        try:
            write()
        except getattr(writer, "failures", OSError) as error:
            self._silenced.add(writer)
            with suppress(getattr(writer, "failures", OSError)):  # of the same cause
                if isinstance(writer, LogStatsWriter):
                    writer.close()
            what = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            _LOGGER.warning("%s cannot write (%s); it is disabled for this run.", type(writer).__name__, what)

    def is_disabled(self, writer: object) -> bool:
        """Return whether an error has disabled a writer, which may be finishing now."""
        return writer in self._silenced

    def reset(self) -> None:
        """Reset the context to its initial state."""
        self.close()
        self.step = 1
        self.n_env_steps = None
        self.hooks = []

    def close(self, error: BaseException | None = None) -> None:
        """Close and remove all writers, in this context.

        :param error: The error that ended the run.
        """
        token, self.error = _entered.set(self), error
        try:
            with self._lock:
                for writer in self.writers:
                    self.guarded(writer, writer.close)
                self.writers = []
                self.event_writers = []
                self._silenced.clear()
        finally:
            self.error = None
            _entered.reset(token)


_LOGGER = logging.getLogger(__name__)
_DEFAULT = StatsContext()
_entered: ContextVar[StatsContext | None] = ContextVar("maze_stats", default=None)
_open_contexts: list[tuple[int, StatsContext]] = []  # with their threads; for threads without one


def of_active_context(name: str) -> Any:
    """Return a property of a metaclass: an attribute of the active context, readable and writable.

    :param name: Name of an attribute of :class:`StatsContext`.
    """

    def read(_: type) -> Any:
        return getattr(StatsContext.active(), name)

    def write(_: type, value: Any) -> None:
        setattr(StatsContext.active(), name, value)

    return property(read, write)


class _ActiveContextView(type):
    """Metaclass whose attributes are those of the active context."""

    global_log_stats_writers = of_active_context("writers")
    hook_on_log_step = of_active_context("hooks")
    global_step = of_active_context("step")


class GlobalLogState(metaclass=_ActiveContextView):
    """`global_log_stats_writers`, `hook_on_log_step` and `global_step` of the active context, readable and writable."""


class LogStatsLogger(LogStatsConsumer):
    """Pass statistics on to the writers of the active context.

    :param path: Prefix of the statistics, such as "train".
    """

    def __init__(self, path: str | None) -> None:
        self.path = path

    @override(LogStatsConsumer)
    def receive(self, stat: LogStats) -> None:
        log_stats(stat, self.path)


def register_log_stats_writer(writer: LogStatsWriter) -> None:
    """Add a writer to the active context.

    :param writer: Receives all further statistics. :meth:`StatsContext.close` closes and removes it.
    """
    StatsContext.active().register_writer(writer)


def log_stats(stats: LogStats, path: str | None) -> None:
    """Pass statistics to the writers of the active context.

    :param stats: The statistics.
    :param path: Prefix such as "train" or "eval".
    """
    StatsContext.active().write(stats, path)


def increment_log_step() -> None:
    """Finish the current log step of the active context."""
    StatsContext.active().finish_step()


def get_stats_logger(path: str | None = None) -> LogStatsConsumer:
    """Return a consumer that passes statistics to the writers.

    :param path: Prefix of the statistics.
    """
    return LogStatsLogger(path)
