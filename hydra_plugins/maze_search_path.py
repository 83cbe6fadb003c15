"""Register the shipped algorithms and the configurations of the shipped environments with Hydra."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from maze.cli.hydra_setup import environment_configs, register_algorithms


class MazeSearchPath(SearchPathPlugin):
    """Register algorithms, and append the `conf` packages of environments and tutorials that are installed."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        register_algorithms()
        for package in environment_configs():
            search_path.append("maze", f"pkg://{package}")
