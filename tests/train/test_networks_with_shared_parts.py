"""Networks whose parts have several names or belong to several networks: everything that uses parameters."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_action_critic import TorchStepStateActionCritic, merged_action_space
from maze.core.env.structured_env import ActorID
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.blocks import ConcatenationBlock, DenseBlock, InferenceBlock, LinearOutputBlock
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import (
    ESDummyDistributedRollouts,
    Population,
    is_batchable,
)
from maze.train.trainers.es.distributed.es_subproc_distributed_rollouts import ESSubprocDistributedRollouts
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_utils import get_flat_parameters, n_trained_parameters, set_flat_parameters
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from tests.train.parallelization.toy_envs import random_walk_env, two_step_env
from tests.train.trainers.sac.sac_models import SQUASHED, learner_of

NOISE = SharedNoiseTable(20_000)


def blocks(in_keys, out_key, n_out, tied):
    """Blocks in a row; the same layer, or the same weights, are met twice."""
    torch.manual_seed(0)
    concat = ConcatenationBlock(in_keys, "features", [(3,)] * len(in_keys), -1)
    first = DenseBlock("features", "first", concat.out_shapes(), [4], nn.Tanh)
    second = DenseBlock("first", "second", (4,), [4], nn.Tanh)
    third = DenseBlock("second", "third", (4,), [4], nn.Tanh)
    if tied:
        third.net[0].weight = second.net[0].weight
    return {
        "concat": concat, "first": first, "second": second, "third": third,
        out_key: LinearOutputBlock("third", out_key, (4,), n_out),
    }  # fmt: skip


def graph(in_keys, out_key, n_out, tied=False):
    return InferenceBlock(in_keys, out_key, [(3,)] * len(in_keys), blocks(in_keys, out_key, n_out, tied))


class RegisteredTwice(nn.Module):
    """Each block is an attribute, and part of a graph as well."""

    def __init__(self, in_keys, out_key, n_out, tied=False):
        super().__init__()
        parts = blocks(in_keys, out_key, n_out, tied)
        self.second, self.head = parts["second"], parts[out_key]
        self.net = InferenceBlock(in_keys, out_key, [(3,)] * len(in_keys), parts)

    def forward(self, x):
        return self.net(x)


class UsedTwice(nn.Module):
    """One layer is applied twice."""

    def __init__(self, in_keys, out_key, n_out):
        super().__init__()
        torch.manual_seed(0)
        self.keys, self.out_key = in_keys, out_key
        self.first, self.repeated = nn.Linear(3 * len(in_keys), 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList([self.first, self.repeated, self.repeated])
        self.head = nn.Linear(4, n_out)

    def forward(self, x):
        latent = torch.cat([x[key] for key in self.keys], -1)
        for layer in self.layers:
            latent = torch.tanh(layer(latent))
        return {self.out_key: self.head(latent)}


NETWORKS = {
    "registered twice": RegisteredTwice,
    "registered twice and tied": partial(RegisteredTwice, tied=True),
    "tied weights": partial(graph, tied=True),
    "used twice": UsedTwice,
}
each_network = pytest.mark.parametrize("make_network", NETWORKS.values(), ids=NETWORKS)


def policy_of(make_network):
    env = random_walk_env()
    mapper = DistributionMapper(env.action_space, SQUASHED)
    policy = TorchPolicy({0: make_network(["position"], "push", 6)}, mapper, "cpu")
    policy.seed(1)
    return policy


def sharing_policy():
    """Two networks with the same embedding."""
    heads = merged_action_space(two_step_env().action_spaces_dict)
    torch.manual_seed(0)
    networks = {
        "choose": FlattenConcatPolicyNet({"time": (1,)}, {"item": (4,)}, [4, 4], nn.Tanh),
        "cut": FlattenConcatPolicyNet({"choice": (2,)}, {"where": (4,)}, [4, 4], nn.Tanh),
    }
    networks["cut"].hidden[2] = networks["choose"].hidden[2]
    return TorchPolicy(networks, DistributionMapper(heads, []), "cpu")


def slots(model):
    """Where each parameter is found, by identity."""
    return {
        (key, name): id(parameter)
        for key, network in model.networks.items()
        for name, parameter in network.named_parameters(remove_duplicate=False)
    }


@each_network
def test_each_perturbed_policy_acts_with_its_own_parameters_and_leaves_the_policy_alone(make_network):
    policy = policy_of(make_network)
    before, values = slots(policy), get_flat_parameters(policy)
    assert is_batchable(policy, random_walk_env().observation_spaces_dict)
    population = Population(policy, 3)
    rng = np.random.default_rng(0)
    population.parameters[:] = rng.normal(size=population.parameters.shape)
    observations = {"position": rng.normal(size=(3, 3)).astype(np.float32)}
    together = population.act(ActorID(0, 0), observations, slice(0, 3))["push"]
    assert slots(policy) == before
    assert all(isinstance(parameter, nn.Parameter) for parameter in policy.networks[0].parameters())
    assert torch.equal(get_flat_parameters(policy), values)
    for row in range(3):
        set_flat_parameters(policy, torch.from_numpy(population.parameters[row]))
        single = {key: value[row] for key, value in observations.items()}
        alone = policy.compute_action(single, deterministic=True)["push"]
        np.testing.assert_allclose(together[row], alone, rtol=1e-5, atol=1e-6)


POLICIES = {
    "registered twice and tied": (partial(policy_of, NETWORKS["registered twice and tied"]), random_walk_env),
    "shared embedding": (sharing_policy, two_step_env),
}


@pytest.mark.parametrize(("make_policy", "make_env"), POLICIES.values(), ids=POLICIES)
def test_evolution_strategies_play_the_same_in_process_and_in_workers(make_policy, make_env):
    played = []
    policy = make_policy()
    before = slots(policy)
    for rollouts in (
        ESDummyDistributedRollouts(make_env(), 2, NOISE, 7, env_factory=make_env, env_seed=3),
        ESSubprocDistributedRollouts(make_env, 1, 0, NOISE, [3], 7, n_eval_rollouts=2),
    ):
        try:
            for update in range(2):  # the second with parameters that have moved
                rollouts.prepare_update(update, 4, 0)
                generator = rollouts.generate_rollouts(policy, 5, 0.5, None)
                results = list(itertools.islice(generator, 3))
                generator.close()
                set_flat_parameters(policy, torch.full((n_trained_parameters(policy),), 0.1 * (update + 1)))
            played.append([(result.noise_indices, result.returns, result.lengths) for result in results])
        finally:
            rollouts.close()
    assert slots(policy) == before
    assert played[0] == played[1]


def critic_of(make_network):
    env = random_walk_env()
    networks = {0: make_network(["position", "push"], "q_value", 1)}
    return TorchStepStateActionCritic(networks, 1, "cpu", {0: False}, env.action_spaces_dict)


@each_network
def test_sac_learns_with_both_networks_of_a_critic_and_keeps_what_is_shared(make_network):
    model = TorchActorCritic(policy_of(make_network), critic_of(make_network), "cpu")
    before = slots(model.policy), slots(model.critic)
    learner = learner_of(model, SACAlgorithmConfig(lr=0.01, tau=0.5), [ActorID(0, 0)])
    generator = torch.Generator().manual_seed(0)
    batch = TransitionBatch(
        actors=[ActorID(0, 0)],
        observations=[{"position": torch.randn(16, 3, generator=generator)}],
        actions=[{"push": torch.rand(16, 3, generator=generator)}],
        rewards=torch.randn(16, 1, generator=generator),
        next_observations=[{"position": torch.randn(16, 3, generator=generator)}],
        terminated=torch.zeros(16, dtype=torch.bool),
        n_substeps=None,
        has_next_step=None,
    )
    first = model.critic.state_dict()
    first = {name: tensor.clone() for name, tensor in first["critics"][0].items()}
    for _ in range(3):
        learner.learn(batch)
    assert (slots(model.policy), slots(model.critic)) == before
    assert all(not torch.equal(first[name], moved) for name, moved in model.critic.state_dict()["critics"][0].items())
    for pair, targets in zip(model.critic.networks.values(), model.critic.target_networks.values(), strict=True):
        assert len(list(pair.parameters())) == len(list(targets.parameters()))
        for own, target in zip(pair.parameters(), targets.parameters(), strict=True):
            assert not torch.equal(own, target)  # half of the way behind


@each_network
def test_weights_that_are_loaded_act_as_those_that_were_saved(make_network):
    policy, other = policy_of(make_network), policy_of(make_network)
    set_flat_parameters(policy, torch.linspace(-1.0, 1.0, n_trained_parameters(policy)))
    before = slots(other)
    observation = {"position": np.array([[0.1, -0.2, 0.3]], np.float32)}
    expected = policy.compute_actions(observation, deterministic=True)["push"].tolist()
    assert other.compute_actions(observation, deterministic=True)["push"].tolist() != expected
    other.load_state_dict(policy.state_dict())
    assert slots(other) == before
    assert other.compute_actions(observation, deterministic=True)["push"].tolist() == expected
    with torch.no_grad():
        learned = other.compute_substep_policy_output(observation).prob_dist.deterministic_sample()["push"]
    np.testing.assert_allclose(learned.numpy(), expected, rtol=1e-5)
