"""A policy and its bundle, exported once for a session of tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from maze.serve.export import export_policy


def policy_for(env: Any, mapping: Any = ()) -> TorchPolicy:
    """A policy with random weights of variance 1."""
    heads = {head: entry for space in env.action_spaces_dict.values() for head, entry in space.spaces.items()}
    mapper = DistributionMapper(spaces.Dict(heads), mapping)
    torch.manual_seed(0)
    networks: dict[Any, Any] = {
        key: FlattenConcatPolicyNet(
            {name: entry.shape for name, entry in space.spaces.items()},
            {head: mapper.required_logits_shape(head) for head in env.action_spaces_dict[key].spaces},
            [8],
            "torch.nn.Tanh",
        )
        for key, space in env.observation_spaces_dict.items()
    }
    policy = TorchPolicy(networks, mapper, "cpu")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_()
    return policy


@pytest.fixture(scope="session")
def exported() -> Callable[..., bytes]:
    """Exports a policy of :func:`policy_for` with few steps."""

    def export(env: Any, mapping: Any = (), n_steps: int = 60) -> bytes:
        return export_policy(policy_for(env, mapping), env, {"name": "test"}, n_steps=n_steps)

    return export


@pytest.fixture(scope="session")
def cartpole_bundle(exported: Callable[..., bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a policy for CartPole-v1."""
    path = tmp_path_factory.mktemp("bundle") / "cartpole.maze"
    path.write_bytes(exported(GymMazeEnv("CartPole-v1")))
    return path
