from __future__ import annotations

import os
import pickle
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, ConfigError, WorkerError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.datasets.in_memory_dataset import DataLoadWorker, InMemoryDataset
from maze.core.trajectory_recording.datasets.trajectory_processor import (
    DeadEndClippingTrajectoryProcessor,
    IdentityTrajectoryProcessor,
    IdentityWithNextObservationTrajectoryProcessor,
)
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import (
    SpacesTrajectoryRecord,
    StateTrajectoryRecord,
    load_trajectories,
    load_trajectory,
)
from maze.core.trajectory_recording.utils.trajectory_utils import SimpleTrajectoryRecordingSetup
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper
from maze_envs.logistics.dispatching.maze_env import dispatching_env
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.train.parallelization.toy_envs import counting_env

EPISODES = ((3, "truncated"), (2, "terminated"), (4, "terminated"))


def conversion_env():
    return counting_env(EPISODES)


class FailingProcessor(IdentityTrajectoryProcessor):
    def pre_process(self, trajectory):
        raise ZeroDivisionError("in the processor")


class KilledProcessor(IdentityTrajectoryProcessor):
    def pre_process(self, trajectory):
        os.kill(os.getpid(), 9)


@pytest.fixture
def trajectory_dir(tmp_path):
    """Three episodes of 3, 2 and 4 steps, in the order of their file names, as the rollout runners write them."""
    env = TrajectoryRecordingWrapper.wrap(counting_env(EPISODES))
    env.seed(5)
    with SimpleTrajectoryRecordingSetup(env, tmp_path / "trajectory_data"):
        for n_steps, _ in EPISODES:
            env.reset()
            for step in range(n_steps):
                env.step({"move": step})
    return tmp_path / "trajectory_data"


def dataset(source, processor=None, n_workers=1, **kwargs):
    return InMemoryDataset(
        input_data=source,
        conversion_env_factory=conversion_env,
        n_workers=n_workers,
        trajectory_processor=processor or IdentityTrajectoryProcessor(),
        deserialize_in_main_thread=kwargs.pop("deserialize_in_main_thread", False),
        **kwargs,
    )


def contents(data):
    return [
        ([np.asarray(o["count"]).tolist() for o in observations], [int(a["move"]) for a in actions], actors)
        for observations, actions, actors in (data[index] for index in range(len(data)))
    ]


def test_recorded_episodes_become_observations_and_actions_without_their_last_states(trajectory_dir):
    data = dataset(trajectory_dir)
    assert isinstance(data, Dataset)
    assert len(data) == 9
    lengths = sorted(len(steps) for steps in data.trajectory_references)
    assert lengths == [2, 3, 4]
    for steps in data.trajectory_references:
        assert [contents(data)[i][1] for i in steps] == [[n] for n in range(len(steps))]
        assert [data.step_records[i].is_done() for i in steps] == [False] * (len(steps) - 1) + [True]
    assert contents(data)[0][2] == [ActorID(0, 0)]


@pytest.mark.long
@pytest.mark.parametrize("in_main_thread", [False, True])
def test_worker_processes_give_the_same_data_in_the_same_order(trajectory_dir, in_main_thread):
    parallel = dataset(trajectory_dir, n_workers=2, deserialize_in_main_thread=in_main_thread)
    assert contents(parallel) == contents(dataset(trajectory_dir))
    assert parallel.trajectory_references == dataset(trajectory_dir).trajectory_references


def test_both_documented_names_of_the_source_work_and_the_one_without_a_default_wins(trajectory_dir):
    assert len(dataset(None, dir_or_file=trajectory_dir)) == 9
    assert len(dataset("trajectory_data", dir_or_file=str(trajectory_dir))) == 9
    first = InMemoryDataset.list_trajectory_files(trajectory_dir)[0]
    assert len(dataset([first, first])) == 2 * len(dataset(first))


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_file_may_hold_a_list_of_trajectories(trajectory_dir, tmp_path, kind, n_workers):
    trajectories = [load_trajectory(file) for file in InMemoryDataset.list_trajectory_files(trajectory_dir)]
    together = tmp_path / "all.pkl"
    together.write_bytes(pickle.dumps(kind(trajectories)))
    assert [one.id for one in load_trajectories(together)] == [one.id for one in trajectories]
    assert contents(dataset([together, together], n_workers=n_workers)) == 2 * contents(dataset(trajectory_dir))
    with pytest.raises(CheckpointError, match=r"found 3.*load_trajectories"):
        load_trajectory(together)
    together.write_bytes(pickle.dumps([*trajectories, "no trajectory"]))
    with pytest.raises(CheckpointError, match="a list of them, found an object of type str"):
        dataset(together)


def test_the_processor_may_come_as_a_configuration(trajectory_dir):
    module = DeadEndClippingTrajectoryProcessor.__module__
    config = {"_target_": f"{module}.DeadEndClippingTrajectoryProcessor", "clip_k": 1}
    assert len(dataset(trajectory_dir, config)) == 3 + 1 + 3


def test_steps_load_in_batches_with_the_data_loader(trajectory_dir):
    observations, actions, actor_ids = next(iter(DataLoader(dataset(trajectory_dir), batch_size=9)))
    assert observations[0]["count"].shape[0] == 9
    assert sorted(actions[0]["move"].tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 3]
    assert actor_ids[0].agent_id.tolist() == [0] * 9


def test_a_failure_in_a_worker_names_the_file_and_keeps_the_traceback(trajectory_dir):
    first, second = (file.name for file in InMemoryDataset.list_trajectory_files(trajectory_dir)[:2])
    both = rf"(worker 0 [^\n]*{first}|worker 1 [^\n]*{second})"  # each fails with its first file
    with pytest.raises(WorkerError, match=rf"(?s){both}.*ZeroDivisionError: in the processor"):
        dataset(trajectory_dir, FailingProcessor(), n_workers=2)


def test_a_killed_worker_is_reported_with_its_signal(trajectory_dir):
    with pytest.raises(WorkerError, match=r"worker \d .* was killed by signal 9 \(SIGKILL\) during `load` of"):
        dataset(trajectory_dir, KilledProcessor(), n_workers=2)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_file_with_code_is_refused_before_the_code_runs(tmp_path, monkeypatch, n_workers):
    monkeypatch.chdir(tmp_path)
    for name in ("a.pkl", "b.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(CheckpointError, match=r"[ab]\.pkl: contains the type `(posix|os)\.mkdir`"):
        dataset(tmp_path, n_workers=n_workers)
    assert not (tmp_path / "executed").exists()


class PrivateState:
    """A type of a user's project, which no file may bring along unasked."""

    count = np.zeros(2, dtype=np.float32)

    def __getitem__(self, key):
        return self.count


@pytest.mark.long
@pytest.mark.parametrize("n_workers", [1, 2])
def test_types_of_the_project_are_loaded_when_they_are_named_or_the_environments_own(tmp_path, n_workers):
    for name in "ab":
        trajectory = StateTrajectoryRecord(name)
        trajectory.append(StateRecord(PrivateState(), {"move": 1}, None, 1.0, True, {}, {}))
        (tmp_path / f"{name}.pkl").write_bytes(pickle.dumps(trajectory))
    arguments = {"trajectory_processor": SkipConversion(), "n_workers": n_workers}
    foreign = partial(GymMazeEnv, "CartPole-v1")
    with pytest.raises(CheckpointError, match="PrivateState"):
        InMemoryDataset(tmp_path, foreign, **arguments)
    assert len(InMemoryDataset(tmp_path, foreign, extra_types=[PrivateState], **arguments)) == 2
    for is_read_here in (False, True):  # the environment is of the same package as the state
        read = InMemoryDataset(tmp_path, conversion_env, deserialize_in_main_thread=is_read_here, **arguments)
        assert len(read) == 2


class SkipConversion(IdentityTrajectoryProcessor):
    @staticmethod
    def convert_trajectory_with_env(trajectory, conversion_env):
        return [StructuredSpacesRecord([SpacesRecord(ActorID(0, 0))])]


def test_a_place_without_trajectories_is_named_with_how_to_make_some(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist.*record_trajectory=true"):
        dataset(tmp_path / "nowhere")
    (tmp_path / "log.csv").write_text("episode_id,step\na,0\n")
    with pytest.raises(CheckpointError, match=r"log\.csv is no trajectory file: expected .*parquet.*read_csv"):
        dataset(tmp_path / "log.csv")
    with pytest.raises(CheckpointError, match="has no trajectory files"):
        dataset(tmp_path)


def spaces_trajectory(name, n_steps, is_truncated=False, **extra):
    trajectory = SpacesTrajectoryRecord(name)
    for step in range(n_steps):
        is_last = step == n_steps - 1
        record = SpacesRecord(
            ActorID("only", 0),
            observation={"x": np.array([step], dtype=np.float32)},
            action={"a": step},
            reward=1.0,
            done=is_last,
            info={"TimeLimit.truncated": True} if is_last and is_truncated else {},
            **extra,
        )
        trajectory.append(StructuredSpacesRecord([record]))
    return trajectory


def actions_of(processed):
    return [[step.actions[0]["a"] for step in steps] for steps in processed]


def test_trajectories_of_spaces_need_no_environment(tmp_path):
    path = tmp_path / "all.pkl"
    path.write_bytes(pickle.dumps([spaces_trajectory("a", 3), spaces_trajectory("b", 2)]))
    data = InMemoryDataset(path)
    assert [len(steps) for steps in data.trajectory_references] == [3, 2]
    assert [data[i][1] for i in range(5)] == [[{"a": 0}], [{"a": 1}], [{"a": 2}], [{"a": 0}], [{"a": 1}]]
    data.append(spaces_trajectory("c", 1))
    assert len(data) == 6


def test_states_cannot_be_converted_without_an_environment(trajectory_dir):
    with pytest.raises(ConfigError, match="conversion_env_factory"):
        InMemoryDataset(trajectory_dir)
    with pytest.raises(ConfigError, match=r"MazeEnv cannot convert its states and actions \(KeyError.*recording"):
        InMemoryDataset(trajectory_dir, conversion_env_factory=dispatching_env)


@pytest.mark.parametrize(
    ("is_truncated", "clip_k", "expected"),
    [
        (False, 2, [[0, 1]]),
        (False, 0, [[0, 1, 2, 3]]),
        (False, 9, []),  # nothing is left of it
        (True, 2, [[0, 1, 2, 3]]),  # cut off, which is not a dead end
    ],
)
def test_dead_end_clipping_drops_the_last_steps_of_terminated_episodes(is_truncated, clip_k, expected):
    trajectory = spaces_trajectory("a", 4, is_truncated)
    processed = DeadEndClippingTrajectoryProcessor(clip_k=clip_k).process(trajectory, None)
    assert actions_of(processed) == expected
    assert len(trajectory) == 4  # what was recorded stays as it is


def test_dead_end_clipping_of_recorded_states_leaves_their_cut_off_episodes_alone(trajectory_dir):
    data = dataset(trajectory_dir, DeadEndClippingTrajectoryProcessor(clip_k=2))
    assert sorted(len(steps) for steps in data.trajectory_references) == [2, 3]  # 4 - 2, 3; nothing is left of 2


def test_next_observations_follow_and_the_last_one_is_that_of_the_last_state(trajectory_dir):
    data = dataset(trajectory_dir, IdentityWithNextObservationTrajectoryProcessor())
    for steps in data.trajectory_references:
        records = [data.step_records[index].substep_records[0] for index in steps]
        for record, following in pairwise(records):
            np.testing.assert_array_equal(record.next_observation["count"], following.observation["count"])
        # the toy environment counts its steps in the first component
        assert records[-1].next_observation["count"][0] == len(records)


def test_the_last_step_is_dropped_if_the_environment_cannot_convert_a_state_without_an_action(tmp_path):
    env = TrajectoryRecordingWrapper.wrap(cutting_env_factory())
    with SimpleTrajectoryRecordingSetup(env, tmp_path):
        env.reset()
        for _ in range(3):
            env.step(env.action_space.sample())
    processor = IdentityWithNextObservationTrajectoryProcessor()
    structured = StructuredCuttingEnv(cutting_env_factory())  # as documented, it divides states with their actions
    trajectory = load_trajectory(next(tmp_path.iterdir()), extra_types=["tests.core.env.tutorial_cutting.*"])
    (steps,) = processor.process(trajectory, structured)
    assert [len(step.substep_records) for step in steps] == [2, 2]
    assert all(substep.next_observation is not None for step in steps for substep in step.substep_records)


@pytest.mark.parametrize(("is_truncated", "n_steps"), [(False, 3), (True, 2)])
def test_a_last_step_whose_next_observation_is_unknown_is_dropped_unless_it_terminated(is_truncated, n_steps):
    processor = IdentityWithNextObservationTrajectoryProcessor()
    trajectory = spaces_trajectory("a", 3, is_truncated)
    (steps,) = processor.process(trajectory, None)
    assert [float(step.next_observations[0]["x"][0]) for step in steps] == [1.0, 2.0, 2.0][:n_steps]
    assert trajectory.step_records[0].next_observations == [None]


def test_the_worker_reports_one_item_for_each_source():
    class Queue(list):
        put = list.append

    queue = Queue()
    sources = [spaces_trajectory("a", 2), spaces_trajectory("b", 1)]
    DataLoadWorker.run(None, sources, queue, IdentityTrajectoryProcessor())
    assert [actions_of(item) for item in queue] == [[[0, 1]], [[0]]]


@pytest.mark.parametrize("seed", range(5))
def test_a_random_split_keeps_trajectories_whole_and_loses_no_step(seed):
    data = InMemoryDataset([spaces_trajectory(str(n), n) for n in range(1, 9)])
    parts = data.random_split([28, 8], generator=torch.Generator().manual_seed(seed))
    indices = [set(part.indices) for part in parts]
    assert indices[0] | indices[1] == set(range(36))
    assert not indices[0] & indices[1]
    for steps in data.trajectory_references:
        assert set(steps) <= indices[0] or set(steps) <= indices[1]
    assert all(part for part in indices)
    assert abs(len(indices[1]) - 8) <= 8


def test_a_random_split_depends_on_its_generator_only():
    data = InMemoryDataset([spaces_trajectory(str(n), 2) for n in range(10)])

    def split(seed):
        return [part.indices for part in data.random_split([10, 10], generator=torch.Generator().manual_seed(seed))]

    assert split(3) == split(3)
    assert any(split(3) != split(other) for other in range(4, 8))


def test_a_single_trajectory_is_split_into_consecutive_pieces():
    data = InMemoryDataset(spaces_trajectory("a", 10))
    first, second = data.random_split([7, 3])
    assert (first.indices, second.indices) == (list(range(7)), [7, 8, 9])


def test_lengths_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match=r"\[3, 3\] do not add up to the 5 steps"):
        InMemoryDataset(spaces_trajectory("a", 5)).random_split([3, 3])


@pytest.mark.parametrize("records_next", [False, True])
def test_the_end_of_an_episode_is_not_followed_by_the_beginning_of_the_next_one(records_next):
    """One record of 10 steps: episodes of 3 (cut off), 2 (terminated), 4 (terminated), and one step of another."""
    env = counting_env(EPISODES)
    policy = RandomPolicy(env.action_spaces_dict)
    record = RolloutGenerator(env, record_next_observations=records_next).rollout(policy, 10)
    data = dataset(record, IdentityWithNextObservationTrajectoryProcessor())
    found = []
    for steps in data.trajectory_references:
        for substep in (data.step_records[index].substep_records[0] for index in steps):
            time, episode = substep.observation["count"].tolist()
            is_terminated = substep.done and not substep.info
            found.append((episode, time))
            following = substep.next_observation["count"].tolist()
            assert is_terminated or following == [time + 1, episode]
            assert following[1] == episode, "nothing of another episode, whether it counts or not"
    whole = [(episode, time) for episode, (n, _) in enumerate(EPISODES) for time in range(n)]
    if records_next:
        assert found == [*whole, (3, 0)]
        assert len(data.trajectory_references) == 1
    else:  # what followed the truncation and the last step is not known
        assert found == [step for step in whole if step != (0, 2)]
        assert [len(steps) for steps in data.trajectory_references] == [2, 6]
