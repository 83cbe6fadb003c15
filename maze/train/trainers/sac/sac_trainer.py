"""Soft actor-critic (Haarnoja et al. 2018), with a replay buffer that may start with demonstrations.

With a step critic, the value of a sub-step is its reward plus the value of the next sub-step of the same environment
step, undiscounted; the last one is followed by the discounted value of the next environment step. A shared critic
values environment steps as a whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn

from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import InitialPolicy
from maze.core.agent.torch_state_action_critic import TorchSharedStateActionCritic, TorchStateActionCritic
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.utils.seeding import seeded_generator
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.learning import Key, Losses, Name, Terms, gradient_step, mean_of
from maze.train.trainers.common.replay_buffer.transitions import TensorDict, TransitionBatch
from maze.train.trainers.common.replay_trainer import ReplayTrainer
from maze.train.trainers.sac.objectives import (
    ActionDraw,
    check_distributions,
    choice_values,
    continuous_policy_loss,
    critic_loss,
    discrete_policy_loss,
    draw_actions,
    entropy_coef_loss,
    soft_bellman_target,
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


class CriticTarget(NamedTuple):
    """Values of one output of a critic, and their target."""

    key: Key
    q_values: list[Tensor]
    """`[B]` by each of its networks, with gradients."""
    target: Tensor
    weight: Tensor | None
    """0 or 1: which rows count; None: all of them."""


Report = list[tuple[Losses, dict[Name, Tensor]]]
"""Losses and gradient norms of the steps that a batch led to."""


class SACLearner:
    """Update the networks of an actor-critic whose actors act in a fixed order.

    :param model: Policy and state-action critic, on their device.
    :param config: Hyperparameters.
    :param actors: The actors of an environment step, in their order.
    :param seed: Seed of the actions drawn for learning; `None` draws one from torch's global generator.
    :raises ConfigError: The critic is none of state-action values, or does not fit the actors.
    """

    def __init__(
        self, model: TorchActorCritic, config: SACAlgorithmConfig, actors: list[ActorID], seed: int | None
    ) -> None:
        if not isinstance(model.critic, TorchStateActionCritic):
            raise ConfigError(
                f"model.critic: SAC needs a state-action critic, found a {type(model.critic).__name__}. Choose one "
                "with `critic=flatten_concat_state_action` or `critic=template_state_action`."
            )
        self.model, self.config, self.actors = model, config, actors
        self.critic: TorchStateActionCritic = model.critic
        self.step_keys = list(dict.fromkeys(actor.step_key for actor in actors))
        self.is_shared = isinstance(self.critic, TorchSharedStateActionCritic)
        if self.is_shared and len(self.step_keys) < len(actors):
            raise ConfigError(
                f"model.critic: a shared state-action critic distinguishes actors by their step keys, but some of "
                f"{actors} have the same. Use maze.perception.models.critics.StateActionCriticComposer."
            )
        self.spaces = [self.critic.action_spaces_dict[actor.step_key] for actor in actors]
        for space in self.spaces:
            check_distributions(space, model.policy.distribution_mapper)
        shared_key = next(iter(self.critic.networks))
        self._critic_keys: list[Key] = [shared_key if self.is_shared else actor.step_key for actor in actors]
        """The critic of each actor."""
        self._all_discrete = [self.critic.only_discrete_spaces[key] for key in self._critic_keys]
        self.generator = seeded_generator(seed, model.device)
        policies = {("policy_grad_norm", key): network for key, network in model.policy.networks.items()}
        critics = {("critic_grad_norm", key): pair for key, pair in self.critic.networks.items()}
        self.policy_optimizer = FlatAdam(policies, lr=config.lr, eps=config.optimizer_eps)
        self.critic_optimizer = FlatAdam(critics, lr=config.lr, eps=config.optimizer_eps)
        log_alpha = math.log(config.entropy_coef) if config.entropy_coef > 0.0 else -math.inf
        self.log_alphas = nn.ParameterList([nn.Parameter(torch.tensor(log_alpha)) for _ in self.step_keys])
        """Logarithms of the entropy coefficients by sub-step key."""
        self.log_alphas.to(model.device)
        self.entropy_optimizer = FlatAdam(
            {"entropy": self.log_alphas}, lr=config.entropy_coef_lr, eps=config.optimizer_eps
        )
        self._constant_targets = [
            target_entropy(space, {}, config.target_entropy_multiplier)
            if all(isinstance(head, spaces.Box) for head in space.spaces.values())
            else None
            for space in self.spaces
        ]
        self._targets = self.critic.followers()
        self._policy_parameters = [p for p in model.policy.parameters() if p.requires_grad]
        self._alphas = self.alphas()
        self.n_batches = 0
        """Number of batches learned from."""
        self.seconds_of_losses = self.seconds_of_gradients = 0.0

    def alphas(self) -> dict[Key, Tensor]:
        """Return the entropy coefficients by sub-step key, scalars `[]` without gradients."""
        return {key: log.detach().exp() for key, log in zip(self.step_keys, self.log_alphas, strict=True)}

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
        self._alphas = self.alphas()
        draws = [self.draw(position, batch.observations[position]) for position in range(len(self.actors))]
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

    def draw(self, position: int, observation: TensorDict) -> ActionDraw:
        """Return actions of an actor, with gradients."""
        output = self.model.policy.compute_substep_policy_output(observation, self.actors[position])
        return draw_actions(output, self.spaces[position], self.generator, not self._all_discrete[position])

    def _learn_policy(self, start: float, losses: PolicyLosses) -> dict[Name, Tensor]:
        learned = self._policy_parameters  # with named inputs, gradients of the critics are not computed
        if self.config.entropy_tuning:
            learned = [*learned, *self.log_alphas]
            self.entropy_optimizer.zero_grad()
        norms = self._timed_step(start, losses, self.policy_optimizer, learned)
        if self.config.entropy_tuning:
            self.entropy_optimizer.step()
        losses.entropy_coef = list(self.alphas().items())
        return norms

    def _timed_step(
        self, start: float, losses: Losses, optimizer: FlatAdam, inputs: list[Tensor] | None = None
    ) -> dict[Name, Tensor]:
        """Take a gradient step; the computation of the losses began at `start`."""
        losses_done = time.perf_counter()
        norms = gradient_step(losses, optimizer, self.config.max_grad_norm, inputs=inputs)
        self.seconds_of_losses += losses_done - start
        self.seconds_of_gradients += time.perf_counter() - losses_done
        return norms

    # -- critics ---------------------------------------------------------------------------------------

    def _critic_losses(self, batch: TransitionBatch, draws: list[ActionDraw]) -> CriticLosses:
        losses = CriticLosses(torch.zeros((), device=self.model.device))
        for key, q_values, target, weight in self.critic_targets(batch, draws):
            loss = critic_loss(q_values, target, weight)
            losses.add(loss)
            if _counts(weight):
                first, second = (q_value.detach() for q_value in q_values)
                losses.critic_value_loss.append((key, loss))
                losses.critic_value.append((key, mean_of(torch.minimum(first, second), weight)))
                losses.errors_between_critics.append((key, mean_of((first - second).abs(), weight)))
        return losses

    def critic_targets(self, batch: TransitionBatch, draws: list[ActionDraw]) -> list[CriticTarget]:
        """Return values and targets of all outputs of the critic.

        :param batch: Transitions.
        :param draws: Actions for the observations of the batch, by actor.
        """
        positions, gamma = range(len(self.actors)), self.config.gamma
        if self.is_shared:
            next_value = self._next_value(positions, batch.next_observations)
            target = soft_bellman_target(batch.rewards.sum(-1), next_value, batch.terminated, gamma)
            # what followed has to be known, unless nothing did
            weight = None if batch.has_next_step is None else (batch.has_next_step | batch.terminated).float()
            return self._values_and_target(positions, batch, target, weight)
        next_values = [self._next_value([0], batch.next_observations)]
        next_values += [self._soft_value([at], [batch.observations[at]], [draws[at]]) for at in positions[1:]]
        found = []
        for at in positions:
            if at == positions[-1]:
                ended, next_value, discount = batch.terminated, next_values[0], gamma
            else:  # the rest of the step follows, unless the episode ended here
                ended, next_value, discount = batch.ended_at(at), next_values[at + 1], 1.0
            target = soft_bellman_target(batch.rewards[:, at], next_value, ended, discount)
            found += self._values_and_target([at], batch, target, batch.acted(at))
        return found

    def _values_and_target(
        self, positions: Sequence[int], batch: TransitionBatch, target: Tensor, weight: Tensor | None
    ) -> list[CriticTarget]:
        """Return values of the taken actions; where all heads are discrete, each has values of its own."""
        key = self._critic_keys[positions[0]]
        observations, actions = (self._by_key(positions, each) for each in (batch.observations, batch.actions))
        q_values: Any = self.critic.predict_q_values(observations, actions, True)[key]
        by_head = [[each[head] for each in q_values] for head in q_values[0]] if _is_by_head(q_values) else [q_values]
        return [CriticTarget(key, of_head, target, weight) for of_head in by_head]

    @torch.no_grad()
    def _next_value(self, positions: Sequence[int], observations: list[TensorDict]) -> Tensor:
        draws = [self.draw(position, observations[position]) for position in positions]
        return self._soft_value(positions, observations, draws)

    def _soft_value(
        self, positions: Sequence[int], observations: Sequence[TensorDict], draws: Sequence[ActionDraw]
    ) -> Tensor:
        """Return the value of states by the target networks, with the entropy of all action heads, `[B]`."""
        keys = [self.actors[position].step_key for position in positions]

        def by_key(values: Sequence[TensorDict]) -> dict[Key, TensorDict]:
            detached = [{name: tensor.detach() for name, tensor in entry.items()} for entry in values]
            return dict(zip(keys, detached, strict=False))

        value = self.critic.predict_next_q_values(
            by_key(observations),
            by_key([draw.actions for draw in draws]),
            by_key([draw.logits for draw in draws]),
            by_key([draw.log_probs for draw in draws]),
            self._alphas,
        )[self._critic_keys[positions[0]]]
        if isinstance(value, Tensor):
            return value
        # by head, each with its own entropy only: the mean of the values, and the entropies of all heads
        bonuses = {
            head: -self._alphas[key] * log_prob.detach()
            for key, draw in zip(keys, draws, strict=True)
            for head, log_prob in draw.expected_log_probs.items()
        }
        if len(bonuses) == 1:
            return next(iter(value.values()))
        bonus = torch.stack(list(bonuses.values()))
        return torch.stack([value[head] for head in bonuses]).mean(0) - bonus.mean(0) + bonus.sum(0)

    # -- policy and entropy coefficients ---------------------------------------------------------------

    def _policy_losses(
        self, batch: TransitionBatch, draws: list[ActionDraw], initial_policy: InitialPolicy | None, kl_coef: float
    ) -> PolicyLosses:
        """Return losses of policy and entropy coefficients, which learn from the same draws but not from each other."""
        losses = PolicyLosses(torch.zeros((), device=self.model.device))
        positions = range(len(self.actors))
        for group in [positions] if self.is_shared else [[position] for position in positions]:
            of_group = self._discrete_losses if self._all_discrete[group[0]] else self._joint_losses
            for position, loss in zip(group, of_group(batch, draws, group), strict=True):
                losses.add(loss)
                key, weight = self.actors[position].step_key, batch.acted(position)
                if _counts(weight):
                    log_prob = mean_of(draws[position].expected_log_prob.detach(), weight)
                    losses.policy_loss.append((key, loss))
                    losses.policy_entropy.append((key, -log_prob))
                    losses.policy_mean_logp.append((key, log_prob))
        if initial_policy is not None:
            for position, draw in enumerate(draws):
                current = self.model.policy.distribution_mapper.logits_dict_to_distribution(draw.logits, 1.0)
                actor, weight = self.actors[position], batch.acted(position)
                divergence = mean_of(initial_policy.divergence(current, batch.observations[position], actor), weight)
                losses.add(divergence, kl_coef)
                if _counts(weight):
                    losses.policy_kl_to_initial.append((actor.step_key, divergence))
        if self.config.entropy_tuning:
            losses.entropy_loss = list(self._entropy_losses(batch, draws).items())
            losses.add(_total([loss for _, loss in losses.entropy_loss]))
        return losses

    def _discrete_losses(
        self, batch: TransitionBatch, draws: list[ActionDraw], positions: Sequence[int]
    ) -> list[Tensor]:
        """Return losses by actor where a critic values all actions at once."""
        observations = self._by_key(positions, batch.observations)
        with torch.no_grad():
            values: Any = self.critic.predict_q_values(observations, {key: {} for key in observations}, False)
        first, second = values[self._critic_keys[positions[0]]]
        return [
            _total(
                [
                    discrete_policy_loss(
                        draws[at].logits[head],
                        torch.minimum(first[head], second[head]),
                        self._alphas[self.actors[at].step_key],
                        batch.acted(at),
                    )
                    for head in self.spaces[at].spaces
                ]
            )
            for at in positions
        ]

    def _joint_losses(self, batch: TransitionBatch, draws: list[ActionDraw], positions: Sequence[int]) -> list[Tensor]:
        """Return losses by actor where a critic values the drawn joint action; it counts for the first sub-step."""
        observations = self._by_key(positions, batch.observations)
        drawn = self._by_key(positions, [draw.actions for draw in draws])

        def value(observed: dict[Key, TensorDict], actions: dict[Key, TensorDict]) -> Tensor:
            q_values: Any = self.critic.predict_q_values(observed, actions, True)
            return torch.minimum(*q_values[self._critic_keys[positions[0]]])

        losses = []
        for index, (key, at) in enumerate(zip(observations, positions, strict=True)):
            objective = value(observations, drawn) if index == 0 else torch.zeros((), device=self.model.device)

            def alternatives(actions: TensorDict, key: Key = key) -> Tensor:
                n_options = len(next(iter(actions.values())))

                def for_each(tensors: TensorDict) -> TensorDict:
                    # one batch dimension: networks with convolutions or normalization take no other
                    expanded = {
                        name: tensor.detach().expand(n_options, *tensor.shape) for name, tensor in tensors.items()
                    }
                    return {name: tensor.flatten(0, 1) for name, tensor in expanded.items()}

                others = {step_key: for_each(entry) for step_key, entry in drawn.items()}
                own = {name: tensor.flatten(0, 1) for name, tensor in actions.items()}
                observed = {step_key: for_each(entry) for step_key, entry in observations.items()}
                return value(observed, {**others, key: own}).view(n_options, -1)

            of_choices = choice_values(self.spaces[at], draws[at].logits, draws[at].actions, alternatives)
            if of_choices is not None:
                objective = objective + of_choices - of_choices.detach()  # contributes its gradient only
            log_prob, weight = draws[at].expected_log_prob, batch.acted(positions[-1])
            losses.append(continuous_policy_loss(log_prob, objective, self._alphas[key], weight))
        return losses

    def _entropy_losses(self, batch: TransitionBatch, draws: list[ActionDraw]) -> dict[Key, Tensor]:
        losses: dict[Key, Tensor] = {}
        log_alphas = dict(zip(self.step_keys, self.log_alphas, strict=True))
        for position, (actor, draw) in enumerate(zip(self.actors, draws, strict=True)):
            key, target = actor.step_key, self._constant_targets[position]
            if target is None:
                target = target_entropy(self.spaces[position], draw.logits, self.config.target_entropy_multiplier)
            loss = entropy_coef_loss(log_alphas[key], draw.expected_log_prob, target, batch.acted(position))
            losses[key] = losses[key] + loss if key in losses else loss
        return losses

    def _by_key(self, positions: Sequence[int], values: Sequence[TensorDict]) -> dict[Key, TensorDict]:
        return {self.actors[position].step_key: values[position] for position in positions}

    # -- state -----------------------------------------------------------------------------------------

    def tie(self) -> None:
        """Move parameters back into the memory of the optimizers."""
        for optimizer in (self.policy_optimizer, self.critic_optimizer, self.entropy_optimizer):
            optimizer.tie()

    def parts(self) -> dict[str, Part]:
        """Return the stateful parts besides the model."""
        return {
            "policy_optimizer": self.policy_optimizer,
            "critic_optimizer": self.critic_optimizer,
            "entropy_optimizer": self.entropy_optimizer,
            "entropy_coefs": self.log_alphas,
            "generator": self.generator,
        }


def _counts(weight: Tensor | None) -> bool:
    """Return whether any row does; a mean over none is not a number to report."""
    return weight is None or bool(weight.any())


def _is_by_head(q_values: Sequence[Any]) -> bool:
    return isinstance(q_values[0], dict)


def _total(losses: list[Tensor]) -> Tensor:
    return sum(losses[1:], losses[0])


class SAC(ReplayTrainer):
    """Collect transitions into a replay buffer and learn from batches of it.

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
        self.learner.n_batches = self.n_updates * self.config.num_batches_per_iter
        self.learner.seconds_of_losses = self.learner.seconds_of_gradients = 0.0
        super()._update()
        self.stats.add_time("time_loss_computation", self.learner.seconds_of_losses)
        self.stats.add_time("time_backprob", self.learner.seconds_of_gradients)

    @override(ReplayTrainer)
    def _learn_from(self, batch: TransitionBatch) -> None:
        steps = self.learner.update(batch, self.critic_learns_alone, self._initial_policy, self._kl_to_initial_coef)
        for losses, norms in steps:
            self.stats.add(losses, norms)

    @override(ReplayTrainer)
    def _parts(self) -> dict[str, Part]:
        return {**super()._parts(), **self.learner.parts()}
