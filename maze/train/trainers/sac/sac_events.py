"""Statistics of SAC."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import define_epoch_stats, define_mean_by, define_time

Key = int | str


class SACEvents(ABC):
    """Events of SAC, once per epoch as the mean over its updates. Percentages are of the time of an update."""

    @define_mean_by("step_key")
    def policy_loss(self, step_key: Key, value: float) -> None:
        """Loss of the policy of a sub-step."""

    @define_mean_by("step_key")
    def policy_grad_norm(self, step_key: Key, value: float) -> None:
        """Gradient norm of the policy network of a sub-step, before clipping."""

    @define_mean_by("step_key")
    def policy_entropy(self, step_key: Key, value: float) -> None:
        """Mean entropy of the action distributions of a sub-step; continuous actions: an estimate by samples."""

    @define_mean_by("step_key")
    def policy_mean_logp(self, step_key: Key, value: float) -> None:
        """Mean (for discrete actions: expected) log-probability of the actions of a sub-step."""

    @define_mean_by("step_key")
    def policy_kl_to_initial(self, step_key: Key, value: float) -> None:
        """KL divergence of the current policy from the initial one of the run, where it is penalised."""

    @define_mean_by("critic_key")
    def errors_between_critics(self, critic_key: Key, value: float) -> None:
        """Mean absolute difference of the two networks of a critic."""

    @define_mean_by("critic_key")
    def critic_value(self, critic_key: Key, value: float) -> None:
        """Mean of the smaller value of the two networks of a critic."""

    @define_mean_by("critic_key")
    def critic_value_loss(self, critic_key: Key, value: float) -> None:
        """Loss of a critic, the sum over both of its networks."""

    @define_mean_by("critic_key")
    def critic_grad_norm(self, critic_key: Key, value: float) -> None:
        """Gradient norm of both networks of a critic, before clipping."""

    @define_mean_by("step_key")
    def entropy_coef(self, step_key: Key, value: float) -> None:
        """Entropy coefficient (alpha) of a sub-step."""

    @define_mean_by("step_key")
    def entropy_loss(self, step_key: Key, value: float) -> None:
        """Loss of the entropy coefficient of a sub-step."""

    @define_time
    def time_learner_rollout(self, time: float, percent: float) -> None:
        """Seconds spent on collecting rollouts in this process."""

    @define_time
    def time_dequeuing_actors(self, time: float, percent: float) -> None:
        """Seconds spent on waiting for rollouts of actors in other processes."""

    @define_time
    def time_sampling_from_buffer(self, time: float, percent: float) -> None:
        """Seconds spent on drawing batches from the replay buffer."""

    @define_time
    def time_loss_computation(self, time: float, percent: float) -> None:
        """Seconds spent on computing losses."""

    @define_time
    def time_backprob(self, time: float, percent: float) -> None:
        """Seconds spent on gradients, optimizer steps and target networks."""

    @define_epoch_stats(np.mean, input_name="before", output_name="before")
    @define_epoch_stats(np.mean, input_name="after", output_name="after")
    def estimated_queue_sizes(self, before: int, after: int) -> None:
        """Number of rollouts waiting before and after a collection; 0 where actors run in this process."""

    @define_epoch_stats(np.mean)
    def buffer_size(self, value: int) -> None:
        """Number of transitions (or rollouts) in the replay buffer."""

    @define_epoch_stats(np.mean)
    def buffer_avg_pick_per_transition(self, value: int) -> None:
        """Mean number of times that a transition (or rollout) was sampled, over all that were ever added."""
