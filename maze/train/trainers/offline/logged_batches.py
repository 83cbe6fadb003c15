"""Batches of logged decisions as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from maze.core.agent.networks import as_float_tensors
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.logged_steps import Array, LoggedSteps, actor_of

TensorDict = dict[str, Tensor]
_CHUNK = 4096
"""Number of decisions that are processed at once in a pass over all data."""


@dataclass
class DecisionBatch:
    """Logged decisions of one actor, and what followed them.

    :param actor: The actor.
    :param observations: `[B, *shape]` by key, action masks included.
    :param actions: `[B, *shape]` by head; those of `Box` heads are scaled to [-1, 1].
    :param rewards: `[B]`.
    :param discounts: Discount to what followed, `[B]`: 0 where the episode terminated, 1 between sub-steps.
    :param following: Actors that acted next, the rows of the batch in which they did (`None`: all), and their
        observations. Those of terminated episodes have no meaning.
    """

    actor: ActorID
    observations: TensorDict
    actions: TensorDict
    rewards: Tensor
    discounts: Tensor
    following: list[tuple[ActorID, Tensor | None, TensorDict]]

    def targets(self, value_of: Callable[[ActorID, TensorDict], Tensor]) -> Tensor:
        """Rewards plus discounted values of what followed, `[B]`.

        :param value_of: Values `[n]` of observations of an actor.
        """
        values = torch.zeros_like(self.rewards)
        for actor, rows, observations in self.following:
            found = value_of(actor, observations)
            values = found if rows is None else values.index_copy(0, rows, found)
        return self.rewards + self.discounts * values.masked_fill(self.discounts == 0.0, 0.0)


@dataclass
class _ActorDecisions:
    """Decisions of an actor: rows in the tables of observations and actions, and what followed."""

    rows: Tensor
    rewards: Tensor
    discounts: Tensor
    next_rows: Tensor
    next_actors: Tensor
    only_next: ActorID | None
    """The actor that always acts next; `None`: there are several."""


class LoggedBatches:
    """Draws batches of logged decisions.

    Decisions whose episode was cut off without a recorded observation after it are left out: their targets are unknown.

    :param data: The decisions.
    :param action_spaces: Action spaces by step key.
    :param gamma: Discount per environment step.
    :param batch_size: Number of decisions of each actor in a batch.
    :param device: Device of the tensors.
    :param generator: Source of randomness, on the CPU.
    :raises ConfigError: A `Box` head has no finite bounds, or an actor has no decision to learn from.
    """

    def __init__(
        self,
        data: LoggedSteps,
        action_spaces: Mapping[StepKeyType, spaces.Dict],
        gamma: float,
        batch_size: int,
        device: str,
        generator: torch.Generator,
    ) -> None:
        self._batch_size, self._device, self._generator = batch_size, device, generator
        self._observations = {
            key: {name: torch.as_tensor(values, device=device) for name, values in table.observations.items()}
            for key, table in data.tables.items()
        }
        self._actions = {
            key: {
                head: torch.as_tensor(_encoded(head, space, table.actions[head]), device=device)
                for head, space in action_spaces[key].spaces.items()
            }
            for key, table in data.tables.items()
        }
        named = [actor_of(key, agent) for key, agent in zip(data.step_keys, data.agent_ids, strict=True)]
        self.actors = list(dict.fromkeys(named))
        """The actors, in the order of their first decisions."""
        numbers = {actor: number for number, actor in enumerate(self.actors)}
        actors = np.array([numbers[actor] for actor in named])
        next_actors = np.roll(actors, -1)
        next_actors[data.episode_starts[1:] - 1] = actors[data.episode_starts[:-1]]
        is_usable = data.terminated | (data.next_rows >= 0)
        discounts = data.discounts(gamma)
        self._decisions: dict[ActorID, _ActorDecisions] = {}
        for actor, number in numbers.items():
            own = np.flatnonzero((actors == number) & is_usable)
            if not len(own):
                raise ConfigError(
                    f"runner.dataset: expected decisions of actor {tuple(actor)} with what followed them, found none. "
                    "Record next observations, or episodes that end."
                )
            followed = np.unique(next_actors[own][~data.terminated[own]])
            self._decisions[actor] = _ActorDecisions(
                rows=self._tensor(data.rows[own]),
                rewards=self._tensor(data.rewards[own].astype(np.float32)),
                discounts=self._tensor(discounts[own].astype(np.float32)),
                next_rows=self._tensor(np.maximum(data.next_rows[own], 0)),
                next_actors=self._tensor(next_actors[own]),
                only_next=self.actors[followed[0]] if len(followed) == 1 else None,
            )

    def draw(self) -> list[DecisionBatch]:
        """Draw decisions of each actor, with replacement."""
        return [self._drawn(actor, decisions) for actor, decisions in self._decisions.items()]

    def chunks(self) -> Iterator[tuple[ActorID, TensorDict, TensorDict]]:
        """Yield all decisions in chunks: actor, observations and actions."""
        for actor, decisions in self._decisions.items():
            for rows in torch.split(decisions.rows, _CHUNK):
                yield actor, self._observed(actor, rows), self._taken(actor, rows)

    def _drawn(self, actor: ActorID, decisions: _ActorDecisions) -> DecisionBatch:
        drawn = torch.randint(len(decisions.rows), (self._batch_size,), generator=self._generator).to(self._device)
        rows, next_rows = decisions.rows[drawn], decisions.next_rows[drawn]
        discounts = decisions.discounts[drawn]
        following: list[tuple[ActorID, Tensor | None, TensorDict]] = []
        if decisions.only_next is not None:
            following.append((decisions.only_next, None, self._observed(decisions.only_next, next_rows)))
        else:
            next_actors = decisions.next_actors[drawn].masked_fill(discounts == 0.0, -1)
            for number, other in enumerate(self.actors):
                places = (next_actors == number).nonzero().squeeze(-1)
                if len(places):
                    following.append((other, places, self._observed(other, next_rows[places])))
        return DecisionBatch(
            actor,
            self._observed(actor, rows),
            self._taken(actor, rows),
            decisions.rewards[drawn],
            discounts,
            following,
        )

    def _observed(self, actor: ActorID, rows: Tensor) -> TensorDict:
        columns = self._observations[actor.step_key]
        return as_float_tensors({name: column.index_select(0, rows) for name, column in columns.items()}, self._device)

    def _taken(self, actor: ActorID, rows: Tensor) -> TensorDict:
        return {head: column.index_select(0, rows) for head, column in self._actions[actor.step_key].items()}

    def _tensor(self, values: Array) -> Tensor:
        return torch.as_tensor(values, device=self._device)


def _encoded(head: str, space: spaces.Space[object], actions: Array) -> Array:
    """Continuous actions are scaled to [-1, 1], choices are integers."""
    if not isinstance(space, spaces.Box):
        return actions.astype(np.int64)
    if not space.is_bounded():
        raise ConfigError(
            f"Action head `{head}`: offline training scales continuous actions to [-1, 1] by the bounds of the space, "
            f"found {space}. Give the action space finite bounds."
        )
    low, width = space.low.astype(np.float64), space.high.astype(np.float64) - space.low
    scaled = 2.0 * (actions - low) / np.where(width > 0.0, width, 1.0) - 1.0
    return np.asarray(scaled.clip(-1.0, 1.0).astype(np.float32))
