"""Unchanged since part 04."""

from tutorial_maze_env.part04_events.env.events import CuttingEvents, InventoryEvents

__all__ = ["CuttingEvents", "InventoryEvents"]
