"""Soft actor-critic (Haarnoja et al. 2018), with a replay buffer that may start with demonstrations.

Losses and targets are functions of tensors. With a step critic, the value of a sub-step is its reward plus the value of
the next sub-step of the same environment step, undiscounted; the last one is followed by the discounted value of the
next environment step. A shared critic values environment steps as a whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_state_action_critic import (
    TorchSharedStateActionCritic,
    TorchStateActionCritic,
    masked_log_probs,
)
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.seeding import seeded_generator
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution
from maze.distributions.utils import sample_with, space_bounds, tensor_clamp
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.learning import Key, Losses, Name, constant, gradient_step, mean_of
from maze.train.trainers.common.replay_buffer.transitions import TensorDict, TransitionBatch, bellman_targets
from maze.train.trainers.common.replay_trainer import ReplayTrainer
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from maze.train.trainers.sac.sac_events import SACEvents
from maze.train.utils.train_utils import Part, mapped

if TYPE_CHECKING:
    from maze.core.agent.torch_policy_output import PolicySubStepOutput
    from maze.distributions.distribution_mapper import DistributionMapper
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection

_DISCRETE_SHARE = 0.98


# -- losses and targets ------------------------------------------------------------------------------


def soft_bellman_target(reward: Tensor, next_value: Tensor, ended: Tensor, discount: float) -> Tensor:
    """Compute the target of a state-action value: `reward + discount * next_value`.

    :param reward: `[B]`
    :param next_value: Soft value of the next observation, `[B]`; after a truncation that of the true last one.
    :param ended: Whether the episode *terminated*, so that nothing follows; the content of `next_value` is ignored.
    :param discount: 1 between sub-steps of one environment step.
    """
    return reward + discount * next_value.masked_fill(ended, 0.0)


def critic_loss(q_values: Sequence[Tensor], target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return half the mean squared error (equation 5), summed over the networks of a critic.

    :param q_values: Values of the same state-action pairs by each network, `[batch]`.
    :param target: `[batch]`, as values and weight.
    :param weight: 0 or 1 for each element; `None`: all of them count.
    """
    if weight is None:
        losses = [functional.mse_loss(q_value, target) for q_value in q_values]
    else:
        losses = [mean_of((q_value - target).square(), weight) for q_value in q_values]
    return 0.5 * sum(losses[1:], losses[0])


def continuous_policy_loss(log_prob: Tensor, q_value: Tensor, alpha: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return `alpha * log_prob - Q` of reparameterised actions (equation 9), averaged.

    :param log_prob: Joint log-probabilities of the actions, `[batch]` as all others, with gradients.
    :param q_value: The smaller value of both networks, with gradients through the actions.
    :param alpha: Entropy coefficient (scalar).
    :param weight: 0 or 1 for each element; `None`: all of them count.
    """
    return mean_of(alpha * log_prob - q_value, weight)


def discrete_policy_loss(logits: Tensor, q_values: Tensor, alpha: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the expectation of `alpha * log p - Q` over all allowed actions, averaged over the batch.

    :param logits: `[..., n]`; those of masked actions are the minimum of their type, or minus infinity.
    :param q_values: `[..., n]`, the smaller values of both networks; no gradient passes through them.
    :param alpha: Entropy coefficient (scalar).
    :param weight: 0 or 1 for each element, `[...]`; `None`: all of them count.
    """
    log_probs, probs = masked_log_probs(logits)
    return mean_of((probs * (alpha * log_probs - q_values.detach())).sum(-1), weight)


def entropy_coef_loss(
    log_alpha: Tensor, log_prob: Tensor, target_entropy: Tensor | float, weight: Tensor | None = None
) -> Tensor:
    """Return the loss of the entropy coefficient: it rises where the entropy is below its target, and falls above.

    :param log_alpha: Logarithm of the entropy coefficient (scalar).
    :param log_prob: (Expected) log-probabilities of the policy's actions.
    :param target_entropy: A number, or one for each element.
    :param weight: 0 or 1 for each element; `None`: all of them count.
    """
    return -log_alpha * mean_of((log_prob + target_entropy).detach(), weight)


# -- how much entropy ---------------------------------------------------------------------------------


def target_entropy(action_space: spaces.Dict, logits: Mapping[str, Tensor], multiplier: float) -> Tensor | float:
    """Return the target for the joint entropy of a sub-step's actions: a number, or `[B]` where action masks differ.

    That of continuous actions is a density of the action in its own unit.

    :param action_space: The heads.
    :param logits: Logits of each head; masked actions have the minimum of their type.
    :param multiplier: Factor of the targets.
    """
    total: Tensor | float = 0.0
    for head, space in action_space.spaces.items():
        if isinstance(space, spaces.Box):
            half_widths = 0.5 * (space.high.astype(np.float64) - space.low.astype(np.float64))
            bounded = half_widths[space.bounded_below & space.bounded_above]
            total = total - multiplier * math.prod(space.shape) + float(np.log(bounded).sum())
        else:
            for component in _choice_logits(space, logits[head]):
                n_allowed = (component > torch.finfo(component.dtype).min).sum(-1).to(component.dtype)
                total = total + multiplier * _DISCRETE_SHARE * n_allowed.log()
    return total


def _choice_logits(space: spaces.Space[Any], logits: Tensor) -> list[Tensor]:
    """Return logits `[..., n]` of each choice that makes up a head's action."""
    if isinstance(space, spaces.Discrete):
        return [logits]
    if isinstance(space, spaces.MultiDiscrete):
        return list(torch.split(logits, [int(n) for n in space.nvec.flatten()], dim=-1))
    flat = logits.flatten(logits.dim() - len(space.shape or ()))
    return [torch.stack([torch.zeros_like(one), one], dim=-1) for one in flat.unbind(-1)]


# -- choices that a critic judges together with other actions -----------------------------------------

JointValue = Callable[[dict[str, Tensor]], Tensor]
"""From actions by head `[K, B, ...]` to their values `[K, B]`."""


def choice_values(
    action_space: spaces.Dict, logits: Mapping[str, Tensor], actions: Mapping[str, Tensor], joint_value: JointValue
) -> Tensor | None:
    """Return the sum over choices of the expected value of their alternatives, all else being as it was drawn.

    The gradient with respect to the logits is an unbiased estimate of that of the expected value of the joint action:
    choices are independent of one another given the state, and alternatives are weighted with their probabilities
    instead of being drawn.

    :param action_space: The heads.
    :param logits: By head, with gradients.
    :param actions: The drawn actions by head.
    :param joint_value: Values of joint actions; no gradient is taken through them.
    :return: `[B]`; None where there are no choices.
    """
    total: Tensor | None = None
    drawn = {head: action.detach() for head, action in actions.items()}
    for head, space in action_space.spaces.items():
        if isinstance(space, spaces.Box):
            continue
        for index, component in enumerate(_choice_logits(space, logits[head])):
            _, probs = masked_log_probs(component)
            n_options = component.shape[-1]
            alternatives = {key: action.expand(n_options, *action.shape) for key, action in drawn.items()}
            options = alternatives[head].clone()
            each_option = torch.arange(n_options, device=options.device, dtype=options.dtype)
            options.view(n_options, len(probs), -1)[:, :, index] = each_option.unsqueeze(-1)
            alternatives[head] = options
            with torch.no_grad():
                values = joint_value(alternatives)
            expected = (probs * values.transpose(0, 1)).sum(-1)
            total = expected if total is None else total + expected
    return total


# -- actions to learn from ----------------------------------------------------------------------------


@dataclass
class ActionDraw:
    """One action for each row of a batch, of one sub-step."""

    logits: TensorDict
    actions: TensorDict = field(default_factory=dict)
    """By head; those of `Box` heads with gradients. Empty where expectations over all actions take their place."""
    log_probs: TensorDict = field(default_factory=dict)
    """Log-probabilities of the sampled actions, by head."""
    expected_log_probs: TensorDict = field(default_factory=dict)
    """Minus the entropy of each head `[B]`: exact for choices, that of the drawn action for `Box`."""

    @property
    def expected_log_prob(self) -> Tensor:
        """Return the expected log-probability of the joint action, the sum over heads.

        :return: `[batch]`.
        """
        first, *others = self.expected_log_probs.values()
        return torch.stack([first, *others]).sum(0) if others else first


def draw_actions(
    output: PolicySubStepOutput, action_space: spaces.Dict, generator: torch.Generator, needs_actions: bool
) -> ActionDraw:
    """Draw from a policy's output.

    :param output: Logits and distributions, perhaps with gradients.
    :param action_space: The heads.
    :param generator: Source of randomness.
    :param needs_actions: Whether choices are drawn as well.
    """
    draw = ActionDraw(output.action_logits)
    for head, space in action_space.spaces.items():
        distribution: Any = output.prob_dist.distribution_dict[head]
        if isinstance(space, spaces.Box):
            if hasattr(distribution, "rsample_with_log_prob"):
                action, log_prob = distribution.rsample_with_log_prob(generator)
            else:
                action = distribution.rsample(generator)
                log_prob = distribution.log_prob(action)
            draw.log_probs[head] = draw.expected_log_probs[head] = log_prob
            is_squashed = isinstance(distribution, SquashedGaussianProbabilityDistribution)
            if not is_squashed and (space.bounded_below.any() or space.bounded_above.any()):
                action = tensor_clamp(action, *space_bounds(space, action))  # as actions in the buffer are
            draw.actions[head] = action
            continue
        draw.expected_log_probs[head] = -distribution.joint_entropy()
        if needs_actions:
            draw.actions[head] = action = sample_with(distribution, generator)
            draw.log_probs[head] = distribution.log_prob(action).detach()
    return draw


def check_distributions(action_space: spaces.Dict, mapper: DistributionMapper) -> None:
    """Refuse heads whose actions cannot be differentiated.

    :raises ConfigError: Names the head.
    """
    for head, space in action_space.spaces.items():
        distribution = mapper.distribution_class(head)
        if isinstance(space, spaces.Box) and not hasattr(distribution, "rsample"):
            raise ConfigError(
                f"Action head `{head}`: SAC needs actions with gradients (`rsample`), which {distribution.__name__} "
                "does not have. Use maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution in "
                "`model.distribution_mapper_config`."
            )


# -- the trainer -------------------------------------------------------------------------------------


class CriticTarget(NamedTuple):
    """Values of one output of a critic, and their target."""

    key: Key
    q_values: list[Tensor]
    """`[B]` by each of its networks, with gradients."""
    target: Tensor
    weight: Tensor | None
    """0 or 1: which rows count; None: all of them."""


class SAC(ReplayTrainer):
    """Collect transitions into a replay buffer and learn from batches of it.

    :param algorithm_config: Hyperparameters.
    :param learner_model: Policy and state-action critic.
    :param distributed_actors: Collect transitions into a buffer; it has been filled to begin with.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param evaluator: Evaluates the policy between epochs; `None`: the model is judged by the training episodes.
    :param seed: Seed of the actions drawn for learning; `None` draws one from torch's global generator.
    :param checkpoint_file: File of the state, written after each epoch; `None`: none.
    :raises ConfigError: The critic is none of state-action values, or does not fit the actors.
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
        common: Any = {"model_selection": model_selection, "evaluator": evaluator, "checkpoint_file": checkpoint_file}
        super().__init__(algorithm_config, learner_model, distributed_actors, **common)
        config, model, actors = self.config, self.model, distributed_actors.actors
        if not isinstance(model.critic, TorchStateActionCritic):
            raise ConfigError(
                f"model.critic: SAC needs a state-action critic, found a {type(model.critic).__name__}. Choose one "
                "with `critic=flatten_concat_state_action` or `critic=template_state_action`."
            )
        self.actors, self.critic = actors, model.critic
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
        # The critic of each actor.
        self._critic_keys: list[Key] = [shared_key if self.is_shared else actor.step_key for actor in actors]
        self._all_discrete = [self.critic.only_discrete_spaces[key] for key in self._critic_keys]
        self.generator = seeded_generator(seed, model.device)
        policies = {("policy_grad_norm", key): network for key, network in model.policy.networks.items()}
        critics = {("critic_grad_norm", key): pair for key, pair in self.critic.networks.items()}
        log_alpha = math.log(config.entropy_coef) if config.entropy_coef > 0.0 else -math.inf
        self.log_alphas = nn.ParameterList([nn.Parameter(torch.tensor(log_alpha)) for _ in self.step_keys])
        """Logarithms of the entropy coefficients by sub-step key."""
        self.log_alphas.to(model.device)
        self.optimizers = {
            "policy_optimizer": FlatAdam(policies, lr=config.lr, eps=config.optimizer_eps),
            "critic_optimizer": FlatAdam(critics, lr=config.lr, eps=config.optimizer_eps),
            "entropy_optimizer": FlatAdam({"entropy": self.log_alphas}, config.entropy_coef_lr, config.optimizer_eps),
        }
        self._constant_targets = [
            target_entropy(space, {}, config.target_entropy_multiplier)
            if all(isinstance(head, spaces.Box) for head in space.spaces.values())
            else None
            for space in self.spaces
        ]
        self._targets = self.critic.followers()
        self._critic_parameters = self.critic.parameters()
        self._alphas = self.alphas()
        self.seconds_of_learning = dict.fromkeys(("time_loss_computation", "time_backprob"), 0.0)

    def alphas(self) -> dict[Key, Tensor]:
        """Return the entropy coefficients by sub-step key, scalars `[]` without gradients."""
        return {key: log.detach().exp() for key, log in zip(self.step_keys, self.log_alphas, strict=True)}

    @override(ReplayTrainer)
    def _parts(self) -> dict[str, Part]:
        own: dict[str, Part] = {"entropy_coefs": self.log_alphas, "generator": self.generator}
        return {**super()._parts(), **self.optimizers, **own}

    # -- one update ------------------------------------------------------------------------------------

    @override(ReplayTrainer)
    def _learn_from(self, batch: TransitionBatch) -> None:
        for losses, norms in self.learn(batch):
            self.stats.add(losses, norms)

    def learn(self, batch: TransitionBatch) -> list[tuple[Losses, dict[Name, Tensor]]]:
        """Learn from a batch. While the critic learns alone, policy and entropy coefficients stay as they are.

        :param batch: Transitions, on the model's device.
        :return: Losses and gradient norms of each step.
        :raises NonFiniteError: A loss or a gradient is not finite; the step that it belongs to was not taken.
        """
        start = time.perf_counter()
        self._alphas = self.alphas()
        draws = [self.draw(position, batch.observations[position]) for position in range(len(self.actors))]
        losses = Losses()
        for key, q_values, target, weight in self.critic_targets(batch, draws):
            loss = critic_loss(q_values, target, weight)
            losses.add(loss)
            if _counts(weight):
                first, second = (q_value.detach() for q_value in q_values)
                losses.report("critic_value_loss", loss, key)
                losses.report("critic_value", mean_of(torch.minimum(first, second), weight), key)
                losses.report("errors_between_critics", mean_of((first - second).abs(), weight), key)
        steps = [(losses, self._timed_step(start, losses, "critic_optimizer"))]
        if not self.critic_learns_alone:
            start = time.perf_counter()
            with constant(self._critic_parameters):
                losses = self._policy_losses(batch, draws)
            if self.config.entropy_tuning:
                self.optimizers["entropy_optimizer"].zero_grad()
            norms = self._timed_step(start, losses, "policy_optimizer")
            if self.config.entropy_tuning:
                self.optimizers["entropy_optimizer"].step()
            for key, alpha in self.alphas().items():
                losses.report("entropy_coef", alpha, key)
            steps.append((losses, norms))
        start = time.perf_counter()
        self.n_batches += 1
        if self.n_batches % self.config.target_update_interval == 0:
            self._targets.update(self.config.tau)
        self.seconds_of_learning["time_backprob"] += time.perf_counter() - start
        return steps

    def draw(self, position: int, observation: TensorDict) -> ActionDraw:
        """Return actions of an actor, with gradients.

        :param position: Index of the actor in `actors`.
        :param observation: Its observations `[B, *shape]` by key.
        """
        output = self.model.policy.compute_substep_policy_output(observation, self.actors[position])
        return draw_actions(output, self.spaces[position], self.generator, not self._all_discrete[position])

    def _timed_step(self, start: float, losses: Losses, optimizer: str) -> dict[Name, Tensor]:
        """Take a gradient step; the computation of the losses began at `start`."""
        losses_done = time.perf_counter()
        norms = gradient_step(losses, self.optimizers[optimizer], self.config.max_grad_norm)
        self.seconds_of_learning["time_loss_computation"] += losses_done - start
        self.seconds_of_learning["time_backprob"] += time.perf_counter() - losses_done
        return norms

    # -- critics ---------------------------------------------------------------------------------------

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

        def value_of(at: int, _: TensorDict) -> Tensor:
            """Return the value at a later sub-step of the rows, or at the first one of the next step."""
            if at:
                return self._soft_value([at], batch.observations, draws)
            return self._next_value([0], batch.next_observations)

        targets = enumerate(bellman_targets(batch, None, gamma, value_of))
        return [each for at, one in targets for each in self._values_and_target([at], batch, one, batch.acted(at))]

    def _values_and_target(
        self, positions: Sequence[int], batch: TransitionBatch, target: Tensor, weight: Tensor | None
    ) -> list[CriticTarget]:
        """Return values of the taken actions; where all heads are discrete, each has values of its own."""
        key = self._critic_keys[positions[0]]
        observations, actions = (self._by_key(positions, each) for each in (batch.observations, batch.actions))
        q_values: Any = self.critic.predict_q_values(observations, actions, True)[key]
        if isinstance(q_values[0], dict):
            return [CriticTarget(key, [each[head] for each in q_values], target, weight) for head in q_values[0]]
        return [CriticTarget(key, q_values, target, weight)]

    def _next_value(self, positions: Sequence[int], observations: list[TensorDict]) -> Tensor:
        with torch.no_grad():
            draws = [self.draw(position, observations[position]) for position in positions]
        return self._soft_value(positions, observations, draws)

    @torch.no_grad()
    def _soft_value(
        self, positions: Sequence[int], observations: Sequence[TensorDict], draws: Sequence[ActionDraw]
    ) -> Tensor:
        """Return the value of states by the target networks, with the entropy of all action heads, `[B]`."""
        value = self.critic.predict_next_q_values(
            self._by_key(positions, observations),
            self._by_key(positions, [draw.actions for draw in draws]),
            self._by_key(positions, [draw.logits for draw in draws]),
            self._by_key(positions, [draw.log_probs for draw in draws]),
            self._alphas,
        )[self._critic_keys[positions[0]]]
        if isinstance(value, Tensor):
            return value
        # by head, each with its own entropy only: the mean of the values, and the entropies of all heads
        bonuses = {
            head: -self._alphas[self.actors[position].step_key] * log_prob
            for position in positions
            for head, log_prob in draws[position].expected_log_probs.items()
        }
        if len(bonuses) == 1:
            return next(iter(value.values()))
        bonus = torch.stack(list(bonuses.values()))
        return torch.stack([value[head] for head in bonuses]).mean(0) - bonus.mean(0) + bonus.sum(0)

    # -- policy and entropy coefficients ---------------------------------------------------------------

    def _policy_losses(self, batch: TransitionBatch, draws: list[ActionDraw]) -> Losses:
        """Return losses of policy and entropy coefficients, which learn from the same draws but not from each other."""
        losses = Losses()
        positions = range(len(self.actors))
        for group in [positions] if self.is_shared else [[position] for position in positions]:
            of_group = self._discrete_losses if self._all_discrete[group[0]] else self._joint_losses
            for position, loss in zip(group, of_group(batch, draws, group), strict=True):
                losses.add(loss)
                key, weight = self.actors[position].step_key, batch.acted(position)
                if _counts(weight):
                    log_prob = mean_of(draws[position].expected_log_prob.detach(), weight)
                    losses.report("policy_loss", loss, key)
                    losses.report("policy_entropy", -log_prob, key)
                    losses.report("policy_mean_logp", log_prob, key)
        log_alphas = dict(zip(self.step_keys, self.log_alphas, strict=True))
        for position, (actor, draw) in enumerate(zip(self.actors, draws, strict=True)):
            key, weight = actor.step_key, batch.acted(position)
            if self._initial_policy is not None:
                current = self.model.policy.distribution_mapper.logits_dict_to_distribution(draw.logits, 1.0)
                divergence = self._initial_policy.divergence(current, batch.observations[position], actor)
                losses.add(mean := mean_of(divergence, weight), self._kl_to_initial_coef)
                if _counts(weight):
                    losses.report("policy_kl_to_initial", mean, key)
            if self.config.entropy_tuning:
                target = self._constant_targets[position]
                if target is None:
                    target = target_entropy(self.spaces[position], draw.logits, self.config.target_entropy_multiplier)
                loss = entropy_coef_loss(log_alphas[key], draw.expected_log_prob, target, weight)
                losses.report("entropy_loss", loss, key, weight=1.0)
        return losses

    def _discrete_losses(
        self, batch: TransitionBatch, draws: list[ActionDraw], positions: Sequence[int]
    ) -> list[Tensor]:
        """Return losses by actor where a critic values all actions at once."""
        observations = self._by_key(positions, batch.observations)
        with torch.no_grad():
            values: Any = self.critic.predict_q_values(observations, {key: {} for key in observations}, False)
        first, second = values[self._critic_keys[positions[0]]]
        losses = []
        for at in positions:
            alpha, weight = self._alphas[self.actors[at].step_key], batch.acted(at)
            of_heads = [
                discrete_policy_loss(draws[at].logits[head], torch.minimum(first[head], second[head]), alpha, weight)
                for head in self.spaces[at].spaces
            ]
            losses.append(sum(of_heads[1:], of_heads[0]))
        return losses

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

                # one batch dimension: networks with convolutions or normalization take no other
                def repeated(tensor: Tensor) -> Tensor:
                    return tensor.detach().repeat(n_options, *[1] * (tensor.dim() - 1))

                seen, taken = mapped(repeated, (observations, drawn))
                own = {name: tensor.flatten(0, 1) for name, tensor in actions.items()}
                return value(seen, {**taken, key: own}).view(n_options, -1)

            of_choices = choice_values(self.spaces[at], draws[at].logits, draws[at].actions, alternatives)
            if of_choices is not None:
                objective = objective + of_choices - of_choices.detach()  # contributes its gradient only
            log_prob, weight = draws[at].expected_log_prob, batch.acted(positions[-1])
            losses.append(continuous_policy_loss(log_prob, objective, self._alphas[key], weight))
        return losses

    def _by_key(self, positions: Sequence[int], values: Sequence[TensorDict]) -> dict[Key, TensorDict]:
        return {self.actors[position].step_key: values[position] for position in positions}


def _counts(weight: Tensor | None) -> bool:
    """Return whether any row does; a mean over none is not a number to report."""
    return weight is None or bool(weight.any())
