"""Figures of event logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from maze.core.errors import ConfigError, did_you_mean
from maze.core.log_events.log_events_writer_tsv import event_tables

if TYPE_CHECKING:
    import pandas as pd

    from maze.core.log_events.episode_event_log import EpisodeEventLog


_FIGURE = "Event statistics"


class EventStatsRenderer:
    """Draw the values of an event over the steps, from logs in memory or from tables.

    Figures are pyplot's, whose backend determines where they are shown.
    """

    @staticmethod
    def render_timeline_stat(
        df: pd.DataFrame,
        event_name: str = "BaseEnvEvents.reward",
        metric_name: str = "value",
        aggregation_func: str | Callable[..., Any] | None = None,
        group_by: str | None = None,
        post_processing_func: str | Callable[..., Any] | None = "cumsum",
    ) -> None:
        """Draw an event's values over the steps, into the current figure.

        :param df: The event's table with columns `episode_id`, `env_time` and one for each attribute, as
            `LogEventsWriterTSV` writes it.
        :param event_name: Interface and event, for the title.
        :param metric_name: The attribute to draw.
        :param aggregation_func: Joins several values of one step: a function, or its name in pandas. None: they are
            summed up.
        :param group_by: Attribute for each value of which a line is drawn.
        :param post_processing_func: Applied to each episode's series: a function, or its name in pandas. None: nothing.
        :raises ConfigError: The event has no such attribute, or pandas no such function.
        """
        import matplotlib.pyplot as plt

        axes, n_episodes = plt.gca(), 0
        lines = timelines(df, metric_name, aggregation_func, group_by, post_processing_func)
        for group, table in lines.items():  # of several episodes the mean, with the range of values shaded
            mean, n_episodes = table.mean(axis=1), max(n_episodes, table.shape[1])
            (line,) = axes.plot(mean.index, mean, label=None if group is None else str(group), linewidth=1.5)
            if table.shape[1] > 1:
                low, high = table.min(axis=1), table.max(axis=1)
                axes.fill_between(mean.index, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set_title(event_name if n_episodes <= 1 else f"{event_name} (mean and range of {n_episodes} episodes)")
        axes.set_xlabel("step")
        label = metric_name
        for function in (aggregation_func, post_processing_func):
            label = label if function is None else f"{getattr(function, '__name__', function)}({label})"
        axes.set_ylabel(label)
        axes.grid(visible=True, alpha=0.3)
        if group_by is not None:
            axes.legend(fontsize="small")

    def render_current_episode_stats(
        self,
        episode_event_log: EpisodeEventLog,
        event_name: str = "BaseEnvEvents.reward",
        metric_name: str = "value",
        aggregation_func: str | Callable[..., Any] | None = None,
        group_by: str | None = None,
        post_processing_func: str | Callable[..., Any] | None = "cumsum",
    ) -> None:
        """Draw an event's values in the episode so far, in a figure that is cleared at each call.

        :param episode_event_log: Events of the episode.
        :param event_name: Interface and event, such as `BaseEnvEvents.reward`.
        :param metric_name: The attribute to draw.
        :param aggregation_func: See :meth:`render_timeline_stat`.
        :param group_by: Attribute for each value of which a line is drawn.
        :param post_processing_func: See :meth:`render_timeline_stat`.
        :raises ConfigError: The event did not occur; the message lists those that did.
        """
        import matplotlib.pyplot as plt
        import pandas as pd

        tables = event_tables(episode_event_log)
        if event_name not in tables:
            raise ConfigError(
                f"There is no event `{event_name}` in this episode. Events that occurred: "
                f"{', '.join(sorted(tables)) or '(none)'}."
            )
        rows = tables[event_name]
        df = pd.DataFrame([{"episode_id": row.episode_id, "env_time": row.env_time, **row.attributes} for row in rows])
        plt.figure(_FIGURE)
        plt.clf()
        self.render_timeline_stat(df, event_name, metric_name, aggregation_func, group_by, post_processing_func)
        refresh(plt)

    def close(self) -> None:
        """Close the figure."""
        import matplotlib.pyplot as plt

        plt.close(_FIGURE)


def refresh(plt: Any) -> None:
    """Show the figure, if the backend has windows."""
    plt.draw()
    if plt.isinteractive() or plt.get_backend().lower() in window_backends():
        plt.pause(0.01)


def window_backends() -> set[str]:
    """Return the backends of matplotlib that open windows."""
    from matplotlib.backends import registry

    interactive = registry.BackendFilter.INTERACTIVE
    names: list[str] = registry.backend_registry.list_builtin(interactive)  # type: ignore[no-untyped-call, unused-ignore]
    return {name.lower() for name in names}


Function = str | Callable[..., Any]
"""A function, or the name of a method of pandas' series."""

ID_COLUMNS = ("episode_id", "env_time")
# Functions of pandas that messages list for each argument.
_USUAL = {
    "aggregation_func": ("sum", "mean", "median", "min", "max", "std", "first", "last", "count"),
    "post_processing_func": ("cumsum", "cumprod", "cummax", "cummin", "abs", "diff"),
}


def timelines(
    df: pd.DataFrame,
    metric_name: str,
    aggregation_func: Function | None = None,
    group_by: str | None = None,
    post_processing_func: Function | None = None,
) -> dict[Any, pd.DataFrame]:
    """Return one table for each group: a row per environment time, a column per episode.

    :param df: Records of one event, as written to event logs.
    :param metric_name: The attribute.
    :param aggregation_func: Joins several values of one step. None: "sum" where there are several.
    :param group_by: Grouping attribute; `None`: one group, `None`.
    :param post_processing_func: Applied to each episode's series; None: nothing is.
    :raises ConfigError: The event has no such attribute, or pandas no such function.
    """
    import pandas as pd

    for column in (metric_name, group_by):
        if column is not None and column not in df.columns:
            known = ", ".join(str(name) for name in df.columns if name not in ID_COLUMNS)
            raise ConfigError(f"The event has no attribute `{column}`; it has: {known or '(none)'}.")
    df = df.dropna(subset=["env_time"])
    groups: Any = [(None, df)] if group_by is None else df.groupby(group_by)
    tables: dict[Any, pd.DataFrame] = {}
    for group, rows in groups:
        values = rows.groupby(["env_time", "episode_id"])[metric_name]
        _require_function("aggregation_func", aggregation_func, values)
        tables[group] = values.agg("sum" if aggregation_func is None else aggregation_func).unstack("episode_id")
        if post_processing_func is not None:
            apply: Any = post_processing_func
            _require_function("post_processing_func", apply, pd.Series)
            series = {name: column.dropna() for name, column in tables[group].items()}
            tables[group] = pd.DataFrame(
                {name: apply(one) if callable(apply) else getattr(one, apply)() for name, one in series.items()}
            )
    return tables


def _require_function(key: str, function: Function | None, owner: Any) -> None:
    """Raise a `ConfigError` unless a function that is named is one of pandas'."""
    if isinstance(function, str) and not callable(getattr(owner, function, None)):
        hint, usual = did_you_mean(function, _USUAL[key]), ", ".join(_USUAL[key])
        raise ConfigError(f"{key}: pandas has no function `{function}`.{hint} Known are, for example: {usual}.")
