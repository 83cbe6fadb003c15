"""An environment whose sub-steps are made by a wrapper, as the documentation's structured tutorial does it.

Such a wrapper answers the first sub-step itself: the environment below is stepped once per environment step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory

N_STEPS = 7


def make_env() -> Any:
    return TimeLimitWrapper.wrap(StructuredCuttingEnv(cutting_env_factory()), max_episode_steps=N_STEPS)


def play_episode(env: Any) -> tuple[float, int]:
    """Return and number of sub-steps of one episode of random actions."""
    env.reset()
    total, n_substeps, done = 0.0, 0, False
    while not done:
        _, reward, done, _ = env.step(env.action_space.sample())
        total += reward
        n_substeps += 1
    return total, n_substeps


def test_statistics_count_environment_steps_and_sum_their_rewards() -> None:
    env = LogStatsWrapper.wrap(make_env())
    env.seed(3)
    returns = []
    for _ in range(3):
        total, n_substeps = play_episode(env)
        assert n_substeps == 2 * N_STEPS
        returns.append(total)
    env.reset()
    env.get_stats(LogStatsLevel.EPOCH).reduce()

    def value(name: str) -> Any:
        return env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name=name)

    assert value("mean") == pytest.approx(np.mean(returns))
    assert value("mean_step_count") == N_STEPS
    assert value("total_step_count") == 3 * N_STEPS


def test_a_trajectory_has_one_record_per_environment_step() -> None:
    env = TrajectoryRecordingWrapper.wrap(make_env())
    env.seed(3)
    total, _ = play_episode(env)
    records = env.episode_record.step_records
    assert len(records) == N_STEPS
    assert sum(record.reward for record in records) == pytest.approx(total)


@pytest.mark.parametrize("vector_env_class", [SequentialVectorEnv, SubprocVectorEnv])
def test_only_the_last_sub_step_completes_an_environment_step(vector_env_class: Any) -> None:
    env = vector_env_class([make_env, make_env])
    try:
        env.seed([1, 2])
        columns = RolloutGenerator(env).collect(
            RandomPolicy(env.action_spaces_dict), RolloutGenerator(env).allocate(2 * N_STEPS)
        )
        assert columns.is_dense()
        np.testing.assert_array_equal(columns.step_complete[:, 0], [False, True] * 2 * N_STEPS)
        assert [actor.step_key for actor in columns.actor_sequence or []] == [0, 1]
        assert columns.truncated.sum() == 4
        assert not columns.rewards[::2].any()
    finally:
        env.close()
