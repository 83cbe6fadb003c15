"""Unchanged since part 04."""

from tutorial_maze_env.part04_events.env.kpi_calculator import Cutting2dKpiCalculator

__all__ = ["Cutting2dKpiCalculator"]
