"""A simulation written in the documented style, as a trainable environment."""

import copy
import pickle

import numpy as np
import pytest
from gymnasium import spaces

from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.action_conversion import ActionConversionInterface, DictActionConversion
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import DictObservationConversion, ObservationConversionInterface
from maze.core.env.structured_env import ActorID, StructuredEnv
from maze.core.env.time_env_mixin import TimeEnvMixin
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.rendering.renderer import draw_current_state
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.utils.check_env import check_env
from tests.core.env.tutorial_cutting import (
    CuttingActionConversion,
    CuttingObservation,
    CuttingState,
    InventoryEvents,
    StructuredCuttingEnv,
    cutting_env_factory,
)

CUT_FIRST = {"piece_idx": 0, "cut_rotation": 0}
CUT_LAST = {"piece_idx": 4, "cut_rotation": 0}


def test_the_documented_environment_steps_with_floats_and_counts_its_time():
    env = cutting_env_factory()
    observation = env.reset()
    assert observation["inventory"].tolist() == [[100, 100], [0, 0], [0, 0], [0, 0], [0, 0]]
    observation, reward, done, info = env.step(CUT_FIRST)
    assert type(reward) is float
    assert (done, info) == (False, {})
    assert env.step(CUT_LAST)[3] == {"error": "piece_id_out_of_bounds"}
    assert env.get_env_time() == 2
    assert env.get_maze_action().piece_id == 4
    assert env.observation_space.contains(observation)
    assert env.action_space.contains(env.action_space.sample())
    assert env.agent_counts_dict == {0: 1}
    assert env.reset()["inventory"].shape == (5, 2)
    assert env.get_env_time() == 0
    assert env.get_maze_action() is None


def test_events_last_one_step_and_those_of_the_reset_belong_to_the_first():
    env = cutting_env_factory()
    env.reset()
    assert len(list(env.get_step_events())) == 1
    assert env.step(CUT_FIRST)[1] == -2.0  # the piece of the reset and the one that replaced the first cut
    assert len(list(env.get_step_events())) == 2
    assert env.step(CUT_FIRST)[1] == -1.0
    (record,) = env.get_step_events()
    assert record.interface_method is InventoryEvents.piece_replenished
    assert env.step(CUT_LAST)[1] == 0.0
    assert list(env.get_step_events()) == []


def test_the_documented_structured_wrapper_alternates_its_sub_steps_and_time_counts_environment_steps():
    env = StructuredCuttingEnv(cutting_env_factory())
    assert isinstance(env, (MazeEnv, StructuredEnv, TimeEnvMixin))
    env.reset()
    times, keys = [], []
    for _ in range(4):
        keys.append(env.actor_id().step_key)
        env.step(env.action_space.sample())
        times.append(env.get_env_time())
    assert keys == [0, 1, 0, 1]
    assert times == [0, 1, 1, 2]
    observations, actions = env.get_observation_and_action_dicts(env.get_maze_state(), env.get_maze_action(), False)
    assert set(observations) == set(actions) == {0, 1}


def test_stacks_survive_pickling_and_copies_continue_independently():
    env = StructuredCuttingEnv(cutting_env_factory())
    env.reset()
    env.step({"piece_idx": 0})
    for twin in (pickle.loads(pickle.dumps(env)), copy.deepcopy(env)):
        assert type(twin) is StructuredCuttingEnv
        assert twin.actor_id() == ActorID(1, 0)
        assert twin.step({"cut_rotation": 1})[1] == -2.0
        assert (twin.get_env_time(), env.get_env_time()) == (1, 0)


class RelayEnv(CoreEnv):
    """Two agents take turns at sub-step `a`, then one acts at `b`; the state is who acts."""

    ACTORS = (ActorID("a", 0), ActorID("a", 1), ActorID("b", 0))

    def __init__(self, reward=1, last=10**6, **more):
        super().__init__()
        self.turn, self.reward, self.last = 0, reward, last
        self.info = more.get("info", {})

    def step(self, maze_action):
        self.turn += 1
        return self.get_maze_state(), self.reward, self.turn >= self.last, self.info

    def reset(self):
        self.turn = 0
        return self.get_maze_state()

    def seed(self, seed): ...
    def close(self): ...

    def get_maze_state(self):
        return self.turn

    def get_serializable_components(self):
        return {}

    def get_renderer(self): ...

    def actor_id(self):
        return self.ACTORS[self.turn % 3]

    def is_actor_done(self):
        return False

    agent_counts_dict = {"a": 2, "b": 1}


class TurnObservation(ObservationConversionInterface):
    def __init__(self, offset):
        self.offset = offset

    def maze_to_space(self, maze_state):
        return {"turn": np.array([maze_state + self.offset], dtype=np.float32)}

    def space(self):
        return spaces.Dict({"turn": spaces.Box(-np.inf, np.inf, (1,))})


class NumberAction(ActionConversionInterface):
    def space_to_maze(self, action, maze_state):
        return action["number"]

    def space(self):
        return spaces.Dict({"number": spaces.Discrete(3)})


def relay_env(**kwargs):
    return MazeEnv(
        RelayEnv(**kwargs),
        {"a": NumberAction(), "b": NumberAction()},
        {"a": TurnObservation(0), "b": TurnObservation(100)},
    )


def test_a_step_is_complete_when_the_first_actor_is_next_and_observations_belong_to_the_next_actor():
    env = relay_env()
    env.reset()
    seen = [(env.step({"number": 0})[0]["turn"].item(), env.get_env_time()) for _ in range(6)]
    assert seen == [(1, 0), (102, 0), (3, 1), (4, 1), (105, 1), (6, 2)]
    assert env.agent_counts_dict == {"a": 2, "b": 1}


def test_an_episode_that_ends_between_sub_steps_completes_its_step():
    env = relay_env(last=2)
    env.reset()
    env.step({"number": 0})
    assert env.step({"number": 0})[2] is True
    assert env.get_env_time() == 1


def test_a_simulation_that_counts_its_steps_itself_is_not_counted_twice():
    class Counting(RelayEnv):
        def step(self, maze_action):
            self.context.increment_env_step()
            return super().step(maze_action)

    env = MazeEnv(
        Counting(), {"a": NumberAction(), "b": NumberAction()}, {"a": TurnObservation(0), "b": TurnObservation(0)}
    )
    env.reset()
    for expected in (1, 2, 3):
        env.step({"number": 0})
        assert env.get_env_time() == expected


def test_post_step_callbacks_see_the_completed_step_and_optionally_outer_wrappers():
    env = StructuredCuttingEnv(cutting_env_factory())
    times = []
    env.context.register_post_step(lambda: times.append((env.get_env_time(), env._sub_step_key)))
    env.reset()
    env.step({"piece_idx": 0})
    env.step({"cut_rotation": 0})
    assert times == [(1, 1)]
    env.step({"piece_idx": 0})
    env.step_with_callbacks({"cut_rotation": 0})
    assert times == [(1, 1), (2, 0)]


def test_episode_identities_repeat_with_the_seed_and_differ_between_episodes_and_seeds():
    def ids(seed):
        env = cutting_env_factory()
        env.seed(seed)
        return [(env.reset(), env.get_episode_id())[1] for _ in range(3)]

    assert ids(1) == ids(1)
    assert len({*ids(1), *ids(2), *ids(None), *ids(None)}) == 12


@pytest.mark.parametrize("reward", [np.float32(2), np.array(2.0), np.array([2]), 2])
def test_rewards_of_all_numeric_types_become_floats(reward):
    env = relay_env(reward=reward)
    env.reset()
    assert env.step({"number": 0})[1] == 2.0


def test_a_vector_reward_is_refused_with_the_way_to_attribute_it():
    env = relay_env(reward=np.array([1.0, 2.0]))
    env.reset()
    with pytest.raises(EnvironmentContractError, match=r"RelayEnv.*get_actor_rewards"):
        env.step({"number": 0})


@pytest.mark.parametrize(("limit", "n_terminated", "n_truncated"), [(100, 4, 0), (1, 0, 8)])
def test_an_episode_may_end_without_an_info(limit, n_terminated, n_truncated):
    """The checker reports it; rollouts and wrappers treat it as an empty one."""
    envs = SequentialVectorEnv([lambda: TimeLimitWrapper.wrap(relay_env(info=None, last=6), limit)] * 2)
    generator = RolloutGenerator(envs)
    columns = generator.collect(RandomPolicy(envs.action_spaces_dict), generator.allocate(4))
    assert (columns.terminated.sum(), columns.truncated.sum()) == (n_terminated, n_truncated)


@pytest.mark.parametrize("info", [[], "ok"])
def test_an_info_that_is_no_dictionary_is_named(info):
    env = relay_env(info=info)
    env.reset()
    with pytest.raises(EnvironmentContractError, match=r"RelayEnv.step: expected \(state, reward, done, info\), found"):
        env.step({"number": 0})


def test_an_actor_without_conversions_is_named():
    env = MazeEnv(
        RelayEnv(), {"a": NumberAction(), "c": NumberAction()}, {"a": TurnObservation(0), "c": TurnObservation(0)}
    )
    env.reset()
    env.step({"number": 0})
    with pytest.raises(EnvironmentContractError, match=r"sub-step 'b'.*Known sub-steps: \['a', 'c'\]"):
        env.step({"number": 0})


def test_conversions_must_be_conversions_with_the_same_keys():
    with pytest.raises(ConfigError, match="same sub-step keys"):
        MazeEnv(RelayEnv(), {"a": NumberAction()}, {"b": TurnObservation(0)})
    with pytest.raises(ConfigError, match=r"action_conversion_dict.*found .*TurnObservation"):
        MazeEnv(RelayEnv(), {0: TurnObservation(0)}, {0: TurnObservation(0)})


def test_a_subclass_that_chooses_its_conversion_is_respected():
    class Choosing(MazeEnv):
        @property
        def observation_conversion(self):
            return TurnObservation(7)

        def get_maze_state(self):
            return "looked at"

    class Looking(NumberAction):
        def space_to_maze(self, action, maze_state):
            assert maze_state == "looked at"
            return super().space_to_maze(action, maze_state)

    env = Choosing(RelayEnv(), {"a": Looking()}, {"a": TurnObservation(0)})
    assert env.reset()["turn"] == 7
    assert env.step({"number": 1})[0]["turn"] == 8


def test_the_simulation_can_be_exchanged_for_one_that_shares_its_context():
    env = relay_env()
    env.reset()
    other = RelayEnv(reward=5)
    other.context = env.context
    env.core_env = other
    assert env.env is other
    assert env.step({"number": 0})[1] == 5.0


def test_recorded_states_and_actions_convert_back():
    env = cutting_env_factory()
    observations, actions = env.get_observation_and_action_dicts(
        CuttingState([(1, 2)], (3, 4)), CuttingActionConversion(5).space_to_maze(CUT_LAST, None), True
    )
    assert observations[0]["inventory"][0].tolist() == [1, 2]
    assert actions == {0: CUT_LAST}
    assert env.get_observation_and_action_dicts(None, None, True) == (None, None)
    assert CuttingObservation(5).space() == env.observation_spaces_dict[0]
    with pytest.raises(NotImplementedError, match=r"NumberAction.maze_to_space"):
        relay_env().get_observation_and_action_dicts(None, 1, True)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (
            {"turn": np.zeros(2, np.float32)},
            r"sub-step 0, observation `turn`: expected shape \(1,\) .* found shape \(2,\)",
        ),
        ({"turn": np.zeros(1, np.complex64)}, "`turn`: expected .* dtype float32 .* found .* dtype complex64"),
        ({"tern": np.zeros(1)}, r"with the keys \['turn'\], found \['tern'\]"),
        (np.zeros(1), "with the keys .*, found ndarray"),
    ],
)
def test_first_observations_that_do_not_fit_their_space_are_named(observation, message):
    class Faulty(TurnObservation):
        def maze_to_space(self, maze_state):
            return observation

    with pytest.raises(EnvironmentContractError, match=rf"MazeEnv, {'' if 'sub' in message else '.*'}{message}"):
        MazeEnv(RelayEnv(), {0: NumberAction()}, {0: Faulty(0)}).reset()


def test_values_out_of_range_are_a_warning_on_the_first_observations_only():
    class Bounded(TurnObservation):
        def space(self):
            return spaces.Dict({"turn": spaces.Box(0, 5, (1,))})

    env = MazeEnv(RelayEnv(), {0: NumberAction()}, {0: Bounded(10)})
    with pytest.warns(UserWarning, match="MazeEnv, sub-step 0, observation `turn`: some values are not in the space"):
        env.reset()
    for _ in range(2):
        with pytest.warns(UserWarning, match="turn"):
            env.step({"number": 0})
    env.step({"number": 0})


class CountdownEnv(CoreEnv):
    """Counts down from three; what has no default is all there is."""

    left = 3

    def seed(self, seed):
        """Do nothing: nothing is random here."""

    def reset(self):
        self.left = 3
        return self.get_maze_state()

    def step(self, maze_action):
        self.left -= maze_action["by"]
        return self.get_maze_state(), 1.0, self.left <= 0, {}

    def get_maze_state(self):
        return {"left": [self.left]}


def countdown_env():
    actions = DictActionConversion({"by": spaces.Discrete(3, start=1)})
    return MazeEnv(CountdownEnv(), {0: actions}, {0: DictObservationConversion({"left": spaces.Box(-3, 3, (1,))})})


def test_a_simulation_of_four_methods_is_a_sound_environment_with_one_actor():
    report = check_env(countdown_env)
    assert report.findings == []
    env = countdown_env()
    assert env.reset() == {"left": np.array([3], np.float32)}
    assert env.step({"by": np.int64(2)})[1:3] == (1.0, False)
    assert type(env.get_maze_action()["by"]) is int
    assert (env.actor_id(), env.agent_counts_dict, env.is_actor_done()) == (ActorID(0, 0), {0: 1}, False)
    assert env.core_env.get_serializable_components() == {}
    env.close()


class LeftAction(DictActionConversion):
    """Counts down no further than zero, which takes the state."""

    def space_to_maze(self, action, maze_state):
        return {"by": min(int(action["by"]), maze_state["left"][0])}


class CountedStates(CountdownEnv):
    n_states = 0

    def get_maze_state(self):
        self.n_states += 1
        return super().get_maze_state()


@pytest.mark.parametrize(("conversion", "n_before", "left"), [(DictActionConversion, 0, -2), (LeftAction, 1, 0)])
def test_a_state_is_made_before_an_action_only_for_conversions_that_use_it(conversion, n_before, left):
    actions = conversion({"by": spaces.Discrete(5, start=1)})
    env = MazeEnv(CountedStates(), {0: actions}, {0: DictObservationConversion({"left": spaces.Box(-3, 3, (1,))})})
    env.reset()
    n_after_reset = env.core_env.n_states
    env.step({"by": 5})
    assert env.core_env.n_states == n_after_reset + n_before + 1  # one after the step
    assert env.core_env.left == left


def test_dictionary_conversions_have_inverses_and_take_copies():
    heads = {"which": spaces.Discrete(4), "how_much": spaces.Box(0, 1, (2,))}
    actions = DictActionConversion(heads)
    action = {"which": np.int64(3), "how_much": np.ones(2, np.float32)}
    assert actions.maze_to_space(actions.space_to_maze(action, None)) == action
    assert actions.space() == spaces.Dict(heads)
    state = {"stock": np.zeros(2), "unseen": None}
    observation = DictObservationConversion({"stock": spaces.Box(0, 1, (2,))}).maze_to_space(state)
    state["stock"] += 1.0
    assert observation["stock"].tolist() == [0.0, 0.0]
    assert observation["stock"].dtype == np.float32


def test_rendering_an_environment_without_a_renderer_is_an_error():
    env = countdown_env()
    env.reset()
    with pytest.raises(ConfigError, match=r"MazeEnv cannot be drawn: it has no renderer.*get_renderer"):
        draw_current_state(env)


def test_a_step_with_too_few_values_and_the_name_of_an_environment_are_readable():
    class Dock(CountdownEnv):
        def step(self, maze_action):
            return super().step(maze_action)[:3]

    env = countdown_env()
    env.core_env = Dock()
    assert repr(env) == "MazeEnv(Dock())"
    env.reset()
    with pytest.raises(EnvironmentContractError, match=r"Dock.step: expected \(state, reward, done, info\), found \("):
        env.step({"by": 1})


def test_an_action_out_of_its_space_is_named_if_the_simulation_fails_with_it():
    env = countdown_env()
    env.reset()
    with pytest.raises(EnvironmentContractError, match=r"must be a dictionary with the keys \['by'\].*KeyError"):
        env.step({"to": 1})
