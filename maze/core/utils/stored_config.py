"""Configurations that lie in the directories of earlier runs, and may come from anybody."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from maze.core.errors import CheckpointError

TRUSTED_PACKAGES = ("maze", "maze_envs", "torch")


def refuse_foreign_targets(
    config: Any, path: Path, project: Path, trusted_packages: Sequence[str] = (), way_out: str = ""
) -> None:
    """Raises where a stored configuration names code that its reader has not chosen.

    :param config: The configuration, of plain containers.
    :param path: The file that it comes from.
    :param project: Directory of the user's own code, which is trusted.
    :param trusted_packages: Further packages that are trusted.
    :param way_out: What to do if the code is trusted after all.
    """
    for target in _targets(config):
        package = target.partition(".")[0]
        if package in TRUSTED_PACKAGES or package in trusted_packages or _belongs_to(package, project):
            continue
        raise CheckpointError(
            f"{path} names {target}, which is neither part of Maze or torch nor of the project in {project}. Stored "
            f"configurations cannot run other code; "
            f"{way_out or f'if you trust it, name it: trusted_packages=[{package!r}].'}"
        )


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "_target_":
                yield str(value)
            yield from _targets(value)
            if isinstance(key, str) and "." in key:
                yield key
    elif isinstance(node, list):
        for value in node:
            yield from _targets(value)


def _belongs_to(package: str, project: Path) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    installed = {"site-packages", "dist-packages"}
    return any(
        Path(place).resolve().is_relative_to(project.resolve()) and not installed & set(Path(place).parts)
        for place in places
        if place is not None
    )
