"""Base of A2C, PPO and IMPALA: one update."""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.hidden_states import HiddenStates
from maze.core.agent.torch_state_critic import TorchStateCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.seeding import seeded_generator
from maze.train.parallelization.curriculum import Curriculum
from maze.train.parallelization.vector_env.sequential_vector_env import vectorized
from maze.train.trainers.common.actor_critic.actor_critic_config import ActorCriticConfig
from maze.train.trainers.common.actor_critic.actor_critic_events import ActorCriticEvents
from maze.train.trainers.common.actor_critic.constraints import (
    LearnedConstraint,
    LearnedConstraints,
    combined_advantage,
)
from maze.train.trainers.common.actor_critic.losses import (
    SurrogateLoss,
    normalize_advantage,
    policy_gradient_loss,
    value_loss,
)
from maze.train.trainers.common.actor_critic.reward_scaling import CentredReturns, RewardScaling
from maze.train.trainers.common.actor_critic.risk import LearnedRisk
from maze.train.trainers.common.actor_critic.valuation import (
    GAE,
    PolicyBatch,
    ReturnFunction,
    RolloutBatch,
    value_rollout,
)
from maze.train.trainers.common.learning import Losses, Terms, gradient_step, require_end_of_schedule, scheduled_lr
from maze.train.trainers.common.trainer import EpisodeSource, EpochTrainer
from maze.train.utils.plain_state import Part

if TYPE_CHECKING:
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.agent.torch_policy_output import PolicyOutput
    from maze.core.rollout.rollout_columns import RolloutColumns
    from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
    from maze.train.trainers.common.training_runner import TrainingRunner


@dataclass
class ActorCriticLosses(Losses):
    """The terms of the objective, and what they are reported with, by sub-step or critic."""

    policy_loss: Terms = field(default_factory=list)
    policy_entropy: Terms = field(default_factory=list)
    policy_clip_fraction: Terms = field(default_factory=list)
    policy_approx_kl: Terms = field(default_factory=list)
    policy_kl_to_initial: Terms = field(default_factory=list)
    critic_value_loss: Terms = field(default_factory=list)
    critic_value: Terms = field(default_factory=list)
    constraint_critic_loss: Terms = field(default_factory=list)
    risk_critic_loss: Terms = field(default_factory=list)


class ActorCritic(EpochTrainer, ABC):
    """Base of the actor-critic trainers: each update collects a rollout with the current policy and learns from it.

    As it stands it is the advantage actor-critic (Mnih et al. 2016): one gradient step for each rollout. Subclasses
    change the policy's loss (:meth:`_policy_loss`), the critic's (:meth:`_value_loss`), and how often a rollout is used
    (:meth:`_optimize`).

    :param algorithm_config: Hyperparameters.
    :param rollout_generator: Collects the rollouts.
    :param model: Policy and state critic.
    :param seed: Seed of the order of minibatches; `None` draws one from torch's global generator.
    :param evaluator: See :class:`~maze.train.trainers.common.trainer.EpochTrainer`, as for the others.
    :raises ConfigError: The model has no state critic, or the algorithm's settings contradict each other.
    """

    config_class: ClassVar[type[ActorCriticConfig]] = ActorCriticConfig
    learns_recurrent: ClassVar[bool] = True
    learns_observation_statistics: ClassVar[bool] = True
    follows_curriculum: ClassVar[bool] = True
    events_class: ClassVar[type[Any]] = ActorCriticEvents
    config: ActorCriticConfig
    model: TorchActorCritic

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
        common: Any = {"evaluator": evaluator, "model_selection": model_selection, "checkpoint_file": checkpoint_file}
        super().__init__(algorithm_config, model, **common)
        if not isinstance(model.critic, TorchStateCritic):
            raise ConfigError(
                f"model.critic: {type(self).__name__} needs a state critic, found a {type(model.critic).__name__}."
            )
        if model.is_recurrent and self.config.kl_to_initial_coef:
            raise ConfigError(
                "algorithm.kl_to_initial_coef: expected 0 with a model that carries hidden states; those of the "
                f"initial policy are not known. Found {self.config.kl_to_initial_coef}."
            )
        self._critic: TorchStateCritic = model.critic
        self.rollout_generator = vectorized(rollout_generator)
        self.generator = seeded_generator(seed)
        self._constraints = LearnedConstraints(self.config, model)
        self._risk = LearnedRisk(self.config, model, self.generator) if self.config.risk is not None else None
        self._further: list[LearnedConstraint | LearnedRisk] = [*self._constraints.each]
        """What else has critics, in the order of the costs of a batch."""
        if self._risk is not None:
            self._further.append(self._risk)
        networks = _networks(model.policy, model.critic)
        networks |= {name: net for one in self._further for name, net in one.networks()}
        self.optimizer = FlatAdam(networks, lr=self.config.lr, eps=self.config.optimizer_eps)
        self._returns = self._return_function()
        config = self.config
        if config.reward_centering:
            self._returns = CentredReturns(self._returns, config.reward_centering, config.reward_scaling)
        self._hidden_states = self._new_hidden_states()
        """Hidden states of a recurrent critic at the begin of the next rollout."""
        is_scaled = config.reward_scaling and not config.reward_centering
        self._reward_scaling = RewardScaling(config.gamma) if is_scaled else None
        self._columns: RolloutColumns | None = None
        self._curriculum: Curriculum | None = None
        self.train_stats.input_values(ActorCriticEvents.time_epoch)  # reserves the first row; its value comes late

    @classmethod
    @override(EpochTrainer)
    def build(cls, run: TrainingRunner) -> ActorCritic:
        model: TorchActorCritic = run.model()
        selection = run.best_model_selection(model)
        curriculum = Curriculum.of(run) if cls.follows_curriculum else None
        trainer = cls(
            algorithm_config=run.algorithm,
            rollout_generator=(curriculum.entered(epoch=0) if curriculum else None) or cls._rollouts(run, model),
            evaluator=run.evaluator(selection),
            model=model,
            model_selection=selection,
            seed=run.agent_seed(),
            checkpoint_file=run.checkpoint_file,
        )
        trainer._curriculum = curriculum
        return trainer

    @classmethod
    def _rollouts(cls, run: TrainingRunner, model: TorchActorCritic) -> RolloutGenerator | DistributedActors:
        """Return the source of the rollouts."""
        return run.rollouts()

    # -- life cycle ------------------------------------------------------------------------------------

    @override(EpochTrainer)
    def _begin_training(self, n_epochs: int) -> None:
        require_end_of_schedule(self.config.lr_schedule, n_epochs)
        self.optimizer.tie()

    @override(EpochTrainer)
    def steps_per_update(self) -> int:
        return self.config.n_rollout_steps * int(self.rollout_generator.env.n_rollout_envs)

    @override(EpochTrainer)
    def episode_source(self) -> EpisodeSource:
        source: EpisodeSource = self.rollout_generator.env
        return source

    @override(EpochTrainer)
    def _parts(self) -> dict[str, Part]:
        centring = self._returns if isinstance(self._returns, CentredReturns) else None
        optional: dict[str, Part | None] = {
            "reward_centering": centring,
            "critic_memory": self._hidden_states,
            "reward_scaling": self._reward_scaling,
            "constraints": self._constraints if self._constraints.each else None,
            "risk": self._risk,
        }
        chosen: dict[str, Part] = {name: part for name, part in optional.items() if part is not None}
        return {"optimizer": self.optimizer, "generator": self.generator, **chosen, "rollouts": self.rollout_generator}

    @override(EpochTrainer)
    def _load_parts(self, state: Mapping[str, Any]) -> list[str]:
        self._enter_stage(self.epoch if self.update else max(0, self.epoch - 1))  # where the latest update was
        return super()._load_parts(state)

    def _enter_stage(self, epoch: int) -> None:
        """Continue in the environments that the curriculum, if there is one, has for an epoch."""
        if self._curriculum is not None and (rollouts := self._curriculum.entered(epoch)) is not None:
            self.rollout_generator, self._columns = rollouts, None
            self._hidden_states = self._new_hidden_states()
            for one in self._further:
                one.restart()

    def _new_hidden_states(self) -> HiddenStates | None:
        if not self.model.is_recurrent:
            return None
        return HiddenStates(self.rollout_generator.env.n_rollout_envs, self._critic.state_sizes)

    @override(EpochTrainer)
    def latest_data(self) -> dict[str, Any]:
        return {} if self._columns is None else {"rollout": self._columns.arrays()}

    # -- one update ------------------------------------------------------------------------------------

    def _return_function(self) -> ReturnFunction:
        """Estimate advantages and targets."""
        return GAE(self.config.gamma, self.config.gae_lambda)

    @override(EpochTrainer)
    def _update(self) -> None:
        """Collect a rollout and learn from it."""
        self._enter_stage(self.epoch)
        self._schedule_lr()
        start = time.perf_counter()
        columns = self._collect()
        collected = time.perf_counter()
        batch = self._valued(columns)
        self.model.train()
        self._optimize(batch)
        if self.observation_statistics.names:
            self.observation_statistics.learn(columns)
        self.stats.add_value("time_rollout", collected - start)
        self.stats.add_value("time_update", time.perf_counter() - collected)
        self.stats.add_value("learning_rate", self.optimizer.lr)
        if self._curriculum is not None:
            self.stats.add_value("curriculum_stage", self._curriculum.stage)

    def _schedule_lr(self) -> None:
        self.optimizer.lr = scheduled_lr(self.config.lr_schedule, self.config.lr, self.share_done)

    def _collect(self) -> RolloutColumns:
        """Return the next rollout; its memory is used again by the one after."""
        if self._columns is None:
            if self._constraints.each:
                self.rollout_generator.env.record_constrained(tuple(self._constraints.sources))
            self._columns = self.rollout_generator.allocate(self.config.n_rollout_steps, self.model.policy)
        self.model.eval()
        self.rollout_generator.collect(self.model.policy, self._columns)
        self._columns.check_finite(self.rollout_generator.env.seeding_at)
        return self._columns

    def _valued(self, columns: RolloutColumns) -> RolloutBatch:
        """Return the rollout with its targets."""
        rewards = columns.rewards if self._risk is None else columns.rewards.copy()
        if self._reward_scaling is not None:
            self._reward_scaling.scale(columns)
        batch = value_rollout(self.model, columns, self._returns, self._hidden_states, self.config.sequence_length)
        if isinstance(self._returns, CentredReturns):
            self.stats.add_value("average_reward", self._returns.averages[0])
        self._constraints.learn(columns, batch, is_fixed=self.critic_learns_alone)
        self._constraints.report(self.stats)
        if self._risk is not None:
            unit = 1.0 if self._reward_scaling is None else self._reward_scaling.std
            self._risk.learn(columns, rewards, unit, batch)
            self._risk.report(self.stats)
        return batch

    def _optimize(self, batch: RolloutBatch) -> None:
        """Learn from a rollout."""
        self._gradient_step(self._losses(batch))

    def _losses(self, batch: RolloutBatch) -> ActorCriticLosses:
        """Return the objective: policy loss, entropy bonus and value loss, summed over sub-steps."""
        losses = ActorCriticLosses(torch.zeros((), device=self.model.device))
        for part in batch.parts:
            policy_output, critic_output = part.evaluate(self.model)
            self._add_policy_terms(losses, part, policy_output)
            share = part.n_rows / batch.n_rows
            self._add_value_terms(losses, part, critic_output.values, share)
            if part.costs:
                self._add_cost_terms(losses, part, policy_output, share)
        return losses

    def _add_policy_terms(self, losses: ActorCriticLosses, part: PolicyBatch, outputs: PolicyOutput) -> None:
        config, learns = self.config, not self.critic_learns_alone
        for index, (substep, output) in enumerate(zip(part.substeps, outputs.substep_outputs, strict=True)):
            key, advantage = substep.actor_id.step_key, part.advantages[index]
            if config.advantage_normalization:
                advantage = normalize_advantage(advantage)
            if constraints := self._constraints.each:
                costs = [costs.advantages[index] for costs in part.costs[: len(constraints)]]
                advantage = self._constrained(advantage, costs)
            log_prob = output.prob_dist.joint_log_prob(substep.action)
            loss = self._policy_loss(log_prob, part.old_log_probs[index], advantage)
            entropy = output.entropy.mean()
            losses.policy_loss.append((key, loss.policy))
            losses.policy_entropy.append((key, entropy))
            if loss.clip_fraction is not None and loss.approx_kl is not None:
                losses.policy_clip_fraction.append((key, loss.clip_fraction))
                losses.policy_approx_kl.append((key, loss.approx_kl))
            if learns:
                losses.add(loss.policy, config.policy_loss_coef)
                losses.add(entropy, -config.entropy_coef)
            if learns and self._initial_policy is not None:
                divergence = self._initial_policy.divergence(output.prob_dist, substep.observation, substep.actor_id)
                divergence = divergence.mean()
                losses.policy_kl_to_initial.append((key, divergence))
                losses.add(divergence, self._kl_to_initial_coef)

    def _policy_loss(self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor) -> SurrogateLoss:
        """Return the policy's loss for the actions of one sub-step, `[n_rows]` each."""
        return SurrogateLoss(policy_gradient_loss(log_prob, advantage))

    def _add_value_terms(
        self, losses: ActorCriticLosses, part: PolicyBatch, values: list[Tensor], share: float
    ) -> None:
        """Add loss and mean value of each output of the critic; a shared one learns from a whole batch at once."""
        is_shared = self._critic.num_critics == 1
        for index, value in enumerate(values):
            key = 0 if is_shared else part.substeps[index].actor_id.step_key
            loss = self._value_loss(value, part.targets[index], part.old_values[index])
            if is_shared and share < 1.0:
                loss = loss * share
            losses.critic_value_loss.append((key, loss))
            losses.critic_value.append((key, value.detach().mean()))
            losses.add(loss, self.config.value_loss_coef)

    def _constrained(self, advantage: Tensor, costs: list[Tensor]) -> Tensor:
        """Return the advantage of the Lagrangian, `[n_rows]`."""
        if self.config.advantage_normalization:
            costs = [normalize_advantage(cost) for cost in costs]
        return combined_advantage(advantage, costs, [one.multiplier for one in self._constraints.each])

    def _add_cost_terms(
        self, losses: ActorCriticLosses, part: PolicyBatch, policy_output: PolicyOutput, share: float
    ) -> None:
        """Add losses of the critics of costs and of the quantile critic."""
        is_shared = self._critic.num_critics == 1
        for position, (one, costs) in enumerate(zip(self._further, part.costs, strict=True)):
            values = one.predicted(part, position, policy_output)
            for index, (value, target) in enumerate(zip(values, costs.targets, strict=True)):
                if isinstance(one, LearnedRisk):
                    key, terms = 0 if is_shared else part.substeps[index].actor_id.step_key, losses.risk_critic_loss
                    loss = one.loss(value, target)
                else:
                    key, terms = one.name, losses.constraint_critic_loss
                    loss = self._value_loss(value, target, costs.old_values[index])
                loss = loss * (share if is_shared else 1.0)
                terms.append((key, loss))
                losses.add(loss, self.config.value_loss_coef)

    def _value_loss(self, value: Tensor, target: Tensor, old_value: Tensor) -> Tensor:
        return value_loss(value, target)

    def _gradient_step(self, losses: ActorCriticLosses) -> None:
        learns_alone = self.critic_learns_alone
        frozen = [name for name in self.optimizer.names if learns_alone and name[0] == "policy_grad_norm"]
        self.stats.add(losses, gradient_step(losses, self.optimizer, self.config.max_grad_norm, frozen=frozen))


def _networks(policy: TorchPolicy, critic: TorchStateCritic) -> dict[tuple[str, Any], nn.Module]:
    """Return all networks, by the event that reports their gradient and by sub-step (or sub-step and agent, or
    critic).
    """
    policies = {("policy_grad_norm", key): network for key, network in policy.networks.items()}
    is_shared = critic.num_critics == 1
    critics = {("critic_grad_norm", 0 if is_shared else key): net for key, net in critic.networks.items()}
    return {**policies, **critics}
