"""Figures of event logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from maze.core.rendering.event_timelines import draw_timelines, event_table, label_of, timelines

if TYPE_CHECKING:
    import pandas as pd

    from maze.core.log_events.episode_event_log import EpisodeEventLog

_FIGURE = "Event statistics"


class EventStatsRenderer:
    """Draws how an event's values develop, from logs in memory or from tables read back.

    Figures belong to pyplot, whose backend decides where they appear.
    """

    def __init__(self) -> None:
        self._is_open = False

    @staticmethod
    def render_timeline_stat(
        df: pd.DataFrame,
        event_name: str = "BaseEnvEvents.reward",
        metric_name: str = "value",
        aggregation_func: str | Callable[..., Any] | None = None,
        group_by: str | None = None,
        post_processing_func: str | Callable[..., Any] | None = "cumsum",
    ) -> None:
        """Draws an event's values over the steps, into the current figure.

        :param df: The event's table with columns `episode_id`, `env_time` and one for each attribute, as
            `LogEventsWriterTSV` writes it.
        :param event_name: Interface and event, for the title.
        :param metric_name: The attribute to draw.
        :param aggregation_func: Joins several values of one step: a function, or its name in pandas. None: they are
            summed up.
        :param group_by: Draw one line for each value of this attribute.
        :param post_processing_func: Applied to each episode's series: a function, or its name in pandas. None: nothing.
        """
        import matplotlib.pyplot as plt

        lines = timelines(df, metric_name, aggregation_func, group_by, post_processing_func)
        label = label_of(metric_name, aggregation_func, post_processing_func)
        draw_timelines(plt.gca(), lines, event_name, label)

    def render_current_episode_stats(
        self,
        episode_event_log: EpisodeEventLog,
        event_name: str = "BaseEnvEvents.reward",
        metric_name: str = "value",
        aggregation_func: str | Callable[..., Any] | None = None,
        group_by: str | None = None,
        post_processing_func: str | Callable[..., Any] | None = "cumsum",
    ) -> None:
        """Draws an event's values in the episode so far, into a figure of its own that is drawn over at each call.

        The arguments are those of :meth:`render_timeline_stat`.
        """
        import matplotlib.pyplot as plt

        df = event_table(episode_event_log, event_name)
        plt.figure(_FIGURE)
        plt.clf()
        self._is_open = True
        self.render_timeline_stat(df, event_name, metric_name, aggregation_func, group_by, post_processing_func)
        refresh(plt)

    def close(self) -> None:
        """Closes the figure."""
        if self._is_open:
            import matplotlib.pyplot as plt

            plt.close(_FIGURE)
            self._is_open = False


def refresh(plt: Any) -> None:
    """Shows what was drawn, where there are windows."""
    plt.draw()
    if plt.isinteractive() or plt.get_backend().lower() in window_backends():
        plt.pause(0.01)


def window_backends() -> set[str]:
    """The backends of matplotlib that open windows."""
    from matplotlib.backends import registry

    interactive = registry.BackendFilter.INTERACTIVE
    names: list[str] = registry.backend_registry.list_builtin(interactive)  # type: ignore[no-untyped-call, unused-ignore]
    return {name.lower() for name in names}
