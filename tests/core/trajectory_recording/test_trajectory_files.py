from __future__ import annotations

import importlib
import logging
import os
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.replay_recorded_actions_policy import ReplayRecordedActionsPolicy
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, EnvironmentContractError
from maze.core.events.event_record import EventRecord
from maze.core.log_stats.log_stats import StatsContext
from maze.core.trajectory_recording.records import trajectory_record
from maze.core.trajectory_recording.records.trajectory_record import (
    ActionRecord,
    StateTrajectoryRecord,
    load_trajectory,
)
from maze.core.trajectory_recording.utils.monitoring_setup import MonitoringSetup
from maze.core.trajectory_recording.utils.trajectory_utils import SimpleTrajectoryRecordingSetup
from maze.core.trajectory_recording.writers.trajectory_writer import TrajectoryWriter
from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile
from maze.core.trajectory_recording.writers.trajectory_writer_registry import TrajectoryWriterRegistry
from maze.core.utils.config_utils import EnvFactory
from maze.core.utils.safe_pickle import register_safe_types, registered_safe_types
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.trajectory_recording_wrapper import (
    ActionRecordingWrapper,
    ParquetRecordingWrapper,
    TrajectoryRecordingWrapper,
)
from tests.core.env.test_maze_env import relay_env
from tests.train.parallelization.toy_envs import counting_env, two_step_env


class Collected(TrajectoryWriter):
    def __init__(self) -> None:
        self.episodes: list[StateTrajectoryRecord] = []

    def write(self, episode_record: StateTrajectoryRecord) -> None:
        self.episodes.append(episode_record)


@pytest.fixture
def writer():
    writer = Collected()
    TrajectoryWriterRegistry.register_writer(writer)
    yield writer
    TrajectoryWriterRegistry.unregister_writer(writer)


def test_an_episode_is_recorded_with_the_states_its_actions_were_taken_in(writer):
    env = TrajectoryRecordingWrapper.wrap(counting_env(((3, "truncated"),)))
    env.seed(5)
    env.reset()
    episode_id = env.get_episode_id()
    for move in (4, 2, 1):
        env.step({"move": move})
    assert writer.episodes == []
    env.reset()
    (episode,) = writer.episodes
    assert episode.id == episode_id
    assert [step.maze_state["count"] for step in episode.step_records] == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert [step.maze_action and step.maze_action["move"] for step in episode.step_records] == [4, 2, 1, None]
    assert [step.reward for step in episode.step_records] == [1, 2, 3, None]
    assert [step.done for step in episode.step_records] == [False, False, True, None]
    assert [step.env_time for step in episode.step_records] == [0, 1, 2, 3]
    assert episode.step_records[2].info == {"TimeLimit.truncated": True}


def test_a_step_of_several_sub_steps_is_one_record(writer):
    env = TrajectoryRecordingWrapper.wrap(two_step_env(2))
    env.reset()
    for _ in range(2):
        env.step({"item": 3})
        env.step({"where": np.zeros(2)})
    env.publish_trajectory()
    (episode,) = writer.episodes
    assert [step.reward for step in episode.step_records] == [13, 23, None]
    assert [step.maze_state["time"] for step in episode.step_records] == [[0], [1], [2]]


def test_an_episode_without_steps_is_not_recorded(writer):
    env = TrajectoryRecordingWrapper.wrap(counting_env())
    env.reset()
    env.reset()
    assert writer.episodes == []


def test_the_recording_of_a_clone_goes_its_own_way(writer):
    env, clone = (TrajectoryRecordingWrapper.wrap(GymMazeEnv("CartPole-v1")) for _ in range(2))
    env.reset()
    env.step({"action": 0})
    clone.clone_from(env)
    clone.step({"action": 1})
    assert len(env.episode_record.step_records) == 1
    assert len(clone.episode_record.step_records) == 2
    assert clone.episode_record.id == env.episode_record.id


N_STORED_STEPS = {
    ActionRecordingWrapper: lambda path: len(ActionRecord.load(path)),
    TrajectoryRecordingWrapper: lambda path: len(load_trajectory(path).step_records) - 1,
}
if find_spec("pyarrow") is not None:
    N_STORED_STEPS[ParquetRecordingWrapper] = lambda path: len(pd.read_parquet(path))


@pytest.mark.parametrize("recorder", N_STORED_STEPS)
def test_an_episode_is_written_by_the_environment_that_began_it_and_by_no_copy(recorder, tmp_path):
    def begun():
        env = recorder.wrap(GymMazeEnv("CartPole-v1"), **arguments)
        env.seed(1)
        env.reset()
        return env

    def n_steps_to_the_end(env):
        n_steps, done = 0, False
        while not done:
            n_steps, done = n_steps + 1, env.step({"action": 0})[2]
        env.reset()
        return n_steps

    arguments = {} if recorder is TrajectoryRecordingWrapper else {"output_dir": tmp_path}
    writer = TrajectoryWriterFile(tmp_path)
    TrajectoryWriterRegistry.register_writer(writer)
    try:
        env, copied = begun(), begun()
        episode_id = env.get_episode_id()
        env.step({"action": 0})
        copied.clone_from(env)
        n_planned = n_steps_to_the_end(copied)
        copied.clone_from(env)
        env.step({"action": 1})
        env.clone_from(copied)  # the step was only tried
        assert n_steps_to_the_end(copied) == n_planned
        assert not list(tmp_path.iterdir())
        assert n_steps_to_the_end(env) == n_planned
    finally:
        TrajectoryWriterRegistry.unregister_writer(writer)
    (file,) = tmp_path.iterdir()
    assert (file.stem, N_STORED_STEPS[recorder](file)) == (episode_id, n_planned + 1)


@pytest.mark.parametrize("recorder", N_STORED_STEPS)
def test_a_step_without_info_is_recorded_like_one_with_an_empty_info(recorder, tmp_path):
    env = relay_env(info=None, last=6)
    if recorder is TrajectoryRecordingWrapper:
        with SimpleTrajectoryRecordingSetup(env := recorder.wrap(env), tmp_path):
            play_relay(env)
    else:
        env = recorder.wrap(env, output_dir=tmp_path)
        env.propensities = lambda records: np.full(len(records), 0.5)
        play_relay(env)
    (file,) = tmp_path.iterdir()
    assert N_STORED_STEPS[recorder](file) == (2 if recorder is TrajectoryRecordingWrapper else 6)


def play_relay(env):
    env.reset()
    while not env.step({"number": 0})[2]:
        pass
    env.reset()


def test_actions_of_an_episode_with_any_name_are_stored_and_found(tmp_path, monkeypatch):
    env = ActionRecordingWrapper.wrap(GymMazeEnv("CartPole-v1"), output_dir=tmp_path)
    monkeypatch.setattr(GymMazeEnv, "get_episode_id", lambda env: "day 1/line 2")
    observation = env.reset()
    env.step({"action": 1})
    env.reset()
    assert [path.name for path in tmp_path.iterdir()] == ["day_1_line_2.json"]
    policy = ReplayRecordedActionsPolicy(tmp_path)
    assert policy.compute_action(observation, None, env, env.actor_id())["action"] == 1


def test_a_full_disk_costs_records_of_actions_and_gives_one_warning(tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("maze.core.trajectory_recording.records.trajectory_record.write_whole", full)
    env = ActionRecordingWrapper.wrap(GymMazeEnv("CartPole-v1"), output_dir=tmp_path)
    for _ in range(3):
        env.reset()
        env.step({"action": 0})
    assert caplog.text.count("No space left on device") == 1


def test_a_copy_keeps_its_own_identities_of_future_episodes():
    env, copied = GymMazeEnv("CartPole-v1"), GymMazeEnv("CartPole-v1")
    ids = set()
    for number, each in enumerate((env, copied)):
        each.seed(number)
        each.reset()
        ids.add(each.get_episode_id())
    copied.clone_from(env)
    assert copied.get_episode_id() == env.get_episode_id()
    for each in (env, copied):
        each.reset()
        ids.add(each.get_episode_id())
    assert len(ids) == 4


def test_files_are_named_by_episode_and_load_without_further_permissions(tmp_path):
    env = TrajectoryRecordingWrapper.wrap(GymMazeEnv("CartPole-v1"))
    env.seed(1)
    with SimpleTrajectoryRecordingSetup(env, tmp_path / "trajectory_data"):
        ids = []
        for _ in range(2):
            observation, done = env.reset(), False
            ids.append(env.get_episode_id())
            while not done:
                observation, _, done, _ = env.step({"action": int(observation["observation"][3] > 0)})
    files = {path.name for path in (tmp_path / "trajectory_data").iterdir()}
    assert files == {f"{episode_id}.pkl" for episode_id in ids}
    trajectory = load_trajectory(tmp_path / "trajectory_data" / f"{ids[0]}.pkl")
    assert isinstance(trajectory, StateTrajectoryRecord)
    assert trajectory.id == ids[0]
    assert trajectory.step_records[-2].done
    assert TrajectoryWriterRegistry.writers == []


class OwnState:
    def __init__(self, value: int) -> None:
        self.value = value


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def stored(state: Any, directory: Path) -> Path:
    from maze.core.trajectory_recording.records.state_record import StateRecord

    episode = StateTrajectoryRecord("episode")
    episode.append(StateRecord(state, None, None, None, None, None, {}))
    TrajectoryWriterFile(directory).write(episode)
    return directory / "episode.pkl"


def test_code_in_a_trajectory_is_refused_and_not_run(tmp_path):
    path = stored(Malicious(tmp_path / "owned"), tmp_path)
    with pytest.raises(CheckpointError, match=r"episode.pkl: contains the type `posix.mkdir`.*allow_pickle=True"):
        load_trajectory(path)
    assert not (tmp_path / "owned").exists()


def test_types_of_ones_own_are_allowed_by_class_by_name_by_pattern_or_for_good(tmp_path):
    path = stored(OwnState(3), tmp_path)
    with pytest.raises(CheckpointError, match=rf"`{OwnState.__module__}.OwnState`.*extra_types"):
        load_trajectory(path)
    name = f"{OwnState.__module__}.OwnState"
    for extra_types in ([OwnState], [name], [f"{OwnState.__module__}.*"]):
        assert load_trajectory(path, extra_types=extra_types).step_records[0].maze_state.value == 3
    assert load_trajectory(path, allow_pickle=True).step_records[0].maze_state.value == 3
    assert name not in registered_safe_types()
    register_safe_types(OwnState)
    assert load_trajectory(path).step_records[0].maze_state.value == 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not a readable pickle"),
        (b"<html>", "not a readable pickle"),
        (pickle.dumps([1]), "found an object of type int"),
    ],
)
def test_damaged_and_foreign_files_are_named(content, expected, tmp_path):
    path = tmp_path / "some.pkl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"some.pkl.*{expected}"):
        load_trajectory(path)
    with pytest.raises(CheckpointError, match=r"missing\.pkl: cannot be read"):
        load_trajectory(tmp_path / "missing.pkl")


def test_a_file_cut_off_is_an_error(tmp_path):
    path = stored({"a": np.arange(100)}, tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"episode.pkl: .*truncated"):
        load_trajectory(path)


def test_a_state_that_cannot_be_stored_is_an_error_and_leaves_no_file(tmp_path):
    with pytest.raises(EnvironmentContractError, match="Episode episode cannot be stored"):
        stored({"function": lambda: None}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_one_warning_and_the_writer(caplog):
    class FullDisk(TrajectoryWriter):
        def write(self, episode_record: StateTrajectoryRecord) -> None:
            raise OSError(28, "No space left on device")

    TrajectoryWriterRegistry.register_writer(FullDisk())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            TrajectoryWriterRegistry.record_trajectory_data(StateTrajectoryRecord("x"))
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert TrajectoryWriterRegistry.writers == []


def test_monitoring_records_trajectories_events_and_statistics(tmp_path, capsys):
    with StatsContext(), MonitoringSetup(counting_env(((2, "terminated"),)), log_dir=str(tmp_path)) as env:
        for _ in range(2):
            env.reset()
            env.step({"move": 1})
            env.step({"move": 2})
    assert len(list((tmp_path / "trajectory_data").iterdir())) == 2
    assert list((tmp_path / "event_logs").iterdir())
    assert "total_episode_count" in capsys.readouterr().out


FOREIGN_MODULE = """
import os
from abc import ABC

class DockEvents(ABC):
    def ship_docked(self, name: str):
        '''A ship is in the dock.'''

class DockState:
    n_ships = 2

def sink():
    os._exit(1)
"""


@pytest.fixture
def dock(tmp_path, monkeypatch):
    """A project's module, imported while an episode is recorded and forgotten before it is read."""
    (tmp_path / "dock_project.py").write_text(FOREIGN_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("dock_project")
    sys.modules.pop("dock_project", None)


def test_events_and_states_of_a_project_are_read_only_if_its_modules_are_named(dock, tmp_path):
    path = stored(
        (EventRecord(dock.DockEvents, dock.DockEvents.ship_docked, {"name": "Zora"}), dock.DockState()), tmp_path
    )
    del sys.modules["dock_project"]
    with pytest.raises(CheckpointError, match=r"`dock_project\.DockEvents`.*extra_types"):
        load_trajectory(path)
    assert "dock_project" not in sys.modules  # refused before anything of it was imported
    event, state = load_trajectory(path, extra_types=["dock_project.*"]).step_records[0].maze_state
    assert event.interface_method is sys.modules["dock_project"].DockEvents.ship_docked
    assert (event.attributes, state.n_ships) == ({"name": "Zora"}, 2)


class Calling:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        return self.function, ()


def test_naming_a_module_allows_neither_its_functions_nor_what_it_imports(dock, tmp_path):
    for function, name in ((dock.sink, "dock_project.sink"), (os.getcwd, "posix.getcwd")):
        path = stored(Calling(function), tmp_path)
        with pytest.raises(CheckpointError, match=f"`{name}`"):
            load_trajectory(path, extra_types=["dock_project.*"])


LISTED = sorted((trajectory_record._DATA_CLASSES | trajectory_record._EVENTS) - {"maze_envs.*"})


@pytest.mark.parametrize("name", LISTED)
def test_each_class_that_may_be_loaded_is_where_it_is_named(name):
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    assert (found.__module__, found.__qualname__) == (module, attribute)


ENVIRONMENTS = sorted((Path(__file__).resolve().parents[3] / "maze_envs").rglob("conf/env/*.yaml"))


@pytest.mark.parametrize("file", ENVIRONMENTS, ids=lambda file: file.stem)
def test_trajectories_of_the_shipped_environments_are_loaded_without_permission(file, tmp_path):
    config = OmegaConf.to_container(OmegaConf.create({"env": OmegaConf.load(file)}), resolve=True)
    env = TrajectoryRecordingWrapper.wrap(EnvFactory(config["env"])())
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(1)
    env.seed(1)
    observation = env.reset()
    with SimpleTrajectoryRecordingSetup(env, tmp_path):
        for _ in range(12):
            observation, _, done, _ = env.step(policy.compute_action(observation, actor_id=env.actor_id()))
            if done:
                break
    (path,) = tmp_path.glob("*.pkl")
    episode = load_trajectory(path)
    assert len(episode.step_records) > 1
    assert type(episode.renderer) is type(env.get_renderer())


class Level:
    """A state of an unregistered type."""

    def __init__(self, value):
        self.value = value


def test_the_environment_that_was_recorded_allows_what_its_own_package_stores(tmp_path):
    path = stored(Level(3), tmp_path)
    with pytest.raises(CheckpointError, match=r"\.Level`"):
        load_trajectory(path, env=GymMazeEnv("CartPole-v1"))
    assert load_trajectory(path, env=counting_env()).step_records[0].maze_state.value == 3


def test_actors_may_be_numbered_by_numpy(tmp_path):
    record = ActionRecord("episode", seed=3)
    record.append(ActorID(np.int64(1), np.flatnonzero([False, True])[0]), {"move": np.int64(2)})
    loaded = ActionRecord.load(record.save(tmp_path))
    assert (loaded.seed, loaded.actions) == (3, [(ActorID(1, 1), {"move": 2})])
