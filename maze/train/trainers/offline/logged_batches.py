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
from maze.core.trajectory_recording.datasets.logged_steps import Array, LoggedSteps
from maze.distributions.utils import space_bounds

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
    :param following: Actors that acted next, the rows of the batch in which they did, and their observations.
    """

    actor: ActorID
    observations: TensorDict
    actions: TensorDict
    rewards: Tensor
    discounts: Tensor
    following: list[tuple[ActorID, Tensor, TensorDict]]

    def targets(self, value_of: Callable[[ActorID, TensorDict], Tensor]) -> Tensor:
        """Rewards plus discounted values of what followed, `[B]`.

        :param value_of: Values `[n]` of observations of an actor.
        """
        values = torch.zeros_like(self.rewards)
        for actor, rows, observations in self.following:
            values.index_copy_(0, rows, value_of(actor, observations))
        return self.rewards + self.discounts * values


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
        self._observations: dict[StepKeyType, TensorDict] = {}
        self._actions: dict[StepKeyType, TensorDict] = {}
        for key, table in data.tables.items():
            self._observations[key] = {name: self._tensor(values) for name, values in table.observations.items()}
            self._actions[key] = {
                head: _encoded(head, space, table.actions[head]).to(device)
                for head, space in action_spaces[key].spaces.items()
            }
        named = [ActorID(*actor) for actor in zip(data.step_keys, data.agent_ids.tolist(), strict=True)]
        self.actors = list(dict.fromkeys(named))
        """The actors, in the order of their first decisions."""
        numbers = {actor: number for number, actor in enumerate(self.actors)}
        actors = np.array([numbers[actor] for actor in named])
        next_actors = np.roll(actors, -1)
        next_actors[data.episode_starts[1:] - 1] = actors[data.episode_starts[:-1]]
        discounts = data.discounts(gamma)
        columns = {
            "rows": data.rows,
            "rewards": data.rewards.astype(np.float32),
            "discounts": discounts.astype(np.float32),
            "next_rows": data.next_rows,
            "next_actors": np.where(data.terminated, -1, next_actors),
        }
        self._decisions: dict[ActorID, TensorDict] = {}
        for actor, number in numbers.items():
            own = np.flatnonzero((actors == number) & data.has_target)
            if not len(own):
                raise ConfigError(
                    f"runner.dataset: expected decisions of actor {tuple(actor)} with what followed them, found none. "
                    "Record next observations, or episodes that end."
                )
            self._decisions[actor] = {name: self._tensor(values[own]) for name, values in columns.items()}

    def draw(self) -> list[DecisionBatch]:
        """Draw decisions of each actor, with replacement."""
        return [self._drawn(actor, columns) for actor, columns in self._decisions.items()]

    def chunks(self) -> Iterator[tuple[ActorID, TensorDict, TensorDict]]:
        """Yield all decisions in chunks: actor, observations and actions."""
        for actor, columns in self._decisions.items():
            for rows in torch.split(columns["rows"], _CHUNK):
                yield actor, self._observed(actor, rows), self._taken(actor, rows)

    def _drawn(self, actor: ActorID, columns: TensorDict) -> DecisionBatch:
        n_decisions = len(columns["rows"])
        drawn = torch.randint(n_decisions, (self._batch_size,), generator=self._generator).to(self._device)
        found = {name: column[drawn] for name, column in columns.items()}
        following = []
        for number, other in enumerate(self.actors):
            places = (found["next_actors"] == number).nonzero().squeeze(-1)
            if len(places):
                following.append((other, places, self._observed(other, found["next_rows"][places])))
        observed, taken = self._observed(actor, found["rows"]), self._taken(actor, found["rows"])
        return DecisionBatch(actor, observed, taken, found["rewards"], found["discounts"], following)

    def _observed(self, actor: ActorID, rows: Tensor) -> TensorDict:
        columns = self._observations[actor.step_key]
        return as_float_tensors({name: column.index_select(0, rows) for name, column in columns.items()}, self._device)

    def _taken(self, actor: ActorID, rows: Tensor) -> TensorDict:
        return {head: column.index_select(0, rows) for head, column in self._actions[actor.step_key].items()}

    def _tensor(self, values: Array) -> Tensor:
        return torch.as_tensor(values, device=self._device)


def scaled(space: spaces.Box, actions: Tensor) -> Tensor:
    """Actions scaled to [-1, 1] by the bounds of their space, `[B, *shape]`."""
    low, high = space_bounds(space, actions)
    return 2.0 * (actions - low) / (high - low) - 1.0


def _encoded(head: str, space: spaces.Space[object], actions: Array) -> Tensor:
    """Continuous actions are scaled to [-1, 1], choices are integers."""
    if not isinstance(space, spaces.Box):
        return torch.as_tensor(actions.astype(np.int64))
    if not space.is_bounded() or not (space.low < space.high).all():
        raise ConfigError(
            f"Action head `{head}`: offline training scales continuous actions to [-1, 1] by the bounds of the space, "
            f"found {space}. Give the action space finite bounds with low < high."
        )
    return scaled(space, torch.as_tensor(actions.astype(np.float32))).clamp(-1.0, 1.0)
