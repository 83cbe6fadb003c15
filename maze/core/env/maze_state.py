"""Type of the simulation's states; any object."""

from __future__ import annotations

from typing import Any

MazeStateType = Any
"""Type of the states of a core environment. Serialisable if trajectories are to be recorded."""
