"""From a batch of rollouts of older policies to tensors with V-trace advantages and targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchStepStateCritic
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.train.trainers.common.actor_critic.rollout_batch import AlignedSubsteps, RolloutBatch
from maze.train.trainers.common.actor_critic.valuation import (
    Ends,
    Group,
    Place,
    bootstrap,
    by_substep,
    dense_bootstrap,
    flat_tensors,
    groups_of,
    next_values_of_later_actor,
)
from maze.train.trainers.impala.impala_vtrace import VTraceReturns, from_importance_weights, log_rhos_of_streams

if TYPE_CHECKING:
    from maze.core.agent.state_critic_input_output import StateCriticOutput
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy_output import PolicyOutput
    from maze.core.rollout.rollout_columns import RolloutColumns

Outputs = tuple["PolicyOutput", "StateCriticOutput"]


@dataclass(frozen=True)
class VTraceOptions:
    """How targets are computed; see :func:`from_importance_weights`."""

    gamma: float
    clip_rho_threshold: float | None = 1.0
    clip_pg_rho_threshold: float | None = 1.0
    trace_lambda: float = 1.0


@dataclass
class VTraceSubsteps(AlignedSubsteps):
    """Sub-steps together with what the networks said about them, gradients included: it is asked for only once."""

    outputs: Outputs


def vtrace_rollout(model: TorchActorCritic, columns: RolloutColumns, options: VTraceOptions) -> RolloutBatch:
    """Asks policy and critic about a whole batch at once, and computes what there is to learn.

    :param model: The learning model.
    :param columns: Rollouts with the logits of the policies that acted.
    :param options: How targets are computed.
    """
    if columns.is_dense():
        return _vtrace_dense(model, columns, options)
    return _vtrace_irregular(model, columns, options)


def _vtrace_dense(model: TorchActorCritic, columns: RolloutColumns, options: VTraceOptions) -> RolloutBatch:
    """All environments take the same sub-steps: one stream of environment steps for each output of the critic."""
    stacked = columns.structured_record()
    n_substeps = len(stacked.substep_records)
    shape = (columns.n_ticks // n_substeps, columns.n_envs)
    record = StructuredSpacesRecord([flat_tensors(substep, model.device) for substep in stacked.substep_records])
    outputs = model.compute_actor_critic_output(record)
    values = [value.reshape(shape) for value in outputs[1].detached_values]
    old_log_probs = _behaviour_log_probs(model, record)
    log_rhos = [log_rho.reshape(shape) for log_rho in _log_rhos(outputs[0], record, old_log_probs)]

    terminated, truncated = (
        torch.from_numpy(array.reshape(-1, n_substeps, columns.n_envs).any(axis=1)).to(model.device)
        for array in (columns.terminated, columns.truncated)
    )
    discounts = torch.full(shape, options.gamma, device=model.device).masked_fill(terminated, 0.0)
    rewards = [reward.to(model.device) for reward in by_substep(columns.rewards, n_substeps)]
    actor_rewards = [reward.to(model.device) for reward in by_substep(columns.actor_rewards, n_substeps)]
    # an actor with rewards of its own is followed by its own next decision, not by that of the others
    has_own_rewards = isinstance(model.critic, TorchStepStateCritic) and n_substeps > 1 and bool(actor_rewards)
    ends = dense_bootstrap(model, columns, stacked)
    returns = []
    for index, stream_log_rhos in enumerate(log_rhos_of_streams(log_rhos, terminated | truncated, len(values))):
        last, final = torch.from_numpy(ends.last).to(values[index]), _final_values(ends.final, values[index])
        if index and has_own_rewards:
            next_values = next_values_of_later_actor(values[index], ends)
            last, final = next_values[-1], next_values
        reward = actor_rewards[index] if has_own_rewards else torch.stack(rewards).sum(0)
        returns.append(_vtrace(stream_log_rhos, discounts, reward, values[index], last, truncated, final, options))
    advantages = [entry.pg_advantages.flatten() for entry in returns]
    part = VTraceSubsteps(
        record=record,
        advantages=advantages if len(values) > 1 else advantages * n_substeps,
        old_log_probs=old_log_probs,
        targets=[entry.vs.flatten() for entry in returns],
        old_values=[value.flatten() for value in values],
        outputs=outputs,
    )
    return RolloutBatch([part], shape[0] * shape[1])


def _vtrace_irregular(model: TorchActorCritic, columns: RolloutColumns, options: VTraceOptions) -> RolloutBatch:
    """Actors differ between environments or steps: one stream of sub-steps for each environment."""
    if isinstance(model.critic, TorchDeltaStateCritic):
        raise ConfigError(
            "model.critic: a delta critic needs environments that all take the same sub-steps in the same order, but "
            "the actors of this environment vary. Use a step or a shared critic."
        )
    shape = columns.rewards.shape
    values, log_rhos = torch.zeros(shape, device=model.device), torch.zeros(shape, device=model.device)
    groups: list[tuple[Group, Outputs]] = []
    for group in groups_of(model, columns):
        outputs = model.compute_actor_critic_output(group.record)
        group.old_log_probs = _behaviour_log_probs(model, group.record)
        group.values = outputs[1].detached_values[0]
        place = _index(group, model.device)
        values[place] = group.values
        log_rhos[place] = _log_rhos(outputs[0], group.record, group.old_log_probs)[0]
        groups.append((group, outputs))
    terminated, truncated, complete = (
        torch.from_numpy(array).to(model.device)
        for array in (columns.terminated, columns.truncated, columns.step_complete)
    )
    # sub-steps of the same environment step belong to the same time
    discounts = torch.where(complete, options.gamma, 1.0).masked_fill(terminated, 0.0)
    discounts = torch.where(truncated, options.gamma, discounts).masked_fill(terminated, 0.0)
    ends: Ends = bootstrap(model, columns)
    last = torch.from_numpy(ends.last).to(values)
    rewards = torch.from_numpy(columns.rewards).to(model.device)
    returns = _vtrace(log_rhos, discounts, rewards, values, last, truncated, _final_values(ends.final, values), options)
    parts: list[AlignedSubsteps] = [
        VTraceSubsteps(
            record=group.record,
            advantages=[returns.pg_advantages[_index(group, model.device)]],
            old_log_probs=group.old_log_probs,
            targets=[returns.vs[_index(group, model.device)]],
            old_values=[group.values],
            outputs=outputs,
        )
        for group, outputs in groups
    ]
    return RolloutBatch(parts, max(1, int(columns.step_complete.sum())))


def _vtrace(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    last: Tensor,
    truncated: Tensor,
    final: Tensor,
    options: VTraceOptions,
) -> VTraceReturns:
    return from_importance_weights(
        log_rhos,
        discounts,
        rewards,
        values,
        last,
        options.clip_rho_threshold,
        options.clip_pg_rho_threshold,
        truncated=truncated,
        final_values=final,
        trace_lambda=options.trace_lambda,
    )


@torch.no_grad()
def _behaviour_log_probs(model: TorchActorCritic, record: StructuredSpacesRecord) -> list[Tensor]:
    """Joint log-probabilities of the actions under the policies that chose them."""
    mapper = model.policy.distribution_mapper
    return [
        mapper.logits_dict_to_distribution(substep.logits, 1.0).joint_log_prob(substep.action)  # type: ignore[arg-type]  # tensors
        for substep in record.substep_records
    ]


@torch.no_grad()
def _log_rhos(output: PolicyOutput, record: StructuredSpacesRecord, old_log_probs: list[Tensor]) -> list[Tensor]:
    log_probs = output.joint_log_probs_for_actions(record.actions)
    return [new - old for new, old in zip(log_probs, old_log_probs, strict=True)]


def _final_values(final: Mapping[Place, float], like: Tensor) -> Tensor:
    """Values of the final observations of truncated episodes at their places, zero elsewhere."""
    result = torch.zeros_like(like)
    for place, value in final.items():
        result[place] = value
    return result


def _index(group: Group, device: str) -> tuple[Tensor, Tensor]:
    ticks, envs = group.place
    return torch.from_numpy(ticks).to(device), torch.from_numpy(envs).to(device)
