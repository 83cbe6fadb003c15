"""Recorded episodes of simulations with sub-steps of their own: what each actor saw and did is there."""

import copy
import pickle

import numpy as np
import pytest

from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError
from maze.core.rendering.keyboard_controlled_trajectory_viewer import KeyboardControlledTrajectoryViewer
from maze.core.rendering.renderer import Renderer
from maze.core.rendering.trajectory_page import _by_substep, step_summaries
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.datasets.trajectory_processor import IdentityWithNextObservationTrajectoryProcessor
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.wrappers.observation_stack_wrapper import ObservationStackWrapper
from maze.core.wrappers.random_reset_wrapper import StepSkipWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper
from maze.core.wrappers.wrapper import Wrapper
from tests.train.parallelization.toy_envs import coming_and_going_env, hierarchical_env, two_step_env
from tests.train.trainers.imitation.depot import Choice, DepotEnv, Loading

CHOOSE, CUT = ActorID("choose", 0), ActorID("cut", 0)


def depot():
    return DepotEnv()


def depot_of_several_turns():
    """One step: a choice, then two loaders who take two turns each."""
    return DepotEnv(loaders=(0, 1, 0, 1))


ENVS = [two_step_env, hierarchical_env, coming_and_going_env, depot, depot_of_several_turns]


class Watching(Wrapper):
    """Keeps what the actors see, do and get."""

    keeps_observations_and_actions = True

    def reset(self):
        observation = self.env.reset()
        self.steps, self.seen, self.begins = [], copy.deepcopy(observation), True
        return observation

    def step(self, action):
        if self.begins:
            self.steps.append(StructuredSpacesRecord())
        record = SpacesRecord(self.env.actor_id(), self.seen, copy.deepcopy(action))
        observation, record.reward, record.done, info = self.env.step(action)
        record.info, record.next_observation = copy.deepcopy(info), copy.deepcopy(observation)
        self.seen = record.next_observation
        self.steps[-1].append(record)
        self.begins = self.env.context.is_step_complete
        return observation, record.reward, record.done, info


def finished(env, policy=None, n_steps=None):
    """The recording of an episode of random actions."""
    policy = policy or RandomPolicy(env.action_spaces_dict)
    policy.seed(3)
    env.seed(7)
    observation, done = env.reset(), False
    while not done and n_steps != env.get_env_time():
        actor = env.actor_id()
        observation, _, done, _ = env.step(policy.compute_action(observation, actor_id=actor))
    record = env.episode_record
    env.publish_trajectory()
    return record


def test_each_sub_step_is_recorded_with_its_actor_state_action_and_reward():
    env = TrajectoryRecordingWrapper.wrap(two_step_env(2))
    env.reset()
    for item in (3, 1):
        env.step({"item": item})
        env.step({"where": np.zeros(2)})
    record = env.episode_record
    env.publish_trajectory()
    first, second, last = record.step_records
    assert [step.actor_id for step in record.step_records] == [CHOOSE] * 3
    assert [substep.actor_id for substep in second.substeps] == [CHOOSE, CUT]
    assert [substep.maze_state["choice"][1] for substep in second.substeps] == [3, 1], "the state before, and after"
    assert second.substeps[0].maze_state is second.maze_state
    assert second.substeps[0].maze_action == {"item": 1}
    assert second.substeps[1].maze_action is second.maze_action
    assert [substep.reward for substep in first.substeps] == [0, 13]
    assert first.reward == 13
    assert [substep.done for substep in second.substeps] == [False, True]
    assert [substep.env_time for substep in second.substeps] == [1, 1]
    assert second.substeps[1].step_event_log is second.step_event_log
    assert last.maze_action is None
    assert last.substeps == ()


@pytest.mark.parametrize("make_env", ENVS)
def test_recorded_states_and_observations_agree(make_env):
    env = TrajectoryRecordingWrapper.wrap(Watching(make_env()))
    record = finished(env)
    processor = IdentityWithNextObservationTrajectoryProcessor()
    of_states = InMemoryDataset(pickle.loads(pickle.dumps(record)), make_env, trajectory_processor=processor)
    assert len(of_states) == len(env.env.steps) == len(record) - 1
    for step, expected in zip(of_states.step_records, env.env.steps, strict=True):
        assert step.actor_ids == expected.actor_ids
        for name in ("rewards", "dones", "infos"):
            assert getattr(step, name) == getattr(expected, name)
        for name in ("observations", "actions", "next_observations"):
            np.testing.assert_equal(getattr(step, name), getattr(expected, name))


def test_an_environment_with_one_actor_is_recorded_without_actor_fields():
    env = TrajectoryRecordingWrapper.wrap(two_step_env(2))
    type(env.core_env).agent_counts_dict, counts = {"choose": 1}, type(env.core_env).agent_counts_dict
    try:
        record = finished(env)
    finally:
        type(env.core_env).agent_counts_dict = counts
    assert all(step.actor_id is None and not step.substeps for step in record.step_records)


def test_trajectories_of_earlier_releases_are_read_and_converted():
    stored = StateRecord({"time": [4], "choice": [4, 2]}, {"item": 2, "where": np.zeros(2)}, None, 7.0, True, {}, {})
    for name in ("actor_id", "substeps"):
        stored.__dict__.pop(name, None)
    loaded = pickle.loads(pickle.dumps(stored))
    assert list(loaded.by_substep()) == [loaded]
    converted = StructuredSpacesRecord.converted_from(loaded, two_step_env(), first_step_in_episode=True)
    assert converted.actor_ids == [CHOOSE, CUT]
    assert converted.rewards == [0.0, 7.0]


def test_sub_steps_that_the_environment_does_not_have_are_named():
    record = finished(TrajectoryRecordingWrapper.wrap(depot()))
    expected = r"found 'choose'.* known sub-steps: \['walk', 'grasp'\].*another environment"
    with pytest.raises(EnvironmentContractError, match=expected):
        InMemoryDataset(record, hierarchical_env)


def test_an_episode_cut_off_within_a_step_keeps_the_sub_steps_taken():
    env = TrajectoryRecordingWrapper.wrap(depot())
    env.reset()
    env.step({"parcel": 1})
    assert env.episode_record.step_records == []
    env.publish_trajectory()
    env.reset()
    env.step({"parcel": 2})
    env.step({"cart": 0})
    env.step({"parcel": 0})
    record = env.episode_record
    env.publish_trajectory()
    assert [step.maze_action for step in record.step_records] == [Loading(0), None]
    assert record.step_records[-1].actor_id == CHOOSE
    assert record.step_records[-1].maze_state.chosen is None, "the state in which the last step began"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env)), "clone"])
def test_a_copy_made_in_mid_step_continues_independently(copied):
    env = TrajectoryRecordingWrapper.wrap(two_step_env(3))
    env.reset()
    env.step({"item": 3})
    if copied == "clone":
        other = TrajectoryRecordingWrapper.wrap(two_step_env(3))
        other.core_env.clone_from = lambda simulation: vars(other.core_env).update(
            {name: value for name, value in vars(simulation).items() if name != "context"}
        )
        other.clone_from(env)
    else:
        other = copied(env)
    for one, where in ((env, 1.0), (other, 0.0)):
        one.step({"where": np.full(2, where)})
    for one, where in ((env, 1.0), (other, 0.0)):
        (step,) = one.episode_record.step_records
        assert [substep.maze_action.get("item") for substep in step.substeps] == [3, None]
        assert step.maze_action["where"].tolist() == [where, where]
        assert [substep.reward for substep in step.substeps] == [0, 13]


def test_stacked_observations_are_those_of_each_agent():
    stack = [{"observation": "self", "keep_original": True, "tag": "before", "delta": False, "stack_steps": 2}]

    def make_env():
        return ObservationStackWrapper.wrap(coming_and_going_env(), stack_config=stack)

    env = TrajectoryRecordingWrapper.wrap(Watching(make_env()))
    record = finished(env)
    dataset = InMemoryDataset(record, make_env)
    for step, expected in zip(dataset.step_records, env.env.steps, strict=True):
        np.testing.assert_equal(step.observations, expected.observations)


def test_agent_actions_of_skipped_steps_are_recorded_once():
    env = TrajectoryRecordingWrapper.wrap(StepSkipWrapper.wrap(depot(), n_steps=2))
    env.seed(1)
    env.reset()
    env.step({"parcel": 2})
    env.step({"cart": 4})
    (step,) = env.episode_record.step_records
    assert [substep.maze_action for substep in step.substeps] == [Choice(2), Loading(4)]
    assert sum(substep.reward for substep in step.substeps) == step.reward
    assert env.get_env_time() == 2


class Seen(Renderer):
    """Needs the state in which an action was taken."""

    def __init__(self):
        self.pairs = []

    def render(self, maze_state, maze_action, events, **kwargs):
        if isinstance(maze_action, Loading):
            assert maze_state.room.shape == (5,)
        self.pairs.append((maze_state.chosen, type(maze_action).__name__))


def test_viewers_go_through_sub_steps_and_draw_each_action_in_its_state():
    record = finished(TrajectoryRecordingWrapper.wrap(TimeLimitWrapper.wrap(depot(), max_episode_steps=2)))
    chosen = [step.substeps[0].maze_action.parcel for step in record.step_records[:-1]]
    expected = [pair for parcel in chosen for pair in ((None, "Choice"), (parcel, "Loading"))] + [(None, "NoneType")]
    renderer = Seen()
    viewer = KeyboardControlledTrajectoryViewer(record, renderer)
    viewer._draw()
    for _ in range(6):
        viewer.on_key("right")
    assert renderer.pairs == expected

    summaries = step_summaries(record.by_substep())
    assert [summary.actor for summary in summaries] == [
        *["sub-step choose, agent 0", "sub-step load, agent 0"] * 2,
        "sub-step choose, agent 0",
    ]
    assert [summary.time for summary in summaries] == ["0", "0", "1", "1", "2"]
    assert summaries[-1].total == pytest.approx(sum(step.reward for step in record.step_records[:-1]))


def test_decisions_are_recorded_with_their_sub_steps():
    record = finished(TrajectoryRecordingWrapper.wrap(depot()), n_steps=2)
    a, b, c, d = ({"actor": name} for name in "abcd")
    assert _by_substep(record, [[a, b], [c, d]]) == [(a,), (b,), (c,), (d,)]
    assert _by_substep(record, [[a, b], [c]]) == [(a,), (b,), [c], ()]
