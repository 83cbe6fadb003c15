"""A rollout as streams: sequences of decisions in the order of time, with their values and rewards.

Where all environments take the same sub-steps, the rows of the networks lie in a stream as they are; otherwise they are
found by index. Estimators of returns (GAE, V-trace) see nothing but streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maze.core.agent.returns import next_values_from
from maze.core.agent.torch_state_critic import TorchStepStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.rollout.rollout_columns import RolloutColumns, has_known_reward
from maze.core.rollout.rollout_sequences import SequencedRollout
from maze.core.rollout.rollout_tensors import Index, Place, numbered_actors, open_ends
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord

if TYPE_CHECKING:
    from maze.core.agent.torch_actor_critic import TorchActorCritic


@dataclass
class Streams:
    """Sequences of decisions, time-major `[n_times, n_sequences]`, without gradients.

    Lists hold an entry for each output of the critic, or (rewards) for each sub-step of an environment step.
    """

    values: list[Tensor]
    """V before each decision."""
    next_values: list[Tensor]
    """V after it, of the final observation where an episode was cut off. Not even finite where one terminated."""
    rewards: list[Tensor]
    has_own_rewards: bool
    """Whether the values of a sub-step predict its own entry of the rewards; otherwise they predict the sum."""
    terminated: Tensor
    truncated: Tensor
    step_complete: Tensor | None = None
    """Where time passes, so that the discount applies; `None`: everywhere."""
    acts: Tensor | None = None
    """Where decisions are, if not everywhere, see :func:`actor_streams`."""
    pauses: Tensor | None = None
    """Entries of environments whose autoreset is pending, which are no decisions; `None`: there are none."""
    log_rhos: list[Tensor] = field(default_factory=list)
    """Logarithms of the importance weights by sub-step, if a return function asked for them."""


@dataclass
class PolicyRows:
    """What the networks say about all that one policy did, in the order of time; in a dense rollout, that all did."""

    substeps: Sequence[SpacesRecord]
    values: list[Tensor]
    """By output of the critic `[n_rows]`."""
    log_rhos: list[Tensor]
    """By sub-step `[n_rows]`; empty where nobody asked for importance weights."""
    index: Index | None
    """Time and sequence of the rows in the streams; `None`: everywhere, in the order of the stream."""
    is_known: np.ndarray | None = None
    """Rows whose rewards are known; `None`: all of them."""

    def of(self, streams: Sequence[Tensor]) -> list[Tensor]:
        """What each stream holds for these rows, `[n_rows]`."""
        if self.index is None:
            return [stream.flatten() for stream in streams]
        return [torch.from_numpy(stream.cpu().numpy()[self.index]).to(stream.device) for stream in streams]


def rollout_streams(
    model: TorchActorCritic,
    columns: RolloutColumns,
    rows: Sequence[PolicyRows],
    gamma: float,
    sequenced: SequencedRollout | None = None,
) -> Streams:
    """The streams of a rollout: of environments, or of actors where each has rewards of its own that a critic predicts.

    :param model: Values the observations at open ends.
    :param columns: The rollout.
    :param rows: All that policies did; it is filled in where they stand in streams of actors.
    :param gamma: Discount for each environment step.
    :param sequenced: Knows the hidden states of a recurrent model.
    """
    if columns.is_dense() or columns.actor_rewards is None or not isinstance(model.critic, TorchStepStateCritic):
        return _streams_of_environments(model, columns, rows, sequenced)
    return _streams_of_actors(model, columns, rows, gamma, sequenced)


def _streams_of_environments(
    model: TorchActorCritic, columns: RolloutColumns, rows: Sequence[PolicyRows], sequenced: SequencedRollout | None
) -> Streams:
    """Environment steps of a dense rollout, or else ticks of all actors together."""
    substeps = rows[0].substeps
    n_substeps = len(substeps)
    shape = (columns.n_ticks // n_substeps, columns.n_envs)
    values = _in_streams(rows, [each.values for each in rows], shape)
    ends = _values_at_ends(model, columns, sequenced, substeps if n_substeps > 1 else ())
    last = torch.tensor([ends.pop((columns.n_ticks, env))[1] for env in range(columns.n_envs)])
    final = {(tick // n_substeps, env): value for (tick, env), (_, value) in ends.items()}
    next_values = [next_values_from(value, last.to(value), final) for value in values]

    def by_substep(array: np.ndarray) -> list[Tensor]:
        return [torch.from_numpy(array[position::n_substeps]).to(model.device) for position in range(n_substeps)]

    rewards = by_substep(columns.rewards)
    has_own_rewards = isinstance(model.critic, TorchStepStateCritic) and n_substeps > 1
    if has_own_rewards and columns.actor_rewards is not None:
        rewards = by_substep(columns.actor_rewards)
        next_values[1:] = [_next_values_of_later_actor(value, final) for value in values[1:]]
    elif has_own_rewards:
        rewards = [torch.stack(rewards).sum(0)] * n_substeps
    terminated, truncated = (torch.stack(by_substep(a)).any(0) for a in (columns.terminated, columns.truncated))
    complete = None if columns.is_dense() else by_substep(columns.step_complete | columns.truncated)[0]
    log_rhos = _in_streams(rows, [each.log_rhos for each in rows], shape)
    pauses = None if columns.is_dense() else _pauses(rows, shape)
    return Streams(
        values, next_values, rewards, has_own_rewards, terminated, truncated, complete, pauses=pauses, log_rhos=log_rhos
    )


def _pauses(rows: Sequence[PolicyRows], shape: tuple[int, ...]) -> Tensor | None:
    pauses = np.ones(shape, np.bool_)
    for each in rows:
        assert each.index is not None
        pauses[each.index] = False
    return torch.from_numpy(pauses) if pauses.any() else None


def _next_values_of_later_actor(values: Tensor, final: Iterable[Place]) -> Tensor:
    """For an actor with rewards of its own that has not seen what comes after an end: its latest value stands in."""
    next_values = torch.cat([values[1:], values[-1:]])
    for place in final:
        next_values[place] = values[place]
    return next_values


def _streams_of_actors(
    model: TorchActorCritic,
    columns: RolloutColumns,
    rows: Sequence[PolicyRows],
    gamma: float,
    sequenced: SequencedRollout | None,
) -> Streams:
    """Actors with rewards of their own, and a critic that predicts them: each actor of an environment is a stream.

    The last decisions of a rollout may have no reward yet. Nothing is learned from them, but their values are what
    follows the decisions before.
    """
    assert columns.actor_rewards is not None
    numbers, actors = numbered_actors(columns)
    acts = actors[..., np.newaxis] == np.arange(len(numbers))
    answers = [[*each.values, *each.log_rhos] for each in rows]
    values, *log_rhos = (stream.cpu().numpy() for stream in _in_streams(rows, answers, actors.shape))
    ends = {
        place: (numbers[actor], value)
        for place, (actor, value) in _values_at_ends(model, columns, sequenced).items()
        if actor in numbers
    }
    complete, terminated, truncated = columns.step_complete | columns.truncated, columns.terminated, columns.truncated
    own = actor_streams(values, acts, ends, terminated, truncated, complete, gamma, *log_rhos)
    is_known = has_known_reward(complete)
    is_last_known = complete & ~np.append(is_known[1:], np.zeros_like(is_known[:1]), axis=0)
    has_left = False if columns.actor_done is None else acts & columns.actor_done[..., np.newaxis]
    for each in rows:
        assert each.index is not None
        ticks, envs = each.index
        each.is_known = is_known[ticks, envs]
        each.index = (ticks, envs * len(numbers) + actors[ticks, envs])

    def stream(grid: np.ndarray) -> Tensor:
        """Environments times actors are the sequences; what is common to all actors of an environment is repeated."""
        filled = np.broadcast_to(grid if grid.ndim == 3 else grid[..., np.newaxis], acts.shape)
        return torch.from_numpy(filled.reshape(len(filled), -1).copy()).to(model.device)

    return Streams(
        values=[stream(own.values)],
        next_values=[stream(own.next_values)],
        rewards=[stream(np.where(acts, columns.actor_rewards[..., np.newaxis], np.float32(0.0)))],
        has_own_rewards=True,
        terminated=stream(terminated[..., np.newaxis] | has_left),
        truncated=stream(truncated | is_last_known),
        step_complete=stream(complete),
        acts=stream(acts),
        log_rhos=[stream(own.log_rhos)] if log_rhos else [],
    )


def _values_at_ends(
    model: TorchActorCritic,
    columns: RolloutColumns,
    sequenced: SequencedRollout | None,
    substeps: Sequence[SpacesRecord] = (),
) -> dict[Place, tuple[ActorID, float]]:
    """Who would have acted next, and its value: after the rollout (time `n_ticks`), and where episodes were cut off."""
    ends: dict[Place, tuple[ActorID, float]] = {}
    for actor, places, observation, known, position in open_ends(columns, substeps):
        runs = None if sequenced is None else sequenced.at(actor, places)
        values = model.bootstrap_values(observation, actor, known, position, runs).cpu().tolist()
        ends.update((place, (actor, value)) for place, value in zip(places, values, strict=True))
    return ends


def _in_streams(rows: Sequence[PolicyRows], answers: list[list[Tensor]], shape: tuple[int, ...]) -> list[Tensor]:
    """What the networks said about each row, in the order of time `[n_times, n_envs]`; by output of a network."""
    if rows[0].index is None:
        return [answer.reshape(shape) for answer in answers[0]]
    streams = []
    for of_policies in zip(*answers, strict=True):
        stream = np.zeros(shape, np.float32)  # NumPy starts small operations much faster
        for each, answer in zip(rows, of_policies, strict=True):
            stream[each.index] = answer.cpu().numpy()
        streams.append(torch.from_numpy(stream).to(of_policies[0].device))
    return streams


class ActorStreams(NamedTuple):
    """What happens to each actor of each environment, `[n_ticks, n_envs, n_actors]`."""

    values: np.ndarray
    """Its value before its decision; where others act, the discounted value of what follows for it."""
    next_values: np.ndarray
    """Its value after the tick."""
    log_rhos: np.ndarray
    """Logarithm of the importance weight of all decisions from its own to the one before its next."""


def actor_streams(
    values: np.ndarray,
    acts: np.ndarray,
    ends: Mapping[tuple[int, int], tuple[int, float]],
    terminated: np.ndarray,
    truncated: np.ndarray,
    step_complete: np.ndarray,
    gamma: float,
    log_rhos: np.ndarray | None = None,
) -> ActorStreams:
    """The decisions of each actor as a stream of its own, however irregularly it acts.

    A tick in which another actor acts only passes time: where it completes an environment step, what follows is
    discounted, and it changes nothing else. So estimators of returns need not know of it.

    Nobody knows an actor's value after the end of a rollout or of a truncated episode unless it is the one to act
    next; its latest value stands in.

    :param values: `[n_ticks, n_envs]`, value of the actor that acted, before it did.
    :param acts: bool `[n_ticks, n_envs, n_actors]`, who acted.
    :param ends: Who was to act next, and its value: after the rollout by `(n_ticks, environment index)`, at the end
        of truncated episodes by the tick they ended with.
    :param terminated: `[n_ticks, n_envs]`, the episode ended by itself.
    :param truncated: `[n_ticks, n_envs]`, the episode was cut off.
    :param step_complete: `[n_ticks, n_envs]`, the tick completed an environment step.
    :param gamma: Discount for each environment step.
    :param log_rhos: `[n_ticks, n_envs]`, logarithm of each decision's importance weight; `None`: all are 1.
    """
    n_ticks = len(acts)
    own_values = np.where(acts, values[..., np.newaxis], 0).astype(values.dtype)
    acted_last = np.maximum.accumulate(np.where(acts, np.arange(n_ticks)[:, np.newaxis, np.newaxis], 0), axis=0)
    at_ends = np.take_along_axis(own_values, acted_last, axis=0)
    following = at_ends[-1].copy()
    for (tick, env), (actor, value) in ends.items():
        (following if tick == n_ticks else at_ends[tick])[env, actor] = value
    discounts = np.where(step_complete, gamma, 1.0)[..., np.newaxis].astype(values.dtype)
    weights = np.zeros_like(own_values)
    weight = np.zeros_like(following)
    next_values = np.empty_like(own_values)
    for tick in reversed(range(n_ticks)):
        following[terminated[tick]] = 0.0
        is_cut_off = truncated[tick] & ~terminated[tick]
        following[is_cut_off] = at_ends[tick, is_cut_off]
        next_values[tick] = following
        own_values[tick] = following = np.where(acts[tick], own_values[tick], discounts[tick] * following)
        if log_rhos is not None:
            weight[terminated[tick] | truncated[tick]] = 0.0
            weight += log_rhos[tick, :, np.newaxis]
            weights[tick] = np.where(acts[tick], weight, 0.0)
            weight[acts[tick]] = 0.0
    return ActorStreams(own_values, next_values, weights)
