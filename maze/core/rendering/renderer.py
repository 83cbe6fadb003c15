"""Drawing of simulation states, also without windows."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.errors import ConfigError
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer_args import RendererArg
from maze.core.trajectory_recording.records.state_record import StateRecord


class Renderer(ABC):
    """Draw states, independent of an environment, so that recordings can be drawn.

    Renderers that draw with matplotlib are compatible with the viewers.
    """

    @staticmethod
    def arguments() -> list[RendererArg]:
        """Return further arguments of :meth:`render` for which viewers show widgets. Default: none."""
        return []

    @abstractmethod
    def render(
        self, maze_state: MazeStateType, maze_action: MazeActionType | None, events: StepEventLog, **kwargs: Any
    ) -> None:
        """Draw one step.

        :param maze_state: State in which the action is taken.
        :param maze_action: The action; `None` after the last step.
        :param events: Events of the step.
        :param kwargs: Values of the arguments in :meth:`arguments`.
        """


def renderer_of(env: Any) -> Renderer:
    """Return the renderer of a Maze environment.

    :raises ConfigError: It has none.
    """
    renderer: Renderer | None = env.get_renderer()
    if renderer is None:
        raise ConfigError(
            f"{type(env).__name__} cannot be drawn: it has no renderer. Return one from `get_renderer` of its CoreEnv."
        )
    return renderer


def draw_current_state(env: Any) -> None:
    """Draw the current state of a Maze environment, with the last action and its events.

    :param env: The environment with its wrappers, after its first reset.
    :raises ConfigError: The environment has no renderer.
    """
    events = StepEventLog(env.get_env_time())
    events.extend(env.get_step_events())
    renderer_of(env).render(env.get_maze_state(), env.get_maze_action(), events)


# -- drawing without windows ------------------------------------------------------------------------------------------


class RecordedFramesRenderer(Renderer):
    """Show the recorded frames of one episode, for environments that cannot draw earlier states."""

    def __init__(self) -> None:
        self.frames: dict[int, bytes] = {}
        """PNG pictures by environment time."""

    def add(self, env_time: int, pixels: np.ndarray) -> None:
        """Add a frame, compressed without loss.

        :param env_time: Environment time of the frame.
        :param pixels: Colours, uint8, `[height, width, 3]`.
        """
        self.frames[env_time] = pixels_png(pixels)

    def picture(self, env_time: int | None) -> bytes | None:
        """Return the PNG of a time, or of the last one before it; `None`: there is none.

        :param env_time: Environment time of a recorded step.
        """
        earlier = [time for time in self.frames if env_time is None or time <= env_time]
        return self.frames[max(earlier)] if earlier else None

    def pixels(self, env_time: int | None) -> np.ndarray | None:
        """Return the latest frame up to a time as colours, uint8 `[height, width, 3]`; `None`: there is none.

        :param env_time: Environment time; `None`: the last frame.
        """
        from PIL import Image

        picture = self.picture(env_time)
        return None if picture is None else np.asarray(Image.open(io.BytesIO(picture)))

    @override(Renderer)
    def render(
        self, maze_state: MazeStateType, maze_action: MazeActionType | None, events: StepEventLog, **kwargs: Any
    ) -> None:
        pixels = self.pixels(events.env_time)
        title = "" if pixels is not None else f"no frame was recorded up to step {events.env_time}"
        show_pixels("Recorded frames", pixels, title)


def show_pixels(window: str, pixels: np.ndarray | None, title: str = "") -> None:
    """Draw a picture with matplotlib.

    :param window: Name of the figure, which is cleared.
    :param pixels: Colours, uint8, `[height, width, 3]`; `None`: only the title is drawn.
    :param title: Text above the picture.
    """
    import matplotlib.pyplot as plt

    plt.figure(window)
    plt.clf()
    plt.title(title)
    plt.axis("off")
    if pixels is not None:
        plt.imshow(pixels)
    plt.draw()
    plt.pause(0.01)


@contextmanager
def offscreen() -> Iterator[Any]:
    """Return a context in which pyplot draws into memory; functions that show, await or refresh windows do nothing.

    Figures created before are not accessible, those created inside are closed. `plt.draw` does nothing, because figures
    are rendered when their pixels are read.
    """
    import matplotlib.pyplot as plt
    from matplotlib._pylab_helpers import Gcf

    backend, draw, pause, show, figures = plt.get_backend(), plt.draw, plt.pause, plt.show, Gcf.figs
    Gcf.figs = type(figures)()
    plt.switch_backend("agg")
    plt.draw = plt.pause = plt.show = lambda *_, **__: None
    try:
        yield plt
    finally:
        plt.draw, plt.pause, plt.show = draw, pause, show
        plt.close("all")
        if backend.lower() != "agg":
            plt.switch_backend(backend)
        Gcf.figs = figures


def figure_png(figure: Any, dpi: int = 100) -> bytes:
    """Return a matplotlib figure as PNG.

    The figure is rendered once; `savefig` would render it twice, to lay it out and to write it.

    :param figure: The figure; its resolution is changed.
    :param dpi: Resolution in dots per inch.
    """
    figure.set_dpi(dpi)
    return pixels_png(figure_pixels(figure))


def figure_pixels(figure: Any) -> np.ndarray:
    """Return a matplotlib figure as colours.

    :param figure: The figure, with a canvas of the backend Agg, as in :func:`offscreen`.
    :return: uint8 `[height, width, 3]`.
    """
    figure.canvas.draw()
    return np.ascontiguousarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])


def pixels_png(pixels: np.ndarray) -> bytes:
    """Return colours as PNG.

    Fast compression: a few per cent larger, five times as fast as the default.

    :param pixels: Colours from 0 to 255, `[height, width, 3]`.
    """
    from PIL import Image

    png = io.BytesIO()
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(png, format="PNG", compress_level=1)
    return png.getvalue()


def step_picture(renderer: Renderer, record: StateRecord, dpi: int = 100, **kwargs: Any) -> bytes | None:
    """Return the picture of a recorded step as PNG; `None`: the renderer draws no figure.

    :param renderer: The renderer.
    :param record: The step.
    :param dpi: Dots per inch of the picture.
    :param kwargs: Further arguments of the renderer.
    """
    if isinstance(renderer, RecordedFramesRenderer):
        return renderer.picture(record.env_time)
    events = record.step_event_log if record.step_event_log is not None else StepEventLog(0)
    with offscreen() as plt:
        renderer.render(record.maze_state, record.maze_action, events, **kwargs)
        return figure_png(plt.gcf(), dpi) if plt.get_fignums() else None
