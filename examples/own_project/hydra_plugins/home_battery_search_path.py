"""Makes the configurations of this project known to `maze-run`, wherever it is started."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class HomeBatterySearchPath(SearchPathPlugin):
    """Appends `home_battery.conf`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("project", "pkg://home_battery.conf")
