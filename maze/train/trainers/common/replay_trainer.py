"""What algorithms have in common that learn from a replay buffer."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from maze.core.agent.networks import depends_on_mode
from maze.core.agent.torch_actor_critic import policy_of
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.train.trainers.common.replay_buffer.filling import fill_replay_buffer
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
from maze.train.trainers.common.trainer import EpochTrainer, Trainer
from maze.train.trainers.common.training_session import EpisodeSource
from maze.train.utils.plain_state import Part

if TYPE_CHECKING:
    from maze.core.agent.torch_model import TorchModel
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
    from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer
    from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch
    from maze.train.trainers.common.training_runner import TrainingRunner

ALWAYS_SAVED_BYTES = 1 << 26
"""A larger replay buffer is saved only when training ends or is interrupted, not after each epoch."""


class ReplayConfig(Protocol):
    """What is asked of the configuration besides what every one has."""

    n_rollout_steps: int
    """Number of environment steps of a rollout."""
    rollouts_per_iteration: int
    """Number of rollouts collected before each update, all environments together."""
    num_batches_per_iter: int
    """Number of batches to learn from in each update."""
    num_actors: int
    """Number of environments that rollouts are collected in, by turns."""
    batch_size: int
    """Number of items in a batch."""
    split_rollouts_into_transitions: bool
    """Whether the items of the replay buffer are single transitions instead of rollouts."""
    replay_buffer_size: int
    """Most items that are kept; the oldest ones make room."""
    initial_buffer_size: int
    """Number of items collected by the initial sampling policy before the training."""
    initial_sampling_policy: Any
    """The policy that collects them, or its configuration."""
    collect_ahead: bool | None
    """Whether rollouts are collected while the networks learn from those before; `None`: if that is done in worker
    processes."""


class ReplayTrainer(EpochTrainer, ABC):
    """Collects transitions into a replay buffer and learns from batches of it.

    An update collects `rollouts_per_iteration * n_rollout_steps` environment steps and learns from
    `num_batches_per_iter` batches. An algorithm says what it learns from a batch (:meth:`_learn_from`), and lists
    its optimizers and generators as its :meth:`_parts`, besides those of this class. The buffer, which the workers
    fill, is part of the training's state; what it holds to begin with is up to who makes the trainer.

    Where it collects ahead (:attr:`collects_ahead`), the rollouts of an update were begun with the policy that the
    update before it began with: one that is exactly one update old, however fast workers and learner are.

    Where the class of events has them, it reports `time_learner_rollout`, `time_dequeuing_actors` and
    `time_sampling_from_buffer` (seconds, and perhaps percent), `estimated_queue_sizes` (before, after),
    `buffer_size` and `buffer_avg_pick_per_transition`.

    :param algorithm_config: Hyperparameters, among them those of :class:`ReplayConfig`.
    :param model: What is trained and saved.
    :param workers: Collect transitions into a buffer, and draw from it.
    :param seed: Seed of what is drawn while it learns, for those subclasses that draw something.
    :param evaluator: See :class:`~maze.train.trainers.common.trainer.EpochTrainer`, as for the others.
    """

    learns_observation_statistics: ClassVar[bool] = True

    def __init__(
        self,
        algorithm_config: Any,
        model: TorchModel,
        workers: BaseDistributedWorkersWithBuffer,
        *,
        seed: int | None = None,
        evaluator: Evaluator | None = None,
        model_selection: ModelSelectionBase | None = None,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        super().__init__(
            algorithm_config,
            model,
            evaluator=evaluator,
            model_selection=model_selection,
            checkpoint_file=checkpoint_file,
        )
        self.workers = workers
        self._n_rows_seen = 0
        """Number of rows of the buffer that observation statistics have learned from."""
        self.collects_ahead = False
        """Whether the next rollouts are collected while it learns; the workers need a policy of their own for that."""
        self._has_modes = depends_on_mode(self.policy.networks.values())

    @classmethod
    @override(Trainer)
    def build(cls, run: TrainingRunner, fill: Callable[[BaseReplayBuffer], int | None] | None = None) -> ReplayTrainer:
        """Builds the trainer of a run.

        :param run: The runner; its algorithm has the fields of :class:`ReplayConfig`.
        :param fill: Fills the replay buffer to begin with, and may return the number of environment steps that it took;
            `None`: the initial sampling policy fills it.
        """
        config: ReplayConfig = run.algorithm
        model = run.model()
        collects_ahead = not run.placement.in_process if config.collect_ahead is None else config.collect_ahead
        policy = policy_of(model)
        if collects_ahead or policy.device != "cpu":
            policy = copy.deepcopy(policy)
            policy.to("cpu")
        selection = run.best_model_selection(model)
        replay_buffer = cls._replay_buffer(run)
        workers = run.workers(
            worker_policy=cls._worker_policy(policy),
            n_rollout_steps=config.n_rollout_steps,
            n_workers=config.num_actors,
            batch_size=config.batch_size,
            rollouts_per_iteration=config.rollouts_per_iteration,
            split_rollouts_into_transitions=config.split_rollouts_into_transitions,
            env_instance_seeds=run.env_seeds(config.num_actors),
            replay_buffer=replay_buffer,
        )
        evaluator = run.evaluator(selection)
        trainer = cls(
            config,
            model,
            workers,
            seed=run.agent_seed(),
            evaluator=evaluator,
            model_selection=selection,
            checkpoint_file=run.checkpoint_file,
        )
        trainer.collects_ahead = collects_ahead
        if run.resumed_state.get("replay_buffer", {}).get("content") is None:
            if fill is None:
                sampling_policy = cls._sampling_policy(config, workers.worker_policy)
                taken = fill_replay_buffer(run, replay_buffer, sampling_policy=sampling_policy)
            else:
                taken = fill(replay_buffer)
            trainer.n_env_steps = taken or 0
        return trainer

    @classmethod
    def _replay_buffer(cls, run: TrainingRunner) -> BaseReplayBuffer:
        """The replay buffer, still empty."""
        return UniformReplayBuffer(run.algorithm.replay_buffer_size, seed=run.agent_seed())

    @classmethod
    def _worker_policy(cls, policy: TorchPolicy) -> TorchPolicy:
        """The policy that collects: here that one itself.

        :param policy: The policy that learns, or a copy where it learns elsewhere or meanwhile.
        """
        return policy

    @classmethod
    def _sampling_policy(cls, config: ReplayConfig, worker_policy: TorchPolicy) -> Any:
        """The policy that fills the buffer to begin with, or its configuration.

        :param config: The algorithm's configuration.
        :param worker_policy: The policy that collects later.
        """
        return config.initial_sampling_policy

    @abstractmethod
    def _learn_from(self, batch: TransitionBatch) -> None:
        """Learns from a batch.

        :param batch: Transitions, on the model's device.
        """

    @override(EpochTrainer)
    def _begin_training(self, n_epochs: int) -> None:
        if self.observation_statistics.is_missing:
            self._learn_observation_statistics()  # from what the buffer begins with
        self.model.train()

    @override(EpochTrainer)
    def _update(self) -> None:
        """Collects transitions and learns from batches of the buffer."""
        stats, sampling = self.stats, 0.0
        start = time.perf_counter()
        waiting = self._collect()
        self._learn_observation_statistics()
        stats.add_time("time_learner_rollout", time.perf_counter() - start - waiting)
        stats.add_time("time_dequeuing_actors", waiting)
        for _ in range(self.config.num_batches_per_iter):
            start = time.perf_counter()
            batch = self.workers.sample_transitions(self.model.device)
            sampling += time.perf_counter() - start
            with self.products.for_batch(len(batch.terminated)):
                self._learn_from(batch)
        stats.add_time("time_sampling_from_buffer", sampling)

    def _learn_observation_statistics(self) -> None:
        """Learns from the rows that have come into the buffer; what is drawn of it is normalized with the newest."""
        if not self.observation_statistics:
            return
        buffer = self.workers.replay_buffer
        if not isinstance(buffer, UniformReplayBuffer):
            raise ConfigError(
                f"model.normalize_observations: statistics are learned from a UniformReplayBuffer, found a "
                f"{type(buffer).__name__}. Derive it from that one, or normalize by wrappers=vector_obs."
            )
        first, self._n_rows_seen = self._n_rows_seen, buffer.n_rows_added
        self.observation_statistics.learn_from(buffer.columns.observations_since(first))

    def _collect(self) -> float:
        """Has the workers collect with the current policy.

        :return: Seconds spent on waiting for them.
        """
        workers = self.workers
        if not workers.is_ahead:
            self._prepare_acting(workers.worker_policy)
        before, after, waiting = workers.collect_rollouts()
        if self.collects_ahead:
            self._prepare_acting(workers.worker_policy)
            workers.begin_rollouts()
        if self._has_modes:
            self.policy.train()
        self.stats.add_value("estimated_queue_sizes", before, after)
        return waiting

    def _prepare_acting(self, worker_policy: TorchPolicy) -> None:
        """Comes before rollouts are collected, or begun; while they are, the policy that acts is left alone.

        :param worker_policy: That policy; it gets the weights that were learned.
        """
        if not worker_policy.shares_networks_with(self.policy):
            self.workers.broadcast_updated_policy(self.policy.state_dict())
        if self._has_modes:
            worker_policy.eval()

    @override(EpochTrainer)
    def _write_epoch_stats(self) -> None:
        self.workers.finish_rollouts()  # their episodes belong to this epoch, whether they are done by now or not
        buffer = self.workers.replay_buffer
        self.stats.add_value("buffer_size", len(buffer))
        self.stats.add_value("buffer_avg_pick_per_transition", buffer.avg_pick_per_transition)
        super()._write_epoch_stats()

    @override(EpochTrainer)
    def _steps_per_update(self) -> int:
        config: ReplayConfig = self.config
        return config.n_rollout_steps * config.rollouts_per_iteration

    @override(EpochTrainer)
    def _episode_source(self) -> EpisodeSource:
        return self.workers

    @override(EpochTrainer)
    def _parts(self) -> dict[str, Part]:
        return {"workers": self.workers}

    @override(EpochTrainer)
    def training_state(self, is_last: bool = True) -> dict[str, Any]:
        self.workers.finish_rollouts()
        buffer = self.workers.replay_buffer
        with_content = is_last or buffer.n_bytes <= ALWAYS_SAVED_BYTES
        of_buffer = {"replay_buffer": buffer.state_dict(with_content), "n_rows_seen": self._n_rows_seen}
        return {**super().training_state(is_last), **of_buffer}

    @override(EpochTrainer)
    def _load_parts(self, state: Mapping[str, Any]) -> list[str]:
        self.workers.finish_rollouts()
        self.workers.replay_buffer.load_state_dict(state["replay_buffer"])
        problems = super()._load_parts(state)
        self._n_rows_seen = state.get("n_rows_seen", 0)
        if state["replay_buffer"]["content"] is None:
            self._n_rows_seen = self.workers.replay_buffer.n_rows_added
            problems.insert(0, "the replay buffer was too large to be saved with every epoch, and is filled anew")
        return problems
