"""Export of all perception blocks, and of plain modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.distributions.torch_dist import TorchProbabilityDistribution
from maze.serve.bundle import BundledNetwork, PolicyBundle
from maze.serve.export import ExportError, as_graph, export_policy
from tests.perception.blocks.block_cases import CASES, random_input
from tests.serve.conftest import policy_for

ONE_OF_A_KIND = ("action_masking", "graph_attention", "lstm_last_step", "recurrent_cell", "vgg")


@pytest.mark.parametrize(
    "case", [case if case in ONE_OF_A_KIND else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
@pytest.mark.slow
def test_every_block_is_exported_with_any_batch_size(case):
    @settings(
        max_examples=1,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        torch.manual_seed(0)
        block = CASES[case](data).eval()
        keys = list(dict.fromkeys(block.in_keys))
        inputs = random_input(block, (3,))
        content, heads = as_graph(block, [inputs[key] for key in keys], keys, block.out_keys)
        names = {key: f"observation/{key}" for key in keys}
        network = BundledNetwork(content, {"inputs": names, "outputs": {head: f"logits/{head}" for head in heads}})
        for n_rows in (1, 3, 7):
            batch = random_input(block, (n_rows,))
            with torch.inference_mode():
                expected = block(dict(batch))
            found = network({key: value.numpy() for key, value in batch.items()})
            assert list(found) == block.out_keys
            for key, values in found.items():
                np.testing.assert_allclose(values, expected[key].numpy(), rtol=1e-5, atol=1e-5)

    check()


class PlainNetwork(nn.Module):
    """A network as people write them: two heads, one embedding, an observation that it does not look at."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 8, batch_first=True)
        self.heads = nn.ModuleDict({"action": nn.Linear(8, 2)})

    def forward(self, observations: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden, _ = self.gru(observations["observation"].reshape(-1, 2, 2))
        return {"embedding": hidden[:, -1], "action": self.heads["action"](nn.functional.gelu(hidden[:, -1]))}


@pytest.mark.slow
def test_plain_modules_are_exported():
    env = GymMazeEnv("CartPole-v1")
    torch.manual_seed(0)
    policy = TorchPolicy({0: PlainNetwork()}, DistributionMapper(env.action_space, {}), "cpu")
    bundle = PolicyBundle(export_policy(policy, env, n_steps=50), check=1e-5)
    assert list(bundle.act_batch(0, {"observation": np.zeros((2, 4))}).logits) == ["action"]


class Looping(nn.Module):
    """What depends on values in Python is not a graph."""

    def forward(self, observations: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        value = observations["observation"]
        while value.sum() > 0.5:
            value = value / 2
        return {"action": value[:, :2]}


def test_networks_that_are_no_graph_are_refused_in_one_sentence():
    env = GymMazeEnv("CartPole-v1")
    policy = TorchPolicy({0: Looping()}, DistributionMapper(env.action_space, {}), "cpu")
    with pytest.raises(ExportError, match=r"The network of sub-step 0 \(Looping\) cannot be exported as an ONNX graph"):
        export_policy(policy, env, n_steps=5)


def test_distributions_of_ones_own_are_refused():
    class Own(TorchProbabilityDistribution[torch.distributions.Normal]):
        """Normal with a fixed deviation."""

        def __init__(self, logits, action_space, temperature=1.0):
            super().__init__(torch.distributions.Normal(logits, 1.0), action_space)

        @classmethod
        def required_logits_shape(cls, action_space):
            return action_space.shape

        def deterministic_sample(self):
            return self.dist.mean

    env = GymMazeEnv("Pendulum-v1")
    policy = policy_for(env, [{"action_space": spaces.Box, "distribution": Own}])
    with pytest.raises(ExportError, match=r"`action` has the custom distribution .*Own"):
        export_policy(policy, env, n_steps=5)
