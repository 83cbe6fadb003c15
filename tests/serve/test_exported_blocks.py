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

N_GROUPS = 4


class Blocks(nn.Module):
    """Blocks side by side: the export of one network costs most of a second, whatever it consists of."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = {}
        for name, block in self.blocks.items():
            found = block({key: inputs[f"{name}/{key}"] for key in block.in_keys})
            outputs |= {f"{name}/{key}": found[key] for key in block.out_keys}
        return outputs


@pytest.mark.slow
@pytest.mark.parametrize("group", range(N_GROUPS))
def test_every_block_is_exported_with_any_batch_size(group: int) -> None:
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
        blocks = {case: CASES[case](data).eval() for case in [*CASES][group::N_GROUPS]}

        def inputs_of(n_rows: int) -> dict[str, torch.Tensor]:
            found = {name: random_input(block, (n_rows,)) for name, block in blocks.items()}
            return {f"{name}/{key}": value for name, values in found.items() for key, value in values.items()}

        network, inputs = Blocks(blocks), inputs_of(3)
        keys, out_keys = list(inputs), [f"{name}/{key}" for name, block in blocks.items() for key in block.out_keys]
        content, heads = as_graph(network, list(inputs.values()), keys, out_keys)
        names = {key: f"observation/{key}" for key in keys}
        graph = BundledNetwork(content, {"inputs": names, "outputs": {head: f"logits/{head}" for head in heads}})
        for n_rows in (1, 3, 7):
            batch = inputs_of(n_rows)
            with torch.inference_mode():
                expected = network(batch)
            found = graph({key: value.numpy() for key, value in batch.items()})
            assert list(found) == out_keys
            for key, values in found.items():
                np.testing.assert_allclose(values, expected[key].numpy(), rtol=1e-5, atol=1e-5, err_msg=key)

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
