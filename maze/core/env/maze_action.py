"""Type of the simulation's actions; any object."""

from __future__ import annotations

from typing import Any

MazeActionType = Any
"""Type of the actions of a core environment. Serialisable if trajectories are to be recorded."""
