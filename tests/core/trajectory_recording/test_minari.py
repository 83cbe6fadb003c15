"""Minari data sets: those that Minari itself writes are learned from, and those of ours are read by it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from maze.core.agent.random_policy import RandomPolicy
from maze.core.errors import CheckpointError, ConfigError, ConfigImportError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.datasets.minari_data import is_minari, minari_path, read_minari, write_minari
from maze.core.trajectory_recording.datasets.trajectory_processor import IdentityWithNextObservationTrajectoryProcessor
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord, StateTrajectoryRecord
from maze.core.trajectory_recording.utils.trajectory_utils import TrajectoryWriterRegistry
from maze.core.trajectory_recording.writers.trajectory_writer import TrajectoryWriter
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.observation_stack_wrapper import ObservationStackWrapper
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper
from maze.maze_cli import main
from tests.train.parallelization.toy_envs import counting_env, two_step_env

minari = pytest.importorskip("minari")
EpisodeBuffer = minari.data_collector.EpisodeBuffer


@pytest.fixture(autouse=True)
def _in_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.chdir(tmp_path)


def collected(env_id: str, dataset_id: str, n_episodes: int = 3, n_steps: int = 12, **options: Any) -> list[Any]:
    """What Minari itself writes of a few episodes (its collector needs jax); its episodes."""
    env = gym.make(env_id, max_episode_steps=n_steps)
    env.action_space.seed(1)
    buffers = []
    for episode in range(n_episodes):
        observations, actions, outcomes = [env.reset(seed=episode)[0]], [], []
        while not outcomes or not any(outcomes[-1][1:]):
            actions.append(env.action_space.sample())
            observation, *outcome, _ = env.step(actions[-1])
            observations.append(observation)
            outcomes.append(outcome)
        rewards, terminations, truncations = (list(values) for values in zip(*outcomes, strict=True))
        seen, done = np.stack(observations), np.stack(actions)
        buffers.append(EpisodeBuffer(episode, None, None, seen, done, rewards, terminations, truncations))
    who = {"author": "author", "author_email": "a@b.c", "code_permalink": "https://b.c", "algorithm_name": "chance"}
    options = {"env": env, "data_format": "arrow", "description": "by chance", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it would like to know of another environment for evaluation
        minari.create_dataset_from_buffers(dataset_id=dataset_id, buffer=buffers, **who, **options)
    env.close()
    return list(minari.load_dataset(dataset_id).iterate_episodes())


def cart_pole() -> GymMazeEnv:
    return GymMazeEnv("CartPole-v1")


@pytest.mark.parametrize("data_format", ["arrow", "hdf5"])
def test_a_minari_data_set_is_read_as_steps(data_format: str) -> None:
    episodes = collected("CartPole-v1", "pole/random-v0", data_format=data_format)
    data = InMemoryDataset("minari:pole/random-v0", cart_pole)
    assert [len(steps) for steps in data.trajectory_references] == [len(episode.rewards) for episode in episodes]
    step = 0
    for episode in episodes:
        for t in range(len(episode.rewards)):
            (observation,), (action,), (actor,) = data[step]
            np.testing.assert_array_equal(observation["observation"], episode.observations[t])
            assert int(action["action"]) == int(episode.actions[t])
            assert tuple(actor) == (0, 0)
            step += 1
    assert len(InMemoryDataset(minari_path("pole/random-v0"), cart_pole)) == step, "by its directory as well"


def test_wrappers_of_the_training_run_are_applied_and_last_observations_are_known() -> None:
    episodes = collected("CartPole-v1", "pole/random-v0", n_steps=4)

    def stacked() -> Any:
        config = {"observation": "observation", "keep_original": False, "tag": None, "delta": False, "stack_steps": 2}
        return ObservationStackWrapper.wrap(cart_pole(), stack_config=[config])

    processor = IdentityWithNextObservationTrajectoryProcessor()
    data = InMemoryDataset("minari:pole/random-v0", stacked, trajectory_processor=processor)
    record = data.step_records[data.trajectory_references[1][-1]].substep_records[0]
    seen = np.asarray(episodes[1].observations)
    np.testing.assert_array_equal(np.sort(record.observation["observation"], 0), np.sort(seen[-3:-1], 0))
    np.testing.assert_array_equal(np.sort(record.next_observation["observation"], 0), np.sort(seen[-2:], 0))
    assert record.info == {"TimeLimit.truncated": True}


class Collected(TrajectoryWriter):
    def __init__(self) -> None:
        self.episodes: list[StateTrajectoryRecord] = []

    def write(self, episode_record: StateTrajectoryRecord) -> None:
        self.episodes.append(episode_record)


def recorded(env: Any, n_episodes: int = 2) -> list[StateTrajectoryRecord]:
    env, writer = TrajectoryRecordingWrapper.wrap(env), Collected()
    TrajectoryWriterRegistry.register_writer(writer)
    try:
        policy = RandomPolicy(env.action_spaces_dict)
        policy.seed(1)
        env.seed(1)
        for _ in range(n_episodes):
            observation, done = env.reset(), False
            while not done:
                observation, _, done, _ = env.step(policy.compute_action(observation, actor_id=env.actor_id()))
        env.publish_trajectory()
    finally:
        TrajectoryWriterRegistry.unregister_writer(writer)
    return writer.episodes


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Blackjack-v1"])
def test_episodes_of_a_gymnasium_environment_keep_its_own_observations_and_actions(env_id: str) -> None:
    episodes = recorded(GymMazeEnv(env_id))
    path = write_minari("some/episodes-v0", episodes, GymMazeEnv(env_id), description="by chance")
    assert is_minari(path)
    dataset = minari.load_dataset("some/episodes-v0")
    env = gym.make(env_id)
    assert (dataset.observation_space, dataset.action_space) == (env.observation_space, env.action_space)
    assert dataset.env_spec.id == env_id
    for episode, found in zip(episodes, dataset.iterate_episodes(), strict=True):
        steps = episode.step_records
        assert [float(reward) for reward in found.rewards] == [step.reward for step in steps[:-1]]
        assert bool(found.terminations[-1]) is not bool(found.truncations[-1])
        for t, step in enumerate(steps):
            at = tuple(part[t] for part in found.observations) if env_id == "Blackjack-v1" else found.observations[t]
            np.testing.assert_array_equal(np.asarray(at), np.asarray(step.maze_state))
            if t < len(steps) - 1:
                np.testing.assert_array_equal(found.actions[t], step.maze_action)
    again = list(read_minari(path, GymMazeEnv(env_id)))
    assert all(isinstance(episode, StateTrajectoryRecord) for episode in again)
    assert [step.done for step in again[0].step_records] == [step.done for step in episodes[0].step_records]


def test_other_environments_write_and_read_dictionaries() -> None:
    env = counting_env(((3, "truncated"), (2, "terminated")))
    path = write_minari("counting/random-v0", recorded(env), env)
    (first, second) = minari.load_dataset("counting/random-v0").iterate_episodes()
    assert np.asarray(first.observations["count"]).tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert np.asarray(first.observations["flag"]).tolist() == [0, 1, 0, 1]
    assert (first.truncations.tolist(), first.terminations.tolist()) == ([False, False, True], [False] * 3)
    assert second.terminations.tolist() == [False, True]
    (again, _) = read_minari(path, env)
    assert isinstance(again, SpacesTrajectoryRecord)
    assert [step.observations[0]["count"].tolist() for step in again.step_records] == [[0, 0], [1, 0], [2, 0]]
    assert again.step_records[-1].next_observations[0]["count"].tolist() == [3, 0]
    assert again.step_records[-1].infos == [{"TimeLimit.truncated": True}]
    assert again.step_records[0].rewards == [1.0]


def test_rollouts_of_spaces_are_recorded_as_observed() -> None:
    env = cart_pole()
    env.seed(1)
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(1)
    rollout = RolloutGenerator(env, terminate_on_done=True, record_next_observations=True).rollout(policy, 5)
    write_minari("pole/seen-v0", [rollout], env)
    (episode,) = minari.load_dataset("pole/seen-v0").iterate_episodes()
    assert np.asarray(episode.observations["observation"]).shape == (6, 4)
    assert episode.truncations.tolist() == [False] * 4 + [True], "what was left in the middle counts as cut off"


def test_mismatching_spaces_are_refused_and_both_are_named() -> None:
    collected("CartPole-v1", "pole/random-v0", n_episodes=1)
    with pytest.raises(
        ConfigError, match=r"recorded in another environment.*observations Box\(\[-1.*found Box.*Discrete\(2\)"
    ):
        InMemoryDataset("minari:pole/random-v0", lambda: GymMazeEnv("Pendulum-v1"))
    with pytest.raises(ConfigError, match=r"one action in each step.*cannot be learned from.*record_parquet"):
        InMemoryDataset("minari:pole/random-v0", two_step_env)
    with pytest.raises(ConfigError, match=r"sub-steps .* cannot be written"):
        write_minari("two/steps-v0", [], two_step_env())
    with pytest.raises(ConfigError, match="no steps to write"):
        write_minari("no/steps-v0", [], cart_pole())


def test_missing_and_damaged_data_sets_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"minari:pole/none-v0: there is no data set.*MINARI_DATASETS_PATH"):
        InMemoryDataset("minari:pole/none-v0", cart_pole)
    collected("CartPole-v1", "pole/random-v0", n_episodes=1)
    path = minari_path("pole/random-v0")
    (path / "data" / "metadata.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a readable Minari data set"):
        list(read_minari(path))


def test_missing_minari_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ConfigImportError, match=r'pip install "maze-rl\[minari\]>=1"'):
        InMemoryDataset("minari:pole/random-v0", cart_pole)


@pytest.mark.slow
def test_policies_are_cloned_from_it() -> None:
    collected("CartPole-v1", "pole/random-v0")
    command = ["-cn", "conf_train", "env.name=CartPole-v1", "algorithm=bc", "algorithm.n_epochs=1"]
    data = ["algorithm.n_eval_episodes=0", "runner.dataset.input_data=minari:pole/random-v0", "hydra.run.dir=clone"]
    assert main([*command, *data]) == 0
    assert Path("clone/state_dict.pt").is_file()


@pytest.mark.slow
def test_sac_starts_with_its_demonstrations() -> None:
    collected("Pendulum-v1", "pendulum/random-v0")
    command = ["-cn", "conf_train", "env.name=Pendulum-v1", "algorithm=sacfd", "model=flatten_concat"]
    short = ["critic=flatten_concat_state_action", "algorithm.n_epochs=1", "algorithm.epoch_length=1"]
    data = "runner.initial_demonstration_trajectories.input_data=minari:pendulum/random-v0"
    assert main([*command, *short, "algorithm.batch_size=4", data, "hydra.run.dir=run"]) == 0
    assert Path("run/state_dict.pt").is_file()
