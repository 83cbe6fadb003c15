"""What is passed between the house and whoever decides."""

from __future__ import annotations

from typing import NamedTuple


class HouseState(NamedTuple):
    """The house at the beginning of an hour."""

    hour: int
    """Since the episode began at midnight."""
    charge: float
    """Energy in the battery in kWh."""
    price: float
    """EUR per kWh from the grid in the coming hour."""
    solar: float
    """kWh from the roof in the coming hour."""
    demand: float
    """kWh that the house needs in the coming hour."""


class BatteryCommand(NamedTuple):
    """What the battery is to do."""

    energy: float
    """kWh to be charged in the coming hour; negative: to be discharged."""
