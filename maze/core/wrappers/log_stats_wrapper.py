"""Statistics of an environment.

On the hot path raw rewards and discrete actions are appended to the input lists of the episode's statistics; records of
these two events are created on request only. The environment's own events are taken from the event service when it
drops them, so that a step without events costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.maze_env import MazeEnv
from maze.core.env.simulated_env_mixin import Future
from maze.core.errors import EnvironmentContractError
from maze.core.events.event_collection import EventCollection
from maze.core.events.event_record import EventRecord
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.log_events_writer_registry import LogEventsWriterRegistry
from maze.core.log_events.monitoring_events import DiscreteActionEvents
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, StatsContext, get_stats_logger
from maze.core.log_stats.log_stats_env import LogStatsEnv
from maze.core.wrappers.wrapper import PassiveWrapper, Wrapper

# Name of an action that is not part of a dictionary.
_SINGLE_ACTION = "action"

_Head = tuple[str, list[int]]


class LogStatsWrapper(PassiveWrapper[MazeEnv[Any]], LogStatsEnv):
    """Collect step, episode and epoch statistics of the wrapped environment.

    The statistics and KPIs of an episode are calculated at the next `reset`; an episode that is reset before its end
    counts as well. :meth:`write_epoch_stats` logs all episodes since its last call; `increment_log_step` calls it
    for environments that were wrapped in the same context.

    :param env: The environment.
    :param logging_prefix: Log epoch statistics under this prefix ("train", "eval"); `None`: only collect them.
    """

    # They refer to methods and lists of the original.
    TRANSIENT: ClassVar[tuple[str, ...]] = (
        *(*Wrapper.TRANSIENT, "_actor_id", "_kpi_calculator", "_heads_by_key", "_only_heads", "_rewards"),
    )
    CLONED = ("_pending_reward", "_is_step_pending", "_keeps_log", "_step_keys", "_is_done", "_n_taken")

    def __init__(self, env: MazeEnv[Any], logging_prefix: str | None = None) -> None:
        self.epoch_stats = LogStatsAggregator(LogStatsLevel.EPOCH)
        self.episode_stats = LogStatsAggregator(LogStatsLevel.EPISODE, self.epoch_stats)
        if logging_prefix is not None:
            self.epoch_stats.register_consumer(get_stats_logger(logging_prefix))
        self.logging_prefix = logging_prefix
        # Statistics of single steps, calculated once they are requested.
        self._step_stats = LogStatsAggregator(LogStatsLevel.STEP)
        self._is_step_level_observed = False
        self._is_log_requested = False
        self._is_done = False
        self._event_stats = LogStatsAggregator(LogStatsLevel.STEP, self.episode_stats)
        self._pending_reward = 0.0
        self._is_step_pending = False
        self._is_resetting = False
        self._keeps_log = False
        self._logs: dict[int, StepEventLog] = {}
        self._n_taken = 0
        self._step_keys: list[Any] = []
        super().__init__(env)
        StatsContext.active().register_epoch(self)

    @override(Wrapper)
    def _bind(self) -> None:
        super()._bind()
        self._actor_id, self._kpi_calculator = self.env.actor_id, self.env.get_kpi_calculator
        self._heads_by_key: dict[Any, list[_Head]] = {}
        for step_key, space in self.env.action_spaces_dict.items():
            is_first = not self._heads_by_key
            self._heads_by_key[step_key] = self._heads(step_key, space)
            if is_first:
                # After the actions of the first sub-step: this defines the order of rows in the log.
                self._rewards: list[float] = self.episode_stats.input_values(BaseEnvEvents.reward)
        is_flat = len(self._heads_by_key) == 1
        self._only_key = next(iter(self._heads_by_key)) if is_flat else None
        self._only_heads = self._heads_by_key[self._only_key] if is_flat else None
        listeners = self._context.event_service.on_clear
        if self._take_events not in listeners:
            listeners.append(self._take_events)

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        # Not in `MazeEnv.step` alone: a wrapper may answer the first sub-steps of a step without stepping it.
        context = self._context
        context.pre_step()
        heads = self._only_heads
        if heads is None:
            step_key = self._actor_id()[0]
            if not self._is_step_pending:
                self._step_keys.clear()
            self._step_keys.append(step_key)
            heads = self._heads_by_key.get(step_key, [])
        result: tuple[Any, Any, bool, dict[Any, Any]] = self._env_step(action)
        if action.__class__ is not dict and not hasattr(action, "keys"):
            action = {_SINGLE_ACTION: action}
        try:
            for name, values in heads:
                values.append(int(action[name]))
        except (KeyError, TypeError, ValueError):
            pass  # the action is not an element of the action space: no statistics of it
        self._is_done = result[2]
        if not context.is_step_complete:
            self._pending_reward += result[1]
            self._is_step_pending = True
        elif self._is_step_pending:
            self._complete_step(self._pending_reward + result[1], context.step_id - 1)
        else:
            self._rewards.append(result[1])
            if self._keeps_log or self._is_step_level_observed:
                self._observe_step(context.step_id - 1)
        return result

    @override(Wrapper)
    def reset(self, **kwargs: Any) -> Any:
        """Publish the statistics of the episode so far, and begin a new one."""
        self.publish_episode()
        # Steps that wrappers take during a reset are not part of the episode; events that remain at its end are.
        self._is_resetting = True
        try:
            observation = self._env_reset(**kwargs)
        finally:
            self._is_resetting = False
        self._n_taken = 0
        self._is_done = False
        self._step_keys.clear()
        has_kpis = self._kpi_calculator() is not None
        self._keeps_log = self._is_log_requested or has_kpis or bool(StatsContext.active().event_writers)
        return observation

    def publish_episode(self) -> None:
        """Publish the statistics of the episode so far immediately; the next `reset` does not repeat them.

        An episode without steps has none.
        """
        env_time = self._env_time()
        if self._is_step_pending:
            self._complete_step(self._pending_reward, env_time)
        n_steps = len(self._rewards)
        if n_steps == 0:
            self.episode_stats.clear_inputs()
            self._logs = {}
            return
        records = self._context.event_service.records
        if len(records) > self._n_taken:
            self._add_events(records[self._n_taken :], env_time)
            self._n_taken = len(records)
        if self._keeps_log:
            log = self._log_without_kpis()
            log.episode_events.extend(kpis := self._kpi_records(log))
            for record in kpis:
                self._event_stats.add_event(record)
            self._event_stats.reduce()
            if not self._context.is_copied:
                LogEventsWriterRegistry.record_event_logs(log)
        self.episode_stats.reduce(n_periods=n_steps)
        self._logs = {}

    def finish_epoch(self) -> None:
        """Write the statistics of the epoch, if there are any, including the episode that has just ended."""
        if self._is_done:
            self.publish_episode()
        if self.epoch_stats.has_received:
            self.write_epoch_stats()

    def discard_episode(self) -> None:
        """Drop the statistics of the episode so far; a `reset` must follow."""
        self._pending_reward = 0.0
        self._is_step_pending = False
        self._n_taken = len(self._context.event_service.records)
        self.episode_stats.clear_inputs()
        self._logs = {}

    def close(self) -> None:
        """Publish the last episode if it is finished, and close the environment."""
        if self._is_done:
            self.publish_episode()
        self.env.close()

    @override(LogStatsEnv)
    def get_stats(self, level: LogStatsLevel) -> LogStatsAggregator:
        """Return the aggregator of a level. Statistics of single steps are calculated after the first request."""
        if level is LogStatsLevel.STEP:
            self._is_step_level_observed = True
            return self._step_stats
        return self.episode_stats if level is LogStatsLevel.EPISODE else self.epoch_stats

    def get_last_step_events(
        self, query: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None
    ) -> list[EventRecord]:
        """Return the events of the last environment step, including its actions and reward.

        :param query: An event's interface method, or several; `None`: all events.
        """
        records = [*self._reward_and_actions(), *self._context.event_service.records]
        return records if query is None else EventCollection(records).query_events(query)

    def get_episode_event_log(self) -> EpisodeEventLog:
        """Return the events of the current episode up to the last step; after its end, its KPIs as well.

        Events are kept if there are KPIs or event writers, otherwise from the step before the first call on.
        :meth:`reset` and :meth:`publish_episode` begin a new log.
        """
        if not self._keeps_log and self._rewards and not self._is_step_pending:
            env_time = self._env_time()
            self._logs[env_time] = StepEventLog(env_time, EventCollection(self._reward_and_actions()))
        self._is_log_requested = self._keeps_log = True
        log = self._log_without_kpis()
        if self._is_done and (self._rewards or self._is_step_pending):
            log.episode_events.extend(self._kpi_records(log))
        return log

    def render_stats(
        self,
        event_name: str = "BaseEnvEvents.reward",
        metric_name: str = "value",
        aggregation_func: str | Callable[..., Any] | None = None,
        group_by: str | None = None,
        post_processing_func: str | Callable[..., Any] | None = "cumsum",
    ) -> None:
        """Draw the values of an event over the steps of the current episode.

        Steps before the first call are shown if the events of the episode were kept.

        :param event_name: Interface and event, separated by a dot.
        :param metric_name: The attribute to draw.
        :param aggregation_func: Aggregation of several values of one step, a function or a name of pandas.
        :param group_by: Attribute for each value of which a line is drawn.
        :param post_processing_func: Applied to each line, as pandas understands it.
        """
        # By name: rendering is a layer above the wrappers and imports matplotlib.
        rendering = import_module("maze.core.rendering.events_stats_renderer")
        rendering.EventStatsRenderer().render_current_episode_stats(
            self.get_episode_event_log(), event_name, metric_name, aggregation_func, group_by, post_processing_func
        )

    @override(Wrapper)
    def clone_from(self, env: LogStatsWrapper, future: Future = "same") -> None:
        super().clone_from(env, future)
        self.episode_stats.copy_inputs_from(env.episode_stats)
        self._logs = {t: StepEventLog(t, EventCollection(log.events)) for t, log in env._logs.items()}

    def _heads(self, step_key: Any, space: spaces.Space[Any]) -> list[_Head]:
        """Return the discrete actions of a sub-step with the lists that collect their values."""
        subspaces = space.spaces if isinstance(space, spaces.Dict) else {_SINGLE_ACTION: space}
        heads: list[_Head] = []
        for name, subspace in subspaces.items():
            if isinstance(subspace, spaces.Discrete):
                group = (f"substep_{step_key}", str(name))
                values = self.episode_stats.input_values(DiscreteActionEvents.action, group=group)
                heads.append((name, values))
        return heads

    def _complete_step(self, reward: float, env_time: int) -> None:
        self._pending_reward = 0.0
        self._is_step_pending = False
        self._rewards.append(reward)
        if self._keeps_log or self._is_step_level_observed:
            self._observe_step(env_time)

    def _observe_step(self, env_time: int) -> None:
        records = self._reward_and_actions()
        if self._keeps_log:
            self._logs[env_time] = StepEventLog(env_time, EventCollection(records))
        if self._is_step_level_observed:
            for record in (*records, *self._context.event_service.records):
                self._step_stats.add_event(record)
            self._step_stats.reduce()

    def _reward_and_actions(self) -> list[EventRecord]:
        """Record of the last environment step's actions and reward, made from the raw values."""
        records: list[EventRecord] = []
        step_keys = self._step_keys if self._only_heads is None else [self._only_key]
        for position, step_key in enumerate(step_keys):
            n_later = step_keys[position:].count(step_key)
            for name, values in self._heads_by_key.get(step_key, ()):
                if len(values) >= n_later:
                    attributes = {"substep": f"substep_{step_key}", "name": str(name), "value": values[-n_later]}
                    records.append(EventRecord(DiscreteActionEvents, DiscreteActionEvents.action, attributes))
        if self._is_step_pending:
            if self._is_done:  # a wrapper ended the episode in the middle of a step
                records.append(_reward_record(self._pending_reward))
        elif self._rewards:
            records.append(_reward_record(self._rewards[-1]))
        return records

    def _env_time(self) -> int:
        """Return the environment time of the last step, or of the step in progress."""
        step_id: int = self._context.step_id
        return step_id - 1 if self._context.is_step_complete else step_id

    def _log_without_kpis(self) -> EpisodeEventLog:
        logs = dict(self._logs)
        untaken = self._context.event_service.records[self._n_taken :]
        if self._is_step_pending:
            untaken = [*self._reward_and_actions(), *untaken]
        if self._keeps_log and untaken:
            # A read must not consume them: the statistics of a step are reduced once, when it is complete.
            env_time = self._env_time()
            known = logs[env_time].events if env_time in logs else ()
            logs[env_time] = StepEventLog(env_time, EventCollection([*known, *untaken]))
        log = EpisodeEventLog(self._context.episode_id)
        log.step_event_logs = [logs[env_time] for env_time in sorted(logs)]
        return log

    def _take_events(self, records: list[EventRecord]) -> None:
        """Take the events of a completed step before the event service drops them."""
        if self._is_resetting:
            return
        n_taken, self._n_taken = self._n_taken, 0
        if len(records) > n_taken:
            self._add_events(records[n_taken:], max(0, self._context.step_id - 1))

    def _add_events(self, new: list[EventRecord], env_time: int) -> None:
        if self._keeps_log:
            self._logs.setdefault(env_time, StepEventLog(env_time)).extend(new)
        topics = self._context.event_service.topics
        if len(topics) > 1:
            # Rows are ordered by topic.
            new.sort(key=lambda record: topics.get(record.interface_class, len(topics)))
        for record in new:
            self._event_stats.add_event(record)
        self._event_stats.reduce()

    def _kpi_records(self, log: EpisodeEventLog) -> list[EventRecord]:
        calculator = self._kpi_calculator()
        kpis: Any = {} if calculator is None else calculator.calculate_kpis(log, self.env.get_maze_state())
        if not isinstance(kpis, Mapping) or any(not _is_number(kpi) for kpi in kpis.values()):
            raise EnvironmentContractError(
                f"{type(calculator).__name__}.calculate_kpis() must return numbers by name, found {kpis!r:.200}."
            )
        return [EventRecord(BaseEnvEvents, BaseEnvEvents.kpi, {"name": name, "value": kpis[name]}) for name in kpis]


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf"


def _reward_record(value: float) -> EventRecord:
    return EventRecord(BaseEnvEvents, BaseEnvEvents.reward, {"value": value})
