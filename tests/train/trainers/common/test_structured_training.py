"""Actor-critic training where steps have sub-steps, and where actors come, go and differ between environments."""

import copy
from functools import partial

import pytest
import torch

from maze.api.run_context import RunContext
from maze.core.agent.returns import GAE
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.perception.models.custom_model_composer import CustomModelComposer
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.actor_critic.valuation import value_rollout
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.ppo.ppo_trainer import PPO
from tests.train.parallelization.toy_envs import coming_and_going_env, hierarchical_env, two_step_env

CRITICS = "maze.perception.models.critics."
NETS = "maze.perception.models.built_in.flatten_concat.FlattenConcat"
SIZES = {"hidden_units": [8], "non_lin": "torch.nn.Tanh"}


def build_model(env, critic, separate_agents=()):
    torch.manual_seed(0)
    composer = CustomModelComposer(
        action_spaces_dict=env.action_spaces_dict,
        observation_spaces_dict=env.observation_spaces_dict,
        agent_counts_dict=env.agent_counts_dict,
        distribution_mapper_config=[],
        policy={
            "_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer",
            "networks": [{"_target_": f"{NETS}PolicyNet", **SIZES}] * len(env.action_spaces_dict),
            "substeps_with_separate_agent_nets": list(separate_agents),
        },
        critic={
            "_target_": f"{CRITICS}{critic}StateCriticComposer",
            "networks": [{"_target_": f"{NETS}StateValueNet", **SIZES}]
            * (1 if critic == "Shared" else len(env.observation_spaces_dict)),
            **({"stack_observations": False} if critic == "Shared" else {}),
        },
    )
    composer.policy.seed(1)
    return TorchActorCritic(composer.policy, composer.critic, "cpu")


def train(make_env, critic, trainer_class, n_envs=3, **config):
    env = SequentialVectorEnv([make_env] * n_envs)
    env.seed(list(range(n_envs)))
    eval_env = SequentialVectorEnv([make_env] * 2)
    eval_env.seed([10, 11])
    model = build_model(env, critic)
    selection = BestModelSelection(None, model)
    before = {id(p): p.detach().clone() for p in model.parameters()}
    values = {"n_epochs": 1, "epoch_length": 3, "n_rollout_steps": 12, "lr": 0.01, **config}
    if trainer_class is PPO:
        values = {"batch_size": 16, "n_optimization_epochs": 2, **values}
    evaluator = RolloutEvaluator(eval_env, 3, selection)
    trainer = trainer_class(values, RolloutGenerator(env), evaluator, model, selection, seed=0)
    trainer.train()
    return trainer, before


ENVS = {
    "sub-steps": two_step_env,
    "cut off in the middle of a step": partial(two_step_env, breaks_at=1),
    "hierarchy": hierarchical_env,
    "agents that come and go": coming_and_going_env,
}


@pytest.mark.parametrize("trainer_class", [A2C, PPO])
@pytest.mark.parametrize("critic", ["Shared", "Step"])
@pytest.mark.parametrize("name", ENVS)
def test_every_network_learns_something_finite(name, critic, trainer_class):
    trainer, before = train(ENVS[name], critic, trainer_class)
    for parameter in trainer.model.parameters():
        assert bool(torch.isfinite(parameter).all())
    for networks in (trainer.model.policy.networks, trainer.model.critic.networks):
        for network in networks.values():
            assert any(not torch.equal(p, before[id(p)]) for p in network.parameters())
    assert trainer.model_selection.best_reward > 0


@pytest.mark.parametrize("trainer_class", [A2C, PPO])
def test_delta_critic_learns_where_all_environments_take_the_same_substeps(trainer_class):
    trainer, before = train(two_step_env, "Delta", trainer_class)
    assert all(not torch.equal(p, before[id(p)]) for p in trainer.model.critic.parameters())
    with pytest.raises(ConfigError, match="Use a step or a shared critic"):
        train(hierarchical_env, "Delta", trainer_class)


@pytest.mark.parametrize("name", ["sub-steps", "hierarchy"])
def test_runs_with_the_same_seeds_are_bit_identical(name):
    first, second = (train(ENVS[name], "Step", PPO)[0].model.parameters() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_agents_with_networks_of_their_own_learn_from_their_own_actions():
    env = SequentialVectorEnv([coming_and_going_env] * 2)
    env.seed([1, 2])
    model = build_model(env, "Shared")
    policy = model.policy
    shared = policy.networks["agent"]
    policy.networks = {("agent", agent): copy.deepcopy(shared) for agent in range(4)}
    policy.substeps_with_separate_agent_nets = ["agent"]
    before = {key: [p.detach().clone() for p in net.parameters()] for key, net in policy.networks.items()}
    config = {"n_epochs": 1, "epoch_length": 1, "n_rollout_steps": 20, "lr": 0.01}
    A2C(config, RolloutGenerator(env), None, TorchActorCritic(policy, model.critic, "cpu"), None, seed=0).train()
    for key, network in policy.networks.items():
        assert not all(torch.equal(p, old) for p, old in zip(network.parameters(), before[key], strict=True))


@pytest.mark.parametrize("is_shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("env", ["CartPole-v1", "pick_and_place", "job_shop"])
def test_recorded_logits_give_the_log_probabilities_of_another_evaluation(env, is_shared, tmp_path):
    overrides = {"runner.concurrency": 3, "model.shared_embedding": is_shared, "algorithm.rollout_evaluator": None}
    with RunContext(env, tmp_path, algorithm="ppo", model="auto", overrides=overrides, silent=True) as rc:
        rc.train(n_epochs=1)
        generator, model = rc.runner.trainer.rollout_generator, rc.runner.trainer.model
    columns = generator.allocate(20, model.policy)
    generator.collect(model.policy, columns)
    recorded = value_rollout(model, columns, GAE(0.9, 0.8)).parts
    for substep in columns.substeps.values():
        assert substep.logits is not None
        substep.logits = None
    for known, evaluated in zip(recorded, value_rollout(model, columns, GAE(0.9, 0.8)).parts, strict=True):
        torch.testing.assert_close(known.old_log_probs, evaluated.old_log_probs, rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, known.targets, evaluated.targets))
