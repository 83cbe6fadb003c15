"""Evolution strategies."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger, increment_log_step
from maze.core.utils.checkpoint import load_into, load_state, save_state
from maze.core.utils.factory import Factory
from maze.train.trainers.common.actor_critic.actor_critic_trainer import STATE_FORMAT
from maze.train.trainers.common.interrupt import InterruptGuard, TrainingInterrupted
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.progress import TrainingProgress
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.es.es_algorithm_config import ESAlgorithmConfig
from maze.train.trainers.es.es_events import ESEvents
from maze.train.trainers.es.es_utils import es_gradient, get_flat_parameters
from maze.train.trainers.es.optimizers.base_optimizer import Optimizer

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
    from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable


class ESTrainer(Trainer):
    """Follows a gradient that is estimated from the returns of randomly perturbed policies.

    Salimans et al. 2017: perturbations come in mirrored pairs, and only the order of the returns counts.

    :param algorithm_config: Hyperparameters.
    :param torch_policy: The policy.
    :param shared_noise: The perturbations.
    :param normalization_stats: Statistics for observation normalization, for the environments.
    :param checkpoint_file: Where the state of the training is written after each epoch; ``None``: nowhere.
    """

    def __init__(
        self,
        algorithm_config: Any,
        torch_policy: TorchPolicy,
        shared_noise: SharedNoiseTable,
        normalization_stats: Any,
        *,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        self.config = ESAlgorithmConfig.from_config(algorithm_config)
        super().__init__(self.config, torch_policy)
        self.policy = torch_policy
        self.shared_noise = shared_noise
        self.normalization_stats = normalization_stats
        self.checkpoint_file = Path(checkpoint_file) if checkpoint_file is not None else None
        self.optimizer: Optimizer = Factory(Optimizer).instantiate(  # type: ignore[type-abstract]  # a subclass
            self.config.optimizer, config_path="algorithm.optimizer"
        )
        self.optimizer.setup(torch_policy)
        shared_noise.get(0, torch_policy.num_params)  # tells now if the table is too small
        self.model_selection: Any = None
        """The model selection of the current or last training."""
        self.epoch = 0
        """Number of completed updates."""
        self._first_epoch = 0
        """Number of updates completed before the current call of :meth:`train`."""
        self._is_finished = False
        """Whether the last training came to its end."""
        self._selection_state: Mapping[str, Any] | None = None
        self._train_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        self._eval_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("eval"))
        self._events = self._train_stats.create_event_topic(ESEvents)

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
        n_epochs = self.config.n_epochs if n_epochs is None else n_epochs
        self._select_with(model_selection)
        if self._is_finished:
            self._first_epoch, self._is_finished = self.epoch, False
        progress = TrainingProgress(n_epochs, epoch_length=1, steps_per_update=0)
        with InterruptGuard(_announce_interrupt) as interrupt:
            try:
                while n_epochs == 0 or self.epoch - self._first_epoch < n_epochs:
                    self._stop_if_requested(interrupt)
                    if self._has_stopped_improving():
                        print(f"-> early stopping: {self.config.patience} evaluations without improvement.", flush=True)
                        break
                    progress.start_epoch(self.epoch - self._first_epoch)
                    progress.steps_per_update = self._update(distributed_rollouts, progress)
                    self.epoch += 1
                    progress.update_done()
                    increment_log_step()
                    progress.epoch_done(self.epoch, self.epoch - self._first_epoch)
                    self._save_checkpoint()
            finally:
                progress.close()
        self._is_finished = True
        self._save_checkpoint()

    def _update(self, distributed_rollouts: ESDistributedRollouts, progress: TrainingProgress) -> int:
        """Evaluates the policy and perturbed versions of it, and takes a step.

        :return: Number of environment steps.
        """
        start = time.perf_counter()
        self.policy.eval()
        noise_indices, returns, n_steps = self._collect(distributed_rollouts)
        gradient = es_gradient(self.shared_noise, noise_indices, returns, self.policy.num_params)
        parameters = get_flat_parameters(self.policy).numpy()
        descent = self.config.l2_penalty * parameters - gradient
        if not np.isfinite(descent).all():
            raise NonFiniteError(
                f"Update {self.epoch + 1}: the estimated gradient is not finite; the step was not taken. Lower "
                "`algorithm.noise_stddev` or the optimizer's step size."
            )
        progress.before_output()
        self._report_evaluation()  # of the policy as it is before the step
        update_ratio = self.optimizer.update(descent)
        self._events.policy_grad_norm(policy_id=0, value=float(np.linalg.norm(gradient)))
        self._events.policy_norm(policy_id=0, value=float(np.linalg.norm(parameters)))
        self._events.update_ratio(value=update_ratio)
        self._events.real_time(value=time.perf_counter() - start)
        self._train_stats.reduce()
        return n_steps

    def _collect(self, distributed_rollouts: ESDistributedRollouts) -> tuple[list[int], np.ndarray, int]:
        """The rollouts of one update.

        :return: Perturbations, returns ``[n_pairs, 2]``, number of environment steps.
        """
        config = self.config
        distributed_rollouts.prepare_update(self.epoch, config.n_rollouts_per_update, config.n_timesteps_per_update)
        rollouts = distributed_rollouts.generate_rollouts(
            self.policy, config.max_steps or None, config.noise_stddev, self.normalization_stats
        )
        self._eval_returns: list[float] = []
        noise_indices: list[int] = []
        returns: list[float] = []
        n_steps = 0
        try:
            for result in rollouts:
                stats = self._eval_stats if result.is_eval else self._train_stats
                for episode_stats in result.episode_stats:
                    stats.receive(episode_stats)
                if result.is_eval:
                    self._eval_returns += result.returns
                    continue
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
                sign = "subtracted" if position % 2 else "added"
                raise NonFiniteError(
                    f"Update {self.epoch + 1}: an episode's return is {episode_return}, so one of its rewards was not "
                    f"finite; no step was taken. It was played with perturbation {noise_indices[position // 2]} of the "
                    f"noise table {sign}."
                )

    def _report_evaluation(self) -> None:
        if not self._eval_returns:
            return
        self._eval_stats.reduce()
        if self.model_selection is not None:
            self.model_selection.update(float(np.mean(self._eval_returns)))

    def _select_with(self, model_selection: ModelSelectionBase | None) -> None:
        self.model_selection = model_selection
        if self._selection_state is not None and isinstance(model_selection, BestModelSelection):
            model_selection.load_state_dict(self._selection_state)
            self._selection_state = None
        if self.config.patience > 0 and model_selection is None:
            raise ConfigError("algorithm.patience: early stopping needs a model selection; pass `model_selection`.")

    def _has_stopped_improving(self) -> bool:
        last_improvement = getattr(self.model_selection, "last_improvement", 0)
        return 0 < self.config.patience <= last_improvement

    def _stop_if_requested(self, interrupt: InterruptGuard) -> None:
        """After a signal, ends the training with everything saved."""
        if interrupt.signum is None:
            return
        self._save_checkpoint()
        saved = f" Its state is saved in `{self.checkpoint_file}`." if self.checkpoint_file is not None else ""
        raise TrainingInterrupted(interrupt.signum, f"Training was interrupted after epoch {self.epoch}.{saved}")

    # -- state -----------------------------------------------------------------------------------------

    @override(Trainer)
    def state_dict(self) -> dict[str, Any]:
        return self.policy.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], origin: str | Path = "The state dictionary") -> None:
        """Loads weights; of an actor-critic's it takes the policy's.

        :param state_dict: Weights as :meth:`state_dict` gives them.
        :param origin: Where they come from, for error messages.
        """
        own = self.policy.state_dict()
        load_into(self.policy, {key: value for key, value in state_dict.items() if key in own}, origin)

    @override(Trainer)
    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        state = load_state(file_path)
        origin = Path(file_path) if isinstance(file_path, str | Path) else "The checkpoint"
        if STATE_FORMAT in state and "es_optimizer" in state:
            self.load_training_state(state, origin)
        else:
            self.load_state_dict(state["model"] if STATE_FORMAT in state else state, origin)

    def training_state(self) -> dict[str, Any]:
        """All that the training itself consists of; episodes depend on seeds and the number of the update only."""
        selection = self.model_selection
        return {
            STATE_FORMAT: 1,
            "model": self.policy.state_dict(),
            "es_optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "first_epoch": self._first_epoch,
            "is_finished": self._is_finished,
            "model_selection": selection.state_dict() if isinstance(selection, BestModelSelection) else None,
        }

    def load_training_state(self, state: Mapping[str, Any], origin: str | Path = "The training state") -> None:
        """Continues from a state that :meth:`training_state` returned."""
        load_into(self.policy, state["model"], origin)
        self.optimizer.load_state_dict(state["es_optimizer"])
        self.epoch = state["epoch"]
        self._first_epoch, self._is_finished = state["first_epoch"], state["is_finished"]
        self._selection_state = state["model_selection"]

    def _save_checkpoint(self) -> None:
        if self.checkpoint_file is not None:
            save_state(self.checkpoint_file, self.training_state())


def _announce_interrupt(signal_name: str) -> None:
    print(
        f"{signal_name}: ending after the current update; interrupt again to stop at once.", file=sys.stderr, flush=True
    )
