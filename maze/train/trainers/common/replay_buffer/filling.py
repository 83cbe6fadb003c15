"""What a replay buffer holds before the training: steps of some policy, or demonstrations."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from maze.core.agent.policy import Policy
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.core.utils.factory import ConfigType, Factory, plain_container
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.replay_buffer.column_rows import RolloutRows
from maze.train.trainers.common.replay_buffer.transitions import fixed_actors

if TYPE_CHECKING:
    from maze.core.env.maze_env import MazeEnv
    from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
    from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer
    from maze.train.trainers.common.replay_trainer import ReplayConfig
    from maze.train.trainers.common.training_runner import TrainingRunner

logger = logging.getLogger(__name__)

_STEPS_AT_A_TIME = 100
"""Environment steps of one rollout that fills the buffer initially."""
_MOST_IN_VAIN = 1000
"""So many rollouts in a row may leave nothing to be kept."""


def fill_replay_buffer(
    run: TrainingRunner,
    replay_buffer: BaseReplayBuffer,
    demonstrations: ConfigType = None,
    sampling_policy: ConfigType = None,
) -> int:
    """Fill the buffer of a run with demonstrations where there are some, and otherwise with the initial policy.

    :param run: The runner; its algorithm has the fields of `ReplayConfig`.
    :param replay_buffer: The buffer.
    :param demonstrations: A data set or its configuration.
    :param sampling_policy: The initial policy, or its configuration; `None`: as configured.
    :return: Number of environment steps taken.
    """
    config: ReplayConfig = run.algorithm
    item_length = 1 if config.split_rollouts_into_transitions else config.n_rollout_steps
    assert run.env_factory is not None, "setup comes first"
    if demonstrations is None:
        n_steps = config.initial_buffer_size * item_length
        print(f"-> collecting {n_steps:,} environment steps to begin with ...", flush=True)
        return fill_by_policy(
            replay_buffer,
            config.initial_sampling_policy if sampling_policy is None else sampling_policy,
            config.initial_buffer_size,
            run.agent_seed(),
            item_length,
            run.env_factory,
            run.placement.vector_env,
        )
    dataset = Factory(InMemoryDataset).instantiate(
        demonstrations,
        config_path="runner.initial_demonstration_trajectories",
        conversion_env_factory=run.env_factory,
    )
    add_demonstrations(replay_buffer, dataset, item_length)
    return 0


def fill_by_policy(
    replay_buffer: BaseReplayBuffer,
    sampling_policy: ConfigType,
    n_items: int,
    seed: int,
    item_length: int,
    env_factory: Callable[[], MazeEnv[Any]],
    make_env: Callable[[Callable[[], MazeEnv[Any]], int], StructuredVectorEnv] | None = None,
) -> int:
    """Fill a buffer by rolling a policy out.

    :param replay_buffer: The buffer.
    :param sampling_policy: The policy, or its configuration; it gets the action spaces if it wants them.
    :param n_items: Number of items.
    :param seed: Seed of policy and environment.
    :param item_length: Number of environment steps of an item.
    :param env_factory: Makes the environment.
    :param make_env: Places so many environments of a factory; `None`, or a policy that looks into environments: in this
        process.
    :return: Number of environment steps taken.
    :raises EnvironmentContractError: No step can be learned from.
    """
    env: StructuredVectorEnv
    env = SequentialVectorEnv([env_factory]) if make_env is None else make_env(env_factory, 1)
    try:
        policy = _build_sampling_policy(sampling_policy, env.action_spaces_dict)
        if make_env is not None and (policy.needs_state() or policy.needs_env()):
            env.close()
            env = SequentialVectorEnv([env_factory])
        env.seed([seed])
        spaces = (env.observation_spaces_dict, env.action_spaces_dict)
        policy.seed(seed)
        actors = fixed_actors(env.agent_counts_dict)
        replay_buffer.allocate(actors, *spaces, item_length)
        generator, rows = RolloutGenerator(env), RolloutRows(actors, *spaces, 1, item_length)
        steps_at_a_time = item_length * max(1, _STEPS_AT_A_TIME // item_length)
        missing, n_in_vain, n_env_steps = n_items * item_length, 0, 0
        while missing > 0:
            columns = generator.allocate(min(missing, steps_at_a_time))
            generator.collect(policy, columns)
            columns.check(env.seeding_at)
            n_env_steps += int(columns.step_complete.sum())
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
        return n_env_steps
    finally:
        env.close()


def add_demonstrations(replay_buffer: BaseReplayBuffer, dataset: InMemoryDataset, item_length: int) -> None:
    """Adds all trajectories of a data set.

    :param replay_buffer: The buffer.
    :param dataset: Steps with what was observed after them.
    :param item_length: Number of steps of an item; what is left of a trajectory is not used.
    :raises ConfigError: The data set holds none that fit the environment.
    """
    if not len(dataset):
        raise ConfigError(
            "runner.initial_demonstration_trajectories: the data set has no steps. Record some, for instance with "
            "`maze-run env.name=... policy=... runner.n_episodes=100`."
        )
    n_before = replay_buffer.n_rows_added
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
    n_added = (replay_buffer.n_rows_added - n_before) // item_length
    if n_added > len(replay_buffer):
        logger.warning(
            "runner.initial_demonstration_trajectories: %d transitions (or rollouts) do not fit into a replay buffer "
            "of %d; only the latest are kept. Raise `algorithm.replay_buffer_size`.",
            n_added,
            len(replay_buffer),
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
