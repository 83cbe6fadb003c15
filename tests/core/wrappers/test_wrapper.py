"""What every wrapper must do: be seen through, delegate, be copied and pickled."""

import copy
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest

from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.simulated_env_mixin import SimulatedEnvMixin
from maze.core.env.structured_env import StructuredEnv
from maze.core.env.time_env_mixin import TimeEnvMixin
from maze.core.errors import EnvironmentContractError
from maze.core.wrappers.maze_gym_env_wrapper import GymCoreEnv, GymMazeEnv
from maze.core.wrappers.no_dict_spaces_wrapper import NoDictSpacesWrapper
from maze.core.wrappers.random_reset_wrapper import RandomResetWrapper
from maze.core.wrappers.reward_clipping_wrapper import RewardClippingWrapper
from maze.core.wrappers.reward_scaling_wrapper import RewardScalingWrapper
from maze.core.wrappers.sorted_spaces_wrapper import SortedSpacesWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import ActionWrapper, ObservationWrapper, RewardWrapper, Wrapper

BUILT_IN = {
    NoDictSpacesWrapper: {},
    RandomResetWrapper: {"min_skip_steps": 1, "max_skip_steps": 3},
    RewardClippingWrapper: {"min_val": 0.0, "max_val": 0.5},
    RewardScalingWrapper: {"scale": 0.1},
    SortedSpacesWrapper: {},
    TimeLimitWrapper: {"max_episode_steps": 10},
}


def cart_pole(seed=1):
    env = GymMazeEnv("CartPole-v1")
    env.seed(seed)
    return env


def four_times_wrapped():
    env = RewardScalingWrapper.wrap(cart_pole(), scale=2.0)
    env = TimeLimitWrapper.wrap(env, max_episode_steps=5)
    env = RewardClippingWrapper.wrap(env, min_val=-1.0, max_val=1.5)
    return RandomResetWrapper.wrap(env, min_skip_steps=0, max_skip_steps=0)


@pytest.mark.parametrize(
    "seen",
    [
        *(RandomResetWrapper, RewardClippingWrapper, TimeLimitWrapper, RewardScalingWrapper, RewardWrapper, Wrapper),
        *(GymMazeEnv, MazeEnv, GymCoreEnv, CoreEnv, StructuredEnv, TimeEnvMixin, SimulatedEnvMixin, object),
    ],
)
def test_isinstance_sees_through_four_wrappers(seen):
    assert isinstance(four_times_wrapped(), seen)


@pytest.mark.parametrize("unseen", [ObservationWrapper, ActionWrapper, NoDictSpacesWrapper, gymnasium.Env, dict])
def test_isinstance_does_not_see_what_is_not_there(unseen):
    assert not isinstance(four_times_wrapped(), unseen)


def test_view_reports_the_real_type():
    env = four_times_wrapped()
    assert type(env) is RandomResetWrapper
    assert env.__class__.__name__ == "RandomResetWrapper"
    assert issubclass(env.__class__, GymCoreEnv)
    assert pickle.loads(pickle.dumps(env.__class__)) is RandomResetWrapper
    assert type(env.__class__(cart_pole(), 0, 0)) is RandomResetWrapper


def test_isinstance_works_around_classes_with_slots_and_extension_types():
    class Slotted:
        __slots__ = ("a", "b")

        def step(self, action): ...
        def reset(self): ...

    class SlottedDict(Slotted, TimeEnvMixin):
        def get_env_time(self):
            return 3

    class Plain(Wrapper[Any]):
        pass

    env = Plain(SlottedDict())
    assert isinstance(env, (Plain,))
    assert isinstance(env, TimeEnvMixin)


def test_a_replaced_environment_is_stepped_and_observed():
    env = TimeLimitWrapper(cart_pole(), max_episode_steps=3)
    env.env = RewardScalingWrapper(cart_pole(), scale=7.0)
    env.reset()
    assert env.step({"action": 0})[1] == 7.0
    assert isinstance(env, RewardScalingWrapper)


@pytest.mark.parametrize(("wrapper", "arguments"), BUILT_IN.items())
def test_built_in_wrappers_continue_equally_after_copies_and_pickling(wrapper, arguments):
    env = wrapper(cart_pole(), **arguments)
    env.reset()
    action = env.action_space.sample()
    twins = [env, copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    for twin in twins:
        assert type(twin) is wrapper
        assert isinstance(twin, GymCoreEnv)
    observations, rewards, dones, _ = zip(*(twin.step(action) for twin in twins), strict=True)
    first = observations[0]["observation"] if isinstance(observations[0], dict) else observations[0]
    for other in observations[1:]:
        np.testing.assert_array_equal(other["observation"] if isinstance(other, dict) else other, first)
    assert len(set(rewards)) == len(set(dones)) == 1


@pytest.mark.parametrize(("wrapper", "arguments"), BUILT_IN.items())
def test_built_in_wrappers_copy_the_state_of_another_environment(wrapper, arguments):
    source, target = wrapper(cart_pole(1), **arguments), wrapper(cart_pole(2), **arguments)
    source.reset(), target.reset()
    action = source.action_space.sample()
    source.step(action)
    target.clone_from(source)
    assert target.get_env_time() == source.get_env_time() >= 1
    assert target.get_episode_id() == source.get_episode_id()
    np.testing.assert_equal(target.step(action)[:3], source.step(action)[:3])


def test_cloning_from_a_differently_wrapped_environment_is_refused():
    with pytest.raises(EnvironmentContractError, match=r"RewardScalingWrapper.*GymMazeEnv"):
        RewardScalingWrapper(cart_pole(), 1.0).clone_from(cart_pole())


def test_the_property_of_a_wrapper_that_fails_is_not_replaced_by_that_of_the_wrapped_environment():
    class Broken(Wrapper[MazeEnv]):
        @property
        def action_space(self):
            return self.no_such_thing

    with pytest.raises(AttributeError, match="no_such_thing"):
        Broken(cart_pole()).action_space


def test_unknown_and_private_attributes_are_named_with_the_stack():
    env = TimeLimitWrapper(cart_pole())
    assert not hasattr(env, "nonsense")
    with pytest.raises(
        AttributeError, match=r"TimeLimitWrapper\(GymMazeEnv\(GymCoreEnv\(CartPole-v1\)\)\).*`nonsense`"
    ):
        env.nonsense
    with pytest.raises(AttributeError, match="private"):
        env._maze_state
    with pytest.raises(AttributeError, match=r"super\(\).__init__"):
        TimeLimitWrapper.__new__(TimeLimitWrapper).action_space


def test_a_wrapper_must_define_its_conversion_of_recordings():
    class Silent(Wrapper[MazeEnv]):
        pass

    with pytest.raises(NotImplementedError, match=r"Silent.*get_observation_and_action_dicts"):
        Silent(cart_pole()).get_observation_and_action_dicts(None, None, True)


def test_wrapper_that_keeps_observations_and_actions_passes_recordings_through():
    class Looking(Wrapper[MazeEnv]):
        keeps_observations_and_actions = True

    env = cart_pole()
    env.reset()
    state = env.get_maze_state()
    observations, actions = Looking(env).get_observation_and_action_dicts(state, 1, True)
    assert (
        observations[0]["observation"].tolist()
        == env.observation_conversion.maze_to_space(state)["observation"].tolist()
    )
    assert actions == {0: {"action": 1}}


def test_a_clone_keeps_the_reward_shares_of_the_last_step():
    class Shared(GymMazeEnv):
        def get_actor_rewards(self):
            return np.array([0.25, 0.75])

    original, clone = (RewardClippingWrapper(Shared("CartPole-v1"), 0.0, 0.5) for _ in range(2))
    original.reset()
    original.step(original.action_space.sample())
    clone.reset()
    clone.clone_from(original)
    assert clone.get_actor_rewards().tolist() == original.get_actor_rewards().tolist() == [0.125, 0.375]


def test_a_wrapper_without_methods_of_its_own_changes_nothing():
    class Nothing(Wrapper[MazeEnv]):
        pass

    plain, wrapped = cart_pole(), Nothing(Nothing(cart_pole()))
    np.testing.assert_array_equal(plain.reset()["observation"], wrapped.reset()["observation"])
    for action in (0, 1, 1, 0):
        one, other = plain.step({"action": action}), wrapped.step({"action": action})
        np.testing.assert_array_equal(one[0]["observation"], other[0]["observation"])
        assert one[1:3] == other[1:3]


def test_the_three_kinds_convert_steps_resets_and_recordings():
    class Doubled(ObservationWrapper[MazeEnv]):
        def observation(self, observation):
            return {"double": observation["observation"] * 2}

    class Swapped(ActionWrapper[MazeEnv]):
        def action(self, action):
            return {"action": 1 - action["swapped"]}

        def reverse_action(self, action):
            return {"swapped": 1 - action["action"]}

    plain, env = cart_pole(), Swapped(Doubled(cart_pole()))
    np.testing.assert_array_equal(plain.reset()["observation"] * 2, env.reset()["double"])
    expected = plain.step({"action": 0})[0]["observation"] * 2
    np.testing.assert_array_equal(env.step({"swapped": 1})[0]["double"], expected)
    observations, actions = env.get_observation_and_action_dicts(env.get_maze_state(), env.get_maze_action(), False)
    np.testing.assert_array_equal(observations[0]["double"], expected)
    assert actions == {0: {"swapped": 1}}
