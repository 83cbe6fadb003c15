"""The documentation's complete listing of a run in plain Python runs as it is written."""

import warnings
from collections.abc import Sequence

import gymnasium as gym
import pytest
import torch
from torch import nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchSharedStateCritic
from maze.core.log_stats.log_stats import StatsContext
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.checkpoint import load_state
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.blocks.general.torch_model_block import TorchModelBlock
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.utils.log_stats_utils import setup_logging


def cartpole_env_factory():
    cartpole_env = gym.make("CartPole-v0")
    maze_env = GymMazeEnv(env=cartpole_env)
    maze_env = GymMazeEnv(env="CartPole-v0")
    return maze_env  # noqa: RET504 (as in the documentation)


class CartpolePolicyNet(nn.Module):
    def __init__(self, obs_shapes: dict[str, Sequence[int]], action_logit_shapes: dict[str, Sequence[int]]):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(in_features=obs_shapes["observation"][0], out_features=action_logit_shapes["action"][0])
        )

    def forward(self, x_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"action": self.net(x_dict["observation"])}


class CartpoleValueNet(nn.Module):
    def __init__(self, obs_shapes: dict[str, Sequence[int]]):
        super().__init__()
        self.value_net = nn.Sequential(nn.Linear(in_features=obs_shapes["observation"][0], out_features=1))

    def forward(self, x_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"value": self.value_net(x_dict["observation"])}


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with StatsContext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the listing's CartPole-v0 is out of date
        yield tmp_path


def test_low_level_listing_trains_and_keeps_the_best_model(in_temporary_directory, capsys):
    env = cartpole_env_factory()
    observation_space = env.observation_space
    action_space = env.action_space
    policy_net = CartpolePolicyNet(
        obs_shapes={"observation": observation_space.spaces["observation"].shape},
        action_logit_shapes={"action": (action_space.spaces["action"].n,)},
    )
    maze_wrapped_policy_net = TorchModelBlock(
        in_keys="observation",
        out_keys="action",
        in_shapes=observation_space.spaces["observation"].shape,
        in_num_dims=[2],
        out_num_dims=2,
        net=policy_net,
    )
    policy_networks = {0: maze_wrapped_policy_net}
    distribution_mapper = DistributionMapper(action_space=action_space, distribution_mapper_config={})
    torch_policy = TorchPolicy(networks=policy_networks, distribution_mapper=distribution_mapper, device="cpu")
    value_net = CartpoleValueNet(obs_shapes={"observation": observation_space.spaces["observation"].shape})
    maze_wrapped_value_net = TorchModelBlock(
        in_keys="observation",
        out_keys="value",
        in_shapes=observation_space.spaces["observation"].shape,
        in_num_dims=[2],
        out_num_dims=2,
        net=value_net,
    )
    torch_critic = TorchSharedStateCritic(
        networks={0: maze_wrapped_value_net},
        obs_spaces_dict=env.observation_spaces_dict,
        device="cpu",
        stack_observations=False,
    )
    actor_critic_model = TorchActorCritic(policy=torch_policy, critic=torch_critic, device="cpu")
    algorithm_config = A2CAlgorithmConfig(
        n_epochs=1,
        epoch_length=2,  # 25 in the listing
        patience=15,
        critic_burn_in_epochs=0,
        n_rollout_steps=100,
        lr=0.0005,
        gamma=0.98,
        gae_lambda=1.0,
        policy_loss_coef=1.0,
        value_loss_coef=0.5,
        entropy_coef=0.00025,
        max_grad_norm=0.0,
        device="cpu",
        rollout_evaluator=RolloutEvaluator(
            eval_env=SequentialVectorEnv([cartpole_env_factory]),
            n_episodes=1,
            model_selection=None,
            deterministic=True,
        ),
    )
    train_envs = SequentialVectorEnv([cartpole_env_factory for _ in range(2)], logging_prefix="train")
    model_selection = BestModelSelection(dump_file="params.pt", model=actor_critic_model)
    a2c_trainer = A2C(
        rollout_generator=RolloutGenerator(train_envs),
        evaluator=algorithm_config.rollout_evaluator,
        algorithm_config=algorithm_config,
        model=actor_critic_model,
        model_selection=model_selection,
    )
    setup_logging(job_config=None, log_dir=".")
    a2c_trainer.train()
    a2c_trainer.evaluate(deterministic=False, repeats=1)

    assert set(load_state("params.pt")) == {"policies", "critics"}
    assert any("train" in line and "policy_loss" in line for line in capsys.readouterr().out.splitlines())
