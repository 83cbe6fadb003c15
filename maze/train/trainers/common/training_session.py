"""Evaluations, early stopping, checkpoints, signals and progress messages around the learning."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from maze.console.runs import TrainingProgress, print_header
from maze.console.streams import lasting_console
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import CheckpointError, ConfigError, MazeError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, StatsContext, increment_log_step
from maze.core.log_stats.stats_format import significant
from maze.core.rollout.batched_acting import EpisodesInterrupted, interrupted_if
from maze.core.utils.checkpoint import save_state
from maze.core.utils.storage import upload_changes
from maze.core.utils.update_profile import UpdateProfile
from maze.train.trainers.common.model_selection.best_model_selection import selected_score
from maze.train.utils.interrupt import InterruptGuard, TrainingInterrupted
from maze.train.utils.training_record import ENDED, INTERRUPTED, RUNNING, EpochSummary, write_record

if TYPE_CHECKING:
    from maze.train.trainers.common.trainer import EpochTrainer

logger = logging.getLogger(__name__)

EPOCH_LIMIT = 1000
"""Most epochs of a run whose number of epochs is not fixed (`algorithm.n_epochs` is 0)."""

EPOCHS_WITHOUT_EPISODE = 10
"""After so many epochs in a row in which no episode has ended, there is a word about it."""


class EpisodeSource(Protocol):
    """Source of training episodes: a vector environment, or workers that fill a replay buffer."""

    @property
    def epoch_stats(self) -> LogStatsAggregator:
        """Statistics of the episodes that ended in this epoch."""

    def write_epoch_stats(self) -> None:
        """Pass them to the writers, and begin the next epoch."""


class TrainingSession:
    """Evaluates between the epochs of a trainer, saves it, and decides when its run ends.

    Nothing in it decides what is learned.

    :param trainer: The trainer.
    :param checkpoint_file: File of the state, written after each epoch; `None`: none.
    """

    def __init__(self, trainer: EpochTrainer, checkpoint_file: str | Path | None) -> None:
        self._trainer = trainer
        self.checkpoint_file = Path(checkpoint_file) if checkpoint_file is not None else None
        self.run_seeds: dict[str, int] = {}
        """Seeds of the run, which are saved with its state."""
        self.history: list[EpochSummary] = []
        """The epochs that this object has completed."""
        self.first_epoch = 0
        """Number of epochs completed before the current call of `train`."""
        self.is_finished = False
        """Whether the last call of `train` completed."""
        self.evaluated_epoch: int | None = None
        """Number of completed epochs at the latest evaluation."""
        self.training_reward = math.nan
        """Mean reward of the episodes of the last epoch; judges the model where there is no evaluation."""
        self.restored: dict[str, Any] = {}
        """States of what is given to the next call of `train` only."""
        self.profile: UpdateProfile | None = None
        """Profile of an update, if one is requested."""
        self._n_epochs = 0
        self._saved_epoch: int | None = None
        """Which epoch the checkpoint is of; `None`: this object has written none."""
        self._progress: TrainingProgress
        self._interrupt: InterruptGuard

    # -- in the order of a run -------------------------------------------------------------------------

    @contextmanager
    def opened(self, n_epochs: int) -> Iterator[TrainingSession]:
        """Context of a whole run.

        :param n_epochs: Number of epochs; 0: not fixed.
        """
        trainer, self._n_epochs = self._trainer, n_epochs
        self.report(self.hand_out_restored(), "The training state")
        if self.is_finished:
            self.first_epoch, self.is_finished = trainer.epoch, False
        self._announce()
        self._progress = TrainingProgress(n_epochs, trainer.n_updates_per_epoch(), trainer.steps_per_update())
        self._write_record(RUNNING)
        if trainer.model_selection is not None:
            trainer.model_selection.training_started()
        with lasting_console(), InterruptGuard(self._announce_interrupt) as self._interrupt:
            try:
                yield self
                if trainer.model_selection is not None:
                    trainer.model_selection.training_ended()
            except BaseException as error:
                self._write_record(INTERRUPTED)
                if isinstance(error, MazeError):
                    self._name_last_checkpoint(error)
                raise
            finally:
                self._progress.close()
        self.is_finished = True
        self.save(is_last=True)  # with the log step in which the next epoch would be logged
        if trainer.evaluates_between_epochs or self.evaluated_epoch == trainer.epoch:
            increment_log_step()
        self._progress.training_done(self._best())

    def goes_on(self) -> bool:
        """Return whether another epoch begins, or the rest of one; before, the policy is evaluated if that is due."""
        trainer, n_done = self._trainer, self._trainer.epoch - self.first_epoch
        self.evaluate_if_due()
        if (self._n_epochs or EPOCH_LIMIT) <= n_done:
            return False
        if self._has_stopped_improving():
            print(f"-> early stopping: {trainer.config.patience} evaluations without improvement.", flush=True)
            return False
        self._progress.evaluated(self._best())
        self._stop_if_requested()
        self._progress.start_epoch(n_done, trainer.update)
        if n_done == 0:
            self._progress.announce(f"epoch {trainer.epoch + 1}: {trainer.work_of_an_epoch()}")
        return True

    @contextmanager
    def one_update(self) -> Iterator[None]:
        """Context of an update: counts it, ends the run after a signal, and saves the data that led to NaN."""
        trainer = self._trainer
        try:
            with self._profiled():
                yield
        except NonFiniteError as error:
            raise self._with_reproduction_file(error) from error
        trainer.update += 1
        trainer.n_updates += 1
        trainer.n_env_steps += self._progress.steps_per_update
        self._progress.update_done()
        self._stop_if_requested()

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """Context of an update that is profiled, if a profile is requested and not yet written."""
        if self.profile is None or self.profile.is_done:
            yield
            return
        with self.profile.one_update(
            self._trainer.epoch * self._trainer.n_updates_per_epoch() + self._trainer.update + 1
        ):
            yield

    @property
    def share_done(self) -> float:
        """Which share of all updates is done; without a limit, epochs."""
        trainer = self._trainer
        n_epochs = trainer.epoch - self.first_epoch + trainer.update / trainer.n_updates_per_epoch()
        return n_epochs / max(self._n_epochs, 1)

    def took_steps(self, n_steps: int) -> None:
        """Take notice of how many environment steps the update has taken, where their number is not fixed."""
        self._progress.steps_per_update = n_steps

    def before_statistics(self, header: str = "") -> None:
        """Report after how many environment steps the following statistics were taken, and make room for their lines.

        :param header: Printed above them; empty: nothing.
        """
        trainer = self._trainer
        counts_steps = trainer.takes_env_steps or trainer.steps_per_epoch or trainer.n_env_steps
        StatsContext.active().n_env_steps = trainer.n_env_steps if counts_steps else None
        self._progress.before_output()
        if header:
            print_header(header)

    def epoch_done(self) -> None:
        """Follow an epoch that was counted and logged: report its score and save it."""
        trainer = self._trainer
        self.training_reward = self._mean_training_reward()
        self.history.append(EpochSummary(trainer.epoch, trainer.n_env_steps, self.training_reward))
        self._tell_where_no_episode_ends()
        increment_log_step()
        seconds = self._progress.epoch_done(trainer.epoch, trainer.epoch - self.first_epoch, trainer.n_env_steps)
        trainer.stats.add_value("time_epoch", seconds)
        if trainer.model_selection is not None:
            trainer.model_selection.epoch_completed(trainer.epoch)
        self.save()

    # -- evaluation and its consequences ---------------------------------------------------------------

    def evaluate_if_due(self) -> None:
        """Evaluate once between two epochs; not while critics learn alone and the policy does not change."""
        trainer, selection = self._trainer, self._trainer.model_selection
        if not trainer.evaluates_between_epochs or self.evaluated_epoch == trainer.epoch or trainer.update > 0:
            return
        if 0 < trainer.epoch <= trainer.config.critic_burn_in_epochs:
            return
        evaluated_before, self.evaluated_epoch = self.evaluated_epoch, trainer.epoch
        self.before_statistics()
        if trainer.evaluator is not None:
            if trainer.epoch == self.first_epoch:
                self._progress.first_evaluation(trainer.epoch)
            try:
                with interrupted_if(lambda: self._interrupt.requested):
                    trainer.evaluate()
            except EpisodesInterrupted:  # they are played again when the run is resumed
                self.evaluated_epoch = evaluated_before
                self._stop_if_requested()
        elif selection is not None and trainer.epoch > 0 and not math.isnan(self.training_reward):
            selection.update(self.training_reward)

    def evaluate(self, deterministic: bool | None = None, repeats: int = 1) -> None:
        """See :meth:`~maze.train.trainers.common.trainer.EpochTrainer.evaluate`."""
        evaluator = self._trainer.evaluator
        if evaluator is None:
            raise ConfigError("The trainer has no evaluator; pass one as `evaluator`.")
        try:
            with evaluator.choosing(deterministic):
                for _ in range(repeats):
                    evaluator.evaluate(self._trainer.policy)
        except MazeError as error:
            error.remark("This happened in an evaluation.")
            raise

    def _has_stopped_improving(self) -> bool:
        selection = self._trainer.model_selection
        return 0 < int(self._trainer.config.patience) <= (0 if selection is None else selection.last_improvement)

    def _mean_training_reward(self) -> float:
        """Mean reward of the episodes that ended in this epoch; NaN if there are none."""
        episodes = self._trainer.episode_source()
        statistics = self._trainer.train_stats if episodes is None else episodes.epoch_stats
        for key, value in statistics.last_stats.items():
            if key.event is BaseEnvEvents.reward and key.output_name == "mean" and key.group is None:
                return float(value)
        return math.nan

    # -- messages --------------------------------------------------------------------------------------

    def _announce(self) -> None:
        n_done = self._trainer.epoch - self.first_epoch
        if 0 < self._n_epochs <= n_done:
            print(
                f"-> nothing left to train: {n_done} epochs are done, algorithm.n_epochs is {self._n_epochs}; raise it "
                "to go on.",
                flush=True,
            )
        elif self._n_epochs == 0:
            print(f"-> algorithm.n_epochs is 0: the run ends {self._end_without_number()}.", flush=True)

    def _end_without_number(self) -> str:
        """What ends a run whose number of epochs is not fixed."""
        trainer, patience = self._trainer, int(self._trainer.config.patience)
        limit = f"after {EPOCH_LIMIT:,} epochs (set algorithm.n_epochs for another number)"
        if patience <= 0 or trainer.model_selection is None:
            return limit
        return (
            f"after {patience} evaluations in a row without improvement, at the earliest after epoch "
            f"{trainer.epoch + patience - trainer.model_selection.last_improvement}, and at the latest {limit}"
        )

    def _best(self) -> str:
        """Return the best score so far, in words; empty: there is none."""
        score = selected_score(self._trainer.model_selection)
        if score is None:
            return ""
        value = significant(float(score))
        return f"{value} (constraints are broken by {score.violation:.5g})" if score.violation else value

    def _announce_interrupt(self, signal_name: str) -> None:
        self._progress.before_output()
        text = "ending after the current update or evaluation step; interrupt again to stop at once."
        print(f"{signal_name}: {text}", file=sys.stderr, flush=True)

    def _tell_where_no_episode_ends(self) -> None:
        latest = self.history[-EPOCHS_WITHOUT_EPISODE:]
        before = self.history[-EPOCHS_WITHOUT_EPISODE - 1 : -EPOCHS_WITHOUT_EPISODE]
        if self._trainer.episode_source() is None or len(latest) < EPOCHS_WITHOUT_EPISODE:
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

    def report(self, problems: list[str], origin: str | Path) -> None:
        """Report what of a state could not be continued.

        :param problems: Sentences; none: nothing is printed.
        :param origin: Where the state comes from.
        """
        if problems:
            logger.warning("`%s` is not continued exactly: %s.", origin, "; ".join(problems))

    # -- files and signals -----------------------------------------------------------------------------

    def save(self, is_last: bool = False) -> None:
        """Write the checkpoint and the run's record, if there is a place for them.

        :param is_last: Whether the run ends here.
        """
        if self.checkpoint_file is not None:
            save_state(self.checkpoint_file, self._trainer.training_state(is_last))
            self._saved_epoch = self._trainer.epoch
            self._write_record(ENDED if self.is_finished else RUNNING)
            upload_changes()

    def hand_out_restored(self) -> list[str]:
        """Pass restored states to evaluator and model selection, once they are there.

        :return: Sentences about parts that could not be restored.
        """
        trainer, problems = self._trainer, list[str]()
        for name, part in (("model_selection", trainer.model_selection), ("evaluator", trainer.evaluator)):
            if part is not None and name in self.restored:
                problems += part.load_state_dict(self.restored.pop(name)) or []
        return problems

    def _stop_if_requested(self) -> None:
        """After a signal, save everything and end the run."""
        trainer, signum = self._trainer, self._interrupt.signum
        if signum is None:
            return
        self.save(is_last=True)
        increment_log_step()
        saved = f" Its state is saved in `{self.checkpoint_file}`." if self.checkpoint_file is not None else ""
        where = f"in epoch {trainer.epoch + 1} after {trainer.update_name} {trainer.update}"
        if trainer.update in (0, trainer.n_updates_per_epoch()):
            where = f"after epoch {trainer.epoch + bool(trainer.update)}"
        raise TrainingInterrupted(signum, f"Training was interrupted {where}.{saved}")

    def _with_reproduction_file(self, error: NonFiniteError) -> NonFiniteError:
        """Return the error with its place in the run, and write a file beside the checkpoints that reproduces it."""
        trainer, where = self._trainer, ""
        if self.checkpoint_file is not None:
            file = self.checkpoint_file.parent / f"non_finite_{time.strftime('%Y-%m-%d_%H-%M-%S')}.pt"
            where = f" The state before that (weights, random states, data) is in `{file}`."
            try:
                save_state(file, {"training_state": trainer.training_state(), **trainer.latest_data()})
            except CheckpointError as failure:
                where = f" No file to reproduce it was written: {failure}"
        return NonFiniteError(f"Epoch {trainer.epoch + 1}, {trainer.update_name} {trainer.update + 1}: {error}{where}")

    def _write_record(self, state: str) -> None:
        """Write the progress of the run beside the checkpoint, for tools that list runs."""
        if self.checkpoint_file is None:
            return
        score = selected_score(self._trainer.model_selection)
        values = {
            "epoch": self._trainer.epoch,
            "n_env_steps": self._trainer.n_env_steps,
            "best_score": None if score is None else float(score),
            "violation": None if score is None else score.violation,
            "minimized": score is not None and not score.maximize,
        }
        write_record(self.checkpoint_file.parent, state, values)

    def _name_last_checkpoint(self, error: MazeError) -> None:
        if self._saved_epoch is not None:
            error.remark(
                f"The run up to epoch {self._saved_epoch} is saved in `{self.checkpoint_file}`; "
                "input_dir=<its directory> resume=true resumes it."
            )
