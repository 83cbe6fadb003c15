"""Evaluation: unbiased, reproducible, and reported to the model selection."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.evaluators.multi_evaluator import MultiEvaluator
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection


class CoinFlipEpisodes(gym.Env):
    """Episodes of 10 or 200 steps, equally likely, with a reward of 1 in each step."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.choice([10, 200]))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}


class Constant(nn.Module):
    """Logits that do not depend on the observation."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        batch = x["observation"].shape[:-1]
        return {"action": self.logits.expand(*batch, -1)}


def make_env():
    return GymMazeEnv(env=CoinFlipEpisodes())


def make_policy(logits=(0.0, 0.0)):
    mapper = DistributionMapper(action_space=make_env().action_space, distribution_mapper_config={})
    policy = TorchPolicy(networks={0: Constant(list(logits))}, distribution_mapper=mapper, device="cpu")
    policy.seed(1)
    return policy


def make_vector_env(n_envs, seed=0):
    env = SequentialVectorEnv([make_env] * n_envs)
    env.seed(list(range(seed, seed + n_envs)))
    return env


def reward_stats(env, name="mean"):
    return env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name=name)


def test_short_episodes_are_not_favoured():
    env = make_vector_env(8)
    evaluator = RolloutEvaluator(env, n_episodes=8, model_selection=None)
    means = []
    for _ in range(30):
        evaluator.evaluate(make_policy())
        means.append(reward_stats(env))
    assert np.mean(means) == pytest.approx(105, abs=20)  # the first eight to finish would give about 47


@pytest.mark.parametrize(
    ("n_episodes", "n_envs", "expected"), [(8, 8, [1] * 8), (5, 2, [3, 2]), (1, 3, [1, 0, 0]), (7, 3, [3, 2, 2])]
)
def test_episodes_are_shared_out_evenly_and_counted_exactly(n_episodes, n_envs, expected):
    env = make_vector_env(n_envs)
    evaluator = RolloutEvaluator(env, n_episodes, model_selection=None)
    assert evaluator.episodes_per_env(n_envs).tolist() == expected
    for _ in range(2):  # what an evaluation leaves unfinished does not count for the next one
        evaluator.evaluate(make_policy())
        assert reward_stats(env, "episode_count") == n_episodes
        assert reward_stats(env, "min") in (10, 200)


def test_mean_reward_is_reported_to_the_model_selection():
    env = make_vector_env(2)
    selection = BestModelSelection(None, None)
    RolloutEvaluator(env, 4, selection).evaluate(make_policy())
    assert selection.best_reward == pytest.approx(reward_stats(env))


def test_the_evaluator_reports_which_model_is_kept():
    env = SequentialVectorEnv([make_env] * 2)
    for keep in ("best", "latest"):
        selection = BestModelSelection(None, None)
        RolloutEvaluator(env, 2, selection, keep=keep).evaluate(make_policy())
        assert selection.keeps_latest == (keep == "latest")
    with pytest.raises(ConfigError, match=r"rollout_evaluator\.keep: expected `best` or `latest`, found 'first'"):
        RolloutEvaluator(env, 2, None, keep="first")


def test_a_single_environment_with_statistics_can_be_evaluated():
    env = LogStatsWrapper.wrap(make_env(), logging_prefix="eval")
    env.seed(3)
    selection = BestModelSelection(None, None)
    RolloutEvaluator(eval_env=env, n_episodes=3, model_selection=selection).evaluate(make_policy())
    assert reward_stats(env, "episode_count") == 3
    assert selection.best_reward == reward_stats(env)


class ActionReward(CoinFlipEpisodes):
    """Pays for action 1."""

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(action), terminated, truncated, info


def test_deterministic_evaluation_takes_the_most_probable_action_and_is_reproducible():
    results = []
    for _ in range(2):
        env = SequentialVectorEnv([lambda: GymMazeEnv(env=ActionReward())] * 2)
        env.seed([1, 2])
        RolloutEvaluator(env, 4, None, deterministic=True).evaluate(make_policy((0.0, 0.1)))
        results.append(reward_stats(env))
    steps = reward_stats(env, "mean_step_count")
    assert results == [steps, steps]  # a reward in every step


def test_evaluation_puts_networks_back_into_the_mode_they_were_in():
    policy = make_policy()
    evaluator = RolloutEvaluator(make_vector_env(1), 1, None)
    policy.train()
    evaluator.evaluate(policy)
    assert policy.networks[0].dropout.training
    policy.eval()
    evaluator.evaluate(policy)
    assert not policy.networks[0].dropout.training


@pytest.mark.parametrize("deterministic", [True, False])
def test_random_numbers_of_training_are_independent_of_the_evaluation(deterministic):
    policy = make_policy()
    expected = str(policy.rng_state())
    evaluator = RolloutEvaluator(make_vector_env(2), 2, None, deterministic)
    evaluator.evaluate(policy)
    assert str(policy.rng_state()) == expected
    evaluator.eval_env.step = None  # any error
    with pytest.raises(TypeError):
        evaluator.evaluate(policy)
    assert str(policy.rng_state()) == expected


def test_evaluations_sample_new_actions_and_resume_with_the_same_ones():
    def evaluated(evaluator, policy):
        evaluator.evaluate(policy)
        return reward_stats(evaluator.eval_env)

    def make_evaluator():
        env = SequentialVectorEnv([lambda: GymMazeEnv(env=ActionReward())] * 2)
        env.seed([1, 2])
        return RolloutEvaluator(env, 4, None)

    policy, evaluator = make_policy(), make_evaluator()
    first = evaluated(evaluator, policy)
    state = evaluator.state_dict()
    later = [evaluated(evaluator, policy) for _ in range(3)]
    assert len({first, *later}) > 1
    continued = make_evaluator()
    assert continued.load_state_dict(state) == []
    assert [evaluated(continued, make_policy()) for _ in range(3)] == later


def test_several_evaluators_run_in_order():
    calls = []

    class Recording(RolloutEvaluator):
        def evaluate(self, policy):
            calls.append(self.n_episodes)

    MultiEvaluator([Recording(None, 2, None), Recording(None, 1, None)]).evaluate(make_policy())
    assert calls == [2, 1]


def test_statistics_are_aggregated_as_usual_after_an_evaluation():
    env = make_vector_env(1)
    RolloutEvaluator(env, 1, None).evaluate(make_policy())
    env.reset()
    actions = {"action": np.zeros(1, np.int64)}
    while True:
        _, _, dones, _ = env.step(actions)
        if dones[0]:
            break
    env.write_epoch_stats()
    assert reward_stats(env, "episode_count") == 1


def test_no_episodes_are_refused():
    with pytest.raises(ValueError, match="n_episodes"):
        RolloutEvaluator(None, 0, None)
