"""Unchanged since part 01."""

from tutorial_maze_env.part01_core_env.env.maze_state import Cutting2DMazeState

__all__ = ["Cutting2DMazeState"]
