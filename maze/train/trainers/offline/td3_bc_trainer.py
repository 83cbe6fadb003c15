"""TD3 with behavioural cloning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import mse_loss

from maze.core.agent.networks import TargetNetworks
from maze.core.agent.torch_policy import InitialPolicy, TorchPolicy
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.train.trainers.common.learning import gradient_step
from maze.train.trainers.offline.logged_batches import DecisionBatch, TensorDict
from maze.train.trainers.offline.offline_algorithm_configs import TD3BCConfig
from maze.train.trainers.offline.offline_trainer import OfflineTrainer, joint_action_values, scaled
from maze.train.utils.plain_state import Part

if TYPE_CHECKING:
    from maze.train.trainers.common.config_classes import AlgorithmConfig


def policy_loss(values: Tensor, distances: Tensor, alpha: float) -> Tensor:
    """`distance - alpha * Q / mean(|Q|)` (Fujimoto and Gu 2021, eq. 3 to 5).

    :param values: Values of the policy's actions, `[B]`.
    :param distances: Mean squared distance of the policy's actions from the logged ones, `[]`.
    :param alpha: Weight of the values.
    :return: The mean, `[]`.
    """
    return distances - alpha * values.mean() / values.detach().abs().mean().clamp(min=1e-8)


class TD3BC(OfflineTrainer):
    """TD3 with behavioural cloning (Fujimoto and Gu 2021) for continuous actions: a deterministic policy maximises
    action values and stays close to the logged actions.

    The policy's deterministic actions are trained. Its standard deviations are not.

    :param arguments: See :class:`~maze.train.trainers.offline.offline_trainer.OfflineTrainer`.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = TD3BCConfig
    config: TD3BCConfig

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for actor in self.actors:
            for head, space in self.action_spaces[actor.step_key].spaces.items():
                if not isinstance(space, spaces.Box):
                    raise ConfigError(
                        f"env: action head `{head}` is {space}, but TD3+BC learns Box actions. Use algorithm=iql."
                    )
        self._target_policy = InitialPolicy(self.model).policy
        pairs = (*self.model.networks.values(), *self.critic.networks.values())
        targets = (*self._target_policy.networks.values(), *self.critic.target_networks.values())
        self._followers = TargetNetworks(targets, pairs)
        self._policy_parameters = self.model.parameters()
        self.optimizers["critic_optimizer"] = self._adam(
            {("critic_grad_norm", key): pair for key, pair in self.critic.networks.items()}
        )
        self.optimizers["policy_optimizer"] = self._policy_adam()

    @override(OfflineTrainer)
    def _learn_from(self, batches: Sequence[DecisionBatch]) -> None:
        losses = self._losses()
        for batch in batches:
            key = batch.actor.step_key
            with torch.no_grad():
                target = batch.targets(self._next_value)
            first, second = joint_action_values(
                self.critic.networks[key], self.action_spaces[key], batch.observations, batch.actions
            )
            loss = mse_loss(first, target) + mse_loss(second, target)
            losses.add(loss)
            losses.critic_loss.append((key, loss))
            losses.critic_value.append((key, first.mean()))
        self.stats.add(losses, gradient_step(losses, self.optimizers["critic_optimizer"]))
        if (self.n_updates + 1) % self.config.policy_delay:
            return
        losses = self._losses()
        for batch in batches:
            key = batch.actor.step_key
            actions = self._actions(self.model, batch.actor, batch.observations)
            values = joint_action_values(
                self.critic.networks[key][:1], self.action_spaces[key], batch.observations, actions
            )
            distance = torch.stack([mse_loss(taken, batch.actions[head]) for head, taken in actions.items()]).mean()
            loss = policy_loss(values[0], distance, self.config.alpha)
            losses.add(loss)
            losses.policy_loss.append((key, loss))
        norms = gradient_step(losses, self.optimizers["policy_optimizer"], inputs=self._policy_parameters)
        self.stats.add(losses, norms)
        self._followers.update(self.config.tau)

    def _next_value(self, actor: ActorID, observations: TensorDict) -> Tensor:
        config, key = self.config, actor.step_key
        actions = {}
        for head, chosen in self._actions(self._target_policy, actor, observations).items():
            noise = torch.randn(chosen.shape, generator=self.generator).to(chosen) * config.target_noise
            actions[head] = (chosen + noise.clamp(-config.target_noise_clip, config.target_noise_clip)).clamp(-1.0, 1.0)
        pair = self.critic.target_networks[key]
        return torch.minimum(*joint_action_values(pair, self.action_spaces[key], observations, actions))

    def _actions(self, policy: TorchPolicy, actor: ActorID, observations: TensorDict) -> TensorDict:
        """Deterministic actions, scaled to [-1, 1]."""
        heads: Any = self.action_spaces[actor.step_key].spaces
        chosen = policy.compute_substep_policy_output(observations, actor).prob_dist.deterministic_sample()
        return {head: scaled(space, chosen[head]) for head, space in heads.items()}

    @override(OfflineTrainer)
    def _parts(self) -> dict[str, Part]:
        return {"critic": self.critic, "targets": self._followers, **super()._parts()}
