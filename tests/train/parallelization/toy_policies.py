"""Toy environments of all kinds, and policies that act in any of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.distributions.distribution_mapper import DistributionMapper
from tests.train.parallelization.toy_envs import coming_and_going_env, hierarchical_env, random_walk_env, two_step_env

ENVS = {
    "flat": random_walk_env,
    "two_step": partial(two_step_env, 3),
    "hierarchical": hierarchical_env,
    "coming_and_going": coming_and_going_env,
}


class Net(nn.Module):
    def __init__(self, key: str, n_inputs: int, heads: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.key = key
        self.shapes = heads
        self.layers = nn.ModuleDict({head: nn.Linear(n_inputs, int(np.prod(shape))) for head, shape in heads.items()})

    def forward(self, x: Any) -> Any:
        observed = x[self.key]
        return {
            head: net(observed).reshape(*observed.shape[:-1], *self.shapes[head]) for head, net in self.layers.items()
        }


def make_policy(env_factory: Any, seed: int = 0) -> TorchPolicy:
    torch.manual_seed(seed)
    env = env_factory()
    spaces = {head: space for of_step in env.action_spaces_dict.values() for head, space in of_step.items()}
    mapper = DistributionMapper(gym.spaces.Dict(spaces), {})
    networks = {}
    for step_key, space in env.observation_spaces_dict.items():
        key = next(name for name, sub in space.items() if len(sub.shape) == 1)
        heads = {head: tuple(mapper.required_logits_shape(head)) for head in env.action_spaces_dict[step_key]}
        networks[step_key] = Net(key, space[key].shape[0], heads)
    policy = TorchPolicy(networks, mapper, "cpu")
    policy.seed(seed)
    return policy
