"""Register `hydra/launcher=ray`."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from maze.cli.launchers import RayLauncher


class MazeRayLauncher(RayLauncher):
    """Distribute the jobs of a sweep over a Ray cluster."""


@dataclass
class LauncherConfig:
    """Configuration of `hydra/launcher=ray`."""

    _target_: str = "hydra_plugins.maze_ray_launcher.MazeRayLauncher"
    address: str | None = None
    """Address of the cluster: `auto` or `<host>:<port>`; `None`: start Ray on this machine."""
    n_jobs: int = -1
    """Number of concurrent jobs; -1: as many as the cluster's CPUs allow."""
    cpus_per_job: float = 1.0
    """CPUs per job."""
    gpus_per_job: float = 0.0
    """GPUs per job."""
    ray_config: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `ray.init`."""


ConfigStore.instance().store(group="hydra/launcher", name="ray", node=LauncherConfig, provider="maze")
