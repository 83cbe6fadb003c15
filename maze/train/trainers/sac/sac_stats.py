"""Numbers of the updates of an epoch, summed up on the device until the epoch is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maze.train.trainers.sac.sac_events import SACEvents


@dataclass
class _Sum:
    """Of updates that learned the same things."""

    total: Tensor
    count: int = 0


class SACStats:
    """Collects values of :class:`SACEvents` and fires their means, in the order of the interface."""

    def __init__(self) -> None:
        self._sums: dict[tuple[tuple[str, Any], ...], _Sum] = {}
        self._times: dict[str, list[float]] = {}
        self._plain: dict[str, list[tuple[float, ...]]] = {}

    @torch.no_grad()
    def add_terms(self, terms: Sequence[tuple[str, Any, Tensor]]) -> None:
        """Adds the scalars of an update by event and group."""
        rows = tuple([(event, key) for event, key, _ in terms])
        values = torch.stack([value for _, _, value in terms])
        same = self._sums.get(rows)
        if same is None:
            same = self._sums[rows] = _Sum(torch.zeros_like(values, dtype=torch.float64))
        same.total += values
        same.count += 1

    def add_time(self, event: str, seconds: float) -> None:
        """Adds the seconds that a part of an update took."""
        self._times.setdefault(event, []).append(seconds)

    def add_plain(self, event: str, *values: float) -> None:
        """Adds the arguments of an event."""
        self._plain.setdefault(event, []).append(values)

    def state(self) -> dict[str, Any]:
        """The values collected so far."""
        values = [(list(rows), same.total.clone(), same.count) for rows, same in self._sums.items()]
        return {"values": values, "times": dict(self._times), "plain": dict(self._plain)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state` returned."""
        self._sums = {
            tuple((event, key) for event, key in rows): _Sum(total.clone(), count)
            for rows, total, count in state["values"]
        }
        self._times, self._plain = dict(state["times"]), dict(state["plain"])

    def publish(self, events: SACEvents) -> None:
        """Fires the mean of each event and group, and starts over; this is the only place that waits for the device."""
        totals: dict[tuple[str, Any], float] = {}
        counts: dict[tuple[str, Any], int] = {}
        for rows, same in self._sums.items():
            for row, value in zip(rows, same.total.tolist(), strict=True):
                totals[row] = totals.get(row, 0.0) + value
                counts[row] = counts.get(row, 0) + same.count
        for event, key in sorted(totals, key=lambda row: _EVENTS.index(row[0])):
            getattr(events, event)(key, totals[event, key] / counts[event, key])
        total = sum(sum(seconds) for seconds in self._times.values()) or 1.0
        for event, seconds in self._times.items():
            getattr(events, event)(sum(seconds) / len(seconds), 100.0 * sum(seconds) / total)
        for event, calls in self._plain.items():
            getattr(events, event)(*(sum(values) / len(values) for values in zip(*calls, strict=True)))
        self._sums.clear()
        self._times.clear()
        self._plain.clear()


_EVENTS = [name for name in vars(SACEvents) if not name.startswith("_")]
