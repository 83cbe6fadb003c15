"""Browsing event logs in a notebook."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from maze.core.errors import CheckpointError, MazeError
from maze.core.rendering.events_stats_renderer import ID_COLUMNS, EventStatsRenderer
from maze.core.rendering.renderer import figure_png, offscreen
from maze.core.rendering.renderer_args import require_ipywidgets

_AGGREGATIONS = [("none", None), *((name, name) for name in ("sum", "mean", "max", "min", "count"))]
_POST_PROCESSING = [("sum up over the steps", "cumsum"), ("none", None), ("largest so far", "cummax")]


class NotebookEventLogsViewer:
    """Draw events of recorded episodes over the steps, with menus for event, attribute and grouping.

    Of several episodes the mean and the range are shown. Needs the extra `maze-rl[notebook]`.

    :param event_logs_dir_path: Directory of the event logs (`event_logs` in the output directory of a rollout).
    :raises CheckpointError: The directory holds no event logs.
    """

    def __init__(self, event_logs_dir_path: str | Path) -> None:
        self.event_logs_dir_path = Path(event_logs_dir_path)
        self.event_files = sorted(self.event_logs_dir_path.glob("*.tsv"))
        if not self.event_files:
            raise CheckpointError(
                f"{self.event_logs_dir_path.absolute()} holds no event logs (*.tsv). Rollouts with "
                f"`runner.record_event_logs=true` write them into `event_logs/` of their output directory."
            )
        widgets = require_ipywidgets()
        reward_first = sorted(self.event_files, key=lambda file: (file.stem != "BaseEnvEvents.reward", file.stem))
        self.event = widgets.Dropdown(options=[(file.stem, file) for file in reward_first], description="event")
        self.metric = widgets.Dropdown(description="attribute")
        self.group_by = widgets.Dropdown(description="group by")
        self.aggregation = widgets.Dropdown(options=_AGGREGATIONS, description="per step")
        self.post_processing = widgets.Dropdown(options=_POST_PROCESSING, description="then")
        self.picture = widgets.Image(format="png")
        """Shows the figure; `picture.value` is the PNG."""
        self.message = widgets.HTML()
        self._is_updating = False

    def build(self) -> None:
        """Show the viewer below the notebook's cell."""
        widgets = require_ipywidgets()
        self.event.observe(self.update_column_options, names="value")
        for widget in (self.metric, self.group_by, self.aggregation, self.post_processing):
            widget.observe(self._update, names="value")
        self.update_column_options({"new": self.event.value})
        menus = widgets.VBox(
            [
                self.event,
                widgets.HBox([self.metric, self.group_by]),
                widgets.HBox([self.aggregation, self.post_processing]),
            ]
        )
        show(widgets.VBox([menus, self.message, self.picture]))

    def update_column_options(self, metadata: dict[str, Any]) -> None:
        """Show the attributes of the chosen event in the menus, and draw it.

        :param metadata: The change of the event menu; its entry "new" is the path of the event's file.
        """
        columns = [column for column in _read(metadata["new"]).columns if column not in ID_COLUMNS]
        self._is_updating = True
        try:
            self.metric.options = columns or ["(none)"]
            self.metric.value = "value" if "value" in columns else self.metric.options[-1]
            self.group_by.options = [("nothing", None), *((column, column) for column in columns)]
            self.group_by.value = None
        finally:
            self._is_updating = False
        self._update()

    def render(self, event_path: str | Path, **kwargs: Any) -> None:
        """Draw an event.

        :param event_path: The event's file.
        :param kwargs: Arguments of :meth:`EventStatsRenderer.render_timeline_stat`.
        """
        df = _read(event_path)
        with offscreen() as plt:
            figure = plt.figure(figsize=(8, 4), layout="constrained")
            EventStatsRenderer.render_timeline_stat(df, event_name=Path(event_path).stem, **kwargs)
            self.picture.value = figure_png(figure)

    def _update(self, _: Any = None) -> None:
        if self._is_updating:
            return
        self.message.value = ""
        try:
            self.render(
                self.event.value,
                metric_name=self.metric.value,
                group_by=self.group_by.value,
                aggregation_func=self.aggregation.value,
                post_processing_func=self.post_processing.value,
            )
        except (MazeError, TypeError, ValueError) as error:
            # For instance a text attribute, which has no sum.
            self.message.value = f"<p>This cannot be drawn: {html.escape(str(error))}</p>"


def _read(path: str | Path) -> Any:
    import pandas as pd

    return pd.read_csv(path, sep="\t")


def show(widget: Any) -> None:
    """Show a widget below the cell."""
    from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

    display(widget)  # type: ignore[no-untyped-call, unused-ignore]
