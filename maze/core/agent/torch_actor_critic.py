"""A policy and a critic as one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from maze.core.agent.policy import Policy
from maze.core.agent.state_critic_input_output import StateCriticInput, StateCriticOutput, StateCriticStepInput
from maze.core.agent.torch_model import TorchModel, check_network_weights
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_policy_output import PolicyOutput
from maze.core.agent.torch_state_action_critic import TorchStateActionCritic
from maze.core.agent.torch_state_critic import TorchStateCritic
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.perception.blocks.recurrent.recurrent_cell import Run


class ModelRuns(NamedTuple):
    """Sources of the hidden states of a recurrent model by sub-step; a shared critic has one entry."""

    policy: Sequence[Run]
    critic: Sequence[Run]


class TorchActorCritic(TorchModel):
    """Join a policy and a critic, which may share modules.

    :param policy: The policy.
    :param critic: Its critic, of states or of state-action pairs.
    :param device: Device of both.
    """

    def __init__(self, policy: TorchPolicy, critic: TorchStateCritic | TorchStateActionCritic, device: str) -> None:
        super().__init__(device)
        self.policy = policy
        self.critic = critic
        self.is_recurrent = policy.is_recurrent or critic.is_recurrent
        # By key of the policy's network.
        self._shares_embeddings: dict[Any, bool] = {}
        for part in (policy, critic):
            if part.device != self._device:
                part.to(self._device)

    @property
    @override(TorchModel)
    def trained_networks(self) -> list[nn.Module]:
        return [*self.policy.trained_networks, *self.critic.trained_networks]

    @override(TorchModel)
    def to(self, device: str) -> None:
        self.policy.to(device)
        self._device = self.policy.device
        self.critic.to(device)

    @override(TorchModel)
    def state_dict(self) -> dict[str, Any]:
        """Return weights of the policy and of the critic, side by side."""
        return {**self.policy.state_dict(), **self.critic.state_dict()}

    @override(TorchModel)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_network_weights(self.policy.networks, state_dict, TorchPolicy.state_group)
        self.critic.load_state_dict(state_dict)  # changes nothing unless it fits
        self.policy.load_state_dict(state_dict)

    def compute_actor_critic_output(
        self, record: StructuredSpacesRecord, temperature: float = 1.0, runs: ModelRuns | None = None
    ) -> tuple[PolicyOutput, StateCriticOutput]:
        """Return outputs of policy and critic for all sub-steps of a record; shared embeddings are computed once.

        :param record: Observations are tensors (or arrays), with any leading batch dimensions the networks take.
        :param temperature: See :meth:`TorchPolicy.compute_substep_policy_output`.
        :param runs: Sources of the hidden states; required by recurrent models.
        :raises ConfigError: The critic is a state-action critic.
        """
        return self.evaluate(record.substep_records, temperature, runs)

    def evaluate(
        self, substeps: Sequence[Any], temperature: float = 1.0, runs: ModelRuns | None = None
    ) -> tuple[PolicyOutput, StateCriticOutput]:
        """Compute the outputs of policy and critic for the sub-steps of environment steps.

        :param substeps: Records or rows with the observations and the actor of each sub-step, in their order.
        :param temperature: See :meth:`TorchPolicy.compute_substep_policy_output`.
        :param runs: Sources of the hidden states; required by recurrent models.
        :raises ConfigError: The critic is a state-action critic.
        """
        critic = self.state_critic
        policy_output = self.policy.evaluate(substeps, temperature, None if runs is None else runs.policy)
        for output in policy_output:
            self._shares_embeddings[self.policy.network_key(output.actor_id)] = bool(output.embedding_logits)
        critic_input = StateCriticInput.of_substeps(policy_output, substeps, () if runs is None else runs.critic)
        return policy_output, critic.predict_values(critic_input)

    def evaluate_critic(self, substeps: Sequence[Any]) -> StateCriticOutput:
        """Compute the outputs of the critic, and of the policy only where they share embeddings.

        :param substeps: As for :meth:`evaluate`; the model is not recurrent.
        """
        if any(self._shares_embeddings.get(self.policy.network_key(each.actor_id), True) for each in substeps):
            return self.evaluate(substeps)[1]
        items = [StateCriticStepInput(each.observation, each.actor_id) for each in substeps]
        return self.state_critic.predict_values(StateCriticInput(items))

    def bootstrap_values(
        self,
        observation: Mapping[str, Any],
        actor_id: ActorID,
        known: Sequence[Mapping[str, Any]] = (),
        position: int = 0,
        runs: ModelRuns | None = None,
    ) -> torch.Tensor:
        """Return values, without gradients, of observations after which nothing is recorded.

        See :meth:`TorchStateCritic.bootstrap_values`; embeddings that the critic shares are computed by the policy.

        :param runs: Sources of the hidden states; required by recurrent models.
        :return: `[batch]`.
        """
        critic = self.state_critic
        of_policy, of_critic = (None, None) if runs is None else (runs.policy[0], runs.critic[0])
        with torch.no_grad():
            if self._shares_embeddings.get(self.policy.network_key(actor_id), True):
                output = self.policy.compute_substep_policy_output(observation, actor_id, run=of_policy)
                observation = {**observation, **(output.embedding_logits or {})}
            return critic.bootstrap_values(observation, actor_id, known, position, of_critic)

    @property
    def state_critic(self) -> TorchStateCritic:
        """The critic, if it is one of states.

        :raises ConfigError: It is a state-action critic.
        """
        if isinstance(self.critic, TorchStateActionCritic):
            raise ConfigError(
                "model.critic: state values were requested, but this is a state-action critic. Choose a state critic, "
                "e.g. `critic=template_state` or `critic=flatten_concat_shared`."
            )
        return self.critic


def policy_of(model: TorchModel) -> TorchPolicy:
    """Return the policy in a model that is trained; with evolution strategies, any policy with parameters.

    :raises ConfigError: There is none.
    """
    if isinstance(model, TorchActorCritic):
        return model.policy
    if isinstance(model, Policy):
        return cast("TorchPolicy", model)
    raise ConfigError(f"model: expected a policy or an actor-critic to train, found a {type(model).__name__}.")
