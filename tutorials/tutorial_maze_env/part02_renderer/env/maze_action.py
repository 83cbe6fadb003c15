"""Unchanged since part 01."""

from tutorial_maze_env.part01_core_env.env.maze_action import Cutting2DMazeAction

__all__ = ["Cutting2DMazeAction"]
