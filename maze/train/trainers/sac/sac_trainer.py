"""Soft actor-critic (Haarnoja et al. 2018), with a replay buffer that may start with demonstrations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import InitialPolicy
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.learning import Key, Losses, Name, Terms, gradient_step, mean_of
from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch
from maze.train.trainers.common.replay_trainer import ReplayTrainer
from maze.train.trainers.sac.objectives import (
    ActionDraw,
    SACNetworks,
    critic_loss,
    critic_targets,
    entropy_coef_loss,
    policy_losses,
    target_entropy,
)
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from maze.train.trainers.sac.sac_events import SACEvents
from maze.train.utils.plain_state import Part

if TYPE_CHECKING:
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection


@dataclass
class CriticLosses(Losses):
    """Losses of the critics, by critic."""

    critic_value_loss: Terms = field(default_factory=list)
    critic_value: Terms = field(default_factory=list)
    errors_between_critics: Terms = field(default_factory=list)


@dataclass
class PolicyLosses(Losses):
    """Losses of policy and entropy coefficients, by sub-step."""

    policy_loss: Terms = field(default_factory=list)
    policy_entropy: Terms = field(default_factory=list)
    policy_mean_logp: Terms = field(default_factory=list)
    policy_kl_to_initial: Terms = field(default_factory=list)
    entropy_loss: Terms = field(default_factory=list)
    entropy_coef: Terms = field(default_factory=list)


Report = list[tuple[Losses, dict[Name, Tensor]]]
"""Losses and gradient norms of the steps that a batch led to."""


class EntropyCoefs(nn.Module):
    """Logarithms of the entropy coefficients, one for each sub-step key.

    :param keys: The sub-step keys.
    :param initial: Where all of them start.
    """

    def __init__(self, keys: list[Key], initial: float) -> None:
        super().__init__()
        log = math.log(initial) if initial > 0.0 else -math.inf
        self.logs = nn.ParameterList([nn.Parameter(torch.tensor(log)) for _ in keys])
        self._by_key: dict[Key, Tensor] = dict(zip(keys, self.logs, strict=True))

    def alphas(self) -> dict[Key, Tensor]:
        """Return the coefficients themselves, without gradients.

        :return: Scalars `[]`.
        """
        return {key: log.detach().exp() for key, log in self._by_key.items()}

    def log_alpha(self, key: Key) -> Tensor:
        """Return one logarithm, with its gradient.

        :return: A scalar `[]`.
        """
        return self._by_key[key]


class SACLearner:
    """Updates the networks of an actor-critic.

    :param model: Policy and state-action critic, on their device.
    :param config: Hyperparameters.
    :param actors: The actors of an environment step, in their order.
    :param seed: Seed of the actions drawn for learning; `None` draws one from torch's global generator.
    """

    def __init__(
        self, model: TorchActorCritic, config: SACAlgorithmConfig, actors: list[ActorID], seed: int | None
    ) -> None:
        self.networks = networks = SACNetworks(model, actors, seed)
        self.model = model
        self.config = config
        self.critic = networks.critic
        self.actors = actors
        adam = {"lr": config.lr, "eps": config.optimizer_eps}
        self.policy_optimizer = FlatAdam(
            {("policy_grad_norm", key): network for key, network in model.policy.networks.items()}, **adam
        )
        self.critic_optimizer = FlatAdam(
            {("critic_grad_norm", key): pair for key, pair in self.critic.networks.items()}, **adam
        )
        self.entropy_coefs = EntropyCoefs(networks.step_keys, config.entropy_coef).to(model.device)
        self.entropy_optimizer = FlatAdam(
            {"entropy": self.entropy_coefs}, lr=config.entropy_coef_lr, eps=config.optimizer_eps
        )
        self._constant_targets = [
            target_entropy(space, {}, config.target_entropy_multiplier)
            if all(isinstance(head, spaces.Box) for head in space.spaces.values())
            else None
            for space in networks.spaces
        ]
        self._targets = self.critic.followers()
        self._policy_parameters = [p for p in model.policy.parameters() if p.requires_grad]
        self._alphas = self.entropy_coefs.alphas()
        self.n_batches = 0
        """Number of batches learned from."""
        self.seconds_of_losses = 0.0
        self.seconds_of_gradients = 0.0

    # -- one batch -------------------------------------------------------------------------------------

    def update(
        self,
        batch: TransitionBatch,
        critic_alone: bool = False,
        initial_policy: InitialPolicy | None = None,
        kl_coef: float = 0.0,
    ) -> Report:
        """Learn from a batch.

        :param batch: Transitions, on the model's device.
        :param critic_alone: Leave policy and entropy coefficients as they are.
        :param initial_policy: Policy that the policy has to stay close to; `None`: none.
        :param kl_coef: Weight of the policy's divergence from it.
        :return: The losses, to be reported.
        :raises NonFiniteError: A loss or a gradient is not finite; the step that it belongs to was not taken.
        """
        start = time.perf_counter()
        draws = [self.networks.draw(position, batch.observations[position]) for position in range(len(self.actors))]
        losses: Losses = self._critic_losses(batch, draws)
        report = [(losses, self._timed_step(start, losses, self.critic_optimizer))]
        if not critic_alone:
            start = time.perf_counter()
            losses = self._policy_losses(batch, draws, initial_policy, kl_coef)
            report.append((losses, self._learn_policy(start, losses)))
        start = time.perf_counter()
        self.n_batches += 1
        if self.n_batches % self.config.target_update_interval == 0:
            self._targets.update(self.config.tau)
        self.seconds_of_gradients += time.perf_counter() - start
        return report

    def _critic_losses(self, batch: TransitionBatch, draws: list[ActionDraw]) -> CriticLosses:
        losses = CriticLosses(torch.zeros((), device=self.model.device))
        for of_critic in critic_targets(self.networks, batch, draws, self._alphas, self.config.gamma):
            key, weight = of_critic.key, of_critic.weight
            loss = critic_loss(of_critic.q_values, of_critic.target, weight)
            losses.add(loss)
            if _counts(weight):
                first, second = (q_value.detach() for q_value in of_critic.q_values)
                losses.critic_value_loss.append((key, loss))
                losses.critic_value.append((key, mean_of(torch.minimum(first, second), weight)))
                losses.errors_between_critics.append((key, mean_of((first - second).abs(), weight)))
        return losses

    def _policy_losses(
        self, batch: TransitionBatch, draws: list[ActionDraw], initial_policy: InitialPolicy | None, kl_coef: float
    ) -> PolicyLosses:
        """Policy and entropy coefficients learn from the same draws; neither has a part in the other's loss."""
        losses = PolicyLosses(torch.zeros((), device=self.model.device))
        for position, loss in policy_losses(self.networks, batch, draws, self._alphas):
            losses.add(loss)
            key, weight = self.actors[position].step_key, batch.acted(position)
            if _counts(weight):
                log_prob = mean_of(draws[position].expected_log_prob.detach(), weight)
                losses.policy_loss.append((key, loss))
                losses.policy_entropy.append((key, -log_prob))
                losses.policy_mean_logp.append((key, log_prob))
        if initial_policy is not None:
            for position, draw in enumerate(draws):
                divergence = self._divergence(initial_policy, batch, draw, position)
                losses.add(divergence, kl_coef)
                if _counts(batch.acted(position)):
                    losses.policy_kl_to_initial.append((self.actors[position].step_key, divergence))
        if self.config.entropy_tuning:
            losses.entropy_loss = list(self._entropy_losses(batch, draws).items())
            losses.add(_total([loss for _, loss in losses.entropy_loss]))
        return losses

    def _learn_policy(self, start: float, losses: PolicyLosses) -> dict[Name, Tensor]:
        learned = self._policy_parameters  # naming them spares the gradients of the critics
        if self.config.entropy_tuning:
            learned = [*learned, *self.entropy_coefs.logs]
            self.entropy_optimizer.zero_grad()
        norms = self._timed_step(start, losses, self.policy_optimizer, learned)
        if self.config.entropy_tuning:
            self.entropy_optimizer.step()
            self._alphas = self.entropy_coefs.alphas()
        losses.entropy_coef = list(self._alphas.items())
        return norms

    def _timed_step(
        self, start: float, losses: Losses, optimizer: FlatAdam, inputs: list[Tensor] | None = None
    ) -> dict[Name, Tensor]:
        """Take a gradient step.

        :param start: When the computation of the losses began.
        """
        losses_done = time.perf_counter()
        norms = gradient_step(losses, optimizer, self.config.max_grad_norm, inputs=inputs)
        self.seconds_of_losses += losses_done - start
        self.seconds_of_gradients += time.perf_counter() - losses_done
        return norms

    def _divergence(
        self, initial_policy: InitialPolicy, batch: TransitionBatch, draw: ActionDraw, position: int
    ) -> Tensor:
        current = self.model.policy.distribution_mapper.logits_dict_to_distribution(draw.logits, 1.0)
        divergence = initial_policy.divergence(current, batch.observations[position], self.actors[position])
        return mean_of(divergence, batch.acted(position))

    def _entropy_losses(self, batch: TransitionBatch, draws: list[ActionDraw]) -> dict[Key, Tensor]:
        losses: dict[Key, Tensor] = {}
        for position, (actor, draw) in enumerate(zip(self.actors, draws, strict=True)):
            key, target = actor.step_key, self._constant_targets[position]
            if target is None:
                space = self.networks.spaces[position]
                target = target_entropy(space, draw.logits, self.config.target_entropy_multiplier)
            log_alpha, weight = self.entropy_coefs.log_alpha(key), batch.acted(position)
            loss = entropy_coef_loss(log_alpha, draw.expected_log_prob, target, weight)
            losses[key] = losses[key] + loss if key in losses else loss
        return losses

    # -- state -----------------------------------------------------------------------------------------

    def tie(self) -> None:
        """Move parameters back into the memory of the optimizers."""
        for optimizer in (self.policy_optimizer, self.critic_optimizer, self.entropy_optimizer):
            optimizer.tie()

    def state_dict(self) -> dict[str, Any]:
        """Optimizers, entropy coefficients, generator and progress; the model's weights are not in it."""
        return {
            "policy_optimizer": self.policy_optimizer.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "entropy_optimizer": self.entropy_optimizer.state_dict(),
            "entropy_coefs": [log.item() for log in self.entropy_coefs.logs],
            "generator": self.networks.generator.get_state(),
            "n_batches": self.n_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self.policy_optimizer.load_state_dict(state["policy_optimizer"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.entropy_optimizer.load_state_dict(state["entropy_optimizer"])
        with torch.no_grad():
            for log, value in zip(self.entropy_coefs.logs, state["entropy_coefs"], strict=True):
                log.fill_(value)
        self._alphas = self.entropy_coefs.alphas()
        self.networks.generator.set_state(state["generator"])
        self.n_batches = state["n_batches"]


def _counts(weight: Tensor | None) -> bool:
    """Return whether any row does; a mean over none is no number to report."""
    return weight is None or bool(weight.any())


def _total(losses: list[Tensor]) -> Tensor:
    return sum(losses[1:], losses[0])


class SAC(ReplayTrainer):
    """Collects transitions into a replay buffer and learns from batches of it.

    :param algorithm_config: Hyperparameters.
    :param learner_model: Policy and state-action critic.
    :param distributed_actors: Collect transitions into a buffer; it has been filled to begin with.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param evaluator: Evaluates the policy between epochs; `None`: the model is judged by the training episodes.
    :param seed: Seed of the actions drawn for learning; `None` draws one from torch's global generator.
    :param checkpoint_file: File of the state, written after each epoch; `None`: none.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = SACAlgorithmConfig
    events_class: ClassVar[type[Any]] = SACEvents
    config: SACAlgorithmConfig
    model: TorchActorCritic

    def __init__(
        self,
        algorithm_config: Any,
        learner_model: TorchActorCritic,
        distributed_actors: BaseDistributedWorkersWithBuffer,
        model_selection: BestModelSelection | None,
        evaluator: Evaluator | None,
        *,
        seed: int | None = None,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        super().__init__(
            algorithm_config,
            learner_model,
            distributed_actors,
            seed=seed,
            evaluator=evaluator,
            model_selection=model_selection,
            checkpoint_file=checkpoint_file,
        )
        self.learner = SACLearner(learner_model, self.config, distributed_actors.actors, seed)

    @override(ReplayTrainer)
    def _begin_training(self, n_epochs: int) -> None:
        super()._begin_training(n_epochs)
        self.learner.tie()

    @override(ReplayTrainer)
    def _update(self) -> None:
        self.learner.seconds_of_losses = self.learner.seconds_of_gradients = 0.0
        super()._update()
        self.stats.add_time("time_loss_computation", self.learner.seconds_of_losses)
        self.stats.add_time("time_backprob", self.learner.seconds_of_gradients)

    @override(ReplayTrainer)
    def _learn_from(self, batch: TransitionBatch) -> None:
        steps = self.learner.update(batch, self._critic_learns_alone, self._initial_policy, self._kl_to_initial_coef)
        for losses, norms in steps:
            self.stats.add(losses, norms)

    @override(ReplayTrainer)
    def _parts(self) -> dict[str, Part]:
        return {**super()._parts(), "learner": self.learner}
