"""Rollouts of single actors, and how a batch is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.rollout.batched_acting import logits_shapes_of
from maze.core.rollout.rollout_columns import FinalObservationEntry, RolloutColumns, SubstepColumns, substeps_per_step
from maze.core.utils.update_profile import TRANSFER, timed

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy

Row = dict[str, np.ndarray]


class SubstepPacket(NamedTuple):
    """The columns of one sub-step key; see :class:`~maze.core.rollout.rollout_columns.SubstepColumns`."""

    observations: Row
    actions: Row
    logits: Row
    agent_ids: np.ndarray
    ticks: np.ndarray
    valid: np.ndarray | None


class RolloutPacket(NamedTuple):
    """A rollout as plain arrays: views of the columns it was made of, or what came over a pipe."""

    substeps: dict[StepKeyType, SubstepPacket]
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    step_complete: np.ndarray
    actor_rewards: np.ndarray | None
    actor_done: np.ndarray | None
    final_observations: list[FinalObservationEntry]
    terminal_observations: list[FinalObservationEntry]
    last_actor_ids: list[ActorID]
    actor_sequence: list[ActorID] | None

    @classmethod
    def of(cls, columns: RolloutColumns) -> RolloutPacket:
        """The rollout that columns hold."""
        substeps = {
            key: SubstepPacket(
                part.observations, part.actions, part.logits or {}, part.agent_ids, part.ticks, part.valid
            )
            for key, part in columns.substeps.items()
        }
        return cls(
            substeps,
            columns.rewards,
            columns.terminated,
            columns.truncated,
            columns.step_complete,
            columns.actor_rewards,
            columns.actor_done,
            columns.final_observations,
            columns.terminal_observations,
            columns.last_actor_ids,
            columns.actor_sequence,
        )


class ActorSpaces(NamedTuple):
    """What the environments of an actor have in common with those of all others."""

    observation_spaces_dict: dict[StepKeyType, Any]
    action_spaces_dict: dict[StepKeyType, Any]
    agent_counts_dict: dict[StepKeyType, int]

    @classmethod
    def of(cls, env: Any) -> ActorSpaces:
        """The spaces of an environment or vector environment."""
        return cls(dict(env.observation_spaces_dict), dict(env.action_spaces_dict), dict(env.agent_counts_dict))

    def columns(self, n_envs: int, n_steps: int, policy: TorchPolicy) -> RolloutColumns:
        """Columns for rollouts with logits."""
        return RolloutColumns(
            self.observation_spaces_dict,
            self.action_spaces_dict,
            n_envs,
            n_steps * substeps_per_step(self.agent_counts_dict),
            logits_shapes_of(policy, self.action_spaces_dict),
        )


@timed(TRANSFER)
def join_rollouts(packets: Iterable[RolloutPacket], columns: RolloutColumns) -> None:
    """Fills columns with rollouts side by side.

    Rollouts of fewer ticks than others end with them: in the ticks before they begin, nobody acts in their
    environments.

    :param packets: Rollouts.
    :param columns: Columns with as many environments as all rollouts together.
    """
    packets = list(packets)
    columns.clear()
    n_ticks = max(len(packet.rewards) for packet in packets)
    columns.reserve(n_ticks)
    bounds = np.cumsum([0, *(packet.rewards.shape[1] for packet in packets)]).tolist()
    places = [slice(*ends) for ends in pairwise(bounds)]
    if any(packet.actor_rewards is not None for packet in packets):
        columns.actor_rewards = np.zeros_like(columns.rewards)
    if any(packet.actor_done is not None for packet in packets):
        columns.actor_done = np.zeros_like(columns.terminated)
    last_actor_ids: list[ActorID] = []
    for packet, envs in zip(packets, places, strict=True):
        first_tick = n_ticks - len(packet.rewards)
        for target, source in (
            (columns.rewards, packet.rewards),
            (columns.terminated, packet.terminated),
            (columns.truncated, packet.truncated),
            (columns.step_complete, packet.step_complete),
            (columns.actor_rewards, packet.actor_rewards),
            (columns.actor_done, packet.actor_done),
        ):
            if target is not None and source is not None:
                target[:first_tick, envs] = 0
                target[first_tick:n_ticks, envs] = source
        for ends, own in (
            (columns.final_observations, packet.final_observations),
            (columns.terminal_observations, packet.terminal_observations),
        ):
            ends += [
                entry._replace(tick=first_tick + entry.tick, env_index=envs.start + entry.env_index) for entry in own
            ]
        last_actor_ids += packet.last_actor_ids
    sequence = packets[0].actor_sequence
    is_dense = sequence is not None and all(
        packet.actor_sequence == sequence and len(packet.rewards) == n_ticks for packet in packets
    )
    for key, substep in columns.substeps.items():
        parts = [
            packet.substeps[key]._replace(ticks=packet.substeps[key].ticks + n_ticks - len(packet.rewards))
            for packet in packets
        ]
        _join_substep(parts, places, substep)
    actors: list[ActorID | None] = [None] * n_ticks
    if is_dense and sequence is not None:
        actors = [sequence[tick % len(sequence)] for tick in range(n_ticks)]
    columns.finish(last_actor_ids, actors)


def _join_substep(parts: list[SubstepPacket], places: list[slice], substep: SubstepColumns) -> None:
    """Rows are the ticks at which any environment was at this sub-step."""
    ticks = np.unique(np.concatenate([part.ticks for part in parts]))
    n_envs = places[-1].stop
    valid = np.zeros((len(ticks), n_envs), np.bool_)
    agent_ids = np.zeros((len(ticks), n_envs), np.int64)
    rows_of_parts = [np.searchsorted(ticks, part.ticks) for part in parts]
    for part, envs, rows in zip(parts, places, rows_of_parts, strict=True):
        valid[rows, envs] = True if part.valid is None else part.valid
        agent_ids[rows, envs] = part.agent_ids
    for row, tick in enumerate(ticks.tolist()):
        here = None if valid[row].all() else np.flatnonzero(valid[row]).tolist()
        substep.add_row(tick, here, agent_ids[row] if here is None else agent_ids[row, here])
    substep.finish(is_dense=False)
    for part, envs, rows in zip(parts, places, rows_of_parts, strict=True):
        for target, source in ((substep.actions, part.actions), (substep.logits or {}, part.logits)):
            for key, array in source.items():
                target[key][rows, envs] = array
        for key, array in part.observations.items():
            substep.observations[key][rows, envs] = array[:-1]
            substep.observations[key][len(ticks), envs] = array[-1]
