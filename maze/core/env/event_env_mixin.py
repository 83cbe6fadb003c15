"""Access to the events that an environment fires."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maze.core.events.event_record import EventRecord
    from maze.core.log_events.kpi_calculator import KpiCalculator


class EventEnvMixin(ABC):
    """Environment whose events can be turned into statistics."""

    @abstractmethod
    def get_step_events(self) -> Iterable[EventRecord]:
        """The events fired so far during the current environment step."""

    @abstractmethod
    def get_kpi_calculator(self) -> KpiCalculator | None:
        """Computes the key performance indicators of an episode; None if there are none."""
