"""Evolution strategies."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger
from maze.core.utils.factory import Factory
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.epoch_trainer import EpochTrainer
from maze.train.trainers.common.model_selection.selection_criterion import SelectionCriterion, tell
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.es.distributed.rollout_schedule import Episode
from maze.train.trainers.es.es_algorithm_config import ESAlgorithmConfig
from maze.train.trainers.es.es_events import ESEvents
from maze.train.trainers.es.es_utils import es_gradient, get_flat_parameters, n_trained_parameters
from maze.train.trainers.es.optimizers.base_optimizer import Optimizer
from maze.train.utils.plain_state import Part

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
    from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts, ESRolloutResult
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable


class ESTrainer(EpochTrainer):
    """Follows a gradient that is estimated from the returns of randomly perturbed policies.

    Salimans et al. 2017: perturbations come in mirrored pairs, and only the order of the returns counts.

    :param algorithm_config: Hyperparameters.
    :param torch_policy: The policy.
    :param shared_noise: The perturbations.
    :param normalization_stats: Statistics for observation normalization, for the environments.
    :param checkpoint_file: Where the state of the training is written after each epoch; ``None``: nowhere.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = ESAlgorithmConfig
    events_class: ClassVar[type[Any]] = ESEvents
    evaluates_between_epochs: ClassVar[bool] = False
    """The policy is evaluated by rollouts of each update."""

    config: ESAlgorithmConfig

    def __init__(
        self,
        algorithm_config: Any,
        torch_policy: TorchPolicy,
        shared_noise: SharedNoiseTable,
        normalization_stats: Any,
        *,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        super().__init__(algorithm_config, torch_policy, checkpoint_file=checkpoint_file)
        self.shared_noise = shared_noise
        self.normalization_stats = normalization_stats
        self.optimizer: Optimizer = Factory(Optimizer).instantiate(  # type: ignore[type-abstract]  # a subclass
            self.config.optimizer, config_path="algorithm.optimizer"
        )
        self.optimizer.setup(torch_policy)
        n_parameters = n_trained_parameters(torch_policy)
        if n_parameters == 0:
            raise ConfigError("model.policy: all parameters of the policy are frozen; there is nothing to train.")
        shared_noise.get(0, n_parameters)  # tells now if the table is too small
        self._criterion = SelectionCriterion(self.config.objective, self.config.maximize, self.config.constraints)
        self._rollouts: ESDistributedRollouts | None = None
        self._eval_returns: list[float] = []
        self._eval_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("eval"))

    @override(Trainer)
    def train(  # type: ignore[override]  # documented: the rollouts come first
        self,
        distributed_rollouts: ESDistributedRollouts,
        n_epochs: int | None = None,
        model_selection: ModelSelectionBase | None = None,
    ) -> None:
        """Trains until the number of epochs is reached, or early stopping or a signal ends the training.

        After a training that has come to its end, another call trains on; after an interrupted one (in this process or
        one whose state was loaded), it does what was left.

        :param distributed_rollouts: Evaluates perturbed policies.
        :param n_epochs: Number of updates; 0: no limit. ``None`` takes the configuration's.
        :param model_selection: Told about the mean return of the evaluation before each update.
        """
        self.model_selection = model_selection
        if self.config.patience > 0 and model_selection is None:
            raise ConfigError("algorithm.patience: early stopping needs a model selection; pass `model_selection`.")
        self._rollouts = distributed_rollouts
        self._train_epochs(n_epochs)

    @override(EpochTrainer)
    def _n_updates_per_epoch(self) -> int:
        return 1

    @override(EpochTrainer)
    def _aggregators(self) -> dict[str, LogStatsAggregator]:
        return {**super()._aggregators(), "evaluations": self._eval_stats}

    @override(EpochTrainer)
    def _update(self) -> None:
        """Evaluates the policy and perturbed versions of it, and takes a step."""
        assert self._rollouts is not None, "train sets them"
        start = time.perf_counter()
        self.policy.eval()
        noise_indices, returns, n_steps = self._collect(self._rollouts)
        gradient = es_gradient(self.shared_noise, noise_indices, returns, n_trained_parameters(self.policy))
        parameters = get_flat_parameters(self.policy).numpy()
        descent = self.config.l2_penalty * parameters - gradient
        if not np.isfinite(descent).all():
            raise NonFiniteError(
                "the estimated gradient is not finite; the step was not taken. Lower "
                "`algorithm.noise_stddev` or the optimizer's step size."
            )
        self._progress.steps_per_update = n_steps
        self._progress.before_output()
        self._report_evaluation(returns)  # of the policy as it is before the step
        update_ratio = self.optimizer.update(descent)
        self.events.policy_grad_norm(policy_id=0, value=float(np.linalg.norm(gradient)))
        self.events.policy_norm(policy_id=0, value=float(np.linalg.norm(parameters)))
        self.events.update_ratio(value=update_ratio)
        self.events.real_time(value=time.perf_counter() - start)

    def _collect(self, distributed_rollouts: ESDistributedRollouts) -> tuple[list[int], np.ndarray, int]:
        """The rollouts of one update.

        :return: Perturbations, returns ``[n_pairs, 2]``, number of environment steps.
        """
        config = self.config
        distributed_rollouts.prepare_update(self.epoch, config.n_rollouts_per_update, config.n_timesteps_per_update)
        rollouts = distributed_rollouts.generate_rollouts(
            self.policy, config.max_steps or None, config.noise_stddev, self.normalization_stats
        )
        self._eval_returns = []
        noise_indices: list[int] = []
        returns: list[float] = []
        n_steps = 0
        try:
            for result in rollouts:
                if result.is_eval:
                    self._take_evaluation(result)
                    continue
                for episode_stats in result.episode_stats:
                    self.train_stats.receive(episode_stats)
                self._check_finite(result.returns, result.noise_indices)
                noise_indices += result.noise_indices
                returns += result.returns
                n_steps += sum(result.lengths)
                if len(returns) >= config.n_rollouts_per_update and n_steps >= config.n_timesteps_per_update:
                    break
        finally:
            rollouts.close()
        return noise_indices, np.array(returns).reshape(-1, 2), n_steps

    def _check_finite(self, returns: list[float], noise_indices: list[int]) -> None:
        for position, episode_return in enumerate(returns):
            if not math.isfinite(episode_return):
                episode = Episode(position, noise_indices[position // 2], -1 if position % 2 else 1, None)
                raise NonFiniteError(f"the return of {episode} is {episode_return}; no step was taken.")

    def _report_evaluation(self, training_returns: np.ndarray) -> None:
        """Tells how good the policy is; where it is not evaluated itself, by the perturbed ones around it."""
        if self._evaluated_epoch == self.epoch:  # an earlier training ended with these episodes
            self._eval_stats.clear_inputs()
        elif self._eval_returns:
            self._eval_stats.reduce()
            if self.model_selection is not None:
                tell(self.model_selection, self._criterion, self._eval_stats.last_stats)
        elif self.model_selection is not None:
            if self.config.objective is not None or self.config.constraints:
                raise ConfigError(
                    "algorithm.objective, algorithm.constraints: they judge evaluations of the policy, but there are "
                    "none; set runner.n_eval_rollouts to at least 1."
                )
            self.model_selection.update(float(training_returns.mean()))

    @override(EpochTrainer)
    def _end_training(self) -> None:
        """Updates evaluate the policy before their step; nobody has seen yet what the last step led to."""
        if not self._eval_returns or self._rollouts is None:
            return
        n_evaluations = len(self._eval_returns)
        self._eval_returns = []
        self.policy.eval()
        self._rollouts.prepare_update(self.epoch, 0, 0)
        rollouts = self._rollouts.generate_rollouts(
            self.policy, self.config.max_steps or None, self.config.noise_stddev, self.normalization_stats
        )
        try:
            for result in rollouts:
                self._take_evaluation(result)
                if not result.is_eval or len(self._eval_returns) >= n_evaluations:
                    break
        finally:
            rollouts.close()
        self._progress.before_output()
        self._report_evaluation(np.empty(0))
        self._evaluated_epoch = self.epoch

    def _take_evaluation(self, result: ESRolloutResult) -> None:
        if result.is_eval:
            for episode_stats in result.episode_stats:
                self._eval_stats.receive(episode_stats)
            self._eval_returns += result.returns

    # -- state -----------------------------------------------------------------------------------------

    @override(EpochTrainer)
    def _parts(self) -> dict[str, Part]:
        """Episodes depend on seeds and the number of the update only."""
        return {"optimizer": self.optimizer}
