"""Numbers of the updates of an epoch, kept as tensors until the epoch is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from maze.train.trainers.common.actor_critic.actor_critic_events import ActorCriticEvents, SubstepKey


class _Row(NamedTuple):
    event: str
    group: SubstepKey | None


class UpdateStats:
    """Collects values of :class:`ActorCriticEvents` and fires their means, sub-step by sub-step."""

    def __init__(self) -> None:
        self._values: dict[_Row, list[Tensor]] = {}

    def add(self, event: str, value: Tensor | float, group: SubstepKey | None = None) -> None:
        """Adds a value.

        :param event: Name of the event.
        :param value: A scalar.
        :param group: Sub-step or critic, for events that are grouped by one.
        """
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        self._values.setdefault(_Row(event, group), []).append(tensor)

    def state(self) -> list[tuple[str, SubstepKey | None, Tensor]]:
        """The values collected so far."""
        return [(row.event, row.group, torch.stack(values)) for row, values in self._values.items()]

    def load_state(self, state: Iterable[tuple[str, SubstepKey | None, Tensor]]) -> None:
        """Continues from a state that :meth:`state` returned."""
        self._values = {_Row(event, group): list(values.unbind()) for event, group, values in state}

    def publish(self, events: ActorCriticEvents) -> None:
        """Fires the mean of each event and group, and starts over; this is the only place that waits for the device."""
        groups = list(dict.fromkeys(row.group for row in self._values))
        rows = sorted(
            self._values, key=lambda row: (_section(row.event), groups.index(row.group), _EVENTS.index(row.event))
        )
        means = torch.stack([torch.stack([v.float() for v in self._values[row]]).mean().cpu() for row in rows])
        for row, mean in zip(rows, means.tolist(), strict=True):
            arguments = (mean,) if row.group is None else (row.group, mean)
            getattr(events, row.event)(*arguments)
        self._values.clear()


_EVENTS = [name for name in vars(ActorCriticEvents) if not name.startswith("_")]
_SECTIONS = ["time_epoch", "time_rollout", "learning_rate", "policy", "critic", "time_update"]


def _section(event: str) -> int:
    """Where an event stands in the table: first times, then all of a sub-step's policy together, then the critics."""
    name = event.partition("_")[0]
    return _SECTIONS.index(name if name in _SECTIONS else event)
