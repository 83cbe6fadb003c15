"""Numbers of the updates of an epoch, kept as tensors until the epoch is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from maze.train.trainers.sac.sac_events import SACEvents


class SACStats:
    """Collects values of :class:`SACEvents` and fires their means, in the order of the interface."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, Any], list[Tensor]] = {}
        self._times: dict[str, list[float]] = {}
        self._plain: dict[str, list[tuple[float, ...]]] = {}

    def add_terms(self, terms: Iterable[tuple[str, Any, Tensor]]) -> None:
        """Adds scalars by event and group."""
        for event, key, value in terms:
            self._values.setdefault((event, key), []).append(value.detach())

    def add_time(self, event: str, seconds: float) -> None:
        """Adds the seconds that a part of an update took."""
        self._times.setdefault(event, []).append(seconds)

    def add_plain(self, event: str, *values: float) -> None:
        """Adds the arguments of an event."""
        self._plain.setdefault(event, []).append(values)

    def publish(self, events: SACEvents) -> None:
        """Fires the mean of each event and group, and starts over; this is the only place that waits for the device."""
        rows = sorted(self._values, key=lambda row: _EVENTS.index(row[0]))
        if rows:
            means = torch.stack([torch.stack(self._values[row]).float().mean() for row in rows]).tolist()
            for (event, key), mean in zip(rows, means, strict=True):
                getattr(events, event)(key, mean)
        total = sum(sum(seconds) for seconds in self._times.values()) or 1.0
        for event, seconds in self._times.items():
            getattr(events, event)(sum(seconds) / len(seconds), 100.0 * sum(seconds) / total)
        for event, calls in self._plain.items():
            getattr(events, event)(*(sum(values) / len(values) for values in zip(*calls, strict=True)))
        self._values.clear()
        self._times.clear()
        self._plain.clear()


_EVENTS = [name for name in vars(SACEvents) if not name.startswith("_")]
