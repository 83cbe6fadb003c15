"""What Hydra is told: where configurations of environments are found, and what ``--multirun`` does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

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


GROUP, NAME = "hydra/sweeper", "basic"


@contextmanager
def grid_by_default() -> Iterator[None]:
    """Has ``hydra/sweeper=basic``, Hydra's default, mean the grid search of Maze.

    A root configuration cannot choose it with ``override hydra/sweeper``: that would win over the choice of an
    experiment. Only the command of Maze is concerned; other applications in the same environment keep Hydra's.
    """
    Plugins.instance()  # plugins register themselves when they are first looked for; here, before one is replaced
    group = ConfigStore.instance().repo["hydra"]["sweeper"]
    previous = group[f"{NAME}.yaml"]
    grid = resources.files("maze.conf") / "hydra" / "sweeper" / "grid.yaml"
    node = OmegaConf.create(grid.read_text(encoding="utf-8"))
    ConfigStore.instance().store(group=GROUP, name=NAME, node=node, provider="maze")
    try:
        yield
    finally:
        group[f"{NAME}.yaml"] = previous
