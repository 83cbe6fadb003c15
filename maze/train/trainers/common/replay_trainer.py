"""Base of the algorithms that learn from a replay buffer."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from maze.core.agent.policy import Policy, build_policy
from maze.core.agent.torch_actor_critic import policy_of
from maze.core.agent.torch_model import TorchModel, depends_on_mode
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.core.utils.factory import ConfigType, Factory
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.config_classes import ReplayConfig
from maze.train.trainers.common.replay_buffer.rows import RolloutRows
from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch, fixed_actors
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
from maze.train.trainers.common.trainer import EpochTrainer, Trainer
from maze.train.utils.train_utils import Part

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
    from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer
    from maze.train.trainers.common.training_runner import TrainingRunner


SAMPLING_POLICY = "algorithm.initial_sampling_policy"
"""Key of the policy that fills a replay buffer."""
# Environment steps of one rollout that fills the buffer initially.
_STEPS_AT_A_TIME = 100
# Environment steps of each environment, times the steps of an item, after which filling without any row is given up.
_MOST_STEPS_WITHOUT_ROWS = 1000


def fill_replay_buffer(run: TrainingRunner, replay_buffer: BaseReplayBuffer, demonstrations: ConfigType = None) -> int:
    """Fill the buffer of a run with demonstrations where there are some, and otherwise with its sampling policy.

    :param run: The runner; its algorithm has the fields of `ReplayConfig`.
    :param replay_buffer: The buffer.
    :param demonstrations: A data set or its configuration.
    :return: Number of environment steps taken.
    """
    config: ReplayConfig = run.algorithm
    item_length = 1 if config.split_rollouts_into_transitions else config.n_rollout_steps
    assert run.env_factory is not None, "setup comes first"
    if demonstrations is None:
        n_steps = config.initial_buffer_size * item_length
        print(f"-> collecting {n_steps:,} environment steps before the first update ...", flush=True)
        policy = build_policy(run.sampling_policy, run.spaces, SAMPLING_POLICY)
        if policy.needs_state() or policy.needs_env():  # it looks into environments of this process
            env: StructuredVectorEnv = SequentialVectorEnv([run.env_factory] * config.num_actors)
        else:
            env = run.placement.vector_env(run.env_factory, config.num_actors)
        return fill_by_policy(replay_buffer, policy, config.initial_buffer_size, run.agent_seed(), item_length, env)
    dataset = Factory(InMemoryDataset).instantiate(
        demonstrations, config_path="runner.initial_demonstration_trajectories", conversion_env_factory=run.env_factory
    )
    add_demonstrations(replay_buffer, dataset, item_length)
    return 0


def fill_by_policy(
    replay_buffer: BaseReplayBuffer, policy: Policy, n_items: int, seed: int, item_length: int, env: StructuredVectorEnv
) -> int:
    """Fill a buffer by rolling a policy out.

    :param replay_buffer: The buffer.
    :param policy: The policy.
    :param n_items: Number of items at least; each environment contributes equally many.
    :param seed: Seed of the policy and of the first environment; the others have those that follow.
    :param item_length: Number of environment steps of an item.
    :param env: The environments; they are closed.
    :return: Number of environment steps taken.
    :raises ConfigError: No step can be kept.
    """
    try:
        env.seed([seed + index for index in range(env.n_envs)])
        spaces = (env.observation_spaces_dict, env.action_spaces_dict)
        policy.seed(seed)
        actors = fixed_actors(env.agent_counts_dict)
        replay_buffer.allocate(actors, *spaces, item_length)
        generator, rows = RolloutGenerator(env), RolloutRows(actors, *spaces, env.n_envs, item_length)
        steps_at_a_time = item_length * max(1, _STEPS_AT_A_TIME // item_length)
        missing, n_env_steps = n_items * item_length, 0
        while missing > 0:
            of_each_env = -(-missing // (env.n_envs * item_length)) * item_length
            columns = generator.allocate(min(of_each_env, steps_at_a_time))
            generator.collect(policy, columns)
            columns.check_finite(env.seeding_at)
            n_env_steps += int(columns.step_complete.sum())
            converted = rows.convert(columns, replay_buffer.n_rows_added)
            replay_buffer.add_rows(converted)
            missing -= len(converted)
            if not replay_buffer.n_rows_added and n_env_steps >= _MOST_STEPS_WITHOUT_ROWS * item_length * env.n_envs:
                raise ConfigError(
                    f"env: none of {n_env_steps:,} environment steps can be kept in a replay buffer: all episodes are "
                    "truncated in their first step, and no observation of the next actor follows. Have `actor_id()` of "
                    "the environment move on at the end of an episode as well, or train with PPO or A2C."
                )
        return n_env_steps
    finally:
        env.close()


def add_demonstrations(replay_buffer: BaseReplayBuffer, dataset: InMemoryDataset, item_length: int) -> None:
    """Add all trajectories of a data set.

    :param replay_buffer: The buffer.
    :param dataset: Steps with their next observations.
    :param item_length: Number of steps of an item; the remaining steps of a trajectory are not used.
    :raises ConfigError: The data set holds none that fit the environment.
    """
    for steps in dataset.trajectory_references:
        records = [dataset.step_records[index] for index in steps]
        if item_length == 1:
            replay_buffer.add_rollout(records)
            continue
        for first in range(0, len(records) - item_length + 1, item_length):
            piece = SpacesTrajectoryRecord(None)
            piece.step_records = records[first : first + item_length]
            replay_buffer.add_transition(piece)
    if not len(replay_buffer):
        raise ConfigError(
            f"runner.initial_demonstration_trajectories: expected trajectories of at least {item_length} environment "
            "steps (`algorithm.n_rollout_steps` of a rollout that is kept as a whole), found none. Record some, for "
            "instance with `maze-run env.name=... policy=... runner.n_episodes=100`."
        )


ALWAYS_SAVED_BYTES = 1 << 26
"""A larger replay buffer is saved only when the run ends or is interrupted, not after each epoch."""


class ReplayTrainer(EpochTrainer, ABC):
    """Collect transitions into a replay buffer and learn from batches of it.

    An update collects `rollouts_per_iteration * n_rollout_steps` environment steps (with `runner.placement.wait_for`
    below 1, at least this share of them) and learns from `num_batches_per_iter` batches. An algorithm learns from a
    batch in :meth:`_learn_from`, and lists its optimizers and generators as its :meth:`_parts`, besides those of this
    class. The buffer, which the workers fill, is part of the run's state; its initial content is up to the caller.

    Where it collects ahead (:attr:`collects_ahead`), the rollouts of an update were begun with the policy that the
    update before it began with: one that is exactly one update old, however fast workers and learner are.

    Where the class of events has them, it reports `time_learner_rollout`, `time_dequeuing_actors` and
    `time_sampling_from_buffer` (seconds, and perhaps percent of the sum of all parts), `estimated_queue_sizes` (before,
    after), `buffer_size` and `buffer_avg_pick_per_transition`.

    :param algorithm_config: Hyperparameters, among them those of :class:`ReplayConfig`.
    :param model: The model that is trained and saved.
    :param workers: Collect transitions into a buffer, and draw from it.
    :param seed: Seed of the random numbers of learning, for subclasses that draw some.
    :param common: Evaluator, model selection and checkpoint file, see
        :class:`~maze.train.trainers.common.trainer.EpochTrainer`.
    """

    learns_observation_statistics: ClassVar[bool] = True

    def __init__(
        self,
        algorithm_config: Any,
        model: TorchModel,
        workers: BaseDistributedWorkersWithBuffer,
        *,
        seed: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(algorithm_config, model, **common)
        self.workers = workers
        # Number of rows of the buffer that observation statistics have learned from.
        self._n_rows_seen = 0
        self.n_filling_steps = 0
        """Number of those environment steps that filled the buffer before the first update."""
        self.collects_ahead = False
        """Whether the next rollouts are collected while it learns; the workers need a policy of their own for that."""
        self._has_modes = depends_on_mode(self.policy.networks.values())
        self.seconds_of_learning: dict[str, float] = {}
        """Seconds that parts of learning took in this update, by event; subclasses may count some."""
        self.n_batches = 0
        """Number of batches learned from, which subclasses count within an update."""

    @classmethod
    @override(Trainer)
    def build(cls, run: TrainingRunner) -> ReplayTrainer:
        """Build the trainer of a run. The runner's `load_replay_buffer` fills the buffer to begin with if it has one,
        otherwise the initial sampling policy does.

        :param run: The runner; its algorithm has the fields of :class:`ReplayConfig`.
        """
        config: ReplayConfig = run.algorithm
        model = run.model()
        collects_ahead = not run.placement.in_process if config.collect_ahead is None else config.collect_ahead
        policy = policy_of(model)
        if collects_ahead or policy.device != "cpu":
            policy = copy.deepcopy(policy)
            policy.to("cpu")
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
        trainer = cls(config, model, workers, seed=run.agent_seed(), **run.common_arguments(model))
        trainer.collects_ahead = collects_ahead
        if run.resumed_state.get("replay_buffer", {}).get("content") is None:
            run.sampling_policy = cls._sampling_policy(config, workers.worker_policy)
            if hasattr(run, "load_replay_buffer"):
                trainer.n_env_steps = run.load_replay_buffer(replay_buffer, run.cfg) or 0
            else:
                trainer.n_env_steps = fill_replay_buffer(run, replay_buffer)
            trainer.n_filling_steps = trainer.n_env_steps
        return trainer

    @classmethod
    def _replay_buffer(cls, run: TrainingRunner) -> BaseReplayBuffer:
        """Return the replay buffer, still empty."""
        return UniformReplayBuffer(run.algorithm.replay_buffer_size, seed=run.agent_seed())

    @classmethod
    def _worker_policy(cls, policy: TorchPolicy) -> TorchPolicy:
        """Return the policy that collects: here that one itself.

        :param policy: The policy that learns, or a copy where it learns on another device or at the same time.
        """
        return policy

    @classmethod
    def _sampling_policy(cls, config: ReplayConfig, worker_policy: TorchPolicy) -> Any:
        """Return the policy that fills the buffer to begin with, or its configuration.

        :param config: The algorithm's configuration.
        :param worker_policy: The policy that collects later.
        """
        return config.initial_sampling_policy

    @abstractmethod
    def _learn_from(self, batch: TransitionBatch) -> None:
        """Learn from a batch.

        :param batch: Transitions, on the model's device.
        """

    @override(EpochTrainer)
    def _begin_training(self, n_epochs: int) -> None:
        if self.observation_statistics.is_missing:
            self._learn_observation_statistics()  # from the initial content of the buffer
        self.model.train()

    @override(EpochTrainer)
    def _update(self) -> None:
        """Collect transitions and learn from batches of the buffer."""
        self.n_batches = self.n_updates * self.config.num_batches_per_iter
        self.seconds_of_learning = dict.fromkeys(self.seconds_of_learning, 0.0)
        start = time.perf_counter()
        waiting = self._collect()
        self._display.steps_per_update = self.workers.n_env_steps
        self._learn_observation_statistics()
        seconds = {"time_learner_rollout": time.perf_counter() - start - waiting, "time_dequeuing_actors": waiting}
        sampling = 0.0
        for _ in range(self.config.num_batches_per_iter):
            start = time.perf_counter()
            batch = self.workers.replay_buffer.sample_transitions(self.config.batch_size, self.model.device)
            sampling += time.perf_counter() - start
            self._learn_from(batch)
        seconds |= {"time_sampling_from_buffer": sampling, **self.seconds_of_learning}
        for event, value in seconds.items():
            self.stats.add_value(event, value, 100.0 * value / sum(seconds.values()))

    def _learn_observation_statistics(self) -> None:
        """Learn the statistics from the new rows of the buffer; sampled rows are normalized with the newest ones."""
        if not self.observation_statistics:
            return
        buffer: Any = self.workers.replay_buffer  # of arrays
        first, self._n_rows_seen = self._n_rows_seen, buffer.n_rows_added
        self.observation_statistics.learn_from(buffer.columns.observations_since(first))

    def _collect(self) -> float:
        """Have the workers collect with the current policy.

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
        """Prepare the acting policy before rollouts are collected or begun; while they are, it does not change.

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
    def steps_per_update(self) -> int:
        config: ReplayConfig = self.config
        return config.n_rollout_steps * config.rollouts_per_iteration

    @override(EpochTrainer)
    def episode_source(self) -> Any:
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
        return {**super().training_state(is_last), **of_buffer, "n_filling_steps": self.n_filling_steps}

    @override(EpochTrainer)
    def _load_parts(self, state: Mapping[str, Any]) -> list[str]:
        self.workers.finish_rollouts()
        self.workers.replay_buffer.load_state_dict(state["replay_buffer"])
        problems = super()._load_parts(state)
        self._n_rows_seen = state["n_rows_seen"]
        self.n_filling_steps = state["n_filling_steps"]
        if state["replay_buffer"]["content"] is None:
            self._n_rows_seen = self.workers.replay_buffer.n_rows_added
            problems.insert(0, "the replay buffer was too large to be saved with every epoch, and is filled anew")
        return problems
