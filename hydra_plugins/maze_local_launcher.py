"""Register `hydra/launcher=local`."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from maze.cli.launchers import LocalLauncher


class MazeLocalLauncher(LocalLauncher):
    """Distribute the jobs of a sweep over local processes."""


@dataclass
class LauncherConfig:
    """Configuration of `hydra/launcher=local`."""

    _target_: str = "hydra_plugins.maze_local_launcher.MazeLocalLauncher"
    n_jobs: int = -1
    """Number of concurrent jobs; -1: the number of CPUs."""


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LauncherConfig, provider="maze")
