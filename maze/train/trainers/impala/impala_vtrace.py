"""V-trace (Espeholt et al. 2018): targets and advantages from rollouts of an older policy, as pure functions.

All tensors are time-major, `[n_steps, n_envs]`, and without gradients. `rho` is the importance weight: the ratio of the
probabilities of an action under target policy (learner) and behaviour policy (actor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maze.core.agent.returns import ReturnFunction, Returns, Trajectories, sum_up
from maze.core.annotations import override
from maze.train.utils.train_utils import mapped

if TYPE_CHECKING:
    from maze.distributions.dict import DictProbabilityDistribution
    from maze.distributions.distribution_mapper import DistributionMapper

TorchActionType = dict[str, Tensor]


MAX_LOG_RHO = 80.0
"""Upper limit of log importance weights without a threshold: larger weights would overflow float32."""


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
        if trajectories.step_complete is not None:  # sub-steps of an environment step are not discounted
            discounts = torch.where(trajectories.step_complete, discounts, 1.0)
            trace_lambda = torch.where(
                trajectories.step_complete if trajectories.acts is None else trajectories.acts, trace_lambda, 1.0
            )
        discounts, rewards = discounts.masked_fill(terminated, 0.0), trajectories.rewards
        if not trajectories.has_own_rewards:
            rewards = [torch.stack(rewards).sum(0)] * len(trajectories.values)
        log_rhos = log_rhos_by_trajectory(trajectories.log_rhos, terminated | truncated, len(trajectories.values))
        clips = self.clip_rho_threshold, self.clip_pg_rho_threshold
        common: dict[str, Any] = {"truncated": truncated, "trace_lambda": trace_lambda}
        terms = zip(log_rhos, rewards, trajectories.values, trajectories.next_values, strict=True)
        returns = [
            from_importance_weights(log_rho, discounts, reward, values, ends[-1], *clips, final_values=ends, **common)
            for log_rho, reward, values, ends in terms
        ]
        advantages = [entry.pg_advantages for entry in returns]
        if len(returns) == 1:
            advantages = advantages * len(trajectories.rewards)
        return Returns(advantages, [entry.vs for entry in returns])


class VTraceReturns(NamedTuple):
    """Result of V-trace for one trajectory of values."""

    vs: Tensor
    """Targets of the values."""
    pg_advantages: Tensor
    """Weights of the policy gradient, including the importance weight."""


class VTraceFromLogitsReturns(NamedTuple):
    """Result of V-trace for the sub-steps of structured environment steps."""

    vs: list[Tensor]
    """Targets, for each trajectory of values."""
    pg_advantages: list[Tensor]
    """Weights of the policy gradient, for each sub-step."""
    log_rhos: list[Tensor]
    """Log importance weights of the actions of each sub-step."""
    behaviour_action_log_probs: list[TorchActionType]
    """Log-probabilities of the actions under the behaviour policy, by sub-step and action head."""
    target_action_log_probs: list[TorchActionType]
    """Log-probabilities of the actions under the target policy, by sub-step and action head."""


def log_probs_from_logits_and_actions_and_spaces(
    policy_logits: list[TorchActionType], actions: list[TorchActionType], distribution_mapper: DistributionMapper
) -> tuple[list[TorchActionType], list[DictProbabilityDistribution]]:
    """Return the log-probabilities of actions under the distributions of logits.

    :param policy_logits: For each sub-step the logits of each action head.
    :param actions: For each sub-step the action of each head.
    :param distribution_mapper: Maps action heads to distributions.
    :return: For each sub-step the log-probabilities by head, and the distributions.
    """
    distributions = [distribution_mapper.logits_dict_to_distribution(logits, 1.0) for logits in policy_logits]
    return [dist.log_prob(action) for dist, action in zip(distributions, actions, strict=True)], distributions


def get_log_rhos(
    target_action_log_probs: list[TorchActionType], behaviour_action_log_probs: list[TorchActionType]
) -> list[Tensor]:
    """Return the log importance weights of the actions of each sub-step: sums over the action heads.

    :param target_action_log_probs: For each sub-step the log-probabilities by head under the target policy.
    :param behaviour_action_log_probs: The same under the behaviour policy.
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
    """Return V-trace targets and advantages (Espeholt et al. 2018, equation 1 and section 4.2).

    :param log_rhos: Log importance weights, `[n_steps, n_envs]` like all other arguments except `bootstrap_value`.
    :param discounts: Discount factor after each step; 0 where the episode terminated.
    :param rewards: Reward of each step.
    :param values: V of the observation before each step.
    :param bootstrap_value: V of the observation after the last step, `[n_envs]`.
    :param clip_rho_threshold: Upper limit of the importance weights of temporal differences; `None`: no limit.
    :param clip_pg_rho_threshold: The same for the advantages.
    :param truncated: The episode was truncated after the step: its return is bootstrapped from its final observation.
    :param final_values: V of the final observation where `truncated`; ignored elsewhere.
    :param trace_lambda: Decay of the traces; 1: the estimator of the paper, 0: one-step targets.
    """
    rhos = log_rhos.clamp(max=MAX_LOG_RHO).exp()
    clipped_rhos = _clipped(rhos, clip_rho_threshold)
    traces = discounts * rhos.clamp(max=1.0) * trace_lambda
    if truncated is not None:
        traces = traces.masked_fill(truncated, 0.0)

    def following(of_steps: Tensor) -> Tensor:
        """Return the values after each step, for values `of_steps` before each step."""
        result = torch.cat([of_steps[1:], bootstrap_value.unsqueeze(0)])
        if truncated is not None and final_values is not None:
            result = torch.where(truncated, final_values, result)
        return result.masked_fill(discounts == 0.0, 0.0)  # values after a termination may not be finite

    deltas = clipped_rhos * (rewards + discounts * following(values) - values)
    sums = deltas.cpu()
    sum_up(sums.numpy(), traces.cpu().numpy())  # NumPy has less overhead for small operations
    vs = values + sums.to(values.device)
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
) -> VTraceFromLogitsReturns:
    """Return V-trace targets and advantages for the sub-steps of structured environment steps.

    Logits are `[n_steps, n_envs, *logits_shape]` by head, all other tensors `[n_steps, n_envs]`.

    :param behaviour_policy_logits: For each sub-step the logits of the behaviour policy by action head.
    :param target_policy_logits: The same for the target policy.
    :param actions: For each sub-step the action of each head.
    :param distribution_mapper: Maps action heads to distributions.
    :param discounts: See :func:`from_importance_weights`; one for each environment step, like the rewards.
    :param rewards: Reward of each environment step.
    :param values: One trajectory of values for whole environment steps, or one for each sub-step.
    :param bootstrap_value: For each trajectory V of the observation after the last step.
    :param clip_rho_threshold: See :func:`from_importance_weights`.
    :param clip_pg_rho_threshold: See :func:`from_importance_weights`.
    :param device: Device of the computation; `None`: that of the tensors.
    """
    if device is not None:
        behaviour_policy_logits, target_policy_logits, actions, discounts, rewards, values, bootstrap_value = mapped(
            lambda tensor: tensor.to(device),
            (behaviour_policy_logits, target_policy_logits, actions, discounts, rewards, values, bootstrap_value),
        )
    behaviour, _ = log_probs_from_logits_and_actions_and_spaces(behaviour_policy_logits, actions, distribution_mapper)
    target, _ = log_probs_from_logits_and_actions_and_spaces(target_policy_logits, actions, distribution_mapper)
    log_rhos = get_log_rhos(target, behaviour)
    by_trajectory = log_rhos_by_trajectory(log_rhos, discounts == 0.0, len(values))
    clips = clip_rho_threshold, clip_pg_rho_threshold
    returns = [
        from_importance_weights(log_rho, discounts, rewards, of_steps, of_end, *clips)
        for log_rho, of_steps, of_end in zip(by_trajectory, values, bootstrap_value, strict=True)
    ]
    advantages = [entry.pg_advantages for entry in returns]
    if len(values) == 1:
        advantages = advantages * len(log_rhos)
    return VTraceFromLogitsReturns([entry.vs for entry in returns], advantages, log_rhos, behaviour, target)


def log_rhos_by_trajectory(log_rhos: Sequence[Tensor], is_over: Tensor, n_streams: int) -> list[Tensor]:
    """Return the log importance weights of whole environment steps for each trajectory of values.

    Between two values of the same sub-step, each sub-step acts once: the later sub-steps of the same environment step,
    and the earlier ones of the next, unless the episode ends in between.

    :param log_rhos: For each sub-step `[n_steps, n_envs]`.
    :param is_over: The episode ended with the step.
    :param n_streams: Number of trajectories of values: 1 for whole environment steps, or the number of sub-steps.
    """
    trajectories = []
    for stream in range(n_streams):
        total = torch.stack(list(log_rhos[stream:])).sum(0)
        if stream:
            earlier = torch.stack(list(log_rhos[:stream])).sum(0)
            # the step after the last one is not recorded
            total = total + torch.cat([earlier[1:], torch.zeros_like(earlier[:1])]).masked_fill(is_over, 0.0)
        trajectories.append(total)
    return trajectories


def _clipped(rhos: Tensor, threshold: float | None) -> Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)
