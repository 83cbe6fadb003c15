"""Browsing an episode with the keyboard."""

from __future__ import annotations

from typing import Any

from maze.core.errors import ConfigError
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.events_stats_renderer import window_backends
from maze.core.rendering.renderer import Renderer
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord

_MOVES = {"right": 1, "left": -1, "d": 1, "a": -1, "up": 10, "down": -10, "pageup": 10, "pagedown": -10}
_LEAVE = ("q", "escape")
_HELP = "left/right: one step   up/down: ten   home/end: first/last   q: close"


class KeyboardControlledTrajectoryViewer:
    """Show the steps (or sub-steps) of an episode in the renderer's window, with keyboard navigation.

    :param episode_record: The episode.
    :param renderer: Renderer of its steps, with matplotlib.
    :param initial_step_index: The first step; negative ones count from the end.
    :param renderer_kwargs: Further arguments of the renderer.
    :raises ConfigError: The episode has no steps.
    """

    def __init__(
        self,
        episode_record: StateTrajectoryRecord,
        renderer: Renderer,
        initial_step_index: int = 0,
        renderer_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.episode_record = episode_record.by_substep()
        self.renderer = renderer
        self.renderer_kwargs = dict(renderer_kwargs or {})
        from_start = initial_step_index if initial_step_index >= 0 else len(self.episode_record) + initial_step_index
        self.step_index = self._clamp(from_start)
        self._connected: set[int] = set()

    def render(self) -> None:
        """Open the window and return when it is closed.

        :raises ConfigError: The backend of matplotlib has no windows.
        """
        import matplotlib.pyplot as plt

        if plt.get_backend().lower() not in window_backends():
            raise ConfigError(
                f"No window can be opened by the backend `{plt.get_backend()}` of matplotlib. Use "
                f"`write_trajectory_page`, or NotebookTrajectoryViewer."
            )
        print(_HELP)
        self._draw()
        plt.show(block=True)

    def on_key(self, key: str | None) -> None:
        """Handle a key.

        :param key: Matplotlib's name of the key.
        """
        if key in _LEAVE:
            import matplotlib.pyplot as plt

            plt.close("all")
            return
        ends = {"home": 0, "end": len(self.episode_record) - 1}
        target = ends[key] if key in ends else self._clamp(self.step_index + _MOVES.get(key or "", 0))
        if target != self.step_index:
            self.step_index = target
            self._draw()

    def _draw(self) -> None:
        import matplotlib.pyplot as plt

        record = self.episode_record.step_records[self.step_index]
        events = record.step_event_log if record.step_event_log is not None else StepEventLog(self.step_index)
        self.renderer.render(record.maze_state, record.maze_action, events, **self.renderer_kwargs)
        figure: Any = plt.gcf()
        if figure.number not in self._connected:
            self._connected.add(figure.number)
            figure.canvas.mpl_connect("key_press_event", lambda event: self.on_key(event.key))
        figure.canvas.draw_idle()

    def _clamp(self, index: int) -> int:
        return min(max(index, 0), len(self.episode_record) - 1)
