"""Documented path of policies that explore; see :mod:`maze.core.agent.action_distribution`."""

from maze.core.agent.action_distribution import ExploringPolicy, cloned_propensities

__all__ = ["ExploringPolicy", "cloned_propensities"]
