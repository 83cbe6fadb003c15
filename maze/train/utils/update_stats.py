"""Numbers of the updates of an epoch, summed up on their device until the epoch is written."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maze.core.errors import ConfigError
from maze.core.events.event_topic_factory import event_methods

if TYPE_CHECKING:
    from maze.train.trainers.common.learning import Losses, Name

Row = tuple[str, Any]
"""Event, and what a number belongs to; `None`: the event has no group."""


@dataclass
class _Sum:
    """Of gradient steps that report the same things."""

    total: Tensor
    count: int = 0


class UpdateStats:
    """Collects what the events of an interface report, and fires their means.

    Rows come in the order of the interface; where successive events have the same kind of group, all of one group come
    together.

    :param interface: The events. :class:`~maze.train.trainers.common.learning.Losses` reports to events with a value,
        or with a group and a value; times go to events with a value, or with seconds and percent.
    """

    def __init__(self, interface: type[Any]) -> None:
        self._interface = interface
        self._parameters = {
            name: list(inspect.signature(method).parameters)[1:] for name, method in event_methods(interface).items()
        }
        blocks = itertools.groupby(self._parameters.items(), key=lambda item: item[1][:1])
        self._blocks = {name: index for index, (_, events) in enumerate(blocks) for name, _ in events}
        self._sums: dict[tuple[Row, ...], _Sum] = {}
        self._values: dict[str, list[tuple[float, ...]]] = {}
        self._times: dict[str, list[float]] = {}

    @torch.no_grad()
    def add(self, losses: Losses, gradient_norms: Mapping[Name, Tensor] | None = None) -> None:
        """Adds what a gradient step has to report.

        :param losses: Its losses.
        :param gradient_norms: Norms by network, scalars `[]`; what belongs to an agent counts for its sub-step.
        :raises ConfigError: The interface has no event of a loss's name.
        """
        terms = list(losses.terms())
        for (event, key), norm in (gradient_norms or {}).items():
            terms.append((event, key[0] if isinstance(key, tuple) else key, norm))
        if not terms:
            return
        rows = tuple([(event, key) for event, key, _ in terms])
        values = torch.stack([value for _, _, value in terms])
        same = self._sums.get(rows)
        if same is None:
            self._check(losses, rows)
            same = self._sums[rows] = _Sum(torch.zeros_like(values, dtype=torch.float64))
        same.total += values
        same.count += 1

    def add_value(self, event: str, *values: float) -> None:
        """Adds the arguments of an event, which is left out where the interface has no such event."""
        if event in self._parameters:
            self._values.setdefault(event, []).append(values)

    def add_time(self, event: str, seconds: float) -> None:
        """Adds the seconds that a part of an update took; an event with a percentage gets that of all such parts.

        It is left out where the interface has no such event.
        """
        if event in self._parameters:
            self._times.setdefault(event, []).append(seconds)

    def publish(self, events: Any) -> None:
        """Fires the mean of each event and group, and starts over; this is the only place that waits for the device.

        :param events: Topic of the interface.
        """
        totals: dict[Row, float] = {}
        counts: dict[Row, int] = {}
        for rows, same in self._sums.items():
            for row, value in zip(rows, same.total.tolist(), strict=True):
                totals[row] = totals.get(row, 0.0) + value
                counts[row] = counts.get(row, 0) + same.count
        calls: dict[Row, tuple[Any, ...]] = {}
        for (event, key), total in totals.items():
            mean = total / counts[event, key]
            calls[event, key] = (mean,) if key is None else (key, mean)
        for event, given in self._values.items():
            calls[event, None] = tuple(sum(values) / len(values) for values in zip(*given, strict=True))
        all_seconds = sum(sum(seconds) for seconds in self._times.values()) or 1.0
        for event, seconds in self._times.items():
            mean, percent = sum(seconds) / len(seconds), 100.0 * sum(seconds) / all_seconds
            calls[event, None] = (mean, percent)[: len(self._parameters[event])]
        order = list(self._parameters)
        groups = list(dict.fromkeys(key for _, key in calls))
        for row in sorted(calls, key=lambda row: (self._blocks[row[0]], groups.index(row[1]), order.index(row[0]))):
            getattr(events, row[0])(*calls[row])
        for collected in (self._sums, self._values, self._times):
            collected.clear()

    def state_dict(self) -> dict[str, Any]:
        """The values collected so far."""
        sums = [(list(rows), same.total.clone(), same.count) for rows, same in self._sums.items()]
        return {"sums": sums, "values": dict(self._values), "times": dict(self._times)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned."""
        self._sums = {
            tuple((event, key) for event, key in rows): _Sum(total.clone(), count)
            for rows, total, count in state_dict["sums"]
        }
        self._values, self._times = dict(state_dict["values"]), dict(state_dict["times"])

    def _check(self, losses: Losses, rows: tuple[Row, ...]) -> None:
        for event, key in rows:
            n_arguments = len(self._parameters.get(event, ()))
            if n_arguments != (1 if key is None else 2):
                wanted = "a value" if key is None else "a group and a value"
                found = f"one with {n_arguments} arguments" if n_arguments else f"only {', '.join(self._parameters)}"
                raise ConfigError(
                    f"{type(losses).__name__}.{event}: expected an event of this name with {wanted} in "
                    f"{self._interface.__name__}, found {found}."
                )
