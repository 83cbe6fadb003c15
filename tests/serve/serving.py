"""Small bundles, and servers on the loopback interface that end with their context."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import gymnasium as gym
import torch
import uvicorn
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.maze_env import MazeEnv
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.observation_stack_wrapper import ObservationStackWrapper
from maze.core.wrappers.random_reset_wrapper import StepSkipWrapper
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from maze.serve.app import Application, Limits, Tokens
from maze.serve.bundle import PolicyBundle
from maze.serve.decision_log import DecisionLog
from maze.serve.export import export_policy
from maze.serve.policies import Policies
from maze.serve.served import Settings
from maze.serve.server import server_config
from tests.train.trainers.common.recurrent_models import recurrent_model
from tutorial_maze_env.part06_struct_env.env.struct_env_masked import struct_env_factory
from tutorial_maze_env.part06_struct_env.models.actor import CuttingPolicyNet, PieceSelectionPolicyNet


class Always(nn.Module):
    """Prefer one of two actions, independent of the observation."""

    def __init__(self, action: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.eye(2)[action] * 5.0)

    def forward(self, observation: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"action": observation["observation"][:, :1] * 0.0 + self.logits}


def network_for(env: MazeEnv[Any], key: Any) -> nn.Module:
    observations = {name: space.shape for name, space in env.observation_spaces_dict[key].spaces.items()}
    mapper = DistributionMapper(env.action_space, {})
    actions = {head: mapper.required_logits_shape(head) for head in env.action_spaces_dict[key].spaces}
    return FlattenConcatPolicyNet(observations, actions, non_lin=nn.Tanh, hidden_units=[16])


def exported(env: MazeEnv[Any], networks: Mapping[Any, nn.Module] | None = None, name: str = "policy") -> bytes:
    torch.manual_seed(0)
    networks = networks or {key: network_for(env, key) for key in env.observation_spaces_dict}
    actions = {head: space for each in env.action_spaces_dict.values() for head, space in each.spaces.items()}
    policy = TorchPolicy(dict(networks), DistributionMapper(gym.spaces.Dict(actions), {}), device="cpu")
    return export_policy(policy, env, {"name": name}, n_steps=600)


@cache
def cartpole() -> bytes:
    """An untrained policy for CartPole."""
    return exported(GymMazeEnv("CartPole-v1"), name="cartpole")


@cache
def always(action: int) -> bytes:
    """A policy for CartPole that always does the same, with probability 0.993."""
    return exported(GymMazeEnv("CartPole-v1"), {0: Always(action)}, name=f"always {action}")


class ManyCartPoles(GymMazeEnv):
    """CartPole that declares a varying number of agents."""

    @property
    def agent_counts_dict(self) -> dict[Any, int]:
        return {0: -1}


@cache
def stacked(kind: type[GymMazeEnv] = GymMazeEnv) -> bytes:
    """An untrained policy for CartPole with three stacked observations."""
    env = ObservationStackWrapper.wrap(
        kind("CartPole-v1"),
        stack_config=[
            {"observation": "observation", "keep_original": False, "tag": None, "delta": False, "stack_steps": 3}
        ],
    )
    return exported(env, name="stacked")


@cache
def repeating() -> bytes:
    """A policy for CartPole that decides in every third step, always the same."""
    env = StepSkipWrapper.wrap(GymMazeEnv("CartPole-v1"), n_steps=3, skip_mode="sticky")
    return exported(env, {0: Always(1)}, name="repeating")


@cache
def remembering(index: int = 0) -> bytes:
    """An untrained policy for CartPole with carried hidden states; each index has weights of its own."""
    env = GymMazeEnv("CartPole-v1")
    policy = recurrent_model(env).policy
    for parameter in policy.parameters():
        parameter.data += 0.7 * torch.randn_like(parameter) + 0.01 * index
    return export_policy(policy, env, {"name": "remembering"}, n_steps=300)


@cache
def pendulum() -> bytes:
    """An untrained policy with continuous actions."""
    return exported(GymMazeEnv("Pendulum-v1"), name="pendulum")


@cache
def cutting() -> bytes:
    """An untrained policy for two masked sub-steps."""
    env = cutting_env()
    networks = {}
    for key, kind in enumerate((PieceSelectionPolicyNet, CuttingPolicyNet)):
        shapes = {name: space.shape for name, space in env.observation_spaces_dict[key].spaces.items()}
        heads = env.action_spaces_dict[key].spaces
        logits = {
            head: DistributionMapper(env.action_spaces_dict[key], {}).required_logits_shape(head) for head in heads
        }
        networks[key] = kind(shapes, logits, nn.Tanh, [16], use_masking=True)
    return exported(env, networks, name="cutting")


def cutting_env() -> MazeEnv[Any]:
    return struct_env_factory(max_pieces_in_inventory=20, raw_piece_size=(100, 100), static_demand=[(30, 15)])


def cartpole_observations(n: int, seed: int = 0) -> list[list[float]]:
    env = gym.make("CartPole-v1")
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    found = []
    for _ in range(n):
        found.append([float(value) for value in observation])
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            observation, _ = env.reset()
    return found


@contextmanager
def served(
    bundles: Mapping[str, bytes],
    *,
    weights: Mapping[str, float] | None = None,
    shadows: tuple[str, ...] = (),
    settings: Settings | None = None,
    limits: Limits | None = None,
    tokens: Tokens | None = None,
    log: DecisionLog | None = None,
) -> Iterator[tuple[str, Application]]:
    """A server in a thread of this process: its address, and the application."""
    policies = Policies(settings, log, seed=0)
    for index, (name, content) in enumerate(bundles.items()):
        weight = (weights or {}).get(name, 1.0 if index == 0 and not weights else 0.0)
        policies.add(name, PolicyBundle(content), weight, name in shadows)
    application = Application(policies, limits, tokens)
    server = uvicorn.Server(server_config(application))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 20.0
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", application
    finally:
        server.should_exit = True
        thread.join(20.0)
        assert not thread.is_alive()


@contextmanager
def command(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`maze-serve` as a process of its own: its address, and the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "maze.serve.server", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"http://\S+:\d+", json.loads(line)["message"]):
                yield found[0], process
                break
        else:
            raise AssertionError(f"ended with status {process.wait()}")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        process.stderr.close()


def metrics_of(text: str) -> dict[str, float]:
    """The values of an exposition by name and labels; fails where a line is none of the format."""
    found = {}
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            continue
        match = re.fullmatch(r'([a-z_]+(?:\{(?:[a-z_]+="(?:[^"\\]|\\.)*",?)+\})?) (-?[0-9.e+-]+)', line)
        assert match, line
        found[match[1]] = float(match[2])
    return found
