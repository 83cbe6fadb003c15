"""Add the configurations of this project to the search path of `maze-run`."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class StockroomSearchPath(SearchPathPlugin):
    """Appends `stockroom.conf`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("project", "pkg://stockroom.conf")
