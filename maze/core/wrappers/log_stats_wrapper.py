"""Statistics of an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, TypeVar

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.env.simulated_env_mixin import Future
from maze.core.events.event_collection import EventCollection
from maze.core.events.event_record import EventRecord
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsKey, LogStatsLevel, StatsContext, get_stats_logger
from maze.core.log_stats.log_stats_env import LogStatsEnv
from maze.core.wrappers.episode_recorder import EpisodeRecorder
from maze.core.wrappers.wrapper import Wrapper

T = TypeVar("T")


class LogStatsWrapper(Wrapper[MazeEnv[Any]], LogStatsEnv):
    """Collect step, episode and epoch statistics of the wrapped environment.

    The statistics and KPIs of an episode are calculated at the next `reset`; an episode that is reset before its end
    counts as well. :meth:`write_epoch_stats` logs all episodes since its last call; `increment_log_step` calls it
    for environments that were wrapped in the same context.

    :param env: The environment.
    :param logging_prefix: Log epoch statistics under this prefix ("train", "eval"); `None`: only collect them.
    """

    keeps_observations_and_actions = True
    records_only = True

    def __init__(self, env: MazeEnv[Any], logging_prefix: str | None = None) -> None:
        self.epoch_stats = LogStatsAggregator(LogStatsLevel.EPOCH)
        self.episode_stats = LogStatsAggregator(LogStatsLevel.EPISODE, self.epoch_stats)
        if logging_prefix is not None:
            self.epoch_stats.register_consumer(get_stats_logger(logging_prefix))
        self._recorder = EpisodeRecorder(self.episode_stats)
        self.logging_prefix = logging_prefix
        super().__init__(env)
        StatsContext.active().register_epoch(self)

    @classmethod
    @override(Wrapper)
    def wrap(cls, env: T, logging_prefix: str | None = None) -> T | LogStatsWrapper:  # type: ignore[override]
        """Wrap `env`; equal to calling the class, but typed as both.

        :param env: The environment.
        :param logging_prefix: Log epoch statistics under this prefix; `None`: only collect them.
        """
        return cls(env, logging_prefix)  # type: ignore[arg-type]

    @override(Wrapper)
    def _bind(self) -> None:
        super()._bind()
        self._recorder.bind(self.env)

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        return self._recorder.step(action)  # type: ignore[no-any-return]

    @override(Wrapper)
    def reset(self, **kwargs: Any) -> Any:
        """Publish the statistics of the episode so far and begins a new one."""
        return self._recorder.reset(self._env_reset, **kwargs)

    def publish_episode(self) -> None:
        """Publish the statistics of the episode so far immediately; the next `reset` does not repeat them."""
        self._recorder.publish()

    def finish_epoch(self) -> None:
        """Write the statistics of the epoch, if there are any, including the episode that has just ended."""
        if self._recorder.is_done:
            self._recorder.publish()
        if self.epoch_stats.has_received:
            self.write_epoch_stats()

    def discard_episode(self) -> None:
        """Drop the statistics of the episode so far; a `reset` must follow."""
        self._recorder.discard()

    def close(self) -> None:
        """Publish the last episode if it is finished, and closes the environment."""
        if self._recorder.is_done:
            self._recorder.publish()
        self.env.close()

    @override(LogStatsEnv)
    def get_stats(self, level: LogStatsLevel) -> LogStatsAggregator:
        """Return the aggregator of a level. Statistics of single steps are calculated after the first request."""
        if level is LogStatsLevel.STEP:
            self._recorder.is_step_level_observed = True
            return self._recorder.step_stats
        return self.episode_stats if level is LogStatsLevel.EPISODE else self.epoch_stats

    @override(LogStatsEnv)
    def write_epoch_stats(self) -> None:
        self.epoch_stats.reduce()

    @override(LogStatsEnv)
    def clear_epoch_stats(self) -> None:
        self.epoch_stats.clear_inputs()

    @override(LogStatsEnv)
    def get_stats_value(self, event: Callable[..., Any], level: LogStatsLevel, name: str | None = None) -> Any:
        return stats_value(self.get_stats(level), event, name)

    def get_last_step_events(
        self, query: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None
    ) -> list[EventRecord]:
        """Return the events of the last environment step, including its actions and reward.

        :param query: An event's interface method, or several; `None`: all events.
        """
        records = self._recorder.last_step_records()
        return records if query is None else EventCollection(records).query_events(query)

    def get_episode_event_log(self) -> EpisodeEventLog:
        """Return the events of the current episode up to the last step; after its end, its KPIs as well.

        Events are kept if there are KPIs or event writers, otherwise from the step before the first call on.
        :meth:`reset` and :meth:`publish_episode` begin a new log.
        """
        self._recorder.request_log()
        return self._recorder.event_log()

    @property
    def episode_event_log(self) -> EpisodeEventLog:
        """The result of :meth:`get_episode_event_log`."""
        return self.get_episode_event_log()

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
        :param aggregation_func: How several values of one step are joined, as pandas understands it.
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
        self._recorder.clone_from(env._recorder)


def stats_value(stats: LogStatsAggregator, event: Callable[..., Any], name: str | None) -> Any:
    """Return one ungrouped value of the latest statistics of an aggregator.

    :param stats: The aggregator.
    :param event: The event's interface method.
    :param name: The statistic's output name.
    :raises KeyError: There is no such statistic; the message lists the existing ones.
    """
    key = LogStatsKey(event, name, None)
    if key not in stats.last_stats:
        known = sorted({f"{k.event.__qualname__}/{k.output_name}" for k in stats.last_stats}) or ["(none yet)"]
        raise KeyError(
            f"No {stats.level.name.lower()} statistic {event.__qualname__}/{name}. Calculated last: {', '.join(known)}."
        )
    return stats.last_stats[key]
