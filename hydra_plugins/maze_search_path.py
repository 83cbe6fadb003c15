"""Makes the configurations of the environments that come with Maze known to Hydra."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from maze.cli.hydra_setup import environment_configs


class MazeSearchPath(SearchPathPlugin):
    """Appends the `conf` packages of environments and tutorials, as far as they are installed."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for package in environment_configs():
            search_path.append("maze", f"pkg://{package}")
