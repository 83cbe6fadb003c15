"""One gradient step of SAC after another, from batches of transitions."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_state_action_critic import TorchSharedStateActionCritic, TorchStateActionCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, NonFiniteError
from maze.train.trainers.common.actor_critic.flat_adam import FlatAdam
from maze.train.trainers.common.actor_critic.non_finite import describe_non_finite
from maze.train.trainers.common.replay_buffer.transitions import TensorDict, TransitionBatch
from maze.train.trainers.sac.action_draws import ActionDraw, check_distributions, draw_actions
from maze.train.trainers.sac.choice_gradients import choice_values
from maze.train.trainers.sac.losses import (
    continuous_policy_loss,
    critic_loss,
    discrete_policy_loss,
    entropy_coef_loss,
    mean_of,
    polyak_update,
    soft_bellman_target,
)
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from maze.train.trainers.sac.target_entropy import target_entropy

logger = logging.getLogger(__name__)

Key = Any
Term = tuple[str, Key, Tensor]
"""Event of ``SACEvents``, sub-step or critic, value."""


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
        """The coefficients themselves, without gradients."""
        return {key: log.detach().exp() for key, log in self._by_key.items()}

    def log_alpha(self, key: Key) -> Tensor:
        """One logarithm, with its gradient."""
        return self._by_key[key]


class SACLearner:
    """Updates the networks of an actor-critic.

    With a step critic, the value of a sub-step is its reward plus the value of the next sub-step of the same
    environment step, undiscounted; the last one is followed by the discounted value of the next environment step. A
    shared critic values environment steps as a whole.

    :param model: Policy and state-action critic, on their device.
    :param config: Hyperparameters.
    :param actors: The actors of an environment step, in their order.
    :param seed: Seed of the actions drawn for learning.
    """

    def __init__(self, model: TorchActorCritic, config: SACAlgorithmConfig, actors: list[ActorID], seed: int) -> None:
        if not isinstance(model.critic, TorchStateActionCritic):
            raise ConfigError(
                f"model.critic: SAC needs a state-action critic, found a {type(model.critic).__name__}. Choose one "
                "with `critic=flatten_concat_state_action` or `critic=template_state_action`."
            )
        self.model = model
        self.config = config
        self.critic: TorchStateActionCritic = model.critic
        self.actors = actors
        self._spaces = [self.critic.action_spaces_dict[actor.step_key] for actor in actors]
        self._is_shared = isinstance(self.critic, TorchSharedStateActionCritic)
        keys = list(dict.fromkeys(actor.step_key for actor in actors))
        if self._is_shared and len(keys) < len(actors):
            raise ConfigError(
                f"model.critic: a shared state-action critic tells the actors of a step by their step keys, but some "
                f"of {actors} have the same. Use maze.perception.models.critics.StateActionCriticComposer."
            )
        self._shared_key = next(iter(self.critic.networks))
        self._all_discrete = [
            self.critic.only_discrete_spaces[self._critic_key(position)] for position in range(len(actors))
        ]
        self._check_distributions()
        self.generator = torch.Generator(device=model.device)
        self.generator.manual_seed(seed)
        adam = {"lr": config.lr, "eps": config.optimizer_eps}
        self.policy_optimizer = FlatAdam(
            {("policy_grad_norm", key): network for key, network in model.policy.networks.items()}, **adam
        )
        self.critic_optimizer = FlatAdam(
            {("critic_grad_norm", key): pair for key, pair in self.critic.networks.items()}, **adam
        )
        self.entropy_coefs = EntropyCoefs(keys, config.entropy_coef).to(model.device)
        self.entropy_optimizer = FlatAdam(
            {"entropy": self.entropy_coefs}, lr=config.entropy_coef_lr, eps=config.optimizer_eps
        )
        self._constant_targets = [
            target_entropy(space, {}, config.target_entropy_multiplier)
            if all(isinstance(head, spaces.Box) for head in space.spaces.values())
            else None
            for space in self._spaces
        ]
        self._targets_and_sources = self._polyak_pairs()
        self._policy_parameters = [p for p in model.policy.parameters() if p.requires_grad]
        self._alphas = self.entropy_coefs.alphas()
        self.n_batches = 0
        """Number of batches learned from."""
        self.seconds_of_losses = 0.0
        self.seconds_of_gradients = 0.0

    # -- one batch -------------------------------------------------------------------------------------

    def update(self, batch: TransitionBatch, critic_alone: bool = False) -> list[Term]:
        """Learns from a batch.

        :param batch: Transitions, on the model's device.
        :param critic_alone: Leave policy and entropy coefficients as they are.
        :return: Values of :class:`~maze.train.trainers.sac.sac_events.SACEvents`.
        :raises NonFiniteError: A loss or a gradient is not finite; the step that it belongs to was not taken.
        """
        start = time.perf_counter()
        draws = [
            self._draw(position, _known(batch.observations[position], _observed(batch, position)))
            for position in range(len(self.actors))
        ]
        terms, total = self._critic_terms(batch, draws)
        losses_done = time.perf_counter()
        self.critic_optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        terms += self._step(self.critic_optimizer, terms, total)
        stepped = time.perf_counter()
        if not critic_alone:
            terms += self._learn_policy(batch, draws)
        self.n_batches += 1
        if self.n_batches % self.config.target_update_interval == 0:
            polyak_update(*self._targets_and_sources, self.config.tau)
        self.seconds_of_losses += losses_done - start
        self.seconds_of_gradients += time.perf_counter() - stepped + (stepped - losses_done)
        return terms

    def _learn_policy(self, batch: TransitionBatch, draws: list[ActionDraw]) -> list[Term]:
        terms, total = self._policy_terms(batch, draws)
        self.policy_optimizer.zero_grad()
        total.backward(inputs=self._policy_parameters)  # type: ignore[no-untyped-call]  # spares gradients of critics
        terms += self._step(self.policy_optimizer, terms, total)
        if self.config.entropy_tuning:
            terms += self._tune_entropy(batch, draws)
        terms += [("entropy_coef", key, alpha) for key, alpha in self._alphas.items()]
        return terms

    def _tune_entropy(self, batch: TransitionBatch, draws: list[ActionDraw]) -> list[Term]:
        terms: list[Term] = []
        losses: dict[Key, Tensor] = {}
        for position, (actor, draw) in enumerate(zip(self.actors, draws, strict=True)):
            key, target = actor.step_key, self._constant_targets[position]
            if target is None:
                target = target_entropy(self._spaces[position], draw.logits, self.config.target_entropy_multiplier)
            log_alpha, weight = self.entropy_coefs.log_alpha(key), _acted(batch, position)
            loss = entropy_coef_loss(log_alpha, draw.expected_log_prob, target, weight)
            losses[key] = losses[key] + loss if key in losses else loss
        terms = [("entropy_loss", key, loss) for key, loss in losses.items()]
        first, *others = losses.values()
        total = sum(others, first)
        self.entropy_optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.entropy_optimizer.step()
        self._alphas = self.entropy_coefs.alphas()
        return terms

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

    # -- critics ---------------------------------------------------------------------------------------

    def _critic_terms(self, batch: TransitionBatch, draws: list[ActionDraw]) -> tuple[list[Term], Tensor]:
        terms: list[Term] = []
        for key, q_values, target, weight in self._targets(batch, draws):
            loss = critic_loss(q_values, target, weight)
            first, second = (q_value.detach() for q_value in q_values)
            terms += [
                ("critic_value_loss", key, loss),
                ("critic_value", key, torch.minimum(first, second).mean()),
                ("errors_between_critics", key, (first - second).abs().mean()),
            ]
        losses = [value for event, _, value in terms if event == "critic_value_loss"]
        return terms, sum(losses[1:], losses[0])

    def _targets(
        self, batch: TransitionBatch, draws: list[ActionDraw]
    ) -> list[tuple[Key, list[Tensor], Tensor, Tensor | None]]:
        """For each output of the critic: its key, values by both networks, their target, and which rows count."""
        if self._is_shared:
            return self._shared_targets(batch)
        next_values = [self._next_value(0, batch.next_observations[0])]
        next_values += [
            self._soft_value(
                [position], [_known(batch.observations[position], _observed(batch, position))], [draws[position]]
            )
            for position in range(1, len(self.actors))
        ]
        found = []
        last = len(self.actors) - 1
        for position, actor in enumerate(self.actors):
            if position == last:
                ended, next_value, discount = batch.terminated, next_values[0], self.config.gamma
            else:  # the rest of the step follows, unless the episode ended here
                next_value, discount = next_values[position + 1], 1.0
                ended = _ended_at(batch, position)
            target = soft_bellman_target(batch.rewards[:, position], next_value, ended, discount)
            q_values = self.critic.predict_q_values(
                {actor.step_key: batch.observations[position]}, {actor.step_key: batch.actions[position]}, True
            )[actor.step_key]
            found += self._by_head(actor.step_key, q_values, target, _acted(batch, position))
        return found

    def _shared_targets(self, batch: TransitionBatch) -> list[tuple[Key, list[Tensor], Tensor, Tensor | None]]:
        positions = list(range(len(self.actors)))
        with torch.no_grad():
            draws = [
                self._draw(position, _known(batch.next_observations[position], _observed_next(batch, position)))
                for position in positions
            ]
        next_value = self._soft_value(positions, batch.next_observations, draws)
        target = soft_bellman_target(batch.rewards.sum(-1), next_value, batch.terminated, self.config.gamma)
        # what followed has to be known, unless nothing did
        weight = None if batch.has_next_step is None else (batch.has_next_step | batch.terminated).float()
        keys = [actor.step_key for actor in self.actors]
        q_values = self.critic.predict_q_values(
            dict(zip(keys, batch.observations, strict=True)), dict(zip(keys, batch.actions, strict=True)), True
        )[self._shared_key]
        return self._by_head(self._shared_key, q_values, target, weight)

    @staticmethod
    def _by_head(
        key: Key, q_values: list[Any], target: Tensor, weight: Tensor | None
    ) -> list[tuple[Key, list[Tensor], Tensor, Tensor | None]]:
        """Where all heads are discrete, each has values of its own, for the same target."""
        if not isinstance(q_values[0], dict):
            return [(key, q_values, target, weight)]
        return [(key, [of_network[head] for of_network in q_values], target, weight) for head in q_values[0]]

    @torch.no_grad()
    def _next_value(self, position: int, observation: TensorDict) -> Tensor:
        return self._soft_value([position], [observation], [self._draw(position, observation)])

    def _soft_value(self, positions: list[int], observations: list[TensorDict], draws: list[ActionDraw]) -> Tensor:
        """Value of states by the target networks, with the entropy of all action heads, ``[B]``."""
        keys = [self.actors[position].step_key for position in positions]

        def by_key(values: list[TensorDict]) -> dict[Key, TensorDict]:
            detached = [{name: tensor.detach() for name, tensor in entry.items()} for entry in values]
            return dict(zip(keys, detached, strict=True))

        value = self.critic.predict_next_q_values(
            by_key(observations),
            by_key([draw.actions for draw in draws]),
            by_key([draw.logits for draw in draws]),
            by_key([draw.log_probs for draw in draws]),
            self._alphas,
        )[self._critic_key(positions[0])]
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

    # -- policy ----------------------------------------------------------------------------------------

    def _draw(self, position: int, observation: TensorDict) -> ActionDraw:
        output = self.model.policy.compute_substep_policy_output(observation, self.actors[position])
        return draw_actions(output, self._spaces[position], self.generator, not self._all_discrete[position])

    def _policy_terms(self, batch: TransitionBatch, draws: list[ActionDraw]) -> tuple[list[Term], Tensor]:
        terms: list[Term] = []
        losses: list[Tensor] = []
        n_actors = len(self.actors)
        groups = [list(range(n_actors))] if self._is_shared else [[position] for position in range(n_actors)]
        for positions in groups:
            for position, loss in self._policy_losses(batch, draws, positions):
                losses.append(loss)
                key, weight = self.actors[position].step_key, _acted(batch, position)
                log_prob = mean_of(draws[position].expected_log_prob.detach(), weight)
                terms += [
                    ("policy_loss", key, loss),
                    ("policy_entropy", key, -log_prob),
                    ("policy_mean_logp", key, log_prob),
                ]
        return terms, sum(losses[1:], losses[0])

    def _policy_losses(
        self, batch: TransitionBatch, draws: list[ActionDraw], positions: list[int]
    ) -> list[tuple[int, Tensor]]:
        """Losses of the sub-steps that one critic judges together."""
        keys = [self.actors[position].step_key for position in positions]
        observations = {key: batch.observations[position] for key, position in zip(keys, positions, strict=True)}
        critic_key = self._critic_key(positions[0])
        if self._all_discrete[positions[0]]:
            with torch.no_grad():
                first, second = self.critic.predict_q_values(observations, {key: {} for key in keys}, False)[critic_key]
            assert isinstance(first, dict)
            assert isinstance(second, dict)
            return [
                (position, self._discrete_loss(batch, draws[position], position, first, second))
                for position in positions
            ]
        return self._joint_losses(batch, draws, positions, observations)

    def _discrete_loss(
        self, batch: TransitionBatch, draw: ActionDraw, position: int, first: TensorDict, second: TensorDict
    ) -> Tensor:
        alpha, weight = self._alphas[self.actors[position].step_key], _acted(batch, position)
        losses = [
            discrete_policy_loss(draw.logits[head], torch.minimum(first[head], second[head]), alpha, weight)
            for head in self._spaces[position].spaces
        ]
        return sum(losses[1:], losses[0])

    def _joint_losses(
        self,
        batch: TransitionBatch,
        draws: list[ActionDraw],
        positions: list[int],
        observations: dict[Key, TensorDict],
    ) -> list[tuple[int, Tensor]]:
        """Losses where a critic values the drawn joint action; the value counts for the first of the sub-steps."""
        keys = [self.actors[position].step_key for position in positions]
        critic_key = self._critic_key(positions[0])
        drawn = {key: draws[position].actions for key, position in zip(keys, positions, strict=True)}

        def value(observed: Mapping[Key, TensorDict], actions: dict[Key, TensorDict]) -> Tensor:
            first, second = self.critic.predict_q_values(dict(observed), actions, True)[critic_key]
            assert isinstance(first, Tensor)
            assert isinstance(second, Tensor)
            return torch.minimum(first, second)

        losses = []
        weight = _acted(batch, positions[-1])
        for index, (key, position) in enumerate(zip(keys, positions, strict=True)):
            draw, space = draws[position], self._spaces[position]
            objective = value(observations, drawn) if index == 0 else torch.zeros((), device=self.model.device)

            def alternatives(actions: TensorDict, key: Key = key) -> Tensor:
                n_options = len(next(iter(actions.values())))
                expanded = {
                    step_key: {name: tensor.expand(n_options, *tensor.shape) for name, tensor in entry.items()}
                    for step_key, entry in observations.items()
                }
                others = {
                    step_key: {name: tensor.detach().expand(n_options, *tensor.shape) for name, tensor in entry.items()}
                    for step_key, entry in drawn.items()
                }
                return value(expanded, {**others, key: actions})

            of_choices = choice_values(space, draw.logits, draw.actions, alternatives)
            if of_choices is not None:
                objective = objective + of_choices - of_choices.detach()  # contributes its gradient only
            alpha = self._alphas[key]
            losses.append((position, continuous_policy_loss(draw.expected_log_prob, objective, alpha, weight)))
        return losses

    def _critic_key(self, position: int) -> Key:
        return self._shared_key if self._is_shared else self.actors[position].step_key

    def _check_distributions(self) -> None:
        mapper = self.model.policy.distribution_mapper
        for space in {id(space): space for space in self._spaces}.values():
            classes = {head: mapper.distribution_class(head) for head in space.spaces}
            for head in check_distributions(space, classes):
                logger.warning(
                    "Action head `%s` is bounded, its distribution is not: SAC learns better with a squashed one. Set "
                    "model.distribution_mapper_config=[{action_head: %s, distribution: "
                    "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution}].",
                    head,
                    head,
                )

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
            "generator": self.generator.get_state(),
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
        self.generator.set_state(state["generator"])
        self.n_batches = state["n_batches"]


def _acted(batch: TransitionBatch, position: int) -> Tensor | None:
    """1 where the actor acted, 0 where the episode had ended before; None: it always did."""
    return None if batch.n_substeps is None or position == 0 else (batch.n_substeps > position).float()


def _observed(batch: TransitionBatch, position: int) -> Tensor | None:
    """Where there is an observation of the actor: it acted, or the episode was cut off when it was to act."""
    if batch.n_substeps is None or position == 0:
        return None
    return (batch.n_substeps > position) | ((batch.n_substeps == position) & ~batch.terminated)


def _observed_next(batch: TransitionBatch, position: int) -> Tensor | None:
    """Where there is an observation of the actor in the next step, or at least in this one."""
    if batch.n_substeps is None or batch.has_next_step is None or position == 0:
        return None
    return batch.has_next_step | (batch.n_substeps > position)


def _known(observation: TensorDict, is_known: Tensor | None) -> TensorDict:
    """In rows without an observation that of another row: nobody looks at what comes of it, but it has to be valid."""
    if is_known is None or not bool(is_known.any()):
        return observation
    rows = torch.arange(len(is_known), device=is_known.device)
    rows = torch.where(is_known, rows, is_known.to(torch.uint8).argmax())
    return {key: tensor[rows] for key, tensor in observation.items()}


def _ended_at(batch: TransitionBatch, position: int) -> Tensor:
    """Whether the episode terminated with this sub-step (not the last one of a step)."""
    if batch.n_substeps is None:
        return torch.zeros_like(batch.terminated)
    return batch.terminated & (batch.n_substeps == position + 1)
