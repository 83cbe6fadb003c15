"""Policy and critics the way SAC asks them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from maze.core.agent.dense_networks import JointEvaluation
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_state_action_critic import TorchSharedStateActionCritic, TorchStateActionCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.train.trainers.common.replay_buffer.transitions import TensorDict
from maze.train.trainers.sac.action_draws import ActionDraw, check_distributions, draw_actions

logger = logging.getLogger(__name__)

Key = Any
Alphas = dict[Key, Tensor]


class SACNetworks:
    """The networks of an actor-critic whose actors act in a fixed order.

    :param model: Policy and state-action critic, on their device.
    :param actors: The actors of an environment step, in their order.
    :param seed: Seed of the actions drawn for learning.
    """

    def __init__(self, model: TorchActorCritic, actors: list[ActorID], seed: int) -> None:
        if not isinstance(model.critic, TorchStateActionCritic):
            raise ConfigError(
                f"model.critic: SAC needs a state-action critic, found a {type(model.critic).__name__}. Choose one "
                "with `critic=flatten_concat_state_action` or `critic=template_state_action`."
            )
        self.policy = model.policy
        self.critic: TorchStateActionCritic = model.critic
        self.device = model.device
        self.actors = actors
        self.spaces = [self.critic.action_spaces_dict[actor.step_key] for actor in actors]
        self.step_keys = list(dict.fromkeys(actor.step_key for actor in actors))
        self.is_shared = isinstance(self.critic, TorchSharedStateActionCritic)
        if self.is_shared and len(self.step_keys) < len(actors):
            raise ConfigError(
                f"model.critic: a shared state-action critic tells the actors of a step by their step keys, but some "
                f"of {actors} have the same. Use maze.perception.models.critics.StateActionCriticComposer."
            )
        self.shared_key: Key = next(iter(self.critic.networks))
        self.all_discrete = [
            self.critic.only_discrete_spaces[self.critic_key(position)] for position in range(len(actors))
        ]
        self._check_distributions()
        self._policy_networks = [JointEvaluation([self.policy.network_for(actor)]) for actor in actors]
        self.generator = torch.Generator(device=model.device)
        self.generator.manual_seed(seed)

    def critic_key(self, position: int) -> Key:
        """The critic that judges an actor."""
        return self.shared_key if self.is_shared else self.actors[position].step_key

    def draw(self, position: int, observation: TensorDict) -> ActionDraw:
        """Actions of an actor, with gradients."""
        network = self._policy_networks[position]
        output = self.policy.substep_output_by(lambda x: network(x)[0], observation, self.actors[position])
        return draw_actions(output, self.spaces[position], self.generator, not self.all_discrete[position])

    def soft_value(
        self, positions: list[int], observations: list[TensorDict], draws: list[ActionDraw], alphas: Alphas
    ) -> Tensor:
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
            alphas,
        )[self.critic_key(positions[0])]
        if isinstance(value, Tensor):
            return value
        # by head, each with its own entropy only: the mean of the values, and the entropies of all heads
        bonuses = {
            head: -alphas[key] * log_prob.detach()
            for key, draw in zip(keys, draws, strict=True)
            for head, log_prob in draw.expected_log_probs.items()
        }
        if len(bonuses) == 1:
            return next(iter(value.values()))
        bonus = torch.stack(list(bonuses.values()))
        return torch.stack([value[head] for head in bonuses]).mean(0) - bonus.mean(0) + bonus.sum(0)

    def _check_distributions(self) -> None:
        mapper = self.policy.distribution_mapper
        for space in {id(space): space for space in self.spaces}.values():
            classes = {head: mapper.distribution_class(head) for head in space.spaces}
            for head in check_distributions(space, classes):
                logger.warning(
                    "Action head `%s` is bounded, its distribution is not: SAC learns better with a squashed one. Set "
                    "model.distribution_mapper_config=[{action_head: %s, distribution: "
                    "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution}].",
                    head,
                    head,
                )
