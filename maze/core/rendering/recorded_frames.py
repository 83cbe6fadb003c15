"""Pictures that were taken during a rollout."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.annotations import override
from maze.core.rendering.renderer import Renderer

if TYPE_CHECKING:
    from maze.core.env.maze_action import MazeActionType
    from maze.core.env.maze_state import MazeStateType
    from maze.core.log_events.step_event_log import StepEventLog


class RecordedFramesRenderer(Renderer):
    """Shows the frames of one episode again, for environments that cannot draw earlier states."""

    def __init__(self) -> None:
        self.frames: dict[int, bytes] = {}
        """PNG pictures by environment time."""

    def __len__(self) -> int:
        return len(self.frames)

    def add(self, env_time: int, pixels: np.ndarray) -> None:
        """Keeps a frame, compressed without loss.

        :param env_time: Environment steps completed when it was taken.
        :param pixels: Colours, uint8, ``[height, width, 3]``.
        """
        from PIL import Image

        png = io.BytesIO()
        Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(png, format="PNG")
        self.frames[env_time] = png.getvalue()

    def picture(self, env_time: int | None) -> bytes | None:
        """The PNG of a time, or of the last one before it; None if there is none.

        :param env_time: Environment time of a recorded step.
        """
        earlier = [time for time in self.frames if env_time is None or time <= env_time]
        return self.frames[max(earlier)] if earlier else None

    def pixels(self, env_time: int | None) -> np.ndarray | None:
        """The frame of a time as colours, ``[height, width, 3]``."""
        from PIL import Image

        picture = self.picture(env_time)
        return None if picture is None else np.asarray(Image.open(io.BytesIO(picture)))

    @override(Renderer)
    def render(
        self, maze_state: MazeStateType, maze_action: MazeActionType | None, events: StepEventLog, **kwargs: Any
    ) -> None:
        import matplotlib.pyplot as plt

        pixels = self.pixels(events.env_time)
        plt.figure("Recorded frames")
        plt.clf()
        plt.axis("off")
        if pixels is None:
            plt.title(f"no frame was recorded up to step {events.env_time}")
        else:
            plt.imshow(pixels)
        plt.draw()
        plt.pause(0.01)
