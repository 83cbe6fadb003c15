"""Actors that fill a replay buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.train.parallelization.distributed_actors.distributed_actors import EpisodeCollector
from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer
from maze.train.trainers.common.replay_buffer.rows import record_of_batch

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.maze_env import MazeEnv
    from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
    from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch


class BaseDistributedWorkersWithBuffer(EpisodeCollector, ABC):
    """Base of actors that collect rollouts into a replay buffer, from which a learner draws batches.

    :param env_factory: Makes one environment.
    :param worker_policy: The policy that acts.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_workers: Number of environments.
    :param batch_size: Number of items of a batch.
    :param rollouts_per_iteration: Number of rollouts per collection, all environments together.
    :param split_rollouts_into_transitions: Whether the items of the buffer are single steps instead of rollouts.
    :param env_instance_seeds: Seeds of the environments.
    :param replay_buffer: Where rollouts go.
    :raises ConfigError: There is not one seed for each worker, or the buffer is none.
    """

    def __init__(
        self,
        env_factory: Callable[[], MazeEnv[Any]],
        worker_policy: TorchPolicy,
        n_rollout_steps: int,
        n_workers: int,
        batch_size: int,
        rollouts_per_iteration: int,
        split_rollouts_into_transitions: bool,
        env_instance_seeds: Sequence[int],
        replay_buffer: BaseReplayBuffer,
    ) -> None:
        if len(env_instance_seeds) != n_workers:
            raise ConfigError(f"Expected one seed for each of the {n_workers} workers, got {len(env_instance_seeds)}.")
        if not isinstance(replay_buffer, BaseReplayBuffer):
            raise ConfigError(f"replay_buffer: expected a BaseReplayBuffer, found {type(replay_buffer).__name__}.")
        self.env_factory = env_factory
        self.worker_policy = worker_policy
        self.n_rollout_steps = n_rollout_steps
        self.n_workers = n_workers
        self.batch_size = batch_size
        self.rollouts_per_iteration = rollouts_per_iteration
        self.split_rollouts_into_transitions = split_rollouts_into_transitions
        self.env_instance_seeds = list(env_instance_seeds)
        self.replay_buffer = replay_buffer
        super().__init__()
        self.is_ahead = False
        """Whether the next rollouts were begun before they were asked for."""

    @abstractmethod
    def start(self) -> None:
        """Makes the environments."""

    @abstractmethod
    def stop(self) -> None:
        """Closes them."""

    @abstractmethod
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        """Has the actors act with new weights.

        :param state_dict: The weights.
        """

    @abstractmethod
    def collect_rollouts(self) -> tuple[float, float, float]:
        """Adds `rollouts_per_iteration` rollouts to the buffer: those that were begun, if there are some.

        :return: Number of rollouts that were waiting before and after, and the seconds spent on waiting for more.
        """

    def begin_rollouts(self) -> None:
        """Begins to collect the next rollouts, for a learner that goes on meanwhile and asks for them later.

        Until then it has to leave `worker_policy` alone. Here nothing is begun: the learner waits for all of it.
        """

    def finish_rollouts(self) -> None:
        """Waits for rollouts that were begun and adds them to the buffer; they count as those of the next collection.

        Between two collections it changes nothing but when that is done; what is saved or counted in between needs it.
        """

    @property
    @abstractmethod
    def actors(self) -> list[ActorID]:
        """The actors of an environment step, in their order."""

    def sample_batch(self, learner_device: str) -> StructuredSpacesRecord:
        """Draws a batch from the buffer.

        :param learner_device: Where its tensors shall be.
        """
        return record_of_batch(self.sample_transitions(learner_device))

    def sample_transitions(self, learner_device: str) -> TransitionBatch:
        """Draws a batch from the buffer, as the arrays it is kept in.

        :param learner_device: Where its tensors shall be.
        """
        return self.replay_buffer.sample_transitions(self.batch_size, learner_device)

    def state_dict(self) -> dict[str, Any]:
        """Where the environments are, the steps that are not in the buffer yet, and the policy's generators."""
        return {"policy_generators": self.worker_policy.rng_state(), "is_ahead": self.is_ahead}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Continues from a state that :meth:`state_dict` returned, perhaps of other workers; the buffer comes first.

        :return: Why environments begin new episodes with the next rollouts, by their index.
        """
        self.worker_policy.set_rng_state(state_dict["policy_generators"])
        self.is_ahead = state_dict["is_ahead"]
        return dict.fromkeys(range(self.n_workers), f"{type(self).__name__} does not keep where they were")
