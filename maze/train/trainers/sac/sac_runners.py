"""Runners of SAC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import DictConfig

from maze.core.agent.policy import Policy, build_policy
from maze.core.env.maze_env import MazeEnv
from maze.core.utils.factory import ConfigType
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer
from maze.train.trainers.common.replay_trainer import SAMPLING_POLICY, fill_by_policy, fill_replay_buffer
from maze.train.trainers.common.training_runner import TrainingRunner


@dataclass
class SACRunner(TrainingRunner):
    """Train on a replay buffer, which may start with demonstrations.

    :param initial_demonstration_trajectories: Data set that fills the replay buffer to begin with, or its
        configuration; `None`: `algorithm.initial_sampling_policy` does.
    """

    eval_concurrency: int = 0
    initial_demonstration_trajectories: ConfigType = None

    default_algorithm: ClassVar[str] = "maze.train.trainers.sac.sac_algorithm_config.SACAlgorithmConfig"
    trains: ClassVar[str] = "maze.train.trainers.common.replay_trainer.ReplayTrainer"
    replaced_arguments: ClassVar[Mapping[str, str]] = {"concurrency": "algorithm.num_actors"}

    def load_replay_buffer(self, replay_buffer: BaseReplayBuffer, cfg: DictConfig) -> int | None:
        """Fill the buffer with demonstrations where there are some, and otherwise with the initial policy.

        :param replay_buffer: The buffer.
        :param cfg: The whole configuration.
        :return: Number of environment steps taken; `None`: not known.
        """
        return fill_replay_buffer(self, replay_buffer, self.initial_demonstration_trajectories)

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
        """Fill a buffer by rolling a policy out.

        :param replay_buffer: The buffer.
        :param initial_sampling_policy: The policy, or its configuration; it gets the action spaces if it accepts them.
        :param initial_buffer_size: Number of items.
        :param replay_buffer_seed: Seed of policy and environment.
        :param split_rollouts_into_transitions: Whether items are single steps instead of rollouts.
        :param n_rollout_steps: Number of steps of a rollout.
        :param env_factory: Makes the environment.
        """
        item_length = 1 if split_rollouts_into_transitions else n_rollout_steps
        env = SequentialVectorEnv([env_factory])
        policy = build_policy(initial_sampling_policy, env, SAMPLING_POLICY)
        fill_by_policy(replay_buffer, policy, initial_buffer_size, replay_buffer_seed, item_length, env)


@dataclass
class SACDevRunner(SACRunner):
    """Step all environments in the training process, unless the placement is configured."""


@dataclass
class SACLocalRunner(SACRunner):
    """Step the environments in worker processes; with the same seeds the results are those of `dev`."""

    default_placement: ClassVar[str] = "processes"
