"""Maze environments in other frameworks."""

from maze.interop.gymnasium_export import MazeGymnasiumEnv, to_gymnasium

__all__ = ["MazeGymnasiumEnv", "to_gymnasium"]
