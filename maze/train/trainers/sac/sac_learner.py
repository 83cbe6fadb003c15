"""One gradient step of SAC after another, from batches of transitions."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import NonFiniteError
from maze.train.trainers.common.actor_critic.flat_adam import FlatAdam
from maze.train.trainers.common.actor_critic.non_finite import describe_non_finite
from maze.train.trainers.common.initial_policy import InitialPolicy
from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch
from maze.train.trainers.sac.action_draws import ActionDraw
from maze.train.trainers.sac.critic_targets import critic_targets
from maze.train.trainers.sac.entropy_coefs import EntropyCoefs
from maze.train.trainers.sac.losses import critic_loss, entropy_coef_loss, mean_of, polyak_update
from maze.train.trainers.sac.policy_losses import policy_losses
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from maze.train.trainers.sac.sac_networks import SACNetworks
from maze.train.trainers.sac.substep_rows import acted, known_observations
from maze.train.trainers.sac.target_entropy import target_entropy

Key = Any
Term = tuple[str, Key, Tensor]
"""Event of ``SACEvents``, sub-step or critic, value."""


class SACLearner:
    """Updates the networks of an actor-critic.

    :param model: Policy and state-action critic, on their device.
    :param config: Hyperparameters.
    :param actors: The actors of an environment step, in their order.
    :param seed: Seed of the actions drawn for learning.
    """

    def __init__(self, model: TorchActorCritic, config: SACAlgorithmConfig, actors: list[ActorID], seed: int) -> None:
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
        self._targets_and_sources = self._polyak_pairs()
        self._policy_parameters = [p for p in model.policy.parameters() if p.requires_grad]
        self._alphas = self.entropy_coefs.alphas()
        self.n_batches = 0
        """Number of batches learned from."""
        self.initial_policy: InitialPolicy | None = None
        """What the policy has to stay close to."""
        self.seconds_of_losses = 0.0
        self.seconds_of_gradients = 0.0

    # -- one batch -------------------------------------------------------------------------------------

    def update(self, batch: TransitionBatch, critic_alone: bool = False, kl_coef: float = 0.0) -> list[Term]:
        """Learns from a batch.

        :param batch: Transitions, on the model's device.
        :param critic_alone: Leave policy and entropy coefficients as they are.
        :param kl_coef: Weight of the policy's divergence from the initial one.
        :return: Values of :class:`~maze.train.trainers.sac.sac_events.SACEvents`.
        :raises NonFiniteError: A loss or a gradient is not finite; the step that it belongs to was not taken.
        """
        start = time.perf_counter()
        draws = [
            self.networks.draw(position, known_observations(batch, position)) for position in range(len(self.actors))
        ]
        terms, total = self._critic_terms(batch, draws)
        losses_done = time.perf_counter()
        self.seconds_of_losses += losses_done - start
        self.seconds_of_gradients -= losses_done
        if self.critic_optimizer.names:
            self.critic_optimizer.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            terms += self._step(self.critic_optimizer, terms, total)
        if not critic_alone:
            terms += self._learn_policy(batch, draws, kl_coef)
        self.n_batches += 1
        if self.n_batches % self.config.target_update_interval == 0:
            polyak_update(*self._targets_and_sources, self.config.tau)
        self.seconds_of_gradients += time.perf_counter()
        return terms

    def _critic_terms(self, batch: TransitionBatch, draws: list[ActionDraw]) -> tuple[list[Term], Tensor]:
        terms: list[Term] = []
        losses: list[Tensor] = []
        for of_critic in critic_targets(self.networks, batch, draws, self._alphas, self.config.gamma):
            loss = critic_loss(of_critic.q_values, of_critic.target, of_critic.weight)
            losses.append(loss)
            weight = of_critic.weight
            if not _counts(weight):
                continue
            first, second = (q_value.detach() for q_value in of_critic.q_values)
            terms += [
                ("critic_value_loss", of_critic.key, loss),
                ("critic_value", of_critic.key, mean_of(torch.minimum(first, second), weight)),
                ("errors_between_critics", of_critic.key, mean_of((first - second).abs(), weight)),
            ]
        return terms, _total(losses)

    def _learn_policy(self, batch: TransitionBatch, draws: list[ActionDraw], kl_coef: float) -> list[Term]:
        """Policy and entropy coefficients learn from the same draws; neither has a part in the other's loss."""
        start = time.perf_counter()
        terms, total = self._policy_terms(batch, draws)
        if self.initial_policy is not None:
            for position, draw in enumerate(draws):
                divergence = self._divergence(self.initial_policy, batch, draw, position)
                if _counts(acted(batch, position)):
                    terms.append(("policy_kl_to_initial", self.actors[position].step_key, divergence))
                total = torch.add(total, divergence, alpha=kl_coef)
        learned = self._policy_parameters  # naming them spares the gradients of the critics
        if self.config.entropy_tuning:
            entropy_losses = self._entropy_losses(batch, draws)
            terms += [("entropy_loss", key, loss) for key, loss in entropy_losses.items()]
            total = total + _total(list(entropy_losses.values()))
            learned = [*learned, *self.entropy_coefs.logs]
        losses_done = time.perf_counter()
        self.seconds_of_losses += losses_done - start
        self.seconds_of_gradients -= losses_done - start
        self.policy_optimizer.zero_grad()
        self.entropy_optimizer.zero_grad()
        if learned:
            total.backward(inputs=learned)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self.policy_optimizer.names:
            terms += self._step(self.policy_optimizer, terms, total)
        if self.config.entropy_tuning:
            self.entropy_optimizer.step()
            self._alphas = self.entropy_coefs.alphas()
        terms += [("entropy_coef", key, alpha) for key, alpha in self._alphas.items()]
        return terms

    def _policy_terms(self, batch: TransitionBatch, draws: list[ActionDraw]) -> tuple[list[Term], Tensor]:
        terms: list[Term] = []
        losses: list[Tensor] = []
        for position, loss in policy_losses(self.networks, batch, draws, self._alphas):
            losses.append(loss)
            key, weight = self.actors[position].step_key, acted(batch, position)
            if not _counts(weight):
                continue
            log_prob = mean_of(draws[position].expected_log_prob.detach(), weight)
            terms += [
                ("policy_loss", key, loss),
                ("policy_entropy", key, -log_prob),
                ("policy_mean_logp", key, log_prob),
            ]
        return terms, _total(losses)

    def _divergence(
        self, initial_policy: InitialPolicy, batch: TransitionBatch, draw: ActionDraw, position: int
    ) -> Tensor:
        current = self.model.policy.distribution_mapper.logits_dict_to_distribution(draw.logits, 1.0)
        divergence = initial_policy.divergence(current, known_observations(batch, position), self.actors[position])
        return mean_of(divergence, acted(batch, position))

    def _entropy_losses(self, batch: TransitionBatch, draws: list[ActionDraw]) -> dict[Key, Tensor]:
        losses: dict[Key, Tensor] = {}
        for position, (actor, draw) in enumerate(zip(self.actors, draws, strict=True)):
            key, target = actor.step_key, self._constant_targets[position]
            if target is None:
                space = self.networks.spaces[position]
                target = target_entropy(space, draw.logits, self.config.target_entropy_multiplier)
            log_alpha, weight = self.entropy_coefs.log_alpha(key), acted(batch, position)
            loss = entropy_coef_loss(log_alpha, draw.expected_log_prob, target, weight)
            losses[key] = losses[key] + loss if key in losses else loss
        return losses

    def _step(self, optimizer: FlatAdam, terms: list[Term], total: Tensor) -> list[Term]:
        """Follows the gradient, unless anything in it is not finite."""
        norms = optimizer.gradient_norms()
        values = list(norms.values())
        norm = values[0] if len(values) == 1 else torch.linalg.vector_norm(torch.stack(values))
        size, loss = torch.stack([norm, total.detach()]).tolist()
        if not (math.isfinite(size) and math.isfinite(loss)):
            raise NonFiniteError(describe_non_finite([term for term in terms if term[0].endswith("loss")], norms))
        if 0.0 < self.config.max_grad_norm < size:
            optimizer.scale_gradients(self.config.max_grad_norm / size)
        optimizer.step()
        return [(event, key[0] if isinstance(key, tuple) else key, value) for (event, key), value in norms.items()]

    def _polyak_pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors of the target networks and those that they follow."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for key, pair in self.critic.networks.items():
            targets += self.critic.target_networks[key].parameters()
            sources += pair.parameters()
            # running statistics follow like weights; counters cannot
            targets += [buffer for buffer in self.critic.target_networks[key].buffers() if buffer.is_floating_point()]
            sources += [buffer for buffer in pair.buffers() if buffer.is_floating_point()]
        return targets, sources

    # -- state -----------------------------------------------------------------------------------------

    def tie(self) -> None:
        """Keeps parameters where the optimizers expect them, whoever has moved them meanwhile."""
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
        """Continues from a state that :meth:`state_dict` returned."""
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
    """Whether any row does; a mean over none is no number to report."""
    return weight is None or bool(weight.any())


def _total(losses: list[Tensor]) -> Tensor:
    return sum(losses[1:], losses[0])
