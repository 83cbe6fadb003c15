"""Statistics of actor-critic trainers."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import define_epoch_stats, define_mean_by

SubstepKey = int | str


class ActorCriticEvents(ABC):
    """Events of an actor-critic trainer, once per epoch as the mean over its updates, in this order."""

    @define_epoch_stats(np.mean)
    def time_epoch(self, value: float) -> None:
        """Seconds spent on the whole previous epoch, its evaluation included."""

    @define_epoch_stats(np.mean)
    def time_rollout(self, value: float) -> None:
        """Seconds spent on collecting a rollout."""

    @define_epoch_stats(np.mean)
    def learning_rate(self, value: float) -> None:
        """Learning rate of the optimizer."""

    @define_epoch_stats(np.mean)
    def average_reward(self, value: float) -> None:
        """Estimate of the average reward of an environment step, where rewards are centred (`reward_centering`)."""

    @define_epoch_stats(np.mean)
    def curriculum_stage(self, value: float) -> None:
        """Stage of the curriculum from 0 on, where there is one; the last one is the environment as configured."""

    @define_mean_by("substep_key")
    def policy_loss(self, substep_key: SubstepKey, value: float) -> None:
        """Loss of the policy of a sub-step."""

    @define_mean_by("substep_key")
    def policy_grad_norm(self, substep_key: SubstepKey, value: float) -> None:
        """Gradient norm of the policy network of a sub-step, before clipping."""

    @define_mean_by("substep_key")
    def policy_entropy(self, substep_key: SubstepKey, value: float) -> None:
        """Mean entropy of the action distributions of a sub-step."""

    @define_mean_by("substep_key")
    def policy_clip_fraction(self, substep_key: SubstepKey, value: float) -> None:
        """Share of actions whose probability ratio was clipped (PPO)."""

    @define_mean_by("substep_key")
    def policy_approx_kl(self, substep_key: SubstepKey, value: float) -> None:
        """KL divergence between the policy that sampled the rollout and the current one (PPO)."""

    @define_mean_by("substep_key")
    def policy_kl_to_initial(self, substep_key: SubstepKey, value: float) -> None:
        """KL divergence of the current policy from the initial one of the run, where it is penalised."""

    @define_mean_by("critic_id")
    def critic_value(self, critic_id: SubstepKey, value: float) -> None:
        """Mean value predicted by a critic."""

    @define_mean_by("critic_id")
    def critic_value_loss(self, critic_id: SubstepKey, value: float) -> None:
        """Loss of a critic."""

    @define_mean_by("critic_id")
    def critic_grad_norm(self, critic_id: SubstepKey, value: float) -> None:
        """Gradient norm of a critic network, before clipping."""

    @define_mean_by("constraint")
    def constraint_value(self, constraint: str, value: float) -> None:
        """Value of a constrained statistic in rollouts."""

    @define_mean_by("constraint")
    def constraint_violation(self, constraint: str, value: float) -> None:
        """Violation of the constraint, relative to its bound; 0: it is fulfilled."""

    @define_mean_by("constraint")
    def constraint_multiplier(self, constraint: str, value: float) -> None:
        """Lagrange multiplier of a constraint."""

    @define_mean_by("constraint")
    def constraint_critic_loss(self, constraint: str, value: float) -> None:
        """Loss of the critic of a constraint's costs."""

    @define_mean_by("constraint")
    def constraint_critic_grad_norm(self, constraint: str, value: float) -> None:
        """Gradient norm of a critic network of a constraint's costs, before clipping."""

    @define_mean_by("critic_id")
    def risk_critic_loss(self, critic_id: SubstepKey, value: float) -> None:
        """Loss of a quantile critic (`risk`)."""

    @define_mean_by("critic_id")
    def risk_critic_grad_norm(self, critic_id: SubstepKey, value: float) -> None:
        """Gradient norm of a quantile critic, before clipping."""

    @define_epoch_stats(np.mean)
    def risk_quantile(self, value: float) -> None:
        """Quantile of the latest training returns at the level of `risk` (value at risk)."""

    @define_epoch_stats(np.mean)
    def risk_cvar(self, value: float) -> None:
        """CVaR of the latest training returns at the level of `risk`."""

    @define_epoch_stats(np.mean)
    def time_update(self, value: float) -> None:
        """Seconds spent on optimizing with a rollout."""
