"""What is cloned at the beginning of a run."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from maze.core.agent.policy import Policy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.warm_start import WarmStart, clone_policy, start_warm
from maze.train.trainers.dqn.dqn_algorithm_config import DQNAlgorithmConfig
from maze.train.trainers.offline.offline_algorithm_configs import CQLConfig


class Nothing(gym.Env):
    """Whatever is done, nothing is seen."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


class AlwaysTwo(Policy):
    def seed(self, seed):
        pass

    def needs_state(self):
        return False

    def compute_action(self, observation, maze_state=None, env=None, actor_id=None, deterministic=False):
        return {"action": 2}


class Biases(nn.Module):
    """Logits that are the same whatever is seen."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(4))

    def forward(self, observation):
        return {"action": self.logits.expand(len(observation["observation"]), 4)}


def cloned(entropy_coef):
    env = GymMazeEnv(Nothing())
    policy = TorchPolicy({0: Biases()}, DistributionMapper(env.action_space, {}), "cpu")
    rollouts = RolloutGenerator(SequentialVectorEnv([lambda: env]))
    config = WarmStart(n_steps=100, n_epochs=1500, batch_size=100, lr=0.02, entropy_coef=entropy_coef)
    likelihood = clone_policy(policy, AlwaysTwo(), rollouts, config, seed=1)
    probabilities = policy.networks[0].logits.detach().softmax(-1).numpy()
    assert likelihood == pytest.approx(probabilities[2], abs=0.01)
    return probabilities


def test_a_cloned_policy_reproduces_the_demonstrated_actions():
    assert cloned(0.0)[2] > 0.99


def test_demonstrated_actions_outside_their_space_are_refused():
    policy = TorchPolicy({0: Biases()}, DistributionMapper(GymMazeEnv(Nothing()).action_space, {}), "cpu")
    narrow = Nothing()
    narrow.action_space = gym.spaces.Discrete(2)
    rollouts = RolloutGenerator(SequentialVectorEnv([lambda: GymMazeEnv(narrow)]))
    with pytest.raises(
        ConfigError, match=r"AlwaysTwo.*`action` of sub-step 0 is not always an element of Discrete\(2\)"
    ):
        clone_policy(policy, AlwaysTwo(), rollouts, WarmStart(n_steps=10), seed=1)


@pytest.mark.parametrize("coefficient", [0.2, 0.5])
def test_actions_that_were_never_taken_keep_the_probability_of_the_entropy_regularised_optimum(coefficient):
    # where the gradient of log p[2] + coefficient * entropy vanishes: p[other] / p[2] = exp(-1 / (coefficient * p[2]))
    probabilities = cloned(coefficient)
    expected = np.exp(-1 / (coefficient * probabilities[2]))
    np.testing.assert_allclose(probabilities[[0, 1, 3]] / probabilities[2], expected, rtol=0.1)


def test_a_weight_below_zero_is_refused():
    with pytest.raises(ConfigError, match=r"warm_start\.entropy_coef: expected a number of at least 0"):
        WarmStart(entropy_coef=-0.1)


def test_a_policy_that_takes_the_spaces_of_the_environment_is_cloned():
    env = GymMazeEnv(Nothing())
    policy = TorchPolicy({0: Biases()}, DistributionMapper(env.action_space, {}), "cpu")
    with torch.no_grad():
        policy.networks[0].logits[0] = 2.0
    trainer = SimpleNamespace(policy=policy, observation_statistics=None)
    section = {
        "policy": {"_target_": "maze.core.agent.random_policy.RandomPolicy"},
        "n_steps": 500, "n_epochs": 60, "batch_size": 500, "lr": 0.1,
    }  # fmt: skip
    start_warm(trainer, section, lambda: RolloutGenerator(SequentialVectorEnv([lambda: env])), lambda: 1)
    np.testing.assert_allclose(policy.networks[0].logits.detach().softmax(-1).numpy(), [0.25] * 4, atol=0.06)


@pytest.mark.parametrize("config", [DQNAlgorithmConfig(), CQLConfig()])
def test_values_of_actions_are_not_cloned(config: AlgorithmConfig):
    mapper = DistributionMapper(GymMazeEnv(Nothing()).action_space, list(config.distributions))
    trainer = SimpleNamespace(policy=TorchPolicy({0: Biases()}, mapper, "cpu"), config=config)
    with pytest.raises(ConfigError, match="cloning needs a policy with probabilities of actions"):
        start_warm(trainer, {"policy": AlwaysTwo()}, RolloutGenerator, int)
