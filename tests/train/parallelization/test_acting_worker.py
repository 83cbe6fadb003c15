"""Rollouts that worker processes collect by themselves are those that single steps give."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.errors import NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.worker_pool import EnvWorkerError
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv, acts_alike
from tests.train.parallelization.toy_envs import counting_env, random_walk_env, two_step_env

ENDINGS = ((3, "terminated"), (2, "truncated"), (12, "truncated"))
N_ENVS = 3
BETA = [{"action_head": "push", "distribution": "maze.distributions.beta.BetaProbabilityDistribution"}]


class Network(nn.Module):
    def __init__(self, space, logits):
        super().__init__()
        self.n_inputs = {key: int(np.prod(part.shape)) or 1 for key, part in space.items()}
        self.layers = nn.ModuleDict({head: nn.Linear(sum(self.n_inputs.values()), n) for head, n in logits.items()})

    def forward(self, observation):
        flat = [observation[key].reshape(-1, n).float() for key, n in self.n_inputs.items()]
        return {head: layer(torch.cat(flat, -1) * 0.1) for head, layer in self.layers.items()}


def policy_for(make_env, distributions=(), policy_class=TorchPolicy):
    torch.manual_seed(0)
    env = make_env()
    heads = {key: space for spaces in env.action_spaces_dict.values() for key, space in spaces.items()}
    mapper = DistributionMapper(type(env.action_space)(heads), distributions)
    networks = {
        step_key: Network(
            space, {head: mapper.required_logits_shape(head)[0] for head in env.action_spaces_dict[step_key]}
        )
        for step_key, space in env.observation_spaces_dict.items()
    }
    policy = policy_class(networks, mapper, "cpu")
    policy.seed(3)
    return policy


class Noted(LogStatsAggregator):
    def __init__(self):
        super().__init__(LogStatsLevel.EPOCH)
        self.received = []

    def receive(self, stat):
        self.received.append({str(key): value for key, value in stat.items()})


def rolled_out(env, policy, n_rollouts=4, n_steps=5, orders=None):
    """All that is recorded of some rollouts, between which the policy learns something."""
    noted = env.epoch_stats = Noted()
    if orders is not None:
        call = env._pool.call
        env._pool.call = lambda method, *arguments, **named: orders.append(method) or call(method, *arguments, **named)
    try:
        env.seed(list(range(7, 7 + env.n_envs)))
        generator = RolloutGenerator(env)
        columns, found = generator.allocate(n_steps), []
        for _ in range(n_rollouts):
            generator.collect(policy, columns)
            (substep, *_) = columns.substeps.values()
            arrays = [*substep.observations.values(), *substep.actions.values(), columns.rewards]
            found += [array.copy() for array in (*arrays, columns.terminated, columns.truncated)]
            found += [(entry[:3], entry.observation) for entry in columns.final_observations]
            with torch.no_grad():
                policy.parameters()[0].add_(0.05)
        return found, noted.received, policy.rng_state()["numpy"]
    finally:
        env.close()


@pytest.mark.parametrize("make_env", [partial(counting_env, ENDINGS), random_walk_env])
@pytest.mark.parametrize("n_workers", [1, 2])
def test_rollouts_are_those_of_single_steps_in_one_process(make_env, n_workers):
    expected = rolled_out(SequentialVectorEnv([make_env] * N_ENVS), policy_for(make_env))
    orders = []
    env = SubprocVectorEnv([make_env] * N_ENVS, n_workers=n_workers, acts=True)
    found = rolled_out(env, policy_for(make_env), orders=orders)
    np.testing.assert_equal(found, expected)
    assert orders == ["reset", *["roll_out"] * 4]  # a message for each rollout
    assert expected[1]
    assert any(isinstance(entry, tuple) for entry in expected[0])  # episodes of both kinds have ended


class DrawsByContent(TorchPolicy):
    pass


@pytest.mark.parametrize(
    ("make_env", "policy", "arguments"),
    [
        (random_walk_env, partial(policy_for, distributions=BETA), {"acts": True}),  # draws until it accepts
        (
            random_walk_env,
            partial(policy_for, policy_class=DrawsByContent),
            {"acts": True},
        ),  # nobody knows what it draws
        (two_step_env, policy_for, {"acts": True}),  # environments may stand at different sub-steps
        (random_walk_env, policy_for, {"acts": True, "timeout": 60.0}),  # which is for a step
        (random_walk_env, policy_for, {}),
    ],
)
def test_other_rollouts_go_step_by_step(make_env, policy, arguments):
    orders = []
    rolled_out(SubprocVectorEnv([make_env] * 2, n_workers=2, **arguments), policy(make_env), 1, 2, orders)
    assert set(orders) == {"reset", "step"}


def test_policies_that_draw_by_the_shape_alone_act_alike_anywhere():
    assert acts_alike(policy_for(random_walk_env))
    assert not acts_alike(policy_for(random_walk_env, BETA))


def test_a_policy_that_has_diverged_is_named_as_in_one_process():
    named = (
        r"environment \d, sub-step 0, after 0 steps .* seeded with \d: policy.networks\[0\]: the logits of .* `push`"
    )
    for env in (SequentialVectorEnv([random_walk_env] * 2), SubprocVectorEnv([random_walk_env] * 2, acts=True)):
        policy = policy_for(random_walk_env)
        with torch.no_grad():
            policy.parameters()[0].fill_(torch.nan)
        with pytest.raises(NonFiniteError, match=named):
            rolled_out(env, policy)


def test_an_environment_that_fails_in_a_rollout_is_named():
    faulty = partial(counting_env, ((100, "terminated"),), ("raise", 3))
    env = SubprocVectorEnv([partial(counting_env, ENDINGS), faulty], n_workers=2, acts=True)
    with pytest.raises(
        EnvWorkerError, match="ValueError: the simulator lost its marbles in environment 1 during `step`"
    ):
        rolled_out(env, policy_for(counting_env))
