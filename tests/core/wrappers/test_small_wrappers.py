"""The wrappers for limits, rewards, spaces and resets."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from maze.core.env.base_env import is_truncated
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ACTORS_DONE_KEY
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.wrappers.dict_action_wrapper import DictActionWrapper
from maze.core.wrappers.dict_observation_wrapper import DictObservationWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.no_dict_action_wrapper import NoDictActionWrapper
from maze.core.wrappers.no_dict_observation_wrapper import NoDictObservationWrapper
from maze.core.wrappers.no_dict_spaces_wrapper import NoDictSpacesWrapper
from maze.core.wrappers.random_reset_wrapper import RandomResetWrapper, StepSkipWrapper
from maze.core.wrappers.return_normalization_reward_wrapper import ReturnNormalizationRewardWrapper
from maze.core.wrappers.reward_clipping_wrapper import RewardClippingWrapper
from maze.core.wrappers.reward_scaling_wrapper import RewardScalingWrapper
from maze.core.wrappers.sorted_spaces_wrapper import SortedSpacesWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import RewardWrapper
from maze_envs.logistics.dispatching.maze_env import dispatching_env
from maze_envs.logistics.dispatching.rules import NearestOrder
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.train.parallelization.toy_envs import RandomWalkCoreEnv, TwoStepCoreEnv, random_walk_env, two_step_env


class CountingEnv(gymnasium.Env):
    """Terminates after ``length`` steps; the reward is the number of the step."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length=10**6):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {"seed": seed}

    def step(self, action):
        self.steps += 1
        return np.array([self.steps], np.float32), float(self.steps), self.steps >= self.length, False, {}


ACTION = {"action": 0}


@pytest.mark.parametrize(
    ("length", "limit", "steps", "truncated"),
    [
        (10, 3, 3, True),
        (3, 3, 3, False),  # terminated in its last permitted step: termination wins
        (3, 10, 3, False),
        (3, None, 3, False),
        (3, 0, 3, False),  # 0 means no limit
    ],
)
def test_time_limit_truncates_what_does_not_terminate(length, limit, steps, truncated):
    env = TimeLimitWrapper(GymMazeEnv(CountingEnv(length)), max_episode_steps=limit)
    for _ in range(2):  # the count starts again with each episode
        env.reset()
        for number in range(1, steps + 1):
            _, _, done, info = env.step(ACTION)
            assert done == (number == steps)
        assert is_truncated(done, info) is truncated


class SharedInfo(RandomWalkCoreEnv):
    """Return one info object in all steps; each episode but the first terminates in its second step."""

    n_episodes = 0
    info: dict = {}

    def reset(self):
        self.n_episodes, self.n_taken = self.n_episodes + 1, 0
        return super().reset()

    def step(self, maze_action):
        self.n_taken += 1
        return self.get_maze_state(), 0.0, self.n_episodes > 1 and self.n_taken == 2, self.info


def test_an_episode_after_a_truncated_one_terminates_although_infos_are_one_object():
    env = random_walk_env()
    env = TimeLimitWrapper(MazeEnv(SharedInfo(), env.action_conversion_dict, env.observation_conversion_dict), 3)
    flags = []
    for n_steps in (3, 2):
        env.reset()
        for _ in range(n_steps):
            _, _, done, info = env.step({"push": np.zeros(3, np.float32)})
        flags.append((done, is_truncated(done, info)))
    assert flags == [(True, True), (True, False)]


def test_time_limit_counts_environment_steps_and_not_sub_steps():
    env = TimeLimitWrapper(StructuredCuttingEnv(cutting_env_factory()), max_episode_steps=2)
    env.reset()
    dones = [env.step(env.action_space.sample())[2] for _ in range(4)]
    assert dones == [False, False, False, True]


def test_time_limit_works_around_gymnasium_environments():
    env = TimeLimitWrapper(CountingEnv(), max_episode_steps=2)
    env.seed(5)
    assert env.reset()[1] == {"seed": 5}
    assert env.reset()[1] == {"seed": None}
    assert env.step(0)[2:4] == (False, False)
    assert env.step(0)[2:4] == (False, True)
    for wrong in (-1, "five", 2.5):
        with pytest.raises(ConfigError, match=rf"max_episode_steps: expected a whole number of at least 0.*{wrong}"):
            env.set_max_episode_steps(wrong)


@pytest.mark.parametrize(
    ("done", "info", "truncated"),
    [
        (True, {"TimeLimit.truncated": True}, True),
        (True, {"TimeLimit.truncated": False}, False),
        (True, {}, False),
        (False, {"TimeLimit.truncated": True}, False),
        (True, {"truncated": True}, False),  # only this key counts
    ],
)
def test_truncation_is_read_from_one_key(done, info, truncated):
    assert is_truncated(done, info) is truncated


def test_rewards_are_scaled_and_clipped():
    env = RewardClippingWrapper(RewardScalingWrapper(GymMazeEnv(CountingEnv()), scale=0.5), min_val=0.75, max_val=1.2)
    env.reset()
    assert [env.step(ACTION)[1] for _ in range(3)] == [0.75, 1.0, 1.2]
    assert np.isnan(env.reward(float("nan")))
    with pytest.raises(ConfigError, match="min_val"):
        RewardClippingWrapper(env, min_val=1.0, max_val=0.0)


@pytest.mark.parametrize(
    ("wrapper", "arguments", "key"),
    [
        (RewardScalingWrapper, {"scale": "abc"}, "scale"),
        (RewardScalingWrapper, {"scale": None}, "scale"),
        (RewardClippingWrapper, {"min_val": "low", "max_val": 1.0}, "min_val"),
        (RewardClippingWrapper, {"min_val": -1.0, "max_val": float("nan")}, "max_val"),
        (ReturnNormalizationRewardWrapper, {"gamma": "high", "epsilon": 1e-8}, "gamma"),
        (ReturnNormalizationRewardWrapper, {"gamma": 0.9, "epsilon": -1}, "epsilon"),
    ],
)
def test_settings_of_reward_wrappers_have_to_be_numbers_in_their_range(wrapper, arguments, key):
    with pytest.raises(ConfigError, match=rf"{wrapper.__name__}\.{key}: expected a number.*, found {arguments[key]!r}"):
        wrapper(GymMazeEnv(CountingEnv()), **arguments)


def test_rewards_may_be_clipped_on_one_side():
    env = RewardClippingWrapper(GymMazeEnv(CountingEnv()), min_val=-float("inf"), max_val=1)
    assert [env.reward(reward) for reward in (-1e9, 0.5, 3.0)] == [-1e9, 0.5, 1]


class Squared(RewardWrapper):
    def reward(self, reward):
        return reward**2


@pytest.mark.parametrize("wrap", [lambda env: RewardScalingWrapper(env, 3.0), Squared])
def test_actor_rewards_add_up_to_the_converted_reward(wrap):
    env = wrap(StructuredCuttingEnv(cutting_env_factory()))
    env.reset()
    env.step({"piece_idx": 0})
    reward = env.step({"cut_rotation": 0})[1]
    assert reward in (-6.0, 4.0)
    assert env.get_actor_rewards().tolist() == [reward / 2] * 2


@pytest.mark.parametrize("wrap", [lambda env: RewardClippingWrapper(env, 0.0, 0.5), Squared])
def test_shares_that_are_rewards_of_sub_steps_are_converted_like_these(wrap):
    env, policy = wrap(dispatching_env()), NearestOrder()
    env.seed(1)
    observation, rewards, most = env.reset(), [], 0
    for _ in range(40):
        observation, reward, _, _ = env.step(policy.compute_action(observation, None, None))
        rewards.append(reward)
        if env.is_step_complete():
            assert env.get_actor_rewards().tolist() == pytest.approx(rewards)
            most, rewards = max(most, len(rewards)), []
    assert most > 1


class ZeroSumCoreEnv(TwoStepCoreEnv):
    def step(self, maze_action):
        state, _, done, info = super().step(maze_action)
        return state, 0.0, done, info

    def get_actor_rewards(self):
        return np.array([1.0, -1.0])


def test_shares_of_a_zero_sum_game_are_normalized_like_rewards():
    env = ReturnNormalizationRewardWrapper(two_step_env(), gamma=0.0, epsilon=0.0)
    env.env.core_env = ZeroSumCoreEnv(3)
    env.load_statistics_state({"count": 4, "mean": 0.0, "squares": 16.0})  # a standard deviation of 2
    env.freeze_statistics()
    env.reset()
    for action in ({"item": 2}, {"where": np.zeros(2, np.float32)}):
        env.step(action)
    assert env.get_actor_rewards().tolist() == [0.5, -0.5]


def test_dictionary_wrappers_pack_and_unpack_around_gymnasium():
    env = DictActionWrapper(DictObservationWrapper(CountingEnv()))
    assert isinstance(env, gymnasium.Env)
    assert list(env.action_space) == ["action"]
    assert list(env.observation_space) == ["observation"]
    observation, info = env.reset(seed=3)
    assert (observation["observation"].tolist(), info) == ([0.0], {"seed": 3})
    assert env.step(ACTION)[1:] == (1.0, False, False, {})
    assert env.reverse_action(1) == {"action": 1}


def test_tuple_actions_and_observations_are_numbered():
    class Pair(CountingEnv):
        action_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))
        observation_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))

    env = DictActionWrapper(DictObservationWrapper(Pair()))
    assert list(env.action_space) == ["action_0", "action_1"]
    assert env.action({"action_0": 1, "action_1": 2}) == (1, 2)
    assert env.reverse_action((1, 2)) == {"action_0": 1, "action_1": 2}
    assert env.env.observation((1, 2)) == {"observation_0": 1, "observation_1": 2}


def test_dictionaries_are_taken_away_on_both_sides():
    env = NoDictSpacesWrapper(GymMazeEnv("CartPole-v1"))
    assert env.action_space == spaces.Discrete(2)
    assert env.observation_space.shape == (4,)
    assert env.action_spaces_dict == {0: spaces.Discrete(2)}
    assert env.reset().shape == (4,)
    assert env.step(1)[0].shape == (4,)
    observations, actions = env.get_observation_and_action_dicts(env.get_maze_state(), env.get_maze_action(), False)
    assert observations[0].shape == (4,)
    assert actions == {0: 1}
    one_sided = NoDictActionWrapper(NoDictObservationWrapper(GymMazeEnv("CartPole-v1")))
    assert one_sided.reset().shape == one_sided.step(0)[0].shape == (4,)


def test_spaces_with_several_entries_cannot_lose_their_dictionary():
    with pytest.raises(EnvironmentContractError, match="one entry"):
        NoDictSpacesWrapper(cutting_env_factory())


def test_spaces_are_sorted():
    env = SortedSpacesWrapper(cutting_env_factory())
    assert list(env.action_space) == list(env.action_spaces_dict[0]) == ["cut_rotation", "piece_idx"]
    assert list(env.observation_space) == list(env.observation_spaces_dict[0]) == ["inventory", "ordered_piece"]
    env.reset()
    env.step(env.action_space.sample())


@given(low=st.integers(0, 4), extra=st.integers(0, 4), length=st.integers(1, 6), seed=st.integers(0, 1000))
def test_random_resets_start_episodes_after_random_steps_and_never_at_their_end(low, extra, length, seed):
    env = RandomResetWrapper(GymMazeEnv(CountingEnv(length)), min_skip_steps=low, max_skip_steps=low + extra)
    env.seed(seed)
    steps = [int(env.reset()["observation"].item()) for _ in range(3)]
    assert all(step < length for step in steps)
    if length > low + extra:
        assert all(low <= step <= low + extra for step in steps)
    env.seed(seed)
    assert steps == [int(env.reset()["observation"].item()) for _ in range(3)]


def test_random_resets_skip_whole_environment_steps():
    env = RandomResetWrapper(StructuredCuttingEnv(cutting_env_factory()), min_skip_steps=2, max_skip_steps=2)
    env.reset()
    assert env.actor_id().step_key == 0
    assert env.get_env_time() == 2
    for least, most in ((3, 2), (-1, 2), (0, "2"), (0.5, 2)):
        with pytest.raises(ConfigError, match="min_skip_steps"):
            RandomResetWrapper(env, least, most)


class Masked(CountingEnv):
    """Only action 1 is possible."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": np.array([0, 1], np.int8)}

    def step(self, action):
        assert action == 1
        return *super().step(action)[:4], {"action_mask": np.array([0, 1], np.int8)}


def test_random_resets_take_actions_that_masks_allow():
    env = RandomResetWrapper(GymMazeEnv(Masked()), min_skip_steps=9, max_skip_steps=9)
    assert env.reset()["observation"].item() == 9


class MaskedPair(gymnasium.Env):
    """Only the action (1, 0) is possible."""

    observation_space = spaces.Dict(action_mask=spaces.MultiBinary(5))
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        return {"action_mask": np.array([0, 1, 1, 0, 0], np.int8)}, {}

    def step(self, action):
        self.taken.append(action.tolist())
        return self.reset()[0], 0.0, False, False, {}


def test_random_resets_take_combined_actions_that_masks_allow():
    env = MaskedPair()
    env.taken = []
    RandomResetWrapper(GymMazeEnv(env), min_skip_steps=9, max_skip_steps=9).reset()
    assert env.taken == [[1, 0]] * 9


@given(length=st.integers(1, 12), n_steps=st.integers(1, 5))
def test_an_action_holds_for_n_steps_or_until_the_episode_ends(length, n_steps):
    env = StepSkipWrapper.wrap(GymMazeEnv(CountingEnv(length)), n_steps=n_steps)
    env.reset()
    rewards, done = [], False
    while not done:
        _, reward, done, _ = env.step({"action": 0})
        rewards.append(reward)
    steps = range(1, length + 1)
    assert rewards == [sum(steps[start : start + n_steps]) for start in range(0, length, n_steps)]
    assert env.get_env_time() == length


def test_all_actors_of_a_step_repeat_their_actions():
    skipping = StepSkipWrapper.wrap(StructuredCuttingEnv(cutting_env_factory()), n_steps=3)
    skipping.seed(3)
    skipping.reset()
    played = []
    inner_step = skipping._env_step
    skipping._env_step = lambda action: played.append((skipping.env.actor_id().step_key, action)) or inner_step(action)
    actions = []
    for _ in range(2):
        action = skipping.action_space.sample()
        actions.append((skipping.actor_id().step_key, action))
        _, _, done, _ = skipping.step(action)
        assert not done
    assert played == actions * 3
    assert skipping.actor_id().step_key == 0
    assert skipping.get_env_time() == 3


def test_per_actor_rewards_of_skipped_steps_belong_to_the_repeated_decisions():
    env = StepSkipWrapper.wrap(two_step_env(length=5), n_steps=2)
    env.reset()
    shares = []
    for item in (2, 1, 3):
        first, second = env.step({"item": item})[1], env.step({"where": np.zeros(2, np.float32)})[1]
        shares.append(env.get_actor_rewards().tolist())
        assert first + second == sum(shares[-1])
    assert shares == [[2 + 2, 10 + 20], [1 + 1, 30 + 40], [3, 50]]  # the episode has five steps


class Leaving(RandomWalkCoreEnv):
    """The actor of the third sub-step leaves, and that of the first one is reported with it."""

    def __init__(self, usual_info):
        super().__init__()
        self.usual_info, self.n_taken = usual_info, 0

    def step(self, maze_action):
        self.n_taken += 1
        info = {ACTORS_DONE_KEY: [2]} if self.n_taken == 3 else self.usual_info
        return self.get_maze_state(), 0.0, False, info

    def is_actor_done(self):
        return self.n_taken == 3


@pytest.mark.parametrize("usual_info", [{}, None])
def test_actors_that_leave_in_skipped_steps_are_those_of_the_repeated_decisions(usual_info):
    env = StepSkipWrapper.wrap(random_walk_env(), n_steps=2)
    env.env.core_env = Leaving(usual_info)
    env.reset()
    action = {"push": np.zeros(3, np.float32)}
    assert env.step(action)[3] == usual_info
    assert not env.is_actor_done()
    assert env.step(action)[3] == {ACTORS_DONE_KEY: [0, 1]}
    assert env.is_actor_done()


def test_the_noop_action_is_that_of_the_action_conversion():
    env = GymMazeEnv(CountingEnv())
    played = []
    env.action_conversion_dict[0].noop_action = lambda: {"action": 1}
    skipping = StepSkipWrapper.wrap(env, n_steps=3, skip_mode="noop")
    inner_step = skipping._env_step
    skipping._env_step = lambda action: played.append(action["action"]) or inner_step(action)
    skipping.reset()
    skipping.step({"action": 0})
    assert played == [0, 1, 1]


@pytest.mark.parametrize("arguments", [{"n_steps": 0}, {"n_steps": 1.5}, {"n_steps": 2, "skip_mode": "stick"}])
def test_faults_in_the_arguments_of_skipping_are_named(arguments):
    with pytest.raises(ConfigError, match="StepSkipWrapper"):
        StepSkipWrapper.wrap(GymMazeEnv(CountingEnv()), **arguments)
