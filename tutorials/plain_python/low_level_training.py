"""Train a policy from its components: networks, policy, critic, environments, trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gymnasium as gym
import torch
from torch import nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchSharedStateCritic
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.blocks.general.torch_model_block import TorchModelBlock
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.utils.log_stats_utils import setup_logging


def cartpole_env_factory() -> GymMazeEnv:
    """Make one environment."""
    return GymMazeEnv(env=gym.make("CartPole-v1"))


class CartpolePolicyNet(nn.Module):
    """Policy network: observations to logits."""

    def __init__(self, obs_shapes: dict[str, Sequence[int]], action_logit_shapes: dict[str, Sequence[int]]) -> None:
        super().__init__()
        self.net = nn.Linear(obs_shapes["observation"][0], action_logit_shapes["action"][0])

    def forward(self, x_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"action": self.net(x_dict["observation"])}


class CartpoleValueNet(nn.Module):
    """Critic network: observations to the value."""

    def __init__(self, obs_shapes: dict[str, Sequence[int]]) -> None:
        super().__init__()
        self.value_net = nn.Linear(obs_shapes["observation"][0], 1)

    def forward(self, x_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"value": self.value_net(x_dict["observation"])}


def train(n_epochs: int, epoch_length: int = 25, n_rollout_steps: int = 100, log_dir: str = ".") -> int:
    """Train, and evaluate the final policy.

    :param n_epochs: Number of epochs.
    :param epoch_length: Number of updates of an epoch.
    :param n_rollout_steps: Number of steps in each environment for an update.
    :param log_dir: Directory for the best model's weights and for TensorBoard.
    :return: 0.
    """
    env = cartpole_env_factory()
    observation_shape = env.observation_space.spaces["observation"].shape

    # The policy: a network for each sub-step, and the distributions that actions are drawn from.
    policy_networks = {
        0: TorchModelBlock(
            in_keys="observation",
            out_keys="action",
            in_shapes=observation_shape,
            in_num_dims=[2],
            out_num_dims=2,
            net=CartpolePolicyNet(
                obs_shapes={"observation": observation_shape},
                action_logit_shapes={"action": (env.action_space.spaces["action"].n,)},
            ),
        )
    }
    # Categorical is what a discrete action has by default; this is how another distribution would be named.
    distribution_mapper = DistributionMapper(
        action_space=env.action_space,
        distribution_mapper_config=[
            {
                "action_space": gym.spaces.Discrete,
                "distribution": "maze.distributions.categorical.CategoricalProbabilityDistribution",
            }
        ],
    )
    torch_policy = TorchPolicy(networks=policy_networks, distribution_mapper=distribution_mapper, device="cpu")

    # The critic, and both together.
    value_networks = {
        0: TorchModelBlock(
            in_keys="observation",
            out_keys="value",
            in_shapes=observation_shape,
            in_num_dims=[2],
            out_num_dims=2,
            net=CartpoleValueNet(obs_shapes={"observation": observation_shape}),
        )
    }
    torch_critic = TorchSharedStateCritic(
        networks=value_networks,
        obs_spaces_dict=env.observation_spaces_dict,
        device="cpu",
        stack_observations=False,
    )
    actor_critic_model = TorchActorCritic(policy=torch_policy, critic=torch_critic, device="cpu")

    # Environments that are stepped together, in this process.
    train_envs = SequentialVectorEnv([cartpole_env_factory for _ in range(2)], logging_prefix="train")
    eval_envs = SequentialVectorEnv([cartpole_env_factory for _ in range(2)], logging_prefix="eval")

    # The weights of the best evaluation are kept.
    model_selection = BestModelSelection(dump_file=str(Path(log_dir) / "params.pt"), model=actor_critic_model)
    algorithm_config = A2CAlgorithmConfig(
        n_epochs=n_epochs,
        epoch_length=epoch_length,
        patience=15,
        critic_burn_in_epochs=0,
        n_rollout_steps=n_rollout_steps,
        lr=0.0005,
        gamma=0.98,
        gae_lambda=1.0,
        policy_loss_coef=1.0,
        value_loss_coef=0.5,
        entropy_coef=0.00025,
        max_grad_norm=0.0,
        device="cpu",
        rollout_evaluator=RolloutEvaluator(
            eval_env=eval_envs,
            n_episodes=2,
            model_selection=model_selection,
            deterministic=True,
        ),
    )
    a2c_trainer = A2C(
        rollout_generator=RolloutGenerator(train_envs),
        evaluator=algorithm_config.rollout_evaluator,
        algorithm_config=algorithm_config,
        model=actor_critic_model,
        model_selection=model_selection,
    )

    setup_logging(job_config=None, log_dir=log_dir)
    a2c_trainer.train()
    a2c_trainer.evaluate(deterministic=False, repeats=1)
    return 0


if __name__ == "__main__":
    train(n_epochs=5)
