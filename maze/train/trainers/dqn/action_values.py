"""Values of discrete actions: their mathematics, and acting by them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maze.core.agent.hidden_states import StatesOfActor
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.train.trainers.common.replay_buffer.transitions import NStepReturns, TransitionBatch

TensorDict = dict[str, Tensor]


class Factor(NamedTuple):
    """A single choice among n, of which the actions of a head consist."""

    head: str
    part: slice
    """Its part of the head's logits."""
    place: int
    """Its place in the head's actions."""

    def of(self, actions: Mapping[str, Any]) -> Any:
        """Return the chosen actions, `[B]`: a view, where the actions allow it.

        :param actions: Arrays or tensors `[B, ...]` by head.
        """
        return actions[self.head].reshape(len(actions[self.head]), -1)[:, self.place]


def factors_of(action_space: spaces.Dict) -> list[Factor]:
    """Return the single choices that actions consist of.

    :param action_space: `Discrete` and `MultiDiscrete` spaces by head.
    :raises ConfigError: One of them is another space.
    """
    factors = []
    for head, space in action_space.spaces.items():
        if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            raise ConfigError(
                f"env: action head `{head}` is {space}, but DQN and CQL choose among Discrete and MultiDiscrete "
                "actions. Discretise it (DiscretizeActionsWrapper), or train with SAC, PPO or IQL."
            )
        ends = np.cumsum(space.n if isinstance(space, spaces.Discrete) else space.nvec).tolist()
        factors += [Factor(head, slice(*part), place) for place, part in enumerate(itertools.pairwise([0, *ends]))]
    return factors


def is_allowed(logits: Tensor) -> Tensor:
    """Return which logits `[..., n]` are not masked; masked ones are the finite minimum or minus infinity."""
    return logits > torch.finfo(logits.dtype).min


def dueling(value: Tensor, advantages: Tensor) -> Tensor:
    """Values of actions `V + A - mean(A)` (Wang et al. 2016, eq. 9), the mean over the allowed ones.

    :param value: `[B, 1]`.
    :param advantages: `[B, n]`; those of masked actions stay at the minimum.
    """
    allowed = is_allowed(advantages)
    known = advantages.masked_fill(~allowed, 0.0)
    mean = known.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(allowed, value + known - mean, advantages)


def values_of(factors: Sequence[Tensor], choices: Sequence[Tensor]) -> Tensor:
    """Values of the chosen actions, `[B, n_factors]`.

    :param factors: Values of all actions of each factor, `[B, n]`.
    :param choices: int64 `[B]` for each factor.
    """
    return torch.cat(
        [values.gather(-1, choice.unsqueeze(-1)) for values, choice in zip(factors, choices, strict=True)], -1
    )


def best_value(chooser: Sequence[Tensor], teller: Sequence[Tensor]) -> Tensor:
    """Value of the best action, `[B]`: the mean over its factors (Tavakoli et al. 2018, eq. 5).

    :param chooser: Values of all actions of each factor, `[B, n]`, by which the best is chosen.
    :param teller: Values that count: the same, or those of other networks (double Q-learning).
    """
    return values_of(teller, [values.argmax(-1) for values in chooser]).mean(-1)


def bellman_targets(
    batch: TransitionBatch,
    n_step: NStepReturns | None,
    gamma: float,
    value_of: Callable[[int, TensorDict], Tensor],
) -> list[Tensor]:
    """Targets of the actions taken in each sub-step, `[B]` by actor.

    One step: the reward of the sub-step plus the value of the next sub-step, which is discounted where it begins
    another environment step. Several steps: the rewards of the rest of this environment step and of those after it,
    plus the discounted value of what is observed then. After a termination nothing is added.

    :param batch: Transitions; targets of sub-steps that were not taken have no meaning.
    :param n_step: N-step returns; `None`: one step counts.
    :param gamma: Discount per environment step.
    :param value_of: Values `[B]` of the observations of the actor at a position.
    """
    if n_step is not None:
        value = value_of(0, n_step.next_observations[0])
        if n_step.next_actor is not None:
            for position in range(1, len(batch.actors)):
                own = value_of(position, n_step.next_observations[position])
                value = torch.where(n_step.next_actor == position, own, value)
        following = n_step.discounts * value
        return [torch.where(n_step.terminated, reward, reward + following) for reward in n_step.rewards.unbind(-1)]
    targets = []
    for position, reward in enumerate(batch.rewards.unbind(-1)):
        if position + 1 == len(batch.actors):
            ended, following = batch.terminated, gamma * value_of(0, batch.next_observations[0])
        else:
            ended, following = batch.ended_at(position), value_of(position + 1, batch.observations[position + 1])
        targets.append(torch.where(ended, reward, reward + following))
    return targets


def linear_schedule(first: float, last: float, n_steps: int, step: int) -> float:
    """From `first` at step 0 to `last` at `n_steps`, and constant after it."""
    return first + (last - first) * min(1.0, step / n_steps)


class ActionValueNetwork(nn.Module):
    """Values of the actions of a sub-step, from its policy network and, for duelling heads, a network of state values.

    :param policy: Returns logits by action head, and perhaps embeddings that the other network takes.
    :param state_value: Returns `value`; `None`: the logits are the values.
    :param factors: The single choices of the action heads, perhaps of those of other sub-steps as well.
    """

    def __init__(self, policy: nn.Module, state_value: nn.Module | None, factors: Sequence[Factor]) -> None:
        super().__init__()
        self.policy = policy
        self.state_value = state_value
        self.factors = factors

    @override(nn.Module)
    def forward(self, observation: TensorDict) -> list[Tensor]:
        """Values of all actions of each factor, `[B, n]`; those of masked actions are at the minimum."""
        outputs: TensorDict = self.policy(observation)
        found = [outputs[head].flatten(1)[:, part] for head, part, _ in self.factors if head in outputs]
        if self.state_value is None:
            return found
        value = self.state_value({**observation, **outputs})["value"].reshape(-1, 1)
        return [dueling(value, advantages) for advantages in found]


class EpsilonGreedyPolicy(TorchPolicy):
    """Acts by the networks of a policy: takes the best action, or with probability `epsilon` any allowed one.

    :param policy: Its networks are shared.
    """

    epsilon: float = 0.0
    """Probability of a random action, for each environment by itself."""

    def __init__(self, policy: TorchPolicy) -> None:
        separate = policy.substeps_with_separate_agent_nets
        super().__init__(policy.networks, policy.distribution_mapper, policy.device, separate)
        self.set_rng_state(policy.rng_state())
        self._factors = factors_of(self.distribution_mapper.action_space)

    @override(TorchPolicy)
    def compute_actions(
        self,
        observation: Mapping[str, np.ndarray],
        actor_id: ActorID | None = None,
        deterministic: bool = False,
        out: dict[str, np.ndarray] | None = None,
        logits_out: dict[str, np.ndarray] | None = None,
        states: StatesOfActor | None = None,
    ) -> dict[str, np.ndarray]:
        n_envs = len(next(iter(observation.values())))
        explorers = np.flatnonzero(self._rng.random(n_envs) < (0.0 if deterministic else self.epsilon))
        if not len(explorers):
            return super().compute_actions(observation, actor_id, True, out, logits_out, states)
        mapper = self.distribution_mapper
        logits = logits_out or {
            head: np.empty((n_envs, *mapper.required_logits_shape(head)), np.float32) for head in mapper.action_heads
        }
        actions = super().compute_actions(observation, actor_id, True, out, logits, states)
        for factor in self._factors:
            if factor.head in actions:
                found: Any = logits[factor.head].reshape(n_envs, -1)[explorers, factor.part]
                draws = np.where(found > np.finfo(np.float32).min, self._rng.random(found.shape), -1.0).argmax(-1)
                factor.of(actions)[explorers] = draws
        return actions
