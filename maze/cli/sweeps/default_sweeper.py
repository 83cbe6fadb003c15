"""What ``--multirun`` does unless a command or an experiment names a sweeper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

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
