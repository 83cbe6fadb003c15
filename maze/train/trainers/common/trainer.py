"""Trainers: the interface, and the loop of epochs and updates that all algorithms share."""

from __future__ import annotations

import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

from maze.console.runs import TrainingProgress, print_header
from maze.console.streams import lasting_console
from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.torch_actor_critic import policy_of
from maze.core.agent.torch_model import TargetNetworks, TorchModel, resolve_device
from maze.core.agent.torch_policy import InitialPolicy
from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import CheckpointError, ConfigError, MazeError, NonFiniteError
from maze.core.log_stats import log_stats
from maze.core.log_stats.stats_format import significant
from maze.core.rollout.batched_acting import EpisodesInterrupted, interrupted_if
from maze.core.utils.checkpoint import load_into, load_state, save_state
from maze.core.utils.files import upload_changes
from maze.core.utils.update_profile import UpdateProfile
from maze.perception.fast_layers import fast_products
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.learning import UpdateStats
from maze.train.trainers.common.model_selection.best_model_selection import selected_score
from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase, SelectionCriterion
from maze.train.trainers.common.observation_statistics import ObservationStatistics
from maze.train.utils import run_process, train_utils

logger = logging.getLogger(__name__)

STATE_VERSION = 1
EPOCH_LIMIT = 1000
"""Maximum number of epochs of a run whose number of epochs is not fixed (`algorithm.n_epochs` is 0)."""

# Attributes of a trainer that are saved as they are.
_PROGRESS = (
    *("epoch", "update", "n_updates", "n_env_steps"),
    *("first_epoch", "is_finished", "evaluated_epoch", "training_reward", "training_violation"),
)


class Trainer(ABC):
    """Train a model.

    :param algorithm_config: Hyperparameters.
    :param model: The model to train.
    """

    AlgorithmConfigType = TypeVar("AlgorithmConfigType", bound="AlgorithmConfig")

    config_class: ClassVar[type[AlgorithmConfig] | None] = None
    """The class of the configuration, where a configuration does not name it itself."""

    def __init__(self, algorithm_config: Any, model: TorchModel | None = None) -> None:
        self.algorithm_config = algorithm_config
        self.model = model

    @classmethod
    def build(cls, run: Any) -> Trainer:
        """Build the trainer of a run from the parts that an algorithm needs.

        The runner has read the configuration, seeded everything and estimated normalization statistics. It provides the
        parts: `run.algorithm` (the configuration), `run.model()` (policy, and critic where there is one),
        `run.rollouts()` or another way to collect experience (`run.actors(...)`, `run.workers(...)`),
        `run.common_arguments(model)` (evaluator, selection of the best model, checkpoint file) and `run.agent_seed()`.
        The runner closes the parts that it created, and resumes the trainer from an earlier run where that is
        configured. This method builds the parts of the algorithm only (a replay buffer, a data set).

        :param run: The :class:`~maze.train.trainers.common.training_runner.TrainingRunner`.
        :raises ConfigError: The algorithm has no `build`.
        """
        raise ConfigError(f"algorithm: {cls.__name__} cannot be built. Implement its class method `build(run)`.")

    @abstractmethod
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        """Train the model.

        :param n_epochs: Number of epochs; `None` takes the number of the configuration.
        :param kwargs: Further arguments of an algorithm.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the model."""

    @abstractmethod
    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        """Load a file with weights, as written for the best model, or with the state of a run.

        :param file_path: The file, by path or opened for binary reading.
        """

    def resume(self, state: Mapping[str, Any], origin: str | Path) -> None:
        """Resume a run of another process; :meth:`train` then counts the epochs of both.

        :param state: Its saved state.
        :param origin: Its source, for messages.
        :raises ConfigError: The algorithm cannot resume that state.
        """
        raise ConfigError(
            f"resume: {type(self).__name__} cannot resume `{origin}`. Leave out `resume=true` to start from its "
            "weights."
        )


class EpochTrainer(Trainer, ABC):
    """Train epoch after epoch. An epoch has a number of updates; its end is logged, evaluated and saved.

    An algorithm is a subclass that names the class of its configuration (:attr:`config_class`) and of its events
    (:attr:`events_class`), and defines

    * what an update is (:meth:`_update`): collect or draw data, compute
      :class:`~maze.train.trainers.common.learning.Losses`, take a
      :func:`~maze.train.trainers.common.learning.gradient_step`, and report both to :attr:`stats`;
    * what it consists of besides its model (:meth:`_parts`): optimizers, generators, environments, a replay buffer;
    * where its episodes come from (:meth:`episode_source`), if it collects some.

    This class provides the rest: evaluation between epochs, the best model, early stopping, the progress display, a
    checkpoint after each epoch from which a run resumes exactly, an orderly end after a signal, and for a number that
    is not finite an error with its place and a file to reproduce it. Burn-in (:attr:`critic_learns_alone`) and the
    distance from the initial policy (:attr:`_initial_policy`) follow the configuration, if it has those fields.

    Algorithms that act while they learn begin with
    :class:`~maze.train.trainers.common.actor_critic.actor_critic_trainer.ActorCritic` (rollouts of the current policy)
    or :class:`~maze.train.trainers.common.replay_trainer.ReplayTrainer` (a replay buffer).

    :param algorithm_config: Hyperparameters: a `config_class`, or a mapping of its fields.
    :param model: The model that is trained and saved; it is moved to `config.device`.
    :param evaluator: Evaluates the policy; `None`: the model is judged by the training episodes.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param checkpoint_file: File of the state, written after each epoch; `None`: none.
    :raises ConfigError: The device is not available.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    """Hyperparameters. How many updates make an epoch, patience, device, burn-in and so on are fields of it."""
    events_class: ClassVar[type[Any]]
    """The events that the losses report to, each logged once per epoch."""
    evaluates_between_epochs: ClassVar[bool] = True
    """Whether there is an evaluation before each epoch and one after the last, apart from what an update does."""
    takes_env_steps: ClassVar[bool] = False
    """Whether it takes environment steps though their number in an update is not fixed (:meth:`steps_per_update`)."""
    learns_recurrent: ClassVar[bool] = False
    """Whether it learns models that carry hidden states from step to step."""
    learns_observation_statistics: ClassVar[bool] = False
    """Whether it has :attr:`observation_statistics` learn; otherwise models that normalize need them beforehand."""
    follows_curriculum: ClassVar[bool] = False
    """Whether its environments may change from epoch to epoch, see
    :class:`~maze.train.trainers.common.actor_critic.actor_critic_runners.Curriculum`."""

    config: Any
    """The hyperparameters; subclasses declare their own type."""
    model: Any
    """The model that is trained; subclasses declare its type."""
    training_violation: float = 0.0
    """Violation of the constraints by the episodes of the last epoch; see :attr:`training_reward`."""

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
        self.policy = policy_of(model)
        if model.is_recurrent and not self.learns_recurrent:
            raise ConfigError(
                f"model: {type(self).__name__} does not learn networks that carry hidden states from step to step. Use "
                "PPO or A2C, or `model.recurrence=true` with stacked observations."
            )
        model.to(resolve_device(self.config.device, "algorithm.device", type(self.config).device))
        self.observation_statistics = ObservationStatistics(model)
        """Statistics of observations that networks normalize; a part of their weights."""
        self.evaluator = evaluator
        self.model_selection = model_selection
        if evaluator is not None and model_selection is not None:
            evaluator.model_selection = evaluator.model_selection or model_selection
        self.checkpoint_file = None if checkpoint_file is None else Path(checkpoint_file)
        self.train_stats = log_stats.LogStatsAggregator(
            log_stats.LogStatsLevel.EPOCH, log_stats.get_stats_logger("train")
        )
        """Statistics of the epoch."""
        self.events = self.train_stats.create_event_topic(self.events_class)
        self.stats = UpdateStats(self.events_class)
        """Collects the numbers of the updates; their means are fired once per epoch."""
        self.epoch = self.update = 0
        """Number of completed epochs, and of completed updates of the current one."""
        self.n_updates = self.n_env_steps = 0
        """Number of all updates and of all environment steps, those that filled a replay buffer included."""
        self.first_epoch, self.is_finished = 0, False
        """Number of epochs completed before the current call of :meth:`train`; whether the last call completed."""
        self.share_done = 0.0
        """Share of all updates of this call that is done; without a limit, epochs."""
        self.critic_learns_alone = self.config.critic_burn_in_epochs > 0
        """Whether this is one of the epochs at the start in which only the critic learns."""
        self.evaluated_epoch: int | None = None
        """Number of completed epochs at the latest evaluation."""
        self.training_reward = math.nan
        """Mean reward of the episodes of the last epoch; judges the model where there is no evaluation."""
        self.history: list[run_process.EpochSummary] = []
        """The epochs that this object has completed."""
        self.run_seeds: dict[str, int] = {}
        """Seeds of the run, which are saved with its state."""
        self.profile: UpdateProfile | None = None
        """Profile of an update, if one is requested."""
        self._n_epochs = 0
        # Number of updates of an epoch in this call of `train`; 0: as configured.
        self._epoch_length = 0
        self._initial_policy: InitialPolicy | None = None
        # Restored states of evaluator and model selection, which some trainers get in :meth:`train` only.
        self._restored: dict[str, Any] = {}
        # Epoch of the checkpoint; `None`: this object has written none.
        self._saved_epoch: int | None = None
        self._display: TrainingProgress
        self._interrupt: run_process.InterruptGuard

    # -- what trainers differ in -----------------------------------------------------------------------

    @abstractmethod
    def _update(self) -> None:
        """Collect or draw data and learn from it."""

    def latest_data(self) -> dict[str, Any]:
        """Return the data of the latest update that the state does not contain; tensors and plain values."""
        return {}

    def n_updates_per_epoch(self) -> int:
        return self._epoch_length or int(self.config.epoch_length)

    def steps_per_update(self) -> int:
        """Return the number of environment steps per update; 0: it takes none, or their number is not fixed."""
        return 0

    def work_of_an_epoch(self) -> str:
        """Return the description of an epoch, printed before the first one."""
        steps = f"collecting {self.steps_per_epoch:,} environment steps, " if self.steps_per_epoch else ""
        return f"{steps}{self.n_updates_per_epoch():,} updates"

    def _begin_training(self, n_epochs: int) -> None:
        """Begin a call of :meth:`train`.

        :param n_epochs: Number of epochs; 0: not fixed.
        """

    def _end_training(self) -> None:
        """Finish a run that ends by itself; called after its last epoch."""

    def _write_epoch_stats(self) -> None:
        """Log the statistics of the epoch that has just been completed."""
        self.stats.publish(self.events)
        self.train_stats.reduce()
        episodes = self.episode_source()
        if episodes is not None:
            episodes.write_epoch_stats()

    def _parts(self) -> dict[str, train_utils.Part]:
        """Return the stateful parts besides the model, by name.

        All of them are saved with the run, and restored in this order. The policy's generators, statistics,
        evaluator, best model, progress and the global generators need no mention.
        """
        return {}

    def _load_parts(self, state: Mapping[str, Any]) -> list[str]:
        """Continue all parts.

        :return: Sentences about parts that could not be restored.
        """
        return train_utils.load_states(self._parts(), state["parts"])

    def _check_fits(self, state: Mapping[str, Any], origin: str | Path) -> None:
        """Raise an error where the parts, as configured, cannot go on with a state of this algorithm."""
        if missing := [part for part in self._parts() if part not in state["parts"]]:
            raise ConfigError(
                f"algorithm: the run in `{origin}` learned without {', '.join(missing)}, but it is configured. "
                "Configure the algorithm as in that run to resume it, or start a new run with the weights alone."
            )

    def episode_source(self) -> Any:
        """Return the source of the training episodes, a vector environment or workers; `None`: it collects none.

        Its `epoch_stats` are the statistics of the episodes that ended in the epoch; `write_epoch_stats` passes them to
        the writers and begins the next epoch.
        """
        return None

    def _aggregators(self) -> dict[str, log_stats.LogStatsAggregator]:
        """Return statistics of the current epoch, by names of their own."""
        episodes = self.episode_source()
        return {"updates": self.train_stats, **({} if episodes is None else {"episodes": episodes.epoch_stats})}

    # -- for all that learn policies -------------------------------------------------------------------

    @property
    def _kl_to_initial_coef(self) -> float:
        """Weight of the divergence from the initial policy: decays with each epoch in which the policy has learned."""
        config = self.config
        n_learning_epochs = max(0, self.epoch - config.critic_burn_in_epochs)
        return float(config.kl_to_initial_coef * config.kl_to_initial_decay**n_learning_epochs)

    @property
    def steps_per_epoch(self) -> int:
        """Number of environment steps of an epoch; 0: it takes none, or their number is not fixed."""
        return self.n_updates_per_epoch() * self.steps_per_update()

    def epochs_for(self, n_steps: int) -> int:
        """Return the number of epochs that take a number of environment steps, rounded up to whole updates.

        Epochs become shorter where whole ones of the configured length would take more steps.

        :param n_steps: Number of environment steps of the next call of :meth:`train`; the number of an update is fixed.
        """
        n_updates = math.ceil(n_steps / self.steps_per_update())
        n_epochs = math.ceil(n_updates / self.n_updates_per_epoch())
        self._epoch_length = math.ceil(n_updates / n_epochs)
        return n_epochs

    # -- the loop --------------------------------------------------------------------------------------

    @override(Trainer)
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        """Train until the number of epochs is reached, or early stopping or a signal ends the run.

        After a run that ended by itself, another call adds epochs, after early stopping with patience counted anew; an
        interrupted run (in this process or from a loaded state) is completed.

        :param n_epochs: Number of epochs; 0: :data:`EPOCH_LIMIT` at most. `None` takes the configuration's.
        :param kwargs: Ignored.
        :raises TrainingInterrupted: SIGINT or SIGTERM was received; the state was saved after the current update.
        :raises NonFiniteError: A loss or gradient is NaN or infinite. The state before is saved beside
            `checkpoint_file`.
        """
        self._n_epochs = int(self.config.n_epochs) if n_epochs is None else n_epochs
        self._begin_training(self._n_epochs)
        for part in self._parts().values():
            if isinstance(part, FlatAdam):
                part.tie()  # something else may have moved the parameters since
        if not self.learns_observation_statistics:
            self.observation_statistics.require_learned(type(self).__name__)
        if self.config.kl_to_initial_coef and self._initial_policy is None:
            self._initial_policy = InitialPolicy(self.policy)
        self._report(self._hand_out_restored(), "The training state")
        if self.is_finished:
            self.first_epoch, self.is_finished = self.epoch, False
            if self.model_selection is not None and 0 < self.config.patience <= self.model_selection.last_improvement:
                self.model_selection.last_improvement = 0  # else a further call would end at once
        n_done = self.epoch - self.first_epoch
        if not self._n_epochs:
            print(f"-> algorithm.n_epochs is 0: early stopping ends the run, or epoch {EPOCH_LIMIT:,}.", flush=True)
        elif n_done >= self._n_epochs:
            print(f"-> nothing left to train: {n_done} of algorithm.n_epochs={self._n_epochs} are done.", flush=True)
        products = fast_products(self.model.parameters(), getattr(self.config, "batch_size", 0))
        with self._running(), run_process.freed_memory_kept(), products:
            while self._begins_epoch():
                while self.update < self.n_updates_per_epoch():
                    self._run_update()
                self._finish_epoch()
            self._end_training()
        self.is_finished, self._epoch_length = True, 0
        self.save(is_last=True)  # with the log step in which the next epoch would be logged
        if self.evaluates_between_epochs or self.evaluated_epoch == self.epoch:
            log_stats.increment_log_step()
        self._display.training_done(self._best())

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Return a context of a whole run: progress display, signals, and the record of a run that fails."""
        display = self._display = TrainingProgress(self._n_epochs, self.n_updates_per_epoch(), self.steps_per_update())
        self._write_record(run_process.RUNNING)
        if self.model_selection is not None:
            self.model_selection.training_started()

        def announce(signal_name: str) -> None:
            display.before_output()
            text = "ending after the current update or evaluation step; interrupt again to stop at once."
            print(f"{signal_name}: {text}", file=sys.stderr, flush=True)

        with lasting_console(), run_process.InterruptGuard(announce) as self._interrupt:
            try:
                yield
                if self.model_selection is not None:
                    self.model_selection.training_ended()
            except BaseException as error:
                self._write_record(run_process.INTERRUPTED)
                if isinstance(error, MazeError) and self._saved_epoch is not None:
                    error.remark(
                        f"The run up to epoch {self._saved_epoch} is saved in `{self.checkpoint_file}`; "
                        "input_dir=<its directory> resume=true resumes it."
                    )
                raise
            finally:
                display.before_output()

    def _begins_epoch(self) -> bool:
        """Return whether another epoch begins, or the rest of one; before, the policy is evaluated if that is due."""
        n_done = self.epoch - self.first_epoch
        self.evaluate_if_due()
        if n_done >= (self._n_epochs or EPOCH_LIMIT):
            return False
        n_vain = 0 if self.model_selection is None else self.model_selection.last_improvement
        if 0 < int(self.config.patience) <= n_vain:
            print(f"-> early stopping: {self.config.patience} evaluations without improvement.", flush=True)
            return False
        self._display.evaluated(self._best())
        self._stop_if_requested()
        self._display.start_epoch(n_done, self.update)
        if n_done == 0:
            self._display.announce(f"epoch {self.epoch + 1}: {self.work_of_an_epoch()}")
        return True

    def _run_update(self) -> None:
        """Run an update, count it, and end the run after a signal; save the data that led to a NaN."""
        n_per_epoch, profile = self.n_updates_per_epoch(), self.profile
        number = self.epoch * n_per_epoch + self.update + 1
        self.share_done = (self.epoch - self.first_epoch + self.update / n_per_epoch) / max(self._n_epochs, 1)
        self.critic_learns_alone = self.epoch < self.config.critic_burn_in_epochs
        try:
            with nullcontext() if profile is None or profile.is_done else profile.one_update(number):
                self._update()
        except NonFiniteError as error:
            where = f"Epoch {self.epoch + 1}, update {self.update + 1}: {error}"
            if self.checkpoint_file is not None:
                file = self.checkpoint_file.parent / f"non_finite_{time.strftime('%Y-%m-%d_%H-%M-%S')}.pt"
                where += f" The state before that (weights, random states, data) is in `{file}`."
                save_state(file, {"training_state": self.training_state(), **self.latest_data()})
            raise NonFiniteError(where) from error
        self.update += 1
        self.n_updates += 1
        self.n_env_steps += self._display.steps_per_update
        self._display.update_done()
        self._stop_if_requested()

    def _finish_epoch(self) -> None:
        """Count, log and save the epoch that has just been completed."""
        self.epoch, self.update = self.epoch + 1, 0
        self.before_statistics()
        self._write_epoch_stats()
        episodes = self.episode_source()
        stats = self.train_stats if episodes is None else episodes.epoch_stats
        reward = log_stats.LogStatsKey(BaseEnvEvents.reward, "mean", None)
        self.training_reward = float(stats.last_stats.get(reward, math.nan))
        if self._training_criterion.constraints and not math.isnan(self.training_reward):
            self.training_violation = self._training_criterion.judge(stats.last_stats).violation
        self.history.append(run_process.EpochSummary(self.epoch, self.n_env_steps, self.training_reward))
        log_stats.increment_log_step()
        seconds = self._display.epoch_done(self.epoch, self.epoch - self.first_epoch, self.n_env_steps)
        self.stats.add_value("time_epoch", seconds)
        if self.model_selection is not None:
            self.model_selection.epoch_completed(self.epoch)
        is_evaluated_next = self.evaluator is not None or not self.evaluates_between_epochs
        if is_evaluated_next or self.epoch - self.first_epoch < (self._n_epochs or EPOCH_LIMIT):
            self.save()  # otherwise the end of the run comes at once, and saves

    def _stop_if_requested(self) -> None:
        """Save everything and end the run after a signal."""
        signum = self._interrupt.signum
        if signum is None:
            return
        self.save(is_last=True)
        log_stats.increment_log_step()
        saved = f" Its state is saved in `{self.checkpoint_file}`." if self.checkpoint_file is not None else ""
        where = f"in epoch {self.epoch + 1} after update {self.update}"
        if self.update in (0, self.n_updates_per_epoch()):
            where = f"after epoch {self.epoch + bool(self.update)}"
        raise run_process.TrainingInterrupted(signum, f"Training was interrupted {where}.{saved}")

    # -- evaluation and statistics ---------------------------------------------------------------------

    def evaluate(self, deterministic: bool | None = None, repeats: int = 1) -> None:
        """Evaluate the current policy.

        :param deterministic: Take greedy actions; `None` leaves it to the evaluator.
        :param repeats: Number of repetitions.
        :raises ConfigError: There is no evaluator.
        """
        if self.evaluator is None:
            raise ConfigError("The trainer has no evaluator; pass one as `evaluator`.")
        configured = self.evaluator.deterministic
        if deterministic is not None and configured is not None:
            self.evaluator.deterministic = deterministic
        try:
            for _ in range(repeats):
                self.evaluator.evaluate(self.policy)
        except MazeError as error:
            error.remark("This happened in an evaluation.")
            raise
        finally:
            self.evaluator.deterministic = configured

    def evaluate_if_due(self) -> None:
        """Evaluate once between two epochs; not while critics learn alone and the policy does not change."""
        if not self.evaluates_between_epochs or self.evaluated_epoch == self.epoch or self.update > 0:
            return
        if 0 < self.epoch <= self.config.critic_burn_in_epochs:
            return
        evaluated_before, self.evaluated_epoch = self.evaluated_epoch, self.epoch
        self.before_statistics()
        if self.evaluator is not None:
            if self.epoch == self.first_epoch:
                self._display.first_evaluation(self.epoch)
            try:
                with interrupted_if(lambda: self._interrupt.requested):
                    self.evaluate()
            except EpisodesInterrupted:  # they are played again when the run is resumed
                self.evaluated_epoch = evaluated_before
                self._stop_if_requested()
        elif self.model_selection is not None and self.epoch > 0 and not math.isnan(self.training_reward):
            self.model_selection.keeps_latest = self.config.risk is not None
            if self._training_criterion.constraints:
                self.model_selection.update_constrained(self.training_reward, self.training_violation)
            else:
                self.model_selection.update(self.training_reward)

    def before_statistics(self, header: str = "") -> None:
        """Report after how many environment steps the following statistics were taken, and make room for their lines.

        :param header: Printed above them; empty: nothing.
        """
        counts_steps = self.takes_env_steps or self.steps_per_epoch or self.n_env_steps
        log_stats.StatsContext.active().n_env_steps = self.n_env_steps if counts_steps else None
        self._display.before_output()
        if header:
            print_header(header)

    @cached_property
    def _training_criterion(self) -> SelectionCriterion:
        """Constraints by which training episodes judge the model, where there is no evaluation."""
        is_judged = self.evaluator is None and self.evaluates_between_epochs
        return SelectionCriterion(constraints=getattr(self.config, "constraints", ()) if is_judged else ())

    def _best(self) -> str:
        """Return the best score so far, in words; empty: there is none."""
        score = selected_score(self.model_selection)
        if score is None:
            return ""
        value = significant(float(score))
        return f"{value} (constraints are violated by {score.violation:.5g})" if score.violation else value

    # -- files -----------------------------------------------------------------------------------------

    def save(self, is_last: bool = False) -> None:
        """Write the checkpoint and the run's record, if there is a place for them.

        :param is_last: Whether the run ends here.
        """
        if self.checkpoint_file is not None:
            save_state(self.checkpoint_file, self.training_state(is_last))
            self._saved_epoch = self.epoch
            self._write_record(run_process.ENDED if self.is_finished else run_process.RUNNING)
            upload_changes()

    def _write_record(self, state: str) -> None:
        """Write the progress of the run beside the checkpoint, for tools that list runs."""
        if self.checkpoint_file is None:
            return
        score = selected_score(self.model_selection)
        values = {
            "epoch": self.epoch,
            "n_env_steps": self.n_env_steps,
            "best_score": None if score is None else float(score),
            "violation": None if score is None else score.violation,
            "minimized": score is not None and not score.maximize,
        }
        run_process.write_record(self.checkpoint_file.parent, state, values)

    # -- weights ---------------------------------------------------------------------------------------

    @override(Trainer)
    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the model."""
        state: dict[str, Any] = self.model.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], origin: str | Path = "The state dictionary") -> None:
        """Load weights; those of a policy alone do not change a critic, and a policy ignores those of a critic.

        :param state_dict: Weights as :meth:`state_dict` gives them.
        :param origin: Their source, for messages.
        """
        is_policy_alone = set(state_dict) == set(self.policy.state_dict())
        load_into(self.policy if is_policy_alone else self.model, state_dict, origin)
        for part in self._parts().values():
            if isinstance(part, TargetNetworks):  # else the first targets would be those of the initial weights
                part.update(1.0)
        self.evaluated_epoch = None
        self._initial_policy = None

    # -- state -----------------------------------------------------------------------------------------

    def training_state(self, is_last: bool = True) -> dict[str, Any]:
        """Return the complete state, from which another process can resume; tensors and plain
        values.

        :param is_last: Whether the run ends here; otherwise large parts may be left out.
        """
        initial = self._initial_policy
        return {
            train_utils.STATE_FORMAT: STATE_VERSION,
            "algorithm": type(self).__name__,
            "model": self.model.state_dict(),
            "initial_policy": None if initial is None else initial.policy.state_dict(),
            "policy_generators": self.policy.rng_state(),
            **{name: getattr(self, name) for name in _PROGRESS},
            "log_step": log_stats.GlobalLogState.global_step,
            "seeds": dict(self.run_seeds),
            "model_selection": None if self.model_selection is None else self.model_selection.state_dict(),
            "evaluator": None if self.evaluator is None else train_utils.to_plain(self.evaluator.state_dict()),
            "update_statistics": self.stats.state_dict(),
            "statistics": {name: train_utils.statistics_to_plain(each) for name, each in self._aggregators().items()},
            "global_generators": train_utils.global_generators_state(),
            "parts": train_utils.states_of(self._parts()),
        }

    def load_training_state(self, state: Mapping[str, Any], origin: str | Path = "The training state") -> None:
        """Restore a state of :meth:`training_state`, and report parts that cannot be restored.

        :param state: The state.
        :param origin: Its source, for messages.
        :raises CheckpointError: It is the state of another algorithm or another release, or its weights do not fit.
        """
        if state[train_utils.STATE_FORMAT] != STATE_VERSION:
            raise CheckpointError(
                f"`{origin}` has version {state[train_utils.STATE_FORMAT]} of the format of states; this release reads "
                f"version {STATE_VERSION}. Use the release that wrote it (`versions.json` beside it names it)."
            )
        if state["algorithm"] != type(self).__name__:
            raise CheckpointError(
                f"`{origin}` is the state of a run with {state['algorithm']}, but {type(self).__name__} is configured."
            )
        self._check_fits(state, origin)
        load_into(self.model, state["model"], origin)
        self._initial_policy = None
        if state["initial_policy"] is not None:
            self._initial_policy = InitialPolicy(self.policy)
            load_into(self._initial_policy.policy, state["initial_policy"], origin)
        self.policy.set_rng_state(state["policy_generators"])
        for name in _PROGRESS:
            setattr(self, name, state[name])
        self.run_seeds = dict(state["seeds"])
        self.stats.load_state_dict(state["update_statistics"])
        problems = self._load_parts(state)
        evaluator = train_utils.from_plain(state["evaluator"])
        self._restored = {"model_selection": state["model_selection"], "evaluator": evaluator}
        problems += self._hand_out_restored()
        for name, aggregator in self._aggregators().items():
            train_utils.statistics_from_plain(aggregator, state["statistics"].get(name, ()))
        log_stats.GlobalLogState.global_step = state["log_step"]
        train_utils.set_global_generators_state(state["global_generators"])
        self._report(problems, origin)

    def _hand_out_restored(self) -> list[str]:
        """Pass restored states to evaluator and model selection, once they are there.

        :return: Sentences about parts that could not be restored.
        """
        problems: list[str] = []
        for name, part in (("model_selection", self.model_selection), ("evaluator", self.evaluator)):
            if part is not None and (of_part := self._restored.pop(name, None)) is not None:
                problems += part.load_state_dict(of_part) or []
        return problems

    def _report(self, problems: list[str], origin: str | Path) -> None:
        if problems:
            logger.warning("`%s` is not resumed exactly: %s.", origin, "; ".join(problems))

    @override(Trainer)
    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        """Load a file with weights, or continue from one with the state of a run.

        A policy alone takes the weights of a run with another algorithm.

        :param file_path: The file, by path or opened for binary reading.
        """
        state = load_state(file_path)
        origin = Path(file_path) if isinstance(file_path, str | Path) else "The checkpoint"
        if train_utils.STATE_FORMAT not in state:
            self.load_state_dict(state, origin)
        elif self.policy is self.model and state["algorithm"] != type(self).__name__:
            self.load_state_dict(state["model"], origin)
        else:
            self.load_training_state(state, origin)

    @override(Trainer)
    def resume(self, state: Mapping[str, Any], origin: str | Path) -> None:
        """Resume a run of another process; epochs of both are counted.

        :param state: Its state.
        :param origin: Its source, for messages.
        :raises ConfigError: The run had another algorithm or model.
        """
        try:
            self.load_training_state(state, origin)
        except CheckpointError as error:
            raise ConfigError(
                f"algorithm, model: the run in `{origin}` cannot be resumed with the configured algorithm and model. "
                f"{error} To start a new run with its weights alone, leave out `resume=true`."
            ) from error
        self.first_epoch, self.is_finished = 0, False
