"""Interface to the events of an environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from maze.core.events.event_record import EventRecord
from maze.core.log_events.kpi_calculator import KpiCalculator


class EventEnvMixin(ABC):
    """Environment with events, from which statistics are calculated."""

    @abstractmethod
    def get_step_events(self) -> Iterable[EventRecord]:
        """Return the events of the current environment step so far."""

    @abstractmethod
    def get_kpi_calculator(self) -> KpiCalculator | None:
        """Return the calculator of an episode's key performance indicators; `None`: there are none."""
