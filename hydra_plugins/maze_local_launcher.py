"""Links `hydra/launcher=local` to the launcher of Maze."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from maze.cli.local_launcher import LocalLauncher


class MazeLocalLauncher(LocalLauncher):
    """Distributes the jobs of a sweep over processes of this machine."""


@dataclass
class LauncherConfig:
    """Configuration of `hydra/launcher=local`."""

    _target_: str = "hydra_plugins.maze_local_launcher.MazeLocalLauncher"
    n_jobs: int = -1
    """Number of jobs at a time; -1: as many as there are CPUs."""


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LauncherConfig, provider="maze")
