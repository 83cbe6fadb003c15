"""Browsing an episode in a notebook."""

from __future__ import annotations

import html
from typing import Any

from maze.core.rendering.notebook_event_logs_viewer import show
from maze.core.rendering.renderer import step_picture
from maze.core.rendering.renderer_args import require_ipywidgets
from maze.core.rendering.trajectory_page import NO_PICTURE, StepSummary, step_summaries
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord


class NotebookTrajectoryViewer:
    """Show the steps (or sub-steps) of an episode with a slider, and widgets for the renderer's arguments.

    Needs the extra `maze-rl[notebook]`.

    :param episode_record: The episode, as loaded by `load_trajectory`, with its renderer.
    :raises ConfigError: The episode has no steps.
    """

    def __init__(self, episode_record: StateTrajectoryRecord) -> None:
        self.episode_record = episode_record.by_substep()
        self.renderer = episode_record.renderer
        self._summaries = step_summaries(self.episode_record)
        widgets = require_ipywidgets()
        self.picture = widgets.Image(format="png")
        """Shows the step; `picture.value` is the PNG."""
        self.text = widgets.HTML()
        """Reward, action and events of the step."""

    def build(self) -> None:
        """Show the viewer below the notebook's cell."""
        widgets = require_ipywidgets()
        last = len(self.episode_record) - 1
        slider = widgets.IntSlider(
            value=0, min=0, max=last, description="step", layout=widgets.Layout(width="640px"), continuous_update=True
        )
        play = widgets.Play(value=0, min=0, max=last, interval=200)
        widgets.jslink((play, "value"), (slider, "value"))
        arguments = {arg.name: arg.create_widget() for arg in self.renderer.arguments()} if self.renderer else {}

        def update(_: Any = None) -> None:
            self.render(slider.value, **{name: widget.value for name, widget in arguments.items()})

        for widget in (slider, *arguments.values()):
            widget.observe(update, names="value")
        update()
        show(widgets.VBox([widgets.HBox([play, slider]), *arguments.values(), self.picture, self.text]))

    def render(self, step_id: int, **kwargs: Any) -> None:
        """Show a step.

        :param step_id: Index of the step, beginning at 0.
        :param kwargs: Further arguments of the renderer.
        """
        record = self.episode_record.step_records[step_id]
        png = None if self.renderer is None else step_picture(self.renderer, record, **kwargs)
        self.picture.value = png or b""
        self.picture.layout.display = "none" if png is None else ""
        note = "" if png is not None else f"<p><i>{NO_PICTURE}</i></p>"
        self.text.value = note + _as_html(self._summaries[step_id])


def _as_html(step: StepSummary) -> str:
    reward = "" if step.reward is None else f"{step.reward:.4g}"
    rows = [
        ("time", step.time),
        ("actor", step.actor),
        ("reward", f"{reward} (sum {step.total:.4g})"),
        ("action", step.action or "none"),
        ("end", step.outcome),
        *step.events,
    ]
    cells = (
        f"<tr><td style='padding-right:1em'><b>{html.escape(name)}</b></td><td>{html.escape(value)}</td></tr>"
        for name, value in rows
        if value or name not in ("actor", "end")
    )
    return f"<table>{''.join(cells)}</table>"
