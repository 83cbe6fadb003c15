"""Unchanged since part 03."""

from tutorial_maze_env.part03_maze_env.space_interfaces.dict_action_conversion import ActionConversion

__all__ = ["ActionConversion"]
