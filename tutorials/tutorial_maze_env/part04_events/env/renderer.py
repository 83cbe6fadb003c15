"""Unchanged since part 02."""

from tutorial_maze_env.part02_renderer.env.renderer import Cutting2DRenderer

__all__ = ["Cutting2DRenderer"]
