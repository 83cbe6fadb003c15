"""The life cycle that all trainers share: epochs, evaluations, early stopping, signals, checkpoints, resumption."""

from __future__ import annotations

import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import CheckpointError, ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import GlobalLogState, LogStatsAggregator, increment_log_step
from maze.core.utils.checkpoint import load_into, load_state, save_state
from maze.train.trainers.common.interrupt import InterruptGuard, TrainingInterrupted
from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
from maze.train.trainers.common.plain_state import (
    from_plain,
    global_generators_state,
    set_global_generators_state,
    statistics_from_plain,
    statistics_to_plain,
    to_plain,
)
from maze.train.trainers.common.progress import TrainingProgress
from maze.train.trainers.common.trainer import Trainer
from maze.utils.console import lasting_console

if TYPE_CHECKING:
    from maze.core.agent.torch_model import TorchModel

logger = logging.getLogger(__name__)

STATE_FORMAT = "maze_training_state"
"""Key that tells the state of a training from plain weights; its value is the version of the format."""

STATE_VERSION = 2
"""Version 1 had no environments, statistics and global generators in it."""


class EpochTrainer(Trainer, ABC):
    """Trains epoch after epoch. An epoch has a number of updates; its end is logged and saved.

    Subclasses say what an update is (:meth:`_update`), what is logged (:meth:`_write_epoch_stats`) and what their
    state is besides the model (:meth:`_own_state`, :meth:`_load_own_state`).

    :param algorithm_config: Hyperparameters.
    :param model: What is trained and saved.
    :param evaluator: Evaluates the policy; ``None``: nobody does.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param checkpoint_file: Where the state of the training is written after each epoch; ``None``: nowhere.
    """

    evaluates_between_epochs: ClassVar[bool] = True
    """Whether there is an evaluation before each epoch and one after the last, apart from what an update does."""
    update_name: ClassVar[str] = "update"
    """What an update is called in messages."""

    model: Any
    _progress: TrainingProgress

    def __init__(
        self,
        algorithm_config: Any,
        model: TorchModel,
        *,
        evaluator: Any = None,
        model_selection: Any = None,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        super().__init__(algorithm_config, model)
        self.evaluator = evaluator
        self.model_selection = model_selection
        if model_selection is not None and getattr(evaluator, "model_selection", model_selection) is None:
            evaluator.model_selection = model_selection
        self.checkpoint_file = Path(checkpoint_file) if checkpoint_file is not None else None
        self.run_seeds: dict[str, int] = {}
        """Seeds of the run, which are saved with its state."""
        self.epoch = 0
        """Number of completed epochs."""
        self.update = 0
        """Number of completed updates of the current epoch."""
        self._first_epoch = 0
        """Number of epochs completed before the current call of :meth:`train`."""
        self._is_finished = False
        """Whether the last training came to its end."""
        self._evaluated_epoch: int | None = None
        self._training_reward = math.nan
        """Mean reward of the episodes of the last epoch, where nothing else says how good the model is."""
        self._restored: dict[str, Any] = {}
        """States of what is given to the next call of :meth:`train` only."""

    # -- what trainers differ in -----------------------------------------------------------------------

    @abstractmethod
    def _update(self) -> None:
        """Collects or draws data and learns from it."""

    @abstractmethod
    def _write_epoch_stats(self) -> None:
        """Logs the statistics of the epoch that has just been completed."""

    @abstractmethod
    def _own_state(self) -> dict[str, Any]:
        """The training's state besides weights and what this class saves; tensors and plain values."""

    @abstractmethod
    def _load_own_state(self, state: Mapping[str, Any], origin: str | Path) -> list[str]:
        """Continues from a state that holds what :meth:`_own_state` returned.

        :return: What could not be continued.
        """

    def _aggregators(self) -> dict[str, LogStatsAggregator]:
        """Statistics of the current epoch, by names of their own."""
        return {}

    def _latest_data(self) -> dict[str, Any]:
        """What the latest update learned from, where its state does not hold it; tensors and plain values."""
        return {}

    def _training_statistics(self) -> LogStatsAggregator | None:
        """Statistics of the training's episodes."""
        return None

    def _n_updates_per_epoch(self) -> int:
        return int(self.algorithm_config.epoch_length)

    def _steps_per_update(self) -> int:
        """Number of environment steps per update, for the progress display."""
        return 0

    def _begin_epoch(self) -> None:
        """Comes before the first update of an epoch, or before what is left of an epoch that was interrupted."""

    def _before_update(self, share_done: float) -> None:
        """Comes before each update.

        :param share_done: Which share of all updates is done.
        """

    def _end_training(self) -> None:
        """Comes after the last epoch of a training that ends by itself."""

    def _epoch_done(self, seconds: float) -> None:
        """Comes when an epoch was logged."""

    @property
    def _policy(self) -> Any:
        """What is evaluated."""
        return self.model

    # -- epochs ----------------------------------------------------------------------------------------

    def _train_epochs(self, n_epochs: int | None) -> None:
        """Trains until the number of epochs is reached, or early stopping or a signal ends the training."""
        n_epochs = self.algorithm_config.n_epochs if n_epochs is None else n_epochs
        assert n_epochs is not None
        self._report(self._take_over_restored(), "The training state")
        if self._is_finished:
            self._first_epoch, self._is_finished = self.epoch, False
        if 0 < n_epochs <= self.epoch - self._first_epoch:
            print(
                f"-> nothing left to train: {self.epoch - self._first_epoch} epochs are done, algorithm.n_epochs is "
                f"{n_epochs}; raise it to go on.",
                flush=True,
            )
        self._progress = TrainingProgress(n_epochs, self._n_updates_per_epoch(), self._steps_per_update())
        if isinstance(self.model_selection, ModelSelectionBase):
            self.model_selection.training_started()
        with lasting_console(), InterruptGuard(_announce_interrupt) as interrupt:
            try:
                while n_epochs == 0 or self.epoch - self._first_epoch < n_epochs:
                    self._evaluate_if_due()
                    if self._has_stopped_improving():
                        print(f"-> early stopping: {self._patience} evaluations without improvement.", flush=True)
                        break
                    self._run_epoch(n_epochs, interrupt)
                self._evaluate_if_due()
                self._end_training()
                if isinstance(self.model_selection, ModelSelectionBase):
                    self.model_selection.training_ended()
            finally:
                self._progress.close()
        self._is_finished = True
        self._save_checkpoint(is_last=True)  # with the log step in which the next epoch would be logged
        if self.evaluates_between_epochs or self._evaluated_epoch == self.epoch:
            increment_log_step()

    def _run_epoch(self, n_epochs: int, interrupt: InterruptGuard) -> None:
        self._stop_if_requested(interrupt)
        first, progress, n_updates = self._first_epoch, self._progress, self._n_updates_per_epoch()
        progress.start_epoch(self.epoch - first)
        self._begin_epoch()
        while self.update < n_updates:
            self._before_update((self.epoch - first + self.update / n_updates) / max(n_epochs, 1))
            try:
                self._update()
            except NonFiniteError as error:
                raise self._with_reproduction_file(error) from error
            self.update += 1
            progress.update_done()
            if interrupt.requested:
                self._stop_if_requested(interrupt)
        self.epoch, self.update = self.epoch + 1, 0
        progress.before_output()
        self._write_epoch_stats()
        if self.evaluator is None and self.model_selection is not None:
            self._training_reward = self._mean_training_reward()
        increment_log_step()
        self._epoch_done(progress.epoch_done(self.epoch, self.epoch - first))
        if isinstance(self.model_selection, ModelSelectionBase):
            self.model_selection.epoch_completed(self.epoch)
        self._save_checkpoint()

    def evaluate(self, deterministic: bool | None = None, repeats: int = 1) -> None:
        """Evaluates the current policy.

        :param deterministic: Take the most probable actions; ``None`` leaves it to the evaluator.
        :param repeats: How often.
        """
        if self.evaluator is None:
            raise ConfigError("The trainer has no evaluator; pass one as `evaluator`.")
        configured = getattr(self.evaluator, "deterministic", None)
        try:
            if deterministic is not None and configured is not None:
                self.evaluator.deterministic = deterministic
            for _ in range(repeats):
                self.evaluator.evaluate(self._policy)
        finally:
            if configured is not None:
                self.evaluator.deterministic = configured

    def _evaluate_if_due(self) -> None:
        """Evaluates once between two epochs; not while critics learn alone and the policy stays what it is."""
        if not self.evaluates_between_epochs or self._evaluated_epoch == self.epoch or self.update > 0:
            return
        if 0 < self.epoch <= getattr(self.algorithm_config, "critic_burn_in_epochs", 0):
            return
        self._evaluated_epoch = self.epoch
        self._progress.before_output()
        if self.evaluator is not None:
            self.evaluate()
        elif self.model_selection is not None and self.epoch > 0 and not math.isnan(self._training_reward):
            self.model_selection.update(self._training_reward)

    def _mean_training_reward(self) -> float:
        """Mean reward of the episodes that ended in this epoch; NaN if there are none."""
        statistics = self._training_statistics()
        if statistics is None:
            return math.nan
        for key, value in statistics.last_stats.items():
            if key.event is BaseEnvEvents.reward and key.output_name == "mean" and key.group is None:
                return float(value)
        return math.nan

    @property
    def _patience(self) -> int:
        return int(getattr(self.algorithm_config, "patience", 0))

    def _has_stopped_improving(self) -> bool:
        return 0 < self._patience <= getattr(self.model_selection, "last_improvement", 0)

    def _stop_if_requested(self, interrupt: InterruptGuard) -> None:
        """After a signal, ends the training with everything saved."""
        if interrupt.signum is None:
            return
        self._save_checkpoint(is_last=True)
        increment_log_step()
        saved = f" Its state is saved in `{self.checkpoint_file}`." if self.checkpoint_file is not None else ""
        where = f"in epoch {self.epoch + 1} after {self.update_name} {self.update}"
        if self.update in (0, self._n_updates_per_epoch()):
            where = f"after epoch {self.epoch + bool(self.update)}"
        raise TrainingInterrupted(interrupt.signum, f"Training was interrupted {where}.{saved}")

    def _with_reproduction_file(self, error: NonFiniteError) -> NonFiniteError:
        """The error with its place in the training, and a file beside the checkpoints that shows it again."""
        where = ""
        if self.checkpoint_file is not None:
            file = self.checkpoint_file.parent / f"non_finite_{time.strftime('%Y-%m-%d_%H-%M-%S')}.pt"
            where = f" The state before that (weights, random states, data) is in `{file}`."
            try:
                save_state(file, {"training_state": self.training_state(), **self._latest_data()})
            except CheckpointError as failure:
                where = f" No file to reproduce it was written: {failure}"
        return NonFiniteError(f"Epoch {self.epoch + 1}, {self.update_name} {self.update + 1}: {error}{where}")

    # -- state -----------------------------------------------------------------------------------------

    @override(Trainer)
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.model.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], origin: str | Path = "The state dictionary") -> None:
        """Loads weights; those of a policy alone leave a critic as it is, and a policy leaves out those of a critic.

        :param state_dict: Weights as :meth:`state_dict` gives them.
        :param origin: Where they come from, for error messages.
        """
        if self._policy is self.model:
            own = self.model.state_dict()
            load_into(self.model, {key: value for key, value in state_dict.items() if key in own}, origin)
        else:
            is_policy_alone = set(state_dict) == set(self._policy.state_dict())
            load_into(self._policy if is_policy_alone else self.model, state_dict, origin)
        self._evaluated_epoch = None

    @override(Trainer)
    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        state = load_state(file_path)
        origin = Path(file_path) if isinstance(file_path, str | Path) else "The checkpoint"
        if STATE_FORMAT not in state:
            self.load_state_dict(state, origin)
        elif self._policy is self.model and not self._is_own_state(state):
            self.load_state_dict(state["model"], origin)
        else:
            self.load_training_state(state, origin)

    @override(Trainer)
    def resume(self, state: Mapping[str, Any], origin: str | Path) -> None:
        if not self._is_own_state(state):
            raise ConfigError(
                f"algorithm: `{origin}` is the state of a training with {state.get('algorithm', 'another algorithm')}, "
                f"but {type(self).__name__} is configured. Choose the algorithm of that training, or leave out "
                "`resume=true` to start a new one with its weights."
            )
        try:
            self.load_training_state(state, origin)
        except CheckpointError as error:
            raise ConfigError(
                f"model: the training in `{origin}` cannot be resumed with the configured model. {error} To start a "
                "new training with weights alone, leave out `resume=true`."
            ) from error
        self._first_epoch, self._is_finished = 0, False

    def training_state(self) -> dict[str, Any]:
        """All that the training consists of, so that another process can go on with it; tensors and plain values."""
        evaluator = getattr(self.evaluator, "state_dict", None)
        selection = getattr(self.model_selection, "state_dict", None)
        return {
            STATE_FORMAT: STATE_VERSION,
            "algorithm": type(self).__name__,
            "model": self.model.state_dict(),
            "epoch": self.epoch,
            "update": self.update,
            "first_epoch": self._first_epoch,
            "is_finished": self._is_finished,
            "evaluated_epoch": self._evaluated_epoch,
            "training_reward": self._training_reward,
            "log_step": GlobalLogState.global_step,
            "seeds": dict(self.run_seeds),
            "model_selection": None if selection is None else selection(),
            "evaluator": None if evaluator is None else to_plain(evaluator()),
            "statistics": {name: statistics_to_plain(each) for name, each in self._aggregators().items()},
            "global_generators": global_generators_state(),
            **self._own_state(),
        }

    def load_training_state(self, state: Mapping[str, Any], origin: str | Path = "The training state") -> None:
        """Continues from a state that :meth:`training_state` returned."""
        self._check_is_readable(state, origin)
        load_into(self.model, state["model"], origin)
        self.epoch, self.update = state["epoch"], state["update"]
        self._first_epoch, self._is_finished = state["first_epoch"], state["is_finished"]
        self._evaluated_epoch = state.get("evaluated_epoch")
        self._training_reward = state.get("training_reward", math.nan)
        self.run_seeds = dict(state.get("seeds", {}))
        problems = self._load_own_state(state, origin)
        self._restored = {key: state[key] for key in ("model_selection", "evaluator") if state.get(key) is not None}
        problems += self._take_over_restored()
        for name, aggregator in self._aggregators().items():
            statistics_from_plain(aggregator, state.get("statistics", {}).get(name, ()))
        if state[STATE_FORMAT] < STATE_VERSION:
            problems.insert(
                0,
                f"an earlier release wrote it (version {state[STATE_FORMAT]} of the format, now {STATE_VERSION}); "
                "environments begin new episodes, statistics those of log step 1",
            )
        else:
            GlobalLogState.global_step = state["log_step"]
            set_global_generators_state(state["global_generators"])
        self._report(problems, origin)

    def _take_over_restored(self) -> list[str]:
        """Hands restored states to evaluator and model selection, once they are there."""
        problems: list[str] = []
        if self.model_selection is not None and "model_selection" in self._restored:
            state = self._restored.pop("model_selection")
            if hasattr(self.model_selection, "load_state_dict"):
                self.model_selection.load_state_dict(state)
        if self.evaluator is not None and "evaluator" in self._restored:
            state = from_plain(self._restored.pop("evaluator"))
            if hasattr(self.evaluator, "load_state_dict"):
                problems += self.evaluator.load_state_dict(state)
        return problems

    def _is_own_state(self, state: Mapping[str, Any]) -> bool:
        if "algorithm" in state:
            return bool(state["algorithm"] == type(self).__name__)
        return all(key in state for key in self._keys_of_version_1)

    _keys_of_version_1: ClassVar[tuple[str, ...]] = ()
    """Keys that tell the states of version 1, which do not name their algorithm."""

    def _check_is_readable(self, state: Mapping[str, Any], origin: str | Path) -> None:
        if state[STATE_FORMAT] > STATE_VERSION:
            raise CheckpointError(
                f"`{origin}` has version {state[STATE_FORMAT]} of the format of training states; this release reads "
                f"versions up to {STATE_VERSION}. Use the release that wrote it (`versions.json` beside it names it)."
            )
        if not all(key in state for key in self._keys_of_version_1):
            raise CheckpointError(
                f"`{origin}` is the state of a training with another algorithm "
                f"({state.get('algorithm', 'not named')}); expected one of {type(self).__name__}."
            )

    def _report(self, problems: list[str], origin: str | Path) -> None:
        if problems:
            logger.warning("`%s` is not continued exactly: %s.", origin, "; ".join(problems))

    def _checkpoint_state(self, is_last: bool) -> dict[str, Any]:
        """What is saved.

        :param is_last: Whether the training ends here.
        """
        return self.training_state()

    def _save_checkpoint(self, is_last: bool = False) -> None:
        if self.checkpoint_file is not None:
            save_state(self.checkpoint_file, self._checkpoint_state(is_last))


def new_episodes(problems: Mapping[int, str]) -> list[str]:
    """Says which environments begin new episodes.

    :param problems: The reasons by index of the environment.
    """
    by_reason: dict[str, list[str]] = {}
    for index, reason in problems.items():
        by_reason.setdefault(reason, []).append(str(index))
    return [
        f"{'environments' if len(indices) > 1 else 'environment'} {', '.join(indices)} "
        f"{'begin new episodes' if len(indices) > 1 else 'begins a new episode'} ({reason})"
        for reason, indices in by_reason.items()
    ]


def _announce_interrupt(signal_name: str) -> None:
    print(
        f"{signal_name}: ending after the current update; interrupt again to stop at once.", file=sys.stderr, flush=True
    )
