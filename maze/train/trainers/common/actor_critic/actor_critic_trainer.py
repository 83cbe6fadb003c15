"""Base of A2C, PPO and IMPALA: the terms of the objective as functions of tensors, and one update."""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.policy import HiddenStates
from maze.core.agent.returns import GAE, ReturnFunction
from maze.core.agent.torch_model import depends_on_mode
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.seeding import seeded_generator
from maze.train.parallelization.vector_env.sequential_vector_env import vectorized
from maze.train.trainers.common.actor_critic.actor_critic_events import ActorCriticEvents
from maze.train.trainers.common.actor_critic.cost_critics import LearnedConstraint, LearnedRisk, combined_advantage
from maze.train.trainers.common.actor_critic.valuation import PolicyBatch, RolloutBatch, value_rollout
from maze.train.trainers.common.config_classes import ActorCriticConfig
from maze.train.trainers.common.learning import Losses, gradient_step, require_end_of_schedule, scheduled_lr
from maze.train.trainers.common.observation_statistics import CentredReturns, RewardScaling
from maze.train.trainers.common.trainer import EpochTrainer
from maze.train.utils.train_utils import Part

if TYPE_CHECKING:
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy_output import PolicyOutput
    from maze.core.rollout.rollout_columns import RolloutColumns
    from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
    from maze.train.trainers.common.actor_critic.actor_critic_runners import Curriculum
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
    from maze.train.trainers.common.training_runner import TrainingRunner


class SurrogateLoss(NamedTuple):
    """A policy's objective and, for PPO, two measures of how far an update has moved the policy."""

    policy: Tensor
    """The loss to minimise (scalar)."""
    clip_fraction: Tensor | None = None
    """Share of the elements whose ratio left the clipping range (scalar, no gradient); where there is one."""
    approx_kl: Tensor | None = None
    """Estimate of KL(old || new), never negative (scalar, no gradient); where the ratio is known."""


def clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float) -> SurrogateLoss:
    """Return PPO's clipped objective (Schulman et al. 2017, equation 7).

    :param log_prob: Joint log-probability of the sampled actions under the current policy.
    :param old_log_prob: The same under the policy that sampled them.
    :param advantage: Advantage of the sampled actions, same shape.
    :param clip_range: Distance of the ratio from 1 at which it is clipped, so that the gradient vanishes.
    """
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    objective = ratio * advantage
    with torch.no_grad():
        clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
        limit = clipped * advantage
        clip_fraction = (ratio != clipped).float().mean()
        approx_kl = (ratio - 1.0 - log_ratio).mean()  # Schulman's low variance estimator
    policy = -torch.where(objective <= limit, objective, limit).mean()  # the minimum, with a shorter gradient
    return SurrogateLoss(policy, clip_fraction, approx_kl)


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return the advantage actor-critic's policy loss (Mnih et al. 2016): raises the probability of better actions.

    :param log_prob: Of the actions, `[batch]`.
    :param advantage: `[batch]`.
    """
    return -(log_prob * advantage).mean()


def value_loss(
    value: Tensor, target: Tensor, old_value: Tensor | None = None, clip_range: float | None = None
) -> Tensor:
    """Return the mean squared error of the values, optionally with their step limited as in PPO's first implementation.

    :param value: Predicted values.
    :param target: Returns to predict, same shape.
    :param old_value: Values predicted when the rollout was valued; needed for clipping only.
    :param clip_range: The largest change that still earns gradient; `None` does not clip.
    """
    squared_error = (value - target).square()
    if clip_range is None or old_value is None:
        return squared_error.mean()
    clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
    return torch.maximum(squared_error, (clipped - target).square()).mean()


def normalize_advantage(advantage: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Shift and scale to mean zero and standard deviation one; a single element has neither and stays as it is.

    :param advantage: `[...]`; the result has the same shape.
    :param epsilon: Number that is added to the standard deviation.
    """
    if advantage.numel() < 2:
        return advantage
    std, mean = torch.std_mean(advantage, correction=0)
    return (advantage - mean) / (std + epsilon)


class ActorCritic(EpochTrainer, ABC):
    """Base of the actor-critic trainers: each update collects a rollout with the current policy and learns from it.

    As it stands it is the advantage actor-critic (Mnih et al. 2016): one gradient step for each rollout. Subclasses
    change the policy's loss (:meth:`_policy_loss`) and how often a rollout is used (:meth:`_optimize`).

    :param algorithm_config: Hyperparameters.
    :param rollout_generator: Collects the rollouts.
    :param model: Policy and state critic.
    :param seed: Seed of the order of minibatches; `None` draws one from torch's global generator.
    :param evaluator: Evaluates the policy; `None`: the model is judged by the training episodes.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param checkpoint_file: File of the state, written after each epoch; `None`: none.
    :raises ConfigError: The model has no state critic, or the algorithm's settings contradict each other.
    """

    config_class: ClassVar[type[ActorCriticConfig]] = ActorCriticConfig
    learns_recurrent: ClassVar[bool] = True
    learns_observation_statistics: ClassVar[bool] = True
    follows_curriculum: ClassVar[bool] = True
    learns_at_once: ClassVar[bool] = True
    """Whether a rollout is used for one gradient step, whose loss takes the outputs that it was valued with."""
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
        if model.is_recurrent and self.config.kl_to_initial_coef:
            raise ConfigError(
                "algorithm.kl_to_initial_coef: expected 0 with a model that carries hidden states; those of the "
                f"initial policy are not known. Found {self.config.kl_to_initial_coef}."
            )
        self._critic = model.state_critic
        self._has_modes = depends_on_mode([*model.policy.networks.values(), *model.critic.networks.values()])
        self.rollout_generator = vectorized(rollout_generator)
        self.generator = seeded_generator(seed)
        self._constraints = [LearnedConstraint(text, self.config, model) for text in self.config.constraints]
        if len({one.name for one in self._constraints}) < len(self._constraints):
            raise ConfigError(
                f"algorithm.constraints: expected one constraint per statistic, found {self.config.constraints}."
            )
        env = self.rollout_generator.env
        if self.config.risk is not None and env.n_rollout_envs < env.n_envs:
            raise ConfigError(
                "algorithm.risk: expected rollouts of all environments, in which the returns of episodes are added up; "
                f"found rollouts of {env.n_rollout_envs} of {env.n_envs}. Use runner.placement.wait_for=1."
            )
        self._risk = LearnedRisk(self.config, model, self.generator) if self.config.risk is not None else None
        # Further signals with critics, in the order of the costs of a batch.
        self._further: list[LearnedConstraint | LearnedRisk] = [*self._constraints]
        if self._risk is not None:
            self._further.append(self._risk)
        self._is_shared = model.critic.num_critics == 1
        networks: dict[tuple[str, Any], nn.Module] = {
            ("policy_grad_norm", key): network for key, network in model.policy.networks.items()
        }
        self._policy_networks = list(networks)
        for key, network in model.critic.networks.items():
            networks["critic_grad_norm", 0 if self._is_shared else key] = network
        networks |= {name: net for one in self._further for name, net in one.networks()}
        self.optimizer = FlatAdam(networks, lr=self.config.lr, eps=self.config.optimizer_eps)
        self._returns = self._return_function()
        config = self.config
        if config.reward_centering:
            self._returns = CentredReturns(self._returns, config.reward_centering, config.reward_scaling)
        # Hidden states of a recurrent critic at the begin of the next rollout.
        self._hidden_states = HiddenStates(env.n_rollout_envs, self._critic.state_sizes) if model.is_recurrent else None
        is_scaled = config.reward_scaling and not config.reward_centering
        self._reward_scaling = RewardScaling(config.gamma) if is_scaled else None
        self._columns: RolloutColumns | None = None
        self._curriculum: Curriculum | None = None
        self.train_stats.input_values(ActorCriticEvents.time_epoch)  # reserves the first row; its value comes late

    @classmethod
    @override(EpochTrainer)
    def build(cls, run: TrainingRunner) -> ActorCritic:
        from maze.train.trainers.common.actor_critic.actor_critic_runners import Curriculum

        model: TorchActorCritic = run.model()
        curriculum = Curriculum.of(run)
        rollouts = (curriculum.entered(epoch=0) if curriculum else None) or cls._rollouts(run, model)
        common = run.common_arguments(model)
        trainer = cls(run.algorithm, rollouts, model=model, seed=run.agent_seed(), **common)
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

    @override(EpochTrainer)
    def steps_per_update(self) -> int:
        return self.config.n_rollout_steps * int(self.rollout_generator.env.n_rollout_envs)

    @override(EpochTrainer)
    def episode_source(self) -> Any:
        return self.rollout_generator.env

    @override(EpochTrainer)
    def _parts(self) -> dict[str, Part]:
        optional: dict[str, Part | None] = {
            "reward_centering": self._returns if isinstance(self._returns, CentredReturns) else None,
            "critic_memory": self._hidden_states,
            "reward_scaling": self._reward_scaling,
            **{f"constraints: {one.constraint.text}": one for one in self._constraints},
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
            if self._risk is not None:
                self._risk.restart()

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
        if self._curriculum is not None:
            self._enter_stage(self.epoch)
            self.stats.add_value("curriculum_stage", self._curriculum.stage)
        self.optimizer.lr = scheduled_lr(self.config.lr_schedule, self.config.lr, self.share_done)
        start = time.perf_counter()
        columns = self._collect()
        collected = time.perf_counter()
        batch = self._valued(columns)
        if self._has_modes:
            self.model.train()
        self._optimize(batch)
        if self.observation_statistics.names:
            self.observation_statistics.learn(columns)
        self.stats.add_value("time_rollout", collected - start)
        self.stats.add_value("time_update", time.perf_counter() - collected)
        self.stats.add_value("learning_rate", self.optimizer.lr)

    def _collect(self) -> RolloutColumns:
        """Return the next rollout; its memory is used again by the one after."""
        generator, policy = self.rollout_generator, self.model.policy
        if self._columns is None:
            if self._constraints:
                generator.env.record_constrained(tuple(source for one in self._constraints for source in one.sources))
            # Log-probabilities of a rollout come from recorded logits, without another evaluation of the policy.
            generator.record_logits |= not self.learns_at_once
            self._columns = generator.allocate(self.config.n_rollout_steps, policy)
        if self._has_modes:
            self.model.eval()
        generator.collect(policy, self._columns)
        self._columns.check_finite(generator.env.seeding_at, generator.env.constrained)
        return self._columns

    def _valued(self, columns: RolloutColumns) -> RolloutBatch:
        """Return the rollout with its targets."""
        rewards = columns.rewards if self._risk is None else columns.rewards.copy()
        if self._reward_scaling is not None:
            self._reward_scaling.scale(columns)
        keeps_outputs = self.learns_at_once and not (self._has_modes or self.model.is_recurrent)
        batch = value_rollout(
            *(self.model, columns, self._returns, self._hidden_states, self.config.sequence_length),
            keeps_outputs=keeps_outputs,
        )
        if isinstance(self._returns, CentredReturns):
            self.stats.add_value("average_reward", self._returns.averages[0])
        first = 0
        for one in self._constraints:
            one.learn(columns, batch, first, is_fixed=self.critic_learns_alone)
            one.report(self.stats)
            first += len(one.sources)
        if self._risk is not None:
            unit = 1.0 if self._reward_scaling is None else self._reward_scaling.std
            self._risk.learn(columns, rewards, unit, batch)
            self._risk.report(self.stats)
        return batch

    def _optimize(self, batch: RolloutBatch) -> None:
        """Learn from a rollout."""
        self._gradient_step(self._losses(batch))

    def _losses(self, batch: RolloutBatch) -> Losses:
        """Return the objective: policy loss, entropy bonus and value loss, summed over sub-steps."""
        losses, clip_range = Losses(), self.config.value_clip_range
        for part in batch.parts:
            policy_output, critic_output = part.evaluate(self.model)
            self._add_policy_terms(losses, part, policy_output)
            is_whole = not self._is_shared or len(batch.parts) == 1  # a shared critic learns from all at once
            share = 1.0 if is_whole else part.n_rows / batch.n_rows
            keys = [0 if self._is_shared else substep.actor_id.step_key for substep in part.substeps]
            # a shared critic may value all sub-steps together
            for index, (key, value) in enumerate(zip(keys, critic_output.values, strict=False)):
                loss = value_loss(value, part.targets[index], part.old_values[index], clip_range)
                loss = loss if share == 1.0 else loss * share
                losses.report("critic_value_loss", loss, key, self.config.value_loss_coef)
                losses.report("critic_value", value.detach().mean(), key)
            for position, (one, costs) in enumerate(zip(self._further, part.costs, strict=False)):
                predicted = one.predicted(part, position, policy_output)
                for index, (key, value) in enumerate(zip(keys, predicted, strict=False)):
                    target = costs.targets[index]
                    if isinstance(one, LearnedRisk):
                        loss = one.loss(value, target) * share
                        losses.report("risk_critic_loss", loss, key, self.config.value_loss_coef)
                    else:
                        loss = value_loss(value, target, costs.old_values[index], clip_range) * share
                        losses.report("constraint_critic_loss", loss, one.name, self.config.value_loss_coef)
        return losses

    def _add_policy_terms(self, losses: Losses, part: PolicyBatch, outputs: PolicyOutput) -> None:
        config, learns = self.config, not self.critic_learns_alone
        for index, (substep, output) in enumerate(zip(part.substeps, outputs, strict=True)):
            key = substep.actor_id.step_key
            advantages = [part.advantages[index]]
            advantages += [costs.advantages[index] for costs in part.costs[: len(self._constraints)]]
            if config.advantage_normalization:
                advantages = [normalize_advantage(advantage) for advantage in advantages]
            advantage, *of_costs = advantages
            if of_costs:
                advantage = combined_advantage(advantage, of_costs, [one.multiplier for one in self._constraints])
            log_prob = output.prob_dist.joint_log_prob(substep.action)
            loss = self._policy_loss(log_prob, part.old_log_probs[index], advantage)
            losses.report("policy_loss", loss.policy, key, config.policy_loss_coef * learns)
            losses.report("policy_entropy", output.entropy.mean(), key, -config.entropy_coef * learns)
            if loss.clip_fraction is not None and loss.approx_kl is not None:
                losses.report("policy_clip_fraction", loss.clip_fraction, key)
                losses.report("policy_approx_kl", loss.approx_kl, key)
            if learns and self._initial_policy is not None:
                divergence = self._initial_policy.divergence(output.prob_dist, substep.observation, substep.actor_id)
                losses.report("policy_kl_to_initial", divergence.mean(), key, self._kl_to_initial_coef)

    def _policy_loss(self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor) -> SurrogateLoss:
        """Return the policy's loss for the actions of one sub-step, `[n_rows]` each."""
        return SurrogateLoss(policy_gradient_loss(log_prob, advantage))

    def _gradient_step(self, losses: Losses) -> None:
        frozen = self._policy_networks if self.critic_learns_alone else ()
        self.stats.add(losses, gradient_step(losses, self.optimizer, self.config.max_grad_norm, frozen=frozen))
