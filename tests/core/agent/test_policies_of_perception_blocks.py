"""Policies and critics whose networks are perception blocks, as the documentation builds them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchSharedStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.blocks.feed_forward.dense import DenseBlock
from maze.perception.blocks.general.torch_model_block import TorchModelBlock
from maze.perception.blocks.inference import InferenceBlock
from maze.perception.blocks.output.linear import LinearOutputBlock

OBSERVATION = spaces.Dict({"observation": spaces.Box(-1, 1, (4,), np.float32)})
ACTION = spaces.Dict({"action": spaces.Discrete(2)})
ACTOR = ActorID(0, 0)


class CartpolePolicyNet(nn.Module):
    def __init__(self, obs_shapes, action_logit_shapes):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_shapes["observation"][0], action_logit_shapes["action"][0]))

    def forward(self, x_dict):
        return {"action": self.net(x_dict["observation"])}


class CartpoleValueNet(nn.Module):
    def __init__(self, obs_shapes):
        super().__init__()
        self.value_net = nn.Sequential(nn.Linear(obs_shapes["observation"][0], 1))

    def forward(self, x_dict):
        return {"value": self.value_net(x_dict["observation"])}


def test_the_plain_python_example_acts_and_learns():
    shape = OBSERVATION["observation"].shape
    policy_net = TorchModelBlock(
        in_keys="observation",
        out_keys="action",
        in_shapes=shape,
        in_num_dims=[2],
        out_num_dims=2,
        net=CartpolePolicyNet({"observation": shape}, {"action": (2,)}),
    )
    mapper = DistributionMapper(
        action_space=ACTION,
        distribution_mapper_config=[
            {
                "action_space": gym.spaces.Discrete,
                "distribution": "maze.distributions.categorical.CategoricalProbabilityDistribution",
            }
        ],
    )
    value_net = TorchModelBlock(
        in_keys="observation",
        out_keys="value",
        in_shapes=shape,
        in_num_dims=[2],
        out_num_dims=2,
        net=CartpoleValueNet({"observation": shape}),
    )
    policy = TorchPolicy(networks={0: policy_net}, distribution_mapper=mapper, device="cpu")
    critic = TorchSharedStateCritic(
        networks={0: value_net}, obs_spaces_dict={0: OBSERVATION}, device="cpu", stack_observations=False
    )
    model = TorchActorCritic(policy=policy, critic=critic, device="cpu")
    record = StructuredSpacesRecord([SpacesRecord(ACTOR, observation={"observation": torch.ones(6, 4)})])
    policy_output, critic_output = model.compute_actor_critic_output(record)
    assert policy_output[0].entropy.shape == critic_output.values[0].shape == (6,)
    assert ACTION.contains(policy.compute_action({"observation": np.ones(4, np.float32)}, actor_id=ACTOR))


@pytest.mark.parametrize("non_lin", [nn.ReLU, nn.Tanh, nn.SELU])
def test_an_inference_block_acts_in_numpy_with_the_logits_of_torch(non_lin):
    latent = DenseBlock("observation", "latent", (4,), hidden_units=[16, 16], non_lin=non_lin)
    head = LinearOutputBlock("latent", "action", latent.out_shapes(), output_units=2)
    network = InferenceBlock("observation", "action", (4,), perception_blocks={"latent": latent, "action": head})
    policy = TorchPolicy({0: network}, DistributionMapper(ACTION, []), "cpu")
    observation = {"observation": np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)}
    untouched = observation["observation"].copy()
    logits = {"action": np.empty((7, 2), np.float32)}
    policy.compute_actions(observation, ACTOR, logits_out=logits)
    assert policy._actors[0].runs_in_numpy
    expected = policy.compute_substep_policy_output(observation, ACTOR).action_logits["action"].detach().numpy()
    np.testing.assert_allclose(logits["action"], expected, atol=1e-5)
    np.testing.assert_array_equal(observation["observation"], untouched)
