"""What the command line starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.utils.seeding import MazeSeeding


class Runner(ABC):
    """Builds what a job needs from its configuration, and runs it."""

    maze_seeding: MazeSeeding
    """Source of all seeds of the job; set by :meth:`setup`."""

    @abstractmethod
    def setup(self, cfg: DictConfig) -> None:
        """Builds everything the job needs.

        :param cfg: The whole composed configuration, of which `cfg.runner` describes this object.
        """

    @abstractmethod
    def run(self, **kwargs: Any) -> None:
        """Runs the job; :meth:`setup` came first."""

    def close(self) -> None:  # most runners hold nothing
        """Gives back what the runner holds beyond its run: processes, a cluster; nothing happens the second time."""
