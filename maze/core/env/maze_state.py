"""The simulation's own representation of its state; any object."""

from __future__ import annotations

from typing import Any

MazeStateType = Any
"""Type of the states that a core environment hands out. Serialisable if trajectories are to be recorded."""
