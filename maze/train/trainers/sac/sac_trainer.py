"""Soft actor-critic (Haarnoja et al. 2018), with a replay buffer that may start with demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from maze.core.annotations import override
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.replay_trainer import ReplayTrainer
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from maze.train.trainers.sac.sac_events import SACEvents
from maze.train.trainers.sac.sac_learner import SACLearner
from maze.train.utils.plain_state import Part

if TYPE_CHECKING:
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
    from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch


class SAC(ReplayTrainer):
    """Collects transitions into a replay buffer and learns from batches of it.

    :param algorithm_config: Hyperparameters.
    :param learner_model: Policy and state-action critic.
    :param distributed_actors: Collect transitions into a buffer; it has been filled to begin with.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param evaluator: Evaluates the policy between epochs; `None`: the training episodes say how good it is.
    :param seed: Seed of the actions drawn for learning; `None` draws one from torch's global generator.
    :param checkpoint_file: Where the state of the training is written after each epoch; `None`: nowhere.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = SACAlgorithmConfig
    events_class: ClassVar[type[Any]] = SACEvents
    config: SACAlgorithmConfig
    model: TorchActorCritic

    def __init__(
        self,
        algorithm_config: Any,
        learner_model: TorchActorCritic,
        distributed_actors: BaseDistributedWorkersWithBuffer,
        model_selection: BestModelSelection | None,
        evaluator: Evaluator | None,
        *,
        seed: int | None = None,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        super().__init__(
            algorithm_config,
            learner_model,
            distributed_actors,
            seed=seed,
            evaluator=evaluator,
            model_selection=model_selection,
            checkpoint_file=checkpoint_file,
        )
        self.learner = SACLearner(learner_model, self.config, distributed_actors.actors, seed)

    @override(ReplayTrainer)
    def _begin_training(self, n_epochs: int) -> None:
        super()._begin_training(n_epochs)
        self.learner.tie()

    @override(ReplayTrainer)
    def _update(self) -> None:
        self.learner.seconds_of_losses = self.learner.seconds_of_gradients = 0.0
        super()._update()
        self.stats.add_time("time_loss_computation", self.learner.seconds_of_losses)
        self.stats.add_time("time_backprob", self.learner.seconds_of_gradients)

    @override(ReplayTrainer)
    def _learn_from(self, batch: TransitionBatch) -> None:
        steps = self.learner.update(batch, self._critic_learns_alone, self._initial_policy, self._kl_to_initial_coef)
        for losses, norms in steps:
            self.stats.add(losses, norms)

    @override(ReplayTrainer)
    def _parts(self) -> dict[str, Part]:
        return {**super()._parts(), "learner": self.learner}
