"""The interface of runners, which the command line starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.utils.seeding import MazeSeeding


class Runner(ABC):
    """Build the components of a job from its configuration and run it."""

    maze_seeding: MazeSeeding
    """Source of all seeds of the job; set by :meth:`setup`."""

    @abstractmethod
    def setup(self, cfg: DictConfig) -> None:
        """Build the components of the job.

        :param cfg: The whole composed configuration; `cfg.runner` describes this object.
        """

    @abstractmethod
    def run(self, **kwargs: Any) -> None:
        """Run the job, after :meth:`setup`.

        :param kwargs: Arguments of a kind of job: a training runner takes `n_epochs` and arguments of its trainer's
            `train`; other runners ignore them.
        """

    def close(self) -> None:  # most runners hold no resources
        """Release resources that outlive the run: processes, a cluster. Further calls have no effect."""
