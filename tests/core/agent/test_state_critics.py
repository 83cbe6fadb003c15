"""State critics and the actor-critic."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.state_critic_input_output import StateCriticInput, StateCriticStepInput
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchSharedStateCritic, TorchStepStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, ConfigError
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.distributions.distribution_mapper import DistributionMapper

SPACES = {
    0: spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32)}),
    1: spaces.Dict({"b": spaces.Box(-1, 1, (3,), np.float32)}),
}
T, N = 4, 2


class Sum(nn.Module):
    """Values an observation by the sum of the given keys' items, times a parameter."""

    def __init__(self, *keys, squeezed=False):
        super().__init__()
        self.keys = keys
        self.squeezed = squeezed
        self.factor = nn.Parameter(torch.ones(()))
        self.seen = {}

    def forward(self, x):
        self.seen = {key: tuple(tensor.shape) for key, tensor in x.items()}
        total = sum(x[key].flatten(2).sum(-1) if x[key].dim() > 2 else x[key].sum(-1) for key in self.keys)
        return {"value": self.factor * (total if self.squeezed else total.unsqueeze(-1))}


def critic_input(*tensor_dicts, keys=None):
    result = StateCriticInput()
    for index, tensors in enumerate(tensor_dicts):
        result.append(StateCriticStepInput(tensors, ActorID((keys or range(9))[index], 0)))
    return result


def two_substeps():
    return critic_input({"a": torch.full((T, N, 2), 1.0)}, {"b": torch.full((T, N, 3), 2.0)})


@pytest.mark.parametrize("squeezed", [False, True])
def test_a_step_critic_values_each_substep_by_its_network(squeezed):
    critic = TorchStepStateCritic({0: Sum("a", squeezed=squeezed), 1: Sum("b", squeezed=squeezed)}, SPACES, "cpu")
    output = critic.predict_values(two_substeps())
    assert [value.shape for value in output.values] == [(T, N)] * 2
    assert [value.mean().item() for value in output.values] == [2.0, 6.0]
    assert output.actor_ids == [ActorID(0, 0), ActorID(1, 0)]
    assert output[0].values.requires_grad
    assert not output[0].detached_values.requires_grad
    assert critic.predict_value({"b": np.ones((5, 3))}, 1)["value"].tolist() == [3.0] * 5
    assert critic.num_critics == 2
    output.reshape((T * N,))
    assert output.values[1].shape == (T * N,)


def test_a_shared_critic_values_the_whole_step_once():
    critic = TorchSharedStateCritic({0: Sum("a", "b")}, SPACES, "cpu", stack_observations=False)
    output = critic.predict_values(two_substeps())
    assert len(output) == critic.num_critics == 1
    assert output.values[0].mean().item() == 8.0


def test_a_shared_critic_stacks_what_agents_observe_under_the_same_key():
    network = Sum("a")
    critic = TorchSharedStateCritic({0: network}, {0: SPACES[0]}, "cpu", stack_observations=True)
    agents = critic_input(*({"a": torch.full((T, N, 2), float(agent))} for agent in range(3)), keys=[0, 0, 0])
    output = critic.predict_values(agents)
    assert network.seen == {"a": (T, N, 3, 2)}
    assert output.values[0].mean().item() == 6.0


def test_after_a_rollout_a_shared_critic_fills_in_what_it_knows_of_later_substeps():
    critic = TorchSharedStateCritic({0: Sum("a", "b")}, SPACES, "cpu", stack_observations=False)
    new, known = {"a": np.ones((N, 2))}, [{"a": np.full((N, 2), 9.0)}, {"b": np.ones((N, 3))}]
    assert critic.bootstrap_values(new, ActorID(0, 0), known).tolist() == [5.0] * N
    assert critic.bootstrap_values(new, ActorID(0, 0)).tolist() == [2.0] * N  # absent ones are zero
    assert not critic.bootstrap_values(new, ActorID(0, 0)).requires_grad


def test_a_delta_critic_predicts_differences_from_the_first_substep():
    critic = TorchDeltaStateCritic({0: Sum("a"), 1: Sum("b")}, SPACES, "cpu")
    output = critic.predict_values(two_substeps())
    assert [value.mean().item() for value in output.values] == [2.0, 8.0]
    output.values[1].sum().backward()
    assert critic.networks[0].factor.grad is None  # the difference's error is not the value's
    known = [{"a": np.ones((N, 2))}]
    assert critic.bootstrap_values({"b": np.ones((N, 3))}, ActorID(1, 0), known, 1).tolist() == [5.0] * N
    with pytest.raises(ConfigError, match="delta critic"):
        critic.bootstrap_values({"b": np.ones((N, 3))}, ActorID(1, 0))
    with pytest.raises(ConfigError, match="keys of their own"):
        critic.predict_values(critic_input({"a": torch.ones(1, 1, 2)}, {"a": torch.ones(1, 1, 2)}, keys=[0, 0]))


def test_the_last_step_of_a_stream_bootstraps_from_its_own_value():
    critic = TorchStepStateCritic({0: Sum("a")}, {0: SPACES[0]}, "cpu")
    column = lambda *values: torch.tensor(values, dtype=torch.float64).reshape(-1, 1)  # noqa: E731  # a table helper
    dones = torch.zeros(2, 1, dtype=torch.bool)
    returns = critic.compute_return(0.5, 1.0, column(0, 0), column(10, 20), dones)
    assert returns.flatten().tolist() == pytest.approx([5.0, 10.0])
    dones[0] = True
    assert critic.compute_return(0.5, 1.0, column(3, 0), column(10, 20), dones).flatten().tolist() == [3.0, 10.0]


def test_shared_and_delta_critics_sum_the_rewards_of_a_step_and_a_step_critic_keeps_them_apart():
    rewards = [torch.full((1, 1), 1.0), torch.full((1, 1), 10.0)]
    values, dones = [torch.zeros(1, 1), torch.zeros(1, 1)], torch.ones(1, 1, dtype=torch.bool)
    networks = {0: Sum("a"), 1: Sum("b")}
    step = TorchStepStateCritic(networks, SPACES, "cpu").compute_structured_return(0.9, 0.9, rewards, values, dones)
    delta = TorchDeltaStateCritic(networks, SPACES, "cpu").compute_structured_return(0.9, 0.9, rewards, values, dones)
    shared_critic = TorchSharedStateCritic({0: Sum("a", "b")}, SPACES, "cpu", False)
    shared = shared_critic.compute_structured_return(0.9, 0.9, rewards, values[:1], dones)
    assert [target.item() for target in step] == [1.0, 10.0]
    assert [target.item() for target in delta] == [11.0, 11.0]
    assert [target.item() for target in shared] == [11.0, 11.0]


def test_mistakes_of_networks_are_named():
    class Wrong(nn.Module):
        def __init__(self, output):
            super().__init__()
            self.output = output

        def forward(self, x):
            return self.output

    observation = {"a": np.ones((5, 2))}
    with pytest.raises(ConfigError, match=r"networks\[0\] returned \['q'\], expected `value`"):
        TorchStepStateCritic({0: Wrong({"q": torch.ones(5)})}, SPACES, "cpu").predict_value(observation, 0)
    with pytest.raises(ConfigError, match=r"shape \(5, 2\).*expected \(5, 1\)"):
        TorchStepStateCritic({0: Wrong({"value": torch.ones(5, 2)})}, SPACES, "cpu").predict_value(observation, 0)
    with pytest.raises(ConfigError, match="one network"):
        TorchSharedStateCritic({0: Sum("a"), 1: Sum("b")}, SPACES, "cpu", False)
    with pytest.raises(ConfigError, match="step key 'x' is unknown"):
        TorchStepStateCritic({0: Sum("a")}, SPACES, "cpu").predict_value(observation, "x")


class Embedding(nn.Module):
    """A policy network that shares what it has computed with the critic."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 3)
        self.n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        latent = self.net(x["a"])
        return {"action": latent[..., :2], "latent": latent}


def actor_critic():
    mapper = DistributionMapper(spaces.Dict({"action": spaces.Discrete(2)}), [])
    policy = TorchPolicy({0: Embedding()}, mapper, "cpu")
    critic = TorchStepStateCritic({0: Sum("latent")}, {0: SPACES[0]}, "cpu")
    return TorchActorCritic(policy, critic, "cpu")


def test_shared_embeddings_are_computed_once_and_learn_from_both():
    model = actor_critic()
    observation = {"a": torch.ones(T, N, 2)}
    record = StructuredSpacesRecord([SpacesRecord(ActorID(0, 0), observation=observation)])
    policy_output, critic_output = model.compute_actor_critic_output(record)
    assert model.policy.networks[0].n_calls == 1
    assert list(observation) == ["a"]
    latent = policy_output[0].embedding_logits["latent"]
    assert torch.allclose(critic_output.values[0], latent.sum(-1))
    critic_output.values[0].sum().backward()
    assert model.policy.networks[0].net.weight.grad is not None
    bootstrapped = model.bootstrap_values({"a": np.ones((N, 2), np.float32)}, ActorID(0, 0))
    assert torch.allclose(bootstrapped, critic_output.detached_values[0][0])


def test_embeddings_are_shared_where_other_substeps_share_none():
    class Plain(nn.Module):
        def forward(self, x):
            return {"action": x["b"][..., :2]}

    mapper = DistributionMapper(spaces.Dict({"action": spaces.Discrete(2)}), [])
    policy = TorchPolicy({0: Embedding(), 1: Plain()}, mapper, "cpu")
    critic = TorchStepStateCritic({0: Sum("latent"), 1: Sum("b")}, SPACES, "cpu")
    model = TorchActorCritic(policy, critic, "cpu")
    first = SpacesRecord(ActorID(0, 0), observation={"a": torch.ones(N, 2)})
    values = model.evaluate([first])[1].detached_values[0]
    model.evaluate([SpacesRecord(ActorID(1, 0), observation={"b": torch.ones(N, 3)})])  # a policy batch of its own
    assert torch.equal(model.bootstrap_values(first.observation, ActorID(0, 0)), values)


def test_weights_of_policy_and_critic_live_side_by_side():
    model, other = actor_critic(), actor_critic()
    with torch.no_grad():
        other.critic.networks[0].factor.fill_(7.0)
    state = other.state_dict()
    assert set(state) == {"policies", "critics"}
    model.load_state_dict(state)
    assert model.critic.networks[0].factor.item() == 7.0
    model.policy.load_state_dict(state)
    assert model.num_params == len(model.parameters()) - 1 + 6 + 2  # a matrix of 6, a vector of 3, one factor

    bad = copy.deepcopy(state)
    del bad["critics"][0]["factor"]
    with torch.no_grad():
        other.policy.networks[0].net.weight.zero_()
    before = model.policy.networks[0].net.weight.clone()
    with pytest.raises(CheckpointError, match="`factor` is missing"):
        model.load_state_dict(bad)
    assert torch.equal(model.policy.networks[0].net.weight, before)


def test_modes_reach_all_networks():
    model = actor_critic()
    model.eval()
    assert not model.policy.networks[0].training
    assert not model.critic.networks[0].training
    model.train()
    assert model.critic.networks[0].training
