"""Workers that fill a replay buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.train.parallelization.distributed_actors.distributed_actors import EpisodeCollector
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv, checked_seeds
from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer
from maze.train.trainers.common.replay_buffer.rows import RolloutRows, record_of_batch
from maze.train.trainers.common.replay_buffer.transitions import fixed_actors


@dataclass(eq=False)
class BaseDistributedWorkersWithBuffer(EpisodeCollector, ABC):
    """Base of workers that collect rollouts into a replay buffer, from which a learner samples batches.

    :param env_factory: Makes one environment.
    :param worker_policy: The behaviour policy.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_workers: Number of environments.
    :param batch_size: Number of items of a batch.
    :param rollouts_per_iteration: Number of rollouts per collection, summed over all environments.
    :param split_rollouts_into_transitions: Whether the items of the buffer are single steps instead of rollouts.
    :param env_instance_seeds: A seed for each environment.
    :param replay_buffer: The replay buffer.
    :raises ValueError: The number of seeds is wrong.
    """

    env_factory: Callable[[], MazeEnv[Any]]
    worker_policy: TorchPolicy
    n_rollout_steps: int
    n_workers: int
    batch_size: int
    rollouts_per_iteration: int
    split_rollouts_into_transitions: bool
    env_instance_seeds: Sequence[int]
    replay_buffer: BaseReplayBuffer

    def __post_init__(self) -> None:
        super().__init__()
        self.env_instance_seeds = checked_seeds(self.env_instance_seeds, self.n_workers)
        self.n_env_steps = self.n_rollout_steps * self.rollouts_per_iteration
        """Number of environment steps of the latest collection."""
        self._actors: list[ActorID] = []
        self._envs: list[Any] = []
        self.is_ahead = False
        """Whether the rollouts of the next collection were started in advance."""

    @abstractmethod
    def start(self) -> None:
        """Make the environments."""

    def stop(self) -> None:
        """Close the environments."""
        while self._envs:
            self._envs.pop().close()

    @override(EpisodeCollector)
    def write_epoch_stats(self) -> None:
        for env in self._envs[:1]:  # all share the actors of a cluster
            env.report_work()
        super().write_epoch_stats()

    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        """Update the behaviour policy.

        :param state_dict: The new weights.
        """
        self.worker_policy.load_state_dict(state_dict)

    def _prepared(self, env: StructuredVectorEnv, seeds: Sequence[int], sizes: Sequence[int]) -> list[RolloutRows]:
        """Seed environments and allocate the buffer.

        :param env: The environments.
        :param seeds: Their seeds.
        :param sizes: Number of environments of each of their groups.
        :return: Converters to rows, one for each group.
        """
        self._envs.append(env)
        env.epoch_stats = self.epoch_stats
        env.seed(seeds)
        spaces = (env.observation_spaces_dict, env.action_spaces_dict)
        self._actors = fixed_actors(env.agent_counts_dict)
        item_length = 1 if self.split_rollouts_into_transitions else self.n_rollout_steps
        self.replay_buffer.allocate(self._actors, *spaces, item_length)
        return [RolloutRows(self._actors, *spaces, size, item_length) for size in sizes]

    @abstractmethod
    def collect_rollouts(self) -> tuple[float, float, float]:
        """Add `rollouts_per_iteration` rollouts to the buffer; rollouts started in advance come first.

        :return: Number of rollouts in the queue before and after, and the seconds spent waiting.
        """

    def begin_rollouts(self) -> None:
        """Start the rollouts of the next collection while the learner learns.

        The learner must not change `worker_policy` until the collection. The default implementation does nothing.
        """

    def finish_rollouts(self) -> None:
        """Wait for rollouts started in advance and add them to the buffer; they count for the next collection.

        Required before the state of buffer or workers is read between two collections. It does not change results.
        """

    @property
    def actors(self) -> list[ActorID]:
        """The actors of an environment step, in their order."""
        self.start()
        return self._actors

    def sample_batch(self, learner_device: str) -> StructuredSpacesRecord:
        """Sample a batch from the buffer.

        :param learner_device: Device of the tensors.
        """
        return record_of_batch(self.replay_buffer.sample_transitions(self.batch_size, learner_device))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of environments and policy generators, and the steps that are not in the buffer yet."""
        return {"policy_generators": self.worker_policy.rng_state(), "is_ahead": self.is_ahead}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Restore a state from :meth:`state_dict`; the buffer has to be restored before.

        :param state_dict: The state, possibly of another number of workers.
        :return: Environment index -> reason why this environment starts a new episode.
        """
        self.worker_policy.set_rng_state(state_dict["policy_generators"])
        self.is_ahead = state_dict["is_ahead"]
        return dict.fromkeys(range(self.n_workers), f"{type(self).__name__} does not save the states of environments")
