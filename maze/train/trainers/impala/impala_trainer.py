"""Importance weighted actor-learner architecture."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from maze.core.agent.returns import ReturnFunction
from maze.core.annotations import override
from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
from maze.train.trainers.common.actor_critic.actor_critic_trainer import ActorCritic
from maze.train.trainers.common.actor_critic.valuation import RolloutBatch
from maze.train.trainers.common.config_classes import ActorCriticConfig
from maze.train.trainers.common.learning import scheduled_lr
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.impala.impala_algorithm_config import ImpalaAlgorithmConfig
from maze.train.trainers.impala.impala_events import ImpalaEvents
from maze.train.trainers.impala.impala_vtrace import VTrace

if TYPE_CHECKING:
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.rollout.rollout_columns import RolloutColumns
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
    from maze.train.trainers.common.training_runner import TrainingRunner


class IMPALA(ActorCritic):
    """Learn from rollouts that actors collect with slightly older policies (Espeholt et al. 2018).

    :param algorithm_config: Hyperparameters.
    :param rollout_generator: The actors; the trainer starts and stops them.
    :param evaluator: Evaluates the policy; `None`: the model is judged by the training episodes.
    :param model: Policy and state critic.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param common: `seed` and `checkpoint_file`, see
        :class:`~maze.train.trainers.common.actor_critic.actor_critic_trainer.ActorCritic`.
    """

    config_class: ClassVar[type[ActorCriticConfig]] = ImpalaAlgorithmConfig
    learns_recurrent: ClassVar[bool] = False
    follows_curriculum: ClassVar[bool] = False
    config: ImpalaAlgorithmConfig
    rollout_generator: DistributedActors

    def __init__(
        self,
        algorithm_config: Any,
        rollout_generator: DistributedActors,
        evaluator: Evaluator | None,
        model: TorchActorCritic,
        model_selection: BestModelSelection | None,
        **common: Any,
    ) -> None:
        super().__init__(algorithm_config, rollout_generator, evaluator, model, model_selection, **common)
        self._impala_events = self.train_stats.create_event_topic(ImpalaEvents)

    @classmethod
    @override(ActorCritic)
    def _rollouts(cls, run: TrainingRunner, model: TorchActorCritic) -> DistributedActors:
        config: ImpalaAlgorithmConfig = run.algorithm
        return run.actors(
            policy=model.policy,
            n_rollout_steps=config.n_rollout_steps,
            n_actors=config.num_actors,
            batch_size=config.actors_batch_size,
            queue_out_of_sync_factor=config.queue_out_of_sync_factor,
            env_instance_seeds=run.env_seeds(config.num_actors * config.envs_per_actor),
            agent_instance_seeds=[run.agent_seed() for _ in range(config.num_actors)],
        )

    @override(ActorCritic)
    def _return_function(self) -> ReturnFunction:
        config = self.config
        clips = config.vtrace_clip_rho_threshold, config.vtrace_clip_pg_rho_threshold
        return VTrace(config.gamma, *clips, config.gae_lambda)

    @override(Trainer)
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        try:
            self.optimizer.tie()  # the optimizer changes these weights in place
            self.rollout_generator.broadcast_updated_policy(self.model.policy.state_dict())
            self.rollout_generator.start()  # the first rollouts have the version that is learned from first
            super().train(n_epochs, **kwargs)
        finally:
            self.rollout_generator.stop()

    @override(ActorCritic)
    def _update(self) -> None:
        """Take a batch from the actors, learn from it and distribute the new policy."""
        self.optimizer.lr = scheduled_lr(self.config.lr_schedule, self.config.lr, self.share_done)
        start = time.perf_counter()
        batch = self.rollout_generator.collect_batch()
        self._columns = batch.columns
        collected = time.perf_counter()
        valued = self._valued(batch.columns)
        valued_at = time.perf_counter()
        losses = self._losses(valued)
        computed = time.perf_counter()
        self._gradient_step(losses)
        self.observation_statistics.learn(batch.columns)
        self.rollout_generator.broadcast_updated_policy(self.model.policy.state_dict())
        done = time.perf_counter()

        self.stats.add_value("time_rollout", collected - start)
        self.stats.add_value("time_update", done - collected)
        self.stats.add_value("learning_rate", self.optimizer.lr)
        events, percent = self._impala_events, 100.0 / (done - start)
        events.time_dequeuing_actors(batch.waiting_time, batch.waiting_time * percent)
        events.time_collecting_actors(collected - start, (collected - start) * percent)
        events.time_learner_rollout(valued_at - collected, (valued_at - collected) * percent)
        events.time_loss_computation(computed - valued_at, (computed - valued_at) * percent)
        events.time_backprob(done - computed, (done - computed) * percent)
        events.estimated_queue_sizes(batch.queue_size_before, batch.queue_size_after)
        for lag in batch.policy_lags:
            events.policy_lag(lag)

    @override(ActorCritic)
    def _valued(self, columns: RolloutColumns) -> RolloutBatch:
        """Return the batch with its targets.

        Actors use evaluation mode, so importance weights and bootstrap values are computed in evaluation mode too. If
        the outputs of the networks depend on the mode, the loss evaluates them again in training mode.
        """
        if not self._has_modes:
            self.model.train()
            return super()._valued(columns)
        self.model.eval()
        with torch.no_grad():
            valued = super()._valued(columns)
        self.model.train()
        return valued
