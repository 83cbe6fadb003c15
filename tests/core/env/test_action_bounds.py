"""Whatever draws an action: no environment gets one from outside the bounds of its continuous heads."""

import copy

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from maze.core.agent_deployment.maze_action_candidates import ActionCandidates, ActionConversionCandidatesInterface
from maze.core.env.action_conversion import ActionBounds
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from tests.train.parallelization.toy_envs import Observe, PassOn, ToyCoreEnv
from tests.train.trainers.sac.sac_models import build_model, build_trainer

BOUNDS = spaces.Box(np.array([-1.0, -np.inf, 0.0], np.float32), np.array([1.0, 2.0, np.inf], np.float32))
HEADS = spaces.Dict({"push": BOUNDS, "free": spaces.Box(-np.inf, np.inf, (2,), np.float32), "gear": spaces.Discrete(3)})


class RecordingCoreEnv(ToyCoreEnv):
    """Remembers what it receives, and by whom."""

    step_keys = ("drive", "wait")

    def __init__(self):
        super().__init__()
        self.received = []

    def reset(self):
        return self.get_maze_state()

    def step(self, maze_action):
        self.received.append(maze_action)
        self.actor = ActorID("wait" if self.actor.step_key == "drive" else "drive", 0)
        return self.get_maze_state(), 0.0, False, {}

    def get_maze_state(self):
        return {"x": [float(len(getattr(self, "received", ())))]}


def recording_env(drive=HEADS, wait=HEADS):
    observation = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (1,), np.float32)})
    conversions = {"drive": PassOn(drive), "wait": PassOn(wait)}
    return MazeEnv(RecordingCoreEnv(), conversions, dict.fromkeys(conversions, Observe(observation)))


numbers = st.floats(-5, 5, width=32)


@given(push=st.tuples(numbers, numbers, numbers), free=st.tuples(numbers, numbers))
def test_an_environment_of_ones_own_gets_actions_within_their_bounds_and_the_callers_stay_as_they_are(push, free):
    env = recording_env()
    env.reset()
    action = {"push": np.array(push, np.float32), "free": np.array(free, np.float32), "gear": np.int64(2)}
    before = copy.deepcopy(action)
    env.step(action)
    (received,) = env.core_env.received
    np.testing.assert_array_equal(received["push"], np.clip(before["push"], BOUNDS.low, BOUNDS.high))
    assert received["push"].dtype == np.float32
    np.testing.assert_array_equal(received["free"], before["free"])
    assert received["gear"] is action["gear"]
    for head, value in before.items():
        np.testing.assert_array_equal(action[head], value)


def test_each_sub_step_has_its_own_bounds():
    narrow = spaces.Dict({"push": spaces.Box(-0.1, 0.1, (3,), np.float32)})
    env = recording_env(wait=narrow)
    env.reset()
    action = {"push": np.full(3, 9.0, np.float32), "free": np.zeros(2, np.float32), "gear": 0}
    env.step(action)
    env.step(action)
    drive, wait = (received["push"].tolist() for received in env.core_env.received)
    assert drive == [1.0, 2.0, 9.0]
    assert wait == [np.float32(0.1)] * 3


def test_nan_is_not_clipped_so_that_the_environment_reports_it():
    env = recording_env()
    env.reset()
    env.step({"push": np.array([np.nan, 9.0, np.inf], np.float32), "free": np.zeros(2), "gear": 0})
    np.testing.assert_array_equal(env.core_env.received[0]["push"], [np.nan, 2.0, np.inf])


@pytest.mark.parametrize("value", [3.0, np.float64(3.0), np.array(3.0), [3.0], np.array([3.0])])
def test_plain_numbers_and_lists_are_clipped_in_their_shape(value):
    (clipped,) = ActionBounds(spaces.Dict({"a": spaces.Box(-1, 1, (1,), np.float32)})).clip({"a": value}).values()
    assert np.shape(clipped) == np.shape(value)
    assert float(np.ravel(clipped)[0]) == 1.0


def test_an_unbounded_action_is_passed_on_unchanged():
    unbounded = spaces.Dict({"free": HEADS["free"], "gear": HEADS["gear"]})
    env = recording_env(unbounded, unbounded)
    env.reset()
    action = {"free": np.full(2, 9.0, np.float32), "gear": 1}
    env.step(action)
    assert env.core_env.received[0] is action


@pytest.mark.parametrize("action", [7, {"push": np.zeros(2, np.float32)}])
def test_invalid_actions_are_refused_by_name(action):
    class Strict(PassOn):
        def space_to_maze(self, action, maze_state):
            return action["push"] + np.zeros(3)

    space = spaces.Dict({"push": BOUNDS})
    observation = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (1,), np.float32)})
    env = MazeEnv(RecordingCoreEnv(), {"drive": Strict(space)}, {"drive": Observe(observation)})
    env.reset()
    with pytest.raises(EnvironmentContractError, match=r"sub-step 'drive': .*push"):
        env.step(action)


def test_each_candidate_of_a_deployed_policy_is_clipped():
    conversion = ActionConversionCandidatesInterface(PassOn(spaces.Dict({"a": spaces.Box(-1, 1, (1,), np.float32)})))
    candidates = [{"a": np.array([value], np.float32)} for value in (0.5, 3.0, -7.0)]
    converted = conversion.space_to_maze(ActionCandidates((candidates, [0.5, 0.3, 0.2])), None)
    assert [float(one["a"][0]) for one in converted.candidates] == [0.5, 1.0, -1.0]


class WalkCoreEnv(RecordingCoreEnv):
    step_keys = (0,)

    def step(self, maze_action):
        self.received.append(np.array(maze_action["push"]))
        return self.get_maze_state(), float(maze_action["push"][0]), False, {}


def walk_env():
    return MazeEnv(
        WalkCoreEnv(),
        {0: PassOn(spaces.Dict({"push": spaces.Box(-0.2, 0.2, (2,), np.float32)}))},
        {0: Observe(spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (1,), np.float32)}))},
    )


def test_a_rollout_records_the_samples_and_the_environment_receives_them_clipped():
    env = SequentialVectorEnv([walk_env])
    policy = build_model(walk_env(), distributions=[]).policy
    generator = RolloutGenerator(env)
    columns = generator.collect(policy, generator.allocate(30))
    drawn = columns.substeps[0].actions["push"][:, 0]
    assert np.abs(drawn).max() > 0.5, "what log-probabilities belong to"
    received = np.array(env.envs[0].core_env.received)
    np.testing.assert_array_equal(received, np.clip(drawn, np.float32(-0.2), np.float32(0.2)))


def test_a_replay_buffer_holds_the_actions_that_the_environment_carried_out():
    trainer = build_trainer(walk_env)
    trainer.workers.worker_policy = build_model(walk_env(), distributions=[]).policy
    buffer, core_env = trainer.workers.replay_buffer, trainer.workers._groups[0].env.envs[0].core_env
    first = buffer.n_rows_added
    for _ in range(40):
        trainer.workers.collect_rollouts()
    held = buffer.columns.actions[0]["push"][first : first + 40]
    np.testing.assert_array_equal(held, np.array(core_env.received))
    np.testing.assert_array_equal(held[:, 0], buffer.columns.rewards[first : first + 40, 0])
