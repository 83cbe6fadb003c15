"""Where configurations of environments are found, beside those in ``maze.conf``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ENVIRONMENT_CONFIGS = (
    "maze_envs.logistics.cutting_2d.conf",
    "maze_envs.logistics.dispatching.conf",
    "maze_envs.robotics.pick_and_place.conf",
    "tutorial_maze_env.part03_maze_env.conf",
    "tutorial_maze_env.part04_events.conf",
    "tutorial_maze_env.part06_struct_env.conf",
)


def environment_configs() -> list[str]:
    """The packages among them that can be imported."""
    _make_tutorial_importable()
    return [package for package in ENVIRONMENT_CONFIGS if _is_importable(package)]


def _make_tutorial_importable() -> None:
    """In a checkout of the project, has the tutorial found where it lies: beside this package, in ``tutorials``."""
    tutorials = Path(__file__).resolve().parents[2] / "tutorials"
    if not _is_importable("tutorial_maze_env") and (tutorials / "tutorial_maze_env").is_dir():
        sys.path.append(str(tutorials))


def _is_importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False  # one of its parents is missing
