"""Figure of an episode's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.rendering.events_stats_renderer import EventStatsRenderer


class StepStatsRenderer:
    """Draw the values of an event over the steps of an episode."""

    @staticmethod
    def render_stats(
        episode_event_log: EpisodeEventLog,
        event_name: str = "BaseEnvEvents.reward",
        group_by: str | None = None,
        aggregation_func: Callable[..., Any] | str | None = None,
        metric: str = "value",
        cumulative: bool = True,
    ) -> None:
        """Draw the values of an event over the steps.

        :param episode_event_log: The events of the episode.
        :param event_name: Interface and event, separated by a dot.
        :param group_by: Attribute for each value of which a line is drawn.
        :param aggregation_func: Joins several values of one step. `None`: their sum.
        :param metric: The attribute to draw.
        :param cumulative: Draw the sum up to each step.
        """
        post_processing = "cumsum" if cumulative else None
        EventStatsRenderer().render_current_episode_stats(
            episode_event_log, event_name, metric, aggregation_func, group_by, post_processing
        )
