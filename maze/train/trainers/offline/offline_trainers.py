"""Algorithms that learn from logged decisions: conservative and implicit Q-learning, TD3 with behavioural cloning."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import mse_loss, smooth_l1_loss

from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.torch_actor_critic import TorchActorCritic, policy_of
from maze.core.agent.torch_model import TargetNetworks, as_float_tensors, depends_on_mode
from maze.core.agent.torch_policy import InitialPolicy, TorchPolicy
from maze.core.agent.torch_state_action_critic import (
    TorchStateActionCritic,
    TorchStepStateActionCritic,
    are_all_discrete,
    encode_action,
    q_values_key,
)
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import define_mean_by
from maze.core.trajectory_recording.datasets.logged_steps import Array, LoggedSteps
from maze.core.utils.factory import ConfigType
from maze.core.utils.seeding import seeded_generator
from maze.distributions.utils import space_bounds
from maze.perception.weight_init import spread_zero_biases
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.learning import Losses, constant, gradient_step
from maze.train.trainers.common.observation_statistics import ObservationStatistics
from maze.train.trainers.common.trainer import EpochTrainer, Trainer
from maze.train.trainers.common.training_runner import TrainingRunner
from maze.train.trainers.dqn.dqn_trainer import ActionValueNetwork, best_value, factors_of, is_allowed, values_of
from maze.train.trainers.imitation.bc_data import load_dataset
from maze.train.trainers.offline.offline_algorithm_configs import CQLConfig, IQLConfig, OfflineConfig, TD3BCConfig
from maze.train.utils.train_utils import Part

Key = int | str
TensorDict = dict[str, Tensor]
# Only masked actions have so small log-probabilities.
_IMPOSSIBLE = -1e30
# Logged actions are moved within this bound: at the bounds the inverse of tanh is infinite.
_LARGEST_SCALED = 0.999


# Number of decisions that are processed at once in a pass over all data.
_CHUNK = 4096


@dataclass
class DecisionBatch:
    """Logged decisions of the agents that share a policy network, and their successors.

    :param actor: One of these actors.
    :param observations: `[B, *shape]` by key, action masks included.
    :param actions: `[B, *shape]` by head; those of `Box` heads are scaled to [-1, 1].
    :param rewards: `[B]`.
    :param discounts: Discount of the next value, `[B]`: 0 where the episode terminated, 1 between sub-steps.
    :param following: Actors that acted next, the rows of the batch in which they did, and their observations.
    """

    actor: ActorID
    observations: TensorDict
    actions: TensorDict
    rewards: Tensor
    discounts: Tensor
    following: list[tuple[ActorID, Tensor, TensorDict]]

    def targets(self, value_of: Callable[[ActorID, TensorDict], Tensor]) -> Tensor:
        """Return rewards plus discounted next values, `[B]`.

        :param value_of: Values `[n]` of observations of an actor.
        """
        values = torch.zeros_like(self.rewards)
        for actor, rows, observations in self.following:
            values.index_copy_(0, rows, value_of(actor, observations))
        return self.rewards + self.discounts * values


class LoggedBatches:
    """Draw batches of logged decisions.

    Decisions before a truncation without a recorded observation after it are left out: their targets are unknown.

    :param data: The decisions.
    :param action_spaces: Action spaces by step key.
    :param gamma: Discount per environment step.
    :param batch_size: Number of decisions of each policy network in a batch.
    :param device: Device of the tensors.
    :param generator: Source of randomness, on the CPU.
    :param network_key: Key of an actor's policy network; `None`: each actor has its own.
    :raises ConfigError: A `Box` head has no finite bounds, or an actor has no decision to learn from.
    """

    def __init__(
        self,
        data: LoggedSteps,
        action_spaces: Mapping[StepKeyType, spaces.Dict],
        gamma: float,
        batch_size: int,
        device: str,
        generator: torch.Generator,
        network_key: Callable[[ActorID], Any] | None = None,
    ) -> None:
        self._batch_size, self._device, self._generator = batch_size, device, generator
        self._observations: dict[StepKeyType, TensorDict] = {}
        self._actions: dict[StepKeyType, TensorDict] = {}
        for key, table in data.tables.items():
            self._observations[key] = {name: self._tensor(values) for name, values in table.observations.items()}
            self._actions[key] = {
                head: _encoded(head, space, table.actions[head]).to(device)
                for head, space in action_spaces[key].spaces.items()
            }
        named = [ActorID(*actor) for actor in zip(data.step_keys, data.agent_ids.tolist(), strict=True)]
        by_network: dict[Any, ActorID] = {}
        shared = {a: by_network.setdefault(network_key(a) if network_key else a, a) for a in dict.fromkeys(named)}
        self.actors = list(by_network.values())
        """The first actor of each policy network, in the order of their first decisions."""
        numbers = {actor: number for number, actor in enumerate(self.actors)}
        actors = np.array([numbers[shared[actor]] for actor in named])
        next_actors = np.roll(actors, -1)
        next_actors[data.episode_starts[1:] - 1] = actors[data.episode_starts[:-1]]
        discounts = data.discounts(gamma)
        columns = {
            "rows": data.rows,
            "rewards": data.rewards.astype(np.float32),
            "discounts": discounts.astype(np.float32),
            "next_rows": data.next_rows,
            "next_actors": np.where(data.terminated, -1, next_actors),
        }
        self._decisions: dict[ActorID, TensorDict] = {}
        for actor, number in numbers.items():
            own = np.flatnonzero((actors == number) & data.has_target)
            if not len(own):
                raise ConfigError(
                    f"runner.dataset: expected decisions of actor {tuple(actor)} with next observations or "
                    "terminations, found none. Record next observations, or episodes that end."
                )
            self._decisions[actor] = {name: self._tensor(values[own]) for name, values in columns.items()}

    def draw(self) -> list[DecisionBatch]:
        """Draw decisions of each policy network, with replacement."""
        drawn = []
        for actor, columns in self._decisions.items():
            places = torch.randint(len(columns["rows"]), (self._batch_size,), generator=self._generator)
            drawn.append(self.at(actor, places.to(self._device)))
        return drawn

    def chunks(self) -> Iterator[tuple[ActorID, TensorDict, TensorDict]]:
        """Yield all decisions in chunks: actor, observations and actions."""
        for actor, columns in self._decisions.items():
            for rows in torch.split(columns["rows"], _CHUNK):
                yield actor, self._observed(actor, rows), self._taken(actor, rows)

    def at(self, actor: ActorID, places: Tensor) -> DecisionBatch:
        """Return decisions of an actor.

        :param actor: The actor.
        :param places: Their places among the actor's decisions with a known target, `[B]`.
        """
        found = {name: column.index_select(0, places) for name, column in self._decisions[actor].items()}
        following = []
        for number, other in enumerate(self.actors):
            rows = (found["next_actors"] == number).nonzero().squeeze(-1)
            if len(rows):
                following.append((other, rows, self._observed(other, found["next_rows"].index_select(0, rows))))
        observed, taken = self._observed(actor, found["rows"]), self._taken(actor, found["rows"])
        return DecisionBatch(actor, observed, taken, found["rewards"], found["discounts"], following)

    def _observed(self, actor: ActorID, rows: Tensor) -> TensorDict:
        columns = self._observations[actor.step_key]
        return as_float_tensors({name: column.index_select(0, rows) for name, column in columns.items()}, self._device)

    def _taken(self, actor: ActorID, rows: Tensor) -> TensorDict:
        return {head: column.index_select(0, rows) for head, column in self._actions[actor.step_key].items()}

    def _tensor(self, values: Array) -> Tensor:
        return torch.as_tensor(values, device=self._device)


def scaled(space: spaces.Box, actions: Tensor) -> Tensor:
    """Return actions scaled to [-1, 1] by the bounds of their space; the inverse of :func:`unscaled`.

    :param space: A box with finite bounds, low < high.
    :param actions: `[B, *shape]`, in the unit of the space; those beyond the bounds are not clipped.
    :return: `[B, *shape]`.
    """
    low, high = space_bounds(space, actions)
    return 2.0 * (actions - low) / (high - low) - 1.0


def _encoded(head: str, space: spaces.Space[object], actions: Array) -> Tensor:
    """Return continuous actions scaled to [-1, 1], and choices as integers."""
    if not isinstance(space, spaces.Box):
        return torch.as_tensor(actions.astype(np.int64))
    if not space.is_bounded() or not (space.low < space.high).all():
        raise ConfigError(
            f"Action head `{head}`: offline training scales continuous actions to [-1, 1] by the bounds of the space, "
            f"found {space}. Give the action space finite bounds with low < high."
        )
    return scaled(space, torch.as_tensor(actions.astype(np.float32))).clamp(-1.0, 1.0)


class OfflineEvents(ABC):
    """Statistics of offline training, once per epoch as means over its updates."""

    @define_mean_by("step_key")
    def critic_loss(self, step_key: Key, value: float) -> None:
        """Temporal difference loss of the action values of a sub-step."""

    @define_mean_by("step_key")
    def critic_value(self, step_key: Key, value: float) -> None:
        """Mean value of the logged actions of a sub-step."""

    @define_mean_by("step_key")
    def conservative_loss(self, step_key: Key, value: float) -> None:
        """Log-sum-exp of the values of the allowed actions of a sub-step minus the value of the logged one (CQL)."""

    @define_mean_by("step_key")
    def value_loss(self, step_key: Key, value: float) -> None:
        """Expectile loss of the state values of a sub-step (IQL)."""

    @define_mean_by("step_key")
    def policy_loss(self, step_key: Key, value: float) -> None:
        """Loss of the policy of a sub-step."""

    @define_mean_by("step_key")
    def critic_grad_norm(self, step_key: Key, value: float) -> None:
        """Gradient norm of the networks with the action values of a sub-step."""

    @define_mean_by("step_key")
    def value_grad_norm(self, step_key: Key, value: float) -> None:
        """Gradient norm of the network with the state values of a sub-step (IQL)."""

    @define_mean_by("step_key")
    def policy_grad_norm(self, step_key: Key, value: float) -> None:
        """Gradient norm of the policy network of a sub-step."""


class OfflineTrainer(EpochTrainer):
    """Learn a policy from logged decisions, without taking environment steps.

    The trained and saved model is the policy, so that PPO and SAC can start with its weights. Critics and target
    networks are parts of the state of the run.

    :param algorithm_config: Hyperparameters.
    :param model: The policy.
    :param data: The logged decisions.
    :param action_spaces: Action spaces by step key.
    :param critic: The state-action critic, for algorithms that have one.
    :param seed: Seed of the batches; `None` draws one from torch's global generator.
    :param common: See :class:`~maze.train.trainers.common.trainer.EpochTrainer`.
    :raises ConfigError: The log has actions that its action masks exclude, or a head that cannot be learned.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = OfflineConfig
    events_class: ClassVar[type[Any]] = OfflineEvents
    learns_observation_statistics: ClassVar[bool] = True
    model: TorchPolicy
    critic: TorchStepStateActionCritic

    def __init__(
        self,
        algorithm_config: Any,
        model: TorchPolicy,
        data: LoggedSteps,
        action_spaces: Mapping[StepKeyType, spaces.Dict],
        critic: TorchStateActionCritic | None = None,
        *,
        seed: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(algorithm_config, model, **common)
        self.action_spaces = action_spaces
        self._require_learnable_actions()  # before bounds of actions are missed that no bounds would help
        self._has_modes = depends_on_mode(model.networks.values())
        self.generator = seeded_generator(seed, "cpu")
        settings = (self.config.gamma, self.config.batch_size, model.device, self.generator)
        self.batches = LoggedBatches(data, action_spaces, *settings, model.network_key)
        self.actors = self.batches.actors
        if self.config.critic is not None:
            if not isinstance(critic, TorchStepStateActionCritic):
                raise ConfigError(
                    f"model.critic: offline training needs a state-action critic for each sub-step, found "
                    f"{type(critic).__name__}. Use critic=flatten_concat_state_action or critic=template_state_action."
                )
            self.critic = critic
            self.observation_statistics = ObservationStatistics(TorchActorCritic(model, self.critic, model.device))
        if self.observation_statistics.is_missing:
            self.observation_statistics.learn_from(
                {name: values.cpu().numpy() for name, values in observations.items()}
                for _, observations, _ in self.batches.chunks()
            )
        if self.config.critic is not None:
            self.critic.update_target_weights(1.0)
        self.model.eval()
        for actor, observations, actions in self.batches.chunks():
            with torch.no_grad():
                distribution = self.model.compute_substep_policy_output(observations, actor).prob_dist
            if n_excluded := int((distribution.joint_log_prob(actions) < _IMPOSSIBLE).sum()):
                raise ConfigError(
                    f"runner.dataset: sub-step {actor.step_key!r}: the action masks of the observations exclude "
                    f"{n_excluded} of {len(next(iter(actions.values())))} logged actions. Was it recorded in another "
                    "environment, or with other wrappers?"
                )
        self.optimizers: dict[str, FlatAdam] = {}
        """Optimizers by name; those of subclasses."""

    def _require_learnable_actions(self) -> None:
        """Raise a `ConfigError` if the algorithm cannot learn an action head, whatever the bounds of its space are."""

    @classmethod
    @override(Trainer)
    def build(cls, run: Any) -> OfflineTrainer:
        """Build the trainer of a run; biases of zero become random ones (:func:`spread_zero_biases`).

        :param run: The :class:`OfflineRunner`.
        """
        data = run.dataset
        if not isinstance(data, LoggedSteps):
            data = LoggedSteps.of_dataset(load_dataset(data, run.env_factory))
        data.require_spaces(run.spaces.observation_spaces_dict, run.spaces.action_spaces_dict)
        model = run.model()
        policy, critic = policy_of(model), getattr(model, "critic", None)
        for part in (policy, critic):
            for network in () if part is None else part.networks.values():
                network.apply(spread_zero_biases)
        common = run.common_arguments(policy)
        return cls(run.algorithm, policy, data, run.spaces.action_spaces_dict, critic, seed=run.agent_seed(), **common)

    @abstractmethod
    def _learn_from(self, batches: Sequence[DecisionBatch]) -> None:
        """Take the gradient steps of an update.

        :param batches: Decisions of each actor.
        """

    @override(EpochTrainer)
    def _update(self) -> None:
        if self._has_modes:
            self.policy.train()
        self._learn_from(self.batches.draw())

    @override(EpochTrainer)
    def _parts(self) -> dict[str, Part]:
        return {**self.optimizers, "generator": self.generator}

    def _adam(self, networks: Mapping[Any, nn.Module]) -> FlatAdam:
        return FlatAdam(networks, lr=self.config.lr, eps=1e-8)

    def _critics(self) -> dict[Any, nn.Module]:
        return {("critic_grad_norm", key): pair for key, pair in self.critic.networks.items()}

    def _policy_adam(self) -> FlatAdam:
        return self._adam({("policy_grad_norm", key): network for key, network in self.model.networks.items()})


def joint_action_values(
    pair: nn.ModuleList, action_space: spaces.Dict, observations: TensorDict, actions: TensorDict
) -> list[Tensor]:
    """Return values of joint actions by each network of a critic, `[B]`; of discrete heads the mean over the heads.

    :param pair: The networks.
    :param action_space: The heads.
    :param observations: `[B, *shape]` by key.
    :param actions: `[B, *shape]` by head; continuous ones are scaled to [-1, 1].
    """
    if are_all_discrete(action_space):
        outputs = ([network(observations)[q_values_key(head)] for head in actions] for network in pair)
        return [values_of(of_heads, [*actions.values()]).mean(-1) for of_heads in outputs]
    dtype = torch.get_default_dtype()
    encoded = {head: encode_action(space, actions[head], dtype) for head, space in action_space.spaces.items()}
    return [network({**observations, **encoded})["q_value"].squeeze(-1) for network in pair]


def unscaled(space: spaces.Box, actions: Tensor) -> Tensor:
    """Return actions in the unit of their space; the inverse of :func:`scaled`.

    :param space: A box with finite bounds.
    :param actions: `[B, *shape]`, scaled to [-1, 1].
    :return: `[B, *shape]`.
    """
    low, high = space_bounds(space, actions)
    return low + 0.5 * (actions + 1.0) * (high - low)


def conservative_loss(values: Sequence[Tensor], taken: Tensor) -> Tensor:
    """Return log-sum-exp of allowed actions' values minus the logged one's value (Kumar et al. 2020, eq. 4).

    :param values: Values of all actions of each factor, `[B, n]`; those of masked actions are at the minimum.
    :param taken: Values of the logged actions, `[B, n_factors]`.
    :return: The mean, `[]`.
    """
    return (torch.stack([of_factor.logsumexp(-1) for of_factor in values], -1) - taken).mean()


class CQL(OfflineTrainer):
    """Conservative Q-learning (Kumar et al. 2020) with double Q-learning targets, for discrete actions.

    The logits of the policy are the values of its actions, as in DQN without duelling heads. Actions of several choices
    are factored (Tavakoli et al. 2018). Masked actions are in no maximum and in no log-sum-exp.

    :param arguments: See :class:`~maze.train.trainers.offline.offline_trainers.OfflineTrainer`.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = CQLConfig
    config: CQLConfig

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._networks = {
            actor: ActionValueNetwork(self.model.network_for(actor), None, self._factors[actor.step_key])
            for actor in self.actors
        }
        self.target_networks = copy.deepcopy(self._networks)
        self._followers = TargetNetworks(self.target_networks.values(), self._networks.values())
        self.optimizers["optimizer"] = self._policy_adam()

    @override(OfflineTrainer)
    def _require_learnable_actions(self) -> None:
        self._factors = {key: factors_of(space) for key, space in self.action_spaces.items()}

    @override(OfflineTrainer)
    def _learn_from(self, batches: Sequence[DecisionBatch]) -> None:
        losses = Losses()
        for batch in batches:
            network, key = self._networks[batch.actor], batch.actor.step_key
            with torch.no_grad():
                target = batch.targets(self._best_value)
            values = network(batch.observations)
            taken = values_of(values, [factor.of(batch.actions) for factor in network.factors])
            loss = smooth_l1_loss(taken, target.unsqueeze(-1).expand_as(taken))
            conservative = conservative_loss(values, taken)
            losses.report("critic_loss", loss, key, 1.0)
            losses.report("conservative_loss", conservative, key, self.config.alpha)
            losses.report("critic_value", taken.mean(), key)
        self.stats.add(losses, gradient_step(losses, self.optimizers["optimizer"]))
        if (self.n_updates + 1) % self.config.target_update_interval == 0:
            self._followers.update(self.config.tau)

    def _best_value(self, actor: ActorID, observations: TensorDict) -> Tensor:
        return best_value(self._networks[actor](observations), self.target_networks[actor](observations))

    @override(OfflineTrainer)
    def _parts(self) -> dict[str, Part]:
        return {**super()._parts(), "targets": self._followers}


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Return the squared error `|expectile - 1(difference < 0)| * difference**2` (Kostrikov et al. 2021, eq. 5).

    :param difference: Action values minus state values, `[B]`.
    :param expectile: In (0, 1); 0.5: half of the squared error, towards 1: state values near the largest action values.
    :return: The mean, `[]`.
    """
    return torch.where(difference < 0.0, 1.0 - expectile, expectile).mul(difference.square()).mean()


def advantage_weights(advantages: Tensor, inverse_temperature: float, max_weight: float) -> Tensor:
    """Return weights `exp(inverse_temperature * advantage)` of the regression of the policy (eq. 7), limited, `[B]`.

    :param advantages: `[B]`.
    :param inverse_temperature: Factor, at least 0; 0: all weights are 1.
    :param max_weight: Upper limit of the weights.
    """
    return (inverse_temperature * advantages).exp().clamp(max=max_weight)


class StateValueNetwork(nn.Module):
    """State values of a sub-step: a copy of the policy network with a linear output over the logits of allowed actions.

    :param policy: The policy network.
    :param logits_shapes: Shape of the logits by head, without batch dimensions.
    """

    def __init__(self, policy: nn.Module, logits_shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.policy = copy.deepcopy(policy)
        self._heads = list(logits_shapes)
        self.value = nn.Linear(sum(math.prod(shape) for shape in logits_shapes.values()), 1)

    @override(nn.Module)
    def forward(self, observations: TensorDict) -> Tensor:
        """Return values, `[B]`."""
        outputs = self.policy(observations)
        logits = torch.cat([outputs[head].flatten(1) for head in self._heads], -1)
        values: Tensor = self.value(logits.masked_fill(~is_allowed(logits), 0.0))
        return values.squeeze(-1)


class IQL(OfflineTrainer):
    """Implicit Q-learning (Kostrikov et al. 2021): no action that was not logged is evaluated.

    State values are an expectile of the action values of logged actions, action values learn from state values, and the
    policy is regressed on logged actions with weights by their advantages. Each sub-step has a state value.

    :param arguments: See :class:`~maze.train.trainers.offline.offline_trainers.OfflineTrainer`.
    :param value_networks: Networks of the state values by key of the policy network, from observations to `[B]`;
        `None`: copies of the policy networks with a linear output. They are critics: they learn from the data, also
        where the policy starts with loaded weights.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = IQLConfig
    config: IQLConfig

    def __init__(self, *arguments: Any, value_networks: Mapping[Any, nn.Module] | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._followers = self.critic.followers()
        mapper = self.model.distribution_mapper
        self.value_networks: dict[Any, nn.Module] = dict(value_networks or {})
        for actor in self.actors if value_networks is None else ():
            heads = self.action_spaces[actor.step_key].spaces
            shapes = {head: mapper.required_logits_shape(head) for head in heads}
            network = StateValueNetwork(self.model.network_for(actor), shapes).to(self.model.device)
            self.value_networks[self.model.network_key(actor)] = network
        values = {("value_grad_norm", key): network for key, network in self.value_networks.items()}
        self.optimizers["critic_optimizer"] = self._adam({**self._critics(), **values})
        self.optimizers["policy_optimizer"] = self._policy_adam()

    @override(OfflineTrainer)
    def _learn_from(self, batches: Sequence[DecisionBatch]) -> None:
        config, losses = self.config, Losses()
        logged_values = []
        for batch in batches:
            key, space = batch.actor.step_key, self.action_spaces[batch.actor.step_key]
            with torch.no_grad():
                logged = torch.minimum(
                    *joint_action_values(self.critic.target_networks[key], space, batch.observations, batch.actions)
                )
                target = batch.targets(self._value)
            logged_values.append(logged)
            value_loss = expectile_loss(logged - self._value(batch.actor, batch.observations), config.expectile)
            q_values = joint_action_values(self.critic.networks[key], space, batch.observations, batch.actions)
            critic_loss = mse_loss(q_values[0], target) + mse_loss(q_values[1], target)
            losses.report("value_loss", value_loss, key, 1.0)
            losses.report("critic_loss", critic_loss, key, 1.0)
            losses.report("critic_value", logged.mean(), key)
        self.stats.add(losses, gradient_step(losses, self.optimizers["critic_optimizer"]))
        losses = Losses()
        for batch, logged in zip(batches, logged_values, strict=True):
            key = batch.actor.step_key
            with torch.no_grad():
                advantages = logged - self._value(batch.actor, batch.observations)
            weights = advantage_weights(advantages, config.inverse_temperature, config.max_weight)
            output = self.model.compute_substep_policy_output(batch.observations, batch.actor)
            actions = {
                head: unscaled(space, batch.actions[head].clamp(-_LARGEST_SCALED, _LARGEST_SCALED))
                if isinstance(space, spaces.Box)
                else batch.actions[head]
                for head, space in self.action_spaces[key].spaces.items()
            }
            loss = -(weights * output.prob_dist.joint_log_prob(actions)).mean()
            losses.report("policy_loss", loss, key, 1.0)
        self.stats.add(losses, gradient_step(losses, self.optimizers["policy_optimizer"]))
        self._followers.update(config.tau)

    def _value(self, actor: ActorID, observations: TensorDict) -> Tensor:
        values: Tensor = self.value_networks[self.model.network_key(actor)](observations)
        return values

    @override(OfflineTrainer)
    def _parts(self) -> dict[str, Part]:
        return {"critic": self.critic, "values": nn.ModuleList(self.value_networks.values()), **super()._parts()}


def policy_loss(values: Tensor, distances: Tensor, alpha: float) -> Tensor:
    """Return `distance - alpha * Q / mean(|Q|)` (Fujimoto and Gu 2021, eq. 3 to 5).

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

    :param arguments: See :class:`~maze.train.trainers.offline.offline_trainers.OfflineTrainer`.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = TD3BCConfig
    config: TD3BCConfig

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._target_policy = InitialPolicy(self.model).policy
        pairs = (*self.model.networks.values(), *self.critic.networks.values())
        targets = (*self._target_policy.networks.values(), *self.critic.target_networks.values())
        self._followers = TargetNetworks(targets, pairs)
        self._critic_parameters = self.critic.parameters()
        self.optimizers["critic_optimizer"] = self._adam(self._critics())
        self.optimizers["policy_optimizer"] = self._policy_adam()

    @override(OfflineTrainer)
    def _require_learnable_actions(self) -> None:
        for of_substep in self.action_spaces.values():
            for head, space in of_substep.spaces.items():
                if not isinstance(space, spaces.Box):
                    raise ConfigError(
                        f"env: action head `{head}` is {space}, but TD3+BC learns Box actions. Use algorithm=iql."
                    )

    @override(OfflineTrainer)
    def _learn_from(self, batches: Sequence[DecisionBatch]) -> None:
        losses = Losses()
        for batch in batches:
            key = batch.actor.step_key
            with torch.no_grad():
                target = batch.targets(self._next_value)
            first, second = joint_action_values(
                self.critic.networks[key], self.action_spaces[key], batch.observations, batch.actions
            )
            loss = mse_loss(first, target) + mse_loss(second, target)
            losses.report("critic_loss", loss, key, 1.0)
            losses.report("critic_value", first.mean(), key)
        self.stats.add(losses, gradient_step(losses, self.optimizers["critic_optimizer"]))
        if (self.n_updates + 1) % self.config.policy_delay:
            return
        losses = Losses()
        for batch in batches:
            key = batch.actor.step_key
            actions = self._actions(self.model, batch.actor, batch.observations)
            pair = self.critic.networks[key][:1]
            with constant(self._critic_parameters):
                values = joint_action_values(pair, self.action_spaces[key], batch.observations, actions)
            distance = torch.stack([mse_loss(taken, batch.actions[head]) for head, taken in actions.items()]).mean()
            loss = policy_loss(values[0], distance, self.config.alpha)
            losses.report("policy_loss", loss, key, 1.0)
        self.stats.add(losses, gradient_step(losses, self.optimizers["policy_optimizer"]))
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
        """Return the deterministic actions, scaled to [-1, 1]."""
        heads: Any = self.action_spaces[actor.step_key].spaces
        chosen = policy.compute_substep_policy_output(observations, actor).prob_dist.deterministic_sample()
        return {head: scaled(space, chosen[head]) for head, space in heads.items()}

    @override(OfflineTrainer)
    def _parts(self) -> dict[str, Part]:
        return {"critic": self.critic, "targets": self._followers, **super()._parts()}


@dataclass
class OfflineRunner(TrainingRunner):
    """Train on logged decisions.

    :param dataset: The logged decisions, or the data set (or its configuration) that they are read from; it gets
        `conversion_env_factory`.
    """

    dataset: ConfigType = None

    trains: ClassVar[str] = "maze.train.trainers.offline.offline_trainers.OfflineTrainer"
    replaced_arguments: ClassVar[Mapping[str, str]] = {"concurrency": "runner.eval_concurrency"}
