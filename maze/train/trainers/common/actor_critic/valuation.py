"""From a rollout as it was collected to tensors with advantages and targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maze.core.agent.returns import next_values_from, structured_gae
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchStateCritic, TorchStepStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.train.trainers.common.actor_critic.actor_streams import actor_stream_gae, has_known_reward
from maze.train.trainers.common.actor_critic.rollout_batch import AlignedSubsteps, RolloutBatch

if TYPE_CHECKING:
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.rollout.rollout_columns import RolloutColumns
    from maze.core.rollout.substep_columns import SubstepColumns

Place = tuple[int, int]
"""(time, environment)"""


@torch.no_grad()
def value_rollout(model: TorchActorCritic, columns: RolloutColumns, gamma: float, gae_lambda: float) -> RolloutBatch:
    """Asks policy and critic about a whole rollout at once, and computes what there is to learn.

    :param model: The model that collected the rollout.
    :param columns: The rollout.
    :param gamma: Discount per environment step.
    :param gae_lambda: Parameter of generalized advantage estimation.
    """
    if columns.is_dense():
        return _value_dense(model, columns, gamma, gae_lambda)
    return _value_irregular(model, columns, gamma, gae_lambda)


def _value_dense(model: TorchActorCritic, columns: RolloutColumns, gamma: float, gae_lambda: float) -> RolloutBatch:
    """All environments take the same sub-steps: the sub-steps of an environment step stay together."""
    stacked = columns.structured_record()
    n_substeps = len(stacked.substep_records)
    shape = (columns.n_ticks // n_substeps, columns.n_envs)
    record = StructuredSpacesRecord([flat_tensors(substep, model.device) for substep in stacked.substep_records])
    policy_output, critic_output = model.compute_actor_critic_output(record)
    values = [value.reshape(shape) for value in critic_output.detached_values]

    rewards, actor_rewards = (by_substep(array, n_substeps) for array in (columns.rewards, columns.actor_rewards))
    terminated, truncated = (
        torch.from_numpy(array.reshape(-1, n_substeps, columns.n_envs).any(axis=1)).to(model.device)
        for array in (columns.terminated, columns.truncated)
    )
    has_own_rewards = isinstance(model.critic, TorchStepStateCritic) and n_substeps > 1
    if has_own_rewards:
        rewards = actor_rewards or [torch.stack(rewards).sum(0)] * n_substeps
    ends = dense_bootstrap(model, columns, stacked)
    next_values = [
        next_values_of_later_actor(value, ends)
        if index and has_own_rewards and actor_rewards
        else next_values_from(value, torch.from_numpy(ends.last).to(value), ends.final)
        for index, value in enumerate(values)
    ]
    assert isinstance(model.critic, TorchStateCritic)
    targets = model.critic.compute_structured_return(
        gamma,
        gae_lambda,
        [reward.to(model.device) for reward in rewards],
        values,
        terminated,
        truncated=truncated,
        next_values=next_values,
    )
    part = AlignedSubsteps(
        record=record,
        advantages=[(target - values[min(index, len(values) - 1)]).flatten() for index, target in enumerate(targets)],
        old_log_probs=policy_output.joint_log_probs_for_actions(record.actions),
        targets=[target.flatten() for target in targets[: len(values)]],
        old_values=[value.flatten() for value in values],
    )
    return RolloutBatch([part], shape[0] * shape[1])


def _value_irregular(model: TorchActorCritic, columns: RolloutColumns, gamma: float, gae_lambda: float) -> RolloutBatch:
    """Actors differ between environments or steps: all that one policy did forms a group of its own."""
    if isinstance(model.critic, TorchDeltaStateCritic):
        raise ConfigError(
            "model.critic: a delta critic needs environments that all take the same sub-steps in the same order, but "
            "the actors of this environment vary. Use a step or a shared critic."
        )
    groups = list(groups_of(model, columns))
    values = np.zeros(columns.rewards.shape, np.float32)
    for group in groups:
        policy_output, critic_output = model.compute_actor_critic_output(group.record)
        group.old_log_probs = policy_output.joint_log_probs_for_actions(group.record.actions)
        group.values = critic_output.detached_values[0]
        values[group.place] = group.values.cpu().numpy()
    is_known: np.ndarray | None = None
    if columns.actor_rewards is not None and isinstance(model.critic, TorchStepStateCritic):
        advantages = _advantages_of_actors(model, columns, values, gamma, gae_lambda)
        is_known = has_known_reward(columns.step_complete)
    else:
        ends = bootstrap(model, columns)
        advantages = structured_gae(
            columns.rewards,
            values,
            next_values_from(values, ends.last, ends.final),
            columns.terminated,
            columns.truncated,
            columns.step_complete,
            gamma,
            gae_lambda,
        )
    parts = []
    for group in groups:
        advantage = torch.from_numpy(advantages[group.place]).to(model.device)
        part = AlignedSubsteps(
            record=group.record,
            advantages=[advantage],
            old_log_probs=group.old_log_probs,
            targets=[advantage + group.values],
            old_values=[group.values],
        )
        if is_known is not None and not is_known[group.place].all():
            part = part.rows(torch.from_numpy(np.flatnonzero(is_known[group.place])).to(model.device))
        if part.n_rows:
            parts.append(part)
    return RolloutBatch(parts, max(1, int(columns.step_complete.sum())))


# -- values after the last recorded action ---------------------------------------------------------


@dataclass
class Ends:
    """Values of observations that nobody acted on."""

    last: np.ndarray
    """After the rollout, ``[n_envs]``."""
    final: dict[Place, float] = field(default_factory=dict)
    """At the end of truncated episodes."""


def dense_bootstrap(model: TorchActorCritic, columns: RolloutColumns, stacked: StructuredSpacesRecord) -> Ends:
    n_substeps = len(stacked.substep_records)
    ends = bootstrap(model, columns, stacked if n_substeps > 1 else None)
    ends.final = {(tick // n_substeps, env): value for (tick, env), value in ends.final.items()}
    return ends


def bootstrap(model: TorchActorCritic, columns: RolloutColumns, stacked: StructuredSpacesRecord | None = None) -> Ends:
    """Values the observations after the rollout and those at the end of truncated episodes, one pass for each actor.

    :param stacked: The sub-steps of a dense rollout: a critic that wants to see all of them takes those that are still
        to come from the step before.
    """
    ends = Ends(np.zeros(columns.n_envs, np.float32))
    for actor, places, observation in _open_ends(columns):
        known, position = None, 0
        if stacked is not None:
            n_substeps = len(stacked.substep_records)
            steps = [min(tick, columns.n_ticks - 1) // n_substeps for tick, _ in places]
            envs = [env for _, env in places]
            known = [_select(substep.observation or {}, (steps, envs)) for substep in stacked.substep_records]
            position = stacked.actor_ids.index(actor) if actor in stacked.actor_ids else 0
        values = model.bootstrap_values(observation, actor, known, position).cpu().tolist()
        for (tick, env), value in zip(places, values, strict=True):
            if tick == columns.n_ticks:
                ends.last[env] = value
            else:
                ends.final[tick, env] = value
    return ends


def _open_ends(columns: RolloutColumns) -> Iterable[tuple[ActorID, list[Place], dict[str, np.ndarray]]]:
    """Observations that nobody acted on, grouped by actor; time ``n_ticks`` is after the rollout."""
    places: dict[ActorID, list[Place]] = {}
    observations: dict[ActorID, list[dict[str, np.ndarray]]] = {}
    for actor in dict.fromkeys(columns.last_actor_ids):
        envs = [env for env, other in enumerate(columns.last_actor_ids) if other == actor]
        places[actor] = [(columns.n_ticks, env) for env in envs]
        row = columns.last_observations[actor.step_key]
        observations[actor] = [row if len(envs) == columns.n_envs else _select(row, envs)]
    for entry in columns.final_observations:
        places.setdefault(entry.actor_id, []).append((entry.tick, entry.env_index))
        expanded = {key: np.asarray(value)[np.newaxis] for key, value in entry.observation.items()}
        observations.setdefault(entry.actor_id, []).append(expanded)
    for actor, rows in observations.items():
        joined = rows[0] if len(rows) == 1 else {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
        yield actor, places[actor], joined


def next_values_of_later_actor(values: Tensor, ends: Ends) -> Tensor:
    """For an actor with rewards of its own that has not seen what comes after an end: its latest value stands in."""
    next_values = torch.cat([values[1:], values[-1:]])
    for place in ends.final:
        next_values[place] = values[place]
    return next_values


def _advantages_of_actors(
    model: TorchActorCritic, columns: RolloutColumns, values: np.ndarray, gamma: float, gae_lambda: float
) -> np.ndarray:
    """Every actor has rewards of its own, and a critic that predicts them: each is a stream of its own."""
    assert columns.actor_rewards is not None
    acted: dict[ActorID, list[tuple[np.ndarray, np.ndarray]]] = {}
    for substep in columns.substeps.values():
        rows, envs = substep.entries()
        agents = substep.agent_ids[rows, envs]
        for agent in np.unique(agents):
            chosen = agents == agent
            actor = ActorID(substep.step_key, int(agent))
            acted.setdefault(actor, []).append((substep.ticks[rows[chosen]], envs[chosen]))
    indices = {actor: index for index, actor in enumerate(acted)}
    actors = np.zeros(values.shape, np.int64)
    for actor, acted_at in acted.items():
        for ticks_and_envs in acted_at:
            actors[ticks_and_envs] = indices[actor]
    latest = _latest_values(values, actors, len(indices))
    last_values = latest[-1].copy()
    final_values = {(e.tick, e.env_index): latest[e.tick, e.env_index].copy() for e in columns.final_observations}
    ends = bootstrap(model, columns)
    for env, actor in enumerate(columns.last_actor_ids):
        if actor in indices:
            last_values[env, indices[actor]] = ends.last[env]
    for entry in columns.final_observations:
        place = (entry.tick, entry.env_index)
        if entry.actor_id in indices:
            final_values[place][indices[entry.actor_id]] = ends.final[place]
    return actor_stream_gae(
        columns.actor_rewards,
        values,
        actors,
        last_values=last_values,
        final_values=final_values,
        terminated=columns.terminated,
        truncated=columns.truncated,
        step_complete=columns.step_complete,
        gamma=gamma,
        gae_lambda=gae_lambda,
        actor_done=columns.actor_done,
    )


def _latest_values(values: np.ndarray, actors: np.ndarray, n_actors: int) -> np.ndarray:
    """Each actor's most recent value, ``[n_ticks, n_envs, n_actors]``; stands in where an actor sees no successor."""
    n_ticks, n_envs = values.shape
    latest = np.zeros((n_ticks, n_envs, n_actors), values.dtype)
    environments = np.arange(n_envs)
    for tick in range(n_ticks):
        if tick:
            latest[tick] = latest[tick - 1]
        latest[tick, environments, actors[tick]] = values[tick]
    return latest


# -- tensors ---------------------------------------------------------------------------------------


@dataclass
class Group:
    """What one policy network did, in the order of time."""

    record: StructuredSpacesRecord
    place: tuple[np.ndarray, np.ndarray]
    """Tick and environment of each row."""
    old_log_probs: list[Tensor] = field(default_factory=list)
    values: Tensor = field(default_factory=lambda: torch.empty(0))


def groups_of(model: TorchActorCritic, columns: RolloutColumns) -> Iterable[Group]:
    for substep in columns.substeps.values():
        rows, envs = substep.entries()
        for actor, chosen in _actors_with_own_networks(model, substep, rows, envs):
            place = (rows[chosen], envs[chosen])
            record = StructuredSpacesRecord(
                [
                    SpacesRecord(
                        actor,
                        observation=_tensors(_select(substep.observations, place), model.device),
                        action=_tensors(_select(substep.actions, place), model.device),
                        logits=_tensors(_select(substep.logits, place), model.device) if substep.logits else None,
                    )
                ]
            )
            yield Group(record, (substep.ticks[place[0]], place[1]))


def _actors_with_own_networks(
    model: TorchActorCritic, substep: SubstepColumns, rows: np.ndarray, envs: np.ndarray
) -> Iterable[tuple[ActorID, np.ndarray]]:
    """One actor for each network of a sub-step, with the entries that belong to it."""
    if not len(rows):
        return
    agents = substep.agent_ids[rows, envs]
    if substep.step_key in model.policy.substeps_with_separate_agent_nets:
        for agent in np.unique(agents):
            yield ActorID(substep.step_key, int(agent)), agents == agent
    else:
        yield ActorID(substep.step_key, int(agents[0])), np.ones(len(rows), np.bool_)


def flat_tensors(substep: SpacesRecord, device: str) -> SpacesRecord:
    """The record with ``[n_steps, n_envs]`` flattened into rows; on the CPU it shares memory with the columns."""
    observation, action, logits = (
        _tensors({key: array.reshape(-1, *array.shape[2:]) for key, array in (arrays or {}).items()}, device)
        for arrays in (substep.observation, substep.action, substep.logits)
    )
    return SpacesRecord(substep.actor_id, observation=observation, action=action, logits=logits or None)


def _tensors(arrays: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {key: _tensor(array, device) for key, array in arrays.items()}


def _tensor(array: Any, device: str) -> Tensor:
    """Small integers, such as pixels, keep their type until a network sees them; float64 and the like are converted."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype is torch.float64:
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.to(device)


def by_substep(array: np.ndarray | None, n_substeps: int) -> list[Tensor]:
    """``[n_ticks, n_envs]`` as one tensor ``[n_steps, n_envs]`` for each sub-step."""
    if array is None:
        return []
    tensor = torch.from_numpy(array)
    return [tensor[position::n_substeps] for position in range(n_substeps)]


def _select(arrays: Mapping[str, Any], index: Sequence[Any] | tuple[Any, ...]) -> dict[str, Any]:
    return {key: array[index] for key, array in arrays.items()}
