"""Time of ``TorchPolicy.compute_actions`` for the built-in models on CartPole's spaces, in NumPy and in torch.

Run ``python benchmarks/acting.py [--quick]``. The variants take turns, so that what else the machine does hits all of
them; figures are medians, and ratios compare within one round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import numpy as np
import torch
from gymnasium import spaces
from hydra import compose, initialize_config_module
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.structured_env import ActorID
from maze.core.utils.factory import Factory
from maze.perception.models.model_composer import BaseModelComposer

ACTOR = ActorID(0, 0)


class TorchOnly(nn.Module):
    """Hides that a network has a NumPy form."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The network's outputs."""
        outputs: dict[str, torch.Tensor] = self.network(x)
        return outputs


def build_policy(model: str, torch_only: bool = False) -> TorchPolicy:
    """The policy of a model configuration."""
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_train", overrides=["env.name=CartPole-v1", f"model={model}"])
    composer = Factory(BaseModelComposer).instantiate(  # type: ignore[type-abstract]  # built from a subclass
        cfg.model,
        config_path="model",
        action_spaces_dict={0: spaces.Dict({"action": spaces.Discrete(2)})},
        observation_spaces_dict={0: spaces.Dict({"observation": spaces.Box(-1, 1, (4,), np.float32)})},
        agent_counts_dict={0: 1},
    )
    policy = composer.policy
    assert policy is not None
    if torch_only:
        policy.networks[0] = TorchOnly(policy.networks[0])
    return policy


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    n_rounds = 100 if parser.parse_args().quick else 1000
    torch.set_num_threads(1)
    policies = {
        "vector_obs": build_policy("vector_obs"),
        "vector_obs in torch": build_policy("vector_obs", torch_only=True),
        "flatten_concat": build_policy("flatten_concat"),
    }
    for batch_size in (1, 8, 64):
        rng = np.random.default_rng(0)
        observation = {"observation": rng.standard_normal((batch_size, 4), dtype=np.float32)}
        functions = {name: partial(policy.compute_actions, observation, ACTOR) for name, policy in policies.items()}
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(n_rounds):
            for name, function in functions.items():
                start = time.perf_counter()
                for _ in range(10):
                    function()
                times[name].append((time.perf_counter() - start) * 1e5)
        for name, values in times.items():
            ratio = statistics.median(a / b for a, b in zip(values, times["flatten_concat"], strict=True))
            print(f"batch {batch_size:3d}  {name:22s} {statistics.median(values):8.1f} us   ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
