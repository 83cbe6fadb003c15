"""Unchanged since part 01."""

from tutorial_maze_env.part01_core_env.env.inventory import Inventory

__all__ = ["Inventory"]
