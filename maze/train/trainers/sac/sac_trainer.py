"""Soft actor-critic (Haarnoja et al. 2018), with a replay buffer that may start with demonstrations."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import nn

from maze.core.agent.torch_model import resolve_device
from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import CheckpointError, ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger, increment_log_step
from maze.core.utils.checkpoint import load_into, load_state, save_state
from maze.train.trainers.common.actor_critic.actor_critic_trainer import STATE_FORMAT
from maze.train.trainers.common.interrupt import InterruptGuard, TrainingInterrupted
from maze.train.trainers.common.progress import TrainingProgress
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from maze.train.trainers.sac.sac_events import SACEvents
from maze.train.trainers.sac.sac_learner import SACLearner
from maze.train.trainers.sac.sac_stats import SACStats

if TYPE_CHECKING:
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection

ALWAYS_SAVED_BYTES = 1 << 26
"""A larger replay buffer is saved only when training ends or is interrupted, not after each epoch."""


class SAC(Trainer):
    """Collects transitions into a replay buffer and learns from batches of it.

    :param algorithm_config: Hyperparameters.
    :param learner_model: Policy and state-action critic.
    :param distributed_actors: Collect transitions into a buffer; it has been filled to begin with.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param evaluator: Evaluates the policy between epochs; ``None``: the training episodes say how good it is.
    :param seed: Seed of the actions drawn for learning; ``None`` draws one from torch's global generator.
    :param checkpoint_file: Where the state of the training is written after each epoch; ``None``: nowhere.
    """

    config_class = SACAlgorithmConfig

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
        self.config = SACAlgorithmConfig.from_config(algorithm_config)
        super().__init__(self.config, learner_model)
        self.model: TorchActorCritic = learner_model
        self.actors = distributed_actors
        self.model_selection = model_selection
        self.evaluator = evaluator
        if model_selection is not None and getattr(evaluator, "model_selection", model_selection) is None:
            evaluator.model_selection = model_selection  # type: ignore[union-attr]  # has the attribute
        self.checkpoint_file = Path(checkpoint_file) if checkpoint_file is not None else None
        try:
            learner_model.to(resolve_device(self.config.device))
        except ConfigError as error:
            raise ConfigError(f"algorithm.{error}") from error
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        self.learner = SACLearner(learner_model, self.config, distributed_actors.actors, seed)
        self.epoch = 0
        """Number of completed epochs."""
        self.n_updates_of_epoch = 0
        """Number of completed updates of the current epoch."""
        self._first_epoch = 0
        """Number of epochs completed before the current call of :meth:`train`."""
        self._is_finished = False
        self._evaluated_epoch: int | None = None
        self._dequeuing = 0.0
        self._has_modes = _depends_on_mode(
            [*learner_model.policy.networks.values(), *learner_model.critic.networks.values()]
        )
        self._stats = SACStats()
        self._events_aggregator = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        self._events = self._events_aggregator.create_event_topic(SACEvents)

    # -- life cycle ------------------------------------------------------------------------------------

    @override(Trainer)
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        """Trains until the number of epochs is reached, or early stopping or a signal ends the training.

        After a training that has come to its end, another call trains on; after an interrupted one (in this process or
        one whose state was loaded), it does what was left.

        :param n_epochs: Number of epochs; 0: no limit. ``None`` takes the configuration's.
        """
        n_epochs = self.config.n_epochs if n_epochs is None else n_epochs
        self.learner.tie()
        self.model.train()
        if self._is_finished:
            self._first_epoch, self._is_finished = self.epoch, False
        steps = self.config.n_rollout_steps * self.config.rollouts_per_iteration
        progress = TrainingProgress(n_epochs, self.config.epoch_length, steps)
        with InterruptGuard(_announce_interrupt) as interrupt:
            try:
                while n_epochs == 0 or self.epoch - self._first_epoch < n_epochs:
                    self._evaluate_if_due(progress)
                    if self._has_stopped_improving():
                        print(f"-> early stopping: {self.config.patience} evaluations without improvement.", flush=True)
                        break
                    self._run_epoch(progress, interrupt)
                self._evaluate_if_due(progress)
            finally:
                progress.close()
        increment_log_step()
        self._is_finished = True
        self._save_checkpoint(is_last=True)

    def _run_epoch(self, progress: TrainingProgress, interrupt: InterruptGuard) -> None:
        self._stop_if_requested(interrupt)
        progress.start_epoch(self.epoch - self._first_epoch)
        while self.n_updates_of_epoch < self.config.epoch_length:
            self._update()
            self.n_updates_of_epoch += 1
            progress.update_done()
            if interrupt.requested:
                self._stop_if_requested(interrupt)
        self.epoch, self.n_updates_of_epoch = self.epoch + 1, 0
        progress.before_output()
        self._write_epoch_stats()
        increment_log_step()
        progress.epoch_done(self.epoch, self.epoch - self._first_epoch)
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
                self.evaluator.deterministic = deterministic  # type: ignore[attr-defined]  # has the attribute
            for _ in range(repeats):
                self.evaluator.evaluate(self.model.policy)
        finally:
            if configured is not None:
                self.evaluator.deterministic = configured  # type: ignore[attr-defined]  # has the attribute

    def _evaluate_if_due(self, progress: TrainingProgress) -> None:
        """Evaluates once between two epochs; not while the critics learn alone and the policy stays what it is."""
        is_new = self._evaluated_epoch != self.epoch and self.n_updates_of_epoch == 0
        if not is_new or 0 < self.epoch <= self.config.critic_burn_in_epochs:
            return
        self._evaluated_epoch = self.epoch
        progress.before_output()
        if self.evaluator is not None:
            self.evaluate()
        elif self.model_selection is not None and self.epoch > 0:
            self.model_selection.update(self._mean_training_reward())

    def _mean_training_reward(self) -> float:
        try:
            value = self.actors.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name="mean")
        except KeyError:  # no episode ended in this epoch
            return math.nan
        assert isinstance(value, int | float)
        return float(value)

    def _has_stopped_improving(self) -> bool:
        patience, selection = self.config.patience, self.model_selection
        return patience > 0 and selection is not None and selection.last_improvement >= patience

    def _stop_if_requested(self, interrupt: InterruptGuard) -> None:
        """After a signal, ends the training with everything saved."""
        if interrupt.signum is None:
            return
        self._save_checkpoint(is_last=True)
        increment_log_step()
        saved = f" Its state is saved in `{self.checkpoint_file}`." if self.checkpoint_file is not None else ""
        raise TrainingInterrupted(
            interrupt.signum,
            f"Training was interrupted in epoch {self.epoch + 1} after update {self.n_updates_of_epoch}.{saved}",
        )

    def _write_epoch_stats(self) -> None:
        buffer = self.actors.replay_buffer
        self._stats.add_plain("buffer_size", len(buffer))
        self._stats.add_plain("buffer_avg_pick_per_transition", buffer.avg_pick_per_transition)
        self._stats.publish(self._events)
        self._events_aggregator.reduce()
        self.actors.write_epoch_stats()

    # -- one update ------------------------------------------------------------------------------------

    def _update(self) -> None:
        """Collects transitions and learns from batches of the buffer."""
        learner, stats = self.learner, self._stats
        learner.seconds_of_losses = learner.seconds_of_gradients = 0.0
        sampling = 0.0
        try:
            start = time.perf_counter()
            self._collect()
            collected = time.perf_counter()
            for _ in range(self.config.num_batches_per_iter):
                drawing = time.perf_counter()
                batch = self.actors.sample_transitions(self.model.device)
                sampling += time.perf_counter() - drawing
                stats.add_terms(learner.update(batch, critic_alone=self._critic_learns_alone))
        except NonFiniteError as error:
            raise self._with_reproduction_file(error) from error
        stats.add_time("time_learner_rollout", collected - start - self._dequeuing)
        stats.add_time("time_dequeuing_actors", self._dequeuing)
        stats.add_time("time_sampling_from_buffer", sampling)
        stats.add_time("time_loss_computation", learner.seconds_of_losses)
        stats.add_time("time_backprob", learner.seconds_of_gradients)

    def _collect(self) -> None:
        policy = self.model.policy
        if self.actors.worker_policy is not policy:
            self.actors.broadcast_updated_policy(policy.state_dict())
        if self._has_modes:
            self.actors.worker_policy.eval()
        before, after, self._dequeuing = self.actors.collect_rollouts()
        if self._has_modes:
            self.model.train()
        self._stats.add_plain("estimated_queue_sizes", before, after)

    @property
    def _critic_learns_alone(self) -> bool:
        return self.epoch < self.config.critic_burn_in_epochs

    def _with_reproduction_file(self, error: NonFiniteError) -> NonFiniteError:
        directory = self.checkpoint_file.parent if self.checkpoint_file is not None else Path()
        file = directory / f"non_finite_{time.strftime('%Y-%m-%d_%H-%M-%S')}.pt"
        where = f" Weights, replay buffer and random states are in `{file}`."
        try:
            save_state(file, {"training_state": self.training_state()})
        except CheckpointError as failure:
            where = f" No file to reproduce it was written: {failure}"
        return NonFiniteError(f"Epoch {self.epoch + 1}, update {self.n_updates_of_epoch + 1}: {error}{where}")

    # -- state -----------------------------------------------------------------------------------------

    @override(Trainer)
    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], origin: str | Path = "The state dictionary") -> None:
        """Loads weights; those of a policy alone leave the critic as it is.

        :param state_dict: Weights as :meth:`state_dict` gives them.
        :param origin: Where they come from, for error messages.
        """
        is_policy_alone = set(state_dict) == set(self.model.policy.state_dict())
        load_into(self.model.policy if is_policy_alone else self.model, state_dict, origin)
        self._evaluated_epoch = None

    @override(Trainer)
    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        state = load_state(file_path)
        origin = Path(file_path) if isinstance(file_path, str | Path) else "The checkpoint"
        if STATE_FORMAT in state:
            self.load_training_state(state, origin)
        else:
            self.load_state_dict(state, origin)

    def training_state(self, with_buffer: bool = True) -> dict[str, Any]:
        """All that the training itself consists of: weights, optimizers, generators, replay buffer, best model.

        :param with_buffer: Whether the transitions are part of it.
        """
        return {
            STATE_FORMAT: 1,
            "model": self.model.state_dict(),
            "learner": self.learner.state_dict(),
            "epoch": self.epoch,
            "update": self.n_updates_of_epoch,
            "first_epoch": self._first_epoch,
            "is_finished": self._is_finished,
            "evaluated_epoch": self._evaluated_epoch,
            "policy_generators": self.actors.worker_policy.rng_state(),
            "replay_buffer": self.actors.replay_buffer.state_dict(with_buffer),
            "wrapper_statistics": self.actors.wrapper_statistics(),
            "model_selection": None if self.model_selection is None else self.model_selection.state_dict(),
        }

    def load_training_state(self, state: Mapping[str, Any], origin: str | Path = "The training state") -> None:
        """Continues from a state that :meth:`training_state` returned; environments start new episodes."""
        if "learner" not in state or "replay_buffer" not in state:
            raise CheckpointError(f"`{origin}` is the state of a training with another algorithm; expected one of SAC.")
        load_into(self.model, state["model"], origin)
        self.learner.load_state_dict(state["learner"])
        self.epoch, self.n_updates_of_epoch = state["epoch"], state["update"]
        self._first_epoch, self._is_finished = state["first_epoch"], state["is_finished"]
        self._evaluated_epoch = state["evaluated_epoch"]
        self.actors.worker_policy.set_rng_state(state["policy_generators"])
        self.actors.replay_buffer.load_state_dict(state["replay_buffer"])
        self.actors.load_wrapper_statistics(state["wrapper_statistics"])
        self.actors.discard_unfinished()
        if self.model_selection is not None and state["model_selection"] is not None:
            self.model_selection.load_state_dict(state["model_selection"])

    def _save_checkpoint(self, is_last: bool = False) -> None:
        if self.checkpoint_file is not None:
            with_buffer = is_last or self.actors.replay_buffer.columns.n_bytes <= ALWAYS_SAVED_BYTES
            save_state(self.checkpoint_file, self.training_state(with_buffer))


def _depends_on_mode(networks: Iterable[nn.Module]) -> bool:
    """Whether networks may compute something else in training than in evaluation; switching takes its time."""
    return any(
        isinstance(module, _DEPEND_ON_MODE) or not type(module).__module__.startswith(("torch.nn.", "maze.perception."))
        for network in networks
        for module in network.modules()
    )


_DEPEND_ON_MODE = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.RReLU,
)


def _announce_interrupt(signal_name: str) -> None:
    print(
        f"{signal_name}: ending after the current update; interrupt again to stop at once.", file=sys.stderr, flush=True
    )
