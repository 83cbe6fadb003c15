"""The life cycle that all trainers share: epochs, evaluations, early stopping, signals, checkpoints, resumption."""

from __future__ import annotations

import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Protocol

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_model import resolve_device
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import CheckpointError, ConfigError, MazeError, NonFiniteError
from maze.core.log_stats.log_stats import (
    GlobalLogState,
    LogStatsAggregator,
    LogStatsLevel,
    StatsContext,
    get_stats_logger,
    increment_log_step,
)
from maze.core.utils.checkpoint import load_into, load_state, save_state
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.learning import InitialPolicy, decayed_coef
from maze.train.trainers.common.model_selection.best_model_selection import selected_score
from maze.train.trainers.common.trainer import Trainer
from maze.train.utils.interrupt import InterruptGuard, TrainingInterrupted
from maze.train.utils.plain_state import (
    Part,
    from_plain,
    global_generators_state,
    load_states,
    set_global_generators_state,
    states_of,
    statistics_from_plain,
    statistics_to_plain,
    to_plain,
)
from maze.train.utils.progress import TrainingProgress
from maze.train.utils.resumption import STATE_FORMAT
from maze.train.utils.training_record import ENDED, INTERRUPTED, RUNNING, EpochSummary, write_record
from maze.train.utils.update_stats import UpdateStats
from maze.utils.console import lasting_console

if TYPE_CHECKING:
    from maze.core.agent.torch_model import TorchModel
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase

logger = logging.getLogger(__name__)

STATE_VERSION = 1

EPOCHS_WITHOUT_EPISODE = 10
"""After so many epochs in a row in which no episode has ended, there is a word about it."""


class EpisodeSource(Protocol):
    """What collects the training's episodes: a vector environment, or workers that fill a replay buffer."""

    @property
    def epoch_stats(self) -> LogStatsAggregator:
        """Statistics of the episodes that ended in this epoch."""

    def write_epoch_stats(self) -> None:
        """Hands them to the writers, and begins the next epoch."""


class EpochTrainer(Trainer, ABC):
    """Trains epoch after epoch. An epoch has a number of updates; its end is logged, evaluated and saved.

    An algorithm is a subclass that names the class of its configuration (:attr:`config_class`) and of its events
    (:attr:`events_class`), and says

    * what an update is (:meth:`_update`): collect or draw data, compute
      :class:`~maze.train.trainers.common.learning.Losses`, take a
      :func:`~maze.train.trainers.common.learning.gradient_step`, and report both to :attr:`stats`;
    * what it consists of besides its model (:meth:`_parts`): optimizers, generators, environments, a replay buffer;
    * where its episodes come from (:meth:`_episode_source`), if it collects some.

    It gets all the rest: evaluation between epochs, the best model, early stopping, statistics, the progress display,
    a checkpoint after each epoch from which a training goes on exactly, an orderly end after a signal, and for a number
    that is not finite an error that says where, with a file to reproduce it. Burn-in (:attr:`_critic_learns_alone`) and
    the distance from the initial policy (:attr:`_initial_policy`) follow the configuration, if it has those fields.

    Algorithms that act while they learn begin with
    :class:`~maze.train.trainers.common.actor_critic.actor_critic_trainer.ActorCritic` (rollouts of the current policy)
    or :class:`~maze.train.trainers.common.replay_trainer.ReplayTrainer` (a replay buffer).

    :param algorithm_config: Hyperparameters: a `config_class`, or a mapping of its fields.
    :param model: What is trained and saved; it is moved to `config.device`.
    :param evaluator: Evaluates the policy; `None`: nobody does, and the training's episodes say how good it is.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param checkpoint_file: Where the state of the training is written after each epoch; `None`: nowhere.
    :raises ConfigError: The device is not there.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    """Hyperparameters. How many updates make an epoch, patience, device, burn-in and so on are fields of it."""
    events_class: ClassVar[type[Any]]
    """The events that the losses report to, each logged once per epoch."""
    evaluates_between_epochs: ClassVar[bool] = True
    """Whether there is an evaluation before each epoch and one after the last, apart from what an update does."""
    update_name: ClassVar[str] = "update"
    """What an update is called in messages."""

    config: Any
    """The hyperparameters; subclasses declare their own type."""
    model: Any
    """What is trained; subclasses declare its type."""
    policy: TorchPolicy
    """What is evaluated: the model, or the policy in it."""
    _progress: TrainingProgress

    def __init__(
        self,
        algorithm_config: Any,
        model: TorchModel,
        *,
        evaluator: Evaluator | None = None,
        model_selection: ModelSelectionBase | None = None,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        self.config = self.config_class.from_config(algorithm_config)
        super().__init__(self.config, model)
        self.policy = _policy_of(model)
        try:
            model.to(resolve_device(self.config.device))
        except ConfigError as error:
            raise ConfigError(f"algorithm.{error}") from error
        self.evaluator = evaluator
        self.model_selection = model_selection
        if evaluator is not None and model_selection is not None:
            evaluator.report_to(model_selection)
        self.checkpoint_file = Path(checkpoint_file) if checkpoint_file is not None else None
        self.train_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        """Statistics of the epoch."""
        self.events = self.train_stats.create_event_topic(self.events_class)
        self.stats = UpdateStats(self.events_class)
        """Collects the numbers of the updates; their means are fired once per epoch."""
        self.run_seeds: dict[str, int] = {}
        """Seeds of the run, which are saved with its state."""
        self.epoch = 0
        """Number of completed epochs."""
        self.update = 0
        """Number of completed updates of the current epoch."""
        self.n_env_steps = 0
        """Number of environment steps of all completed epochs."""
        self.history: list[EpochSummary] = []
        """The epochs that this object has completed."""
        self._initial_policy: InitialPolicy | None = None
        """What the training started from, where the policy has to stay close to it."""
        self._first_epoch = 0
        """Number of epochs completed before the current call of :meth:`train`."""
        self._is_finished = False
        """Whether the last training came to its end."""
        self._evaluated_epoch: int | None = None
        self._training_reward = math.nan
        """Mean reward of the episodes of the last epoch, where nothing else says how good the model is."""
        self._saved_epoch: int | None = None
        """Which epoch the checkpoint is of; `None`: this object has written none."""
        self._restored: dict[str, Any] = {}
        """States of what is given to the next call of :meth:`train` only."""

    # -- what trainers differ in -----------------------------------------------------------------------

    @abstractmethod
    def _update(self) -> None:
        """Collects or draws data and learns from it."""

    def _parts(self) -> dict[str, Part]:
        """What the training consists of besides the model, by names of their own.

        All of it is saved with the training, and continued in this order. The policy's generators, statistics,
        evaluator, best model, progress and the global generators need no mention.
        """
        return {}

    def _episode_source(self) -> EpisodeSource | None:
        """What collects the training's episodes."""
        return None

    def _latest_data(self) -> dict[str, Any]:
        """What the latest update learned from, where its state does not hold it; tensors and plain values."""
        return {}

    def _n_updates_per_epoch(self) -> int:
        return int(self.config.epoch_length)

    def _steps_per_update(self) -> int:
        """Number of environment steps per update, for the progress display."""
        return 0

    @property
    def steps_per_epoch(self) -> int:
        """Number of environment steps of an epoch; 0: it takes none, or their number is not fixed."""
        return self._n_updates_per_epoch() * self._steps_per_update()

    def _work_of_an_epoch(self) -> str:
        """Returns what an epoch is made of; printed before the first one, which may take long."""
        n_updates = f"{self._n_updates_per_epoch():,} updates"
        return (
            f"collecting {self.steps_per_epoch:,} environment steps, {n_updates}" if self.steps_per_epoch else n_updates
        )

    def _begin_training(self, n_epochs: int) -> None:
        """Comes first in each call of :meth:`train`.

        :param n_epochs: Number of epochs; 0: no limit.
        """

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

    def _write_epoch_stats(self) -> None:
        """Logs the statistics of the epoch that has just been completed."""
        self.stats.publish(self.events)
        self.train_stats.reduce()
        episodes = self._episode_source()
        if episodes is not None:
            episodes.write_epoch_stats()

    def _aggregators(self) -> dict[str, LogStatsAggregator]:
        """Statistics of the current epoch, by names of their own."""
        episodes = self._episode_source()
        return {"updates": self.train_stats, **({} if episodes is None else {"episodes": episodes.epoch_stats})}

    # -- for all that learn policies -------------------------------------------------------------------

    @property
    def _critic_learns_alone(self) -> bool:
        """Whether this is one of the epochs at the start in which the policy stays as it is."""
        return self.epoch < int(self.config.critic_burn_in_epochs)

    @property
    def _kl_to_initial_coef(self) -> float:
        """Weight of the divergence from the initial policy in this epoch."""
        config = self.config
        n_learning_epochs = self.epoch - config.critic_burn_in_epochs
        return decayed_coef(config.kl_to_initial_coef, config.kl_to_initial_decay, n_learning_epochs)

    # -- epochs ----------------------------------------------------------------------------------------

    @override(Trainer)
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        """Trains until the number of epochs is reached, or early stopping or a signal ends the training.

        After a training that has come to its end, another call trains on; after an interrupted one (in this process or
        one whose state was loaded), it does what was left.

        :param n_epochs: Number of epochs; 0: no limit. `None` takes the configuration's.
        """
        self._train_epochs(n_epochs)

    def _train_epochs(self, n_epochs: int | None) -> None:
        n_epochs = int(self.config.n_epochs) if n_epochs is None else n_epochs
        self._begin_training(n_epochs)
        if self.config.kl_to_initial_coef and self._initial_policy is None:
            self._initial_policy = InitialPolicy(self.policy)
        self._report(self._take_over_restored(), "The training state")
        if self._is_finished:
            self._first_epoch, self._is_finished = self.epoch, False
        if 0 < n_epochs <= self.epoch - self._first_epoch:
            print(
                f"-> nothing left to train: {self.epoch - self._first_epoch} epochs are done, algorithm.n_epochs is "
                f"{n_epochs}; raise it to go on.",
                flush=True,
            )
        elif n_epochs == 0:
            print(f"-> algorithm.n_epochs is 0: {self._end_without_limit()}.", flush=True)
        self._progress = TrainingProgress(n_epochs, self._n_updates_per_epoch(), self._steps_per_update())
        self._write_record(RUNNING)
        if self.model_selection is not None:
            self.model_selection.training_started()
        with lasting_console(), InterruptGuard(_announce_interrupt) as interrupt:
            try:
                while n_epochs == 0 or self.epoch - self._first_epoch < n_epochs:
                    self._evaluate_if_due()
                    if self._has_stopped_improving():
                        print(f"-> early stopping: {self.config.patience} evaluations without improvement.", flush=True)
                        break
                    self._run_epoch(n_epochs, interrupt)
                self._evaluate_if_due()
                self._end_training()
                if self.model_selection is not None:
                    self.model_selection.training_ended()
            except BaseException as error:
                self._write_record(INTERRUPTED)
                if isinstance(error, MazeError):
                    self._name_last_checkpoint(error)
                raise
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
        if self.epoch == first:
            progress.announce(f"epoch {self.epoch + 1}: {self._work_of_an_epoch()}")
        self._begin_epoch()
        while self.update < n_updates:
            self._before_update((self.epoch - first + self.update / n_updates) / max(n_epochs, 1))
            try:
                self._update()
            except NonFiniteError as error:
                raise self._with_reproduction_file(error) from error
            self.update += 1
            self.n_env_steps += progress.steps_per_update
            progress.update_done()
            if interrupt.requested:
                self._stop_if_requested(interrupt)
        self.epoch, self.update = self.epoch + 1, 0
        progress.before_output()
        self._tell_env_steps()
        self._write_epoch_stats()
        self._training_reward = self._mean_training_reward()
        self.history.append(EpochSummary(self.epoch, self.n_env_steps, self._training_reward))
        self._tell_where_no_episode_ends()
        increment_log_step()
        self._epoch_done(progress.epoch_done(self.epoch, self.epoch - first))
        if self.model_selection is not None:
            self.model_selection.epoch_completed(self.epoch)
        self._save_checkpoint()

    def evaluate(self, deterministic: bool | None = None, repeats: int = 1) -> None:
        """Evaluates the current policy.

        :param deterministic: Take the most probable actions; `None` leaves it to the evaluator.
        :param repeats: How often.
        :raises ConfigError: There is no evaluator.
        """
        if self.evaluator is None:
            raise ConfigError("The trainer has no evaluator; pass one as `evaluator`.")
        try:
            with self.evaluator.choosing(deterministic):
                for _ in range(repeats):
                    self.evaluator.evaluate(self.policy)
        except MazeError as error:
            error.remark("This happened in an evaluation.")
            raise

    def _evaluate_if_due(self) -> None:
        """Evaluates once between two epochs; not while critics learn alone and the policy stays what it is."""
        if not self.evaluates_between_epochs or self._evaluated_epoch == self.epoch or self.update > 0:
            return
        if 0 < self.epoch <= self.config.critic_burn_in_epochs:
            return
        self._evaluated_epoch = self.epoch
        self._progress.before_output()
        self._tell_env_steps()
        if self.evaluator is not None:
            if self.epoch == self._first_epoch:
                self._progress.announce("evaluating the policy that the training starts from")
            self.evaluate()
        elif self.model_selection is not None and self.epoch > 0 and not math.isnan(self._training_reward):
            self.model_selection.update(self._training_reward)

    def _tell_env_steps(self) -> None:
        """Says after how many environment steps the statistics that follow were taken, where they are counted."""
        StatsContext.active().n_env_steps = self.n_env_steps if self.steps_per_epoch else None

    def _mean_training_reward(self) -> float:
        """Mean reward of the episodes that ended in this epoch; NaN if there are none."""
        episodes = self._episode_source()
        statistics = self.train_stats if episodes is None else episodes.epoch_stats
        for key, value in statistics.last_stats.items():
            if key.event is BaseEnvEvents.reward and key.output_name == "mean" and key.group is None:
                return float(value)
        return math.nan

    def _tell_where_no_episode_ends(self) -> None:
        latest = self.history[-EPOCHS_WITHOUT_EPISODE:]
        before = self.history[-EPOCHS_WITHOUT_EPISODE - 1 : -EPOCHS_WITHOUT_EPISODE]
        if self._episode_source() is None or len(latest) < EPOCHS_WITHOUT_EPISODE:
            return
        if all(math.isnan(epoch.mean_reward) for epoch in latest) and not any(
            math.isnan(epoch.mean_reward) for epoch in before
        ):
            logger.warning(
                "No episode has ended for %d epochs, so their statistics say nothing of rewards. Either episodes are "
                "longer than that (raise algorithm.epoch_length or algorithm.n_rollout_steps), or the environment "
                "never reports `done`: a TimeLimitWrapper (max_episode_steps) ends them.",
                EPOCHS_WITHOUT_EPISODE,
            )

    def _end_without_limit(self) -> str:
        """What ends a training that has no number of epochs."""
        patience = int(self.config.patience)
        if patience <= 0 or self.model_selection is None:
            return "training goes on until it is interrupted (Ctrl-C saves everything)"
        return (
            f"training ends after {patience} evaluations in a row without improvement, at the earliest after epoch "
            f"{self.epoch + patience - self.model_selection.last_improvement}, or when it is interrupted (Ctrl-C "
            "saves everything)"
        )

    def _has_stopped_improving(self) -> bool:
        n_in_vain = 0 if self.model_selection is None else self.model_selection.last_improvement
        return 0 < int(self.config.patience) <= n_in_vain

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
        if self.policy is self.model:
            own = self.model.state_dict()
            load_into(self.model, {key: value for key, value in state_dict.items() if key in own}, origin)
        else:
            is_policy_alone = set(state_dict) == set(self.policy.state_dict())
            load_into(self.policy if is_policy_alone else self.model, state_dict, origin)
        self._evaluated_epoch = None
        self._initial_policy = None

    @override(Trainer)
    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        state = load_state(file_path)
        origin = Path(file_path) if isinstance(file_path, str | Path) else "The checkpoint"
        if STATE_FORMAT not in state:
            self.load_state_dict(state, origin)
        elif self.policy is self.model and not self._is_own_state(state):
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

    def training_state(self, is_last: bool = True) -> dict[str, Any]:
        """All that the training consists of, so that another process can go on with it; tensors and plain values.

        :param is_last: Whether the training ends here; what is expensive to save may be left out of others.
        """
        initial = self._initial_policy
        return {
            STATE_FORMAT: STATE_VERSION,
            "algorithm": type(self).__name__,
            "model": self.model.state_dict(),
            "initial_policy": None if initial is None else initial.policy.state_dict(),
            "policy_generators": self.policy.rng_state(),
            "epoch": self.epoch,
            "update": self.update,
            "first_epoch": self._first_epoch,
            "is_finished": self._is_finished,
            "evaluated_epoch": self._evaluated_epoch,
            "training_reward": self._training_reward,
            "n_env_steps": self.n_env_steps,
            "log_step": GlobalLogState.global_step,
            "seeds": dict(self.run_seeds),
            "model_selection": None if self.model_selection is None else self.model_selection.state_dict(),
            "evaluator": None if self.evaluator is None else to_plain(self.evaluator.state_dict()),
            "update_statistics": self.stats.state_dict(),
            "statistics": {name: statistics_to_plain(each) for name, each in self._aggregators().items()},
            "global_generators": global_generators_state(),
            "parts": states_of(self._parts()),
        }

    def load_training_state(self, state: Mapping[str, Any], origin: str | Path = "The training state") -> None:
        """Continues from a state that :meth:`training_state` returned."""
        self._check_is_readable(state, origin)
        load_into(self.model, state["model"], origin)
        self._initial_policy = None
        if state["initial_policy"] is not None:
            self._initial_policy = InitialPolicy(self.policy)
            load_into(self._initial_policy.policy, state["initial_policy"], origin)
        self.policy.set_rng_state(state["policy_generators"])
        self.epoch, self.update = state["epoch"], state["update"]
        self._first_epoch, self._is_finished = state["first_epoch"], state["is_finished"]
        self._evaluated_epoch = state["evaluated_epoch"]
        self._training_reward = state["training_reward"]
        self.n_env_steps = state["n_env_steps"]
        self.run_seeds = dict(state["seeds"])
        self.stats.load_state_dict(state["update_statistics"])
        problems = self._load_parts(state)
        self._restored = {key: state[key] for key in ("model_selection", "evaluator") if state[key] is not None}
        problems += self._take_over_restored()
        for name, aggregator in self._aggregators().items():
            statistics_from_plain(aggregator, state["statistics"].get(name, ()))
        GlobalLogState.global_step = state["log_step"]
        set_global_generators_state(state["global_generators"])
        self._report(problems, origin)

    def _load_parts(self, state: Mapping[str, Any]) -> list[str]:
        """Continues all parts.

        :return: What could not be continued.
        """
        return load_states(self._parts(), state["parts"])

    def _take_over_restored(self) -> list[str]:
        """Hands restored states to evaluator and model selection, once they are there."""
        problems: list[str] = []
        if self.model_selection is not None and "model_selection" in self._restored:
            self.model_selection.load_state_dict(self._restored.pop("model_selection"))
        if self.evaluator is not None and "evaluator" in self._restored:
            problems += self.evaluator.load_state_dict(from_plain(self._restored.pop("evaluator")))
        return problems

    def _is_own_state(self, state: Mapping[str, Any]) -> bool:
        return bool(state.get("algorithm") == type(self).__name__)

    def _check_is_readable(self, state: Mapping[str, Any], origin: str | Path) -> None:
        if state[STATE_FORMAT] != STATE_VERSION:
            raise CheckpointError(
                f"`{origin}` has version {state[STATE_FORMAT]} of the format of training states; this release reads "
                f"version {STATE_VERSION}. Use the release that wrote it (`versions.json` beside it names it)."
            )
        if not self._is_own_state(state):
            raise CheckpointError(
                f"`{origin}` is the state of a training with another algorithm "
                f"({state.get('algorithm', 'not named')}); expected one of {type(self).__name__}."
            )

    def _report(self, problems: list[str], origin: str | Path) -> None:
        if problems:
            logger.warning("`%s` is not continued exactly: %s.", origin, "; ".join(problems))

    def _save_checkpoint(self, is_last: bool = False) -> None:
        if self.checkpoint_file is not None:
            save_state(self.checkpoint_file, self.training_state(is_last))
            self._saved_epoch = self.epoch
            self._write_record(ENDED if self._is_finished else RUNNING)

    def _write_record(self, state: str) -> None:
        """Says beside the checkpoint how far the training is, for those who look at many runs."""
        if self.checkpoint_file is None:
            return
        score = selected_score(self.model_selection)
        values = {
            "epoch": self.epoch,
            "n_env_steps": self.n_env_steps,
            "best_score": None if score is None else float(score),
            "violation": None if score is None else score.violation,
        }
        write_record(self.checkpoint_file.parent, state, values)

    def _name_last_checkpoint(self, error: MazeError) -> None:
        if self._saved_epoch is not None:
            error.remark(
                f"The training up to epoch {self._saved_epoch} is safe in `{self.checkpoint_file}`; "
                "input_dir=<its directory> resume=true goes on from there."
            )


def _policy_of(model: TorchModel) -> TorchPolicy:
    if isinstance(model, TorchActorCritic):
        return model.policy
    if isinstance(model, TorchPolicy):
        return model
    raise ConfigError(f"model: expected a policy or an actor-critic to train, found a {type(model).__name__}.")


def _announce_interrupt(signal_name: str) -> None:
    print(
        f"{signal_name}: ending after the current update; interrupt again to stop at once.", file=sys.stderr, flush=True
    )
