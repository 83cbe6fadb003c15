"""Links `hydra/launcher=patient` to the launcher of this project.

Hydra takes launchers only from modules in `hydra_plugins`, and imports these before all others: nothing more is done
here, and `from __future__ import annotations` does not get along with the dataclass.
"""

from dataclasses import dataclass

from home_battery.launchers.patient import PatientLauncher
from hydra.core.config_store import ConfigStore


class HomeBatteryLauncher(PatientLauncher):
    """Runs the jobs of a sweep one after the other, whatever becomes of them."""


@dataclass
class LauncherConfig:
    """Configuration of `hydra/launcher=patient`."""

    _target_: str = "hydra_plugins.home_battery_launcher.HomeBatteryLauncher"
    list_file: str = "jobs.csv"
    """Name of the list of jobs, in the directory of the sweep."""


ConfigStore.instance().store(group="hydra/launcher", name="patient", node=LauncherConfig, provider="home_battery")
