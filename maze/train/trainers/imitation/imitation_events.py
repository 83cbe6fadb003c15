"""Statistics of imitation learning."""

from __future__ import annotations

from abc import ABC

from maze.core.log_stats.event_decorators import define_mean_by


class ImitationEvents(ABC):
    """Statistics of each minibatch; the means between two evaluations are logged."""

    @define_mean_by("step_id", input_name="value")
    def policy_loss(self, step_id: str | int, agent_id: int, value: float) -> None:
        """Loss of the policy of a sub-step, without the entropy bonus."""

    @define_mean_by("step_id", input_name="value")
    def policy_entropy(self, step_id: str | int, agent_id: int, value: float) -> None:
        """Mean entropy of the action distributions of a sub-step."""

    @define_mean_by("step_id", input_name="value")
    def policy_l2_norm(self, step_id: str | int, agent_id: int, value: float) -> None:
        """Norm of the parameters of a sub-step's network."""

    @define_mean_by("step_id", input_name="value")
    def policy_grad_norm(self, step_id: str | int, agent_id: int, value: float) -> None:
        """Norm of the gradient of a sub-step's network."""

    @define_mean_by("step_id", "subspace_name", input_name="value")
    def discrete_accuracy(self, step_id: str | int, agent_id: int, subspace_name: str, value: float) -> None:
        """Share of discrete actions that the policy finds most probable."""

    @define_mean_by("step_id", "subspace_name", input_name="value")
    def discrete_top_5_accuracy(self, step_id: str | int, agent_id: int, subspace_name: str, value: float) -> None:
        """Share of discrete actions among the policy's five most probable ones; where there are more than five."""

    @define_mean_by("step_id", "subspace_name", input_name="value")
    def discrete_top_10_accuracy(self, step_id: str | int, agent_id: int, subspace_name: str, value: float) -> None:
        """Share of discrete actions among the policy's ten most probable ones; where there are more than ten."""

    @define_mean_by("step_id", "subspace_name", input_name="value")
    def multi_binary_accuracy(self, step_id: str | int, agent_id: int, subspace_name: str, value: float) -> None:
        """Share of binary choices that the policy finds more probable."""

    @define_mean_by("step_id", "subspace_name", input_name="value")
    def box_mean_abs_deviation(self, step_id: str | int, agent_id: int, subspace_name: str, value: float) -> None:
        """Mean distance of continuous actions from the policy's."""
