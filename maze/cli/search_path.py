"""Where configurations of environments are found, beside those in ``maze.conf``."""

from __future__ import annotations

import importlib.util

ENVIRONMENT_CONFIGS = ("maze_envs.logistics.cutting_2d.conf", "maze_envs.conf", "tutorials.conf")


def environment_configs() -> list[str]:
    """The packages among them that are installed."""
    return [package for package in ENVIRONMENT_CONFIGS if _is_installed(package)]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False  # one of its parents is missing
