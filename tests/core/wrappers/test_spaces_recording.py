"""Recording of episodes in terms of their spaces."""

from __future__ import annotations

import numpy as np
import pytest

from maze.core.trajectory_recording.records.trajectory_record import load_trajectory
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.recording_wrapper import SpacesRecordingWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.core.wrappers.test_small_wrappers import CountingEnv

ACTION = {"action": 1}


def test_every_episode_is_written_once_with_what_was_seen_done_and_got(tmp_path):
    env = SpacesRecordingWrapper.wrap(GymMazeEnv(CountingEnv(length=3)), output_dir=str(tmp_path / "records"))
    for n_steps in (3, 2):  # the second one is left before its end
        env.reset()
        for _ in range(n_steps):
            env.step(ACTION)
    last_id = env.get_episode_id()
    env.close()
    env.close()
    files = sorted((tmp_path / "records").glob("*.pkl"))
    records = {load_trajectory(file).id: load_trajectory(file) for file in files}
    assert sorted(len(record) for record in records.values()) == [2, 3]
    assert len(records[last_id]) == 2
    (whole,) = (record for record in records.values() if len(record) == 3)
    steps = [step.substep_records[0] for step in whole.step_records]
    assert [step.observation["observation"].tolist() for step in steps] == [[0], [1], [2]]
    assert [step.next_observation["observation"].tolist() for step in steps] == [[1], [2], [3]]
    assert [step.action for step in steps] == [ACTION] * 3
    assert [step.reward for step in steps] == [1.0, 2.0, 3.0]
    assert [step.done for step in steps] == [False, False, True]
    assert whole.is_done()


def test_sub_steps_are_recorded_with_their_actors():
    env = SpacesRecordingWrapper.wrap(
        TimeLimitWrapper.wrap(StructuredCuttingEnv(cutting_env_factory()), max_episode_steps=3), output_dir=None
    )
    env.reset()
    done = False
    while not done:
        done = env.step(env.action_space.sample())[2]
    record = env.episode_record
    assert [[actor.step_key for actor in step.actor_ids] for step in record.step_records] == [[0, 1]] * 3
    assert record.stack().substep_records[1].observation["selected_piece"].shape == (3, 2)


def test_arrays_that_the_environment_uses_again_do_not_change_the_record():
    class Reusing(CountingEnv):
        def step(self, action):
            observation, *rest = super().step(action)
            self.buffer[:] = observation
            return self.buffer, *rest

        buffer = np.zeros(1, np.float32)

    env = SpacesRecordingWrapper.wrap(GymMazeEnv(Reusing()), output_dir=None)
    env.reset()
    for _ in range(3):
        env.step(ACTION)
    steps = [step.substep_records[0] for step in env.episode_record.step_records]
    assert [step.next_observation["observation"].item() for step in steps] == [1.0, 2.0, 3.0]


def test_nothing_is_written_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = SpacesRecordingWrapper.wrap(GymMazeEnv(CountingEnv(2)), output_dir=None)
    env.reset()
    env.step(ACTION)
    env.step(ACTION)
    env.close()
    assert not list(tmp_path.iterdir())
    assert len(env.episode_record) == 2


@pytest.mark.parametrize("n_steps", [0])
def test_an_episode_without_a_step_is_not_written(tmp_path, n_steps):
    env = SpacesRecordingWrapper.wrap(GymMazeEnv(CountingEnv()), output_dir=str(tmp_path / "records"))
    env.reset()
    env.close()
    assert not (tmp_path / "records").exists()
