"""Conservative Q-learning for discrete actions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from maze.core.agent.networks import TargetNetworks
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.train.trainers.common.learning import gradient_step
from maze.train.trainers.dqn.action_values import ActionValueNetwork, best_value, factors_of, values_of
from maze.train.trainers.offline.logged_batches import DecisionBatch, TensorDict
from maze.train.trainers.offline.offline_algorithm_configs import CQLConfig
from maze.train.trainers.offline.offline_trainer import OfflineTrainer
from maze.train.utils.plain_state import Part

if TYPE_CHECKING:
    from maze.train.trainers.common.config_classes import AlgorithmConfig


def conservative_loss(values: Sequence[Tensor], taken: Tensor) -> Tensor:
    """Log-sum-exp of the values of the allowed actions minus the value of the logged one (Kumar et al. 2020, eq. 4).

    :param values: Values of all actions of each factor, `[B, n]`; those of masked actions are at the minimum.
    :param taken: Values of the logged actions, `[B, n_factors]`.
    :return: The mean, `[]`.
    """
    return (torch.stack([of_factor.logsumexp(-1) for of_factor in values], -1) - taken).mean()


class CQL(OfflineTrainer):
    """Conservative Q-learning (Kumar et al. 2020) with double Q-learning targets, for discrete actions.

    The logits of the policy are the values of its actions, as in DQN without duelling heads. Actions of several choices
    are factored (Tavakoli et al. 2018). Masked actions are in no maximum and in no log-sum-exp.

    :param arguments: See :class:`~maze.train.trainers.offline.offline_trainer.OfflineTrainer`.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = CQLConfig
    config: CQLConfig

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        policy, networks = self.model, {}
        for actor in self.actors:
            factors = factors_of(self.action_spaces[actor.step_key])
            networks[policy.network_key(actor)] = ActionValueNetwork(policy.network_for(actor), None, factors)
        targets = {key: copy.deepcopy(network).requires_grad_(False) for key, network in networks.items()}
        self._networks = {actor: networks[policy.network_key(actor)] for actor in self.actors}
        self._targets = {actor: targets[policy.network_key(actor)] for actor in self.actors}
        self._followers = TargetNetworks(targets.values(), networks.values())
        self.optimizers["optimizer"] = self._policy_adam()

    @override(OfflineTrainer)
    def _learn_from(self, batches: Sequence[DecisionBatch]) -> None:
        losses = self._losses()
        for batch in batches:
            network, key = self._networks[batch.actor], batch.actor.step_key
            with torch.no_grad():
                target = batch.targets(self._best_value)
            values = network(batch.observations)
            taken = values_of(values, [factor.of(batch.actions) for factor in network.factors])
            loss = smooth_l1_loss(taken, target.unsqueeze(-1).expand_as(taken))
            conservative = conservative_loss(values, taken)
            losses.add(loss)
            losses.add(conservative, self.config.alpha)
            losses.critic_loss.append((key, loss))
            losses.conservative_loss.append((key, conservative))
            losses.critic_value.append((key, taken.mean()))
        self.stats.add(losses, gradient_step(losses, self.optimizers["optimizer"]))
        if (self.n_updates + 1) % self.config.target_update_interval == 0:
            self._followers.update(self.config.tau)

    def _best_value(self, actor: ActorID, observations: TensorDict) -> Tensor:
        return best_value(self._networks[actor](observations), self._targets[actor](observations))

    @override(OfflineTrainer)
    def _parts(self) -> dict[str, Part]:
        return {**super()._parts(), "targets": self._followers}
