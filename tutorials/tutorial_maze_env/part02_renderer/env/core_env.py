"""The simulation, with a renderer."""

from __future__ import annotations

from typing import Any

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from tutorial_maze_env.part01_core_env.env.core_env import Cutting2DCoreEnvironment as Part01CoreEnvironment

from .renderer import Cutting2DRenderer


class Cutting2DCoreEnvironment(Part01CoreEnvironment):
    """The simulation of part 01 that can be drawn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.renderer = Cutting2DRenderer()

    @override(CoreEnv)
    def get_renderer(self) -> Cutting2DRenderer:
        return self.renderer
