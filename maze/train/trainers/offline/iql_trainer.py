"""Implicit Q-learning."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.train.trainers.common.learning import gradient_step
from maze.train.trainers.dqn.action_values import is_allowed
from maze.train.trainers.offline.logged_batches import DecisionBatch, TensorDict
from maze.train.trainers.offline.offline_algorithm_configs import IQLConfig
from maze.train.trainers.offline.offline_trainer import OfflineTrainer, joint_action_values, unscaled
from maze.train.utils.plain_state import Part

if TYPE_CHECKING:
    from maze.train.trainers.common.config_classes import AlgorithmConfig

_LARGEST_SCALED = 0.999
"""Logged actions are moved within this bound: at the bounds the inverse of tanh is infinite."""


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Asymmetric squared error `|expectile - 1(difference < 0)| * difference**2` (Kostrikov et al. 2021, eq. 5).

    :param difference: Action values minus state values, `[B]`.
    :return: The mean, `[]`.
    """
    return torch.where(difference < 0.0, 1.0 - expectile, expectile).mul(difference.square()).mean()


def advantage_weights(advantages: Tensor, inverse_temperature: float, max_weight: float) -> Tensor:
    """Weights `exp(inverse_temperature * advantage)` of the regression of the policy (eq. 7), limited, `[B]`."""
    return (inverse_temperature * advantages).exp().clamp(max=max_weight)


class StateValueNetwork(nn.Module):
    """State values of a sub-step: a copy of the policy network with a linear output over the logits of allowed actions.

    :param policy: The policy network.
    :param logits_shapes: Shape of the logits by head, without batch dimensions.
    """

    def __init__(self, policy: nn.Module, logits_shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.policy = copy.deepcopy(policy)
        self._heads = list(logits_shapes)
        self.value = nn.Linear(sum(math.prod(shape) for shape in logits_shapes.values()), 1)

    @override(nn.Module)
    def forward(self, observations: TensorDict) -> Tensor:
        """Values, `[B]`."""
        outputs = self.policy(observations)
        logits = torch.cat([outputs[head].flatten(1) for head in self._heads], -1)
        values: Tensor = self.value(logits.masked_fill(~is_allowed(logits), 0.0))
        return values.squeeze(-1)


class IQL(OfflineTrainer):
    """Implicit Q-learning (Kostrikov et al. 2021): no action that was not logged is evaluated.

    State values are an expectile of the action values of logged actions, action values learn from state values, and the
    policy is regressed on logged actions with weights by their advantages. Each sub-step has a state value.

    :param arguments: See :class:`~maze.train.trainers.offline.offline_trainer.OfflineTrainer`.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = IQLConfig
    config: IQLConfig

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._followers = self.critic.followers()
        mapper = self.model.distribution_mapper
        self.value_networks: dict[Any, nn.Module] = {}
        for actor in self.actors:
            shapes = {head: mapper.required_logits_shape(head) for head in self.action_spaces[actor.step_key].spaces}
            network = StateValueNetwork(self.model.network_for(actor), shapes).to(self.model.device)
            self.value_networks.setdefault(self.model.network_key(actor), network)
        self.optimizers["critic_optimizer"] = self._adam(
            {
                **{("critic_grad_norm", key): pair for key, pair in self.critic.networks.items()},
                **{("value_grad_norm", key): network for key, network in self.value_networks.items()},
            }
        )
        self.optimizers["policy_optimizer"] = self._policy_adam()

    @override(OfflineTrainer)
    def _learn_from(self, batches: Sequence[DecisionBatch]) -> None:
        config, losses = self.config, self._losses()
        logged_values = []
        for batch in batches:
            key, space = batch.actor.step_key, self.action_spaces[batch.actor.step_key]
            with torch.no_grad():
                logged = torch.minimum(
                    *joint_action_values(self.critic.target_networks[key], space, batch.observations, batch.actions)
                )
                target = batch.targets(self._value)
            logged_values.append(logged)
            value_loss = expectile_loss(logged - self._value(batch.actor, batch.observations), config.expectile)
            q_values = joint_action_values(self.critic.networks[key], space, batch.observations, batch.actions)
            critic_loss = mse_loss(q_values[0], target) + mse_loss(q_values[1], target)
            losses.add(value_loss)
            losses.add(critic_loss)
            losses.value_loss.append((key, value_loss))
            losses.critic_loss.append((key, critic_loss))
            losses.critic_value.append((key, logged.mean()))
        self.stats.add(losses, gradient_step(losses, self.optimizers["critic_optimizer"]))
        losses = self._losses()
        for batch, logged in zip(batches, logged_values, strict=True):
            key = batch.actor.step_key
            with torch.no_grad():
                advantages = logged - self._value(batch.actor, batch.observations)
            weights = advantage_weights(advantages, config.inverse_temperature, config.max_weight)
            output = self.model.compute_substep_policy_output(batch.observations, batch.actor)
            loss = -(weights * output.prob_dist.joint_log_prob(self._in_own_unit(batch))).mean()
            losses.add(loss)
            losses.policy_loss.append((key, loss))
            losses.advantage_weight.append((key, weights.mean()))
        self.stats.add(losses, gradient_step(losses, self.optimizers["policy_optimizer"]))
        self._followers.update(config.tau)

    def _value(self, actor: ActorID, observations: TensorDict) -> Tensor:
        values: Tensor = self.value_networks[self.model.network_key(actor)](observations)
        return values

    def _in_own_unit(self, batch: DecisionBatch) -> TensorDict:
        heads = self.action_spaces[batch.actor.step_key].spaces
        return {
            head: unscaled(space, batch.actions[head].clamp(-_LARGEST_SCALED, _LARGEST_SCALED))
            if isinstance(space := heads[head], spaces.Box)
            else batch.actions[head]
            for head in heads
        }

    @override(OfflineTrainer)
    def _parts(self) -> dict[str, Part]:
        return {"critic": self.critic, "values": nn.ModuleList(self.value_networks.values()), **super()._parts()}
