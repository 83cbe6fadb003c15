"""Links `hydra/launcher=ray` to the launcher of Maze."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from maze.cli.ray_launcher import RayLauncher


class MazeRayLauncher(RayLauncher):
    """Distributes the jobs of a sweep over a cluster of Ray."""


@dataclass
class LauncherConfig:
    """Configuration of `hydra/launcher=ray`."""

    _target_: str = "hydra_plugins.maze_ray_launcher.MazeRayLauncher"
    address: str | None = None
    """Where Ray is: `auto` or `<host>:<port>`; `None`: one is started on this machine."""
    n_jobs: int = -1
    """Number of jobs at a time; -1: as many as there is room for."""
    cpus_per_job: float = 1.0
    """CPUs that a job needs."""
    gpus_per_job: float = 0.0
    """GPUs that a job needs."""
    ray_config: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `ray.init`."""


ConfigStore.instance().store(group="hydra/launcher", name="ray", node=LauncherConfig, provider="maze")
