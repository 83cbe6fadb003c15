"""Unchanged since part 04."""

from tutorial_maze_env.part04_events.env.inventory import Inventory

__all__ = ["Inventory"]
