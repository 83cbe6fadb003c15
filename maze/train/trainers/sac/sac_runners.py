"""Runners of SAC trainings."""

from __future__ import annotations

import copy
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maze.core.agent.policy import Policy
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import ConfigType, Factory, plain_container
from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import (
    DummyDistributedWorkersWithBuffer,
)
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.replay_buffer.column_rows import RolloutRows
from maze.train.trainers.common.replay_buffer.transitions import fixed_actors
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
from maze.train.trainers.common.resumption import CHECKPOINT_FILE
from maze.train.trainers.common.training_runner import TrainingRunner
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from maze.train.trainers.sac.sac_trainer import SAC

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.maze_env import MazeEnv
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
    from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer

logger = logging.getLogger(__name__)

_STEPS_AT_A_TIME = 100
"""Environment steps of one rollout that fills the buffer initially."""
_MOST_IN_VAIN = 1000
"""So many rollouts in a row may leave nothing to be kept."""


@dataclass
class SACRunner(TrainingRunner, ABC):
    """Builds model, replay buffer, actors, evaluator and trainer, and trains.

    :param eval_concurrency: Number of evaluation environments; 0: as many as episodes and CPU cores suggest.
    :param initial_demonstration_trajectories: Data set that fills the replay buffer to begin with, or its
        configuration; ``None``: ``algorithm.initial_sampling_policy`` does.
    """

    eval_concurrency: int = 0
    initial_demonstration_trajectories: ConfigType = None

    @override(TrainingRunner)
    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("runner.eval_concurrency", self.eval_concurrency, at_least=0)

    @override(TrainingRunner)
    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        assert self.env_factory is not None
        config = SACAlgorithmConfig.from_config(cfg.algorithm)
        model = self._build_actor_critic("SAC", config.device, critic_of="state-action")
        selection = BestModelSelection(self.state_dict_dump_file, model, dump_interval=self.dump_interval)
        replay_buffer = UniformReplayBuffer(
            config.replay_buffer_size, seed=self.maze_seeding.generate_agent_instance_seed()
        )
        try:
            actors = self.create_distributed_rollout_workers(
                env_factory=self.env_factory,
                worker_policy=_worker_policy(model),
                n_rollout_steps=config.n_rollout_steps,
                n_workers=config.num_actors,
                batch_size=config.batch_size,
                rollouts_per_iteration=config.rollouts_per_iteration,
                split_rollouts_into_transitions=config.split_rollouts_into_transitions,
                env_instance_seeds=self._env_seeds(config.num_actors),
                replay_buffer=replay_buffer,
            )
            self._closing.append(actors.stop)
            actors.start()
            evaluator = self._rollout_evaluator(
                config.rollout_evaluator, selection, self.create_distributed_eval_env, self.eval_concurrency
            )
            trainer_seed = self.maze_seeding.generate_agent_instance_seed()
            self._trainer = SAC(
                config, model, actors, selection, evaluator, seed=trainer_seed, checkpoint_file=CHECKPOINT_FILE
            )
            if self._resumed is None or self._resumed.state.get("replay_buffer", {}).get("content") is None:
                self.load_replay_buffer(replay_buffer, cfg)
            self._init_trainer_from_input_dir(self._trainer, self.state_dict_dump_file, cfg.get("input_dir"))
        except BaseException:
            self.close()
            raise

    def load_replay_buffer(self, replay_buffer: BaseReplayBuffer, cfg: DictConfig) -> None:
        """Fills the buffer with demonstrations where there are some, and otherwise with the initial policy.

        :param replay_buffer: The buffer.
        :param cfg: The whole configuration.
        """
        assert self.env_factory is not None
        config = SACAlgorithmConfig.from_config(cfg.algorithm)
        if self.initial_demonstration_trajectories is None:
            self.init_replay_buffer(
                replay_buffer=replay_buffer,
                initial_sampling_policy=config.initial_sampling_policy,
                initial_buffer_size=config.initial_buffer_size,
                replay_buffer_seed=self.maze_seeding.generate_agent_instance_seed(),
                split_rollouts_into_transitions=config.split_rollouts_into_transitions,
                n_rollout_steps=config.n_rollout_steps,
                env_factory=self.env_factory,
            )
            return
        dataset = Factory(InMemoryDataset).instantiate(
            self.initial_demonstration_trajectories,
            config_path="runner.initial_demonstration_trajectories",
            conversion_env_factory=self.env_factory,
        )
        n_steps = 1 if config.split_rollouts_into_transitions else config.n_rollout_steps
        add_demonstrations(replay_buffer, dataset, n_steps)

    @staticmethod
    def init_replay_buffer(
        replay_buffer: BaseReplayBuffer,
        initial_sampling_policy: DictConfig | Policy | Any,
        initial_buffer_size: int,
        replay_buffer_seed: int,
        split_rollouts_into_transitions: bool,
        n_rollout_steps: int,
        env_factory: Callable[[], MazeEnv[Any]],
    ) -> None:
        """Fills a buffer by rolling a policy out.

        :param replay_buffer: The buffer.
        :param initial_sampling_policy: The policy, or its configuration; it gets the action spaces if it wants them.
        :param initial_buffer_size: Number of items.
        :param replay_buffer_seed: Seed of policy and environment.
        :param split_rollouts_into_transitions: Whether items are single steps instead of rollouts.
        :param n_rollout_steps: Number of steps of a rollout.
        :param env_factory: Makes the environment.
        """
        if not isinstance(replay_buffer, UniformReplayBuffer):
            raise ConfigError(f"replay_buffer: expected a UniformReplayBuffer, found {type(replay_buffer).__name__}.")
        env = SequentialVectorEnv([env_factory])
        try:
            env.seed([replay_buffer_seed])
            spaces = (env.observation_spaces_dict, env.action_spaces_dict)
            policy = _build_sampling_policy(initial_sampling_policy, env.action_spaces_dict)
            policy.seed(replay_buffer_seed)
            item_length = 1 if split_rollouts_into_transitions else n_rollout_steps
            actors = fixed_actors(env.agent_counts_dict)
            replay_buffer.allocate(actors, *spaces, item_length)
            generator, rows = RolloutGenerator(env), RolloutRows(actors, *spaces, 1, item_length)
            steps_at_a_time = item_length * max(1, _STEPS_AT_A_TIME // item_length)
            missing, n_in_vain = initial_buffer_size * item_length, 0
            while missing > 0:
                columns = generator.allocate(min(missing, steps_at_a_time))
                generator.collect(policy, columns)
                columns.check_finite(env.seeding_at)
                converted = rows.convert(columns, replay_buffer.n_rows_added)
                replay_buffer.add_rows(converted)
                missing -= len(converted)
                n_in_vain = 0 if len(converted) else n_in_vain + 1
                if n_in_vain == _MOST_IN_VAIN:
                    raise EnvironmentContractError(
                        f"env: after {n_in_vain} rollouts not one step could be put into the replay buffer, because "
                        f"each one cut its episode off with an actor to act that was not {actors[0]}. Have "
                        "`actor_id()` move on at the end of an episode as well."
                    )
        finally:
            env.close()

    @abstractmethod
    def create_distributed_eval_env(
        self, env_factory: Callable[[], MazeEnv[Any]], eval_concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Builds the evaluation environments.

        :param env_factory: Makes one environment.
        :param eval_concurrency: Number of environments.
        :param logging_prefix: Where their statistics are logged.
        """

    @abstractmethod
    def create_distributed_rollout_workers(
        self,
        env_factory: Callable[[], MazeEnv[Any]],
        worker_policy: TorchPolicy,
        n_rollout_steps: int,
        n_workers: int,
        batch_size: int,
        rollouts_per_iteration: int,
        split_rollouts_into_transitions: bool,
        env_instance_seeds: list[int],
        replay_buffer: BaseReplayBuffer,
    ) -> BaseDistributedWorkersWithBuffer:
        """Builds what collects rollouts; the arguments are those of ``BaseDistributedWorkersWithBuffer``."""


@dataclass
class SACDevRunner(SACRunner):
    """Steps all environments in the process of the training."""

    @override(SACRunner)
    def create_distributed_rollout_workers(
        self,
        env_factory: Callable[[], MazeEnv[Any]],
        worker_policy: TorchPolicy,
        n_rollout_steps: int,
        n_workers: int,
        batch_size: int,
        rollouts_per_iteration: int,
        split_rollouts_into_transitions: bool,
        env_instance_seeds: list[int],
        replay_buffer: BaseReplayBuffer,
    ) -> DummyDistributedWorkersWithBuffer:
        return DummyDistributedWorkersWithBuffer(
            env_factory=env_factory,
            worker_policy=worker_policy,
            n_rollout_steps=n_rollout_steps,
            n_workers=n_workers,
            batch_size=batch_size,
            rollouts_per_iteration=rollouts_per_iteration,
            split_rollouts_into_transitions=split_rollouts_into_transitions,
            env_instance_seeds=env_instance_seeds,
            replay_buffer=replay_buffer,
        )

    @override(SACRunner)
    def create_distributed_eval_env(
        self, env_factory: Callable[[], MazeEnv[Any]], eval_concurrency: int, logging_prefix: str
    ) -> SequentialVectorEnv:
        return SequentialVectorEnv([env_factory] * eval_concurrency, logging_prefix=logging_prefix)


def add_demonstrations(replay_buffer: BaseReplayBuffer, dataset: InMemoryDataset, item_length: int) -> None:
    """Adds all trajectories of a data set.

    :param replay_buffer: The buffer.
    :param dataset: Steps with what was observed after them.
    :param item_length: Number of steps of an item; what is left of a trajectory is not used.
    """
    if not len(dataset):
        raise ConfigError(
            "runner.initial_demonstration_trajectories: the data set has no steps. Record some, for instance with "
            "`maze-run env.name=... policy=... runner.n_episodes=100`."
        )
    n_before = replay_buffer.n_added if isinstance(replay_buffer, UniformReplayBuffer) else 0
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
            f"runner.initial_demonstration_trajectories: no trajectory has the {item_length} steps of a rollout "
            "(`algorithm.n_rollout_steps`)."
        )
    if isinstance(replay_buffer, UniformReplayBuffer):
        n_added = replay_buffer.n_added - n_before
        if n_added > replay_buffer.buffer_size:
            logger.warning(
                "runner.initial_demonstration_trajectories: %d transitions (or rollouts) do not fit into a replay "
                "buffer of %d; only the latest are kept. Raise `algorithm.replay_buffer_size`.",
                n_added,
                replay_buffer.buffer_size,
            )


def _build_sampling_policy(config: Any, action_spaces_dict: Mapping[Any, Any]) -> Policy:
    where = "algorithm.initial_sampling_policy"
    if config is None:
        raise ConfigError(f"{where}: expected a policy or its configuration, found none.")
    factory = Factory(Policy)  # type: ignore[type-abstract]  # a subclass
    target = plain_container(config).get("_target_") if isinstance(config, Mapping) else None
    arguments = {}
    if isinstance(target, str):
        target = factory.type_or_function(target, where)
    if target is not None and "action_spaces_dict" in inspect.signature(target).parameters:
        arguments["action_spaces_dict"] = dict(action_spaces_dict)
    return factory.instantiate(config, config_path=where, **arguments)


def _worker_policy(model: TorchActorCritic) -> TorchPolicy:
    """Acts on the CPU: a copy where the networks are trained elsewhere."""
    if model.device == "cpu":
        return model.policy
    policy = copy.deepcopy(model.policy)
    policy.to("cpu")
    return policy
