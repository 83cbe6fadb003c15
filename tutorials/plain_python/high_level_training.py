"""Train and evaluate a policy with own networks through `RunContext`."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym
import torch
from torch import nn

from maze.api.run_context import RunContext
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.blocks.general.torch_model_block import TorchModelBlock
from maze.perception.models.critics.shared_state_critic_composer import SharedStateCriticComposer
from maze.perception.models.policies import ProbabilisticPolicyComposer
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator


def cartpole_env_factory() -> GymMazeEnv:
    """Create an environment. Training needs several, so it takes a function."""
    # GymMazeEnv("CartPole-v1") does the same; this way, the environment could be one of your own.
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


def train(n_epochs: int, epoch_length: int = 25, n_rollout_steps: int = 100) -> int:
    """Train in this process, continue in several, and evaluate.

    :param n_epochs: Number of epochs of each run.
    :param epoch_length: Number of updates of an epoch.
    :param n_rollout_steps: Number of steps in each environment for an update.
    :return: 0.
    """
    env = cartpole_env_factory()
    observation_shape = env.observation_space.spaces["observation"].shape

    # The algorithm: its hyperparameters, and how the policy is evaluated between two epochs.
    algorithm_config = A2CAlgorithmConfig(
        n_epochs=5,
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
            eval_env=SequentialVectorEnv([cartpole_env_factory]),
            n_episodes=1,
            model_selection=None,
            deterministic=True,
        ),
    )

    # The policy: a network for each sub-step, and the distributions that actions are drawn from.
    policy_net = CartpolePolicyNet(
        obs_shapes={"observation": observation_shape},
        action_logit_shapes={"action": (env.action_space.spaces["action"].n,)},
    )
    policy_composer = ProbabilisticPolicyComposer(
        action_spaces_dict=env.action_spaces_dict,
        observation_spaces_dict=env.observation_spaces_dict,
        distribution_mapper=DistributionMapper(action_space=env.action_space, distribution_mapper_config={}),
        networks=[policy_net],
        substeps_with_separate_agent_nets=[],
        agent_counts_dict={0: 1},
    )

    # The critic: a network that is wrapped, so that it may rely on the shape of what it gets.
    value_networks = {
        0: TorchModelBlock(
            in_keys="observation",
            out_keys="value",
            in_shapes=observation_shape,
            in_num_dims=[2],
            out_num_dims=2,
            net=CartpoleValueNet({"observation": observation_shape}),
        )
    }
    critic_composer = SharedStateCriticComposer(
        observation_spaces_dict=env.observation_spaces_dict,
        agent_counts_dict={0: 1},
        networks=value_networks,
        stack_observations=True,
    )

    # Training in this process, ...
    rc = RunContext(
        env=cartpole_env_factory,
        algorithm=algorithm_config,
        policy=policy_composer,
        critic=critic_composer,
        runner="dev",
    )
    rc.train(n_epochs=n_epochs)

    # ... and then, with the same networks, in several.
    algorithm_config.rollout_evaluator.eval_env = SubprocVectorEnv([cartpole_env_factory])
    rc = RunContext(
        env=cartpole_env_factory,
        algorithm=algorithm_config,
        policy=policy_composer,
        critic=critic_composer,
        runner="local",
    )
    rc.train(n_epochs=n_epochs)

    # Evaluation. The evaluator reads statistics, which a wrapper collects.
    print("-----------------")
    evaluator = RolloutEvaluator(
        eval_env=LogStatsWrapper.wrap(cartpole_env_factory(), logging_prefix="eval"),
        n_episodes=1,
        model_selection=None,
    )
    evaluator.evaluate(rc.policy)

    rc.close()
    algorithm_config.rollout_evaluator.eval_env.close()
    return 0


if __name__ == "__main__":
    train(n_epochs=1)
