"""Conversions of environments and policies between Maze and gymnasium, PettingZoo and stable-baselines3.

Names that need an optional package are imported on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from maze.core.errors import ConfigImportError, install_command
from maze.interop.gymnasium_export import MazeGymnasiumEnv, to_gymnasium

if TYPE_CHECKING:
    from maze.interop.pettingzoo_env import PettingZooEnv
    from maze.interop.pettingzoo_export import to_aec, to_parallel
    from maze.interop.sb3_policy import SB3Policy, to_sb3

__all__ = ["MazeGymnasiumEnv", "PettingZooEnv", "SB3Policy", "to_aec", "to_gymnasium", "to_parallel", "to_sb3"]

_MODULES = {
    "PettingZooEnv": "pettingzoo_env",
    "SB3Policy": "sb3_policy",
    "to_aec": "pettingzoo_export",
    "to_parallel": "pettingzoo_export",
    "to_sb3": "sb3_policy",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "pettingzoo":
            raise
        raise ConfigImportError(f"{name}: PettingZoo is not installed: {install_command('pettingzoo')}.") from error
