"""Documented path of a reduce function that is defined in `reduction`."""

from maze.core.log_stats.reduction import histogram

__all__ = ["histogram"]
