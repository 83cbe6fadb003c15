"""What A2C, PPO and IMPALA have in common: what an update consists of."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from maze.core.agent.torch_model import resolve_device
from maze.core.agent.torch_state_critic import TorchStateCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.checkpoint import load_into
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.actor_critic.actor_critic_config import ActorCriticConfig
from maze.train.trainers.common.actor_critic.actor_critic_events import ActorCriticEvents, SubstepKey
from maze.train.trainers.common.actor_critic.flat_adam import FlatAdam
from maze.train.trainers.common.actor_critic.losses import normalize_advantage, value_loss
from maze.train.trainers.common.actor_critic.lr_schedule import scheduled_lr
from maze.train.trainers.common.actor_critic.non_finite import columns_as_tensors, describe_non_finite
from maze.train.trainers.common.actor_critic.rollout_batch import AlignedSubsteps, RolloutBatch
from maze.train.trainers.common.actor_critic.update_stats import UpdateStats
from maze.train.trainers.common.actor_critic.valuation import GAE, value_rollout
from maze.train.trainers.common.epoch_trainer import EpochTrainer, new_episodes
from maze.train.trainers.common.initial_policy import InitialPolicy, decayed_coef
from maze.train.trainers.common.plain_state import from_plain, to_plain
from maze.train.trainers.common.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze.core.agent.state_critic_input_output import StateCriticOutput
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.agent.torch_policy_output import PolicyOutput
    from maze.core.rollout.rollout_columns import RolloutColumns
    from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection


@dataclass
class Losses:
    """What is minimised, and the terms it consists of."""

    total: Tensor
    terms: list[tuple[str, SubstepKey, Tensor]]
    """Event of :class:`ActorCriticEvents`, sub-step or critic, and value of each term and of further statistics."""


class ActorCritic(EpochTrainer, ABC):
    """Base of the actor-critic trainers.

    Subclasses say what the policy's loss is and how a rollout is used for optimization.

    :param algorithm_config: Hyperparameters.
    :param rollout_generator: Collects the rollouts.
    :param evaluator: Evaluates the policy between epochs; ``None``: the training episodes say how good it is.
    :param model: Policy and state critic.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param seed: Seed of the order of minibatches; ``None`` draws one from torch's global generator.
    :param checkpoint_file: Where the state of the training is written after each epoch; ``None``: nowhere.
    """

    config_class: ClassVar[type[ActorCriticConfig]] = ActorCriticConfig

    def __init__(
        self,
        algorithm_config: Any,
        rollout_generator: RolloutGenerator | DistributedActors,
        evaluator: Evaluator | None,
        model: TorchActorCritic,
        model_selection: BestModelSelection | None,
        *,
        seed: int | None = None,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        self.config = self.config_class.from_config(algorithm_config)
        super().__init__(
            self.config,
            model,
            evaluator=evaluator,
            model_selection=model_selection,
            checkpoint_file=checkpoint_file,
        )
        self.model: TorchActorCritic = model
        if not isinstance(model.critic, TorchStateCritic):
            raise ConfigError(
                f"model.critic: {type(self).__name__} needs a state critic, found a {type(model.critic).__name__}."
            )
        self._critic: TorchStateCritic = model.critic
        self.rollout_generator = _vectorized(rollout_generator)

        try:
            model.to(resolve_device(self.config.device))
        except ConfigError as error:
            raise ConfigError(f"algorithm.{error}") from error
        self.optimizer = FlatAdam(
            _networks(model.policy, model.critic), lr=self.config.lr, eps=self.config.optimizer_eps
        )
        self.generator = torch.Generator()
        self.generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
        self._columns: RolloutColumns | None = None
        self._initial_policy: InitialPolicy | None = None
        """What the training started from, where the policy has to stay close to it."""
        self._stats = UpdateStats()
        aggregator = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        self._events = aggregator.create_event_topic(ActorCriticEvents)
        aggregator.input_values(ActorCriticEvents.time_epoch)  # reserves the first row; its first value comes late
        self._events_aggregator = aggregator

    # -- what the algorithms differ in -----------------------------------------------------------------

    @abstractmethod
    def _optimize(self, batch: RolloutBatch) -> None:
        """Learns from a rollout."""

    @abstractmethod
    def _policy_loss(
        self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The policy's loss for the actions of one sub-step, and further statistics by event."""

    # -- life cycle ------------------------------------------------------------------------------------

    @override(Trainer)
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        """Trains until the number of epochs is reached, or early stopping or a signal ends the training.

        After a training that has come to its end, another call trains on; after an interrupted one (in this process or
        one whose state was loaded), it does what was left.

        :param n_epochs: Number of epochs; 0: no limit. ``None`` takes the configuration's.
        """
        n_epochs = self.config.n_epochs if n_epochs is None else n_epochs
        if n_epochs == 0 and self.config.lr_schedule != "constant":
            raise ConfigError(
                f"algorithm.lr_schedule: `{self.config.lr_schedule}` has to know when training ends; set "
                "`algorithm.n_epochs`, or use `constant`."
            )
        self.optimizer.tie()
        if self.config.kl_to_initial_coef and self._initial_policy is None:
            self._initial_policy = InitialPolicy(self.model.policy)
        self._train_epochs(n_epochs)

    @override(EpochTrainer)
    def _before_update(self, share_done: float) -> None:
        self.optimizer.lr = scheduled_lr(self.config.lr_schedule, self.config.lr, share_done)

    @override(EpochTrainer)
    def _write_epoch_stats(self) -> None:
        self._stats.publish(self._events)
        self._events_aggregator.reduce()
        self.rollout_generator.env.write_epoch_stats()

    @override(EpochTrainer)
    def _epoch_done(self, seconds: float) -> None:
        self._stats.add("time_epoch", seconds)

    @override(EpochTrainer)
    def _steps_per_update(self) -> int:
        return self.config.n_rollout_steps * int(self.rollout_generator.env.n_envs)

    @override(EpochTrainer)
    def _training_statistics(self) -> LogStatsAggregator:
        statistics: LogStatsAggregator = self.rollout_generator.env.epoch_stats
        return statistics

    @override(EpochTrainer)
    def _aggregators(self) -> dict[str, LogStatsAggregator]:
        return {"updates": self._events_aggregator, "episodes": self._training_statistics()}

    @property
    @override(EpochTrainer)
    def _policy(self) -> TorchPolicy:
        return self.model.policy

    # -- one update ------------------------------------------------------------------------------------

    @override(EpochTrainer)
    def _update(self) -> None:
        """Collects a rollout and learns from it."""
        start = time.perf_counter()
        columns = self._collect()
        collected = time.perf_counter()
        batch = value_rollout(self.model, columns, GAE(self.config.gamma, self.config.gae_lambda))
        self.model.train()
        self._optimize(batch)
        self._stats.add("time_rollout", collected - start)
        self._stats.add("time_update", time.perf_counter() - collected)
        self._stats.add("learning_rate", self.optimizer.lr)

    def _collect(self) -> RolloutColumns:
        """The next rollout; its memory is used again by the one after."""
        if self._columns is None:
            self._columns = self.rollout_generator.allocate(self.config.n_rollout_steps, self.model.policy)
        self.model.eval()
        self.rollout_generator.collect(self.model.policy, self._columns)
        self._columns.check_finite(self.rollout_generator.env.seeding_at)
        return self._columns

    def _losses(self, batch: RolloutBatch) -> Losses:
        """The objective: policy loss, entropy bonus and value loss, summed over sub-steps."""
        terms: list[tuple[str, SubstepKey, Tensor]] = []
        for part in batch.parts:
            policy_output, critic_output = self._outputs(part)
            log_probs = policy_output.joint_log_probs_for_actions(part.actions)
            for index, output in enumerate(policy_output.substep_outputs):
                key = part.record.substep_keys[index]
                advantage = part.advantages[index]
                if self.config.advantage_normalization:
                    advantage = normalize_advantage(advantage)
                loss, extra = self._policy_loss(log_probs[index], part.old_log_probs[index], advantage)
                terms += [("policy_loss", key, loss), ("policy_entropy", key, output.entropy.mean())]
                terms += [(event, key, value) for event, value in extra.items()]
                if self._initial_policy is not None and not self._critic_learns_alone:
                    observation = part.record.observations[index]
                    kl = self._initial_policy.divergence(output.prob_dist, observation, output.actor_id)
                    terms.append(("policy_kl_to_initial", key, kl.mean()))
            terms += self._value_terms(part, critic_output.values, part.n_rows / batch.n_rows)
        weights = {
            "policy_loss": self.config.policy_loss_coef,
            "policy_entropy": -self.config.entropy_coef,
            "critic_value_loss": self.config.value_loss_coef,
            "policy_kl_to_initial": self._kl_to_initial_coef,
        }
        if self._critic_learns_alone:
            weights = {"critic_value_loss": self.config.value_loss_coef}
        total = torch.zeros((), device=self.model.device)
        for event, _, value in terms:
            if weights.get(event):
                total = torch.add(total, value, alpha=weights[event])
        return Losses(total, terms)

    def _outputs(self, part: AlignedSubsteps) -> tuple[PolicyOutput, StateCriticOutput]:
        """Outputs of policy and critic for a part of a batch, with gradients."""
        return self.model.compute_actor_critic_output(part.record)

    def _value_terms(
        self, part: AlignedSubsteps, values: list[Tensor], share: float
    ) -> list[tuple[str, SubstepKey, Tensor]]:
        """Loss and mean value for each output of the critic; a shared one learns from all parts of a batch together."""
        is_shared = self._critic.num_critics == 1
        terms: list[tuple[str, SubstepKey, Tensor]] = []
        for index, value in enumerate(values):
            key = 0 if is_shared else part.record.substep_keys[index]
            loss = self._value_loss(value, part.targets[index], part.old_values[index])
            terms.append(("critic_value_loss", key, loss * share if is_shared and share < 1.0 else loss))
            terms.append(("critic_value", key, value.detach().mean()))
        return terms

    def _value_loss(self, value: Tensor, target: Tensor, old_value: Tensor) -> Tensor:
        return value_loss(value, target)

    def _gradient_step(self, losses: Losses) -> None:
        """Follows the gradient, unless anything in it is not finite."""
        self.optimizer.zero_grad()
        losses.total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        norms = self.optimizer.gradient_norms()
        total_norm = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        norm, loss = torch.stack([total_norm, losses.total.detach()]).tolist()
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise NonFiniteError(describe_non_finite(losses.terms, norms))
        if 0.0 < self.config.max_grad_norm < norm:
            self.optimizer.scale_gradients(self.config.max_grad_norm / norm)
        self.optimizer.step(frozen=self._policy_networks if self._critic_learns_alone else ())
        for event, key, value in losses.terms:
            self._stats.add(event, value, key)
        for (event, key), value in norms.items():
            self._stats.add(event, value, key[0] if isinstance(key, tuple) else key)  # (sub-step, agent)

    @property
    def _critic_learns_alone(self) -> bool:
        return self.epoch < self.config.critic_burn_in_epochs

    @property
    def _kl_to_initial_coef(self) -> float:
        config = self.config
        n_learning_epochs = self.epoch - config.critic_burn_in_epochs
        return decayed_coef(config.kl_to_initial_coef, config.kl_to_initial_decay, n_learning_epochs)

    @override(EpochTrainer)
    def _latest_data(self) -> dict[str, Any]:
        return {} if self._columns is None else {"rollout": columns_as_tensors(self._columns)}

    # -- state -----------------------------------------------------------------------------------------

    _keys_of_version_1: ClassVar[tuple[str, ...]] = ("optimizer",)

    def load_state_dict(self, state_dict: dict[str, Any], origin: str | Path = "The state dictionary") -> None:
        super().load_state_dict(state_dict, origin)
        self._initial_policy = None

    @override(EpochTrainer)
    def _own_state(self) -> dict[str, Any]:
        env = self.rollout_generator.env
        return {
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "policy_generators": self.model.policy.rng_state(),
            "environments": to_plain(env.episodes_state()),
            "wrapper_statistics": env.wrapper_statistics(),
            "update_statistics": self._stats.state(),
            "initial_policy": None if self._initial_policy is None else self._initial_policy.policy.state_dict(),
        }

    @override(EpochTrainer)
    def _load_own_state(self, state: Mapping[str, Any], origin: str | Path) -> list[str]:
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.model.policy.set_rng_state(state["policy_generators"])
        self._stats.load_state(state.get("update_statistics", ()))
        self._initial_policy = None
        if state.get("initial_policy") is not None:
            self._initial_policy = InitialPolicy(self.model.policy)
            load_into(self._initial_policy.policy, state["initial_policy"], origin)
        env = self.rollout_generator.env
        problems: list[str] = []
        if "environments" in state:
            problems = new_episodes(env.load_episodes_state(from_plain(state["environments"])))
        env.load_wrapper_statistics(state.get("wrapper_statistics", []))
        self.rollout_generator.reset()
        return problems

    @property
    def _policy_networks(self) -> list[Any]:
        return [name for name in self.optimizer.names if name[0] == "policy_grad_norm"]


def _networks(policy: TorchPolicy, critic: TorchStateCritic) -> dict[tuple[str, Any], nn.Module]:
    """All networks, by the event that reports their gradient and by sub-step (or sub-step and agent, or critic)."""
    policies = {("policy_grad_norm", key): network for key, network in policy.networks.items()}
    is_shared = critic.num_critics == 1
    critics = {("critic_grad_norm", 0 if is_shared else key): net for key, net in critic.networks.items()}
    return {**policies, **critics}


def _vectorized(generator: RolloutGenerator | DistributedActors) -> Any:
    if generator.is_vectorized:
        return generator
    env: Any = generator.env
    return RolloutGenerator(SequentialVectorEnv([lambda: env], logging_prefix="train"))
