"""Deep Q-networks: values of discrete actions, acting by them, and the trainer."""

from __future__ import annotations

import copy
import itertools
from abc import ABC
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.policy import StatesOfActor
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_model import TargetNetworks, as_float_tensors
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchSharedStateCritic, TorchStepStateCritic
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import define_epoch_stats, define_mean_by, define_time
from maze.train.trainers.common import learning
from maze.train.trainers.common.config_classes import AlgorithmConfig, Risk
from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch, as_column, bellman_targets
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import PrioritizedReplayBuffer
from maze.train.trainers.common.replay_trainer import ReplayTrainer
from maze.train.trainers.dqn.dqn_algorithm_config import DQNAlgorithmConfig
from maze.train.utils.train_utils import Part

if TYPE_CHECKING:
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer
    from maze.train.trainers.common.training_runner import TrainingRunner


TensorDict = dict[str, Tensor]


class Factor(NamedTuple):
    """A single choice among n, of which the actions of a head consist."""

    head: str
    part: slice
    """Slice of the head's logits."""
    place: int
    """Index in the head's actions."""

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
    """Return values of actions `V + A - mean(A)` (Wang et al. 2016, eq. 9), the mean over the allowed ones.

    :param value: `[B, 1]`.
    :param advantages: `[B, n]`; those of masked actions stay at the minimum.
    """
    allowed = is_allowed(advantages)
    known = advantages.masked_fill(~allowed, 0.0)
    mean = known.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(allowed, value + known - mean, advantages)


def values_of(factors: Sequence[Tensor], choices: Sequence[Tensor]) -> Tensor:
    """Return values of the chosen actions, `[B, n_factors]`, or their quantiles `[B, n_factors, n_quantiles]`.

    :param factors: Values of all actions of each factor, `[B, n]`, or their quantiles `[B, n, n_quantiles]`.
    :param choices: int64 `[B]` for each factor.
    """

    def index(values: Tensor, choice: Tensor) -> Tensor:
        return choice.unsqueeze(-1) if values.dim() == 2 else choice.view(-1, 1, 1).expand(-1, 1, values.shape[-1])

    pairs = zip(factors, choices, strict=True)
    return torch.cat([values.gather(1, index(values, choice)) for values, choice in pairs], 1)


def best_value(chooser: Sequence[Tensor], estimates: Sequence[Tensor]) -> Tensor:
    """Return the value of the best action, `[B]`: the mean over its factors (Tavakoli et al. 2018, eq. 5).

    :param chooser: Values of all actions of each factor, `[B, n]`, by which the best is chosen.
    :param estimates: Values that are returned: the same, those of other networks (double Q-learning), or quantiles
        `[B, n, n_quantiles]`, which are returned by quantile.
    """
    return values_of(estimates, [values.argmax(-1) for values in chooser]).mean(1)


def linear_schedule(first: float, last: float, n_steps: int, step: int) -> float:
    """Interpolate from `first` at step 0 to `last` at `n_steps`; constant after it.

    :param first: First value.
    :param last: Last value.
    :param n_steps: Number of steps, at least 1.
    :param step: Number of steps so far, at least 0.
    """
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
        """Return values of all actions of each factor, `[B, n]`; those of masked actions are at the minimum."""
        return self._values(observation, self.policy(observation))

    def estimates(self, observation: TensorDict) -> list[Tensor]:
        """Return the learned quantity of all actions of each factor: here their values.

        :param observation: Observations `[B, *shape]` by key.
        :return: `[B, n]` for each factor.
        """
        return self(observation)  # type: ignore[no-any-return]

    def means(self, estimates: list[Tensor]) -> list[Tensor]:
        """Return the values `[B, n]` of estimates."""
        return estimates

    def _values(self, observation: TensorDict, outputs: TensorDict) -> list[Tensor]:
        found = [outputs[head].flatten(1)[:, part] for head, part, _ in self.factors if head in outputs]
        if self.state_value is None:
            return found
        value = self.state_value({**observation, **outputs})["value"].reshape(-1, 1)
        return [dueling(value, advantages) for advantages in found]


class ActionQuantileNetwork(ActionValueNetwork):
    """Quantiles of the returns of the actions of a sub-step, whose weighted means are the values.

    The policy's logits stay values, or advantages, by which actions are chosen; heads `o` add how the quantiles differ
    from the value `q` of an action: `z_i = q + o_i - sum_j(w_j * o_j)`. They are needed in training only.

    :param policy: As of :class:`ActionValueNetwork`, like the next two.
    :param state_value: Network of state values.
    :param factors: The single choices.
    :param weights: Weights of the quantiles, `[n_quantiles]`.
    """

    weights: Tensor

    def __init__(
        self, policy: nn.Module, state_value: nn.Module | None, factors: Sequence[Factor], weights: Sequence[float]
    ) -> None:
        super().__init__(policy, state_value, factors)
        self.register_buffer("weights", torch.tensor(weights, device=next(policy.parameters()).device))
        sizes = {factor.head: factor.part.stop for factor in factors}  # the last part of a head ends it
        layers = {head: learning.output_layer(policy, (size, 1)) for head, size in sizes.items()}
        self._heads = {
            head: learning.QuantileHead(layer, sizes[head], len(weights))
            for head, layer in layers.items()
            if layer is not None
        }
        self.heads = nn.ModuleList(self._heads.values())

    @override(ActionValueNetwork)
    def means(self, estimates: list[Tensor]) -> list[Tensor]:
        return [quantiles @ self.weights for quantiles in estimates]

    @override(ActionValueNetwork)
    def estimates(self, observation: TensorDict) -> list[Tensor]:
        """Return the quantiles of all actions of each factor, `[B, n, n_quantiles]`."""
        with ExitStack() as stack:
            for watched in self._heads.values():
                stack.enter_context(watched.watching())
            outputs = self.policy(observation)
        found: list[Tensor] = []
        factors = [factor for factor in self.factors if factor.head in outputs]
        for values, (head, part, _) in zip(self._values(observation, outputs), factors, strict=True):
            if head not in self._heads:
                raise learning.no_output_layer(f"the policy network of action head `{head}`")
            offsets = self._heads[head]()[:, part]
            found.append(values.unsqueeze(-1) + offsets - (offsets @ self.weights).unsqueeze(-1))
        return found


class EpsilonGreedyPolicy(TorchPolicy):
    """Act by the networks of a policy: take the best action, or with probability `epsilon` any allowed one.

    :param policy: Its networks are shared.
    """

    def __init__(self, policy: TorchPolicy) -> None:
        separate = policy.substeps_with_separate_agent_nets
        super().__init__(policy.networks, policy.distribution_mapper, policy.device, separate)
        self.set_rng_state(policy.rng_state())
        self._factors = factors_of(self.distribution_mapper.action_space)
        self._epsilon = torch.zeros(1, dtype=torch.float64)

    @property
    def epsilon(self) -> float:
        """Probability of a random action, for each environment by itself."""
        return float(self._epsilon)

    @epsilon.setter
    def epsilon(self, value: float) -> None:
        self._epsilon.fill_(value)

    @override(TorchPolicy)
    def state_dict(self) -> dict[str, Any]:
        # workers with copies of the policy receive only its weights with each rollout
        return {**super().state_dict(), "epsilon": self._epsilon}

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
        logits = {} if logits_out is None else logits_out
        actions = super().compute_actions(observation, actor_id, True, out, logits, states)
        for factor in self._factors:
            if factor.head in actions:
                found: Any = logits[factor.head].reshape(n_envs, -1)[explorers, factor.part]
                draws = np.where(found > np.finfo(np.float32).min, self._rng.random(found.shape), -1.0).argmax(-1)
                factor.of(actions)[explorers] = draws
        return actions


Key = int | str


class DQNEvents(ABC):
    """Events of DQN, once per epoch as the mean over its updates. Percentages are of collecting and drawing."""

    @define_mean_by("step_key")
    def value_loss(self, step_key: Key, value: float) -> None:
        """Loss of the values of a sub-step's actions."""

    @define_mean_by("step_key")
    def action_value(self, step_key: Key, value: float) -> None:
        """Mean value of the actions that were taken in a sub-step."""

    @define_mean_by("step_key")
    def grad_norm(self, step_key: Key, value: float) -> None:
        """Gradient norm of the networks of a sub-step, before clipping."""

    @define_epoch_stats(np.mean)
    def epsilon(self, value: float) -> None:
        """Share of actions drawn at random."""

    @define_time
    def time_learner_rollout(self, time: float, percent: float) -> None:
        """Seconds spent on collecting transitions."""

    @define_time
    def time_sampling_from_buffer(self, time: float, percent: float) -> None:
        """Seconds spent on drawing batches from the replay buffer."""

    @define_epoch_stats(np.mean)
    def buffer_size(self, value: int) -> None:
        """Number of transitions in the replay buffer."""


class DQN(ReplayTrainer):
    """Deep Q-networks (Mnih et al. 2015), double (van Hasselt et al. 2016), with duelling heads (Wang et al. 2016),
    returns over several steps (Hessel et al. 2018) and prioritised replay (Schaul et al. 2016), each as configured.

    The logits of the policy are the values of its actions, or advantages over the value that the critic predicts of the
    state: either way its most probable action is the best one. Actions of several choices are factored (Tavakoli et al.
    2018). In structured environments the value after a sub-step is that of the next one, and a discount applies after
    the last; returns over several steps are those of whole environment steps.

    :param algorithm_config: Hyperparameters.
    :param model: Policy and state critic.
    :param workers: Collect transitions into a buffer; it has been filled to begin with.
    :param common: See :class:`~maze.train.trainers.common.replay_trainer.ReplayTrainer`.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = DQNAlgorithmConfig
    events_class: ClassVar[type[Any]] = DQNEvents
    config: DQNAlgorithmConfig
    model: TorchActorCritic

    def __init__(
        self, algorithm_config: Any, model: TorchActorCritic, workers: BaseDistributedWorkersWithBuffer, **common: Any
    ) -> None:
        super().__init__(algorithm_config, model, workers, **common)
        config, policy, self.actors = self.config, model.policy, workers.actors
        factors = factors_of(policy.distribution_mapper.action_space)
        own = [policy.network_for(actor) for actor in self.actors]
        networks: dict[nn.Module, ActionValueNetwork] = {}
        for net, actor in zip(own, self.actors, strict=True):
            state_value, critic = None, model.critic
            if config.dueling and isinstance(critic, TorchStepStateCritic):
                state_value = critic.networks[actor.step_key]
            elif config.dueling and isinstance(critic, TorchSharedStateCritic) and len(self.actors) == 1:
                state_value = next(iter(critic.networks.values()))
            elif config.dueling:
                raise ConfigError(
                    f"model.critic: duelling heads need the value of the state at each sub-step; found a "
                    f"{type(critic).__name__} for {len(self.actors)} sub-steps. Use critic=flatten_concat_step or "
                    "critic=template_state, or set algorithm.dueling=false."
                )
            if config.risk is None:
                networks[net] = ActionValueNetwork(net, state_value, factors)
            else:
                weights = Risk.parse(config.risk).weights(config.n_quantiles)
                networks[net] = ActionQuantileNetwork(net, state_value, factors, weights)
        quantile_networks = (each for each in networks.values() if isinstance(each, ActionQuantileNetwork))
        # What the model does not contain.
        self._heads = nn.ModuleList([each.heads for each in quantile_networks])
        targets = {net: copy.deepcopy(values).requires_grad_(False) for net, values in networks.items()}
        self._networks, self._targets = [networks[net] for net in own], [targets[net] for net in own]
        self._followers = TargetNetworks(targets.values(), networks.values())
        keys = [(self.actors[own.index(net)].step_key, index) for index, net in enumerate(networks)]
        named = {("grad_norm", key): values for key, values in zip(keys, networks.values(), strict=True)}
        self.optimizer = FlatAdam(named, lr=config.lr, eps=config.optimizer_eps)

    @classmethod
    @override(ReplayTrainer)
    def _replay_buffer(cls, run: TrainingRunner) -> BaseReplayBuffer:
        config: DQNAlgorithmConfig = run.algorithm
        if not config.prioritized:
            return super()._replay_buffer(run)
        seed, alpha, beta = run.agent_seed(), config.priority_alpha, config.priority_beta
        return PrioritizedReplayBuffer(config.replay_buffer_size, seed, alpha, beta)

    @classmethod
    @override(ReplayTrainer)
    def _worker_policy(cls, policy: TorchPolicy) -> TorchPolicy:
        return EpsilonGreedyPolicy(policy)

    @classmethod
    @override(ReplayTrainer)
    def _sampling_policy(cls, config: Any, worker_policy: TorchPolicy) -> Any:
        if config.initial_sampling_policy is not None:
            return config.initial_sampling_policy
        policy = EpsilonGreedyPolicy(worker_policy)
        policy.epsilon = 1.0
        return policy

    @override(ReplayTrainer)
    def _update(self) -> None:
        config, buffer = self.config, self.workers.replay_buffer
        if isinstance(buffer, PrioritizedReplayBuffer):
            buffer.beta = self._scheduled(config.priority_beta, 1.0)
        super()._update()

    @override(ReplayTrainer)
    def _prepare_acting(self, worker_policy: TorchPolicy) -> None:
        super()._prepare_acting(worker_policy)
        assert isinstance(worker_policy, EpsilonGreedyPolicy)
        worker_policy.epsilon = self._scheduled(self.config.initial_epsilon, self.config.final_epsilon)
        self.stats.add_value("epsilon", worker_policy.epsilon)

    def _scheduled(self, first: float, last: float) -> float:
        n_steps = self.n_env_steps - self.n_filling_steps
        return linear_schedule(first, last, self.config.epsilon_decay_steps, n_steps)

    @override(ReplayTrainer)
    def _learn_from(self, batch: TransitionBatch) -> None:
        losses = learning.Losses()
        config, n_step = self.config, None
        buffer: Any = self.workers.replay_buffer  # of arrays
        errors: list[Tensor] = []
        if config.n_step_returns > 1:
            n_step = buffer.columns.n_step_returns(batch.slots, config.n_step_returns, config.gamma, self.model.device)
        with torch.no_grad():
            targets = bellman_targets(batch, n_step, config.gamma, self._best_value)
        for position, actor in enumerate(self.actors):
            network, actions = self._networks[position], batch.actions[position]
            choices = [factor.of(actions).long() for factor in network.factors if factor.head in actions]
            observation = as_float_tensors(batch.observations[position], self.model.device)
            taken = values_of(network.estimates(observation), choices)
            target = targets[position].unsqueeze(1).expand_as(taken)
            if (weight := batch.acted(position)) is not None:
                # the placeholder of an action that was not taken may be masked: its value is not finite
                absent = as_column(weight == 0.0, taken)
                taken, target = (each.masked_fill(absent, 0.0) for each in (taken, target))
            if isinstance(network, ActionQuantileNetwork):
                loss = learning.quantile_huber_loss(taken, target).mean(-1)
                taken, target = taken.mean(-1), target.mean(-1)
            else:
                loss = smooth_l1_loss(taken, target, reduction="none").mean(-1)
            if isinstance(buffer, PrioritizedReplayBuffer):
                errors.append((taken - target).detach().abs().sum(-1))
            if batch.weights is not None:
                loss = loss * batch.weights
            losses.add(mean := learning.mean_of(loss, weight))
            if weight is None or bool(weight.any()):
                losses.report("value_loss", mean, actor.step_key)
                losses.report("action_value", learning.mean_of(taken.mean(-1), weight), actor.step_key)
        self.stats.add(losses, learning.gradient_step(losses, self.optimizer, config.max_grad_norm))
        if isinstance(buffer, PrioritizedReplayBuffer):
            buffer.set_errors(batch.slots, torch.stack(errors).amax(0).cpu().numpy())
        self.n_batches += 1
        if self.n_batches % config.target_update_interval == 0:
            self._followers.update(config.tau)

    def _best_value(self, position: int, observation: TensorDict) -> Tensor:
        observation = as_float_tensors(observation, self.model.device)
        target = self._targets[position]
        estimates = target.estimates(observation)
        chooser = self._networks[position](observation) if self.config.double else target.means(estimates)
        return best_value(chooser, estimates)

    @override(ReplayTrainer)
    def _parts(self) -> dict[str, Part]:
        heads: dict[str, Part] = {"quantile_heads": self._heads} if len(self._heads) else {}
        return {**super()._parts(), "optimizer": self.optimizer, "targets": self._followers, **heads}
