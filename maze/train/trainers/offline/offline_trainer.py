"""What the algorithms that learn from logged decisions share: data, statistics, runner and critic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.torch_actor_critic import TorchActorCritic, policy_of
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_action_critic import (
    TorchSharedStateActionCritic,
    TorchStateActionCritic,
    are_all_discrete,
    encode_action,
    q_values_key,
)
from maze.core.annotations import override
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping
from maze.core.trajectory_recording.datasets.logged_steps import LoggedSteps
from maze.core.utils.factory import ConfigType
from maze.core.utils.seeding import seeded_generator
from maze.distributions.utils import space_bounds
from maze.train.trainers.common.learning import Losses, Terms
from maze.train.trainers.common.observation_statistics import ObservationStatistics
from maze.train.trainers.common.trainer import EpochTrainer, Trainer
from maze.train.trainers.common.training_runner import TrainingRunner
from maze.train.trainers.dqn.action_values import factors_of, is_allowed
from maze.train.trainers.imitation.bc_data import load_dataset
from maze.train.trainers.offline.logged_batches import DecisionBatch, LoggedBatches, TensorDict
from maze.train.trainers.offline.offline_algorithm_configs import OfflineConfig
from maze.train.utils.plain_state import Part

if TYPE_CHECKING:
    from maze.train.trainers.common.config_classes import AlgorithmConfig

Key = int | str


class OfflineEvents(ABC):
    """Statistics of offline training, once per epoch as means over its updates."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def critic_loss(self, step_key: Key, value: float) -> None:
        """Temporal difference loss of the action values of a sub-step."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def critic_value(self, step_key: Key, value: float) -> None:
        """Mean value of the logged actions of a sub-step."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def conservative_loss(self, step_key: Key, value: float) -> None:
        """Log-sum-exp of the values of the allowed actions of a sub-step minus the value of the logged one (CQL)."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def value_loss(self, step_key: Key, value: float) -> None:
        """Expectile loss of the state values of a sub-step (IQL)."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def advantage_weight(self, step_key: Key, value: float) -> None:
        """Mean weight of the logged actions of a sub-step in the policy's regression (IQL)."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def policy_loss(self, step_key: Key, value: float) -> None:
        """Loss of the policy of a sub-step."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def critic_grad_norm(self, step_key: Key, value: float) -> None:
        """Gradient norm of the networks with the action values of a sub-step."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def value_grad_norm(self, step_key: Key, value: float) -> None:
        """Gradient norm of the network with the state values of a sub-step (IQL)."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def policy_grad_norm(self, step_key: Key, value: float) -> None:
        """Gradient norm of the policy network of a sub-step."""


@dataclass
class OfflineLosses(Losses):
    """Losses by sub-step."""

    critic_loss: Terms = field(default_factory=list)
    critic_value: Terms = field(default_factory=list)
    conservative_loss: Terms = field(default_factory=list)
    value_loss: Terms = field(default_factory=list)
    advantage_weight: Terms = field(default_factory=list)
    policy_loss: Terms = field(default_factory=list)


class OfflineTrainer(EpochTrainer):
    """Learns a policy from logged decisions, without taking environment steps.

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
    critic: TorchStateActionCritic

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
        self.generator = seeded_generator(seed, "cpu")
        self.batches = LoggedBatches(
            data, action_spaces, self.config.gamma, self.config.batch_size, model.device, self.generator
        )
        self.actors = self.batches.actors
        if self.config.critic is not None:
            self.critic = step_critic(critic)
            self.observation_statistics = ObservationStatistics(TorchActorCritic(model, self.critic, model.device))
        if self.observation_statistics.is_missing:
            self.observation_statistics.learn_from(
                {name: values.cpu().numpy() for name, values in observations.items()}
                for _, observations, _ in self.batches.chunks()
            )
        if self.config.critic is not None:
            self.critic.update_target_weights(1.0)
        self._require_allowed_actions()
        self.optimizers: dict[str, FlatAdam] = {}
        """Optimizers by name; those of subclasses."""

    @classmethod
    @override(Trainer)
    def build(cls, run: TrainingRunner, dataset: ConfigType | LoggedSteps = None) -> OfflineTrainer:
        """Build the trainer of a run.

        :param run: The runner.
        :param dataset: The logged decisions, or the data set (or its configuration) that they are read from.
        """
        if isinstance(dataset, LoggedSteps):
            data = dataset
        else:
            data = LoggedSteps.of_dataset(load_dataset(dataset, run.env_factory))
        data.require_spaces(run.spaces.observation_spaces_dict, run.spaces.action_spaces_dict)
        model = run.model()
        policy = policy_of(model)
        selection = run.best_model_selection(policy)
        return cls(
            run.algorithm,
            policy,
            data,
            run.spaces.action_spaces_dict,
            getattr(model, "critic", None),
            seed=run.agent_seed(),
            evaluator=run.evaluator(selection),
            model_selection=selection,
            checkpoint_file=run.checkpoint_file,
        )

    @abstractmethod
    def _learn_from(self, batches: Sequence[DecisionBatch]) -> None:
        """Take the gradient steps of an update.

        :param batches: Decisions of each actor.
        """

    @override(EpochTrainer)
    def _begin_training(self, n_epochs: int) -> None:
        super()._begin_training(n_epochs)
        for optimizer in self.optimizers.values():
            optimizer.tie()

    @override(EpochTrainer)
    def _update(self) -> None:
        self.policy.train()
        self._learn_from(self.batches.draw())

    @override(EpochTrainer)
    def _parts(self) -> dict[str, Part]:
        return {**self.optimizers, "generator": self.generator}

    def _adam(self, networks: Mapping[Any, nn.Module]) -> FlatAdam:
        return FlatAdam(networks, lr=self.config.lr, eps=1e-8)

    def _policy_adam(self) -> FlatAdam:
        return self._adam({("policy_grad_norm", key): network for key, network in self.model.networks.items()})

    def _losses(self) -> OfflineLosses:
        return OfflineLosses(torch.zeros((), device=self.model.device))

    @torch.no_grad()
    def _require_allowed_actions(self) -> None:
        heads = {
            key: spaces.Dict({head: part for head, part in space.items() if isinstance(part, _CHOICES)})
            for key, space in self.action_spaces.items()
        }
        for actor, observations, actions in self.batches.chunks():
            if not (factors := factors_of(heads[actor.step_key])):
                continue
            logits = self.model.compute_substep_policy_output(observations, actor).action_logits
            for factor in factors:
                allowed = is_allowed(logits[factor.head].flatten(1)[:, factor.part])
                is_possible = allowed.gather(1, factor.of(actions).unsqueeze(-1))
                if n_excluded := int((~is_possible).sum()):
                    raise ConfigError(
                        f"runner.dataset: sub-step {actor.step_key!r}, action head `{factor.head}`: the action mask of "
                        f"the observation excludes {n_excluded} logged actions. Was it recorded in another "
                        "environment, or with other wrappers?"
                    )


_CHOICES = (spaces.Discrete, spaces.MultiDiscrete)


def step_critic(critic: TorchStateActionCritic | None) -> TorchStateActionCritic:
    """Return the critic if it has networks for each sub-step.

    :raises ConfigError: There is none, or it evaluates all sub-steps together.
    """
    if critic is None or isinstance(critic, TorchSharedStateActionCritic):
        raise ConfigError(
            f"model.critic: offline training needs a state-action critic for each sub-step, found "
            f"{'none' if critic is None else type(critic).__name__}. Use critic=flatten_concat_state_action or "
            "critic=template_state_action."
        )
    return critic


def joint_action_values(
    pair: nn.ModuleList, action_space: spaces.Dict, observations: TensorDict, actions: TensorDict
) -> list[Tensor]:
    """Values of joint actions by each network of a critic, `[B]`; of discrete heads the mean over the heads.

    :param pair: The networks.
    :param action_space: The heads.
    :param observations: `[B, *shape]` by key.
    :param actions: `[B, *shape]` by head; continuous ones are scaled to [-1, 1].
    """
    if are_all_discrete(action_space):
        outputs = [network(observations) for network in pair]
        by_head = [
            [output[q_values_key(head)].gather(-1, taken.unsqueeze(-1)) for head, taken in actions.items()]
            for output in outputs
        ]
        return [values[0].squeeze(-1) if len(values) == 1 else torch.cat(values, -1).mean(-1) for values in by_head]
    encoded = {
        head: encode_action(space, actions[head], torch.get_default_dtype())
        for head, space in action_space.spaces.items()
    }
    return [network({**observations, **encoded})["q_value"].squeeze(-1) for network in pair]


def unscaled(space: spaces.Box, actions: Tensor) -> Tensor:
    """Actions in the unit of their space.

    :param actions: `[B, *shape]`, scaled to [-1, 1].
    """
    low, high = space_bounds(space, actions)
    return low + 0.5 * (actions + 1.0) * (high - low)


def scaled(space: spaces.Box, actions: Tensor) -> Tensor:
    """Actions scaled to [-1, 1]; the inverse of :func:`unscaled`.

    :param actions: `[B, *shape]`, in the unit of their space.
    """
    low, high = space_bounds(space, actions)
    return 2.0 * (actions - low) / (high - low) - 1.0


@dataclass
class OfflineRunner(TrainingRunner):
    """Trains on logged decisions.

    :param dataset: Configuration of the data set; it gets `conversion_env_factory`.
    """

    dataset: ConfigType = None

    trains: ClassVar[str] = "maze.train.trainers.offline.offline_trainer.OfflineTrainer"
    replaced_arguments: ClassVar[Mapping[str, str]] = {"concurrency": "runner.eval_concurrency"}

    @override(TrainingRunner)
    def build_trainer(self) -> Trainer:
        trainer_class: Any = self.trainer_type
        trainer: Trainer = trainer_class.build(self, self.dataset)
        return trainer
