"""V-trace (Espeholt et al. 2018): targets and advantages from rollouts of an older policy, as pure functions.

Everything is time-major, `[n_steps, n_envs]`, and without gradients. `rho` is the ratio of the probabilities that
the learning (target) policy and the policy that acted (behaviour) give to an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from maze.core.annotations import override
from maze.train.trainers.common.actor_critic.valuation import ReturnFunction, Returns, Trajectories

if TYPE_CHECKING:
    from maze.distributions.dict import DictProbabilityDistribution
    from maze.distributions.distribution_mapper import DistributionMapper

TorchActionType = dict[str, Tensor]


MAX_LOG_RHO = 80.0
"""Larger importance weights would overflow float32; where there is no threshold, they are limited to exp(80)."""


@dataclass(frozen=True)
class VTrace(ReturnFunction):
    """V-trace as the returns of whole rollouts; see :func:`from_importance_weights`."""

    gamma: float
    clip_rho_threshold: float | None = 1.0
    clip_pg_rho_threshold: float | None = 1.0
    trace_lambda: float = 1.0

    is_off_policy: bool = field(default=True, init=False)

    @override(ReturnFunction)
    def __call__(self, trajectories: Trajectories) -> Returns:
        terminated, truncated = trajectories.terminated, trajectories.truncated
        discounts = torch.full(terminated.shape, self.gamma, device=terminated.device)
        trace_lambda: Tensor | float = self.trace_lambda
        if trajectories.step_complete is not None:  # sub-steps of the same environment step belong to the same time
            discounts = torch.where(trajectories.step_complete, discounts, 1.0)
            trace_lambda = torch.where(
                trajectories.step_complete if trajectories.acts is None else trajectories.acts, trace_lambda, 1.0
            )
        sum_of_rewards = torch.stack(trajectories.rewards).sum(0)
        log_rhos = log_rhos_of_streams(trajectories.log_rhos, terminated | truncated, len(trajectories.values))
        returns = [
            from_importance_weights(
                log_rhos[index],
                discounts.masked_fill(terminated, 0.0),
                trajectories.rewards[index] if trajectories.has_own_rewards else sum_of_rewards,
                values,
                next_values[-1],
                self.clip_rho_threshold,
                self.clip_pg_rho_threshold,
                truncated=truncated,
                final_values=next_values,
                trace_lambda=trace_lambda,
            )
            for index, (values, next_values) in enumerate(
                zip(trajectories.values, trajectories.next_values, strict=True)
            )
        ]
        advantages = [entry.pg_advantages for entry in returns]
        if len(returns) == 1:
            advantages = advantages * len(trajectories.rewards)
        return Returns(advantages, [entry.vs for entry in returns])


class VTraceReturns(NamedTuple):
    """What V-trace gives for one stream of values."""

    vs: Tensor
    """Targets of the values."""
    pg_advantages: Tensor
    """What the gradients of the log-probabilities are weighted with, importance weight included."""


class VTraceFromLogitsReturns(NamedTuple):
    """What V-trace gives for the sub-steps of structured environment steps."""

    vs: list[Tensor]
    """Targets, for each stream of values."""
    pg_advantages: list[Tensor]
    """Weights of the policy gradient, for each sub-step."""
    log_rhos: list[Tensor]
    """Logarithm of the importance weight of each sub-step's own action."""
    behaviour_action_log_probs: list[TorchActionType]
    """By sub-step and action head."""
    target_action_log_probs: list[TorchActionType]
    """By sub-step and action head."""


def log_probs_from_logits_and_actions_and_spaces(
    policy_logits: list[TorchActionType], actions: list[TorchActionType], distribution_mapper: DistributionMapper
) -> tuple[list[TorchActionType], list[DictProbabilityDistribution]]:
    """Log-probabilities of actions under the distributions that logits describe.

    :param policy_logits: For each sub-step the logits of each action head.
    :param actions: For each sub-step the action of each head.
    :param distribution_mapper: Knows the distribution of each head.
    :return: For each sub-step the log-probabilities by head, and the distributions.
    """
    distributions = [distribution_mapper.logits_dict_to_distribution(logits, 1.0) for logits in policy_logits]
    return [dist.log_prob(action) for dist, action in zip(distributions, actions, strict=True)], distributions


def get_log_rhos(
    target_action_log_probs: list[TorchActionType], behaviour_action_log_probs: list[TorchActionType]
) -> list[Tensor]:
    """Logarithm of the importance weight of each sub-step's action: the sum over its action heads.

    :param target_action_log_probs: For each sub-step the log-probabilities by head under the learning policy.
    :param behaviour_action_log_probs: The same under the policy that acted.
    :return: Each `[n_steps, n_envs]`.
    """
    return [
        torch.stack([target[head] - behaviour[head] for head in target]).sum(0)
        for target, behaviour in zip(target_action_log_probs, behaviour_action_log_probs, strict=True)
    ]


@torch.no_grad()
def from_importance_weights(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None,
    clip_pg_rho_threshold: float | None,
    *,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    trace_lambda: Tensor | float = 1.0,
) -> VTraceReturns:
    """V-trace targets and advantages (Espeholt et al. 2018, equation 1 and section 4.2).

    :param log_rhos: Logarithms of the importance weights, `[n_steps, n_envs]` as all but `bootstrap_value`.
    :param discounts: Discount of what follows each step; 0 where the episode terminated.
    :param rewards: Reward of each step.
    :param values: V of the observation before each step.
    :param bootstrap_value: V of the observation after the last step, `[n_envs]`.
    :param clip_rho_threshold: Limit of the importance weights of the temporal differences; `None`: unlimited.
    :param clip_pg_rho_threshold: The same for the advantages.
    :param truncated: The episode was cut off after the step: it is bootstrapped, and nothing of the next one enters.
    :param final_values: V of the final observation where `truncated`; ignored elsewhere.
    :param trace_lambda: Decay of the traces; 1 is the paper's estimator, 0 looks one step ahead.
    """
    rhos = log_rhos.clamp(max=MAX_LOG_RHO).exp()
    clipped_rhos = _clipped(rhos, clip_rho_threshold)
    traces = discounts * rhos.clamp(max=1.0) * trace_lambda
    if truncated is not None:
        traces = traces.masked_fill(truncated, 0.0)

    def following(of_steps: Tensor) -> Tensor:
        """What is bootstrapped from, where a later step has `of_steps`."""
        result = torch.cat([of_steps[1:], bootstrap_value.unsqueeze(0)])
        if truncated is not None and final_values is not None:
            result = torch.where(truncated, final_values, result)
        return result.masked_fill(discounts == 0.0, 0.0)  # after a termination it need not even be finite

    deltas = clipped_rhos * (rewards + discounts * following(values) - values)
    vs = values + _decayed_sums(deltas, traces)
    pg_advantages = _clipped(rhos, clip_pg_rho_threshold) * (rewards + discounts * following(vs) - values)
    return VTraceReturns(vs, pg_advantages)


@torch.no_grad()
def from_logits(
    behaviour_policy_logits: list[TorchActionType],
    target_policy_logits: list[TorchActionType],
    actions: list[TorchActionType],
    distribution_mapper: DistributionMapper,
    discounts: Tensor,
    rewards: Tensor,
    values: list[Tensor],
    bootstrap_value: list[Tensor],
    clip_rho_threshold: float | None,
    clip_pg_rho_threshold: float | None,
    device: str | None,
    *,
    truncated: Tensor | None = None,
    final_values: list[Tensor] | None = None,
    trace_lambda: float = 1.0,
) -> VTraceFromLogitsReturns:
    """V-trace for the sub-steps of structured environment steps.

    Logits are `[n_steps, n_envs, *logits_shape]` by head, everything else `[n_steps, n_envs]`.

    :param behaviour_policy_logits: For each sub-step the logits of the policy that acted, by action head.
    :param target_policy_logits: The same of the learning policy.
    :param actions: For each sub-step the action of each head.
    :param distribution_mapper: Knows the distribution of each head.
    :param discounts: See :func:`from_importance_weights`; one for each environment step, as the rewards.
    :param rewards: Reward of each environment step.
    :param values: A single stream of values for whole environment steps, or one for each sub-step.
    :param bootstrap_value: For each stream V of the observation after the last step.
    :param clip_rho_threshold: See :func:`from_importance_weights`.
    :param clip_pg_rho_threshold: See :func:`from_importance_weights`.
    :param device: Where it is computed; `None`: where the tensors are.
    :param truncated: See :func:`from_importance_weights`.
    :param final_values: For each stream; see :func:`from_importance_weights`.
    :param trace_lambda: See :func:`from_importance_weights`.
    """
    if device is not None:
        behaviour_policy_logits, target_policy_logits, actions = (
            [{key: tensor.to(device) for key, tensor in substep.items()} for substep in substeps]
            for substeps in (behaviour_policy_logits, target_policy_logits, actions)
        )
        discounts, rewards = discounts.to(device), rewards.to(device)
        values, bootstrap_value = ([t.to(device) for t in tensors] for tensors in (values, bootstrap_value))
        truncated = None if truncated is None else truncated.to(device)
        final_values = None if final_values is None else [t.to(device) for t in final_values]
    behaviour, _ = log_probs_from_logits_and_actions_and_spaces(behaviour_policy_logits, actions, distribution_mapper)
    target, _ = log_probs_from_logits_and_actions_and_spaces(target_policy_logits, actions, distribution_mapper)
    log_rhos = get_log_rhos(target, behaviour)
    is_over = discounts == 0.0 if truncated is None else (discounts == 0.0) | truncated
    returns = [
        from_importance_weights(
            stream_log_rhos,
            discounts,
            rewards,
            values[stream],
            bootstrap_value[stream],
            clip_rho_threshold,
            clip_pg_rho_threshold,
            truncated=truncated,
            final_values=None if final_values is None else final_values[stream],
            trace_lambda=trace_lambda,
        )
        for stream, stream_log_rhos in enumerate(log_rhos_of_streams(log_rhos, is_over, len(values)))
    ]
    advantages = [entry.pg_advantages for entry in returns]
    if len(values) == 1:
        advantages = advantages * len(log_rhos)
    return VTraceFromLogitsReturns([entry.vs for entry in returns], advantages, log_rhos, behaviour, target)


def log_rhos_of_streams(log_rhos: Sequence[Tensor], is_over: Tensor, n_streams: int) -> list[Tensor]:
    """Importance weights of whole environment steps, as each stream of values sees them.

    From one value of a sub-step to its next, all sub-steps act once: the later ones of the same environment step, and
    the earlier ones of the next, unless the episode ends in between.

    :param log_rhos: For each sub-step `[n_steps, n_envs]`.
    :param is_over: The episode ended with the step.
    :param n_streams: 1: values belong to whole environment steps; otherwise the number of sub-steps.
    """
    trajectories = []
    for stream in range(n_streams):
        total = torch.stack(list(log_rhos[stream:])).sum(0)
        if stream:
            earlier = torch.stack(list(log_rhos[:stream])).sum(0)
            # what follows the last step is not recorded
            total = total + torch.cat([earlier[1:], torch.zeros_like(earlier[:1])]).masked_fill(is_over, 0.0)
        trajectories.append(total)
    return trajectories


def _clipped(rhos: Tensor, threshold: float | None) -> Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)


def _decayed_sums(deltas: Tensor, factors: Tensor) -> Tensor:
    """`result[t] = deltas[t] + factors[t] * result[t + 1]`; in NumPy, which starts a small operation much faster."""
    sums = deltas.cpu().numpy().copy()
    decay = factors.cpu().numpy()
    for step in range(len(sums) - 2, -1, -1):
        sums[step] += decay[step] * sums[step + 1]
    return torch.from_numpy(sums).to(deltas.device)
