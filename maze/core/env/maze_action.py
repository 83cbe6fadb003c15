"""The simulation's own representation of an action; any object."""

from __future__ import annotations

from typing import Any

MazeActionType = Any
"""Type of the actions that a core environment takes. Serialisable if trajectories are to be recorded."""
