"""Environment steps as rows of arrays, the content of replay buffers.

A row is one *environment step* with all of its sub-steps, whose actors act in a fixed order. An episode that ends in
mid-step leaves a row with fewer sub-steps. The rest of it is not learned from, but networks have to be able to evaluate
it: rewards are zero, observations and actions are values that the spaces allow. Where the episode was truncated, the
observation of the next actor is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from maze.core.env.space_values import usual_values
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.train.utils.train_utils import mapped

Arrays = dict[str, np.ndarray]
TensorDict = dict[str, Tensor]


@dataclass
class TransitionRows:
    """Rows to be added, one for each environment step; all arrays start with the dimension of the rows.

    :param actions: Actions of each actor of the step, by action head.
    """

    observations: list[Arrays]
    """Observations of each actor of the step."""
    actions: list[Arrays]
    rewards: np.ndarray
    """float32 `[n, n_actors]`"""
    next_observation: Arrays
    """Observation of the first actor after the step: the last one where the episode was truncated. Where it does not
    count (the episode terminated, or ended in mid-step) any observation of the first actor."""
    terminated: np.ndarray
    """bool `[n]`"""
    n_substeps: np.ndarray
    """int64 `[n]`: number of actors that acted."""
    follows: np.ndarray
    """int64 `[n]`: number (counted over all that were ever added) of the row that each one continues; -1: none."""

    def __len__(self) -> int:
        return len(self.terminated)

    def select(self, chosen: np.ndarray) -> TransitionRows:
        """Return some of the rows.

        :param chosen: bool `[n]`.
        """
        return TransitionRows(**mapped(lambda values: values[chosen], vars(self)))


@dataclass
class TransitionBatch:
    """Rows drawn from a buffer, as tensors.

    :param actors: The actors of an environment step, in their order.
    :param observations: Of each actor, `[B, *shape]` by key.
    :param actions: Of each actor, `[B, *shape]` by action head.
    """

    actors: list[ActorID]
    observations: list[TensorDict]
    actions: list[TensorDict]
    rewards: Tensor
    """float32 `[B, n_actors]`"""
    next_observations: list[TensorDict]
    """First actor: its observation after the step. Others: their observations in the next step."""
    terminated: Tensor
    """bool `[B]`"""
    n_substeps: Tensor | None
    """int64 `[B]`; None: all steps are complete."""
    has_next_step: Tensor | None
    """bool `[B]`: whether `next_observations` of the other actors are known; None: there are no others."""
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 `[B]`: where the rows lie; empty where the buffer keeps none."""
    weights: Tensor | None = None
    """float32 `[B]`: weights that make up for rows that are drawn more often than others; None: none are."""

    def acted(self, position: int) -> Tensor | None:
        """Return 1 where an actor acted, 0 where the episode had ended before; `None`: it always did.

        :param position: Position of the actor in the step.
        :return: Floats `[B]`.
        """
        return None if self.n_substeps is None or position == 0 else (self.n_substeps > position).float()

    def ended_at(self, position: int) -> Tensor:
        """Return whether the episode terminated with the sub-step of an actor.

        :param position: Position of the actor in the step.
        :return: Booleans `[B]`.
        """
        n_substeps = len(self.actors) if self.n_substeps is None else self.n_substeps
        return self.terminated & (n_substeps == position + 1)


@dataclass
class NStepReturns:
    """Rewards and observations that followed rows over several environment steps."""

    rewards: Tensor
    """float32 `[B, n_actors]`: discounted sum of the rewards from each sub-step on."""
    discounts: Tensor
    """float32 `[B]`: discount of the value of the next observation."""
    next_observations: list[TensorDict]
    """First actor: its observation after the last of these steps. Others: their observation in it, which counts where
    the episode was truncated before they acted."""
    next_actor: Tensor | None
    """int64 `[B]`: position of the actor that acts next; `None`: the first one, in all rows."""
    terminated: Tensor
    """bool `[B]`: whether the episode terminated with the last of these steps."""


def as_column(values: Tensor, like: Tensor) -> Tensor:
    """Return values `[B]` as `[B, 1, ...]`, with as many dimensions as `like`."""
    return values.view(-1, *[1] * (like.dim() - 1))


def bellman_targets(
    batch: TransitionBatch, n_step: NStepReturns | None, gamma: float, value_of: Callable[[int, TensorDict], Tensor]
) -> list[Tensor]:
    """Return targets of the actions taken in each sub-step, `[B, ...]` by actor.

    One step: the reward of the sub-step plus the value of the next sub-step, which is discounted where it begins
    another environment step. Several steps: the rewards of the rest of this environment step and of those after it,
    plus the discounted value of the next observation. Nothing is added after a termination.

    :param batch: Transitions; targets of sub-steps that were not taken have no meaning.
    :param n_step: N-step returns; `None`: one step counts.
    :param gamma: Discount per environment step.
    :param value_of: Values `[B]` of the observations of the actor at a position, or quantiles `[B, n_quantiles]`.
    """

    def target(ended: Tensor, reward: Tensor, following: Tensor) -> Tensor:
        reward = as_column(reward, following)
        return torch.where(as_column(ended, following), reward, reward + following)

    if n_step is not None:
        value = value_of(0, n_step.next_observations[0])
        if n_step.next_actor is not None:
            for position in range(1, len(batch.actors)):
                own = value_of(position, n_step.next_observations[position])
                value = torch.where(as_column(n_step.next_actor == position, own), own, value)
        following = as_column(n_step.discounts, value) * value
        return [target(n_step.terminated, reward, following) for reward in n_step.rewards.unbind(-1)]
    targets = []
    for position, reward in enumerate(batch.rewards.unbind(-1)):
        if position + 1 == len(batch.actors):
            ended, following = batch.terminated, gamma * value_of(0, batch.next_observations[0])
        else:
            ended, following = batch.ended_at(position), value_of(position + 1, batch.observations[position + 1])
        targets.append(target(ended, reward, following))
    return targets


def fixed_actors(agent_counts_dict: Mapping[StepKeyType, int]) -> list[ActorID]:
    """Return the actors of an environment step, in their order.

    :param agent_counts_dict: Number of agents by step key; -1: it varies.
    :raises ConfigError: Their number changes.
    """
    for key, count in agent_counts_dict.items():
        if count < 1:
            raise ConfigError(
                f"env: sub-step {key!r} has a varying number of agents ({count}). A replay buffer needs steps with the "
                "same actors in the same order; train with PPO or A2C instead."
            )
    return [ActorID(key, agent) for key, count in agent_counts_dict.items() for agent in range(count)]


def usual_steps(actors: Sequence[ActorID], *spaces_dicts: Mapping[StepKeyType, spaces.Dict]) -> list[list[Arrays]]:
    """Return small values of spaces, see :func:`~maze.core.env.space_values.usual_values`: for each of `spaces_dicts`
    those of each actor.

    :param actors: Actors of an environment step.
    :param spaces_dicts: Spaces by step key.
    """
    return [[usual_values(by_key[actor.step_key]) for actor in actors] for by_key in spaces_dicts]


class TransitionColumns:
    """A ring of rows in arrays that are allocated once.

    :param capacity: Maximum number of rows.
    :param actors: Actors of an environment step.
    :param observations: An observation of each actor, in place of missing ones.
    :param actions: An action of each actor, likewise.
    """

    def __init__(
        self, capacity: int, actors: Sequence[ActorID], observations: Sequence[Arrays], actions: Sequence[Arrays]
    ) -> None:
        self.capacity = capacity
        self.actors = list(actors)
        self.missing = observations, actions
        """Values in place of missing observations and actions, by actor."""
        self.n_added = 0
        """Number of rows ever added."""
        self.all_complete = True
        """Whether no row with fewer sub-steps was ever added."""
        # at most float32, in which networks compute
        self.observations, self.actions, self.next_observation = mapped(
            lambda one: np.zeros((capacity, *one.shape), np.float32 if one.dtype == np.float64 else one.dtype),
            (observations, actions, observations[0]),
        )
        self.rewards = np.zeros((capacity, len(self.actors)), np.float32)
        self.terminated = np.zeros(capacity, np.bool_)
        self.n_substeps = np.zeros(capacity, np.int64)
        self.next_row = np.full(capacity, -1, np.int64)

    @classmethod
    def for_rows(cls, capacity: int, actors: Sequence[ActorID], rows: TransitionRows) -> TransitionColumns:
        """Return columns for more rows like these.

        :param capacity: Maximum number of rows.
        :param actors: Actors of an environment step.
        :param rows: Rows with the shapes and types of all arrays.
        """
        return cls(capacity, actors, *mapped(lambda array: array[0].copy(), (rows.observations, rows.actions)))

    def __len__(self) -> int:
        return min(self.n_added, self.capacity)

    def add(self, rows: TransitionRows) -> None:
        """Add rows; the oldest ones make room.

        :param rows: The rows, which are copied; observations and actions of float64 become float32.
        :raises EnvironmentContractError: An entry is missing or has another shape.
        """
        n = len(rows)
        numbers = np.arange(self.n_added, self.n_added + n)
        slots: Any = numbers % self.capacity
        if n and slots[0] + n <= self.capacity:
            slots = slice(int(slots[0]), int(slots[0]) + n)
        for own, given in zip(self.observations, rows.observations, strict=True):
            _write(own, slots, given, "observation")
        for own, given in zip(self.actions, rows.actions, strict=True):
            _write(own, slots, given, "action")
        _write(self.next_observation, slots, rows.next_observation, "next observation")
        self.rewards[slots] = rows.rewards
        self.terminated[slots] = rows.terminated
        if len(self.actors) > 1:
            self.n_substeps[slots] = rows.n_substeps
            self.all_complete &= bool((rows.n_substeps == len(self.actors)).all())
        self.next_row[slots] = -1
        self.n_added += n
        known = (rows.follows >= 0) & (rows.follows >= self.n_added - self.capacity)
        self.next_row[rows.follows[known] % self.capacity] = numbers[known]

    def observations_since(self, first: int) -> Iterator[Arrays]:
        """Yield the observations of actors in the rows that are still held and not older than a number.

        :param first: Number of the first of them, counted over all that were ever added.
        :return: Of each actor, arrays `[n, ...]`.
        """
        slots = np.arange(max(first, self.n_added - self.capacity), self.n_added) % self.capacity
        for position, arrays in enumerate(self.observations):
            seen = slots if len(self.actors) == 1 else slots[self.n_substeps[slots] > position]
            yield {key: array[seen] for key, array in arrays.items()}

    def read(self, slots: np.ndarray, device: str) -> TransitionBatch:
        """Return the rows in the given places.

        :param slots: int64 `[B]`, below the number of rows.
        :param device: Device of the tensors.
        """
        has_next_step, next_observations = None, [_take(self.next_observation, slots, device)]
        if len(self.actors) > 1:
            next_rows = self.next_row[slots]
            following = np.where(next_rows >= 0, next_rows % self.capacity, slots)
            # a step that was truncated before its last actor acted has the observation of that one as well
            n_observed = self.n_substeps[following] + ~self.terminated[following]
            complete = (next_rows >= 0) & (n_observed >= len(self.actors))
            following = np.where(complete, following, slots)  # there has to be something valid
            has_next_step = torch.from_numpy(complete).to(device)
            next_observations += _take(self.observations[1:], following, device)
        observations, actions, rewards, terminated = _take(
            (self.observations, self.actions, self.rewards, self.terminated), slots, device
        )
        n_substeps = None if self.all_complete else _take(self.n_substeps, slots, device)
        return TransitionBatch(
            actors=self.actors,
            observations=observations,
            actions=actions,
            rewards=rewards,
            next_observations=next_observations,
            terminated=terminated,
            n_substeps=n_substeps,
            has_next_step=has_next_step,
            slots=slots,
        )

    def n_step_returns(self, slots: np.ndarray, n_steps: int, gamma: float, device: str) -> NStepReturns:
        """Sum up the rewards after rows, until the episode ends or the following steps are not known.

        If the episode was truncated between two sub-steps, the value of the next actor replaces the remaining rewards
        of that environment step.

        :param slots: int64 `[B]`, below the number of rows.
        :param n_steps: Most environment steps.
        :param gamma: Discount for each of them.
        :param device: Device of the tensors.
        """
        rewards = np.cumsum(self.rewards[slots][:, ::-1], axis=1)[:, ::-1].copy()
        last, discounts = slots.copy(), np.ones(len(slots), np.float32)
        for _ in range(n_steps - 1):
            following = self.next_row[last]
            known = following >= 0
            if not known.any():
                break
            last[known] = following[known] % self.capacity
            discounts[known] *= gamma
            rewards[known] += (discounts[known] * self.rewards[last[known]].sum(1))[:, None]
        next_observations, next_actor = [_take(self.next_observation, last, device)], None
        if not self.all_complete:
            position = self.n_substeps[last] % len(self.actors)
            next_actor = torch.from_numpy(position).to(device)
            next_observations += _take(self.observations[1:], last, device)
            discounts[position == 0] *= gamma
        else:
            discounts *= gamma
        summed, discount, terminated = (
            torch.from_numpy(array).to(device) for array in (rewards, discounts, self.terminated[last])
        )
        return NStepReturns(summed, discount, next_observations, next_actor, terminated)

    @property
    def n_bytes(self) -> int:
        """Size of the rows held."""
        total = sum(array.nbytes for array in self._arrays().values())
        return int(total * len(self) / self.capacity)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the rows held, as tensors and plain values."""
        n = len(self)
        arrays = {name: torch.from_numpy(array[:n].copy()) for name, array in self._arrays().items()}
        return {"n_added": self.n_added, "capacity": self.capacity, "all_complete": self.all_complete, "arrays": arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict` of columns of the same capacity."""
        for name, array in self._arrays().items():
            saved = state["arrays"][name].numpy()
            array[: len(saved)] = saved
        self.n_added, self.all_complete = int(state["n_added"]), bool(state["all_complete"])

    def _arrays(self) -> Arrays:
        named: Arrays = {name: getattr(self, name) for name in ("rewards", "terminated", "n_substeps", "next_row")}
        groups = {"next_observation": self.next_observation}
        for position in range(len(self.actors)):
            groups[f"observation_{position}"] = self.observations[position]
            groups[f"action_{position}"] = self.actions[position]
        return {**named, **{f"{group}/{key}": array for group, part in groups.items() for key, array in part.items()}}


def _write(own: Arrays, slots: Any, given: Mapping[str, np.ndarray], what: str) -> None:
    for key, array in own.items():
        value = given.get(key)
        if value is None or value.shape[1:] != array.shape[1:]:
            found = f"nothing (only {sorted(given)})" if value is None else f"shape {value.shape[1:]}"
            raise EnvironmentContractError(
                f"Replay buffer, {what} `{key}`: expected shape {array.shape[1:]}, found {found}. Does the experience "
                "come from another environment, or from one with other wrappers?"
            )
        array[slots] = value


def _take(arrays: Any, slots: np.ndarray, device: str) -> Any:
    """Return rows of nested arrays as tensors."""
    tensors = mapped(lambda array: torch.from_numpy(array.take(slots, 0)), arrays)
    return tensors if device == "cpu" else mapped(lambda tensor: tensor.to(device), tensors)
